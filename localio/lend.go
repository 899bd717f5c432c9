package localio

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

// Lends reports whether there is a session in which files are lent, for reading and writing, that others may have open for long.
func (t *Target) Lends() bool {
	s := t.current.Load()
	return s != nil && s.export == nil && s.readOnly == "" && !t.cfg.ReadOnly
}

// Lend returns a descriptor of a data file, for page-cached I/O, which is the caller's to close. With write it is one for reading and writing.
// What the caller does with it is his affair: it is not taken back when the server wants it back, so whoever keeps it keeps the server
// from confirming that nobody writes the file.
func (t *Target) Lend(ctx context.Context, df *layout.DataFile, write bool) (fd int, err error) {
	if write && t.cfg.ReadOnly {
		return -1, errors.New("it was mounted with localio=ro")
	}
	fh, err := nfs3.NewFileHandle(df.Handles[0])
	if err != nil {
		return -1, err
	}
	k := key{fh, df.Cred, write}
	t.mu.Lock()
	s := t.session
	switch {
	case s == nil:
		err := t.why
		t.mu.Unlock()
		return -1, err
	case s.export != nil:
		t.mu.Unlock()
		return -1, errors.New("nobody can tell who has files of other servers open")
	}
	f := s.lookup(k)
	switch {
	case f != nil || write && s.readOnly != "" || s.full():
		t.mu.Unlock()
	default:
		var ask *wire.Open
		f, ask = s.ask(k)
		t.mu.Unlock()
		s.send(ask)
	}
	switch {
	case f == nil && write && s.readOnly != "":
		return -1, fmt.Errorf("the data server lends nothing for writing: %s", s.readOnly)
	case f == nil:
		return -1, errors.New("too many files are being lent")
	}
	late := time.NewTimer(openTime)
	defer late.Stop()
	select {
	case <-f.known:
	case <-late.C:
		return -1, errors.New("the data server takes too long to lend the file")
	case <-ctx.Done():
		return -1, ctx.Err()
	}
	t.mu.Lock()
	opened := f.state == open && f.acquire()
	t.mu.Unlock()
	if !opened {
		return -1, errors.New("the data server does not lend the file")
	}
	defer f.release()
	return descriptors.Retry(func() (int, error) {
		if !write {
			return unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0)
		}
		// An open file of its own, since the kernel tells each one once of what could not be written back.
		return unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	})
}
