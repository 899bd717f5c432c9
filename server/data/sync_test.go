package data

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// onSync replaces the system calls by do until the test ends; call makes the true one.
func onSync(t *testing.T, do func(fd int, call func(int) error) error) {
	oldSync, oldData := fsync, fdatasync
	fsync = func(fd int) error { return do(fd, oldSync) }
	fdatasync = func(fd int) error { return do(fd, oldData) }
	t.Cleanup(func() { fsync, fdatasync = oldSync, oldData })
}

// syncLog knows which inodes were synced, and lets syncs fail.
type syncLog struct {
	mu   sync.Mutex
	inos []uint64
	fail int // so many
}

func watchSyncs(t *testing.T) *syncLog {
	l := new(syncLog)
	onSync(t, func(fd int, call func(int) error) error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Error(err)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.inos = append(l.inos, st.Ino)
		if l.fail > 0 {
			l.fail--
			return unix.EIO
		}
		return call(fd)
	})
	return l
}

// take returns the inodes that were synced since the last time, in numerical order.
func (l *syncLog) take() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	inos := l.inos
	l.inos = nil
	slices.Sort(inos)
	return inos
}

func (l *syncLog) failNext() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = 1
}

// ino is the inode of a file of the export.
func (ts *testServer) ino(name string) uint64 {
	ts.t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(ts.export(name), &st); err != nil {
		ts.t.Fatal(err)
	}
	return st.Ino
}

// The verifier stays while nothing is lost, also when the server is started again.
func TestVerifier(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	verf := c.write(super, fh, 0, []byte("a"), wire.Unstable).Verf
	equal(t, "COMMIT", c.commit(super, fh).Verf, verf)
	equal(t, "WRITE", c.write(super, fh, 0, []byte("b"), wire.FileSync).Verf, verf)
	other := c.create(ts.root, "g", 1, 1)
	equal(t, "WRITE of another file", ts.dial().write(super, other, 0, []byte("c"), wire.Unstable).Verf, verf)
	ts.stop()

	ts = start(t, ts.dir)
	c = ts.dial()
	commit := c.commit(super, fh)
	equal(t, "COMMIT", commit.Status, wire.OK)
	equal(t, "COMMIT", commit.Verf, verf)
	equal(t, "WRITE", c.write(super, fh, 0, []byte("b"), wire.Unstable).Verf, verf)
	if v := start(t, "").verifier.now.Load(); *v == verf {
		t.Error("two servers have the same verifier")
	}
}

// After a failed sync, by whomever, nothing of before is vouched for.
func TestFailedSync(t *testing.T) {
	syncs := watchSyncs(t)
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	other := c.create(ts.root, "g", 1, 1)
	for name, fail := range map[string]func() wire.Status{
		"COMMIT":            func() wire.Status { return c.commit(super, fh).Status },
		"WRITE DATA_SYNC":   func() wire.Status { return c.write(super, fh, 0, []byte("x"), wire.DataSync).Status },
		"WRITE FILE_SYNC":   func() wire.Status { return c.write(super, fh, 0, []byte("x"), wire.FileSync).Status },
		"SETATTR":           func() wire.Status { return c.setattr(super, fh, wire.Sattr{SetMode: true}).Status },
		"COMMIT of another": func() wire.Status { return c.commit(super, other).Status },
	} {
		verf := c.write(super, fh, 0, []byte("a"), wire.Unstable).Verf
		syncs.failNext()
		equal(t, name, fail(), wire.ErrIO)
		if commit := c.commit(super, fh); commit.Status != wire.OK || commit.Verf == verf {
			t.Errorf("%s failed: %v, verifier is the same: %v", name, commit.Status, commit.Verf == verf)
		}
	}
}

// The kernel tells only one sync that data was lost. Here the first of two COMMITs is told while the second waits: the
// second must not vouch for the writes.
func TestFailedSyncWhileAnotherWaits(t *testing.T) {
	begun, goOn := make(chan bool), make(chan bool)
	var lose atomic.Bool
	onSync(t, func(fd int, call func(int) error) error {
		if lose.CompareAndSwap(true, false) {
			begun <- true
			<-goOn
			return unix.EIO
		}
		return call(fd)
	})
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	lose.Store(true)
	verf := c.write(super, fh, 0, []byte("a"), wire.Unstable).Verf
	args := (&wire.CommitArgs{FH: fh}).Append(nil)
	one := c.send(nfsCall(wire.ProcCommit, super), args)
	<-begun
	two := c.send(nfsCall(wire.ProcCommit, super), args)
	during := c.write(super, fh, 0, []byte("b"), wire.Unstable).Verf
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	for ts.refs(f) < 3 { // until the second COMMIT has the file
	}
	ts.cache.put(f)
	goOn <- true
	var res wire.CommitRes
	if _, err := finish(one, &res); err != nil || res.Status != wire.ErrIO {
		t.Errorf("first COMMIT: %v, %v", res.Status, err)
	}
	if _, err := finish(two, &res); err != nil || res.Status != wire.OK {
		t.Fatalf("second COMMIT: %v, %v", res.Status, err)
	}
	if res.Verf == verf || res.Verf == during {
		t.Error("the second COMMIT vouches for what the first one lost")
	}
}

// A sync takes with it what somebody else has just wished for, and fails. The next one is for all attributes nevertheless:
// of a directory, fdatasync(2) need not make new names stable.
func TestFullSyncAfterAFailedOne(t *testing.T) {
	ts := start(t, "")
	f, err := ts.get(ts.root)
	if err != nil {
		t.Fatal(err)
	}
	defer ts.cache.put(f)
	var full, data atomic.Int32
	fsyncs, datasyncs := fsync, fdatasync
	t.Cleanup(func() { fsync, fdatasync = fsyncs, datasyncs })
	fsync = func(fd int) error { full.Add(1); return fsyncs(fd) }
	fdatasync = func(fd int) error { data.Add(1); return datasyncs(fd) }
	f.sync.mu.Lock()
	f.sync.begun.Add(1)
	done := make(chan error)
	go func() { done <- ts.stabilize(f) }() // ends with the sync
	for !f.sync.full.Load() {
		runtime.Gosched()
	}
	f.sync.full.Store(false)
	f.sync.mu.Unlock()
	if err := <-done; err != nil || full.Load() != 1 || data.Load() != 0 {
		t.Errorf("%v; %d calls of fsync, %d of fdatasync; want 1 and none", err, full.Load(), data.Load())
	}
}

// Those who want a file synced while a sync runs share the next one.
func TestSyncsAreShared(t *testing.T) {
	var calls atomic.Int32
	begun, goOn := make(chan bool), make(chan bool)
	onSync(t, func(fd int, call func(int) error) error {
		if calls.Add(1) == 1 {
			begun <- true
			<-goOn
		}
		return call(fd)
	})
	ts := start(t, "")
	f, err := ts.get(ts.root)
	if err != nil {
		t.Fatal(err)
	}
	defer ts.cache.put(f)
	var wg sync.WaitGroup
	wg.Go(func() { ts.sync(f, false) })
	<-begun
	var arrived sync.WaitGroup
	for range 50 {
		arrived.Add(1)
		wg.Go(func() {
			covers := f.sync.begun.Load() + 1
			arrived.Done()
			if _, err := ts.sync(f, true); err != nil {
				t.Error(err)
			}
			if f.sync.begun.Load() < covers {
				t.Error("a sync returned that began before it was asked for")
			}
		})
	}
	arrived.Wait()
	goOn <- true
	wg.Wait()
	if n := calls.Load(); n < 2 || n > 10 { // 2 unless somebody was late
		t.Errorf("%d system calls for 51 syncs", n)
	}
}

// A file with data that was never synced is synced before its descriptor is closed: the kernel may forget a failure to
// write it when nobody has it open.
func TestDirtyFileLeavesTheCache(t *testing.T) {
	syncs := watchSyncs(t)
	ts := start(t, "", limitFiles(1))
	c := ts.dial()
	a := c.create(ts.root, "a", 1, 1)
	b := c.create(ts.root, "b", 1, 1)
	verf := c.write(super, a, 0, []byte("a"), wire.Unstable).Verf
	syncs.take()
	c.getattr(b)
	if got := syncs.take(); !slices.Equal(got, []uint64{ts.ino("a")}) {
		t.Errorf("synced inodes %v, want %d", got, ts.ino("a"))
	}
	if ts.isOpen(a) {
		t.Error("it is still open")
	}
	equal(t, "verifier", c.commit(super, a).Verf, verf)

	c.put(a, 0, []byte("a"))
	syncs.failNext()
	c.getattr(b)
	if c.commit(super, a).Verf == verf {
		t.Error("data was lost and the verifier is the same")
	}
	// A clean file is closed as it is.
	syncs.take()
	c.getattr(b)
	if got := syncs.take(); len(got) != 0 {
		t.Errorf("synced inodes %v", got)
	}
}

// What changes names or attributes is synced before it is answered: the file or directory and its name.
func TestChangesAreStable(t *testing.T) {
	syncs := watchSyncs(t)
	ts := start(t, "")
	c := ts.dial()
	ino := ts.ino
	check := func(what string, want ...uint64) {
		t.Helper()
		slices.Sort(want)
		if got := syncs.take(); !slices.Equal(got, want) {
			t.Errorf("%s synced inodes %v, want %v", what, got, want)
		}
	}
	root := ino(".")
	d := c.mkdir(super, ts.root, "d", wire.Sattr{}).FH.FH
	check("MKDIR", root, ino("d"))
	for _, mode := range []wire.CreateMode{wire.Guarded, wire.Unchecked, wire.Exclusive} {
		name := fmt.Sprint("f", mode)
		c.createAs(super, ts.root, name, mode, wire.Sattr{}, wire.CreateVerf{})
		check("CREATE", root, ino(name))
		if mode != wire.Guarded { // perhaps the first one was interrupted
			c.createAs(super, ts.root, name, mode, wire.Sattr{}, wire.CreateVerf{})
			check("CREATE again", root, ino(name))
		}
	}
	fh := c.lookup(super, ts.root, "f0").FH
	c.setattr(super, fh, wire.Sattr{SetUID: true, UID: 5})
	check("SETATTR", ino("f0"))
	c.rename(super, ts.root, "f0", ts.root, "g")
	check("RENAME", root)
	c.rename(super, ts.root, "g", d, "g")
	check("RENAME to another directory", root, ino("d"))
	c.put(fh, 0, []byte("x"))
	check("WRITE")
	c.commit(super, fh)
	check("COMMIT", ino("d/g"))
	c.write(super, fh, 0, []byte("x"), wire.DataSync)
	check("WRITE DATA_SYNC", ino("d/g"))
	c.write(super, fh, 0, []byte("x"), wire.FileSync)
	check("WRITE FILE_SYNC", ino("d/g"))
	c.remove(super, d, "g")
	check("REMOVE", ino("d"))
	c.rmdir(super, ts.root, "d")
	check("RMDIR", root)
	c.names(ts.root, true, 8192, nil)
	check("READDIRPLUS")
}

// A full file system says so, at the WRITE, and is not full any more when something was removed.
func TestNoSpace(t *testing.T) {
	dir := t.TempDir()
	mountRAM(t, dir, "size=8m")
	ts := start(t, dir)
	defer ts.stop() // before the unmounting
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i)
	}
	written := uint64(0)
	for {
		res := c.write(super, fh, written, data, wire.Unstable)
		if res.Status == wire.ErrNoSpc {
			break
		}
		if res.Status != wire.OK || res.Count == 0 || written > 8<<20 {
			t.Fatalf("WRITE at %d: %v, %d bytes", written, res.Status, res.Count)
		}
		written += uint64(res.Count)
	}
	for off := uint64(0); off < written; off += uint64(len(data)) {
		c.check(fh, off, data[:min(uint64(len(data)), written-off)])
	}
	equal(t, "COMMIT", c.commit(super, fh).Status, wire.OK)
	stat := func() (res wire.FsstatRes) {
		c.do(wire.ProcFsstat, super, &ts.root, &res)
		return res
	}
	if st := stat(); st.AvailBytes != 0 || st.TotalBytes != 8<<20 {
		t.Errorf("%d bytes available of %d", st.AvailBytes, st.TotalBytes)
	}
	equal(t, "a hole takes no space", c.setattr(super, fh, wire.Sattr{SetSize: true, Size: 1 << 40}).Status, wire.OK)
	equal(t, "WRITE behind it", c.write(super, fh, 1<<39, data, wire.FileSync).Status, wire.ErrNoSpc)
	equal(t, "REMOVE", c.remove(super, ts.root, "f"), wire.OK)
	if st := stat(); st.AvailBytes < 7<<20 {
		t.Errorf("%d bytes available after REMOVE", st.AvailBytes)
	}
	c.put(c.create(ts.root, "g", 1, 1), 0, data)
}

// A file system that became read-only, as after an error of the disk, can still be read.
func TestReadOnly(t *testing.T) {
	dir := t.TempDir()
	mountRAM(t, dir, "size=8m")
	ts := start(t, dir)
	defer ts.stop()
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	c.put(fh, 0, []byte("data"))
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	ts.cache.doom(f)
	ts.cache.put(f) // closed, since a file open for writing keeps the file system writable
	lock := ts.lock
	ts.lock = os.NewFile(^uintptr(0), "closed by the test")
	lock.Close()
	ts.verifier.close()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	c.check(fh, 0, []byte("data"))
	equal(t, "WRITE", c.write(super, fh, 0, []byte("x"), wire.Unstable).Status, wire.ErrROFS)
	equal(t, "SETATTR", c.setattr(super, fh, wire.Sattr{SetSize: true}).Status, wire.ErrROFS)
	equal(t, "CREATE", c.createAs(super, ts.root, "g", wire.Guarded, wire.Sattr{}, wire.CreateVerf{}).Status, wire.ErrROFS)
	equal(t, "REMOVE", c.remove(super, ts.root, "f"), wire.ErrROFS)
	c.names(ts.root, true, 8192, nil)
}
