package main

import (
	"fmt"
	"net"
	"path"
	"strconv"
	"strings"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// source is what is mounted: metadata services, any of which will do, and a directory of the volume.
type source struct {
	addrs []string // host:port
	dir   string   // absolute and clean
}

// parseSource reads HOST[:PORT][,HOST[:PORT]...]:/[SUBDIR]; an IPv6 address stands in brackets.
func parseSource(s string) (source, error) {
	hosts, dir, ok := strings.Cut(s, ":/")
	if !ok {
		return source{}, fmt.Errorf("source %q: want HOST[:PORT]:/ or HOST[:PORT]:/SUBDIR", s)
	}
	addrs, err := parseHosts(hosts)
	if err != nil {
		return source{}, fmt.Errorf("source %q: %w", s, err)
	}
	return source{addrs: addrs, dir: path.Clean("/" + dir)}, nil
}

// String is the canonical form, which parseSource reads back.
func (s source) String() string { return strings.Join(s.addrs, ",") + ":" + s.dir }

// shown is String for people.
func (s source) shown() string { return filename.Quote(s.String()) }

func parseHosts(s string) ([]string, error) {
	var addrs []string
	for _, h := range strings.Split(s, ",") {
		addr, err := parseHost(h)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// parseHost reads HOST, HOST:PORT, [IPV6] or [IPV6]:PORT and adds the port of metadata services.
func parseHost(s string) (string, error) { return parseHostPort(s, strconv.Itoa(metarpc.DefaultPort)) }

// parseHostPort does it with another port.
func parseHostPort(s, port string) (string, error) {
	host := s
	if inner, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(s, "]") {
		host = strings.TrimSuffix(inner, "]")
	} else if strings.Contains(s, ":") {
		var err error
		if host, port, err = net.SplitHostPort(s); err != nil {
			return "", fmt.Errorf("%q is not HOST[:PORT] (an IPv6 address stands in brackets)", s)
		}
	}
	if host == "" {
		return "", fmt.Errorf("%q has no host", s)
	}
	if strings.ContainsAny(host, "[]/ \t\r\n") {
		return "", fmt.Errorf("%q: %q is not a host", s, host)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return "", fmt.Errorf("%q: %q is not a port (1 to 65535)", s, port)
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}
