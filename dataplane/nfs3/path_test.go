package nfs3

import (
	"testing"
	"time"
)

// However long a server was away, it is tried again soon.
func TestPathBackOff(t *testing.T) {
	var p path
	now := time.Now()
	var last time.Duration
	for range 100 {
		p.failed(now)
		last = p.notBefore.Sub(now)
		if last < minDelay/2 || last > 2*maxDelay {
			t.Fatalf("after %d failures the next attempt is in %v, want %v to %v", p.fails, last, minDelay/2, 2*maxDelay)
		}
	}
	if last < maxDelay/2 {
		t.Errorf("after %d failures the next attempt is in %v, want %v at least", p.fails, last, maxDelay/2)
	}
}
