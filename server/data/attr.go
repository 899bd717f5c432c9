package data

import (
	"math"
	"unsafe"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

func fattr(st *unix.Stat_t) wire.Fattr {
	kind := wire.TypeReg
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		kind = wire.TypeDir
	}
	return wire.Fattr{
		Type: kind, Mode: st.Mode & 0o7777, Nlink: uint32(st.Nlink), UID: st.Uid, GID: st.Gid,
		Size: uint64(st.Size), Used: uint64(st.Blocks) * 512, FSID: st.Dev, FileID: st.Ino,
		Atime: timeOf(st.Atim), Mtime: timeOf(st.Mtim), Ctime: timeOf(st.Ctim),
	}
}

// timeOf converts a time; what NFSv3 cannot say becomes the nearest it can.
func timeOf(t unix.Timespec) wire.Time {
	if t.Sec < 0 {
		return wire.Time{}
	}
	return wire.Time{Sec: uint32(min(t.Sec, math.MaxUint32)), Nsec: uint32(t.Nsec)}
}

func postOp(st *unix.Stat_t) wire.PostOpAttr {
	return wire.PostOpAttr{Present: true, Attr: fattr(st)}
}

// after is the attributes of an open file behind a change: absent if they cannot be had.
func after(f *file) wire.WccData {
	var st unix.Stat_t
	if unix.Fstat(f.fd, &st) != nil {
		return wire.WccData{}
	}
	return wire.WccData{After: postOp(&st)}
}

// describe is for the procedures that only look at a file.
func (s *Server) describe(fh wire.FileHandle) (st unix.Stat_t, err error) {
	f, err := s.open(fh, &st)
	if err == nil {
		s.cache.put(f)
	}
	return st, err
}

// attrOf is the attributes of a file that nothing is done to: absent if they cannot be had.
func (s *Server) attrOf(fh wire.FileHandle) wire.PostOpAttr {
	st, err := s.describe(fh)
	if err != nil {
		return wire.PostOpAttr{}
	}
	return postOp(&st)
}

func (s *Server) getattr(r *request, a *wire.FileHandle) results {
	st, err := s.describe(*a)
	return &wire.GetattrRes{Status: statusOf(err), Attr: fattr(&st)}
}

func (s *Server) access(r *request, a *wire.AccessArgs) results {
	st, err := s.describe(a.FH)
	if err != nil {
		return &wire.AccessRes{Status: statusOf(err)}
	}
	var granted uint32
	if authorize(r.cred, &st, mayRead) {
		granted |= wire.AccessRead
	}
	if authorize(r.cred, &st, mayWrite) {
		granted |= wire.AccessModify | wire.AccessExtend
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir && authorize(r.cred, &st, mayWrite|mayExec) {
		granted |= wire.AccessDelete
	}
	if authorize(r.cred, &st, mayExec) {
		if isDir {
			granted |= wire.AccessLookup
		} else {
			granted |= wire.AccessExecute
		}
	}
	return &wire.AccessRes{Attr: postOp(&st), Access: granted & a.Access}
}

// readlink has nothing to read: an export has no symbolic links.
func (s *Server) readlink(r *request, a *wire.FileHandle) results {
	st, err := s.describe(*a)
	if err != nil {
		return &wire.ReadlinkRes{Status: statusOf(err)}
	}
	return &wire.ReadlinkRes{Status: wire.ErrInval, Attr: postOp(&st)}
}

// setattr holds the file's lock exclusively, so that I/O allowed by the attributes of before has ended when it answers.
func (s *Server) setattr(r *request, a *wire.SetattrArgs) results {
	f, err := s.get(a.FH)
	if err != nil {
		return &wire.WccRes{Status: statusOf(err)}
	}
	defer s.cache.put(f)
	f.mu.Lock()
	defer f.mu.Unlock()
	var st unix.Stat_t
	if err = s.stat(f, &st); err == nil && a.Guard && timeOf(st.Ctim) != a.GuardCtime {
		err = wire.ErrNotSync
	}
	if err == nil {
		err = s.change(r, f, &st, &a.Attr)
	}
	return &wire.WccRes{Status: statusOf(err), Wcc: after(f)}
}

// change changes attributes of f, which st describes, as r's caller may, and makes that stable. f.mu is held exclusively.
func (s *Server) change(r *request, f *file, st *unix.Stat_t, a *wire.Sattr) error {
	if err := authorizeChange(r.cred, st, a); err != nil {
		return err
	}
	if f.readOnly {
		return unix.EROFS
	}
	if a.SetUID || a.SetGID || a.SetMode {
		if err := s.expel(f); err != nil {
			return err
		}
	}
	if err := apply(f.fd, a); err != nil {
		return err
	}
	return s.stabilize(f)
}

// apply sets size, ids, mode and times.
func apply(fd int, a *wire.Sattr) error {
	if a.SetSize {
		if err := unix.Ftruncate(fd, int64(a.Size)); err != nil {
			return err
		}
	}
	if a.SetUID || a.SetGID {
		uid, gid := -1, -1
		if a.SetUID {
			uid = int(a.UID)
		}
		if a.SetGID {
			gid = int(a.GID)
		}
		if err := unix.Fchown(fd, uid, gid); err != nil {
			return err
		}
	}
	if a.SetMode { // after fchown, which clears bits
		if err := unix.Fchmod(fd, a.Mode&0o7777); err != nil {
			return err
		}
	}
	if a.AtimeHow != wire.KeepTime || a.MtimeHow != wire.KeepTime {
		return futimens(fd, timespec(a.AtimeHow, a.Atime), timespec(a.MtimeHow, a.Mtime))
	}
	return nil
}

func timespec(how wire.TimeHow, t wire.Time) unix.Timespec {
	switch how {
	case wire.ServerTime:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	case wire.ClientTime:
		return unix.Timespec{Sec: int64(t.Sec), Nsec: int64(t.Nsec)}
	}
	return unix.Timespec{Nsec: unix.UTIME_OMIT}
}

// futimens is utimensat(2) without a path, which the unix package does not offer.
func futimens(fd int, atime, mtime unix.Timespec) error {
	ts := [2]unix.Timespec{atime, mtime}
	if _, _, e := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0); e != 0 {
		return e
	}
	return nil
}

func (s *Server) fsstat(r *request, a *wire.FileHandle) results {
	st, err := s.describe(*a)
	var fs unix.Statfs_t
	if err == nil {
		err = unix.Fstatfs(s.root, &fs)
	}
	if err != nil {
		return &wire.FsstatRes{Status: statusOf(err)}
	}
	unit := uint64(fs.Frsize)
	return &wire.FsstatRes{
		Attr:       postOp(&st),
		TotalBytes: fs.Blocks * unit, FreeBytes: fs.Bfree * unit, AvailBytes: fs.Bavail * unit,
		TotalFiles: fs.Files, FreeFiles: fs.Ffree, AvailFiles: fs.Ffree,
	}
}

func (s *Server) fsinfo(r *request, a *wire.FileHandle) results {
	if _, err := s.describe(*a); err != nil {
		return &wire.FsinfoRes{Status: statusOf(err)}
	}
	return &wire.FsinfoRes{ // without attributes, which have the owner: guests may call it
		Rtmax: maxIO, Rtpref: prefIO, Rtmult: 4096,
		Wtmax: maxIO, Wtpref: prefIO, Wtmult: 4096,
		Dtpref:      64 << 10,
		MaxFileSize: math.MaxInt64,
		TimeDelta:   wire.Time{Nsec: 1},
		Properties:  wire.PropHomogeneous | wire.PropCanSetTime,
	}
}

func (s *Server) pathconf(r *request, a *wire.FileHandle) results {
	st, err := s.describe(*a)
	if err != nil {
		return &wire.PathconfRes{Status: statusOf(err)}
	}
	return &wire.PathconfRes{
		Attr:    postOp(&st),
		LinkMax: 1, NameMax: unix.NAME_MAX,
		NoTrunc: true, ChownRestricted: true, CasePreserving: true,
	}
}
