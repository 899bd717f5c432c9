package localio

import (
	"sync"
	"time"

	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// leaveTime is for how long the file system may have a request that was left before all others go by RPC.
const leaveTime = time.Second

// memory is what requests are done in that may be left, page-aligned.
var memory sync.Pool // of *[]byte

func getMemory(n int) []byte {
	if b, ok := memory.Get().(*[]byte); ok && cap(*b) >= n {
		return (*b)[:n]
	}
	return iobuf.Aligned(n)
}

// work is what the file system does. Whoever is at the task calls it.
func (k *task) work() *layout.Op {
	if k.own != nil {
		return k.own
	}
	return k.op
}

// separate makes a task that somebody is at, and that may have to be left, one that can be: it is done in memory of its
// own. It returns false if the task was taken away instead, or goes by RPC, because its memory is wanted already.
func (t *Target) separate(k *task) bool {
	op, f := k.op, k.file
	kind := &f.session.kind
	if kind.Memory || !op.Leave && op.Kind != layout.OpCommit {
		return true
	}
	own := *op
	var block []byte
	skip := 0
	if op.Kind != layout.OpCommit {
		skip = kind.Shift(len(op.Data), uint64(op.Off))
		block = getMemory(skip + len(op.Data))
		own.Data = block[skip:]
	}
	t.mu.Lock()
	if k.wanted {
		k.file = nil
		t.hand(k)
		t.Remote.Flush()
		f.release()
		return false
	}
	if op.Kind == layout.OpWrite {
		copy(own.Data, op.Data)
	}
	k.own = &own
	own.Target = block
	t.mu.Unlock()
	return true
}

// rejoin takes in that the file system has done a task, and passes the outcome on to its op. It returns false if the task
// was left: then it is over, but for the use of its file.
func (t *Target) rejoin(k *task, err error) bool {
	own := k.own
	if own == nil {
		return true
	}
	block, _ := own.Target.([]byte)
	t.mu.Lock()
	op := k.op
	if op == nil {
		if err != nil {
			t.failed(k.file, own, err)
		}
		t.give(k)
		t.mu.Unlock()
		putMemory(block)
		return false
	}
	k.own = nil // from here on Detach waits
	given := k.wanted
	k.wanted = false
	if given && err != nil { // it goes on by RPC
		op.Data, block = own.Data, nil
	}
	t.mu.Unlock()
	if err == nil {
		if op.Kind == layout.OpRead {
			copy(op.Data, own.Data[:own.N])
		}
		op.N, op.EOF, op.Committed, op.Verifier, op.Kept, op.Err = own.N, own.EOF, own.Committed, own.Verifier, own.Kept, nil
	}
	putMemory(block)
	return true
}

func putMemory(b []byte) {
	if b != nil {
		memory.Put(&b)
	}
}

// leaveSoon takes in that nobody waits for a task any more that the file system has, with memory of its own. mu is held.
func (t *Target) leaveSoon(k *task) {
	own := k.own
	time.AfterFunc(leaveTime, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if k.own == own { // it is still the same task
			t.leave(k)
		}
	})
}

// leave has all requests go by RPC until the file system has done a task for which nobody waits any more. So no more
// memory and threads are lost to a disk that hangs, and what asks the server knows how to wait for it. mu is held.
func (t *Target) leave(k *task) {
	if k.stuck {
		return
	}
	k.stuck = true
	if t.stuck.Add(1) == 1 {
		t.cfg.Log.Warn("the file system of the data server does not answer: until it does, requests go by RPC", "device", t.cfg.Name)
	}
}

// sweepLater sees to it that sweep runs in a while. mu is held.
func (t *Target) sweepLater() {
	if !t.sweeping {
		t.sweeping = true
		time.AfterFunc(t.cfg.Patience.Time/16, t.sweep)
	}
}

// sweep ends what the file system has had for Config.Patience; a WRITE does not end, but its caller is told (Op.Overdue).
func (t *Target) sweep() {
	limit := time.Now().Add(-t.cfg.Patience.Time)
	err := t.cfg.Patience.Over(nil)
	var ended []*layout.Op
	t.mu.Lock()
	t.sweeping = false
	busy := false
	for op, k := range t.tasksOf {
		busy = busy || k.busy
		if !k.busy || k.since.After(limit) {
			continue
		}
		switch {
		case op.Kind == layout.OpWrite && op.Overdue != nil && !k.overdue:
			k.overdue = true
			op.Overdue(op, err)
			t.leave(k)
		case op.Kind != layout.OpWrite && k.own != nil:
			t.takeAway(op, k)
			t.leave(k)
			ended = append(ended, op)
		}
	}
	if busy {
		t.sweepLater()
	}
	t.mu.Unlock()
	for _, op := range ended {
		op.N, op.EOF, op.Err = 0, false, err
		op.Done(op)
	}
}
