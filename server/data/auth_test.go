package data

import (
	"fmt"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// A data file's uid with its group may read and write, its group alone may read, others nothing, and the metadata
// service, uid 0, everything (RFC 8435 section 2.2). After a fence the old ids are worth nothing.
func TestDataFilePermissions(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	c.put(fh, 0, []byte("data"))
	check := func(cred oncrpc.Auth, read, write bool) {
		t.Helper()
		status := func(ok bool) wire.Status {
			if ok {
				return wire.OK
			}
			return wire.ErrAcces
		}
		who := fmt.Sprintf(" by %x", cred.Body[12:])
		equal(t, "READ"+who, c.read(cred, fh, 0, 4).Status, status(read))
		equal(t, "READ at the end"+who, c.read(cred, fh, 4, 4).Status, status(read))
		equal(t, "WRITE"+who, c.write(cred, fh, 0, []byte("data"), wire.Unstable).Status, status(write))
		equal(t, "COMMIT"+who, c.commit(cred, fh).Status, status(write))
	}
	check(super, true, true)
	check(as(0, 5), true, true)
	check(as(1000, 1001), true, true)
	check(as(1000, 5), false, false)
	check(as(1000, 5, 1001), false, false)
	check(as(5, 1001), true, false)
	check(as(5, 6, 7, 1001, 8), false, false)
	check(as(5, 6), false, false)
	check(as(1001, 1000), false, false)
	check(as(5, 0), false, false)

	equal(t, "fence", c.setattr(super, fh, wire.Sattr{SetUID: true, UID: 2000, SetGID: true, GID: 2001}).Status, wire.OK)
	check(as(1000, 1001), false, false)
	check(as(5, 1001), false, false)
	check(as(2000, 1001), false, false)
	check(as(2000, 2001), true, true)
	check(as(5, 2001), true, false)
	check(super, true, true)

	// The owner's bits count for the owner, also where others have more.
	c.setattr(super, fh, wire.Sattr{SetMode: true, Mode: 0o046})
	check(as(2000, 2001), false, false)
	check(as(5, 2001), true, false)
	check(as(5, 5), true, true)
}

// Who is refused too often is slowed down, as is everybody else at that address, except for the metadata service.
func TestGuesses(t *testing.T) {
	ts := start(t, "", func(s *Server) { s.refusals.Free = 4 })
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	write := func(c *client, cred oncrpc.Auth) chan []byte {
		return c.send(nfsCall(wire.ProcWrite, cred), (&writeCall{wire.WriteArgs{FH: fh}, []byte("data")}).Append(nil))
	}
	var guesses []chan []byte
	for uid := range uint32(500) {
		guesses = append(guesses, write(c, as(1+uid, 1001)))
	}
	lost := 0
	for _, g := range guesses {
		var res wire.WriteRes
		switch _, err := finish(g, &res); {
		case err == errLost:
			lost++
		case err != nil || res.Status != wire.ErrAcces:
			t.Fatalf("%v, %v", res.Status, err)
		}
	}
	if lost == 0 {
		t.Errorf("%d guesses were answered", len(guesses))
	}
	equal(t, "WRITE by the service", ts.dial().write(super, fh, 0, []byte("data"), wire.Unstable).Status, wire.OK)
	equal(t, "WRITE from elsewhere", ts.dialFrom("127.0.0.2").write(as(1000, 1001), fh, 0, []byte("data"), wire.Unstable).Status, wire.OK)
}

func TestWhoMaySetAttributes(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	owner, group, other := as(1000, 1001, 1002), as(5, 1001), as(5, 6)
	fh := c.create(ts.root, "f", 1000, 1001)
	mode := wire.Sattr{SetMode: true, Mode: 0o640}
	size := wire.Sattr{SetSize: true, Size: 5}
	clock := wire.Sattr{MtimeHow: wire.ServerTime}
	times := wire.Sattr{MtimeHow: wire.ClientTime}
	uid := func(id uint32) wire.Sattr { return wire.Sattr{SetUID: true, UID: id} }
	gid := func(id uint32) wire.Sattr { return wire.Sattr{SetGID: true, GID: id} }
	for _, tt := range []struct {
		name string
		cred oncrpc.Auth
		attr wire.Sattr
		want wire.Status
	}{
		{"owner sets the mode", owner, mode, wire.OK},
		{"owner sets the size", owner, size, wire.OK},
		{"owner sets times", owner, times, wire.OK},
		{"owner sets the clock's time", owner, clock, wire.OK},
		{"owner keeps the ids", owner, owned(1000, 1001), wire.OK},
		{"owner gives to a group of its own", owner, gid(1002), wire.OK},
		{"owner gives back", owner, gid(1001), wire.OK},
		{"owner gives to another group", owner, gid(1003), wire.ErrPerm},
		{"owner gives away", owner, uid(5), wire.ErrPerm},
		{"owner gives to the service", owner, uid(0), wire.ErrPerm},
		{"group sets the mode", group, mode, wire.ErrPerm},
		{"group sets the size", group, size, wire.ErrAcces},
		{"group sets times", group, times, wire.ErrPerm},
		{"group sets the clock's time", group, clock, wire.ErrAcces},
		{"other takes it", other, uid(5), wire.ErrPerm},
		{"other sets the size", other, size, wire.ErrAcces},
		{"service gives away", super, uid(2000), wire.OK},
		{"old owner takes it back", owner, uid(1000), wire.ErrPerm},
		{"old owner sets the size", owner, size, wire.ErrAcces},
		{"service lets everybody write", super, wire.Sattr{SetMode: true, Mode: 0o666}, wire.OK},
		{"writer sets the size", other, size, wire.OK},
		{"writer sets the clock's time", other, clock, wire.OK},
		{"writer sets times", other, times, wire.ErrPerm},
	} {
		before := c.getattr(fh).Attr
		equal(t, tt.name, c.setattr(tt.cred, fh, tt.attr).Status, tt.want)
		if after := c.getattr(fh).Attr; tt.want != wire.OK {
			equal(t, tt.name+": attributes", after, before)
		}
	}
	// Nothing of a change is done if a part of it is refused.
	c.setattr(super, fh, owned(1000, 1001))
	before := c.getattr(fh).Attr
	equal(t, "size and ids", c.setattr(owner, fh, wire.Sattr{SetSize: true, Size: 1, SetUID: true, UID: 5}).Status, wire.ErrPerm)
	equal(t, "attributes", c.getattr(fh).Attr, before)
}

func TestDirectoryPermissions(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	owner, group, other := as(1000, 1001), as(5, 1001), as(5, 6)
	attr := wire.Sattr{SetMode: true, Mode: 0o750, SetUID: true, UID: 1000, SetGID: true, GID: 1001}
	dir := c.mkdir(super, ts.root, "d", attr).FH.FH
	c.create(dir, "f", 1, 1)
	for _, tt := range []struct {
		cred                      oncrpc.Auth
		change, search, list, out wire.Status
	}{
		{super, wire.OK, wire.OK, wire.OK, wire.ErrNoEnt},
		{owner, wire.OK, wire.OK, wire.OK, wire.ErrAcces},
		{group, wire.ErrAcces, wire.OK, wire.OK, wire.ErrAcces},
		{other, wire.ErrAcces, wire.ErrAcces, wire.ErrAcces, wire.ErrAcces},
	} {
		equal(t, "LOOKUP", c.lookup(tt.cred, dir, "f").Status, tt.search)
		made := c.createAs(tt.cred, dir, "n", wire.Guarded, wire.Sattr{}, wire.CreateVerf{})
		equal(t, "CREATE", made.Status, tt.change)
		equal(t, "MKDIR", c.mkdir(tt.cred, dir, "m", wire.Sattr{}).Status, tt.change)
		equal(t, "RENAME", c.rename(tt.cred, dir, "n", dir, "n2"), tt.change)
		equal(t, "RENAME out of it", c.rename(tt.cred, dir, "none", ts.root, "x"), tt.out)
		equal(t, "REMOVE", c.remove(tt.cred, dir, "n2"), tt.change)
		equal(t, "RMDIR", c.rmdir(tt.cred, dir, "m"), tt.change)
		var list wire.ReaddirRes
		c.do(wire.ProcReaddir, tt.cred, &readdirArgs{Dir: dir, Count: 8192}, &list)
		equal(t, "READDIR", list.Status, tt.list)
		var plus wire.ReaddirPlusRes
		c.do(wire.ProcReaddirPlus, tt.cred, &wire.ReaddirPlusArgs{Dir: dir, DirCount: 8192, MaxCount: 8192}, &plus)
		equal(t, "READDIRPLUS", plus.Status, tt.list)
	}
	// What is made belongs to its maker, who cannot make it somebody else's.
	made := c.createAs(owner, dir, "mine", wire.Guarded, wire.Sattr{}, wire.CreateVerf{}).Attr.Attr
	equal(t, "uid", made.UID, 1000)
	equal(t, "gid", made.GID, 1001)
	equal(t, "CREATE for another", c.createAs(owner, dir, "x", wire.Guarded, owned(5, 1001), wire.CreateVerf{}).Status, wire.ErrPerm)
	equal(t, "CREATE for another group", c.createAs(owner, dir, "x", wire.Guarded, owned(1000, 5), wire.CreateVerf{}).Status, wire.ErrPerm)
	equal(t, "MKDIR for another", c.mkdir(owner, dir, "x", attr).Status, wire.OK)
	attr.UID = 5
	equal(t, "MKDIR for another", c.mkdir(owner, dir, "y", attr).Status, wire.ErrPerm)
	// Listing needs the right to read, attributes of entries that to search.
	c.setattr(super, dir, wire.Sattr{SetMode: true, Mode: 0o704})
	var list wire.ReaddirRes
	c.do(wire.ProcReaddir, other, &readdirArgs{Dir: dir, Count: 8192}, &list)
	equal(t, "READDIR", list.Status, wire.OK)
	var plus wire.ReaddirPlusRes
	c.do(wire.ProcReaddirPlus, other, &wire.ReaddirPlusArgs{Dir: dir, DirCount: 8192, MaxCount: 8192}, &plus)
	equal(t, "READDIRPLUS", plus.Status, wire.ErrAcces)
}
