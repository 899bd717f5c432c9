package main

import (
	"testing"
	"time"
)

func TestMatchPath(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"*.bin", "a.bin", true},
		{"*.bin", "dir/sub/a.bin", true},
		{"*.bin", "dir/sub/a.txt", false},
		{"sub", "dir/sub/a.bin", true}, // below a directory of the name
		{"dir/*", "dir/sub/a.bin", true},
		{"dir/*", "dir", false},
		{"dir/sub", "dir/sub", true},
		{"sub/*", "dir/sub/a.bin", false}, // a path begins at the mount point
		{"*/sub", "dir/sub/a", true},
		{"*", "", false}, // not known
		{"*", ".", false},
	} {
		if got := matchPath(c.pattern, c.path); got != c.want {
			t.Errorf("%q and %q: %v", c.pattern, c.path, got)
		}
	}
}

func TestTraceLine(t *testing.T) {
	line := traceLine{
		At: time.Date(2026, 1, 2, 3, 4, 5, 678e3, time.UTC), Op: "read", Inode: 7, Path: "dir/f\x1b[1m", PID: 12, Command: "python3", Offset: 4096, Bytes: 1 << 20,
		Took: 1234567, Daemon: 34567, Data: 1200000, Device: "0123456789abcdef", Slowest: 1100000,
	}
	if got, want := line.String(), `03:04:05.000678 read              1.2ms  34.6µs        -   1.2ms    1.1ms 01234567 12/python3           1048576@4096           $'dir/f\x1b[1m'`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	line = traceLine{At: line.At, Op: "lookup", Inode: 7, Name: "new\n", PID: 12, Took: 5e8, Metadata: 5e8}
	if got, want := line.String(), `03:04:05.000678 lookup            500ms       -    500ms       -        - -        12/?                 -                      inode 7 $'new\x0a'`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestProgressTrace has more lines come than anybody takes.
func TestProgressTrace(t *testing.T) {
	var p news
	if more := p.trace(make([]traceLine, traceRoom-1), 3); more != 0 {
		t.Errorf("%d lines are lost at once", more)
	}
	if more := p.trace(make([]traceLine, 3), 3); more != 2 {
		t.Errorf("%d lines are lost, want 2", more)
	}
	if r, ok := p.take(0); !ok || len(r.Trace) != traceRoom || r.Lost != 5 {
		t.Errorf("%v: %d lines, %d lost", ok, len(r.Trace), r.Lost)
	}
	if _, ok := p.take(5); ok {
		t.Error("there is something to be told twice")
	}
	if r, ok := p.take(3); !ok || r.Lost != 5 {
		t.Error("what is lost is not told")
	}
}
