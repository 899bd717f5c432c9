package flexfiles

import (
	"net/netip"
	"reflect"
	"runtime"
	"testing"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/internal/wire/xdr/xdrtest"
	"github.com/weftfs/weft/layout"
)

// again decodes what v was encoded as and compares.
func again(t *testing.T, v any, b []byte, decode func(d *xdr.Decoder) (any, error)) {
	t.Helper()
	d := xdr.NewDecoder(b)
	got, err := decode(&d)
	if err != nil || len(d.Rest()) != 0 || !reflect.DeepEqual(got, v) {
		t.Errorf("%+v comes back as %+v, %v, %d bytes left", v, got, err, len(d.Rest()))
	}
}

// fuzzDecoder feeds decode, which returns what it made and the encoding of that.
func fuzzDecoder(f *testing.F, decode func(d *xdr.Decoder) (v any, encoded []byte, err error)) {
	f.Fuzz(func(t *testing.T, b []byte) {
		d := xdr.NewDecoder(b)
		v, encoded, err := decode(&d)
		if err != nil {
			return
		}
		again(t, v, encoded, func(d *xdr.Decoder) (any, error) {
			v, _, err := decode(d)
			return v, err
		})
	})
}

func addCaptured(f *testing.F, file string) {
	for _, c := range xdrtest.Exchanges(f, file) {
		f.Add(c.Call)
	}
}

func FuzzLayout(f *testing.F) {
	addCaptured(f, "testdata/layouts.txt")
	addCaptured(f, "testdata/knfsd-6.12.txt")
	f.Add(AppendLayout(nil, exampleSegment()))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		body := d.Rest()
		d.FixedOpaque(len(body) &^ 3)
		s, err := DecodeLayout(body, wholeFile, layout.IOModeRead)
		if err != nil {
			return nil, nil, err
		}
		return s, AppendLayout(nil, s), nil
	})
}

func FuzzSegment(f *testing.F) {
	f.Add(AppendSegment(nil, exampleSegment()))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		s, err := DecodeSegment(d)
		if err != nil {
			return nil, nil, err
		}
		return s, AppendSegment(nil, s), nil
	})
}

func FuzzDevice(f *testing.F) {
	addCaptured(f, "testdata/devices.txt")
	dev := exampleDevice()
	f.Add(AppendDevice(nil, &dev))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		dev, err := DecodeDevice(d, layout.DeviceID{1})
		return dev, AppendDevice(nil, &dev), err
	})
}

func FuzzIOError(f *testing.F) {
	e := exampleError()
	f.Add(e.Append(nil))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		var e IOError
		err := e.Decode(d)
		return e, e.Append(nil), err
	})
}

func FuzzIOStats(f *testing.F) {
	s := exampleStats()
	f.Add(s.Append(nil))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		var s IOStats
		err := s.Decode(d)
		return s, s.Append(nil), err
	})
}

func FuzzStatsArgs(f *testing.F) {
	s := exampleStats()
	f.Add(s.AppendArgs(nil))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		var s IOStats
		err := s.DecodeArgs(d)
		return s, s.AppendArgs(nil), err
	})
}

func FuzzReturn(f *testing.F) {
	r := Return{Errors: []IOError{exampleError()}, Stats: []IOStats{exampleStats()}}
	f.Add(r.Append(nil))
	fuzzDecoder(f, func(d *xdr.Decoder) (any, []byte, error) {
		var r Return
		err := r.Decode(d)
		return r, r.Append(nil), err
	})
}

func FuzzUaddr(f *testing.F) {
	for _, s := range []string{"10.10.10.51.8.1", "2001:db8::1.8.1", "::ffff:10.0.0.1.8.1", "fe80::1%eth0.8.1"} {
		f.Add("tcp", s)
		f.Add("tcp6", s)
	}
	f.Fuzz(func(t *testing.T, netid, uaddr string) {
		a, err := ParseUaddr(netid, uaddr)
		if err != nil {
			if a != (netip.AddrPort{}) {
				t.Errorf("%v with %v", a, err)
			}
			return
		}
		if b, err := ParseUaddr(netid, FormatUaddr(a)); err != nil || a != b {
			t.Errorf("%v comes back as %v, %v", a, b, err)
		}
	})
}

// The largest counts in front of nothing, or of as much as they need at the very least, allocate in proportion to the
// input.
func TestBoundedAllocation(t *testing.T) {
	many := make([]byte, 1<<20)
	layoutHead := xdr.AppendUint32(xdr.AppendUint64(nil, 4096), layout.MaxMirrors)
	layoutOne := xdr.AppendUint32(xdr.AppendUint32(xdr.AppendUint64(nil, 4096), 1), layout.MaxServers)
	huge := xdr.AppendUint32(nil, 1<<32-1)
	for name, decode := range map[string]func() error{
		"mirrors": func() error { _, err := DecodeLayout(append(layoutHead, many...), wholeFile, 1); return err },
		"servers": func() error { _, err := DecodeLayout(append(layoutOne, many...), wholeFile, 1); return err },
		"errors": func() error {
			d := xdr.NewDecoder(append(append(make([]byte, 32), huge...), many...))
			return new(IOError).Decode(&d)
		},
		"reports": func() error { d := xdr.NewDecoder(append(huge, many...)); return new(Return).Decode(&d) },
		"reports that might be": func() error {
			d := xdr.NewDecoder(append(xdr.AppendUint32(nil, uint32(len(many)/minIOError)), many...))
			return new(Return).Decode(&d)
		},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := decode()
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 6*uint64(len(many)) {
			t.Errorf("%s: %d bytes allocated for %d: %v", name, n, len(many), err)
		}
	}
}
