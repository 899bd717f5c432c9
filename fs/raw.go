package fs

import (
	"math"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

// raw answers the kernel's requests through go-fuse. Its handlers run in goroutines of the transport and may block.
// What is not here go-fuse answers with ENOSYS: the kernel then does without (copy_file_range, access checks, which
// are its own because of default_permissions).
type raw struct {
	fuse.RawFileSystem
	fs   *FS
	dirs openDirs
}

// RawFileSystem is the FS as go-fuse serves it.
func (fs *FS) RawFileSystem() fuse.RawFileSystem {
	return &raw{RawFileSystem: fuse.NewDefaultRawFileSystem(), fs: fs, dirs: openDirs{open: map[uint64]openDir{}}}
}

func (r *raw) String() string { return "weft" }

// Forget matters for directories alone: the node id of anything else is its inode number, which may be used at any time.
func (r *raw) Forget(nodeid, nlookup uint64) { r.fs.places.forget(nodeid, nlookup) }

// begin returns the context of a handler, which calls end when it returns.
func (r *raw) begin(cancel <-chan struct{}, h *fuse.InHeader) *request {
	req := &request{fs: r.fs, cancel: cancel, flight: flight{op: h.Opcode, pid: h.Pid, id: r.fs.id(h.NodeId), began: time.Now()}}
	r.fs.flights.start(&req.flight)
	r.fs.kept.asked(h.Pid)
	r.fs.restarts.begin(req)
	return req
}

func (r *raw) status(err error) fuse.Status { return fuse.Status(r.fs.errno(err)) }

// checkName refuses names that the service would; the kernel allows longer ones.
func checkName(name string) error {
	if len(name) > metarpc.MaxName {
		return syscall.ENAMETOOLONG
	}
	return nil
}

// blockSize is st_blksize, which is what many programs read and write at a time. Without a page cache each time is a
// round trip; yet a buffer of this size for each open file must not hurt.
const blockSize = 256 << 10

func fillAttr(out *fuse.Attr, a *metarpc.Attr) {
	*out = fuse.Attr{
		Ino:     uint64(a.ID),
		Size:    uint64(a.Size),
		Blocks:  sectors(a),
		Mode:    a.Mode,
		Nlink:   a.Nlink,
		Owner:   fuse.Owner{Uid: a.UID, Gid: a.GID},
		Rdev:    a.Rdev,
		Blksize: blockSize,
	}
	out.Atime, out.Atimensec = splitTime(a.Atime)
	out.Mtime, out.Mtimensec = splitTime(a.Mtime)
	out.Ctime, out.Ctimensec = splitTime(a.Ctime)
}

// show is called before attributes are given to the kernel.
func (r *raw) show(in *fuse.InHeader, a *metarpc.Attr) {
	r.fs.accesses.show(a)
	r.fs.given.tell(in.Pid, a)
}

// splitTime turns nanoseconds since 1970 into seconds, as a two's complement, and the nanoseconds after them.
func splitTime(ns int64) (sec uint64, nsec uint32) {
	s, n := ns/1e9, ns%1e9
	if n < 0 {
		s, n = s-1, n+1e9
	}
	return uint64(s), uint32(n)
}

// joinTime is the inverse of splitTime. What does not fit, before 1678 or after 2261, becomes the limit.
func joinTime(sec uint64, nsec uint32) int64 {
	const most = math.MaxInt64/int64(1e9) - 1
	s := min(max(int64(sec), -most), most)
	return s*1e9 + int64(min(nsec, 1e9-1))
}

// entry answers with the inode that the name at a place leads to, or that it leads nowhere; a file that is made without a
// name has no place. The kernel may not keep the attributes: see the package comment.
func (r *raw) entry(ctx *request, in *fuse.InHeader, out *fuse.EntryOut, at place, answer metaclient.Answer, asked uint64, err error) fuse.Status {
	dir, keep := r.fs.id(at.parent), time.Duration(0)
	if k := r.fs.kernel.Load(); k != nil && (*k).expiresNames(err == nil) && !r.fs.places.several(dir) {
		// For each name that is new to the kernel, and for one that is not there, it holds the lock of the directory.
		locked := in.Opcode != opLookup || err != nil
		keep = r.fs.kept.give(dir, at, in.Pid, locked, int64(ctx.began.Sub(start))+1, answer.KeepName)
	}
	if err != nil {
		r.fs.places.vacate(at)
		if e, _ := errnoOf(err); e == syscall.ENOENT && keep > 0 {
			*out = fuse.EntryOut{} // node 0: there is no such name
			out.SetEntryTimeout(keep)
			return fuse.OK
		}
		return r.status(err)
	}
	a := r.fs.seen(answer, asked)
	r.show(in, &a.Attr)
	if out.NodeId = r.fs.node(a.ID); a.Mode&unix.S_IFMT != unix.S_IFDIR {
		r.fs.places.vacate(at)
	} else if out.NodeId != fuse.FUSE_ROOT_ID {
		out.NodeId = r.fs.enter(at, a.ID)
	}
	fillAttr(&out.Attr, &a.Attr)
	out.SetEntryTimeout(keep)
	return fuse.OK
}

func (r *raw) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	a, err := r.fs.getAttr(ctx, r.fs.id(in.NodeId))
	if err != nil {
		return r.status(err)
	}
	r.show(&in.InHeader, &a.Attr)
	fillAttr(&out.Attr, &a.Attr)
	out.SetTimeout(r.fs.keepAttr(&a))
	return fuse.OK
}

// Statx is asked instead of GetAttr when somebody wants the time of birth.
func (r *raw) Statx(cancel <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	a, err := r.fs.getAttr(ctx, r.fs.id(in.NodeId))
	if err != nil {
		return r.status(err)
	}
	r.show(&in.InHeader, &a.Attr)
	var basic fuse.Attr
	fillAttr(&basic, &a.Attr)
	sec, nsec := splitTime(a.Btime)
	out.Statx = fuse.Statx{
		Mask:      unix.STATX_BASIC_STATS | unix.STATX_BTIME,
		Blksize:   basic.Blksize,
		Nlink:     basic.Nlink,
		Uid:       basic.Uid,
		Gid:       basic.Gid,
		Mode:      uint16(basic.Mode),
		Ino:       basic.Ino,
		Size:      basic.Size,
		Blocks:    basic.Blocks,
		Atime:     fuse.SxTime{Sec: basic.Atime, Nsec: basic.Atimensec},
		Mtime:     fuse.SxTime{Sec: basic.Mtime, Nsec: basic.Mtimensec},
		Ctime:     fuse.SxTime{Sec: basic.Ctime, Nsec: basic.Ctimensec},
		Btime:     fuse.SxTime{Sec: sec, Nsec: nsec},
		RdevMajor: unix.Major(uint64(basic.Rdev)),
		RdevMinor: unix.Minor(uint64(basic.Rdev)),
	}
	out.SetTimeout(r.fs.keepAttr(&a))
	return fuse.OK
}

func (r *raw) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	args := &metarpc.SetAttrArgs{ID: r.fs.id(in.NodeId)}
	for _, f := range []struct {
		valid uint32
		mask  metarpc.AttrMask
	}{
		{fuse.FATTR_MODE, metarpc.SetMode},
		{fuse.FATTR_UID, metarpc.SetUID},
		{fuse.FATTR_GID, metarpc.SetGID},
		{fuse.FATTR_SIZE, metarpc.SetSize},
		{fuse.FATTR_ATIME, metarpc.SetAtime},
		{fuse.FATTR_MTIME, metarpc.SetMtime},
		{fuse.FATTR_ATIME_NOW, metarpc.SetAtimeNow},
		{fuse.FATTR_MTIME_NOW, metarpc.SetMtimeNow},
	} {
		if in.Valid&f.valid != 0 {
			args.Mask |= f.mask
		}
	}
	if in.Size > math.MaxInt64 {
		return fuse.Status(syscall.EFBIG)
	}
	args.Mode, args.UID, args.GID, args.Size = in.Mode&07777, in.Uid, in.Gid, int64(in.Size)
	// The kernel names the handle for what it has allowed when that was opened, so it is only right for a size.
	args.Open = in.Valid&fuse.FATTR_FH != 0 && in.Valid&fuse.FATTR_SIZE != 0
	args.Atime, args.Mtime = joinTime(in.Atime, in.Atimensec), joinTime(in.Mtime, in.Mtimensec)
	a, err := r.fs.setAttr(ctx, cred(&in.InHeader), args, in.Valid&fuse.FATTR_KILL_SUIDGID != 0)
	if err != nil {
		return r.status(err)
	}
	r.show(&in.InHeader, &a.Attr)
	fillAttr(&out.Attr, &a.Attr) // not to be kept
	return fuse.OK
}

func (r *raw) StatFs(cancel <-chan struct{}, in *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	id := r.fs.id(in.NodeId)
	s, err := r.fs.meta.StatFS(ctx, id)
	if err != nil {
		return r.status(byID(id, err))
	}
	*out = statfsOut(&s)
	return fuse.OK
}

// statfsOut is the answer to statfs(2). Its counts fit 32 bits as far as that can be, since a program of 32 bits is
// told EOVERFLOW otherwise (Linux, fs/statfs.c, put_compat_statfs): a block is as large as that takes, and of inodes
// that may still be made no more are shown.
func statfsOut(s *metarpc.StatFSResult) fuse.StatfsOut {
	const least = 4096
	block := uint64(least)
	for uint64(max(s.Total, s.Free, s.Avail))/block > math.MaxUint32 {
		block *= 2
	}
	files, free := uint64(s.Files), uint64(s.Avail)/least // inodes are not limited but by the room for what they hold
	if s.MaxFiles > 0 {
		free = uint64(max(s.MaxFiles-s.Files, 0))
	}
	if files <= math.MaxUint32 {
		free = min(free, math.MaxUint32-files)
	}
	return fuse.StatfsOut{
		Blocks: uint64(s.Total) / block, Bfree: uint64(s.Free) / block, Bavail: uint64(s.Avail) / block,
		Bsize: uint32(block), Frsize: uint32(block), NameLen: metarpc.MaxName,
		Files: files + free, Ffree: free,
	}
}

func (r *raw) Readlink(cancel <-chan struct{}, in *fuse.InHeader) ([]byte, fuse.Status) {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	id := r.fs.id(in.NodeId)
	target, err := r.fs.meta.ReadLink(ctx, userOnly(in), id)
	if err == nil {
		r.fs.accesses.other(id, false)
	}
	return []byte(target), r.status(byID(id, err))
}
