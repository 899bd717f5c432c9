package etcd

import (
	"bytes"
	"context"
	"iter"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/weftfs/weft/server/catalog"
)

// Get implements [catalog.Reader].
func (e *Engine) Get(ctx context.Context, key []byte) ([]byte, error) {
	values, err := e.GetMany(ctx, [][]byte{key})
	return only(values, err)
}

func only(values [][]byte, err error) ([]byte, error) {
	if err == nil && values[0] == nil {
		err = catalog.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	return values[0], nil
}

// GetMany implements [catalog.Reader].
func (e *Engine) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	ctx, end, err := e.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	values := make([][]byte, len(keys))
	var parts []*lookup
	for at := range slices.Chunk(keys, e.cfg.MaxTxnOps) {
		l := &lookup{done: make(chan struct{})}
		for _, key := range at {
			l.keys = append(l.keys, e.keys.row(key))
		}
		parts = append(parts, l)
		e.look(l)
	}
	values = values[:0]
	for _, l := range parts {
		select {
		case <-l.done:
		case <-ctx.Done():
			return nil, e.because(ctx.Err())
		}
		if l.err != nil {
			return nil, e.because(l.err)
		}
		values = append(values, l.values...)
	}
	return values, nil
}

// lookups packs the reads of single rows as pack does batches: what is asked for while others are read is read together.
type lookups struct {
	mu      sync.Mutex
	waiting []*lookup
	busy    int // goroutines that read
}

// maxLookups is how many transactions that read rows are under way at a time. More make the groups smaller, and it is calls that
// cost, not rows.
const maxLookups = 2

// lookup reads some rows, at most as many as a transaction can.
type lookup struct {
	keys   [][]byte
	done   chan struct{} // closed when values, in the order of keys, or err are set
	values [][]byte
	err    error
}

// look has l read.
func (e *Engine) look(l *lookup) {
	e.lookups.mu.Lock()
	defer e.lookups.mu.Unlock()
	e.lookups.waiting = append(e.lookups.waiting, l)
	if e.lookups.busy < maxLookups {
		e.lookups.busy++
		go e.readLookups() // ends when nothing waits
	}
}

func (e *Engine) readLookups() {
	for {
		group, n := e.nextLookups()
		if n == 0 {
			return
		}
		ops := make([]*pb.RequestOp, 0, n)
		for _, l := range group {
			for _, key := range l.keys {
				ops = append(ops, opRange(&pb.RangeRequest{Key: key}))
			}
		}
		answers, err := e.readRows(ops)
		for _, l := range group {
			if l.err = err; err == nil {
				l.values = make([][]byte, len(l.keys))
				for i := range l.keys {
					l.values[i] = rowOf(answers[i]).value
				}
				answers = answers[len(l.keys):]
			}
			close(l.done)
		}
	}
}

// nextLookups takes what one transaction can read. If nothing waits it counts its caller out.
func (e *Engine) nextLookups() (group []*lookup, n int) {
	q := &e.lookups
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := 0
	for _, l := range q.waiting {
		if n+len(l.keys) > e.cfg.MaxTxnOps {
			break
		}
		n += len(l.keys)
		taken++
	}
	group = slices.Clone(q.waiting[:taken])
	if q.waiting = slices.Delete(q.waiting, 0, taken); taken == 0 {
		q.busy--
	}
	return group, n
}

// readRows makes reads, linearizably and all at one revision.
func (e *Engine) readRows(ops []*pb.RequestOp) ([]*pb.ResponseOp, error) {
	if len(ops) > 1 {
		resp, err := e.cluster.txnRead(e.life, &pb.TxnRequest{Success: ops})
		return resp.GetResponses(), err
	}
	resp, err := e.cluster.rangeRead(e.life, ops[0].GetRequestRange()) // costs the members a little less
	return []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseRange{ResponseRange: resp}}}, err
}

// Scan implements [catalog.Reader]. Each page is of a revision of its own. In reverse, etcd goes through the whole range for
// each page.
func (e *Engine) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		ctx, end, err := e.begin(ctx)
		if err != nil {
			yield(catalog.Row{}, err)
			return
		}
		defer end()
		e.scan(ctx, from, to, opts, e.page, yield)
	}
}

// page reads a page of the latest state.
func (e *Engine) page(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	return e.cluster.rangeRead(ctx, req)
}

const (
	// A page has as many rows as had pageBytes on the page before, but not more than pageRows: etcd has no limit in bytes,
	// and a member that reads a page cannot be interrupted.
	firstPage = 128
	pageRows  = 8192
	pageBytes = 1 << 20
)

func (e *Engine) scan(
	ctx context.Context, from, to []byte, opts catalog.ScanOptions,
	read func(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error), yield func(catalog.Row, error) bool,
) {
	if len(to) > 0 && bytes.Compare(from, to) >= 0 {
		return
	}
	req := &pb.RangeRequest{Key: e.keys.row(from), RangeEnd: e.keys.end, KeysOnly: opts.KeysOnly}
	if len(to) > 0 {
		req.RangeEnd = e.keys.row(to)
	}
	if opts.Reverse {
		req.SortTarget, req.SortOrder = pb.RangeRequest_KEY, pb.RangeRequest_DESCEND
	}
	left, page := opts.Limit, firstPage
	for {
		req.Limit = int64(page)
		if opts.Limit > 0 {
			req.Limit = int64(min(page, left))
		}
		resp, err := read(ctx, req)
		if err != nil {
			yield(catalog.Row{}, e.because(err))
			return
		}
		size := 0
		for _, kv := range resp.Kvs {
			if err := ctx.Err(); err != nil {
				yield(catalog.Row{}, e.because(err))
				return
			}
			size += len(kv.Key) + len(kv.Value)
			if !yield(e.rowIn(kv, opts), nil) {
				return
			}
		}
		left -= len(resp.Kvs)
		if !resp.More || opts.Limit > 0 && left <= 0 || len(resp.Kvs) == 0 {
			return
		}
		last := resp.Kvs[len(resp.Kvs)-1].Key
		if opts.Reverse {
			req.RangeEnd = last
		} else {
			req.Key = catalog.After(last)
		}
		page = max(1, min(pageRows, 4*page, pageBytes*len(resp.Kvs)/max(size, 1)))
	}
}

// rowIn returns the row that is in a key and value of etcd.
func (e *Engine) rowIn(kv *mvccpb.KeyValue, opts catalog.ScanOptions) catalog.Row {
	r := catalog.Row{Key: kv.Key[len(e.keys.rows):]}
	if !opts.KeysOnly {
		if r.Value = kv.Value; r.Value == nil {
			r.Value = []byte{}
		}
	}
	return r
}

// Snapshot implements [catalog.Engine]. It costs the cluster nothing; see Old revisions in the package comment.
func (e *Engine) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	ctx, end, err := e.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	resp, err := e.cluster.rangeRead(ctx, &pb.RangeRequest{Key: e.keys.format, CountOnly: true})
	if err != nil {
		return nil, e.because(err)
	}
	return &snapshot{engine: e, revision: resp.Header.Revision}, nil
}

// snapshot is one revision.
type snapshot struct {
	engine   *Engine
	revision int64
	gate     gate
}

// begin begins a call of the snapshot, which is one of the engine as well.
func (s *snapshot) begin(ctx context.Context) (context.Context, func(), error) {
	ctx, end, err := s.engine.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := s.gate.enter(); err != nil {
		end()
		return nil, nil, err
	}
	return ctx, func() { s.gate.leave(); end() }, nil
}

// page reads of the snapshot's revision. Any member that has come that far will do.
func (s *snapshot) page(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	req.Revision, req.Serializable = s.revision, true
	return s.engine.cluster.rangeRead(ctx, req)
}

func (s *snapshot) Get(ctx context.Context, key []byte) ([]byte, error) {
	return only(s.GetMany(ctx, [][]byte{key}))
}

func (s *snapshot) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	ctx, end, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	values := make([][]byte, 0, len(keys))
	for part := range slices.Chunk(keys, s.engine.cfg.MaxTxnOps) {
		ops := make([]*pb.RequestOp, len(part))
		for i, key := range part {
			ops[i] = opRange(&pb.RangeRequest{Key: s.engine.keys.row(key), Revision: s.revision, Serializable: true})
		}
		resp, err := s.engine.cluster.txnRead(ctx, &pb.TxnRequest{Success: ops})
		if err != nil {
			return nil, s.engine.because(err)
		}
		for _, answer := range resp.Responses {
			values = append(values, rowOf(answer).value)
		}
	}
	return values, nil
}

func (s *snapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		ctx, end, err := s.begin(ctx)
		if err != nil {
			yield(catalog.Row{}, err)
			return
		}
		defer end()
		s.engine.scan(ctx, from, to, opts, s.page, yield)
	}
}

// Close implements [catalog.Snapshot].
func (s *snapshot) Close() error {
	s.gate.close()
	s.gate.calls.Wait()
	return nil
}
