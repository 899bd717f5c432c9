package main

import (
	"strings"
	"testing"
	"time"
)

func TestMoveProgress(t *testing.T) {
	p := moveProgress{files: 10, moved: 2, empty: 1, there: 1, failed: 1, bytes: 4 << 30, done: 1 << 30, copied: 1 << 30, counted: true, waits: "node1"}
	for _, c := range []struct {
		p        moveProgress
		width    int
		terminal bool
		want     string
	}{
		{p, 0, false, " 25%  1.0 GiB of 4.0 GiB  512 MiB/s  6s left  5 of 10 files  waits for node1"},
		{p, 200, true, "[#####---------------]  25%  1.0 GiB of 4.0 GiB  512 MiB/s  6s left  5 of 10 files  waits for node1"},
		{p, 10, true, "[#####---"},
		{moveProgress{files: 3, done: 1 << 20}, 0, false, "1.0 MiB  0 B/s  0 of 3 files"},
		{moveProgress{files: 1, counted: true}, 0, false, "  0%  0 B of 0 B  0 B/s  0 of 1 files"},
	} {
		if got := c.p.line(2*time.Second, c.width, c.terminal); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	if got := p.summary(2 * time.Second); !strings.HasPrefix(got, "2 files moved, 1.0 GiB in 2s, 512 MiB/s; 1 were there already; 1 have no data yet; 1 could") {
		t.Errorf("%q", got)
	}
}
