package main

import (
	"strings"
	"testing"
)

func TestTally(t *testing.T) {
	for _, c := range []struct {
		name, in, want string
		passed, failed int
	}{
		{"nothing", "", "", 0, 0},
		{"no tests", `{"Action":"output","Package":"p","Output":"?   p [no test files]\n"}
{"Action":"skip","Package":"p"}`, "", 0, 0},
		{"passed", `{"Action":"output","Package":"p","Test":"A","Output":"noise\n"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Elapsed":1.25}`, "ok    p  1.2s\n", 1, 0},
		{"slow", `{"Action":"pass","Package":"p","Test":"A/b","Elapsed":20}
{"Action":"pass","Package":"p","Test":"A","Elapsed":21.5}`, "slow  p A  21.5s\n", 2, 0},
		{"skipped", `{"Action":"output","Package":"p","Test":"A","Output":"    a_test.go:7: missing: root\n"}
{"Action":"skip","Package":"p","Test":"A"}`, "skip  p A: missing: root\n", 0, 0},
		{"failed", `{"Action":"output","Package":"p","Test":"A","Output":"why\n"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"fail","Package":"p"}`, "why\nFAIL\n", 0, 1},
		{"crashed", `{"Action":"output","Package":"p","Test":"A","Output":"panic\n"}
{"Action":"output","Package":"q","Test":"A","Output":"other\n"}
{"Action":"fail","Package":"p"}`, "panic\n", 0, 1},
		{"does not compile", `{"ImportPath":"p","Action":"build-output","Output":"p.go:1: no\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p"}`, "p.go:1: no\n", 0, 1},
		{"the go command itself", "go: no such package\n", "go: no such package\n", 0, 0},
	} {
		var out strings.Builder
		got := tally{w: &out, said: map[name]string{}, failing: map[string]bool{}}
		if err := got.read(strings.NewReader(c.in)); err != nil || out.String() != c.want || got.passed != c.passed || got.failed != c.failed {
			t.Errorf("%s: %q, %d passed, %d failed, %v; want %q, %d, %d", c.name, out.String(), got.passed, got.failed, err, c.want, c.passed, c.failed)
		}
	}
}
