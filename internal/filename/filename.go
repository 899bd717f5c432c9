package filename

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// special are the printable characters that mean something to a shell.
const special = " !\"#$&'()*;<>?[\\]`{|}~"

// Quote returns a name, or a path, as a shell reads it, on one line.
func Quote(name string) string {
	escaped := Escape(name)
	switch {
	case escaped != name, strings.Contains(name, "'"):
		var b strings.Builder
		b.WriteString("$'")
		for part := range each(name) {
			switch part {
			case "'", `\`:
				b.WriteString(`\`)
			}
			b.WriteString(Escape(part))
		}
		return b.String() + "'"
	case name == "", strings.ContainsAny(name, special):
		return "'" + name + "'"
	}
	return name
}

// Escape returns a text, such as a message with names in it, without what a terminal might obey: such bytes, and those
// that are not UTF-8, are \xHH.
func Escape(text string) string {
	var b strings.Builder
	for part := range each(text) {
		if r, n := utf8.DecodeRuneInString(part); unicode.IsPrint(r) && (r != utf8.RuneError || n > 1) {
			b.WriteString(part)
			continue
		}
		for i := range len(part) {
			fmt.Fprintf(&b, `\x%02x`, part[i])
		}
	}
	return b.String()
}

// OneLine is the escaped text of an error without the line breaks between joined errors.
func OneLine(err error) string { return Escape(strings.ReplaceAll(err.Error(), "\n", "; ")) }

// each goes over the characters of a text, and bytes that are not part of one.
func each(text string) func(yield func(part string) bool) {
	return func(yield func(string) bool) {
		for len(text) > 0 {
			_, n := utf8.DecodeRuneInString(text)
			if !yield(text[:n]) {
				return
			}
			text = text[n:]
		}
	}
}

// JSON is a name, or a text with names in it, that survives JSON.
type JSON string

// MarshalJSON implements [json.Marshaler].
func (s JSON) MarshalJSON() ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false) // whoever encodes what this is part of does it if asked to
	b := []byte{'"'}
	for rest := string(s); rest != ""; {
		n := 0
		for n < len(rest) {
			r, width := utf8.DecodeRuneInString(rest[n:])
			if r == utf8.RuneError && width == 1 {
				break
			}
			n += width
		}
		out.Reset()
		if err := enc.Encode(rest[:n]); err != nil {
			return nil, err
		}
		b = append(b, out.Bytes()[1:out.Len()-2]...) // without the quotes and the end of the line
		if rest = rest[n:]; rest != "" {
			b = fmt.Appendf(b, `\udc%02x`, rest[0])
			rest = rest[1:]
		}
	}
	return append(b, '"'), nil
}

// UnmarshalJSON implements [json.Unmarshaler].
func (s *JSON) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		return nil
	}
	if len(b) < 2 || b[0] != '"' {
		return errors.New("want a string")
	}
	var out []byte
	text := b[1 : len(b)-1]
	plain := func(n int) error { // takes in n bytes that have no lone surrogates for bytes
		var part string
		if err := json.Unmarshal(fmt.Appendf(nil, `"%s"`, text[:n]), &part); err != nil {
			return err
		}
		out, text = append(out, part...), text[n:]
		return nil
	}
	for i := 0; i < len(text); {
		switch code := escape(text[i:]); {
		case code >= 0xdc80 && code <= 0xdcff:
			if err := plain(i); err != nil {
				return err
			}
			out, text, i = append(out, byte(code)), text[6:], 0
		case code >= 0xd800 && code <= 0xdbff && escape(text[i+6:])&0xfc00 == 0xdc00: // a pair, which is one character
			i += 12
		case text[i] == '\\':
			i += 2
		default:
			i++
		}
	}
	if err := plain(len(text)); err != nil {
		return err
	}
	*s = JSON(out)
	return nil
}

// escape is N if a JSON text begins with \uN, or else 0.
func escape(text []byte) uint64 {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0
	}
	n, _ := strconv.ParseUint(string(text[2:6]), 16, 16)
	return n
}
