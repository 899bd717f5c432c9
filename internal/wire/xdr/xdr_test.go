package xdr

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
)

// TestRFCExample encodes and decodes the file of RFC 4506 section 7.
func TestRFCExample(t *testing.T) {
	want := xdrtest.Hex(t, `
		00000009 73696c6c 7970726f 67000000 -- filename "sillyprog", 3 bytes of fill
		00000002                            -- kind: EXEC
		00000004 6c697370                   -- interpretor "lisp"
		00000004 6a6f686e                   -- owner "john"
		00000006 28717569 74290000          -- data "(quit)", 2 bytes of fill
	`)
	b := AppendString(nil, "sillyprog")
	b = AppendUint32(b, 2)
	b = AppendString(b, "lisp")
	b = AppendString(b, "john")
	b = AppendOpaque(b, []byte("(quit)"))
	if !bytes.Equal(b, want) {
		t.Errorf("encoded %x, want %x", b, want)
	}
	d := NewDecoder(want)
	name, kind, interpretor, owner, data := d.String(255), d.Uint32(), d.String(255), d.String(255), d.Opaque(65535)
	if d.Err() != nil || name != "sillyprog" || kind != 2 || interpretor != "lisp" || owner != "john" || string(data) != "(quit)" {
		t.Errorf("decoded %q %d %q %q %q, %v", name, kind, interpretor, owner, data, d.Err())
	}
	if d.Offset() != 48 || len(d.Rest()) != 0 {
		t.Errorf("offset %d with %d left, want 48 and 0", d.Offset(), len(d.Rest()))
	}
}

func TestEncode(t *testing.T) {
	prefix := []byte{0xee}
	for _, tt := range []struct {
		name string
		got  []byte
		want string
	}{
		{"uint32", AppendUint32(prefix, 0x01020304), "ee 01020304"},
		{"uint64", AppendUint64(prefix, 0x0102030405060708), "ee 01020304 05060708"},
		{"false", AppendBool(prefix, false), "ee 00000000"},
		{"true", AppendBool(prefix, true), "ee 00000001"},
		{"fixed 0", AppendFixedOpaque(prefix, nil), "ee"},
		{"fixed 1", AppendFixedOpaque(prefix, []byte{9}), "ee 09000000"},
		{"fixed 4", AppendFixedOpaque(prefix, []byte{9, 8, 7, 6}), "ee 09080706"},
		{"opaque 0", AppendOpaque(prefix, nil), "ee 00000000"},
		{"opaque 3", AppendOpaque(prefix, []byte{9, 8, 7}), "ee 00000003 09080700"},
		{"opaque 5", AppendOpaque(prefix, []byte{9, 8, 7, 6, 5}), "ee 00000005 09080706 05000000"},
		{"string 2", AppendString(prefix, "ab"), "ee 00000002 61620000"},
	} {
		if want := xdrtest.Hex(t, tt.want); !bytes.Equal(tt.got, want) {
			t.Errorf("%s: %x, want %x", tt.name, tt.got, want)
		}
	}
}

func TestPad(t *testing.T) {
	for n, want := range []int{0, 3, 2, 1, 0, 3, 2, 1, 0} {
		if Pad(n) != want || Padded(n) != n+want || !bytes.Equal(Padding(n), make([]byte, want)) {
			t.Errorf("%d: Pad %d, Padded %d, Padding %v; want %d of padding", n, Pad(n), Padded(n), Padding(n), want)
		}
	}
}

// TestDecodeErrors gives one decoder method input that is wrong in one way.
func TestDecodeErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		in    string
		field func(d *Decoder) bool // whether the result is zero
		want  error
	}{
		{"uint32 of 3 bytes", "000000", func(d *Decoder) bool { return d.Uint32() == 0 }, ErrTruncated},
		{"uint64 of 7 bytes", "01020304 050607", func(d *Decoder) bool { return d.Uint64() == 0 }, ErrTruncated},
		{"bool of 2", "00000002", func(d *Decoder) bool { return !d.Bool() }, ErrInvalid},
		{"bool in the wrong byte", "01000000", func(d *Decoder) bool { return !d.Bool() }, ErrInvalid},
		{"bool of 3 bytes", "000001", func(d *Decoder) bool { return !d.Bool() }, ErrTruncated},
		{"fixed opaque too short", "01020304", func(d *Decoder) bool { return d.FixedOpaque(5) == nil }, ErrTruncated},
		{"fixed opaque without padding", "01020304 05", func(d *Decoder) bool { return d.FixedOpaque(5) == nil }, ErrTruncated},
		{"fixed opaque of negative size", "01020304", func(d *Decoder) bool { return d.FixedOpaque(-1) == nil }, ErrTruncated},
		{"fixed opaque of the largest size", "01020304", func(d *Decoder) bool { return d.FixedOpaque(math.MaxInt) == nil }, ErrTruncated},
		{"opaque without length", "0000", func(d *Decoder) bool { return d.Opaque(8) == nil }, ErrTruncated},
		{"opaque longer than its maximum", "00000009 01020304 05060708 09000000", func(d *Decoder) bool { return d.Opaque(8) == nil }, ErrTooLong},
		{"opaque longer than the input", "00000008 01020304", func(d *Decoder) bool { return d.Opaque(8) == nil }, ErrTruncated},
		{"opaque with half of its padding", "00000001 0102", func(d *Decoder) bool { return d.Opaque(8) == nil }, ErrTruncated},
		{"opaque of 4 GiB", "ffffffff 01020304", func(d *Decoder) bool { return d.Opaque(math.MaxInt) == nil }, ErrTruncated},
		{"string longer than its maximum", "00000002 61620000", func(d *Decoder) bool { return d.String(1) == "" }, ErrTooLong},
	} {
		d := NewDecoder(xdrtest.Hex(t, tt.in))
		if !tt.field(&d) {
			t.Errorf("%s: result is not zero", tt.name)
		}
		if !errors.Is(d.Err(), tt.want) {
			t.Errorf("%s: error %v, want %v", tt.name, d.Err(), tt.want)
		}
		if d.Rest() != nil {
			t.Errorf("%s: there is input after the error", tt.name)
		}
	}
}

// TestFirstErrorStays: later fields and later failures change nothing.
func TestFirstErrorStays(t *testing.T) {
	d := NewDecoder(xdrtest.Hex(t, "00000001 00000007 00000001 00000001"))
	d.Uint32()
	d.Bool()
	first := d.Err()
	d.Fail(errors.New("later"))
	if d.Uint32() != 0 || d.Uint64() != 0 || d.Bool() || d.Opaque(9) != nil || d.FixedOpaque(4) != nil || d.String(9) != "" {
		t.Error("a field after the error is not zero")
	}
	if d.Err() != first {
		t.Errorf("error became %v", d.Err())
	}
	var e *Error
	if !errors.As(first, &e) || e.Offset != 8 || !strings.Contains(first.Error(), "bool 7") {
		t.Errorf("error is %v, want one at byte 8 that names bool 7", first)
	}
}

func TestOpaqueAliasesInput(t *testing.T) {
	in := xdrtest.Hex(t, "00000002 61620000 63640000")
	d := NewDecoder(in)
	p := d.Opaque(8)
	if &p[0] != &in[4] || cap(p) != 2 {
		t.Errorf("opaque does not alias the input with capacity 2: cap %d", cap(p))
	}
	if q := d.FixedOpaque(2); &q[0] != &in[8] || cap(q) != 2 {
		t.Errorf("fixed opaque does not alias the input with capacity 2: cap %d", cap(q))
	}
}

// TestPaddingContent: the padding's content carries no meaning, and its absence alone is an error.
func TestPaddingContent(t *testing.T) {
	d := NewDecoder(xdrtest.Hex(t, "00000001 61ffffff"))
	if s := d.String(8); s != "a" || d.Err() != nil {
		t.Errorf("%q, %v", s, d.Err())
	}
}

func TestNoAllocation(t *testing.T) {
	buf := make([]byte, 0, 64)
	huge := xdrtest.Hex(t, "7ffffff0 00000000")
	n := testing.AllocsPerRun(100, func() {
		b := AppendUint32(buf, 7)
		b = AppendUint64(b, 8)
		b = AppendBool(b, true)
		b = AppendOpaque(b, b[:5])
		b = AppendString(b, "abc")
		d := NewDecoder(b)
		if d.Uint32() != 7 || d.Uint64() != 8 || !d.Bool() || len(d.Opaque(5)) != 5 || len(d.Opaque(3)) != 3 || d.Err() != nil {
			t.Error(d.Err())
		}
	})
	if n != 0 {
		t.Errorf("encode and decode: %v allocations", n)
	}
	// A length that lies must cost no more than its error.
	n = testing.AllocsPerRun(100, func() {
		d := NewDecoder(huge)
		if d.String(math.MaxInt) != "" {
			t.Error("a string out of nothing")
		}
	})
	if n > 1 {
		t.Errorf("a length of 2 GiB: %v allocations", n)
	}
}

// FuzzDecoder takes fields in the order that script tells from input. Whatever they are, the decoder stays inside the
// input, and encoding the fields again gives as many bytes as were taken.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5}, bytes.Repeat([]byte{0, 0, 0, 1}, 12))
	f.Add([]byte{3, 3}, []byte("\x00\x00\x00\x05hello\x00\x00\x00\x00\x00\x00\x01a"))
	f.Fuzz(func(t *testing.T, script, input []byte) {
		d := NewDecoder(input)
		var again []byte
		for _, op := range script {
			before := d.Offset()
			switch op % 6 {
			case 0:
				again = AppendUint32(again, d.Uint32())
			case 1:
				again = AppendUint64(again, d.Uint64())
			case 2:
				again = AppendBool(again, d.Bool())
			case 3:
				again = AppendOpaque(again, d.Opaque(int(op)))
			case 4:
				again = AppendFixedOpaque(again, d.FixedOpaque(int(op)))
			case 5:
				again = AppendString(again, d.String(int(op)))
			}
			if d.Err() != nil {
				if d.Rest() != nil || d.Uint32() != 0 {
					t.Fatal("a decoder with an error has input")
				}
				return
			}
			if d.Offset() < before || d.Offset() > len(input) || d.Offset()+len(d.Rest()) != len(input) {
				t.Fatalf("offset went from %d to %d of %d with %d left", before, d.Offset(), len(input), len(d.Rest()))
			}
		}
		if len(again) != d.Offset() {
			t.Fatalf("took %d bytes, which encode to %d", d.Offset(), len(again))
		}
	})
}
