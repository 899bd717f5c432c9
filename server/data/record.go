package data

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// record reads one RPC message from a connection, without the marks of its fragments (RFC 5531 section 11).
type record struct {
	in    *bufio.Reader
	left  int  // bytes of the fragment
	last  bool // no other fragment follows
	total int  // length of the fragments begun so far
	err   error
}

// begin waits for the next message.
func (rec *record) begin() error {
	rec.last, rec.total = false, 0
	rec.fragment()
	return rec.err
}

func (rec *record) fragment() {
	var mark []byte
	if mark, rec.err = rec.in.Peek(oncrpc.RecordMarkSize); rec.err != nil {
		return
	}
	rec.left, rec.last = oncrpc.ParseRecordMark(mark)
	rec.in.Discard(oncrpc.RecordMarkSize)
	switch rec.total += rec.left; {
	case rec.total > maxRecord:
		rec.err = fmt.Errorf("call of %d bytes or more, at most %d are taken", rec.total, maxRecord)
	case rec.left == 0 && !rec.last:
		rec.err = errors.New("empty fragment")
	}
}

// Read returns io.EOF at the end of the message and err, which stays, if the connection fails.
func (rec *record) Read(p []byte) (n int, err error) {
	for rec.left == 0 && rec.err == nil {
		if rec.last {
			return 0, io.EOF
		}
		rec.fragment()
	}
	if rec.err != nil {
		return 0, rec.err
	}
	n, rec.err = rec.in.Read(p[:min(len(p), rec.left)])
	rec.left -= n
	return n, rec.err
}

// whole is whether the next message is there, so that reading it does not wait.
func (rec *record) whole() bool {
	n := rec.in.Buffered()
	if n < oncrpc.RecordMarkSize {
		return false
	}
	mark, _ := rec.in.Peek(oncrpc.RecordMarkSize)
	size, last := oncrpc.ParseRecordMark(mark)
	return last && n-oncrpc.RecordMarkSize >= size
}

// fill reads b or as much of it as the message has, and returns that.
func (rec *record) fill(b []byte) []byte {
	n, _ := io.ReadFull(rec, b)
	return b[:n]
}

// rest is at least the length of what has not been read, and exactly that if there is only one fragment.
func (rec *record) rest() int {
	if rec.last {
		return rec.left
	}
	return rec.left + maxRecord - rec.total
}

// skip drops the rest of the message.
func (rec *record) skip() {
	for rec.err == nil && (rec.left > 0 || !rec.last) {
		if rec.left == 0 {
			rec.fragment()
			continue
		}
		var n int
		n, rec.err = rec.in.Discard(rec.left)
		rec.left -= n
	}
}
