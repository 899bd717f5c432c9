package fs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// What the kernel would send, as short calls that fail the test unless the status is the wanted one.

const testPID = 4242

func header(id layout.FileID) fuse.InHeader {
	return fuse.InHeader{NodeId: uint64(id), Caller: fuse.Caller{Owner: fuse.Owner{Uid: 1000, Gid: 1000}, Pid: testPID}}
}

func (r *rig) want(got fuse.Status, want syscall.Errno, format string, args ...any) {
	r.t.Helper()
	if got != fuse.Status(want) {
		r.t.Fatalf("%s: %v, want %v", fmt.Sprintf(format, args...), got, fuse.Status(want))
	}
}

func (r *rig) create(name string) (id layout.FileID, fh uint64) {
	r.t.Helper()
	in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_RDWR | unix.O_CREAT, Mode: unix.S_IFREG | 0644}
	var out fuse.CreateOut
	r.want(r.raw.Create(nil, in, name, &out), 0, "create %s", name)
	if want := uint32(fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES); out.OpenFlags != want {
		r.t.Fatalf("create %s: open flags %#x, want %#x", name, out.OpenFlags, want)
	}
	return layout.FileID(out.NodeId), out.Fh
}

func (r *rig) open(id layout.FileID, flags uint32) (fh uint64) {
	r.t.Helper()
	var out fuse.OpenOut
	r.want(r.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: flags}, &out), 0, "open %d", id)
	return out.Fh
}

func (r *rig) tryWrite(id layout.FileID, off int64, data []byte, flags uint32) (int, fuse.Status) {
	n, status := r.raw.Write(nil, &fuse.WriteIn{InHeader: header(id), Offset: uint64(off), Flags: flags}, data)
	return int(n), status
}

func (r *rig) write(id layout.FileID, off int64, data []byte) {
	r.t.Helper()
	n, status := r.tryWrite(id, off, data, unix.O_RDWR)
	r.want(status, 0, "write of %d bytes at %d", len(data), off)
	if n != len(data) {
		r.t.Fatalf("write of %d bytes at %d: %d written", len(data), off, n)
	}
}

func (r *rig) tryRead(id layout.FileID, off int64, n int) ([]byte, fuse.Status) {
	buf := bytes.Repeat([]byte{0xee}, n)
	result, status := r.raw.Read(nil, &fuse.ReadIn{InHeader: header(id), Offset: uint64(off)}, buf)
	if status != fuse.OK {
		return nil, status
	}
	got, _ := result.Bytes(nil)
	got = slices.Clone(got)
	result.Done()
	return got, fuse.OK
}

func (r *rig) read(id layout.FileID, off int64, n int) []byte {
	r.t.Helper()
	got, status := r.tryRead(id, off, n)
	r.want(status, 0, "read of %d bytes at %d", n, off)
	return got
}

func (r *rig) wantRead(id layout.FileID, off int64, n int, want []byte) {
	r.t.Helper()
	if got := r.read(id, off, n); !bytes.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		r.t.Fatalf("read of %d bytes at %d: %d bytes, want %d; they differ at %d", n, off, len(got), len(want), at)
	}
}

func (r *rig) flush(id layout.FileID, fh uint64) fuse.Status {
	return r.raw.Flush(nil, &fuse.FlushIn{InHeader: header(id), Fh: fh})
}

func (r *rig) fsync(id layout.FileID, fh uint64) fuse.Status {
	return r.raw.Fsync(nil, &fuse.FsyncIn{InHeader: header(id), Fh: fh})
}

func (r *rig) release(fh uint64) { r.raw.Release(nil, &fuse.ReleaseIn{Fh: fh}) }

func (r *rig) closeFile(id layout.FileID, fh uint64) {
	r.t.Helper()
	r.want(r.flush(id, fh), 0, "close")
	r.release(fh)
}

func (r *rig) stat(id layout.FileID) fuse.Attr {
	r.t.Helper()
	var out fuse.AttrOut
	r.want(r.raw.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(id)}, &out), 0, "getattr %d", id)
	return out.Attr
}

func (r *rig) wantSize(id layout.FileID, want int64) {
	r.t.Helper()
	if got := int64(r.stat(id).Size); got != want {
		r.t.Fatalf("size of %d is %d, want %d", id, got, want)
	}
}

func (r *rig) setAttr(id layout.FileID, set fuse.SetAttrInCommon) (fuse.Attr, fuse.Status) {
	set.InHeader = header(id)
	var out fuse.AttrOut
	status := r.raw.SetAttr(nil, &fuse.SetAttrIn{SetAttrInCommon: set}, &out)
	return out.Attr, status
}

func (r *rig) truncate(id layout.FileID, size int64) {
	r.t.Helper()
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: uint64(size)})
	r.want(status, 0, "truncate to %d", size)
}

// durable is the size that would survive the service and all clients.
func (r *rig) durable(id layout.FileID) int64 {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.s.nodes[id].attr.Size
}

func pattern(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	binary.BigEndian.PutUint64(key[:], seed)
	rand.NewChaCha8(key).Read(b)
	return b
}

// held are inodes that the FS still knows.
func (r *rig) held() (n int) {
	for k := range r.buckets {
		s := &r.buckets[k]
		s.mu.RLock()
		n += len(s.inodes)
		s.mu.RUnlock()
	}
	return n
}

func TestReadWrite(t *testing.T) {
	r := newRig(t, newService(4, 64<<10))
	id, fh := r.create("f")
	model := []byte{}
	put := func(off int, data []byte) {
		r.write(id, int64(off), data)
		if need := off + len(data); need > len(model) {
			model = append(model, make([]byte, need-len(model))...)
		}
		copy(model[off:], data)
		r.wantSize(id, int64(len(model)))
	}
	r.wantRead(id, 0, 100, nil)
	put(0, pattern(1, 1000))
	r.wantRead(id, 0, 4096, model)
	r.wantRead(id, 500, 100, model[500:600])
	r.wantRead(id, 1000, 10, nil)
	put(64<<10-10, pattern(2, 20)) // crosses into the wide segment
	r.wantRead(id, 0, 1<<20, model)
	put(1<<20, pattern(3, 300_000)) // behind a hole
	r.wantRead(id, 0, 4<<20, model)
	put(10, pattern(4, 200_000))
	r.wantRead(id, 0, 4<<20, model)
	r.closeFile(id, fh)

	other := newRig(t, r.s)
	fh = other.open(id, unix.O_RDONLY)
	other.wantSize(id, int64(len(model)))
	other.wantRead(id, 0, 4<<20, model)
	other.release(fh)

	// No data file at all, and one that is shorter than the file.
	id, fh = r.create("hole")
	r.truncate(id, 300_000)
	r.wantRead(id, 100, 1<<20, make([]byte, 299_900))
	r.write(id, 10, []byte("x"))
	want := make([]byte, 300_000)
	want[10] = 'x'
	r.wantRead(id, 0, 1<<20, want)
	r.closeFile(id, fh)
}

// With a layout cached, reads and writes need neither the service nor a goroutine of their own.
func TestFastPath(t *testing.T) {
	r := newRig(t, newService(4, 64<<10))
	id, fh := r.create("f")
	data := pattern(1, 1<<20)
	r.write(id, 0, data)
	r.m.setHook(func(_ context.Context, call string) error {
		if call != "LayoutCommit" { // the flusher
			t.Errorf("call of %s", call)
		}
		return nil
	})
	over := make(chan string, 1)
	done := func(n int, errno syscall.Errno) { over <- fmt.Sprint(n, errno) }
	for range 3 {
		w := &Write{ID: id, Off: 100, Data: data[100:], Done: done}
		r.StartWrite(w)
		if w.cancel != nil {
			t.Error("a goroutine took over the write")
		}
		r.Flush()
		if got, want := <-over, fmt.Sprint(len(data)-100, syscall.Errno(0)); got != want {
			t.Errorf("write: %s, want %s", got, want)
		}
		rd := &Read{ID: id, Off: 1, Buf: make([]byte, 2<<20), Done: done}
		r.StartRead(rd)
		if rd.cancel != nil {
			t.Error("a goroutine took over the read")
		}
		r.Flush()
		if got, want := <-over, fmt.Sprint(len(data)-1, syscall.Errno(0)); got != want {
			t.Errorf("read: %s, want %s", got, want)
		}
		if !bytes.Equal(rd.Buf[:len(data)-1], data[1:]) {
			t.Error("read other data than was written")
		}
	}
	r.m.setHook(func(context.Context, string) error { return nil })
	r.closeFile(id, fh)
}

// A read at the end of the file touches everything of ours and nothing of the fakes.
func TestReadAllocations(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	defer r.release(fh)
	r.write(id, 0, pattern(1, 4096))
	in, buf := &fuse.ReadIn{InHeader: header(id), Offset: 4096}, make([]byte, 4096)
	if n := testing.AllocsPerRun(1000, func() {
		result, _ := r.raw.Read(nil, in, buf)
		result.Done()
	}); n > 0 {
		t.Errorf("%v allocations for each read", n)
	}
}

// Appends of many writers, through several handles, are whole and none is lost.
func TestAppend(t *testing.T) {
	r := newRig(t, newService(4, 64<<10))
	id, fh := r.create("f")
	const writers, each = 8, 50
	var total atomic.Int64
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 1))
			for range each {
				record := bytes.Repeat([]byte{byte('a' + w)}, 1+rnd.IntN(5000))
				record[len(record)-1] = '\n'
				n, status := r.tryWrite(id, 12345 /* must not count */, record, unix.O_WRONLY|unix.O_APPEND)
				if status != fuse.OK || n != len(record) {
					t.Errorf("append: %d of %d, %v", n, len(record), status)
				}
				total.Add(int64(n))
			}
		})
	}
	wg.Wait()
	r.wantSize(id, total.Load())
	lines := bytes.SplitAfter(r.read(id, 0, int(total.Load())), []byte("\n"))
	if len(lines) != writers*each+1 {
		t.Errorf("%d records, want %d", len(lines)-1, writers*each)
	}
	for _, l := range lines[:len(lines)-1] {
		if len(bytes.Trim(l[:len(l)-1], string(l[:1]))) > 0 {
			t.Fatalf("records are mixed: %q", l)
		}
	}
	r.closeFile(id, fh)
}

// An append goes where the file ends for everybody, as far as that is known here.
func TestAppendAfterOther(t *testing.T) {
	s := newService(4, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	fb := b.open(id, unix.O_WRONLY|unix.O_APPEND)
	a.write(id, 0, []byte("one"))
	a.want(a.flush(id, fa), 0, "flush")
	b.release(fb)
	fb = b.open(id, unix.O_WRONLY|unix.O_APPEND)
	if n, status := b.tryWrite(id, 0, []byte("two"), unix.O_APPEND); n != 3 || status != fuse.OK {
		t.Fatalf("append: %d %v", n, status)
	}
	b.closeFile(id, fb)
	a.wantRead(id, 0, 100, []byte("onetwo"))
	a.closeFile(id, fa)
}

// A truncation waits for writes that are on their way, and later writes for it.
func TestTruncateOrder(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 50_000))
	for _, server := range r.s.servers {
		server.Pause()
	}
	var wg sync.WaitGroup
	wg.Go(func() { r.write(id, 10_000, pattern(2, 30_000)) })
	i := r.peek(id)
	waittest.Until(t, "write begins", func() bool {
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.writes[0]+i.writes[1] > 0
	})
	wg.Go(func() { r.truncate(id, 20_000) })
	waittest.Until(t, "truncation begins", func() bool {
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.sizing
	})
	wg.Go(func() {
		r.write(id, 30_000, []byte("after"))
		if r.m.called("SetAttr") == 0 {
			t.Error("a write overtook the truncation")
		}
	})
	time.Sleep(20 * time.Millisecond)
	if n := r.m.called("SetAttr"); n != 0 {
		t.Error("the truncation did not wait for the write")
	}
	for _, server := range r.s.servers {
		server.Resume()
	}
	wg.Wait()
	want := make([]byte, 30_005)
	copy(want, pattern(1, 10_000))
	copy(want[10_000:20_000], pattern(2, 30_000))
	copy(want[30_000:], "after")
	r.wantRead(id, 0, 1<<20, want)
	r.closeFile(id, fh)
}

// Random writes, appends and truncations of two mounts, one after the other, against a slice of bytes.
func TestModel(t *testing.T) {
	s := newService(3, 16<<10)
	mounts := []*rig{newRig(t, s), newRig(t, s)}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 9))
	id, first := mounts[0].create("f")
	handles := []uint64{first, mounts[1].open(id, unix.O_RDWR)}
	var model []byte
	const most = 200_000
	grow := func(n int) {
		if n > len(model) {
			model = append(model, make([]byte, n-len(model))...)
		}
	}
	for step := range 400 {
		k := rnd.IntN(2)
		r := mounts[k]
		switch rnd.IntN(8) {
		case 0, 1, 2:
			off, data := rnd.IntN(most), pattern(rnd.Uint64(), rnd.IntN(30_000))
			r.write(id, int64(off), data)
			if len(data) > 0 {
				grow(off + len(data))
				copy(model[off:], data)
			}
		case 3:
			data := pattern(rnd.Uint64(), 1+rnd.IntN(1000))
			_, status := r.tryWrite(id, 0, data, unix.O_APPEND)
			r.want(status, 0, "append")
			model = append(model, data...)
		case 4:
			size := rnd.IntN(most)
			r.truncate(id, int64(size))
			grow(size)
			model = model[:size]
		case 5:
			off, n := rnd.IntN(most), 1+rnd.IntN(30_000)
			r.want(r.raw.Fallocate(nil, &fuse.FallocateIn{InHeader: header(id), Fh: handles[k], Offset: uint64(off), Length: uint64(n), Mode: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}), 0, "punch")
			if off < len(model) {
				clear(model[off:min(off+n, len(model))])
			}
		case 6:
			r.want(r.fsync(id, handles[k]), 0, "fsync")
		}
		off, n := rnd.IntN(most), rnd.IntN(50_000)
		want := model[min(off, len(model)):min(off+n, len(model))]
		if got := mounts[1-k].read(id, int64(off), n); !bytes.Equal(got, want) {
			t.Fatalf("step %d: read of %d at %d differs", step, n, off)
		}
		mounts[1-k].wantSize(id, int64(len(model)))
	}
	for k, r := range mounts {
		r.closeFile(id, handles[k])
	}
}

// Without anybody asking, what was written becomes durable, and what is closed is released.
func TestFlusher(t *testing.T) {
	r := newRig(t, newService(3, 64<<10))
	data := pattern(1, 200_000)
	const files = 20
	var ids []layout.FileID
	for n := range files {
		id, fh := r.create(fmt.Sprint("f", n))
		r.write(id, 0, data)
		r.closeFile(id, fh)
		ids = append(ids, id)
		if n := r.durable(id); n != 0 {
			t.Logf("already durable: %d bytes", n)
		}
		r.wantSize(id, int64(len(data)))
	}
	waittest.Until(t, "all is durable", func() bool {
		for _, id := range ids {
			if r.durable(id) != int64(len(data)) {
				return false
			}
		}
		return true
	})
	for _, server := range r.s.servers {
		server.Restart()
	}
	waittest.Until(t, "all is released", func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return len(r.m.opens) == 0
	})
	waittest.Until(t, "nothing is held", func() bool { return r.held() == 0 })
	other := newRig(t, r.s)
	for _, id := range ids {
		fh := other.open(id, unix.O_RDONLY)
		other.wantRead(id, 0, 1<<20, data)
		other.release(fh)
	}
	// Many files in few calls.
	if n := r.m.called("LayoutCommit"); n >= files {
		t.Errorf("%d durable LayoutCommits for %d files", n, files)
	}
}

// A data server that does not answer does not keep the data of others from becoming durable.
func TestFlusherDeadServer(t *testing.T) {
	r := newRig(t, newService(2, 1<<20))
	dead, fd := r.create("dead")
	live, fl := r.create("live")
	r.write(dead, 0, []byte("x"))
	r.write(live, 0, []byte("x"))
	r.s.mu.Lock()
	stopped := r.s.server(r.s.nodes[dead].files[0].Device)
	if stopped == r.s.server(r.s.nodes[live].files[0].Device) {
		t.Fatal("both files are on one server")
	}
	r.s.mu.Unlock()
	stopped.Pause()
	waittest.Until(t, "the live one is durable", func() bool { return r.durable(live) == 1 })
	if r.durable(dead) != 0 {
		t.Error("size is durable although the data is not")
	}
	stopped.Resume()
	waittest.Until(t, "the dead one is durable", func() bool { return r.durable(dead) == 1 })
	r.closeFile(dead, fd)
	r.closeFile(live, fl)
}

func TestFsync(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	id, fh := r.create("f")
	data := pattern(1, 100_000)
	r.write(id, 0, data)
	r.want(r.fsync(id, fh), 0, "fsync")
	if got := r.durable(id); got != int64(len(data)) {
		t.Errorf("durable size %d, want %d", got, len(data))
	}
	for _, server := range r.s.servers {
		server.Restart()
	}
	r.wantRead(id, 0, 1<<20, data)
	before := r.m.called("LayoutCommit")
	r.want(r.fsync(id, fh), 0, "fsync of nothing")
	if n := r.m.called("LayoutCommit"); n != before {
		t.Error("fsync of nothing calls the service")
	}
	// Data that a restart has taken is sent again.
	r.write(id, 50_000, pattern(2, 100_000))
	copy(data[50_000:], pattern(2, 100_000))
	data = append(data, pattern(2, 100_000)[50_000:]...)
	for _, server := range r.s.servers {
		server.Restart()
	}
	r.want(r.fsync(id, fh), 0, "fsync after a restart")
	for _, server := range r.s.servers {
		server.Restart()
	}
	r.wantRead(id, 0, 1<<20, data)
	r.closeFile(id, fh)
}

func TestSyncWrites(t *testing.T) {
	for _, flags := range []uint32{unix.O_SYNC, unix.O_DSYNC, unix.O_SYNC | unix.O_APPEND} {
		r := newRig(t, newService(2, 64<<10))
		id, fh := r.create("f")
		var all []byte
		for n := range 5 {
			data := pattern(uint64(n), 50_000)
			_, status := r.tryWrite(id, int64(len(all)), data, unix.O_WRONLY|flags)
			r.want(status, 0, "write")
			all = append(all, data...)
			for _, server := range r.s.servers {
				server.Restart()
			}
			if got := r.durable(id); got != int64(len(all)) {
				t.Errorf("flags %#o: durable size %d, want %d", flags, got, len(all))
			}
		}
		r.wantRead(id, 0, 1<<20, all)
		r.closeFile(id, fh)
	}
}

var errDisk = &testError{syscall.EIO}

type testError struct{ e syscall.Errno }

func (e *testError) Error() string        { return "test: " + e.e.Error() }
func (e *testError) Errno() syscall.Errno { return e.e }

// Acknowledged data that cannot be made stable is an error of fsync as long as that is so, and of close once for each
// handle that was open when it began. It is kept: when the server is well again everything becomes stable.
func TestLateErrors(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, f1 := r.create("f")
	f2 := r.open(id, unix.O_WRONLY)
	f3 := r.open(id, unix.O_RDONLY)
	data := pattern(1, 10_000)
	r.write(id, 0, data)
	r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk})
	i := r.peek(id)
	waittest.Until(t, "the flusher fails", func() bool {
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.late > 0
	})
	f4 := r.open(id, unix.O_WRONLY)
	for _, step := range []struct {
		what string
		got  fuse.Status
		want syscall.Errno
	}{
		{"close of a writer", r.flush(id, f1), syscall.EIO},
		{"second close of that (a duplicate)", r.flush(id, f1), 0},
		{"close of another", r.flush(id, f2), syscall.EIO},
		{"close of one opened later", r.flush(id, f4), 0},
		{"fsync of one opened later", r.fsync(id, f4), syscall.EIO},
		{"fsync of it again", r.fsync(id, f4), syscall.EIO},
		{"fsync of the first", r.fsync(id, f1), syscall.EIO},
	} {
		r.want(step.got, step.want, "%s", step.what)
	}
	if n := r.durable(id); n != 0 {
		t.Errorf("a size of %d is durable, the data is not", n)
	}
	r.faults[0].SetRules()
	r.want(r.fsync(id, f1), 0, "fsync when the server is well")
	r.s.servers[0].Restart()
	r.wantRead(id, 0, 1<<20, data)
	r.want(r.flush(id, f3), 0, "close when nothing is lost any more")
	for _, fh := range []uint64{f1, f2, f3, f4} {
		r.release(fh)
	}
}

// What a data server refuses of a write: errors that mean the layout is no good lead to another one, others to the
// application.
func TestWriteErrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   error
		times int
		want  syscall.Errno
	}{
		{"stale once", &testError{syscall.ESTALE}, 1, 0},
		{"fenced for a while", &testError{syscall.EACCES}, 4, 0},
		{"fenced for good", &testError{syscall.EACCES}, 0, syscall.EIO},
		{"no space", &testError{syscall.ENOSPC}, 1, syscall.ENOSPC},
		{"quota", &testError{syscall.EDQUOT}, 1, syscall.EDQUOT},
		{"disk", errDisk, 1, syscall.EIO},
		{"no errno", errors.New("nonsense"), 1, syscall.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, newService(1, 1<<20))
			id, fh := r.create("f")
			r.write(id, 0, pattern(1, 1000))
			for _, kind := range []layout.OpKind{layout.OpWrite, layout.OpRead} {
				r.faults[0].SetRules(faultytest.Rule{Kind: kind, Err: c.err, Times: c.times})
				before := r.m.called("Layout")
				var status fuse.Status
				if kind == layout.OpWrite {
					_, status = r.tryWrite(id, 0, pattern(1, 1000), unix.O_RDWR)
				} else {
					_, status = r.tryRead(id, 0, 1000)
				}
				if kind == layout.OpRead && (c.want == syscall.ENOSPC || c.want == syscall.EDQUOT) {
					continue
				}
				r.want(status, c.want, "%v", kind)
				if asked := r.m.called("Layout") - before; (asked > 0) != (c.times != 1 || c.want == 0) || asked > maxRefetch {
					t.Errorf("%v: asked for %d layouts", kind, asked)
				}
			}
			r.faults[0].SetRules()
			r.wantRead(id, 0, 2000, pattern(1, 1000))
			r.closeFile(id, fh)
		})
	}
}

// The service is asked again for a layout until it has one.
func TestLayoutUnavailable(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	var refusals atomic.Int32
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "Layout" && refusals.Add(1) < 4 {
			return &metarpc.Error{Op: metarpc.OpLayoutGet, Status: metarpc.StatusLayoutUnavailable}
		}
		return nil
	})
	id, fh := r.create("f")
	r.write(id, 0, []byte("x"))
	r.closeFile(id, fh)
}

// An interrupted request goes on while its caller lives.
func TestInterrupted(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	var who atomic.Int32 // a fate
	r.caller = func(pid uint32) fate {
		if pid != testPID {
			t.Errorf("asked for pid %d", pid)
		}
		return fate(who.Load())
	}
	id, fh := r.create("f")
	data := pattern(1, 100_000)
	r.write(id, 0, data)

	type result struct {
		status fuse.Status
		buf    []byte
	}
	start := func(kind layout.OpKind, cancel chan struct{}) chan result {
		over := make(chan result, 1)
		buf := bytes.Repeat([]byte{0xee}, len(data))
		go func() {
			if kind == layout.OpRead {
				res, status := r.raw.Read(cancel, &fuse.ReadIn{InHeader: header(id)}, buf)
				if status == fuse.OK {
					res.Done()
				}
				over <- result{status, buf}
			} else {
				_, status := r.raw.Write(cancel, &fuse.WriteIn{InHeader: header(id), Offset: 1 << 20}, buf)
				over <- result{status, buf}
			}
		}()
		return over
	}
	block := map[string]struct{ on, off func() }{
		"data server": {r.s.servers[0].Pause, r.s.servers[0].Resume},
		"service": {
			func() {
				r.m.DropLayout(id, 0)
				r.m.setHook(func(ctx context.Context, call string) error {
					if call == "Layout" {
						<-ctx.Done()
					}
					return ctx.Err()
				})
			},
			func() { r.m.setHook(func(context.Context, string) error { return nil }) },
		},
	}
	for name, b := range block {
		for _, kind := range []layout.OpKind{layout.OpRead, layout.OpWrite} {
			b.on()
			who.Store(int32(alive))
			cancel := make(chan struct{})
			over := start(kind, cancel)
			close(cancel)
			select {
			case got := <-over:
				t.Errorf("%s, %v: ended with %v although the caller lives", name, kind, got.status)
			case <-time.After(3 * interruptPoll):
			}
			who.Store(int32(dying))
			select {
			case got := <-over:
				if got.status != fuse.EINTR {
					t.Errorf("%s, %v: %v, want EINTR", name, kind, got.status)
				}
				// The buffer belongs to others now.
				for k := range got.buf {
					got.buf[k] = 0xdd
				}
				b.off()
				r.wantRead(id, 0, 1000, data[:1000]) // the server has dealt with what was sent before
				if len(bytes.Trim(got.buf, "\xdd")) > 0 {
					t.Errorf("%s, %v: the buffer was written to after the end", name, kind)
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("%s, %v: not ended although the caller was killed", name, kind)
			}
		}
	}
	// An interrupted write goes on from a copy, and its range stays in order.
	r.write(id, 0, data)
	r.s.servers[0].Pause()
	cancel := make(chan struct{})
	close(cancel)
	payload := bytes.Repeat([]byte("a"), 1000)
	_, status := r.raw.Write(cancel, &fuse.WriteIn{InHeader: header(id), Offset: 500}, payload)
	r.want(status, syscall.EINTR, "write")
	copy(payload, bytes.Repeat([]byte("b"), 1000))
	done := make(chan struct{})
	go func() {
		r.write(id, 600, []byte("c"))
		close(done)
	}()
	time.Sleep(10 * time.Millisecond)
	r.s.servers[0].Resume()
	<-done
	got := r.read(id, 500, 1000)
	if got[0] != 'a' || got[100] != 'c' || bytes.ContainsRune(got, 'b') {
		t.Errorf("interrupted write left %q...", got[:120])
	}
	// A caller that cannot be seen gets some time.
	who.Store(int32(unknown))
	r.s.servers[0].Pause()
	began := time.Now()
	_, status = r.tryReadInterrupted(id)
	r.want(status, syscall.EINTR, "read of an unknown caller")
	if d := time.Since(began); d < unknownPatience {
		t.Errorf("an unknown caller was given up after %v", d)
	}
	r.s.servers[0].Resume()
	r.closeFile(id, fh)
}

func (r *rig) tryReadInterrupted(id layout.FileID) (int, fuse.Status) {
	cancel := make(chan struct{})
	close(cancel)
	_, status := r.raw.Read(cancel, &fuse.ReadIn{InHeader: header(id)}, make([]byte, 100))
	return 0, status
}

// Interrupted calls of the service, too, end only with their callers.
func TestInterruptedCall(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	var killed atomic.Bool
	r.caller = func(uint32) fate {
		if killed.Load() {
			return dying
		}
		return alive
	}
	r.m.setHook(func(ctx context.Context, call string) error {
		if call != "MakeNode" {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(300 * time.Millisecond):
			return nil
		}
	})
	cancel := make(chan struct{})
	close(cancel)
	var out fuse.EntryOut
	mkdir := func(name string) fuse.Status {
		return r.raw.Mkdir(cancel, &fuse.MkdirIn{InHeader: header(layout.RootID), Mode: 0755}, name, &out)
	}
	r.want(mkdir("alive"), 0, "mkdir")
	killed.Store(true)
	r.want(mkdir("killed"), syscall.EINTR, "mkdir")
}

// A truncation that nobody waits for any more is still in order with later writes.
func TestAbandonedTruncate(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	r.caller = func(uint32) fate { return dying }
	id, fh := r.create("f")
	r.write(id, 0, []byte("0123456789"))
	proceed := make(chan struct{})
	r.m.setHook(func(ctx context.Context, call string) error {
		if call == "SetAttr" {
			<-proceed
		}
		return nil
	})
	cancel := make(chan struct{})
	close(cancel)
	var out fuse.AttrOut
	in := &fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{InHeader: header(id), Valid: fuse.FATTR_SIZE}}
	r.want(r.raw.SetAttr(cancel, in, &out), syscall.EINTR, "truncate")
	done := make(chan struct{})
	go func() {
		r.write(id, 0, []byte("new"))
		close(done)
	}()
	select {
	case <-done:
		t.Error("the write did not wait for the truncation")
	case <-time.After(50 * time.Millisecond):
	}
	close(proceed)
	<-done
	r.wantRead(id, 0, 100, []byte("new"))
	r.closeFile(id, fh)
}

// A report of earlier writes that comes in between cannot undo a truncation.
func TestReportDuringTruncate(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	data := pattern(1, 10_000)
	r.write(id, 0, data)
	r.m.setHook(func(ctx context.Context, call string) error {
		if call == "SetAttr" {
			return r.peek(id).makeDurable(ctx)
		}
		return nil
	})
	r.want(r.flush(id, fh), 0, "flush")
	before := r.m.called("LayoutCommit")
	r.truncate(id, 100)
	if r.m.called("LayoutCommit") == before {
		t.Error("there was no report")
	}
	r.wantRead(id, 0, 5000, data[:100])
	r.wantSize(id, 100)
	r.closeFile(id, fh)
	r.wantSize(id, 100)
}

// A refused truncation changes nothing.
func TestRefusedTruncate(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	data := pattern(1, 10_000)
	r.write(id, 0, data)
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "SetAttr" {
			return refusal(metarpc.OpSetAttr, syscall.EROFS)
		}
		return nil
	})
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 10})
	r.want(status, syscall.EROFS, "truncate")
	r.s.servers[0].Restart()
	r.want(r.fsync(id, fh), 0, "fsync")
	r.wantSize(id, int64(len(data)))
	r.wantRead(id, 0, 1<<20, data)
	r.closeFile(id, fh)
}

// Two mounts that truncate and write one file at once must not wait for each other for ever.
func TestConcurrentRecalls(t *testing.T) {
	s := newService(3, 16<<10)
	mounts := []*rig{newRig(t, s), newRig(t, s)}
	id, fh := mounts[0].create("f")
	handles := []uint64{fh, mounts[1].open(id, unix.O_RDWR)}
	var wg sync.WaitGroup
	for k, r := range mounts {
		for g := range 3 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(k), uint64(g)))
				for range 60 {
					switch rnd.IntN(5) {
					case 0:
						r.truncate(id, rnd.Int64N(100_000))
					case 1:
						if _, status := r.tryWrite(id, 0, pattern(1, 100), unix.O_APPEND); status != fuse.OK {
							t.Errorf("append: %v", status)
						}
					case 2:
						if _, status := r.tryRead(id, rnd.Int64N(100_000), 1000); status != fuse.OK {
							t.Errorf("read: %v", status)
						}
					default:
						r.write(id, rnd.Int64N(100_000), pattern(1, 10_000))
					}
				}
			})
		}
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		t.Fatal("deadlock")
	}
	for k, r := range mounts {
		r.want(r.fsync(id, handles[k]), 0, "fsync")
		r.closeFile(id, handles[k])
	}
	size := s.nodes[id].attr.Size
	for _, r := range mounts {
		r.wantSize(id, size)
	}
}

// A recall makes stable and known what was written, and no write of before it arrives after it.
func TestRecall(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	fb := b.open(id, unix.O_RDWR)
	data := pattern(1, 100_000)
	a.write(id, 0, data)
	b.truncate(id, 50_000)
	for _, server := range s.servers {
		server.Restart()
	}
	b.wantRead(id, 0, 1<<20, data[:50_000])
	a.wantRead(id, 0, 1<<20, data[:50_000])
	a.wantSize(id, 50_000)
	if err := a.OnRecall(t.Context(), 999, 0, layout.ToEOF); err != nil {
		t.Errorf("recall of a file nobody has open: %v", err)
	}
	a.closeFile(id, fa)
	b.closeFile(id, fb)
}

// What other mounts may write at the same time is stable when it is acknowledged, and nothing of it is kept.
func TestSharedSegments(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	for _, shared := range []bool{true, false} {
		r.m.shared.Store(shared)
		id, fh := r.create(fmt.Sprint("f", shared))
		data := pattern(1, 200_000)
		i := r.peek(id)
		i.mu.Lock()
		i.retryAt = 1 << 62 // the flusher leaves it alone
		i.mu.Unlock()
		r.write(id, 0, data)
		if kept := r.plane.Retained() > 0; kept == shared {
			t.Errorf("shared %v: something is kept: %v", shared, kept)
		}
		if shared {
			for _, server := range r.s.servers {
				server.Restart()
			}
			r.wantRead(id, 0, 1<<20, data)
		}
		i.mu.Lock()
		i.retryAt = 0
		i.mu.Unlock()
		r.want(r.fsync(id, fh), 0, "fsync")
		r.closeFile(id, fh)
	}
}

// What a data server refuses to make stable is given up when others want to write there: each open file reports that once, the session goes on, and
// nothing of it is sent again.
func TestRecallOfFailing(t *testing.T) {
	s := newService(1, 1<<20)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	f2 := a.open(id, unix.O_WRONLY)
	fb := b.open(id, unix.O_RDWR)
	a.write(id, 0, pattern(1, 10_000))
	a.faults[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk})
	if err := a.OnRecall(t.Context(), id, 0, layout.ToEOF); err != nil {
		t.Fatal(err)
	}
	if n := a.plane.Retained(); n != 0 {
		t.Errorf("%d bytes are kept", n)
	}
	data := pattern(2, 10_000)
	b.write(id, 0, data)
	b.want(b.fsync(id, fb), 0, "fsync of the other mount")
	a.faults[0].SetRules()
	for _, step := range []struct {
		what string
		got  fuse.Status
		want syscall.Errno
	}{
		{"fsync", a.fsync(id, fa), syscall.EIO},
		{"fsync again", a.fsync(id, fa), 0},
		{"close of another open file", a.flush(id, f2), syscall.EIO},
		{"second close", a.flush(id, f2), 0},
	} {
		a.want(step.got, step.want, "%s", step.what)
	}
	s.servers[0].Restart()
	a.want(a.fsync(id, fa), 0, "fsync after the restart of the server")
	a.wantRead(id, 0, 1<<20, data)
	a.release(fa)
	a.release(f2)
	b.closeFile(id, fb)
}

// A report that was overtaken by another one of the same does not arrive after the recall, when the file has been cut.
func TestRecallLateReport(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	fb := b.open(id, unix.O_RDWR)
	a.write(id, 0, pattern(1, 100_000))
	late, told := make(chan struct{}), make(chan struct{}, 100)
	var overtaken atomic.Bool
	a.m.setHook(func(_ context.Context, call string) error {
		if call != "LayoutCommit" {
			return nil
		}
		first := overtaken.CompareAndSwap(false, true)
		told <- struct{}{}
		if first {
			<-late
		}
		return nil
	})
	synced, cut := make(chan error, 1), make(chan struct{})
	go func() { synced <- a.Sync(t.Context()) }()
	<-told
	go func() {
		b.truncate(id, 50_000)
		close(cut)
	}()
	<-told
	select {
	case <-cut:
	case <-time.After(200 * time.Millisecond):
	}
	close(late)
	<-cut
	if err := <-synced; err != nil {
		t.Error(err)
	}
	b.wantSize(id, 50_000)
	a.wantSize(id, 50_000)
	a.closeFile(id, fa)
	b.closeFile(id, fb)
}

// After a restart of the service sizes are reported again.
func TestReset(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk}) // so that nothing becomes durable meanwhile
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk})
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 100_000))
	r.want(r.flush(id, fh), 0, "flush")
	gone, fg := r.create("gone")
	r.write(gone, 0, []byte("x"))
	r.s.mu.Lock()
	r.m.provisional = map[layout.FileID]metarpc.SizeReport{}
	delete(r.s.nodes, gone)
	delete(r.s.nodes[layout.RootID].entries, "gone")
	r.s.mu.Unlock()
	r.OnReset(t.Context(), 0, false)
	other := newRig(t, r.s)
	other.wantSize(id, 100_000)
	r.faults[0].SetRules()
	r.faults[1].SetRules()
	// A file that the service has forgotten is gone for its users as well, and nobody waits for its data.
	_, status := r.tryWrite(gone, 0, []byte("x"), 0)
	r.want(status, syscall.ESTALE, "write to a file that is gone")
	r.want(r.fsync(gone, fg), 0, "fsync of a file that is gone")
	r.release(fg)
	r.closeFile(id, fh)
}

// Whoever replaces a file by a new one finds one or the other after a crash.
func TestRenameOver(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	r.faults[0].SetRules()
	oldID, fh := r.create("old")
	r.write(oldID, 0, []byte("old"))
	r.want(r.fsync(oldID, fh), 0, "fsync")
	r.closeFile(oldID, fh)
	rename := func(from, to string, flags uint32) fuse.Status {
		return r.raw.Rename(nil, &fuse.RenameIn{InHeader: header(layout.RootID), Newdir: uint64(layout.RootID), Flags: flags}, from, to)
	}
	id, fh := r.create("new")
	r.write(id, 0, []byte("new!"))
	r.closeFile(id, fh)
	r.want(rename("new", "old", 0), 0, "rename")
	if n := r.durable(id); n != 4 {
		t.Errorf("durable size of the new file is %d when it is renamed, want 4", n)
	}
	for _, server := range r.s.servers {
		server.Restart()
	}
	fh = r.open(id, unix.O_RDONLY)
	r.wantRead(id, 0, 100, []byte("new!"))
	r.release(fh)

	// If the data cannot be made stable the old file stays.
	id, fh = r.create("new")
	r.write(id, 0, []byte("lost"))
	for _, f := range r.faults {
		f.SetRules(faultytest.Rule{Kind: layout.OpCommit, Err: errDisk})
	}
	r.want(rename("new", "old", 0), syscall.EIO, "rename of a file that cannot be made stable")
	r.want(rename("new", "third", 0), 0, "rename to a new name")
	for _, f := range r.faults {
		f.SetRules()
	}
	r.want(rename("third", "old", metarpc.RenameExchange), 0, "exchange")
	if n := r.durable(id); n != 4 {
		t.Errorf("durable size after an exchange is %d, want 4", n)
	}
	r.want(rename("third", "old", metarpc.RenameNoReplace), syscall.EEXIST, "rename without replacing")
	r.want(rename("third", "old", 4), syscall.EINVAL, "rename with an unknown flag")
	r.release(fh)
}

// The time that a program sets stays, although reports of earlier writes come later.
func TestTimes(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	before := time.Now().UnixNano()
	r.write(id, 0, []byte("x"))
	a := r.stat(id)
	if got := int64(a.Mtime)*1e9 + int64(a.Mtimensec); got < before {
		t.Errorf("mtime is not that of the write")
	}
	const when = 1_000_000_000
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME | fuse.FATTR_ATIME, Mtime: when, Mtimensec: 5, Atime: when + 1})
	r.want(status, 0, "utimens")
	r.closeFile(id, fh)
	waittest.Until(t, "released", func() bool { return r.held() == 0 })
	a = r.stat(id)
	if a.Mtime != when || a.Mtimensec != 5 || a.Atime != when+1 || a.Size != 1 {
		t.Errorf("mtime %d.%d, atime %d, size %d; want those that were set", a.Mtime, a.Mtimensec, a.Atime, a.Size)
	}
	for _, ns := range []int64{0, 1, -1, -1_500_000_000, 1_700_000_000_123_456_789} {
		if got := joinTime(splitTime(ns)); got != ns {
			t.Errorf("time %d becomes %d", ns, got)
		}
	}
	if got := joinTime(1<<62, 0); got < 9e18 {
		t.Errorf("a time far in the future becomes %d", got)
	}
}

// An unlinked file is usable until the last close, after which nothing is left of it.
func TestUnlinked(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.write(id, 0, []byte("one"))
	h := header(layout.RootID)
	r.want(r.raw.Unlink(nil, &h, "f"), 0, "unlink")
	r.write(id, 3, []byte("two"))
	r.wantRead(id, 0, 100, []byte("onetwo"))
	if n := r.stat(id).Nlink; n != 0 {
		t.Errorf("%d links", n)
	}
	r.closeFile(id, fh)
	waittest.Until(t, "nothing is held", func() bool { return r.held() == 0 })
	if n := r.s.servers[0].Count(layout.OpCommit); n != 0 {
		t.Errorf("data of a file without names was committed")
	}
	var out fuse.AttrOut
	r.want(r.raw.GetAttr(nil, &fuse.GetAttrIn{InHeader: header(id)}, &out), syscall.ESTALE, "getattr")
}

// Creation of a file that somebody else has just made: the kernel is to look again.
func TestCreateRace(t *testing.T) {
	s := newService(1, 1<<20)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	var out fuse.CreateOut
	in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_RDWR | unix.O_CREAT | unix.O_TRUNC, Mode: 0600}
	b.want(b.raw.Create(nil, in, "f", &out), syscall.ESTALE, "create")
	in.Flags |= unix.O_EXCL
	b.want(b.raw.Create(nil, in, "f", &out), syscall.EEXIST, "exclusive create")
	s.mu.Lock()
	if b.m.opens[id] {
		t.Error("the file stays open at the service")
	}
	s.mu.Unlock()
	if b.held() != 0 {
		t.Error("the file is still held")
	}
	a.closeFile(id, fa)
	b.want(b.raw.Create(nil, in, string(make([]byte, 256)), &out), syscall.ENAMETOOLONG, "long name")
}

func TestOpenTruncates(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, f1 := r.create("f")
	r.write(id, 0, []byte("0123456789"))
	var out fuse.OpenOut
	in := &fuse.OpenIn{InHeader: header(id), Flags: unix.O_WRONLY | unix.O_TRUNC}
	r.want(r.raw.Open(nil, in, &out), 0, "open")
	r.wantSize(id, 0)
	r.wantRead(id, 0, 100, nil)
	r.want(r.fsync(id, f1), 0, "fsync")
	r.wantSize(id, 0)
	r.release(f1)
	r.release(out.Fh)
	in.NodeId = 999
	r.want(r.raw.Open(nil, in, &out), syscall.ESTALE, "open of nothing")
}

// Writing takes from a file what would give its new contents privileges.
func TestPrivileges(t *testing.T) {
	for _, c := range []struct {
		name       string
		mode, want uint32
		kill       bool // as the kernel says for those without CAP_FSETID
	}{
		{"suid", 04755, 0755, true},
		{"sgid of a program", 02755, 0755, true},
		{"sgid of what is not", 02644, 02644, true},
		{"privileged writer", 06755, 06755, false},
		{"none", 0644, 0644, true},
	} {
		for _, how := range []string{"write", "truncate", "open"} {
			r := newRig(t, newService(1, 1<<20))
			made, fh := r.create("f")
			r.release(fh)
			waittest.Until(t, "released", func() bool { return r.held() == 0 })
			r.s.mu.Lock()
			n := r.s.nodes[made]
			n.attr.Mode = unix.S_IFREG | c.mode
			n.xattrs[capability] = []byte("cap")
			r.s.mu.Unlock()
			fh = r.open(made, unix.O_WRONLY)
			switch how {
			case "write":
				in := &fuse.WriteIn{InHeader: header(made)}
				if c.kill {
					in.WriteFlags = fuse.WRITE_KILL_SUIDGID
				}
				_, status := r.raw.Write(nil, in, []byte("x"))
				r.want(status, 0, "write")
			case "truncate":
				set := fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 1}
				if c.kill {
					set.Valid |= fuse.FATTR_KILL_SUIDGID
				}
				_, status := r.setAttr(made, set)
				r.want(status, 0, "truncate")
			case "open":
				in := &fuse.OpenIn{InHeader: header(made), Flags: unix.O_WRONLY | unix.O_TRUNC}
				if c.kill {
					in.Mode = fuse.OPEN_KILL_SUIDGID
				}
				var out fuse.OpenOut
				r.want(r.raw.Open(nil, in, &out), 0, "open")
				r.release(out.Fh)
			}
			if got := r.stat(made).Mode & 07777; got != c.want {
				t.Errorf("%s by %s: mode %#o, want %#o", c.name, how, got, c.want)
			}
			r.s.mu.Lock()
			if len(n.xattrs) > 0 {
				t.Errorf("%s by %s: capabilities are left", c.name, how)
			}
			r.s.mu.Unlock()
			r.release(fh)
		}
	}
	// chown, too, on Linux also by root.
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 06755})
	r.want(status, 0, "chmod")
	a, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_UID | fuse.FATTR_GID | fuse.FATTR_KILL_SUIDGID, Owner: fuse.Owner{Uid: 5, Gid: 6}})
	r.want(status, 0, "chown")
	if a.Mode&07777 != 0755 || a.Uid != 5 || a.Gid != 6 {
		t.Errorf("after chown: mode %#o, owner %d:%d", a.Mode, a.Uid, a.Gid)
	}
	r.release(fh)
}

// openDir opens a directory and returns the handle.
func (r *rig) openDir(id layout.FileID) uint64 {
	r.t.Helper()
	var out fuse.OpenOut
	r.want(r.raw.OpenDir(nil, &fuse.OpenIn{InHeader: header(id)}, &out), 0, "opendir")
	r.t.Cleanup(func() { r.raw.ReleaseDir(&fuse.ReleaseIn{Fh: out.Fh}) })
	return out.Fh
}

// readDir reads one page of an open directory.
func (r *rig) readDir(id layout.FileID, fh, off uint64, size int) []fuse.DirEntry {
	r.t.Helper()
	in := &fuse.ReadIn{InHeader: header(id), Fh: fh, Offset: off, Size: uint32(size)}
	list := fuse.NewDirEntryList(make([]byte, size), off)
	r.want(r.raw.ReadDir(nil, in, list), 0, "readdir")
	entries, err := fuse.ParseDirEntries(list.Bytes())
	if err != nil {
		r.t.Fatal(err)
	}
	return entries
}

// listDir reads a directory in pages of the given size. Of each it takes most entries, as the kernel does when the
// program's buffer is full by then, or all if most is 0, and calls taken, which may be nil.
func (r *rig) listDir(id layout.FileID, size, most int, taken func(name string)) (all []fuse.DirEntry) {
	r.t.Helper()
	fh := r.openDir(id)
	for off := uint64(0); ; {
		page := r.readDir(id, fh, off, size)
		if len(page) == 0 {
			return all
		}
		if most > 0 {
			page = page[:min(most, len(page))]
		}
		for _, e := range page {
			all = append(all, e)
			if off = e.Off; taken != nil {
				taken(e.Name)
			}
		}
		if len(all) > 2000 {
			r.t.Fatalf("the listing does not end: %v", all[len(all)-3:])
		}
	}
}

// Each listing tells each entry once, with the same offset of 31 bits, whatever the hashes of names are.
func TestReadDir(t *testing.T) {
	hashed := func(hash func(uint64) uint64) func(string) uint64 {
		return func(name string) uint64 {
			c := spreadCookie(name)
			return max(hash(c>>32)<<32|c&math.MaxUint32, metarpc.FirstCookie)
		}
	}
	for _, kind := range []struct {
		name   string
		cookie func(string) uint64
		own    bool // each entry has an offset of its own
	}{
		{"as the service's", spreadCookie, true},
		{"few hashes", hashed(func(h uint64) uint64 { return (1 + h%40) << 20 }), true},
		{"the greatest hash", hashed(func(uint64) uint64 { return math.MaxInt32 }), true},
		{"the least hash", hashed(func(uint64) uint64 { return 0 }), false},
		{"neighbours", hashed(func(h uint64) uint64 { return 1000 + h%40 }), false},
		{"equal cookies", func(string) uint64 { return 1 << 60 }, true},
		{"the least cookie", func(string) uint64 { return metarpc.FirstCookie }, false},
	} {
		t.Run(kind.name, func(t *testing.T) {
			s := newService(1, 1<<20)
			s.cookie = kind.cookie
			r := newRig(t, s)
			h := header(layout.RootID)
			want := []string{".", ".."}
			add := func(name string) {
				var out fuse.EntryOut
				r.want(r.raw.Mknod(nil, &fuse.MknodIn{InHeader: h, Mode: unix.S_IFREG | 0644}, name, &out), 0, "mknod")
			}
			for n := range 100 {
				want = append(want, fmt.Sprintf("%0*d", 1+n%60, n))
				add(want[2+n])
			}
			slices.Sort(want)
			check := func(what string, all []fuse.DirEntry) {
				t.Helper()
				var got []string
				for _, e := range all {
					got = append(got, e.Name)
				}
				if len(got) < 2 || !slices.Equal(got[:2], []string{".", ".."}) {
					t.Errorf("%s: begins with %.2q", what, got)
				}
				if slices.Sort(got); !slices.Equal(got, want) {
					t.Errorf("%s: %d names, want %d", what, len(got), len(want))
				}
			}
			offsets := map[string]uint64{}
			for _, size := range []int{4096, 5000, 32768, 1 << 20} {
				for _, most := range []int{0, 1, 3} {
					all := r.listDir(layout.RootID, size, most, nil)
					what := fmt.Sprintf("pages of %d bytes, of which %d entries are taken", size, most)
					check(what, all)
					for _, e := range all {
						if before, ok := offsets[e.Name]; ok && before != e.Off || e.Off > math.MaxInt32 {
							t.Errorf("%s: %s has offset %d, before it was %d", what, e.Name, e.Off, before)
						}
						offsets[e.Name] = e.Off
					}
				}
			}
			// In another open the entries behind an offset are those that came behind it.
			all := r.listDir(layout.RootID, 4096, 0, nil)
			for i, e := range all {
				next := r.readDir(layout.RootID, r.openDir(layout.RootID), e.Off, 4096)
				if i == len(all)-1 {
					if len(next) > 0 {
						t.Errorf("%s comes behind the last entry", next[0].Name)
					}
				} else if len(next) == 0 {
					t.Errorf("nothing comes behind %s", e.Name)
				} else if k := slices.IndexFunc(all, func(e fuse.DirEntry) bool { return e.Name == next[0].Name }); k > i+1 || kind.own && k != i+1 {
					t.Errorf("entry %d comes behind entry %d", k, i)
				}
			}
			if next := r.readDir(layout.RootID, r.openDir(layout.RootID), 1<<62, 4096); len(next) > 0 {
				t.Errorf("%s comes behind an offset that is none", next[0].Name)
			}
			// What a listing has told is not asked again for each name.
			asked := r.m.called("Lookup")
			for _, name := range want[2:] {
				var out fuse.EntryOut
				r.want(r.raw.Lookup(nil, &h, name, &out), 0, "lookup of %s", name)
			}
			if n := r.m.called("Lookup") - asked; n > 0 {
				t.Errorf("%d questions for names that were listed", n)
			}
			// What comes and goes meanwhile keeps nothing else from being told once.
			if kind.own {
				n := 0
				all := r.listDir(layout.RootID, 4096, 0, func(string) {
					if n++; n%10 == 0 {
						add(fmt.Sprint("new", n))
					}
				})
				check("while names are added", slices.DeleteFunc(all, func(e fuse.DirEntry) bool { return strings.HasPrefix(e.Name, "new") }))
			}
			for _, most := range []int{0, 1, 3} {
				all := r.listDir(layout.RootID, 4096, most, func(name string) {
					if name[0] != '.' {
						r.want(r.raw.Unlink(nil, &h, name), 0, "unlink of %s", name)
					}
				})
				check("while what was told is removed", slices.DeleteFunc(all, func(e fuse.DirEntry) bool { return strings.HasPrefix(e.Name, "new") }))
				if rest := r.listDir(layout.RootID, 4096, 0, nil); len(rest) > 2 {
					t.Errorf("%d entries are left", len(rest)-2)
				}
				for _, name := range want[2:] {
					add(name)
				}
			}
		})
	}
}

// Each page of a listing costs one call of the service.
func TestReadDirCalls(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	for n := range 1000 {
		var out fuse.EntryOut
		in := &fuse.MknodIn{InHeader: header(layout.RootID), Mode: unix.S_IFREG | 0644}
		r.want(r.raw.Mknod(nil, in, fmt.Sprintf("ordinary-%04d.ext", n), &out), 0, "mknod")
	}
	const size = 4096
	asked := r.m.called("ReadDir")
	all := r.listDir(layout.RootID, size, 0, nil)
	pages := len(all)*(direntSize+24)/size + 2 // the last one is empty
	if n := r.m.called("ReadDir") - asked; len(all) != 1002 || n > pages {
		t.Errorf("%d entries by %d calls, want 1002 by %d", len(all), n, pages)
	}
}

// fsync of a directory has the service make durable what it has shown.
func TestFsyncDir(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	in := &fuse.FsyncIn{InHeader: header(layout.RootID)}
	r.want(r.raw.FsyncDir(nil, in), 0, "fsync of a directory")
	if n := r.m.called("LayoutCommit"); n != 1 {
		t.Errorf("%d reports, want 1", n)
	}
	r.m.setHook(func(context.Context, string) error { return syscall.EIO })
	r.want(r.raw.FsyncDir(nil, in), syscall.EIO, "fsync of a directory that the service cannot make durable")
}

// A mount may show any directory of the volume as its root.
func TestSubdirectory(t *testing.T) {
	s := newService(1, 1<<20)
	var dir fuse.EntryOut
	whole := newRig(t, s)
	whole.want(whole.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: header(layout.RootID), Mode: 0755}, "sub", &dir), 0, "mkdir")
	sub := newRig(t, s, func(c *Config) { c.Root = layout.FileID(dir.NodeId) })
	if got := sub.stat(fuse.FUSE_ROOT_ID); got.Ino != dir.Ino {
		t.Errorf("root of the mount is inode %d, want %d", got.Ino, dir.Ino)
	}
	id, fh := sub.create("f") // in node 1
	sub.closeFile(id, fh)
	h := header(layout.FileID(dir.NodeId))
	var out fuse.EntryOut
	whole.want(whole.raw.Lookup(nil, &h, "f", &out), 0, "lookup")
	if out.NodeId != uint64(id) {
		t.Errorf("found node %d, want %d", out.NodeId, id)
	}
	whole.want(whole.raw.Link(nil, &fuse.LinkIn{InHeader: header(layout.RootID), Oldnodeid: uint64(id)}, "link", &out), 0, "link")
}

func TestXattrs(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	h := header(layout.RootID)
	set := func(name, value string, flags uint32) fuse.Status {
		return r.raw.SetXAttr(nil, &fuse.SetXAttrIn{InHeader: h, Flags: flags}, name, []byte(value))
	}
	r.want(set("user.a", "value", 0), 0, "set")
	r.want(set("user.a", "", metarpc.XattrCreate), syscall.EEXIST, "create")
	r.want(set("user.b", "", metarpc.XattrReplace), syscall.ENODATA, "replace")
	r.want(set("system.nfs4_acl", "acl", 0), syscall.EOPNOTSUPP, "set of an ACL of another kind")
	buf := make([]byte, 100)
	for _, c := range []struct {
		name string
		room int
		n    uint32
		want syscall.Errno
	}{
		{"user.a", 100, 5, 0},
		{"user.a", 0, 5, syscall.ERANGE}, // go-fuse makes that the size alone
		{"user.a", 4, 5, syscall.ERANGE},
		{"user.none", 100, 0, syscall.ENODATA},
		{"security.selinux", 100, 0, syscall.EOPNOTSUPP},
		{"system.nfs4_acl", 100, 0, syscall.EOPNOTSUPP},
		{"system.posix_acl_access", 100, 0, syscall.ENODATA},
	} {
		n, status := r.raw.GetXAttr(nil, &h, c.name, buf[:c.room])
		if n != c.n || status != fuse.Status(c.want) {
			t.Errorf("get %s into %d bytes: %d, %v; want %d, %v", c.name, c.room, n, status, c.n, c.want)
		}
	}
	r.want(set("user.c", "", 0), 0, "set")
	n, status := r.raw.ListXAttr(nil, &h, buf)
	r.want(status, 0, "list")
	if got := string(buf[:n]); got != "user.a\x00user.c\x00" {
		t.Errorf("list: %q", got)
	}
	r.want(r.raw.RemoveXAttr(nil, &h, "user.a"), 0, "remove")
	r.want(r.raw.RemoveXAttr(nil, &h, "user.a"), syscall.ENODATA, "remove")
}

// What statfs tells fits 32 bits, whatever there is, and whatever quota there is.
func TestStatfsOut(t *testing.T) {
	for _, c := range []struct {
		s           metarpc.StatFSResult
		block       uint32
		files, free uint64
	}{
		{metarpc.StatFSResult{Total: 1 << 40, Free: 1 << 39, Avail: 1 << 38, Files: 5}, 4096, 5 + 1<<26, 1 << 26},
		{metarpc.StatFSResult{Total: 1<<44 - 1, Free: 1<<44 - 1, Avail: 4096}, 4096, 1, 1},
		{metarpc.StatFSResult{Total: 1 << 44, Avail: 4096}, 8192, 1, 1},
		{metarpc.StatFSResult{Total: math.MaxInt64, Free: math.MaxInt64, Avail: math.MaxInt64, Files: 7}, 1 << 31, math.MaxUint32, math.MaxUint32 - 7},
		// Quotas.
		{metarpc.StatFSResult{Total: 24 << 20, Files: 3, MaxFiles: 10}, 4096, 10, 7},
		{metarpc.StatFSResult{Total: 24 << 20, Files: 13, MaxFiles: 10}, 4096, 13, 0},
		{metarpc.StatFSResult{Total: 24 << 20, Files: 13, MaxFiles: 1 << 40}, 4096, math.MaxUint32, math.MaxUint32 - 13},
		{metarpc.StatFSResult{Total: 1 << 62, Files: 1, MaxFiles: 1}, 1 << 31, 1, 0},
		// There are more.
		{metarpc.StatFSResult{Total: 1 << 50, Avail: 4096, Files: 1 << 33}, 1 << 19, 1<<33 + 1, 1},
	} {
		got := statfsOut(&c.s)
		if got.Bsize != c.block || got.Frsize != c.block || got.Files != c.files || got.Ffree != c.free {
			t.Errorf("%+v: %+v", c.s, got)
		}
		for _, n := range [][2]uint64{{got.Blocks, uint64(c.s.Total)}, {got.Bfree, uint64(c.s.Free)}, {got.Bavail, uint64(c.s.Avail)}} {
			if n[0] > math.MaxUint32 || n[0] != n[1]/uint64(c.block) {
				t.Errorf("%+v: %d blocks for %d bytes", c.s, n[0], n[1])
			}
		}
	}
}

// A reader sees a file grow, and shrink, as soon as the writer has been answered.
func TestReadOfChanging(t *testing.T) {
	s := newService(1, 1<<20)
	w, rd := newRig(t, s), newRig(t, s)
	id, fw := w.create("f")
	fr := rd.open(id, unix.O_RDONLY)
	for n := range 3 {
		w.write(id, int64(n), []byte{'x'})
		rd.wantSize(id, int64(n+1))
		rd.wantRead(id, 0, 10, bytes.Repeat([]byte{'x'}, n+1))
	}
	// Read within the size that is known, from a cached layout.
	asked := rd.m.called("GetAttr")
	rd.wantRead(id, 0, 2, []byte("xx"))
	if n := rd.m.called("GetAttr") - asked; n > 0 {
		t.Errorf("%d questions for a read within the size", n)
	}
	w.truncate(id, 1)
	rd.wantRead(id, 0, 2, []byte("x"))
	w.closeFile(id, fw)
	rd.release(fr)
}

// A read or a question for the size that is overtaken by reports, of which each makes answers of before worthless, still sees what another mount
// wrote before it began.
func TestOvertakenByReport(t *testing.T) {
	s := newService(1, 1<<20)
	a, b := newRig(t, s), newRig(t, s)
	id, fa := a.create("f")
	fb := b.open(id, unix.O_RDWR)
	overtake := func() {
		left := 5
		a.m.setHook(func(ctx context.Context, call string) error {
			if call != "GetAttr" || left == 0 {
				return nil
			}
			left--
			a.write(id, 0, []byte("mine"))
			return a.peek(id).makeDurable(ctx)
		})
	}
	b.write(id, 5000, []byte("first"))
	a.write(id, 0, []byte("mine"))
	b.write(id, 7000, []byte("second"))
	overtake()
	a.wantRead(id, 7000, 10, []byte("second"))
	b.write(id, 9000, []byte("third"))
	overtake()
	a.wantSize(id, 9005)
	a.closeFile(id, fa)
	b.closeFile(id, fb)
}

// lateAnswers is a service whose answers to durable reports come when late is closed.
type lateAnswers struct {
	Meta
	late, waiting chan struct{}
}

func (m *lateAnswers) LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error) {
	attrs, err := m.Meta.LayoutCommit(ctx, reports, provisional)
	if !provisional {
		select {
		case m.waiting <- struct{}{}:
		default:
		}
		<-m.late
	}
	return attrs, err
}

// The answer to a report that is older than what a read goes by does not make that read shorter.
func TestLateAnswerDuringRead(t *testing.T) {
	s := newService(1, 1<<20)
	m := &lateAnswers{late: make(chan struct{}), waiting: make(chan struct{}, 1)}
	a, b := newRig(t, s, func(cfg *Config) { m.Meta, cfg.Meta = cfg.Meta, m }), newRig(t, s)
	id, fa := a.create("f")
	fb := b.open(id, unix.O_RDWR)
	b.write(id, 10, []byte("first"))
	a.write(id, 0, []byte("mine"))
	i := a.peek(id)
	told := make(chan error, 1)
	go func() { told <- i.makeDurable(t.Context()) }()
	<-m.waiting
	b.write(id, 5000, []byte("second"))
	s.servers[0].Pause()
	read := make(chan []byte, 1)
	go func() {
		got, _ := a.tryRead(id, 5000, 10)
		read <- got
	}()
	waittest.Until(t, "read begins", func() bool { return i.reads.under[0].Load()+i.reads.under[1].Load() > 0 })
	close(m.late)
	if err := <-told; err != nil {
		t.Error(err)
	}
	s.servers[0].Resume()
	if got := <-read; string(got) != "second" {
		t.Errorf("%q was read", got)
	}
	a.closeFile(id, fa)
	b.closeFile(id, fb)
}

func TestSyncAndClose(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	id, _ := r.create("f")
	r.write(id, 0, pattern(1, 100_000))
	if err := r.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.durable(id); n != 100_000 {
		t.Errorf("durable size after Sync is %d", n)
	}
	r.write(id, 100_000, []byte("x"))
	// The kernel need not have released what was open when the mount ended.
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.durable(id); n != 100_001 {
		t.Errorf("durable size after Close is %d", n)
	}
	if r.held() != 0 || len(r.m.opens) != 0 {
		t.Errorf("after Close %d inodes are held, %d files open", r.held(), len(r.m.opens))
	}
}

// With StableClose each close(2) of a file for writing leaves it durable, and reports what fails.
func TestStableClose(t *testing.T) {
	r := newRig(t, newService(2, 64<<10), func(c *Config) { c.StableClose = true })
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 100_000))
	r.want(r.raw.Flush(nil, &fuse.FlushIn{InHeader: header(id), Fh: fh}), 0, "close")
	if n := r.durable(id); n != 100_000 || r.plane.Retained() != 0 {
		t.Errorf("after close the durable size is %d, %d bytes are not stable", n, r.plane.Retained())
	}
	r.closeFile(id, fh)
}

// Close does not wait for ever, and says what it leaves behind.
func TestCloseWithDeadServer(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	r.leaves = true
	id, _ := r.create("f")
	r.write(id, 0, []byte("x"))
	r.s.servers[0].Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := r.Close(ctx)
	if err == nil || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close: %v", err)
	}
	r.s.servers[0].Resume()
}

func TestStatFs(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	var out fuse.StatfsOut
	h := header(layout.RootID)
	r.want(r.raw.StatFs(nil, &h, &out), 0, "statfs")
	if out.Blocks*uint64(out.Bsize) != 1<<40 || out.Bavail*uint64(out.Bsize) != 1<<38 || out.NameLen != 255 {
		t.Errorf("statfs: %+v", out)
	}
}

func TestStatx(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.write(id, 0, make([]byte, 1000))
	var out fuse.StatxOut
	r.want(r.raw.Statx(nil, &fuse.StatxIn{InHeader: header(id)}, &out), 0, "statx")
	if out.Size != 1000 || out.Btime.Sec == 0 || out.Mode != unix.S_IFREG|0644 || out.Ino != uint64(id) {
		t.Errorf("statx: %+v", out.Statx)
	}
	r.closeFile(id, fh)
}

// Many open and close one file: whenever it is open here, it is open at the service.
func TestOpenCloseRace(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.closeFile(id, fh)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for n := range 300 {
				var out fuse.OpenOut
				if status := r.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: unix.O_RDWR}, &out); status != fuse.OK {
					t.Errorf("open: %v", status)
					return
				}
				if n%10 == g {
					r.tryWrite(id, int64(g), []byte("x"), unix.O_RDWR)
				}
				r.s.mu.Lock()
				open := r.m.opens[id]
				r.s.mu.Unlock()
				if !open {
					t.Error("an open file is not open at the service")
				}
				r.release(out.Fh)
			}
		})
	}
	wg.Wait()
	waittest.Until(t, "nothing is held", func() bool { return r.held() == 0 })
	if len(r.m.opens) != 0 {
		t.Error("it stays open at the service")
	}
}

// A write that goes on after its process was killed, and then fails, leaves nothing behind.
func TestOrphanedWrite(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	r.caller = func(uint32) fate { return dying }
	id, fh := r.create("f")
	r.write(id, 0, []byte("x"))
	r.want(r.fsync(id, fh), 0, "fsync")
	r.s.servers[0].Pause()
	cancel := make(chan struct{})
	close(cancel)
	r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: errDisk, Reach: true})
	_, status := r.raw.Write(cancel, &fuse.WriteIn{InHeader: header(id)}, []byte("y"))
	r.want(status, syscall.EINTR, "write")
	r.release(fh)
	r.s.servers[0].Resume()
	waittest.Until(t, "nothing is held", func() bool { return r.held() == 0 })
}

// A close(2) by a process that is exiting does not keep it for ever: there is no INTERRUPT for that.
func TestExitingCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		who := alive
		fs := &FS{caller: func(uint32) fate { return who }, disconnected: func() bool { return false }}
		for _, c := range []struct {
			name        string
			closes      bool
			interrupted bool
			who         fate
			want        time.Duration // 0 = never
		}{
			{"alive", true, false, alive, 0},
			{"exiting", true, false, dying, exitPatience},
			{"exiting, but not in close", false, false, dying, 0},
			{"not visible", true, false, unknown, 0},
			{"killed", false, true, dying, time.Nanosecond},
			{"signalled", false, true, alive, 0},
			{"signalled, not visible", false, true, unknown, unknownPatience + interruptPoll},
		} {
			who = c.who
			cancel := make(chan struct{})
			ctx := &request{fs: fs, cancel: cancel, closes: c.closes}
			if c.interrupted {
				close(cancel)
			}
			began := time.Now()
			select {
			case <-ctx.Done():
				if got := time.Since(began); c.want == 0 || got > c.want {
					t.Errorf("%s: given up after %v, want %v", c.name, got, c.want)
				}
				if ctx.Err() != context.Canceled {
					t.Errorf("%s: %v", c.name, ctx.Err())
				}
			case <-time.After(time.Hour):
				if c.want != 0 {
					t.Errorf("%s: not given up, want it after %v", c.name, c.want)
				}
			}
			ctx.end()
			synctest.Wait()
		}
	})
}
