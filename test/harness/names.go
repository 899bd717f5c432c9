package harness

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// ChangeNames creates, renames and removes files and directories in these directories of a volume, with two threads on
// each mount. Their names begin with "new-". It goes on until stop is called, which returns how many changes there were,
// or until the test ends.
func ChangeNames(t testing.TB, seed uint64, mounts []*Mount, dirs ...string) (stop func() int64) {
	var changes atomic.Int64
	var wg sync.WaitGroup
	end := make(chan struct{})
	for k, m := range mounts {
		for w := range 2 {
			wg.Go(func() { // ends with the channel, or with an error
				rng := rand.New(rand.NewPCG(seed, uint64(2*k+w)))
				path := func(n int) string {
					return filepath.Join(m.Dir, dirs[rng.IntN(len(dirs))], fmt.Sprintf("new-%d-%d-%d", k, w, n))
				}
				for n := 0; ; n++ {
					select {
					case <-end:
						return
					default:
					}
					one, other, third := path(3*n), path(3*n+1), path(3*n+2)
					err := errors.Join(os.WriteFile(one, nil, 0o644), os.Rename(one, other), os.Mkdir(one, 0o755),
						os.Rename(one, third), os.Remove(other), os.Remove(third))
					if err != nil {
						t.Errorf("mount %d: %v", k, err)
						return
					}
					changes.Add(6)
					if n%4 == 0 { // for longer than the kernel keeps no names after a change
						select {
						case <-end:
						case <-time.After(time.Duration(rng.IntN(2500)) * time.Millisecond):
						}
					}
				}
			})
		}
	}
	stop = sync.OnceValue(func() int64 {
		close(end)
		wg.Wait()
		return changes.Load()
	})
	t.Cleanup(func() { stop() })
	return stop
}
