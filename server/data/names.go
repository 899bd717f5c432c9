package data

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/fileio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// openDir returns the directory of a call that needs the rights in want on it, and describes it; the caller puts it back
// into the cache. The directory is not locked: what fences needs is about data files.
func (s *Server) openDir(r *request, fh wire.FileHandle, want uint32, st *unix.Stat_t) (*file, wire.Status) {
	d, err := s.open(fh, st)
	switch {
	case err != nil:
		return nil, statusOf(err)
	case !d.dir:
		err = wire.ErrNotDir
	case !authorize(r.cred, st, want):
		err = wire.ErrAcces
	default:
		return d, wire.OK
	}
	s.cache.put(d)
	return nil, statusOf(err)
}

// checkName refuses what is no name of an entry that can be made or removed.
func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00"):
		return wire.ErrInval
	case len(name) > unix.NAME_MAX:
		return wire.ErrNameTooLong
	}
	return nil
}

// lookup finds an entry, or the directory itself as ".". For ".." it has no answer: a directory that was moved out of
// the export behind the server's back would lead on to the whole file system.
func (s *Server) lookup(r *request, a *wire.DirOpArgs) results {
	var dirStat unix.Stat_t
	d, st := s.openDir(r, a.Dir, mayExec, &dirStat)
	if st != wire.OK {
		return &wire.LookupRes{Status: st}
	}
	defer s.cache.put(d)
	res := &wire.LookupRes{DirAttr: postOp(&dirStat)}
	if a.Name == "." {
		res.FH, res.Attr = a.Dir, res.DirAttr
		return res
	}
	if a.Name == ".." {
		res.Status = wire.ErrAcces
		return res
	}
	err := checkName(a.Name)
	if err == nil {
		var entry unix.Stat_t
		res.FH, entry, err = s.handles.of(d.fd, a.Name)
		res.Attr = postOp(&entry)
	}
	res.Status = statusOf(err)
	return res
}

// make runs do, which makes an entry of a directory or finds the one it would have made, and answers as CREATE and MKDIR
// do.
func (s *Server) make(r *request, where wire.DirOpArgs, do func(dir *file) (wire.FileHandle, unix.Stat_t, error)) results {
	var st unix.Stat_t
	d, status := s.openDir(r, where.Dir, mayWrite|mayExec, &st)
	if status != wire.OK {
		return &wire.CreateRes{Status: status}
	}
	defer s.cache.put(d)
	var fh wire.FileHandle
	err := checkName(where.Name)
	if err == nil {
		fh, st, err = do(d)
	}
	if err == nil {
		err = s.stabilize(d)
	}
	return &wire.CreateRes{Status: statusOf(err), FH: wire.PostOpFH{Present: true, FH: fh}, Attr: postOp(&st), DirWcc: after(d)}
}

func (s *Server) mkdir(r *request, a *wire.MkdirArgs) results {
	return s.make(r, a.Where, func(d *file) (fh wire.FileHandle, st unix.Stat_t, err error) {
		attr := a.Attr
		attr.SetSize = false
		if err := completeAttr(r, &attr, unix.S_IFDIR|0o755); err != nil {
			return fh, st, err
		}
		if err := unix.Mkdirat(d.fd, a.Where.Name, attr.Mode&0o7777); err != nil {
			return fh, st, err
		}
		fd, err := unix.Openat(d.fd, a.Where.Name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == nil {
			fh, st, err = s.complete(fd, &attr)
		}
		if err != nil {
			unix.Unlinkat(d.fd, a.Where.Name, unix.AT_REMOVEDIR)
		}
		return fh, st, err
	})
}

func (s *Server) create(r *request, a *wire.CreateArgs) results {
	return s.make(r, a.Where, func(d *file) (fh wire.FileHandle, st unix.Stat_t, err error) {
		attr := a.Attr
		if a.Mode == wire.Exclusive {
			// The SETATTR that follows sets mode and times (RFC 1813 section 3.3.8).
			atime, mtime := verfTimes(a.Verf)
			attr = wire.Sattr{SetMode: true, Mode: 0o600, AtimeHow: wire.ClientTime, Atime: atime, MtimeHow: wire.ClientTime, Mtime: mtime}
		}
		if err := completeAttr(r, &attr, unix.S_IFREG|0o644); err != nil {
			return fh, st, err
		}
		fd, err := unix.Openat(d.fd, a.Where.Name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, attr.Mode&0o7777)
		if err == unix.EEXIST && a.Mode != wire.Guarded {
			return s.createdBefore(r, d, a)
		}
		if err != nil {
			return fh, st, err
		}
		if fh, st, err = s.complete(fd, &attr); err != nil {
			unix.Unlinkat(d.fd, a.Where.Name, 0)
		}
		return fh, st, err
	})
}

// completeAttr completes the attributes of what r's caller makes and checks that the caller may give them. mode is type
// and permissions of it for a caller who says none.
func completeAttr(r *request, a *wire.Sattr, mode uint32) error {
	if !a.SetMode {
		a.SetMode, a.Mode = true, mode&0o7777
	}
	if !a.SetUID {
		a.SetUID, a.UID = true, r.cred.UID
	}
	if !a.SetGID {
		a.SetGID, a.GID = true, r.cred.GID
	}
	return authorizeChange(r.cred, &unix.Stat_t{Uid: r.cred.UID, Gid: r.cred.GID, Mode: mode}, a)
}

// complete gives a new file or directory its attributes, makes it stable but for its name, and closes it.
func (s *Server) complete(fd int, a *wire.Sattr) (fh wire.FileHandle, st unix.Stat_t, err error) {
	defer unix.Close(fd)
	if err := apply(fd, a); err != nil {
		return fh, st, err
	}
	if err := fileio.Retry(fsync, fd); err != nil {
		return fh, st, err
	}
	return s.handles.of(fd, "")
}

// verfTimes is the times in which a file keeps the verifier of the EXCLUSIVE CREATE that made it. The upper bits are
// left out: some file systems do not keep times beyond 2038.
func verfTimes(v wire.CreateVerf) (atime, mtime wire.Time) {
	const mask = 1<<31 - 1
	return wire.Time{Sec: binary.BigEndian.Uint32(v[:4]) & mask}, wire.Time{Sec: binary.BigEndian.Uint32(v[4:]) & mask}
}

// createdBefore is CREATE of a name that exists. For UNCHECKED the file is taken, and cut if that was asked; for
// EXCLUSIVE it is a repetition if the verifier is the same.
func (s *Server) createdBefore(r *request, d *file, a *wire.CreateArgs) (fh wire.FileHandle, st unix.Stat_t, err error) {
	fh, st, err = s.handles.of(d.fd, a.Where.Name)
	switch {
	case err == unix.ENOENT:
		return fh, st, wire.ErrJukebox // it is gone again
	case err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fh, st, unix.EEXIST
	}
	if a.Mode == wire.Exclusive {
		if atime, mtime := verfTimes(a.Verf); timeOf(st.Atim) != atime || timeOf(st.Mtim) != mtime {
			return fh, st, unix.EEXIST
		}
	}
	f, err := s.get(fh)
	if err != nil {
		return fh, st, err
	}
	defer s.cache.put(f)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := s.stat(f, &st); err != nil {
		return fh, st, err
	}
	// With nothing to change it still makes the file stable, which is perhaps not yet what it was made as.
	if err := s.change(r, f, &st, &wire.Sattr{SetSize: a.Attr.SetSize, Size: a.Attr.Size}); err != nil {
		return fh, st, err
	}
	return fh, st, s.stat(f, &st)
}

func (s *Server) remove(r *request, a *wire.DirOpArgs) results { return s.unlink(r, a, 0) }
func (s *Server) rmdir(r *request, a *wire.DirOpArgs) results {
	return s.unlink(r, a, unix.AT_REMOVEDIR)
}

func (s *Server) unlink(r *request, a *wire.DirOpArgs, flags int) results {
	var st unix.Stat_t
	d, status := s.openDir(r, a.Dir, mayWrite|mayExec, &st)
	if status != wire.OK {
		return &wire.WccRes{Status: status}
	}
	defer s.cache.put(d)
	err := checkName(a.Name)
	if err == nil {
		fh, _, unknown := s.handles.of(d.fd, a.Name)
		if err = unix.Unlinkat(d.fd, a.Name, flags); err == nil && unknown == nil {
			s.forget(fh)
		}
	}
	if err == nil {
		err = s.stabilize(d)
	}
	return &wire.WccRes{Status: statusOf(err), Wcc: after(d)}
}

func (s *Server) rename(r *request, a *wire.RenameArgs) results {
	var st unix.Stat_t
	from, status := s.openDir(r, a.From.Dir, mayWrite|mayExec, &st)
	if status != wire.OK {
		return &wire.RenameRes{Status: status}
	}
	defer s.cache.put(from)
	to, status := s.openDir(r, a.To.Dir, mayWrite|mayExec, &st)
	if status != wire.OK {
		return &wire.RenameRes{Status: status, FromWcc: after(from)}
	}
	defer s.cache.put(to)
	err := checkName(a.From.Name)
	if err == nil {
		err = checkName(a.To.Name)
	}
	if err == nil {
		err = s.move(from, a.From.Name, to, a.To.Name)
	}
	return &wire.RenameRes{Status: statusOf(err), FromWcc: after(from), ToWcc: after(to)}
}

// move renames an entry and makes that stable.
func (s *Server) move(from *file, old string, to *file, name string) error {
	replaced, _, unknown := s.handles.of(to.fd, name)
	if err := unix.Renameat(from.fd, old, to.fd, name); err != nil {
		return err
	}
	if unknown == nil {
		s.forget(replaced)
	}
	if err := s.stabilize(to); err != nil || to == from {
		return err
	}
	return s.stabilize(from)
}

// refuseNode answers SYMLINK and MKNOD: an export has files and directories only.
func (s *Server) refuseNode(dir wire.FileHandle) results {
	return &wire.CreateRes{Status: wire.ErrNotSupp, DirWcc: wire.WccData{After: s.attrOf(dir)}}
}

// refuseLink answers LINK: a data file has one name.
func (s *Server) refuseLink(a *wire.LinkArgs) results {
	return &wire.LinkRes{Status: wire.ErrNotSupp, Attr: s.attrOf(a.FH), DirWcc: wire.WccData{After: s.attrOf(a.Link.Dir)}}
}
