package filelock

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of random operations")

const (
	span   = 24 // bytes of the model's file
	owners = 4
)

// model is a file's locks byte by byte. Byte span-1 stands for all that follow.
type model [owners][span]Type

// pos is where a byte of the model lies; the last one is the end of every file.
func pos(b int) int64 {
	if b == span-1 {
		return ToEOF
	}
	return int64(b)
}

func (m *model) set(owner int, t Type, from, to int) {
	for b := from; b <= to; b++ {
		m[owner][b] = t
	}
}

func (m *model) conflict(owner int, t Type, from, to int) bool {
	for o := range owners {
		for b := from; o != owner && b <= to; b++ {
			if m[o][b] != None && (t == Write || m[o][b] == Write) {
				return true
			}
		}
	}
	return false
}

// locks are the fewest locks that say what the model says of an owner. A lock that ends before the last byte of the
// model ends there in the table, too; the gap up to ToEOF is nobody's, since the model has no byte for it.
func (m *model) locks(owner int) []Lock[int] {
	var list []Lock[int]
	for b, t := range m[owner] {
		if t == None {
			continue
		}
		if n := len(list); n > 0 && list[n-1].Type == t && list[n-1].End == int64(b-1) {
			list[n-1].End = pos(b)
			continue
		}
		list = append(list, Lock[int]{Owner: owner, Type: t, Start: start(b), End: pos(b)})
	}
	return list
}

// start is the first byte of a range that begins with byte b of the model.
func start(b int) int64 { return int64(b) }

// step does one operation on both, and compares.
func step(t *testing.T, tab *Table[int], m *model, op, owner, from, to int) {
	t.Helper()
	if from > to {
		from, to = to, from
	}
	l := Lock[int]{Owner: owner, Type: Type(op % 3), Start: start(from), End: pos(to), PID: uint32(owner)}
	switch {
	case op == 9:
		n := len(m.locks(owner))
		if got := tab.Release(owner); got != n {
			t.Errorf("released %d locks of owner %d, want %d", got, owner, n)
		}
		m.set(owner, None, 0, span-1)
	default:
		want := m.conflict(owner, l.Type, from, to) && l.Type != None
		c, got := tab.Conflict(l)
		if got != want {
			t.Errorf("%+v: conflict %v, want %v", l, got, want)
		}
		if got && (!c.Conflicts(&l) || !l.Conflicts(&c)) {
			t.Errorf("%+v is said to be in the way of %+v", c, l)
		}
		for other := range tab.Conflicts(l) {
			if other.Start < c.Start || !other.Conflicts(&l) {
				t.Errorf("%+v comes with the first conflict %+v", other, c)
			}
		}
		if want {
			return // as a caller would
		}
		before := tab.Len()
		if n := tab.Set(l); n != tab.Len()-before {
			t.Errorf("Set said %d more locks, there are %d", n, tab.Len()-before)
		}
		m.set(owner, l.Type, from, to)
	}
	total := 0
	for o := range owners {
		got, want := tab.Owned(o, 0, ToEOF), m.locks(o)
		for i := range got {
			if got[i].PID != uint32(o) {
				t.Errorf("%+v: whose process?", got[i])
			}
			got[i].PID = 0
		}
		if !slices.Equal(got, want) {
			t.Errorf("owner %d has %+v, want %+v", o, got, want)
		}
		total += len(want)
	}
	if tab.Len() != total {
		t.Errorf("%d locks, want %d", tab.Len(), total)
	}
	last := int64(0)
	for l := range tab.All() {
		if l.Start < last || l.Start > l.End || l.Type == None {
			t.Errorf("lock %+v after one from %d", l, last)
		}
		last = l.Start
	}
}

// Random operations have the same outcome as on a map of bytes.
func TestModel(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	for range 300 {
		var tab Table[int]
		var m model
		for n := range 300 {
			step(t, &tab, &m, rng.IntN(10), rng.IntN(owners), rng.IntN(span), rng.IntN(span))
			if t.Failed() {
				t.Fatalf("at operation %d", n)
			}
		}
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte{1, 0, 3, 9, 2, 0, 5, 6, 0, 0, 5, 5})
	f.Add([]byte{1, 0, 0, span - 1, 1, 1, 2, 3, 2, 0, 2, 3, 9, 1, 0, 0, 2, 0, 2, 3})
	f.Fuzz(func(t *testing.T, ops []byte) {
		var tab Table[int]
		var m model
		for ; len(ops) >= 4; ops = ops[4:] {
			step(t, &tab, &m, int(ops[0]%10), int(ops[1]%owners), int(ops[2]%span), int(ops[3]%span))
		}
	})
}

func TestSet(t *testing.T) {
	type op struct {
		Type
		start, end int64
	}
	for _, c := range []struct {
		name string
		ops  []op
		want string
	}{
		{"split", []op{{Write, 0, 99}, {None, 40, 59}}, "W0-39 W60-99"},
		{"split by another type", []op{{Write, 0, 99}, {Read, 40, 59}}, "W0-39 R40-59 W60-99"},
		{"merge", []op{{Read, 0, 9}, {Read, 20, 29}, {Read, 10, 19}}, "R0-29"},
		{"types are not merged", []op{{Read, 0, 9}, {Write, 10, 19}}, "R0-9 W10-19"},
		{"upgrade merges", []op{{Write, 0, 9}, {Read, 10, 19}, {Write, 10, 19}}, "W0-19"},
		{"downgrade of the middle and back", []op{{Write, 0, 29}, {Read, 10, 19}, {Write, 5, 25}}, "W0-29"},
		{"cover all", []op{{Read, 3, 4}, {Write, 7, 8}, {Read, 0, ToEOF}}, "R0-eof"},
		{"up to the end", []op{{Read, 10, ToEOF}, {None, 20, ToEOF}}, "R10-19"},
		{"last byte", []op{{Read, ToEOF - 1, ToEOF - 1}, {Read, ToEOF, ToEOF}}, "R9223372036854775806-eof"},
		{"unlock what is not locked", []op{{None, 0, ToEOF}}, ""},
		{"one byte of one", []op{{Write, 5, 5}, {None, 5, 5}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var tab Table[string]
			for _, o := range c.ops {
				tab.Set(Lock[string]{Owner: "a", Type: o.Type, Start: o.start, End: o.end})
			}
			got := ""
			for i, l := range tab.Owned("a", 0, ToEOF) {
				if i > 0 {
					got += " "
				}
				end := fmt.Sprint(l.End)
				if l.End == ToEOF {
					end = "eof"
				}
				got += fmt.Sprintf("%c%d-%s", " RW"[l.Type], l.Start, end)
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// A lock is cut to the range that is asked for.
func TestOwnedRange(t *testing.T) {
	var tab Table[int]
	tab.Set(Lock[int]{Owner: 1, Type: Read, Start: 0, End: 99})
	tab.Set(Lock[int]{Owner: 2, Type: Read, Start: 0, End: 99})
	got := tab.Owned(1, 10, 19)
	if want := []Lock[int]{{Owner: 1, Type: Read, Start: 10, End: 19}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := tab.Owned(1, 100, ToEOF); got != nil {
		t.Errorf("%+v, want none", got)
	}
}

// What is no longer locked costs no memory.
func TestShrink(t *testing.T) {
	var tab Table[int]
	for i := range int64(10000) {
		tab.Set(Lock[int]{Type: Write, Start: 2 * i, End: 2 * i})
	}
	tab.Set(Lock[int]{Type: None, Start: 10, End: ToEOF})
	if tab.Len() != 5 || cap(tab.locks) > 64 {
		t.Errorf("%d locks with room for %d", tab.Len(), cap(tab.locks))
	}
	tab.Set(Lock[int]{Type: None, Start: 0, End: ToEOF})
	if tab.locks != nil {
		t.Error("an empty table keeps memory")
	}
}
