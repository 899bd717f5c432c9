// Package xdrtest reads the hex in which tests of wire formats keep their golden messages.
package xdrtest

import (
	"bufio"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// Hex decodes hex digits with white space between them. On each line "--" begins a comment, for the name of the field
// that stands before it.
func Hex(t testing.TB, s string) []byte {
	t.Helper()
	var digits strings.Builder
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "--")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Exchange is a recorded call and its reply, without record marks.
type Exchange struct {
	Name        string
	Call, Reply []byte
}

// Exchanges reads a file of recorded messages: a line "# name", a line "> hex" with the call, a line "< hex" with its
// reply. The last comment before a call is its name.
func Exchanges(t testing.TB, file string) []Exchange {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []Exchange
	var name string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		mark, text, _ := strings.Cut(sc.Text(), " ")
		switch mark {
		case "#":
			name = text
		case ">":
			all = append(all, Exchange{Name: name, Call: Hex(t, text)})
		case "<":
			all[len(all)-1].Reply = Hex(t, text)
		}
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatalf("%s has no exchanges", file)
	}
	return all
}
