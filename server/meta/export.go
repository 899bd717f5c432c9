package meta

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// nobodyID is the user and the group that exports(5) calls anonymous where it is not told otherwise.
const nobodyID = 65534

// Export says what the clients of a network may do.
type Export struct {
	Clients    netip.Prefix // IPv4 as such; the zero Prefix is everybody
	ReadOnly   bool
	RootSquash bool // root of a client is nobody special
	AllSquash  bool // all users of a client are the anonymous one
	AnonUID    uint32
	AnonGID    uint32
}

// everybody is the rule where there are none.
var everybody = Export{AnonUID: nobodyID, AnonGID: nobodyID}

// ParseExport reads a rule in the manner of exports(5), such as 10.0.0.0/8(rw,no_root_squash): an address, a network, or
// * for everybody, and options, where as in exports(5) ro and root_squash go without saying.
func ParseExport(s string) (Export, error) {
	e := Export{ReadOnly: true, RootSquash: true, AnonUID: nobodyID, AnonGID: nobodyID}
	clients, options, found := strings.Cut(s, "(")
	if found {
		var ok bool
		if options, ok = strings.CutSuffix(options, ")"); !ok {
			return e, fmt.Errorf("%q: the options do not end with a parenthesis", s)
		}
	}
	switch prefix, err := netip.ParsePrefix(clients); {
	case clients == "*":
	case err == nil && prefix != prefix.Masked():
		return e, fmt.Errorf("%q: bits are set outside the network: want %v", clients, prefix.Masked())
	case err == nil:
		e.Clients = prefix
	default:
		addr, err := netip.ParseAddr(clients)
		if err != nil || addr.Zone() != "" {
			return e, fmt.Errorf("%q: want an IP address, a network ADDRESS/BITS, or *", clients)
		}
		addr = addr.Unmap()
		e.Clients = netip.PrefixFrom(addr, addr.BitLen())
	}
	if !found {
		return e, nil
	}
	for _, option := range strings.Split(options, ",") {
		name, value, _ := strings.Cut(option, "=")
		var err error
		switch {
		case option == "ro":
			e.ReadOnly = true
		case option == "rw":
			e.ReadOnly = false
		case option == "root_squash":
			e.RootSquash = true
		case option == "no_root_squash":
			e.RootSquash = false
		case option == "all_squash":
			e.AllSquash = true
		case option == "no_all_squash":
			e.AllSquash = false
		case name == "anonuid":
			e.AnonUID, err = parseID(value)
		case name == "anongid":
			e.AnonGID, err = parseID(value)
		default:
			return e, fmt.Errorf("option %q: want ro, rw, root_squash, no_root_squash, all_squash, no_all_squash, anonuid=N or anongid=N", option)
		}
		if err != nil {
			return e, fmt.Errorf("option %q: %w", option, err)
		}
	}
	return e, nil
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 1<<32-1 {
		return 0, fmt.Errorf("%q is no user or group", s)
	}
	return uint32(n), nil
}

// String is the rule as ParseExport reads it.
func (e Export) String() string {
	clients := "*"
	if e.Clients.IsValid() {
		clients = e.Clients.String()
	}
	word := func(set bool, name, otherwise string) string {
		if set {
			return name
		}
		return otherwise
	}
	return fmt.Sprintf("%s(%s,%s,%s,anonuid=%d,anongid=%d)", clients, word(e.ReadOnly, "ro", "rw"),
		word(e.RootSquash, "root_squash", "no_root_squash"), word(e.AllSquash, "all_squash", "no_all_squash"),
		e.AnonUID, e.AnonGID)
}

// admitted finds what holds for a client. An error says why it is not to be let in.
func (s *Service) admitted(in *Incoming) (Export, error) {
	if err := s.cfg.Door.Refuses(in); err != nil {
		return Export{}, err
	}
	address := in.Conn.RemoteAddr().String()
	e, ok := s.exportFor(address)
	if !ok {
		return e, fmt.Errorf("the volume is not exported to %s", address)
	}
	return e, nil
}

// exportFor is the first rule for a client at an address "IP:port". There is none for a client that is not to be let in.
func (s *Service) exportFor(address string) (Export, bool) {
	if len(s.cfg.Exports) == 0 {
		return everybody, true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	addr, err := netip.ParseAddr(host)
	addr = addr.Unmap().WithZone("")
	for _, e := range s.cfg.Exports {
		if !e.Clients.IsValid() || err == nil && e.Clients.Contains(addr) {
			return e, true
		}
	}
	return Export{}, false
}
