package flexfiles

import (
	"bytes"
	"fmt"
	"math"
	"time"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
)

const (
	deviceErrorSize = 16 + 4 + 4
	minIOError      = 8 + 8 + 16 + 4
	minIOStats      = 8 + 8 + 16 + 2*16 + 16 + minUpdate
	latencySize     = 5*8 + 2*timeSize
	timeSize        = 8 + 4
	minUpdate       = minNetAddr + minOpaque + 2*latencySize + timeSize + 4
)

// DeviceError is an error that a client met on a device (device_error4). Status and Op are numbers of NFSv4, also for
// an NFSv3 device.
type DeviceError struct {
	Device layout.DeviceID
	Status uint32
	Op     uint32
}

// IOError is the errors that a client met in a range of a file (ff_ioerr4), and the arguments of LAYOUTERROR.
type IOError struct {
	layout.Range
	Stateid layout.Stateid
	Errors  []DeviceError
}

// Append encodes the message.
func (e *IOError) Append(b []byte) []byte {
	b = appendRange(b, e.Range)
	b = append(b, e.Stateid[:]...)
	b = xdr.AppendUint32(b, uint32(len(e.Errors)))
	for i := range e.Errors {
		b = append(b, e.Errors[i].Device[:]...)
		b = xdr.AppendUint32(b, e.Errors[i].Status)
		b = xdr.AppendUint32(b, e.Errors[i].Op)
	}
	return b
}

// Decode takes the message.
func (e *IOError) Decode(d *xdr.Decoder) error {
	e.decode(d)
	return wrap("layout error", d.Err())
}

func (e *IOError) decode(d *xdr.Decoder) {
	e.Range = decodeRange(d)
	copy(e.Stateid[:], d.FixedOpaque(len(e.Stateid)))
	e.Errors = make([]DeviceError, decodeCount(d, "errors", math.MaxInt32, deviceErrorSize))
	for i := range e.Errors {
		copy(e.Errors[i].Device[:], d.FixedOpaque(len(e.Errors[i].Device)))
		e.Errors[i].Status = d.Uint32()
		e.Errors[i].Op = d.Uint32()
	}
}

// IOInfo counts I/O (io_info4).
type IOInfo struct {
	Count, Bytes uint64
}

func (i IOInfo) append(b []byte) []byte {
	b = xdr.AppendUint64(b, i.Count)
	return xdr.AppendUint64(b, i.Bytes)
}

func (i *IOInfo) decode(d *xdr.Decoder) {
	i.Count = d.Uint64()
	i.Bytes = d.Uint64()
}

// IOLatency is what a client measured of one kind of requests to a device, since it has the layout (ff_io_latency4).
type IOLatency struct {
	OpsRequested, BytesRequested uint64
	OpsCompleted, BytesCompleted uint64
	BytesNotDelivered            uint64
	Busy                         time.Duration // with at least one request outstanding
	Completion                   time.Duration // sum of the times of all requests
}

func (l *IOLatency) append(b []byte) []byte {
	b = xdr.AppendUint64(b, l.OpsRequested)
	b = xdr.AppendUint64(b, l.BytesRequested)
	b = xdr.AppendUint64(b, l.OpsCompleted)
	b = xdr.AppendUint64(b, l.BytesCompleted)
	b = xdr.AppendUint64(b, l.BytesNotDelivered)
	b = appendDuration(b, l.Busy)
	return appendDuration(b, l.Completion)
}

func (l *IOLatency) decode(d *xdr.Decoder) {
	l.OpsRequested = d.Uint64()
	l.BytesRequested = d.Uint64()
	l.OpsCompleted = d.Uint64()
	l.BytesCompleted = d.Uint64()
	l.BytesNotDelivered = d.Uint64()
	l.Busy = decodeDuration(d)
	l.Completion = decodeDuration(d)
}

// LayoutUpdate is the part of the statistics that is about Flex Files (ff_layoutupdate4).
type LayoutUpdate struct {
	Addr        layout.NetAddr
	Handle      []byte
	Read, Write IOLatency
	Duration    time.Duration // over which was measured
	Local       bool          // served by the client's own cache
}

func (u *LayoutUpdate) append(b []byte) []byte {
	b = appendNetAddr(b, u.Addr)
	b = xdr.AppendOpaque(b, u.Handle)
	b = u.Read.append(b)
	b = u.Write.append(b)
	b = appendDuration(b, u.Duration)
	return xdr.AppendBool(b, u.Local)
}

// decode takes the message; Addr stays zero if its transport is unknown.
func (u *LayoutUpdate) decode(d *xdr.Decoder) {
	u.Addr, _ = decodeNetAddr(d)
	u.Handle = bytes.Clone(d.Opaque(layout.MaxHandle))
	u.Read.decode(d)
	u.Write.decode(d)
	u.Duration = decodeDuration(d)
	u.Local = d.Bool()
}

// IOStats is a client's statistics of a range of a file on one device (ff_iostats4).
type IOStats struct {
	layout.Range
	Stateid     layout.Stateid
	Read, Write IOInfo
	Device      layout.DeviceID
	Update      LayoutUpdate
}

// Append encodes the message as an ff_iostats4.
func (s *IOStats) Append(b []byte) []byte {
	return s.Update.append(s.appendHead(b))
}

// AppendArgs encodes the message as the arguments of LAYOUTSTATS. That must be the last operation of its compound: a
// server is known that does not get behind them.
func (s *IOStats) AppendArgs(b []byte) []byte {
	b = s.appendHead(b)
	b = xdr.AppendUint32(b, LayoutType)
	return xdr.AppendOpaque(b, s.Update.append(nil))
}

func (s *IOStats) appendHead(b []byte) []byte {
	b = appendRange(b, s.Range)
	b = append(b, s.Stateid[:]...)
	b = s.Read.append(b)
	b = s.Write.append(b)
	return append(b, s.Device[:]...)
}

// Decode takes the message as an ff_iostats4.
func (s *IOStats) Decode(d *xdr.Decoder) error {
	s.decodeHead(d)
	s.Update.decode(d)
	return wrap("statistics", d.Err())
}

// DecodeArgs takes the message as the arguments of LAYOUTSTATS.
func (s *IOStats) DecodeArgs(d *xdr.Decoder) error {
	s.decodeHead(d)
	decodeType(d)
	update := xdr.NewDecoder(d.Opaque(math.MaxInt32))
	if d.Err() == nil {
		s.Update.decode(&update)
		if err := update.Err(); err != nil {
			d.Fail(err)
		}
	}
	return wrap("statistics", d.Err())
}

func (s *IOStats) decodeHead(d *xdr.Decoder) {
	s.Range = decodeRange(d)
	copy(s.Stateid[:], d.FixedOpaque(len(s.Stateid)))
	s.Read.decode(d)
	s.Write.decode(d)
	copy(s.Device[:], d.FixedOpaque(len(s.Device)))
}

// Return is what a client says when it gives a layout back (ff_layoutreturn4).
type Return struct {
	Errors []IOError
	Stats  []IOStats
}

// Append encodes the message.
func (r *Return) Append(b []byte) []byte {
	b = xdr.AppendUint32(b, uint32(len(r.Errors)))
	for i := range r.Errors {
		b = r.Errors[i].Append(b)
	}
	b = xdr.AppendUint32(b, uint32(len(r.Stats)))
	for i := range r.Stats {
		b = r.Stats[i].Append(b)
	}
	return b
}

// Decode takes the message.
func (r *Return) Decode(d *xdr.Decoder) error {
	r.Errors = make([]IOError, decodeCount(d, "error reports", math.MaxInt32, minIOError))
	for i := range r.Errors {
		r.Errors[i].decode(d)
	}
	r.Stats = make([]IOStats, decodeCount(d, "statistics", math.MaxInt32, minIOStats))
	for i := range r.Stats {
		r.Stats[i].decodeHead(d)
		r.Stats[i].Update.decode(d)
	}
	return wrap("layout return", d.Err())
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("flexfiles: %s: %w", what, err)
}

// appendDuration encodes a duration of at least 0 as an nfstime4.
func appendDuration(b []byte, t time.Duration) []byte {
	b = xdr.AppendUint64(b, uint64(t/time.Second))
	return xdr.AppendUint32(b, uint32(t%time.Second))
}

func decodeDuration(d *xdr.Decoder) time.Duration {
	sec, nsec := d.Uint64(), d.Uint32()
	if sec >= uint64(math.MaxInt64/time.Second) || nsec >= uint32(time.Second) {
		d.Fail(fmt.Errorf("duration of %d s and %d ns: %w", int64(sec), nsec, xdr.ErrInvalid))
		return 0
	}
	return time.Duration(sec)*time.Second + time.Duration(nsec)
}
