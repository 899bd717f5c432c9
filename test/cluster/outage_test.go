package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
	"github.com/weftfs/weft/test/locktest"
)

// outageLease is that of clients in TestOutage: short, as the catalog is away for longer.
const outageLease = 4 * time.Second

// TestOutage takes the catalog away from all services for longer than leases last, and then kills one of the services.
func TestOutage(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true, Lease: outageLease})
	mounts := []*harness.Mount{v.Mount(), v.Mount()}
	t.Run("catalog", func(t *testing.T) { catalogAway(t, v.Cluster, mounts[0].Dir) })
	t.Run("service", func(t *testing.T) { serviceKilled(t, v.Cluster, mounts[0].Dir, mounts[1].Dir) })
	for _, m := range mounts {
		if strings.Contains(m.Log(), "session lost") {
			t.Error("a mount has lost a session")
		}
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}

// catalogAway has two of three etcd members gone: reads and writes under a layout go on, until the lease ends; they and everything else wait, and then are done.
func catalogAway(t *testing.T, c *harness.Cluster, mount string) {
	dirs := c.Spread(mount)
	const size, part = 1 << 20, 4096
	f, err := os.Create(filepath.Join(mount, dirs[0], "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want, got := bytes.Repeat([]byte("before, "), size/8), make([]byte, size)
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	rounds := atomic.Int64{}
	transfer := func() {
		n := rounds.Load()
		block := bytes.Repeat([]byte{byte('a' + n%26)}, part)
		off := n * part % size
		copy(want[off:], block)
		if _, err := f.WriteAt(block, off); err != nil {
			t.Errorf("write: %v", err)
		}
		if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("read: %v, or other bytes than were written", err)
		}
		rounds.Add(1)
	}
	transfer() // has a layout then

	c.Etcd[0].Kill()
	c.Etcd[1].Freeze()
	before := rounds.Load()
	made, ended, transferred := make(chan error, len(dirs)), make(chan struct{}), make(chan struct{})
	for _, dir := range dirs {
		go func() { made <- os.Mkdir(filepath.Join(mount, dir, "made"), 0o755) }() // ends with the call
	}
	go func() { // ends with ended
		defer close(transferred)
		for {
			select {
			case <-ended:
				return
			case <-time.After(10 * time.Millisecond):
				transfer()
			}
		}
	}()
	time.Sleep(2*outageLease + time.Second)
	if n := rounds.Load() - before; n == 0 {
		t.Error("nothing was written and read while the catalog was away")
	} else {
		t.Logf("written and read %d times", n)
	}
	select {
	case err := <-made:
		t.Errorf("mkdir without a catalog: %v", err)
		made <- nil
	default:
	}

	c.Etcd[1].Thaw()
	back := time.Now()
	for range dirs {
		if err := <-made; err != nil {
			t.Errorf("mkdir: %v", err)
		}
	}
	t.Logf("directories made %v after the catalog was back", time.Since(back).Round(time.Millisecond))
	c.Etcd[0].Start()
	close(ended)
	<-transferred
	transfer()
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(mount, dir, "made")); err != nil {
			t.Error(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Error(err)
	}
}

// serviceKilled has one of three services killed, for good: what clients have there they have from the services that follow it, and no lock is given twice
// meanwhile; what the other services have is served all the time.
func serviceKilled(t *testing.T, c *harness.Cluster, here, there string) {
	victim := int(*seed % 3)
	t.Logf("-seed %d", *seed)
	owners := c.Owners()
	dirs := make([]*os.Root, len(owners)) // by shard
	names := make([]string, len(owners))
	for n, missing := 0, len(owners); missing > 0; n++ {
		name := fmt.Sprint("of-a-shard-", n)
		shard := harness.MakeDir(t, filepath.Join(here, name), len(owners))
		if dirs[shard] != nil {
			continue
		}
		dir, err := os.OpenRoot(filepath.Join(here, name)) // so that nobody else needs to be asked on the way there
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		dirs[shard], names[shard] = dir, name
		missing--
	}
	shard := slices.Index(owners, victim)
	dir := names[shard]

	holder, waiter, other := locktest.New(t, filepath.Join(here, dir)), locktest.New(t, filepath.Join(there, dir)), locktest.New(t, filepath.Join(there, dir))
	for _, w := range []*locktest.Worker{holder, waiter, other} {
		w.Do("open f locked", "ok")
	}
	holder.Do("posix f w 0 10", "ok")
	holder.Do("ofd f w 20 10", "ok")
	holder.Do("ex f", "ok")
	waiter.Blocks("posixw f w 0 10")
	create := func(name string) *os.File {
		f, err := dirs[shard].Create(name)
		if err == nil {
			_, err = f.WriteString("before ")
		}
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	kept, unlinked := create("kept"), create("unlinked")
	defer kept.Close()
	defer unlinked.Close()
	if err := dirs[shard].Remove("unlinked"); err != nil {
		t.Fatal(err)
	}

	killed := time.Now()
	c.Services[victim].Kill()
	var served atomic.Bool // all shards are
	var shortest, longest time.Duration
	var both sync.WaitGroup
	both.Go(func() { // ends when the shards of the victim are served
		defer served.Store(true)
		waits := make([]time.Duration, len(owners))
		var all sync.WaitGroup
		for shard, dir := range dirs {
			if owners[shard] == victim {
				all.Go(func() { // ends with the call
					if err := dir.Mkdir("after", 0o755); err != nil {
						t.Error(err)
					}
					waits[shard] = time.Since(killed)
				})
			}
		}
		all.Wait()
		waits = slices.DeleteFunc(waits, func(d time.Duration) bool { return d == 0 })
		shortest = slices.Min(waits)
		t.Logf("the victim's shards are served after %v to %v", shortest.Round(time.Millisecond), slices.Max(waits).Round(time.Millisecond))
	})
	both.Go(func() { // the same
		n := 0
		for ; !served.Load(); n++ {
			for shard, dir := range dirs {
				if owners[shard] == victim {
					continue
				}
				began := time.Now()
				name := fmt.Sprint("probe", n)
				f, err := dir.Create(name)
				if err == nil {
					err = f.Close()
				}
				if err == nil {
					_, err = dir.Stat(name)
				}
				if err == nil {
					err = dir.Mkdir(name+".d", 0o755)
				}
				if err != nil {
					t.Errorf("shard %d, which is served: %v", shard, err)
				}
				longest = max(longest, time.Since(began))
			}
		}
		t.Logf("%d times at each of the other shards, at most %v for a file and a directory", n, longest.Round(time.Millisecond))
	})
	holder.Tell("posix f w 100 10") // these two are of two processes
	other.Tell("posix f w 100 10")
	both.Wait()
	if longest >= shortest {
		t.Errorf("something took %v at a service that lives, as long as the killed one's shards were away", longest)
	}

	answers := []string{<-holder.Answers(), <-other.Answers()}
	if slices.Sort(answers); !slices.Equal(answers, []string{"EAGAIN", "ok"}) {
		t.Errorf("two who asked for a lock meanwhile: %v", answers)
	}
	other.Do("posix f r 5 1", "EAGAIN")
	other.Do("ofd f r 25 1", "EAGAIN")
	other.Do("sh f", "EAGAIN")
	select {
	case got := <-waiter.Answers():
		t.Errorf("who waited for a lock that another has: %s", got)
	default:
	}
	holder.Do("posix f u 0 10", "ok")
	waiter.Want("the lock that was waited for", "ok")
	holder.Do("posix f r 5 1", "EAGAIN")

	for _, f := range []*os.File{kept, unlinked} {
		if _, err := f.WriteString("and after"); err != nil {
			t.Error(err)
		}
		if err := f.Sync(); err != nil {
			t.Error(err)
		}
		got := make([]byte, 100)
		if n, err := f.ReadAt(got, 0); err != io.EOF || string(got[:n]) != "before and after" {
			t.Errorf("%s: %q, %v", f.Name(), got[:n], err)
		}
	}
	if got, err := os.ReadFile(filepath.Join(there, dir, "kept")); err != nil || string(got) != "before and after" {
		t.Errorf("through the other mount: %q, %v", got, err)
	}
	if info, err := unlinked.Stat(); err != nil || info.Sys().(*syscall.Stat_t).Nlink != 0 {
		t.Errorf("the file without a name: %+v, %v", info, err)
	}
	if _, err := dirs[shard].Stat("unlinked"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name that was removed: %v", err)
	}
}
