package layout

import (
	"math"
	"net/netip"
	"strings"
	"testing"
)

func TestRange(t *testing.T) {
	for _, c := range []struct {
		r        Range
		end      int64
		text     string
		in, out  [][2]int64 // offset and length of what it contains and what not
		overlaps []Range
		apart    []Range
	}{
		{
			Range{10, 5}, 15, "[10, 15)",
			[][2]int64{{10, 5}, {14, 1}, {15, 0}, {10, 0}}, [][2]int64{{9, 1}, {10, 6}, {15, 1}, {16, 0}, {math.MaxInt64, 1}},
			[]Range{{14, 1}, {0, 11}, {0, ToEOF}, {10, 5}}, []Range{{15, 1}, {0, 10}, {15, ToEOF}, {12, 0}},
		},
		{
			Range{100, ToEOF}, math.MaxInt64, "[100, end)",
			[][2]int64{{100, math.MaxInt64 - 100}, {math.MaxInt64 - 1, 1}, {math.MaxInt64, 0}}, [][2]int64{{99, 1}, {100, math.MaxInt64}, {math.MaxInt64, 1}},
			[]Range{{0, 101}, {math.MaxInt64 - 1, 1}, {200, ToEOF}}, []Range{{0, 100}},
		},
		{
			Range{0, ToEOF}, math.MaxInt64, "[0, end)",
			[][2]int64{{0, math.MaxInt64}}, nil,
			[]Range{{0, 1}}, []Range{{5, 0}},
		},
		{
			Range{math.MaxInt64 - 1, 10}, math.MaxInt64, "[9223372036854775806, 9223372036854775807)",
			[][2]int64{{math.MaxInt64 - 1, 1}}, [][2]int64{{math.MaxInt64 - 1, 2}},
			nil, []Range{{0, math.MaxInt64 - 1}},
		},
	} {
		if c.r.End() != c.end || c.r.String() != c.text {
			t.Errorf("%+v: end %d, text %q", c.r, c.r.End(), c.r)
		}
		for _, x := range c.in {
			if !c.r.Contains(x[0], x[1]) {
				t.Errorf("%v does not contain %d bytes at %d", c.r, x[1], x[0])
			}
		}
		for _, x := range c.out {
			if c.r.Contains(x[0], x[1]) {
				t.Errorf("%v contains %d bytes at %d", c.r, x[1], x[0])
			}
		}
		for _, o := range c.overlaps {
			if !c.r.Overlaps(o) || !o.Overlaps(c.r) {
				t.Errorf("%v and %v do not overlap", c.r, o)
			}
		}
		for _, o := range c.apart {
			if c.r.Overlaps(o) || o.Overlaps(c.r) {
				t.Errorf("%v and %v overlap", c.r, o)
			}
		}
	}
}

func TestValidateSegment(t *testing.T) {
	all := Range{0, ToEOF}
	for name, c := range map[string]struct {
		change func(s *Segment)
		want   string // part of the message; empty: valid
	}{
		"good":              {func(*Segment) {}, ""},
		"one server":        {func(s *Segment) { *s = *segmentOf(all, 0, 1) }, ""},
		"unit, one server":  {func(s *Segment) { *s = *segmentOf(all, 4096, 1) }, ""},
		"negative offset":   {func(s *Segment) { s.Off = -1 }, "offset -1"},
		"no length":         {func(s *Segment) { s.Len = 0 }, "length 0"},
		"iomode any":        {func(s *Segment) { s.IOMode = IOModeAny }, "iomode 3"},
		"iomode 0":          {func(s *Segment) { s.IOMode = 0 }, "iomode 0"},
		"no mirror":         {func(s *Segment) { s.Mirrors = nil }, "0 mirrors"},
		"too many mirrors":  {func(s *Segment) { s.Mirrors = make([]Mirror, MaxMirrors+1) }, "4097 mirrors"},
		"no server":         {func(s *Segment) { s.Mirrors[0].Servers = nil }, "0 data servers"},
		"too many servers":  {func(s *Segment) { *s = *segmentOf(all, 4096, MaxServers+1) }, "4097 data servers"},
		"no unit":           {func(s *Segment) { s.StripeUnit = 0 }, "stripe unit 0"},
		"negative unit":     {func(s *Segment) { s.StripeUnit = -1 }, "stripe unit -1"},
		"unequal mirrors":   {func(s *Segment) { s.Mirrors = append(s.Mirrors, Mirror{Servers: s.Mirrors[0].Servers[:1]}) }, "mirror 1"},
		"no handle":         {func(s *Segment) { s.Mirrors[0].Servers[1].Handles = nil }, "server 1"},
		"too many handles":  {func(s *Segment) { s.Mirrors[0].Servers[1].Handles = make([][]byte, MaxVersions+1) }, "17 file handles"},
		"empty handle":      {func(s *Segment) { s.Mirrors[0].Servers[1].Handles = [][]byte{{1}, nil} }, "0 bytes"},
		"handle too long":   {func(s *Segment) { s.Mirrors[0].Servers[1].Handles = [][]byte{make([]byte, MaxHandle+1)} }, "129 bytes"},
		"longest of handle": {func(s *Segment) { s.Mirrors[0].Servers[1].Handles = [][]byte{make([]byte, MaxHandle)} }, ""},
	} {
		s := segmentOf(all, 4096, 2)
		c.change(s)
		err := s.Validate()
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

func TestValidateDevice(t *testing.T) {
	good := Device{
		Addrs:    []NetAddr{{"tcp", netip.MustParseAddrPort("192.0.2.1:2049")}, {"tcp6", netip.MustParseAddrPort("[2001:db8::1]:20049")}},
		Versions: []Version{{Version: 3, RSize: 1 << 20, WSize: 1 << 20}},
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(d *Device){
		"no address":         func(d *Device) { d.Addrs = nil },
		"too many addresses": func(d *Device) { d.Addrs = make([]NetAddr, MaxAddresses+1) },
		"no version":         func(d *Device) { d.Versions = nil },
		"too many versions":  func(d *Device) { d.Versions = make([]Version, MaxVersions+1) },
		"invalid address":    func(d *Device) { d.Addrs = []NetAddr{{}} },
		"port 0":             func(d *Device) { d.Addrs = []NetAddr{{"tcp", netip.MustParseAddrPort("192.0.2.1:0")}} },
	} {
		d := good
		change(&d)
		if err := d.Validate(); err == nil || !strings.Contains(err.Error(), d.ID.String()) {
			t.Errorf("%s: %v, want an error that names the device", name, err)
		}
	}
}

func TestFind(t *testing.T) {
	seg := func(off, n int64, mode IOMode, flags Flags) Segment {
		s := *segmentOf(Range{off, n}, 4096, 1)
		s.IOMode, s.Flags = mode, flags
		return s
	}
	l := Layout{Segments: []Segment{
		seg(0, 4096, IOModeRW, 0),
		seg(0, 8192, IOModeRead, 0),
		seg(100, ToEOF, IOModeRW, FlagNoReadIO),
		seg(20000, 100, IOModeRead, 0),
	}}
	for _, c := range []struct {
		mode   IOMode
		off, n int64
		want   int // index, -1: none
		covers int64
	}{
		{IOModeRead, 0, 4096, 0, 4096},
		{IOModeRead, 0, 4097, 1, 4097},
		{IOModeRead, 8000, 1000, 1, 192},
		{IOModeRead, 8192, 1, -1, 0},
		{IOModeRead, 20050, 500, 3, 50},
		{IOModeRW, 0, 10, 0, 10},
		{IOModeRW, 0, 5000, 0, 4096},
		{IOModeRW, 200, 5000, 2, 5000},
		{IOModeRW, math.MaxInt64 - 5, 5, 2, 5},
	} {
		got, n := l.Find(c.mode, c.off, c.n)
		var want *Segment
		if c.want >= 0 {
			want = &l.Segments[c.want]
		}
		if got != want || n != c.covers {
			t.Errorf("%v of %d bytes at %d: %v covers %d; want segment %d, %d", c.mode, c.n, c.off, got, n, c.want, c.covers)
		}
	}
	var none Layout
	if s, n := none.Find(IOModeRead, 0, 1); s != nil || n != 0 {
		t.Errorf("empty layout: %v, %d", s, n)
	}
}

func TestEfficiency(t *testing.T) {
	m := Mirror{Servers: []DataFile{{Efficiency: math.MaxUint32}, {Efficiency: math.MaxUint32}, {Efficiency: 1}}}
	if got := m.Efficiency(); got != 2*math.MaxUint32+1 {
		t.Errorf("%d", got)
	}
}

func TestStrings(t *testing.T) {
	for want, got := range map[string]interface{ String() string }{
		"read":                             IOModeRead,
		"rw":                               IOModeRW,
		"any":                              IOModeAny,
		"iomode(9)":                        IOMode(9),
		"READ":                             OpRead,
		"WRITE":                            OpWrite,
		"COMMIT":                           OpCommit,
		"op(0)":                            OpKind(0),
		"UNSTABLE":                         Unstable,
		"DATA_SYNC":                        DataSync,
		"FILE_SYNC":                        FileSync,
		"stable_how(3)":                    Stability(3),
		"read-write":                       ExtentReadWrite,
		"invalid":                          ExtentInvalid,
		"none":                             ExtentNone,
		"extent state(4)":                  ExtentState(4),
		"0102030405060708090a0b0c0d0e0f10": DeviceID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
		"stripe_unit=4096 mirrors=2":       Policy{StripeUnit: 4096, Mirrors: 2},
	} {
		if got.String() != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
