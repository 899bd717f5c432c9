package data

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/test/harness"
)

// onSyncfs replaces the system call until the test ends.
func onSyncfs(t *testing.T, do func(fd int) error) {
	syncfs = do
	t.Cleanup(func() { syncfs = unix.Syncfs })
}

// verfOf starts a server, returns its verifier and stops it.
func verfOf(t *testing.T, dir, shared string) wire.WriteVerf {
	t.Helper()
	ts := startLocal(t, dir, shared)
	defer ts.stop()
	return *ts.verifier.now.Load()
}

// failuresNote is the path of the only one there is.
func failuresNote(t *testing.T, shared string) string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(shared, "failures-*"))
	if err != nil || len(paths) != 1 {
		t.Fatalf("%q, %v", paths, err)
	}
	return paths[0]
}

// Whatever may mean that something was lost while no server ran gives the next one another verifier, and the one after
// it keeps that.
func TestVerifierChanges(t *testing.T) {
	for _, tt := range []struct {
		name   string
		happen func(t *testing.T, dir, shared string) (undo func())
	}{
		{"boot", func(t *testing.T, dir, shared string) func() {
			was := bootFile
			bootFile = filepath.Join(t.TempDir(), "boot_id")
			if err := os.WriteFile(bootFile, []byte("9f3c8c43-ce1b-4ae1-9f3c-000000000000\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { bootFile = was })
			return func() {}
		}},
		{"error told by syncfs", func(t *testing.T, dir, shared string) func() {
			onSyncfs(t, func(int) error { return unix.EIO })
			return func() { syncfs = unix.Syncfs }
		}},
		{"copied directory", func(t *testing.T, dir, shared string) func() {
			path := filepath.Join(dir, "verifier")
			b, err := os.ReadFile(path)
			if err == nil {
				err = errors.Join(os.WriteFile(path+".copy", b, 0o600), os.Rename(path+".copy", path))
			}
			if err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"no verifier", func(t *testing.T, dir, shared string) func() {
			if err := os.Remove(filepath.Join(dir, "verifier")); err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"damaged verifier", func(t *testing.T, dir, shared string) func() {
			if err := os.WriteFile(filepath.Join(dir, "verifier"), make([]byte, noteSize), 0o600); err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"no note of failures", func(t *testing.T, dir, shared string) func() {
			if err := os.Remove(failuresNote(t, shared)); err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"damaged note of failures", func(t *testing.T, dir, shared string) func() {
			if err := os.WriteFile(failuresNote(t, shared), make([]byte, noteSize), 0o600); err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"error told to another server", func(t *testing.T, dir, shared string) func() {
			other := filepath.Join(filepath.Dir(dir), "other")
			verfOf(t, other, shared)
			onSyncfs(t, func(int) error { return unix.EIO })
			verfOf(t, other, shared)
			syncfs = unix.Syncfs
			return func() {}
		}},
		{"server killed while it asked", func(t *testing.T, dir, shared string) func() {
			// As if it had not come to writing what it was told.
			var during []byte
			note := failuresNote(t, shared)
			onSyncfs(t, func(int) (err error) {
				during, err = os.ReadFile(note)
				return err
			})
			verfOf(t, dir, shared)
			syncfs = unix.Syncfs
			if err := os.WriteFile(note, during, 0o600); err != nil {
				t.Fatal(err)
			}
			return func() {}
		}},
		{"run without failures noted", func(t *testing.T, dir, shared string) func() {
			open := socketDir(t)
			if err := os.Chmod(open, 0o777); err != nil {
				t.Fatal(err)
			}
			if a, b := verfOf(t, dir, open), verfOf(t, dir, open); a == b {
				t.Error("nothing can be noted, and the verifier is the same")
			}
			return func() {}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, shared := filepath.Join(newDir(t), "dir"), socketDir(t)
			before := verfOf(t, dir, shared)
			if again := verfOf(t, dir, shared); again != before {
				t.Fatal("nothing has happened, and the verifier is another one")
			}
			undo := tt.happen(t, dir, shared)
			after := verfOf(t, dir, shared)
			if after == before {
				t.Error("the verifier is the same")
			}
			undo()
			if again := verfOf(t, dir, shared); again != after {
				t.Error("the verifier has changed twice")
			}
		})
	}
}

// A file system that was mounted anew may have lost something; one that was mounted in a second place, too, or with
// other options, has not.
func TestVerifierMount(t *testing.T) {
	needRoot(t)
	disk := harness.NewDisk(t, 32<<20)
	dir, shared, second := filepath.Join(disk.Dir, "dir"), socketDir(t), t.TempDir()
	before := verfOf(t, dir, shared)
	if err := unix.Mount(disk.Dir, second, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	again := verfOf(t, filepath.Join(second, "dir"), shared)
	if err := errors.Join(unix.Unmount(second, 0), unix.Mount("", disk.Dir, "", unix.MS_REMOUNT|unix.MS_SYNCHRONOUS, "")); err != nil {
		t.Fatal(err)
	}
	if again != before || verfOf(t, dir, shared) != before {
		t.Error("it was mounted all the time, and the verifier is another one")
	}
	disk.Remount()
	if verfOf(t, dir, shared) == before {
		t.Error("it was mounted anew, and the verifier is the same")
	}
}

// A sync that fails while the server runs is recorded before it is answered, so a server that is killed then does not
// come back with the verifier of before.
func TestFailedSyncIsRecorded(t *testing.T) {
	syncs := watchSyncs(t)
	ts := startLocal(t, "", "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	verf := c.write(super, fh, 0, []byte("a"), wire.Unstable).Verf
	syncs.failNext()
	equal(t, "COMMIT", c.commit(super, fh).Status, wire.ErrIO)
	after := *ts.verifier.now.Load()
	b, err := os.ReadFile(filepath.Join(ts.dir, "verifier"))
	if err != nil {
		t.Fatal(err)
	}
	ts.stop()
	// What a server that is killed leaves.
	if err := os.WriteFile(filepath.Join(ts.dir, "verifier"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if v := verfOf(t, ts.dir, ts.sockets); v == verf || v != after {
		t.Errorf("verifier %x, then %x, and after a restart %x", verf, after, v)
	}
}

// A true disk that does not take what is in the page cache. What is written again when it does is on the disk.
func TestFailedDisk(t *testing.T) {
	needRoot(t)
	disk := harness.NewDisk(t, 32<<20)
	buffered := func(c *Config) { c.IO = IOBuffered }
	ts := startLocal(t, filepath.Join(disk.Dir, "dir"), "", buffered)
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	data := bytes.Repeat([]byte("weft"), 1<<18)
	undo := disk.FailWrites()
	verf := c.write(super, fh, 0, data, wire.Unstable).Verf
	if st := c.commit(super, fh).Status; st == wire.OK {
		t.Fatal("COMMIT to a disk that fails")
	}
	undo()
	again := c.write(super, fh, 0, data, wire.Unstable)
	equal(t, "WRITE", again.Status, wire.OK)
	commit := c.commit(super, fh)
	if commit.Status != wire.OK || commit.Verf == verf || commit.Verf != again.Verf {
		t.Errorf("COMMIT %v, verifiers %x, %x, %x", commit.Status, verf, again.Verf, commit.Verf)
	}
	// Nothing was lost without being told, so the kernel's answer to syncfs may give one more change.
	ts.stop()
	if verfOf(t, ts.dir, ts.sockets) == verf {
		t.Error("the verifier of before is back")
	}
	disk.Remount()
	ts = startLocal(t, ts.dir, ts.sockets, buffered)
	defer ts.stop()
	ts.dial().check(fh, 0, data)
}

// While one sync of a file fails another write is stable in vain: it is not answered as if it were.
func TestFailedSyncBesideWrite(t *testing.T) {
	begun, goOn := make(chan bool), make(chan bool)
	var fail atomic.Bool
	onSync(t, func(fd int, call func(int) error) error {
		if fail.CompareAndSwap(true, false) { // a WRITE has written before this fails, and is synced after it
			begun <- true
			<-goOn
			return unix.EIO
		}
		return call(fd)
	})
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	fail.Store(true)
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	failing := c.send(nfsCall(wire.ProcCommit, super), (&wire.CommitArgs{FH: fh}).Append(nil))
	<-begun
	written := make(chan wire.Status)
	other := ts.dial()
	go func() { written <- other.write(super, fh, 0, []byte("x"), wire.FileSync).Status }() // ends with the answer
	waittest.Until(t, "the page cache has it", f.sync.dirty.Load)
	ts.cache.put(f)
	goOn <- true
	var res wire.CommitRes
	if _, err := finish(failing, &res); err != nil || res.Status != wire.ErrIO {
		t.Errorf("COMMIT: %v, %v", res.Status, err)
	}
	equal(t, "WRITE FILE_SYNC", <-written, wire.ErrIO)
	equal(t, "and again", c.write(super, fh, 0, []byte("x"), wire.FileSync).Status, wire.OK)
}

// The kernel tells a server that is started that something could not be written while there was none.
func TestFailedDiskWithoutServer(t *testing.T) {
	needRoot(t)
	disk := harness.NewDisk(t, 32<<20)
	dir, shared := filepath.Join(disk.Dir, "dir"), socketDir(t)
	before := verfOf(t, dir, shared)
	undo := disk.FailWrites()
	if err := os.WriteFile(filepath.Join(disk.Dir, "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	after := verfOf(t, dir, shared)
	if after == before {
		t.Error("the verifier is the same")
	}
	undo()
}

// Where it cannot be recorded that something was lost nothing is written any more, by servers that are started later
// neither, until the file system is mounted anew.
func TestUnrecorded(t *testing.T) {
	syncs := watchSyncs(t)
	needRoot(t)
	disk := harness.NewDisk(t, 32<<20)
	ts := startLocal(t, filepath.Join(disk.Dir, "dir"), "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	verf := c.write(super, fh, 0, []byte("a"), wire.Unstable).Verf
	p := ts.meet(c)
	reading, writing := p.mustOpen(fh, 7, 8, false), p.mustOpen(fh, 7, 8, true)
	check := func(ts *localServer, fh wire.FileHandle) {
		t.Helper()
		c := ts.dial()
		equal(t, "WRITE", c.write(super, fh, 0, []byte("b"), wire.Unstable).Status, wire.ErrIO)
		equal(t, "WRITE", c.write(super, fh, 0, []byte("b"), wire.FileSync).Status, wire.ErrIO)
		equal(t, "COMMIT", c.commit(super, fh).Status, wire.ErrIO)
		if ts.Ready() == nil {
			t.Error("it says that it is ready")
		}
		p := ts.meet(c)
		if o, _ := p.open(fh, 7, 8, true); o != wire.ErrIO {
			t.Errorf("descriptors for writing: %v", o)
		}
		l := p.mustOpen(fh, 7, 8, false)
		p.giveBack(l)
	}
	ts.verifier.file.Close() // so that it cannot be written
	syncs.failNext()
	equal(t, "COMMIT", c.commit(super, fh).Status, wire.ErrIO)
	ids := map[uint32]bool{hear[*localio.Revoke](p).ID: true, hear[*localio.Revoke](p).ID: true}
	if !ids[reading.id] || !ids[writing.id] {
		t.Errorf("revoked: %v", ids)
	}
	p.giveBack(reading)
	p.giveBack(writing)
	check(ts, fh)
	c.check(fh, 0, []byte("a"))
	ts.stop()

	ts = startLocal(t, ts.dir, ts.sockets)
	check(ts, fh)
	other := startLocal(t, filepath.Join(disk.Dir, "other"), ts.sockets)
	check(other, other.dial().create(other.root, "f", 7, 8))
	ts.stop()
	other.stop()

	disk.Remount()
	ts = startLocal(t, ts.dir, ts.sockets)
	defer ts.stop()
	c = ts.dial()
	res := c.write(super, fh, 0, []byte("b"), wire.FileSync)
	if res.Status != wire.OK || res.Verf == verf || ts.Ready() != nil {
		t.Errorf("mounted anew: WRITE %v, verifier is the same: %v, %v", res.Status, res.Verf == verf, ts.Ready())
	}
}

// A server that is told to end syncs what was written, and nothing else.
func TestLastSync(t *testing.T) {
	syncs := watchSyncs(t)
	ts := start(t, "")
	c := ts.dial()
	var want []uint64
	for _, name := range []string{"a", "b", "c"} {
		fh := c.create(ts.root, name, 1, 1)
		c.put(fh, 0, []byte("x"))
		if name != "c" {
			want = append(want, ts.ino(name))
		} else {
			c.commit(super, fh)
		}
	}
	syncs.take()
	before := *ts.verifier.now.Load()
	syncs.failNext()
	ts.stop()
	got := syncs.take()
	if len(got) != 2 || got[0] != min(want[0], want[1]) || got[1] != max(want[0], want[1]) {
		t.Errorf("synced inodes %v, want %v", got, want)
	}
	if v := *start(t, ts.dir).verifier.now.Load(); v == before {
		t.Error("the last sync has failed, and the verifier is the same")
	}
}

// Syncs that begin after the time for them is over are left to the next server.
func TestLastSyncIsBounded(t *testing.T) {
	var last atomic.Bool
	var begun atomic.Int32
	goOn := make(chan bool)
	onSync(t, func(fd int, call func(int) error) error {
		if last.Load() {
			begun.Add(1)
			<-goOn
		}
		return call(fd)
	})
	ts := start(t, "")
	c := ts.dial()
	for i := range lastSyncs + 8 {
		c.put(c.create(ts.root, string(rune('a'+i)), 1, 1), 0, []byte("x"))
	}
	last.Store(true)
	ended := make(chan bool)
	go func() {
		ts.stop()
		close(ended)
	}()
	waittest.Until(t, "it shuts down", ts.isClosing)
	close(goOn)
	<-ended
	if n := begun.Load(); n > lastSyncs {
		t.Errorf("%d syncs have begun, of which %d wait", n, lastSyncs)
	}
}
