package fs

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
)

// TestCreateWithLayout makes files, of which those come with a layout that follow one which was written, and are to be written themselves.
func TestCreateWithLayout(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	made := 0
	create := func(flags uint32, layouts bool) (id layout.FileID, fh uint64) {
		t.Helper()
		made++
		before := len(r.m.granted)
		in := &fuse.CreateIn{InHeader: header(layout.RootID), Flags: flags | unix.O_CREAT, Mode: unix.S_IFREG | 0644}
		var out fuse.CreateOut
		r.want(r.raw.Create(nil, in, fmt.Sprint("f", made), &out), 0, "create")
		if got := len(r.m.granted) > before; got != layouts {
			t.Errorf("file %d: asked for a layout %t, want %t", made, got, layouts)
		}
		return layout.FileID(out.NodeId), out.Fh
	}
	fill := func(id layout.FileID, calls int) {
		t.Helper()
		before := r.m.called("Layout")
		r.write(id, 0, []byte("data"))
		if n := r.m.called("Layout") - before; n != calls {
			t.Errorf("a write cost %d calls for a layout, want %d", n, calls)
		}
	}
	a, afh := create(unix.O_WRONLY, false) // nothing is known yet
	b, bfh := create(unix.O_WRONLY, false)
	fill(a, 1)
	c, cfh := create(unix.O_RDWR, true)
	fill(c, 0)
	_, dfh := create(unix.O_RDONLY, false)
	e, efh := create(unix.O_WRONLY|unix.O_APPEND, false)
	r.closeFile(b, bfh) // the last one of which it is known, and empty
	f, ffh := create(unix.O_WRONLY, false)
	fill(f, 1)
	g, gfh := create(unix.O_WRONLY, true)
	fill(g, 0)
	fill(g, 0)
	for _, o := range []struct {
		id layout.FileID
		fh uint64
	}{{a, afh}, {c, cfh}, {f, ffh}, {g, gfh}} { // that they are closed says nothing new
		r.closeFile(o.id, o.fh)
	}
	h, hfh := create(unix.O_WRONLY, true)
	r.want(r.raw.Create(nil, &fuse.CreateIn{InHeader: header(layout.RootID), Flags: unix.O_WRONLY | unix.O_CREAT, Mode: unix.S_IFREG | 0644}, "f1", new(fuse.CreateOut)),
		syscall.ESTALE, "create of what is there")
	fill(h, 0)
	r.closeFile(h, hfh)
	r.release(dfh)
	r.closeFile(e, efh)
	create(unix.O_WRONLY, false)
}
