package fs

import (
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const setTime = 1_000_000_000 // seconds

func (r *rig) utimens(id layout.FileID, sec uint64) {
	r.t.Helper()
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME | fuse.FATTR_ATIME, Mtime: sec, Atime: sec + 1})
	r.want(status, 0, "utimens")
}

func (r *rig) wantTimes(id layout.FileID, sec uint64) {
	r.t.Helper()
	if a := r.stat(id); a.Mtime != sec || a.Atime != sec+1 {
		r.t.Errorf("mtime %d, atime %d, want %d and %d", a.Mtime, a.Atime, sec, sec+1)
	}
}

// row is what the service has of a file, without what is reported only.
func (r *rig) row(id layout.FileID) metarpc.Attr {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.s.nodes[id].attr
}

// What tar(1) does with each file costs one call besides CREATE.
func TestPutOff(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.write(id, 0, []byte("x"))
	begun := time.Now().Unix()
	r.utimens(id, setTime)
	a := r.stat(id)
	if int64(a.Ctime) < begun {
		t.Errorf("ctime %d, before %d", a.Ctime, begun)
	}
	_, status := r.setAttr(id, fuse.SetAttrInCommon{
		Valid: fuse.FATTR_UID | fuse.FATTR_GID | fuse.FATTR_KILL_SUIDGID, Owner: fuse.Owner{Uid: a.Uid, Gid: a.Gid}, // as the kernel sends it
	})
	r.want(status, 0, "chown to the same")
	r.wantTimes(id, setTime)
	if n := r.m.called("SetAttr"); n != 0 {
		t.Errorf("%d calls for times and owner", n)
	}
	_, status = r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MODE, Mode: 0o600})
	r.want(status, 0, "chmod")
	if n := r.m.called("SetAttr"); n != 1 {
		t.Errorf("%d calls with chmod", n)
	}
	if at := r.row(id); at.Mtime != setTime*1e9 || at.Atime != (setTime+1)*1e9 || at.Mode&0o777 != 0o600 {
		t.Errorf("the service has %+v", at)
	}
	r.closeFile(id, fh)
	waittest.Until(t, "released", func() bool { return r.held() == 0 })
	r.wantTimes(id, setTime)

	// Without that it goes with the data, and others see it before.
	id, fh = r.create("g")
	r.write(id, 0, []byte("x"))
	r.utimens(id, setTime)
	other := newRig(t, r.s)
	other.wantTimes(id, setTime)
	other.wantSize(id, 1)
	r.utimens(id, setTime+5)
	r.want(r.fsync(id, fh), 0, "fsync")
	if at := r.row(id); at.Mtime != (setTime+5)*1e9 || at.Atime != (setTime+6)*1e9 {
		t.Errorf("the service has %+v", at)
	}
	if n := r.m.called("SetAttr"); n != 1 {
		t.Errorf("%d calls", n)
	}
	r.closeFile(id, fh)
}

// A write after the times were set has its own.
func TestPutOffThenWritten(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.write(id, 0, []byte("x"))
	r.utimens(id, setTime)
	before := time.Now().Unix()
	r.write(id, 1, []byte("y"))
	for range 2 {
		if a := r.stat(id); int64(a.Mtime) < before || a.Atime != setTime+1 {
			t.Errorf("mtime %d, atime %d after a write at %d", a.Mtime, a.Atime, before)
		}
		r.want(r.fsync(id, fh), 0, "fsync")
	}
	r.closeFile(id, fh)
}

// What is not the same owner's to set, or has no lease, is not put off, and comes after what was.
func TestNotPutOff(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	id, fh := r.create("f")
	r.utimens(id, setTime)
	if n := r.m.called("SetAttr"); n != 1 {
		t.Errorf("times of a file without data: %d calls", n)
	}
	r.write(id, 0, []byte("x"))
	r.utimens(id, setTime)
	_, status := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_UID, Owner: fuse.Owner{Uid: 77}})
	r.want(status, 0, "chown")
	if at := r.row(id); at.UID != 77 || at.Mtime != setTime*1e9 {
		t.Errorf("the service has %+v", at)
	}
	calls := r.m.called("SetAttr")
	r.write(id, 0, []byte("y"))
	r.utimens(id, setTime+9) // by root, who is not its owner any more
	if n := r.m.called("SetAttr"); n != calls+1 {
		t.Errorf("times of somebody else's file: %d calls", n-calls)
	}
	r.wantTimes(id, setTime+9)
	r.closeFile(id, fh)

	id, fh = r.create("g")
	r.write(id, 0, []byte("x"))
	r.utimens(id, setTime)
	r.OnLeaseRecall(t.Context(), []metarpc.LeaseItem{{ID: id, Lease: metarpc.LeaseAttrs}})
	if at := r.row(id); at.Mtime != setTime*1e9 {
		t.Errorf("after a recall the service has %+v", at)
	}
	r.truncate(id, 0)
	if a := r.stat(id); a.Mtime == setTime || a.Atime != setTime+1 {
		t.Errorf("after a truncation: mtime %d, atime %d", a.Mtime, a.Atime)
	}
	r.closeFile(id, fh)
}
