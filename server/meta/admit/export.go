package admit

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// nobodyID is the user and the group that exports(5) calls anonymous where it is not told otherwise.
const nobodyID = 65534

// Export says what some clients may do.
type Export struct {
	Clients    netip.Prefix // IPv4 as such; the zero Prefix is everybody
	Cert       string       // in place of Clients: those with TLS whose certificate has a name like this (path.Match)
	Path       string       // the directory of the volume that they get, with what is below; empty: all
	UIDs, GIDs []idRange    // that users of a client can have; those with others are anonymous. nil: all
	Ops        int          // metadata operations a second for each client; 0: as many as there are
	ReadOnly   bool
	RootSquash bool // root of a client is nobody special
	AllSquash  bool // all users of a client are the anonymous one
	AnonUID    uint32
	AnonGID    uint32
}

// idRange is a range of users or groups, both ends included.
type idRange struct{ First, Last uint32 }

// everybody is the rule where there is no rule.
var everybody = Export{AnonUID: nobodyID, AnonGID: nobodyID}

// Parse reads a rule in the manner of exports(5), such as 10.0.0.0/8(rw,no_root_squash): an address, a network,
// cert:NAME with a pattern for the names of certificates, or * for everybody, and options, where as in exports(5) ro
// and root_squash go without saying.
func Parse(s string) (Export, error) {
	e := Export{ReadOnly: true, RootSquash: true, AnonUID: nobodyID, AnonGID: nobodyID}
	clients, options, found := strings.Cut(s, "(")
	if found {
		var ok bool
		if options, ok = strings.CutSuffix(options, ")"); !ok {
			return e, fmt.Errorf("%q: the options do not end with a parenthesis", s)
		}
	}
	pattern, ofCert := strings.CutPrefix(clients, certWord)
	switch prefix, err := netip.ParsePrefix(clients); {
	case ofCert:
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" || strings.ContainsAny(pattern, "() ,") {
			return e, fmt.Errorf("%q: want cert: and the name in a certificate, which may have *, ? and [a-z]", s)
		}
		e.Cert = pattern
	case clients == "*":
	case err == nil && prefix != prefix.Masked():
		return e, fmt.Errorf("%q: bits are set outside the network: want %v", clients, prefix.Masked())
	case err == nil:
		e.Clients = prefix
	default:
		addr, err := netip.ParseAddr(clients)
		if err != nil || addr.Zone() != "" {
			return e, fmt.Errorf("%q: want an IP address, a network ADDRESS/BITS, cert:NAME, or *", clients)
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
		case name == "uids":
			e.UIDs, err = parseIDs(value)
		case name == "gids":
			e.GIDs, err = parseIDs(value)
		case name == "ops":
			if e.Ops, err = strconv.Atoi(value); err != nil || e.Ops < 1 || e.Ops > maxOps {
				err = fmt.Errorf("want a number from 1 to %d", maxOps)
			}
		case name == "path":
			if e.Path = path.Clean(value); !path.IsAbs(value) || len(value) > maxRulePath {
				err = fmt.Errorf("want a directory of the volume, from / on")
			} else if e.Path == "/" {
				e.Path = ""
			}
		default:
			return e, fmt.Errorf("option %q: want ro, rw, root_squash, no_root_squash, all_squash, no_all_squash, anonuid=N, anongid=N, "+
				"path=DIR, uids=A-B[+C-D...], gids=A-B[+C-D...] or ops=N", option)
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

// parseIDs reads A-B+C, for example.
func parseIDs(s string) (list []idRange, err error) {
	for _, part := range strings.Split(s, "+") {
		a, b, several := strings.Cut(part, "-")
		if !several {
			b = a
		}
		var r idRange
		if r.First, err = parseID(a); err == nil {
			r.Last, err = parseID(b)
		}
		if err != nil {
			return nil, err
		}
		if r.First > r.Last {
			return nil, fmt.Errorf("%q is no range of users or groups", part)
		}
		list = append(list, r)
	}
	if len(list) > maxRanges {
		return nil, fmt.Errorf("%d ranges, want at most %d", len(list), maxRanges)
	}
	return list, nil
}

const (
	certWord    = "cert:"
	maxOps      = 1_000_000_000
	maxRanges   = 64
	maxRulePath = 4096
)

// has reports whether a user or group is in the ranges, of which none are all.
func has(ranges []idRange, id uint32) bool {
	return ranges == nil || slices.ContainsFunc(ranges, func(r idRange) bool { return r.First <= id && id <= r.Last })
}

func (e *Export) matches(name string) bool {
	ok, err := path.Match(e.Cert, name)
	return ok && err == nil
}

// Whose says which clients it is for.
func (e Export) Whose() string {
	switch {
	case e.Cert != "":
		return certWord + e.Cert
	case e.Clients.IsValid():
		return e.Clients.String()
	}
	return "*"
}

// moreSpecific orders rules: names of certificates, patterns, those with the longer beginning first, networks, the
// smaller first, and everybody.
func moreSpecific(a, b Export) int {
	rank := func(e Export) (kind, long int) {
		switch at := strings.IndexAny(e.Cert, `*?[\`); {
		case e.Cert != "" && at < 0:
			return 0, len(e.Cert)
		case e.Cert != "":
			return 1, at
		case e.Clients.IsValid():
			return 2, 128 - e.Clients.Addr().BitLen() + e.Clients.Bits()
		}
		return 3, 0
	}
	kindA, longA := rank(a)
	kindB, longB := rank(b)
	return cmp.Or(cmp.Compare(kindA, kindB), cmp.Compare(longB, longA), cmp.Compare(a.Whose(), b.Whose()))
}

// String is the rule as Parse reads it.
func (e Export) String() string {
	word := func(set bool, name, otherwise string) string {
		if set {
			return name
		}
		return otherwise
	}
	s := fmt.Sprintf("%s(%s,%s,%s,anonuid=%d,anongid=%d", e.Whose(), word(e.ReadOnly, "ro", "rw"),
		word(e.RootSquash, "root_squash", "no_root_squash"), word(e.AllSquash, "all_squash", "no_all_squash"),
		e.AnonUID, e.AnonGID)
	if e.Path != "" {
		s += ",path=" + e.Path
	}
	for _, ids := range []struct {
		name   string
		ranges []idRange
	}{{"uids", e.UIDs}, {"gids", e.GIDs}} {
		for i, r := range ids.ranges {
			s += fmt.Sprintf("%s%d-%d", word(i == 0, ","+ids.name+"=", "+"), r.First, r.Last)
		}
	}
	if e.Ops > 0 {
		s += fmt.Sprintf(",ops=%d", e.Ops)
	}
	return s + ")"
}

// Rules are those of a volume or a service, in the order in which they count.
type Rules []Export

// Sort puts the most specific ones first.
func (list Rules) Sort() { slices.SortStableFunc(list, moreSpecific) }

// For is the first rule for a client of an address "IP:port", whose certificate says name. There is none
// for a client that is not to be let in; without rules all are.
func (list Rules) For(address, name string) (Export, bool) {
	if len(list) == 0 {
		return everybody, true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	addr, err := netip.ParseAddr(host)
	addr = addr.Unmap().WithZone("")
	for _, e := range list {
		switch {
		case e.Cert != "":
			if name != "" && e.matches(name) {
				return e, true
			}
		case !e.Clients.IsValid() || err == nil && e.Clients.Contains(addr):
			return e, true
		}
	}
	return Export{}, false
}

// ForAdmin is a rule that lets a client do everything.
func ForAdmin(address, name string) Export {
	e := everybody
	if name != "" {
		e.Cert = name
	} else if at, err := netip.ParseAddrPort(address); err == nil {
		addr := at.Addr().Unmap().WithZone("")
		e.Clients = netip.PrefixFrom(addr, addr.BitLen())
	}
	return e
}
