package localio

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

// Export is an administrator's statement that a directory of this host is what an NFSv3 server that is not weft's exports.
type Export struct {
	Statement string // for messages: how it was put
	Dir       string // the directory, an absolute path
	// Lookup returns the server's file handle of a name in the root of the export, as it gives it to the superuser.
	Lookup func(ctx context.Context, name string) ([]byte, error)
}

// verifyTime is how often a statement is verified, besides whenever Remote has made a connection. Tests have less time.
var verifyTime = time.Hour

const (
	// probePrefix is what the names of files begin with that are made for that. One that is older than probeAge was left behind.
	probePrefix = ".weft-local-"
	probeAge    = time.Hour
	nonceSize   = 32
)

// Whom such a file belongs to, and somebody else. No data file is stranger's, and no group.
var (
	probeOwner = layout.Credential{UID: 1<<31 - 2, GID: 1<<31 - 2}
	stranger   = layout.Credential{UID: 1<<31 - 1, GID: 1<<31 - 1}
)

// readsOnly is why writes go by RPC.
const readsOnly = "the data server is none of weft's: descriptors to write by could not be taken back"

// errGone says that a file may not be read any more by whom its descriptor was opened for.
var errGone = errors.New("the data file has another owner, or was removed")

// export is a directory that is what the server exports, as was verified.
type export struct {
	dir    *os.File
	dev    uint64 // of dir, and ino
	ino    uint64
	epoch  uint64 // of Remote before it was verified
	memory bool   // its file system is in memory

	// The server's handle of a file of that file system: fixed, the kernel's handle of kind with size bytes, and pad zeros.
	fixed []byte
	kind  int32
	size  int
	pad   int

	odd atomic.Bool // a handle of another form was seen
}

// statement makes a session by the statement of the configuration, if it turns out to be true.
func (t *Target) statement(ctx context.Context) (*session, error) {
	x, err := t.verify(ctx)
	if err != nil {
		return nil, err
	}
	return &session{
		t: t, export: x, readOnly: readsOnly, kind: fileio.Kind{Memory: x.memory}, files: map[key]*file{}, named: map[uint32]*file{},
	}, nil
}

// verify finds out whether the directory of the statement is the server's export. Its errors name the statement and do not change
// from one attempt to the next.
func (t *Target) verify(ctx context.Context) (*export, error) {
	ctx, cancel := context.WithTimeout(ctx, proveTime)
	defer cancel()
	x, err := t.openExport()
	if err == nil {
		if err = t.probe(ctx, x); err != nil {
			x.dir.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.cfg.Export.Statement, err)
	}
	return x, nil
}

// openExport opens the directory of the statement.
func (t *Target) openExport() (*export, error) {
	dir, err := os.OpenFile(t.cfg.Export.Dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	var fs unix.Statfs_t
	fd := int(dir.Fd())
	if err = unix.Fstat(fd, &st); err == nil {
		err = unix.Fstatfs(fd, &fs)
	}
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &export{dir: dir, dev: st.Dev, ino: st.Ino, epoch: t.Remote.Epoch(), memory: fs.Type == unix.TMPFS_MAGIC}, nil
}

// probe makes a file in x with a secret in it and sees whether the server has it, at the same name, under the handle that the
// kernel gives it, with the same contents and for the same users.
func (t *Target) probe(ctx context.Context, x *export) error {
	dir := t.cfg.Export.Dir
	x.clean()
	var nonce [nonceSize]byte
	rand.Read(nonce[:])
	name := probePrefix + rand.Text()
	kernel, err := x.plant(name, nonce[:])
	defer unix.Unlinkat(int(x.dir.Fd()), name, 0)
	if err != nil {
		return fmt.Errorf("a file to verify it by cannot be made in %s: %w", dir, err)
	}
	fh, err := t.cfg.Export.Lookup(ctx, name)
	var status nfs3.Status
	switch {
	case ctx.Err() != nil:
		return errors.New("the data server does not answer")
	case errors.As(err, &status) && status == nfs3.ErrNoEnt:
		return fmt.Errorf("a file that was made in %s is not in the export", dir)
	case errors.As(err, &status):
		return fmt.Errorf("the data server does not let root of this host look for a file in the export: %w", status)
	case err != nil:
		return fmt.Errorf("the data server cannot be asked for a file in the export: %w", err)
	}
	if !x.learn(fh, kernel) {
		return fmt.Errorf("the data server's handle, of %d bytes, of a file that was made in %s does not end with that of the kernel of this host, of %d bytes",
			len(fh), dir, kernel.Size())
	}
	got := make([]byte, nonceSize)
	n, err := t.readRemote(ctx, fh, probeOwner, got)
	switch {
	case ctx.Err() != nil:
		return errors.New("the data server does not answer")
	case err != nil:
		return fmt.Errorf("the data server does not let its owner read a file that was made in %s (does the export squash users?): %w", dir, err)
	case !bytes.Equal(got[:n], nonce[:]):
		return fmt.Errorf("the data server reads something else in a file that was made in %s", dir)
	}
	_, err = t.readRemote(ctx, fh, stranger, got)
	switch {
	case ctx.Err() != nil:
		return errors.New("the data server does not answer")
	case err == nil:
		return fmt.Errorf("the data server lets everybody read a file that was made in %s for its owner (does the export squash users?)", dir)
	case !errors.As(err, &status) || status != nfs3.ErrAcces && status != nfs3.ErrPerm:
		return fmt.Errorf("the data server cannot be asked for a file in the export: %w", err)
	}
	return nil
}

// plant makes a file that probeOwner may read, and nobody else, and returns the kernel's handle of it.
func (x *export) plant(name string, contents []byte) (handle unix.FileHandle, err error) {
	fd, err := unix.Openat(int(x.dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return handle, err
	}
	defer unix.Close(fd)
	if err := unix.Fchown(fd, int(probeOwner.UID), int(probeOwner.GID)); err != nil {
		return handle, err
	}
	if err := unix.Fchmod(fd, 0o400); err != nil {
		return handle, err
	}
	if _, err := fileio.Pwrite(fd, contents, 0); err != nil {
		return handle, err
	}
	if handle, _, err = unix.NameToHandleAt(fd, "", unix.AT_EMPTY_PATH); err != nil {
		return handle, fmt.Errorf("its file system gives no file handles: %w", err)
	}
	return handle, nil
}

// clean removes what attempts have left behind that were cut short.
func (x *export) clean() {
	fd := int(x.dir.Fd())
	names, _ := x.dir.Readdirnames(-1)
	for _, name := range names {
		var st unix.Stat_t
		if strings.HasPrefix(name, probePrefix) && unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && time.Since(time.Unix(st.Mtim.Unix())) > probeAge {
			unix.Unlinkat(fd, name, 0)
		}
	}
}

// learn takes in how the server's handle of a file is made of the kernel's, and reports whether it is.
func (x *export) learn(fh []byte, kernel unix.FileHandle) bool {
	for x.pad = 0; x.pad < 4; x.pad++ { // NFS-Ganesha fills its handles up to a multiple of 4 bytes
		body, padded := bytes.CutSuffix(fh, make([]byte, x.pad))
		if fixed, ok := bytes.CutSuffix(body, kernel.Bytes()); padded && ok && kernel.Size() > 0 {
			x.fixed, x.kind, x.size = slices.Clone(fixed), kernel.Type(), kernel.Size()
			return true
		}
	}
	return false
}

// kernelHandle takes the kernel's handle out of the server's.
func (x *export) kernelHandle(fh []byte) (unix.FileHandle, bool) {
	rest, ok := bytes.CutPrefix(fh, x.fixed)
	if !ok || len(rest) != x.size+x.pad || !bytes.Equal(rest[x.size:], make([]byte, x.pad)) {
		return unix.FileHandle{}, false
	}
	return unix.NewFileHandle(x.kind, rest[:x.size]), true
}

// admits reports whether cred may read a data file: the owner and the group if the mode says so, others never.
func (x *export) admits(st *unix.Stat_t, cred layout.Credential) bool {
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink == 0 || st.Dev != x.dev || cred.UID == 0 || cred.GID == 0 {
		return false
	}
	switch {
	case cred.UID == st.Uid:
		return st.Mode&0o400 != 0
	case cred.GID == st.Gid:
		return st.Mode&0o040 != 0
	}
	return false
}

// open opens the data file of a handle for reading, if cred may read it.
func (x *export) open(fh []byte, cred layout.Credential) (fd int, err error) {
	kernel, ok := x.kernelHandle(fh)
	if !ok {
		return -1, unix.EBADF
	}
	raw, err := x.dir.SyscallConn()
	if err != nil {
		return -1, err
	}
	var inner error
	err = raw.Control(func(dir uintptr) { fd, inner = x.openAt(int(dir), kernel, cred) })
	if err == nil {
		err = inner
	}
	return fd, err
}

func (x *export) openAt(dir int, kernel unix.FileHandle, cred layout.Credential) (fd int, err error) {
	// First without opening what it is, in case that is a device.
	at, err := unix.OpenByHandleAt(dir, kernel, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return -1, err
	}
	if !x.admits(&st, cred) {
		return -1, unix.EACCES
	}
	// The same inode, as the handle has its generation. Without O_NONBLOCK it would wait for somebody who has a lease.
	fd, err = unix.OpenByHandleAt(dir, kernel, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOATIME|unix.O_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NOATIME); err == nil {
		// With an access control list the bits of the group are not the group's.
		switch _, acl := unix.Fgetxattr(fd, "system.posix_acl_access", nil); acl {
		case unix.ENODATA, unix.EOPNOTSUPP:
			return fd, nil
		}
		err = unix.EACCES
	}
	unix.Close(fd)
	return -1, err
}

// lend answers an OPEN as a broker would.
func (s *session) lend(o *wire.Open) {
	fd, err := descriptors.Retry(func() (int, error) { return s.export.open(o.File.Bytes(), layout.Credential{UID: o.UID, GID: o.GID}) })
	if err != nil {
		if err == unix.EBADF && !s.export.odd.Swap(true) {
			s.t.cfg.Log.Warn("a data file is read by RPC, as its handle has not the form that those of the export have", "device", s.t.cfg.Name,
				"because", s.t.cfg.Export.Statement, "handle", o.File)
		}
		s.opened(&wire.Opened{ID: o.ID, Status: nfs3.ErrAcces}, nil, err == unix.EMFILE || err == unix.ENFILE) // whatever it is, the server tells
		return
	}
	s.opened(&wire.Opened{ID: o.ID}, []int{fd}, false)
}

// permitted reports whether what was read by f before the call was read by somebody who may. Brokers take descriptors back
// before anything else; the directory of a statement has nobody who would.
func (f *file) permitted() bool {
	if f.session.export == nil {
		return true
	}
	var st unix.Stat_t
	return unix.Fstat(f.fd, &st) == nil && f.session.export.admits(&st, f.key.cred)
}

// watch verifies the statement again and again, until it is no longer true, and tells what is wrong with it. It closes files that
// may not be read any more: what was removed takes up room while they are open.
func (s *session) watch(ctx context.Context) error {
	t, epoch, next := s.t, s.export.epoch, time.Now().Add(verifyTime)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lookTime):
		}
		s.sweep()
		if t.Remote.Epoch() == epoch && time.Now().Before(next) {
			continue
		}
		x, err := t.verify(ctx)
		if err != nil {
			return err
		}
		x.dir.Close()
		if !x.same(s.export) {
			return fmt.Errorf("%s: %s is another directory than it was, or the data server names files in another way", t.cfg.Export.Statement, t.cfg.Export.Dir)
		}
		epoch, next = x.epoch, time.Now().Add(verifyTime)
	}
}

func (x *export) same(y *export) bool {
	return x.dev == y.dev && x.ino == y.ino && bytes.Equal(x.fixed, y.fixed) && x.kind == y.kind && x.size == y.size && x.pad == y.pad
}

// sweep closes the files that nobody may read any more by them.
func (s *session) sweep() {
	t := s.t
	var all []*file
	t.mu.Lock()
	for e := s.recent.Front(); e != nil; e = e.Next() {
		f := e.Value.(*file)
		f.use.Add(1) // not acquire: that is no use that would keep it open
		all = append(all, f)
	}
	t.mu.Unlock()
	for _, f := range all {
		if !f.permitted() {
			t.mu.Lock()
			if f.state == open {
				f.retire()
			}
			t.mu.Unlock()
		}
		f.release()
	}
}

// readRemote reads the beginning of a file by RPC.
func (t *Target) readRemote(ctx context.Context, fh []byte, cred layout.Credential, b []byte) (n int, err error) {
	op := &layout.Op{Kind: layout.OpRead, File: &layout.DataFile{Handles: [][]byte{fh}, Cred: cred}, Data: b}
	done := make(chan struct{})
	op.Done = func(*layout.Op) { close(done) }
	t.Remote.Start(op)
	t.Remote.Flush()
	select {
	case <-done:
		return op.N, op.Err
	case <-ctx.Done():
		t.Remote.Detach(op)
		return 0, ctx.Err()
	}
}
