package fs

import (
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// checkXattr refuses names outside the namespaces of xattr(7), which the kernel leaves to a FUSE file system, and attributes
// that mean something to the kernel which it would not act upon: SELinux labels and what is not an access control list.
// Programs like ls(1) ask for those of each file, until told that there are none at all.
func checkXattr(name string) error {
	space, rest, _ := strings.Cut(name, ".")
	switch space {
	case "user", "trusted", "security", "weft":
	case "system":
		if rest != "posix_acl_access" && rest != "posix_acl_default" {
			return syscall.EOPNOTSUPP
		}
	default:
		return syscall.EOPNOTSUPP
	}
	switch {
	case name == "security.selinux":
		return syscall.EOPNOTSUPP
	case rest == "":
		return syscall.EINVAL
	}
	if len(name) > metarpc.MaxXattrKey {
		return syscall.ERANGE
	}
	return nil
}

// fit copies an attribute's value to where the caller wants it. Without room it tells how much is needed.
func fit(dest, value []byte) (uint32, fuse.Status) {
	if len(dest) < len(value) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

func (r *raw) GetXAttr(cancel <-chan struct{}, in *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	if err := checkXattr(name); err != nil {
		return 0, r.status(err)
	}
	id := r.fs.id(in.NodeId)
	if name == xattrAdvise {
		state, err := r.fs.advice(ctx, id)
		if err != nil {
			return 0, r.status(err)
		}
		return fit(dest, []byte(state))
	}
	value, err := r.fs.meta.GetXattr(ctx, cred(in), id, name)
	if err != nil {
		return 0, r.status(byID(id, err))
	}
	return fit(dest, value)
}

func (r *raw) ListXAttr(cancel <-chan struct{}, in *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	id := r.fs.id(in.NodeId)
	names, err := r.fs.meta.ListXattr(ctx, cred(in), id)
	if err != nil {
		return 0, r.status(byID(id, err))
	}
	var list []byte
	for _, name := range names {
		list = append(append(list, name...), 0)
	}
	return fit(dest, list)
}

func (r *raw) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, name string, value []byte) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	if err := checkXattr(name); err != nil {
		return r.status(err)
	}
	id := r.fs.id(in.NodeId)
	if name == xattrAdvise {
		return r.status(r.fs.setAdvice(ctx, cred(&in.InHeader), id, string(value)))
	}
	err := r.fs.meta.SetXattr(ctx, cred(&in.InHeader), id, name, value, in.Flags)
	r.fs.unsure(err, id)
	r.xattrChanged(id, name)
	return r.status(byID(id, err))
}

// xattrChanged is called before a change of an extended attribute is answered, whatever came of it. The mode goes with
// an access control list, and answers to GETATTR that are on their way are of before.
func (r *raw) xattrChanged(id layout.FileID, name string) {
	switch {
	case name == capability:
		r.fs.armed(id)
	case strings.HasPrefix(name, "system.posix_acl_"):
		r.fs.forgetAttrs(id)
	}
}

func (r *raw) RemoveXAttr(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	ctx := r.begin(cancel, in)
	defer ctx.end()
	if err := checkXattr(name); err != nil {
		return r.status(err)
	}
	id := r.fs.id(in.NodeId)
	err := r.fs.meta.RemoveXattr(ctx, cred(in), id, name)
	r.fs.unsure(err, id)
	r.xattrChanged(id, name)
	return r.status(byID(id, err))
}
