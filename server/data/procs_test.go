package data

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// equal compares statuses and other small things.
func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// gone is a handle that once was a file's.
func gone(c *client, root wire.FileHandle) wire.FileHandle {
	c.t.Helper()
	fh := c.create(root, "gone", 1, 1)
	if st := c.remove(super, root, "gone"); st != wire.OK {
		c.t.Fatal(st)
	}
	return fh
}

func TestAttributes(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	c.put(fh, 0, make([]byte, 10_000))

	var want unix.Stat_t
	if err := unix.Stat(ts.export("f"), &want); err != nil {
		t.Fatal(err)
	}
	res := c.getattr(fh)
	equal(t, "GETATTR", res.Status, wire.OK)
	equal(t, "attributes", res.Attr, fattr(&want))
	a := res.Attr
	equal(t, "type", a.Type, wire.TypeReg)
	equal(t, "mode", a.Mode, 0o640)
	equal(t, "size", a.Size, 10_000)
	equal(t, "uid", a.UID, 1000)
	equal(t, "gid", a.GID, 1001)
	equal(t, "type of the root", c.getattr(ts.root).Attr.Type, wire.TypeDir)

	when := wire.Time{Sec: math.MaxInt32, Nsec: 5}
	set := c.setattr(super, fh, wire.Sattr{
		SetMode: true, Mode: 0o600, SetUID: true, UID: 7, SetGID: true, GID: 8, SetSize: true, Size: 3,
		AtimeHow: wire.ClientTime, Atime: when, MtimeHow: wire.ServerTime,
	})
	equal(t, "SETATTR", set.Status, wire.OK)
	b := set.Wcc.After.Attr
	equal(t, "attributes afterwards", b, c.getattr(fh).Attr)
	equal(t, "mode", b.Mode, 0o600)
	equal(t, "uid", b.UID, 7)
	equal(t, "gid", b.GID, 8)
	equal(t, "size", b.Size, 3)
	equal(t, "atime", b.Atime, when)
	if d := time.Since(b.Mtime.Time()); d < -time.Minute || d > time.Minute {
		t.Errorf("mtime is %v old", d)
	}
	set = c.setattr(super, fh, wire.Sattr{MtimeHow: wire.ClientTime, Mtime: wire.Time{Sec: 9}})
	equal(t, "mtime", set.Wcc.After.Attr.Mtime, wire.Time{Sec: 9})
	equal(t, "atime is kept", set.Wcc.After.Attr.Atime, when)

	guarded := func(ctime wire.Time) wire.Status {
		var res wire.WccRes
		c.do(wire.ProcSetattr, super, &wire.SetattrArgs{FH: fh, Attr: wire.Sattr{SetSize: true}, Guard: true, GuardCtime: ctime}, &res)
		return res.Status
	}
	equal(t, "guard of another time", guarded(wire.Time{Sec: 1}), wire.ErrNotSync)
	equal(t, "size", c.getattr(fh).Attr.Size, 3)
	equal(t, "guard", guarded(c.getattr(fh).Attr.Ctime), wire.OK)
	equal(t, "size", c.getattr(fh).Attr.Size, 0)

	stale := gone(c, ts.root)
	equal(t, "GETATTR", c.getattr(stale).Status, wire.ErrStale)
	equal(t, "SETATTR", c.setattr(super, stale, wire.Sattr{}).Status, wire.ErrStale)
	for _, tt := range []struct {
		name string
		fh   wire.FileHandle
		attr wire.Sattr
		want wire.Status
	}{
		{"size of a directory", ts.root, wire.Sattr{SetSize: true}, wire.ErrIsDir},
		{"size beyond an offset", fh, wire.Sattr{SetSize: true, Size: 1 << 63}, wire.ErrFBig},
		{"uid that chown takes for none", fh, wire.Sattr{SetUID: true, UID: math.MaxUint32}, wire.ErrInval},
		{"gid that chown takes for none", fh, wire.Sattr{SetGID: true, GID: math.MaxUint32}, wire.ErrInval},
		{"a second and more of nanoseconds", fh, wire.Sattr{MtimeHow: wire.ClientTime, Mtime: wire.Time{Nsec: 1_000_000_000}}, wire.ErrInval},
		{"nanoseconds that mean now", fh, wire.Sattr{AtimeHow: wire.ClientTime, Atime: wire.Time{Nsec: unix.UTIME_NOW}}, wire.ErrInval},
	} {
		before := c.getattr(tt.fh).Attr
		equal(t, tt.name, c.setattr(super, tt.fh, tt.attr).Status, tt.want)
		equal(t, tt.name+": attributes", c.getattr(tt.fh).Attr, before)
	}
}

func TestReadWrite(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	data := make([]byte, 100_001) // not a multiple of 4
	for i := range data {
		data[i] = byte(i * 7)
	}
	for _, stable := range []wire.Stable{wire.Unstable, wire.DataSync, wire.FileSync} {
		res := c.write(super, fh, 5, data, stable)
		equal(t, "WRITE", res.Status, wire.OK)
		equal(t, "count", res.Count, uint32(len(data)))
		equal(t, "committed", res.Committed, stable)
		equal(t, "verifier", res.Verf, *ts.verifier.now.Load())
	}
	commit := c.commit(super, fh)
	equal(t, "COMMIT", commit.Status, wire.OK)
	equal(t, "verifier", commit.Verf, *ts.verifier.now.Load())
	size := uint64(len(data)) + 5
	c.check(fh, 0, append(make([]byte, 5), data...))
	got, err := os.ReadFile(ts.export("f"))
	if err != nil || !bytes.Equal(got[5:], data) {
		t.Errorf("file has other contents: %v", err)
	}

	for _, tt := range []struct {
		off   uint64
		count uint32
		n     uint64
		eof   bool
	}{
		{0, 100, 100, false},
		{0, 0, 0, false},
		{size - 10, 9, 9, false},
		{size - 10, 10, 10, true},
		{size - 10, 11, 10, true},
		{0, math.MaxUint32, size, true},
		{size, 10, 0, true},
		{size, 0, 0, true},
		{size + 1, 10, 0, true},
		{math.MaxInt64, 10, 0, true},
		{math.MaxInt64 + 1, 10, 0, true},
		{math.MaxUint64, 10, 0, true},
	} {
		res := c.read(super, fh, tt.off, tt.count)
		what := fmt.Sprintf("READ of %d at %d", tt.count, tt.off)
		equal(t, what, res.Status, wire.OK)
		equal(t, what+": count", uint64(res.Count), tt.n)
		equal(t, what+": eof", res.EOF, tt.eof)
	}

	equal(t, "WRITE of nothing", c.write(super, fh, 0, nil, wire.Unstable).Status, wire.OK)
	equal(t, "WRITE of nothing at the end of offsets", c.write(super, fh, math.MaxInt64, nil, wire.Unstable).Status, wire.OK)
	for _, off := range []uint64{math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64} {
		equal(t, fmt.Sprintf("WRITE at %d", off), c.write(super, fh, off, []byte("x"), wire.Unstable).Status, wire.ErrFBig)
	}
	equal(t, "size", c.getattr(fh).Attr.Size, size)

	stale := gone(c, ts.root)
	for _, tt := range []struct {
		fh   wire.FileHandle
		want wire.Status
	}{{ts.root, wire.ErrIsDir}, {stale, wire.ErrStale}, {wire.FileHandle{}, wire.ErrBadHandle}} {
		equal(t, "READ", c.read(super, tt.fh, 0, 1).Status, tt.want)
		equal(t, "WRITE", c.write(super, tt.fh, 0, []byte("x"), wire.Unstable).Status, tt.want)
		equal(t, "COMMIT", c.commit(super, tt.fh).Status, tt.want)
	}
}

// What is larger than the largest request is cut, not refused.
func TestLargest(t *testing.T) {
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	data := bytes.Repeat([]byte("0123456789abcdef"), (maxIO+4096)/16)
	res := c.write(super, fh, 0, data, wire.Unstable)
	equal(t, "WRITE", res.Status, wire.OK)
	equal(t, "count", res.Count, maxIO)
	c.put(fh, maxIO, data[maxIO:])
	read := c.read(super, fh, 0, uint32(len(data)))
	equal(t, "READ", read.Status, wire.OK)
	equal(t, "count", read.Count, maxIO)
	equal(t, "eof", read.EOF, false)
	c.check(fh, 0, data)
}

func TestLookup(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	made := c.mkdir(super, ts.root, "d", wire.Sattr{SetMode: true, Mode: 0o700})
	equal(t, "MKDIR", made.Status, wire.OK)

	res := c.lookup(super, ts.root, "f")
	equal(t, "LOOKUP", res.Status, wire.OK)
	equal(t, "handle", res.FH, fh)
	equal(t, "attributes", res.Attr, wire.PostOpAttr{Present: true, Attr: c.getattr(fh).Attr})
	equal(t, "directory's attributes", res.DirAttr.Attr, c.getattr(ts.root).Attr)
	equal(t, "handle of a directory", c.lookup(super, ts.root, "d").FH, made.FH.FH)
	equal(t, "handle of .", c.lookup(super, made.FH.FH, ".").FH, made.FH.FH)

	long := strings.Repeat("n", unix.NAME_MAX)
	c.create(ts.root, long, 1, 1)
	equal(t, "longest name", c.lookup(super, ts.root, long).Status, wire.OK)
	if err := os.Symlink("f", ts.export("link")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		dir  wire.FileHandle
		name string
		want wire.Status
	}{
		{ts.root, "none", wire.ErrNoEnt},
		{ts.root, "", wire.ErrInval},
		{ts.root, "a/b", wire.ErrInval},
		{ts.root, "/", wire.ErrInval},
		{ts.root, "f\x00", wire.ErrInval},
		{ts.root, long + "n", wire.ErrNameTooLong},
		{ts.root, "link", wire.ErrInval},
		{ts.root, "..", wire.ErrAcces},
		{made.FH.FH, "..", wire.ErrAcces},
		{fh, "f", wire.ErrNotDir},
		{gone(c, ts.root), "f", wire.ErrStale},
		{wire.FileHandle{}, "f", wire.ErrBadHandle},
	} {
		equal(t, fmt.Sprintf("LOOKUP %.20q", tt.name), c.lookup(super, tt.dir, tt.name).Status, tt.want)
	}
}

func TestAccess(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	dir := c.mkdir(super, ts.root, "d", wire.Sattr{SetMode: true, Mode: 0o750, SetUID: true, UID: 1000, SetGID: true, GID: 1001}).FH.FH
	const (
		all   = 0x3f
		file  = wire.AccessRead | wire.AccessModify | wire.AccessExtend
		enter = wire.AccessRead | wire.AccessLookup
		full  = enter | wire.AccessModify | wire.AccessExtend | wire.AccessDelete
	)
	for _, tt := range []struct {
		cred oncrpc.Auth
		fh   wire.FileHandle
		mask uint32
		want uint32
	}{
		{super, fh, all, file | wire.AccessExecute},
		{super, fh, wire.AccessRead, wire.AccessRead},
		{as(1000, 1001), fh, all, file},
		{as(1000, 5), fh, all, 0},
		{as(5, 1001), fh, all, wire.AccessRead},
		{as(5, 5), fh, all, 0},
		{super, dir, all, full},
		{as(1000, 5), dir, all, full},
		{as(5, 1001), dir, all, enter},
		{as(5, 5), dir, all, 0},
	} {
		var res wire.AccessRes
		c.do(wire.ProcAccess, tt.cred, &wire.AccessArgs{FH: tt.fh, Access: tt.mask}, &res)
		equal(t, "ACCESS", res.Status, wire.OK)
		equal(t, fmt.Sprintf("rights of %x", tt.cred.Body), res.Access, tt.want)
	}
	var res wire.AccessRes
	c.do(wire.ProcAccess, super, &wire.AccessArgs{FH: gone(c, ts.root), Access: all}, &res)
	equal(t, "ACCESS", res.Status, wire.ErrStale)
}

func TestCreate(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	attr := owned(1000, 1001)
	attr.SetSize, attr.Size = true, 17
	attr.MtimeHow, attr.Mtime = wire.ClientTime, wire.Time{Sec: 12}
	res := c.createAs(super, ts.root, "f", wire.Unchecked, attr, wire.CreateVerf{})
	equal(t, "CREATE", res.Status, wire.OK)
	equal(t, "handle", res.FH.FH, c.lookup(super, ts.root, "f").FH)
	a := c.getattr(res.FH.FH).Attr
	equal(t, "attributes", res.Attr, wire.PostOpAttr{Present: true, Attr: a})
	equal(t, "mode", a.Mode, 0o640)
	equal(t, "uid", a.UID, 1000)
	equal(t, "gid", a.GID, 1001)
	equal(t, "size", a.Size, 17)
	equal(t, "mtime", a.Mtime, wire.Time{Sec: 12})

	again := c.createAs(super, ts.root, "f", wire.Unchecked, owned(5, 5), wire.CreateVerf{})
	equal(t, "CREATE of what exists", again.Status, wire.OK)
	equal(t, "handle", again.FH.FH, res.FH.FH)
	equal(t, "it stays as it is", again.Attr.Attr, a)
	again = c.createAs(super, ts.root, "f", wire.Unchecked, wire.Sattr{SetSize: true}, wire.CreateVerf{})
	equal(t, "CREATE that cuts", again.Status, wire.OK)
	equal(t, "size", again.Attr.Attr.Size, 0)
	equal(t, "GUARDED", c.createAs(super, ts.root, "f", wire.Guarded, owned(5, 5), wire.CreateVerf{}).Status, wire.ErrExist)
	equal(t, "GUARDED", c.createAs(super, ts.root, "g", wire.Guarded, wire.Sattr{}, wire.CreateVerf{}).Attr.Attr.Mode, 0o644)

	// The verifier's upper bit is lost to the times, which may not matter.
	verf := wire.CreateVerf{0xff, 2, 3, 4, 5, 6, 7, 8}
	first := c.createAs(super, ts.root, "x", wire.Exclusive, wire.Sattr{}, verf)
	equal(t, "EXCLUSIVE", first.Status, wire.OK)
	second := c.createAs(super, ts.root, "x", wire.Exclusive, wire.Sattr{}, verf)
	equal(t, "EXCLUSIVE again", second.Status, wire.OK)
	equal(t, "handle", second.FH.FH, first.FH.FH)
	equal(t, "EXCLUSIVE of somebody else", c.createAs(super, ts.root, "x", wire.Exclusive, wire.Sattr{}, wire.CreateVerf{1}).Status, wire.ErrExist)
	equal(t, "EXCLUSIVE of what exists", c.createAs(super, ts.root, "f", wire.Exclusive, wire.Sattr{}, verf).Status, wire.ErrExist)
	equal(t, "SETATTR", c.setattr(super, first.FH.FH, wire.Sattr{AtimeHow: wire.ServerTime, MtimeHow: wire.ServerTime}).Status, wire.OK)
	equal(t, "EXCLUSIVE after SETATTR", c.createAs(super, ts.root, "x", wire.Exclusive, wire.Sattr{}, verf).Status, wire.ErrExist)

	c.mkdir(super, ts.root, "d", wire.Sattr{})
	if err := os.Symlink("f", ts.export("link")); err != nil {
		t.Fatal(err)
	}
	fh := res.FH.FH
	for _, tt := range []struct {
		dir  wire.FileHandle
		name string
		want wire.Status
	}{
		{ts.root, "d", wire.ErrExist},
		{ts.root, "link", wire.ErrExist},
		{ts.root, ".", wire.ErrInval},
		{ts.root, "..", wire.ErrInval},
		{ts.root, "", wire.ErrInval},
		{ts.root, "a/b", wire.ErrInval},
		{ts.root, "a\x00b", wire.ErrInval},
		{ts.root, strings.Repeat("n", unix.NAME_MAX+1), wire.ErrNameTooLong},
		{fh, "f", wire.ErrNotDir},
		{gone(c, ts.root), "f", wire.ErrStale},
		{wire.FileHandle{}, "f", wire.ErrBadHandle},
	} {
		for _, mode := range []wire.CreateMode{wire.Unchecked, wire.Guarded, wire.Exclusive} {
			res := c.createAs(super, tt.dir, tt.name, mode, wire.Sattr{}, verf)
			equal(t, fmt.Sprintf("CREATE %.20q in mode %d", tt.name, mode), res.Status, tt.want)
		}
		want := tt.want
		equal(t, fmt.Sprintf("MKDIR %.20q", tt.name), c.mkdir(super, tt.dir, tt.name, wire.Sattr{}).Status, want)
	}
	bad := wire.Sattr{SetUID: true, UID: math.MaxUint32}
	equal(t, "CREATE for nobody", c.createAs(super, ts.root, "n", wire.Guarded, bad, wire.CreateVerf{}).Status, wire.ErrInval)
	equal(t, "CREATE of a huge file", c.createAs(super, ts.root, "n", wire.Guarded, wire.Sattr{SetSize: true, Size: 1 << 63}, wire.CreateVerf{}).Status, wire.ErrFBig)
	equal(t, "nothing was made", c.lookup(super, ts.root, "n").Status, wire.ErrNoEnt)
	// More than the file system can do is found out only when the file is there.
	res = c.createAs(super, ts.root, "n", wire.Guarded, wire.Sattr{SetSize: true, Size: math.MaxInt64}, wire.CreateVerf{})
	if res.Status != wire.OK {
		equal(t, "nothing was left", c.lookup(super, ts.root, "n").Status, wire.ErrNoEnt)
	}
}

func TestMkdirRemove(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	res := c.mkdir(super, ts.root, "d", wire.Sattr{SetMode: true, Mode: 0o2750, SetUID: true, UID: 3, SetGID: true, GID: 4, SetSize: true})
	equal(t, "MKDIR", res.Status, wire.OK)
	a := c.getattr(res.FH.FH).Attr
	equal(t, "attributes", res.Attr.Attr, a)
	equal(t, "type", a.Type, wire.TypeDir)
	equal(t, "mode", a.Mode, 0o2750)
	equal(t, "uid", a.UID, 3)
	equal(t, "gid", a.GID, 4)
	equal(t, "MKDIR", c.mkdir(super, ts.root, "d", wire.Sattr{}).Status, wire.ErrExist)
	equal(t, "MKDIR for nobody", c.mkdir(super, ts.root, "e", wire.Sattr{SetGID: true, GID: math.MaxUint32}).Status, wire.ErrInval)

	dir := res.FH.FH
	fh := c.create(dir, "f", 1, 1)
	c.put(fh, 0, []byte("data"))
	equal(t, "REMOVE of a directory", c.remove(super, ts.root, "d"), wire.ErrIsDir)
	equal(t, "RMDIR of a file", c.rmdir(super, dir, "f"), wire.ErrNotDir)
	equal(t, "RMDIR of a full directory", c.rmdir(super, ts.root, "d"), wire.ErrNotEmpty)
	equal(t, "it is still there", c.getattr(fh).Status, wire.OK)
	equal(t, "REMOVE", c.remove(super, dir, "f"), wire.OK)
	equal(t, "GETATTR", c.getattr(fh).Status, wire.ErrStale)
	equal(t, "REMOVE", c.remove(super, dir, "f"), wire.ErrNoEnt)
	equal(t, "RMDIR", c.rmdir(super, ts.root, "d"), wire.OK)
	equal(t, "GETATTR", c.getattr(dir).Status, wire.ErrStale)
	equal(t, "RMDIR", c.rmdir(super, ts.root, "d"), wire.ErrNoEnt)
	equal(t, "REMOVE in it", c.remove(super, dir, "f"), wire.ErrStale)

	// What the server never makes it still removes.
	if err := os.Symlink("f", ts.export("link")); err != nil {
		t.Fatal(err)
	}
	equal(t, "REMOVE of a link", c.remove(super, ts.root, "link"), wire.OK)
	for _, name := range []string{".", "..", "", "a/b", "a\x00"} {
		equal(t, fmt.Sprintf("REMOVE %q", name), c.remove(super, ts.root, name), wire.ErrInval)
		equal(t, fmt.Sprintf("RMDIR %q", name), c.rmdir(super, ts.root, name), wire.ErrInval)
	}
}

func TestRename(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	root := ts.root
	d := c.mkdir(super, root, "d", wire.Sattr{}).FH.FH
	e := c.mkdir(super, root, "e", wire.Sattr{}).FH.FH
	f := c.create(root, "f", 1, 1)
	g := c.create(d, "g", 1, 1)
	c.put(f, 0, []byte("f"))
	c.put(g, 0, []byte("g"))

	equal(t, "over itself", c.rename(super, root, "f", root, "f"), wire.OK)
	c.check(f, 0, []byte("f"))
	equal(t, "to another name", c.rename(super, root, "f", root, "f2"), wire.OK)
	equal(t, "LOOKUP", c.lookup(super, root, "f").Status, wire.ErrNoEnt)
	equal(t, "LOOKUP", c.lookup(super, root, "f2").FH, f)
	equal(t, "over another file", c.rename(super, root, "f2", d, "g"), wire.OK)
	c.check(f, 0, []byte("f"))
	equal(t, "GETATTR of the other", c.getattr(g).Status, wire.ErrStale)
	equal(t, "LOOKUP", c.lookup(super, d, "g").FH, f)
	equal(t, "over an empty directory", c.rename(super, root, "d", root, "e"), wire.OK)
	equal(t, "GETATTR of that", c.getattr(e).Status, wire.ErrStale)
	equal(t, "LOOKUP", c.lookup(super, root, "e").FH, d)

	h := c.mkdir(super, root, "h", wire.Sattr{}).FH.FH
	equal(t, "over a full directory", c.rename(super, root, "h", root, "e"), wire.ErrNotEmpty)
	equal(t, "into itself", c.rename(super, root, "h", h, "h"), wire.ErrInval)
	equal(t, "what is not there", c.rename(super, root, "none", root, "x"), wire.ErrNoEnt)
	equal(t, "file over a directory", c.rename(super, d, "g", root, "h"), wire.ErrIsDir)
	equal(t, "directory over a file", c.rename(super, root, "h", d, "g"), wire.ErrNotDir)
	equal(t, "from a file", c.rename(super, f, "x", root, "x"), wire.ErrNotDir)
	equal(t, "to a file", c.rename(super, root, "h", f, "x"), wire.ErrNotDir)
	equal(t, "from nowhere", c.rename(super, e, "x", root, "x"), wire.ErrStale)
	equal(t, "to nowhere", c.rename(super, root, "h", e, "x"), wire.ErrStale)
	for _, name := range []string{".", "..", "", "a/b", "a\x00"} {
		equal(t, fmt.Sprintf("from %q", name), c.rename(super, root, name, root, "x"), wire.ErrInval)
		equal(t, fmt.Sprintf("to %q", name), c.rename(super, root, "h", root, name), wire.ErrInval)
	}
	equal(t, "to a long name", c.rename(super, root, "h", root, strings.Repeat("n", unix.NAME_MAX+1)), wire.ErrNameTooLong)
}

// names lists a directory in pages; turn is called after each.
func (c *client) names(dir wire.FileHandle, plus bool, count uint32, turn func(page []string)) []string {
	c.t.Helper()
	var all []string
	var cookie uint64
	var verf wire.CookieVerf
	for {
		var entries []wire.EntryPlus
		var eof bool
		var reply interface{ Append([]byte) []byte }
		if plus {
			var res wire.ReaddirPlusRes
			c.do(wire.ProcReaddirPlus, super, &wire.ReaddirPlusArgs{Dir: dir, Cookie: cookie, Verf: verf, DirCount: count, MaxCount: count}, &res)
			equal(c.t, "READDIRPLUS", res.Status, wire.OK)
			entries, eof, verf, reply = res.Entries, res.EOF, res.Verf, &res
		} else {
			var res wire.ReaddirRes
			c.do(wire.ProcReaddir, super, &readdirArgs{Dir: dir, Cookie: cookie, Verf: verf, Count: count}, &res)
			equal(c.t, "READDIR", res.Status, wire.OK)
			for _, e := range res.Entries {
				entries = append(entries, wire.EntryPlus{Entry: e})
			}
			eof, verf, reply = res.EOF, res.Verf, &res
		}
		if n := len(reply.Append(nil)) - 4; uint32(n) > count {
			c.t.Fatalf("%d bytes of results, asked for %d", n, count)
		}
		var page []string
		for _, e := range entries {
			page = append(page, e.Name)
			cookie = e.Cookie
			if !plus {
				continue
			}
			if e.Name == ".." {
				if e.FH.Present || e.Attr.Present {
					c.t.Error("attributes or handle of ..")
				}
				continue
			}
			if !e.FH.Present || !e.Attr.Present || e.Attr.Attr.FileID != e.FileID {
				c.t.Errorf("entry %q: handle %v, attributes %+v, id %d", e.Name, e.FH.Present, e.Attr, e.FileID)
			}
		}
		if turn != nil {
			turn(page)
		}
		all = append(all, page...)
		if eof {
			return all
		}
		if len(entries) == 0 {
			c.t.Fatal("page without entries before the end")
		}
	}
}

// Entries that come and go between the pages do not make others be missed or told twice.
func TestReaddir(t *testing.T) {
	for _, dir := range []string{"", ramDir(t)} {
		ts := start(t, dir)
		c := ts.dial()
		for _, plus := range []bool{false, true} {
			made := c.mkdir(super, ts.root, fmt.Sprintf("d%v", plus), wire.Sattr{})
			fh := made.FH.FH
			path := ts.export(fmt.Sprintf("d%v", plus))
			want := []string{".", ".."}
			for i := range 500 {
				name := fmt.Sprintf("file-with-a-name-%d", i)
				want = append(want, name)
				if err := os.WriteFile(path+"/"+name, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			slices.Sort(want)
			for _, count := range []uint32{1 << 10, 8 << 10, math.MaxUint32} {
				got := c.names(fh, plus, count, nil)
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("%d names of %d in pages of %d", len(got), len(want), count)
				}
			}

			n := 0
			told := map[string]int{}
			removed := map[string]bool{}
			c.names(fh, plus, 2<<10, func(page []string) {
				for _, name := range page {
					told[name]++
				}
				n++
				if err := os.WriteFile(fmt.Sprintf("%s/new-%d", path, n), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				for i := 1; i < len(page); i += 2 { // of those that were told
					if os.Remove(path+"/"+page[i]) == nil {
						removed[page[i]] = true
					}
				}
				victim := fmt.Sprintf("file-with-a-name-%d", n*7%500) // and one that perhaps was not
				if os.Remove(path+"/"+victim) == nil {
					removed[victim] = true
				}
			})
			for _, name := range want {
				if told[name] > 1 || told[name] == 0 && !removed[name] {
					t.Errorf("%q was told %d times", name, told[name])
				}
			}
		}

		fh := c.create(ts.root, "f", 1, 1)
		for _, tt := range []struct {
			args readdirArgs
			want wire.Status
		}{
			{readdirArgs{Dir: ts.root, Count: 110}, wire.ErrTooSmall},
			{readdirArgs{Dir: ts.root, Count: 0}, wire.ErrTooSmall},
			{readdirArgs{Dir: ts.root, Count: 8192, Cookie: math.MaxUint64}, wire.ErrBadCookie},
			{readdirArgs{Dir: fh, Count: 8192}, wire.ErrNotDir},
			{readdirArgs{Dir: gone(c, ts.root), Count: 8192}, wire.ErrStale},
			{readdirArgs{Count: 8192}, wire.ErrBadHandle},
		} {
			var res wire.ReaddirRes
			c.do(wire.ProcReaddir, super, &tt.args, &res)
			equal(t, "READDIR", res.Status, tt.want)
			var plus wire.ReaddirPlusRes
			c.do(wire.ProcReaddirPlus, super, &wire.ReaddirPlusArgs{Dir: tt.args.Dir, Cookie: tt.args.Cookie, DirCount: tt.args.Count, MaxCount: tt.args.Count}, &plus)
			equal(t, "READDIRPLUS", plus.Status, tt.want)
		}
		ts.stop()
	}
}

func TestFileSystem(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	var info wire.FsinfoRes
	c.do(wire.ProcFsinfo, super, &ts.root, &info)
	equal(t, "FSINFO", info.Status, wire.OK)
	equal(t, "rtmax", info.Rtmax, maxIO)
	equal(t, "wtmax", info.Wtmax, maxIO)
	equal(t, "properties", info.Properties, wire.PropHomogeneous|wire.PropCanSetTime)

	var stat wire.FsstatRes
	c.do(wire.ProcFsstat, super, &ts.root, &stat)
	equal(t, "FSSTAT", stat.Status, wire.OK)
	var fs unix.Statfs_t
	if err := unix.Statfs(ts.dir, &fs); err != nil {
		t.Fatal(err)
	}
	equal(t, "total bytes", stat.TotalBytes, fs.Blocks*uint64(fs.Bsize))
	if stat.AvailBytes > stat.FreeBytes || stat.FreeBytes > stat.TotalBytes {
		t.Errorf("%d bytes available, %d free, %d altogether", stat.AvailBytes, stat.FreeBytes, stat.TotalBytes)
	}

	var conf wire.PathconfRes
	c.do(wire.ProcPathconf, super, &ts.root, &conf)
	equal(t, "PATHCONF", conf.Status, wire.OK)
	equal(t, "longest name", conf.NameMax, unix.NAME_MAX)

	stale := gone(c, ts.root)
	c.do(wire.ProcFsinfo, super, &stale, &info)
	equal(t, "FSINFO", info.Status, wire.ErrStale)
	c.do(wire.ProcFsstat, super, &stale, &stat)
	equal(t, "FSSTAT", stat.Status, wire.ErrStale)
	c.do(wire.ProcPathconf, super, &stale, &conf)
	equal(t, "PATHCONF", conf.Status, wire.ErrStale)
}

// What data files have no use for.
func TestRefused(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1, 1)
	where := wire.DirOpArgs{Dir: ts.root, Name: "n"}
	var made wire.CreateRes
	c.do(wire.ProcSymlink, super, &symlinkArgs{Where: where, Target: "f"}, &made)
	equal(t, "SYMLINK", made.Status, wire.ErrNotSupp)
	c.do(wire.ProcMknod, super, &mkfifoArgs{where}, &made)
	equal(t, "MKNOD", made.Status, wire.ErrNotSupp)
	var link wire.LinkRes
	c.do(wire.ProcLink, super, &wire.LinkArgs{FH: fh, Link: where}, &link)
	equal(t, "LINK", link.Status, wire.ErrNotSupp)
	equal(t, "nothing was made", c.lookup(super, ts.root, "n").Status, wire.ErrNoEnt)
	var read wire.ReadlinkRes
	c.do(wire.ProcReadlink, super, &fh, &read)
	equal(t, "READLINK", read.Status, wire.ErrInval)
	stale := gone(c, ts.root)
	c.do(wire.ProcReadlink, super, &stale, &read)
	equal(t, "READLINK", read.Status, wire.ErrStale)
}

func mountCall(proc wire.MountProc) oncrpc.Call {
	return oncrpc.Call{Prog: oncrpc.ProgMount, Vers: wire.Version, Proc: uint32(proc)}
}

func TestMount(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	mount := func(path string) wire.MountRes {
		var res wire.MountRes
		if _, err := finish(c.send(mountCall(wire.MountProcMnt), (&wire.MountPath{Path: path}).Append(nil)), &res); err != nil {
			t.Fatal(err)
		}
		return res
	}
	for _, path := range []string{"/", "", "//"} {
		res := mount(path)
		equal(t, "MNT", res.Status, wire.OK)
		equal(t, "root", res.FH, ts.root)
		if !slices.Equal(res.Flavors, []oncrpc.Flavor{oncrpc.FlavorSys}) {
			t.Errorf("flavors %v", res.Flavors)
		}
	}
	equal(t, "MNT", mount("/other").Status, wire.ErrNoEnt)

	var exports wire.ExportRes
	if _, err := finish(c.send(mountCall(wire.MountProcExport), nil), &exports); err != nil {
		t.Fatal(err)
	}
	if len(exports.Exports) != 1 || exports.Exports[0].Dir != "/" || exports.Exports[0].Groups != nil {
		t.Errorf("exports %+v", exports.Exports)
	}
	var dump wire.DumpRes
	if _, err := finish(c.send(mountCall(wire.MountProcDump), nil), &dump); err != nil || dump.Mounts != nil {
		t.Errorf("DUMP: %+v, %v", dump, err)
	}
	for _, proc := range []wire.MountProc{wire.MountProcNull, wire.MountProcUmnt, wire.MountProcUmntAll} {
		if rest, err := finish(c.send(mountCall(proc), (&wire.MountPath{Path: "/"}).Append(nil)), nil); err != nil || len(rest) != 0 {
			t.Errorf("procedure %d: %d bytes, %v", proc, len(rest), err)
		}
	}
	for proc, want := range map[uint32]oncrpc.Stat{6: oncrpc.ProcUnavail, uint32(wire.MountProcMnt): oncrpc.GarbageArgs} {
		_, err := finish(c.send(mountCall(wire.MountProc(proc)), xdr.AppendUint32(nil, 2000)), nil)
		wantStat(t, "procedure", err, want)
	}
}
