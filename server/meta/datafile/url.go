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
	host   string
	port   uint16
	export string
}

// parseURL reads nfs://HOST:PORT/EXPORT.
func parseURL(s string) (place, error) {
	bad := func(why string, args ...any) (place, error) {
		return place{}, fmt.Errorf("data server %q: %s; want nfs://HOST:PORT/EXPORT, such as nfs://10.0.0.7:2049/export", s, fmt.Sprintf(why, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return bad("%v", err)
	}
	switch {
	case u.Scheme != "nfs":
		return bad("it does not begin with nfs://")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return bad("there is more than a host, a port and an export")
	case u.Hostname() == "":
		return bad("the host is missing")
	case u.Port() == "":
		return bad("the port is missing")
	case !strings.HasPrefix(u.Path, "/"):
		return bad("the export is missing")
	case len(u.Path) > nfs3.MaxMountPath:
		return bad("the export has %d bytes, at most %d are possible", len(u.Path), nfs3.MaxMountPath)
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil || port == 0 {
		return bad("port %s is not one of 1 to 65535", u.Port())
	}
	return place{u.Hostname(), uint16(port), u.Path}, nil
}

// hostPort is the place's address as dialled.
func (p place) hostPort() string { return net.JoinHostPort(p.host, strconv.Itoa(int(p.port))) }

// String is the URL that parseURL reads.
func (p place) String() string {
	return (&url.URL{Scheme: "nfs", Host: p.hostPort(), Path: p.export}).String()
}
