package datafile

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/weftfs/weft/internal/wire/nfs3"
)

// place is where an export is: what a Device row says of it.
type place struct {
	host      string
	port      uint16 // 0 only until it is found out
	export    string
	mountPort uint16 // 0 = to be found out each time
}

// parseURL reads nfs://HOST[:PORT]/EXPORT[?mountport=PORT].
func parseURL(s string) (place, error) {
	bad := func(why string, args ...any) (place, error) {
		return place{}, fmt.Errorf("data server %q: %s; want nfs://HOST[:PORT]/EXPORT[?mountport=PORT], such as nfs://10.0.0.7:2049/export", s, fmt.Sprintf(why, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return bad("%v", err)
	}
	switch {
	case u.Scheme != "nfs":
		return bad("it does not begin with nfs://")
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
	u := url.URL{Scheme: "nfs", Host: p.hostPort(), Path: p.export}
	if p.mountPort != 0 {
		u.RawQuery = fmt.Sprintf("mountport=%d", p.mountPort)
	}
	return u.String()
}
