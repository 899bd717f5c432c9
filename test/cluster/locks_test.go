package cluster

import (
	"fmt"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
	"github.com/weftfs/weft/test/locktest"
)

// TestLockWorker is not a test but a process of the others.
func TestLockWorker(t *testing.T) { locktest.Serve(t) }

// TestDeadlock has two processes ask crosswise for record locks that different services give: one of them is told, the other gets its lock.
func TestDeadlock(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true})
	m := v.Mount()
	dirs := v.Cluster.Spread(m.Dir)
	for name, other := range map[string]*harness.Mount{"one mount": m, "two mounts": v.Mount()} {
		t.Run(name, func(t *testing.T) {
			at := func(m *harness.Mount) *locktest.Worker {
				w := locktest.New(t, m.Dir)
				for i, dir := range dirs {
					w.Do(fmt.Sprintf("open f%d %s/deadlock", i, dir), "ok")
				}
				return w
			}
			a, b := at(m), at(other)
			a.Do("posix f0 w 0 1", "ok")
			b.Do("posix f1 w 0 1", "ok")
			a.Blocks("posixw f1 w 0 1")
			began := time.Now()
			b.Tell("posixw f0 w 0 1")
			// Either may be the one that gives up.
			refused, others := a, b
			var got string
			select {
			case got = <-a.Answers():
			case got = <-b.Answers():
				refused, others = b, a
			case <-time.After(10 * time.Second):
				t.Fatal("both wait for each other")
			}
			if got != "EDEADLK" {
				t.Fatalf("the first answer is %s, want EDEADLK", got)
			}
			t.Logf("found after %v", time.Since(began).Round(time.Millisecond))
			refused.Do(map[bool]string{true: "posix f0 u 0 1", false: "posix f1 u 0 1"}[refused == a], "ok")
			others.Want("after the other gave up", "ok")
		})
	}
}
