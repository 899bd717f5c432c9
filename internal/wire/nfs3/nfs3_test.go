package nfs3

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

// TestStatusTable compares the table with RFC 1813 2.6, in its order.
func TestStatusTable(t *testing.T) {
	want := []struct {
		value uint32
		name  string
		errno syscall.Errno
	}{
		{0, "NFS3_OK", 0},
		{1, "NFS3ERR_PERM", syscall.EPERM},
		{2, "NFS3ERR_NOENT", syscall.ENOENT},
		{5, "NFS3ERR_IO", syscall.EIO},
		{6, "NFS3ERR_NXIO", syscall.ENXIO},
		{13, "NFS3ERR_ACCES", syscall.EACCES},
		{17, "NFS3ERR_EXIST", syscall.EEXIST},
		{18, "NFS3ERR_XDEV", syscall.EXDEV},
		{19, "NFS3ERR_NODEV", syscall.ENODEV},
		{20, "NFS3ERR_NOTDIR", syscall.ENOTDIR},
		{21, "NFS3ERR_ISDIR", syscall.EISDIR},
		{22, "NFS3ERR_INVAL", syscall.EINVAL},
		{27, "NFS3ERR_FBIG", syscall.EFBIG},
		{28, "NFS3ERR_NOSPC", syscall.ENOSPC},
		{30, "NFS3ERR_ROFS", syscall.EROFS},
		{31, "NFS3ERR_MLINK", syscall.EMLINK},
		{63, "NFS3ERR_NAMETOOLONG", syscall.ENAMETOOLONG},
		{66, "NFS3ERR_NOTEMPTY", syscall.ENOTEMPTY},
		{69, "NFS3ERR_DQUOT", syscall.EDQUOT},
		{70, "NFS3ERR_STALE", syscall.ESTALE},
		{71, "NFS3ERR_REMOTE", syscall.EIO},
		{10001, "NFS3ERR_BADHANDLE", syscall.ESTALE},
		{10002, "NFS3ERR_NOT_SYNC", syscall.EIO},
		{10003, "NFS3ERR_BAD_COOKIE", syscall.EIO},
		{10004, "NFS3ERR_NOTSUPP", syscall.EOPNOTSUPP},
		{10005, "NFS3ERR_TOOSMALL", syscall.EIO},
		{10006, "NFS3ERR_SERVERFAULT", syscall.EREMOTEIO},
		{10007, "NFS3ERR_BADTYPE", syscall.EIO},
		{10008, "NFS3ERR_JUKEBOX", syscall.EAGAIN},
	}
	if len(statuses) != len(want) {
		t.Fatalf("the table has %d statuses, RFC 1813 has %d", len(statuses), len(want))
	}
	for i, w := range want {
		s := statuses[i].status
		if uint32(s) != w.value || s.String() != w.name || s.Error() != w.name || s.Errno() != w.errno {
			t.Errorf("line %d: %d %v %v, want %+v", i, uint32(s), s, s.Errno(), w)
		}
		if back := StatusOf(w.errno); back.Errno() != w.errno || back > s {
			t.Errorf("%v: errno %v becomes %v", s, w.errno, back)
		}
	}
	unknown := Status(12345)
	if unknown.Errno() != syscall.EIO || unknown.String() != "NFS3 status 12345" {
		t.Errorf("unknown status: %v, %v", unknown, unknown.Errno())
	}
	if s := StatusOf(syscall.EXFULL); s != ErrIO {
		t.Errorf("an errno without status becomes %v", s)
	}
}

func TestStatusErr(t *testing.T) {
	if err := OK.Err(); err != nil {
		t.Errorf("OK is the error %v", err)
	}
	err := fmt.Errorf("server 7: %w", ErrStale.Err())
	var s Status
	if !errors.Is(err, ErrStale) || errors.Is(err, ErrNoEnt) || !errors.As(err, &s) || s != ErrStale {
		t.Errorf("%v is not ErrStale", err)
	}
}

// TestProcs has the numbers of RFC 1813 3.3 and 5.2.
func TestProcs(t *testing.T) {
	for i, want := range strings.Fields(`NULL GETATTR SETATTR LOOKUP ACCESS READLINK READ WRITE CREATE MKDIR SYMLINK MKNOD REMOVE
		RMDIR RENAME LINK READDIR READDIRPLUS FSSTAT FSINFO PATHCONF COMMIT`) {
		if p := Proc(i); p.String() != want {
			t.Errorf("%d: %v, want %s", i, p, want)
		}
	}
	if ProcCommit != 21 || ProcRead != 6 || ProcReaddir != 16 {
		t.Errorf("READ %d, READDIR %d, COMMIT %d", ProcRead, ProcReaddir, ProcCommit)
	}
	if p := ProcCommit + 1; p.String() != "NFS procedure 22" {
		t.Error(p)
	}
	for i, want := range strings.Fields("NULL MNT DUMP UMNT UMNTALL EXPORT") {
		if p := MountProc(i); p.String() != want {
			t.Errorf("%d: %v, want %s", i, p, want)
		}
	}
	if p := MountProcExport + 1; p.String() != "MOUNT procedure 6" {
		t.Errorf("%v", p)
	}
}

func TestFileHandle(t *testing.T) {
	long := bytes.Repeat([]byte{1}, MaxHandle)
	h := handle(long...)
	if !bytes.Equal(h.Bytes(), long) || h != handle(long...) || h == handle(long[1:]...) {
		t.Errorf("handle of %d bytes is %v", MaxHandle, h)
	}
	if handle(1) == handle(1, 0) {
		t.Error("a handle equals the one with a zero behind it")
	}
	if _, err := NewFileHandle(append(long, 1)); !errors.Is(err, xdr.ErrTooLong) {
		t.Errorf("handle of %d bytes: %v", MaxHandle+1, err)
	}
	d := xdr.NewDecoder(xdr.AppendOpaque(nil, append(long, 1)))
	if err := h.Decode(&d); !errors.Is(err, xdr.ErrTooLong) || h != (FileHandle{}) {
		t.Errorf("handle of %d bytes decoded to %v, %v", MaxHandle+1, h, err)
	}
	if s := handle(0xab, 1).String(); s != "ab01" {
		t.Errorf("String is %q", s)
	}
	// A shorter handle decoded over a longer one must equal itself.
	h = handle(long...)
	d = xdr.NewDecoder(xdrtest.Hex(t, fh1Hex))
	if err := h.Decode(&d); err != nil || h != fh1 {
		t.Errorf("decoded %v, %v; want %v", h, err, fh1)
	}
}

func TestTime(t *testing.T) {
	if got := (Time{0x9000_0000, 7}).Time(); !got.Equal(time.Unix(0x9000_0000, 7)) {
		t.Errorf("a time after 2038 is %v", got)
	}
}

func TestStableNames(t *testing.T) {
	for s, want := range []string{"UNSTABLE", "DATA_SYNC", "FILE_SYNC", "stable_how 3"} {
		if got := Stable(s).String(); got != want {
			t.Errorf("%d: %q, want %q", s, got, want)
		}
	}
}

// TestSizes encodes the largest and smallest messages whose sizes callers count on.
func TestSizes(t *testing.T) {
	h := handle(bytes.Repeat([]byte{1}, MaxHandle)...)
	auth := oncrpc.Auth{Body: make([]byte, oncrpc.MaxAuthBody)}
	size := func(parts ...interface{ Append([]byte) []byte }) int {
		var b []byte
		for _, p := range parts {
			b = p.Append(b)
		}
		return len(b)
	}
	for _, tt := range []struct {
		name      string
		want, got int
	}{
		{"FattrSize", FattrSize, len(attr.append(nil))},
		{"FattrSize by RFC 1813", 84, FattrSize},
		{"ReadArgsMax", ReadArgsMax, size(&ReadArgs{FH: h})},
		{"ReadHead", ReadHead, size(&readReply{})},
		{"ReadHeadAttrs", ReadHeadAttrs, size(&readReply{ReadRes{Attr: post}})},
		{"ReadReplyHead", ReadReplyHead, size(&oncrpc.Reply{}, &readReply{})},
		{"ReadReplyHead by the packages' documents", 44, ReadReplyHead},
		{"ReadReplyHeadAttrs", ReadReplyHeadAttrs, size(&oncrpc.Reply{}, &readReply{ReadRes{Attr: post}})},
		{"ReadReplyHeadAttrs by the packages' documents", 128, ReadReplyHeadAttrs},
		{"WriteHeadMax", WriteHeadMax, size(&writeCall{WriteArgs{FH: h}})},
		{"WriteCallHeadMin", WriteCallHeadMin, size(&oncrpc.Call{}, &writeCall{})},
		{"WriteCallHeadMax", WriteCallHeadMax, size(&oncrpc.Call{Cred: auth, Verf: auth}, &writeCall{WriteArgs{FH: h}})},
		{"WriteResMax", WriteResMax, size(&WriteRes{Wcc: wcc})},
		{"CommitArgsMax", CommitArgsMax, size(&CommitArgs{FH: h})},
		{"CommitResMax", CommitResMax, size(&CommitRes{Wcc: wcc})},
	} {
		if tt.got != tt.want {
			t.Errorf("%s is %d, want %d", tt.name, tt.got, tt.want)
		}
	}
}

// TestInvalid changes one field of a message to a value it cannot have; the error names it.
func TestInvalid(t *testing.T) {
	long := strings.Repeat("n", MaxPath+1)
	badAttr := attr
	badAttr.Type = 8
	for _, tt := range []struct {
		name string
		msg  message
		want error
		text string
	}{
		{"ftype3 0", &GetattrRes{}, xdr.ErrInvalid, "ftype3 0"},
		{"ftype3 8", &GetattrRes{Attr: badAttr}, xdr.ErrInvalid, "ftype3 8"},
		{"stable_how 3 in a call", &writeCall{WriteArgs{Stable: 3}}, xdr.ErrInvalid, "stable_how 3"},
		{"stable_how 3 in a reply", &WriteRes{Committed: 3}, xdr.ErrInvalid, "stable_how 3"},
		{"createmode3 3", &CreateArgs{Mode: 3}, xdr.ErrInvalid, "createmode3 3"},
		{"time_how 3", &MkdirArgs{Attr: Sattr{MtimeHow: 3}}, xdr.ErrInvalid, "time_how 3"},
		{"long name", &DirOpArgs{Name: long}, xdr.ErrTooLong, "4097"},
		{"long link", &ReadlinkRes{Target: long}, xdr.ErrTooLong, "4097"},
		{"long target", &SymlinkArgs{Target: long}, xdr.ErrTooLong, "4097"},
		{"long entry", &ReaddirRes{Entries: []Entry{{Name: long}}}, xdr.ErrTooLong, "4097"},
		{"long mount path", &MountPath{long[:MaxMountPath+1]}, xdr.ErrTooLong, "1025"},
		{"long host", &DumpRes{[]MountEntry{{Host: long[:MaxMountName+1]}}}, xdr.ErrTooLong, "256"},
		{"long group", &ExportRes{[]Export{{Groups: []string{long[:MaxMountName+1]}}}}, xdr.ErrTooLong, "256"},
		{"many flavors", &MountRes{Flavors: make([]oncrpc.Flavor, maxFlavors+1)}, xdr.ErrTooLong, "65"},
	} {
		d := xdr.NewDecoder(tt.msg.Append(nil))
		got := fresh(tt.msg)
		if err := got.Decode(&d); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %+v, %v; want %v with %q", tt.name, got, err, tt.want, tt.text)
		}
	}
}

// TestPayloadChecks: the head of a READ reply or WRITE call is refused unless the record can hold its payload and the
// padding behind it.
func TestPayloadChecks(t *testing.T) {
	for _, tt := range []struct {
		count, length uint32
		behind, more  int // bytes of payload in the decoder's input, and beyond it
		want          error
	}{
		{5, 5, 8, 0, nil},
		{5, 5, 0, 8, nil},
		{5, 5, 3, 5, nil},
		{5, 5, 9, 100, nil},
		{0, 0, 0, 0, nil},
		{5, 5, 7, 0, xdr.ErrTruncated},
		{5, 5, 0, 7, xdr.ErrTruncated},
		{5, 5, 3, 4, xdr.ErrTruncated},
		{1 << 20, 1 << 20, 0, 1<<20 - 1, xdr.ErrTruncated},
		{math.MaxUint32, math.MaxUint32, 0, math.MaxInt32, xdr.ErrTruncated},
		{5, 6, 8, 0, xdr.ErrInvalid},
		{6, 5, 8, 0, xdr.ErrInvalid},
	} {
		write := fh1.Append(nil)
		write = xdr.AppendUint64(write, 0)
		write = xdr.AppendUint32(write, tt.count)
		write = xdr.AppendUint32(write, uint32(DataSync))
		write = xdr.AppendUint32(write, tt.length)
		read := xdrtest.Hex(t, okHex+noneHex)
		read = xdr.AppendUint32(read, tt.count)
		read = xdr.AppendBool(read, true)
		read = xdr.AppendUint32(read, tt.length)
		behind := bytes.Repeat([]byte{0xda}, tt.behind)

		var args WriteArgs
		d := xdr.NewDecoder(append(write, behind...))
		err := args.DecodeHead(&d, tt.more)
		if !errors.Is(err, tt.want) || err == nil && (args.Count != tt.count || !bytes.Equal(d.Rest(), behind)) {
			t.Errorf("WRITE %+v: %+v, %v with %x behind it", tt, args, err, d.Rest())
		}
		var res ReadRes
		d = xdr.NewDecoder(append(read, behind...))
		err = res.DecodeHead(&d, tt.more)
		if !errors.Is(err, tt.want) || err == nil && (res.Count != tt.count || !bytes.Equal(d.Rest(), behind)) {
			t.Errorf("READ %+v: %+v, %v with %x behind it", tt, res, err, d.Rest())
		}
	}
}

func TestReadHeadLen(t *testing.T) {
	for _, tt := range []struct {
		res  ReadRes
		want int
	}{
		{ReadRes{}, ReadHead},
		{ReadRes{Attr: post, Count: 9}, ReadHeadAttrs},
		{ReadRes{Status: ErrIO}, 8},
		{ReadRes{Status: ErrIO, Attr: post}, 8 + FattrSize},
	} {
		b := tt.res.AppendHead(nil)
		if n, err := ReadHeadLen(b[:8]); n != tt.want || n != len(b) || err != nil {
			t.Errorf("%+v: %d, %v; want %d of %d", tt.res, n, err, tt.want, len(b))
		}
		if _, err := ReadHeadLen(b[:7]); !errors.Is(err, xdr.ErrTruncated) {
			t.Errorf("7 bytes: %v", err)
		}
	}
	if _, err := ReadHeadLen([]byte{0, 0, 0, 0, 0, 0, 0, 2}); !errors.Is(err, xdr.ErrInvalid) {
		t.Errorf("attributes_follow of 2: %v", err)
	}
}

// TestReadReplyByPieces reads a record as a client does: as many bytes as a reply without attributes has before the
// payload, then what the attribute flag says is missing, then the payload to its place.
func TestReadReplyByPieces(t *testing.T) {
	payload := []byte("some bytes that are not a multiple of four")
	for _, attr := range []PostOpAttr{{}, post} {
		reply := oncrpc.Reply{XID: 77}
		res := ReadRes{Attr: attr, Count: uint32(len(payload)), EOF: true}
		record := append(res.AppendHead(reply.Append(nil)), payload...)
		record = append(record, xdr.Padding(len(payload))...)

		socket := bytes.NewReader(record)
		head := make([]byte, ReadReplyHead, ReadReplyHeadAttrs)
		mustRead(t, socket, head)
		d := xdr.NewDecoder(head)
		var gotReply oncrpc.Reply
		if err := gotReply.Decode(&d); err != nil || gotReply.XID != 77 || gotReply.Stat != oncrpc.Success {
			t.Fatalf("%+v, %v", gotReply, err)
		}
		n, err := ReadHeadLen(d.Rest())
		if err != nil {
			t.Fatal(err)
		}
		if missing := d.Offset() + n - len(head); missing > 0 {
			head = head[:len(head)+missing]
			mustRead(t, socket, head[ReadReplyHead:])
		}
		d = xdr.NewDecoder(head)
		var got ReadRes
		if err := gotReply.Decode(&d); err != nil {
			t.Fatal(err)
		}
		if err := got.DecodeHead(&d, len(record)-len(head)); err != nil || got != res {
			t.Fatalf("decoded %+v, %v; want %+v", got, err, res)
		}
		if len(d.Rest()) != 0 {
			t.Fatalf("%d bytes of payload were read with the head", len(d.Rest()))
		}
		data := make([]byte, got.Count)
		mustRead(t, socket, data)
		if !bytes.Equal(data, payload) || socket.Len() != xdr.Pad(len(payload)) {
			t.Errorf("payload %q with %d bytes behind it", data, socket.Len())
		}
	}
}

func mustRead(t *testing.T, r *bytes.Reader, p []byte) {
	t.Helper()
	if n, err := r.Read(p); err != nil || n != len(p) {
		t.Fatalf("%d of %d bytes, %v", n, len(p), err)
	}
}

// TestNoAllocation runs both sides of READ, WRITE and COMMIT.
func TestNoAllocation(t *testing.T) {
	sys := oncrpc.AuthSys{Machine: "host", UID: 7, GID: 8, GIDs: []uint32{9, 10}}
	cred, err := sys.Auth()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 4+WriteCallHeadMax)
	call := func(proc Proc) []byte {
		c := oncrpc.Call{XID: 1, Prog: oncrpc.ProgNFS, Vers: Version, Proc: uint32(proc), Cred: cred}
		return c.Append(oncrpctest.AppendRecordMark(buf[:0], 0, true))
	}
	arguments := func(b []byte) xdr.Decoder {
		d := xdr.NewDecoder(b[oncrpc.RecordMarkSize:])
		var c oncrpc.Call
		if err := c.Decode(&d); err != nil {
			t.Error(err)
		}
		return d
	}
	reply := func() []byte {
		r := oncrpc.Reply{XID: 1}
		return r.Append(oncrpctest.AppendRecordMark(buf[:0], 0, true))
	}
	results := func(b []byte) xdr.Decoder {
		d := xdr.NewDecoder(b[oncrpc.RecordMarkSize:])
		var r oncrpc.Reply
		if err := r.Decode(&d); err != nil || r.Err() != nil {
			t.Error(err)
		}
		return d
	}
	for name, f := range map[string]func() error{
		"READ": func() error {
			sent := ReadArgs{FH: fh1, Offset: 4096, Count: 1 << 20}
			d := arguments(sent.Append(call(ProcRead)))
			var args ReadArgs
			if err := args.Decode(&d); err != nil {
				return err
			}
			answer := ReadRes{Attr: post, Count: args.Count}
			d = results(answer.AppendHead(reply()))
			if _, err := ReadHeadLen(d.Rest()); err != nil {
				return err
			}
			var res ReadRes
			return res.DecodeHead(&d, 1<<20)
		},
		"WRITE": func() error {
			sent := WriteArgs{FH: fh1, Offset: 4096, Count: 1 << 20, Stable: Unstable}
			d := arguments(sent.AppendHead(call(ProcWrite)))
			var args WriteArgs
			if err := args.DecodeHead(&d, 1<<20); err != nil {
				return err
			}
			answer := WriteRes{Wcc: wcc, Count: args.Count}
			d = results(answer.Append(reply()))
			var res WriteRes
			return res.Decode(&d)
		},
		"COMMIT": func() error {
			sent := CommitArgs{FH: fh1, Offset: 4096, Count: 1 << 20}
			d := arguments(sent.Append(call(ProcCommit)))
			var args CommitArgs
			if err := args.Decode(&d); err != nil {
				return err
			}
			answer := CommitRes{Wcc: wcc}
			d = results(answer.Append(reply()))
			var res CommitRes
			return res.Decode(&d)
		},
	} {
		n := testing.AllocsPerRun(100, func() {
			if err := f(); err != nil {
				t.Error(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// messages returns the messages of a procedure: its arguments and results, nil for none.
func messages(prog uint32, proc uint32) (args, res message) {
	type pair struct{ args, res message }
	var p pair
	switch prog {
	case oncrpc.ProgNFS:
		p = map[Proc]pair{
			ProcNull: {}, ProcGetattr: {new(FileHandle), new(GetattrRes)}, ProcSetattr: {new(SetattrArgs), new(WccRes)},
			ProcLookup: {new(DirOpArgs), new(LookupRes)}, ProcAccess: {new(AccessArgs), new(AccessRes)},
			ProcReadlink: {new(FileHandle), new(ReadlinkRes)}, ProcRead: {new(ReadArgs), new(readReply)},
			ProcWrite: {new(writeCall), new(WriteRes)}, ProcCreate: {new(CreateArgs), new(CreateRes)},
			ProcMkdir: {new(MkdirArgs), new(CreateRes)}, ProcSymlink: {new(SymlinkArgs), new(CreateRes)},
			ProcMknod: {new(MknodArgs), new(CreateRes)}, ProcRemove: {new(DirOpArgs), new(WccRes)},
			ProcRmdir: {new(DirOpArgs), new(WccRes)}, ProcRename: {new(RenameArgs), new(RenameRes)},
			ProcLink: {new(LinkArgs), new(LinkRes)}, ProcReaddir: {new(ReaddirArgs), new(ReaddirRes)},
			ProcReaddirPlus: {new(ReaddirPlusArgs), new(ReaddirPlusRes)}, ProcFsstat: {new(FileHandle), new(FsstatRes)},
			ProcFsinfo: {new(FileHandle), new(FsinfoRes)}, ProcPathconf: {new(FileHandle), new(PathconfRes)},
			ProcCommit: {new(CommitArgs), new(CommitRes)},
		}[Proc(proc)]
	case oncrpc.ProgMount:
		p = map[MountProc]pair{
			MountProcMnt: {new(MountPath), new(MountRes)}, MountProcDump: {nil, new(DumpRes)}, MountProcUmnt: {new(MountPath), nil},
			MountProcExport: {nil, new(ExportRes)},
		}[MountProc(proc)]
	}
	return p.args, p.res
}

// TestLinux decodes what the kernel's client and server say to each other, and encodes the same bytes from it. Each
// procedure of both programs is there.
func TestLinux(t *testing.T) {
	seen := map[string]bool{}
	checked := 0
	for _, x := range xdrtest.Exchanges(t, "testdata/linux-6.12.txt") {
		t.Run(x.Name, func(t *testing.T) {
			var call oncrpc.Call
			d := xdr.NewDecoder(x.Call)
			if err := call.Decode(&d); err != nil {
				t.Fatal(err)
			}
			seen[fmt.Sprint(call.Prog, call.Proc)] = true
			args, res := messages(call.Prog, call.Proc)
			sameAgain(t, &d, args, call.Append(nil), x.Call)

			var reply oncrpc.Reply
			d = xdr.NewDecoder(x.Reply)
			if err := reply.Decode(&d); err != nil || reply.Err() != nil || reply.XID != call.XID {
				t.Fatalf("%+v, %v", reply, err)
			}
			sameAgain(t, &d, res, reply.Append(nil), x.Reply)

			if check := linuxChecks[x.Name]; check != nil {
				check(t, args, res)
				checked++
			}
		})
	}
	for p := range ProcCommit + 1 {
		if !seen[fmt.Sprint(oncrpc.ProgNFS, uint32(p))] {
			t.Errorf("no exchange of NFS %v", p)
		}
	}
	for p := MountProcMnt; p <= MountProcExport; p++ {
		if !seen[fmt.Sprint(oncrpc.ProgMount, uint32(p))] {
			t.Errorf("no exchange of MOUNT %v", p)
		}
	}
	if checked != len(linuxChecks) {
		t.Errorf("%d of %d checks have an exchange", checked, len(linuxChecks))
	}
}

// sameAgain decodes msg from d and expects that it encodes, behind the header and before its payload, to the record.
func sameAgain(t *testing.T, d *xdr.Decoder, msg message, header, record []byte) {
	t.Helper()
	if msg != nil {
		if err := msg.Decode(d); err != nil {
			t.Fatal(err)
		}
		header = msg.Append(header)
	}
	var count uint32
	switch m := msg.(type) {
	case *writeCall:
		count = m.Count
	case *readReply:
		count = m.Count
	}
	payload := d.Rest()
	if len(payload) != xdr.Padded(int(count)) {
		t.Errorf("%d bytes behind the message, with a count of %d", len(payload), count)
	}
	if again := append(header, payload...); !bytes.Equal(again, record) {
		t.Errorf("encoded again %x, was %x", again, record)
	}
}

// linuxChecks knows what some of the recorded messages mean.
var linuxChecks = map[string]func(t *testing.T, args, res message){
	"READ: dd iflag=direct bs=4096 of a file of 29 bytes": func(t *testing.T, args, res message) {
		a, r := args.(*ReadArgs), res.(*readReply)
		if a.Offset != 0 || a.Count != 4096 || r.Count != 29 || !r.EOF || r.Attr.Attr.Size != 29 {
			t.Errorf("%+v, %+v", a, r)
		}
	},
	"READ: the same, behind the end": func(t *testing.T, args, res message) {
		if a, r := args.(*ReadArgs), res.(*readReply); a.Offset != 29 || r.Status != OK || r.Count != 0 || !r.EOF {
			t.Errorf("%+v, %+v", a, r)
		}
	},
	"WRITE: dd bs=1500 conv=fsync with wsize=1024, the last 476 bytes": func(t *testing.T, args, res message) {
		a, r := args.(*writeCall), res.(*WriteRes)
		if a.Offset != 1024 || a.Count != 476 || a.Stable != Unstable || r.Count != 476 || r.Committed != Unstable || r.Wcc.After.Attr.Size != 1500 {
			t.Errorf("%+v, %+v", a, r)
		}
	},
	"SETATTR: chmod 640": func(t *testing.T, args, res message) {
		a, r := args.(*SetattrArgs), res.(*WccRes)
		if !a.Attr.SetMode || a.Attr.Mode&0o7777 != 0o640 || a.Attr.SetSize || a.Attr.SetUID || r.Wcc.After.Attr.Mode != 0o640 {
			t.Errorf("%+v, %+v", a, r)
		}
	},
	"SETATTR: touch -d '2001-02-03 04:05:06'": func(t *testing.T, args, res message) {
		want := Time{Sec: uint32(time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC).Unix())}
		if a := args.(*SetattrArgs); a.Attr.AtimeHow != ClientTime || a.Attr.Mtime != want {
			t.Errorf("%+v", a)
		}
		if r := res.(*WccRes); r.Wcc.After.Attr.Mtime != want {
			t.Errorf("%+v", r)
		}
	},
	"MKNOD: mknod sub/chr c 1 3": func(t *testing.T, args, res message) {
		a, r := args.(*MknodArgs), res.(*CreateRes)
		if a.Type != TypeChr || a.Spec != (SpecData{1, 3}) || r.Attr.Attr.Rdev != a.Spec || r.Attr.Attr.Type != TypeChr {
			t.Errorf("%+v, %+v", a, r)
		}
	},
	"CREATE: set -C; echo x > sub/excl": func(t *testing.T, args, res message) {
		if a := args.(*CreateArgs); a.Mode != Exclusive || a.Verf == (CreateVerf{}) || a.Where.Name != "excl" {
			t.Errorf("%+v", a)
		}
	},
	"READLINK: readlink": func(t *testing.T, args, res message) {
		if r := res.(*ReadlinkRes); r.Target != "../some/where" {
			t.Errorf("%+v", r)
		}
	},
	"READDIRPLUS: ls -la": func(t *testing.T, args, res message) {
		r := res.(*ReaddirPlusRes)
		names := map[string]Ftype{}
		for _, e := range r.Entries {
			names[e.Name] = e.Attr.Attr.Type
		}
		want := map[string]Ftype{
			".": TypeDir, "..": TypeDir, "file": TypeReg, "hard2": TypeReg, "sync": TypeReg, "big": TypeReg, "excl": TypeReg,
			"link": TypeLnk, "fifo": TypeFifo, "chr": TypeChr,
		}
		if !reflect.DeepEqual(names, want) || !r.EOF {
			t.Errorf("entries %v, eof %v; want %v", names, r.EOF, want)
		}
	},
	"FSINFO: mount": func(t *testing.T, args, res message) {
		r := res.(*FsinfoRes)
		if r.Rtmax != 1<<20 || r.Wtmax != 1<<20 || r.Properties != PropLink|PropSymlink|PropHomogeneous|PropCanSetTime {
			t.Errorf("%+v", r)
		}
	},
	"RMDIR: rmdir of a directory with files: NOTEMPTY": func(t *testing.T, args, res message) {
		if r := res.(*WccRes); r.Status != ErrNotEmpty {
			t.Errorf("%+v", r)
		}
	},
	"GETATTR: of a file removed on the server: STALE": func(t *testing.T, args, res message) {
		if r := res.(*GetattrRes); r.Status != ErrStale {
			t.Errorf("%+v", r)
		}
	},
	"EXPORT: showmount -e": func(t *testing.T, args, res message) {
		r := res.(*ExportRes)
		var dirs []string
		for _, e := range r.Exports {
			dirs = append(dirs, e.Dir)
		}
		if len(dirs) != 4 || !strings.HasPrefix(dirs[0], "/export/ds") {
			t.Errorf("%v", dirs)
		}
	},
	"DUMP: showmount -a": func(t *testing.T, args, res message) {
		if r := res.(*DumpRes); !reflect.DeepEqual(r.Mounts, []MountEntry{{"127.0.0.1", "/export/ds0"}}) {
			t.Errorf("%+v", r)
		}
	},
}
