package crash

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// kind is what an operation does.
type kind string

const (
	opOpen     kind = "open"
	opWrite    kind = "write"
	opAppend   kind = "append"
	opTruncate kind = "truncate"
	opPunch    kind = "punch"
	opRead     kind = "read"
	opSync     kind = "sync" // fsync
	opLock     kind = "lock"
	opUnlock   kind = "unlock"
)

// op is an operation of a writer. A log has it once when it begins and once when it has returned.
type op struct {
	Writer int
	N      int // its number among those of the writer, from 1
	Kind   kind
	File   string
	Epoch  int      // counts how often the writer has opened the file
	Block  int      // the first block concerned; the new size in blocks of a truncation
	Count  int      // of blocks
	Dsync  bool     // a write through O_DSYNC
	Begin  int64    // of the monotonic clock, in nanoseconds
	End    int64    // 0: it has not returned
	Err    string   `json:",omitempty"`
	Seen   []string `json:",omitempty"` // by a read: each block as block.String has it
}

// forever is when an operation ends that has not returned, or with an error: it may be carried out at any time from
// its beginning on.
const forever = math.MaxInt64

// ok reports whether the operation has returned, and without an error.
func (o *op) ok() bool { return o.End > 0 && o.Err == "" }

// last is the moment after which the operation changes nothing any more.
func (o *op) last() int64 {
	if o.ok() {
		return o.End
	}
	return forever
}

func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// value is what a block was made by: a block of a write or an append by its place in that operation. The zero value
// is zeros.
type value struct{ writer, n, index int }

func (v value) String() string {
	if v == (value{}) {
		return "zeros"
	}
	return fmt.Sprintf("%d.%d.%d", v.writer, v.n, v.index)
}

// cell is how many bytes of a block tell whose they are.
const cell = 64

// fill makes a block of a value.
func fill(p []byte, v value) {
	for at := 0; at < len(p); at += cell {
		fillCell(p[at:at+cell], v, at)
	}
}

// fillCell makes the cell that is at a place of a block. All of its bytes depend on all that it says.
func fillCell(p []byte, v value, at int) {
	copy(p, "weft")
	binary.BigEndian.PutUint32(p[4:], uint32(v.writer))
	binary.BigEndian.PutUint32(p[8:], uint32(v.n))
	binary.BigEndian.PutUint16(p[12:], uint16(v.index))
	binary.BigEndian.PutUint16(p[14:], uint16(at/cell))
	x := binary.BigEndian.Uint64(p[4:]) ^ binary.BigEndian.Uint64(p[8:])<<1
	for i := 16; i < cell; i += 8 {
		x += 0x9e3779b97f4a7c15
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		binary.BigEndian.PutUint64(p[i:], z^z>>27)
	}
}

// block is what was read of a block: one value, or several where it is a mixture. garbage is set if some of it was
// never written.
type block struct {
	values  []value
	garbage bool
}

// String is the values with + in between, and ? for bytes that nobody has written.
func (b block) String() string {
	var all []string
	for _, v := range b.values {
		all = append(all, v.String())
	}
	if b.garbage {
		all = append(all, "?")
	}
	return strings.Join(all, "+")
}

func parseBlock(s string) (b block, err error) {
	for part := range strings.SplitSeq(s, "+") {
		var v value
		switch part {
		case "?":
			b.garbage = true
			continue
		case "zeros":
		default:
			if _, err := fmt.Sscanf(part, "%d.%d.%d", &v.writer, &v.n, &v.index); err != nil {
				return b, fmt.Errorf("block %q: %w", s, err)
			}
		}
		b.values = append(b.values, v)
	}
	return b, nil
}

// decode tells what a block is made of.
func decode(p []byte) (b block) {
	zeros, want := make([]byte, cell), make([]byte, cell)
	for at := 0; at < len(p); at += cell {
		got := p[at:min(at+cell, len(p))]
		var v value
		if !bytes.Equal(got, zeros[:len(got)]) {
			if len(got) == cell {
				v = value{
					writer: int(binary.BigEndian.Uint32(got[4:])),
					n:      int(binary.BigEndian.Uint32(got[8:])),
					index:  int(binary.BigEndian.Uint16(got[12:])),
				}
				fillCell(want, v, at)
			}
			if v.writer == 0 || !bytes.Equal(got, want) {
				b.garbage = true
				continue
			}
		}
		if len(b.values) == 0 || b.values[len(b.values)-1] != v {
			b.values = append(b.values, v)
		}
	}
	return b
}

// span is a time during which something was so.
type span struct{ begin, end int64 }

func (s span) meets(begin, end int64) bool { return s.begin <= end && s.end >= begin }

// history is all that was done to the files of a round, and what was done to those who did it.
type history struct {
	ops    []*op
	mounts map[int]int    // which mount a writer used; each that is made anew has a number of its own
	cuts   []span         // power cuts of data servers, until they were back
	stops  map[int][]span // when a mount stood still, or the service had ended its session
	syncs  map[int][]span // calls of weft sync that have returned without an error
}

func newHistory() *history {
	return &history{mounts: map[int]int{}, stops: map[int][]span{}, syncs: map[int][]span{}}
}

// addLog adds what a writer has logged. It may have been killed in the middle of a line.
func (h *history) addLog(path string, mount int) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	r := bufio.NewReader(f)
	var last *op
	for {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		o := &op{}
		if err := json.Unmarshal(line, o); err != nil {
			return fmt.Errorf("%s: %q: %w", path, line, err)
		}
		h.mounts[o.Writer] = mount
		if last != nil && last.N == o.N {
			*last = *o
			continue
		}
		h.ops = append(h.ops, o)
		last = o
	}
}
