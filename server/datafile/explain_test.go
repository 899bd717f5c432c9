package datafile

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	client "github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/server/datafile/store"
)

// TestExplain: each refusal has its reason and the line to export, and stays the error that it was.
func TestExplain(t *testing.T) {
	answer := func(op string, status nfs3.Status) error {
		return fmt.Errorf("mount: %w", &client.Error{Op: op, Status: status})
	}
	auth := func(stat oncrpc.AuthStat) error {
		return &client.ReplyError{Op: "MNT", Err: &oncrpc.Error{Stat: oncrpc.AuthError, AuthStat: stat}}
	}
	for _, tc := range []struct {
		err  error
		root bool
		want string // empty: nothing is added
	}{
		{answer("MNT", nfs3.ErrAcces), true, "does not export that to this host;"},
		{answer("MNT", nfs3.ErrAcces), false, "ports above 1023"},
		{answer("MNT", nfs3.ErrPerm), true, "does not export"},
		{answer("MNT", nfs3.ErrNoEnt), true, ""},
		{answer("LOOKUP", nfs3.ErrPerm), false, "below 1024"},
		{answer("LOOKUP", nfs3.ErrPerm), true, "root squash"},
		{answer("MKDIR", nfs3.ErrAcces), true, "root squash"},
		{answer("MKDIR", nfs3.ErrROFS), true, "read-only"},
		{answer("MKDIR", nfs3.ErrNoSpc), true, ""},
		{fmt.Errorf("dir: %w", store.ErrSquashed), true, "root squash"},
		{auth(oncrpc.AuthTooWeak), true, "--xprtsec"},
		{auth(oncrpc.AuthBadCred), true, "AUTH_SYS"},
		{errors.New("no route"), true, ""},
	} {
		got := explain(tc.err, "/srv/weft", tc.root)
		if !errors.Is(got, tc.err) {
			t.Errorf("%v: is another error now", tc.err)
		}
		switch {
		case tc.want == "" && got.Error() != tc.err.Error():
			t.Errorf("%v: %v", tc.err, got)
		case tc.want != "" && (!strings.Contains(got.Error(), tc.want) || !strings.Contains(got.Error(), "/srv/weft *(rw,no_root_squash,insecure")):
			t.Errorf("%v: %v; want %q and the line to export", tc.err, got, tc.want)
		}
	}
}
