package data

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/fileio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// syncState is what Server.sync knows of a file.
type syncState struct {
	dirty atomic.Bool   // there may be data that no sync has covered; set behind a write, cleared before a sync
	full  atomic.Bool   // somebody who waits wants all attributes, too
	begun atomic.Uint64 // syncs, counted before the system call
	// failed says that a sync has failed, and that pages may be in the page cache which a later one does not make
	// stable, see fileio.DropPages. It is set before there is another verifier. Server.get clears it, so no write has
	// that verifier and such a page.
	failed atomic.Bool

	mu   sync.Mutex // held during a sync
	verf wire.WriteVerf
	err  error // of the last sync
}

// fsync and fdatasync are the system calls; tests put others in their place.
var fsync, fdatasync = unix.Fsync, unix.Fdatasync

// sync makes what was written to a file stable, with full all its attributes, too. verf is the verifier of writes that
// this vouches for: after a failure the server has another one.
//
// The kernel tells that it could not write something to one caller only. So there is one sync of a file at a time, which
// serves all who came before it began, and takes the verifier when it begins: if it were taken by somebody who then
// waits, the sync before might fail, this one succeed with the rest, and the loss go unnoticed.
func (s *Server) sync(f *file, full bool) (verf wire.WriteVerf, err error) {
	y := &f.sync
	if full {
		y.full.Store(true)
	}
	covers := y.begun.Load() + 1 // the first sync that begins after this
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.begun.Load() >= covers {
		return y.verf, y.err
	}
	y.begun.Add(1)
	y.dirty.Store(false)
	y.verf = *s.verifier.now.Load()
	do := fdatasync
	if y.full.Swap(false) || full { // whoever has taken our wish before may have failed
		do = fsync
	}
	before := y.err
	y.err = fileio.Retry(do, f.fd)
	if y.err != nil {
		y.failed.Store(true)
		s.newVerifier()
	}
	if y.err != nil && before == nil {
		s.log.Error("sync failed: clients send again what was not committed", "handle", f.fh, "err", y.err)
	}
	return y.verf, y.err
}

// stabilize is a full sync for those whom the verifier does not concern.
func (s *Server) stabilize(f *file) error {
	_, err := s.sync(f, true)
	return err
}

// recover makes a file of which a sync has failed fit for being written again.
func (f *file) recover() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sync.failed.Load() {
		fileio.DropPages(f.fd)
		f.sync.failed.Store(false)
	}
}
