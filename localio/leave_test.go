package localio

import (
	"bytes"
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// hung is a disk that answers nothing before the gate is closed.
type hung struct {
	gate    chan struct{}
	waiting atomic.Int32
}

func (h *hung) wait() {
	h.waiting.Add(1)
	<-h.gate
}

// hang has the file system of l answer nothing. The function that it returns ends that.
func hang(t *testing.T, l *Target) (h *hung, release func()) {
	h = &hung{gate: make(chan struct{})}
	release = sync.OnceFunc(func() { close(h.gate) })
	read, write, datasync := readFile, writeFile, fdatasync
	t.Cleanup(func() { readFile, writeFile, fdatasync = read, write, datasync })
	readFile = func(k *fileio.Kind, f fileio.File, b []byte, off int64) (int, error) {
		h.wait()
		return read(k, f, b, off)
	}
	writeFile = func(k *fileio.Kind, f fileio.File, b []byte, off int64) (int, error) {
		h.wait()
		return write(k, f, b, off)
	}
	fdatasync = func(fd int) error {
		h.wait()
		return datasync(fd)
	}
	l.ringless.Store(true) // there is none
	l.mu.Lock()
	l.session.kind.Memory = false
	l.mu.Unlock()
	t.Cleanup(release) // before the target is closed
	return h, release
}

// filled starts with a data file of so many bytes that the target has open.
func filled(t *testing.T, e *env, l *Target, data []byte) *layout.DataFile {
	t.Helper()
	df := e.newFile(0o640)
	if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: data, Stable: layout.FileSync}); op.Err != nil {
		t.Fatal(op.Err)
	}
	if st := l.Status(context.Background()); st.OpsLocal != 1 {
		t.Fatalf("%d requests by descriptors, want 1", st.OpsLocal)
	}
	return df
}

// A READ that the file system does not end can be detached, its memory is the caller's then, and as long as it is under
// way all others go by RPC.
func TestLeave(t *testing.T) {
	e := newEnv(t, "", nil)
	l := e.local()
	data := bytes.Repeat([]byte("weft"), smallOnDisk/2)
	df := filled(t, e, l, data)
	h, release := hang(t, l)
	read := &layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, len(data)), Leave: true}
	write := &layout.Op{Kind: layout.OpWrite, File: df, Off: int64(len(data)), Data: bytes.Clone(data), Leave: true}
	readDone, writeDone := begin(l, read), begin(l, write)
	waittest.Until(t, "both are with the file system", func() bool { return h.waiting.Load() == 2 })
	for _, op := range []*layout.Op{read, write} {
		mine := op.Data
		l.Detach(op)
		for i := range mine {
			mine[i] = 'm'
		}
	}
	<-readDone
	if !errors.Is(read.Err, context.Canceled) {
		t.Errorf("the READ ended with %v", read.Err)
	}
	waittest.Until(t, "that it hangs is noticed", func() bool { return l.stuck.Load() == 2 })
	before := l.Status(context.Background())
	if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, len(data))}); op.Err != nil || !bytes.Equal(op.Data, data) {
		t.Errorf("a READ meanwhile: %v, %.8q", op.Err, op.Data)
	}
	if st := l.Status(context.Background()); st.OpsRPC != before.OpsRPC+1 {
		t.Errorf("%d requests by RPC meanwhile, want 1", st.OpsRPC-before.OpsRPC)
	}
	select {
	case <-writeDone:
		t.Error("the WRITE has ended while it was under way")
	default:
	}
	release()
	<-writeDone
	if write.Err != nil || write.N != len(data) {
		t.Errorf("the WRITE: %d bytes, %v", write.N, write.Err)
	}
	if got, err := os.ReadFile(e.path()); err != nil || !bytes.Equal(got, bytes.Repeat(data, 2)) {
		t.Errorf("the WRITE was not of what its memory held before Detach: %d bytes, %v", len(got), err)
	}
	waittest.Until(t, "nothing hangs any more", func() bool { return l.stuck.Load() == 0 })
	if i := bytes.IndexFunc(read.Data, func(c rune) bool { return c != 'm' }); i >= 0 {
		t.Errorf("byte %d of the READ's memory was written to after Detach: %q", i, read.Data[i])
	}
	before = l.Status(context.Background())
	if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, 8), Leave: true}); op.Err != nil || string(op.Data) != "weftweft" {
		t.Errorf("a READ afterwards: %v, %q", op.Err, op.Data)
	}
	if st := l.Status(context.Background()); st.OpsLocal != before.OpsLocal+1 {
		t.Error("a READ afterwards went by RPC")
	}
}

// On a soft mount requests that the file system does not end are given up.
func TestLeaveSoft(t *testing.T) {
	const patience = 300 * time.Millisecond
	e := newEnv(t, "", nil)
	l := e.target(func(c *Config) { c.Patience = layout.Patience{Time: patience, Errno: unix.EIO} })
	data := bytes.Repeat([]byte("weft"), smallOnDisk/2)
	df := filled(t, e, l, data)
	h, release := hang(t, l)
	overdue := make(chan error, 1)
	read := &layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, len(data)), Leave: true}
	commit := &layout.Op{Kind: layout.OpCommit, File: df}
	write := &layout.Op{Kind: layout.OpWrite, File: df, Data: data, Leave: true, Overdue: func(_ *layout.Op, err error) { overdue <- err }}
	readDone, commitDone, writeDone := begin(l, read), begin(l, commit), begin(l, write)
	waittest.Until(t, "all are with the file system", func() bool { return h.waiting.Load() == 3 })
	<-readDone
	<-commitDone
	for what, err := range map[string]error{"READ": read.Err, "COMMIT": commit.Err, "WRITE": <-overdue} {
		if errnoOf(err) != unix.EIO || !errors.As(err, new(*layout.TimeoutError)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	l.Detach(write) // as its caller does
	if n := l.stuck.Load(); n != 3 {
		t.Errorf("%d requests were left, want 3", n)
	}
	if op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, len(data)), Leave: true}); op.Err != nil || !bytes.Equal(op.Data, data) {
		t.Errorf("a READ by RPC: %v, %.8q", op.Err, op.Data)
	}
	release()
	<-writeDone
	if write.Err != nil {
		t.Errorf("the WRITE: %v", write.Err)
	}
	waittest.Until(t, "nothing hangs any more", func() bool { return l.stuck.Load() == 0 })
}
