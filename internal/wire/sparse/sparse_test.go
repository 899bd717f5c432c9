package sparse

import (
	"bytes"
	"errors"
	"math"
	"reflect"
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

var someRange = RangeArgs{
	FH: handle(0xf1, 0xf2, 0xf3), Off: 0x1_0000_0005, Length: 0x20_0000, Column: Column{Unit: 0x10_0000, Count: 4, Index: 3},
}

const rangeHex = `
	00000003 f1f2f300              -- file
	00000001 00000005              -- offset
	00000000 00200000              -- length
	00000000 00100000 00000004 00000003 -- unit, count, index
`

var goldens = []struct {
	name string
	msg  message
	hex  string
}{
	{"DEALLOCATE", &someRange, rangeHex},
	{"ALLOCATE", &AllocateArgs{someRange, true}, rangeHex + "00000001 -- keep_size"},
	{"ALLOCATE all", &AllocateArgs{RangeArgs: RangeArgs{FH: handle(1), Length: math.MaxInt64}}, `
		00000001 01000000
		00000000 00000000
		7fffffff ffffffff
		00000000 00000000 00000000 00000000
		00000000`},
	{"SEEK data", &SeekArgs{someRange, Data}, rangeHex + "00000000 -- what"},
	{"SEEK hole", &SeekArgs{someRange, Hole}, rangeHex + "00000001 -- what"},
	{"range done", &RangeRes{Off: 0x1_0020_0005}, "00000000 00000001 00200005"},
	{"no space", &RangeRes{Status: nfs3.ErrNoSpc}, "0000001c"},
	{"not supported", &RangeRes{Status: nfs3.ErrNotSupp}, "00002714"},
	{"found", &SeekRes{Found: true, Off: 0x2000}, "00000000 00000001 00000000 00002000"},
	{"not found", &SeekRes{Off: 0x1_0020_0005}, "00000000 00000000 00000001 00200005"},
	{"stale", &SeekRes{Status: nfs3.ErrStale}, "00000046"},
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

func TestInvalid(t *testing.T) {
	bad := func(c Column) *RangeArgs { return &RangeArgs{FH: handle(1), Length: 1, Column: c} }
	for _, msg := range []message{
		bad(Column{Unit: 0, Count: 2}),
		bad(Column{Unit: math.MaxInt64 + 1, Count: 2}),
		bad(Column{Unit: 4096, Count: 2, Index: 2}),
		&SeekArgs{someRange, 2},
	} {
		d := xdr.NewDecoder(msg.Append(nil))
		if err := fresh(msg).Decode(&d); !errors.Is(err, xdr.ErrInvalid) {
			t.Errorf("%+v: %v", msg, err)
		}
	}
}

func TestProc(t *testing.T) {
	for p, want := range map[Proc]string{
		ProcNull: "NULL", ProcAllocate: "ALLOCATE", ProcDeallocate: "DEALLOCATE", ProcSeek: "SEEK", 9: "sparse procedure 9",
	} {
		if p.String() != want {
			t.Errorf("procedure %d is %q, want %q", uint32(p), p, want)
		}
	}
}

// fuzz decodes any bytes. What decodes must encode to as many bytes as were taken, and these decode to the same.
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

func FuzzRangeArgs(f *testing.F)    { fuzz(f, new(RangeArgs)) }
func FuzzAllocateArgs(f *testing.F) { fuzz(f, new(AllocateArgs)) }
func FuzzSeekArgs(f *testing.F)     { fuzz(f, new(SeekArgs)) }
func FuzzRangeRes(f *testing.F)     { fuzz(f, new(RangeRes)) }
func FuzzSeekRes(f *testing.F)      { fuzz(f, new(SeekRes)) }
