package metarpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MaxHello bounds the first frame in each direction, when it is not yet known who the peer is.
const MaxHello = 512 << 10

// prefixLen is the size of a frame's length.
const prefixLen = 4

// firstRead is how much of a frame ReadFrame makes room for before any of it has arrived.
const firstRead = 4 << 10

// Errors of this package.
var (
	// ErrMalformed is what every error of a Parse function other than an *Error wraps: the peer does not follow the
	// protocol and the connection cannot go on.
	ErrMalformed = errors.New("malformed metadata frame")
	// ErrMagic tells that the first frame is no hello: the peer is something else. It is also an ErrMalformed.
	ErrMagic = fmt.Errorf("%w: not a weft hello", ErrMalformed)
	// ErrFrameSize tells that a message to be sent does not fit MaxFrame.
	ErrFrameSize = errors.New("metadata frame is larger than the protocol allows")
)

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// ReadFrame reads one frame and returns it without its length. It uses buf's capacity if that suffices; the result
// is the caller's. A length of 0 or above max is an ErrMalformed before anything is allocated, and memory grows only
// as bytes arrive, so that a peer which promises much and sends little costs little.
//
// It returns io.EOF if the stream ends between frames and io.ErrUnexpectedEOF if it ends inside one.
func ReadFrame(r io.Reader, buf []byte, max int) ([]byte, error) {
	if cap(buf) < firstRead {
		buf = make([]byte, firstRead)
	}
	prefix := buf[:prefixLen] // in buf because an array of its own would escape through r
	if _, err := io.ReadFull(r, prefix); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(prefix)
	if size == 0 || uint64(size) > uint64(max) {
		return nil, malformed("length %d, want 1 to %d", size, max)
	}
	n := int(size)
	got := 0
	for {
		buf = buf[:min(n, cap(buf))]
		k, err := io.ReadFull(r, buf[got:])
		got += k
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		if got == n {
			return buf, nil
		}
		bigger := make([]byte, min(n, 4*cap(buf)))
		copy(bigger, buf)
		buf = bigger
	}
}

// FrameKind tells what a frame is, so that the right Parse function can be called.
func FrameKind(frame []byte) (Kind, error) {
	c := cursor{b: frame}
	c.array()
	k := Kind(c.uint(8))
	if c.err == nil && k > KindBackReply {
		c.fail("frame kind %d", k)
	}
	return k, c.err
}
