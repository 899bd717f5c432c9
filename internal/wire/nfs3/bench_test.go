package nfs3

import (
	"testing"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// BenchmarkWriteCall encodes what a client sends before the payload of a WRITE.
func BenchmarkWriteCall(b *testing.B) {
	sys := oncrpc.AuthSys{Machine: "host", UID: 7, GID: 8, GIDs: []uint32{9, 10}}
	cred, err := sys.Auth()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	buf := make([]byte, 0, 256)
	for b.Loop() {
		call := oncrpc.Call{XID: 1, Prog: oncrpc.ProgNFS, Vers: Version, Proc: uint32(ProcWrite), Cred: cred}
		args := WriteArgs{FH: fh1, Offset: 4096, Count: 1 << 20}
		buf = args.AppendHead(call.Append(oncrpctest.AppendRecordMark(buf[:0], 0, true)))
		oncrpc.PutRecordMark(buf, len(buf)-oncrpc.RecordMarkSize+xdr.Padded(1<<20), true)
	}
}

// BenchmarkReadReply decodes what a client reads before the payload of a READ.
func BenchmarkReadReply(b *testing.B) {
	sent := ReadRes{Attr: post, Count: 1 << 20}
	head := sent.AppendHead((&oncrpc.Reply{XID: 1}).Append(nil))
	b.ReportAllocs()
	for b.Loop() {
		d := xdr.NewDecoder(head)
		var reply oncrpc.Reply
		var res ReadRes
		if err := reply.Decode(&d); err != nil {
			b.Fatal(err)
		}
		if err := res.DecodeHead(&d, 1<<20); err != nil {
			b.Fatal(err)
		}
	}
}
