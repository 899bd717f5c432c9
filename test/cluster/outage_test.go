package cluster

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// outageLease is that of clients in TestOutage: short, as the catalog is away for longer.
const outageLease = 5 * time.Second

// TestOutage takes the catalog away from all services for longer than leases last.
func TestOutage(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true, Lease: outageLease})
	mounts := []*harness.Mount{v.Mount(), v.Mount()}
	dirs := v.Cluster.Spread(mounts[0].Dir)
	t.Run("catalog", func(t *testing.T) { catalogAway(t, v.Cluster, mounts[0].Dir, dirs[:]) })
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
func catalogAway(t *testing.T, c *harness.Cluster, mount string, dirs []string) {
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
