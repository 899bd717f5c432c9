package metarpc

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// appender is the writer a msgpack encoder appends through.
type appender struct {
	enc *msgpack.Encoder
	b   []byte
}

func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

func (a *appender) WriteByte(c byte) error {
	a.b = append(a.b, c)
	return nil
}

var appenders = sync.Pool{New: func() any { return &appender{enc: msgpack.NewEncoder(nil)} }}

// appendFrame appends a whole frame: length, array of the given number of elements, kind, and what body encodes.
func appendFrame(b []byte, kind Kind, elements int, body func(*appender) error) ([]byte, error) {
	a := appenders.Get().(*appender)
	defer func() {
		a.b = nil
		appenders.Put(a)
	}()
	start := len(b)
	a.b = append(b, 0, 0, 0, 0)
	a.enc.Reset(a)
	a.enc.UseCompactInts(true)
	err := a.enc.EncodeArrayLen(elements)
	if err == nil {
		err = a.enc.EncodeUint(uint64(kind))
	}
	if err == nil {
		err = body(a)
	}
	if err != nil {
		return b, err
	}
	n := len(a.b) - start - prefixLen
	if n > MaxFrame {
		return b, fmt.Errorf("frame of %d bytes: %w", n, ErrFrameSize)
	}
	binary.BigEndian.PutUint32(a.b[start:], uint32(n))
	return a.b, nil
}

// encode appends what v points to, or nil, in the form of a version.
func (a *appender) encode(v any, version uint32) error {
	start := len(a.b)
	err := a.enc.Encode(v)
	if err == nil && v != nil && version < Version && shapeOf(reflect.TypeOf(v).Elem()).newest > version {
		a.b = Fit(a.b[:start:start], a.b[start:], v, version)
	}
	return err
}

// AppendHello appends a Hello frame with its length. Like all Append functions it returns b as it came with an error.
func AppendHello(b []byte, h *Hello) ([]byte, error) {
	return appendFrame(b, KindHello, 7, func(a *appender) error {
		return a.enc.EncodeMulti(h.Magic, h.Lowest, h.Highest, &h.Client, &h.Session, h.Shard)
	})
}

// AppendWelcome appends a Welcome frame with its length, in the form of its version. A ring without shards is that of a volume which has one, and one service.
func AppendWelcome(b []byte, w *Welcome) ([]byte, error) {
	ring := &w.Ring
	if len(ring.Owners) == 0 {
		ring = &Ring{Owners: []int{-1}}
	}
	elements := 11
	if w.Version >= topVersion {
		elements++
	}
	return appendFrame(b, KindWelcome, elements, func(a *appender) error {
		err := first(a.enc.EncodeMulti(w.Magic, w.Version, uint32(w.Status), clip(w.Message), &w.Session, &w.Volume, &w.Instance,
			w.Slots, w.Lease), a.encode(ring, w.Version))
		if err == nil && w.Version >= topVersion {
			err = a.enc.EncodeString(w.Top)
		}
		return err
	})
}

// AppendCall appends a Call frame with its length, in the form of Version. args is a pointer to the arguments of h.Op.
func AppendCall(b []byte, h CallHeader, args any) ([]byte, error) {
	return appendFrame(b, KindCall, 6, func(a *appender) error {
		e := a.enc
		// Field by field: EncodeMulti would put each number in an allocated interface.
		return first(e.EncodeInt(int64(h.Slot)), e.EncodeUint(h.Sequence), e.EncodeUint(uint64(h.Op)),
			encodeCred(e, &h.Cred), e.Encode(args))
	})
}

// AppendCallAs appends a frame that AppendCall has made, in the form of a version, which has the call.
func AppendCallAs(b, call []byte, version uint32) []byte {
	if version >= Version {
		return append(b, call...)
	}
	c := cursor{b: call[prefixLen:]}
	c.array()
	c.uint(8)
	c.slot()
	c.sequence()
	op := Op(c.uint(16))
	c.cred()
	start := len(b)
	b = Fit(append(b, call[:len(call)-len(c.b)]...), c.b, op.NewArgs(), version)
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-prefixLen))
	return b
}

func encodeCred(e *msgpack.Encoder, c *Cred) error {
	err := first(e.EncodeArrayLen(4), e.EncodeUint(uint64(c.UID)), e.EncodeUint(uint64(c.GID)))
	if c.Groups == nil {
		err = first(err, e.EncodeNil())
	} else {
		err = first(err, e.EncodeArrayLen(len(c.Groups)))
		for _, g := range c.Groups {
			err = first(err, e.EncodeUint(uint64(g)))
		}
	}
	return first(err, e.EncodeBool(c.ByUID))
}

// AppendReply appends a Reply frame with its length, in the form of a version. result is a pointer to the op's result, or nil with a status
// other than StatusOK. A message longer than MaxMessage is cut.
func AppendReply(b []byte, version uint32, h ReplyHeader, result any) ([]byte, error) {
	return appendFrame(b, KindReply, 6, func(a *appender) error {
		e := a.enc
		return first(e.EncodeInt(int64(h.Slot)), e.EncodeUint(h.Sequence), e.EncodeUint(uint64(h.Status)),
			e.EncodeString(clip(h.Message)), a.encode(result, version))
	})
}

// AppendCallBack appends a CallBack frame with its length, in the form of a version, which has the callback. args is a pointer to the arguments of h.Op.
func AppendCallBack(b []byte, version uint32, h BackHeader, args any) ([]byte, error) {
	if !h.Op.In(version) {
		return b, fmt.Errorf("version %d of the protocol does not have the callback %v", version, h.Op)
	}
	return appendFrame(b, KindCallBack, 4, func(a *appender) error {
		return first(a.enc.EncodeUint(h.Number), a.enc.EncodeUint(uint64(h.Op)), a.encode(args, version))
	})
}

// AppendBackReply appends a BackReply frame with its length.
func AppendBackReply(b []byte, r BackReply) ([]byte, error) {
	return appendFrame(b, KindBackReply, 3, func(a *appender) error {
		return first(a.enc.EncodeUint(r.Number), a.enc.EncodeUint(uint64(r.Status)))
	})
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func clip(message string) string { return message[:min(len(message), MaxMessage)] }
