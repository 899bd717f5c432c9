package data

import (
	"bytes"
	"encoding/binary"
	"io"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// maxDirReply bounds the results of READDIR and READDIRPLUS.
const maxDirReply = 64 << 10

// dirent is an entry as getdents64(2) gives it: ino u64 | off i64 | reclen u16 | type u8 | name, NUL.
type dirent struct {
	ino  uint64
	off  int64 // cookie of what follows
	name string
}

// eachEntry calls do for the entries behind cookie until it returns false; eof tells that it never did.
func eachEntry(d *file, cookie uint64, do func(dirent) bool) (eof bool, err error) {
	// The directory's own descriptor is shared and has one position.
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if cookie != 0 {
		if _, err := unix.Seek(fd, int64(cookie), io.SeekStart); err != nil {
			return false, wire.ErrBadCookie
		}
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Getdents(fd, buf)
		if err != nil || n == 0 {
			return err == nil, err
		}
		for b := buf[:n]; len(b) > 0; {
			reclen := binary.NativeEndian.Uint16(b[16:])
			name := b[19:reclen]
			name = name[:bytes.IndexByte(name, 0)]
			if !do(dirent{binary.NativeEndian.Uint64(b), int64(binary.NativeEndian.Uint64(b[8:])), string(name)}) {
				return false, nil
			}
			b = b[reclen:]
		}
	}
}

// dirWriter is what DirWriter and DirPlusWriter have in common.
type dirWriter interface {
	Len() int
	End(eof bool) []byte
}

func (s *Server) readdir(r *request, reply *oncrpc.Reply) {
	var a wire.ReaddirArgs
	if a.Decode(&r.args) != nil {
		reply.Stat = oncrpc.GarbageArgs
		r.finish(reply, nil)
		return
	}
	s.list(r, reply, a.Dir, mayRead, func(d *file, attr wire.PostOpAttr) (dirWriter, bool, error) {
		w := wire.NewDirWriter(r.reply, attr, a.Verf, min(a.Count, maxDirReply))
		eof, err := eachEntry(d, a.Cookie, func(e dirent) bool {
			return w.Add(&wire.Entry{FileID: e.ino, Name: e.name, Cookie: uint64(e.off)})
		})
		return &w, eof, err
	})
}

func (s *Server) readdirPlus(r *request, reply *oncrpc.Reply) {
	var a wire.ReaddirPlusArgs
	if a.Decode(&r.args) != nil {
		reply.Stat = oncrpc.GarbageArgs
		r.finish(reply, nil)
		return
	}
	// Attributes and handles are told of entries, so the right to search is needed as for LOOKUP.
	s.list(r, reply, a.Dir, mayRead|mayExec, func(d *file, attr wire.PostOpAttr) (dirWriter, bool, error) {
		w := wire.NewDirPlusWriter(r.reply, attr, a.Verf, a.DirCount, min(a.MaxCount, maxDirReply))
		eof, err := eachEntry(d, a.Cookie, func(e dirent) bool {
			plus := wire.EntryPlus{Entry: wire.Entry{FileID: e.ino, Name: e.name, Cookie: uint64(e.off)}}
			if e.name != ".." { // see lookup
				if fh, st, err := s.handles.of(d.fd, e.name); err == nil {
					plus.FH, plus.Attr = wire.PostOpFH{Present: true, FH: fh}, postOp(&st)
				}
			}
			return w.Add(&plus)
		})
		return &w, eof, err
	})
}

// list answers with what fill writes behind r.reply. Both procedures fail alike.
func (s *Server) list(r *request, reply *oncrpc.Reply, dir wire.FileHandle, want uint32, fill func(*file, wire.PostOpAttr) (dirWriter, bool, error)) {
	var st unix.Stat_t
	d, status := s.openDir(r, dir, want, &st)
	if status != wire.OK {
		r.finish(reply, &wire.ReaddirRes{Status: status})
		return
	}
	defer s.cache.put(d)
	r.begin(reply)
	w, eof, err := fill(d, postOp(&st))
	if err == nil && w.Len() == 0 && !eof {
		err = wire.ErrTooSmall
	}
	if err != nil {
		r.finish(reply, &wire.ReaddirRes{Status: statusOf(err), DirAttr: postOp(&st)})
		return
	}
	r.reply = w.End(eof)
	r.end()
}
