package nvmetcp

import "testing"

// hot is what happens for each command and PDU of I/O: to encode one, and to decode it again.
var hot = []struct {
	name string
	run  func(buf []byte, r *Receiver) error
}{
	{"CapsuleCmd", func(buf []byte, r *Receiver) error {
		p := CapsuleCmd{Command: Range{NSID: 1, SLBA: 2, Blocks: 8}.Command(OpWrite, CapsuleSGL(4096)), Length: 4096}
		buf = p.Append(buf, r.Framing)
		return decodeHot(buf, r, Controller, p.Decode)
	}},
	{"CapsuleResp", func(buf []byte, r *Receiver) error {
		p := CapsuleResp{Completion{CID: 1}}
		buf = p.Append(buf, r.Framing)
		return decodeHot(buf, r, Host, p.Decode)
	}},
	{"H2CData", func(buf []byte, r *Receiver) error {
		p := H2CData{CID: 1, Tag: 2, Offset: 4096, Length: 4096, Last: true}
		buf = p.Append(buf, r.Framing)
		return decodeHot(buf, r, Controller, p.Decode)
	}},
	{"C2HData", func(buf []byte, r *Receiver) error {
		p := C2HData{CID: 1, Offset: 4096, Length: 4096, Last: true, Success: true}
		buf = p.Append(buf, r.Framing)
		return decodeHot(buf, r, Host, p.Decode)
	}},
	{"R2T", func(buf []byte, r *Receiver) error {
		p := R2T{CID: 1, Tag: 2, Length: 1 << 20}
		buf = p.Append(buf, r.Framing)
		return decodeHot(buf, r, Host, p.Decode)
	}},
}

func decodeHot(buf []byte, r *Receiver, role Role, decode func(Header, []byte) error) error {
	r.Role = role
	h, err := r.Decode(buf)
	if err != nil {
		return err
	}
	if err := h.Verify(buf); err != nil {
		return err
	}
	return decode(h, buf)
}

func receiver(f Framing) *Receiver {
	return &Receiver{Framing: f, MaxCapsule: 8192, MaxData: 1 << 20}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	buf := make([]byte, 0, MaxHeaderSize)
	for _, f := range []Framing{plain, full} {
		r := receiver(f)
		for _, tt := range hot {
			if n := testing.AllocsPerRun(100, func() {
				if err := tt.run(buf, r); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%s: %v allocations", tt.name, n)
			}
		}
	}
	c := Completion{}
	if n := testing.AllocsPerRun(100, func() {
		if c.Err(&readCommand, false) != nil || c.Class() != ClassDone {
			t.Fatal("success is an error")
		}
	}); n != 0 {
		t.Errorf("success: %v allocations", n)
	}
}

func BenchmarkHot(b *testing.B) {
	buf := make([]byte, 0, MaxHeaderSize)
	for _, tt := range hot {
		for name, f := range map[string]Framing{"": plain, "WithDigest": {HeaderDigest: true}} {
			b.Run(tt.name+name, func(b *testing.B) {
				r := receiver(f)
				b.ReportAllocs()
				for b.Loop() {
					if err := tt.run(buf, r); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkDigest1MiB(b *testing.B) {
	data := make([]byte, 1<<20)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		Digest(data)
	}
}
