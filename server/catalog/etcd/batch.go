package etcd

import (
	"bytes"
	"context"

	"github.com/weftfs/weft/server/catalog"
)

// request is a batch that waits for its outcome. It has copies of all it needs, with the keys as etcd has them, so that whoever
// asked may leave.
type request struct {
	ctx    context.Context // of the caller
	guards []catalog.Guard
	writes []write
	deltas []catalog.Delta
	size   int // bytes, about what it takes in a transaction of its own

	guard int // the guard that did not hold; -1

	done chan struct{} // closed when guard and err do not change any more
	err  error
	left bool // nobody waits for done any more; under queue.mu
}

// write is a put, or with a nil value a delete.
type write struct {
	key, value []byte
}

// entryBytes is what an entry of a batch takes in a transaction at most, besides its keys and values: lengths, numbers of fields,
// a comparison.
const entryBytes = 64

func newRequest(ctx context.Context, b *catalog.Batch, keys keyspace) *request {
	r := &request{ctx: ctx, done: make(chan struct{}), guard: -1}
	// One piece of memory for all bytes; slices of it do not move since it has room for all.
	arena := make([]byte, 0, b.Bytes()+(b.Len()+len(b.Guards))*len(keys.rows)+len(keys.rows))
	row := func(key []byte) []byte {
		begin := len(arena)
		arena = append(append(arena, keys.rows...), key...)
		return arena[begin:len(arena):len(arena)]
	}
	clone := func(value []byte) []byte {
		begin := len(arena)
		arena = append(arena, value...)
		return arena[begin:len(arena):len(arena)]
	}
	r.guards = make([]catalog.Guard, len(b.Guards))
	for i, g := range b.Guards {
		own := catalog.Guard{Kind: g.Kind, Key: row(g.Key), Value: clone(g.Value)}
		if g.Kind == catalog.RangeEmpty {
			if own.To = keys.end; len(g.To) > 0 {
				own.To = row(g.To)
			}
		}
		r.guards[i] = own
		r.size += 2*(len(own.Key)+len(own.To)) + len(own.Value)
	}
	r.writes = make([]write, 0, len(b.Puts)+len(b.Deletes))
	for _, put := range b.Puts {
		w := write{row(put.Key), clone(put.Value)}
		r.writes = append(r.writes, w)
		r.size += len(w.key) + len(w.value)
	}
	for _, key := range b.Deletes {
		w := write{key: row(key)}
		r.writes = append(r.writes, w)
		r.size += len(w.key)
	}
	r.deltas = make([]catalog.Delta, len(b.Deltas))
	for i, d := range b.Deltas {
		d.Key = row(d.Key)
		r.deltas[i] = d
		r.size += 3*len(d.Key) + 2*8*catalog.MaxFields
	}
	r.size += entryBytes * b.Len()
	return r
}

// over ends r. queue.mu is held. It returns true.
func (r *request) over(err error) bool {
	r.err = err
	close(r.done)
	return true
}

// own returns what r itself writes at key, before its deltas.
func (r *request) own(key []byte) (w write, ok bool) {
	for _, w := range r.writes {
		if bytes.Equal(w.key, key) {
			return w, true
		}
	}
	return write{}, false
}
