package perm

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// What setfacl -m u:1000:rw,g:100:r,m:rx writes for a file of mode 0640, as linux/posix_acl_xattr.h describes it.
const golden = "02000000" +
	"0100 0600 ffffffff" + "0200 0600 e8030000" + "0400 0400 ffffffff" + "0800 0400 64000000" +
	"1000 0500 ffffffff" + "2000 0000 ffffffff"

var goldenList = ACL{
	{UserObj, 6, NoID}, {User, 6, 1000}, {GroupObj, 4, NoID}, {Group, 4, 100}, {Mask, 5, NoID}, {Other, 0, NoID},
}

func bytesOf(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGolden(t *testing.T) {
	l, err := ParseACL(bytesOf(t, golden))
	if err != nil || !reflect.DeepEqual(l, goldenList) {
		t.Errorf("%+v, %v", l, err)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	if got := goldenList.Value(); !bytes.Equal(got, bytesOf(t, golden)) {
		t.Errorf("%x", got)
	}
}

func TestParseACL(t *testing.T) {
	entry := "0100 0600 00000000"
	for _, c := range []struct {
		name, value string
		want        error
	}{
		{"nothing", "", ErrInvalid},
		{"half a header", "0200", ErrInvalid},
		{"version 1", "01000000", ErrVersion},
		{"no entries", "02000000", nil},
		{"half an entry", "02000000 0100", ErrInvalid},
		{"an id where there is none", "02000000" + entry, nil},
		{"unknown tag", "02000000 0300 0000 00000000", ErrInvalid},
		{"nobody", "02000000 0200 0000 ffffffff", ErrInvalid},
		{"as many as fit", "02000000" + strings.Repeat(entry, MaxEntries), nil},
		{"too many", "02000000" + strings.Repeat(entry, MaxEntries+1), ErrTooLong},
	} {
		l, err := ParseACL(bytesOf(t, c.value))
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		for _, e := range l {
			if e.ID != NoID {
				t.Errorf("%s: %+v", c.name, e)
			}
		}
	}
}

func TestCheck(t *testing.T) {
	u, g, o := Entry{UserObj, 7, NoID}, Entry{GroupObj, 5, NoID}, Entry{Other, 0, NoID}
	m, u1, g1 := Entry{Mask, 7, NoID}, Entry{User, 7, 1}, Entry{Group, 7, 1}
	for _, c := range []struct {
		list ACL
		ok   bool
	}{
		{ACL{u, g, o}, true},
		{ACL{u, g, m, o}, true},
		{ACL{u, u1, u1, g, g1, g1, m, o}, true},
		{ACL{u, u1, g, o}, false}, // no mask
		{ACL{u, g, g1, o}, false},
		{ACL{u, g, g1, m}, false},
		{ACL{u, g}, false},
		{ACL{g, o}, false},
		{ACL{u, o}, false},
		{ACL{u, g, o, o}, false},
		{ACL{u, g, o, m}, false},
		{ACL{u, g1, g, m, o}, false},
		{ACL{u, g, u1, m, o}, false},
		{ACL{u, u, g, o}, false},
		{ACL{u, g, m, m, o}, false},
		{ACL{u, {GroupObj, 8, NoID}, o}, false},
		{ACL{u, {64, 0, NoID}, g, o}, false},
		{nil, false},
	} {
		if err := c.list.Check(); (err == nil) != c.ok || err != nil && !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", c.list, err)
		}
	}
}

func TestModes(t *testing.T) {
	plain := ACL{{UserObj, 7, NoID}, {GroupObj, 5, NoID}, {Other, 1, NoID}}
	for _, c := range []struct {
		list  ACL
		mode  uint32
		want  uint32
		whole bool
	}{
		{plain, 0o104000, 0o104751, true},
		{goldenList, 0o102777, 0o102650, false},
		{ACL{{UserObj, 7, NoID}, {GroupObj, 5, NoID}, {Mask, 3, NoID}, {Other, 1, NoID}}, 0, 0o731, false},
	} {
		if mode, whole := c.list.Mode(c.mode); mode != c.want || whole != c.whole {
			t.Errorf("%+v: mode %#o, whole %t", c.list, mode, whole)
		}
	}
	got := goldenList.Chmod(0o104771)
	want := ACL{{UserObj, 7, NoID}, {User, 6, 1000}, {GroupObj, 4, NoID}, {Group, 4, 100}, {Mask, 7, NoID}, {Other, 1, NoID}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("chmod: %+v", got)
	}
	if got := plain.Chmod(0o610); !reflect.DeepEqual(got, ACL{{UserObj, 6, NoID}, {GroupObj, 1, NoID}, {Other, 0, NoID}}) {
		t.Errorf("chmod without a mask: %+v", got)
	}
	mode, access := goldenList.Inherit(0o100444)
	want = slices.Clone(goldenList)
	want[0].Perm, want[4].Perm = 4, 4
	if mode != 0o100440 || !reflect.DeepEqual(access, want) {
		t.Errorf("inherited: %#o %+v", mode, access)
	}
	if mode, access := plain.Inherit(0o40777); mode != 0o40751 || access != nil {
		t.Errorf("inherited: %#o %+v", mode, access)
	}
	if goldenList[0].Perm != 6 || plain[0].Perm != 7 {
		t.Error("a list was changed")
	}
}

func TestAllows(t *testing.T) {
	l := ACL{
		{UserObj, 2, NoID}, {User, 7, 10}, {User, 7, 1}, {GroupObj, 4, NoID}, {Group, 2, 20}, {Group, 7, 21}, {Mask, 6, NoID}, {Other, 1, NoID},
	}
	for _, c := range []struct {
		name string
		who  Caller
		want [8]bool // by what is wanted
	}{
		{"owner", Caller{UID: 1, GID: 100, Groups: []uint32{21}}, [8]bool{0: true, 2: true}}, // whatever else there is about him
		{"named user, masked", Caller{UID: 10, GID: 100}, [8]bool{0: true, 2: true, 4: true, 6: true}},
		{"owning group", Caller{UID: 5, GID: 100, Groups: []uint32{2}}, [8]bool{0: true, 4: true}},
		{"named group", Caller{UID: 5, GID: 100, Groups: []uint32{20}}, [8]bool{0: true, 2: true}},
		{"two groups, not together", Caller{UID: 5, GID: 100, Groups: []uint32{2, 20}}, [8]bool{0: true, 2: true, 4: true}},
		{"named group, masked", Caller{UID: 5, GID: 100, Groups: []uint32{21}}, [8]bool{0: true, 2: true, 4: true, 6: true}},
		{"other", Caller{UID: 5, GID: 100, Groups: []uint32{9}}, [8]bool{0: true, 1: true}},
	} {
		for want, ok := range c.want {
			if l.Allows(&c.who, 1, 2, uint16(want)) != ok {
				t.Errorf("%s: %d is allowed: %t", c.name, want, !ok)
			}
		}
	}
}

func FuzzParseACL(f *testing.F) {
	f.Add(bytesOf(f, golden))
	f.Add(bytesOf(f, "02000000"))
	f.Fuzz(func(t *testing.T, value []byte) {
		l, err := ParseACL(value)
		if err != nil {
			if l != nil {
				t.Errorf("a list with %v", err)
			}
			return
		}
		again, err := ParseACL(l.Value())
		if err != nil || !reflect.DeepEqual(l, again) {
			t.Errorf("%+v came back as %+v, %v", l, again, err)
		}
		valid := l.Check() == nil
		for want := range uint16(8) {
			l.Allows(&Caller{UID: 1, GID: 100, Groups: []uint32{2}}, 1, 2, want)
		}
		if !valid {
			return
		}
		mode, _ := l.Mode(0)
		if got, _ := l.Chmod(mode).Mode(0); got != mode || l.Chmod(mode).Check() != nil {
			t.Errorf("mode %#o became %#o", mode, got)
		}
		inherited, access := l.Inherit(0o777)
		if inherited != mode || access != nil && access.Check() != nil {
			t.Errorf("inherited mode %#o, want %#o", inherited, mode)
		}
	})
}
