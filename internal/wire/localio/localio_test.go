package localio

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

type message interface {
	Append([]byte) []byte
	Decode(*xdr.Decoder) error
}

func handle(b ...byte) nfs3.FileHandle {
	h, err := nfs3.NewFileHandle(b)
	if err != nil {
		panic(err)
	}
	return h
}

// count returns n bytes that count up from first.
func count(first byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = first + byte(i)
	}
	return b
}

var (
	someServer   = ID(count(0xa0, 16))
	someInstance = ID(count(0xb0, 16))
	someNonce    = Nonce(count(0xc0, 32))
	someProof    = Proof(count(0x10, 32))
)

const (
	serverHex   = "a0a1a2a3 a4a5a6a7 a8a9aaab acadaeaf -- server\n"
	instanceHex = "b0b1b2b3 b4b5b6b7 b8b9babb bcbdbebf -- instance\n"
	nonceHex    = "c0c1c2c3 c4c5c6c7 c8c9cacb cccdcecf d0d1d2d3 d4d5d6d7 d8d9dadb dcdddedf -- nonce\n"
	proofHex    = "10111213 14151617 18191a1b 1c1d1e1f 20212223 24252627 28292a2b 2c2d2e2f -- proof\n"
)

var goldens = []struct {
	name string
	msg  message
	hex  string
}{
	{"local", &Identity{Server: someServer, Local: true}, serverHex + `
		00000001 -- local
		00000000 -- reason`},
	{"not local", &Identity{Server: someServer, Reason: "why"}, serverHex + `
		00000000          -- local
		00000003 77687900 -- reason "why"`},
	{"PROBE", &ProbeArgs{someServer, someInstance, someProof}, serverHex + instanceHex + proofHex},
}

var packets = []struct {
	name string
	msg  Message
	hex  string
}{
	{"HELLO", &Hello{1, someServer}, "00000001 00000001 -- version\n" + serverHex},
	{"CHALLENGE", &Challenge{someServer, someInstance, someNonce}, "00000002" + serverHex + instanceHex + nonceHex},
	{"REVEAL", &Reveal{someNonce}, "00000003" + nonceHex},
	{"GRANTED", &Granted{Align: 512, Least: 4096}, `
		00000004
		00000000 00000200 -- align
		00000000 00001000 -- least
		00000000          -- memory
		00000000          -- readonly`},
	{"GRANTED without direct transfers", &Granted{Memory: true, ReadOnly: "quota"}, `
		00000004
		00000000 00000000
		00000000 00000000
		00000001
		00000005 71756f74 61000000`},
	{"GRANTED with the largest alignment", &Granted{Align: 1 << 62, Least: math.MaxInt64}, `
		00000004
		40000000 00000000
		7fffffff ffffffff
		00000000
		00000000`},
	{"REFUSED", &Refused{"no proof"}, "00000005 00000008 6e6f2070 726f6f66"},
	{"OPEN to write", &Open{7, handle(0xf1, 0xf2, 0xf3), 1000, 100, true}, `
		00000006
		00000007          -- id
		00000003 f1f2f300 -- file
		000003e8 00000064 -- uid, gid
		00000001          -- write`},
	{"OPEN to read", &Open{ID: math.MaxUint32, File: handle(1, 2, 3, 4), UID: math.MaxUint32}, `
		00000006
		ffffffff
		00000004 01020304
		ffffffff 00000000
		00000000`},
	{"OPENED", &Opened{ID: 7, Verifier: nfs3.WriteVerf{1, 2, 3, 4, 5, 6, 7, 8}}, "00000007 00000007 00000000 01020304 05060708"},
	{"OPENED stale", &Opened{ID: 7, Status: nfs3.ErrStale}, "00000007 00000007 00000046 00000000 00000000"},
	{"REVOKE", &Revoke{7}, "00000008 00000007"},
	{"CLOSED", &Closed{ID: 7}, "00000009 00000007 00000000"},
	{"CLOSED unstable", &Closed{7, true}, "00000009 00000007 00000001"},
}

func fresh(msg message) message { return reflect.New(reflect.TypeOf(msg).Elem()).Interface().(message) }

func TestGolden(t *testing.T) {
	for _, tt := range goldens {
		want := xdrtest.Hex(t, tt.hex)
		if got := tt.msg.Append(nil); !bytes.Equal(got, want) {
			t.Errorf("%s: encoded\n%x, want\n%x", tt.name, got, want)
		}
		got := fresh(tt.msg)
		d := xdr.NewDecoder(want)
		if err := got.Decode(&d); err != nil || !reflect.DeepEqual(got, tt.msg) || len(d.Rest()) > 0 {
			t.Errorf("%s: decoded %+v with %d bytes left, %v", tt.name, got, len(d.Rest()), err)
		}
		for n := range want {
			d := xdr.NewDecoder(want[:n])
			if err := fresh(tt.msg).Decode(&d); !errors.Is(err, xdr.ErrTruncated) {
				t.Errorf("%s: the first %d bytes give %v", tt.name, n, err)
			}
		}
	}
}

func TestGoldenPackets(t *testing.T) {
	for _, tt := range packets {
		want := xdrtest.Hex(t, tt.hex)
		if got := Append(nil, tt.msg); !bytes.Equal(got, want) {
			t.Errorf("%s: encoded\n%x, want\n%x", tt.name, got, want)
		}
		if got, err := Decode(want); err != nil || !reflect.DeepEqual(got, tt.msg) {
			t.Errorf("%s: decoded %+v, %v", tt.name, got, err)
		}
		for n := range want {
			if got, err := Decode(want[:n]); got != nil || !errors.Is(err, xdr.ErrTruncated) {
				t.Errorf("%s: the first %d bytes give %+v, %v", tt.name, n, got, err)
			}
		}
		for _, more := range [][]byte{{0}, {0, 0, 0, 0}, want} {
			if got, err := Decode(append(bytes.Clone(want), more...)); got != nil || !errors.Is(err, xdr.ErrInvalid) {
				t.Errorf("%s: with %x behind it gives %+v, %v", tt.name, more, got, err)
			}
		}
	}
}

func TestInvalid(t *testing.T) {
	granted := func(align, least int64) []byte { return Append(nil, &Granted{Align: align, Least: least}) }
	for _, tt := range []struct {
		name string
		in   []byte
		want error
	}{
		{"nothing", nil, xdr.ErrTruncated},
		{"type 0", xdrtest.Hex(t, "00000000"), xdr.ErrInvalid},
		{"type 10", xdrtest.Hex(t, "0000000a 00000007"), xdr.ErrInvalid},
		{"type -1", xdrtest.Hex(t, "ffffffff"), xdr.ErrInvalid},
		{"align is no power of two", granted(513, 4096), xdr.ErrInvalid},
		{"align is negative", granted(-512, 4096), xdr.ErrInvalid},
		{"align is the most negative", granted(math.MinInt64, 4096), xdr.ErrInvalid},
		{"least is below align", granted(4096, 512), xdr.ErrInvalid},
		{"least is negative", granted(0, -1), xdr.ErrInvalid},
		{"memory of 2", xdrtest.Hex(t, "00000004 00000000 00000200 00000000 00001000 00000002 00000000"), xdr.ErrInvalid},
		{"write of 2", xdrtest.Hex(t, "00000006 00000007 00000000 00000000 00000000 00000002"), xdr.ErrInvalid},
		{"file of 65 bytes", append(xdrtest.Hex(t, "00000006 00000007 00000041"), make([]byte, 68+12)...), xdr.ErrTooLong},
	} {
		if got, err := Decode(tt.in); got != nil || !errors.Is(err, tt.want) {
			t.Errorf("%s: %+v, %v", tt.name, got, err)
		}
	}
	d := xdr.NewDecoder(xdrtest.Hex(t, serverHex+"00000002 00000000"))
	if err := new(Identity).Decode(&d); !errors.Is(err, xdr.ErrInvalid) {
		t.Errorf("local of 2: %v", err)
	}
}

// TestReasons: a reason is what each message that has one ends with.
func TestReasons(t *testing.T) {
	identity := func(reason string) []byte { return (&Identity{Server: someServer, Reason: reason}).Append(nil) }
	decodeIdentity := func(b []byte) (string, error) {
		var m Identity
		d := xdr.NewDecoder(b)
		err := m.Decode(&d)
		return m.Reason, err
	}
	decodePacket := func(b []byte) (string, error) {
		m, err := Decode(b)
		switch m := m.(type) {
		case *Granted:
			return m.ReadOnly, err
		case *Refused:
			return m.Reason, err
		}
		return "", err
	}
	for _, tt := range []struct {
		name   string
		encode func(string) []byte
		decode func([]byte) (string, error)
	}{
		{"IDENTITY", identity, decodeIdentity},
		{"GRANTED", func(reason string) []byte { return Append(nil, &Granted{ReadOnly: reason}) }, decodePacket},
		{"REFUSED", func(reason string) []byte { return Append(nil, &Refused{reason}) }, decodePacket},
	} {
		for _, n := range []int{255, 256, 257, 1000} {
			long := string(count(0, n))
			if got, err := tt.decode(tt.encode(long)); got != long[:min(n, 256)] || err != nil {
				t.Errorf("%s: a reason of %d bytes became %q, %v", tt.name, n, got, err)
			}
		}
		start := bytes.TrimSuffix(tt.encode(""), []byte{0, 0, 0, 0})
		if _, err := tt.decode(xdr.AppendString(start, strings.Repeat("x", 257))); !errors.Is(err, xdr.ErrTooLong) {
			t.Errorf("%s: a reason of 257 bytes gives %v", tt.name, err)
		}
	}
}

func TestMaxMessage(t *testing.T) {
	reason := strings.Repeat("x", 256)
	largest := []Message{
		&Hello{math.MaxUint32, someServer},
		&Challenge{someServer, someInstance, someNonce},
		&Reveal{someNonce},
		&Granted{1 << 62, math.MaxInt64, true, reason},
		&Refused{reason},
		&Open{math.MaxUint32, handle(count(1, 64)...), math.MaxUint32, math.MaxUint32, true},
		&Opened{ID: math.MaxUint32, Status: math.MaxUint32},
		&Revoke{math.MaxUint32},
		&Closed{math.MaxUint32, true},
	}
	for i, m := range largest {
		b := Append(nil, m)
		if len(b) > MaxMessage {
			t.Errorf("%T has %d bytes, more than %d", m, len(b), MaxMessage)
		}
		if got, err := Decode(b); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("decoded %+v, want %+v, %v", got, m, err)
		}
		if m.kind() != uint32(i+1) {
			t.Errorf("%T is of type %d, want %d", m, m.kind(), i+1)
		}
	}
	if len(largest) != kindClosed {
		t.Errorf("%d of %d types", len(largest), kindClosed)
	}
}

func TestMakeProof(t *testing.T) {
	const proofInput = `
		77656674 2d6c6f63 616c2d31 -- "weft-local-1"
		01020304 05060708 090a0b0c 0d0e0f10 11121314 15161718 191a1b1c 1d1e1f20 -- the broker's nonce
		41424344 45464748 494a4b4c 4d4e4f50 51525354 55565758 595a5b5c 5d5e5f60 -- the client's nonce
	` + serverHex + instanceHex
	broker, client := Nonce(count(0x01, 32)), Nonce(count(0x41, 32))
	channel := count(0xe0, 32)
	if got, want := MakeProof(broker, client, someServer, someInstance, nil), sha256.Sum256(xdrtest.Hex(t, proofInput)); got != want {
		t.Errorf("without TLS: %x, want %x", got, want)
	}
	got := MakeProof(broker, client, someServer, someInstance, channel)
	want := sha256.Sum256(xdrtest.Hex(t, proofInput+`
		e0e1e2e3 e4e5e6e7 e8e9eaeb ecedeeef f0f1f2f3 f4f5f6f7 f8f9fafb fcfdfeff -- channel`))
	if got != want {
		t.Errorf("with TLS: %x, want %x", got, want)
	}

	otherNonce, otherID, otherChannel := broker, someServer, bytes.Clone(channel)
	otherNonce[31]++
	otherID[15]++
	otherChannel[31]++
	seen := map[Proof]string{got: "the proof itself"}
	for _, tt := range []struct {
		name  string
		proof Proof
	}{
		{"broker's nonce", MakeProof(otherNonce, client, someServer, someInstance, channel)},
		{"client's nonce", MakeProof(broker, otherNonce, someServer, someInstance, channel)},
		{"nonces swapped", MakeProof(client, broker, someServer, someInstance, channel)},
		{"server", MakeProof(broker, client, otherID, someInstance, channel)},
		{"instance", MakeProof(broker, client, someServer, otherID, channel)},
		{"server and instance swapped", MakeProof(broker, client, someInstance, someServer, channel)},
		{"channel", MakeProof(broker, client, someServer, someInstance, otherChannel)},
		{"no channel", MakeProof(broker, client, someServer, someInstance, nil)},
	} {
		if same, ok := seen[tt.proof]; ok {
			t.Errorf("%s: as %s", tt.name, same)
		}
		seen[tt.proof] = tt.name
	}
}

func TestSocket(t *testing.T) {
	const want = "/run/weft/localio/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
	if got := Socket(Dir, someServer); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// FuzzDecode decodes any packet. What decodes must encode to as many bytes, and these decode to the same.
func FuzzDecode(f *testing.F) {
	for _, tt := range packets {
		f.Add(xdrtest.Hex(f, tt.hex))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		got, err := Decode(input)
		if err != nil {
			return
		}
		b := Append(nil, got)
		if len(b) != len(input) || len(b) > MaxMessage {
			t.Fatalf("took %d bytes for %+v, which encodes to %d", len(input), got, len(b))
		}
		again, err := Decode(b)
		if err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("decoded %+v, and after encoding it %+v, %v", got, again, err)
		}
	})
}

// fuzz does so for a message of the RPC program, which other bytes may follow.
func fuzz(f *testing.F, msg message) {
	for _, tt := range goldens {
		if reflect.TypeOf(tt.msg) == reflect.TypeOf(msg) {
			f.Add(xdrtest.Hex(f, tt.hex))
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		got := fresh(msg)
		d := xdr.NewDecoder(input)
		if got.Decode(&d) != nil {
			return
		}
		b := got.Append(nil)
		if len(b) != d.Offset() {
			t.Fatalf("took %d bytes for %+v, which encodes to %d", d.Offset(), got, len(b))
		}
		again := fresh(msg)
		d = xdr.NewDecoder(b)
		if err := again.Decode(&d); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("decoded %+v, and after encoding it %+v, %v", got, again, err)
		}
	})
}

func FuzzIdentity(f *testing.F)  { fuzz(f, new(Identity)) }
func FuzzProbeArgs(f *testing.F) { fuzz(f, new(ProbeArgs)) }
