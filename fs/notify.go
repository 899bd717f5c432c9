package fs

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// kernel is who keeps what this mount says of names, attributes and pages. *Server is the real one.
type kernel interface {
	// forgetAttrs makes it ask for an inode's attributes again. It takes no lock that is held while a request waits for its
	// answer. It reports false if the kernel does not know the inode, or not yet.
	forgetAttrs(node uint64) bool
	// forgetPages makes it drop a file's pages, and attributes. It waits for READs and WRITEs of pages.
	forgetPages(node uint64)
	// forgetNames makes it ask for every name again, also those it knows not to exist, and takes no lock at all. Without
	// forgetsNames it must not be given names to keep.
	forgetNames()
	forgetsNames() bool
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

// Codes of enum fuse_notify_code (linux/fuse.h). go-fuse can send the first but not the second.
const (
	notifyInvalInode = 2
	notifyIncEpoch   = 8 // 7.44
)

// send writes a notification to the FUSE device: a struct fuse_out_header whose unique is 0 and whose error is the
// code, and what belongs to that.
func (s *Server) send(code uint32, payload ...uint64) error {
	const header = 16
	msg := make([]byte, header, header+8*len(payload))
	binary.NativeEndian.PutUint32(msg[0:], uint32(cap(msg)))
	binary.NativeEndian.PutUint32(msg[4:], code)
	for _, v := range payload {
		msg = binary.NativeEndian.AppendUint64(msg, v)
	}
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
	return !errors.Is(s.send(notifyInvalInode, node, noPages, 0), unix.ENOENT)
}

func (s *Server) forgetPages(node uint64) {
	_ = s.send(notifyInvalInode, node, 0, 0) // a length of 0 is all
}

func (s *Server) forgetNames() {
	if s.epochs {
		_ = s.send(notifyIncEpoch)
	}
}

func (s *Server) forgetsNames() bool { return s.epochs }
