package nvmetcp

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// DiscoveryNQN is the name by which every discovery controller can be connected to.
const DiscoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

// MaxNQN is the bytes of the longest NQN, nqnSize those of the field that holds one.
const (
	MaxNQN  = 223
	nqnSize = 256
)

// CheckNQN checks a name that somebody gave: its length, and that it is UTF-8 without spaces and control characters. A name
// that begins with "nqn." must go on with yyyy-mm and a naming authority. Other names are not an NQN by the specification
// but are in use, since the Linux target accepts them.
func CheckNQN(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	rest, ok := strings.CutPrefix(name, "nqn.")
	if !ok {
		return nil
	}
	date, authority, _ := strings.Cut(rest, ".")
	digits := strings.Trim(date, "0123456789")
	if len(date) != len("yyyy-mm") || digits != "-" || date[4] != '-' || authority == "" {
		return fmt.Errorf("NQN %q: want nqn.yyyy-mm.AUTHORITY:NAME: %w", name, ErrInvalid)
	}
	return nil
}

// checkName is CheckNQN for names that a peer sent.
func checkName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("NQN is empty: %w", ErrInvalid)
	case len(name) > MaxNQN:
		return fmt.Errorf("NQN %.32q... of %d bytes, at most %d are possible: %w", name, len(name), MaxNQN, ErrInvalid)
	case !utf8.ValidString(name):
		return fmt.Errorf("NQN %q is not UTF-8: %w", name, ErrInvalid)
	case strings.ContainsFunc(name, func(r rune) bool { return unicode.IsControl(r) || unicode.IsSpace(r) }):
		return fmt.Errorf("NQN %q has a space or control character: %w", name, ErrInvalid)
	}
	return nil
}

// putNQN fills the field at the start of b.
func putNQN(b []byte, name string) { putText(b[:nqnSize], name, 0) }

// getNQN takes the field at the start of b.
func getNQN(b []byte) (string, error) {
	name := getText(b[:nqnSize])
	return name, checkName(name)
}

// putText fills the field b with s and then pad. What does not fit is cut off.
func putText(b []byte, s string, pad byte) {
	for n := copy(b, s); n < len(b); n++ {
		b[n] = pad
	}
}

// getText takes the string in the field b, which ends at a NUL or at trailing spaces.
func getText(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(bytes.TrimRight(b, " "))
}

// Ports by convention.
const (
	DefaultPort          = 4420
	DefaultDiscoveryPort = 8009
)

// URL names a namespace as nvme://HOST:PORT/NQN#NSID, or with less of it a subsystem or a discovery service. HOST is a name,
// an IPv4 address, or an IPv6 address in brackets.
type URL struct {
	Host string // without brackets
	Port uint16
	NQN  string // "" for a discovery service
	NSID uint32 // 0 for a subsystem or a discovery service
}

// ParseURL takes the written form. A port that is not there is DefaultPort, or DefaultDiscoveryPort if there is no NQN.
func ParseURL(s string) (URL, error) {
	u, err := parseURL(s)
	if err != nil {
		return URL{}, fmt.Errorf("%q: %w; want nvme://HOST:PORT/NQN#NSID", s, err)
	}
	return u, nil
}

func parseURL(s string) (u URL, err error) {
	rest, ok := strings.CutPrefix(s, "nvme://")
	if !ok {
		return u, fmt.Errorf("does not begin with nvme://: %w", ErrInvalid)
	}
	hostport, rest, _ := strings.Cut(rest, "/")
	if rest != "" {
		at := strings.LastIndexByte(rest, '#')
		if at >= 0 {
			id, err := strconv.ParseUint(rest[at+1:], 10, 32)
			if err != nil || id == 0 || id == AllNamespaces {
				return u, fmt.Errorf("%q is not a namespace ID (1 to %d): %w", rest[at+1:], uint32(AllNamespaces-1), ErrInvalid)
			}
			u.NSID = uint32(id)
			rest = rest[:at]
		}
		if err := CheckNQN(rest); err != nil {
			return u, err
		}
		u.NQN = rest
	}
	u.Port = DefaultPort
	if u.NQN == "" {
		u.Port = DefaultDiscoveryPort
	}

	u.Host = hostport
	if port := strings.LastIndexByte(hostport, ':'); port > strings.LastIndexByte(hostport, ']') {
		n, err := strconv.ParseUint(hostport[port+1:], 10, 16)
		if err != nil || n == 0 {
			return u, fmt.Errorf("%q is not a port: %w", hostport[port+1:], ErrInvalid)
		}
		u.Host, u.Port = hostport[:port], uint16(n)
	}
	if strings.HasPrefix(hostport, "[") {
		host, closed := strings.CutSuffix(u.Host[1:], "]")
		u.Host = host
		if addr, err := netip.ParseAddr(host); err != nil || !addr.Is6() || !closed {
			return u, fmt.Errorf("%q is not an IPv6 address in brackets: %w", hostport, ErrInvalid)
		}
		return u, nil
	}
	if u.Host == "" || strings.ContainsFunc(u.Host, func(r rune) bool {
		return r != '-' && r != '.' && r != '_' && (r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r))
	}) {
		return u, fmt.Errorf("%q is not a host; IPv6 addresses stand in brackets: %w", u.Host, ErrInvalid)
	}
	return u, nil
}

// Addr is HOST:PORT, as net.Dial takes it.
func (u URL) Addr() string { return net.JoinHostPort(u.Host, strconv.Itoa(int(u.Port))) }

func (u URL) String() string {
	s := "nvme://" + u.Addr()
	if u.NQN != "" {
		s += "/" + u.NQN
		if u.NSID != 0 {
			s += "#" + strconv.FormatUint(uint64(u.NSID), 10)
		}
	}
	return s
}
