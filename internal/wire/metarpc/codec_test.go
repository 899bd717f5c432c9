package metarpc

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/weftfs/weft/layout"
)

// random returns a generator whose seed is in the log of a failed test.
func random(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// fill sets every exported field below v to something that is not zero.
func fill(r *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1 + r.Int64N(math.MaxInt64-1)>>r.IntN(63))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		bits := v.Type().Bits()
		v.SetUint(1 + r.Uint64N(1<<(bits-1)-1)>>r.IntN(bits-1))
	case reflect.String:
		b := make([]byte, 3+r.IntN(MaxName-2)) // "." and ".." are no names
		for i := range b {
			if b[i] = byte(r.IntN(256)); b[i] == 0 || b[i] == '/' {
				b[i] = 0xff
			}
		}
		v.SetString(string(b))
	case reflect.Slice:
		n := 1 + r.IntN(20)
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(r, v.Index(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(r, v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(r, v.Field(i))
			}
		}
	default:
		panic(v.Kind())
	}
}

// tame brings random values into the protocol's bounds, leaving as much of them as it can.
func tame(v any) any {
	switch v := v.(type) {
	case *SetAttrArgs:
		v.Mask &= setAll
		v.Mode &= 0o7777
	case *OpenArgs:
		v.Access &= accessAll
	case *CreateArgs:
		v.Mode &= 0o7777
		v.Umask &= 0o7777
		v.Access &= accessAll
	case *TmpFileArgs:
		v.Mode &= 0o7777
		v.Umask &= 0o7777
	case *MakeNodeArgs:
		v.Mode = v.Mode&0o7777 | syscall.S_IFLNK
		v.Umask &= 0o7777
	case *LockArgs:
		v.Type, v.End = LockWrite, math.MaxInt64
	case *LockResult:
		v.Type, v.End = LockRead, math.MaxInt64
	case *LeaseRecallArgs:
		for i := range v.Items {
			v.Items[i].Lease &= leaseAll
		}
	case *Hello:
		v.Shard = int(uint(v.Shard) % layout.MaxShards)
	case *Welcome:
		tame(&v.Ring)
	case *Ring:
		for i := range v.Owners {
			v.Owners[i] = i%(len(v.Services)+1) - 1
		}
		for i := range v.Services {
			v.Services[i] = fmt.Sprintf("host%d:7049", i)
		}
	case *Attr:
		v.Flags &= attrFlagsAll
		v.Used = max(v.Used, 0)
	case *AttrResult:
		tame(&v.Attr)
		v.Lease = LeaseAttrs
	case *CreateResult:
		tame(&v.Attr)
		v.Created, v.Granted, v.Lease = true, true, LeaseAttrs
		for i := range v.Segments {
			tame(&v.Segments[i])
			v.Segments[i].IOMode = layout.IOModeRW
		}
	case *LookupResult:
		tame(&v.Attr)
		v.Lease, v.Names = LeaseAttrs, LeaseNames
	case *LayoutCommitArgs:
		v.Provisional = false
		for i := range v.Reports {
			v.Reports[i].Written = v.Reports[i].Written[:1]
			v.Reports[i].Set.Mask &= SetAtime | SetMtime
			v.Reports[i].Used = max(v.Reports[i].Used, UsedLost)
			w := &v.Reports[i].Written[0]
			w.Copy.Handle = w.Copy.Handle[:min(len(w.Copy.Handle), maxHandle)]
			for k := range w.Ranges {
				w.Ranges[k] = Range{Off: int64(k) << 30, Len: 512 + w.Ranges[k].Len%(1<<30)&^511}
			}
		}
	case *LayoutCommitResult:
		for i := range v.Attrs {
			tame(&v.Attrs[i])
		}
	case *MetaListResult:
		v.Shards = layout.MaxShards
		for i := range v.Services {
			s := &v.Services[i]
			s.Address, s.State = fmt.Sprintf("host%d:7049", i), MetaSilent
			for k := range s.Shards {
				s.Shards[k] = int(uint(s.Shards[k]) % layout.MaxShards)
			}
		}
	case *RenameArgs:
		v.Flags = RenameExchange
	case *ReadDirArgs:
		v.Limit = MaxPage
	case *XattrArgs:
		v.Flags = XattrReplace
	case *VerifyArgs:
		v.Len = 1 + v.Len%MaxVerify
	case *LayoutGetArgs:
		v.IOMode = layout.IOModeRW
	case *ReadDirResult:
		v.Names = LeaseNames
		for i := range v.Entries {
			tame(&v.Entries[i].Attr)
			v.Entries[i].Lease = LeaseAttrs
			v.Entries[i].Cookie = math.MaxInt64 - uint64(len(v.Entries)) + uint64(i)
		}
	case *LayoutResult:
		for i := range v.Segments {
			tame(&v.Segments[i])
		}
	case *QuotaName:
		v.Kind, v.ID = QuotaUser, v.ID%1000
	case *QuotaSetArgs:
		tame(&v.Name)
	case *ClientSetArgs:
		v.Whose = ""
		v.Rule += "*"
	case *QuotasArgs:
		tame(&v.Name)
	case *QuotasResult:
		for i := range v.Quotas {
			tame(&v.Quotas[i].Name)
		}
	case *CacheStartResult:
		v.Segments = v.Segments[:1]
		tame(&v.Segments[0])
		s := &v.Segments[0]
		s.IOMode, s.Off, s.Len = layout.IOModeRW, 0, layout.ToEOF
	case *Segment:
		v.IOMode = layout.IOModeRead
		for i := range v.Mirrors {
			v.Mirrors[i] = append([]DataFile(nil), v.Mirrors[0]...)
			for j := range v.Mirrors[i] {
				v.Mirrors[i][j].State = layout.CopyState(i % 3) // the first of each column is good
				for k := range v.Mirrors[i][j].Extents {
					e := &v.Mirrors[i][j].Extents[k]
					*e = Extent{Off: int64(k) << 30, Len: 512 + e.Len%(1<<30)&^511, Addr: e.Addr >> 1 &^ 511, State: layout.ExtentState(k % 3)}
				}
			}
		}
	case *DevicesResult:
		for i := range v.Devices {
			tame(&v.Devices[i].Device)
		}
	case *AddDeviceResult:
		tame(&v.Info.Device)
	case *Device:
		for i := range v.Addrs {
			v.Addrs[i] = []string{"192.0.2.7:2049", "[2001:db8::1]:20049"}[i%2]
		}
		v.Namespace = v.Namespace[:1]
		v.Namespace[0].NQN = v.Namespace[0].NQN[:min(len(v.Namespace[0].NQN), layout.MaxNQN)]
		v.Namespace[0].Block = 4096
	}
	return v
}

// written is a report of blocks that become valid, given by offsets and lengths, and every is n of them.
func written(ranges ...int64) SizeReport {
	w := Written{Copy: CopyRef{Handle: []byte{1}}}
	for r := range slices.Chunk(ranges, 2) {
		w.Ranges = append(w.Ranges, Range{Off: r[0], Len: r[1]})
	}
	return SizeReport{ID: 1, Written: []Written{w}}
}

func every(n int) (ranges []int64) {
	for i := range n {
		ranges = append(ranges, int64(i)*1024, 512)
	}
	return ranges
}

func filled(r *rand.Rand, v any) any {
	fill(r, reflect.ValueOf(v).Elem())
	return tame(v)
}

// body checks a frame's length and takes it off.
func body(t *testing.T, frame []byte, err error) []byte {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	b, err := ReadFrame(bytes.NewReader(frame), nil, MaxFrame)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) != len(frame)-prefixLen {
		t.Fatalf("frame of %d bytes has a length of %d", len(frame), len(b))
	}
	return b
}

func same(t *testing.T, what any, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%v:\n got %+v\nwant %+v", what, got, want)
	}
}

func TestRoundTrip(t *testing.T) {
	r := random(t)
	for range 20 {
		hello := filled(r, new(Hello)).(*Hello)
		hello.Magic, hello.Lowest, hello.Highest = Magic, Version, max(hello.Highest, Version)
		b, err := AppendHello(nil, hello)
		gotHello, err := ParseHello(body(t, b, err), Spoken)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "hello", gotHello, hello)

		welcome := filled(r, new(Welcome)).(*Welcome)
		welcome.Magic, welcome.Version, welcome.Status = Magic, Version, StatusOK
		welcome.Slots, welcome.Lease = MinSlots+r.IntN(MaxSlots-MinSlots), int64(MinLease)+r.Int64N(int64(MaxLease-MinLease))
		b, err = AppendWelcome(nil, welcome)
		gotWelcome, err := ParseWelcome(body(t, b, err), Spoken)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "welcome", gotWelcome, welcome)

		moved := &Welcome{Magic: Magic, Version: Version, Status: StatusMoved, Message: "elsewhere", Volume: welcome.Volume, Ring: welcome.Ring}
		b, err = AppendWelcome(nil, moved)
		gotMoved, err := ParseWelcome(body(t, b, err), Spoken)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "moved", gotMoved, moved)

		refused := &Welcome{Magic: Magic, Version: Version, Status: StatusBadSession, Message: "gone", Volume: welcome.Volume}
		b, err = AppendWelcome(nil, refused)
		gotRefused, err := ParseWelcome(body(t, b, err), Spoken)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "refused", gotRefused, refused)

		for op := Op(1); op < opEnd; op++ {
			call := CallHeader{Slot: r.IntN(MaxSlots), Sequence: 1 + r.Uint64()>>1, Op: op, Cred: *filled(r, new(Cred)).(*Cred)}
			args := filled(r, op.NewArgs())
			if a, ok := args.(*XattrArgs); ok && op != OpSetXattr {
				a.Value, a.Flags = nil, 0
			}
			if a, ok := args.(*LayoutGetArgs); ok {
				a.Pin, a.Renew = PinOnly, false
				if r.IntN(2) == 0 {
					a.Pin, a.Renew = PinNone, true
				}
			}
			b, err := AppendCall([]byte("before"), call, args)
			gotCall, gotArgs, err := ParseCall(body(t, b[len("before"):], err), Version)
			if err != nil {
				t.Fatalf("%v: %v", op, err)
			}
			same(t, op, gotCall, call)
			same(t, op, gotArgs, args)

			reply := ReplyHeader{Slot: call.Slot, Sequence: call.Sequence}
			want := filled(r, op.NewResult())
			b, err = AppendReply(nil, Version, reply, want)
			gotReply, raw, err := ParseReplyHeader(body(t, b, err))
			if err != nil {
				t.Fatalf("%v: %v", op, err)
			}
			same(t, op, gotReply, reply)
			result := op.NewResult()
			if err := DecodeResult(op, raw, result); err != nil {
				t.Fatalf("%v: %v", op, err)
			}
			same(t, op, result, want)
		}

		reply := ReplyHeader{Slot: 3, Sequence: 1 + r.Uint64()>>1, Status: Status(r.Uint32()), Message: "why \xff"}
		b, err = AppendReply(nil, Version, reply, nil)
		gotReply, _, err := ParseReplyHeader(body(t, b, err))
		if err != nil {
			t.Fatal(err)
		}
		same(t, "reply", gotReply, reply)

		for op := BackOp(1); op < backOpEnd; op++ {
			back := BackHeader{Number: r.Uint64(), Op: op}
			args := filled(r, op.NewArgs())
			b, err := AppendCallBack(nil, Version, back, args)
			gotBack, gotArgs, err := ParseCallBack(body(t, b, err), Version)
			if err != nil {
				t.Fatal(err)
			}
			same(t, op, gotBack, back)
			same(t, op, gotArgs, args)
		}

		answer := BackReply{Number: r.Uint64(), Status: Status(r.Uint32())}
		b, err = AppendBackReply(nil, answer)
		gotAnswer, err := ParseBackReply(body(t, b, err))
		if err != nil {
			t.Fatal(err)
		}
		same(t, "backreply", gotAnswer, answer)
	}
}

// Each case is a whole frame, as a person would write it down from the package comment.
func TestGolden(t *testing.T) {
	id := [16]byte{0: 1, 15: 0xfe}
	cases := []struct {
		name string
		make func() ([]byte, error)
		want string
	}{
		{"hello", func() ([]byte, error) {
			return AppendHello(nil, &Hello{Magic: Magic, Lowest: 3, Highest: 3, Client: ClientInfo{ID: id, Host: "n1", PID: 300, Program: "weft", Mount: "/w"}, Shard: 300})
		}, "0000003f" + "97 00 a477656674 03 03" + "95 c410 010000000000000000000000000000fe a26e31 cd012c a477656674 a22f77" +
			"c410 00000000000000000000000000000000 cd012c"},
		{"moved", func() ([]byte, error) {
			return AppendWelcome(nil, &Welcome{Magic: Magic, Version: 3, Status: StatusMoved, Message: "no",
				Ring: Ring{Epoch: 9, Services: []string{"n1:1", "n2:2"}, Owners: []int{1, -1, 0}}})
		}, "00000057" + "9b 01 a477656674 03 cd03f5 a26e6f" + strings.Repeat("c410 00000000000000000000000000000000", 3) + "00 00" +
			"93 09 92 a46e313a31 a46e323a32 93 01 ff 00"},
		{"confined", func() ([]byte, error) {
			return AppendWelcome(nil, &Welcome{Magic: Magic, Version: 8, Volume: id, Slots: 1, Lease: 1, Top: "/a"})
		}, "0000004a" + "9c 01 a477656674 08 00 a0" + "c410 00000000000000000000000000000000" + "c410 010000000000000000000000000000fe" +
			"c410 00000000000000000000000000000000" + "01 01 93 00 c0 91 ff a22f61"},
		{"call", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLookup, Cred: Cred{UID: 1000, GID: 100}}, &NameArgs{Parent: layout.RootID, Name: "a\xff"})
		}, "00000011" + "96 02 02 07 05 94cd03e864c0c2 92 01 a261ff"},
		{"call of a member of groups", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpRenew, Cred: Cred{UID: 1, GID: 2, Groups: []uint32{3, 1000}, ByUID: true}}, &Empty{})
		}, "0000000f" + "96 02 02 07 01 94 01 02 9203cd03e8 c3 90"},
		{"create", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpCreate}, &CreateArgs{
				Parent: layout.RootID, Name: "a", Mode: 0o644, Umask: 0o22, Access: AccessWrite, Layout: true, Near: []layout.DeviceID{id}})
		}, "00000028" + "96 02 02 07 06 940000c0c2 98 01 a161 cd01a4 12 c2 02 c3 91 c410 010000000000000000000000000000fe"},
		{"created, with a layout", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &CreateResult{Attr: Attr{ID: 3}, Created: true, Granted: true, Segments: []Segment{
				{Len: 4096, IOMode: layout.IOModeRW, StripeUnit: 4096, Mirrors: [][]DataFile{{{Device: id, Handle: []byte{0xaa}, UID: 1, GID: 2}}}}}})
		}, "00000043" + "96 03 02 07 00 a0 95 9d03000000000000000000000000 c3 00 c3" +
			"91 9a 00 cd1000 02 cd1000 91 91 96 c410 010000000000000000000000000000fe 00 c401aa 01 02 00 00 00 c2 c2 c2"},
		{"refusal", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7, Status: Status(syscall.ENOENT), Message: "no"}, nil)
		}, "00000009" + "96 03 02 07 02 a26e6f c0"},
		{"reply", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 255, Sequence: 1}, &AttrResult{Attr: Attr{
				ID: 3, Mode: 0o100644, Nlink: 1, UID: 1, GID: 2, Size: 1 << 32, Atime: -1, Mtime: 1 << 40, Ctime: 128, Btime: 65536, Flags: AttrXattrs | AttrDefaultACL,
				Used: UsedOf(5000)}, Lease: LeaseAttrs})
		}, "00000030" + "96 03 ccff 01 00 a0 92" + "9d 03 cd81a4 01 01 02 00 cf0000000100000000 ff cf0000010000000000 cc80 ce00010000 05 cd2001 01"},
		{"reply of version 5", func() ([]byte, error) {
			return AppendReply(nil, 5, ReplyHeader{Slot: 2, Sequence: 1}, &AttrResult{Attr: Attr{ID: 3, Used: UsedOf(5000)}, Lease: LeaseAttrs})
		}, "00000015" + "96 03 02 01 00 a0 92" + "9c 03 0000000000000000000000 01"},
		{"report", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLayoutCommit}, &LayoutCommitArgs{Reports: []SizeReport{
				{ID: 5, End: 1, Used: UsedOf(1)}, {ID: 6, Used: UsedLost}}})
		}, "0000002d" + "96 02 02 07 15 940000c0c2 92 92" + "9a 05 01 00 00 c0 9400000000 c0c0c0 cd1001" + "9a 06 00 00 00 c0 9400000000 c0c0c0 ff" + "c2"},
		{"callback", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackLayoutRecall}, &LayoutRecallArgs{ID: 5, Off: 4096, Len: layout.ToEOF})
		}, "00000012" + "94 04 09 01 93 05 cd1000 cf7fffffffffffffff"},
		{"lookup of nothing", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 1, Sequence: 1}, &LookupResult{Names: LeaseNames})
		}, "00000017" + "96 03 01 01 00 a0 93 9d00000000000000000000000000 00 02"},
		{"lock", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLock}, &LockArgs{
				ID: 5, Owner: 9, Flock: true, Type: LockWrite, End: math.MaxInt64, PID: 77, Wait: true})
		}, "0000001d" + "96 02 02 07 1d 940000c0c2 9a 05 09 c3 02 00 cf7fffffffffffffff 4d c3 c2 c2"},
		{"unlock, alone", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLock}, &LockArgs{ID: 5, Owner: 9, End: 1, Alone: true})
		}, "00000015" + "96 02 02 07 1d 940000c0c2 9a 05 09 c2 00 00 01 00 c2 c2 c3"},
		{"lock set, shared", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &LockDone{Shared: true})
		}, "00000008" + "96 03 02 07 00 a0 91 c3"},
		{"lock set, version 5", func() ([]byte, error) {
			return AppendReply(nil, 5, ReplyHeader{Slot: 2, Sequence: 7}, &LockDone{Shared: true})
		}, "00000007" + "96 03 02 07 00 a0 90"},
		{"lease recall", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackLeaseRecall},
				&LeaseRecallArgs{Items: []LeaseItem{{ID: 5, Lease: LeaseAttrs | LeaseNames}, {ID: 300, Lease: LeaseData}}})
		}, "0000000e" + "94 04 09 02 91 92 920503 92cd012c04"},
		{"size query", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackSizeQuery}, &SizeQueryArgs{IDs: []layout.FileID{5, 6}})
		}, "00000008" + "94 04 09 03 91 92 05 06"},
		{"reserve", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpReserve}, &ReserveArgs{ID: 5, Len: 128, Ended: []uint64{1, 300}, GivenUp: []uint64{2}})
		}, "00000015" + "96 02 02 07 1c 940000c0c2 94 05 cc80 92 01cd012c 91 02"},
		{"reserved", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &ReserveResult{Off: 128, Mtime: 5, Number: 300})
		}, "0000000d" + "96 03 02 07 00 a0 93 cc80 05 cd012c"},
		{"reserved, version 5", func() ([]byte, error) {
			return AppendReply(nil, 5, ReplyHeader{Slot: 2, Sequence: 7}, &ReserveResult{Off: 128, Mtime: 5, Number: 300})
		}, "0000000a" + "96 03 02 07 00 a0 92 cc80 05"},
		{"places", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLayoutCommit}, &LayoutCommitArgs{Provisional: true, Reports: []SizeReport{
				{ID: 5, End: 9, Ended: []uint64{1}, GivenUp: []uint64{2, 3}, Reserved: []Place{{Number: 4, Off: 9, Len: 128, Mtime: 7}}}}})
		}, "00000025" + "96 02 02 07 15 940000c0c2 92 91 9a 05 09 00 00 c0 9400000000 91 01 92 0203 91 94 04 09 cc80 07 00 c3"},
		{"reserve recall", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackReserveRecall}, &ReserveRecallArgs{ID: 5, Upto: 300})
		}, "00000009" + "94 04 09 07 92 05 cd012c"},
		{"device states", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackDeviceStates}, &DeviceStatesArgs{Prober: [16]byte{7}, Epoch: 300,
				Down: []DownDevice{{Device: id, Silent: true, For: 128}}})
		}, "00000031" + "94 04 09 08 93 c410 07000000000000000000000000000000 cd012c 91 93 c410 010000000000000000000000000000fe c3 cc80"},
		{"report devices", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpReportDevices}, &ReportDevicesArgs{Devices: []layout.DeviceID{id}})
		}, "0000001e" + "96 02 02 07 30 940000c0c2 91 91 c410 010000000000000000000000000000fe"},
		{"parent", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpParent}, &ParentArgs{ID: 300, Top: 5})
		}, "0000000f" + "96 02 02 07 31 940000c0c2 92 cd012c 05"},
		{"parent is", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &ParentResult{Parent: 300})
		}, "0000000a" + "96 03 02 07 00 a0 91 cd012c"},
		{"layout stats", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLayoutStats}, &LayoutStatsArgs{Span: 128, Devices: []DeviceStats{
				{Device: id, Reads: IOStats{Ops: 1, Bytes: 4096, Time: 300}, Writes: IOStats{Ops: 2, Bytes: 3, Time: 4}, Outstanding: 5}}})
		}, "0000002e" + "96 02 02 07 24 940000c0c2 92 cc80 91 94 c410 010000000000000000000000000000fe 9301cd1000cd012c 93020304 05"},
		{"verify", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpVerify}, &VerifyArgs{ID: 5, Off: 4096, Len: 128, Repair: true})
		}, "00000012" + "96 02 02 07 2f 940000c0c2 94 05 cd1000 cc80 c3"},
		{"verified", func() ([]byte, error) {
			ref := []CopyRef{{Device: id, Handle: []byte{0xaa}}}
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &VerifyResult{Next: 4224, Size: 5000, Copies: 2,
				Differ: []Difference{{Off: 4096, Len: 128, Good: ref, Bad: ref, Majority: true}}})
		}, "00000046" + "96 03 02 07 00 a0 96 cd1080 cd1388 02 c2" + "91 95 cd1000 cc80" +
			"91 92 c410 010000000000000000000000000000fe c401aa" + "91 92 c410 010000000000000000000000000000fe c401aa" + "c3" + "c2"},
		{"layout move", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpLayoutMove}, &LayoutMoveArgs{ID: 5, Device: id})
		}, "0000001e" + "96 02 02 07 25 940000c0c2 92 05 c410 010000000000000000000000000000fe"},
		{"layout moved", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &LayoutMoveResult{Done: 128, Size: 4096, Waits: "w"})
		}, "00000010" + "96 03 02 07 00 a0 95 c2 c2 cc80 cd1000 a177"},
		{"cache start", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpCacheStart}, &CacheStartArgs{ID: 5, Devices: []layout.DeviceID{id}, Limit: 128, Run: 9})
		}, "00000022" + "96 02 02 07 26 940000c0c2 94 05 91 c410 010000000000000000000000000000fe cc80 09"},
		{"cache done", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpCacheDone}, &CacheDoneArgs{ID: 5, Copy: CopyRef{Device: id, Handle: []byte{0xaa}}})
		}, "00000022" + "96 02 02 07 27 940000c0c2 92 05 92 c410 010000000000000000000000000000fe c401aa"},
		{"cache drop", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpCacheDrop}, &CacheDropArgs{ID: 5, Device: id})
		}, "0000001e" + "96 02 02 07 28 940000c0c2 92 05 c410 010000000000000000000000000000fe"},
		{"meta drain", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpMetaDrain}, &MetaDrainArgs{Address: "a:1", Cancel: true})
		}, "00000010" + "96 02 02 07 2a 940000c0c2 92 a3613a31 c3"},
		{"meta list", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &MetaListResult{Shards: 3, Services: []MetaService{
				{Address: "a:1", Host: "h", Program: "p", Started: 5, State: MetaDraining, Silent: 128, Shards: []int{0, 2}, Sessions: 9, Lowest: 3, Highest: 128}}})
		}, "0000001d" + "96 03 02 07 00 a0 92 03 91 9a a3613a31 a168 a170 05 01 cc80 920002 09 03 cc80"},
		{"meta list, version 3", func() ([]byte, error) {
			return AppendReply(nil, 3, ReplyHeader{Slot: 2, Sequence: 7}, &MetaListResult{Shards: 3, Services: []MetaService{
				{Address: "a:1", Host: "h", Program: "p", Started: 5, State: MetaDraining, Silent: 128, Shards: []int{0, 2}, Sessions: 9, Lowest: 3, Highest: 128}}})
		}, "0000001a" + "96 03 02 07 00 a0 92 03 91 98 a3613a31 a168 a170 05 01 cc80 920002 09"},
		{"quota set", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpQuotaSet}, &QuotaSetArgs{Name: QuotaName{Kind: QuotaGroup, ID: 5}, Bytes: QuotaKeep, Files: 128})
		}, "00000011" + "96 02 02 07 2b 940000c0c2 93 920305 ff cc80"},
		{"quotas", func() ([]byte, error) {
			return AppendCall(nil, CallHeader{Slot: 2, Sequence: 7, Op: OpQuotas}, &QuotasArgs{Name: QuotaName{Kind: QuotaTree, ID: 5}, After: true})
		}, "0000000f" + "96 02 02 07 2c 940000c0c2 92 920105 c3"},
		{"quotas told", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 2, Sequence: 7}, &QuotasResult{EOF: true, Quotas: []QuotaInfo{
				{Name: QuotaName{Kind: QuotaTree, ID: 5}, Path: "/a", Bytes: 1, Files: 2, UsedBytes: 3, UsedFiles: 4}}})
		}, "00000014" + "96 03 02 07 00 a0 92 91 96 920105 a22f61 01 02 03 04 c3"},
		{"lock ready", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackLockReady}, &LockReadyArgs{ID: 5, Owner: 6, Flock: true})
		}, "00000008" + "94 04 09 04 93 05 06 c3"},
		{"lease shrink", func() ([]byte, error) {
			return AppendCallBack(nil, Version, BackHeader{Number: 9, Op: BackLeaseShrink}, &LeaseShrinkArgs{Keep: 100})
		}, "00000006" + "94 04 09 05 91 64"},
		{"backreply", func() ([]byte, error) { return AppendBackReply(nil, BackReply{Number: 9, Status: StatusInternal}) },
			"00000006" + "93 05 09 cd03f0"},
		{"segments", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 0, Sequence: 1}, &LayoutResult{Segments: []Segment{{
				Off: 0, Len: 1 << 20, IOMode: layout.IOModeRW, StripeUnit: 1 << 20,
				Mirrors: [][]DataFile{{{Device: id, Efficiency: 1, Handle: []byte{0xaa, 0xbb}, UID: 7, GID: 8, State: layout.CopyGood}}}, Shared: true, Exacting: true}},
				Pinned: CopyRef{Device: id, Handle: []byte{0xaa, 0xbb}}})
		}, "0000004e" + "96 03 00 01 00 a0 92 91 9a 00 ce00100000 02 ce00100000 91 91 96" +
			"c410 010000000000000000000000000000fe 01 c402aabb 07 08 00 00 00 c3 c3 c2" +
			"92 c410 010000000000000000000000000000fe c402aabb"},
		{"extents", func() ([]byte, error) {
			return AppendReply(nil, Version, ReplyHeader{Slot: 0, Sequence: 1}, &LayoutResult{Segments: []Segment{{
				Off: 0, Len: 1 << 20, IOMode: layout.IOModeRW,
				Mirrors: [][]DataFile{{{Device: id, Handle: []byte{0xaa}, Generation: 9, Extents: []Extent{
					{Len: 4096, Addr: 1 << 32}, {Off: 4096, Len: 512, Addr: 1 << 20, State: layout.ExtentInvalid}}}}}}}})
		}, "00000064" + "96 03 00 01 00 a0 92 91 9a 00 ce00100000 02 00 91 91 98" +
			"c410 010000000000000000000000000000fe 00 c401aa 00 00 00" +
			"09 92 94 00 cd1000 cf0000000100000000 00 94 cd1000 cd0200 ce00100000 02" + "00 00 c2 c2 c2" +
			"92 c410 00000000000000000000000000000000 c0"},
	}
	for _, c := range cases {
		got, err := c.make()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		want, err := hex.DecodeString(strings.ReplaceAll(c.want, " ", ""))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s:\n got %x\nwant %x", c.name, got, want)
		}
	}
}

// Any bytes that are a name on Linux come back as they went.
func TestNamesAreBytes(t *testing.T) {
	for _, name := range []string{"a", "\xff\xfe\x80", "\x01\n\r", "...", " ", strings.Repeat("\xf0", 255), "\u202e", "-"} {
		b, err := AppendCall(nil, CallHeader{Sequence: 1, Op: OpLookup}, &NameArgs{Parent: 1, Name: name})
		_, args, err := ParseCall(body(t, b, err), Version)
		if err != nil {
			t.Errorf("%q: %v", name, err)
		} else if got := args.(*NameArgs).Name; got != name {
			t.Errorf("%q came back as %q", name, got)
		}
	}
}

func TestRefusedArguments(t *testing.T) {
	const (
		tooLong  = Status(syscall.ENAMETOOLONG)
		outRange = Status(syscall.ERANGE)
		tooBig   = Status(syscall.E2BIG)
		bad      = StatusBadArgs
		fine     = StatusOK
	)
	long := strings.Repeat("x", MaxName+1)
	ids := make([]layout.FileID, MaxBatch+1)
	for i := range ids {
		ids[i] = 1
	}
	cases := []struct {
		op   Op
		args any
		want Status
	}{
		{OpLookup, &NameArgs{Parent: 1, Name: long[1:]}, fine},
		{OpLookup, &NameArgs{Parent: 1, Name: long}, tooLong},
		{OpLookup, &NameArgs{Parent: 1, Name: ""}, bad},
		{OpLookup, &NameArgs{Parent: 1, Name: "."}, bad},
		{OpLookup, &NameArgs{Parent: 1, Name: ".."}, bad},
		{OpLookup, &NameArgs{Parent: 1, Name: "a/b"}, bad},
		{OpLookup, &NameArgs{Parent: 1, Name: "a\x00"}, bad},
		{OpLookup, &NameArgs{Parent: 0, Name: "a"}, bad},
		{OpGetAttr, &IDArgs{}, bad},
		{OpGetAttr, &NameArgs{Parent: 1, Name: "a"}, bad}, // another call's arguments
		{OpGetAttr, nil, bad},
		{opEnd, &Empty{}, bad},
		{OpRenew, &Empty{}, fine},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Mode: 0o7777}, fine},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Mode: 0o100644}, bad},
		{OpCreate, &CreateArgs{Parent: 1, Name: long}, tooLong},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Umask: 0o7777, Access: accessAll}, fine},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Umask: 0o10000}, bad},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Access: accessAll + 1}, bad},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Layout: true, Near: make([]layout.DeviceID, MaxNear)}, fine},
		{OpCreate, &CreateArgs{Parent: 1, Name: "a", Layout: true, Near: make([]layout.DeviceID, MaxNear+1)}, bad},
		{OpTmpFile, &TmpFileArgs{Parent: 1, Mode: 0o600, Umask: 0o22}, fine},
		{OpTmpFile, &TmpFileArgs{Mode: 0o600}, bad},
		{OpTmpFile, &TmpFileArgs{Parent: 1, Mode: syscall.S_IFREG}, bad},
		{OpTmpFile, &TmpFileArgs{Parent: 1, Umask: 1 << 20}, bad},
		{OpOpen, &OpenArgs{ID: 1, Access: AccessRead | AccessWrite | AccessExec, Reclaim: true}, fine},
		{OpOpen, &OpenArgs{Access: AccessRead}, bad},
		{OpOpen, &OpenArgs{ID: 1, Access: 8}, bad},
		{OpLock, &LockArgs{ID: 1, Type: LockNone, Start: 5, End: 5}, fine},
		{OpLock, &LockArgs{ID: 1, Type: LockWrite, End: math.MaxInt64}, fine},
		{OpLock, &LockArgs{Type: LockWrite}, bad},
		{OpLock, &LockArgs{ID: 1, Type: lockTypeEnd}, bad},
		{OpLock, &LockArgs{ID: 1, Start: -1}, bad},
		{OpTestLock, &LockArgs{ID: 1, Type: LockRead, Start: 2, End: 1}, bad},
		{OpReserve, &ReserveArgs{ID: 1, Len: 1}, fine},
		{OpReserve, &ReserveArgs{ID: 1}, bad},
		{OpReserve, &ReserveArgs{ID: 1, Len: -1}, bad},
		{OpReserve, &ReserveArgs{Len: 1}, bad},
		{OpReserve, &ReserveArgs{ID: 1, Len: 1, Ended: make([]uint64, MaxBatch), GivenUp: make([]uint64, MaxBatch)}, fine},
		{OpReserve, &ReserveArgs{ID: 1, Len: 1, Ended: make([]uint64, MaxBatch+1)}, bad},
		{OpReserve, &ReserveArgs{ID: 1, Len: 1, GivenUp: make([]uint64, MaxBatch+1)}, bad},
		{OpLeaseReturn, &LeaseReturnArgs{IDs: ids[1:]}, fine},
		{OpLeaseReturn, &LeaseReturnArgs{IDs: ids}, bad},
		{OpLeaseReturn, &LeaseReturnArgs{IDs: []layout.FileID{0}}, bad},
		{OpReclaimComplete, &Empty{}, fine},
		{OpLink, &LinkArgs{ID: 2, Parent: 1, Name: long}, tooLong},
		{OpRemove, &RemoveArgs{Parent: 1, Name: long}, tooLong},
		{OpRemove, &RemoveArgs{Parent: 1, Name: ".", Dir: true}, bad},
		{OpRename, &RenameArgs{OldParent: 1, OldName: "a", NewParent: 1, NewName: long}, tooLong},
		{OpRename, &RenameArgs{OldParent: 1, OldName: "a", NewParent: 1, NewName: "b", Flags: 3}, bad},
		{OpRename, &RenameArgs{OldParent: 1, OldName: "a", NewParent: 1, NewName: "b", Flags: 1}, fine},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFDIR | 0o755}, fine},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: 0o755}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFMT}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFDIR | 1<<20}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFDIR, Umask: 0o10000}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFDIR, Target: "b"}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFLNK}, bad},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFLNK, Target: "/\xff/" + strings.Repeat("t", MaxSymlink-3)}, fine},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFLNK, Target: strings.Repeat("t", MaxSymlink+1)}, tooLong},
		{OpMakeNode, &MakeNodeArgs{Parent: 1, Name: "a", Mode: syscall.S_IFLNK, Target: "a\x00b"}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: SetAtime | SetAtimeNow, Atime: -5}, fine},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: setAll + 1}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: SetSize, Size: -1}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: SetMode, Mode: 0o10000}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: SetUID, UID: math.MaxUint32}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, Mask: SetGID, GID: math.MaxUint32}, bad},
		{OpSetAttr, &SetAttrArgs{ID: 1, UID: math.MaxUint32, Size: -1}, fine}, // not asked for
		{OpReadDir, &ReadDirArgs{ID: 1, Limit: 1, Cookie: math.MaxInt64}, fine},
		{OpReadDir, &ReadDirArgs{ID: 1, Limit: 1, Cookie: math.MaxInt64 + 1}, bad},
		{OpReadDir, &ReadDirArgs{ID: 1}, bad},
		{OpReadDir, &ReadDirArgs{ID: 1, Limit: MaxPage + 1}, bad},
		{OpSetXattr, &XattrArgs{ID: 1, Name: "user.a", Value: make([]byte, MaxXattr)}, fine},
		{OpSetXattr, &XattrArgs{ID: 1, Name: "user.a", Value: make([]byte, MaxXattr+1)}, tooBig},
		{OpSetXattr, &XattrArgs{ID: 1, Name: "user.a", Flags: 4}, bad},
		{OpSetXattr, &XattrArgs{ID: 1, Name: ""}, outRange},
		{OpSetXattr, &XattrArgs{ID: 1, Name: long}, outRange},
		{OpSetXattr, &XattrArgs{ID: 1, Name: "user.\x00"}, bad},
		{OpGetXattr, &XattrArgs{ID: 1, Name: "user.a", Value: []byte{1}}, bad},
		{OpRemoveXattr, &XattrArgs{ID: 1, Name: "user.a", Flags: 1}, bad},
		{OpClose, &CloseArgs{}, fine},
		{OpClose, &CloseArgs{IDs: ids[1:]}, fine},
		{OpClose, &CloseArgs{IDs: ids}, bad},
		{OpClose, &CloseArgs{IDs: []layout.FileID{1, 0}}, bad},
		{OpLayoutReturn, &LayoutReturnArgs{IDs: ids}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: 0, Len: layout.ToEOF}, fine},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Near: make([]layout.DeviceID, MaxNear)}, fine},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Near: make([]layout.DeviceID, MaxNear+1)}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: 0, Len: 1, Pin: PinAny}, fine},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Pin: PinOnly}, fine},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Pin: PinAny}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: 0, Len: 1, Pin: pinEnd}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Renew: true}, fine},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: 0, Len: 1, Renew: true}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRW, Off: 0, Len: 1, Pin: PinOnly, Renew: true}, bad},
		{OpOpen, &OpenArgs{ID: 1, Access: AccessRead, Pinned: CopyRef{Handle: make([]byte, maxHandle)}}, fine},
		{OpOpen, &OpenArgs{ID: 1, Access: AccessRead, Pinned: CopyRef{Handle: make([]byte, maxHandle+1)}}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeAny, Off: 0, Len: 1}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: -1, Len: 1}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: 0, Len: 0}, bad},
		{OpLayoutGet, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Off: math.MaxInt64, Len: 1}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, End: -1}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 0, End: 1}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Used: UsedLost}}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Used: UsedLost - 1}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: make([]SizeReport, MaxBatch+1)}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Ended: make([]uint64, MaxPlaces)}}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Ended: make([]uint64, MaxPlaces)}, {ID: 2, GivenUp: []uint64{1}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Reserved: []Place{{Number: 1, Len: 1, Mtime: 1}}}}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Reserved: []Place{{Len: 1, Mtime: 1}}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Reserved: []Place{{Number: 1, Mtime: 1}}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Reserved: []Place{{Number: 1, Off: -1, Len: 1, Mtime: 1}}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Reserved: []Place{{Number: 1, Len: 1}}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(0, 512, 512, 4096)}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(0, 512)}, Provisional: true}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 5, Set: Times{Mask: SetMtime, Ctime: 1}}}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 5, Set: Times{Mask: SetMtime}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 5, Set: Times{Mask: SetMode, Ctime: 1}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 5, Set: Times{Ctime: 1}}}, Provisional: true}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(512, 512, 0, 512)}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(0, 513)}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(-512, 512)}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(0, 0)}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(math.MaxInt64-511, 512)}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, Written: []Written{{}}}}}, bad},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(every(MaxRanges)...)}}, fine},
		{OpLayoutCommit, &LayoutCommitArgs{Reports: []SizeReport{written(every(MaxRanges)...), written(0, 512)}}, bad},
		{OpAddDevice, &AddDeviceArgs{URL: strings.Repeat("u", MaxText+1)}, bad},
		{OpLayoutMove, &LayoutMoveArgs{ID: 1, Device: layout.DeviceID{1}}, fine},
		{OpLayoutMove, &LayoutMoveArgs{ID: 1}, bad},
		{OpVerify, &VerifyArgs{ID: 1, Off: 5, Len: MaxVerify, Repair: true}, fine},
		{OpVerify, &VerifyArgs{ID: 1, Len: MaxVerify + 1}, bad},
		{OpVerify, &VerifyArgs{ID: 1}, bad},
		{OpVerify, &VerifyArgs{Len: 1}, bad},
		{OpLayoutMove, &LayoutMoveArgs{Device: layout.DeviceID{1}}, bad},
		{OpLayoutStats, &LayoutStatsArgs{Span: 1, Devices: make([]DeviceStats, MaxBatch)}, fine},
		{OpLayoutStats, &LayoutStatsArgs{Span: 1, Devices: make([]DeviceStats, MaxBatch+1)}, bad},
		{OpLayoutStats, &LayoutStatsArgs{}, bad},
		{OpParent, &ParentArgs{ID: 5, Top: 1}, fine},
		{OpParent, &ParentArgs{Top: 1}, bad},
		{OpParent, &ParentArgs{ID: 5}, bad},
		{OpReportDevices, &ReportDevicesArgs{Devices: make([]layout.DeviceID, MaxBatch)}, fine},
		{OpReportDevices, &ReportDevicesArgs{Devices: make([]layout.DeviceID, MaxBatch+1)}, bad},
		{OpCacheStart, &CacheStartArgs{ID: 1, Devices: make([]layout.DeviceID, MaxNear)}, fine},
		{OpCacheStart, &CacheStartArgs{ID: 1, Devices: make([]layout.DeviceID, MaxNear+1)}, bad},
		{OpCacheStart, &CacheStartArgs{ID: 1}, bad},
		{OpCacheStart, &CacheStartArgs{ID: 1, Devices: make([]layout.DeviceID, 1), Limit: -1}, bad},
		{OpCacheStart, &CacheStartArgs{Devices: make([]layout.DeviceID, 1)}, bad},
		{OpCacheDone, &CacheDoneArgs{ID: 1, Copy: CopyRef{Handle: []byte{1}}}, fine},
		{OpCacheDone, &CacheDoneArgs{ID: 1}, bad},
		{OpCacheDrop, &CacheDropArgs{ID: 1}, fine},
		{OpCacheDrop, &CacheDropArgs{}, bad},
		{OpMetaList, &Empty{}, fine},
		{OpMetaDrain, &MetaDrainArgs{Address: strings.Repeat("a", MaxAddress), Cancel: true}, fine},
		{OpMetaDrain, &MetaDrainArgs{Address: strings.Repeat("a", MaxAddress+1)}, bad},
		{OpMetaDrain, &MetaDrainArgs{}, bad},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaTree, ID: 1}, Bytes: QuotaKeep, Files: QuotaKeep}, fine},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaUser}}, fine},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaTree, ID: 0}}, bad},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaGroup, ID: math.MaxUint32}}, bad},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: quotaEnd, ID: 1}}, bad},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaTree, ID: 1}, Bytes: -2}, bad},
		{OpQuotaSet, &QuotaSetArgs{Name: QuotaName{Kind: QuotaTree, ID: 1}, Files: -2}, bad},
		{OpQuotas, &QuotasArgs{After: true}, fine},
		{OpClientSet, &ClientSetArgs{Rule: strings.Repeat("a", MaxRule)}, fine},
		{OpClientSet, &ClientSetArgs{Rule: strings.Repeat("a", MaxRule+1)}, bad},
		{OpClientSet, &ClientSetArgs{Whose: strings.Repeat("a", MaxRule+1)}, bad},
		{OpClientSet, &ClientSetArgs{Whose: "*"}, fine},
		{OpClientSet, &ClientSetArgs{Whose: "*", Rule: "*"}, bad},
		{OpClientSet, &ClientSetArgs{}, bad},
		{OpQuotas, &QuotasArgs{}, bad},
		{OpQuotas, &QuotasArgs{Name: QuotaName{ID: 1}, After: true}, bad},
		{OpStatFS, &IDArgs{}, bad},
		{OpLayoutStats, &LayoutStatsArgs{Span: 1, Devices: []DeviceStats{{Reads: IOStats{Time: -1}}}}, bad},
		{OpLayoutStats, &LayoutStatsArgs{Span: 1, Devices: []DeviceStats{{Writes: IOStats{Time: -1}}}}, bad},
		{OpLayoutStats, &LayoutStatsArgs{Span: 1, Devices: []DeviceStats{{Outstanding: -1}}}, bad},
	}
	for _, c := range cases {
		call := CallHeader{Slot: 1, Sequence: 2, Op: c.op, Cred: Cred{UID: 3, GID: 4}}
		b, err := AppendCall(nil, call, c.args)
		h, args, err := ParseCall(body(t, b, err), Version)
		var refusal *Error
		switch {
		case c.want == StatusOK && err != nil:
			t.Errorf("%v %.80v: %v", c.op, c.args, err)
		case c.want == StatusOK:
		case !errors.As(err, &refusal) || refusal.Status != c.want || args != nil || refusal.Op != c.op:
			t.Errorf("%v %.80v: got %v and arguments %v, want status %v", c.op, c.args, err, args, c.want)
		}
		if !reflect.DeepEqual(h, call) {
			t.Errorf("%v: header %+v, want %+v", c.op, h, call)
		}
	}

	b, err := AppendCall(nil, CallHeader{Sequence: 1, Op: OpRenew, Cred: Cred{UID: math.MaxUint32}}, &Empty{})
	if _, _, err = ParseCall(body(t, b, err), Version); err == nil || errors.Is(err, ErrMalformed) {
		t.Errorf("credential of nobody: %v", err)
	}
	b, err = AppendCall(nil, CallHeader{Sequence: 1, Op: OpRenew, Cred: Cred{Groups: make([]uint32, MaxGroups)}}, &Empty{})
	if h, _, err := ParseCall(body(t, b, err), Version); err != nil || len(h.Cred.Groups) != MaxGroups {
		t.Errorf("as many groups as may be: %d, %v", len(h.Cred.Groups), err)
	}
	b, err = AppendCall(nil, CallHeader{Sequence: 1, Op: OpRenew, Cred: Cred{Groups: make([]uint32, MaxGroups+1)}}, &Empty{})
	if _, _, err := ParseCall(body(t, b, err), Version); !errors.Is(err, ErrMalformed) {
		t.Errorf("too many groups: %v", err)
	}
}

func TestRefusedResults(t *testing.T) {
	attr := Attr{ID: 1}
	refs := []CopyRef{{Device: layout.DeviceID{1}, Handle: []byte{1}}}
	created := func(created, granted bool, mode layout.IOMode) *CreateResult {
		return &CreateResult{Attr: attr, Created: created, Granted: granted, Segments: []Segment{{Len: 1, IOMode: mode, Mirrors: [][]DataFile{{{Handle: []byte{1}}}}}}}
	}
	entry := func(cookie uint64) DirEntry { return DirEntry{Name: "a", Cookie: cookie, Attr: attr} }
	cases := []struct {
		op     Op
		result any
		fine   bool
	}{
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Size: -1}}, false},
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Used: UsedOf(0)}}, true},
		{OpVerify, &VerifyResult{Next: 5, Differ: []Difference{{Len: 1, Good: refs, Bad: refs}}}, true},
		{OpVerify, &VerifyResult{Next: 0}, false},
		{OpVerify, &VerifyResult{Next: 5, Size: -1}, false},
		{OpVerify, &VerifyResult{Next: 5, Differ: []Difference{{Good: refs, Bad: refs}}}, false},
		{OpVerify, &VerifyResult{Next: 5, Differ: []Difference{{Len: 1, Good: refs}}}, false},
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Used: UsedLost}}, false},
		{OpGetAttr, &AttrResult{}, false},
		{OpGetAttr, &Empty{}, false},
		{OpGetAttr, nil, false},
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Flags: attrFlagsAll}, Lease: LeaseAttrs}, true},
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Flags: attrFlagsAll + 1}}, false},
		{OpGetAttr, &AttrResult{Attr: attr, Lease: LeaseNames}, false},
		{OpCreate, &CreateResult{}, false},
		{OpCreate, &CreateResult{Attr: attr, Lease: LeaseData}, false},
		{OpTmpFile, &CreateResult{Attr: attr, Created: true, Lease: LeaseAttrs}, true},
		{OpCreate, created(true, true, layout.IOModeRW), true},
		{OpCreate, created(false, true, layout.IOModeRW), false},
		{OpCreate, created(true, false, layout.IOModeRW), false},
		{OpCreate, created(true, true, layout.IOModeRead), false},
		{OpCreate, &CreateResult{Attr: attr, Created: true, Granted: true}, true},
		{OpCreate, &CreateResult{Attr: attr, Granted: true}, false},
		{OpCreate, &CreateResult{Attr: attr, Created: true, Granted: true, Segments: []Segment{{Len: 1, IOMode: layout.IOModeRW}}}, false},
		{OpMakeNode, &AttrResult{Attr: Attr{ID: 1, Mode: syscall.S_IFDIR | 0o755}, Lease: LeaseAttrs | LeaseNames}, true},
		{OpMakeNode, &AttrResult{Attr: Attr{ID: 1, Mode: syscall.S_IFLNK | 0o777}, Lease: LeaseAttrs | LeaseNames}, false},
		{OpMakeNode, &AttrResult{Attr: Attr{ID: 1, Mode: syscall.S_IFDIR | 0o755}, Lease: LeaseData}, false},
		{OpGetAttr, &AttrResult{Attr: Attr{ID: 1, Mode: syscall.S_IFDIR | 0o755}, Lease: LeaseNames}, false},
		{OpLookup, &LookupResult{}, true}, // there is no such name
		{OpLookup, &LookupResult{Attr: attr, Lease: LeaseAttrs, Names: LeaseNames}, true},
		{OpLookup, &LookupResult{Attr: Attr{ID: 1, Size: -1}}, false},
		{OpLookup, &LookupResult{Attr: attr, Lease: LeaseNames}, false},
		{OpLookup, &LookupResult{Attr: attr, Names: LeaseAttrs}, false},
		{OpReserve, &ReserveResult{Mtime: 1}, true},
		{OpReserve, &ReserveResult{Off: -1, Mtime: 1}, false},
		{OpReserve, &ReserveResult{Off: 1}, false},
		{OpTestLock, &LockResult{}, true},
		{OpTestLock, &LockResult{Type: lockTypeEnd}, false},
		{OpTestLock, &LockResult{Start: 2, End: 1}, false},
		{OpTestLock, &LockResult{Start: -1}, false},
		{OpTestLock, &LockResult{Host: strings.Repeat("h", MaxText+1)}, false},
		{OpReadDir, &ReadDirResult{EOF: true, Names: LeaseNames}, true},
		{OpReadDir, &ReadDirResult{EOF: true, Names: LeaseAttrs}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{{Name: "a", Cookie: 17, Attr: attr, Lease: LeaseNames}}}, false},
		{OpReadDir, &ReadDirResult{EOF: true}, true},
		{OpReadDir, &ReadDirResult{}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{entry(16), entry(16), entry(math.MaxInt64)}}, true},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{entry(18), entry(17)}}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{entry(FirstCookie - 1)}}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{entry(math.MaxInt64 + 1)}}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{{Name: "a/b", Cookie: 17, Attr: attr}}}, false},
		{OpReadDir, &ReadDirResult{Entries: []DirEntry{{Name: "a", Cookie: 17}}}, false},
		{OpReadLink, &BytesResult{Value: make([]byte, MaxSymlink+1)}, false},
		{OpGetXattr, &BytesResult{Value: make([]byte, MaxXattr)}, true},
		{OpGetXattr, &BytesResult{Value: make([]byte, MaxXattr+1)}, false},
		{OpListXattr, &NamesResult{Names: []string{"user.a", ""}}, false},
		{OpListXattr, &NamesResult{Names: make([]string, maxElements+1)}, false},
		{OpLayoutGet, &LayoutResult{}, true},
		{OpLayoutGet, &LayoutResult{Pinned: CopyRef{Handle: make([]byte, maxHandle)}}, true},
		{OpLayoutGet, extents(Extent{Len: 4096}, Extent{Off: 8192, Len: 512, Addr: 512}), true},
		{OpLayoutGet, extents(Extent{Len: 4096}, Extent{Off: 2048, Len: 4096}), false},
		{OpLayoutGet, extents(Extent{Len: 4096, State: 4}), false},
		{OpLayoutGet, extents(make([]Extent, layout.MaxExtents+1)...), false},
		{OpLayoutGet, &LayoutResult{Pinned: CopyRef{Handle: make([]byte, maxHandle+1)}}, false},
		{OpLayoutGet, &LayoutResult{Segments: []Segment{{Len: 1, IOMode: layout.IOModeRead}}}, false},
		{OpLayoutGet, &LayoutResult{Segments: []Segment{{Len: 1, IOMode: layout.IOModeRead, Mirrors: [][]DataFile{{{Handle: make([]byte, 65)}}}}}}, false},
		{OpCacheStart, &CacheStartResult{Size: 1, Cached: true}, true},
		{OpCacheStart, &CacheStartResult{Size: -1}, false},
		{OpCacheStart, &CacheStartResult{Size: 2, Segments: []Segment{{Len: 1, IOMode: layout.IOModeRW, Mirrors: [][]DataFile{{{Handle: []byte{1}}}}}}}, false},
		{OpCacheStart, &CacheStartResult{Size: 1, Segments: []Segment{{Len: 1, IOMode: layout.IOModeRead, Mirrors: [][]DataFile{{{Handle: []byte{1}}}}}}}, false},
		{OpCacheStart, &CacheStartResult{Segments: make([]Segment, 2)}, false},
		{OpCacheDrop, &CacheDropResult{Bytes: -1}, false},
		{OpMetaList, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a:1", State: MetaSilent, Silent: 5, Shards: []int{1, 0}}}}, true},
		{OpMetaList, &MetaListResult{Shards: 1}, true},
		{OpMetaList, &MetaListResult{}, false},
		{OpMetaList, &MetaListResult{Shards: layout.MaxShards + 1}, false},
		{OpMetaList, &MetaListResult{Shards: 1, Services: make([]MetaService, 1)}, false},
		{OpMetaList, &MetaListResult{Shards: 1, Services: slices.Repeat([]MetaService{{Address: "a"}}, MaxServices+1)}, false},
		{OpMetaList, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a", Shards: []int{2}}}}, false},
		{OpMetaList, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a", State: metaStateEnd}}}, false},
		{OpMetaList, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a", Silent: -1}}}, false},
		{OpMetaDrain, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a", Sessions: -1}}}, false},
		{OpMetaDrain, &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a", Program: strings.Repeat("p", MaxText+1)}}}, false},
		{OpQuotas, &QuotasResult{EOF: true}, true},
		{OpQuotas, &QuotasResult{}, false},
		{OpQuotas, &QuotasResult{Quotas: make([]QuotaInfo, 1)}, false},
		{OpQuotas, &QuotasResult{Quotas: []QuotaInfo{{Name: QuotaName{Kind: QuotaTree, ID: 1}, UsedBytes: -1}}}, true},
		{OpQuotas, &QuotasResult{Quotas: []QuotaInfo{{Name: QuotaName{Kind: QuotaTree, ID: 1}, Bytes: -1}}}, false},
		{OpQuotas, &QuotasResult{Quotas: []QuotaInfo{{Name: QuotaName{Kind: QuotaTree, ID: 1}, Path: strings.Repeat("p", MaxText+1)}}}, false},
		{OpStatFS, &StatFSResult{MaxFiles: -1}, false},
		{OpLayoutCommit, &LayoutCommitResult{Attrs: []Attr{{}, attr}}, true},
		{OpLayoutCommit, &LayoutCommitResult{Attrs: []Attr{{Size: -1}}}, false},
		{OpDevices, &DevicesResult{Devices: []DeviceInfo{{Device: Device{Addrs: []string{"server.example:2049"}}}}}, false},
		{OpDevices, &DevicesResult{Devices: []DeviceInfo{{}}}, true},
		{OpDevices, &DevicesResult{Devices: []DeviceInfo{{Device: Device{Addrs: []string{"192.0.2.1:2049", "192.0.2.1"}}}}}, false},
		{OpAddDevice, &AddDeviceResult{Info: DeviceInfo{Device: Device{Addrs: []string{"192.0.2.1:0"}}}}, false},
		{OpStatFS, &StatFSResult{Free: -1}, false},
	}
	for _, c := range cases {
		b, err := AppendReply(nil, Version, ReplyHeader{Sequence: 1}, c.result)
		_, raw, err := ParseReplyHeader(body(t, b, err))
		if err != nil {
			t.Fatal(err)
		}
		err = DecodeResult(c.op, raw, c.op.NewResult())
		if c.fine && err != nil || !c.fine && !errors.Is(err, ErrMalformed) {
			t.Errorf("%v %.80v: %v", c.op, c.result, err)
		}
	}
}

// extents is a layout with a data file that has them.
func extents(list ...Extent) *LayoutResult {
	return &LayoutResult{Segments: []Segment{{Len: 1, IOMode: layout.IOModeRead, Mirrors: [][]DataFile{{{Handle: []byte{1}, Extents: list}}}}}}
}

// Optional fields are all there or none.
func TestOptionalFields(t *testing.T) {
	const head, tail = "91 97 00 01 01 00 91 91", "00 00 92 c410 00000000000000000000000000000000 c0"
	const file = "c410 01000000000000000000000000000000 00 c401aa 01 02 00"
	want := DataFile{Device: layout.DeviceID{1}, Handle: []byte{0xaa}, UID: 1, GID: 2}
	for _, c := range []struct {
		name, file string
		generation uint64
		extents    []Extent
		fine       bool
	}{
		{"none", "96" + file, 0, nil, true},
		{"all, zero", "98" + file + "00 c0", 0, nil, true},
		{"no extent", "98" + file + "09 90", 9, nil, true},
		{"an extent", "98" + file + "09 91 94 00 cd0200 00 03", 9, []Extent{{Len: 512, State: layout.ExtentNone}}, true},
		{"one of two", "97" + file + "09", 0, nil, false},
		{"one too many", "99" + file + "09 c0 00", 0, nil, false},
		{"one too few", "95" + file[:len(file)-3], 0, nil, false},
		{"a short extent", "98" + file + "09 91 93 00 cd0200 00", 0, nil, false},
	} {
		var got LayoutResult
		err := DecodeResult(OpLayoutGet, unhex(t, "92"+head+c.file+tail), &got)
		if !c.fine {
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		want.Generation, want.Extents = c.generation, c.extents
		same(t, c.name, got.Segments[0].Mirrors[0][0], want)
	}
}

// Frames that break the connection: bytes that no encoder of ours makes.
func TestMalformed(t *testing.T) {
	callOf := func(args string) string { return "96 02 00 01 05 940000c0c2" + args }
	cases := []struct{ name, frame string }{
		{"empty array", "90"},
		{"credential of two", "96 02 00 01 05 920000 9101"},
		{"groups as bytes", "96 02 00 01 05 940000c40100c2 9101"},
		{"group beyond 32 bits", "96 02 00 01 05 94000091cf0000000100000000c2 9101"},
		{"groups without end", "96 02 00 01 05 940000ddffffffffc2 9101"},
		{"no word on the user's groups", "96 02 00 01 05 940000c0c0 9101"},
		{"no array", "c0"},
		{"map", "86 02 00"},
		{"array32 of 4 billion", "dd ffffffff 02"},
		{"wrong count", "95 02 00 01 05 920000"},
		{"wrong kind", "96 03 00 01 05 940000c0c2 9101"},
		{"slot too high", "96 02 cd0100 01 05 940000c0c2 9101"},
		{"slot negative", "96 02 ff 01 05 940000c0c2 9101"},
		{"sequence 0", "96 02 00 00 05 940000c0c2 9101"},
		{"op beyond 16 bits", "96 02 00 01 ce00010005 940000c0c2 9101"},
		{"credential as map", "96 02 00 01 05 840000c0c2 9101"},
		{"credential nil", "96 02 00 01 05 c0 9101"},
		{"uid beyond 32 bits", "96 02 00 01 05 94 cf0000000100000000 00 c0 c2 9101"},
		{"float", "96 02 00 01 05 94 ca00000000 00 c0 c2 9101"},
		{"cut", "96 02 00 01 05 94"},
	}
	for _, c := range cases {
		if _, _, err := ParseCall(unhex(t, c.frame), Version); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	refused := []struct{ name, args string }{
		{"nil", "c0"},
		{"empty array", "90"},
		{"credential of two", "96 02 00 01 05 920000 9101"},
		{"groups as bytes", "96 02 00 01 05 940000c40100c2 9101"},
		{"group beyond 32 bits", "96 02 00 01 05 94000091cf0000000100000000c2 9101"},
		{"groups without end", "96 02 00 01 05 940000ddffffffffc2 9101"},
		{"no word on the user's groups", "96 02 00 01 05 940000c0c0 9101"},
		{"empty map", "80"},
		{"map", "82 a6506172656e74 01 a44e616d65 a161"},
		{"short", "91 01"},
		{"long", "93 01 a161 00"},
		{"trailing", "92 01 a161 00"},
		{"name as bin", "92 01 c40161"},
		{"name nil", "92 01 c0"},
		{"name of 4 GiB", "92 01 db ffffffff 61"},
		{"id negative", "92 ff a161"},
		{"deep", "92" + strings.Repeat("91", 1<<16)},
	}
	for _, c := range refused {
		_, args, err := ParseCall(unhex(t, callOf(c.args)), Version)
		var refusal *Error
		if !errors.As(err, &refusal) || refusal.Status != StatusBadArgs || args != nil {
			t.Errorf("%s: %v, %v", c.name, args, err)
		}
	}
	if _, _, err := ParseCallBack(unhex(t, "94 04 01 06 93 05 00 01"), Version); !errors.Is(err, ErrMalformed) {
		t.Errorf("unknown callback: %v", err)
	}
	if _, _, err := ParseCallBack(unhex(t, "94 04 01 01 93 00 00 01"), Version); !errors.Is(err, ErrMalformed) {
		t.Errorf("callback for inode 0: %v", err)
	}
	for name, args := range map[string]struct {
		op   BackOp
		args any
	}{
		"size of inode 0":       {BackSizeQuery, &SizeQueryArgs{IDs: []layout.FileID{0}}},
		"too many sizes":        {BackSizeQuery, &SizeQueryArgs{IDs: slices.Repeat([]layout.FileID{1}, MaxBatch+1)}},
		"lease on inode 0":      {BackLeaseRecall, &LeaseRecallArgs{Items: []LeaseItem{{Lease: LeaseAttrs}}}},
		"lease of another kind": {BackLeaseRecall, &LeaseRecallArgs{Items: []LeaseItem{{ID: 1, Lease: leaseAll + 1}}}},
		"too many leases":       {BackLeaseRecall, &LeaseRecallArgs{Items: slices.Repeat([]LeaseItem{{ID: 1}}, MaxBatch+1)}},
		"places of inode 0":     {BackReserveRecall, &ReserveRecallArgs{Upto: 1}},
		"lock of inode 0":       {BackLockReady, &LockReadyArgs{}},
		"down for less":         {BackDeviceStates, &DeviceStatesArgs{Down: []DownDevice{{For: -1}}}},
		"too many devices":      {BackDeviceStates, &DeviceStatesArgs{Down: make([]DownDevice, MaxBatch+1)}},
		"fewer than none":       {BackLeaseShrink, &LeaseShrinkArgs{Keep: -1}},
	} {
		b, err := AppendCallBack(nil, Version, BackHeader{Op: args.op}, args.args)
		if _, _, err := ParseCallBack(body(t, b, err), Version); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := ParseReplyHeader(unhex(t, "96 03 00 01 02 db00001001"+strings.Repeat("61", MaxMessage+1)+"c0")); !errors.Is(err, ErrMalformed) {
		t.Errorf("long message: %v", err)
	}
	if k, err := FrameKind([]byte{0x93, 6, 0, 0}); !errors.Is(err, ErrMalformed) {
		t.Errorf("kind %v: %v", k, err)
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestIntegers(t *testing.T) {
	for _, c := range []struct {
		hex  string
		bits int
		want int64
		ok   bool
	}{
		{"00", 64, 0, true}, {"ff", 64, -1, true}, {"e0", 64, -32, true}, {"7f", 64, 127, true}, {"d080", 64, -128, true},
		{"d1ffff", 64, -1, true}, {"d2ffffffff", 64, -1, true}, {"d38000000000000000", 64, math.MinInt64, true},
		{"cf7fffffffffffffff", 64, math.MaxInt64, true}, {"cf8000000000000000", 64, 0, false},
		{"cfffffffffffffffff", 64, 0, false}, {"c0", 64, 0, false}, {"c3", 64, 0, false}, {"d3ff", 64, 0, false},
	} {
		cur := cursor{b: unhex(t, c.hex)}
		got := cur.int(c.bits)
		if err := cur.end(); got != c.want || (err == nil) != c.ok {
			t.Errorf("%s: %d, %v", c.hex, got, err)
		}
	}
	for _, c := range []struct {
		hex  string
		bits int
		want uint64
		ok   bool
	}{
		{"ccff", 8, 255, true}, {"cd0100", 8, 0, false}, {"ff", 64, 0, false}, {"d07f", 8, 127, true}, {"d3ffffffffffffffff", 64, 0, false},
		{"cfffffffffffffffff", 64, math.MaxUint64, true}, {"ceffffffff", 32, math.MaxUint32, true}, {"cf0000000100000000", 32, 0, false},
	} {
		cur := cursor{b: unhex(t, c.hex)}
		got := cur.uint(c.bits)
		if err := cur.end(); got != c.want || (err == nil) != c.ok {
			t.Errorf("%s: %d, %v", c.hex, got, err)
		}
	}
}

func TestHellos(t *testing.T) {
	for _, garbage := range []string{"", "90", "c0", "9100", "96 00 a4", "97 00 a46e667321 02 02", "4745 5420", "96 01 a477656674 01 01 90 90"} {
		if h, err := ParseHello(unhex(t, garbage), Spoken); !errors.Is(err, ErrMagic) || !errors.Is(err, ErrMalformed) {
			t.Errorf("hello %q: %+v, %v", garbage, h, err)
		}
	}
	// A later version may go on in any way.
	h, err := ParseHello(unhex(t, "9a 00 a477656674 63 64 c0 c0 c0 c0 c0 c0"), Spoken)
	if err != nil || h.Lowest != 99 || h.Highest != 100 {
		t.Errorf("later hello: %+v, %v", h, err)
	}
	if h, err := ParseHello(unhex(t, "97 00 a477656674 02 01 c0 c0"), Spoken); err == nil || errors.Is(err, ErrMagic) || h != nil {
		t.Errorf("hello with versions 2 to 1: %+v, %v", h, err)
	}
	w, err := ParseWelcome(unhex(t, "98 01 a477656674 63 cd03e9 a3776879 c0 c0 c0"), Spoken)
	if err != nil || w.Version != 99 || w.Status != StatusVersion || w.Message != "why" {
		t.Errorf("later welcome: %+v, %v", w, err)
	}
	good := Welcome{Magic: Magic, Version: Version, Session: SessionID{1}, Slots: MinSlots, Lease: int64(MinLease)}
	for name, change := range map[string]func(*Welcome){
		"no session":     func(w *Welcome) { w.Session = SessionID{} },
		"few slots":      func(w *Welcome) { w.Slots = MinSlots - 1 },
		"negative slots": func(w *Welcome) { w.Slots = -1 },
		"many slots":     func(w *Welcome) { w.Slots = MaxSlots + 1 },
		"no lease":       func(w *Welcome) { w.Lease = 0 },
		"long lease":     func(w *Welcome) { w.Lease = math.MaxInt64 },
		"many shards":    func(w *Welcome) { w.Ring.Owners = make([]int, layout.MaxShards+1); w.Ring.Services = []string{"a:1"} },
		"many services": func(w *Welcome) {
			w.Ring.Owners, w.Ring.Services = []int{0}, slices.Repeat([]string{"a:1"}, MaxServices+1)
		},
		"no such owner": func(w *Welcome) { w.Ring.Owners = []int{0} },
		"strange owner": func(w *Welcome) { w.Ring.Owners = []int{-2} },
		"no address":    func(w *Welcome) { w.Ring.Owners, w.Ring.Services = []int{0}, []string{""} },
		"long address": func(w *Welcome) {
			w.Ring.Owners, w.Ring.Services = []int{0}, []string{strings.Repeat("a", MaxAddress+1)}
		},
		"fine": func(*Welcome) {},
	} {
		w := good
		change(&w)
		b, err := AppendWelcome(nil, &w)
		if _, err = ParseWelcome(body(t, b, err), Spoken); (err == nil) != (name == "fine") {
			t.Errorf("%s: %v", name, err)
		}
	}
	hello := &Hello{Magic: Magic, Lowest: Version, Highest: Version, Client: ClientInfo{Host: strings.Repeat("h", MaxText+1)}}
	b, err := AppendHello(nil, hello)
	if _, err = ParseHello(body(t, b, err), Spoken); !errors.Is(err, ErrMalformed) {
		t.Errorf("long host name: %v", err)
	}
	hello.Client = ClientInfo{PID: -1}
	b, err = AppendHello(nil, hello)
	if _, err = ParseHello(body(t, b, err), Spoken); !errors.Is(err, ErrMalformed) {
		t.Errorf("negative process: %v", err)
	}
	for _, shard := range []int{-1, layout.MaxShards} {
		hello.Client, hello.Shard = ClientInfo{}, shard
		b, err = AppendHello(nil, hello)
		if _, err = ParseHello(body(t, b, err), Spoken); !errors.Is(err, ErrMalformed) {
			t.Errorf("shard %d: %v", shard, err)
		}
	}
}

func TestReadFrame(t *testing.T) {
	frame := func(n int) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(n))
		for i := range n {
			b = append(b, byte(i*7))
		}
		return b
	}
	for _, n := range []int{1, 2, firstRead - 1, firstRead, firstRead + 1, 5 * firstRead, MaxFrame} {
		b := frame(n)
		got, err := ReadFrame(iotest.HalfReader(bytes.NewReader(b)), nil, MaxFrame)
		if err != nil || !bytes.Equal(got, b[4:]) {
			t.Errorf("%d bytes: %d, %v", n, len(got), err)
		}
		if _, err := ReadFrame(bytes.NewReader(b), nil, n-1); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d bytes with room for %d: %v", n, n-1, err)
		}
		if _, err := ReadFrame(bytes.NewReader(b[:n+3]), nil, MaxFrame); err != io.ErrUnexpectedEOF {
			t.Errorf("%d bytes, cut: %v", n, err)
		}
	}
	if _, err := ReadFrame(bytes.NewReader(nil), nil, MaxFrame); err != io.EOF {
		t.Errorf("end: %v", err)
	}
	if _, err := ReadFrame(bytes.NewReader([]byte{0, 0}), nil, MaxFrame); err != io.ErrUnexpectedEOF {
		t.Errorf("end in length: %v", err)
	}
	if _, err := ReadFrame(bytes.NewReader(make([]byte, 8)), nil, MaxFrame); !errors.Is(err, ErrMalformed) {
		t.Errorf("length 0: %v", err)
	}
	// A promise of MaxFrame bytes is not worth MaxFrame bytes.
	promise := append(binary.BigEndian.AppendUint32(nil, MaxFrame), 1, 2, 3)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := ReadFrame(bytes.NewReader(promise), nil, MaxFrame); err != io.ErrUnexpectedEOF {
		t.Error(err)
	}
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > 4*firstRead {
		t.Errorf("%d bytes allocated for a frame of which 3 came", got)
	}
}

func TestFrameSize(t *testing.T) {
	names := make([]string, maxElements)
	for i := range names {
		names[i] = strings.Repeat("n", MaxXattrKey)
	}
	b, err := AppendReply([]byte{9}, Version, ReplyHeader{Sequence: 1}, &NamesResult{Names: names})
	if !errors.Is(err, ErrFrameSize) || !bytes.Equal(b, []byte{9}) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	b, err = AppendReply(nil, Version, ReplyHeader{Sequence: 1, Status: StatusInternal, Message: strings.Repeat("m", 2*MaxMessage)}, nil)
	h, _, err := ParseReplyHeader(body(t, b, err))
	if err != nil || len(h.Message) != MaxMessage {
		t.Errorf("long message: %d bytes, %v", len(h.Message), err)
	}
}

func TestConversions(t *testing.T) {
	s := &layout.Segment{
		Range: layout.Range{Off: 0, Len: layout.ToEOF}, IOMode: layout.IOModeRW, StripeUnit: 1 << 20, Flags: layout.FlagNoReadIO, StatsHint: 5,
		OnNamespaces: true,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{
			{Device: layout.DeviceID{1}, Efficiency: 2, Handles: [][]byte{{1, 2}}, Cred: layout.Credential{UID: 3, GID: 4}},
			{Device: layout.DeviceID{2}, Efficiency: 3, Handles: [][]byte{{3}}, Cred: layout.Credential{UID: 5, GID: 6}},
			{Device: layout.DeviceID{3}, Handles: [][]byte{{4}}, Generation: 7, Extents: []layout.Extent{
				{Len: 4096, Addr: 1 << 20}, {Off: 4096, Len: 4096, Addr: 1 << 30, State: layout.ExtentInvalid}}},
		}}},
	}
	w := SegmentOf(s)
	got, err := w.Layout()
	if err != nil {
		t.Fatal(err)
	}
	same(t, "segment", got, s)
	w.Mirrors[0] = w.Mirrors[0][:2]
	if got, err = w.Layout(); err != nil || got.OnNamespaces {
		t.Errorf("a segment on data servers is %+v, %v", got, err)
	}

	d := layout.Device{ID: layout.DeviceID{7}, Versions: []layout.Version{{Version: 3, RSize: 1 << 20, WSize: 1 << 19}}, Addrs: []layout.NetAddr{
		{NetID: "tcp", Addr: netip.MustParseAddrPort("192.0.2.1:2049")}, {NetID: "tcp6", Addr: netip.MustParseAddrPort("[2001:db8::2]:20049")}}}
	wd := DeviceOf(&d)
	gotDevice, err := wd.Layout()
	if err != nil {
		t.Fatal(err)
	}
	same(t, "device", gotDevice, d)

	d = layout.Device{ID: layout.DeviceID{8}, Addrs: d.Addrs, Namespace: &layout.Namespace{
		NQN: "nqn.2014-08.org.example:a", NSID: 3, NGUID: [16]byte{1}, EUI64: [8]byte{2}, UUID: [16]byte{4}, Block: 4096, Reserved: true}}
	wd = DeviceOf(&d)
	if gotDevice, err = wd.Layout(); err != nil {
		t.Fatal(err)
	}
	same(t, "namespace", gotDevice, d)
	for name, spoil := range map[string]func(*Namespace){
		"no name": func(n *Namespace) { n.NQN = "" }, "long name": func(n *Namespace) { n.NQN = strings.Repeat("n", layout.MaxNQN+1) },
		"namespace 0": func(n *Namespace) { n.NSID = 0 }, "all namespaces": func(n *Namespace) { n.NSID = math.MaxUint32 },
		"no identifier": func(n *Namespace) { n.NGUID, n.EUI64, n.UUID = [16]byte{}, [8]byte{}, [16]byte{} },
		"small blocks":  func(n *Namespace) { n.Block = 256 }, "odd blocks": func(n *Namespace) { n.Block = 1000 },
	} {
		bad := wd
		bad.Namespace = slices.Clone(wd.Namespace)
		spoil(&bad.Namespace[0])
		if _, err := bad.Layout(); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	wd.Namespace = make([]Namespace, 2)
	if _, err := wd.Layout(); err == nil {
		t.Error("two namespaces are taken")
	}

	for name, addrs := range map[string][]string{"none": nil, "name": {"host:1"}, "port 0": {"192.0.2.1:0"}, "many": make([]string, layout.MaxAddresses+1)} {
		if _, err := (&Device{Addrs: addrs}).Layout(); err == nil {
			t.Errorf("device with addresses %s is taken", name)
		}
	}
	mapped, err := (&Device{Addrs: []string{"[::ffff:192.0.2.1]:9"}}).Layout()
	if err != nil || mapped.Addrs[0].NetID != "tcp" || mapped.Addrs[0].Addr.String() != "192.0.2.1:9" {
		t.Errorf("mapped address: %+v, %v", mapped, err)
	}
}

func TestStatuses(t *testing.T) {
	last := StatusVersion - 1
	for _, row := range statuses {
		if row.status != last+1 {
			t.Errorf("%v is out of order", row.status)
		}
		last = row.status
		if row.status.String() != row.name || row.status.Errno() != row.errno || row.errno == 0 {
			t.Errorf("%d: %v, %v", row.status, row.status, row.status.Errno())
		}
	}
	if last != StatusTurnedBack {
		t.Errorf("the table ends at %v", last)
	}
	if s := Status(syscall.ENOENT); s.Errno() != syscall.ENOENT || s.String() != "no such file or directory" {
		t.Errorf("ENOENT: %v, %v", s, s.Errno())
	}
	if s := Status(5000); s.Errno() != syscall.EIO || s.String() != "status(5000)" {
		t.Errorf("unknown: %v, %v", s, s.Errno())
	}
	if err := error(&Error{Op: OpRename, Status: StatusInternal, Message: "m"}); err.Error() != "metadata service: RENAME: INTERNAL: m" {
		t.Error(err)
	}
}

// Every op has a whole row, and the calls that make, remove or rename survive a crash of the service.
func TestOps(t *testing.T) {
	for op := Op(1); op < opEnd; op++ {
		if !op.Valid() || op.String() == "" || op.NewArgs() == nil || op.NewResult() == nil {
			t.Errorf("op %d has no whole row", op)
		}
	}
	for _, op := range []Op{0, opEnd} {
		if op.Valid() || op.Once() || op.String() != fmt.Sprintf("op(%d)", op) {
			t.Errorf("%v is an op", op)
		}
	}
	for _, op := range []Op{OpSetAttr, OpCreate, OpMakeNode, OpLink, OpRemove, OpRename, OpSetXattr, OpRemoveXattr, OpTmpFile, OpReserve} {
		if !op.Once() {
			t.Errorf("%v may be executed twice", op)
		}
	}
	for op := BackOp(1); op < backOpEnd; op++ {
		if !op.Valid() || strings.HasPrefix(op.String(), "callback(") || op.NewArgs() == nil {
			t.Errorf("callback %d has no whole row", op)
		}
	}
}

// The credential of most callers costs nothing.
func TestCredentialDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	call := CallHeader{Slot: 1, Sequence: 2, Op: OpRenew, Cred: Cred{UID: 1000, GID: 100}}
	args := &Empty{}
	b, err := AppendCall(nil, call, args)
	frame := body(t, b, err)
	if n := testing.AllocsPerRun(100, func() {
		c := cursor{b: frame[5:]}
		if cred := c.cred(); c.err != nil || cred.UID != 1000 || cred.Groups != nil {
			t.Fatal(cred, c.err)
		}
	}); n != 0 {
		t.Errorf("%v allocations to read", n)
	}
	plain := testing.AllocsPerRun(100, func() { b, _ = AppendCall(b[:0], call, args) })
	call.Cred.Groups = make([]uint32, 100)
	b, _ = AppendCall(b[:0], call, args) // has room from now on
	if n := testing.AllocsPerRun(100, func() { b, _ = AppendCall(b[:0], call, args) }); n > plain {
		t.Errorf("%v allocations to write with groups, %v without", n, plain)
	}
}

func BenchmarkCall(b *testing.B) {
	args := &NameArgs{Parent: 12345, Name: "checkpoint-000123.safetensors"}
	reply := &AttrResult{Attr: Attr{ID: 99, Mode: 0o100644, Nlink: 1, Size: 1 << 40, Mtime: 1 << 60, Ctime: 1 << 60, Atime: 1 << 60, Btime: 1 << 60}}
	var buf, out []byte
	b.ReportAllocs()
	for b.Loop() {
		buf, _ = AppendCall(buf[:0], CallHeader{Slot: 1, Sequence: 2, Op: OpLookup}, args)
		if _, _, err := ParseCall(buf[4:], Version); err != nil {
			b.Fatal(err)
		}
		out, _ = AppendReply(out[:0], Version, ReplyHeader{Slot: 1, Sequence: 2}, reply)
		_, raw, err := ParseReplyHeader(out[4:])
		if err != nil {
			b.Fatal(err)
		}
		var res AttrResult
		if err := DecodeResult(OpGetAttr, raw, &res); err != nil {
			b.Fatal(err)
		}
	}
}
