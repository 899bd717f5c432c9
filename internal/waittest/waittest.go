// Package waittest waits in tests and benchmarks for conditions that no channel reports.
package waittest

import (
	"testing"
	"time"
)

// Until waits until cond returns true. A test that waits for longer than a minute fails, and names what it waits for.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !Poll(time.Minute, time.Millisecond, cond) {
		t.Fatalf("not after a minute: %s", what)
	}
}

// Poll calls cond until it returns true, with a pause after each call, and reports whether it did within limit. The
// last call begins after limit, so a machine that is slow does not make cond look false.
func Poll(limit, pause time.Duration, cond func() bool) bool {
	for end := time.Now().Add(limit); !cond(); time.Sleep(pause) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}
