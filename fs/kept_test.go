package fs

import (
	"io"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// calm makes the mount forget what was recalled and renamed before.
func (r *rig) calm() {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	r.kept.dirs, r.kept.count = nil, 0
}

// keepOn has the kernel keep its names for so long that a recall on a slow machine waits for the notifications, but no
// longer than leases last.
func (r *rig) keepOn() {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	for _, d := range r.kept.dirs {
		for _, n := range d.names {
			n.until = now() + int64(time.Minute/2)
		}
	}
}

// lookup is LOOKUP by a thread, of a name that its kernel may know. It returns for how long it may be kept.
func (r *rig) lookup(thread uint32, parent layout.FileID, name string) time.Duration {
	h := header(parent)
	h.Opcode, h.Pid = opLookup, thread
	var out fuse.EntryOut
	r.raw.Lookup(nil, &h, name, &out)
	return out.EntryTimeout()
}

func (r *rig) rename(from layout.FileID, old string, to layout.FileID, new string, flags uint32) {
	r.t.Helper()
	r.want(r.tryRename(from, old, to, new, flags), 0, "rename")
}

func (r *rig) tryRename(from layout.FileID, old string, to layout.FileID, new string, flags uint32) fuse.Status {
	in := &fuse.RenameIn{InHeader: header(from), Newdir: uint64(to), Flags: flags}
	in.Opcode = opRename2
	return r.raw.Rename(nil, in, old, new)
}

func (r *rig) mkdir(name string) layout.FileID {
	r.t.Helper()
	var out fuse.EntryOut
	r.want(r.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: header(layout.RootID), Mode: 0755}, name, &out), 0, "mkdir")
	return layout.FileID(out.NodeId)
}

// expired remembers which names a kernel was made to ask for again.
type expired struct {
	mu   sync.Mutex
	list []place
}

func (e *expired) add(at place) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, at)
}

func (e *expired) take() []place {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := e.list
	e.list = nil
	return list
}

// pendingThread does as if a thread that was answered did not run on.
func (r *rig) pendingThread(state threadState) *atomic.Int32 {
	var s atomic.Int32
	s.Store(int32(state))
	r.thread = func(uint32) threadState { return threadState(s.Load()) }
	return &s
}

// A recall has no name expired before each thread that looks one up again has made use of its answer.
func TestExpireAfterAnswer(t *testing.T) {
	s := newService(1, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	var told expired
	b.listen().name = told.add
	a.mkdir("d")
	for _, c := range []struct {
		what string
		pass func(state *atomic.Int32)
	}{
		{"its next request", func(*atomic.Int32) { b.kept.asked(7) }},
		{"its end", func(state *atomic.Int32) { state.Store(int32(threadGone)) }},
		{"its sleep", func(state *atomic.Int32) { state.Store(int32(threadSleeps)) }},
		{"a second", func(*atomic.Int32) {}},
	} {
		b.calm()
		state := b.pendingThread(threadRuns)
		if keep := b.lookup(7, layout.RootID, "d"); keep != mostKept {
			t.Fatalf("%s: the name may be kept for %v", c.what, keep)
		}
		answered := now()
		b.keepOn()
		done := make(chan struct{})
		go func() { // ends with the recall
			defer close(done)
			b.expireNames(t.Context(), layout.RootID)
		}()
		time.Sleep(10 * time.Millisecond)
		list := told.take()
		if len(list) > 0 && time.Duration(now()-answered) < threadPatience {
			t.Errorf("%s: %v were expired before it", c.what, list)
		}
		c.pass(state)
		<-done
		if list = append(list, told.take()...); !slices.Equal(list, []place{{1, "d"}}) {
			t.Errorf("%s: %v were expired", c.what, list)
		}
	}
}

// A name that is looked up for the first time, or made, or missing, is expired at once: the kernel orders the two.
func TestExpireLocked(t *testing.T) {
	s := newService(1, 64<<10)
	r := newRig(t, s)
	var told expired
	r.listen().name = told.add
	r.pendingThread(threadRuns)
	r.mkdir("d")
	if r.lookup(7, layout.RootID, "none") == 0 {
		t.Error("a name that is missing may not be kept")
	}
	r.keepOn()
	r.expireNames(t.Context(), layout.RootID)
	if n := r.kept.asking.Load(); n != 2 {
		t.Errorf("it has waited until %d threads of 2 are left", n)
	}
	if list := told.take(); len(list) != 2 {
		t.Errorf("%v were expired", list)
	}
}

// A recall that cannot have names expired waits until they may not be kept any more, and after it none are for a while.
func TestExpireStuck(t *testing.T) {
	s := newService(1, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	b.kept.most = 300 * time.Millisecond
	free := make(chan struct{})
	defer close(free)
	b.listen().name = func(place) { <-free }
	a.mkdir("d")
	keep := b.lookup(testPID, layout.RootID, "d")
	used := now()
	b.kept.asked(testPID)
	a.mkdir("e") // recalls the names
	if took := time.Duration(now() - used); took < keep || keep == 0 {
		t.Errorf("a name to be kept for %v was waited for %v", keep, took)
	}
	for range 2 { // the first one asks for the lease
		if keep := b.lookup(testPID, layout.RootID, "d"); keep != 0 {
			t.Errorf("after a slow recall a name may be kept for %v", keep)
		}
	}
	b.kept.mu.Lock()
	pause := time.Duration(b.kept.dirs[layout.RootID].pause - now())
	b.kept.mu.Unlock()
	if pause < slowRecallPause/2 {
		t.Errorf("it has a pause of %v", pause)
	}
}

// What was asked before a recall ended is not kept.
func TestKeepOvertaken(t *testing.T) {
	k := keptNames{most: mostKept}
	const dir = layout.RootID
	at := place{1, "f"}
	give := func(asked int64) time.Duration { return k.give(dir, at, 7, false, asked, time.Minute) }
	before := now()
	if give(before) != mostKept {
		t.Error("not kept")
	}
	dirs := k.beginRecall([]layout.FileID{dir})
	if give(now()) != 0 {
		t.Error("kept while a recall is under way")
	}
	k.endRecall(dirs, false)
	k.dirs[dir].pause = 0
	if give(before) != 0 {
		t.Error("kept though it was asked before a recall")
	}
	time.Sleep(time.Millisecond)
	if give(now()) != leastKept {
		t.Error("not kept after a recall, or for long")
	}
	k.dirs[dir].recalled -= int64(recallMemory)
	if give(now()) != mostKept {
		t.Error("not kept as before when a recall was long ago")
	}
	e := &ends{dirs: [2]layout.FileID{dir, 5}, at: [2]place{at, {5, "f"}}}
	asked := now()
	k.beginRename(e)
	if give(now()) != 0 {
		t.Error("kept while a rename is under way")
	}
	k.endRename(e, false)
	if give(asked) != 0 {
		t.Error("kept though it was asked before a rename")
	}
	if give(now()-int64(recallPause)-1) != 0 {
		t.Error("kept though nobody knows what happened since it was asked")
	}
	time.Sleep(time.Millisecond)
	if give(now()) == 0 {
		t.Error("not kept after a rename")
	}
	k.beginRename(e)
	k.endRename(e, true)
	if k.dirs[dir].pause < now()+int64(slowRecallPause/2) || k.dirs[5].pause != 0 {
		t.Error("after a slow rename there is no pause, or one for the new directory")
	}
	for _, d := range k.dirs {
		d.used, d.recalled, d.pause = -int64(time.Hour), -int64(time.Hour), 0
	}
	k.asked(7)
	k.sweep(now() + int64(time.Minute))
	if len(k.dirs) != 0 || k.count != 0 || len(k.askers) != 0 || k.asking.Load() != 0 {
		t.Errorf("left over: %d directories, %d names, %d askers", len(k.dirs), k.count, len(k.askers))
	}
}

// The kernel takes an entry with it to the place where a rename leads, and so does the next recall there.
func TestExpireRenamed(t *testing.T) {
	s := newService(1, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	var told expired
	b.listen().name = told.add
	from, to := a.mkdir("from"), a.mkdir("to")
	id, fh := a.create("f")
	a.closeFile(id, fh)
	a.rename(layout.RootID, "f", from, "f", 0)
	b.lookup(testPID, to, "g") // a lease on the names
	if b.lookup(testPID, from, "f") == 0 {
		t.Fatal("the name may not be kept")
	}
	b.keepOn()
	b.rename(from, "f", to, "g", 0)
	told.take()
	a.rename(to, "g", to, "h", 0)
	if !slices.Contains(told.take(), place{uint64(to), "g"}) {
		t.Error("the renamed entry was not expired")
	}

	// Without a lease on the new directory the rename starts over, and then the kernel keeps nothing. If it cannot, it takes
	// as long as the entry is kept.
	for _, firm := range []bool{false, true} {
		b.calm()
		b.kept.most = 200 * time.Millisecond
		b.lookup(testPID, to, "h")
		keep := b.lookup(testPID, to, "h")
		if keep == 0 {
			t.Fatal("the name may not be kept")
		}
		b.kernelThread = func(uint32) bool { return firm }
		s.mu.Lock()
		s.nodes[from].changing++ // which gives no lease
		s.mu.Unlock()
		used := now()
		b.kept.asked(testPID)
		if !firm {
			b.want(b.tryRename(to, "h", from, "f", 0), syscall.ESTALE, "rename")
			if !slices.Contains(told.take(), place{uint64(to), "h"}) {
				waittest.Until(t, "the name is expired", func() bool {
					return slices.Contains(told.take(), place{uint64(to), "h"})
				})
			}
		}
		b.rename(to, "h", from, "f", 0)
		s.mu.Lock()
		s.nodes[from].changing--
		s.mu.Unlock()
		if took := time.Duration(now() - used); firm && took < keep {
			t.Errorf("a name to be kept for %v was moved to where there is no lease after %v", keep, took)
		}
		if !firm {
			b.rename(from, "f", to, "h", 0)
		}
	}
	b.kept.most = mostKept

	// Both entries of an exchange.
	id, fh = a.create("x")
	a.closeFile(id, fh)
	b.calm()
	for _, at := range []place{{uint64(from), "f"}, {uint64(layout.RootID), "x"}} {
		b.lookup(testPID, layout.FileID(at.parent), at.name)
		if b.lookup(testPID, layout.FileID(at.parent), at.name) == 0 {
			t.Fatalf("%v may not be kept", at)
		}
	}
	b.keepOn()
	b.rename(layout.RootID, "x", from, "f", metarpc.RenameExchange)
	told.take()
	a.want(a.raw.Unlink(nil, &fuse.InHeader{NodeId: uint64(from), Caller: header(from).Caller}, "f"), 0, "unlink")
	if !slices.Contains(told.take(), place{uint64(from), "f"}) {
		t.Error("the exchanged entry was not expired")
	}
	a.want(a.raw.Unlink(nil, &fuse.InHeader{NodeId: uint64(layout.RootID), Caller: header(from).Caller}, "x"), 0, "unlink")
	if !slices.Contains(told.take(), place{uint64(layout.RootID), "x"}) {
		t.Error("the other exchanged entry was not expired")
	}
}

// What a thread does is seen as it is.
func TestStateOf(t *testing.T) {
	for script, want := range map[string]threadState{"read x": threadSleeps, "while :; do :; done": threadRuns} {
		cmd := exec.Command("sh", "-c", script)
		in := must[io.WriteCloser](t)(cmd.StdinPipe())
		ok(t, cmd.Start())
		id := uint32(cmd.Process.Pid)
		waittest.Until(t, script, func() bool { return stateOf(id) == want })
		cmd.Process.Kill()
		cmd.Wait()
		in.Close()
		if got := stateOf(id); got != threadGone {
			t.Errorf("%s: after its end state %d", script, got)
		}
	}
}
