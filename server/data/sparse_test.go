package data

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/internal/wire/xdr"
)

func sparseCall(proc sparse.Proc, cred oncrpc.Auth) oncrpc.Call {
	return oncrpc.Call{Prog: sparse.Program, Vers: sparse.Version, Proc: uint32(proc), Cred: cred}
}

// sparse makes a call of the program for holes.
func (c *client) sparse(proc sparse.Proc, cred oncrpc.Auth, args appender, res interface{ Decode(*xdr.Decoder) error }) {
	c.t.Helper()
	if _, err := finish(c.send(sparseCall(proc, cred), args.Append(nil)), res); err != nil {
		c.t.Fatalf("%v: %v", proc, err)
	}
}

func (c *client) allocate(cred oncrpc.Auth, fh wire.FileHandle, off, n uint64, col sparse.Column, keep bool) sparse.RangeRes {
	c.t.Helper()
	var res sparse.RangeRes
	args := &sparse.AllocateArgs{RangeArgs: sparse.RangeArgs{FH: fh, Off: off, Length: n, Column: col}, KeepSize: keep}
	c.sparse(sparse.ProcAllocate, cred, args, &res)
	return res
}

func (c *client) deallocate(cred oncrpc.Auth, fh wire.FileHandle, off, n uint64, col sparse.Column) sparse.RangeRes {
	c.t.Helper()
	var res sparse.RangeRes
	c.sparse(sparse.ProcDeallocate, cred, &sparse.RangeArgs{FH: fh, Off: off, Length: n, Column: col}, &res)
	return res
}

func (c *client) seek(cred oncrpc.Auth, fh wire.FileHandle, what sparse.What, off, n uint64, col sparse.Column) sparse.SeekRes {
	c.t.Helper()
	var res sparse.SeekRes
	args := &sparse.SeekArgs{RangeArgs: sparse.RangeArgs{FH: fh, Off: off, Length: n, Column: col}, What: what}
	c.sparse(sparse.ProcSeek, cred, args, &res)
	return res
}

// onFileSystems runs a test on the file systems that there are.
func onFileSystems(t *testing.T, run func(t *testing.T, dir string)) {
	t.Run("disk", func(t *testing.T) { run(t, "") })
	t.Run("tmpfs", func(t *testing.T) { run(t, ramDir(t)) })
}

func TestSparse(t *testing.T) {
	onFileSystems(t, func(t *testing.T, dir string) {
		ts := start(t, dir)
		c := ts.dial()
		fh := c.create(ts.root, "f", 7, 8)
		const unit = 64 << 10
		all := sparse.Column{}
		odd := sparse.Column{Unit: unit, Count: 2, Index: 1}
		used := func() uint64 { return c.getattr(fh).Attr.Used }
		size := func() uint64 { return c.getattr(fh).Attr.Size }

		// Space is reserved for the column alone, and the size grows to its end.
		if res := c.allocate(as(7, 8), fh, 0, 16*unit, odd, true); res != (sparse.RangeRes{Off: 16 * unit}) {
			t.Fatalf("ALLOCATE: %+v", res)
		}
		if n := used(); n < 8*unit || n > 9*unit || size() != 0 {
			t.Errorf("%d bytes used, size %d; want %d and 0", n, size(), 8*unit)
		}
		c.allocate(as(7, 8), fh, 0, 15*unit, odd, false)
		if got := size(); got != 14*unit {
			t.Errorf("size %d, want the end of the column's last unit, %d", got, 14*unit)
		}
		for i := range uint64(7) {
			c.put(fh, (2*i+1)*unit, bytes.Repeat([]byte{0xaa}, unit))
		}
		if res := c.deallocate(as(7, 8), fh, 3*unit+100, unit-100, all); res != (sparse.RangeRes{Off: 4 * unit}) {
			t.Fatalf("DEALLOCATE: %+v", res)
		}
		c.check(fh, 3*unit, append(bytes.Repeat([]byte{0xaa}, 100), make([]byte, unit)...))
		if n := used(); n > 9*unit-unit/2 {
			t.Errorf("%d bytes used after DEALLOCATE", n)
		}

		block := uint64(4096)
		short := c.create(ts.root, "short", 7, 8)
		c.put(short, 2*block, []byte("end"))
		for _, c2 := range []struct {
			what      sparse.What
			off, want uint64
			found     bool
		}{
			{sparse.Data, 0, 2 * block, true},
			{sparse.Data, 2*block + 100, 2*block + 100, true}, // the last block counts to its end
			{sparse.Data, 3 * block, 100 * block, false},
			{sparse.Hole, 2*block + 1, 3 * block, true},
			{sparse.Hole, 2*block + 100, 3 * block, true},
			{sparse.Hole, 3*block + 5, 3*block + 5, true},
		} {
			res := c.seek(as(7, 8), short, c2.what, c2.off, 100*block-c2.off, all)
			if res != (sparse.SeekRes{Found: c2.found, Off: c2.want}) {
				t.Errorf("SEEK %d from %d in a short file: %+v, want %v %d", c2.what, c2.off, res, c2.found, c2.want)
			}
		}
		for _, c2 := range []struct {
			what   sparse.What
			off, n uint64
			col    sparse.Column
			found  bool
			want   uint64
		}{
			{sparse.Data, 0, 16 * unit, all, true, unit},
			{sparse.Data, 0, 16 * unit, odd, true, unit},
			{sparse.Data, 0, unit, all, false, unit},
			{sparse.Data, unit + 5, 16 * unit, all, true, unit + 5},
			{sparse.Hole, unit + 5, 16 * unit, all, true, 2 * unit},
			{sparse.Hole, unit, 16 * unit, odd, true, 3*unit + block},
			{sparse.Hole, 4 * unit, 100 * unit, odd, true, 15 * unit}, // the end of the file
			{sparse.Hole, 4 * unit, 7 * unit, odd, false, 11 * unit},
			{sparse.Data, 3*unit + block, 16 * unit, all, true, 5 * unit},
			{sparse.Data, 14 * unit, 1 << 40, all, false, 14*unit + 1<<40},
			{sparse.Hole, 1 << 40, 10, all, true, 1 << 40},
			{sparse.Data, 77, 0, all, false, 77},
		} {
			res := c.seek(as(99, 8), fh, c2.what, c2.off, c2.n, c2.col)
			if res != (sparse.SeekRes{Found: c2.found, Off: c2.want}) {
				t.Errorf("SEEK %d in %d bytes at %d of %+v: %+v, want %v %d", c2.what, c2.n, c2.off, c2.col, res, c2.found, c2.want)
			}
		}
	})
}

// What the file system cannot have is told apart, and a hole there is one.
func TestSparseRefusals(t *testing.T) {
	onFileSystems(t, func(t *testing.T, dir string) {
		ts := start(t, dir)
		c := ts.dial()
		fh := c.create(ts.root, "f", 7, 8)
		c.put(fh, 0, []byte("data"))
		all := sparse.Column{}
		for _, cred := range []oncrpc.Auth{as(9, 9), as(9, 8)} {
			if res := c.allocate(cred, fh, 0, 10, all, true); res.Status != wire.ErrAcces {
				t.Errorf("ALLOCATE by who may not write: %v", res.Status)
			}
			if res := c.deallocate(cred, fh, 0, 10, all); res.Status != wire.ErrAcces {
				t.Errorf("DEALLOCATE by who may not write: %v", res.Status)
			}
		}
		if res := c.seek(as(9, 9), fh, sparse.Data, 0, 10, all); res.Status != wire.ErrAcces {
			t.Errorf("SEEK by who may not read: %v", res.Status)
		}
		if res := c.seek(super, ts.root, sparse.Data, 0, 10, all); res.Status != wire.ErrIsDir {
			t.Errorf("SEEK in a directory: %v", res.Status)
		}
		for _, r := range [][2]uint64{{1 << 63, 1}, {math.MaxInt64, 1}, {math.MaxInt64 - 5, 100}, {5, math.MaxUint64}} {
			if res := c.allocate(super, fh, r[0], r[1], all, false); res.Status != wire.ErrFBig {
				t.Errorf("ALLOCATE of %d bytes at %d: %v", r[1], r[0], res.Status)
			}
		}
		if res := c.deallocate(super, fh, 2, math.MaxInt64-2, all); res != (sparse.RangeRes{Off: math.MaxInt64}) {
			t.Errorf("DEALLOCATE to the end of everything: %+v", res)
		}
		c.check(fh, 0, []byte("da\x00\x00"))
		stale := fh
		c.remove(super, ts.root, "f")
		if res := c.deallocate(super, stale, 0, 10, all); res.Status != wire.ErrStale {
			t.Errorf("DEALLOCATE in a removed file: %v", res.Status)
		}

		wantStat(t, "procedure", func() error { _, err := finish(c.send(sparseCall(9, super), nil), nil); return err }(), oncrpc.ProcUnavail)
		call := sparseCall(sparse.ProcSeek, super)
		wantStat(t, "arguments", func() error { _, err := finish(c.send(call, []byte{1}), nil); return err }(), oncrpc.GarbageArgs)
		call.Vers = 3
		wantStat(t, "version", func() error { _, err := finish(c.send(call, nil), nil); return err }(), oncrpc.ProgMismatch)
		if _, err := finish(c.send(sparseCall(sparse.ProcNull, oncrpc.Auth{}), nil), nil); err != nil {
			t.Errorf("NULL: %v", err)
		}
		wantStat(t, "no identity", func() error {
			_, err := finish(c.send(sparseCall(sparse.ProcSeek, oncrpc.Auth{}), nil), nil)
			return err
		}(), oncrpc.AuthError)
	})
}

// What is answered is on the disk, and a sync that fails is told and changes the verifier.
func TestSparseStable(t *testing.T) {
	var syncs atomic.Int32
	var fail atomic.Bool
	real := fsync
	fsync = func(fd int) error {
		syncs.Add(1)
		if fail.Load() {
			return unix.EIO
		}
		return real(fd)
	}
	defer func() { fsync = real }()
	ts := start(t, "")
	defer ts.stop()
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	for _, do := range []func() sparse.RangeRes{
		func() sparse.RangeRes { return c.allocate(super, fh, 0, 1<<20, sparse.Column{}, false) },
		func() sparse.RangeRes { return c.deallocate(super, fh, 0, 1<<20, sparse.Column{}) },
	} {
		before, verf := syncs.Load(), *ts.verifier.now.Load()
		if res := do(); res.Status != wire.OK || syncs.Load() == before {
			t.Errorf("%+v after %d syncs", res, syncs.Load()-before)
		}
		fail.Store(true)
		if res := do(); res.Status != wire.ErrIO {
			t.Errorf("with a failing sync: %+v", res)
		}
		if *ts.verifier.now.Load() == verf {
			t.Error("a failed sync left the verifier as it was")
		}
		fail.Store(false)
	}
}

// A long range may take several calls; none does less than nothing.
func TestSparseProgress(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	if res := c.allocate(super, fh, math.MaxInt64-4095, 4000, sparse.Column{}, true); res != (sparse.RangeRes{Off: math.MaxInt64 - 95}) {
		t.Errorf("ALLOCATE in the last block: %+v", res)
	}
	col := sparse.Column{Unit: 4096, Count: 1000, Index: 3}
	calls := 0
	for off, end := uint64(0), uint64(1<<42); off < end; calls++ {
		res := c.seek(super, fh, sparse.Data, off, end-off, col)
		if res.Status != wire.OK || res.Found || res.Off <= off {
			t.Fatalf("SEEK at %d: %+v", off, res)
		}
		off = res.Off
	}
	for off, end := uint64(0), uint64(1<<28); off < end; calls++ {
		res := c.deallocate(super, fh, off, end-off, col)
		if res.Status != wire.OK || res.Off <= off {
			t.Fatalf("DEALLOCATE at %d: %+v", off, res)
		}
		off = res.Off
	}
	t.Log(fmt.Sprint(calls, " calls"))
}

// A file system that is full says so, and what was there stays.
func TestSparseNoSpace(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("weft-test", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("missing: the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	ts := start(t, dir)
	defer ts.stop()
	c := ts.dial()
	fh := c.create(ts.root, "f", 7, 8)
	c.put(fh, 0, []byte("data"))
	if res := c.allocate(super, fh, 0, 4<<20, sparse.Column{}, false); res.Status != wire.OK {
		t.Fatalf("ALLOCATE of half of it: %v", res.Status)
	}
	other := c.create(ts.root, "g", 7, 8)
	if res := c.allocate(super, other, 0, 8<<20, sparse.Column{}, true); res.Status != wire.ErrNoSpc {
		t.Errorf("ALLOCATE of more than there is: %v", res.Status)
	}
	if res := c.deallocate(super, other, 0, 8<<20, sparse.Column{}); res.Status != wire.OK {
		t.Errorf("DEALLOCATE: %v", res.Status)
	}
	c.put(fh, 4, make([]byte, 1<<20)) // into what is reserved
	c.check(fh, 0, []byte("data"))
}

// Punching all of the last block of a file, which it has only in part, leaves a hole there, as fallocate(2) does on a
// local file when the range reaches to the block's end. Clients of striped files know no more than where the file ends.
func TestPunchTail(t *testing.T) {
	const block, size = 4096, 2*4096 + 3
	onFileSystems(t, func(t *testing.T, dir string) {
		ts := start(t, dir)
		c := ts.dial()
		for i, end := range []uint64{size, size + 100, 3 * block, 1 << 20, math.MaxInt64} {
			for _, from := range []uint64{0, block, block + 5, 2 * block} {
				name := fmt.Sprintf("f%d-%d", i, from)
				fh := c.create(ts.root, name, 7, 8)
				data := bytes.Repeat([]byte{0xaa}, size)
				c.put(fh, 0, data)
				if res := c.deallocate(super, fh, from, end-from, sparse.Column{}); res != (sparse.RangeRes{Off: end}) {
					t.Fatalf("DEALLOCATE from %d to %d: %+v", from, end, res)
				}
				clear(data[from:])
				c.check(fh, 0, data)
				if attr := c.getattr(fh).Attr; attr.Size != size || attr.Used > 2*block {
					t.Errorf("DEALLOCATE from %d to %d: size %d, %d bytes used", from, end, attr.Size, attr.Used)
				}
				if res := c.seek(super, fh, sparse.Data, 2*block, block, sparse.Column{}); res.Status != wire.OK || res.Found {
					t.Errorf("DEALLOCATE from %d to %d: data in the last block: %+v", from, end, res)
				}

				// The system calls that an application makes, on a local file.
				local, err := os.OpenFile(ts.export("local-"+name), os.O_RDWR|os.O_CREATE, 0o600)
				if err != nil {
					t.Fatal(err)
				}
				defer local.Close()
				if _, err := local.Write(bytes.Repeat([]byte{0xaa}, size)); err != nil {
					t.Fatal(err)
				}
				if err := unix.Fallocate(int(local.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from), max(int64(end), 3*block)-int64(from)); err != nil && end < math.MaxInt64 {
					t.Fatal(err)
				}
				if end == math.MaxInt64 {
					continue // not all file systems take this
				}
				for _, whence := range []int{unix.SEEK_DATA, unix.SEEK_HOLE} {
					for off := int64(0); off < size; off += block / 2 {
						want, err := unix.Seek(int(local.Fd()), off, whence)
						what := sparse.Data
						if whence == unix.SEEK_HOLE {
							what = sparse.Hole
						}
						res := c.seek(super, fh, what, uint64(off), uint64(size-off), sparse.Column{})
						found := err == nil && want < size
						if res.Status != wire.OK || res.Found != found || found && res.Off != uint64(want) {
							t.Errorf("DEALLOCATE from %d to %d: SEEK %d from %d: %+v; in the local file %d, %v", from, end, what, off, res, want, err)
						}
					}
				}
			}
		}
	})
}

// Bytes that are written behind the end of the file while its last block is punched stay.
func TestPunchTailRace(t *testing.T) {
	ts := start(t, ramDir(t))
	punch, write := ts.dial(), ts.dial()
	for i := range 300 {
		fh := punch.create(ts.root, fmt.Sprint("f", i), 7, 8)
		punch.put(fh, 0, []byte("abc"))
		var wg sync.WaitGroup
		wg.Go(func() { punch.deallocate(super, fh, 0, 3, sparse.Column{}) })
		wg.Go(func() { write.put(fh, 3, []byte("def")) })
		wg.Wait()
		punch.check(fh, 0, []byte("\x00\x00\x00def"))
	}
}
