package fs

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// passRig is a rig whose kernel takes a file of this host for the data file of every file.
type passRig struct {
	*rig
	k    *fakeKernel
	file *os.File

	mu      sync.Mutex
	several bool  // what Pin says
	none    bool  // it has none
	other   byte  // 0 = the first data file, otherwise one that has taken its place
	refuse  error // what Lend fails with
	lent    []int // descriptors
}

func newPassRig(t *testing.T, mode Passthrough, change ...func(*Config)) *passRig {
	t.Helper()
	p := new(passRig)
	var err error
	if p.file, err = os.Create(filepath.Join(t.TempDir(), "data")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.file.Close() })
	p.rig = newRig(t, newService(1, 64<<10), append(change, func(c *Config) {
		c.Passthrough, c.Copies = mode, metarpc.PinAny
		c.Lend = func(context.Context, *layout.DataFile, bool) (int, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.refuse != nil {
				return -1, p.refuse
			}
			fd, err := unix.FcntlInt(p.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			p.lent = append(p.lent, fd)
			return fd, err
		}
	})...)
	p.m.pinned = func(context.Context, layout.FileID, layout.IOMode, metarpc.Pin) (*layout.DataFile, bool, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.none {
			return nil, false, nil
		}
		return &layout.DataFile{Handles: [][]byte{{1 + p.other}}, Device: layout.DeviceID{1}}, p.several, nil
	}
	p.k = p.listen()
	p.k.backings = map[int32]bool{}
	return p
}

// make makes a file with a size that is that of the data file, and closes it.
func (p *passRig) make(name string, size int64) layout.FileID {
	p.t.Helper()
	in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_RDWR | unix.O_CREAT | unix.O_SYNC, Mode: unix.S_IFREG | 0644}
	var out fuse.CreateOut
	p.want(p.raw.Create(nil, in, name, &out), 0, "create %s", name)
	id := layout.FileID(out.NodeId)
	if size > 0 {
		p.write(id, size-1, []byte{1})
	}
	p.closeFile(id, out.Fh)
	if err := p.file.Truncate(size); err != nil {
		p.t.Fatal(err)
	}
	waittest.Until(p.t, "the file is closed", func() bool { return p.held() == 0 })
	return id
}

// openAs opens a file and returns how the kernel is told to serve it.
func (p *passRig) openAs(id layout.FileID, flags uint32) (out fuse.OpenOut) {
	p.t.Helper()
	p.want(p.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: flags}, &out), 0, "open %d with %x", id, flags)
	return out
}

func (p *passRig) live() int {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return len(p.k.backings)
}

// wantFree checks that nothing is left of what was open.
func (p *passRig) wantFree() {
	p.t.Helper()
	waittest.Until(p.t, "nothing is held", func() bool { return p.held() == 0 })
	if n := p.live(); n != 0 {
		p.t.Errorf("%d backings have not ended", n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var own, st unix.Stat_t
	if err := unix.Fstat(int(p.file.Fd()), &own); err != nil {
		p.t.Fatal(err)
	}
	for _, fd := range p.lent {
		if unix.Fstat(fd, &st) == nil && st.Dev == own.Dev && st.Ino == own.Ino && fd != int(p.file.Fd()) {
			p.t.Errorf("descriptor %d is still open", fd)
		}
	}
}

const (
	passOnly = fuse.FOPEN_PASSTHROUGH
	asked    = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES
	passMap  = fuse.FOPEN_PASSTHROUGH | asked // only mappings go by the backing
)

// How files are opened, one after another, in each of the modes.
func TestPassthroughWays(t *testing.T) {
	const r, w, rw = unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR
	for _, c := range []struct {
		name  string
		mode  Passthrough
		size  int64
		flags []uint32
		want  []uint32
	}{
		{"off", PassNone, 100, []uint32{r, rw}, []uint32{asked, asked}},
		{"readers", PassReads, 100, []uint32{r, r, r | unix.O_DIRECT}, []uint32{passOnly, passOnly, passOnly}},
		{"joiners", PassReads, 100, []uint32{r, w, rw, w | unix.O_APPEND}, []uint32{passOnly, passMap, passMap, passMap}},
		{"after a writer", PassReads, 100, []uint32{w, r, r}, []uint32{asked, asked, asked}},
		{"empty", PassReads, 0, []uint32{r}, []uint32{asked}},
		{"writers", PassWrites, 100, []uint32{rw, w, r}, []uint32{passOnly, passOnly, passOnly}},
		{"empty, to be written", PassWrites, 0, []uint32{w}, []uint32{passOnly}},
		{"appends", PassWrites, 100, []uint32{rw, w | unix.O_APPEND, rw | unix.O_SYNC, w | unix.O_DSYNC}, []uint32{passOnly, passMap, passMap, passMap}},
		{"append first", PassWrites, 100, []uint32{w | unix.O_APPEND, rw, r}, []uint32{asked, asked, asked}},
		{"reader first", PassWrites, 100, []uint32{r, rw, r}, []uint32{passOnly, passMap, passOnly}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPassRig(t, c.mode)
			id := p.make("f", c.size)
			for range 2 { // the second time nothing may be left of the first
				var fhs []uint64
				var backing int32
				for n, flags := range c.flags {
					out := p.openAs(id, flags)
					fhs = append(fhs, out.Fh)
					if out.OpenFlags != c.want[n] {
						t.Errorf("open %d with %x: %x, want %x", n, flags, out.OpenFlags, c.want[n])
					}
					passed := out.OpenFlags&fuse.FOPEN_PASSTHROUGH != 0
					if n == 0 {
						backing = out.BackingID
					}
					if out.BackingID != backing || passed != (backing > 0) || passed && p.live() != 1 {
						t.Errorf("open %d: backing %d after %d, %d in all", n, out.BackingID, backing, p.live())
					}
				}
				for n, fh := range fhs {
					if backing > 0 && p.live() != 1 {
						t.Errorf("the backing has ended while %d files are open", len(fhs)-n)
					}
					p.release(fh)
				}
				p.wantFree()
			}
		})
	}
}

// What keeps a file from being passed.
func TestPassthroughRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		set   func(p *passRig)
		why   string // what is said
		flags uint32
	}{
		{"nothing to pin", func(p *passRig) { p.none = true }, "", unix.O_RDONLY},
		{"nothing lent", func(p *passRig) { p.refuse = errors.New("test") }, "", unix.O_RDWR},
		{"data file is short", func(p *passRig) { p.file.Truncate(99) }, "", unix.O_RDONLY},
		{"data file is long", func(p *passRig) { p.file.Truncate(101) }, "", unix.O_RDWR},
		{"kernel refuses", func(p *passRig) { p.k.backings = nil }, "not supported", unix.O_RDONLY},
		{"kernel refuses for writing", func(p *passRig) { p.k.backings = nil }, "not supported", unix.O_RDWR},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPassRig(t, PassWrites)
			id := p.make("f", 100)
			c.set(p)
			out := p.openAs(id, c.flags)
			if out.OpenFlags != asked || out.BackingID != 0 {
				t.Errorf("flags %x, backing %d", out.OpenFlags, out.BackingID)
			}
			list, why := p.Passed()
			if len(list) > 0 || (why != nil) != (c.why != "") || why != nil && !strings.Contains(why.Error(), c.why) {
				t.Errorf("passed %+v, because %v", list, why)
			}
			p.release(out.Fh)
			p.wantFree()
		})
	}
}

// Of several copies the kernel must not write one, which it would by a mapping.
func TestPassthroughSeveral(t *testing.T) {
	p := newPassRig(t, PassReads)
	p.several = true
	id := p.make("f", 100)
	r := p.openAs(id, unix.O_RDONLY)
	var out fuse.OpenOut
	p.want(p.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: unix.O_RDWR}, &out), syscall.ETXTBSY, "open for mapping and writing")
	w := p.openAs(id, unix.O_WRONLY)
	if r.OpenFlags != passOnly || w.OpenFlags != passMap {
		t.Errorf("flags %x and %x", r.OpenFlags, w.OpenFlags)
	}
	p.release(r.Fh)
	p.release(w.Fh)
	p.wantFree()
}

// Many open and close the same file at the same time: an open is answered without a backing only while none is named, and each backing
// ends once.
func TestPassthroughRace(t *testing.T) {
	for _, mode := range []Passthrough{PassReads, PassWrites} {
		p := newPassRig(t, mode)
		id := p.make("f", 100)
		var all sync.WaitGroup
		var mu sync.Mutex
		with, without := map[int32]int{}, 0 // open files by backing, and those without
		for worker := range 8 {
			all.Go(func() {
				rng := rand.New(rand.NewPCG(7, uint64(worker)))
				for range 500 {
					flags := []uint32{unix.O_RDONLY, unix.O_RDWR, unix.O_WRONLY | unix.O_APPEND}[rng.IntN(3)]
					out := p.openAs(id, flags)
					mu.Lock()
					if out.BackingID > 0 {
						with[out.BackingID]++
					} else {
						without++
					}
					if len(with) > 1 || len(with) == 1 && without > 0 {
						t.Errorf("open with backings %v, %d without one", with, without)
					}
					mu.Unlock()
					if rng.IntN(2) == 0 {
						time.Sleep(time.Duration(rng.IntN(50)) * time.Microsecond)
					}
					mu.Lock() // before the daemon knows, as in the kernel
					if out.BackingID == 0 {
						without--
					} else if with[out.BackingID]--; with[out.BackingID] == 0 {
						delete(with, out.BackingID)
					}
					mu.Unlock()
					p.release(out.Fh)
				}
			})
		}
		all.Wait()
		p.wantFree()
	}
}

// What the kernel writes by itself is looked up: its end and time, also when the file has been cut since, and it is stable after fsync.
func TestPassthroughLook(t *testing.T) {
	p := newPassRig(t, PassWrites)
	id := p.make("f", 100)
	out := p.openAs(id, unix.O_RDWR)
	if out.OpenFlags != passOnly {
		t.Fatalf("flags %x", out.OpenFlags)
	}
	at := time.Now().Add(time.Minute)
	write := func(size int64) { // as the kernel would
		t.Helper()
		at = at.Add(time.Second)
		if err := errors.Join(p.file.Truncate(size), os.Chtimes(p.file.Name(), at, at)); err != nil {
			t.Fatal(err)
		}
	}
	write(5000)
	if a := p.stat(id); a.Size != 5000 || int64(a.Mtime) != at.Unix() {
		t.Errorf("%d bytes, modified %d, want 5000, %d", a.Size, a.Mtime, at.Unix())
	}
	if d := p.durable(id); d != 100 {
		t.Errorf("%d bytes are durable before fsync", d)
	}
	p.want(p.fsync(id, out.Fh), 0, "fsync")
	if d := p.durable(id); d != 5000 {
		t.Errorf("%d bytes are durable", d)
	}
	write(9000)
	p.wantSize(id, 9000)
	write(300) // another mount has cut it, before anybody was told of the 9000
	p.want(p.fsync(id, out.Fh), 0, "fsync")
	if d := p.durable(id); d == 9000 {
		t.Error("an end is reported that the file has not any more")
	}
	// A time that is set is later than what was written before.
	write(9000)
	p.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME, Mtime: 1000})
	p.want(p.fsync(id, out.Fh), 0, "fsync")
	if a := p.stat(id); a.Mtime != 1000 {
		t.Errorf("modified %d, want 1000", a.Mtime)
	}
	// That the kernel has read it is seen by the data file.
	before := p.stat(id)
	if _, err := p.file.ReadAt(make([]byte, 10), 0); err != nil {
		t.Fatal(err)
	}
	if a := p.stat(id); a.Atime == before.Atime && a.Atimensec == before.Atimensec {
		t.Errorf("accessed %d.%09d, before and after it was read", a.Atime, a.Atimensec)
	}
	// With the session goes what is known of it.
	write(9500)
	p.OnLost(0)
	p.want(p.fsync(id, out.Fh), syscall.EIO, "fsync after the session")
	p.release(out.Fh)
	p.wantFree()
}

// What the kernel writes within one tick of the clock of files leaves the data file's time as it is: the size is told all the same, and a
// time that was set in between is not that of the file any more.
func TestPassthroughTick(t *testing.T) {
	p := newPassRig(t, PassWrites)
	id := p.make("f", 100)
	out := p.openAs(id, unix.O_RDWR)
	at := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	write := func(size int64) { // as the kernel would that takes the tick's time, if the data file has another one
		t.Helper()
		_, err := p.file.WriteAt([]byte{byte(size)}, size-1)
		if err := errors.Join(err, os.Chtimes(p.file.Name(), time.Time{}, at)); err != nil {
			t.Fatal(err)
		}
	}
	wantTime := func(what string, seconds int64) {
		t.Helper()
		p.want(p.fsync(id, out.Fh), 0, "fsync")
		if a := p.stat(id); int64(a.Mtime) != seconds {
			t.Errorf("%s: modified %d, want %d", what, a.Mtime, seconds)
		}
		p.s.mu.Lock()
		durable := p.s.nodes[id].attr.Mtime
		p.s.mu.Unlock()
		if durable/int64(time.Second) != seconds {
			t.Errorf("%s: durably modified %d, want %d", what, durable, seconds)
		}
	}
	write(100)
	wantTime("written", at.Unix())
	write(5000)
	wantTime("longer", at.Unix())
	if d := p.durable(id); d != 5000 {
		t.Errorf("%d bytes are durable, want 5000", d)
	}
	p.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME, Mtime: 1000})
	wantTime("set", 1000)
	p.peek(id).lookAt()
	wantTime("set, and looked at", 1000)
	write(5000)
	wantTime("written after that", at.Unix())
	p.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 5000})
	p.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME, Mtime: 1000})
	write(6000)
	wantTime("longer after that", at.Unix())
	if d := p.durable(id); d != 6000 {
		t.Errorf("%d bytes are durable, want 6000", d)
	}
	p.release(out.Fh)
	p.wantFree()
}

// What was written here when a file can first be written by a mapping is stable then, and so is what is written from then on: else it
// could be sent again, over what the kernel has written.
func TestPassthroughUnretained(t *testing.T) {
	p := newPassRig(t, PassReads)
	id := p.make("f", 100)
	a := p.openAs(id, unix.O_RDONLY)
	i := p.peek(id)
	p.write(id, 0, []byte("before"))
	b := p.openAs(id, unix.O_RDWR)
	if i.data.Dirty() {
		t.Error("it is not stable when the file is open for mapping and writing")
	}
	p.write(id, 0, []byte("beside"))
	if i.data.Dirty() {
		t.Error("it is not stable when it is acknowledged")
	}
	p.release(b.Fh)
	p.release(a.Fh)
	p.wantFree()
}

// A file that is read by the kernel is not opened for mapping and writing if nobody lends the data file for that.
func TestPassUnlent(t *testing.T) {
	p := newPassRig(t, PassReads)
	id := p.make("f", 100)
	a := p.openAs(id, unix.O_RDONLY)
	p.mu.Lock()
	p.refuse = errors.New("not now")
	p.mu.Unlock()
	in := &fuse.OpenIn{InHeader: header(id), Flags: unix.O_RDWR}
	var out fuse.OpenOut
	if status := p.raw.Open(nil, in, &out); status != fuse.Status(syscall.ETXTBSY) {
		t.Errorf("opened for reading and writing: %v, flags %#x", status, out.OpenFlags)
	}
	b := p.openAs(id, unix.O_RDONLY)
	if b.BackingID != a.BackingID {
		t.Error("the backing has gone")
	}
	p.release(b.Fh)
	p.release(a.Fh)
}

// What was written by a mapping when the session was lost is gone, and fsync says so for good.
func TestPassLostMapping(t *testing.T) {
	p := newPassRig(t, PassReads)
	id := p.make("f", 100)
	a := p.openAs(id, unix.O_RDONLY)
	b := p.openAs(id, unix.O_RDWR)
	p.file.WriteAt([]byte{7}, 0)
	p.OnLost(0)
	p.file.WriteAt([]byte{8}, 0)
	for range 2 {
		if status := p.raw.Fsync(nil, &fuse.FsyncIn{InHeader: header(id), Fh: b.Fh}); status != fuse.EIO {
			t.Errorf("fsync: %v", status)
		}
	}
	if status := p.raw.Fsync(nil, &fuse.FsyncIn{InHeader: header(id), Fh: a.Fh}); status != fuse.OK {
		t.Errorf("fsync of what was opened for reading: %v", status)
	}
	p.release(b.Fh)
	p.release(a.Fh)
}

// After the session was lost others join a backing only if it is the inode's data file still.
func TestPassReplaced(t *testing.T) {
	p := newPassRig(t, PassReads)
	id := p.make("f", 100)
	a := p.openAs(id, unix.O_RDONLY)
	p.OnLost(0)
	b := p.openAs(id, unix.O_RDONLY)
	if b.BackingID != a.BackingID {
		t.Error("another backing for the same data file")
	}
	p.OnLost(0)
	p.mu.Lock()
	p.other = 1
	p.mu.Unlock()
	var out fuse.OpenOut
	if status := p.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: unix.O_RDONLY}, &out); status != fuse.Status(syscall.ESTALE) {
		t.Errorf("opened though the data file was replaced: %v", status)
	}
	p.release(b.Fh)
	p.release(a.Fh)
	c := p.openAs(id, unix.O_RDONLY)
	p.release(c.Fh)
}
