package peerrpc

import (
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// frames are one of each kind, and of each call, with what they look like.
var frames = []struct {
	name  string
	frame any
	want  string
}{
	{"hello", &Hello{Magic: Magic, Lowest: 1, Highest: 2, From: ID{1}, To: ID{2}, Nonce: Nonce{3}},
		"00000044" + "97 00 a9776566742d70656572 01 02 c410 01000000000000000000000000000000 c410 02000000000000000000000000000000 c410 03000000000000000000000000000000"},
	{"challenge", &Challenge{Status: StatusVersion, Message: "no", Version: 2, Nonce: Nonce{3}, Proof: [32]byte{4}},
		"0000003b" + "96 01 03 a26e6f 02 c410 03000000000000000000000000000000 c420 04" + strings.Repeat("00", 31)},
	{"proof", &Proof{Proof: [32]byte{5}}, "00000024" + "92 02 c420 05" + strings.Repeat("00", 31)},
	{"hold", &Call{Number: 300, Op: OpHold, Shard: 2, Wait: 5,
		Hold: &Hold{Shard: 3, Row: []byte{8}, To: 6, Change: 9, Oldest: 7, Items: []HoldItem{{ID: 4096, Lease: metarpc.LeaseAttrs, Last: true}}}},
		"00000019" + "98 03 cd012c 01 02 05 96 03 c40108 06 09 07 91 93 cd1000 01 c3 c0 c0"},
	{"settle", &Call{Number: 1, Op: OpSettle, Shard: 2, Settle: &Settle{Shard: 3, Row: []byte{8}, Oldest: 7, Changes: []Settled{{Change: 9, To: 6, Committed: true}}}},
		"00000013" + "98 03 01 02 02 00 c0 94 03 c40108 07 91 93 09 06 c3 c0"},
	{"look", &Call{Number: 1, Op: OpLook}, "00000009" + "98 03 01 03 00 00 c0 c0 c0"},
	{"lock waits", &Call{Number: 1, Op: OpLockWaits, Shard: 2, After: &LockWait{Number: 5, Holder: LockOwner{Client: [16]byte{1}, Number: 3}}},
		"00000032" + "98 03 01 04 02 00 c0 c0 93 05 92 c410 00000000000000000000000000000000 00 92 c410 01000000000000000000000000000000 03"},
	{"reply", &Reply{Number: 1, Status: StatusNotHere, Message: "m", State: 3, Row: []byte{7}}, "0000000b" + "97 04 01 02 a16d 03 c40107 c0"},
	{"waits", &Reply{Number: 1, Waits: []LockWait{{Number: 5, Waiter: LockOwner{Client: [16]byte{1}, Number: 2}, Holder: LockOwner{Number: 3}}}},
		"00000032" + "97 04 01 00 a0 00 c0 91 93 05 92 c410 01000000000000000000000000000000 02 92 c410 00000000000000000000000000000000 03"},
}

func parseAny(frame []byte) (any, error) {
	if len(frame) < 2 {
		return nil, malformed("short")
	}
	switch Kind(frame[1]) {
	case KindHello:
		return ParseHello(frame)
	case KindChallenge:
		return ParseChallenge(frame)
	case KindProof:
		return ParseProof(frame)
	case KindCall:
		return ParseCall(frame, Version)
	}
	return ParseReply(frame, Version)
}

func TestGolden(t *testing.T) {
	for _, f := range frames {
		b, err := Append([]byte("x"), Version, f.frame)
		if err != nil || b[0] != 'x' {
			t.Fatal(f.name, err)
		}
		if got, want := hex.EncodeToString(b[1:]), strings.ReplaceAll(f.want, " ", ""); got != want {
			t.Errorf("%s:\n%s, want\n%s", f.name, got, want)
		}
		back, err := parseAny(b[5:])
		if err != nil || !reflect.DeepEqual(back, f.frame) {
			t.Errorf("%s: %+v, %v; want %+v", f.name, back, err, f.frame)
		}
		if IsHello(b[5:]) != (f.name == "hello") {
			t.Errorf("%s: is a hello: %v", f.name, IsHello(b[5:]))
		}
		for cut := range b[5:] {
			if back, err := parseAny(b[5 : 5+cut]); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%s cut to %d bytes: %+v, %v", f.name, cut, back, err)
			}
		}
	}
}

// A client's hello is none of a peer, and the other way round.
func TestStrangers(t *testing.T) {
	client, err := metarpc.AppendHello(nil, &metarpc.Hello{Magic: metarpc.Magic, Lowest: 1, Highest: 2})
	if err != nil || IsHello(client[4:]) {
		t.Error("a client's hello looks like a peer's", err)
	}
	if _, err := ParseHello(client[4:]); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	peer, err := Append(nil, Version, &Hello{Magic: Magic})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := metarpc.ParseHello(peer[4:], metarpc.Spoken); !errors.Is(err, metarpc.ErrMagic) {
		t.Error(err)
	}
}

func TestRefusedCalls(t *testing.T) {
	for name, c := range map[string]Call{
		"no op":             {},
		"later op":          {Op: opEnd},
		"hold of nothing":   {Op: OpHold},
		"settle as hold":    {Op: OpHold, Settle: &Settle{}},
		"settle and hold":   {Op: OpHold, Settle: &Settle{}, Hold: &Hold{}},
		"look after a wait": {Op: OpLook, After: &LockWait{}},
		"look with hold":    {Op: OpLook, Hold: &Hold{}},
		"negative shard":    {Op: OpHold, Shard: -1, Hold: &Hold{}},
		"large shard":       {Op: OpSettle, Shard: layout.MaxShards, Settle: &Settle{}},
		"asker's shard":     {Op: OpSettle, Settle: &Settle{Shard: layout.MaxShards}},
		"holder's shard":    {Op: OpHold, Hold: &Hold{Shard: -1}},
		"many changes":      {Op: OpSettle, Settle: &Settle{Changes: make([]Settled, MaxItems+1)}},
		"inode 0":           {Op: OpHold, Hold: &Hold{Items: []HoldItem{{}}}},
		"many inodes":       {Op: OpHold, Hold: &Hold{Items: make([]HoldItem, MaxItems+1)}},
		"waits for ever":    {Op: OpLook, Wait: int64(MaxWait) + 1},
		"waits for no time": {Op: OpLook, Wait: -1},
	} {
		op := c.Op
		if !op.In(Version) { // nor can it be made
			c.Op = OpLook
		}
		b, err := Append(nil, Version, &c)
		if err != nil {
			t.Fatal(name, err)
		}
		b[7] = byte(op)
		if got, err := ParseCall(b[4:], Version); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := Append(nil, Version, &Reply{Row: make([]byte, MaxFrame)}); err == nil {
		t.Error("a frame that is too large")
	}
}

// What a version lacks is neither sent nor taken in it, and who speaks no version in common hears which side is too old.
func TestVersions(t *testing.T) {
	newOps[OpLockWaits] = Version
	defer delete(newOps, OpLockWaits)
	call := &Call{Number: 1, Op: OpLockWaits}
	if _, err := Append(nil, Version-1, call); err == nil {
		t.Error("a call that the callee does not know was made")
	}
	b, err := Append(nil, Version, call)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseCall(b[4:], Version); err != nil {
		t.Error(err)
	}
	if _, err := ParseCall(b[4:], Version-1); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	longer := append(b[4:], 0xc0)
	longer[0]++
	if _, err := ParseCall(longer, Version); !errors.Is(err, ErrMalformed) {
		t.Error("a call with a field that no version has:", err)
	}
	// All others have a form in any version.
	for _, f := range frames {
		if c, ok := f.frame.(*Call); ok && c.Op == OpLockWaits {
			continue
		}
		if _, err := Append(nil, Version-1, f.frame); err != nil {
			t.Error(f.name, err)
		}
	}
	for want, sides := range map[string][2]metarpc.Versions{
		"calls speaks version 2 of the protocol between services, the one that is called versions 3 to 4: upgrade weftd of the one that calls":     {{Lowest: 2, Highest: 2}, {Lowest: 3, Highest: 4}},
		"calls speaks versions 3 to 4 of the protocol between services, the one that is called version 2: upgrade weftd of the one that is called": {{Lowest: 3, Highest: 4}, {Lowest: 2, Highest: 2}},
	} {
		if got := Mismatch(sides[0], sides[1]); !strings.HasSuffix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if h, err := Append(nil, Version, &Hello{Magic: Magic, Lowest: 3, Highest: 2}); err != nil {
		t.Error(err)
	} else if _, err := ParseHello(h[4:]); !errors.Is(err, ErrMalformed) {
		t.Error("versions 3 to 2:", err)
	}
}

func TestProof(t *testing.T) {
	h := &Hello{From: ID{1}, To: ID{2}, Nonce: Nonce{3}}
	first := ProofOf([16]byte{9}, CallerSide, h, Nonce{4})
	if again := ProofOf([16]byte{9}, CallerSide, h, Nonce{4}); again != first {
		t.Error("proofs of the same differ")
	}
	for name, other := range map[string][32]byte{
		"side":      ProofOf([16]byte{9}, CalleeSide, h, Nonce{4}),
		"token":     ProofOf([16]byte{8}, CallerSide, h, Nonce{4}),
		"challenge": ProofOf([16]byte{9}, CallerSide, h, Nonce{5}),
		"nonce":     ProofOf([16]byte{9}, CallerSide, &Hello{From: ID{1}, To: ID{2}}, Nonce{4}),
		"caller":    ProofOf([16]byte{9}, CallerSide, &Hello{To: ID{2}, Nonce: Nonce{3}}, Nonce{4}),
		"callee":    ProofOf([16]byte{9}, CallerSide, &Hello{From: ID{1}, Nonce: Nonce{3}}, Nonce{4}),
	} {
		if other == first {
			t.Error("a proof does not depend on the", name)
		}
	}
}

// FuzzParse: whatever is parsed comes out the same when it is sent on.
func FuzzParse(f *testing.F) {
	for _, fr := range frames {
		b, err := Append(nil, Version, fr.frame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[4:])
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		v, err := parseAny(frame)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		b, err := Append(nil, Version, v)
		if err != nil {
			return // it had more elements than are kept, or is larger now
		}
		again, err := parseAny(b[4:])
		if err != nil || !reflect.DeepEqual(again, v) {
			t.Fatalf("%+v became %+v, %v", v, again, err)
		}
	})
}
