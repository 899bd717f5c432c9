package nfs3

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

// message is what every type of the package's message table is, but for the two heads.
type message interface {
	Append([]byte) []byte
	Decode(*xdr.Decoder) error
}

// writeCall and readReply make messages of the two heads, with the payload a golden message has behind it. headTail is
// what the decoder is told to be beyond its input.
type (
	writeCall struct{ WriteArgs }
	readReply struct{ ReadRes }
)

const headTail = 8 // a payload of 5 to 8 bytes with its padding

func (m *writeCall) Append(b []byte) []byte      { return m.AppendHead(b) }
func (m *writeCall) Decode(d *xdr.Decoder) error { return m.DecodeHead(d, headTail) }
func (m *readReply) Append(b []byte) []byte      { return m.AppendHead(b) }
func (m *readReply) Decode(d *xdr.Decoder) error { return m.DecodeHead(d, headTail) }

func handle(b ...byte) FileHandle {
	h, err := NewFileHandle(b)
	if err != nil {
		panic(err)
	}
	return h
}

var (
	fh1 = handle(0xf1, 0xf2, 0xf3)
	fh2 = handle(0xe1, 0xe2, 0xe3, 0xe4)

	attr = Fattr{
		Type: TypeReg, Mode: 0o640, Nlink: 2, UID: 1000, GID: 100, Size: 0x1_0000_0005, Used: 0x2000,
		Rdev: SpecData{8, 1}, FSID: 0xabcd, FileID: 0x77, Atime: Time{1, 2}, Mtime: Time{3, 4}, Ctime: Time{5, 6},
	}
	post = PostOpAttr{Present: true, Attr: attr}
	wcc  = WccData{Before: PreOpAttr{Present: true, Size: 9, Mtime: Time{10, 11}, Ctime: Time{12, 13}}, After: post}

	setAll = Sattr{
		SetMode: true, SetUID: true, SetGID: true, SetSize: true, Mode: 0o600, UID: 7, GID: 8, Size: 0x2_0000_0000,
		AtimeHow: ServerTime, MtimeHow: ClientTime, Mtime: Time{14, 15},
	}
	setMode = Sattr{SetMode: true, Mode: 0o755}
	name    = DirOpArgs{Dir: fh1, Name: "file7"}
)

const (
	fh1Hex = `
		00000003 f1f2f300          -- nfs_fh3, 3 bytes
	`
	fh2Hex = `
		00000004 e1e2e3e4          -- nfs_fh3, 4 bytes
	`
	attrHex = `                    -- fattr3
		00000001 000001a0 00000002 -- type NF3REG, mode 0640, nlink 2
		000003e8 00000064          -- uid 1000, gid 100
		00000001 00000005          -- size
		00000000 00002000          -- used
		00000008 00000001          -- rdev 8, 1
		00000000 0000abcd          -- fsid
		00000000 00000077          -- fileid
		00000001 00000002          -- atime
		00000003 00000004          -- mtime
		00000005 00000006          -- ctime
	`
	postHex = `
		00000001                   -- attributes_follow
	` + attrHex
	noneHex = `
		00000000                   -- attributes_follow: FALSE
	`
	wccHex = `
		00000001                   -- before: attributes_follow
		00000000 00000009          -- size
		0000000a 0000000b          -- mtime
		0000000c 0000000d          -- ctime
	` + postHex
	noWccHex = noneHex + noneHex
	okHex    = `
		00000000                   -- NFS3_OK
	`
	nameHex = fh1Hex + `
		00000005 66696c65 37000000 -- name "file7"
	`
	setAllHex = `                  -- sattr3
		00000001 00000180          -- mode 0600
		00000001 00000007          -- uid
		00000001 00000008          -- gid
		00000001 00000002 00000000 -- size
		00000001                   -- atime SET_TO_SERVER_TIME
		00000002 0000000e 0000000f -- mtime SET_TO_CLIENT_TIME
	`
	setModeHex = `                 -- sattr3
		00000001 000001ed          -- mode 0755
		00000000 00000000 00000000 -- no uid, gid, size
		00000000 00000000          -- atime, mtime DONT_CHANGE
	`
)

// goldens has the messages in the order of RFC 1813 3.3 and 5.2, each beside its bytes.
var goldens = []struct {
	name string
	msg  message
	hex  string
}{
	{"GETATTR call", &fh1, fh1Hex},
	{"GETATTR reply", &GetattrRes{Attr: attr}, okHex + attrHex},
	{"GETATTR failure", &GetattrRes{Status: ErrStale}, `
		00000046 -- NFS3ERR_STALE
	`},

	{"SETATTR call", &SetattrArgs{FH: fh1, Attr: setAll, Guard: true, GuardCtime: Time{16, 17}}, fh1Hex + setAllHex + `
		00000001 00000010 00000011 -- guard: check, ctime
	`},
	{"SETATTR call without guard", &SetattrArgs{FH: fh1, Attr: setMode}, fh1Hex + setModeHex + `
		00000000                   -- guard: no check
	`},
	{"SETATTR reply", &WccRes{Wcc: wcc}, okHex + wccHex},
	{"SETATTR failure", &WccRes{Status: ErrNotSync}, `
		00002712 -- NFS3ERR_NOT_SYNC
	` + noWccHex},

	{"LOOKUP call", &name, nameHex},
	{"LOOKUP reply", &LookupRes{FH: fh2, Attr: post, DirAttr: post}, okHex + fh2Hex + postHex + postHex},
	{"LOOKUP failure", &LookupRes{Status: ErrNoEnt, DirAttr: post}, `
		00000002 -- NFS3ERR_NOENT
	` + postHex},

	{"ACCESS call", &AccessArgs{FH: fh1, Access: AccessRead | AccessLookup | AccessModify | AccessExtend | AccessDelete | AccessExecute}, fh1Hex + `
		0000003f -- access: all six
	`},
	{"ACCESS reply", &AccessRes{Attr: post, Access: AccessRead | AccessExecute}, okHex + postHex + `
		00000021 -- access: READ, EXECUTE
	`},
	{"ACCESS failure", &AccessRes{Status: ErrServerFault}, `
		00002716 -- NFS3ERR_SERVERFAULT
	` + noneHex},

	{"READLINK reply", &ReadlinkRes{Attr: post, Target: "../x"}, okHex + postHex + `
		00000004 2e2e2f78 -- data "../x"
	`},
	{"READLINK failure", &ReadlinkRes{Status: ErrInval, Attr: post}, `
		00000016 -- NFS3ERR_INVAL
	` + postHex},

	{"READ call", &ReadArgs{FH: fh1, Offset: 0x1_0000_0000, Count: 0x100000}, fh1Hex + `
		00000001 00000000 -- offset
		00100000          -- count
	`},
	{"READ reply", &readReply{ReadRes{Attr: post, Count: 5, EOF: true}}, okHex + postHex + `
		00000005 00000001 -- count, eof
		00000005          -- length of data
	`},
	{"READ reply without attributes", &readReply{ReadRes{Count: 8}}, okHex + noneHex + `
		00000008 00000000 -- count, no eof
		00000008          -- length of data
	`},
	{"READ failure", &readReply{ReadRes{Status: ErrIO, Attr: post}}, `
		00000005 -- NFS3ERR_IO
	` + postHex},

	{"WRITE call", &writeCall{WriteArgs{FH: fh1, Offset: 0x1_0000_0000, Count: 7, Stable: DataSync}}, fh1Hex + `
		00000001 00000000 -- offset
		00000007 00000001 -- count, DATA_SYNC
		00000007          -- length of data
	`},
	{"WRITE reply", &WriteRes{Wcc: wcc, Count: 7, Committed: FileSync, Verf: WriteVerf{1, 2, 3, 4, 5, 6, 7, 8}}, okHex + wccHex + `
		00000007 00000002 -- count, FILE_SYNC
		01020304 05060708 -- verf
	`},
	{"WRITE failure", &WriteRes{Status: ErrNoSpc, Wcc: WccData{After: post}}, `
		0000001c -- NFS3ERR_NOSPC
		00000000 -- before: attributes_follow: FALSE
	` + postHex},

	{"CREATE call, UNCHECKED", &CreateArgs{Where: name, Mode: Unchecked, Attr: setMode}, nameHex + `
		00000000 -- UNCHECKED
	` + setModeHex},
	{"CREATE call, GUARDED", &CreateArgs{Where: name, Mode: Guarded, Attr: setAll}, nameHex + `
		00000001 -- GUARDED
	` + setAllHex},
	{"CREATE call, EXCLUSIVE", &CreateArgs{Where: name, Mode: Exclusive, Verf: CreateVerf{8, 7, 6, 5, 4, 3, 2, 1}}, nameHex + `
		00000002          -- EXCLUSIVE
		08070605 04030201 -- verf
	`},
	{"CREATE reply", &CreateRes{FH: PostOpFH{true, fh2}, Attr: post, DirWcc: wcc}, okHex + `
		00000001 -- handle_follows
	` + fh2Hex + postHex + wccHex},
	{"CREATE reply without handle", &CreateRes{}, okHex + `
		00000000 -- handle_follows: FALSE
	` + noneHex + noWccHex},
	{"CREATE failure", &CreateRes{Status: ErrExist, DirWcc: wcc}, `
		00000011 -- NFS3ERR_EXIST
	` + wccHex},

	{"MKDIR call", &MkdirArgs{Where: name, Attr: setMode}, nameHex + setModeHex},

	{"SYMLINK call", &SymlinkArgs{Where: name, Attr: setMode, Target: "to"}, nameHex + setModeHex + `
		00000002 746f0000 -- symlink_data "to"
	`},

	{"MKNOD call, character device", &MknodArgs{Where: name, Type: TypeChr, Attr: setMode, Spec: SpecData{1, 3}}, nameHex + `
		00000004          -- NF3CHR
	` + setModeHex + `
		00000001 00000003 -- spec 1, 3
	`},
	{"MKNOD call, block device", &MknodArgs{Where: name, Type: TypeBlk, Attr: setMode, Spec: SpecData{8, 16}}, nameHex + `
		00000003          -- NF3BLK
	` + setModeHex + `
		00000008 00000010 -- spec 8, 16
	`},
	{"MKNOD call, socket", &MknodArgs{Where: name, Type: TypeSock, Attr: setMode}, nameHex + `
		00000006 -- NF3SOCK
	` + setModeHex},
	{"MKNOD call, fifo", &MknodArgs{Where: name, Type: TypeFifo, Attr: setMode}, nameHex + `
		00000007 -- NF3FIFO
	` + setModeHex},
	{"MKNOD call, no such type", &MknodArgs{Where: name, Type: 9}, nameHex + `
		00000009 -- type 9, which has no data
	`},

	{"RENAME call", &RenameArgs{From: name, To: DirOpArgs{Dir: fh2, Name: "n"}}, nameHex + fh2Hex + `
		00000001 6e000000 -- name "n"
	`},
	{"RENAME reply", &RenameRes{FromWcc: wcc, ToWcc: WccData{After: post}}, okHex + wccHex + `
		00000000 -- before: attributes_follow: FALSE
	` + postHex},
	{"RENAME failure", &RenameRes{Status: ErrNotEmpty, ToWcc: wcc}, `
		00000042 -- NFS3ERR_NOTEMPTY
	` + noWccHex + wccHex},

	{"LINK call", &LinkArgs{FH: fh2, Link: name}, fh2Hex + nameHex},
	{"LINK reply", &LinkRes{Attr: post, DirWcc: wcc}, okHex + postHex + wccHex},
	{"LINK failure", &LinkRes{Status: ErrMLink, DirWcc: wcc}, `
		0000001f -- NFS3ERR_MLINK
	` + noneHex + wccHex},

	{"READDIR call", &ReaddirArgs{Dir: fh1, Cookie: 0x1_0000_0002, Verf: CookieVerf{7: 9}, Count: 4096}, fh1Hex + `
		00000001 00000002 -- cookie
		00000000 00000009 -- cookieverf
		00001000          -- count
	`},
	{"READDIR reply", &ReaddirRes{DirAttr: post, Verf: CookieVerf{7: 9}, Entries: []Entry{{0x77, "a", 1}, {0x78, "five5", 2}}, EOF: true}, okHex + postHex + `
		00000000 00000009                            -- cookieverf
		00000001 00000000 00000077 00000001 61000000 -- entry: fileid, name "a"
		00000000 00000001                            -- cookie
		00000001 00000000 00000078 00000005 66697665 35000000 -- entry: fileid, name "five5"
		00000000 00000002                            -- cookie
		00000000 00000001                            -- no entry, eof
	`},
	{"READDIR reply without entries", &ReaddirRes{}, okHex + noneHex + `
		00000000 00000000 -- cookieverf
		00000000 00000000 -- no entry, no eof
	`},
	{"READDIR failure", &ReaddirRes{Status: ErrBadCookie, DirAttr: post}, `
		00002713 -- NFS3ERR_BAD_COOKIE
	` + postHex},

	{"READDIRPLUS call", &ReaddirPlusArgs{Dir: fh1, Cookie: 2, Verf: CookieVerf{7: 9}, DirCount: 512, MaxCount: 4096}, fh1Hex + `
		00000000 00000002 -- cookie
		00000000 00000009 -- cookieverf
		00000200 00001000 -- dircount, maxcount
	`},
	{"READDIRPLUS reply", &ReaddirPlusRes{Verf: CookieVerf{7: 9}, EOF: true, Entries: []EntryPlus{
		{Entry: Entry{0x77, "a", 1}, Attr: post, FH: PostOpFH{true, fh2}},
		{Entry: Entry{0x78, "b", 2}},
	}}, okHex + noneHex + `
		00000000 00000009                            -- cookieverf
		00000001 00000000 00000077 00000001 61000000 -- entry: fileid, name "a"
		00000000 00000001                            -- cookie
	` + postHex + `
		00000001                                     -- handle_follows
	` + fh2Hex + `
		00000001 00000000 00000078 00000001 62000000 -- entry: fileid, name "b"
		00000000 00000002                            -- cookie
		00000000 00000000                            -- no attributes, no handle
		00000000 00000001                            -- no entry, eof
	`},
	{"READDIRPLUS failure", &ReaddirPlusRes{Status: ErrNotSupp}, `
		00002714 -- NFS3ERR_NOTSUPP
	` + noneHex},

	{"FSSTAT reply", &FsstatRes{Attr: post, TotalBytes: 1 << 40, FreeBytes: 2, AvailBytes: 3, TotalFiles: 4, FreeFiles: 5, AvailFiles: 6, Invarsec: 7}, okHex + postHex + `
		00000100 00000000 00000000 00000002 00000000 00000003 -- tbytes, fbytes, abytes
		00000000 00000004 00000000 00000005 00000000 00000006 -- tfiles, ffiles, afiles
		00000007                                              -- invarsec
	`},
	{"FSSTAT failure", &FsstatRes{Status: ErrJukebox}, `
		00002718 -- NFS3ERR_JUKEBOX
	` + noneHex},

	{"FSINFO reply", &FsinfoRes{
		Rtmax: 0x100000, Rtpref: 0x80000, Rtmult: 4096, Wtmax: 0x200000, Wtpref: 0x40000, Wtmult: 512, Dtpref: 8192,
		MaxFileSize: 1<<63 - 1, TimeDelta: Time{0, 1}, Properties: PropLink | PropSymlink | PropHomogeneous | PropCanSetTime,
	}, okHex + noneHex + `
		00100000 00080000 00001000 -- rtmax, rtpref, rtmult
		00200000 00040000 00000200 -- wtmax, wtpref, wtmult
		00002000                   -- dtpref
		7fffffff ffffffff          -- maxfilesize
		00000000 00000001          -- time_delta
		0000001b                   -- FSF3_LINK, SYMLINK, HOMOGENEOUS, CANSETTIME
	`},
	{"FSINFO failure", &FsinfoRes{Status: ErrBadHandle, Attr: post}, `
		00002711 -- NFS3ERR_BADHANDLE
	` + postHex},

	{"PATHCONF reply", &PathconfRes{Attr: post, LinkMax: 32000, NameMax: 255, NoTrunc: true, CasePreserving: true}, okHex + postHex + `
		00007d00 000000ff -- linkmax, name_max
		00000001 00000000 -- no_trunc, chown_restricted
		00000000 00000001 -- case_insensitive, case_preserving
	`},
	{"PATHCONF reply, the other bools", &PathconfRes{ChownRestricted: true, CaseInsensitive: true}, okHex + noneHex + `
		00000000 00000000 -- linkmax, name_max
		00000000 00000001 -- no_trunc, chown_restricted
		00000001 00000000 -- case_insensitive, case_preserving
	`},
	{"PATHCONF failure", &PathconfRes{Status: 12345}, `
		00003039 -- a status that RFC 1813 does not have
	` + noneHex},

	{"COMMIT call", &CommitArgs{FH: fh1, Offset: 0x1_0000_0000, Count: 0x100000}, fh1Hex + `
		00000001 00000000 -- offset
		00100000          -- count
	`},
	{"COMMIT reply", &CommitRes{Wcc: wcc, Verf: WriteVerf{1, 2, 3, 4, 5, 6, 7, 8}}, okHex + wccHex + `
		01020304 05060708 -- verf
	`},
	{"COMMIT failure", &CommitRes{Status: ErrIO}, `
		00000005 -- NFS3ERR_IO
	` + noWccHex},

	{"MNT call", &MountPath{"/export"}, `
		00000007 2f657870 6f727400 -- dirpath "/export"
	`},
	{"MNT reply", &MountRes{FH: fh1, Flavors: []oncrpc.Flavor{oncrpc.FlavorSys, 390003}}, okHex + fh1Hex + `
		00000002 00000001 0005f373 -- auth_flavors<>: AUTH_SYS, krb5
	`},
	{"MNT failure", &MountRes{Status: ErrAcces}, `
		0000000d -- MNT3ERR_ACCES
	`},
	{"DUMP reply", &DumpRes{[]MountEntry{{"h1", "/a"}, {"h22", "/bb"}}}, `
		00000001 00000002 68310000 00000002 2f610000 -- "h1", "/a"
		00000001 00000003 68323200 00000003 2f626200 -- "h22", "/bb"
		00000000                                     -- end
	`},
	{"EXPORT reply", &ExportRes{[]Export{{Dir: "/a", Groups: []string{"g1", "@net"}}, {Dir: "/b"}}}, `
		00000001 00000002 2f610000 -- "/a"
		00000001 00000002 67310000 -- group "g1"
		00000001 00000004 406e6574 -- group "@net"
		00000000                   -- end of groups
		00000001 00000002 2f620000 -- "/b"
		00000000                   -- end of groups
		00000000                   -- end
	`},
}

// fresh returns a new message of the type of m, full of what an earlier use may have left in it.
func fresh(m message) message {
	v := reflect.New(reflect.TypeOf(m).Elem())
	dirty(v.Elem())
	return v.Interface().(message)
}

func dirty(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[FileHandle]() {
			v.Set(reflect.ValueOf(handle(bytes.Repeat([]byte{0xdd}, MaxHandle)...)))
			return
		}
		for i := range v.NumField() {
			dirty(v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			dirty(v.Index(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 3, 3))
	case reflect.String:
		v.SetString("dirt")
	case reflect.Bool:
		v.SetBool(true)
	default:
		v.SetUint(0xdd)
	}
}

// TestGolden encodes and decodes each message, and decodes each proper prefix of it.
func TestGolden(t *testing.T) {
	for _, tt := range goldens {
		t.Run(tt.name, func(t *testing.T) {
			want := xdrtest.Hex(t, tt.hex)
			if b := tt.msg.Append([]byte{0xee}); !bytes.Equal(b[1:], want) {
				t.Errorf("encoded %x, want %x", b[1:], want)
			}
			input := append(slices.Clone(want), 1, 2, 3, 4)
			d := xdr.NewDecoder(input)
			got := fresh(tt.msg)
			err := got.Decode(&d)
			clear(input)
			if err != nil || !reflect.DeepEqual(got, tt.msg) {
				t.Errorf("decoded %+v, %v; want %+v", got, err, tt.msg)
			}
			if d.Offset() != len(want) || len(d.Rest()) != 4 {
				t.Errorf("took %d bytes of %d and left %x", d.Offset(), len(want), d.Rest())
			}
			for n := range want {
				got := fresh(tt.msg)
				d := xdr.NewDecoder(want[:n])
				if err := got.Decode(&d); !errors.Is(err, xdr.ErrTruncated) {
					t.Errorf("the first %d bytes decoded to %+v, %v", n, got, err)
				}
			}
		})
	}
}
