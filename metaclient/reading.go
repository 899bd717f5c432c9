package metaclient

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// A connection is read by whoever has its token. That is a caller while there is one call at a time, who is then not woken by anybody else but the
// kernel, and else the connection's own reader. What callers leave it takes over within two turnMost; and as long as the service
// calls back now and then, nobody else reads.
const (
	turnMost  = time.Millisecond // a caller reads for no longer than about this
	backQuiet = time.Second      // after a callback, before callers read again
)

// readFor reads until the call in sl has its answer, unless somebody else reads. It returns early if the connection's own reader is to go on.
func (c *Client) readFor(cn *conn, sl *slot) {
	select {
	case <-cn.token:
	default:
		return
	}
	cn.turns.Add(1)
	for cn.ended == nil && len(sl.done) == 0 {
		whole, err := cn.await()
		if err == nil && whole {
			err = c.readFrame(cn)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) || err == nil && !whole {
			break
		}
		cn.ended = err
	}
	over := cn.ended != nil
	cn.token <- struct{}{}
	if over || c.busy(cn) {
		cn.kick()
	}
}

// await waits for a frame without taking any of it. It reports false for one that does not fit the buffer.
func (cn *conn) await() (whole bool, err error) {
	const head = 4
	b, err := cn.r.Peek(head)
	if err != nil {
		return false, err
	}
	n := int64(head) + int64(binary.BigEndian.Uint32(b))
	if n > int64(cn.r.Size()) {
		return false, nil
	}
	_, err = cn.r.Peek(int(n))
	return true, err
}

// readFrame reads a frame and does what it says.
func (c *Client) readFrame(cn *conn) error {
	frame, err := metarpc.ReadFrame(cn.r, cn.frame, metarpc.MaxFrame)
	if err != nil {
		return err
	}
	kind, err := metarpc.FrameKind(frame)
	switch {
	case err != nil:
	case kind == metarpc.KindReply:
		err = c.reply(cn, frame)
	case kind == metarpc.KindCallBack:
		c.mu.Lock()
		cn.calledBack = time.Now()
		c.mu.Unlock()
		err = c.callBack(cn, frame)
	default:
		err = fmt.Errorf("%w: kind %d from the service", metarpc.ErrMalformed, kind)
	}
	if cn.frame = frame[:0]; cap(cn.frame) > 1<<20 {
		cn.frame = nil
	}
	return err
}

// busy reports whether an answer may come, or something else soon, that no caller reads.
func (c *Client) busy(cn *conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cn.calls > 0 || time.Since(cn.calledBack) < backQuiet
}

// read handles frames until the connection fails, but for those that callers handle.
func (c *Client) read(cn *conn) error {
	for {
		for busy := true; busy; busy = c.busy(cn) {
			if cn.ended == nil { // of a caller
				cn.ended = c.readFrame(cn)
			}
			if cn.ended != nil {
				return cn.ended
			}
		}
		cn.token <- struct{}{}
		cn.standBy(c.busy(cn))
	}
}

// standBy waits until callers do not read any more, or kick, and returns with the token; at once if nobody has that and now is true.
func (cn *conn) standBy(now bool) {
	timer := time.NewTimer(turnMost)
	defer timer.Stop()
	turns := cn.turns.Load()
	for {
		if now {
			select {
			case <-cn.token:
				return
			default: // a caller reads, who will kick
			}
		}
		select {
		case <-cn.kicked:
			now = true
			continue
		case <-timer.C:
		}
		timer.Reset(turnMost)
		before := turns
		if turns = cn.turns.Load(); turns != before {
			continue
		}
		cn.nc.SetReadDeadline(time.Unix(1, 0)) // whoever reads stops
		<-cn.token
		cn.nc.SetReadDeadline(time.Time{})
		return
	}
}

// kick has the connection's own reader look whether it is to read.
func (cn *conn) kick() {
	select {
	case cn.kicked <- struct{}{}:
	default:
	}
}
