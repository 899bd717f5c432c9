package fs

import (
	"context"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Open directories have no state: entries are found by their cookies. Nor is anything of one kept between two requests:
// the kernel holds the directory's lock for each of them, so what one returns is true as far as this mount goes.

func (r *raw) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	// ENOSYS would save this request, and make the kernel cache directories for good.
	return fuse.OK
}

func (r *raw) ReleaseDir(in *fuse.ReleaseIn) {}

// FsyncDir has nothing to do: what the service has answered is durable.
func (r *raw) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status { return fuse.OK }

func (r *raw) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.status(r.readDir(ctx, in, &dirPage{list: out, left: int(in.Size)}))
}

func (r *raw) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.status(r.readDir(ctx, in, &dirPage{list: out, left: int(in.Size), plus: true}))
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
	asked := r.fs.clock.Load()
	got, err := r.fs.meta.ReadDir(ctx, cred(&in.InHeader), id, off, page.room())
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
			out := page.add(fuse.DirEntry{Name: e.Name, Ino: uint64(e.Attr.ID), Mode: e.Attr.Mode, Off: e.Cookie})
			if out != nil {
				a := r.fs.seen(e.Attr, asked)
				r.fillEntry(out, &a)
			}
		}
		rest = rest[n:]
	}
	return nil
}

// dirPage is the answer to one READDIR or READDIRPLUS.
type dirPage struct {
	list *fuse.DirEntryList
	plus bool
	left int // bytes
	some bool
}

// Sizes of struct fuse_dirent without its name, and of struct fuse_entry_out.
const (
	direntSize = 24
	entrySize  = 128
)

func (p *dirPage) size(name string) int {
	n := direntSize + (len(name)+7)&^7
	if p.plus {
		n += entrySize
	}
	return n
}

// room is how many entries with names of ordinary length fit.
func (p *dirPage) room() int {
	return min(max(p.left/p.size("ordinary-name.ext"), 1), metarpc.MaxPage)
}

// add adds an entry if there is room. With plus it returns the place for its attributes.
func (p *dirPage) add(e fuse.DirEntry) *fuse.EntryOut {
	if !p.plus {
		if p.list.AddDirEntry(e) {
			p.left -= p.size(e.Name)
			p.some = true
		}
		return nil
	}
	out := p.list.AddDirLookupEntry(e)
	if out != nil {
		p.left -= p.size(e.Name)
		p.some = true
	}
	return out
}
