package fs

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// mirrorTimeout is after how long a copy is done without that does not answer. A busy machine must not take as long for anything.
const mirrorTimeout = 2 * time.Second

// mirroredRig is a mount of a volume with two data servers and two copies of everything.
func mirroredRig(t *testing.T) (*service, *rig) {
	s := newService(2, 64<<10)
	s.mirrors, s.patience = true, mirrorTimeout
	return s, newRig(t, s)
}

// TestFailedCopy fails one copy in many ways: the application sees nothing of it, but that a server that is silent costs
// the timeout. What it reads is what it wrote, here and on another mount.
func TestFailedCopy(t *testing.T) {
	for name, rule := range map[string]faultytest.Rule{
		"EIO":          {Kind: layout.OpWrite, Err: syscall.EIO},
		"ENOSPC":       {Kind: layout.OpWrite, Err: syscall.ENOSPC},
		"ESTALE":       {Kind: layout.OpWrite, Err: syscall.ESTALE},
		"EACCES":       {Kind: layout.OpWrite, Err: syscall.EACCES},
		"short":        {Kind: layout.OpWrite, Err: syscall.EIO, Short: true},
		"reached":      {Kind: layout.OpWrite, Err: syscall.EIO, Reach: true},
		"silent":       {Kind: layout.OpWrite, Delay: time.Hour},
		"commit fails": {Kind: layout.OpCommit, Err: syscall.EIO},
		"no commit":    {Kind: layout.OpCommit, Delay: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			s, r := mirroredRig(t)
			other := newRig(t, s)
			id, fh := r.create("f")
			there := other.open(id, unix.O_RDONLY)
			data := bytes.Repeat([]byte("before"), 50000)
			r.write(id, 0, data)
			r.want(r.fsync(id, fh), 0, "fsync")
			other.wantRead(id, 0, len(data), data)
			r.faults[1].SetRules(rule)
			data = bytes.Repeat([]byte("behind"), 50000)
			r.write(id, 0, data)
			for range 4 {
				other.wantRead(id, 0, len(data), data)
			}
			r.want(r.fsync(id, fh), 0, "fsync")
			if r.m.called("LayoutError") == 0 {
				t.Error("the service was not told")
			}
			for range 4 {
				r.wantRead(id, 0, len(data), data)
				other.wantRead(id, 0, len(data), data)
			}
			told := r.m.called("LayoutError")
			r.write(id, 0, data)
			r.want(r.fsync(id, fh), 0, "fsync")
			if r.m.called("LayoutError") != told {
				t.Error("the service was told again of what it knows")
			}
			r.faults[1].SetRules()
			other.release(there)
			r.want(r.flush(id, fh), 0, "close")
		})
	}
}

// TestExacting: an fsync waits until there are two good copies again, where files are to have them. Writes do not,
// but for those that are to be stable.
func TestExacting(t *testing.T) {
	s := newService(2, 64<<10)
	s.mirrors, s.exacting, s.patience = true, true, mirrorTimeout
	r := newRig(t, s)
	id, fh := r.create("f")
	data := bytes.Repeat([]byte("before"), 50000)
	r.write(id, 0, data)
	r.want(r.fsync(id, fh), 0, "fsync")
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.EIO})
	data = bytes.Repeat([]byte("behind"), 50000)
	r.write(id, 0, data)
	asked := r.m.called("Layout")
	synced := make(chan fuse.Status)
	go func() { synced <- r.fsync(id, fh) }()
	go func() {
		_, status := r.tryWrite(id, 0, data, unix.O_RDWR|unix.O_DSYNC)
		synced <- status
	}()
	waittest.Until(t, "the service is asked for copies", func() bool { return r.m.called("Layout") >= asked+8 })
	r.wantRead(id, 0, len(data), data)
	r.write(id, 0, data)
	select {
	case status := <-synced:
		t.Errorf("synced with one good copy: %v", status)
	default:
	}
	s.filled.Store(true)
	r.want(<-synced, 0, "with two good copies")
	r.want(<-synced, 0, "with two good copies")
	r.faults[1].SetRules()
}

// TestExactingSoft has an fsync wait for a copy on a soft mount: it fails in the end, and the next one does not if
// there is a copy by then.
func TestExactingSoft(t *testing.T) {
	s := newService(2, 64<<10)
	s.mirrors, s.exacting, s.patience = true, true, mirrorTimeout
	r := newRig(t, s, func(c *Config) { c.Patience = layout.Patience{Time: time.Second, Errno: syscall.ETIMEDOUT} })
	id, fh := r.create("f")
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.EIO})
	r.write(id, 0, []byte("data"))
	r.want(r.fsync(id, fh), syscall.ETIMEDOUT, "fsync")
	s.filled.Store(true)
	r.want(r.fsync(id, fh), 0, "with two good copies")
	r.faults[1].SetRules()
}

// TestLastCopy fails the only copy that is left: its errors are the application's, and while it is silent everything waits.
func TestLastCopy(t *testing.T) {
	_, r := mirroredRig(t)
	id, fh := r.create("f")
	r.write(id, 0, []byte("data"))
	r.want(r.fsync(id, fh), 0, "fsync")
	r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.EIO})
	r.write(id, 0, []byte("more"))
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Err: syscall.ENOSPC})
	if _, status := r.tryWrite(id, 0, []byte("full"), unix.O_RDWR); status != 28 {
		t.Errorf("write to a full server: %v", status)
	}
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Late: 2 * mirrorTimeout})
	start := time.Now()
	r.write(id, 0, []byte("last"))
	if took := time.Since(start); took < 2*mirrorTimeout {
		t.Errorf("the last copy was given up after %v", took)
	}
	r.faults[1].SetRules()
	r.wantRead(id, 0, 4, []byte("last"))
	r.want(r.fsync(id, fh), 0, "fsync")
}

// TestSettledWithoutCaller fails a copy under a write whose caller was killed: the copies are settled all the same, and before
// that the file is not let go.
func TestSettledWithoutCaller(t *testing.T) {
	_, r := mirroredRig(t)
	id, fh := r.create("f")
	r.write(id, 0, []byte("data"))
	r.want(r.fsync(id, fh), 0, "fsync")
	r.faults[1].SetRules(faultytest.Rule{Kind: layout.OpWrite, Delay: 100 * time.Millisecond, Err: errors.New("lost")})
	w := &Write{ID: id, Data: []byte("gone"), Flags: unix.O_RDWR, Done: func(int, syscall.Errno) {}}
	r.StartWrite(w)
	r.Flush()
	w.Detach()
	r.release(fh)
	waittest.Until(t, "the file is not kept", func() bool { return r.peek(id) == nil })
	if n := r.m.called("LayoutError"); n != 1 {
		t.Errorf("the service was told %d times", n)
	}
}
