package etcd

import (
	"bytes"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// reservedOps are the operations of a transaction that are not the batches': if it is refused, a read of the stamp and a nested
// transaction of one operation, which etcd counts on top of the others.
const reservedOps = 3

// pack is what becomes one transaction: batches, in the order in which they take effect, all of them or none.
//
// What is compared is the state before all of them. So no batch has a guard on what an earlier one of the pack changes: it waits
// for the next one. Changes of the same rows are joined, so that each row is written once, as etcd asks for: what a batch does
// to a row is done to what the ones before have left, and deltas of all are added up.
type pack struct {
	maxOps, maxBytes int

	requests []*request
	doomed   []*request // have a guard that does not hold if the pack is applied, which is in their guard
	size     int
	after    map[string]*row // rows that change: what they will be
	order    []string        // keys of after, in the order they came
	found    map[string]int  // the comparison a key has in compares
	compares []condition
}

// row is the value of a row, or that there is none.
type row struct {
	value   []byte // not nil if present
	present bool
}

// condition is a guard, or that a counter row is what the sum was made from. The latter is a guard of kind Equal or Absent.
type condition struct {
	catalog.Guard
	counters bool
}

func newPack(cfg *Config) *pack {
	return &pack{
		maxOps: cfg.MaxTxnOps - reservedOps, maxBytes: cfg.MaxRequestBytes,
		after: map[string]*row{}, found: map[string]int{},
	}
}

// counterRows knows what counter rows were when last seen, by their keys. What it says is compared before it is relied on.
type counterRows map[string]row

// maxCounterRows bounds counterRows: some 150 bytes each. When it is full it is emptied.
const maxCounterRows = 1 << 16

func (c counterRows) learn(key string, r row) {
	if len(c) >= maxCounterRows {
		clear(c)
	}
	c[key] = r
}

// forget forgets rows that r adds to and that are no counter rows: they may have become some.
func (c counterRows) forget(r *request) {
	for i := range r.deltas {
		key := string(r.deltas[i].Key)
		if _, err := catalog.DecodeCounters(c[key].value); err != nil {
			delete(c, key)
		}
	}
}

// missing returns the keys of rows that r adds to and c does not know, r's own aside.
func (c counterRows) missing(r *request) []string {
	var keys []string
	for i := range r.deltas {
		key := r.deltas[i].Key
		if _, ok := c[string(key)]; ok {
			continue
		}
		if _, wrote := r.own(key); !wrote {
			keys = append(keys, string(key))
		}
	}
	return keys
}

// learnFrom learns what the counter rows are after p was applied.
func (c counterRows) learnFrom(p *pack) {
	for key, r := range p.after {
		if _, ok := c[key]; ok {
			c[key] = *r
		}
	}
	for _, r := range p.requests {
		for i := range r.deltas {
			key := string(r.deltas[i].Key)
			c.learn(key, *p.after[key])
		}
	}
}

// verdict is what add says of a request.
type verdict int

const (
	added   verdict = iota
	later           // it has to wait for another pack
	misused         // a delta meets a row that is no counter row, which makes it ErrNotCounters
)

// add adds r if it fits. counters knows the rows of all its deltas that it does not write itself.
func (p *pack) add(r *request, counters counterRows) verdict {
	if p.conflicts(r) {
		if at := p.foresee(r); at >= 0 {
			r.guard = at
			p.doomed = append(p.doomed, r)
			return added
		}
		return later
	}
	if len(p.requests) > 0 && !p.fits(r) {
		return later
	}
	// Deltas come first, since they alone can find that r cannot be.
	sums := make(map[string]row, len(r.deltas))
	var bases []condition
	for i := range r.deltas {
		d := &r.deltas[i]
		key := string(d.Key)
		base, ok := sums[key]
		if !ok {
			earlier := p.after[key]
			if own, wrote := r.own(d.Key); wrote {
				base = row{own.value, own.value != nil}
			} else if earlier != nil {
				base = *earlier
			} else {
				base = counters[key]
				c := condition{Guard: catalog.Guard{Kind: catalog.Absent, Key: d.Key}, counters: true}
				if base.present {
					c.Kind, c.Value = catalog.Equal, base.value
				}
				bases = append(bases, c)
			}
		}
		fields, err := catalog.DecodeCounters(base.value)
		if err != nil && len(p.requests) > 0 {
			return later // it may be the fault of a batch of this pack, which may not be applied
		}
		if err != nil {
			return misused
		}
		sums[key] = row{catalog.EncodeCounters(d.Apply(fields)...), true}
	}
	for _, g := range r.guards {
		p.require(condition{Guard: g})
	}
	for _, c := range bases {
		p.require(c)
	}
	for _, w := range r.writes {
		p.set(string(w.key), row{w.value, w.value != nil})
	}
	for key, sum := range sums {
		p.set(key, sum)
	}
	p.requests = append(p.requests, r)
	p.size += r.size
	return added
}

// fits reports whether r keeps p within the limits of a transaction.
func (p *pack) fits(r *request) bool {
	if p.size+r.size > p.maxBytes {
		return false
	}
	compares, writes := len(p.compares), len(p.order)
	for i := range r.guards {
		if !p.required(&r.guards[i]) {
			compares++
		}
	}
	for _, w := range r.writes {
		if p.after[string(w.key)] == nil {
			writes++
		}
	}
	for i := range r.deltas {
		if p.after[string(r.deltas[i].Key)] == nil {
			compares++
			writes++
		}
	}
	return compares <= p.maxOps && writes <= p.maxOps
}

// conflicts reports whether a guard of r is on what p changes.
func (p *pack) conflicts(r *request) bool {
	return slices.ContainsFunc(r.guards, func(g catalog.Guard) bool { touched, _ := p.touches(&g); return touched })
}

// touches reports whether g is on what p changes and, if so, whether it is known not to hold when p is applied.
func (p *pack) touches(g *catalog.Guard) (touched, fails bool) {
	if g.Kind != catalog.RangeEmpty {
		r := p.after[string(g.Key)]
		return r != nil, r != nil && !holds(g, *r)
	}
	for key, r := range p.after {
		if key >= string(g.Key) && key < string(g.To) {
			touched, fails = true, fails || r.present
		}
	}
	return touched, fails
}

// foresee returns the first guard of r that does not hold once p is applied, or -1 if that is not known. Many who change one row
// after having read it would otherwise get their refusals one by one.
func (p *pack) foresee(r *request) int {
	for i := range r.guards {
		touched, fails := p.touches(&r.guards[i])
		if fails {
			return i
		}
		if touched || !p.required(&r.guards[i]) {
			return -1
		}
	}
	return -1
}

// required reports whether p has the condition already.
func (p *pack) required(g *catalog.Guard) bool {
	at, ok := p.found[string(g.Key)]
	if !ok {
		return false
	}
	have := &p.compares[at]
	return have.Kind == g.Kind && bytes.Equal(have.Value, g.Value) && bytes.Equal(have.To, g.To)
}

func (p *pack) require(c condition) {
	if p.required(&c.Guard) {
		have := &p.compares[p.found[string(c.Key)]]
		have.counters = have.counters || c.counters
		return
	}
	p.found[string(c.Key)] = len(p.compares)
	p.compares = append(p.compares, c)
}

func (p *pack) set(key string, r row) {
	if at := p.after[key]; at != nil {
		*at = r
		return
	}
	p.after[key] = &r
	p.order = append(p.order, key)
}

// txn returns the transaction, without the stamp. Its else branch reads what the conditions are about.
func (p *pack) txn() *pb.TxnRequest {
	t := &pb.TxnRequest{Compare: make([]*pb.Compare, len(p.compares)), Success: make([]*pb.RequestOp, 0, len(p.order)+1)}
	for i := range p.compares {
		t.Compare[i] = compare(&p.compares[i].Guard)
	}
	for _, key := range p.order {
		if r := p.after[key]; r.present {
			t.Success = append(t.Success, opPut([]byte(key), r.value))
		} else {
			t.Success = append(t.Success, opDelete([]byte(key)))
		}
	}
	t.Failure = p.reads()
	return t
}

// reads returns operations that read what each condition is about.
func (p *pack) reads() []*pb.RequestOp {
	ops := make([]*pb.RequestOp, len(p.compares), len(p.compares)+1)
	for i := range p.compares {
		c := &p.compares[i]
		ops[i] = opRange(&pb.RangeRequest{Key: c.Key, RangeEnd: c.To, Limit: 1, KeysOnly: c.Kind != catalog.Equal && !c.counters})
	}
	return ops
}

// judge looks at what reads gave, as of one revision. It sets the guard of requests that have one that does not hold,
// and learns the counter rows. It reports whether there is a condition that does not hold.
func (p *pack) judge(answers []*pb.ResponseOp, counters counterRows) (found bool, err error) {
	if len(answers) < len(p.compares) {
		return false, fmt.Errorf("etcd answered %d reads, %d were asked for", len(answers), len(p.compares))
	}
	rows := make([]row, len(p.compares))
	for i := range p.compares {
		c := &p.compares[i]
		rows[i] = rowOf(answers[i])
		if c.counters {
			counters.learn(string(c.Key), rows[i])
		}
		found = found || !holds(&c.Guard, rows[i])
	}
	for _, r := range p.requests {
		r.guard = slices.IndexFunc(r.guards, func(g catalog.Guard) bool { return !holds(&g, rows[p.condition(&g)]) })
	}
	for _, r := range p.doomed { // by the state before the pack, as far as it was read
		r.guard = -1
		for i := range r.guards {
			ok, known := p.looked(&r.guards[i], rows)
			if known && !ok {
				r.guard = i
			}
			if !known || !ok {
				break
			}
		}
	}
	return found, nil
}

// looked reports whether g holds, if rows, which were read for the conditions of p, tell.
func (p *pack) looked(g *catalog.Guard, rows []row) (ok, known bool) {
	at, found := p.found[string(g.Key)]
	if !found || !bytes.Equal(p.compares[at].To, g.To) {
		return false, false
	}
	c := &p.compares[at]
	if g.Kind == catalog.Equal && rows[at].present && c.Kind != catalog.Equal && !c.counters {
		return false, false // its value was not read
	}
	return holds(g, rows[at]), true
}

// rowOf returns the first row of what a read gave.
func rowOf(answer *pb.ResponseOp) row {
	if kvs := answer.GetResponseRange().GetKvs(); len(kvs) > 0 {
		return row{append([]byte{}, kvs[0].Value...), true}
	}
	return row{}
}

// condition returns the index of the condition that is about what g is about.
func (p *pack) condition(g *catalog.Guard) int {
	at := p.found[string(g.Key)]
	if p.required(g) {
		return at
	}
	// Different guards on one key are rare: a row that is guarded twice, or the beginning of a range.
	for i := range p.compares {
		if c := &p.compares[i]; bytes.Equal(c.Key, g.Key) && bytes.Equal(c.To, g.To) && c.Kind == g.Kind && bytes.Equal(c.Value, g.Value) {
			return i
		}
	}
	panic(fmt.Sprintf("etcd: no condition for %v", g))
}

func holds(g *catalog.Guard, r row) bool {
	switch g.Kind {
	case catalog.Absent, catalog.RangeEmpty:
		return !r.present
	case catalog.Present:
		return r.present
	case catalog.Equal:
		return r.present && bytes.Equal(r.value, g.Value)
	}
	panic(fmt.Sprintf("etcd: %v passed Check", *g))
}

// compare returns the comparison that holds if g does. A comparison of a range is one of each of its rows, and, if there are
// none, of a row with zeros: so "created at revision 0" holds of an empty range, and of no other.
func compare(g *catalog.Guard) *pb.Compare {
	c := &pb.Compare{Key: g.Key, RangeEnd: g.To, Target: pb.Compare_CREATE, TargetUnion: &pb.Compare_CreateRevision{}}
	switch g.Kind {
	case catalog.Present:
		c.Result = pb.Compare_GREATER
	case catalog.Equal:
		c.Target, c.TargetUnion = pb.Compare_VALUE, &pb.Compare_Value{Value: g.Value}
	}
	return c
}

func opPut(key, value []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: value}}}
}

func opDelete(key []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key}}}
}

func opRange(r *pb.RangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
}

func opTxn(t *pb.TxnRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: t}}
}
