package nvmetcp

import (
	"bytes"
	"fmt"
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
