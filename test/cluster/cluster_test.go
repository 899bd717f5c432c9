package cluster

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
	"github.com/weftfs/weft/test/linear"
	"github.com/weftfs/weft/test/model"
)

var (
	seed     = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of random choices")
	duration = flag.Duration("duration", 3*time.Minute, "of TestChaos")
	tree     = flag.String("tree", "src/encoding", "what TestKilled copies, below GOROOT")
)

// TestChaos has four mounts checked for linear histories, and random operations through two of them compared with a plain directory, while services and
// etcd members are killed, stopped, frozen and cut off.
func TestChaos(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true, Links: true})
	var mounts []string
	for range 4 {
		mounts = append(mounts, v.Mount().Dir)
	}
	v.Cluster.Chaos(*seed)
	end := time.Now().Add(*duration)
	var both sync.WaitGroup
	both.Go(func() { // ends with the time, or the first error
		rounds := 0
		for ; time.Now().Before(end); rounds++ {
			if err := linear.Round(*seed+uint64(rounds), mounts); err != nil {
				t.Errorf("histories, -seed %d, round %d: %v", *seed, rounds, err)
				return
			}
		}
		t.Logf("%d rounds of histories", rounds)
	})
	both.Go(func() { // the same
		n, err := compare(filepath.Join(t.TempDir(), "plain"), mounts[:2], end)
		if err != nil {
			t.Errorf("operations, -seed %d: %v", *seed, err)
		}
		t.Logf("%d operations compared", n)
	})
	both.Wait()
	v.Cluster.Calm()
	if t.Failed() {
		return
	}
	v.Stop()
	v.Fsck()
}

// compare does random operations in a directory of the mounts, in turn, and in a plain one until the time is over, or they differ.
func compare(plain string, mounts []string, end time.Time) (n int, err error) {
	for part := 0; time.Now().Before(end); part++ {
		name := fmt.Sprintf("model-%d", part)
		a, b := model.NewWorld(filepath.Join(mounts[0], name)), model.NewWorld(filepath.Join(plain, name))
		for _, w := range []*model.World{a, b} {
			if err := os.MkdirAll(w.Root, 0o755); err != nil {
				return n, err
			}
		}
		s := &model.Script{Rng: rand.New(rand.NewPCG(*seed, uint64(part))), MaxSize: 4 << 20}
		var done []string // the last operations
		for i := 0; i < 400 && time.Now().Before(end) && err == nil; i++ {
			o := s.Next()
			a.Root = filepath.Join(mounts[i%len(mounts)], name)
			done = append(done[max(0, len(done)-40):], fmt.Sprintf("mount %d: %s", i%len(mounts), o.Desc))
			if err = model.Step(o, a, b); err != nil {
				err = fmt.Errorf("part %d, operation %d: %w\nbefore it:\n%s", part, i, err, strings.Join(done, "\n"))
			}
			n++
		}
		if err == nil {
			err = model.CompareTrees(a, b)
		}
		a.Close()
		b.Close()
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// TestKilled copies a real tree while one after the other of the services and etcd members is killed, for good.
func TestKilled(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true})
	m := v.Mount()
	root := strings.TrimSpace(harness.Run(t, "", "go", "env", "GOROOT"))
	source := filepath.Join(root, *tree)
	r := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("-seed %d", *seed)
	for i, victim := range append(v.Cluster.Services[:], v.Cluster.Etcd[:]...) {
		dir := filepath.Join(m.Dir, fmt.Sprint(i))
		began := time.Now()
		copying := exec.Command("cp", "-a", source, dir)
		out := new(strings.Builder)
		copying.Stdout, copying.Stderr = out, out
		if err := copying.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(r.Int64N(int64(2 * time.Second))))
		victim.Kill()
		if err := copying.Wait(); err != nil {
			t.Fatalf("cp after %s was killed: %v\n%s", victim.Name, err, out)
		}
		t.Logf("%s killed: copied in %v", victim.Name, time.Since(began).Round(time.Millisecond))
		if out, err := exec.Command("diff", "-r", source, dir).CombinedOutput(); err != nil {
			t.Fatalf("diff after %s was killed: %v\n%s", victim.Name, err, out)
		}
		victim.Start()
		if i < len(v.Cluster.Services) {
			v.Cluster.Await(victim)
		}
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}
