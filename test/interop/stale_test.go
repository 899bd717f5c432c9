package interop

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestGaneshaStale starts an NFS-Ganesha again, which then has another write verifier: what one mount has written before another one wrote the same
// bytes and made that stable is not sent again. One file is overwritten, one under locks.
func TestGaneshaStale(t *testing.T) {
	harness.NeedMount(t)
	dir := harness.Dir(t)
	g := startGanesha(t, export{dir, open})
	v := harness.NewVolume(t, harness.Options{Devices: []string{"nfs://127.0.0.1:" + g.nfs + dir + "?mountport=" + g.mount}})
	a, b := v.Mount("localio=off"), v.Mount("localio=off")
	const blocks, size = 64, 4096
	write := func(path string, with byte, sync, locks bool) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		lock := unix.Flock_t{Type: unix.F_WRLCK}
		if locks {
			err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &lock)
		}
		for n := range int64(blocks) {
			_, e := f.WriteAt(bytes.Repeat([]byte{with}, size), n*size)
			err = errors.Join(err, e)
		}
		if sync {
			err = errors.Join(err, f.Sync())
		}
		if lock.Type = unix.F_UNLCK; locks {
			err = errors.Join(err, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"plain", "locked"}
	for _, name := range names {
		write(filepath.Join(a.Dir, name), 'a', false, name == "locked")
	}
	for _, name := range names {
		write(filepath.Join(b.Dir, name), 'b', true, name == "locked")
	}
	g.kill()
	g.start()
	for _, name := range names {
		f, err := os.Open(filepath.Join(a.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			t.Error(err)
		}
		data, err := os.ReadFile(filepath.Join(b.Dir, name))
		if err != nil || !bytes.Equal(data, bytes.Repeat([]byte{'b'}, blocks*size)) {
			t.Errorf("%s: %d bytes, of which %d are a's older ones, %v", name, len(data), bytes.Count(data, []byte{'a'}), err)
		}
	}
}
