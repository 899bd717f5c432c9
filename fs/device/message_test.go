package device

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
	"syscall"
	"testing"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	ok(t, err)
	return b
}

// Requests as Linux 6.18 sends them (x86-64), by linux/fuse.h.
func TestGolden(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("missing: a little-endian machine")
	}
	var h head
	n := copy(h[:], unhex(t, `
		53000000 10000000 0807060504030201 1817161514131211 e8030000 e9030000 2a000000 0000 0000
		0200000000000000 0010000000000000 03000000 04000000 0000000000000000 41800000 00000000`)) + 3
	hdr, good := parseHeader(&h, n)
	if want := (header{opWrite, 0x0102030405060708, 0x1112131415161718, 42}); hdr != want || !good {
		t.Errorf("header %+v, %v; want %+v", hdr, good, want)
	}
	in, errno := parseTransfer(&h, n, 4096, true)
	if want := (transferIn{2, 4096, 3, 4, 0x8041}); in != want || errno != 0 {
		t.Errorf("WRITE %+v, %v; want %+v", in, errno, want)
	}
	h = head{}
	n = copy(h[:], unhex(t, `30000000 24000000 0900000000000000 0000000000000000 00000000 00000000 00000000 0000 0000 0800000000000000`))
	if hdr, good := parseHeader(&h, n); !good || hdr.opcode != opInterrupt || interrupted(&h, n) != 8 {
		t.Errorf("INTERRUPT %+v of %d", hdr, interrupted(&h, n))
	}
	out := make([]byte, 24)
	putOutHeader(out, 24, 0, 8)
	putWriteOut(out[16:], 3)
	if want := "180000000000000008000000000000000300000000000000"; hex.EncodeToString(out) != want {
		t.Errorf("answer %x, want %s", out, want)
	}
	putOutHeader(out, 16, syscall.EIO, 8)
	if want := "10000000fbffffff0800000000000000"; hex.EncodeToString(out[:16]) != want {
		t.Errorf("answer %x, want %s", out[:16], want)
	}
}

// FuzzRequest decodes anything. What is decoded must be within its bounds.
func FuzzRequest(f *testing.F) {
	k := &kernel{}
	f.Add(k.transfer(opRead, 1<<40, 4096, nil))
	f.Add(k.transfer(opWrite, 0, 3, []byte("abc")))
	f.Add(k.message(opInit, make([]byte, 64)))
	f.Add(k.message(opGetxattr, make([]byte, 8)))
	f.Add(makeInterrupt(8))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var h head
		copy(h[:], b)
		n := len(b)
		const maxSize = 1 << 20
		hdr, good := parseHeader(&h, n)
		if good && (n < inHeaderSize || hdr.unique == 0) {
			t.Fatalf("%x has a header", b)
		}
		for _, write := range []bool{false, true} {
			in, errno := parseTransfer(&h, n, maxSize, write)
			switch {
			case errno != 0:
			case in.size < 0 || in.size > maxSize || in.off < 0 || in.off+int64(in.size) < 0:
				t.Fatalf("%x: %+v", b, in)
			case write && in.size != n-headSize:
				t.Fatalf("%x: a WRITE of %d bytes with %d", b, in.size, n-headSize)
			}
		}
		if size, good := answerSize(hdr.opcode, &h, n, maxSize); good && (size < outHeaderSize || size > maxSize+8192) {
			t.Fatalf("%x: an answer of %d bytes", b, size)
		}
		if interrupted(&h, n) != 0 && n < interruptSize {
			t.Fatalf("%x interrupts %d", b, interrupted(&h, n))
		}
		parseInit(&h, n)
	})
}
