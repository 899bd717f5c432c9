package main

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/weftfs/weft/internal/filename"
)

func topSamples() (before, now *topSample) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	sample := func(at time.Time, n uint64) *topSample {
		latency := make([]uint64, 20)
		latency[18], latency[19] = 98*n, 2*n
		use := opUse{Ops: 100 * n, Bytes: n << 30, Latency: latency}
		return &topSample{
			At: at, Requests: map[string]opUse{"read": use, "lookup": {Ops: 50 * n}}, Flights: 7,
			Files: []topFile{{Inode: 5, PID: 77, Path: filename.JSON(strings.Repeat("long/", 40) + "n\x1bme"), Ops: 100 * n, Read: int64(n << 30)}, {Inode: 6, PID: 78, Ops: n, Written: int64(n)}, {Inode: 7}},
			Status: mountStatus{
				Version: "1.0", Since: time.Now(), Retained: 1 << 20,
				Slow: []slowRequest{{Op: "read", Inode: 5, PID: 77, Since: time.Now().Add(-time.Minute), WaitsFor: "device x"}},
				Service: serviceStatus{Address: "meta:7049", Connected: true, Calls: map[string]uint64{"GETATTR": 3 * n, "OPEN": n},
					Clients: []clientStatus{{ID: "a", Host: "idle", Calls: 9}, {ID: "b", Host: "busy", Mount: "/m", Calls: 30 * n, Opens: 2, Layouts: 1}}},
				Devices: []deviceStatus{
					{ID: "d1", Address: "nfs://one:2049/", Reachable: true, Mount: &deviceUse{Path: "tls", Reads: use, Outstanding: 5, Connections: []connectionUse{{Up: true}, {}}}},
					{ID: "d2", Address: "nfs://two:2049/", Problem: "refused"},
					{ID: "d3", Address: "nvme://three:4420/n#1", Reachable: true},
				},
			},
		}
	}
	return sample(at, 1), sample(at.Add(2*time.Second), 3)
}

func TestTopLines(t *testing.T) {
	before, now := topSamples()
	v := &topView{mount: mountEntry{Source: "meta:7049:/", Mountpoint: "/mnt"}, before: before, now: now}
	want := `meta:7049:/ on /mnt   weft 1.0, since now
read        1.0 GiB/s       100/s  p50  197µs  p99  393µs
written         0 B/s         0/s  p50      -  p99      -
requests        150/s  7 under way; 1.0 MiB written and not stable yet
metadata        4.0 calls/s  meta:7049: ok
waiting  read of inode 5, by process 77, for 1m0s; waits for device x

DEVICE                           READ/S  WRITTEN/S   OPS/S     P50     P99  WAIT
one:2049 tls 1/2                1.0 GiB        0 B     100   197µs   393µs     5
two:2049                     refused
three:4420                   not used by this mount

FILE                                         READ/S  WRITTEN/S   OPS/S   PROCESS
...ong/long/long/long/long/long/n\x1bme'    1.0 GiB        0 B     100        77
inode 6                                         0 B        1 B     1.0        78

CLIENT                                                 CALLS/S     OPEN  WRITING
busy /m                                                     30        2        1
idle                                                         0        0        0`
	if got := strings.Join(v.lines(80, 24), "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for _, size := range [][2]int{{80, 24}, {200, 50}, {80, 10}, {40, 5}, {1, 1}, {0, 0}} {
		lines := v.lines(size[0], size[1])
		if len(lines) > size[1] {
			t.Errorf("%d lines of %v", len(lines), size)
		}
		for _, line := range lines {
			if n := utf8.RuneCountInString(line); n > size[0] {
				t.Errorf("%d columns of %v: %s", n, size, line)
			}
		}
	}
	v.err = errors.New("it does not answer")
	if lines := v.lines(80, 24); lines[1] != "it does not answer" || len(lines) < 15 {
		t.Errorf("what was last seen, and the error: %q", lines)
	}
	v.before = nil
	if lines := v.lines(80, 24); len(lines) != 2 {
		t.Errorf("%q", lines)
	}
}
