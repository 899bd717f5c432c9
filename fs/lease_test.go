package fs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// fakeKernel records what it is told.
type fakeKernel struct {
	attrs, pages func(node uint64)
	name         func(at place)
	unknown      atomic.Bool // it knows no inode
	absent       atomic.Bool // it does not expire that there is no such name

	mu       sync.Mutex
	last     int32
	backings map[int32]bool // that have begun and not ended
}

func (k *fakeKernel) forgetAttrs(node uint64) bool { k.attrs(node); return !k.unknown.Load() }
func (k *fakeKernel) forgetPages(node uint64)      { k.pages(node) }
func (k *fakeKernel) expireName(at place)          { k.name(at) }
func (k *fakeKernel) expiresNames(there bool) bool { return there || !k.absent.Load() }

// beginBacking says no unless backings has been made.
func (k *fakeKernel) beginBacking(int) (int32, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.backings == nil {
		return 0, syscall.EOPNOTSUPP
	}
	k.last++
	k.backings[k.last] = true
	return k.last, nil
}

func (k *fakeKernel) endBacking(id int32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.backings[id] {
		panic(fmt.Sprintf("backing %d ends a second time", id))
	}
	delete(k.backings, id)
}

// listen makes a fakeKernel the one that a rig tells.
func (r *rig) listen() *fakeKernel {
	k := &fakeKernel{attrs: func(uint64) {}, pages: func(uint64) {}, name: func(place) {}}
	told := kernel(k)
	r.kernel.Store(&told)
	return k
}

// Before a change is answered the kernels of other mounts have been told, and the own one has not.
func TestRecallTells(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fh := a.create("f")
	a.closeFile(id, fh)
	waittest.Until(t, "the file is closed", func() bool { return a.held() == 0 })
	var told []string
	k := b.listen()
	k.attrs = func(node uint64) { told = append(told, fmt.Sprintf("attrs %d", node)) }
	k.pages = func(node uint64) { told = append(told, fmt.Sprintf("pages %d", node)) }
	k.name = func(at place) { told = append(told, fmt.Sprintf("names of %d", at.parent)) }
	a.listen().attrs = func(node uint64) { t.Errorf("the changing mount's kernel was told to forget node %d", node) }
	h := header(layout.RootID)
	var fb uint64
	for _, c := range []struct {
		name   string
		change func()
		want   string
	}{
		{"chmod", func() {
			_, status := a.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0600})
			a.want(status, 0, "chmod")
		}, "attrs 2"},
		{"setxattr", func() {
			a.want(a.raw.SetXAttr(nil, &fuse.SetXAttrIn{InHeader: header(id)}, "user.a", []byte("b")), 0, "setxattr")
		}, "attrs 2"},
		{"mkdir", func() {
			a.want(a.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: h, Mode: 0755}, "d", &fuse.EntryOut{}), 0, "mkdir")
		}, "attrs 1, names of 1"},
		{"link", func() {
			a.want(a.raw.Link(nil, &fuse.LinkIn{InHeader: h, Oldnodeid: uint64(id)}, "l", &fuse.EntryOut{}), 0, "link")
		}, "attrs 2, attrs 1, names of 1"},
		{"unlink", func() { a.want(a.raw.Unlink(nil, &h, "l"), 0, "unlink") }, "attrs 1, attrs 2, names of 1"},
		{"truncate", func() { a.truncate(id, 10) }, "attrs 2"},
		{"truncate of an open file", func() {
			fb = b.open(id, unix.O_RDONLY)
			a.truncate(id, 10)
		}, "attrs 2, pages 2"},
		{"first write", func() {
			fa := a.open(id, unix.O_RDWR)
			a.write(id, 0, []byte("x"))
			a.closeFile(id, fa)
		}, "attrs 2, pages 2"},
	} {
		// So that there is something to recall.
		b.calm()
		var out fuse.EntryOut
		for _, name := range []string{"f", "d", "l"} {
			b.raw.Lookup(nil, &h, name, &out)
		}
		b.stat(layout.RootID)
		b.stat(id)
		b.keepOn()
		told = nil
		c.change()
		if got := strings.Join(slices.Compact(told), ", "); got != c.want {
			t.Errorf("%s: told %q, want %q", c.name, got, c.want)
		}
	}
	b.release(fb)
}

func TestExpiresAbsent(t *testing.T) {
	for release, want := range map[string]bool{
		"6.2.0": true, "6.18.44-fc-v657": true, "6.19.0": false, "6.19.14-1-default": false, "7.0.0-rc1": false, "7.0.3": false, "7.1.0": true,
	} {
		if got := expiresAbsent(release); got != want {
			t.Errorf("%s: %v, want %v", release, got, want)
		}
	}
}

// What may be kept is said only in answers that the kernel guards.
func TestValidity(t *testing.T) {
	s := newService(1, 1<<20)
	r := newRig(t, s)
	k := r.listen()
	id, fh := r.create("f")
	h := header(layout.RootID)
	var entry fuse.EntryOut
	r.want(r.raw.Lookup(nil, &h, "f", &entry), 0, "lookup")
	if entry.EntryTimeout() != mostKept || entry.AttrTimeout() != 0 {
		t.Errorf("lookup: name for %v, attributes for %v", entry.EntryTimeout(), entry.AttrTimeout())
	}
	r.want(r.raw.Lookup(nil, &h, "none", &entry), 0, "lookup of nothing")
	if entry.NodeId != 0 || entry.EntryTimeout() != mostKept {
		t.Errorf("lookup of nothing: node %d for %v", entry.NodeId, entry.EntryTimeout())
	}
	k.absent.Store(true)
	r.want(r.raw.Lookup(nil, &h, "none", &entry), syscall.ENOENT, "lookup of nothing that the kernel would not expire")
	r.want(r.raw.Lookup(nil, &h, "f", &entry), 0, "lookup")
	if entry.EntryTimeout() != mostKept {
		t.Errorf("lookup: name for %v", entry.EntryTimeout())
	}
	var attr fuse.AttrOut
	r.want(r.raw.SetAttr(nil, &fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{InHeader: header(id), Valid: fuse.FATTR_MODE, Mode: 0600}}, &attr), 0, "chmod")
	if attr.Timeout() != 0 {
		t.Errorf("chmod: attributes for %v", attr.Timeout())
	}
	get := func() time.Duration {
		r.want(r.raw.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(id)}, &attr), 0, "getattr")
		return attr.Timeout()
	}
	if got := get(); got != s.lease {
		t.Errorf("getattr: attributes for %v", got)
	}
	r.write(id, 0, []byte("x"))
	if got := get(); got != 0 {
		t.Errorf("getattr of a file with writes that are not known to the service: for %v", got)
	}
	r.want(r.fsync(id, fh), 0, "fsync")
	if got := get(); got != s.lease {
		t.Errorf("getattr after fsync: attributes for %v", got)
	}
	r.closeFile(id, fh)
	r.kernel.Store(nil) // as if it could not be told
	r.want(r.raw.Lookup(nil, &h, "none", &entry), syscall.ENOENT, "lookup of nothing, unkept")
}

// The time of an append for which the service finds the place is the same for all, before and after it is durable.
func TestAppendTime(t *testing.T) {
	s := newService(1, 16<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fh := a.create("f")
	other := b.open(id, unix.O_WRONLY|unix.O_APPEND)
	b.write(id, 0, []byte("b")) // so neither of them has the file for itself
	if got := b.fsync(id, other); got != fuse.OK {
		t.Fatal(got)
	}
	for range 20 {
		if n, status := a.tryWrite(id, 0, []byte("a"), unix.O_APPEND); n != 1 || status != fuse.OK {
			t.Fatalf("append: %d, %v", n, status)
		}
		seen := b.stat(id)
		if mine := a.stat(id); mine.Mtime != seen.Mtime || mine.Mtimensec != seen.Mtimensec {
			t.Fatalf("made at %d.%09d, the other mount says %d.%09d", mine.Mtime, mine.Mtimensec, seen.Mtime, seen.Mtimensec)
		}
		if got := a.fsync(id, fh); got != fuse.OK {
			t.Fatal(got)
		}
		for _, r := range []*rig{a, b} {
			if now := r.stat(id); now.Mtime != seen.Mtime || now.Mtimensec != seen.Mtimensec {
				t.Fatalf("durable with %d.%09d, was %d.%09d", now.Mtime, now.Mtimensec, seen.Mtime, seen.Mtimensec)
			}
		}
	}
	if n := a.m.called("Reserve"); n != 20 {
		t.Errorf("%d reservations for 20 appends", n)
	}
	a.closeFile(id, fh)
	b.closeFile(id, other)
}

// Records that several mounts append at once are whole, none is lost, and a lone writer needs no call for each.
func TestAppendOfMany(t *testing.T) {
	s := newService(3, 16<<10)
	mounts := []*rig{newRig(t, s), newRig(t, s)}
	id, fh := mounts[0].create("f")
	handles := []uint64{fh, mounts[1].open(id, unix.O_WRONLY|unix.O_APPEND)}
	const size, each, writers = 1024, 60, 3
	record := func(k, w, n int) []byte {
		return append(bytes.Repeat(fmt.Appendf(nil, "%d.%d.%03d|", k, w, n), size/8)[:size-1], '\n')
	}
	want := map[string]bool{}
	for n := range each {
		b := record(0, 9, n)
		want[string(b)] = true
		if n, status := mounts[0].tryWrite(id, 0, b, unix.O_APPEND); n != size || status != fuse.OK {
			t.Fatalf("append: %d, %v", n, status)
		}
	}
	if n := mounts[0].m.called("Reserve"); n > 0 {
		t.Errorf("%d reservations for %d appends of the only writer", n, each)
	}
	var wg sync.WaitGroup
	for k, r := range mounts {
		for w := range writers {
			for n := range each {
				want[string(record(k, w, n))] = true
			}
			wg.Go(func() {
				for n := range each {
					if n, status := r.tryWrite(id, 0, record(k, w, n), unix.O_APPEND); n != size || status != fuse.OK {
						t.Errorf("append: %d, %v", n, status)
					}
				}
			})
		}
	}
	wg.Wait()
	for k, r := range mounts {
		r.wantSize(id, int64(len(want)*size))
		got := r.read(id, 0, len(want)*size)
		for at := 0; at < len(got); at += size {
			if !want[string(got[at:at+size])] {
				t.Fatalf("mount %d: the record at %d is torn: %q...", k, at, got[at:at+32])
			}
		}
		seen := map[string]bool{}
		for at := 0; at < len(got); at += size {
			seen[string(got[at:at+size])] = true
		}
		if len(seen) != len(want) {
			t.Errorf("mount %d: %d records, want %d", k, len(seen), len(want))
		}
	}
	for k, r := range mounts {
		r.closeFile(id, handles[k])
	}
}

// A recall waits for pages to be dropped, but not if that waits for a request which the service answers only afterwards.
func TestRecallOfPages(t *testing.T) {
	s := newService(1, 1<<20)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	a.write(id, 0, pattern(1, 4096))
	fb := b.open(id, unix.O_RDWR)
	b.wantRead(id, 0, 4096, pattern(1, 4096))
	k := b.listen()
	// The pages are dropped once a dirty one has been written, for which a layout is needed.
	answered, cut := make(chan struct{}), make(chan struct{})
	b.m.setHook(func(ctx context.Context, call string) error {
		if call == "Layout" {
			<-answered
		}
		return nil
	})
	k.pages = func(uint64) {
		defer close(cut)
		if _, status := b.tryWrite(id, 0, []byte("dirty"), 0); status != fuse.OK {
			t.Errorf("write: %v", status)
		}
	}
	a.truncate(id, 100)
	close(answered)
	<-cut
	a.wantRead(id, 0, 5, []byte("dirty"))
	// Without that it does wait.
	b.m.setHook(func(context.Context, string) error { return nil })
	var dropped atomic.Bool
	k.pages = func(uint64) {
		time.Sleep(2 * stuckPatience)
		dropped.Store(true)
	}
	a.truncate(id, 50)
	if !dropped.Load() {
		t.Error("the recall was answered before the pages were dropped")
	}
	a.closeFile(id, fa)
	b.closeFile(id, fb)
}

// With a session goes what was not stable. That is said once to each who had the file open; then all is well again.
func TestSessionLost(t *testing.T) {
	s := newService(2, 64<<10)
	r := newRig(t, s)
	for _, f := range r.faults {
		f.SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk})
	}
	id, fh := r.create("f")
	other := r.open(id, unix.O_RDWR)
	clean, fc := r.create("clean")
	r.write(id, 0, pattern(1, 100_000))
	if r.plane.Retained() == 0 {
		t.Fatal("nothing is kept")
	}
	r.OnLost(0)
	reports := r.m.called("LayoutCommit provisional")
	r.OnReset(t.Context(), 0, true)
	r.OnSizeQuery(t.Context(), []layout.FileID{id})
	if r.m.called("LayoutCommit provisional") > reports {
		t.Error("the size of lost data was reported")
	}
	waittest.Until(t, "unstable data is dropped", func() bool { return r.plane.Retained() == 0 })
	for _, f := range r.faults {
		f.SetRules()
	}
	r.want(r.fsync(id, fh), syscall.EIO, "fsync")
	r.want(r.fsync(id, fh), 0, "second fsync")
	r.want(r.flush(id, other), syscall.EIO, "close")
	r.want(r.fsync(clean, fc), 0, "fsync of a file without unstable data")
	r.write(id, 0, pattern(2, 100_000))
	r.want(r.fsync(id, fh), 0, "fsync of new data")
	r.wantRead(id, 0, 200_000, pattern(2, 100_000))
	r.release(other)
	r.closeFile(id, fh)
	r.closeFile(clean, fc)
}

// While the lease may have run out, nothing is taken for granted.
func TestNotAlive(t *testing.T) {
	s := newService(1, 1<<20)
	r := newRig(t, s)
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 1000))
	r.wantRead(id, 0, 500, pattern(1, 1000)[:500])
	s.mu.Lock()
	r.m.dead = true
	s.mu.Unlock()
	asked := r.m.called("GetAttr")
	r.wantRead(id, 0, 500, pattern(1, 1000)[:500])
	if r.m.called("GetAttr") == asked {
		t.Error("a read relied on a size that may be out of date")
	}
	r.closeFile(id, fh)
}

// startTwo serves two mounts of one volume. The second is what it returns beside the first.
func startTwo(t *testing.T, env ...string) (*testMount, string) {
	t.Helper()
	needMount(t)
	dir := publicDir(t)
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	m := startMount(t, append(env, serveEnv+"_SECOND="+dir)...)
	return m, dir
}

func write(t *testing.T, path, data string) {
	t.Helper()
	ok(t, os.WriteFile(path, []byte(data), 0644))
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s: %q, %v, want %q", path, got, err, want)
	}
}

// After a change of one mount has returned, the other sees it, though its kernel had kept everything.
func TestMountCoherence(t *testing.T) { eachTransport(t, testMountCoherence) }

func testMountCoherence(t *testing.T) {
	for _, cache := range []string{"", "1"} {
		t.Run("cache="+cache, func(t *testing.T) {
			m, b := startTwo(t, serveEnv+"_CACHE="+cache)
			a := m.dir
			ok(t, os.Mkdir(a+"/d", 0755))
			write(t, a+"/d/f", "one")
			stat := func(path string) os.FileInfo {
				t.Helper()
				return must[os.FileInfo](t)(os.Lstat(path))
			}
			// warm makes b's kernel keep what it may, and proves that it does. A file that a has written to is a's alone
			// until it has given the layout back, soon after its data is stable.
			warm := func() {
				t.Helper()
				waittest.Until(t, "nothing is asked for", func() bool {
					m.command("asked 1")
					for _, name := range []string{"none", "new", "g", "f"} {
						os.Lstat(b + "/d/" + name)
					}
					return m.command("asked 1") == ""
				})
			}
			for _, c := range []struct {
				name   string
				change func()
				check  func() bool
			}{
				{"chmod", func() { ok(t, os.Chmod(a+"/d/f", 0600)) }, func() bool { return stat(b+"/d/f").Mode() == 0600 }},
				{"write", func() { write(t, a+"/d/f", "longer") }, func() bool { return stat(b+"/d/f").Size() == 6 }},
				{"truncate", func() { ok(t, os.Truncate(a+"/d/f", 2)) }, func() bool { return stat(b+"/d/f").Size() == 2 }},
				{"create", func() { write(t, a+"/d/new", "") }, func() bool { return stat(b+"/d/new") != nil }},
				{"unlink", func() { ok(t, os.Remove(a+"/d/new")) }, func() bool { _, err := os.Lstat(b + "/d/new"); return os.IsNotExist(err) }},
				{"rename", func() { ok(t, os.Rename(a+"/d/f", a+"/d/new")) }, func() bool {
					_, err := os.Lstat(b + "/d/f")
					return os.IsNotExist(err) && stat(b+"/d/new").Size() == 2
				}},
				{"rename back", func() { ok(t, os.Rename(a+"/d/new", a+"/d/f")) }, func() bool {
					_, err := os.Lstat(b + "/d/new")
					return os.IsNotExist(err) && stat(b+"/d/f").Size() == 2
				}},
				{"rename over", func() {
					write(t, a+"/d/g", "other")
					ok(t, os.Rename(a+"/d/g", a+"/d/f"))
				}, func() bool { return stat(b+"/d/f").Size() == 5 }},
				{"mkdir", func() { ok(t, os.Mkdir(a+"/d/new", 0755)) }, func() bool {
					entries := must[[]os.DirEntry](t)(os.ReadDir(b + "/d"))
					return len(entries) == 2 && stat(b+"/d").Sys().(*syscall.Stat_t).Nlink == 3
				}},
				{"rmdir", func() { ok(t, os.Remove(a+"/d/new")) }, func() bool {
					return len(must[[]os.DirEntry](t)(os.ReadDir(b+"/d"))) == 1 && stat(b+"/d").Sys().(*syscall.Stat_t).Nlink == 2
				}},
				{"contents", func() { write(t, a+"/d/f", "OTHER") }, func() bool {
					got, err := os.ReadFile(b + "/d/f")
					return err == nil && string(got) == "OTHER"
				}},
			} {
				warm()
				c.change()
				if !c.check() {
					t.Errorf("%s: not seen", c.name)
				}
			}
			// A rename takes the entry to another directory, whose lease is another.
			ok(t, os.Mkdir(a+"/e", 0755))
			warm()
			ok(t, os.Rename(b+"/d/f", b+"/e/f"))
			ok(t, os.Rename(a+"/e/f", a+"/d/f"))
			if _, err := os.Lstat(b + "/e/f"); !os.IsNotExist(err) {
				t.Errorf("a file that was moved and moved away is still there: %v", err)
			}
			// A file that both have open.
			fa := must[*os.File](t)(os.OpenFile(a+"/d/f", os.O_RDWR, 0))
			defer fa.Close()
			fb := must[*os.File](t)(os.Open(b + "/d/f"))
			defer fb.Close()
			buf := make([]byte, 100)
			for n := range 20 {
				want := fmt.Sprintf("%05d", n)
				must[int](t)(fa.WriteAt([]byte(want), 0))
				if got, _ := fb.ReadAt(buf, 0); string(buf[:got]) != want {
					t.Fatalf("write %d: the other mount reads %q", n, buf[:got])
				}
			}
		})
	}
}

// Pages that are mapped are those of when the file was opened, or newer.
func TestMountMapped(t *testing.T) { eachTransport(t, testMountMapped) }

func testMountMapped(t *testing.T) {
	m, b := startTwo(t)
	old, young := strings.Repeat("a", 8192), strings.Repeat("b", 8192)
	write(t, m.dir+"/f", old)
	mapped := func() string {
		f := must[*os.File](t)(os.Open(b + "/f"))
		defer f.Close()
		p := must[[]byte](t)(unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ, unix.MAP_SHARED))
		defer unix.Munmap(p)
		return string(p)
	}
	if mapped() != old {
		t.Error("the mapping has other data")
	}
	f := must[*os.File](t)(os.Open(b + "/f"))
	defer f.Close()
	p := must[[]byte](t)(unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ, unix.MAP_SHARED))
	defer unix.Munmap(p)
	if string(p) != old {
		t.Error("the mapping has other data")
	}
	write(t, m.dir+"/f", young) // truncates, which is recalled
	if string(p) != young {
		t.Error("a mapping has old data after a recall")
	}
	if mapped() != young {
		t.Error("a new mapping has old data")
	}
	// Dirty pages of a mapping stand in nobody's way.
	g := must[*os.File](t)(os.OpenFile(b+"/f", os.O_RDWR, 0))
	defer g.Close()
	q := must[[]byte](t)(unix.Mmap(int(g.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))
	defer unix.Munmap(q)
	for n := range 10 {
		q[100] = byte('0' + n)
		began := time.Now()
		ok(t, os.Truncate(m.dir+"/f", 8192-int64(n)))
		if d := time.Since(began); d > 5*time.Second { // a busy machine may take one
			t.Errorf("a truncation waited %v for dirty pages of another mount", d)
		}
	}
}

// With cache=lease what was read stays, also from one open to the next, until somebody writes.
func TestMountPages(t *testing.T) { eachTransport(t, testMountPages) }

func testMountPages(t *testing.T) {
	m, b := startTwo(t, serveEnv+"_CACHE=1")
	data := strings.Repeat("x", 100_000)
	write(t, m.dir+"/f", data)
	// The writer's mount gives its layout back soon after the close; until then nobody has a lease.
	waittest.Until(t, "the file is read from memory", func() bool {
		wantFile(t, b+"/f", data)
		wantFile(t, b+"/f", data)
		m.command("asked 1")
		wantFile(t, b+"/f", data)
		return !strings.Contains(m.command("asked 1"), "Layout")
	})
	f := must[*os.File](t)(os.OpenFile(m.dir+"/f", os.O_WRONLY, 0))
	must[int](t)(f.WriteAt([]byte("y"), 50_000))
	wantFile(t, b+"/f", data[:50_000]+"y"+data[50_001:])
	ok(t, f.Close())
	wantFile(t, b+"/f", data[:50_000]+"y"+data[50_001:])
	// A direct writer beside a cached reader, on one mount.
	rd := must[*os.File](t)(os.Open(b + "/f"))
	defer rd.Close()
	w := must[*os.File](t)(os.OpenFile(b+"/f", os.O_WRONLY|os.O_APPEND, 0))
	defer w.Close()
	buf := make([]byte, 10)
	for n := range 10 {
		must[int](t)(w.WriteString(fmt.Sprint(n)))
		if _, err := rd.ReadAt(buf[:n+1], 100_000); err != nil || string(buf[:n+1]) != "0123456789"[:n+1] {
			t.Fatalf("after append %d: %q, %v", n, buf[:n+1], err)
		}
	}
}

// Two mounts that change one directory never wait long for one another, with a single thread for Go code.
func TestMountStorm(t *testing.T) { eachTransport(t, testMountStorm) }

func testMountStorm(t *testing.T) {
	m, b := startTwo(t, "GOMAXPROCS=1")
	const duration = 4 * time.Second
	dirs := []string{m.dir, b}
	ok(t, os.MkdirAll(m.dir+"/d/e", 0755))
	var longest, machine, operations atomic.Int64
	note := func(most *atomic.Int64, began time.Time) {
		took := int64(time.Since(began))
		for old := most.Load(); took > old && !most.CompareAndSwap(old, took); old = most.Load() {
		}
	}
	var wg sync.WaitGroup
	end := time.Now().Add(duration)
	wg.Go(func() { // how long other things take on a machine that is busy
		for time.Now().Before(end) {
			began := time.Now()
			time.Sleep(time.Millisecond)
			note(&machine, began)
		}
	})
	for k, dir := range dirs {
		for w := range 3 {
			wg.Go(func() {
				path := func(n int) string { return fmt.Sprintf("%s/d/%d-%d-%d", dir, k, w, n%10) }
				for n := 0; time.Now().Before(end); n++ {
					for _, op := range []func() error{
						func() error { return os.WriteFile(path(n), []byte("data"), 0644) },
						func() error { _, err := os.Stat(path(n)); return err },
						func() error { _, err := os.ReadDir(dir + "/d"); return err },
						func() error { return os.Rename(path(n), path(n)+"r") },
						func() error { return os.Rename(path(n)+"r", dir+"/d/e/"+filepath.Base(path(n))) },
						func() error { return os.Mkdir(path(n), 0755) },
						func() error { return os.Remove(path(n)) },
						func() error { return os.Remove(dir + "/d/e/" + filepath.Base(path(n))) },
					} {
						began := time.Now()
						err := op()
						note(&longest, began)
						if err != nil {
							t.Errorf("mount %d: %v", k, err)
							return
						}
						operations.Add(1)
					}
				}
			})
		}
	}
	wg.Wait()
	took, sleep := time.Duration(longest.Load()), time.Duration(machine.Load())
	t.Logf("%d operations in %v, the longest took %v, a sleep of a millisecond %v", operations.Load(), duration, took, sleep)
	// A recall waits a second for a thread that the machine does not let run. Without turning back what stands in the way
	// it would take 5 s.
	if took > 3*time.Second+10*sleep {
		t.Errorf("an operation took %v", took)
	}
	for _, dir := range dirs {
		if left := must[[]os.DirEntry](t)(os.ReadDir(dir + "/d")); len(left) != 1 {
			t.Errorf("%d names are left", len(left))
		}
	}
}

// A process keeps its working directory, and programs that watch a directory hear of changes through their mount.
func TestMountWatch(t *testing.T) { eachTransport(t, testMountWatch) }

func testMountWatch(t *testing.T) {
	m, b := startTwo(t)
	ok(t, os.MkdirAll(m.dir+"/d/e", 0755))
	watch := must[int](t)(unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK))
	defer unix.Close(watch)
	must[int](t)(unix.InotifyAddWatch(watch, m.dir+"/d", unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVED_FROM))
	write(t, m.dir+"/d/f", "x")
	ok(t, os.Rename(m.dir+"/d/f", m.dir+"/g"))
	buf := make([]byte, 4096)
	n := must[int](t)(unix.Read(watch, buf))
	if got := buf[:n]; bytes.Count(got, []byte("f\x00")) != 2 {
		t.Errorf("events: %q", got)
	}
	cmd := exec.Command("/bin/sh", "-c", "read x; /bin/pwd && ls .")
	cmd.Dir = b + "/d/e"
	in := must[interface {
		Write([]byte) (int, error)
		Close() error
	}](t)(cmd.StdinPipe())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	ok(t, cmd.Start())
	for n := range 5 {
		write(t, fmt.Sprintf("%s/d/e/%d", m.dir, n), "")
		os.Stat(b + "/d/e")
	}
	must[int](t)(in.Write([]byte("\n")))
	ok(t, in.Close())
	if err := cmd.Wait(); err != nil || out.String() != b+"/d/e\n0\n1\n2\n3\n4\n" {
		t.Errorf("in a directory that changed: %v, %q", err, out.String())
	}
}

// File systems that are mounted inside stay, whoever changes names around them.
func TestMountInside(t *testing.T) { eachTransport(t, testMountInside) }

func testMountInside(t *testing.T) {
	m, b := startTwo(t)
	ok(t, os.MkdirAll(m.dir+"/d/sub", 0755))
	ok(t, os.MkdirAll(m.dir+"/e", 0755))
	ok(t, unix.Mount("none", b+"/d/sub", "tmpfs", 0, ""))
	t.Cleanup(func() { unix.Unmount(b+"/d/sub", unix.MNT_DETACH) })
	write(t, b+"/d/sub/inside", "x")
	for n := range 3 {
		name := fmt.Sprintf("/d/%d", n)
		os.Stat(b + name)
		write(t, m.dir+name, "y")
		wantFile(t, b+name, "y")
		ok(t, os.Remove(m.dir+name))
		if _, err := os.Stat(b + name); !os.IsNotExist(err) {
			t.Errorf("a removed file: %v", err)
		}
		write(t, b+name, "z")
		ok(t, os.Rename(b+name, b+"/e/moved"))
		wantFile(t, m.dir+"/e/moved", "z")
		wantFile(t, b+"/d/sub/inside", "x")
	}
	wantFile(t, b+"/d/sub/inside", "x")
	ok(t, unix.Unmount(b+"/d/sub", 0))
}

// How many calls of the service operations need. The table of the README comes from here.
func TestMountCalls(t *testing.T) { eachTransport(t, testMountCalls) }

func testMountCalls(t *testing.T) {
	m := startMount(t)
	dir := m.dir
	ok(t, os.Mkdir(dir+"/d", 0755))
	for n := range 1000 {
		write(t, fmt.Sprintf("%s/d/%d", dir, n), "data")
	}
	write(t, dir+"/f", "data")
	write(t, dir+"/g", "data")
	write(t, dir+"/h", "data")
	os.Stat(dir + "/f")
	wantFile(t, dir+"/f", "data")
	settle := func() {
		waittest.Until(t, "what was written is stable and given back", func() bool { return m.command("held") == "0" })
	}
	for _, c := range []struct {
		name string
		want int
		run  func()
	}{
		{"stat of a known file", 0, func() { must[os.FileInfo](t)(os.Stat(dir + "/f")) }},
		{"stat of a name known not to exist", 0, func() { os.Stat(dir + "/none") }},
		{"open, read, close of a known file", 2, func() { wantFile(t, dir+"/f", "data") }},
		{"create, write, close of a new name", 3, func() { write(t, dir+"/new", "data") }},
		{"ls -l of 1,000 files", 7, func() {
			for _, e := range must[[]os.DirEntry](t)(os.ReadDir(dir + "/d")) {
				must[os.FileInfo](t)(e.Info())
			}
		}},
		{"ls -l again", 7, func() {
			for _, e := range must[[]os.DirEntry](t)(os.ReadDir(dir + "/d")) {
				must[os.FileInfo](t)(e.Info())
			}
		}},
		{"rename to a new name", 2, func() { ok(t, os.Rename(dir+"/g", dir+"/i")) }},
		{"unlink", 1, func() { ok(t, os.Remove(dir+"/h")) }},
		{"chmod", 1, func() { ok(t, os.Chmod(dir+"/f", 0600)) }},
	} {
		if c.name == "stat of a name known not to exist" {
			os.Stat(dir + "/none")
		}
		settle()
		m.command("calls")
		c.run()
		settle()
		got := m.command("calls")
		sum := 0
		for _, call := range strings.Fields(got) {
			name, n, _ := strings.Cut(call, "=")
			if name != "LayoutCommit-atimes" { // of several operations, when it is time for it
				sum += must[int](t)(strconv.Atoi(n))
			}
		}
		t.Logf("%-36s %2d %s", c.name, sum, got)
		if sum != c.want {
			t.Errorf("%s: %d calls, want %d: %s", c.name, sum, c.want, got)
		}
	}
}

// What tar(1) does with a file: it writes it, sets its times, and closes it. The size is told when the service asks, as is all of a new file.
func TestCloseAfterTimes(t *testing.T) {
	r := newRig(t, newService(1, 64<<10))
	id, fh := r.create("f")
	reports := func() int { return r.m.called("LayoutCommit provisional") }
	steps := []struct {
		what string
		do   func()
		want int
	}{
		{"written and closed", func() { r.write(id, 0, pattern(1, 1000)); r.flush(id, fh) }, 0},
		{"written, times set, closed", func() {
			r.write(id, 1000, pattern(2, 1000))
			if _, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME, Mtime: 5}); !status.Ok() {
				t.Fatal(status)
			}
			if status := r.flush(id, fh); !status.Ok() {
				t.Fatal(status)
			}
		}, 0},
		{"asked", func() { r.OnSizeQuery(t.Context(), []layout.FileID{id}) }, 1},
		{"written again", func() { r.write(id, 2000, pattern(3, 1000)); r.flush(id, fh) }, 1},
	}
	for _, step := range steps {
		before := reports()
		step.do()
		if n := reports() - before; n != step.want {
			t.Errorf("%s: %d reports, want %d", step.what, n, step.want)
		}
	}
	r.wantSize(id, 3000)
}

// The kernel keeps the attributes of a file that it makes for a moment. A recall that comes before it has made its inode waits until it has.
func TestNewborn(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	k := a.listen()
	var told atomic.Int32
	k.attrs = func(uint64) { told.Add(1) }
	k.unknown.Store(true)
	var out fuse.CreateOut
	in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_RDWR | unix.O_CREAT, Mode: unix.S_IFREG | 0644}
	a.want(a.raw.Create(nil, in, "f", &out), 0, "create")
	if keep := out.AttrTimeout(); keep <= 0 || keep > newbornKeep {
		t.Errorf("the kernel may keep the attributes for %v", keep)
	}
	id := layout.FileID(out.NodeId)
	chmod := func() chan struct{} {
		done := make(chan struct{})
		go func() { // ends with the answer
			defer close(done)
			_, status := b.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0600})
			b.want(status, 0, "chmod")
		}()
		return done
	}
	changed := chmod()
	waittest.Until(t, "the kernel is told several times", func() bool { return told.Load() > 3 })
	select {
	case <-changed:
		t.Error("changed before the kernel has forgotten the attributes")
	default:
	}
	k.unknown.Store(false)
	<-changed

	// That the file is closed shows that the kernel has it; what it does not know then it has forgotten.
	k.unknown.Store(true)
	a.stat(id)
	a.closeFile(id, out.Fh)
	told.Store(0)
	a.stat(id)
	<-chmod()
	if n := told.Load(); n > 1 {
		t.Errorf("the kernel was told %d times to forget an inode that it knows no more", n)
	}
}
