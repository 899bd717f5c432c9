package nvmetcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// read is the goroutine that receives PDUs and ends the commands that they answer, until the connection ends.
func (q *queue) read() {
	defer q.a.wg.Done()
	for {
		h, err := q.receive()
		if err == nil {
			continue
		}
		var wrong *wire.ProtocolError
		switch {
		case errors.As(err, &wrong):
			q.terminate(wrong, h)
		case errors.Is(err, io.EOF):
			err = errHungUp
		}
		q.a.fail(fmt.Errorf("queue %d: %w", q.id, err))
		return
	}
}

// receive takes one PDU. With an error it returns what it has of the PDU's header.
func (q *queue) receive() ([]byte, error) {
	b, err := q.in.head(wire.HeaderSize)
	if err != nil {
		return nil, err
	}
	h, err := q.recv.Decode(b)
	if err != nil {
		return b, err
	}
	if b, err = q.in.head(h.Before()); err != nil {
		return nil, err
	}
	if err := h.Verify(b); err != nil {
		return b, err
	}
	var cmd *Command
	switch h.Type {
	case wire.PDUCapsuleResp:
		var p wire.CapsuleResp
		if err = p.Decode(h, b); err == nil {
			q.in.consume(len(b))
			cmd, err = q.answered(&p.Completion)
		}
	case wire.PDUC2HData:
		var p wire.C2HData
		if err = p.Decode(h, b); err == nil {
			q.in.consume(len(b))
			cmd, err = q.data(h, &p)
		}
	case wire.PDUR2T:
		var p wire.R2T
		if err = p.Decode(h, b); err == nil {
			q.in.consume(len(b))
			err = q.ready(&p)
		}
	case wire.PDUC2HTermReq:
		if b, err = q.in.head(int(h.PLen)); err != nil {
			return nil, err
		}
		var p wire.TermReq
		if err = p.Decode(h, b); err == nil {
			err = fmt.Errorf("%w: %v (%#x)", errTermReq, p.Fatal, p.Info)
		}
		return nil, err
	default:
		err = sequenceError("%v after the connection was set up", h.Type)
	}
	if err != nil {
		return b, err
	}
	if cmd != nil {
		broken := q.broken(cmd)
		q.more.Store(q.in.buffered() > 0) // what is started for all of these answers goes out together
		cmd.Done(cmd)
		return nil, broken
	}
	return nil, nil
}

// broken returns an error if the answer to cmd says that the controller has to be reset.
func (q *queue) broken(cmd *Command) error {
	if cmd.Status == wire.StatusSuccess || cmd.own {
		return nil
	}
	var e *wire.CommandError
	if !errors.As(cmd.Err, &e) || e.Class() != wire.ClassReset && e.Status != wire.StatusAuthRequired {
		return nil
	}
	return &resetError{fmt.Sprintf("a command was answered with %v", cmd.Status)}
}

func sequenceError(format string, args ...any) error {
	return &wire.ProtocolError{Fatal: wire.FatalSequence, What: fmt.Sprintf(format, args...)}
}

func rangeError(format string, args ...any) error {
	return &wire.ProtocolError{Fatal: wire.FatalDataRange, What: fmt.Sprintf(format, args...)}
}

func limitError(format string, args ...any) error {
	return &wire.ProtocolError{Fatal: wire.FatalLimit, What: fmt.Sprintf(format, args...)}
}

// answered takes a completion. It returns the command whose Done is to be called, if any.
func (q *queue) answered(e *wire.Completion) (*Command, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, err := q.find(e.CID, "completion")
	if err != nil {
		return nil, err
	}
	return q.complete(s, e)
}

// complete ends the command in s, at once or when it is wholly sent. mu is held.
func (q *queue) complete(s *slot, e *wire.Completion) (*Command, error) {
	if e.Status == wire.StatusSuccess {
		switch {
		case s.dir == wire.ToHost && s.got < s.size:
			return nil, rangeError("%s of %d bytes succeeded with %d", s.sqe.Name(q.admin()), s.size, s.got)
		case s.dir == wire.ToController && !s.inline && (s.asked < s.size || s.nr2t > 0 || !q.out.sent(s.end)):
			return nil, rangeError("%s of %d bytes succeeded before all of them were sent", s.sqe.Name(q.admin()), s.size)
		}
	}
	q.answers.Add(1)
	s.answer = *e
	if s.nr2t > 0 {
		// It has failed early: what of its data is not in a batch stays here.
		s.unlink()
		s.nr2t = 0
	}
	if !q.out.sent(s.end) {
		s.answered = true
		q.lingering++
		return nil, nil
	}
	return q.finish(s), nil
}

// data takes the payload of a C2HData. It returns the command whose Done is to be called, if the PDU ends it.
func (q *queue) data(h wire.Header, p *wire.C2HData) (*Command, error) {
	n := int(p.Length)
	q.mu.Lock()
	s, err := q.find(p.CID, "data")
	if err == nil {
		err = s.expects(p)
	}
	if err != nil {
		q.mu.Unlock()
		return nil, err
	}
	q.current = s
	if s.data != nil {
		q.in.target(s.data[s.got : s.got+n : s.got+n])
	} else {
		q.in.target(nil)
	}
	q.mu.Unlock()

	sum, err := q.in.payload(n, h.DataDigest() > 0)
	if err != nil {
		return nil, err
	}
	bad := false
	if h.DataDigest() > 0 {
		b, err := q.in.head(wire.DigestSize)
		if err != nil {
			return nil, err
		}
		bad = binary.LittleEndian.Uint32(b) != sum
		q.in.consume(wire.DigestSize)
	}
	q.in.drop()

	q.mu.Lock()
	defer q.mu.Unlock()
	q.current = nil
	s.got += n
	s.last = p.Last
	if bad {
		s.bad = true
		q.stats.badDigests++
	}
	if !p.Success {
		return nil, nil
	}
	return q.complete(s, &wire.Completion{CID: p.CID})
}

// expects checks that p brings what comes next of the command's data.
func (s *slot) expects(p *wire.C2HData) error {
	switch end := int64(p.Offset) + int64(p.Length); {
	case s.dir != wire.ToHost:
		return sequenceError("data for command %#x, which reads none", p.CID)
	case s.last:
		return sequenceError("data for command %#x behind the last of it", p.CID)
	case end > int64(s.size):
		return rangeError("%d bytes of data at %d for command %#x, which reads %d", p.Length, p.Offset, p.CID, s.size)
	case int(p.Offset) != s.got:
		return rangeError("data at %d for command %#x, where %d was to come next", p.Offset, p.CID, s.got)
	}
	return nil
}

// ready takes an R2T.
func (q *queue) ready(p *wire.R2T) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, err := q.find(p.CID, "R2T")
	switch {
	case err != nil:
		return err
	case s.dir != wire.ToController || s.inline:
		return sequenceError("R2T for command %#x, which has nothing to send", p.CID)
	case int64(p.Offset)+int64(p.Length) > int64(s.size):
		return rangeError("R2T of %d bytes at %d for command %#x, which writes %d", p.Length, p.Offset, p.CID, s.size)
	case s.nr2t == maxR2T:
		return limitError("more than %d R2Ts outstanding for command %#x", maxR2T, p.CID)
	case s.asked+int(p.Length) > s.size:
		return limitError("R2Ts of %d bytes together for command %#x, which writes %d", s.asked+int(p.Length), p.CID, s.size)
	}
	s.asked += int(p.Length)
	s.r2t[s.nr2t] = *p
	s.nr2t++
	if s.nr2t == 1 {
		q.transfers.pushBack(s)
	}
	q.unflushed.Store(true)
	return nil
}

// maxParting is how long the end of a connection waits for what is being sent, so that a TermReq can follow.
const maxParting = 20 * time.Millisecond

// terminate tells the controller what was wrong with the PDU whose header begins with h, unless it takes nothing.
// Afterwards nothing is read any more.
func (q *queue) terminate(wrong *wire.ProtocolError, h []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for waited := time.Duration(0); q.writing && !q.dead && waited < maxParting; waited += time.Millisecond {
		q.mu.Unlock()
		time.Sleep(time.Millisecond)
		q.mu.Lock()
	}
	if q.writing || q.dead {
		return
	}
	q.writing = true
	pdu := wire.TermReq{Type: wire.Host.TermReq(), Fatal: wrong.Fatal, Info: wrong.Info, Header: h}
	q.out.begin()
	q.out.head(pdu.Append(q.out.heads))
	q.mu.Unlock()
	q.out.write(false) // an error says what we know: the connection is lost
	q.mu.Lock()
	q.stopWriting()
}
