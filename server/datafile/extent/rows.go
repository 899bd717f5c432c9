package extent

import (
	"bytes"
	"context"
	"fmt"
	"math/bits"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// unit is one unit of a data file.
type unit struct {
	at         int64 // in the data file
	unit       int64 // on the namespace
	generation uint64
	state      schema.RunState
	valid      []byte // as schema.ExtentRun.Valid
}

// is reports whether a block is valid.
func (u *unit) is(block int64) bool {
	return u.state == schema.RunValid || u.state == schema.RunPartly && u.valid[block/8]>>(block%8)&1 != 0
}

// same is the first block after from that is not as from is, or to.
func (u *unit) same(from, to int64) int64 {
	valid, whole := u.is(from), byte(0)
	if valid {
		whole = 0xff
	}
	for from++; from < to && u.is(from) == valid; {
		if from%8 == 0 && u.valid[from/8] == whole {
			from += 8
		} else {
			from++
		}
	}
	return min(from, to)
}

// put makes the blocks [from, to) valid or invalid and reports whether that changes any.
func (u *unit) put(g *geometry, from, to int64, valid bool) bool {
	whole := schema.RunInvalid
	if valid {
		whole = schema.RunValid
	}
	if from >= to || u.state == whole {
		return false
	}
	if from == 0 && to == g.blocks {
		u.state, u.valid = whole, nil
		return true
	}
	fill := byte(0)
	if valid {
		fill = 0xff
	}
	m := slices.Clone(u.valid)
	if u.state != schema.RunPartly {
		m = bytes.Repeat([]byte{^fill}, int(g.blocks/8)) // there are at least 16 blocks, and a power of two
	}
	changed := false
	for i := from; i < to; {
		n, mask := int64(8), byte(0xff)
		if i%8 != 0 || to-i < 8 {
			n, mask = 1, 1<<(i%8)
		}
		if m[i/8]&mask != fill&mask {
			m[i/8] = m[i/8]&^mask | fill&mask
			changed = true
		}
		i += n
	}
	n := 0
	for _, c := range m {
		n += bits.OnesCount8(c)
	}
	switch int64(n) {
	case 0:
		u.state, u.valid = schema.RunInvalid, nil
	case g.blocks:
		u.state, u.valid = schema.RunValid, nil
	default:
		u.state, u.valid = schema.RunPartly, m
	}
	return changed
}

// part is the blocks of a unit that the bytes [off, end) of the data file touch, of which some are touched only in part if those
// are no multiples of the block.
func (g *geometry) part(at, off, end int64) (from, to int64) {
	start := at * g.unit
	from = max(off-start, 0) / g.block
	to = g.blocks
	if end-start < g.unit {
		to = (end - start + g.block - 1) / g.block
	}
	return from, to
}

// row is a row of extents.
type row struct {
	key, old []byte
	at       int64 // unit in its key
	units    []unit
	changed  bool
}

func (g *geometry) decodeRow(key, value []byte) (*row, error) {
	var e schema.Extents
	if err := schema.Decode(value, &e); err != nil {
		return nil, fmt.Errorf("extents row %q: %w: %w", key, catalog.ErrCorrupt, err)
	}
	bad := func(format string, args ...any) (*row, error) {
		return nil, fmt.Errorf("extents row %q: %w: %s", key, catalog.ErrCorrupt, fmt.Sprintf(format, args...))
	}
	_, at, _ := schema.ExtentsOf(key)
	r := &row{key: key, old: value, at: at}
	last := at - 1
	for i := range e.Runs {
		run := &e.Runs[i]
		switch {
		case run.Count < 1 || run.Count > int64(g.perRow-len(r.units)):
			return bad("run %d: %d units", i, run.Count)
		case run.At <= last || run.At > MaxBytes/g.unit-run.Count || i == 0 && run.At != at:
			return bad("run %d: at unit %d", i, run.At)
		case run.Unit < first || run.Unit > g.limit-run.Count:
			return bad("run %d: %d units from %d on", i, run.Count, run.Unit)
		case run.State > schema.RunPartly,
			run.State == schema.RunPartly && (run.Count != 1 || int64(len(run.Valid)) != g.blocks/8),
			run.State != schema.RunPartly && len(run.Valid) != 0:
			return bad("run %d: %d units in state %d, %d bytes say which blocks are valid", i, run.Count, run.State, len(run.Valid))
		}
		for j := range run.Count {
			u := unit{at: run.At + j, unit: run.Unit + j, generation: run.Generation, state: run.State}
			if run.State == schema.RunPartly {
				u.valid = run.Valid
			}
			r.units = append(r.units, u)
		}
		last = run.At + run.Count - 1
	}
	if len(r.units) == 0 {
		return bad("no unit")
	}
	return r, nil
}

// MaxBytes is where every data file ends at the latest.
const MaxBytes = 1 << 62

func encodeRow(units []unit) []byte {
	var e schema.Extents
	for i := range units {
		u := &units[i]
		if n := len(e.Runs); n > 0 && u.state != schema.RunPartly {
			run := &e.Runs[n-1]
			if run.State == u.state && run.Generation == u.generation && run.At+run.Count == u.at && run.Unit+run.Count == u.unit {
				run.Count++
				continue
			}
		}
		e.Runs = append(e.Runs, schema.ExtentRun{At: u.at, Unit: u.unit, Count: 1, Generation: u.generation, State: u.state, Valid: u.valid})
	}
	return schema.Encode(&e)
}

// write puts what has become of a row into a batch: nothing, itself, or several rows, if it has more units than fit one.
// appended says that units were only added behind those it had.
func (s *Space) write(b *catalog.Batch, number uint64, r *row, appended bool) {
	if !r.changed {
		return
	}
	if r.old != nil {
		b.GuardEqual(r.key, r.old)
	}
	kept := false
	for rest, rows := r.units, (len(r.units)+s.geo.perRow-1)/s.geo.perRow; rows > 0; rows-- {
		n := (len(rest) + rows - 1) / rows // alike, so that there is room in each
		if appended {
			n = min(len(rest), s.geo.perRow) // nothing will come between them
		}
		key := schema.ExtentsKey(s.id, number, rest[0].at)
		b.Put(key, encodeRow(rest[:n]))
		kept = kept || rest[0].at == r.at && r.old != nil
		rest = rest[n:]
	}
	if r.old != nil && !kept {
		b.Delete(r.key)
	}
}

// budget is how many rows, and how many bytes of them, may be read at a time.
type budget struct{ rows, bytes int }

// load reads the rows of a data file from the one in which unit from is or would be, up to those that begin before unit to, or fewer
// if the budget is exceeded. It returns where the first row begins that was not read for that reason, or to.
func (s *Space) load(ctx context.Context, r catalog.Reader, number uint64, from, to int64, most budget) (rows []*row, end int64, err error) {
	begin, limit := schema.ExtentsKey(s.id, number, 0), schema.ExtentsKey(s.id, number, to)
	at := schema.ExtentsKey(s.id, number, from)
	for kv, err := range r.Scan(ctx, begin, catalog.After(at), catalog.ScanOptions{Limit: 1, Reverse: true, KeysOnly: true}) {
		if err != nil {
			return nil, 0, err
		}
		at = slices.Clone(kv.Key)
	}
	for kv, err := range r.Scan(ctx, at, limit, catalog.ScanOptions{}) {
		if err != nil {
			return nil, 0, err
		}
		most.rows--
		most.bytes -= len(kv.Key) + len(kv.Value)
		if len(rows) > 0 && (most.rows < 0 || most.bytes < 0) {
			_, stop, _ := schema.ExtentsOf(kv.Key)
			return rows, stop, nil
		}
		row, err := s.geo.decodeRow(slices.Clone(kv.Key), slices.Clone(kv.Value))
		if err != nil {
			return nil, 0, err
		}
		rows = append(rows, row)
	}
	return rows, to, nil
}

// head reads the row of a data file as a whole; raw is nil if it has none.
func (s *Space) head(ctx context.Context, r catalog.Reader, number uint64) (head schema.ExtentFile, raw []byte, err error) {
	raws, err := r.GetMany(ctx, [][]byte{schema.ExtentFileKey(s.id, number)})
	if err != nil || raws[0] == nil {
		return head, nil, err
	}
	if err := schema.Decode(raws[0], &head); err != nil {
		return head, nil, fmt.Errorf("row of data file %x: %w: %w", number, catalog.ErrCorrupt, err)
	}
	return head, raws[0], nil
}

// describer makes a list of extents out of units that come in the order of their places in the data file.
type describer struct {
	geo     *geometry
	mode    layout.IOMode
	at, end int64 // bytes that are still to be listed, multiples of the block
	most    int
	list    []layout.Extent
}

// full reports whether the list has all that it may have.
func (d *describer) full() bool { return len(d.list) >= d.most || d.at >= d.end }

// add lists n bytes that are next. The list may get one extent more than it may have, which finish cuts off.
func (d *describer) add(n, addr int64, state layout.ExtentState) {
	if len(d.list) > 0 {
		last := &d.list[len(d.list)-1]
		if last.State == state && (state == layout.ExtentNone || last.Addr+last.Len == addr) {
			last.Len += n
			d.at += n
			return
		}
	}
	d.list = append(d.list, layout.Extent{Off: d.at, Len: n, Addr: addr, State: state})
	d.at += n
}

// unit lists a unit and the hole before it.
func (d *describer) unit(u *unit) {
	start := u.at * d.geo.unit
	if start+d.geo.unit <= d.at || start >= d.end {
		return
	}
	if start > d.at {
		d.add(start-d.at, 0, layout.ExtentNone)
	}
	from, to := d.geo.part(u.at, d.at, d.end)
	for from < to && len(d.list) <= d.most {
		valid, next := u.is(from), to
		if u.state == schema.RunPartly {
			next = u.same(from, to)
		}
		state := layout.ExtentInvalid
		if valid {
			state = layout.ExtentReadWrite
		}
		addr := u.unit*d.geo.unit + from*d.geo.block
		if d.mode == layout.IOModeRead {
			if state = layout.ExtentRead; !valid {
				state, addr = layout.ExtentNone, 0
			}
		}
		d.add((next-from)*d.geo.block, addr, state)
		from = next
	}
}

// finish returns the list. What follows the last unit up to the end is a hole.
func (d *describer) finish(hole bool) []layout.Extent {
	if hole && len(d.list) < d.most && d.at < d.end {
		d.add(d.end-d.at, 0, layout.ExtentNone)
	}
	return d.list[:min(len(d.list), d.most)]
}
