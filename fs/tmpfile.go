package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Tmpfile is open(2) with O_TMPFILE: the file has no name, and link(2) may give it one.
func (r *raw) Tmpfile(cancel <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	fs := r.fs
	asked := fs.clock.Add(1)
	args := &metarpc.TmpFileArgs{Parent: fs.id(in.NodeId), Mode: in.Mode & 07777, Umask: in.Umask & 07777}
	made, err := fs.meta.TmpFile(ctx, cred(&in.InHeader), args)
	if err != nil {
		return r.status(err)
	}
	i := fs.hold(made.Attr.ID)
	defer i.drop()
	i.mu.Lock()
	i.opens++
	i.opened()
	i.mu.Unlock()
	if err := r.opened(ctx, &out.OpenOut, i, in.Flags, in.Pid); err != nil {
		return r.status(err)
	}
	return r.entry(ctx, &in.InHeader, &out.EntryOut, place{}, made, asked, nil)
}

// named records that a file got a name: what is written to it is wanted even when nobody has it open, however much the
// answer that says so is overtaken by writes.
func (fs *FS) named(id layout.FileID) {
	if i := fs.peek(id); i != nil {
		i.mu.Lock()
		i.removed = false
		i.mu.Unlock()
	}
}
