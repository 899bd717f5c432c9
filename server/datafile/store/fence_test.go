package store_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"

	client "github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/datafile/store"
)

// TestFence checks that a data server refuses who has the old owner's layout, and takes who has the new one.
func TestFence(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: root, for a data server, which gives files to their owners")
	}
	ds, err := data.Open(data.Config{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- ds.Serve(l) }() // until the Shutdown below
	t.Cleanup(func() {
		if err := ds.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		<-served
	})
	addrs := []netip.AddrPort{netip.MustParseAddrPort(l.Addr().String())}
	server, err := store.DialNFS("test", addrs, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	target, err := client.New(client.Config{Name: "test", Addrs: addrs, Connections: 1, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	st := format(t, server, "/")
	handle, err := st.Create(t.Context(), 1, owner)
	if err != nil {
		t.Fatal(err)
	}
	do := func(kind layout.OpKind, as layout.Credential, text string) error {
		done := make(chan struct{})
		op := layout.Op{
			Kind: kind, File: &layout.DataFile{Device: device, Handles: [][]byte{handle}, Cred: as}, Data: []byte(text),
			Stable: layout.FileSync, Done: func(*layout.Op) { close(done) },
		}
		target.Start(&op)
		target.Flush()
		<-done
		return op.Err
	}
	reader := layout.Credential{UID: 1<<31 - 1, GID: owner.GID}
	if err := do(layout.OpWrite, owner, "early"); err != nil {
		t.Fatal(err)
	}
	if err := do(layout.OpRead, reader, "....."); err != nil {
		t.Fatal(err)
	}
	next := layout.Credential{UID: owner.UID + 10, GID: owner.GID + 10}
	if err := st.Fence(t.Context(), handle, next); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"write":                 do(layout.OpWrite, owner, "late!"),
		"write with its group":  do(layout.OpWrite, layout.Credential{UID: 1<<31 - 1, GID: next.GID}, "late!"),
		"read with old layouts": do(layout.OpRead, reader, "....."),
	} {
		if !errors.Is(err, nfs3.ErrAcces) && !errors.Is(err, nfs3.ErrPerm) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := do(layout.OpWrite, next, "fresh"); err != nil {
		t.Error(err)
	}
	attr, err := st.GetAttr(t.Context(), handle)
	if err != nil || !store.Owned(&attr, next) {
		t.Errorf("%+v, %v", attr, err)
	}
	if err := st.Fence(t.Context(), handle, next); err != nil { // as after a lost answer
		t.Error(err)
	}
}
