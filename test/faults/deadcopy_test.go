package faults

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// oldFileOp is something that is done to a file that has been there for long.
type oldFileOp struct {
	name string
	do   func(path string) error
	want []byte // what is in the file then; nil: it is gone
}

// writeAt writes to a file in place.
func writeAt(path string, flags int, data []byte, sync bool) error {
	f, err := os.OpenFile(path, os.O_WRONLY|flags, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if sync && err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

var (
	oldData = bytes.Repeat([]byte("old"), 4000)
	newData = bytes.Repeat([]byte("new"), 4000)

	oldFileOps = []oldFileOp{
		{"overwrite", func(p string) error { return writeAt(p, 0, newData, false) }, newData},
		{"overwrite and fsync", func(p string) error { return writeAt(p, 0, newData, true) }, newData},
		{"append", func(p string) error { return writeAt(p, os.O_APPEND, newData, false) }, append(bytes.Clone(oldData), newData...)},
		{"O_TRUNC", func(p string) error { return writeAt(p, os.O_TRUNC, newData[:100], false) }, newData[:100]},
		{"truncate", func(p string) error { return os.Truncate(p, 100) }, oldData[:100]},
		{"create beside", func(p string) error { return writeAt(p+".new", os.O_CREATE|os.O_EXCL, newData, true) }, oldData},
		{"remove", os.Remove, nil},
	}
)

// opTimes says how long one operation took on many files in turn.
type opTimes struct{ longest, all time.Duration }

// TestDeadCopy changes old files one after the other, which have two copies on three data servers, before and after one of
// these is harmed. A dead copy costs its wait once, not for each file.
func TestDeadCopy(t *testing.T) {
	const files = 30
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 99))
	for _, name := range []string{"killed", "stopped", "frozen", "dead"} {
		t.Run(name, func(t *testing.T) {
			var disks []*harness.Disk
			for range 3 {
				disks = append(disks, harness.NewDisk(t, 64<<20))
			}
			v := harness.NewVolume(t, harness.Options{DataServers: 3, Apart: true, Remote: true, Disks: disks})
			m := v.Mount(mountOptions()...)
			harness.Weft(t, "layout", "set", m.Dir, "--mirrors", "2")
			path := func(round, op string, i int) string { return filepath.Join(m.Dir, round, op, fmt.Sprint(i)) }
			for _, round := range []string{"healthy", "harmed"} {
				for _, op := range oldFileOps {
					if err := os.MkdirAll(filepath.Dir(path(round, op.name, 0)), 0o755); err != nil {
						t.Fatal(err)
					}
					for i := range files {
						if err := os.WriteFile(path(round, op.name, i), oldData, 0o644); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			harness.Weft(t, "sync", m.Dir)
			run := func(round string) map[string]opTimes {
				times := map[string]opTimes{}
				for _, op := range oldFileOps {
					var took opTimes
					for i := range files {
						start := time.Now()
						inTime(t, op.name, func() error { return op.do(path(round, op.name, i)) })
						last := time.Since(start)
						took.longest, took.all = max(took.longest, last), took.all+last
					}
					times[op.name] = took
					for i := range files {
						got, err := os.ReadFile(path(round, op.name, i))
						if gone := errors.Is(err, os.ErrNotExist); gone != (op.want == nil) || err != nil && !gone || !bytes.Equal(got, op.want) {
							t.Errorf("%s, file %d: %d bytes, %v", op.name, i, len(got), err)
						}
					}
				}
				return times
			}
			healthy := run("healthy")
			n := rng.IntN(len(disks))
			var end func()
			for _, harm := range deviceHarms {
				if harm.name == name {
					end = harm.begin(v.Servers[n], disks[n])
				}
			}
			harmed := run("harmed")
			// These bounds hold on a machine that does much else. On an idle one it is two seconds, and half as much again.
			for _, op := range oldFileOps {
				was, is := healthy[op.name], harmed[op.name]
				t.Logf("%-20s longest %v (healthy %v), all %v (healthy %v)", op.name, is.longest, was.longest, is.all, was.all)
				if is.longest > was.longest+6*time.Second || is.all > 4*was.all+10*time.Second {
					t.Errorf("%s takes too long", op.name)
				}
			}
			end()
			m.AwaitCopies()
			harness.Weft(t, "sync", m.Dir)
			allEqual(t, v, m)
			m.Unmount()
			v.Stop()
			v.Fsck()
		})
	}
}
