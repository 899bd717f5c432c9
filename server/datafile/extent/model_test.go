package extent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// grain is a part of a data file or of the namespace; the model knows nothing smaller.
type grain int64

// grains are in a unit.
const grains = 8

// told is what a client was told of a data file.
type told struct {
	number, generation uint64
	extents            []layout.Extent
}

// whose a unit is.
type whose struct {
	number    uint64
	at        int64 // in the data file
	condemned bool
}

// model is what must be true: whose each unit is, what is on the namespace, and what each data file's readers see.
type model struct {
	t     *testing.T
	ctx   context.Context
	rng   *rand.Rand
	place place
	e     *tight
	s     *Space
	unit  int64
	units map[int64]whose
	disk  map[grain]uint64            // tags; each write has its own
	files map[uint64]map[grain]uint64 // what is valid
	may   map[uint64]map[grain]uint64 // what a call that failed may have made of it; 0 = a hole
	freed map[int64]bool              // units that the call may free
	gone  map[uint64]bool             // data files that it may forget
	old   []told
	tag   uint64
	next  uint64
}

// Random calls, some of which are cut short at some batch, and restarts, against the model.
func TestModel(t *testing.T) {
	for _, geo := range []struct{ block, unit int64 }{{4096, mib}, {512, 16 * mib}, {512, 64 * mib}} { // 64, 4 and 1 units in a row
		for _, p := range places(t) {
			t.Run(fmt.Sprintf("%s/%d-%d", p.name, geo.block, geo.unit/mib), func(t *testing.T) {
				seed := uint64(time.Now().UnixNano())
				t.Logf("seed %d", seed)
				m := &model{
					t: t, ctx: timed(t), rng: rand.New(rand.NewPCG(seed, 0)), place: p, unit: geo.unit,
					units: map[int64]whose{}, disk: map[grain]uint64{}, files: map[uint64]map[grain]uint64{}, next: 1,
				}
				m.e = squeeze(p.open(t))
				m.s = format(t, m.e, geo.block, geo.unit, 150)
				calls := 800
				if testing.Short() {
					calls = 200
				}
				if p.name == "pebble" {
					calls = 150
				}
				for i := range calls {
					m.step()
					if t.Failed() {
						t.Fatalf("at call %d", i)
					}
				}
			})
		}
	}
}

func (m *model) step() {
	m.may, m.freed, m.gone = map[uint64]map[grain]uint64{}, map[int64]bool{}, map[uint64]bool{}
	if m.rng.IntN(4) == 0 { // stops soon, before or after the batch
		m.e.left, m.e.after = 1+m.rng.IntN(4), m.rng.IntN(2) == 0
	}
	var err error
	what := ""
	switch m.rng.IntN(12) {
	case 0, 1, 2, 3, 4:
		what, err = "write", m.write()
	case 5:
		what, err = "late write", m.late()
	case 6, 7:
		what, err = "punch", m.punch()
	case 8:
		what, err = "remove", m.remove()
	case 9, 10:
		what, err = "release", m.release()
	case 11:
		m.restart()
	}
	if err != nil && !errors.Is(err, errStopped) && !errors.Is(err, ErrNoSpace) {
		m.t.Errorf("%s: %v", what, err)
	}
	if m.e.stopped {
		m.restart()
	}
	m.e.left = 0
	if m.verify(err != nil); m.t.Failed() {
		m.t.Errorf("after %s: %v", what, err)
	}
}

// restart is a crash of the service, and perhaps of the engine.
func (m *model) restart() {
	e := m.place.open(m.t)
	m.e = squeeze(e)
	m.s = open(m.t, m.e)
}

// pick is some data file, which may not be there yet.
func (m *model) pick() uint64 {
	if len(m.files) < 6 && m.rng.IntN(3) == 0 {
		m.next++
		return m.next
	}
	numbers := slices.Sorted(maps.Keys(m.files))
	if len(numbers) == 0 {
		return m.next
	}
	return numbers[m.rng.IntN(len(numbers))]
}

// extent is some range, of whole grains.
func (m *model) extent() layout.Range {
	g := m.unit / grains
	off := int64(m.rng.IntN(100*grains)) * g
	if m.rng.IntN(2) == 0 {
		off = int64(m.rng.IntN(6*grains)) * g
	}
	return layout.Range{Off: off, Len: int64(1+m.rng.IntN(1<<m.rng.IntN(8))) * g}
}

// write asks for space for some data files, writes a part of it, and commits that.
func (m *model) write() error {
	var requests []Request
	for range 1 + m.rng.IntN(3) {
		r := Request{Space: m.s, Number: m.pick(), Range: m.extent()}
		if m.rng.IntN(3) == 0 {
			r.Column = layout.Column{Unit: m.unit, Count: 3, Index: m.rng.IntN(3)}
		}
		if !slices.ContainsFunc(requests, func(o Request) bool { return o.Number == r.Number }) {
			requests = append(requests, r)
			if m.files[r.Number] == nil {
				m.files[r.Number] = map[grain]uint64{}
			}
		}
	}
	grants, err := Allocate(m.ctx, requests, nil)
	if err != nil {
		return err
	}
	for i, g := range grants {
		number := requests[i].Number
		m.old = append(m.old, told{number, g.Generation, g.Extents})
		var ranges []layout.Range
		end := g.Extents[0].Off
		for _, x := range g.Extents {
			if x.Off != end {
				m.t.Errorf("a gap before %+v", x)
			}
			end = x.End()
		}
		for _, r := range m.pieces(requests[i], g.Extents) {
			if m.rng.IntN(4) == 0 {
				continue
			}
			from := r.Off + int64(m.rng.IntN(grains))*m.unit/grains
			if from < r.End() {
				ranges = append(ranges, layout.Range{Off: from, Len: r.End() - from})
			}
		}
		m.may[number] = map[grain]uint64{}
		for _, r := range ranges {
			for at := grain(r.Off * grains / m.unit); at < grain(r.End()*grains/m.unit); at++ {
				where, state := lookup(g.Extents, at, m.unit)
				if state != layout.ExtentReadWrite && state != layout.ExtentInvalid {
					m.t.Fatalf("%d bytes at %d were asked for: %v", m.unit/grains, int64(at)*m.unit/grains, g.Extents)
				}
				m.tag++
				m.disk[where] = m.tag
				if state == layout.ExtentReadWrite {
					m.files[number][at] = m.tag
				}
				m.may[number][at] = m.tag
			}
		}
		if len(ranges) == 0 || m.rng.IntN(8) == 0 { // it never says so
			m.may[number] = nil
			continue
		}
		if err := m.s.Validate(m.ctx, number, g.Generation, layout.Column{}, ranges); err != nil {
			return err
		}
		maps.Copy(m.files[number], m.may[number])
		m.may[number] = nil
	}
	return nil
}

// pieces is what a request asked for and got.
func (m *model) pieces(r Request, extents []layout.Extent) (list []layout.Range) {
	end := min(extents[len(extents)-1].End(), r.End())
	for from, to := r.Column.Next(r.Off, end); from < to; from, to = r.Column.Next(to, end) {
		list = append(list, layout.Range{Off: from, Len: to - from})
	}
	return list
}

// lookup is where a grain of a data file is.
func lookup(extents []layout.Extent, at grain, unit int64) (grain, layout.ExtentState) {
	off := int64(at) * unit / grains
	for _, x := range extents {
		if off >= x.Off && off < x.End() {
			return grain((x.Addr + off - x.Off) * grains / unit), x.State
		}
	}
	return 0, layout.ExtentNone
}

// late is a client that does not know, or does not care, that what it was told is over. It can write to the namespace until it is declared
// dead, and is refused when it commits that.
func (m *model) late() error {
	if len(m.old) == 0 {
		return nil
	}
	o := m.old[m.rng.IntN(len(m.old))]
	now, _, err := m.s.Lookup(m.ctx, o.number, layout.Range{Len: layout.ToEOF}, layout.IOModeRW, layout.MaxExtents)
	if err != nil {
		return err
	}
	for _, x := range o.extents {
		if x.State == layout.ExtentNone {
			continue
		}
		for off := x.Off; off < x.End(); off += m.unit / grains {
			at := grain(off * grains / m.unit)
			was, _ := lookup(o.extents, at, m.unit)
			where, state := lookup(now, at, m.unit)
			if state != layout.ExtentNone && where == was {
				continue // it may
			}
			m.tag++
			m.disk[was] = m.tag
			err := m.s.Validate(m.ctx, o.number, o.generation, layout.Column{}, []layout.Range{{Off: off, Len: m.unit / grains}})
			if !errors.Is(err, ErrStale) && !errors.Is(err, ErrNotAllocated) {
				return fmt.Errorf("data file %d, grain %d, written in generation %d at %d, is at %d: %w", o.number, at, o.generation, was, where, errors.Join(err, errors.New("was taken")))
			}
		}
	}
	return nil
}

func (m *model) punch() error {
	number, r := m.pick(), m.extent()
	if m.rng.IntN(3) == 0 {
		r.Len = layout.ToEOF
	}
	m.may[number] = map[grain]uint64{}
	for at := range m.files[number] {
		if off := int64(at) * m.unit / grains; r.Contains(off, 1) {
			m.may[number][at] = 0
		}
	}
	zeros, _, err := m.s.Punch(m.ctx, number, r)
	if len(zeros) > 0 {
		m.t.Errorf("zeros %v of whole blocks", zeros)
	}
	if err == nil {
		for at := range m.may[number] {
			delete(m.files[number], at)
		}
		m.may[number] = nil
	}
	return err
}

func (m *model) remove() error {
	number := m.pick()
	m.may[number] = map[grain]uint64{}
	for at := range m.files[number] {
		m.may[number][at] = 0
	}
	m.gone[number] = true
	err := m.s.Remove(m.ctx, number)
	for err != nil && m.e.stopped && m.rng.IntN(2) == 0 { // the service goes on with it
		m.restart()
		err = m.s.Remove(m.ctx, number)
	}
	if err == nil {
		delete(m.files, number)
		m.may[number] = nil
		m.next++ // its number is used up
	}
	return err
}

// release declares dead who was told of a data file before some generation.
func (m *model) release() error {
	var all []Waiting
	if err := m.s.Condemned(m.ctx, func(w Waiting) error { all = append(all, w); return nil }); err != nil {
		return err
	}
	if len(all) == 0 {
		return nil
	}
	w := all[m.rng.IntN(len(all))]
	if m.rng.IntN(3) == 0 {
		w.Generation -= min(w.Generation, uint64(m.rng.IntN(3)))
	}
	from, to := schema.OfDevice(schema.PrefixCondemned, dev, w.Number)
	for kv, err := range m.e.Scan(m.ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		_, generation, run, err := m.s.geo.decodeCondemned(kv.Key, kv.Value)
		if err != nil {
			return err
		}
		for u := run.unit; u < run.unit+run.n && generation <= w.Generation; u++ {
			m.freed[u] = true
		}
	}
	m.old = slices.DeleteFunc(m.old, func(o told) bool { return o.number == w.Number && o.generation < w.Generation })
	return m.s.Release(m.ctx, w.Number, w.Generation)
}

// verify holds the catalog against the model. What a call that failed may have changed is as before or as it was to become.
func (m *model) verify(failed bool) {
	t := m.t
	units := map[int64]whose{}
	take := func(u int64, w whose) {
		if other, ok := units[u]; ok {
			t.Errorf("unit %d is %+v and %+v", u, other, w)
		}
		units[u] = w
	}
	listed := map[uint64]bool{}
	err := m.s.List(m.ctx, func(f File) error {
		listed[f.Number] = true
		if m.files[f.Number] == nil {
			t.Errorf("data file %d is there", f.Number)
			return nil
		}
		list, _, err := m.s.Lookup(m.ctx, f.Number, layout.Range{Len: layout.ToEOF}, layout.IOModeRW, layout.MaxExtents)
		if err != nil {
			return err
		}
		size, err := m.s.Size(m.ctx, f.Number)
		if err != nil {
			return err
		}
		seen := map[grain]uint64{}
		end, last := int64(0), int64(0)
		for _, x := range list {
			if x.Off != end || x.Len <= 0 || (x.Off|x.Len|x.Addr)%m.s.geo.block != 0 {
				t.Errorf("data file %d: extent %+v after %d", f.Number, x, end)
			}
			end = x.End()
			if x.State == layout.ExtentNone {
				continue
			}
			for off := x.Off; off < x.End(); off += m.unit / grains {
				where := (x.Addr + off - x.Off) / (m.unit / grains)
				if where%grains != off/(m.unit/grains)%grains {
					t.Errorf("data file %d: %+v is at another place in its unit", f.Number, x)
				}
				if off%m.unit == 0 {
					take(where/grains, whose{f.Number, off / m.unit, false})
				}
				if x.State == layout.ExtentReadWrite {
					seen[grain(off/(m.unit/grains))] = m.disk[grain(where)]
					last = off + m.unit/grains
				}
			}
		}
		if size != last {
			t.Errorf("data file %d: size %d, want %d", f.Number, size, last)
		}
		m.compare(f.Number, seen, failed)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for number := range m.files {
		if !listed[number] {
			m.compare(number, nil, failed)
			if m.gone[number] {
				delete(m.files, number)
				m.next++
			}
		}
	}
	from, to := schema.OfDevice(schema.PrefixCondemned, dev)
	for kv, err := range m.e.Scan(m.ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		number, _, run, err := m.s.geo.decodeCondemned(kv.Key, kv.Value)
		if err != nil {
			t.Fatal(err)
		}
		for u := run.unit; u < run.unit+run.n; u++ {
			take(u, whose{number, 0, true})
		}
	}
	for u := range m.s.geo.limit {
		was, had := m.units[u]
		is, has := units[u]
		switch {
		case !has && had && !(was.condemned && m.freed[u]):
			t.Errorf("unit %d was %+v and is free", u, was)
		case has && is.condemned && !(had && was.number == is.number):
			t.Errorf("unit %d was %+v and is condemned as %+v", u, was, is)
		case has && !is.condemned && had && was != is:
			t.Errorf("unit %d was %+v and is %+v", u, was, is)
		}
	}
	m.units = units
	clean(t, m.s)
}

// compare holds what readers of a data file see against what they are to see.
func (m *model) compare(number uint64, seen map[grain]uint64, failed bool) {
	want := m.files[number]
	for at, tag := range m.may[number] {
		if failed && seen[at] == tag {
			if want[at] = tag; tag == 0 {
				delete(want, at)
			}
		}
	}
	for at, tag := range seen {
		if want[at] != tag {
			m.t.Errorf("data file %d, grain %d: %d, want %d", number, at, tag, want[at])
		}
	}
	for at, tag := range want {
		if _, ok := seen[at]; !ok {
			m.t.Errorf("data file %d, grain %d: a hole, want %d", number, at, tag)
		}
	}
}
