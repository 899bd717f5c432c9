package flexfiles

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
	"github.com/weftfs/weft/layout"
)

// wholeFile is what the captured layouts do not say themselves.
var wholeFile = layout.Range{Len: layout.ToEOF}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The layouts of a real server decode to what an independent decoder found in them, and encode to the same bytes.
func TestCapturedLayouts(t *testing.T) {
	type server struct{ device, handle string }
	want := []struct {
		servers [][]server
		gid     uint32
		stateid string
	}{
		{[][]server{{{"00000001000000000000000100000000", "4300000a12448b04cfccd9934d3c010380a0001f27142c00"}}}, 0, "000000010000000118e9fd0ded71e006"},
		{[][]server{{
			{"00000001000000000000000100000000", "4300000a12448b04cfccd9934d3c010b80a0002f9337d000"},
			{"00000001000000010000000100000000", "4300000b12448b04cfccd9934d3c0181439f0059d7a22b00"},
			{"00000001000000020000000100000000", "4300000c12448b04cfccd9934d3c016420a1004652073600"},
			{"00000001000000030000000100000000", "4300000d12448b04cfccd9934d3c015520a100e45c819700"},
		}}, 0, "000000010000000118e9fd6fd3c7d02c"},
		{[][]server{
			{{"00000001000000000000000100000000", "4300000a12448b04cfccd9934d3c010380a0001f27142c00"}},
			{{"00000001000000010000000100000000", "4300000b12448b04cfccd9934d3c0180439f00ff3eee0000"}},
		}, 0, "000000010000000118e9fd10c63b0d3e"},
		{[][]server{
			{{"00000001000000000000000100000000", "4300000a12448b04cfccd9934d3c010b80a0002f9337d000"}},
			{{"00000001000000010000000100000000", "4300000b12448b04cfccd9934d3c0181439f0059d7a22b00"}},
			{{"00000001000000020000000100000000", "4300000c12448b04cfccd9934d3c016420a1004652073600"}},
			{{"00000001000000030000000100000000", "4300000d12448b04cfccd9934d3c015520a100e45c819700"}},
		}, 0, "000000010000000118e9fd0f5a6822ec"},
		{[][]server{
			{{"00000001000000000000000100000000", "4300000a12448b04cfccd9934d3c010380a0001f27142c00"}},
			{{"00000001000000010000000100000000", "4300000b12448b04cfccd9934d3c0180439f00ff3eee0000"}},
			{{"00000001000000020000000100000000", "4300000c12448b04cfccd9934d3c013521a1005127bfd900"}},
			{{"00000001000000030000000100000000", "4300000d12448b04cfccd9934d3c014421a100b083f5da00"}},
		}, 0, "000000010000000118e9fd1234a266a2"},
		{[][]server{{{"00000001000000030000000100000000", "4300000d12448b04cfccd9934d3c014420a100d43a208900"}}}, 1000, "000000010000000118e9fdb3d46103f2"},
		{[][]server{{{"00000001000000000000000000000000", "0100078163350c06000000006c9427a812a84a6693761b27c36e7995d550b60000000000d789ca85"}}}, 1000, "000000010000000118b708dfdafcabd5"},
	}
	captured := xdrtest.Exchanges(t, "testdata/layouts.txt")
	if len(captured) != len(want) {
		t.Fatalf("%d layouts", len(captured))
	}
	for i, c := range captured {
		s, err := DecodeLayout(c.Call, wholeFile, layout.IOModeRW)
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		if got := AppendLayout(nil, s); !bytes.Equal(got, c.Call) {
			t.Errorf("%s: encodes as\n%x, captured\n%x", c.Name, got, c.Call)
		}
		w := &layout.Segment{Range: wholeFile, IOMode: layout.IOModeRW, StripeUnit: 65536}
		for _, servers := range want[i].servers {
			var m layout.Mirror
			for _, server := range servers {
				f := layout.DataFile{Handles: [][]byte{unhex(t, server.handle)}, Cred: layout.Credential{GID: want[i].gid}}
				copy(f.Device[:], unhex(t, server.device))
				copy(f.Stateid[:], unhex(t, want[i].stateid))
				m.Servers = append(m.Servers, f)
			}
			w.Mirrors = append(w.Mirrors, m)
		}
		if !reflect.DeepEqual(s, w) {
			t.Errorf("%s:\n%+v, want\n%+v", c.Name, s, w)
		}
		if CheckHandles(&s.Mirrors[0].Servers[0], &layout.Device{Versions: make([]layout.Version, 1)}) != nil ||
			CheckHandles(&s.Mirrors[0].Servers[0], &layout.Device{Versions: make([]layout.Version, 2)}) == nil {
			t.Errorf("%s: handles and versions", c.Name)
		}
	}
}

// The length that knfsd declares ends inside the last field.
func TestShortLayout(t *testing.T) {
	body := xdrtest.Exchanges(t, "testdata/knfsd-6.12.txt")[0].Call
	if len(body) != 102 {
		t.Fatalf("%d bytes", len(body))
	}
	want := &layout.Segment{
		Range: wholeFile, IOMode: layout.IOModeRW, Flags: layout.FlagNoLayoutCommit | layout.FlagNoIOThruMDS | layout.FlagNoReadIO,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{{
			Device: layout.DeviceID{3}, Efficiency: 1, Stateid: layout.Stateid{3: 1},
			Handles: [][]byte{unhex(t, "010001010d000000e57df23b0200000000000000")},
		}}}},
	}
	segment := xdrtest.Hex(t, `
		00000000 00000000 ffffffff ffffffff 00000002 00000004 -- range, LAYOUTIOMODE4_RW, LAYOUT4_FLEX_FILES
		00000066                                              -- 102 bytes
	`)
	d := xdr.NewDecoder(append(append(segment, body...), 0, 0))
	if s, err := DecodeSegment(&d); err != nil || len(d.Rest()) != 0 || !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, %v, want %+v", s, err, want)
	}
	// User and group of three digits each make it too long.
	long := append(AppendLayout(nil, want), 1, 2)
	if s, err := DecodeLayout(long, wholeFile, layout.IOModeRW); err != nil || !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, %v, want %+v", s, err, want)
	}
}

// A layout that is cut anywhere is refused, unless it is flags and hint that are missing. A cut inside a unit of four bytes
// may show as another fault than a short layout.
func TestCutLayouts(t *testing.T) {
	for _, c := range xdrtest.Exchanges(t, "testdata/layouts.txt") {
		whole, err := DecodeLayout(c.Call, wholeFile, layout.IOModeRW)
		if err != nil {
			t.Fatal(err)
		}
		group := strconv.Itoa(int(whole.Mirrors[0].Servers[0].Cred.GID))
		need := len(c.Call) - 4 - 4 - xdr.Pad(len(group)) // flags and hint are 0, as is the padding before them
		for n := range c.Call {
			s, err := DecodeLayout(c.Call[:n], wholeFile, layout.IOModeRW)
			if n >= need {
				if err != nil || !reflect.DeepEqual(s, whole) {
					t.Errorf("%s: %d bytes of %d: %v", c.Name, n, len(c.Call), err)
				}
			} else if err == nil || s != nil || n%4 == 0 && !errors.Is(err, xdr.ErrTruncated) {
				t.Errorf("%s: %d bytes of %d: %v", c.Name, n, len(c.Call), err)
			}
		}
	}
}

func TestCapturedDevices(t *testing.T) {
	tcp := func(addr string) layout.NetAddr {
		return layout.NetAddr{NetID: "tcp", Addr: netip.MustParseAddrPort(addr)}
	}
	rdma := layout.NetAddr{NetID: "rdma", Addr: netip.MustParseAddrPort("10.10.10.51:20049")}
	want := [][]layout.NetAddr{
		{tcp("10.10.10.52:2049")}, {tcp("10.10.10.53:2049")}, {tcp("10.10.10.54:2049")}, {tcp("10.10.10.51:2049")},
		{tcp("10.10.10.51:2049"), rdma}, {rdma}, {tcp("10.0.0.13:2049")},
	}
	captured := xdrtest.Exchanges(t, "testdata/devices.txt")
	if len(captured) != len(want) {
		t.Fatalf("%d devices", len(captured))
	}
	for i, c := range captured {
		var id layout.DeviceID
		copy(id[:], unhex(t, c.Name[:32]))
		d := xdr.NewDecoder(c.Call)
		dev, err := DecodeDevice(&d, id)
		if err != nil || len(d.Rest()) != 0 {
			t.Errorf("%s: %v, %d bytes left", c.Name, err, len(d.Rest()))
			continue
		}
		w := layout.Device{ID: id, Addrs: want[i], Versions: []layout.Version{{Version: 3, RSize: 1 << 20, WSize: 1 << 20}}}
		if !reflect.DeepEqual(dev, w) {
			t.Errorf("%s: %+v, want %+v", c.Name, dev, w)
		}
		if got := AppendDevice(nil, &dev); !bytes.Equal(got, c.Call) {
			t.Errorf("%s: encodes as\n%x, captured\n%x", c.Name, got, c.Call)
		}
		for n := range c.Call {
			d := xdr.NewDecoder(c.Call[:n])
			if _, err := DecodeDevice(&d, id); !errors.Is(err, xdr.ErrTruncated) {
				t.Errorf("%s: %d bytes of %d: %v", c.Name, n, len(c.Call), err)
			}
		}
	}
}

// What the Linux client gets and sends, at the end of whole records.
func TestCapturedRecords(t *testing.T) {
	captured := xdrtest.Exchanges(t, "testdata/linux-6.12.txt")

	b := captured[0].Reply
	b = b[len(b)-(8+8+4+4+4+108):]
	d := xdr.NewDecoder(b)
	s, err := DecodeSegment(&d)
	if err != nil || len(d.Rest()) != 0 {
		t.Fatalf("%s: %v, %d bytes left", captured[0].Name, err, len(d.Rest()))
	}
	if s.Range != (layout.Range{Len: 64 << 30}) || s.IOMode != layout.IOModeRW || s.StripeUnit != 65536 || s.Width() != 1 {
		t.Errorf("segment %+v", s)
	}
	if got := AppendSegment(nil, s); !bytes.Equal(got, b) {
		t.Errorf("encodes as\n%x, captured\n%x", got, b)
	}
	handle := s.Mirrors[0].Servers[0].Handles[0]

	b = captured[1].Reply
	b = b[len(b)-4-56 : len(b)-4] // an empty bitmap of notifications follows
	d = xdr.NewDecoder(b)
	dev, err := DecodeDevice(&d, s.Mirrors[0].Servers[0].Device)
	if err != nil || !bytes.Equal(AppendDevice(nil, &dev), b) {
		t.Errorf("%s: %v", captured[1].Name, err)
	}

	b = captured[3].Call
	b = b[len(b)-288:]
	d = xdr.NewDecoder(b)
	var r Return
	if err := r.Decode(&d); err != nil || len(d.Rest()) != 0 {
		t.Fatalf("%s: %v, %d bytes left", captured[3].Name, err, len(d.Rest()))
	}
	var stateid layout.Stateid
	copy(stateid[:], unhex(t, "000000010000000118e9fd6fd3c7d02f"))
	want := Return{Errors: []IOError{}, Stats: []IOStats{{
		Range: wholeFile, Stateid: stateid, Device: dev.ID,
		Write: IOInfo{Count: 1, Bytes: 17},
		Update: LayoutUpdate{
			Addr: dev.Addrs[0], Handle: handle, Duration: 0x2126362c,
			Write: IOLatency{OpsRequested: 1, BytesRequested: 17, OpsCompleted: 1, BytesCompleted: 17, Busy: 0x2fd36b, Completion: 0x2fd36b},
		},
	}}}
	if !reflect.DeepEqual(r, want) {
		t.Errorf("%s:\n%+v, want\n%+v", captured[3].Name, r, want)
	}
	if got := r.Append(nil); !bytes.Equal(got, b) {
		t.Errorf("encodes as\n%x, captured\n%x", got, b)
	}
	for n := range b {
		d := xdr.NewDecoder(b[:n])
		if err := new(Return).Decode(&d); !errors.Is(err, xdr.ErrTruncated) {
			t.Errorf("%d bytes of %d: %v", n, len(b), err)
		}
	}
}

func exampleSegment() *layout.Segment {
	file := func(n byte) layout.DataFile {
		return layout.DataFile{
			Device: layout.DeviceID{n}, Efficiency: uint32(n), Stateid: layout.Stateid{15: n},
			Handles: [][]byte{{n}, {n, n, n, n}}, Cred: layout.Credential{UID: 1000 + uint32(n), GID: 7},
		}
	}
	return &layout.Segment{
		Range: layout.Range{Off: 1 << 32, Len: layout.ToEOF}, IOMode: layout.IOModeRead, StripeUnit: 1 << 20,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{file(1), file(2)}}},
		Flags:   layout.FlagNoLayoutCommit | layout.FlagWriteOneMirror, StatsHint: 60,
	}
}

const segmentHex = `
	00000001 00000000                      -- offset 2^32
	ffffffff ffffffff                      -- length: to the end of the file
	00000001                               -- LAYOUTIOMODE4_READ
	00000004                               -- LAYOUT4_FLEX_FILES
	000000a8                               -- 168 bytes:
	00000000 00100000                      -- stripe unit
	00000001                               -- mirrors
	00000002                               -- data servers
	01000000 00000000 00000000 00000000    -- deviceid
	00000001                               -- efficiency
	00000000 00000000 00000000 00000001    -- stateid
	00000002                               -- file handles
	00000001 01000000
	00000004 01010101
	00000004 31303031                      -- user 1001
	00000001 37000000                      -- group 7
	02000000 00000000 00000000 00000000
	00000002
	00000000 00000000 00000000 00000002
	00000002
	00000001 02000000
	00000004 02020202
	00000004 31303032
	00000001 37000000
	00000009                               -- flags
	0000003c                               -- statistics every 60 s
`

func exampleDevice() layout.Device {
	return layout.Device{
		ID: layout.DeviceID{1},
		Addrs: []layout.NetAddr{
			{NetID: "tcp6", Addr: netip.MustParseAddrPort("[2001:db8::1]:2049")},
			{NetID: "tcp", Addr: netip.MustParseAddrPort("192.0.2.1:255")},
		},
		Versions: []layout.Version{{Version: 4, Minor: 1, RSize: 1 << 20, WSize: 1 << 16, TightlyCoupled: true}, {Version: 3, RSize: 5, WSize: 6}},
	}
}

const deviceHex = `
	00000002                               -- addresses
	00000004 74637036                      -- tcp6
	0000000f 32303031 3a646238 3a3a312e 382e3100   -- 2001:db8::1.8.1
	00000003 74637000                      -- tcp
	0000000f 3139322e 302e322e 312e302e 32353500   -- 192.0.2.1.0.255
	00000002                               -- versions
	00000004 00000001 00100000 00010000 00000001
	00000003 00000000 00000005 00000006 00000000
`

func exampleError() IOError {
	return IOError{
		Range: layout.Range{Off: 4096, Len: 8192}, Stateid: layout.Stateid{15: 9},
		Errors: []DeviceError{{Device: layout.DeviceID{1}, Status: 13, Op: 38}, {Device: layout.DeviceID{2}, Status: 6, Op: 25}},
	}
}

const errorHex = `
	00000000 00001000 00000000 00002000    -- range
	00000000 00000000 00000000 00000009    -- stateid
	00000002                               -- errors
	01000000 00000000 00000000 00000000 0000000d 00000026   -- NFS4ERR_ACCESS, WRITE
	02000000 00000000 00000000 00000000 00000006 00000019   -- NFS4ERR_NXIO, READ
`

func exampleStats() IOStats {
	return IOStats{
		Range: layout.Range{Len: layout.ToEOF}, Stateid: layout.Stateid{15: 9}, Device: layout.DeviceID{1},
		Read: IOInfo{1, 2}, Write: IOInfo{3, 4},
		Update: LayoutUpdate{
			Addr: layout.NetAddr{NetID: "tcp", Addr: netip.MustParseAddrPort("192.0.2.1:2049")}, Handle: []byte{1, 2, 3, 4, 5},
			Read: IOLatency{
				OpsRequested: 1, BytesRequested: 2, OpsCompleted: 3, BytesCompleted: 4, BytesNotDelivered: 5,
				Busy: 6*time.Second + 7, Completion: 8,
			},
			Duration: time.Minute, Local: true,
		},
	}
}

const statsHex = `
	00000000 00000000 ffffffff ffffffff    -- range
	00000000 00000000 00000000 00000009    -- stateid
	00000000 00000001 00000000 00000002    -- read: count, bytes
	00000000 00000003 00000000 00000004    -- written
	01000000 00000000 00000000 00000000    -- deviceid
`

const updateHex = `
	00000003 74637000                      -- tcp
	0000000d 3139322e 302e322e 312e382e 31000000   -- 192.0.2.1.8.1
	00000005 01020304 05000000             -- file handle
	00000000 00000001 00000000 00000002    -- READ: requested
	00000000 00000003 00000000 00000004    -- completed
	00000000 00000005                      -- not delivered
	00000000 00000006 00000007             -- busy
	00000000 00000000 00000008             -- completion
	00000000 00000000 00000000 00000000    -- WRITE
	00000000 00000000 00000000 00000000
	00000000 00000000
	00000000 00000000 00000000
	00000000 00000000 00000000
	00000000 0000003c 00000000             -- duration
	00000001                               -- local
`

func TestGolden(t *testing.T) {
	seg, dev, ioerr, stats := exampleSegment(), exampleDevice(), exampleError(), exampleStats()
	ret := Return{Errors: []IOError{ioerr, ioerr}, Stats: []IOStats{stats}}
	for _, tt := range []struct {
		name   string
		got    []byte
		hex    string
		decode func(d *xdr.Decoder) (any, error)
		want   any
	}{
		{"layout4", AppendSegment(nil, seg), segmentHex,
			func(d *xdr.Decoder) (any, error) { return DecodeSegment(d) }, seg},
		{"ff_device_addr4", AppendDevice(nil, &dev), deviceHex,
			func(d *xdr.Decoder) (any, error) { return DecodeDevice(d, dev.ID) }, dev},
		{"ff_ioerr4", ioerr.Append(nil), errorHex,
			func(d *xdr.Decoder) (any, error) { var e IOError; err := e.Decode(d); return e, err }, ioerr},
		{"ff_iostats4", stats.Append(nil), statsHex + updateHex,
			func(d *xdr.Decoder) (any, error) { var s IOStats; err := s.Decode(d); return s, err }, stats},
		{"LAYOUTSTATS", stats.AppendArgs(nil), statsHex + "00000004 000000b8 -- type, length" + updateHex,
			func(d *xdr.Decoder) (any, error) { var s IOStats; err := s.DecodeArgs(d); return s, err }, stats},
		{"ff_layoutreturn4", ret.Append(nil), "00000002" + errorHex + errorHex + "00000001" + statsHex + updateHex,
			func(d *xdr.Decoder) (any, error) { var r Return; err := r.Decode(d); return r, err }, ret},
	} {
		want := xdrtest.Hex(t, tt.hex)
		if !bytes.Equal(tt.got, want) {
			t.Errorf("%s encodes as\n%x, want\n%x", tt.name, tt.got, want)
		}
		d := xdr.NewDecoder(append(want, 1, 2, 3))
		v, err := tt.decode(&d)
		if err != nil || !bytes.Equal(d.Rest(), []byte{1, 2, 3}) || !reflect.DeepEqual(v, tt.want) {
			t.Errorf("%s decodes as\n%+v, %v, %x left, want\n%+v", tt.name, v, err, d.Rest(), tt.want)
		}
		for n := range want {
			d := xdr.NewDecoder(want[:n])
			if _, err := tt.decode(&d); !errors.Is(err, xdr.ErrTruncated) {
				t.Errorf("%d bytes of %s: %v", n, tt.name, err)
			}
		}
	}
}

// Nothing that was decoded shares memory with the input.
func TestNoAliases(t *testing.T) {
	seg, stats := exampleSegment(), exampleStats()
	b, b2 := AppendSegment(nil, seg), stats.Append(nil)
	d, d2 := xdr.NewDecoder(b), xdr.NewDecoder(b2)
	got, err := DecodeSegment(&d)
	var gotStats IOStats
	err2 := gotStats.Decode(&d2)
	clear(b)
	clear(b2)
	if err != nil || err2 != nil || !reflect.DeepEqual(got, seg) || !reflect.DeepEqual(gotStats, stats) {
		t.Errorf("%+v, %+v, %v, %v", got, gotStats, err, err2)
	}
}

func TestBadLayouts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(s *layout.Segment)
		want   string
	}{
		{"no mirror", func(s *layout.Segment) { s.Mirrors = nil }, "0 mirrors"},
		{"no data server", func(s *layout.Segment) { s.Mirrors[0].Servers = nil }, "0 data servers"},
		{"no handle", func(s *layout.Segment) { s.Mirrors[0].Servers[1].Handles = nil }, "0 file handles"},
		{"empty handle", func(s *layout.Segment) { s.Mirrors[0].Servers[1].Handles[0] = nil }, "file handle of 0 bytes"},
		{"long handle", func(s *layout.Segment) { s.Mirrors[0].Servers[1].Handles[0] = make([]byte, 129) }, "129 bytes where 128"},
		{"17 handles", func(s *layout.Segment) { s.Mirrors[0].Servers[1].Handles = make([][]byte, 17) }, "17 file handles where 16"},
		{"stripes without a unit", func(s *layout.Segment) { s.StripeUnit = 0 }, "stripe unit 0 with 2"},
		{"huge unit", func(s *layout.Segment) { s.StripeUnit = -1 }, "stripe unit 18446744073709551615"},
		{"mirrors of unequal width", func(s *layout.Segment) {
			s.Mirrors = append(s.Mirrors, layout.Mirror{Servers: s.Mirrors[0].Servers[:1]})
		}, "mirror 1 has 1 data servers, mirror 0 has 2"},
		{"4097 mirrors", func(s *layout.Segment) { s.Mirrors = make([]layout.Mirror, 4097) }, "4097 mirrors where 4096"},
		{"4097 stripes", func(s *layout.Segment) { s.Mirrors[0].Servers = make([]layout.DataFile, 4097) }, "4097 data servers where 4096"},
		{"iomode any", func(s *layout.Segment) { s.IOMode = layout.IOModeAny }, "iomode 3"},
		{"no range", func(s *layout.Segment) { s.Len = 0 }, "length 0"},
		{"range beyond offsets", func(s *layout.Segment) { s.Off = math.MinInt64 }, "offset 9223372036854775808"},
	} {
		s := exampleSegment()
		tt.change(s)
		d := xdr.NewDecoder(AppendSegment(nil, s))
		if _, err := DecodeSegment(&d); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}

	good := xdrtest.Hex(t, segmentHex)
	for _, tt := range []struct{ name, old, new, want string }{
		{"another type", "0000000100000004000000a8", "0000000100000001000000a8", "layout type 1"},
		{"length neither in range nor to the end", "ffffffffffffffff", "fffffffffffffffe", "length 18446744073709551614"},
		{"name as user", "0000000431303031", "0000000462696e40", `user "bin@"`},
		{"user with zeros before it", "0000000431303031", "0000000430303031", `user "0001"`},
		{"user with a sign", "0000000431303031", "000000042b303031", `user "+001"`},
		{"empty group", "000000013700000002", "000000003700000002", `group ""`},
		{"body shorter than said", "000000a8", "000000a4", ""},
		{"body longer than said", "000000a8", "000000ac", "too early"},
	} {
		b := unhex(t, strings.Replace(hex.EncodeToString(good), tt.old, tt.new, 1))
		d := xdr.NewDecoder(b)
		s, err := DecodeSegment(&d)
		if tt.want == "" { // the tolerated form: only the hint is missing
			if err != nil || s.StatsHint != 0 || s.Flags != 9 {
				t.Errorf("%s: %v", tt.name, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	// The numbers of ids end with 32 bits.
	for id, ok := range map[string]bool{"4294967295": true, "4294967296": false} {
		b := xdr.AppendString(nil, id)
		d := xdr.NewDecoder(b)
		if got := decodeID(&d, "user"); ok != (d.Err() == nil) || ok && got != math.MaxUint32 {
			t.Errorf("user %s: %d, %v", id, got, d.Err())
		}
	}
}

func TestBadDevices(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(dev *layout.Device)
		want   string
	}{
		{"no address", func(dev *layout.Device) { dev.Addrs = nil }, "0 addresses"},
		{"65 addresses", func(dev *layout.Device) { dev.Addrs = make([]layout.NetAddr, 65) }, "65 addresses where 64"},
		{"no version", func(dev *layout.Device) { dev.Versions = nil }, "0 protocol versions"},
		{"17 versions", func(dev *layout.Device) { dev.Versions = make([]layout.Version, 17) }, "17 versions where 16"},
		{"no port", func(dev *layout.Device) { dev.Addrs[0].Addr = netip.AddrPortFrom(dev.Addrs[0].Addr.Addr(), 0) }, "bad address"},
		{"unknown transports only", func(dev *layout.Device) { dev.Addrs[0].NetID, dev.Addrs[1].NetID = "udp", "" }, "0 addresses"},
		{"IPv6 address for tcp", func(dev *layout.Device) { dev.Addrs[0].NetID = "tcp" }, `address "2001:db8::1.8.1" for "tcp"`},
	} {
		dev := exampleDevice()
		tt.change(&dev)
		d := xdr.NewDecoder(AppendDevice(nil, &dev))
		if _, err := DecodeDevice(&d, dev.ID); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), dev.ID.String()) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	// The addresses that can be used are.
	dev := exampleDevice()
	dev.Addrs[0].NetID = "vsock"
	d := xdr.NewDecoder(AppendDevice(nil, &dev))
	got, err := DecodeDevice(&d, dev.ID)
	if err != nil || !reflect.DeepEqual(got.Addrs, dev.Addrs[1:]) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestUaddr(t *testing.T) {
	for _, tt := range []struct{ netid, uaddr, addr string }{
		{"tcp", "10.10.10.51.8.1", "10.10.10.51:2049"},
		{"rdma", "10.10.10.51.78.81", "10.10.10.51:20049"},
		{"tcp", "0.0.0.0.0.0", "0.0.0.0:0"},
		{"tcp", "255.255.255.255.255.255", "255.255.255.255:65535"},
		{"tcp6", "::1.8.1", "[::1]:2049"},
		{"rdma6", "2001:db8:0:1::a.0.111", "[2001:db8:0:1::a]:111"},
		{"tcp6", "::ffff:10.0.0.1.8.1", "[::ffff:10.0.0.1]:2049"},
	} {
		want := netip.MustParseAddrPort(tt.addr)
		got, err := ParseUaddr(tt.netid, tt.uaddr)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", tt.uaddr, got, err, want)
		}
		if s := FormatUaddr(want); s != tt.uaddr {
			t.Errorf("%v: %s, want %s", want, s, tt.uaddr)
		}
	}
	for _, tt := range []struct{ netid, uaddr string }{
		{"tcp", ""}, {"tcp", "."}, {"tcp", ".."}, {"tcp", "1.2"}, {"tcp", "10.0.0.1"}, {"tcp", "10.0.0.8.1"},
		{"tcp", "10.0.0.1.8"}, {"tcp", "10.0.0.1.8.256"}, {"tcp", "10.0.0.1.-1.1"}, {"tcp", "10.0.0.1.8.1."},
		{"tcp", "10.0.0.1.8.+1"}, {"tcp", "host.8.1"}, {"tcp", "::1.8.1"}, {"tcp6", "10.0.0.1.8.1"}, {"tcp6", "fe80::1%eth0.8.1"},
		{"tcp6", "[::1].8.1"}, {"tcp", "10.0.0.01.8.1"}, {"tcp", "10.0.0.1:8.1"},
	} {
		if got, err := ParseUaddr(tt.netid, tt.uaddr); !errors.Is(err, xdr.ErrInvalid) || !strings.Contains(err.Error(), tt.uaddr) {
			t.Errorf("%q for %s: %v, %v", tt.uaddr, tt.netid, got, err)
		}
	}
}

func TestBadReports(t *testing.T) {
	stats := exampleStats()
	b := stats.Append(nil)
	for _, tt := range []struct{ name, old, new string }{
		{"negative duration", "00000000000000060000000700", "ffffffffffffffff0000000700"},
		{"duration of centuries", "00000000000000060000000700", "0000000225c17d040000000700"},
		{"a second of nanoseconds", "00000000000000060000000700", "00000000000000063b9aca0000"},
		{"bad address", "3139322e302e322e312e382e31", "3139322e302e322e312e382e2e"},
		{"long handle", "0000000501020304", "0000008101020304"},
	} {
		bad := unhex(t, strings.Replace(hex.EncodeToString(b), tt.old, tt.new, 1))
		d := xdr.NewDecoder(bad)
		if err := new(IOStats).Decode(&d); err == nil || errors.Is(err, xdr.ErrTruncated) || bytes.Equal(bad, b) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	// An address that is none of ours is no reason to refuse a client's statistics.
	stats.Update.Addr.NetID = "vsock"
	d := xdr.NewDecoder(stats.Append(nil))
	var got IOStats
	stats.Update.Addr = layout.NetAddr{}
	if err := got.Decode(&d); err != nil || !reflect.DeepEqual(got, stats) {
		t.Errorf("%+v, %v", got, err)
	}
	b = stats.AppendArgs(nil)
	d = xdr.NewDecoder(unhex(t, strings.Replace(hex.EncodeToString(b), "00000004000000", "00000003000000", 1)))
	if err := got.DecodeArgs(&d); !errors.Is(err, xdr.ErrInvalid) {
		t.Errorf("another type: %v", err)
	}
}
