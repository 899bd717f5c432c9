package fs

import (
	"bytes"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

const (
	keepSize = unix.FALLOC_FL_KEEP_SIZE
	punchOut = unix.FALLOC_FL_PUNCH_HOLE | keepSize
	zeroOut  = unix.FALLOC_FL_ZERO_RANGE
)

func (r *rig) fallocate(id layout.FileID, fh uint64, mode uint32, off, n int64) fuse.Status {
	return r.raw.Fallocate(nil, &fuse.FallocateIn{InHeader: header(id), Fh: fh, Mode: mode, Offset: uint64(off), Length: uint64(n)})
}

func (r *rig) seek(id layout.FileID, fh uint64, off uint64, whence uint32) (uint64, fuse.Status) {
	var out fuse.LseekOut
	status := r.raw.Lseek(nil, &fuse.LseekIn{InHeader: header(id), Fh: fh, Offset: off, Whence: whence}, &out)
	return out.Offset, status
}

// taken is how much space a file's data files take up.
func (r *rig) taken(id layout.FileID) (n int64) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	for _, df := range r.s.nodes[id].files {
		n += r.s.server(df.Device).Taken(df)
	}
	return n
}

func TestFallocate(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		s := newService(3, 16<<10)
		if foreign {
			for _, server := range s.servers {
				server.Foreign()
			}
		}
		r := newRig(t, s)
		id, fh := r.create("f")
		data := pattern(1, 100_000)
		r.write(id, 0, data)
		r.want(r.fallocate(id, fh, 0, 0, 50_000), 0, "allocate inside")
		r.wantSize(id, 100_000)
		r.want(r.fallocate(id, fh, 0, 100_000, 50_000), 0, "allocate at the end")
		data = append(data, make([]byte, 50_000)...)
		r.wantRead(id, 0, 1<<20, data)
		r.want(r.fallocate(id, fh, punchOut, 90_000, 1<<40), 0, "punch to the end")
		clear(data[90_000:])
		r.wantRead(id, 0, 1<<20, data)
		r.want(r.fallocate(id, fh, zeroOut, 80_000, 100_000), 0, "zero beyond the end")
		data = append(data, make([]byte, 30_000)...)
		clear(data[80_000:])
		r.wantRead(id, 0, 1<<20, data)
		r.want(r.fallocate(id, fh, zeroOut|keepSize, 1000, 1<<20), 0, "zero and keep the size")
		clear(data[1000:])
		r.wantRead(id, 0, 1<<20, data)
		r.wantSize(id, 180_000)
		for _, mode := range []uint32{unix.FALLOC_FL_COLLAPSE_RANGE, unix.FALLOC_FL_INSERT_RANGE, unix.FALLOC_FL_UNSHARE_RANGE, unix.FALLOC_FL_PUNCH_HOLE} {
			r.want(r.fallocate(id, fh, mode, 0, 4096), syscall.EOPNOTSUPP, "mode %#x", mode)
		}
		r.want(r.fallocate(id, fh, 0, math.MaxInt64-10, 100), syscall.EFBIG, "allocate past everything")
		var errno syscall.Errno
		if foreign {
			errno = syscall.EOPNOTSUPP
		}
		r.want(r.fallocate(id, fh, keepSize, 200_000, 100_000), errno, "reserve behind the end")
		r.wantSize(id, 180_000)
		// Growing it must not cut what another mount has written meanwhile.
		other := newRig(t, r.s)
		fo := other.open(id, unix.O_WRONLY)
		other.write(id, 500_000, []byte("far"))
		other.closeFile(id, fo)
		r.want(r.fallocate(id, fh, 0, 0, 200_000), 0, "allocate")
		r.wantSize(id, 500_003)
		r.closeFile(id, fh)
	}
}

// Space is reserved, given back, and not there when it is not.
func TestFallocateSpace(t *testing.T) {
	r := newRig(t, newService(3, 16<<10))
	id, fh := r.create("f")
	r.want(r.fallocate(id, fh, keepSize, 0, 480<<10), 0, "reserve")
	r.wantSize(id, 0)
	if n := r.taken(id); n != 480<<10 {
		t.Errorf("%d bytes are taken, want %d", n, 480<<10)
	}
	r.want(r.fallocate(id, fh, 0, 0, 480<<10), 0, "allocate")
	r.wantSize(id, 480<<10)
	r.want(r.fallocate(id, fh, punchOut, 0, 240<<10), 0, "punch")
	if n := r.taken(id); n != 240<<10 {
		t.Errorf("%d bytes are taken, want %d", n, 240<<10)
	}
	r.want(r.fallocate(id, fh, zeroOut, 0, 48<<10), 0, "zero")
	if n := r.taken(id); n != 288<<10 {
		t.Errorf("%d bytes are taken, want %d", n, 288<<10)
	}
	for _, s := range r.s.servers {
		s.Room(0)
	}
	for _, mode := range []uint32{0, keepSize, zeroOut} {
		r.want(r.fallocate(id, fh, mode, 400<<10, 1<<20), syscall.ENOSPC, "mode %#x on full servers", mode)
	}
	r.wantSize(id, 480<<10)
	r.closeFile(id, fh)
}

// A punch is a change of the contents, a reservation is none.
func TestFallocateTimes(t *testing.T) {
	r := newRig(t, newService(1, 16<<10))
	id, fh := r.create("f")
	r.write(id, 0, make([]byte, 10_000))
	r.want(r.fsync(id, fh), 0, "fsync")
	past := uint64(1000)
	r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_MTIME, Mtime: past})
	r.want(r.fallocate(id, fh, 0, 0, 10_000), 0, "allocate")
	if a := r.stat(id); a.Mtime != past {
		t.Errorf("an allocation made the time of the last change %d", a.Mtime)
	}
	r.want(r.fallocate(id, fh, punchOut, 0, 4096), 0, "punch")
	if a := r.stat(id); a.Mtime == past {
		t.Error("a punch did not change the time of the last change")
	}
	r.closeFile(id, fh)
}

func TestSeek(t *testing.T) {
	const unit = 16 << 10
	r := newRig(t, newService(3, unit))
	id, fh := r.create("f")
	check := func(off uint64, whence uint32, want uint64, errno syscall.Errno) {
		t.Helper()
		if got, status := r.seek(id, fh, off, whence); status != fuse.Status(errno) || got != want {
			t.Errorf("lseek(%d, %d): %d, %v; want %d, %v", off, whence, got, status, want, errno)
		}
	}
	check(0, unix.SEEK_DATA, 0, syscall.ENXIO)
	check(0, unix.SEEK_HOLE, 0, syscall.ENXIO)
	r.truncate(id, 10*unit) // no data file covers it
	check(5, unix.SEEK_DATA, 0, syscall.ENXIO)
	check(5, unix.SEEK_HOLE, 5, 0)
	r.write(id, 10, []byte("near")) // the narrow segment alone
	check(0, unix.SEEK_DATA, 0, 0)
	check(0, unix.SEEK_HOLE, targettest.BlockSize, 0)
	check(targettest.BlockSize, unix.SEEK_DATA, 0, syscall.ENXIO)
	check(unit, unix.SEEK_HOLE, unit, 0)
	r.write(id, 4*unit, bytes.Repeat([]byte{1}, 6*unit-100))
	check(targettest.BlockSize, unix.SEEK_DATA, 4*unit, 0)
	check(4*unit+77, unix.SEEK_DATA, 4*unit+77, 0)
	check(4*unit, unix.SEEK_HOLE, 10*unit, 0) // the end
	check(10*unit, unix.SEEK_HOLE, 0, syscall.ENXIO)
	check(1<<63+1, unix.SEEK_DATA, 0, syscall.ENXIO)
	check(10, 77, 0, syscall.EINVAL)
	r.want(r.fallocate(id, fh, punchOut, 6*unit, unit), 0, "punch")
	check(4*unit, unix.SEEK_HOLE, 6*unit, 0)
	check(6*unit, unix.SEEK_DATA, 7*unit, 0)
	r.closeFile(id, fh)
}

// Random operations, also by another mount that reads and seeks, against a byte slice, while servers restart.
func TestHolesModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 4))
	r := newRig(t, newService(3, 16<<10))
	id, fh := r.create("f")
	const most = 300_000
	var want []byte
	grow := func(end int) {
		if end > len(want) {
			want = append(want, make([]byte, end-len(want))...)
		}
	}
	for step := range 300 {
		off := rnd.IntN(most)
		n := 1 + rnd.IntN(min(most-off, 1<<(1+rnd.IntN(18))))
		switch rnd.IntN(10) {
		case 0, 1, 2:
			data := pattern(uint64(step), n)
			r.write(id, int64(off), data)
			grow(off + n)
			copy(want[off:], data)
		case 3:
			r.truncate(id, int64(off))
			want = want[:min(off, len(want))]
			grow(off)
		case 4, 5, 6:
			mode := []uint32{0, keepSize, punchOut, zeroOut, zeroOut | keepSize}[rnd.IntN(5)]
			r.want(r.fallocate(id, fh, mode, int64(off), int64(n)), 0, "step %d: mode %#x", step, mode)
			if mode&keepSize == 0 {
				grow(off + n)
			}
			if mode&(unix.FALLOC_FL_PUNCH_HOLE|zeroOut) != 0 && off < len(want) {
				clear(want[off:min(off+n, len(want))])
			}
		case 7:
			r.s.servers[rnd.IntN(3)].Restart()
		case 8:
			at, status := r.seek(id, fh, uint64(off), unix.SEEK_DATA)
			if status == fuse.Status(syscall.ENXIO) {
				at = uint64(len(want))
			}
			if end := int(at); off < len(want) && (end < off || end > len(want) || len(bytes.Trim(want[off:end], "\x00")) > 0) {
				t.Fatalf("step %d: seek for data from %d: %d, %v", step, off, at, status)
			}
		case 9:
			at, status := r.seek(id, fh, uint64(off), unix.SEEK_HOLE)
			if off < len(want) && (status != 0 || int(at) < off || int(at) > len(want) || int(at) < len(want) && want[at] != 0) {
				t.Fatalf("step %d: seek for a hole from %d: %d, %v", step, off, at, status)
			}
		}
		r.wantSize(id, int64(len(want)))
		if step%10 == 0 {
			r.wantRead(id, 0, most, want)
		}
	}
	r.want(r.fsync(id, fh), 0, "fsync")
	for _, s := range r.s.servers {
		s.Restart()
	}
	r.wantRead(id, 0, most, want)
	r.closeFile(id, fh)
}
