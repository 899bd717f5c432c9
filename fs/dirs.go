package fs

import (
	"context"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Open directories have no state but who opened them: entries are found by their cookies. Nor is anything of one kept between two requests:
// the kernel holds the directory's lock for each of them, so what one returns is true as far as this mount goes.

func (r *raw) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	// ENOSYS would save this request, and make the kernel cache directories for good.
	out.Fh = r.dirs.add(cred(&in.InHeader))
	return fuse.OK
}

func (r *raw) ReleaseDir(in *fuse.ReleaseIn) { r.dirs.remove(in.Fh) }

// FsyncDir has nothing to do: what the service has answered is durable.
func (r *raw) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status { return fuse.OK }

func (r *raw) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.status(r.readDir(ctx, in, &dirPage{list: out, left: int(in.Size)}))
}

// Offsets of entries, as the kernel gives them back to say where to go on. Those of names are cookies.
const (
	afterDot    = 1
	afterDotDot = 2
)

func (r *raw) readDir(ctx context.Context, in *fuse.ReadIn, page *dirPage) error {
	id := r.fs.id(in.NodeId)
	off := in.Offset
	if off < afterDot {
		page.add(fuse.DirEntry{Name: ".", Ino: uint64(id), Mode: unix.S_IFDIR, Off: afterDot})
	}
	if off < afterDotDot {
		page.add(fuse.DirEntry{Name: "..", Ino: fuse.FUSE_UNKNOWN_INO, Mode: unix.S_IFDIR, Off: afterDotDot})
		off = 0
	}
	if off < metarpc.FirstCookie {
		off = 0
	}
	who, ok := r.dirs.of(in.Fh)
	if !ok {
		who = cred(&in.InHeader)
	}
	got, err := r.fs.meta.ReadDir(ctx, who, id, off, page.room())
	if err != nil {
		return err
	}
	if in.Flags&unix.O_NOATIME == 0 {
		r.fs.accesses.other(id, true)
	}
	for rest := got.Entries; len(rest) > 0; {
		// Names of equal cookies stay together: the kernel goes on after a cookie.
		n, size := 0, 0
		for n < len(rest) && rest[n].Cookie == rest[0].Cookie {
			size += page.size(rest[n].Name)
			n++
		}
		if size > page.left && page.some {
			break
		}
		for _, e := range rest[:n] {
			page.add(fuse.DirEntry{Name: e.Name, Ino: uint64(e.Attr.ID), Mode: e.Attr.Mode, Off: e.Cookie})
		}
		rest = rest[n:]
	}
	return nil
}

// dirPage is the answer to one READDIR. READDIRPLUS is not used: what it says of attributes and names the kernel may not
// keep, see the package comment, and could as well have not asked for. It will ask for each name it wants; the answers
// are here already.
type dirPage struct {
	list *fuse.DirEntryList
	left int // bytes
	some bool
}

// direntSize is the size of struct fuse_dirent without its name.
const direntSize = 24

func (p *dirPage) size(name string) int { return direntSize + (len(name)+7)&^7 }

// room is how many entries with names of ordinary length fit.
func (p *dirPage) room() int {
	return min(max(p.left/p.size("ordinary-name.ext"), 1), metarpc.MaxPage)
}

// add adds an entry if there is room.
func (p *dirPage) add(e fuse.DirEntry) {
	if p.list.AddDirEntry(e) {
		p.left -= p.size(e.Name)
		p.some = true
	}
}
