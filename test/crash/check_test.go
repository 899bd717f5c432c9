package crash

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// made is a history in which writers 1 and 2 are on mounts of their own, and writer 3 on that of writer 1. Times are
// small numbers.
type made struct {
	*history
	n map[int]int
}

func newMade() *made {
	m := &made{history: newHistory(), n: map[int]int{}}
	m.mounts = map[int]int{1: 0, 2: 1, 3: 0}
	for writer := range m.mounts {
		m.n[writer] = 0
	}
	for _, writer := range []int{1, 2, 3} {
		m.add(op{Writer: writer, Kind: opOpen, Begin: 1, End: 2})
	}
	return m
}

// add adds an operation and returns its first value.
func (m *made) add(o op) value {
	m.n[o.Writer]++
	o.N, o.File, o.Epoch = m.n[o.Writer], "f", 1
	if o.Count == 0 {
		o.Count = 1
	}
	m.ops = append(m.ops, &o)
	return value{o.Writer, o.N, 0}
}

func (m *made) write(writer int, begin, end int64) value {
	return m.add(op{Writer: writer, Kind: opWrite, Begin: begin, End: end})
}

func (m *made) sync(writer int, begin, end int64) {
	m.add(op{Writer: writer, Kind: opSync, Begin: begin, End: end})
}

func (m *made) read(begin, end int64, v value) {
	m.add(op{Writer: 3, Kind: opRead, Begin: begin, End: end, Seen: []string{v.String()}})
}

// TestHistories shows which histories of one block are right, and what is at its end.
func TestHistories(t *testing.T) {
	for name, c := range map[string]struct {
		history func(m *made) value
		wrong   string // part of what is found; empty if it is right
	}{
		"nothing": {func(m *made) value { return value{} }, ""},
		"written": {func(m *made) value { v := m.write(1, 10, 20); m.sync(1, 21, 30); return v }, ""},
		"written and not there": {func(m *made) value {
			m.write(1, 10, 20)
			m.sync(1, 21, 30)
			return value{}
		}, "nothing has made it zeros"},
		"not synced, and lost with the mount": {func(m *made) value { m.write(1, 10, 20); return value{} }, ""},
		"a sync that failed": {func(m *made) value {
			m.write(1, 10, 20)
			m.add(op{Writer: 1, Kind: opSync, Begin: 21, End: 30, Err: "EIO"})
			return value{}
		}, ""},
		"a sync before": {func(m *made) value { m.sync(1, 5, 15); m.write(1, 10, 20); return value{} }, ""},
		"older than what was synced": {func(m *made) value {
			old := m.write(1, 10, 20)
			m.write(2, 21, 30)
			m.sync(2, 31, 40)
			return old
		}, "was replaced before"},
		"older, through O_DSYNC": {func(m *made) value {
			old := m.write(1, 10, 20)
			m.add(op{Writer: 2, Kind: opWrite, Begin: 21, End: 30, Dsync: true})
			return old
		}, "was replaced before"},
		"at the same time": {func(m *made) value {
			old := m.write(1, 10, 22)
			m.write(2, 21, 30)
			m.sync(2, 31, 40)
			return old
		}, ""},
		"has not returned": {func(m *made) value {
			late := m.write(1, 10, 0)
			m.write(2, 21, 30)
			m.sync(2, 31, 40)
			return late
		}, ""},
		"an error": {func(m *made) value {
			late := m.add(op{Writer: 1, Kind: opWrite, Begin: 10, End: 12, Err: "EIO"})
			m.write(2, 21, 30)
			m.sync(2, 31, 40)
			return late
		}, ""},
		"what was never written here": {func(m *made) value {
			return m.add(op{Writer: 1, Kind: opWrite, Block: 1, Begin: 10, End: 12})
		}, "was not written here"},
		"punched": {func(m *made) value {
			m.write(1, 10, 20)
			m.sync(1, 21, 30)
			m.add(op{Writer: 2, Kind: opPunch, Begin: 31, End: 40})
			return value{}
		}, ""},
		"back after it was punched": {func(m *made) value {
			old := m.write(1, 10, 20)
			m.add(op{Writer: 2, Kind: opPunch, Begin: 31, End: 40})
			m.sync(2, 41, 50)
			return old
		}, "was replaced before"},
		"back after the file was truncated": {func(m *made) value {
			old := m.write(1, 10, 20)
			m.add(op{Writer: 2, Kind: opTruncate, Begin: 31, End: 40})
			m.sync(2, 41, 50)
			return old
		}, "was replaced before"},
		"zeros from before it was written": {func(m *made) value {
			m.add(op{Writer: 2, Kind: opPunch, Begin: 3, End: 4})
			m.sync(2, 5, 6)
			m.write(1, 10, 20)
			m.sync(1, 21, 30)
			return value{}
		}, "zeros was replaced before"},
		"unlocked, and the other mount has it open": {func(m *made) value {
			m.add(op{Writer: 1, Kind: opLock, Begin: 5, End: 6})
			m.write(1, 10, 20)
			m.add(op{Writer: 1, Kind: opUnlock, Begin: 21, End: 30})
			m.sync(2, 41, 50)
			return value{}
		}, "nothing has made it zeros"},
		"unlocked, and a sync failed": {func(m *made) value {
			m.add(op{Writer: 1, Kind: opLock, Begin: 5, End: 6})
			m.write(1, 10, 20)
			m.add(op{Writer: 1, Kind: opUnlock, Begin: 21, End: 30})
			m.sync(2, 41, 50)
			m.add(op{Writer: 1, Kind: opSync, Begin: 31, End: 40, Err: "EIO"})
			return value{}
		}, ""},
		"unlocked, and nobody else has it open": {func(m *made) value {
			m.add(op{Writer: 1, Kind: opLock, Begin: 5, End: 6})
			m.write(1, 10, 20)
			m.add(op{Writer: 1, Kind: opUnlock, Begin: 21, End: 30})
			return value{}
		}, ""},
		"unlocked after the mount stood still": {func(m *made) value {
			m.stops[0] = []span{{7, 8}}
			m.add(op{Writer: 1, Kind: opLock, Begin: 5, End: 6})
			m.write(1, 10, 20)
			m.add(op{Writer: 1, Kind: opUnlock, Begin: 21, End: 30})
			m.sync(2, 41, 50)
			return value{}
		}, ""},
		"written before the lock": {func(m *made) value {
			m.write(1, 3, 4)
			m.add(op{Writer: 1, Kind: opLock, Begin: 5, End: 6})
			m.add(op{Writer: 1, Kind: opUnlock, Begin: 21, End: 30})
			m.sync(2, 41, 50)
			return value{}
		}, ""},
		"weft sync": {func(m *made) value {
			m.write(1, 10, 20)
			m.syncs[0] = []span{{21, 30}}
			return value{}
		}, "nothing has made it zeros"},
		"weft sync of another mount": {func(m *made) value {
			m.write(1, 10, 20)
			m.syncs[1] = []span{{21, 30}}
			return value{}
		}, ""},
		"weft sync that began before": {func(m *made) value {
			m.write(1, 10, 20)
			m.syncs[0] = []span{{19, 30}}
			return value{}
		}, ""},
		"read before it is stable": {func(m *made) value {
			v := m.write(1, 10, 20)
			m.read(21, 22, value{})
			m.sync(1, 30, 40)
			return v
		}, "nothing has made it zeros"},
		"read while it is written": {func(m *made) value {
			v := m.write(1, 10, 20)
			m.read(19, 22, value{})
			m.sync(1, 30, 40)
			return v
		}, ""},
		"read before it is written": {func(m *made) value {
			v := value{1, 2, 0}
			m.read(5, 6, v)
			m.write(1, 10, 20)
			m.sync(1, 30, 40)
			return v
		}, "was not written here"},
		"read while it is not stable and the power is cut": {func(m *made) value {
			m.cuts = []span{{21, 25}}
			v := m.write(1, 10, 20)
			m.read(26, 27, value{})
			m.sync(1, 30, 40)
			return v
		}, ""},
		"read when it is stable and the power was cut": {func(m *made) value {
			m.cuts = []span{{21, 25}}
			v := m.write(1, 10, 20)
			m.sync(1, 30, 40)
			m.read(41, 42, value{})
			return v
		}, "nothing has made it zeros"},
		"appended": {func(m *made) value { return m.add(op{Writer: 1, Kind: opAppend, Begin: 10, End: 20}) }, ""},
		"appended where the file was": {func(m *made) value {
			m.write(1, 10, 20)
			m.sync(1, 21, 30)
			v := m.add(op{Writer: 2, Kind: opAppend, Begin: 31, End: 40})
			m.sync(2, 41, 50)
			return v
		}, "the file was longer"},
		"appended after a truncation": {func(m *made) value {
			m.write(1, 10, 20)
			m.sync(1, 21, 30)
			m.add(op{Writer: 2, Kind: opTruncate, Begin: 31, End: 35})
			v := m.add(op{Writer: 2, Kind: opAppend, Begin: 36, End: 40})
			m.sync(2, 41, 50)
			return v
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMade()
			end := c.history(m).String()
			checker := newChecker(m.history)
			checker.checkBlocks(file{Path: "f", Block: cell, Blocks: 1}, [][]string{{end}}, 1000)
			expect(t, checker.found, c.wrong)
		})
	}
}

func expect(t *testing.T, found []string, wrong string) {
	t.Helper()
	if wrong == "" && len(found) > 0 || wrong != "" && !slices.ContainsFunc(found, func(s string) bool { return strings.Contains(s, wrong) }) {
		t.Errorf("found %q, want %q", found, wrong)
	}
}

// TestBlocks shows what is told of bytes that are no whole block of one value.
func TestBlocks(t *testing.T) {
	a, b := value{1, 2, 0}, value{2, 7, 1}
	p := make([]byte, 4*cell)
	expectBlock := func(want string) {
		t.Helper()
		if got := decode(p).String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if back, err := parseBlock(want); err != nil || back.String() != want {
			t.Errorf("%s is read as %s, %v", want, back, err)
		}
	}
	expectBlock("zeros")
	fill(p, a)
	expectBlock("1.2.0")
	fillCell(p[2*cell:3*cell], b, 2*cell)
	expectBlock("1.2.0+2.7.1+1.2.0")
	clear(p[3*cell:])
	expectBlock("1.2.0+2.7.1+zeros")
	fill(p, a)
	p[cell+40]++
	expectBlock("1.2.0+?")
	fill(p, a)
	copy(p, bytes.Clone(p[cell:2*cell])) // in the wrong place
	expectBlock("1.2.0+?")

	for name, c := range map[string]struct {
		end   string
		never bool // one of the two writes has not returned
		wrong string
	}{
		"one of both":             {"1.2.0", false, ""},
		"halves":                  {"1.2.0+2.2.0", false, "a mixture"},
		"half of what was killed": {"1.2.0+2.2.0", true, ""},
		"other bytes":             {"1.2.0+?", true, "nobody has written"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMade()
			m.write(1, 10, 20)
			end := int64(21)
			if c.never {
				end = 0
			}
			m.write(2, 11, end)
			checker := newChecker(m.history)
			checker.checkBlocks(file{Path: "f", Block: cell, Blocks: 1}, [][]string{{c.end}}, 1000)
			expect(t, checker.found, c.wrong)
		})
	}
	m := newMade()
	m.write(1, 10, 20)
	m.write(2, 11, 21)
	checker := newChecker(m.history)
	checker.checkBlocks(file{Path: "f", Block: cell, Blocks: 1}, [][]string{{"1.2.0"}, {"2.2.0"}}, 1000)
	expect(t, checker.found, "view 0 is")
}

// TestLogs shows which records a file may have that is appended to and truncated to nothing.
func TestLogs(t *testing.T) {
	appended := func(m *made, writer int, begin, end int64) string {
		return m.add(op{Writer: writer, Kind: opAppend, Begin: begin, End: end}).String()
	}
	for name, c := range map[string]struct {
		history func(m *made) []string
		wrong   string
	}{
		"in order": {func(m *made) []string {
			a, b := appended(m, 1, 10, 20), appended(m, 2, 21, 30)
			m.sync(1, 31, 40)
			m.sync(2, 31, 40)
			return []string{a, b}
		}, ""},
		"out of order": {func(m *made) []string {
			a, b := appended(m, 1, 10, 20), appended(m, 2, 21, 30)
			return []string{b, a}
		}, "that was appended later"},
		"at once": {func(m *made) []string {
			a, b := appended(m, 1, 10, 22), appended(m, 2, 21, 30)
			return []string{b, a}
		}, ""},
		"twice": {func(m *made) []string {
			a := appended(m, 1, 10, 22)
			return []string{a, a}
		}, "it is at block 0, too"},
		"missing": {func(m *made) []string {
			appended(m, 1, 10, 20)
			m.sync(1, 21, 30)
			return nil
		}, "none has what was appended"},
		"missing and not synced": {func(m *made) []string {
			appended(m, 1, 10, 20)
			return nil
		}, ""},
		"a hole": {func(m *made) []string {
			a := appended(m, 1, 10, 20)
			m.sync(1, 21, 30)
			return []string{value{}.String(), a}
		}, "every place was written"},
		"a hole of what was killed": {func(m *made) []string {
			a := appended(m, 1, 10, 20)
			m.sync(1, 21, 30)
			appended(m, 2, 10, 0)
			return []string{value{}.String(), a}
		}, ""},
		"a hole that is read": {func(m *made) []string {
			a := appended(m, 1, 10, 20)
			m.read(26, 27, value{})
			m.sync(1, 31, 40)
			return []string{a}
		}, "every place was written"},
		"a hole that is read after the power was cut": {func(m *made) []string {
			m.cuts = []span{{21, 25}}
			a := appended(m, 1, 10, 20)
			m.read(26, 27, value{})
			m.sync(1, 31, 40)
			return []string{a}
		}, ""},
		"a hole that is read after the power was cut, of what was stable": {func(m *made) []string {
			m.cuts = []span{{35, 38}}
			a := appended(m, 1, 10, 20)
			m.sync(1, 21, 30)
			m.read(41, 42, value{})
			return []string{a}
		}, "every place was written"},
		"truncated": {func(m *made) []string {
			appended(m, 1, 10, 20)
			m.add(op{Writer: 2, Kind: opTruncate, Begin: 21, End: 30})
			m.sync(1, 31, 40)
			m.sync(2, 31, 40)
			return nil
		}, ""},
		"back after it was truncated": {func(m *made) []string {
			a := appended(m, 1, 10, 20)
			m.add(op{Writer: 2, Kind: opTruncate, Begin: 21, End: 30})
			m.sync(2, 31, 40)
			return []string{a}
		}, "the file was truncated since"},
		"of nobody": {func(m *made) []string { return []string{"1.77.0"} }, "it was not appended"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMade()
			end := c.history(m)
			checker := newChecker(m.history)
			checker.checkLog(file{Path: "f", Block: cell}, [][]string{end}, 1000)
			expect(t, checker.found, c.wrong)
		})
	}
}

// TestNames shows which names and contents a directory may have.
func TestNames(t *testing.T) {
	one, two, gone := change{Name: "n", N: 1}, change{Name: "n", N: 2}, change{Name: "n", N: 2, Gone: true}
	promised := func(c change) change { c.Promised = true; return c }
	for name, c := range map[string]struct {
		changes []change
		version int // that is there; 0: none
		right   bool
	}{
		"begun":                   {[]change{one}, 0, true},
		"begun and done":          {[]change{one}, 1, true},
		"promised":                {[]change{one, promised(one)}, 1, true},
		"promised and not there":  {[]change{one, promised(one)}, 0, false},
		"replaced":                {[]change{one, promised(one), two}, 1, true},
		"replaced and done":       {[]change{one, promised(one), two}, 2, true},
		"replaced and not there":  {[]change{one, promised(one), two}, 0, false},
		"replaced, promised":      {[]change{one, promised(one), two, promised(two)}, 2, true},
		"back":                    {[]change{one, promised(one), two, promised(two)}, 1, false},
		"removed":                 {[]change{one, promised(one), gone}, 0, true},
		"not yet removed":         {[]change{one, promised(one), gone}, 1, true},
		"removed, promised":       {[]change{one, gone, promised(gone)}, 0, true},
		"removed and there again": {[]change{one, gone, promised(gone)}, 1, false},
		"of nobody":               {[]change{one}, 7, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if c.version > 0 {
				if err := os.WriteFile(filepath.Join(dir, "n"), contentOf("n", c.version), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if found := checkNames(dir, c.changes); (len(found) == 0) != c.right {
				t.Errorf("found %q", found)
			}
		})
	}
}
