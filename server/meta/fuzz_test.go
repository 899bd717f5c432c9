package meta

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// FuzzConn sends arbitrary bytes to a service, in place of a hello or after one, as root of a client that is confined to a directory: the connection ends, others are served, and
// outside of that directory nothing has changed.
func FuzzConn(f *testing.F) {
	h := newHost(f, memorytest.New())
	h.config = func(cfg *Config) { cfg.Log = slog.New(slog.DiscardHandler) }
	h.start()
	admin := h.root()
	a := admin.mkdir(layout.RootID, "a")
	file := admin.touch(a, "f")
	other := admin.mkdir(layout.RootID, "other")
	secret := admin.touch(other, "g")
	h.svc.cfg.Exports = admit.Rules{mustExport(f, "127.0.0.0/8(rw,no_root_squash)"), mustExport(f, "*(rw,no_root_squash,path=/a)")}
	hello, err := metarpc.AppendHello(nil, &metarpc.Hello{
		Magic: metarpc.Magic, Lowest: metarpc.Lowest, Highest: metarpc.Version, Client: metarpc.ClientInfo{ID: [16]byte{7}, Host: "fuzz"},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(hello, false)
	f.Add(bytes.Repeat(hello, 2), false)
	f.Add([]byte{22, 3, 1, 0, 5, 1, 0, 0, 1, 0}, false) // the beginning of TLS
	sequence := uint64(0)
	seed := func(op metarpc.Op, args any) []byte {
		sequence++
		b, err := metarpc.AppendCall(nil, metarpc.CallHeader{Slot: 1, Sequence: sequence, Op: op}, args)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, true)
		return b
	}
	var all []byte
	for _, id := range []layout.FileID{a, file, other, secret, layout.RootID} {
		for _, call := range []struct {
			op   metarpc.Op
			args any
		}{
			{metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}}, {metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: 0o777}},
			{metarpc.OpLookup, &metarpc.NameArgs{Parent: id, Name: "g"}}, {metarpc.OpCreate, &metarpc.CreateArgs{Parent: id, Name: "n"}},
			{metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: id, Name: "d", Mode: syscall.S_IFDIR | 0o755}}, {metarpc.OpLink, &metarpc.LinkArgs{ID: secret, Parent: id, Name: "l"}},
			{metarpc.OpRemove, &metarpc.RemoveArgs{Parent: id, Name: "g"}}, {metarpc.OpRename, &metarpc.RenameArgs{OldParent: id, OldName: "g", NewParent: a, NewName: "x"}},
			{metarpc.OpRename, &metarpc.RenameArgs{OldParent: a, OldName: "f", NewParent: id, NewName: "x"}},
			{metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: id, Limit: 10}}, {metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessWrite, Reclaim: true}},
			{metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: 1}}, {metarpc.OpReserve, &metarpc.ReserveArgs{ID: id, Len: 10}},
			{metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: id, End: 99}}}}, {metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "user.a"}},
			{metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}}}, {metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{id}}},
		} {
			all = append(all, seed(call.op, call.args)...)
		}
	}
	f.Add(all, true)
	seed(metarpc.OpClientSet, &metarpc.ClientSetArgs{Rule: "*(rw,no_root_squash)"})
	seed(metarpc.OpQuotaSet, &metarpc.QuotaSetArgs{Name: metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: uint64(other)}, Bytes: 1})
	seed(metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: "nfs://x/"})
	seed(metarpc.OpEndSession, &metarpc.Empty{})

	// Counters tell usage of what is below, which goes up to the root.
	outside := func(t testing.TB) (rows [][]byte) {
		for _, key := range [][]byte{
			schema.InodeKey(layout.RootID), schema.InodeKey(other), schema.InodeKey(secret), schema.EntryKey(layout.RootID, "a"), schema.EntryKey(layout.RootID, "other"),
			schema.EntryKey(other, "g"), schema.LayoutKey(secret), schema.KeyClients, schema.EntryKey(layout.RootID, "n"), schema.EntryKey(other, "n"), schema.XattrKey(secret, "user.a"),
		} {
			row, err := schema.FindRow(t.Context(), h.svc.engine, key)
			if err != nil {
				t.Fatal(err)
			}
			rows = append(rows, row)
		}
		return rows
	}
	before := outside(f)
	f.Fuzz(func(t *testing.T, b []byte, after bool) {
		admin.t = t
		near, far := net.Pipe()
		ended := make(chan struct{})
		go func() { // ends with the connection
			defer close(ended)
			h.svc.serve(far)
		}()
		read := make(chan struct{})
		go func() { // ends with the connection
			defer close(read)
			io.Copy(io.Discard, near)
		}()
		near.SetWriteDeadline(time.Now().Add(time.Minute))
		if after {
			near.Write(hello)
		}
		near.Write(b)
		near.Close()
		for _, over := range []chan struct{}{ended, read} {
			select {
			case <-over:
			case <-time.After(time.Minute):
				t.Fatal("the connection does not end")
			}
		}
		h.svc.mu.Lock()
		var left []*session
		for _, sess := range h.svc.sessions {
			if sess.client.ID != admin.hello.Client.ID {
				left = append(left, sess)
			}
		}
		h.svc.mu.Unlock()
		for _, sess := range left {
			sess.mu.Lock()
			sess.left = true // it relies on nothing, so that the next input need not wait for its lease
			sess.mu.Unlock()
			h.svc.end(sess, "the input is over")
		}
		must[metarpc.AttrResult](admin, metarpc.OpGetAttr, &metarpc.IDArgs{ID: layout.RootID})
		for i, row := range outside(t) {
			if !bytes.Equal(row, before[i]) {
				t.Errorf("row %d is %x now, was %x", i, row, before[i])
			}
		}
	})
}
