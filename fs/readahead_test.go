package fs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

func aheadBy(n int64) func(*Config) { return func(c *Config) { c.ReadAhead = n } }

// tryReadAt reads through an open file.
func (r *rig) tryReadAt(id layout.FileID, fh uint64, off int64, n int, flags uint32) ([]byte, fuse.Status) {
	buf := bytes.Repeat([]byte{0xee}, n)
	result, status := r.raw.Read(nil, &fuse.ReadIn{InHeader: header(id), Fh: fh, Offset: uint64(off), Flags: flags}, buf)
	if status != fuse.OK {
		return nil, status
	}
	defer result.Done()
	got, _ := result.Bytes(nil)
	return bytes.Clone(got), fuse.OK
}

func (r *rig) wantReadAt(id layout.FileID, fh uint64, off int64, n int, want []byte) {
	r.t.Helper()
	got, status := r.tryReadAt(id, fh, off, n, 0)
	r.want(status, 0, "read of %d bytes at %d", n, off)
	if !bytes.Equal(got, want[off:min(off+int64(n), int64(len(want)))]) {
		r.t.Fatalf("read of %d bytes at %d: other data", n, off)
	}
}

// aheadFile is a file that nobody writes to, open in r.
func aheadFile(t *testing.T, s *service, r *rig, n int) (id layout.FileID, fh uint64, data []byte) {
	t.Helper()
	w := newRig(t, s)
	id, fh = w.create(fmt.Sprintf("f%d", n))
	data = pattern(uint64(n), n)
	w.write(id, 0, data)
	w.want(w.fsync(id, fh), 0, "fsync")
	w.closeFile(id, fh)
	waittest.Until(t, "the file is closed", func() bool { return w.held() == 0 })
	return id, r.open(id, unix.O_RDONLY), data
}

// come waits until all that is read ahead through an open file has come, and returns how far ahead that is, in bytes.
func (r *rig) come(fh uint64) (n int64) {
	r.t.Helper()
	w := &r.handles.get(fh).window
	waittest.Until(r.t, "what is read ahead has come", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		n = 0
		for _, p := range w.pieces {
			if n += p.end() - max(p.io.Off, w.next); !p.over {
				return false
			}
		}
		return true
	})
	return n
}

func (s *service) pause()  { s.each(func(i int) { s.servers[i].Pause() }) }
func (s *service) resume() { s.each(func(i int) { s.servers[i].Resume() }) }

func (s *service) each(f func(i int)) {
	for i := range s.servers {
		f(i)
	}
}

func (s *service) reads() (n int) {
	s.each(func(i int) { n += s.servers[i].Count(layout.OpRead) })
	return n
}

// Who reads from front to back gets what comes next without any server.
func TestReadAhead(t *testing.T) {
	s := newService(4, 64<<10)
	r := newRig(t, s, aheadBy(1<<20))
	id, fh, data := aheadFile(t, s, r, 3<<20+12345)
	const n = 100_000
	r.wantReadAt(id, fh, 0, n, data)
	if r.come(fh) > 0 {
		t.Error("one read made the file be read ahead")
	}
	off := int64(n)
	for ; off < int64(len(data)); off += n {
		r.wantReadAt(id, fh, off, n, data)
		if ahead := r.come(fh); ahead > 1<<20 {
			t.Errorf("%d bytes read ahead", ahead)
		}
		if off+n < int64(len(data)) {
			s.pause()
			r.wantReadAt(id, fh, off+n, n, data)
			off += n
			s.resume()
		}
	}
	if used := r.ahead.pool.Used(); used != 0 {
		t.Errorf("%d bytes are kept of what was read", used)
	}
	if got, status := r.tryReadAt(id, fh, off, n, 0); len(got) > 0 || status != fuse.OK {
		t.Errorf("read behind the end: %d bytes, %v", len(got), status)
	}
	r.release(fh)
}

// Who does not read from front to back costs servers no more than is asked for.
func TestReadAheadNot(t *testing.T) {
	s := newService(1, 1<<20)
	r := newRig(t, s, aheadBy(1<<20))
	id, fh, data := aheadFile(t, s, r, 1<<20)
	for name, c := range map[string]struct {
		offs  []int64
		flags uint32
	}{
		"backwards": {offs: []int64{900_000, 800_000, 700_000, 600_000}},
		"gaps":      {offs: []int64{0, 100_000, 200_000, 300_000, 400_000}},
		"O_DIRECT":  {[]int64{0, 4096, 8192, 12288, 16384}, unix.O_DIRECT},
	} {
		before := s.reads()
		for _, off := range c.offs {
			got, status := r.tryReadAt(id, fh, off, 4096, c.flags)
			r.want(status, 0, "%s: read at %d", name, off)
			if !bytes.Equal(got, data[off:off+4096]) {
				t.Errorf("%s: other data at %d", name, off)
			}
		}
		r.come(fh)
		if got := s.reads() - before; got != len(c.offs) {
			t.Errorf("%s: %d requests for %d reads", name, got, len(c.offs))
		}
	}
	r.release(fh)
}

// Two reads under way at once are not served, and are right.
func TestReadAheadTwo(t *testing.T) {
	s := newService(2, 64<<10)
	r := newRig(t, s, aheadBy(1<<20))
	id, fh, data := aheadFile(t, s, r, 4<<20)
	var wg sync.WaitGroup
	var mu sync.Mutex
	next := int64(0)
	for range 4 {
		wg.Go(func() {
			for {
				mu.Lock()
				off := next
				next += 50_000
				mu.Unlock()
				if off >= int64(len(data)) {
					return
				}
				got, status := r.tryReadAt(id, fh, off, 50_000, 0)
				if status != fuse.OK || !bytes.Equal(got, data[off:min(off+50_000, int64(len(data)))]) {
					t.Errorf("read at %d: %v, or other data", off, status)
					return
				}
			}
		})
	}
	wg.Wait()
	r.release(fh)
	waittest.Until(t, "all memory is back", func() bool { return r.ahead.pool.Used() == 0 })
}

// Nothing is seen of what was read before a change that was made, here or elsewhere.
func TestReadAheadCoherence(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	s := newService(3, 64<<10)
	a, b := newRig(t, s, aheadBy(256<<10)), newRig(t, s)
	id, fa, data := aheadFile(t, s, a, 1<<20)
	fb := b.open(id, unix.O_RDWR)
	served := 0
	for op := 0; op < 400; {
		off, n := int64(0), 1+rnd.IntN(30_000)
		for range 3 + rnd.IntN(20) {
			op++
			a.wantReadAt(id, fa, off, n, data)
			off += int64(n)
			if rnd.IntN(2) == 0 && a.come(fa) > 0 {
				served++
			}
		}
		// What was read ahead is changed.
		at, size := min(off+int64(rnd.IntN(100_000)), 1<<20), 1+rnd.IntN(50_000)
		who, name := a, "reader"
		if rnd.IntN(2) == 0 {
			who, name = b, "other mount"
		}
		switch rnd.IntN(3) {
		case 0:
			t.Logf("%d: %s writes %d bytes at %d", op, name, size, at)
			change := pattern(rnd.Uint64(), size)
			who.write(id, at, change)
			data = append(data, make([]byte, max(0, int(at)+size-len(data)))...)
			copy(data[at:], change)
		case 1:
			t.Logf("%d: %s truncates to %d", op, name, at)
			who.truncate(id, at)
			data = append(data, make([]byte, max(0, int(at)-len(data)))...)[:at]
			who.truncate(id, 1<<20)
			data = append(data, make([]byte, max(0, 1<<20-len(data)))...)[:1<<20]
		case 2:
			t.Logf("%d: %s punches %d bytes at %d", op, name, size, at)
			h := map[*rig]uint64{a: fa, b: fb}[who]
			who.want(who.raw.Fallocate(nil, &fuse.FallocateIn{
				InHeader: header(id), Fh: h, Offset: uint64(at), Length: uint64(size), Mode: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
			}), 0, "punch")
			if at < int64(len(data)) {
				clear(data[at:min(int(at)+size, len(data))])
			}
		}
		if off < int64(len(data)) {
			a.wantReadAt(id, fa, off, n, data) // goes on where it was
		}
		for _, f := range []struct {
			r  *rig
			fh uint64
		}{{a, fa}, {b, fb}} {
			f.r.want(f.r.fsync(id, f.fh), 0, "fsync") // or there would be no lease for long
		}
		waittest.Until(t, "the writers' layouts are back", func() bool {
			b.m.Forget(id)
			_, ok := a.m.CachedAttr(id)
			if !ok {
				a.stat(id)
			}
			return ok
		})
	}
	if served < 20 {
		t.Errorf("only %d times something was read ahead", served)
	}
	a.release(fa)
	b.release(fb)
}

// What cannot be read ahead is read when it is asked for, and then errors count.
func TestReadAheadErrors(t *testing.T) {
	s := newService(2, 64<<10)
	r := newRig(t, s, aheadBy(1<<20))
	id, fh, data := aheadFile(t, s, r, 2<<20)
	for _, f := range r.faults {
		f.SetRules(faultytest.Rule{Kind: layout.OpRead, Prob: 0.2, Err: &targettest.Error{Op: layout.OpRead, Err: syscall.EACCES}})
	}
	for off := int64(0); off < int64(len(data)); off += 60_000 {
		r.wantReadAt(id, fh, off, 60_000, data)
	}
	for _, f := range r.faults {
		f.SetRules()
	}
	r.release(fh)
	waittest.Until(t, "all memory is back", func() bool { return r.ahead.pool.Used() == 0 })
}

// The caller of a read that waits for what is read ahead is killed: its buffer is not touched any more.
func TestReadAheadKilled(t *testing.T) {
	s := newService(2, 64<<10)
	r := newRig(t, s, aheadBy(1<<20))
	id, fh, data := aheadFile(t, s, r, 2<<20)
	r.caller = func(uint32) fate { return dying }
	const n = 50_000
	r.wantReadAt(id, fh, 0, n, data)
	r.wantReadAt(id, fh, n, n, data)
	r.come(fh)
	s.pause()
	cancel := make(chan struct{})
	close(cancel)
	buf := make([]byte, n)
	off := int64(2 * n)
	for ; ; off += n {
		result, status := r.raw.Read(cancel, &fuse.ReadIn{InHeader: header(id), Fh: fh, Offset: uint64(off)}, buf)
		if status == fuse.EINTR {
			break
		}
		r.want(status, 0, "read at %d", off)
		result.Done()
		if !bytes.Equal(buf, data[off:off+n]) {
			t.Fatalf("other data at %d", off)
		}
	}
	if off == 2*n {
		t.Error("nothing was read ahead")
	}
	clear(buf)
	s.resume()
	r.come(fh)
	if len(bytes.Trim(buf, "\x00")) > 0 {
		t.Error("the buffer was written to after the end")
	}
	r.wantReadAt(id, fh, off, n, data)
	r.release(fh)
	waittest.Until(t, "all memory is back", func() bool { return r.ahead.pool.Used() == 0 })
}

// All open files share a bounded memory, and those that are not read any more make way.
func TestReadAheadMemory(t *testing.T) {
	s := newService(2, 64<<10)
	r := newRig(t, s, aheadBy(MinReadAhead))
	id, fh, data := aheadFile(t, s, r, 1<<20)
	handles := []uint64{fh}
	for range 60 {
		handles = append(handles, r.open(id, unix.O_RDONLY))
	}
	const n = 8 << 10
	start := func(fh uint64) int64 {
		for off := int64(0); off < 5*n; off += n {
			r.wantReadAt(id, fh, off, n, data)
		}
		return r.come(fh)
	}
	var none uint64
	for _, fh := range handles {
		if start(fh) == 0 {
			none = fh
		}
	}
	if none == 0 {
		t.Fatalf("%d open files are read ahead by as much as %d", len(handles), aheadShares)
	}
	r.ahead.mu.Lock()
	for e := r.ahead.windows.Front(); e != nil; e = e.Next() {
		e.Value.(*window).used -= int64(aheadIdle)
	}
	r.ahead.mu.Unlock()
	r.wantReadAt(id, none, 5*n, n, data)
	if r.come(none) == 0 {
		t.Error("files that are not read any more keep all memory")
	}
	for _, fh := range handles {
		r.release(fh)
	}
	waittest.Until(t, "all memory is back", func() bool { return r.ahead.pool.Used() == 0 })
	if n := r.ahead.windows.Len(); n > 0 {
		t.Errorf("%d windows are left", n)
	}
}

// Who reads more at a time than before, or leaves out some of what comes next, gets the right bytes.
func TestReadAheadSkips(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	s := newService(3, 64<<10)
	r := newRig(t, s, aheadBy(256<<10))
	var wg sync.WaitGroup
	for k := range 4 {
		id, fh, data := aheadFile(t, s, r, 2<<20+k)
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(k)))
			for range 40 {
				off := int64(rnd.IntN(1 << 20))
				for range rnd.IntN(40) {
					n := 1 + rnd.IntN(40_000)
					if off >= int64(len(data)) {
						break
					}
					got, status := r.tryReadAt(id, fh, off, n, 0)
					if status != fuse.OK || !bytes.Equal(got, data[off:min(off+int64(n), int64(len(data)))]) {
						t.Errorf("read of %d bytes at %d of file %d: %v, or other data", n, off, k, status)
						return
					}
					off += int64(n) + int64(rnd.IntN(3)*rnd.IntN(40_000))
				}
			}
		})
		defer r.release(fh)
	}
	wg.Wait()
}
