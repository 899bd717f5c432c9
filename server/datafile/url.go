package datafile

import (
	"fmt"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
)

// place is where an export or a namespace is: what a Device row says of it.
type place struct {
	host      string
	port      uint16 // 0 only until it is found out
	export    string
	mountPort uint16 // 0 = to be found out each time
	nqn       string // of a namespace's subsystem; otherwise empty
	nsid      uint32
}

// nvmePort is that of NVMe over TCP by convention.
const nvmePort = 4420

// parseURL reads nfs://HOST[:PORT]/EXPORT[?mountport=PORT] and nvme://HOST[:PORT]/NQN#NSID.
func parseURL(s string) (place, error) {
	if strings.HasPrefix(s, "nvme:") {
		return parseNamespaceURL(s)
	}
	bad := func(why string, args ...any) (place, error) {
		return place{}, fmt.Errorf("data server %q: %s; want nfs://HOST[:PORT]/EXPORT[?mountport=PORT], such as nfs://10.0.0.7:2049/export", s, fmt.Sprintf(why, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return bad("%v", err)
	}
	switch {
	case u.Scheme != "nfs":
		return bad("it begins neither with nfs:// nor with nvme://")
	case u.User != nil || u.Fragment != "":
		return bad("there is more than a host, a port and an export")
	case u.Hostname() == "":
		return bad("the host is missing")
	case !strings.HasPrefix(u.Path, "/"):
		return bad("the export is missing")
	case len(u.Path) > nfs3.MaxMountPath:
		return bad("the export has %d bytes, at most %d are possible", len(u.Path), nfs3.MaxMountPath)
	}
	at := place{host: u.Hostname(), export: u.Path}
	if u.Port() != "" {
		if at.port, err = parsePort(u.Port()); err != nil {
			return bad("%v", err)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return bad("the port is missing behind the colon")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return bad("%v", err)
	}
	for name, values := range query {
		if name != "mountport" || len(values) != 1 {
			return bad("it has the parameter %q; mountport=PORT is the only one there is", name)
		}
		if at.mountPort, err = parsePort(values[0]); err != nil {
			return bad("mountport: %v", err)
		}
	}
	return at, nil
}

// parseNamespaceURL reads nvme://HOST[:PORT]/NQN#NSID.
func parseNamespaceURL(s string) (place, error) {
	bad := func(why string, args ...any) (place, error) {
		return place{}, fmt.Errorf("NVMe namespace %q: %s; want nvme://HOST[:PORT]/NQN#NSID, such as nvme://10.0.0.7:4420/nqn.2014-08.org.example:a#1", s, fmt.Sprintf(why, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return bad("%v", err)
	}
	nqn := strings.TrimPrefix(u.Path, "/")
	switch {
	case u.User != nil || u.RawQuery != "" || u.Opaque != "":
		return bad("there is more than a host, a port, an NQN and a namespace")
	case u.Hostname() == "":
		return bad("the host is missing")
	case nqn == "" && u.Fragment == "":
		return bad("the NQN and the namespace are missing: it may be a discovery controller, which weft admin device add asks for its namespaces")
	case nqn == "":
		return bad("the NQN is missing")
	case len(nqn) > layout.MaxNQN:
		return bad("the NQN has %d bytes, at most %d are possible", len(nqn), layout.MaxNQN)
	case u.Fragment == "":
		return bad("the number of the namespace is missing")
	}
	nsid, err := strconv.ParseUint(u.Fragment, 10, 32)
	if err != nil || nsid == 0 || nsid == math.MaxUint32 {
		return bad("namespace %s is not one of 1 to %d", u.Fragment, uint32(math.MaxUint32-1))
	}
	at := place{host: u.Hostname(), port: nvmePort, nqn: nqn, nsid: uint32(nsid)}
	if u.Port() != "" {
		if at.port, err = parsePort(u.Port()); err != nil {
			return bad("%v", err)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return bad("the port is missing behind the colon")
	}
	return at, nil
}

func parsePort(s string) (uint16, error) {
	port, err := strconv.ParseUint(s, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("port %s is not one of 1 to 65535", s)
	}
	return uint16(port), nil
}

// hostPort is the place's address as dialled.
func (p place) hostPort() string { return net.JoinHostPort(p.host, strconv.Itoa(int(p.port))) }

// String is the URL that parseURL reads.
func (p place) String() string {
	if p.nqn != "" {
		u := url.URL{Scheme: "nvme", Host: p.hostPort(), Path: p.nqn, Fragment: strconv.FormatUint(uint64(p.nsid), 10)}
		return u.String()
	}
	u := url.URL{Scheme: "nfs", Host: p.hostPort(), Path: p.export}
	if p.mountPort != 0 {
		u.RawQuery = fmt.Sprintf("mountport=%d", p.mountPort)
	}
	return u.String()
}
