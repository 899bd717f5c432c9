package nvmeauth

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

// codec is what the tests of messages want of each kind.
type codec interface {
	append([]byte) []byte
	decode([]byte) *Failure
}

type success2 struct{ tid uint16 }

func (m *success2) append(b []byte) []byte { return appendSuccess2(b, m.tid) }

func (m *success2) decode(b []byte) *Failure {
	_, tid, f := parseHeader(b)
	if f == nil && len(b) < fixedSize {
		f = badSize(kindSuccess2, len(b))
	}
	m.tid = tid
	return f
}

type failure struct {
	kind   kind
	tid    uint16
	reason Reason
}

func (m *failure) append(b []byte) []byte { return appendFailure(b, m.kind, m.tid, m.reason) }

func (m *failure) decode(b []byte) (f *Failure) {
	if m.kind, m.tid, f = parseHeader(b); f == nil {
		m.reason, f = decodeFailure(b)
	}
	return f
}

const (
	hex32 = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	hex48 = hex32 + "202122232425262728292a2b2c2d2e2f"
)

var golden = []struct {
	name string
	kind kind
	m    codec
	hex  string
	// exact: a byte more than the message is a mistake
	exact bool
}{
	{"negotiate", kindNegotiate, &negotiate{tid: 0x1234, secure: 2, hashes: []Hash{SHA256, SHA384, SHA512}, groups: []Group{FFDHE8192, NoGroup}}, `
		00 00 0000                        -- AUTH_TYPE, AUTH_ID
		3412                              -- T_ID
		02 01                             -- SC_C, NAPD
		01 00 03 02                       -- AUTHID, HALEN, DHLEN
		01 02 03 000000000000000000000000000000000000000000000000000000
		05 00    00000000000000000000000000000000000000000000000000000000
	`, true},
	{"challenge", kindChallenge, &challenge{
		tid: 0x1234, hash: SHA256, group: FFDHE2048, seq: 0x55667788, challenge: count(32), public: []byte{0xAA, 0xBB, 0xCC},
	}, `
		01 01 0000 3412
		20 00                             -- HL
		01 01 0300                        -- HASHID, DHGID, DHVLEN
		88776655                          -- S1
		` + hex32 + `
		aabbcc                            -- g^y
	`, false},
	{"challenge without a group", kindChallenge, &challenge{
		tid: 0xFFFF, hash: SHA384, seq: 1, challenge: count(48), public: []byte{},
	}, `
		01 01 0000 ffff 30 00 02 00 0000 01000000
		` + hex48, false},
	{"reply", kindReply, &reply{
		tid: 0x1234, response: count(32), challenge: bytes.Repeat([]byte{0xC2}, 32), seq: 0x55667788, public: []byte{0xAA, 0xBB, 0xCC},
	}, `
		01 02 0000 3412
		20 00                             -- HL
		01 00 0300                        -- CVALID, DHVLEN
		88776655                          -- S2
		` + hex32 + `
		c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2
		aabbcc                            -- g^x
	`, true},
	{"reply without a challenge", kindReply, &reply{tid: 0x1234, response: count(48), seq: 9, public: []byte{}}, `
		01 02 0000 3412 30 00 00 00 0000 09000000
		` + hex48 + `
		000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000
	`, true},
	{"success1", kindSuccess1, &success1{tid: 0x1234, hashSize: 32, response: count(32)}, `
		01 03 0000 3412
		20 00                             -- HL
		01 00000000000000                 -- RVALID
		` + hex32, false},
	{"success1 without a response", kindSuccess1, &success1{tid: 0x1234, hashSize: 64}, `
		01 03 0000 3412 40 00 00 00000000000000
	`, false},
	{"success2", kindSuccess2, &success2{0x1234}, `
		01 04 0000 3412 00000000000000000000
	`, false},
	{"failure1", kindFailure1, &failure{kindFailure1, 0x1234, GroupUnusable}, `00 f1 0000 3412 01 05`, false},
	{"failure2", kindFailure2, &failure{kindFailure2, 0x1234, Failed}, `00 f0 0000 3412 01 01`, false},
}

func TestMessages(t *testing.T) {
	for _, tt := range golden {
		want := xdrtest.Hex(t, tt.hex)
		b := tt.m.append([]byte{0xEE})
		if !bytes.Equal(b[1:], want) || b[0] != 0xEE {
			t.Errorf("%s: encoded\n%x, want ee and\n%x", tt.name, b, want)
		}
		if k, tid, f := parseHeader(want); f != nil || k != tt.kind || tid != uint16(want[4])|uint16(want[5])<<8 {
			t.Errorf("%s: the header is of a %v message of transaction %#x, %v", tt.name, k, tid, f)
		}
		again := reflect.New(reflect.TypeOf(tt.m).Elem()).Interface().(codec)
		if f := again.decode(want); f != nil || !reflect.DeepEqual(again, tt.m) {
			t.Errorf("%s: decoded %+v, %v; want %+v", tt.name, again, f, tt.m)
		}
		for n := range want {
			if f := again.decode(want[:n:n]); f == nil || f.Reason != IncorrectPayload {
				t.Errorf("%s: the first %d bytes: %v", tt.name, n, f)
			}
		}
		if f := again.decode(append(want, 0)); (f != nil) != tt.exact {
			t.Errorf("%s and a zero: %v", tt.name, f)
		}
	}
}

func TestMessageErrors(t *testing.T) {
	find := func(name string) []byte {
		for _, tt := range golden {
			if tt.name == name {
				return xdrtest.Hex(t, tt.hex)
			}
		}
		t.Fatal(name)
		return nil
	}
	for _, tt := range []struct {
		name string
		at   int
		to   byte
		want Reason
	}{
		{"negotiate", 7, 0, IncorrectPayload},
		{"negotiate", 7, 2, IncorrectPayload},
		{"negotiate", 7, 255, IncorrectPayload},
		{"negotiate", 8, 2, ProtocolUnusable},
		{"negotiate", 10, 31, IncorrectPayload},
		{"negotiate", 11, 31, IncorrectPayload},
		{"challenge", 6, 48, HashUnusable},
		{"challenge", 8, 0, HashUnusable},
		{"challenge", 8, 4, HashUnusable},
		{"challenge", 8, 3, HashUnusable},
		{"challenge", 9, 6, GroupUnusable},
		{"challenge", 9, 255, GroupUnusable},
		{"challenge", 9, 0, IncorrectPayload},  // a DH value without a group
		{"challenge", 10, 0, IncorrectPayload}, // and a group without a DH value
		{"challenge", 11, 1, IncorrectPayload}, // 259 bytes
		{"challenge without a group", 12, 0, IncorrectPayload},
		{"reply", 6, 48, IncorrectPayload},
		{"reply", 8, 2, IncorrectPayload},
		{"reply", 10, 2, IncorrectPayload},
		{"reply", 11, 255, IncorrectPayload},
		{"success1", 6, 64, IncorrectPayload},
		{"success1", 8, 2, IncorrectPayload},
	} {
		b := find(tt.name)
		b[tt.at] = tt.to
		var f *Failure
		switch tt.name {
		case "negotiate":
			f = new(negotiate).decode(b)
		case "reply":
			f = new(reply).decode(b)
		case "success1":
			f = new(success1).decode(b)
		default:
			f = new(challenge).decode(b)
		}
		if f == nil || f.Reason != tt.want {
			t.Errorf("%s with %d at %d: %v, want %v", tt.name, tt.to, tt.at, f, tt.want)
		}
	}

	b := find("reply")
	copy(b[12:16], make([]byte, 4))
	if f := new(reply).decode(b); f == nil || f.Reason != IncorrectPayload {
		t.Errorf("a challenge with sequence number 0: %v", f)
	}
	// A DH value of 259 bytes that are there.
	b = (&challenge{hash: SHA256, group: FFDHE2048, seq: 1, challenge: count(32), public: make([]byte, 257)}).append(nil)
	if f := new(challenge).decode(b); f == nil || f.Reason != IncorrectPayload {
		t.Errorf("a DH value longer than the prime: %v", f)
	}
	if _, _, f := parseHeader(make([]byte, MaxMessage)); f != nil {
		t.Error(f)
	}
	if _, _, f := parseHeader(make([]byte, MaxMessage+1)); f == nil || f.Reason != IncorrectPayload {
		t.Errorf("more than MaxMessage: %v", f)
	}
}

// TestOtherProtocols has a negotiate message in which DH-HMAC-CHAP is the second of three protocols.
func TestOtherProtocols(t *testing.T) {
	b := (&negotiate{tid: 7, hashes: []Hash{SHA512}, groups: []Group{FFDHE3072}}).append(nil)
	other := bytes.Repeat([]byte{0xF1}, protocolSize)
	b = append(append(append(append([]byte{}, b[:negotiateSize]...), other...), b[negotiateSize:]...), other...)
	b[7] = 3
	var m negotiate
	if f := m.decode(b); f != nil || !reflect.DeepEqual(m.hashes, []Hash{SHA512}) || !reflect.DeepEqual(m.groups, []Group{FFDHE3072}) {
		t.Errorf("%+v, %v", m, f)
	}
}

// TestLargestMessage is about what [MaxMessage] and the Linux buffer of the same size must hold.
func TestLargestMessage(t *testing.T) {
	r := reply{response: make([]byte, 64), challenge: make([]byte, 64), public: make([]byte, FFDHE8192.size())}
	if n := len(r.append(nil)); n != 1168 {
		t.Errorf("the largest reply has %d bytes", n)
	}
}

// FuzzMessages: what decodes is the same after another round.
func FuzzMessages(f *testing.F) {
	for _, tt := range golden {
		f.Add(xdrtest.Hex(f, tt.hex))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range []codec{new(negotiate), new(challenge), new(reply), new(success1), new(success2), new(failure)} {
			if m.decode(b) != nil {
				continue
			}
			again := reflect.New(reflect.TypeOf(m).Elem()).Interface().(codec)
			if f := again.decode(m.append(nil)); f != nil || !reflect.DeepEqual(again, m) {
				t.Errorf("%x is %+v, then %+v, %v", b, m, again, f)
			}
		}
	})
}
