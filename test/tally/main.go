// Command tally reads what `go test -json` prints, shows what failed, what was skipped and what lasted long, and counts: its last line is
// "N passed, N failed". It fails if a test failed or none ran.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

func main() {
	t := tally{w: os.Stdout, said: map[name]string{}, failing: map[string]bool{}}
	if err := t.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "tally:", err)
		os.Exit(1)
	}
	fmt.Printf("%d passed, %d failed\n", t.passed, t.failed)
	if t.failed > 0 || t.passed == 0 {
		os.Exit(1)
	}
}

// event is a line of go test -json (go doc test2json).
type event struct {
	Action string
	name
	Output  string
	Elapsed float64 // seconds
}

// name of a test, or of a package if Test is empty.
type name struct{ Package, Test string }

type tally struct {
	w              io.Writer
	said           map[name]string // output of tests and packages that have not ended
	failing        map[string]bool // packages with a failed test
	passed, failed int
}

const slow = 10 // seconds: what a test may last and not be shown for it

func (t *tally) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if len(line) > 0 && json.Unmarshal(line, &e) != nil {
			t.w.Write(line) // the go command's own
		} else {
			t.event(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *tally) event(e event) {
	switch e.Action {
	case "output":
		t.said[e.name] += e.Output
		return
	case "build-output":
		io.WriteString(t.w, e.Output)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	said := t.said[e.name]
	delete(t.said, e.name)
	switch {
	case e.Test == "" && e.Action == "fail":
		// Tests that have not ended tell why: a crash, or a timeout.
		for n, output := range t.said {
			if n.Package == e.Package {
				io.WriteString(t.w, output)
			}
		}
		io.WriteString(t.w, said)
		if !t.failing[e.Package] {
			t.failed++
		}
	case e.Test == "" && e.Action == "pass":
		fmt.Fprintf(t.w, "ok    %s  %.1fs\n", e.Package, e.Elapsed)
	case e.Test == "": // no tests
	case e.Action == "pass":
		t.passed++
		if e.Elapsed >= slow && !strings.Contains(e.Test, "/") {
			fmt.Fprintf(t.w, "slow  %s %s  %.1fs\n", e.Package, e.Test, e.Elapsed)
		}
	case e.Action == "fail":
		io.WriteString(t.w, said)
		t.failed++
		t.failing[e.Package] = true
	case e.Action == "skip":
		why := "no reason given"
		if m := skipReason.FindStringSubmatch(said); m != nil {
			why = m[1]
		}
		fmt.Fprintf(t.w, "skip  %s %s: %s\n", e.Package, e.Test, why)
	}
}

// skipReason finds what t.Skip was told.
var skipReason = regexp.MustCompile(`\.go:\d+: (.*)`)
