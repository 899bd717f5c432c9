package localio

import (
	"crypto/rand"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
)

// errWaits says that a request would have to wait.
var errWaits = errors.New("would wait")

// quick reports whether op may be done where nobody may wait.
func (s *session) quick(op *layout.Op) bool {
	switch op.Kind {
	case layout.OpRead:
		return len(op.Data) <= small && (s.kind.Memory || len(op.Data) <= smallOnDisk && !s.kind.Reaches(len(op.Data), op.Off))
	case layout.OpWrite:
		return len(op.Data) <= small && s.kind.Memory && op.Stable == layout.Unstable
	}
	return s.kind.Memory
}

// maxKnown bounds session.known.
const maxKnown = 4096

// remember notes that f is the file for requests like op.
func (s *session) remember(op *layout.Op, f *file) {
	m := &s.known[0]
	if op.Kind != layout.OpRead {
		m = &s.known[1]
	}
	if was, loaded := m.Swap(op.File, f); loaded && was == f {
		return
	}
	if s.count.Add(1) > maxKnown {
		s.known[0].Clear()
		s.known[1].Clear()
		s.count.Store(0)
	}
}

// recall returns what remember has noted, nil if that is nothing.
func (s *session) recall(op *layout.Op) *file {
	m := &s.known[0]
	if op.Kind != layout.OpRead {
		m = &s.known[1]
	}
	if f, ok := m.Load(op.File); ok {
		return f.(*file)
	}
	return nil
}

// do does op by the file's descriptors. With now a READ that would have to wait ends with errWaits. After an error op is to be
// done from the beginning by RPC.
func (f *file) do(op *layout.Op, now bool) error {
	kind := &f.session.kind
	switch op.Kind {
	case layout.OpRead:
		n, err := len(op.Data), error(nil)
		if now {
			if !kind.ReadNow(f.fd, op.Data, op.Off) {
				return errWaits
			}
		} else if n, err = readFile(kind, f, op.Data, op.Off); err != nil {
			return err
		}
		if !f.permitted() {
			return errGone
		}
		op.N, op.EOF = n, n < len(op.Data)
	case layout.OpWrite:
		n, err := writeFile(kind, f, op.Data, op.Off)
		if err == nil && op.Stable != layout.Unstable {
			err = f.sync(op.Stable == layout.FileSync)
		}
		if err != nil {
			return err
		}
		op.N, op.Committed, op.Verifier, op.Kept = n, op.Stable, f.verifier, f.kept
	case layout.OpCommit:
		if err := f.sync(false); err != nil {
			return err
		}
		op.Verifier, op.Kept = f.verifier, f.kept
	}
	op.Err = nil
	return nil
}

// queued has the ring do a task, and reports whether it does: those that wait for a disk, and have no parts.
func (t *Target) queued(k *task) bool {
	op, kind := k.work(), &k.file.session.kind
	if kind.Memory || op.Kind == layout.OpCommit || op.Kind == layout.OpWrite && op.Stable != layout.Unstable {
		return false
	}
	fd, ok := kind.Whole(k.file, op.Data, op.Off)
	if !ok {
		return false
	}
	r := t.ring.Load()
	if r == nil && !t.ringless.Load() && !descriptors.Scarce() {
		r = t.makeRing()
	}
	return r != nil && r.start(k, fd, op.Kind == layout.OpWrite, op.Data, op.Off)
}

// makeRing makes the ring, if nobody else has. It returns nil if there is none.
func (t *Target) makeRing() *ring {
	t.ringMu.Lock()
	defer t.ringMu.Unlock()
	if r := t.ring.Load(); r != nil || t.ringless.Load() {
		return r
	}
	r, err := newRing(t.reaped, t.last)
	switch {
	case err == nil:
		t.ring.Store(r)
	case !descriptors.Short(err): // or a later request makes it
		t.ringless.Store(true)
		t.cfg.Log.Info("reads and writes that wait for a disk have a thread each", "device", t.cfg.Name, "because", err)
	}
	return r
}

// reaped ends a task that the ring has done, res being what read(2) or write(2) would return, or a negative errno.
func (t *Target) reaped(k *task, res int32) over {
	op, f := k.work(), k.file
	if int(res) != len(op.Data) || !f.permitted() {
		go func() { // ends with the request, of which there may be some left, or nothing, or which goes by RPC
			defer t.tasks.Done()
			t.perform(k, false)
		}()
		return over{}
	}
	op.N, op.EOF, op.Err = len(op.Data), false, nil
	kind := &f.session.kind
	if direct := kind.Reaches(len(op.Data), op.Off); op.Kind == layout.OpWrite {
		op.Committed, op.Verifier, op.Kept = layout.Unstable, f.verifier, f.kept
		if !direct {
			kind.HaveWritten(f, op.Off, op.N)
		}
	} else if !direct {
		kind.HaveRead(f, op.Off, op.N)
	}
	if !t.rejoin(k, nil) {
		f.release()
		t.tasks.Done()
		return over{}
	}
	op = k.op
	t.settle(k)
	return over{op, f}
}

// last is the end of what reaped has returned.
func (t *Target) last(o over) {
	o.op.Done(o.op)
	o.f.release()
	t.tasks.Done()
}

// syncError says that what was written may not have become stable, and that the kernel will not say so again.
type syncError struct{ err error }

func (e *syncError) Error() string { return "sync: " + e.err.Error() }
func (e *syncError) Unwrap() error { return e.err }

// fsync and fdatasync are the system calls, and readFile and writeFile some more; tests put others in their place.
var (
	fsync, fdatasync    = unix.Fsync, unix.Fdatasync
	readFile, writeFile = (*fileio.Kind).Read, (*fileio.Kind).Write
)

// sync makes what was written stable, with full all attributes, too. It is done by the descriptor that was open before all
// writes, of whichever kind: there the kernel tells of those that failed.
func (f *file) sync(full bool) error {
	do := fdatasync
	if full {
		do = fsync
	}
	f.syncing.Lock()
	defer f.syncing.Unlock()
	if f.broken == nil {
		if f.broken = fileio.Retry(do, f.fd); f.broken != nil {
			f.session.t.spoil(f.key.fh) // at once: the kernel says nothing of it to those who open the file now
			fileio.DropPages(f.fd)      // it is written anew by another descriptor, or by RPC
		}
	}
	if f.broken != nil {
		return &syncError{f.broken}
	}
	return nil
}

// spoil makes all verifiers of a data file others from now on than they were, by whichever way it is written: what was written
// and not stable has to be sent again.
func (t *Target) spoil(fh nfs3.FileHandle) {
	var salt layout.Verifier
	rand.Read(salt[:])
	t.salts.Store(fh, salt)
	t.spoilt.Store(true)
}

// token is what requests for a data file are Kept as: always the same, but for what spoil has changed. A write is in the page cache when it
// is answered, where it stays when the server goes, and whoever syncs the file then has it written.
func (t *Target) token(fh nfs3.FileHandle) uint64 {
	salt, ok := t.salts.Load(fh)
	if !ok {
		return t.kept
	}
	v := salt.(layout.Verifier)
	return t.kept ^ binary.LittleEndian.Uint64(v[:])&^1
}

// Keeps reports whether writes go by descriptors.
func (t *Target) Keeps() bool {
	s := t.current.Load()
	return s != nil && s.readOnly == "" && !t.cfg.ReadOnly
}

// salt changes a verifier that belongs to a data file.
func (t *Target) salt(fh nfs3.FileHandle, v *layout.Verifier) {
	salt, ok := t.salts.Load(fh)
	if !ok {
		return
	}
	for i, b := range salt.(layout.Verifier) {
		v[i] ^= b
	}
}

// saltLater changes the verifier that a request by RPC brings, and says what a COMMIT covers.
func (t *Target) saltLater(op *layout.Op) {
	if op.Kind == layout.OpRead || op.File == nil || len(op.File.Handles) == 0 {
		return
	}
	fh, err := nfs3.NewFileHandle(op.File.Handles[0])
	if err != nil {
		return
	}
	done := op.Done
	op.Done = func(op *layout.Op) {
		op.Done = done
		t.salt(fh, &op.Verifier)
		if op.Kind == layout.OpCommit {
			op.Kept = t.token(fh)
		}
		done(op)
	}
}
