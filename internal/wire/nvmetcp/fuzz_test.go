package nvmetcp

import (
	"bytes"
	"errors"
	"reflect"
	"testing"
)

// FuzzPDU decodes a stream of PDUs. What decodes must encode to what decodes to the same, in the same place.
func FuzzPDU(f *testing.F) {
	for _, tt := range pduGoldens {
		var mode byte
		if tt.role == Controller {
			mode |= 1
		}
		if tt.f.HeaderDigest {
			mode |= 2
		}
		if tt.f.DataDigest {
			mode |= 4
		}
		f.Add(mode|tt.f.Align<<3, append(layout(f, tt.size, tt.hex), make([]byte, tt.data)...))
	}
	f.Add(byte(1), (&ICReq{Align: 3, MaxR2T: 1}).Append(nil))
	f.Add(byte(0), (&ICResp{HeaderDigest: true, MaxH2CData: 4096}).Append(nil))
	f.Add(byte(0), (&TermReq{Type: PDUC2HTermReq, Fatal: FatalLimit, Header: make([]byte, 72)}).Append(nil))
	f.Add(byte(1), (&TermReq{Type: PDUH2CTermReq, Fatal: FatalLimit}).Append(nil))
	for _, c := range captures(f) {
		var mode byte
		if c.to == Controller {
			mode |= 1
		}
		f.Add(mode|6, c.pdu)
		f.Add(mode, c.pdu)
	}
	f.Fuzz(func(t *testing.T, mode byte, b []byte) {
		r := Receiver{Framing: Framing{HeaderDigest: mode&2 != 0, DataDigest: mode&4 != 0, Align: mode >> 3}, Role: Role(mode & 1), MaxCapsule: 1024, MaxData: 8192}
		h, err := r.Decode(b)
		if err != nil {
			var p *ProtocolError
			if !errors.As(err, &p) && !errors.Is(err, ErrShort) {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		if h.Before() < int(h.HLen)+h.Digest() || h.Before() > MaxHeaderSize || h.Data() < 0 || h.Before()+h.Data()+h.DataDigest() != int(h.PLen) {
			t.Fatalf("%+v: %d, %d, %d", h, h.Before(), h.Data(), h.DataDigest())
		}
		if limit := map[PDUType]int{PDUCapsuleCmd: 1024, PDUH2CData: 8192, PDUC2HData: 8192, PDUH2CTermReq: MaxTermReqData, PDUC2HTermReq: MaxTermReqData}[h.Type]; h.Data() > limit {
			t.Fatalf("%+v: %d bytes", h, h.Data())
		}
		_ = h.Verify(b)
		switch h.Type {
		case PDUICReq:
			var p, again ICReq
			if p.Decode(h, b) == nil && (again.Decode(h, p.Append(nil)) != nil || again != p) {
				t.Fatalf("%+v, %+v", p, again)
			}
			return
		case PDUICResp:
			var p, again ICResp
			all := &ICReq{HeaderDigest: true, DataDigest: true}
			if p.Decode(h, b, all) == nil && (again.Decode(h, p.Append(nil), all) != nil || again != p) {
				t.Fatalf("%+v, %+v", p, again)
			}
			return
		case PDUH2CTermReq, PDUC2HTermReq:
			var p, again TermReq
			if p.Decode(h, b) == nil && (again.Decode(h, p.Append(nil)) != nil || !reflect.DeepEqual(p, again)) {
				t.Fatalf("%+v, %+v", p, again)
			}
			return
		}
		p := map[PDUType]pdu{PDUCapsuleCmd: &CapsuleCmd{}, PDUCapsuleResp: &CapsuleResp{}, PDUH2CData: &H2CData{}, PDUC2HData: &C2HData{}, PDUR2T: &R2T{}}[h.Type]
		if p.Decode(h, b) != nil {
			return
		}
		if c, ok := p.(*CapsuleCmd); ok {
			c.Command.Flags = c.Command.Flags&^flagsPSDT | flagsSGL // which is what Append makes of it
		}
		again := fresh(p)
		enc := p.Append(nil, r.Framing)
		h2, err := r.Decode(enc)
		if err != nil || h2.Flags != h.Flags || h2.Data() != h.Data() || h2.Verify(enc) != nil || len(enc) != h2.Before() {
			t.Fatalf("%+v became %+v, %v", h, h2, err)
		}
		if err := again.Decode(h2, enc); err != nil || !reflect.DeepEqual(again, p) {
			t.Fatalf("%+v became %+v, %v", p, again, err)
		}
	})
}

// fuzzStruct decodes a structure like s. What decodes must encode to what decodes to the same.
func fuzzStruct(f *testing.F, s structure) {
	for _, tt := range structGoldens {
		if reflect.TypeOf(tt.s) == reflect.TypeOf(s) {
			f.Add(layout(f, tt.size, tt.hex))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		// A structure is mostly zeros: the input stands for its beginning.
		if n := len(s.Append(nil)); len(b) > 0 && len(b) < n && b[0]&1 == 0 {
			b = append(b, make([]byte, n-len(b))...)
		}
		got := fresh(s)
		if got.Decode(b) != nil {
			return
		}
		if c, ok := got.(*Command); ok {
			c.Flags = c.Flags&^flagsPSDT | flagsSGL
		}
		again := fresh(s)
		if err := again.Decode(got.Append(nil)); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("%+v became %+v, %v", got, again, err)
		}
	})
}

func FuzzCompletion(f *testing.F)      { fuzzStruct(f, &Completion{}) }
func FuzzConnectData(f *testing.F)     { fuzzStruct(f, &ConnectData{SubsysNQN: "a", HostNQN: "a"}) }
func FuzzControllerData(f *testing.F)  { fuzzStruct(f, &ControllerData{}) }
func FuzzNVMController(f *testing.F)   { fuzzStruct(f, &NVMController{}) }
func FuzzNamespace(f *testing.F)       { fuzzStruct(f, &Namespace{}) }
func FuzzDescriptors(f *testing.F)     { fuzzStruct(f, &Descriptors{}) }
func FuzzDSMRange(f *testing.F)        { fuzzStruct(f, &DSMRange{}) }
func FuzzDiscoveryHeader(f *testing.F) { fuzzStruct(f, &DiscoveryHeader{}) }
func FuzzDiscoveryEntry(f *testing.F)  { fuzzStruct(f, &DiscoveryEntry{}) }

// FuzzCommand decodes the arguments of any command as those of every command, with data behind it. Arguments that decode must
// encode to what decodes to the same.
func FuzzCommand(f *testing.F) {
	for _, tt := range commandGoldens {
		f.Add(append(layout(f, CommandSize, tt.hex), register.AppendData(nil)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Command
		if err := c.Decode(b); err != nil {
			if !errors.Is(err, ErrShort) {
				t.Fatal(err)
			}
			return
		}
		data := b[CommandSize:]
		if c.Name(true) == "" || c.Name(false) == "" {
			t.Fatal("no name")
		}
		if c.CheckData(uint32(len(data))) == StatusSuccess && c.SGL.Type == SGLInCapsule && int(c.SGL.Length) != len(data) {
			t.Fatalf("%+v with %d bytes", c, len(data))
		}
		same := func(ok bool, got, again any) {
			if !ok || !reflect.DeepEqual(got, again) {
				t.Fatalf("%+v became %+v", got, again)
			}
		}
		{
			var p, q PropertyGet
			if p.Decode(&c) == StatusSuccess {
				e := p.Command()
				same(q.Decode(&e) == StatusSuccess, p, q)
			}
		}
		{
			var p, q PropertySet
			if p.Decode(&c) == StatusSuccess {
				e := p.Command()
				same(q.Decode(&e) == StatusSuccess, p, q)
			}
		}
		{
			var p, q Connect
			if p.Decode(&c) == nil {
				e := p.Command()
				same(q.Decode(&e) == nil, p, q)
			}
		}
		{
			var p, q Auth
			if p.Decode(&c) == StatusSuccess {
				e := p.Command(false)
				same(q.Decode(&e) == StatusSuccess, p, q)
			}
		}
		{
			var p, q Identify
			p.Decode(&c)
			e := p.Command()
			q.Decode(&e)
			same(true, p, q)
		}
		{
			var p, q Feature
			p.Decode(&c)
			e := p.Set(NoSGL())
			q.Decode(&e)
			same(true, p, q)
		}
		{
			var p, q GetLogPage
			if p.Decode(&c) == StatusSuccess {
				e := p.Command()
				same(q.Decode(&e) == StatusSuccess, p, q)
			}
		}
		{
			var p, q Range
			p.Decode(&c)
			e := p.Command(c.Opcode, c.SGL)
			q.Decode(&e)
			same(true, p, q)
		}
		{
			n, _ := DecodeDSM(&c)
			e := Deallocate(c.NSID, n, false)
			m, _ := DecodeDSM(&e)
			same(true, n, m)
		}
		{
			var p, q ReservationRegister
			if p.Decode(&c, data) == StatusSuccess {
				e := p.Command(true)
				same(q.Decode(&e, p.AppendData(nil)) == StatusSuccess, p, q)
			}
		}
		{
			var p, q ReservationAcquire
			if p.Decode(&c, data) == StatusSuccess {
				e := p.Command(true)
				same(q.Decode(&e, p.AppendData(nil)) == StatusSuccess, p, q)
			}
		}
		{
			var p, q ReservationRelease
			if p.Decode(&c, data) == StatusSuccess {
				e := p.Command(true)
				same(q.Decode(&e, p.AppendData(nil)) == StatusSuccess, p, q)
			}
		}
		{
			var p, q ReservationReport
			if p.Decode(&c) == StatusSuccess {
				e := p.Command()
				same(q.Decode(&e) == StatusSuccess, p, q)
			}
		}
	})
}

// FuzzResults decodes the numbers that are completions' results.
func FuzzResults(f *testing.F) {
	for _, v := range []uint64{0, 0x000C0302, 0x00460001, 0x00020001, 0x0840_0820_1e01_03ff} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v uint64) {
		var capabilities, again Capabilities
		if capabilities.Decode(v) == nil && (again.Decode(capabilities.Property()) != nil || again != capabilities) {
			t.Fatalf("%+v, %+v", capabilities, again)
		}
		var config, config2 Configuration
		config.Decode(uint32(v))
		if config2.Decode(config.Property()); config != config2 {
			t.Fatalf("%+v, %+v", config, config2)
		}
		var status, status2 ControllerStatus
		status.Decode(uint32(v))
		if status2.Decode(status.Property()); status != status2 {
			t.Fatalf("%+v, %+v", status, status2)
		}
		if e := DecodeAsyncEvent(uint32(v)); e != DecodeAsyncEvent(e.DW0()) || e.String() == "" {
			t.Fatal(e)
		}
		if r := DecodeConnectResult(uint32(v)); r != DecodeConnectResult(r.DW0()) {
			t.Fatal(r)
		}
		if n := DecodeQueueCount(uint32(v)); n < 1 || n > 1<<16 {
			t.Fatal(n)
		}
		if e := ConnectParam(uint32(v)); *e != *ConnectParam(e.DW0()) || e.Error() == "" {
			t.Fatal(e)
		}
		for set := SetIO; set <= SetFabrics; set++ {
			if s := Status(v) & statusMask; s.Text(set) == "" || s.Errno() == 0 && s != StatusSuccess {
				t.Fatal(s)
			}
		}
	})
}

// FuzzANALog checks that what is read from an ANA log encodes to its beginning.
func FuzzANALog(f *testing.F) {
	f.Add(AppendANAGroup(ANAHeader{ChangeCount: 5, Groups: 1}.Append(nil), ANAGroup{ID: 1, ChangeCount: 3, State: ANAOptimized}, []uint32{1, 3}))
	f.Add(AppendANAGroup(AppendANAGroup(ANAHeader{Groups: 2}.Append(nil), ANAGroup{ID: 1, State: ANALoss}, nil), ANAGroup{ID: 2, State: ANAChange}, []uint32{7}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var head ANAHeader
		if head.Decode(b) != nil {
			return
		}
		enc := head.Append(nil)
		n := 0
		for g, err := range ANAGroups(b) {
			if err != nil {
				if !errors.Is(err, ErrInvalid) {
					t.Fatal(err)
				}
				return
			}
			n++
			var ids []uint32
			last := uint32(0)
			for id := range g.NSIDs() {
				if id <= last {
					t.Fatalf("%d after %d", id, last)
				}
				ids, last = append(ids, id), id
			}
			enc = AppendANAGroup(enc, g, ids)
		}
		if n != int(head.Groups) || len(enc) > len(b) {
			t.Fatalf("%d groups of %d in %d bytes of %d", n, head.Groups, len(enc), len(b))
		}
		for g, err := range ANAGroups(enc) {
			if err != nil {
				t.Fatalf("%+v, %v", g, err)
			}
			break
		}
	})
}

// FuzzRegistrants checks the same of a reservation report.
func FuzzRegistrants(f *testing.F) {
	for _, tt := range reportGoldens {
		f.Add(tt.extended, layout(f, tt.size, tt.hex))
	}
	f.Fuzz(func(t *testing.T, extended bool, b []byte) {
		var status ReservationStatus
		if status.Decode(b, extended) != nil {
			return
		}
		enc := status.Append(nil, extended)
		n := 0
		for r, err := range Registrants(b, extended) {
			if err != nil {
				if !errors.Is(err, ErrShort) {
					t.Fatal(err)
				}
				return
			}
			n++
			enc = r.Append(enc, extended)
		}
		if n != int(status.Registrants) || len(enc) != ReservationReportSize(n, extended) || len(enc) > len(b) {
			t.Fatalf("%d of %d entries in %d bytes", n, status.Registrants, len(enc))
		}
		again := enc[:0:0]
		again = status.Append(again, extended)
		for r, err := range Registrants(enc, extended) {
			if err != nil {
				t.Fatal(err)
			}
			again = r.Append(again, extended)
		}
		if !bytes.Equal(enc, again) {
			t.Fatal(diff(again, enc))
		}
	})
}

// FuzzNSIDs decodes a list of namespaces.
func FuzzNSIDs(f *testing.F) {
	f.Add(uint32(1), AppendNSIDs(nil, []uint32{2, 3, 256}))
	f.Add(uint32(0), AppendNSIDs(nil, []uint32{AllNamespaces}))
	f.Fuzz(func(t *testing.T, after uint32, b []byte) {
		if len(b) < IdentifySize {
			b = append(b, make([]byte, IdentifySize-len(b))...)
		}
		if ids, full, err := ActiveNSIDs(nil, b, after); err == nil {
			again, full2, err := ActiveNSIDs(nil, AppendNSIDs(nil, ids), after)
			if err != nil || full != full2 || !reflect.DeepEqual(ids, again) {
				t.Fatal(ids, again, err)
			}
		}
	})
}
