package fs

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// stalled has the service answer none of some calls until go on is called, which applications do not wait for.
func (r *rig) stalled(calls ...string) (goOn func()) {
	gate := make(chan struct{})
	r.m.setHook(func(ctx context.Context, call string) error {
		if !slices.Contains(calls, call) {
			return nil
		}
		select {
		case <-gate:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	r.m.setSilent(true)
	return func() {
		r.m.setSilent(false)
		close(gate)
	}
}

// On a soft mount fsync and close fail while the service does not answer, and what they were to tell it is told later.
func TestSoftSync(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	id, fh := r.create("f")
	data := pattern(1, 100_000)
	r.write(id, 0, data)
	goOn := r.stalled("LayoutCommit")
	r.want(r.fsync(id, fh), syscall.ETIMEDOUT, "fsync")
	r.write(id, int64(len(data)), data)
	r.wantRead(id, 0, len(data), data)
	goOn()
	waittest.Until(t, "the size is durable", func() bool { return r.durable(id) == int64(2*len(data)) })
	r.want(r.fsync(id, fh), 0, "fsync")
	r.closeFile(id, fh)
}

// A change of size that was given up on a soft mount is carried through. What must come after it fails as well until then, and the kernel
// is told to believe nothing.
func TestSoftTruncate(t *testing.T) {
	r := newRig(t, newService(2, 64<<10))
	id, fh := r.create("f")
	data := pattern(1, 100_000)
	r.write(id, 0, data)
	r.want(r.fsync(id, fh), 0, "fsync")
	var attrs []uint64
	r.listen().attrs = func(node uint64) { attrs = append(attrs, node) }
	goOn := r.stalled("SetAttr")
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 10})
	r.want(status, syscall.ETIMEDOUT, "truncate")
	if !slices.Equal(attrs, []uint64{uint64(id)}) {
		t.Errorf("the kernel was told to forget the attributes of %v", attrs)
	}
	_, status = r.tryWrite(id, 0, data[:5], unix.O_RDWR)
	r.want(status, syscall.ETIMEDOUT, "write behind it")
	_, status = r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_SIZE, Size: 20})
	r.want(status, syscall.ETIMEDOUT, "another truncate")
	goOn()
	r.write(id, 12, data[:5])
	r.wantRead(id, 0, 100, slices.Concat(data[:10], []byte{0, 0}, data[:5]))
	r.want(r.fsync(id, fh), 0, "fsync")
	if got := r.durable(id); got != 17 {
		t.Errorf("the service has %d bytes", got)
	}
}

// A change of names that was given up makes the kernel ask for all names of the directory again.
func TestSoftNames(t *testing.T) {
	h := header(layout.RootID)
	for _, c := range []struct {
		name, call string
		change     func(r *rig, id layout.FileID) fuse.Status
		attrs      []uint64
	}{
		{"mkdir", "MakeNode", func(r *rig, _ layout.FileID) fuse.Status {
			return r.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: h, Mode: 0755}, "d", &fuse.EntryOut{})
		}, []uint64{1}},
		{"create", "Create", func(r *rig, _ layout.FileID) fuse.Status {
			return r.raw.Create(nil, &fuse.CreateIn{InHeader: h, Flags: unix.O_RDWR | unix.O_CREAT}, "g", &fuse.CreateOut{})
		}, []uint64{1}},
		{"link", "Link", func(r *rig, id layout.FileID) fuse.Status {
			return r.raw.Link(nil, &fuse.LinkIn{InHeader: h, Oldnodeid: uint64(id)}, "l", &fuse.EntryOut{})
		}, []uint64{2, 1}},
		{"unlink", "Remove", func(r *rig, _ layout.FileID) fuse.Status { return r.raw.Unlink(nil, &h, "f") }, []uint64{1}},
		{"rename", "Rename", func(r *rig, _ layout.FileID) fuse.Status {
			return r.raw.Rename(nil, &fuse.RenameIn{InHeader: h, Newdir: 1}, "f", "g")
		}, []uint64{1, 1}},
		{"setxattr", "SetXattr", func(r *rig, id layout.FileID) fuse.Status {
			return r.raw.SetXAttr(nil, &fuse.SetXAttrIn{InHeader: header(id)}, "user.a", []byte("b"))
		}, []uint64{2}},
		{"removexattr", "RemoveXattr", func(r *rig, id layout.FileID) fuse.Status {
			rh := header(id)
			return r.raw.RemoveXAttr(nil, &rh, "user.a")
		}, []uint64{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, newService(2, 64<<10))
			id, fh := r.create("f")
			r.closeFile(id, fh)
			var attrs []uint64
			names := 0
			k := r.listen()
			k.attrs, k.name = func(node uint64) { attrs = append(attrs, node) }, func(place) { names++ }
			r.lookup(testPID, layout.RootID, "none")
			r.keepOn()
			r.m.setHook(func(_ context.Context, call string) error {
				if call == c.call {
					return errSilent
				}
				return nil
			})
			r.want(c.change(r, id), syscall.ETIMEDOUT, "the change")
			want := 0
			if slices.Contains(attrs, 1) {
				want = 1
			}
			if !slices.Equal(attrs, c.attrs) || names != want {
				t.Errorf("the kernel was told to forget the attributes of %v, want %v, and %d names", attrs, c.attrs, names)
			}
		})
	}
}
