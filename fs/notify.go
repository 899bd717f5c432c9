package fs

import (
	"encoding/binary"
	"errors"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// kernel is who keeps what this mount says of names, attributes and pages. *Server is the real one.
type kernel interface {
	// forgetAttrs makes it ask for an inode's attributes again. It takes no lock that is held while a request waits for its
	// answer. It reports false if the kernel does not know the inode, or not yet.
	forgetAttrs(node uint64) bool
	// forgetPages makes it drop a file's pages, and attributes. It waits for READs and WRITEs of pages.
	forgetPages(node uint64)
	// expireName makes it ask for a name again when that is used next. It waits for the lock of the directory.
	expireName(at place)
	// expiresNames says whether it can do so with a name that is there, or with one that is not. Otherwise it must not
	// be given such names to keep.
	expiresNames(there bool) bool
	// beginBacking tells it of a data file that it may read and write by itself, and returns its number for it; endBacking that it is
	// not named in answers any more.
	beginBacking(fd int) (int32, error)
	endBacking(id int32)
}

// tell calls f if there is a mount.
func (fs *FS) notify(f func(kernel)) {
	if k := fs.kernel.Load(); k != nil {
		f(*k)
	}
}

// Codes of enum fuse_notify_code (linux/fuse.h), and a flag of the second. go-fuse can send these, but not without waiting for
// its own lock.
const (
	notifyInvalInode = 2
	notifyInvalEntry = 3
	expireOnly       = 1 // 7.38
)

// send writes a notification to the FUSE device: a struct fuse_out_header whose unique is 0 and whose error is the
// code, and what belongs to that.
func (s *Server) send(code uint32, payload ...byte) error {
	const header = 16
	msg := append(make([]byte, header, header+len(payload)), payload...)
	binary.NativeEndian.PutUint32(msg[0:], uint32(len(msg)))
	binary.NativeEndian.PutUint32(msg[4:], code)
	// Not by os.File.Write, which lets one write wait for the other.
	conn, err := s.device.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = conn.Control(func(fd uintptr) {
		for {
			if _, sent = unix.Write(int(fd), msg); !errors.Is(sent, unix.EINTR) {
				return
			}
		}
	})
	return errors.Join(err, sent)
}

// An inode that the kernel does not know, and a mount that is gone, are errors that need nothing done.

func (s *Server) forgetAttrs(node uint64) bool {
	const noPages = ^uint64(0) // -1
	return !errors.Is(s.sendInode(node, noPages, 0), unix.ENOENT)
}

func (s *Server) forgetPages(node uint64) {
	_ = s.sendInode(node, 0, 0) // a length of 0 is all
}

// sendInode sends a struct fuse_notify_inval_inode_out.
func (s *Server) sendInode(node, off, n uint64) error {
	var payload []byte
	for _, v := range []uint64{node, off, n} {
		payload = binary.NativeEndian.AppendUint64(payload, v)
	}
	return s.send(notifyInvalInode, payload...)
}

// expireName sends a struct fuse_notify_inval_entry_out and the name with a NUL byte.
func (s *Server) expireName(at place) {
	payload := binary.NativeEndian.AppendUint64(nil, at.parent)
	payload = binary.NativeEndian.AppendUint32(payload, uint32(len(at.name)))
	payload = binary.NativeEndian.AppendUint32(payload, expireOnly)
	payload = append(append(payload, at.name...), 0)
	_ = s.send(notifyInvalEntry, payload...)
}

func (s *Server) expiresNames(there bool) bool {
	return s.transport.KernelSettings().Flags64()&fuse.CAP_HAS_EXPIRE_ONLY != 0 && (there || s.absent)
}

// kernelRelease is what uname -r prints.
func kernelRelease() string {
	var uts unix.Utsname
	unix.Uname(&uts) // which has no errors but for a bad address
	return unix.ByteSliceToString(uts.Release[:])
}

// expiresAbsent says whether a release of Linux forgets the answer that a name is not there when it is told to expire the
// name. Linux 6.19 and 7.0 keep the answer and return ENOENT: their fuse_reverse_inval_entry looks for a name that could
// be removed (start_removing_dentry).
func expiresAbsent(release string) bool {
	return !strings.HasPrefix(release, "6.19") && !strings.HasPrefix(release, "7.0")
}
