package crash

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// effect is what an operation makes of one block.
type effect struct {
	op  *op
	val value
}

// checker has what follows from a history.
type checker struct {
	*history
	stable map[*op]int64 // when a change was promised to be stable; those that are missing may be lost, if they were made at all
	files  map[string][]*op
	found  []string
}

// most is how many findings are told.
const most = 5

// newChecker finds out which operations were promised.
func newChecker(h *history) *checker {
	c := &checker{history: h, stable: map[*op]int64{}, files: map[string][]*op{}}
	for _, o := range h.ops {
		c.files[o.File] = append(c.files[o.File], o)
	}
	type epoch struct {
		writer int
		file   string
		epoch  int
	}
	sessions := map[epoch][]*op{}
	for _, o := range h.ops {
		key := epoch{o.Writer, o.File, o.Epoch}
		sessions[key] = append(sessions[key], o)
	}
	for _, ops := range sessions {
		c.promise(ops)
	}
	return c
}

// changes reports whether an operation changes blocks.
func (o *op) changes() bool {
	switch o.Kind {
	case opWrite, opAppend, opTruncate, opPunch:
		return true
	}
	return false
}

// promise goes through what a writer has done to a file between open and close. Whatever returns an error takes back
// what was promised by others than fsync since the last fsync: the session may have been lost at any time since, and
// it is fsync that tells.
func (c *checker) promise(ops []*op) {
	var pending []*op // changes since the last fsync
	var lock *op
	for _, o := range ops {
		if !o.ok() {
			for _, p := range pending {
				if !p.Dsync {
					delete(c.stable, p)
				}
			}
			return // the file was closed
		}
		switch {
		case o.changes():
			pending = append(pending, o)
			if o.Dsync {
				c.stable[o] = o.End
			}
			for _, s := range c.syncs[c.mounts[o.Writer]] {
				if s.begin >= o.End {
					c.promised(o, s.end)
				}
			}
		case o.Kind == opSync:
			for _, p := range pending {
				c.promised(p, o.End)
			}
			pending = nil
		case o.Kind == opLock:
			lock = o
		case o.Kind == opUnlock && c.sharedSince(lock, o):
			for _, p := range pending {
				if p.N > lock.N {
					c.promised(p, o.End)
				}
			}
		}
	}
}

// promised notes that a change is stable from some time on, if it was not before.
func (c *checker) promised(o *op, at int64) {
	if before, ok := c.stable[o]; !ok || at < before {
		c.stable[o] = at
	}
}

// sharedSince reports whether it is certain that another mount had the file open when a lock was granted, and that
// neither has lost its session.
func (c *checker) sharedSince(lock, unlock *op) bool {
	stood := func(mount int, since int64) bool {
		return slices.ContainsFunc(c.stops[mount], func(s span) bool { return s.meets(since, unlock.End) })
	}
	mine := c.mounts[lock.Writer]
	opened := int64(0)
	for _, o := range c.files[lock.File] {
		if o.Writer == lock.Writer && o.Epoch == lock.Epoch && o.Kind == opOpen {
			opened = o.Begin
		}
	}
	if stood(mine, opened) {
		return false
	}
	type holder struct{ writer, epoch int }
	since := map[holder]int64{}
	for _, o := range c.files[lock.File] {
		if c.mounts[o.Writer] == mine {
			continue
		}
		h := holder{o.Writer, o.Epoch}
		switch {
		case o.Kind == opOpen && o.ok() && o.End < lock.Begin:
			since[h] = o.Begin
		// It had it open still, and its session, when it called something later on that was answered.
		case o.ok() && o.Begin > unlock.End && since[h] > 0 && !stood(c.mounts[o.Writer], since[h]):
			return true
		}
	}
	return false
}

// holds reports whether a change must be seen by what looks at its block from begin to end: it was promised and was
// stable then, or no power was cut meanwhile.
func (c *checker) holds(o *op, begin, end int64) bool {
	stable, ok := c.stable[o]
	if !ok || !o.ok() {
		return false
	}
	return stable <= begin || !slices.ContainsFunc(c.cuts, func(s span) bool { return s.meets(o.Begin, end) })
}

// effects is what operations make of a block of a file, in the order in which they began.
func (c *checker) effects(file string, block int) (all []effect) {
	for _, o := range c.files[file] {
		switch in := block >= o.Block && block < o.Block+o.Count; {
		case o.Kind == opWrite && in:
			all = append(all, effect{o, value{o.Writer, o.N, block - o.Block}})
		case o.Kind == opTruncate && block >= o.Block, o.Kind == opPunch && in:
			all = append(all, effect{o, value{}})
		}
	}
	return all
}

// mustParse reads what this package has written.
func mustParse(s string) block {
	b, err := parseBlock(s)
	if err != nil {
		panic(err)
	}
	return b
}

// look is what was seen of a block, and when.
type look struct {
	by         string
	begin, end int64
	seen       block
	final      bool // nothing is done any more
}

// checkBlocks checks a file that is written in place: each block, in each read and at the end.
func (c *checker) checkBlocks(f file, final [][]string, at int64) {
	appends := map[value]*op{}
	for _, o := range c.files[f.Path] {
		if o.Kind == opAppend {
			appends[value{o.Writer, o.N, 0}] = o
		}
	}
	looks := map[int][]look{}
	add := func(o look, first int, seen []string) {
		for i, s := range seen {
			o.seen = mustParse(s)
			looks[first+i] = append(looks[first+i], o)
		}
	}
	for _, o := range c.files[f.Path] {
		if o.Kind == opRead && o.ok() {
			add(look{by: fmt.Sprint("writer ", o.Writer), begin: o.Begin, end: o.End}, o.Block, o.Seen)
		}
	}
	longest := f.Blocks
	for _, seen := range final {
		longest = max(longest, len(seen))
	}
	var ends [][]string
	for _, seen := range final {
		seen = slices.Clone(seen)
		for len(seen) < longest {
			seen = append(seen, value{}.String())
		}
		ends = append(ends, seen)
	}
	// What is changed no more is the same for everybody.
	for i, seen := range ends {
		if i == 0 || !slices.Equal(seen, ends[0]) {
			add(look{by: fmt.Sprint("view ", i), begin: at, end: forever, final: true}, 0, seen)
		}
	}
	placed := map[value]int{} // where an append was found at the end
	for b := range longest {
		c.checkBlock(f, b, looks[b], appends, placed)
		for i, seen := range ends {
			if seen[b] != ends[0][b] {
				l := look{by: fmt.Sprint("view ", i), end: forever, final: true, seen: mustParse(seen[b])}
				c.report(f, b, l, fmt.Sprintf("view 0 is %s (views are those of the mounts, then the copies)", ends[0][b]), c.effects(f.Path, b))
			}
		}
	}
}

// checkBlock checks what was seen of one block. Its effects with those of appends that were found there are all that
// may be seen.
func (c *checker) checkBlock(f file, b int, looks []look, appends map[value]*op, placed map[value]int) {
	effects := c.effects(f.Path, b)
	here := map[value]bool{}
	for _, l := range looks {
		for _, v := range l.seen.values {
			if o := appends[v]; o != nil && !here[v] {
				here[v] = true
				effects = append(effects, effect{o, v})
			}
		}
	}
	for _, l := range looks {
		switch {
		case l.seen.garbage:
			c.report(f, b, l, "nobody has written these bytes", effects)
			continue
		case len(l.seen.values) > 1 && !l.final:
			continue // it may be read while it is written
		case len(l.seen.values) > 1 && !slices.ContainsFunc(l.seen.values, func(v value) bool {
			return slices.ContainsFunc(effects, func(e effect) bool { return e.val == v && !e.op.ok() })
		}):
			c.report(f, b, l, "a mixture of what was written at once", effects)
			continue
		}
		for _, v := range l.seen.values {
			if why := c.wrong(v, l.begin, l.end, effects); why != "" {
				c.report(f, b, l, why, effects)
			}
			o := appends[v]
			if o == nil {
				continue
			}
			if before, ok := placed[v]; ok && before != b && l.final {
				c.report(f, b, l, fmt.Sprintf("%s was appended once and is at block %d, too", v, before), effects)
			}
			if l.final {
				placed[v] = b
			}
			if !here[v] {
				continue
			}
			delete(here, v) // once is enough
			if under := c.covered(f.Path, b, o); under != nil {
				c.report(f, b, l, fmt.Sprintf("%s was appended, but the file was longer: %s", v, c.describe(under)), effects)
			}
		}
	}
}

// wrong tells why a value cannot be what a block is made of when it is looked at from begin to end; "" if it can.
//
// A value can be seen if it had begun to be written, and no change that must be seen began after it had ended and had
// ended before.
func (c *checker) wrong(v value, begin, end int64, effects []effect) string {
	var over *op // the change that must be seen, which began last
	for _, e := range effects {
		if e.op.ok() && e.op.End <= begin && (over == nil || e.op.Begin > over.Begin) && c.holds(e.op, begin, end) {
			over = e.op
		}
	}
	if over == nil && v == (value{}) {
		return ""
	}
	made := false
	for _, e := range effects {
		if e.val != v || e.op.Begin >= end {
			continue
		}
		made = true
		if over == nil || e.op.last() >= over.Begin {
			return ""
		}
	}
	switch {
	case over == nil || (!made && v != value{}):
		return fmt.Sprintf("%s was not written here", v)
	case !made:
		return fmt.Sprintf("nothing has made it zeros since: %s", c.describe(over))
	}
	return fmt.Sprintf("%s was replaced before: %s", v, c.describe(over))
}

// covered returns a change that proves that the file was longer when an append that was found at a block began; nil
// if there is none.
func (c *checker) covered(name string, block int, o *op) *op {
	for _, u := range c.files[name] {
		if u.Kind != opWrite || u.Block+u.Count <= block || !u.ok() || u.End > o.Begin || !c.holds(u, o.Begin, o.last()) {
			continue
		}
		if !slices.ContainsFunc(c.files[name], func(t *op) bool {
			return t.Kind == opTruncate && t.Block < u.Block+u.Count && t.last() >= u.Begin && t.Begin <= o.last()
		}) {
			return u
		}
	}
	return nil
}

// slow is how long an append takes at least whose place may have been recalled, so that it stays zeros.
const slow = 900 * time.Millisecond

// checkLog checks a file that is only appended to and truncated to nothing.
func (c *checker) checkLog(f file, final [][]string, at int64) {
	for _, o := range c.files[f.Path] {
		if o.Kind == opRead && o.ok() {
			c.checkRecords(f, look{by: fmt.Sprint("writer ", o.Writer), begin: o.Begin, end: o.End}, o.Seen)
		}
	}
	for i, seen := range final {
		if i > 0 && slices.Equal(seen, final[0]) {
			continue
		}
		c.checkRecords(f, look{by: fmt.Sprint("view ", i), begin: at, end: forever, final: true}, seen)
	}
}

// checkRecords checks the records that such a file has at some time.
func (c *checker) checkRecords(f file, l look, seen []string) {
	appends := map[value]*op{}
	var truncated int64 // when the last truncation began that was done before
	busy := false       // a truncation is under way meanwhile, or may still come
	maybe := false      // an append may have left a place without bytes
	var truncations []*op
	for _, o := range c.files[f.Path] {
		if o.Kind == opTruncate {
			truncations = append(truncations, o)
		}
		switch {
		case o.Kind == opAppend:
			appends[value{o.Writer, o.N, 0}] = o
		case o.Kind == opTruncate && c.holds(o, l.begin, l.end) && o.End <= l.begin:
			truncated = max(truncated, o.Begin)
		case o.Kind == opTruncate && o.Begin < l.end && !l.final:
			busy = true
		}
	}
	for _, o := range appends {
		if o.Begin < l.end && o.last() >= truncated && (!c.holds(o, l.begin, l.end) || o.End-o.Begin > int64(slow)) {
			maybe = true
		}
	}
	places := map[value]int{}
	var before *op // of the records so far the one that began last
	for i, s := range seen {
		b := mustParse(s)
		if len(b.values) != 1 || b.garbage {
			if l.final || b.garbage {
				l.seen = b
				c.report(f, i, l, "it is no record", nil)
			}
			continue
		}
		v := b.values[0]
		o := appends[v]
		l.seen = b
		switch p, again := places[v]; {
		case v == value{} && !maybe && !busy:
			c.report(f, i, l, "every place was written", c.around(appends, truncated))
			maybe = true // once is enough; which record is missing, or stands elsewhere, is told below
		case v == value{}:
		case o == nil || o.Begin >= l.end:
			c.report(f, i, l, "it was not appended", nil)
		case again && !busy:
			c.report(f, i, l, fmt.Sprintf("it is at block %d, too", p), nil)
		case o.last() < truncated:
			c.report(f, i, l, "the file was truncated since", c.around(appends, truncated))
		case before != nil && o.last() < before.Begin && !busy:
			c.report(f, i, l, fmt.Sprintf("a record stands before it that was appended later: %s", c.describe(before)), nil)
		default:
			places[v] = i
			if before == nil || o.Begin > before.Begin {
				before = o
			}
		}
	}
	for v, o := range appends {
		if _, there := places[v]; there || !o.ok() || o.End > l.begin || !c.holds(o, l.begin, l.end) {
			continue
		}
		if !slices.ContainsFunc(truncations, func(t *op) bool {
			return t.last() >= o.Begin && t.Begin < l.end
		}) {
			l.seen = block{}
			c.report(f, len(seen), l, fmt.Sprintf("of %d blocks none has what was appended: %s", len(seen), c.describe(o)), nil)
		}
	}
}

// around is what is told of a file that is appended to: what was done since a moment.
func (c *checker) around(appends map[value]*op, since int64) (all []effect) {
	for v, o := range appends {
		if o.last() >= since {
			all = append(all, effect{o, v})
		}
	}
	return all
}

// describe is an operation in a report.
func (c *checker) describe(o *op) string {
	ms := func(t int64) float64 { return float64(t-c.ops[0].Begin) / 1e6 }
	end, stable := "has not returned", "not promised"
	if o.End > 0 {
		end = fmt.Sprintf("%.3f", ms(o.End))
	}
	if o.Err != "" {
		end += " " + o.Err
	}
	if at, ok := c.stable[o]; ok {
		stable = fmt.Sprintf("stable from %.3f on", ms(at))
	}
	dsync := ""
	if o.Dsync {
		dsync = " O_DSYNC"
	}
	return fmt.Sprintf("%d.%d %s%s %d+%d on mount %d from %.3f to %s, %s", o.Writer, o.N, o.Kind, dsync, o.Block, o.Count, c.mounts[o.Writer], ms(o.Begin),
		end, stable)
}

// report adds a finding, with the last that was done to the block before it was looked at.
func (c *checker) report(f file, b int, l look, why string, effects []effect) {
	if len(c.found) > most {
		return
	}
	var s strings.Builder
	when := "at the end"
	if !l.final {
		when = fmt.Sprintf("from %.3f to %.3f ms", float64(l.begin-c.ops[0].Begin)/1e6, float64(l.end-c.ops[0].Begin)/1e6)
	}
	fmt.Fprintf(&s, "%s block %d (of %d bytes): %s is read by %s %s: %s", f.Path, b, f.Block, l.seen, l.by, when, why)
	effects = slices.DeleteFunc(slices.Clone(effects), func(e effect) bool { return e.op.Begin > l.end })
	slices.SortFunc(effects, func(a, b effect) int { return cmp.Compare(a.op.Begin, b.op.Begin) })
	for _, e := range effects[max(0, len(effects)-25):] {
		fmt.Fprintf(&s, "\n\t%s: %s", c.describe(e.op), e.val)
	}
	for _, cut := range c.cuts {
		fmt.Fprintf(&s, "\n\tpower of a data server cut from %.3f to %.3f", float64(cut.begin-c.ops[0].Begin)/1e6, float64(cut.end-c.ops[0].Begin)/1e6)
	}
	c.found = append(c.found, s.String())
}
