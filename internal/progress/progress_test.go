package progress

import (
	"encoding/json"
	"testing"
	"time"
)

func TestState(t *testing.T) {
	bytes := func(done, total int64, more bool) Count { return Count{Bytes, done, total, more} }
	for _, c := range []struct {
		s          State
		line, json string
	}{
		{State{}, "", `{"seconds":10,"per_second":0,"counts":[]}`},
		{
			State{Counts: []Count{bytes(1<<30, 4<<30, false), {Unit: "files", Done: 5, Total: 10}}, Waits: "node1"},
			" 25%  1.0 GiB of 4.0 GiB, 102 MiB/s, 30s left, 5 of 10 files, waits for node1",
			`{"seconds":10,"share":0.25,"left":30,"per_second":107374182.4,"counts":[{"unit":"bytes","done":1073741824,"total":4294967296},{"unit":"files","done":5,"total":10}],"waits_for":"node1"}`,
		},
		{ // not all is found yet
			State{Counts: []Count{bytes(1<<30, 4<<30, true), {Unit: "files", Done: 5, Total: 10, More: true}}, Rate: 1 << 20},
			"1.0 GiB of 4.0 GiB+, 1.0 MiB/s, 5 of 10+ files",
			`{"seconds":10,"per_second":1048576,"counts":[{"unit":"bytes","done":1073741824,"total":4294967296},{"unit":"files","done":5,"total":10}]}`,
		},
		{ // the rate is of what was copied
			State{Counts: []Count{bytes(3<<20, 4<<20, false)}, Rate: 1 << 10},
			" 75%  3.0 MiB of 4.0 MiB, 1.0 KiB/s, 17m4s left",
			`{"seconds":10,"share":0.75,"left":1024,"per_second":1024,"counts":[{"unit":"bytes","done":3145728,"total":4194304}]}`,
		},
		{ // an estimate
			State{Counts: []Count{{Unit: "rows", Done: 1000}}, Share: 0.25, Doing: "entries"},
			" 25%  entries, 1000 rows, 100 rows/s, 30s left",
			`{"seconds":10,"share":0.25,"left":30,"per_second":100,"counts":[{"unit":"rows","done":1000}],"doing":"entries"}`,
		},
		{State{Share: 1.5}, "100%  ", `{"seconds":10,"share":1,"per_second":0,"counts":[]}`},
		{State{Share: 0.5, Left: 3 * time.Second}, " 50%  3s left", `{"seconds":10,"share":0.5,"left":3,"per_second":0,"counts":[]}`},
		{ // nothing is to be done, or known
			State{Counts: []Count{bytes(0, 0, false)}}, "0 B", `{"seconds":10,"per_second":0,"counts":[{"unit":"bytes","done":0}]}`,
		},
	} {
		if got := c.s.Line(10*time.Second, false); got != c.line {
			t.Errorf("got  %q\nwant %q", got, c.line)
		}
		got, err := json.Marshal(c.s.object(10 * time.Second))
		if err != nil || string(got) != c.json {
			t.Errorf("got  %s (%v)\nwant %s", got, err, c.json)
		}
	}
	half := State{Counts: []Count{bytes(2, 4, false)}}
	if got := half.Line(time.Second, true); got != "[##########----------]  50%  2 B of 4 B, 2 B/s, 1s left" {
		t.Errorf("%q", got)
	}
}

func TestForm(t *testing.T) {
	f := Form("auto")
	for _, s := range []string{"json", "off", "auto"} {
		if err := f.Set(s); err != nil || f.String() != s {
			t.Errorf("%s: %v, %q", s, err, f)
		}
	}
	if err := f.Set("bar"); err == nil || f != "auto" {
		t.Errorf("an unknown one: %v, %q", err, f)
	}
}
