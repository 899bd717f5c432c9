package metarpc

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/weftfs/weft/layout"
)

// again encodes what a Parse function returned, parses that, and wants the same: so nothing is taken that cannot be said.
func again[T any](t *testing.T, v T, frame []byte, err error, parse func([]byte) (T, error)) {
	t.Helper()
	if err != nil {
		t.Fatalf("%+v does not encode: %v", v, err)
	}
	got, err := parse(frame[prefixLen:])
	if err != nil {
		t.Fatalf("%+v does not parse again: %v", v, err)
	}
	if !reflect.DeepEqual(got, v) {
		t.Fatalf("got %+v, want %+v", got, v)
	}
}

// typed fails unless err says that the peer is at fault.
func typed(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, ErrMalformed) {
		t.Fatalf("error of another kind: %v", err)
	}
}

func seed(f *testing.F, frame []byte, err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(frame[prefixLen:])
}

func FuzzParseHello(f *testing.F) {
	b, err := AppendHello(nil, &Hello{Magic: Magic, Lowest: Version, Highest: Version, Client: ClientInfo{ID: [16]byte{1}, Host: "h", PID: 3, Program: "weft", Mount: "/m"}})
	seed(f, b, err)
	f.Fuzz(func(t *testing.T, frame []byte) {
		h, err := ParseHello(frame, Spoken)
		if err != nil {
			typed(t, err)
			return
		}
		b, err := AppendHello(nil, h)
		again(t, h, b, err, func(frame []byte) (*Hello, error) { return ParseHello(frame, Spoken) })
	})
}

func FuzzParseWelcome(f *testing.F) {
	b, err := AppendWelcome(nil, &Welcome{Magic: Magic, Version: Version, Session: SessionID{1}, Slots: 64, Lease: 30e9})
	seed(f, b, err)
	b, err = AppendWelcome(nil, &Welcome{Magic: Magic, Version: Version, Status: StatusBadSession, Message: "m"})
	seed(f, b, err)
	f.Fuzz(func(t *testing.T, frame []byte) {
		w, err := ParseWelcome(frame, Spoken)
		if err != nil {
			typed(t, err)
			return
		}
		b, err := AppendWelcome(nil, w)
		again(t, w, b, err, func(frame []byte) (*Welcome, error) { return ParseWelcome(frame, Spoken) })
	})
}

type call struct {
	h    CallHeader
	args any
}

func parseCall(frame []byte) (call, error) {
	h, args, err := ParseCall(frame, Version)
	return call{h, args}, err
}

func FuzzParseCall(f *testing.F) {
	for _, c := range []call{
		{CallHeader{Slot: 1, Sequence: 2, Op: OpRename}, &RenameArgs{OldParent: 1, OldName: "a", NewParent: 1, NewName: "b"}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpSetXattr}, &XattrArgs{ID: 1, Name: "user.a", Value: []byte("v")}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpLayoutCommit}, &LayoutCommitArgs{Reports: []SizeReport{{ID: 1, End: 2, Mtime: 3}, {ID: 4, Reserved: []Place{{Number: 5, Len: 6, Mtime: 7}}}, written(0, 512)}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpClose}, &CloseArgs{IDs: []layout.FileID{1, 2}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpSetAttr}, &SetAttrArgs{ID: 1, Mask: SetSize, Size: 7}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpMakeNode}, &MakeNodeArgs{Parent: 1, Name: "l", Mode: 0o120777, Target: "t"}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpCreate, Cred: Cred{UID: 1, Groups: []uint32{2, 3}}}, &CreateArgs{Parent: 1, Name: "f", Umask: 0o22, Access: AccessRead}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpCreate}, &CreateArgs{Parent: 1, Name: "f", Access: AccessWrite, Layout: true, Near: []layout.DeviceID{{1}}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpTmpFile, Cred: Cred{ByUID: true}}, &TmpFileArgs{Parent: 1, Mode: 0o600}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpLock}, &LockArgs{ID: 1, Owner: 2, Type: LockWrite, End: 9, Wait: true}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpReserve}, &ReserveArgs{ID: 1, Len: 9, Ended: []uint64{1}, GivenUp: []uint64{2}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpLayoutStats}, &LayoutStatsArgs{Span: 9, Devices: []DeviceStats{{Reads: IOStats{Ops: 1, Bytes: 2, Time: 3}}}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpReportDevices}, &ReportDevicesArgs{Devices: []layout.DeviceID{{1}}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpParent}, &ParentArgs{ID: 2, Top: 1}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpVerify}, &VerifyArgs{ID: 1, Len: 1}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpLayoutMove}, &LayoutMoveArgs{ID: 1, Device: layout.DeviceID{1}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpCacheStart}, &CacheStartArgs{ID: 1, Devices: []layout.DeviceID{{2}}, Limit: 3, Run: 4}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpCacheDone}, &CacheDoneArgs{ID: 1, Copy: CopyRef{Handle: []byte{2}}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpCacheDrop}, &CacheDropArgs{ID: 1, Device: layout.DeviceID{2}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpMetaDrain}, &MetaDrainArgs{Address: "a:1", Cancel: true}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpQuotaSet}, &QuotaSetArgs{Name: QuotaName{Kind: QuotaUser, ID: 1}, Bytes: 2, Files: QuotaKeep}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpQuotas}, &QuotasArgs{After: true}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpOpen}, &OpenArgs{ID: 1, Access: AccessWrite}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpOpen}, &OpenArgs{ID: 1, Reclaim: true, Pinned: CopyRef{Device: layout.DeviceID{1}, Handle: []byte{2}}}},
		{CallHeader{Slot: 1, Sequence: 2, Op: OpLayoutGet}, &LayoutGetArgs{ID: 1, IOMode: layout.IOModeRead, Len: 1, Near: []layout.DeviceID{{1}}, Pin: PinAny}},
	} {
		b, err := AppendCall(nil, c.h, c.args)
		seed(f, b, err)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		c, err := parseCall(frame)
		if refusal := (*Error)(nil); errors.As(err, &refusal) {
			if refusal.Status == StatusOK || c.args != nil || c.h.Sequence == 0 {
				t.Fatalf("refused %+v with %v", c, refusal)
			}
			return
		}
		if err != nil {
			typed(t, err)
			return
		}
		b, err := AppendCall(nil, c.h, c.args)
		again(t, c, b, err, parseCall)
	})
}

func FuzzParseReply(f *testing.F) {
	attr := Attr{ID: 1, Mode: 0o100644, Size: 5}
	for op, result := range map[Op]any{
		OpGetAttr: &AttrResult{Attr: attr, Lease: LeaseAttrs},
		OpLookup:  &LookupResult{Attr: attr, Lease: LeaseAttrs, Names: LeaseNames},
		OpCreate: &CreateResult{Attr: attr, Created: true, Lease: LeaseAttrs, Granted: true, Segments: []Segment{
			{Len: 1, IOMode: layout.IOModeRW, Mirrors: [][]DataFile{{{Handle: []byte{1}}}}}}},
		OpRemove:   &RemoveResult{At: 7},
		OpParent:   &ParentResult{Parent: 7},
		OpTestLock: &LockResult{Type: LockRead, End: 5, Host: "h"},
		OpReserve:  &ReserveResult{Off: 5, Mtime: 6, Number: 7},
		OpReadDir:  &ReadDirResult{Entries: []DirEntry{{Name: "a", Cookie: 17, Attr: attr}}, EOF: true},
		OpLayoutGet: &LayoutResult{Segments: []Segment{{Len: 1, IOMode: 1, Mirrors: [][]DataFile{{{Handle: []byte{1}}},
			{{Handle: []byte{2}, Generation: 3, Extents: []Extent{{Len: 4096, Addr: 512, State: layout.ExtentInvalid}}}}}}}},
		OpDevices: &DevicesResult{Devices: []DeviceInfo{{Device: Device{Addrs: []string{"192.0.2.1:1"}}, URL: "nfs://h/e"},
			{Device: Device{Addrs: []string{"192.0.2.1:2"}, Namespace: []Namespace{{NQN: "n", NSID: 1, UUID: [16]byte{1}, Block: 512}}}}}},
		OpListXattr:      &NamesResult{Names: []string{"user.a"}},
		OpCacheStart:     &CacheStartResult{Size: 1, Segments: []Segment{{Len: 1, IOMode: layout.IOModeRW, Mirrors: [][]DataFile{{{Handle: []byte{1}}}}}}},
		OpCacheDrop:      &CacheDropResult{Caches: 1, Bytes: 2},
		OpMetaList:       &MetaListResult{Shards: 2, Services: []MetaService{{Address: "a:1", State: MetaDraining, Shards: []int{1}, Sessions: 2}}},
		OpQuotas:         &QuotasResult{Quotas: []QuotaInfo{{Name: QuotaName{Kind: QuotaTree, ID: 1}, Path: "/a", Bytes: 2}}},
		OpDescribeLayout: &Described{Mirrors: [][]DescribedServer{{{Address: "a", DataFile: "f"}}}, Caches: []DescribedCache{{Bytes: 1}}},
		OpStatus:         &StatusResult{Waiting: []WaitingFiles{{Files: 3}}, Sessions: []SessionInfo{{Address: "a"}}, HeldUp: []HeldUp{{ID: 1, What: "w", Since: 2, Hosts: []string{"h"}}}},
	} {
		b, err := AppendReply(nil, Version, ReplyHeader{Slot: 1, Sequence: 2}, result)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint16(op), b[prefixLen:])
	}
	f.Fuzz(func(t *testing.T, number uint16, frame []byte) {
		h, raw, err := ParseReplyHeader(frame)
		if err != nil {
			typed(t, err)
			return
		}
		op := Op(number)
		if !op.Valid() {
			return
		}
		result := op.NewResult()
		if err := DecodeResult(op, raw, result); err != nil {
			typed(t, err)
			return
		}
		b, err := AppendReply(nil, Version, h, result)
		again(t, result, b, err, func(frame []byte) (any, error) {
			_, raw, err := ParseReplyHeader(frame)
			if err != nil {
				return nil, err
			}
			v := op.NewResult()
			return v, DecodeResult(op, raw, v)
		})
		b, err = AppendReply(nil, Lowest, h, result)
		if err == nil {
			_, raw, err = ParseReplyHeader(b[prefixLen:])
		}
		if err == nil {
			err = DecodeResult(op, raw, op.NewResult())
		}
		if err != nil {
			t.Fatalf("%+v does not parse in version %d: %v", result, Lowest, err)
		}
	})
}

type callBack struct {
	h    BackHeader
	args any
}

func parseCallBack(frame []byte) (callBack, error) {
	h, args, err := ParseCallBack(frame, Version)
	return callBack{h, args}, err
}

func FuzzParseCallBack(f *testing.F) {
	b, err := AppendCallBack(nil, Version, BackHeader{Number: 1, Op: BackLayoutRecall}, &LayoutRecallArgs{ID: 1, Off: 0, Len: layout.ToEOF})
	seed(f, b, err)
	for _, c := range []callBack{
		{BackHeader{Number: 1, Op: BackLeaseRecall}, &LeaseRecallArgs{Items: []LeaseItem{{ID: 1, Lease: LeaseAttrs | LeaseData}}}},
		{BackHeader{Number: 1, Op: BackSizeQuery}, &SizeQueryArgs{IDs: []layout.FileID{1, 2}}},
		{BackHeader{Number: 1, Op: BackLockReady}, &LockReadyArgs{ID: 1, Owner: 2}},
		{BackHeader{Number: 1, Op: BackLeaseShrink}, &LeaseShrinkArgs{Keep: 3}},
		{BackHeader{Number: 1, Op: BackDeviceStates}, &DeviceStatesArgs{Epoch: 1, Down: []DownDevice{{Silent: true, For: 2}}}},
		{BackHeader{Number: 1, Op: BackReserveRecall}, &ReserveRecallArgs{ID: 1, Upto: 9}},
	} {
		b, err := AppendCallBack(nil, Version, c.h, c.args)
		seed(f, b, err)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		c, err := parseCallBack(frame)
		if err != nil {
			typed(t, err)
			return
		}
		b, err := AppendCallBack(nil, Version, c.h, c.args)
		again(t, c, b, err, parseCallBack)
	})
}

func FuzzParseBackReply(f *testing.F) {
	b, err := AppendBackReply(nil, BackReply{Number: 1, Status: StatusInternal})
	seed(f, b, err)
	f.Fuzz(func(t *testing.T, frame []byte) {
		r, err := ParseBackReply(frame)
		if err != nil {
			typed(t, err)
			return
		}
		b, err := AppendBackReply(nil, r)
		again(t, r, b, err, ParseBackReply)
	})
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 0x90})
	f.Add([]byte{0, 0x40, 0, 0, 0x90})
	f.Fuzz(func(t *testing.T, stream []byte) {
		r := bytes.NewReader(stream)
		for {
			frame, err := ReadFrame(r, nil, MaxFrame)
			if err != nil {
				return
			}
			if len(frame) == 0 {
				t.Fatal("empty frame")
			}
			if _, err := FrameKind(frame); err != nil {
				typed(t, err)
			}
		}
	})
}
