package main

import (
	"strings"
	"testing"
	"time"
)

func TestMoveProgress(t *testing.T) {
	p := moveProgress{files: 10, moved: 2, empty: 1, there: 1, failed: 1, bytes: 4 << 30, done: 1 << 30, copied: 1 << 30, counted: true, waits: "node1"}
	st := p.state(2 * time.Second)
	if got, want := st.Line(2*time.Second, false), " 25%  1.0 GiB of 4.0 GiB, 512 MiB/s, 6s left, 5 of 10 files, waits for node1"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	p.counted = false
	st = p.state(2 * time.Second)
	if got, want := st.Line(2*time.Second, false), "1.0 GiB of 4.0 GiB+, 512 MiB/s, 5 of 10+ files, waits for node1"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := p.summary(2 * time.Second); !strings.HasPrefix(got, "2 files moved, 1.0 GiB in 2s, 512 MiB/s; 1 were there already; 1 have no data yet; 1 could") {
		t.Errorf("%q", got)
	}
}
