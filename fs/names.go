package fs

import (
	"context"
	"errors"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func (r *raw) Lookup(cancel <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	ctx.name = name
	if err := checkName(name); err != nil {
		return r.status(err)
	}
	if name == "." || name == ".." {
		return r.status(r.lookupNode(ctx, in, name == "..", out))
	}
	asked := r.fs.clock.Add(1)
	a, err := r.fs.meta.Lookup(ctx, cred(in), r.fs.id(in.NodeId), name)
	return r.entry(ctx, in, out, place{in.NodeId, name}, a, asked, err)
}

// makeNode is all ways to make an inode but creat(2).
func (r *raw) makeNode(cancel <-chan struct{}, in *fuse.InHeader, args *metarpc.MakeNodeArgs, out *fuse.EntryOut) fuse.Status {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	ctx.name = args.Name
	if args.Mode&unix.S_IFMT == unix.S_IFSOCK { // bind(2) does not look a path up again
		ctx.firm.Store(true)
	}
	if err := checkName(args.Name); err != nil {
		return r.status(err)
	}
	args.Parent = r.fs.id(in.NodeId)
	asked := r.fs.clock.Add(1)
	a, err := r.fs.meta.MakeNode(ctx, cred(in), args)
	r.fs.unsure(err, args.Parent)
	return r.entry(ctx, in, out, place{in.NodeId, args.Name}, a, asked, err)
}

func (r *raw) Mknod(cancel <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	args := &metarpc.MakeNodeArgs{Name: name, Mode: in.Mode, Umask: in.Umask & 07777}
	if t := in.Mode & unix.S_IFMT; t == unix.S_IFCHR || t == unix.S_IFBLK {
		args.Rdev = in.Rdev
	}
	return r.makeNode(cancel, &in.InHeader, args, out)
}

func (r *raw) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	args := &metarpc.MakeNodeArgs{Name: name, Mode: unix.S_IFDIR | in.Mode&07777, Umask: in.Umask & 07777}
	return r.makeNode(cancel, &in.InHeader, args, out)
}

func (r *raw) Symlink(cancel <-chan struct{}, in *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	if len(target) > metarpc.MaxSymlink {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	args := &metarpc.MakeNodeArgs{Name: name, Mode: unix.S_IFLNK | 0777, Target: target}
	return r.makeNode(cancel, in, args, out)
}

func (r *raw) Link(cancel <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	ctx.name = name
	if err := checkName(name); err != nil {
		return r.status(err)
	}
	asked := r.fs.clock.Add(1)
	id, parent := r.fs.id(in.Oldnodeid), r.fs.id(in.NodeId)
	a, err := r.fs.meta.Link(ctx, cred(&in.InHeader), id, parent, name)
	r.fs.unsure(err, id, parent)
	status := r.entry(ctx, &in.InHeader, out, place{in.NodeId, name}, a, asked, err)
	if err == nil {
		r.fs.named(a.Attr.ID)
	}
	return status
}

func (r *raw) remove(cancel <-chan struct{}, in *fuse.InHeader, name string, dir bool) fuse.Status {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	ctx.name = name
	if err := checkName(name); err != nil {
		return r.status(err)
	}
	parent := r.fs.id(in.NodeId)
	err := r.fs.meta.Remove(ctx, cred(in), parent, name, dir)
	r.fs.unsure(err, parent)
	return r.status(err)
}

func (r *raw) Unlink(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return r.remove(cancel, in, name, false)
}

func (r *raw) Rmdir(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return r.remove(cancel, in, name, true)
}

func (r *raw) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	ctx.name, ctx.into = oldName, r.fs.id(in.Newdir)
	if err := errors.Join(checkName(oldName), checkName(newName)); err != nil {
		return r.status(err)
	}
	if in.Flags&^(metarpc.RenameNoReplace|metarpc.RenameExchange) != 0 {
		return fuse.EINVAL
	}
	args := &metarpc.RenameArgs{
		OldParent: r.fs.id(in.NodeId), OldName: oldName,
		NewParent: r.fs.id(in.Newdir), NewName: newName,
		Flags: in.Flags,
	}
	e := &ends{
		dirs:     [2]layout.FileID{args.OldParent, args.NewParent},
		at:       [2]place{{in.NodeId, oldName}, {in.Newdir, newName}},
		exchange: in.Flags&metarpc.RenameExchange != 0,
	}
	began, slow := now(), false
	r.fs.kept.beginRename(e)
	defer func() { r.fs.kept.endRename(e, slow) }()
	names, leased, err := r.fs.beforeRename(ctx, cred(&in.InHeader), e, began)
	if err != nil {
		return r.status(err)
	}
	if !leased && ctx.startOver() {
		return fuse.Status(syscall.ESTALE)
	}
	err = r.fs.rename(ctx, cred(&in.InHeader), args)
	if err == nil {
		if slow = !leased; slow {
			r.fs.awaitNames(ctx, names)
		}
		r.fs.places.rename(e.at[0], e.at[1], e.exchange)
	}
	return r.status(err)
}

// rename makes the data of a file stable before the file takes the place of another one: whoever writes a file beside
// an old one and renames it expects to find one or the other after a crash.
func (fs *FS) rename(ctx context.Context, who metarpc.Cred, args *metarpc.RenameArgs) error {
	if args.Flags&metarpc.RenameNoReplace == 0 && fs.flusher.anyDirty() {
		oldFile := fs.dirtyFile(ctx, who, args.OldParent, args.OldName)
		newFile, err := fs.meta.Lookup(ctx, who, args.NewParent, args.NewName)
		replaces := err == nil && newFile.Attr.Mode&unix.S_IFMT == unix.S_IFREG
		if oldFile != nil {
			defer oldFile.drop()
			if replaces {
				if err := oldFile.makeDurable(ctx); err != nil {
					return err
				}
			}
		}
		if replaces && args.Flags&metarpc.RenameExchange != 0 {
			if i := fs.holdKnown(newFile.Attr.ID); i != nil {
				defer i.drop()
				if err := i.makeDurable(ctx); err != nil {
					return err
				}
			}
		}
	}
	err := fs.meta.Rename(ctx, who, args)
	fs.unsure(err, args.OldParent, args.NewParent)
	return err
}

// dirtyFile holds the file of that name if it may have data that is not stable, and returns nil otherwise.
func (fs *FS) dirtyFile(ctx context.Context, who metarpc.Cred, parent layout.FileID, name string) *inode {
	a, err := fs.meta.Lookup(ctx, who, parent, name)
	if err != nil {
		return nil // the rename will tell why
	}
	return fs.holdKnown(a.Attr.ID)
}
