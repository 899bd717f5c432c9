package meta

import (
	"net"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// from has clients connect from another loopback address.
func (h *host) from(ip string) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	h.dial = func() (net.Conn, error) { return d.Dial("tcp", h.l.Addr().String()) }
}

func setRule(c *client, rule string) error {
	_, err := ask[metarpc.Empty](c, metarpc.OpClientSet, &metarpc.ClientSetArgs{Rule: rule})
	return err
}

// TestRules has an administrator at 127.0.0.1 confine clients at 127.0.0.5.
func TestRules(t *testing.T) {
	h := startMemory(t)
	h.from("127.0.0.1")
	admin := h.root()
	a := admin.mkdir(layout.RootID, "a")
	b := admin.mkdir(a, "b")
	f := admin.touch(b, "f")
	other := admin.mkdir(layout.RootID, "other")
	g := admin.touch(other, "g")

	h.from("127.0.0.5")
	old := h.root() // before there was a rule
	const confined, everything = "127.0.0.5(rw,no_root_squash,path=/a)", "127.0.0.1(rw,no_root_squash)"
	for rule, want := range map[string]struct {
		status syscall.Errno
		say    string
	}{
		confined:                     {syscall.EPERM, "127.0.0.1/32(rw,no_root_squash"},
		"*(rw)":                      {syscall.EPERM, "127.0.0.1/32(rw,no_root_squash"},
		everything:                   {syscall.EBUSY, "1 clients off, such as 127.0.0.5 (host test)"},
		"*(rw,no_root_squash,path=a": {syscall.EINVAL, "parenthesis"},
		"*(rw,path=/none)":           {syscall.EINVAL, "the rule for * says path=/none, and the volume has no directory /none: make"},
		"*(rw,path=/a/b/c/d)":        {syscall.EINVAL, "the volume has no directory /a/b/c:"},
		"*(rw,path=/other/g)":        {syscall.EINVAL, "path=/other/g, and /other/g of the volume is not a directory: make"},
	} {
		if err := setRule(admin, rule); statusOf(err) != metarpc.Status(want.status) || !strings.Contains(err.Error(), want.say) {
			t.Errorf("%s: %v, want %v and %q", rule, err, want.status, want.say)
		}
	}
	const local = "127.0.0.0/8(rw,no_root_squash)"
	for _, rule := range []string{local, confined, everything} {
		if err := setRule(admin, rule); err != nil {
			t.Fatal(err)
		}
	}
	must[metarpc.Empty](admin, metarpc.OpClientSet, &metarpc.ClientSetArgs{Whose: "127.0.0.0/8"})
	fresh := h.root()
	for name, c := range map[string]*client{"a client that was connected": old, "a new client": fresh} {
		for _, call := range []struct {
			op   metarpc.Op
			args any
			want syscall.Errno
		}{
			{metarpc.OpGetAttr, &metarpc.IDArgs{ID: layout.RootID}, 0},
			{metarpc.OpStatFS, &metarpc.IDArgs{ID: layout.RootID}, 0},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "a"}, 0},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: a, Name: "b"}, 0},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: b, Name: "f"}, 0},
			{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: a, Limit: 100}, 0},
			{metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessWrite}, 0},
			{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1}, 0},
			{metarpc.OpCreate, &metarpc.CreateArgs{Parent: b, Name: "new"}, 0},
			{metarpc.OpRename, &metarpc.RenameArgs{OldParent: b, OldName: "new", NewParent: a, NewName: "moved"}, 0},
			{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: a, Name: "moved"}, 0},
			{metarpc.OpStatus, &metarpc.Empty{}, 0},
			{metarpc.OpDevices, &metarpc.Empty{}, 0},

			{metarpc.OpParent, &metarpc.ParentArgs{ID: f, Top: a}, 0},

			{metarpc.OpParent, &metarpc.ParentArgs{ID: g, Top: layout.RootID}, syscall.EACCES},
			{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: layout.RootID, Limit: 100}, syscall.EACCES},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "other"}, syscall.EACCES},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "none"}, syscall.EACCES},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: other, Name: "g"}, syscall.EACCES},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: g, Name: "g"}, syscall.EACCES},
			{metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: layout.RootID, Mask: metarpc.SetMode, Mode: 0o777}, syscall.EACCES},
			{metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "new"}, syscall.EACCES},
			{metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: other, Name: "out"}, syscall.EACCES},
			{metarpc.OpLink, &metarpc.LinkArgs{ID: g, Parent: a, Name: "in"}, syscall.EACCES},
			{metarpc.OpRename, &metarpc.RenameArgs{OldParent: a, OldName: "b", NewParent: other, NewName: "b"}, syscall.EACCES},
			{metarpc.OpRename, &metarpc.RenameArgs{OldParent: other, OldName: "g", NewParent: a, NewName: "g"}, syscall.EACCES},
			{metarpc.OpClientSet, &metarpc.ClientSetArgs{Rule: "*(rw,no_root_squash)"}, syscall.EPERM},
			{metarpc.OpClientList, &metarpc.Empty{}, syscall.EPERM},
			{metarpc.OpQuotas, &metarpc.QuotasArgs{After: true}, syscall.EPERM},
			{metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: 1}, Bytes: 1}, syscall.EPERM},
			{metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: "nfs://x/"}, syscall.EPERM},
			{metarpc.OpDrainDevice, &metarpc.DrainDeviceArgs{}, syscall.EPERM},
			{metarpc.OpRemoveDevice, &metarpc.RemoveDeviceArgs{}, syscall.EPERM},
			{metarpc.OpVerify, &metarpc.VerifyArgs{ID: f, Len: 1}, syscall.EPERM},
		} {
			hdr, ch := c.begin(call.op, call.args)
			if err := c.finish(hdr, ch, call.op.NewResult()); statusOf(err) != metarpc.Status(call.want) {
				t.Errorf("%s: %v %+v: %v, want %v", name, call.op, call.args, err, call.want)
			}
		}
		if c.connect(); c.welcome.Top != "/a" {
			t.Errorf("%s is told that its directory is %q", name, c.welcome.Top)
		}
		if st := must[metarpc.StatusResult](c, metarpc.OpStatus, &metarpc.Empty{}); len(st.Sessions) != 1 || st.Sessions[0].Client.ID != c.hello.Client.ID {
			t.Errorf("%s sees sessions %+v", name, st.Sessions)
		}
	}

	// What leaves the directory is out of reach.
	must[metarpc.Empty](admin, metarpc.OpRename, &metarpc.RenameArgs{OldParent: a, OldName: "b", NewParent: other, NewName: "b"})
	_, err := ask[metarpc.AttrResult](fresh, metarpc.OpGetAttr, &metarpc.IDArgs{ID: f})
	wantStatus(t, err, metarpc.Status(syscall.EACCES))

	list := must[metarpc.ClientListResult](admin, metarpc.OpClientList, &metarpc.Empty{})
	if len(list.Rules) != 2 || list.Given != nil || !strings.Contains(list.Rules[1], "path=/a") && !strings.Contains(list.Rules[0], "path=/a") {
		t.Errorf("rules %+v", list)
	}
	// After a restart they count as before; who comes back with a session does not escape.
	h.from("127.0.0.1")
	h.restart()
	h.from("127.0.0.5")
	fresh.connect()
	_, err = ask[metarpc.AttrResult](fresh, metarpc.OpGetAttr, &metarpc.IDArgs{ID: g})
	wantStatus(t, err, metarpc.Status(syscall.EACCES))
	h.from("127.0.0.1")
	admin.connect()

	// Without a rule there is no session.
	_, err = ask[metarpc.Empty](admin, metarpc.OpClientSet, &metarpc.ClientSetArgs{Whose: "127.0.0.9"})
	wantStatus(t, err, metarpc.Status(syscall.ENOENT))
	must[metarpc.Empty](admin, metarpc.OpClientSet, &metarpc.ClientSetArgs{Whose: "127.0.0.5"})
	h.from("127.0.0.5")
	if conn, w := fresh.greet(); w.Status != metarpc.Status(syscall.EACCES) || !strings.Contains(w.Message, "127.0.0.5") {
		t.Errorf("%+v", w)
		conn.Close()
	}
	h.svc.mu.Lock()
	for _, sess := range h.svc.sessions {
		if sess.client.ID == fresh.hello.Client.ID {
			t.Error("the session goes on")
		}
	}
	h.svc.mu.Unlock()
	_, err = ask[metarpc.Empty](admin, metarpc.OpClientSet, &metarpc.ClientSetArgs{Whose: "127.0.0.1"})
	if err != nil {
		t.Error("without rules everybody may do everything:", err)
	}
}

// Every call about inodes of elsewhere is refused.
func TestWithin(t *testing.T) {
	h := startMemory(t)
	admin := h.root()
	a := admin.mkdir(layout.RootID, "a")
	f := admin.touch(a, "f")
	dir := admin.mkdir(layout.RootID, "other")
	g := admin.touch(dir, "g")
	given := grant{Export: admit.Export{Path: "/a"}}
	if err := h.svc.confine(t.Context(), &given); err != nil || given.top != a || !slices.Equal(given.above, []layout.FileID{layout.RootID}) {
		t.Fatalf("%+v, %v", given, err)
	}
	seen := 0
	for op := metarpc.Op(1); int(op) < metarpc.Ops; op++ {
		for id, inside := range map[layout.FileID]bool{a: true, f: true, g: false, dir: false, layout.RootID: false} {
			args := op.NewArgs()
			for _, name := range []string{"ID", "Parent", "OldParent"} {
				if field := reflect.ValueOf(args).Elem().FieldByName(name); field.IsValid() && field.Type() == reflect.TypeFor[layout.FileID]() {
					field.SetUint(uint64(id))
				}
			}
			switch args := args.(type) {
			case *metarpc.LayoutCommitArgs:
				args.Reports = []metarpc.SizeReport{{ID: id}}
			case *metarpc.RenameArgs:
				args.NewParent = a
			case *metarpc.LinkArgs:
				args.Parent = a
			}
			if one, several := subjects(args); one == 0 && several == nil {
				continue
			}
			if id == layout.RootID {
				switch op {
				case metarpc.OpGetAttr, metarpc.OpStatFS, metarpc.OpGetXattr, metarpc.OpListXattr:
					inside = true
				}
			}
			seen++
			if err := h.svc.within(t.Context(), &given, op, args); (err == nil) != inside {
				t.Errorf("%v of inode %d: %v", op, id, err)
			}
		}
	}
	if seen < 5*25 {
		t.Errorf("%d calls tried", seen)
	}
}

// A client with a rate gets what is left of it, and what it gives back does not wait.
func TestThrottle(t *testing.T) {
	h := startMemory(t)
	c := h.root()
	if err := setRule(c, "127.0.0.1(rw,no_root_squash,ops=1)"); err != nil {
		t.Fatal(err)
	}
	for range 3600 { // others have used it up, for an hour
		h.svc.rules.meters.Take("127.0.0.1", 1)
	}
	hdr, ch := c.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: layout.RootID})
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
	must[metarpc.Empty](c, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{5}})
	select {
	case <-ch:
		t.Error("a call was let through")
	default:
	}
	must[metarpc.Empty](c, metarpc.OpEndSession, &metarpc.Empty{})
	_ = hdr
}

func TestTooManySessions(t *testing.T) {
	defer func(n int) { maxSessions = n }(maxSessions)
	maxSessions = 3
	h := startMemory(t)
	h.from("127.0.0.5")
	for range maxSessions {
		h.client()
	}
	conn, w := h.newClient().greet()
	conn.Close()
	if w.Status != metarpc.Status(syscall.EUSERS) || !strings.Contains(w.Message, "3 sessions") {
		t.Errorf("%+v", w)
	}
	h.from("127.0.0.6")
	h.client()
}

// Rules that cannot be read let in whom they let in before.
func TestSpoiltRules(t *testing.T) {
	h := startMemory(t)
	c := h.root()
	if err := setRule(c, "127.0.0.0/8(rw,no_root_squash)"); err != nil {
		t.Fatal(err)
	}
	put(t, h, schema.KeyClients, schema.Encode(&schema.Clients{Rules: []string{"*(later)"}}))
	h.root()
	if err := setRule(c, "*(ro)"); err == nil {
		t.Error("a row that is not understood was overwritten")
	}
}
