package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// within is what comes from done.
func within[T any](t *testing.T, what string, done <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: not within 20 s", what)
	}
	return v
}

// untilFree makes commands of one kind wait, after n others; begun has an element for each that waits, and free ends it.
func (s *space) untilFree(op wire.Opcode, n int) (begun chan struct{}, free func()) {
	begun, over := make(chan struct{}, 100), make(chan struct{})
	left := make(chan struct{}, n)
	for range n {
		left <- struct{}{}
	}
	s.hold(func(r *nvmetcp.Request) {
		if r.Op != op {
			return
		}
		select {
		case <-left:
			return
		default:
		}
		begun <- struct{}{}
		<-over
	})
	return begun, func() {
		s.hold(nil)
		close(over)
	}
}

func TestNamespaceFiles(t *testing.T) {
	for _, cached := range []bool{false, true} {
		t.Run(fmt.Sprint("cached=", cached), func(t *testing.T) {
			s := newSpaceService(cached)
			s.space.most = 3 * spaceUnit // writes go piecewise
			r, other := newSpaceRig(t, s), newSpaceRig(t, s)
			id, fh := r.create("f")
			fh2 := other.open(id, unix.O_RDWR)
			want := make([]byte, 50_000)
			r.wantRead(id, 0, len(want), nil)
			put := func(r *rig, seed uint64, off, n int) {
				t.Helper()
				data := pattern(seed, n)
				copy(want[off:], data)
				r.write(id, int64(off), data)
			}
			put(r, 1, 1000, 40_000)
			r.wantRead(id, 0, len(want), want[:41_000]) // by layouts of before and of now
			put(r, 2, 45_000, 5000)
			r.wantRead(id, 0, len(want), want)
			r.m.DropLayout(id, 0) // the next one is for reading, and knows nothing of what was written
			r.wantRead(id, 0, len(want), want)
			other.wantRead(id, 0, len(want), want) // it is recalled, and told
			if n := r.m.called("LayoutCommit"); n == 0 {
				t.Error("nothing was told")
			}
			put(other, 3, 10, 4000)
			r.wantRead(id, 0, len(want), want)
			put(r, 4, 5, 10)
			r.want(r.fsync(id, fh), 0, "fsync")
			put(other, 5, 4090, 20)
			r.wantRead(id, 0, len(want), want)
			other.want(other.fsync(id, fh2), 0, "fsync")

			other.want(other.fallocate(id, fh2, punchOut, 2000, 20_000), 0, "punch")
			clear(want[2000:22_000])
			r.wantRead(id, 0, len(want), want)
			r.want(r.fallocate(id, fh, 0, 60_000, 20_000), 0, "allocate")
			want = append(want, make([]byte, 30_000)...)
			other.wantRead(id, 0, len(want), want)
			put(r, 6, 70_000, 100)
			if at, status := r.seek(id, fh, 60_000, unix.SEEK_DATA); status != 0 || at < 60_000 || at > 70_000 {
				t.Errorf("data is at %d, %v", at, status)
			}
			for _, c := range []struct {
				r    *rig
				size int
			}{{r, 69_000}, {other, 30_001}, {r, 10_000}, {r, 0}} {
				c.r.truncate(id, int64(c.size))
				want = want[:c.size]
				r.wantRead(id, 0, 100_000, want)
				c.r.write(id, int64(c.size+5000), []byte("x"))
				want = append(want, make([]byte, 5001)...)
				want[c.size+5000] = 'x'
				other.wantRead(id, 0, 100_000, want)
			}
			r.closeFile(id, fh)
			other.closeFile(id, fh2)
			late := newSpaceRig(t, s)
			fh = late.open(id, unix.O_RDONLY)
			late.wantRead(id, 0, 100_000, want)
			late.closeFile(id, fh)
		})
	}
}

// The flusher tells of what was written, and so does each way in which a file becomes durable.
func TestNamespaceFilesAreTold(t *testing.T) {
	s := newSpaceService(true)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 5000))
	waittest.Until(t, "the flusher tells", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.nodes[id].blocks.valid) == 10 && s.nodes[id].attr.Size == 5000
	})
	// A report that fails is made again, with what it was to make valid.
	fail := errors.New("no answer")
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "LayoutCommit" {
			return fail
		}
		return nil
	})
	r.write(id, 5120, pattern(2, 512))
	r.want(r.fsync(id, fh), syscall.EIO, "fsync without an answer")
	r.m.setHook(func(context.Context, string) error { return nil })
	r.want(r.fsync(id, fh), 0, "fsync")
	s.mu.Lock()
	if !s.nodes[id].blocks.valid[10] {
		t.Error("what was not told was forgotten")
	}
	s.mu.Unlock()
	before := r.m.called("LayoutCommit")
	r.want(r.fsync(id, fh), 0, "fsync of nothing")
	if n := r.m.called("LayoutCommit"); n != before {
		t.Error("it is told again")
	}
	r.closeFile(id, fh)
	waittest.Until(t, "the file is let go", func() bool { return r.held() == 0 })
}

// A recall waits for a read that has begun, and not for those that begin later.
func TestRecallWaitsForReads(t *testing.T) {
	for _, ahead := range []bool{false, true} {
		s := newSpaceService(false)
		r := newSpaceRig(t, s, func(c *Config) {
			if ahead {
				c.ReadAhead = MaxReadAhead >> 10
			}
		})
		id, fh := r.create("f")
		want := pattern(1, 256<<10)
		r.write(id, 0, want)
		r.want(r.fsync(id, fh), 0, "fsync")
		if ahead {
			r.wantReadAt(id, fh, 0, 4096, want[:4096])
		}
		begun, free := s.space.untilFree(wire.OpRead, map[bool]int{true: 1}[ahead])
		read := make(chan error, 2)
		go func() { // ends with the read
			off := map[bool]int64{true: 4096}[ahead]
			got, status := r.tryReadAt(id, fh, off, 4096, 0)
			if status != 0 || !bytes.Equal(got, want[off:off+4096]) {
				read <- fmt.Errorf("%d bytes, %v", len(got), status)
			} else {
				read <- nil
			}
		}()
		within(t, "a read at the namespace", begun)
		recalled := make(chan error, 1)
		go func() { recalled <- r.OnRecall(context.Background(), id, 0, layout.ToEOF) }() // ends with the recall
		i := r.peek(id)
		waittest.Until(t, "the recall waits for reads", func() bool { return i.reads.awaited.Load() > 0 })
		asked := r.m.called("Layout")
		late := make(chan error, 1)
		go func() { // ends with the read
			got, status := r.tryReadAt(id, 0, 8192, 4096, 0)
			if status != 0 || !bytes.Equal(got, want[8192:12288]) {
				late <- fmt.Errorf("%d bytes, %v", len(got), status)
			} else {
				late <- nil
			}
		}()
		select {
		case err := <-recalled:
			t.Fatalf("the recall has ended: %v", err)
		case err := <-read:
			t.Fatalf("the read has ended: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		free()
		if err := within(t, "the read", read); err != nil {
			t.Error(err)
		}
		if err := within(t, "the recall", recalled); err != nil {
			t.Error(err)
		}
		if err := within(t, "the later read", late); err != nil {
			t.Error(err)
		}
		if n := r.m.called("Layout"); n == asked {
			t.Error("the later read goes by the layout that was recalled")
		}
		r.closeFile(id, fh)
	}
}

// Who waits for reads waits for those that had begun, whoever else waits and whatever begins.
func TestAwaitReads(t *testing.T) {
	s := newSpaceService(false)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 4096))
	i := r.peek(id)
	begin := func() reading {
		seg, k := i.beginRead(0, 10)
		if seg == nil {
			t.Fatal("there is no segment")
		}
		return k
	}
	first := begin()
	var ended []chan error
	for n := range 3 {
		done := make(chan error, 1)
		go func() { done <- i.awaitReads(context.Background()) }() // ends when the first read has
		ended = append(ended, done)
		waittest.Until(t, "it waits", func() bool { return i.reads.awaited.Load() == int32(n+1) })
	}
	var others []reading
	for range 5 { // one begins before another ends
		others = append(others, begin())
		if len(others) > 1 {
			i.endRead(others[0])
			others = others[1:]
		}
	}
	for _, done := range ended {
		select {
		case <-done:
			t.Fatal("a read that had begun is not waited for")
		default:
		}
	}
	i.endRead(first)
	for len(others) > 0 {
		// What began in the turn that is waited for ends some time; there is always another one.
		others = append(others, begin())
		i.endRead(others[0])
		others = others[1:]
		left := ended[:0]
		for _, done := range ended {
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			default:
				left = append(left, done)
			}
		}
		if ended = left; len(ended) == 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for _, k := range others {
		i.endRead(k)
	}
	ctx, cancel := context.WithCancel(t.Context())
	last := begin()
	cancel()
	if err := i.awaitReads(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want what ctx ended with", err)
	}
	i.endRead(last)
	r.closeFile(id, fh)
}

// A truncation waits for reads of what it cuts off, tells what was written before, and keeps new reads waiting.
func TestTruncationKeepsReadsOut(t *testing.T) {
	s := newSpaceService(true)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	want := pattern(1, 40_000)
	r.write(id, 0, want)
	begun, free := s.space.untilFree(wire.OpRead, 0)
	type result struct {
		data   []byte
		status fuse.Status
	}
	start := func(off int64, n int) chan result {
		done := make(chan result, 1)
		go func() { // ends with the read
			data, status := r.tryRead(id, off, n)
			done <- result{data, status}
		}()
		return done
	}
	first := start(20_000, 10_000)
	within(t, "a read at the namespace", begun)
	setting, set := make(chan struct{}, 1), make(chan struct{})
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "SetAttr" {
			setting <- struct{}{}
			<-set
		}
		return nil
	})
	cut := make(chan fuse.Status, 1)
	go func() { // ends with the truncation
		_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 10_100})
		cut <- status
	}()
	i := r.peek(id)
	waittest.Until(t, "the truncation waits for reads", func() bool { return i.reads.awaited.Load() > 0 })
	if n := r.m.called("SetAttr"); n != 0 {
		t.Fatal("the file is cut while it is read")
	}
	s.mu.Lock()
	if n := len(s.nodes[id].blocks.valid); n != 79 {
		t.Errorf("%d blocks were told", n)
	}
	s.mu.Unlock()
	free()
	if got := within(t, "the read", first); got.status != 0 || !bytes.Equal(got.data, want[20_000:30_000]) {
		t.Errorf("%d bytes, %v", len(got.data), got.status)
	}
	within(t, "the truncation", setting)
	// A layout that was asked for before comes only now.
	if seg, err := r.m.Layout(t.Context(), id, layout.IOModeRead, 0, layout.ToEOF, metaclient.Anywhere); err != nil || seg == nil {
		t.Fatal(err)
	}
	reads := s.space.count(wire.OpRead)
	later := start(5000, 30_000)
	select {
	case <-later:
		t.Fatal("the file is read while it is cut")
	case <-time.After(50 * time.Millisecond):
	}
	if n := s.space.count(wire.OpRead); n != reads {
		t.Error("what is being cut off is read")
	}
	close(set)
	r.want(within(t, "the truncation", cut), 0, "truncate")
	if got := within(t, "the later read", later); got.status != 0 || !bytes.Equal(got.data, want[5000:10_100]) {
		t.Errorf("%d bytes, %v; want those up to the new end", len(got.data), got.status)
	}
	r.write(id, 30_000, []byte("x"))
	r.want(r.fsync(id, fh), 0, "fsync")
	r.wantRead(id, 0, 40_000, append(append(bytes.Clone(want[:10_100]), make([]byte, 30_000-10_100)...), 'x'))
	r.closeFile(id, fh)
}

// Blocks that were taken away before they were told are lost, and only they.
func TestBlocksTakenAway(t *testing.T) {
	s := newSpaceService(false)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	id2, fh2 := r.create("g")
	r.write(id, 0, pattern(1, 5000))
	r.write(id2, 0, pattern(2, 5000))
	s.mu.Lock()
	s.cut(s.nodes[id], 0)
	s.mu.Unlock()
	if err := r.Sync(t.Context()); !errors.Is(err, errTaken) {
		t.Errorf("sync: %v, want what says that blocks were taken away", err)
	}
	r.want(r.fsync(id2, fh2), 0, "fsync of the other file")
	if n := r.durable(id2); n != 5000 {
		t.Errorf("the other file has %d bytes", n)
	}
	r.want(r.fsync(id, fh), syscall.EIO, "fsync")
	r.want(r.fsync(id, fh), 0, "fsync again")
	r.wantRead(id, 0, 5000, make([]byte, 5000))
	r.write(id, 0, pattern(3, 600))
	r.want(r.fsync(id, fh), 0, "fsync of what is written anew")
	r.wantRead(id, 0, 5000, append(pattern(3, 600), make([]byte, 4400)...))
	// A recall is answered all the same.
	r.write(id, 8192, pattern(4, 600))
	s.mu.Lock()
	s.cut(s.nodes[id], 0)
	s.mu.Unlock()
	if err := r.OnRecall(t.Context(), id, 0, layout.ToEOF); err != nil {
		t.Errorf("recall: %v", err)
	}
	r.want(r.flush(id, fh), syscall.EIO, "close")
	r.release(fh)
	r.closeFile(id2, fh2)
}

// What was written in a session and not told is lost with it, and what is read as it ends is read again.
func TestNamespaceSessionLost(t *testing.T) {
	s := newSpaceService(false)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	want := pattern(1, 5000)
	r.write(id, 0, want)
	r.want(r.fsync(id, fh), 0, "fsync")
	r.write(id, 8192, pattern(2, 1000))
	r.OnLost(0)
	r.OnReset(t.Context(), 0, true)
	r.want(r.fsync(id, fh), syscall.EIO, "fsync")
	r.want(r.fsync(id, fh), 0, "fsync again")
	s.mu.Lock()
	if n := len(s.nodes[id].blocks.valid); n != 10 || s.nodes[id].attr.Size != 5000 {
		t.Errorf("%d blocks are valid of %d bytes, want those of the session before", n, s.nodes[id].attr.Size)
	}
	s.mu.Unlock()
	for name, lose := range map[string]func() (restore func()){
		"the session is another one": func() func() {
			r.OnLost(0)
			r.OnReset(t.Context(), 0, true)
			return func() {}
		},
		"the session may be over": func() func() {
			s.mu.Lock()
			r.m.dead = true
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				r.m.dead = false
				s.mu.Unlock()
			}
		},
	} {
		r.read(id, 0, 10)
		begun, free := s.space.untilFree(wire.OpRead, 0)
		before := s.space.count(wire.OpRead)
		read := make(chan error, 1)
		go func() { // ends with the read
			got, status := r.tryRead(id, 0, 512) // by one command
			if status != 0 || !bytes.Equal(got, want[:512]) {
				read <- fmt.Errorf("%d bytes, %v", len(got), status)
			} else {
				read <- nil
			}
		}()
		within(t, "a read at the namespace", begun)
		restore := lose()
		free()
		waittest.Until(t, name+": it is read again", func() bool { return s.space.count(wire.OpRead)-before >= 2 })
		restore()
		if err := within(t, "the read", read); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.closeFile(id, fh)
}

// What one report has told is not told again by another one that was made before: the layout may have been given back since.
func TestReportThatWasOvertaken(t *testing.T) {
	s := newSpaceService(true)
	r := newSpaceRig(t, s)
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 5000))
	i := r.peek(id)
	late, err := i.commit(t.Context(), false)
	if err != nil || len(late.written) == 0 {
		t.Fatalf("%v, %v", late.written, err)
	}
	if err := r.OnRecall(t.Context(), id, 0, layout.ToEOF); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.cut(s.nodes[id], 0) // by somebody else
	s.mu.Unlock()
	if again, err := r.tell(t.Context(), []report{late}, false); err != nil || len(again) > 0 {
		t.Errorf("%v, %d files to be told of again", err, len(again))
	}
	r.want(r.fsync(id, fh), 0, "fsync")
	r.closeFile(id, fh)
}

// recalling is a session whose layout is recalled when somebody has just found it, which is once.
type recalling struct {
	*session
	recall func()
}

func (m *recalling) CachedLayout(id layout.FileID, mode layout.IOMode, off, n int64) *layout.Segment {
	seg := m.session.CachedLayout(id, mode, off, n)
	if recall := m.recall; recall != nil && seg != nil {
		m.recall = nil
		recall()
	}
	return seg
}

// The first read of a file does not go by a layout that was given back as it began.
func TestRecallAsTheFirstReadBegins(t *testing.T) {
	s := newSpaceService(false)
	writer := newSpaceRig(t, s)
	id, fh := writer.create("f")
	writer.write(id, 0, pattern(1, 5000))
	var m recalling
	r := newSpaceRig(t, s, func(c *Config) {
		m.session = c.Meta.(*session)
		c.Meta = &m
	})
	there := r.open(id, unix.O_RDONLY)
	if seg, err := r.m.Layout(t.Context(), id, layout.IOModeRead, 0, 5000, metaclient.Anywhere); err != nil || seg == nil {
		t.Fatal(err)
	}
	m.recall = func() {
		if err := r.OnRecall(t.Context(), id, 0, layout.ToEOF); err != nil {
			t.Error(err)
		}
	}
	i := r.peek(id)
	if seg, k := i.beginRead(0, 5000); seg != nil {
		t.Error("a read begins with a layout that was given back")
		i.endRead(k)
	}
	r.wantRead(id, 0, 5000, pattern(1, 5000))
	r.closeFile(id, there)
	writer.closeFile(id, fh)
}

// quiescing is a target that says when it is to wait for what is under way to a copy, and does so until over is closed.
type quiescing struct {
	*nvmetcp.Target
	begun, over chan struct{}
}

func (q *quiescing) Quiesce(ctx context.Context, df *layout.DataFile) error {
	q.begun <- struct{}{}
	<-q.over
	return q.Target.Quiesce(ctx, df)
}

// The layout of a file that was closed is not given back while something may be under way to a copy that was given up.
func TestCloseWaitsForForsakenCopies(t *testing.T) {
	s := newSpaceService(false)
	target, err := nvmetcp.NewTarget(s.space)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	q := &quiescing{target, make(chan struct{}, 10), make(chan struct{})}
	r := newRigOver(t, s, map[layout.DeviceID]dataplane.Target{spaceDevice: q})
	id, fh := r.create("f")
	r.write(id, 0, pattern(1, 5000))
	r.want(r.fsync(id, fh), 0, "fsync")
	seg, err := r.m.Layout(t.Context(), id, layout.IOModeRead, 0, 1, metaclient.Anywhere)
	if err != nil {
		t.Fatal(err)
	}
	r.OnCopiesStale(id, []metarpc.CopyRef{{Device: spaceDevice, Handle: seg.Mirrors[0].Servers[0].Handles[0]}})
	i := r.peek(id)
	if _, err := r.m.Layout(t.Context(), id, layout.IOModeRead, 0, 1, metaclient.Anywhere); err != nil {
		t.Fatal(err)
	}
	r.closeFile(id, fh)
	within(t, "it is waited for", q.begun)
	fh = r.open(id, unix.O_RDONLY) // and closed once more meanwhile
	r.closeFile(id, fh)
	i.mu.Lock()
	if !i.wanted || r.m.CachedLayout(id, layout.IOModeRead, 0, 1) == nil {
		t.Error("the file is let go")
	}
	i.mu.Unlock()
	close(q.over)
	waittest.Until(t, "the file is let go", func() bool { return r.held() == 0 })
	if r.m.CachedLayout(id, layout.IOModeRead, 0, 1) != nil {
		t.Error("the layout is kept")
	}
}
