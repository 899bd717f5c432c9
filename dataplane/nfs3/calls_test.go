package nfs3

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

var root = layout.Credential{}

func TestMount(t *testing.T) {
	srv := newServer(t)
	fh, err := Mount(t.Context(), srv.addr, "/export", nil)
	if err != nil || string(fh) != "root" {
		t.Errorf("handle %q, error %v", fh, err)
	}
	srv.script = func(*callInfo) *action { return &action{status: wire.ErrAcces} }
	if _, err := Mount(t.Context(), srv.addr, "/secret", nil); !isStatus(err, wire.ErrAcces) || !strings.Contains(err.Error(), `"/secret"`) {
		t.Errorf("error %v", err)
	}
	srv.mu.Lock()
	srv.script = func(*callInfo) *action { return &action{hangup: true} }
	srv.mu.Unlock()
	if _, err := Mount(t.Context(), srv.addr, "/export", nil); err == nil {
		t.Error("no error from a server that hangs up")
	}
	if _, err := Mount(t.Context(), srv.addr, strings.Repeat("x", 2000), nil); err == nil {
		t.Error("no error for a path that is too long")
	}
	srv.close()
	if _, err := Mount(t.Context(), srv.addr, "/export", nil); !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), srv.addr.String()) {
		t.Errorf("error %v", err)
	}
}

// TestCalls compares what each call sends and returns with what it should, and has it fail.
func TestCalls(t *testing.T) {
	fh := func(name string) wire.FileHandle {
		h, err := wire.NewFileHandle([]byte(name))
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	attr := wire.Fattr{Type: wire.TypeReg, Mode: 0o640, UID: 7, Size: 1 << 40, Mtime: wire.Time{Sec: 3, Nsec: 4}}
	post := wire.PostOpAttr{Present: true, Attr: attr}
	set := wire.Sattr{SetMode: true, Mode: 0o600, SetSize: true, Size: 99, MtimeHow: wire.ServerTime}
	dir, file := []byte("dir"), []byte("file")
	where := wire.DirOpArgs{Dir: fh("dir"), Name: "näme"}
	fsinfo := wire.FsinfoRes{Attr: post, Rtmax: 5, Wtmax: 6, MaxFileSize: 7}
	fsstat := wire.FsstatRes{Attr: post, TotalBytes: 8, FreeFiles: 9}
	entries := wire.ReaddirPlusRes{DirAttr: post, Verf: wire.CookieVerf{1}, EOF: true, Entries: []wire.EntryPlus{
		{Entry: wire.Entry{FileID: 1, Name: "a", Cookie: 10}}, {Entry: wire.Entry{FileID: 2, Name: "b", Cookie: 11}, Attr: post},
	}}
	cred := layout.Credential{UID: 1, GID: 2}
	ctx := t.Context()
	for _, tc := range []struct {
		proc wire.Proc
		call func(tg *Target) (any, error)
		args message
		res  message
		want any
	}{
		{wire.ProcGetattr, func(tg *Target) (any, error) { return tg.GetAttr(ctx, cred, file) }, ptr(fh("file")),
			&wire.GetattrRes{Attr: attr}, attr},
		{wire.ProcSetattr, func(tg *Target) (any, error) { return tg.SetAttr(ctx, cred, file, set, nil) },
			&wire.SetattrArgs{FH: fh("file"), Attr: set}, &wire.WccRes{Wcc: wire.WccData{After: post}}, post},
		{wire.ProcSetattr, func(tg *Target) (any, error) { return tg.SetAttr(ctx, cred, file, set, &wire.Time{Sec: 8}) },
			&wire.SetattrArgs{FH: fh("file"), Attr: set, Guard: true, GuardCtime: wire.Time{Sec: 8}}, &wire.WccRes{}, wire.PostOpAttr{}},
		{wire.ProcLookup, func(tg *Target) (any, error) {
			h, a, err := tg.Lookup(ctx, cred, dir, "näme")
			return []any{string(h), a}, err
		}, &where, &wire.LookupRes{FH: fh("file"), Attr: post}, []any{"file", post}},
		{wire.ProcAccess, func(tg *Target) (any, error) { return tg.Access(ctx, cred, file, 0x3f) },
			&wire.AccessArgs{FH: fh("file"), Access: 0x3f}, &wire.AccessRes{Access: 5}, uint32(5)},
		{wire.ProcCreate, func(tg *Target) (any, error) {
			h, a, err := tg.Create(ctx, cred, dir, "näme", wire.Unchecked, set, wire.CreateVerf{})
			return []any{string(h), a}, err
		}, &wire.CreateArgs{Where: where, Mode: wire.Unchecked, Attr: set},
			&wire.CreateRes{FH: wire.PostOpFH{Present: true, FH: fh("file")}, Attr: post}, []any{"file", post}},
		{wire.ProcCreate, func(tg *Target) (any, error) {
			h, a, err := tg.Create(ctx, cred, dir, "näme", wire.Exclusive, wire.Sattr{}, wire.CreateVerf{1, 2})
			return []any{string(h), a}, err
		}, &wire.CreateArgs{Where: where, Mode: wire.Exclusive, Verf: wire.CreateVerf{1, 2}},
			&wire.CreateRes{FH: wire.PostOpFH{Present: true, FH: fh("file")}}, []any{"file", wire.PostOpAttr{}}},
		{wire.ProcMkdir, func(tg *Target) (any, error) {
			h, a, err := tg.Mkdir(ctx, cred, dir, "näme", set)
			return []any{string(h), a}, err
		}, &wire.MkdirArgs{Where: where, Attr: set},
			&wire.CreateRes{FH: wire.PostOpFH{Present: true, FH: fh("file")}, Attr: post}, []any{"file", post}},
		{wire.ProcRemove, func(tg *Target) (any, error) { return nil, tg.Remove(ctx, cred, dir, "näme") }, &where, &wire.WccRes{}, nil},
		{wire.ProcRmdir, func(tg *Target) (any, error) { return nil, tg.Rmdir(ctx, cred, dir, "näme") }, &where, &wire.WccRes{}, nil},
		{wire.ProcReaddirPlus, func(tg *Target) (any, error) {
			res, err := tg.ReadDirPlus(ctx, cred, dir, 9, wire.CookieVerf{1})
			if err != nil {
				return nil, err
			}
			return *res, err
		}, &wire.ReaddirPlusArgs{Dir: fh("dir"), Cookie: 9, Verf: wire.CookieVerf{1}, DirCount: readDirBytes, MaxCount: readDirBytes}, &entries, entries},
		{wire.ProcFsinfo, func(tg *Target) (any, error) { return tg.FSInfo(ctx, cred, file) }, ptr(fh("file")), &fsinfo, fsinfo},
		{wire.ProcFsstat, func(tg *Target) (any, error) { return tg.FSStat(ctx, cred, file) }, ptr(fh("file")), &fsstat, fsstat},
		{wire.ProcCommit, func(tg *Target) (any, error) { return tg.Commit(ctx, cred, file, 4096, 1<<33) },
			&wire.CommitArgs{FH: fh("file"), Offset: 4096}, &wire.CommitRes{Verf: wire.WriteVerf{9}}, layout.Verifier{9}},
	} {
		srv := newServer(t)
		tg := newTarget(t, Config{}, srv.addr)
		srv.script = func(c *callInfo) *action {
			var id oncrpc.AuthSys
			if err := id.Decode(c.cred.Body); err != nil || id.UID != 1 || id.GID != 2 {
				t.Errorf("%v: identity %+v, %v", tc.proc, id, err)
			}
			if want := tc.args.Append(nil); c.proc != tc.proc || !bytes.Equal(c.args, want) {
				t.Errorf("%v was sent with\n%x, want %v with\n%x", c.proc, c.args, tc.proc, want)
			}
			if c.nth == 1 {
				return &action{body: tc.res.Append(nil)}
			}
			return &action{body: append([]byte{0, 0, 0, byte(wire.ErrNoSpc)}, make([]byte, 20)...)}
		}
		got, err := tc.call(tg)
		if err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%v: %+v, %v; want %+v", tc.proc, got, err, tc.want)
		}
		_, err = tc.call(tg)
		if !isStatus(err, wire.ErrNoSpc) || !errors.Is(err, wire.ErrNoSpc) {
			t.Errorf("%v: error %v", tc.proc, err)
		}
		if want := tc.proc.String(); !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), srv.addr.String()) {
			t.Errorf("%v: error %q", tc.proc, err)
		}
	}

	// A handle that is too long never gets as far as the wire.
	srv := newServer(t)
	tg := newTarget(t, Config{}, srv.addr)
	long := make([]byte, wire.MaxHandle+1)
	_, err1 := tg.GetAttr(ctx, cred, long)
	_, err2 := tg.SetAttr(ctx, cred, long, set, nil)
	_, _, err3 := tg.Lookup(ctx, cred, long, "x")
	_, err4 := tg.Access(ctx, cred, long, 1)
	_, _, err5 := tg.Create(ctx, cred, long, "x", wire.Unchecked, set, wire.CreateVerf{})
	_, _, err6 := tg.Mkdir(ctx, cred, long, "x", set)
	err7 := tg.Remove(ctx, cred, long, "x")
	_, err8 := tg.ReadDirPlus(ctx, cred, long, 0, wire.CookieVerf{})
	_, err9 := tg.FSInfo(ctx, cred, long)
	_, err10 := tg.FSStat(ctx, cred, long)
	_, err11 := tg.Commit(ctx, cred, long, 0, 0)
	_, err12 := tg.Commit(ctx, cred, file, -1, 0)
	for i, err := range []error{err1, err2, err3, err4, err5, err6, err7, err8, err9, err10, err11, err12} {
		if err == nil {
			t.Errorf("bad arguments %d were taken", i+1)
		}
	}
	if n := srv.connections(); n != 0 {
		t.Errorf("%d connections made for nothing", n)
	}
}

// TestHandleLeftOut: servers may answer CREATE and MKDIR without the handle.
func TestHandleLeftOut(t *testing.T) {
	srv := newServer(t)
	srv.put("name", nil)
	srv.script = func(c *callInfo) *action {
		if c.proc == wire.ProcLookup {
			return nil
		}
		return &action{body: (&wire.CreateRes{}).Append(nil)}
	}
	tg := newTarget(t, Config{}, srv.addr)
	for i := range 2 {
		var fh []byte
		var err error
		if i == 0 {
			fh, _, err = tg.Create(t.Context(), root, []byte("dir"), "name", wire.Unchecked, wire.Sattr{}, wire.CreateVerf{})
		} else {
			fh, _, err = tg.Mkdir(t.Context(), root, []byte("dir"), "name", wire.Sattr{})
		}
		if err != nil || string(fh) != "name" {
			t.Errorf("handle %q, error %v", fh, err)
		}
	}
}

func ptr[T any](v T) *T { return &v }

// TestResent loses the connection after the server has executed the call.
func TestResent(t *testing.T) {
	srv := newServer(t)
	srv.script = func(c *callInfo) *action { return &action{hangup: c.nth == 1 && c.proc != wire.ProcNull} }
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	srv.put("name", nil)
	if err := tg.Remove(t.Context(), root, []byte("dir"), "name"); err != nil {
		t.Errorf("REMOVE: %v", err)
	}
	if err := tg.Remove(t.Context(), root, []byte("dir"), "name"); !isStatus(err, wire.ErrNoEnt) {
		t.Errorf("second REMOVE: %v", err)
	}
	srv.put("name", nil)
	if err := tg.Rmdir(t.Context(), root, []byte("dir"), "name"); err != nil {
		t.Errorf("RMDIR: %v", err)
	}
	fh, _, err := tg.Mkdir(t.Context(), root, []byte("dir"), "made", wire.Sattr{})
	if err != nil || string(fh) != "made" {
		t.Errorf("MKDIR: handle %q, error %v", fh, err)
	}
	if _, _, err := tg.Mkdir(t.Context(), root, []byte("dir"), "made", wire.Sattr{}); !isStatus(err, wire.ErrExist) {
		t.Errorf("second MKDIR: %v", err)
	}
	if n := srv.calls(wire.ProcLookup); n < 1 {
		t.Error("the directory was not looked up")
	}
}

// TestCallGivenUp ends the context of a call at its stages.
func TestCallGivenUp(t *testing.T) {
	srv := newServer(t)
	gate, arrived := make(chan struct{}), make(chan struct{}, 1)
	srv.script = func(c *callInfo) *action {
		switch {
		case c.proc == wire.ProcRemove:
			return &action{status: wire.ErrJukebox}
		case c.proc == wire.ProcGetattr && c.nth == 1:
			arrived <- struct{}{}
			return &action{wait: gate}
		}
		return nil
	}
	tg := newTarget(t, Config{Connections: 1}, srv.addr)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-arrived; cancel() }()
	if _, err := tg.GetAttr(ctx, root, []byte("f")); !errors.Is(err, context.Canceled) {
		t.Errorf("at the server: %v", err)
	}
	if _, err := tg.GetAttr(ctx, root, []byte("f")); !errors.Is(err, context.Canceled) || srv.calls(wire.ProcGetattr) != 1 {
		t.Errorf("before the start: %v", err)
	}
	close(gate)
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := tg.Remove(ctx, root, []byte("dir"), "name"); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), `REMOVE "name"`) {
		t.Errorf("during a back-off: %v", err)
	}
	waittest.Until(t, "the remains to go", func() bool { return tg.Stats().Outstanding == 0 })

	srv.close()
	tg = newTarget(t, Config{Connections: 1}, srv.addr)
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- tg.Null(ctx) }() // ends with ctx
	waittest.Until(t, "the failure", tg.Refused)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("without a connection: %v", err)
	}
	if n := tg.Stats().Outstanding; n != 0 {
		t.Errorf("%d outstanding", n)
	}
}
