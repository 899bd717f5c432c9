package conns

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

type message interface {
	Append([]byte) []byte
	Decode(*xdr.Decoder) error
}

var client = Client{0xc0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xcf}

var goldens = []struct {
	name string
	msg  message
	hex  string
}{
	{"name", &Name{client, 0x1_0000_0002}, `
		c0010203 04050607 08090a0b 0c0d0ecf -- client
		00000001 00000002                   -- number`},
	{"all of a client", &Name{client, 0}, "c0010203 04050607 08090a0b 0c0d0ecf 00000000 00000000"},
	{"ended", &EndRes{true}, "00000001"},
	{"not ended", &EndRes{false}, "00000000"},
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

func TestCovers(t *testing.T) {
	for _, tt := range []struct {
		end, conn Name
		want      bool
	}{
		{Name{client, 7}, Name{client, 7}, true},
		{Name{client, 7}, Name{client, 8}, false},
		{Name{client, 0}, Name{client, 8}, true},
		{Name{client, 7}, Name{Client{1}, 7}, false},
		{Name{client, 0}, Name{Client{1}, 7}, false},
		{Name{}, Name{}, false}, // a connection that has not joined has no name
	} {
		if got := tt.end.Covers(tt.conn); got != tt.want {
			t.Errorf("END of %v ends %v: %v", tt.end, tt.conn, got)
		}
	}
}

func TestProc(t *testing.T) {
	for p, want := range map[Proc]string{ProcNull: "NULL", ProcJoin: "JOIN", ProcEnd: "END", ProcStop: "STOP", 9: "conns procedure 9"} {
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

func FuzzName(f *testing.F)   { fuzz(f, new(Name)) }
func FuzzEndRes(f *testing.F) { fuzz(f, new(EndRes)) }
