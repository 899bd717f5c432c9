package nfs3

import (
	"reflect"
	"testing"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

// fuzz decodes messages of the type of msg from any bytes. What decodes must encode to as many bytes as were taken,
// and these must decode to the same.
func fuzz(f *testing.F, msg message) {
	typ := reflect.TypeOf(msg)
	for _, tt := range goldens {
		if reflect.TypeOf(tt.msg) == typ {
			f.Add(xdrtest.Hex(f, tt.hex))
		}
	}
	for _, x := range xdrtest.Exchanges(f, "testdata/linux-6.12.txt") {
		var call oncrpc.Call
		d := xdr.NewDecoder(x.Call)
		if err := call.Decode(&d); err != nil {
			f.Fatal(err)
		}
		args, res := messages(call.Prog, call.Proc)
		if reflect.TypeOf(args) == typ {
			f.Add(d.Rest())
		}
		if reflect.TypeOf(res) == typ {
			f.Add(x.Reply[oncrpc.AcceptedSize:])
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		got := fresh(msg)
		d := xdr.NewDecoder(input)
		if err := got.Decode(&d); err != nil {
			return
		}
		b := got.Append(nil)
		if len(b) != d.Offset() {
			t.Fatalf("took %d bytes for %+v, which encodes to %d", d.Offset(), got, len(b))
		}
		d = xdr.NewDecoder(append(b, d.Rest()...))
		again := fresh(msg)
		if err := again.Decode(&d); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("decoded %+v, and after encoding it %+v, %v", got, again, err)
		}
	})
}

func FuzzFileHandle(f *testing.F)      { fuzz(f, new(FileHandle)) }
func FuzzGetattrRes(f *testing.F)      { fuzz(f, new(GetattrRes)) }
func FuzzSetattrArgs(f *testing.F)     { fuzz(f, new(SetattrArgs)) }
func FuzzWccRes(f *testing.F)          { fuzz(f, new(WccRes)) }
func FuzzDirOpArgs(f *testing.F)       { fuzz(f, new(DirOpArgs)) }
func FuzzLookupRes(f *testing.F)       { fuzz(f, new(LookupRes)) }
func FuzzAccessArgs(f *testing.F)      { fuzz(f, new(AccessArgs)) }
func FuzzAccessRes(f *testing.F)       { fuzz(f, new(AccessRes)) }
func FuzzReadlinkRes(f *testing.F)     { fuzz(f, new(ReadlinkRes)) }
func FuzzReadArgs(f *testing.F)        { fuzz(f, new(ReadArgs)) }
func FuzzReadRes(f *testing.F)         { fuzz(f, new(readReply)) }
func FuzzWriteArgs(f *testing.F)       { fuzz(f, new(writeCall)) }
func FuzzWriteRes(f *testing.F)        { fuzz(f, new(WriteRes)) }
func FuzzCreateArgs(f *testing.F)      { fuzz(f, new(CreateArgs)) }
func FuzzCreateRes(f *testing.F)       { fuzz(f, new(CreateRes)) }
func FuzzMkdirArgs(f *testing.F)       { fuzz(f, new(MkdirArgs)) }
func FuzzSymlinkArgs(f *testing.F)     { fuzz(f, new(SymlinkArgs)) }
func FuzzMknodArgs(f *testing.F)       { fuzz(f, new(MknodArgs)) }
func FuzzRenameArgs(f *testing.F)      { fuzz(f, new(RenameArgs)) }
func FuzzRenameRes(f *testing.F)       { fuzz(f, new(RenameRes)) }
func FuzzLinkArgs(f *testing.F)        { fuzz(f, new(LinkArgs)) }
func FuzzLinkRes(f *testing.F)         { fuzz(f, new(LinkRes)) }
func FuzzReaddirArgs(f *testing.F)     { fuzz(f, new(ReaddirArgs)) }
func FuzzReaddirRes(f *testing.F)      { fuzz(f, new(ReaddirRes)) }
func FuzzReaddirPlusArgs(f *testing.F) { fuzz(f, new(ReaddirPlusArgs)) }
func FuzzReaddirPlusRes(f *testing.F)  { fuzz(f, new(ReaddirPlusRes)) }
func FuzzFsstatRes(f *testing.F)       { fuzz(f, new(FsstatRes)) }
func FuzzFsinfoRes(f *testing.F)       { fuzz(f, new(FsinfoRes)) }
func FuzzPathconfRes(f *testing.F)     { fuzz(f, new(PathconfRes)) }
func FuzzCommitArgs(f *testing.F)      { fuzz(f, new(CommitArgs)) }
func FuzzCommitRes(f *testing.F)       { fuzz(f, new(CommitRes)) }
func FuzzMountPath(f *testing.F)       { fuzz(f, new(MountPath)) }
func FuzzMountRes(f *testing.F)        { fuzz(f, new(MountRes)) }
func FuzzDumpRes(f *testing.F)         { fuzz(f, new(DumpRes)) }
func FuzzExportRes(f *testing.F)       { fuzz(f, new(ExportRes)) }

// FuzzReadHeadLen: what it says of the first eight bytes is what DecodeHead takes.
func FuzzReadHeadLen(f *testing.F) {
	for _, attr := range []PostOpAttr{{}, post} {
		for _, status := range []Status{OK, ErrIO} {
			res := ReadRes{Status: status, Attr: attr}
			f.Add(res.AppendHead(nil))
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		n, err := ReadHeadLen(input)
		d := xdr.NewDecoder(input)
		var res ReadRes
		if res.DecodeHead(&d, 1<<40) == nil && (err != nil || n != d.Offset()) {
			t.Fatalf("a head of %d bytes was announced as %d, %v", d.Offset(), n, err)
		}
	})
}
