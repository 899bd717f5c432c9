package metarpc

//lint:file-ignore U1000 msgpack finds the fields _msgpack by reflection

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/layout"
)

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		client, service Versions
		want            uint32 // 0: none
	}{
		{Versions{3, 5}, Versions{2, 4}, 4}, {Versions{2, 4}, Versions{3, 5}, 4}, {Versions{3, 3}, Versions{3, 3}, 3},
		{Versions{3, 4}, Versions{4, 9}, 4}, {Versions{1, 9}, Versions{4, 5}, 5}, {Versions{4, 5}, Versions{1, 9}, 5},
		{Versions{1, 2}, Versions{3, 4}, 0}, {Versions{3, 4}, Versions{1, 2}, 0},
	} {
		got, ok := c.client.Choose(c.service)
		if ok != (c.want > 0) || ok && got != c.want {
			t.Errorf("client %v, service %v: %d, %v; want %d", c.client, c.service, got, ok, c.want)
		}
	}
	for _, c := range []struct {
		client, service Versions
		want            []string
	}{
		{Versions{1, 2}, Versions{3, 4}, []string{"client speaks versions 1 to 2", "service versions 3 to 4", "upgrade weft on the client"}},
		{Versions{3, 4}, Versions{2, 2}, []string{"client speaks versions 3 to 4", "service version 2:", "upgrade weftd on"}},
	} {
		got := Mismatch(c.client, c.service)
		for _, part := range c.want {
			if !strings.Contains(got, part) {
				t.Errorf("%q lacks %q", got, part)
			}
		}
	}
	if got := (Versions{}).Or(Spoken); got != Spoken {
		t.Error(got)
	}
	if got := (Versions{1, 1}).Or(Spoken); got != (Versions{1, 1}) {
		t.Error(got)
	}
}

// Hellos and welcomes between sides of which one is newer than this program. What a later hello has more is not looked at.
func TestHelloVersions(t *testing.T) {
	b, err := AppendHello(nil, &Hello{Magic: Magic, Lowest: 3, Highest: 9, Client: ClientInfo{Host: "h"}, Shard: 2})
	hello := body(t, b, err)
	hello[0]++ // one element more
	hello = append(hello, 0x91, codeNil)
	for _, speaks := range []Versions{{2, 4}, {9, 11}, {3, 3}} {
		if h, err := ParseHello(hello, speaks); err != nil || h.Versions() != (Versions{3, 9}) || h.Shard != 2 || h.Client.Host != "h" {
			t.Errorf("%v: %+v, %v", speaks, h, err)
		}
	}
	if h, err := ParseHello(hello, Versions{1, 2}); err != nil || h.Versions() != (Versions{3, 9}) || h.Shard != 0 {
		t.Errorf("no version in common: %+v, %v", h, err)
	}
	b, err = AppendWelcome(nil, &Welcome{Magic: Magic, Version: 5, Session: SessionID{1}, Slots: MinSlots, Lease: int64(MinLease)})
	welcome := body(t, b, err)
	if w, err := ParseWelcome(welcome, Versions{3, 5}); err != nil || w.Version != 5 || w.Slots != MinSlots {
		t.Errorf("%+v, %v", w, err)
	}
	if w, err := ParseWelcome(welcome, Versions{3, 4}); err != nil || w.Version != 5 || w.Slots != 0 {
		t.Errorf("a version that was not offered: %+v, %v", w, err)
	}
}

// grownA to grownC are a message as it was in some version, in A, and what became of it: outer and inner fields came with versions 6 and 8.
type (
	grownA struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Items    []grownItemA
		One      *grownItemA
	}
	grownItemA struct {
		_msgpack struct{} `msgpack:",as_array"`
		N        int64
	}
	grownB struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Items    []grownItemB
		One      *grownItemB
		Names    []string `since:"6"`
		Six      bool     `since:"6"`
	}
	grownItemB struct {
		_msgpack struct{} `msgpack:",as_array"`
		N        int64
		Six      string `since:"6"`
	}
	grownC struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Items    []grownItemC
		One      *grownItemC
		Names    []string    `since:"6"`
		Six      bool        `since:"6"`
		Eight    grownItemC  `since:"8"`
		Key      [16]byte    `since:"8"`
		Data     []byte      `since:"8"`
		More     *grownItemC `since:"8"`
		U        uint32      `since:"8"`
	}
	grownItemC struct {
		_msgpack struct{} `msgpack:",as_array"`
		N        int64
		Six      string `since:"6"`
	}
)

// A message is understood by whoever speaks the version it was made for, or a later one, and by nobody else.
func TestGrown(t *testing.T) {
	c := &grownC{ID: 7, Items: make([]grownItemC, 20), One: &grownItemC{N: -1, Six: "y"}, Names: []string{"n"}, Six: true,
		Eight: grownItemC{N: 2, Six: "z"}, Key: [16]byte{9}, Data: []byte{1}, More: &grownItemC{}, U: 8}
	c.Items[19] = grownItemC{N: 1 << 40, Six: "x"}
	b := &grownB{ID: 7, Items: make([]grownItemB, 20), One: &grownItemB{N: -1, Six: "y"}, Names: []string{"n"}, Six: true}
	b.Items[19] = grownItemB{N: 1 << 40, Six: "x"}
	a := &grownA{ID: 7, Items: make([]grownItemA, 20), One: &grownItemA{N: -1}}
	a.Items[19].N = 1 << 40
	// What the later ones are to one that knows fewer versions, and the other way round.
	fromA := &grownC{ID: 7, Items: make([]grownItemC, 20), One: &grownItemC{N: -1}}
	fromA.Items[19].N = 1 << 40
	fromB := &grownC{ID: 7, Items: c.Items, One: c.One, Names: c.Names, Six: true}

	encode := func(v any) []byte {
		var out bytes.Buffer
		e := msgpack.NewEncoder(&out)
		e.UseCompactInts(true)
		if err := e.Encode(v); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	full := encode(c)
	for version, want := range map[uint32][]byte{3: encode(a), 5: encode(a), 6: encode(b), 7: encode(b), 8: full, 9: full} {
		if got := Fit([]byte("x"), full, c, version); !bytes.Equal(got[1:], want) {
			t.Errorf("version %d:\n%x, want\n%x", version, got[1:], want)
		}
	}
	for _, row := range []struct {
		sent    []byte
		version uint32 // of the connection
		want    any    // of the type that the receiver knows; nil: it is refused
		into    any
	}{
		{encode(a), 3, fromA, new(grownC)}, {encode(a), 8, fromA, new(grownC)}, {encode(b), 6, fromB, new(grownC)}, {encode(b), 8, fromB, new(grownC)},
		{full, 8, c, new(grownC)}, {full, 12, c, new(grownC)}, {encode(b), 7, b, new(grownB)}, {encode(a), 7, &grownB{ID: 7, Items: func() []grownItemB {
			items := make([]grownItemB, 20)
			items[19].N = 1 << 40
			return items
		}(), One: &grownItemB{N: -1}}, new(grownB)},
		{encode(b), 5, nil, new(grownC)}, {full, 7, nil, new(grownC)}, {full, 8, nil, new(grownB)}, {encode(b), 6, nil, new(grownA)},
	} {
		err := DecodeMessage(row.sent, row.into, row.version)
		switch {
		case row.want == nil && !errors.Is(err, ErrMalformed):
			t.Errorf("%T from %x in version %d: %+v, %v", row.into, row.sent, row.version, row.into, err)
		case row.want != nil && (err != nil || !reflect.DeepEqual(row.into, row.want)):
			t.Errorf("%T from %x in version %d: %+v, %v; want %+v", row.into, row.sent, row.version, row.into, err, row.want)
		}
	}
	// No version ends between fields of one.
	if err := DecodeMessage([]byte{0x94, 7, codeNil, codeNil, codeNil}, new(grownB), 6); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	if err := DecodeMessage([]byte{0x93, 7, codeNil, codeNil}, new(grownB), 6); err != nil {
		t.Error(err)
	}
	if err := DecodeMessage([]byte{0x92, 7, codeNil}, new(grownB), 6); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
}

// Fields that are not at the end, or among those that can be left out, are a mistake of whoever adds them.
func TestMisplaced(t *testing.T) {
	for _, v := range []any{
		struct {
			A int `since:"4"`
			B int
		}{},
		struct {
			A int `since:"5"`
			B int `since:"4"`
		}{},
		struct {
			A int
			B int `metarpc:"optional"`
			C int `since:"4"`
		}{},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%T has a wire form", v)
				}
			}()
			makeShape(reflect.TypeOf(v))
		}()
	}
}

// No tag is of a version that is not spoken yet, or that all speak.
func TestSince(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var look func(reflect.Type)
	look = func(typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice:
			look(typ.Elem())
		case reflect.Struct:
			if seen[typ] {
				return
			}
			seen[typ] = true
			s := shapeOf(typ)
			for i, since := range s.since {
				if since > 0 && (since <= Lowest || since > Version) {
					t.Errorf("field %d of %v is of version %d", i, typ, since)
				}
			}
			for i := range typ.NumField() {
				look(typ.Field(i).Type)
			}
		}
	}
	for op := Op(1); op < opEnd; op++ {
		look(reflect.TypeOf(op.NewArgs()))
		look(reflect.TypeOf(op.NewResult()))
	}
	for op := BackOp(1); op < backOpEnd; op++ {
		look(reflect.TypeOf(op.NewArgs()))
	}
	for since := range maps.Values(newOps) {
		if since <= Lowest || since > Version {
			t.Errorf("a call of version %d", since)
		}
	}
	// Nothing is chosen yet when a client says who it is.
	if s := shapeOf(reflect.TypeFor[ClientInfo]()); s.newest > 0 || len(s.fields) != 5 {
		t.Error("ClientInfo has changed")
	}
}

// A call that waits for its answer goes on where an older version is spoken, a stored answer where a newer one was.
func TestRepeated(t *testing.T) {
	type args struct {
		_msgpack struct{} `msgpack:",as_array"`
		ID       layout.FileID
		Late     string `since:"4"`
	}
	old := ops[OpRenew]
	defer func() { ops[OpRenew] = old }()
	ops[OpRenew].newArgs, ops[OpRenew].newResult = of[args], of[args]
	h := CallHeader{Slot: 200, Sequence: 1 << 40, Op: OpRenew, Cred: Cred{UID: 1, GID: 2, Groups: []uint32{3}}}
	call, err := AppendCall(nil, h, &args{ID: 5, Late: strings.Repeat("l", 300)})
	if err != nil {
		t.Fatal(err)
	}
	if got := AppendCallAs([]byte("x"), call, 4); !bytes.Equal(got[1:], call) {
		t.Errorf("%x", got)
	}
	b := AppendCallAs([]byte("x"), call, 3)[1:]
	if int(binary.BigEndian.Uint32(b)) != len(b)-4 {
		t.Errorf("length of %x", b)
	}
	if got, a, err := ParseCall(b[4:], 3); err != nil || !reflect.DeepEqual(got, h) || !reflect.DeepEqual(a, &args{ID: 5}) {
		t.Errorf("%+v %+v, %v", got, a, err)
	}
	var refusal *Error
	if _, _, err := ParseCall(call[4:], 3); !errors.As(err, &refusal) || refusal.Status != StatusBadArgs {
		t.Errorf("a call of version 4 in version 3: %v", err)
	}
	reply, err := AppendReply(nil, 4, ReplyHeader{Slot: 1, Sequence: 1}, &args{ID: 5, Late: "l"})
	if err != nil {
		t.Fatal(err)
	}
	var got args
	if _, result, err := ParseReplyHeader(reply[4:]); err != nil || DecodeResult(OpRenew, result, &got) != nil || got.Late != "l" {
		t.Errorf("%+v, %v", got, err)
	}

	create, err := AppendReply(nil, Version, ReplyHeader{Slot: 1, Sequence: 1}, &CreateResult{Attr: Attr{ID: 4097}})
	if err != nil {
		t.Fatal(err)
	}
	later := append(bytes.Clone(create[4:]), codeNil, 0x91, 0x01) // two fields more
	i := strings.Index(hex.EncodeToString(later), hex.EncodeToString([]byte{0x90 | byte(shapeOf(reflect.TypeFor[CreateResult]()).count(Version)), 0x90 | byte(shapeOf(reflect.TypeFor[Attr]()).count(Version))}))
	if i < 0 {
		t.Fatalf("no CreateResult in %x", later)
	}
	later[i/2] += 2
	for _, frame := range [][]byte{create[4:], later} {
		if id, err := CreatedID(frame); err != nil || id != 4097 {
			t.Errorf("%x: %v, %v", frame, id, err)
		}
	}
	if _, err := CreatedID(create[4:12]); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
}

// Calls and callbacks that a version does not have are neither made in it nor taken.
func TestNewOps(t *testing.T) {
	newOps[OpQuotas], newBackOps[BackCopiesStale] = 4, 4
	defer func() {
		delete(newOps, OpQuotas)
		delete(newBackOps, BackCopiesStale)
	}()
	if OpQuotas.In(3) || !OpQuotas.In(4) || !OpRenew.In(3) || opEnd.In(4) {
		t.Error("which version has which call")
	}
	call, err := AppendCall(nil, CallHeader{Sequence: 1, Op: OpQuotas}, &QuotasArgs{Name: QuotaName{Kind: QuotaUser}})
	if err != nil {
		t.Fatal(err)
	}
	for version := uint32(3); version <= 4; version++ {
		var refusal *Error
		_, _, err = ParseCall(call[4:], version)
		if got := errors.As(err, &refusal); got != (version == 3) {
			t.Errorf("call in version %d: %v", version, err)
		}
	}
	back, err := AppendCallBack(nil, 4, BackHeader{Op: BackCopiesStale}, &CopiesStaleArgs{ID: 1, Copies: []CopyRef{{Device: layout.DeviceID{1}, Handle: []byte{1}}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := ParseCallBack(back[4:], 4); err != nil {
		t.Error(err)
	}
	if _, _, err := ParseCallBack(back[4:], 3); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	if _, err := AppendCallBack(nil, 3, BackHeader{Op: BackCopiesStale}, &CopiesStaleArgs{}); err == nil {
		t.Error("a callback that the client does not know was made")
	}
}
