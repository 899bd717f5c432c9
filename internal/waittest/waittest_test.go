package waittest

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// failing keeps what a test fails with, and lets it go on.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) { f.said = fmt.Sprintf(format, args...) }

func TestUntil(t *testing.T) {
	for _, c := range []struct {
		after time.Duration // when the condition is true
		said  string
	}{
		{0, ""},
		{59 * time.Second, ""},
		{2 * time.Minute, "not after a minute: it is so"},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, began := &failing{TB: t}, time.Now()
			Until(f, "it is so", func() bool { return time.Since(began) >= c.after })
			if took := time.Since(began); f.said != c.said || c.said == "" && took != c.after {
				t.Errorf("true after %v: %q after %v, want %q", c.after, f.said, took, c.said)
			}
		})
	}
}

// TestPoll has a condition that takes longer than the limit: it counts what its last call returns.
func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			calls int // that return false
			want  bool
			took  time.Duration
		}{
			{0, true, 0},
			{1, true, 3 * time.Second},
			{2, true, 6 * time.Second},
			{3, false, 6 * time.Second},
		} {
			calls, began := 0, time.Now()
			got := Poll(5*time.Second, 3*time.Second, func() bool { calls++; return calls > c.calls })
			if took := time.Since(began); got != c.want || took != c.took {
				t.Errorf("%d calls in vain: %t after %v, want %t after %v", c.calls, got, took, c.want, c.took)
			}
		}
	})
}
