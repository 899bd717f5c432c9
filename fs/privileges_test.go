package fs

import (
	"errors"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// execFlag is __FMODE_EXEC in flags of OPEN.
const execFlag = 0x20

// TestGiven walks through what execve(2) may find, by what the kernel was told before.
func TestGiven(t *testing.T) {
	const id, thread, other = 5, 100, 200
	armed := &metarpc.Attr{ID: id, Mode: unix.S_IFREG | 0o4755}
	others := &metarpc.Attr{ID: id, Mode: unix.S_IFREG | 0o4755, UID: 7}
	plain := &metarpc.Attr{ID: id, Mode: unix.S_IFREG | 0o755, UID: 7}
	var g *given
	upset := func() { g.during(id, func() {}) }
	for _, c := range []struct {
		name string
		now  *metarpc.Attr
		do   func()
		want error
	}{
		{"never told", armed, func() {}, nil},
		{"told of this", armed, func() { g.tell(other, armed) }, nil},
		{"told of this, by several", armed, func() { g.tell(other, armed); upset(); g.tell(thread, armed); upset() }, nil},
		{"no privileges any more", plain, func() { g.tell(thread, armed); g.tell(thread, plain) }, errOldPrivileges},
		{"another owner's", others, func() { g.tell(thread, armed); g.tell(thread, others) }, errOldPrivileges},
		{"two were given", armed, func() { g.tell(thread, others); g.tell(thread, armed) }, errOldPrivileges},
		{"asked since it was refused", plain, func() { g.tell(thread, armed); g.refused(thread, id); g.tell(thread, plain) }, nil},
		{"asked for another owner's", others, func() { g.tell(thread, armed); g.refused(thread, id); g.tell(thread, others) }, nil},
		{"somebody else asked", plain, func() { g.tell(thread, armed); g.refused(thread, id); g.tell(other, plain); g.tell(other, plain) }, errTextBusy},
		{"told of the old ones", plain, func() { g.tell(thread, armed); g.refused(thread, id); g.tell(thread, armed) }, errTextBusy},
		{"the old ones were given later", plain, func() {
			g.tell(thread, armed)
			g.refused(thread, id)
			g.tell(thread, plain)
			g.tell(other, armed)
		}, errTextBusy},
		{"upset before the answer", plain, func() { g.tell(thread, armed); g.refused(thread, id); upset(); g.tell(thread, plain) }, errTextBusy},
		{"upset after the answer", plain, func() { g.tell(thread, armed); g.refused(thread, id); g.tell(thread, plain); upset() }, errTextBusy},
		{"asked twice since", plain, func() {
			g.tell(thread, armed)
			g.refused(thread, id)
			upset()
			g.tell(thread, plain)
			g.tell(thread, plain)
		}, nil},
		{"more programs than are remembered", plain, func() {
			for n := range layout.FileID(maxPrograms) {
				g.tell(other, &metarpc.Attr{ID: 1000 + n, Mode: armed.Mode})
			}
			g.tell(thread, armed)
		}, errOldPrivileges},
	} {
		g = new(given)
		c.do()
		if err := g.mayExecute(thread, c.now, false); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if len(g.of) > maxPrograms {
			t.Errorf("%s: %d programs", c.name, len(g.of))
		}
	}
	g = new(given)
	g.tell(thread, armed)
	g.refused(thread, id)
	g.tell(thread, plain)
	g.during(id, func() {
		if err := g.mayExecute(thread, plain, false); !errors.Is(err, errTextBusy) {
			t.Errorf("while it is upset: %v, want %v", err, errTextBusy)
		}
	})
}

// TestExecute has a program overwritten through another mount. The kernel of this one, which knows it as root's,
// executes it when it has asked again.
func TestExecute(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, fh := b.create("f")
	b.write(id, 0, []byte("old"))
	b.closeFile(id, fh)
	_, status := b.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0o4755})
	b.want(status, 0, "chmod")
	asker := header(id)
	asker.Pid = 100
	execute := func() (uint64, fuse.Status) {
		var out fuse.OpenOut
		status := a.raw.Open(nil, &fuse.OpenIn{InHeader: asker, Flags: execFlag}, &out)
		return out.Fh, status
	}
	var attr fuse.AttrOut
	stat := func() { a.want(a.raw.GetAttr(nil, &fuse.GetAttrIn{InHeader: asker}, &attr), 0, "stat") }
	told := 0
	a.listen().attrs = func(uint64) { told++ }
	stat()
	h, status := execute()
	a.want(status, 0, "execution of what is root's")
	a.release(h)

	fh = b.open(id, unix.O_WRONLY)
	in := &fuse.WriteIn{InHeader: header(id), WriteFlags: fuse.WRITE_CACHE} // from a mapping
	_, status = b.raw.Write(nil, in, []byte("new"))
	b.want(status, 0, "write")
	b.closeFile(id, fh)
	if got := b.stat(id).Mode; got != unix.S_IFREG|0o755 {
		t.Errorf("mode %#o after a write through a mapping", got)
	}
	stat() // not certain to be what the kernel has
	before := told
	_, status = execute()
	a.want(status, syscall.ESTALE, "execution with privileges of before")
	if told == before {
		t.Error("the kernel was not made to ask again")
	}
	stat()
	h, status = execute()
	a.want(status, 0, "execution of what the kernel has asked for")

	// The kernel hears of a truncation before it is answered.
	a.release(h)
	_, status = b.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0o4755})
	b.want(status, 0, "chmod")
	stat()
	before = told
	a.want(a.raw.Open(nil, &fuse.OpenIn{InHeader: header(id), Flags: unix.O_WRONLY | unix.O_TRUNC, Mode: fuse.OPEN_KILL_SUIDGID}, &fuse.OpenOut{}), 0, "open")
	if told == before {
		t.Error("the kernel was not told of the truncation")
	}
	// Nothing is certain while it is open for writing here.
	_, status = execute()
	a.want(status, syscall.ETXTBSY, "execution of what is being written")
}

// TestArmedElsewhere has a file get privileges while it is open for writing here: the next write takes them away, after
// any number that did not have to.
func TestArmedElsewhere(t *testing.T) {
	s := newService(2, 64<<10)
	a, b := newRig(t, s), newRig(t, s)
	id, _ := a.create("f")
	write := func() {
		_, status := a.raw.Write(nil, &fuse.WriteIn{InHeader: header(id), WriteFlags: fuse.WRITE_KILL_SUIDGID}, []byte("x"))
		a.want(status, 0, "write")
	}
	for range 3 {
		write()
		_, status := b.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0o4755})
		b.want(status, 0, "chmod")
		// As the service does, which knows a to be a writer.
		a.OnLeaseRecall(t.Context(), []metarpc.LeaseItem{{ID: id, Lease: metarpc.LeaseAttrs}})
		write()
		if got := b.stat(id).Mode; got != unix.S_IFREG|0o755 {
			t.Errorf("mode %#o after a write", got)
		}
		// It is known again that there are none.
		n := a.m.called("Open")
		write()
		if got := a.m.called("Open"); got != n {
			t.Errorf("%d questions before another write", got-n)
		}
	}
}
