package metarpc

import (
	"encoding/binary"
	"fmt"
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
func appendFrame(b []byte, kind Kind, elements int, body func(*msgpack.Encoder) error) ([]byte, error) {
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
		err = body(a.enc)
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

// AppendHello appends a Hello frame with its length. Like all Append functions it returns b as it came with an error.
func AppendHello(b []byte, h *Hello) ([]byte, error) {
	return appendFrame(b, KindHello, 7, func(e *msgpack.Encoder) error {
		return e.EncodeMulti(h.Magic, h.Lowest, h.Highest, &h.Client, &h.Session, h.Shard)
	})
}

// AppendWelcome appends a Welcome frame with its length. A ring without shards is that of a volume which has one, and one service.
func AppendWelcome(b []byte, w *Welcome) ([]byte, error) {
	ring := &w.Ring
	if len(ring.Owners) == 0 {
		ring = &Ring{Owners: []int{-1}}
	}
	return appendFrame(b, KindWelcome, 11, func(e *msgpack.Encoder) error {
		return e.EncodeMulti(w.Magic, w.Version, uint32(w.Status), clip(w.Message), &w.Session, &w.Volume, &w.Instance,
			w.Slots, w.Lease, ring)
	})
}

// AppendCall appends a Call frame with its length. args is a pointer to the arguments of h.Op.
func AppendCall(b []byte, h CallHeader, args any) ([]byte, error) {
	return appendFrame(b, KindCall, 6, func(e *msgpack.Encoder) error {
		// Field by field: EncodeMulti would put each number in an allocated interface.
		return first(e.EncodeInt(int64(h.Slot)), e.EncodeUint(h.Sequence), e.EncodeUint(uint64(h.Op)),
			encodeCred(e, &h.Cred), e.Encode(args))
	})
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

// AppendReply appends a Reply frame with its length. result is a pointer to the op's result, or nil with a status
// other than StatusOK. A message longer than MaxMessage is cut.
func AppendReply(b []byte, h ReplyHeader, result any) ([]byte, error) {
	return appendFrame(b, KindReply, 6, func(e *msgpack.Encoder) error {
		return first(e.EncodeInt(int64(h.Slot)), e.EncodeUint(h.Sequence), e.EncodeUint(uint64(h.Status)),
			e.EncodeString(clip(h.Message)), e.Encode(result))
	})
}

// AppendCallBack appends a CallBack frame with its length. args is a pointer to the arguments of h.Op.
func AppendCallBack(b []byte, h BackHeader, args any) ([]byte, error) {
	return appendFrame(b, KindCallBack, 4, func(e *msgpack.Encoder) error {
		return first(e.EncodeUint(h.Number), e.EncodeUint(uint64(h.Op)), e.Encode(args))
	})
}

// AppendBackReply appends a BackReply frame with its length.
func AppendBackReply(b []byte, r BackReply) ([]byte, error) {
	return appendFrame(b, KindBackReply, 3, func(e *msgpack.Encoder) error {
		return first(e.EncodeUint(r.Number), e.EncodeUint(uint64(r.Status)))
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
