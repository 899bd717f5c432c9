package metarpc

import (
	"errors"
	"fmt"
	"time"

	"github.com/weftfs/weft/layout"
)

// start begins a frame of the given kind and number of elements; 0 leaves the number to the caller.
func start(frame []byte, kind Kind, elements int) cursor {
	c := cursor{b: frame}
	n := c.array()
	k := Kind(c.uint(8))
	switch {
	case c.err != nil:
	case k != kind:
		c.fail("frame of kind %d, want %d", k, kind)
	case elements != 0 && n != elements:
		c.fail("frame of kind %d with %d elements, want %d", k, n, elements)
	}
	return c
}

// ParseHello reads a Hello frame for a service that speaks some versions. Magic and version range come first in every version of the protocol; of a
// hello whose range has none of them nothing else is looked at or set. ErrMagic tells that it is no hello at all.
func ParseHello(frame []byte, speaks Versions) (*Hello, error) {
	c := start(frame, KindHello, 0)
	h := &Hello{Magic: string(c.str())}
	if c.err != nil || h.Magic != Magic {
		return nil, ErrMagic
	}
	h.Lowest, h.Highest = uint32(c.uint(32)), uint32(c.uint(32))
	if c.err == nil && h.Lowest > h.Highest {
		c.fail("versions %d to %d", h.Lowest, h.Highest)
	}
	if c.err != nil {
		return nil, c.err
	}
	version, ok := speaks.Choose(h.Versions())
	if !ok {
		return h, nil
	}
	c.decode(&h.Client, version)
	h.Session = c.bin16()
	shard := c.int(64)
	if c.err != nil { // what is left came with a later version
		return nil, c.err
	}
	if err := h.Client.check(0); err != nil {
		return nil, malformed("hello: %v", err)
	}
	if shard < 0 || shard >= layout.MaxShards {
		return nil, malformed("hello for shard %d, want 0 to %d", shard, layout.MaxShards-1)
	}
	h.Shard = int(shard)
	return h, nil
}

// ParseWelcome reads a Welcome frame for a client that speaks some versions. Magic, version, status and message come first in every version of the protocol;
// if the version is none of these nothing else is looked at or set. With a status other than StatusOK only the volume is, and with StatusMoved
// the ring. ErrMagic tells that it is no welcome at all.
func ParseWelcome(frame []byte, speaks Versions) (*Welcome, error) {
	c := start(frame, KindWelcome, 0)
	w := &Welcome{Magic: string(c.str())}
	if c.err != nil || w.Magic != Magic {
		return nil, ErrMagic
	}
	w.Version = uint32(c.uint(32))
	w.Status = Status(c.uint(32))
	w.Message = c.message()
	if c.err != nil {
		return nil, c.err
	}
	if !speaks.Has(w.Version) {
		return w, nil
	}
	w.Session, w.Volume, w.Instance = c.bin16(), c.bin16(), c.bin16()
	slots, lease := c.int(64), c.int(64)
	c.decode(&w.Ring, w.Version)
	top := ""
	if w.Version >= topVersion {
		top = string(c.str())
	}
	if err := c.end(); err != nil {
		return nil, err
	}
	if err := w.Ring.check(); err != nil {
		return nil, malformed("welcome: %v", err)
	}
	if w.Status != StatusOK {
		w.Session, w.Instance = SessionID{}, [16]byte{}
		if w.Status != StatusMoved {
			w.Ring = Ring{}
		}
		return w, nil
	}
	switch {
	case w.Session == SessionID{}:
		return nil, malformed("welcome without a session")
	case slots < MinSlots || slots > MaxSlots:
		return nil, malformed("welcome with %d slots, want %d to %d", slots, MinSlots, MaxSlots)
	case lease < int64(MinLease) || lease > int64(MaxLease):
		return nil, malformed("welcome with a lease of %v, want %v to %v", time.Duration(lease), MinLease, MaxLease)
	}
	w.Slots, w.Lease, w.Top = int(slots), lease, top
	return w, nil
}

// ParseCall reads a Call frame on a connection of some version; args is a new pointer to the arguments of h.Op and aliases nothing.
//
// An *Error means that the frame is a call whose arguments are refused: h is set, args is nil, and the call is to be
// answered with that error, every time it comes. Its status is StatusBadArgs, or the errno that the same mistake has
// on a local file system (ENAMETOOLONG, ERANGE and E2BIG for extended attributes). Any other error is an ErrMalformed.
func ParseCall(frame []byte, version uint32) (h CallHeader, args any, err error) {
	c := start(frame, KindCall, 6)
	h.Slot = c.slot()
	h.Sequence = c.sequence()
	h.Op = Op(c.uint(16))
	h.Cred = c.cred()
	if c.err != nil {
		return CallHeader{}, nil, c.err
	}
	if !h.Op.In(version) {
		return h, nil, &Error{Op: h.Op, Status: StatusBadArgs, Message: "there is no such call"}
	}
	args = h.Op.NewArgs()
	c.decode(args, version)
	err = c.end()
	if err == nil {
		err = first(h.Cred.check(h.Op), check(h.Op, args))
	}
	if err == nil {
		return h, args, nil
	}
	refusal := &Error{Op: h.Op, Status: StatusBadArgs, Message: err.Error()}
	if bad := (*badValue)(nil); errors.As(err, &bad) {
		refusal.Status = bad.status
	}
	return h, nil, refusal
}

// ParseReplyHeader reads a Reply frame up to its result, which is for DecodeResult and aliases frame.
func ParseReplyHeader(frame []byte) (h ReplyHeader, result []byte, err error) {
	c := start(frame, KindReply, 6)
	h.Slot = c.slot()
	h.Sequence = c.sequence()
	h.Status = Status(c.uint(32))
	h.Message = c.message()
	if c.err != nil {
		return ReplyHeader{}, nil, c.err
	}
	return h, c.b, nil
}

// DecodeResult reads the result of a reply with StatusOK into result, a pointer to a zero value of op's result. It takes the form of any version up to
// Version, as an answer may be repeated on a connection of another one.
func DecodeResult(op Op, b []byte, result any) error {
	c := cursor{b: b}
	c.decode(result, Version)
	err := c.end()
	if err == nil {
		if bad := check(op, result); bad != nil {
			err = malformed("%v", bad)
		}
	}
	if err != nil {
		return fmt.Errorf("result of %v: %w", op, err)
	}
	return nil
}

// CreatedID reads from the frame of a reply to Create or TmpFile, without its length, which inode was made. It may be of any version, also a later one.
func CreatedID(frame []byte) (layout.FileID, error) {
	_, result, err := ParseReplyHeader(frame)
	if err != nil {
		return 0, err
	}
	c := cursor{b: result}
	c.array() // CreateResult
	c.array() // Attr
	id := layout.FileID(c.uint(64))
	return id, c.err
}

// ParseCallBack reads a CallBack frame on a connection of some version; args is a new pointer to the arguments of h.Op and aliases nothing.
func ParseCallBack(frame []byte, version uint32) (h BackHeader, args any, err error) {
	c := start(frame, KindCallBack, 4)
	h.Number = c.uint(64)
	h.Op = BackOp(c.uint(16))
	if c.err == nil && !h.Op.In(version) {
		c.fail("callback %d", h.Op)
	}
	if c.err != nil {
		return BackHeader{}, nil, c.err
	}
	args = h.Op.NewArgs()
	c.decode(args, version)
	if err := c.end(); err != nil {
		return BackHeader{}, nil, err
	}
	if err := check(0, args); err != nil {
		return BackHeader{}, nil, malformed("callback %v: %v", h.Op, err)
	}
	return h, args, nil
}

// ParseBackReply reads a BackReply frame.
func ParseBackReply(frame []byte) (BackReply, error) {
	c := start(frame, KindBackReply, 3)
	r := BackReply{Number: c.uint(64), Status: Status(c.uint(32))}
	if err := c.end(); err != nil {
		return BackReply{}, err
	}
	return r, nil
}

func (c *cursor) slot() int {
	n := c.int(64)
	if n < 0 || n >= MaxSlots {
		c.fail("slot %d, want 0 to %d", n, MaxSlots-1)
		return 0
	}
	return int(n)
}

func (c *cursor) cred() (cred Cred) {
	c.exactly(4)
	cred.UID, cred.GID = uint32(c.uint(32)), uint32(c.uint(32))
	if !c.isNil() {
		n := c.array()
		if n > MaxGroups {
			c.fail("%d groups, want at most %d", n, MaxGroups)
			return Cred{}
		}
		if n > 0 {
			cred.Groups = make([]uint32, n)
		}
		for i := range cred.Groups {
			cred.Groups[i] = uint32(c.uint(32))
		}
	}
	cred.ByUID = c.bool()
	return cred
}

func (c *cursor) sequence() uint64 {
	n := c.uint(64)
	if n == 0 {
		c.fail("sequence number 0")
	}
	return n
}

func (c *cursor) message() string {
	p := c.str()
	if len(p) > MaxMessage {
		c.fail("message of %d bytes, want at most %d", len(p), MaxMessage)
		return ""
	}
	return string(p)
}
