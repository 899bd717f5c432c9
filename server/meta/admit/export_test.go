package admit

import (
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"10.0.0.0/8", "10.0.0.0/8(ro,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"10.1.2.3(rw)", "10.1.2.3/32(rw,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"*(rw,no_root_squash)", "*(rw,no_root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
		{"2001:db8::/32(rw,all_squash,anonuid=7,anongid=8)", "2001:db8::/32(rw,root_squash,all_squash,anonuid=7,anongid=8)"},
		{"cert:tr-*(rw,path=/a//b/../c/,uids=1-2+7,gids=5,ops=9)", "cert:tr-*(rw,root_squash,no_all_squash,anonuid=65534,anongid=65534,path=/a/c,uids=1-2+7-7,gids=5-5,ops=9)"},
		{"*(path=/)", "*(ro,root_squash,no_all_squash,anonuid=65534,anongid=65534)"},
	} {
		e, err := Parse(c.in)
		if err != nil || e.String() != c.want {
			t.Errorf("%s: %v, %v", c.in, e, err)
		}
		if again, err := Parse(e.String()); err != nil || !reflect.DeepEqual(again, e) {
			t.Errorf("%s came back as %v, %v", e, again, err)
		}
	}
	for in, names := range map[string]string{
		"":                         `""`,
		"host(rw)":                 `"host"`,
		"10.0.0.1/8(rw)":           `10.0.0.0/8`,
		"10.0.0.0/33":              `"10.0.0.0/33"`,
		"*(rw":                     `"*(rw"`,
		"*()":                      `""`,
		"*(rw,sync)":               `"sync"`,
		"*(rw,anonuid=-1)":         `"-1"`,
		"cert:(rw)":                `"cert:(rw)"`,
		"cert:[(rw)":               `"cert:[(rw)"`,
		"*(path=a)":                `"path=a"`,
		"*(uids=)":                 `"uids="`,
		"*(uids=2-1)":              `"2-1"`,
		"*(gids=1-2-3)":            `"2-3"`,
		"*(ops=0)":                 `"ops=0"`,
		"*(rw,anongid=4294967295)": `"4294967295"`,
	} {
		if _, err := Parse(in); err == nil || !strings.Contains(err.Error(), names) {
			t.Errorf("%q: %v, want it to name %s", in, err, names)
		}
	}
}

func TestRuleFor(t *testing.T) {
	list := Rules{
		mustParse(t, "10.0.0.1"), mustParse(t, "10.0.0.0/8(rw)"), mustParse(t, "fd00::/8"), mustParse(t, "*"), mustParse(t, "cert:trainer-*"), mustParse(t, "cert:trainer-1(rw)"),
		mustParse(t, "cert:tr*"), mustParse(t, "10.1.0.0/16"),
	}
	list.Sort()
	for _, c := range []struct{ address, name, want string }{
		{"10.0.0.1:5", "", "10.0.0.1/32"}, {"10.2.3.4:5", "", "10.0.0.0/8"}, {"[::ffff:10.2.3.4]:5", "", "10.0.0.0/8"}, {"[fd00::1%eth0]:5", "", "fd00::/8"},
		{"10.1.2.3:5", "", "10.1.0.0/16"}, {"11.0.0.1:5", "", "*"}, {"elsewhere", "", "*"},
		{"10.0.0.1:5", "trainer-1", "cert:trainer-1"}, {"10.0.0.1:5", "trainer-12", "cert:trainer-*"}, {"10.0.0.1:5", "tr", "cert:tr*"}, {"10.0.0.1:5", "t", "10.0.0.1/32"},
	} {
		if e, ok := list.For(c.address, c.name); !ok || e.Whose() != c.want {
			t.Errorf("%s %q: %v %t, want that of %s", c.address, c.name, e, ok, c.want)
		}
	}
	list = list[:len(list)-1]
	for _, address := range []string{"11.0.0.1:5", "elsewhere"} {
		if e, ok := list.For(address, "other"); ok {
			t.Errorf("%s: %v", address, e)
		}
	}
	if e, ok := Rules(nil).For("1.2.3.4:5", ""); !ok || !reflect.DeepEqual(e, everybody) {
		t.Errorf("without rules: %v %t", e, ok)
	}
}

func mustParse(t testing.TB, s string) Export {
	t.Helper()
	e, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestCaller(t *testing.T) {
	groupsOf := func(uid uint32) []uint32 { return []uint32{uid + 1000} }
	for _, c := range []struct {
		rule string
		cred metarpc.Cred
		want perm.Caller
	}{
		{"*(rw,no_root_squash)", metarpc.Cred{}, perm.Caller{Privileged: true}},
		{"*(rw)", metarpc.Cred{Groups: []uint32{0, 5}}, perm.Caller{UID: 65534, GID: 65534, Groups: []uint32{65534, 5}}},
		{"*(rw,anonuid=3,anongid=4)", metarpc.Cred{UID: 9}, perm.Caller{UID: 9, GID: 4}},
		{"*(rw,all_squash,anonuid=3,anongid=4)", metarpc.Cred{UID: 9, GID: 8, Groups: []uint32{7}}, perm.Caller{UID: 3, GID: 4}},
		{"*(rw,uids=5-9+20,gids=8)", metarpc.Cred{UID: 9, GID: 7, Groups: []uint32{8, 10}}, perm.Caller{UID: 9, GID: 65534, Groups: []uint32{8}}},
		{"*(rw,uids=5-9+20,anonuid=3)", metarpc.Cred{UID: 10, GID: 8, Groups: []uint32{8}}, perm.Caller{UID: 3, GID: 65534}},
		{"*(rw,no_root_squash,uids=5)", metarpc.Cred{}, perm.Caller{UID: 65534, GID: 65534}},
		{"*(rw,uids=20)", metarpc.Cred{UID: 20, GID: 5, Groups: []uint32{8}}, perm.Caller{UID: 20, GID: 5, Groups: []uint32{8}}},
		{"*", metarpc.Cred{UID: 9, GID: 8, ByUID: true}, perm.Caller{UID: 9, GID: 8, Groups: []uint32{1009}, ReadOnly: true}},
	} {
		if got := mustParse(t, c.rule).Caller(c.cred, groupsOf); !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s of %+v: %+v", c.rule, c.cred, *got)
		}
	}
}

func TestGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		g := NewGroups()
		g.lookUp = func(uid uint32) []uint32 {
			asked++
			return []uint32{uid, uint32(asked)}
		}
		for range 2 {
			if got := g.Of(5); !reflect.DeepEqual(got, []uint32{5, 1}) {
				t.Errorf("%v", got)
			}
		}
		time.Sleep(groupsValidity)
		if got := g.Of(5); !reflect.DeepEqual(got, []uint32{5, 2}) {
			t.Errorf("after a minute: %v", got)
		}
		for uid := range uint32(2 * groupsKept) {
			g.Of(uid)
		}
		if len(g.users) > groupsKept {
			t.Errorf("%d users are remembered", len(g.users))
		}
	})
	if got := groupsOfUser(0); len(got) == 0 {
		t.Error("root has no groups")
	}
	if got := groupsOfUser(1<<32 - 2); got != nil {
		t.Errorf("somebody who does not exist has groups %v", got)
	}
}

// Whatever is a rule comes back from its text, and lets in whom it let in.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"*", "10.0.0.0/8(rw)", "fd00::/8(ro,all_squash)", "cert:tr-*(rw,path=/a//b/../c/,uids=1-2+7,gids=5,ops=9,anonuid=3,anongid=4)", "cert:[a-z]?x", "::ffff:10.0.0.1(rw,no_root_squash)", "*()",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := Parse(s)
		if err != nil {
			return
		}
		again, err := Parse(e.String())
		if err != nil || !reflect.DeepEqual(again, e) {
			t.Fatalf("%q is %+v, and %q is %+v, %v", s, e, e.String(), again, err)
		}
		if moreSpecific(e, again) != 0 {
			t.Errorf("%v comes before itself", e)
		}
		Rules{e}.For("10.0.0.1:5", "trainer")
	})
}
func TestMeter(t *testing.T) {
	var m meter
	at := time.Unix(1, 0)
	let := 0
	for range 1000 {
		if m.take(at, 100) == 0 {
			let++
		}
	}
	if let != 11 {
		t.Errorf("%d calls at once of 100 a second", let)
	}
	if wait := m.take(at, 100); wait != 9900*time.Millisecond {
		t.Errorf("call 1001 waits %v", wait)
	}
	if wait := m.take(at.Add(time.Minute), 100); wait != 0 {
		t.Errorf("a minute later: %v", wait)
	}
}
