package faults

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// TestHungDisk freezes the disk of a data server on this host, whose files are written without it. A soft mount gives up,
// and a hard one goes on with the other copy.
func TestHungDisk(t *testing.T) {
	disks := []*harness.Disk{harness.NewDisk(t, 64<<20), harness.NewDisk(t, 64<<20)}
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true, Disks: disks})
	hard := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	soft := v.Mount(append(mountOptions(), "soft", "timeo=10", "retrans=1")...)
	data := bytes.Repeat([]byte("weft"), 64<<10)
	prepare := func(m *harness.Mount, dir string, args ...string) *os.File {
		t.Helper()
		dir = filepath.Join(m.Dir, dir)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, append([]string{"layout", "set", dir}, args...)...)
		f, err := os.Create(filepath.Join(dir, "f"))
		if err == nil {
			_, err = f.Write(data)
		}
		if err == nil {
			err = f.Sync()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	single := prepare(soft, "single", "--stripe-count", "1")
	double := prepare(hard, "double", "--mirrors", "2")
	server := v.ServerAt(harness.LayoutOf(t, single.Name()).Mirrors[0].Servers[0].Address)
	disk := disks[0]
	if server == v.Servers[1] {
		disk = disks[1]
	}
	newer := bytes.Repeat([]byte("new!"), 64<<10)
	use := func(f *os.File) error {
		_, err := f.WriteAt(newer, 0)
		return errors.Join(err, f.Sync())
	}
	disk.Freeze()
	began := time.Now()
	inTime(t, "a soft mount", func() error {
		if err := use(single); !errors.Is(err, syscall.EIO) {
			return errors.Join(errors.New("no EIO"), err)
		}
		return nil
	})
	t.Logf("soft: %v", time.Since(began).Round(time.Millisecond))
	if log := soft.Log(); !strings.Contains(log, "does not answer: until it does") {
		t.Errorf("the soft mount did not write by a descriptor:\n%s", log)
	}
	began = time.Now()
	inTime(t, "a hard mount with another copy", func() error { return use(double) })
	t.Logf("hard: %v", time.Since(began).Round(time.Millisecond))
	disk.Thaw()
	harness.Await(t, "the soft mount writes again", func() bool { return use(single) == nil })
	hard.AwaitCopies()
	for _, f := range []*os.File{single, double} {
		got := make([]byte, len(newer))
		if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, newer) {
			t.Errorf("%s: %v, %.8q", f.Name(), err, got)
		}
		f.Close()
	}
	hard.Verify()
}
