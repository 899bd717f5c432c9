package faults

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestRecallFromWaiting has one mount write to a data server that is away for several leases, while another mount cuts the same
// file. The first cannot give its layout back before the server answers. It keeps its session all the same: its lock, and what
// it has written there and to other servers and not yet made stable.
func TestRecallFromWaiting(t *testing.T) {
	t.Logf("-seed %d", *seed)
	const lease = 3 * time.Second
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 2, Apart: true, Lease: lease})
	m, other := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-count", "1")
	rnd := rand.New(rand.NewPCG(*seed, 0))
	want := make([]byte, 3<<20)
	for i := range want {
		want[i] = byte(rnd.Uint32())
	}
	const half = 3 << 19
	// A file on the server that goes away, one on the other.
	files := map[*harness.DataServer]*os.File{}
	for i := 0; len(files) < 2 && i < 20; i++ {
		f, err := os.Create(filepath.Join(m.Dir, string(rune('a'+i))))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(want[:half]); err != nil {
			t.Fatal(err)
		}
		files[v.ServerAt(harness.LayoutOf(t, f.Name()).Mirrors[0].Servers[0].Address)] = f
	}
	if len(files) < 2 {
		t.Fatal("20 files are all on one of two data servers")
	}
	away, f, safe := v.Servers[0], files[v.Servers[0]], files[v.Servers[1]]
	if err := unix.Flock(int(safe.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	away.Pause()
	wrote, cut := make(chan error, 1), make(chan error, 1)
	go func() { // ends when the server is back
		_, err := f.WriteAt(want[half:], half)
		wrote <- err
	}()
	time.Sleep(lease / 3)
	name := filepath.Join(other.Dir, filepath.Base(f.Name()))
	size := int64(half + 12345)
	go func() { // ends when the writer has given its layout back
		cut <- os.Truncate(name, size)
	}()
	select {
	case err := <-wrote:
		t.Fatalf("write to a server that is away: %v", err)
	case err := <-cut:
		t.Fatalf("a file was cut while a write to it was under way: %v", err)
	case <-time.After(4 * lease):
	}
	away.Continue()
	for what, ch := range map[string]chan error{"write": wrote, "truncate": cut} {
		select {
		case err := <-ch:
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s does not end though the server is back", what)
		}
	}
	for _, g := range files {
		if err := g.Sync(); err != nil {
			t.Errorf("fsync of %s: %v", g.Name(), err)
		}
	}
	g, err := os.Open(filepath.Join(other.Dir, filepath.Base(safe.Name())))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := unix.Flock(int(g.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != unix.EWOULDBLOCK {
		t.Errorf("lock of the file on the other server, from the other mount: %v; want %v", err, unix.EWOULDBLOCK)
	}
	for path, n := range map[string]int64{name: size, g.Name(): half} {
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want[:n]) {
			t.Errorf("%s has %d bytes, %v; want %d, as they were written", path, len(got), err, n)
		}
	}
	if log := m.Log(); strings.Contains(log, "session") {
		t.Errorf("the mount has lost its session:\n%s", log)
	}
}
