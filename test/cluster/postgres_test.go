package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/test/harness"
)

// TestPromotion has three services on PostgreSQL, whose primary is killed, and its synchronous standby promoted, while files are made, renamed and removed in
// shards of each: nobody gets an error, and all that was answered is there.
func TestPromotion(t *testing.T) {
	harness.NeedMount(t)
	primary := pgserver.Start(t, pgserver.Options{})
	standby := primary.Standby()
	v := harness.NewVolume(t, harness.Options{Cluster: true, Catalog: pgserver.Together(standby, primary)})
	m, other := v.Mount(), v.Mount()
	dirs := v.Cluster.Spread(m.Dir)

	var done [len(dirs)]atomic.Int64
	var end atomic.Bool
	var all sync.WaitGroup
	for i, dir := range dirs {
		next := dirs[(i+1)%len(dirs)]
		all.Go(func() { // ends with end, or the first error
			for n := int64(0); !end.Load(); n++ {
				path := filepath.Join(m.Dir, dir, fmt.Sprint("f", n))
				err := os.WriteFile(path, []byte(path), 0o644)
				switch {
				case err != nil:
				case n%3 == 1:
					err = os.Rename(path, filepath.Join(m.Dir, next, fmt.Sprint("moved", n)))
				case n%3 == 2:
					err = os.Remove(path)
				}
				if err != nil {
					t.Errorf("file %d in %s: %v", n, dir, err)
					return
				}
				done[i].Add(1)
			}
		})
	}
	awaitMore := func(more int64) {
		for i := range done {
			want := done[i].Load() + more
			harness.Await(t, "files made in "+dirs[i], func() bool { return done[i].Load() >= want || t.Failed() })
		}
	}
	awaitMore(20)
	primary.Kill()
	killed := time.Now()
	standby.Promote()
	t.Logf("promoted after %v", time.Since(killed).Round(time.Millisecond))
	awaitMore(1)
	t.Logf("files are made again after %v", time.Since(killed).Round(time.Millisecond))
	awaitMore(20)
	end.Store(true)
	all.Wait()

	for i, dir := range dirs {
		t.Logf("%d files in %s", done[i].Load(), dir)
		for n := range done[i].Load() {
			made := filepath.Join(dir, fmt.Sprint("f", n))
			moved := filepath.Join(dirs[(i+1)%len(dirs)], fmt.Sprint("moved", n))
			want := map[string]bool{made: n%3 == 0, moved: n%3 == 1}
			for path, there := range want {
				got, err := os.ReadFile(filepath.Join(other.Dir, path))
				switch {
				case there && (err != nil || string(got) != filepath.Join(m.Dir, made)):
					t.Errorf("%s: %q, %v", path, got, err)
				case !there && !os.IsNotExist(err):
					t.Errorf("%s is there: %v", path, err)
				}
			}
		}
	}
	for _, m := range []*harness.Mount{m, other} {
		if strings.Contains(m.Log(), "session lost") {
			t.Error("a mount has lost a session")
		}
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}
