package postgres

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
)

// FNV-1a, 64 bits: every process has to come to the same number.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func hash(h uint64, b []byte) uint64 {
	for _, c := range b {
		h = (h ^ uint64(c)) * fnvPrime
	}
	return h
}

const (
	// classLen is how many bytes keys of one class share: inserts into a class and guards on ranges within it meet at one lock.
	// It is the length of a kind of row and a number of 8 bytes, as in the keys of a directory's entries.
	classLen = 9

	// maxLocks is from how many locks on a batch locks everything instead, so that a few batches at once do not use up the
	// server's lock table (64 for each of its connections by default).
	maxLocks = 256
)

// plan is what a batch sends to the server.
type plan struct {
	salt  uint64
	lazy  bool
	locks []int64 // as in commitArgs; the exclusive ones have the lowest bit

	guardIndex, guardKind []int32
	guardKeys, guardVals  [][]byte
	guardLocks            []int64

	rangeIndex         []int32
	rangeFrom, rangeTo [][]byte

	putKeys, putVals [][]byte
	deletes          [][]byte

	changeKeys, changes [][]byte
	addMasks, maxMasks  []int64
	changeLocks         []int64
}

// lock returns the number of the lock of a key or class, times two.
func (p *plan) lock(key []byte) int64 { return int64(hash(p.salt, key) &^ 1) }

// everything is the lock that each batch shares and those take alone that cannot say what they touch.
func (p *plan) everything() int64 { return int64(p.salt &^ 1) }

const exclusive = 1

func (p *plan) shared(lock int64) { p.locks = append(p.locks, lock) }
func (p *plan) alone(lock int64)  { p.locks = append(p.locks, lock|exclusive) }

// insert takes the lock that keeps guards on ranges away while key may come into being.
func (p *plan) insert(key []byte) {
	if len(key) > classLen {
		p.shared(p.lock(key[:classLen]))
	}
}

// endless is behind every key.
var endless = bytes.Repeat([]byte{0xff}, catalog.MaxKey+2)

// classOf returns the class that all keys from <= key < to are in, or false if there are several.
func classOf(from, to []byte) ([]byte, bool) {
	if len(from) < classLen || len(to) == 0 {
		return nil, false
	}
	class := from[:classLen]
	end := catalog.PrefixEnd(class)
	return class, end == nil || bytes.Compare(to, end) <= 0
}

// newPlan prepares b, which passed Check.
//
// With careful every lock on a key is taken alone, so that nothing that the batch names can be in use by others.
func newPlan(salt uint64, b *catalog.Batch, careful bool) (*plan, error) {
	p := &plan{salt: salt, lazy: b.Durability == catalog.NoSync}
	p.locks = make([]int64, 0, 1+b.Len()+len(b.Puts)+len(b.Deltas))
	onKey := p.shared
	if careful {
		onKey = p.alone
	}
	wide := false
	for i := range b.Guards {
		g := &b.Guards[i]
		if g.Kind == catalog.RangeEmpty {
			to := g.To
			if len(to) == 0 {
				to = endless
			}
			p.rangeIndex = append(p.rangeIndex, int32(i))
			p.rangeFrom, p.rangeTo = append(p.rangeFrom, g.Key), append(p.rangeTo, to)
			if class, one := classOf(g.Key, g.To); one {
				p.alone(p.lock(class))
			} else {
				wide = true
			}
			continue
		}
		l := p.lock(g.Key)
		onKey(l)
		p.guardIndex, p.guardKind = append(p.guardIndex, int32(i)), append(p.guardKind, int32(g.Kind))
		p.guardKeys, p.guardVals = append(p.guardKeys, g.Key), append(p.guardVals, g.Value)
		p.guardLocks = append(p.guardLocks, l>>1)
	}
	groups := groupDeltas(b.Deltas)
	for i := range b.Puts {
		row := &b.Puts[i]
		value, err := groups.onTop(row.Key, row.Value)
		if err != nil {
			return nil, err
		}
		p.put(row.Key, value)
	}
	for _, key := range b.Deletes {
		if groups.has(key) {
			value, err := groups.onTop(key, nil)
			if err != nil {
				return nil, err
			}
			p.put(key, value)
			continue
		}
		p.deletes = append(p.deletes, key)
		p.alone(p.lock(key))
	}
	for i := range groups {
		if g := &groups[i]; !g.used {
			p.delta(g, onKey)
		}
	}
	p.shared(p.everything())
	p.sortLocks() // most rows are guarded as well as put, and many share a class: what counts is what is left
	if wide || len(p.locks) > maxLocks {
		p.locks = append(p.locks[:0], p.everything()|exclusive)
	}
	return p, nil
}

func (p *plan) put(key, value []byte) {
	p.putKeys, p.putVals = append(p.putKeys, key), append(p.putVals, value)
	p.alone(p.lock(key))
	p.insert(key)
}

func (p *plan) delta(g *group, onKey func(int64)) {
	var adds, maxes int64
	for _, d := range g.deltas {
		if d.Op == catalog.OpAdd {
			adds |= 1 << d.Field
		} else {
			maxes |= 1 << d.Field
		}
	}
	l := p.lock(g.key)
	if adds&maxes != 0 { // they do not commute with any others
		onKey = p.alone
	}
	onKey(l)
	p.insert(g.key)
	p.changeKeys, p.changes = append(p.changeKeys, g.key), append(p.changes, g.change().Append(nil))
	p.addMasks, p.maxMasks = append(p.addMasks, adds), append(p.maxMasks, maxes)
	p.changeLocks = append(p.changeLocks, l>>1)
}

// sortLocks brings the locks into the order that all commits take them in, each once and in its stronger mode.
func (p *plan) sortLocks() {
	slices.SortFunc(p.locks, func(a, b int64) int { return cmp.Compare(a, b) })
	n := 0
	for _, l := range p.locks {
		if n > 0 && p.locks[n-1]&^exclusive == l&^exclusive {
			p.locks[n-1] = l // behind the shared one, as it is odd
			continue
		}
		p.locks[n] = l
		n++
	}
	p.locks = p.locks[:n]
}

// group are the deltas of one key in a batch.
type group struct {
	key    []byte
	deltas []*catalog.Delta
	used   bool // they are part of a put
}

func (g *group) change() fold.Change {
	var c fold.Change
	for _, d := range g.deltas {
		c = c.AddDelta(d)
	}
	return c
}

// groups are in the order of their keys.
type groups []group

func groupDeltas(deltas []catalog.Delta) groups {
	var gs groups
	for i := range deltas {
		d := &deltas[i]
		at, found := gs.find(d.Key)
		if !found {
			gs = slices.Insert(gs, at, group{key: d.Key})
		}
		gs[at].deltas = append(gs[at].deltas, d)
	}
	return gs
}

func (gs groups) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(gs, key, func(g group, key []byte) int { return bytes.Compare(g.key, key) })
}

func (gs groups) has(key []byte) bool {
	_, found := gs.find(key)
	return found
}

// onTop returns value with the deltas of key in this batch, if it has any.
func (gs groups) onTop(key, value []byte) ([]byte, error) {
	at, found := gs.find(key)
	if !found {
		return value, nil
	}
	counters, err := catalog.DecodeCounters(value)
	if err != nil {
		return nil, fmt.Errorf("delta on %q: %w", key, err)
	}
	gs[at].used = true
	return catalog.EncodeCounters(gs[at].change().Apply(counters)...), nil
}

// The object ids of PostgreSQL's types.
const (
	oidBytea = 17
	oidInt8  = 20
	oidInt4  = 23
)

// binaryFormat is the format of all arguments and results.
var binaryFormat = []int16{1}

// args encodes the arguments of weft_commit, with these locks.
func (p *plan) args(locks []int64) [][]byte {
	lazy := []byte{0}
	if p.lazy {
		lazy[0] = 1
	}
	return [][]byte{
		int8s(locks), lazy,
		int4s(p.guardIndex), int4s(p.guardKind), byteas(p.guardKeys), byteas(p.guardVals), int8s(p.guardLocks),
		int4s(p.rangeIndex), byteas(p.rangeFrom), byteas(p.rangeTo),
		byteas(p.putKeys), byteas(p.putVals),
		byteas(p.deletes),
		byteas(p.changeKeys), byteas(p.changes), int8s(p.addMasks), int8s(p.maxMasks), int8s(p.changeLocks),
	}
}

// arrayHead begins an array of n elements in PostgreSQL's binary form (src/backend/utils/adt/arrayfuncs.c, array_recv):
// dimensions, whether there are nulls, type of the elements, and for the one dimension its length and first index.
func arrayHead(n, oid, room int) []byte {
	if n == 0 {
		return binary.BigEndian.AppendUint32(make([]byte, 8, 12), uint32(oid))
	}
	b := make([]byte, 0, 20+room)
	for _, x := range []uint32{1, 0, uint32(oid), uint32(n), 1} {
		b = binary.BigEndian.AppendUint32(b, x)
	}
	return b
}

func byteas(values [][]byte) []byte {
	room := 0
	for _, v := range values {
		room += 4 + len(v)
	}
	b := arrayHead(len(values), oidBytea, room)
	for _, v := range values {
		b = binary.BigEndian.AppendUint32(b, uint32(len(v)))
		b = append(b, v...)
	}
	return b
}

func int8s(values []int64) []byte {
	b := arrayHead(len(values), oidInt8, 12*len(values))
	for _, v := range values {
		b = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(b, 8), uint64(v))
	}
	return b
}

func int4s(values []int32) []byte {
	b := arrayHead(len(values), oidInt4, 8*len(values))
	for _, v := range values {
		b = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, 4), uint32(v))
	}
	return b
}
