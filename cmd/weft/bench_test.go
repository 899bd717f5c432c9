package main

import (
	"strings"
	"testing"
	"time"
)

func TestBenchHints(t *testing.T) {
	device := func(id string, write, read float64, most time.Duration) benchDevice {
		return benchDevice{ID: id, Address: "nfs://" + id + "/", Write: write, Read: read, Half: most / 2, Most: most}
	}
	const m = 1 << 20
	for name, c := range map[string]struct {
		r    benchReport
		want []string // each in a hint of its own, in this order
	}{
		"alike": {benchReport{Devices: []benchDevice{device("a", 500*m, 900*m, time.Millisecond), device("b", 450*m, 800*m, time.Millisecond)}, Striped: benchDevice{Read: 1700 * m}}, nil},
		"slow writes": {benchReport{Devices: []benchDevice{device("a", 500*m, 900*m, time.Millisecond), device("b", 450*m, 800*m, time.Millisecond), device("c", 100*m, 800*m, time.Millisecond)},
			Striped: benchDevice{Read: 1700 * m}}, []string{"device c (nfs://c/) is slow: it writes 100 MiB/s where others do 500 MiB/s."}},
		"slow at times": {benchReport{Devices: []benchDevice{device("a", 500*m, 900*m, time.Millisecond), device("b", 500*m, 900*m, 9*time.Millisecond)}, Striped: benchDevice{Read: 1700 * m}},
			[]string{"device b (nfs://b/) is slow: it answers one small read of 100 only after 9ms, others after 1ms."}},
		"away":       {benchReport{Devices: []benchDevice{device("a", 500*m, 900*m, time.Millisecond), {ID: "b", Address: "nfs://b/", Problem: "connection refused"}}}, []string{"device b (nfs://b/): connection refused"}},
		"one limit":  {benchReport{Devices: []benchDevice{device("a", 500*m, 900*m, time.Millisecond), device("b", 500*m, 900*m, time.Millisecond)}, Striped: benchDevice{Read: 950 * m}}, []string{"are the limit"}},
		"far away":   {benchReport{Metadata: []benchCalls{{Call: "create", Half: 30 * time.Millisecond}}}, []string{"create takes 30ms"}},
		"one device": {benchReport{Devices: []benchDevice{device("a", 1*m, 1*m, time.Second)}, Striped: benchDevice{Read: 1 * m}}, nil},
	} {
		got := c.r.hints()
		if len(got) != len(c.want) {
			t.Errorf("%s: %q", name, got)
			continue
		}
		for i := range got {
			if !strings.Contains(got[i], c.want[i]) {
				t.Errorf("%s: %q, want %q in it", name, got[i], c.want[i])
			}
		}
	}
}

func TestPercentiles(t *testing.T) {
	var times []time.Duration
	for i := range 200 {
		times = append(times, time.Duration(200-i))
	}
	if half, most := percentiles(times); half != 101 || most != 199 {
		t.Errorf("%d and %d", half, most)
	}
	if half, most := percentiles(nil); half != 0 || most != 0 {
		t.Errorf("of nothing %d and %d", half, most)
	}
}

func TestKernelVersion(t *testing.T) {
	for release, want := range map[string][2]int{"6.18.5-amd64": {6, 18}, "5.4": {5, 4}, "7.0-rc1": {7, 0}, "odd": {0, 0}} {
		if major, minor := kernelVersion(release); [2]int{major, minor} != want {
			t.Errorf("%s: %d.%d", release, major, minor)
		}
	}
}
