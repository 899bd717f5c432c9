package postgres

import (
	"bytes"
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
)

// querier is a connection or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// source is what rows are read from: the latest state, or a snapshot. do calls f with a connection, again if it was lost
// and nothing is the matter with that.
type source interface {
	do(ctx context.Context, f func(querier) error) error
	statements() *statements
}

func (e *Engine) statements() *statements { return e.sql }

// do implements source.
func (e *Engine) do(ctx context.Context, f func(querier) error) error {
	if err := e.begin(ctx); err != nil {
		return err
	}
	defer e.gate.Leave()
	return e.persist(ctx, func() error {
		conn, err := e.pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		return f(conn)
	})
}

// Get implements [catalog.Reader].
func (e *Engine) Get(ctx context.Context, key []byte) ([]byte, error) { return get(ctx, e, key) }

// GetMany implements [catalog.Reader]. The values are of one revision.
func (e *Engine) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	return getMany(ctx, e, keys)
}

// Scan implements [catalog.Reader]. It reads page after page, each of one revision.
func (e *Engine) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return scan(ctx, e, from, to, opts)
}

// join returns the value of a row with the changes that are outside it. The value is never nil.
func join(key, value []byte, changes [][]byte) ([]byte, error) {
	if len(changes) == 0 {
		if value == nil {
			value = []byte{}
		}
		return value, nil
	}
	counters, err := catalog.DecodeCounters(value)
	if err != nil {
		return nil, fmt.Errorf("%w: %q has changes and is no counter row: %w", catalog.ErrCorrupt, key, err)
	}
	for _, stored := range changes {
		c, ok := fold.Decode(stored)
		if !ok {
			return nil, fmt.Errorf("%w: a change of %q is %x", catalog.ErrCorrupt, key, stored)
		}
		counters = c.Apply(counters)
	}
	return catalog.EncodeCounters(counters...), nil
}

func get(ctx context.Context, s source, key []byte) (value []byte, err error) {
	err = s.do(ctx, func(q querier) error {
		rows, err := q.Query(ctx, s.statements().get, notNil(key))
		if err != nil {
			return err
		}
		defer rows.Close()
		found := rows.Next()
		if found {
			var changes [][]byte
			if err := rows.Scan(&value, &changes); err != nil {
				return err
			}
			if value, err = join(key, value, changes); err != nil {
				return err
			}
		}
		rows.Close()
		if err := rows.Err(); err != nil {
			return err
		}
		if !found {
			return catalog.ErrNotFound
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return value, nil
}

func notNil(key []byte) []byte {
	if key == nil {
		return []byte{}
	}
	return key
}

func getMany(ctx context.Context, s source, keys [][]byte) ([][]byte, error) {
	asked := make([][]byte, len(keys))
	for i, key := range keys {
		asked[i] = notNil(key)
	}
	var values [][]byte
	err := s.do(ctx, func(q querier) error {
		values = make([][]byte, len(keys))
		if len(keys) == 0 {
			return nil
		}
		rows, err := q.Query(ctx, s.statements().getMany, asked)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var position int64
			var value []byte
			var changes [][]byte
			if err := rows.Scan(&position, &value, &changes); err != nil {
				return err
			}
			i := position - 1
			if values[i], err = join(keys[i], value, changes); err != nil {
				return err
			}
		}
		return rows.Err()
	})
	if err != nil {
		return nil, err
	}
	return values, nil
}

// A scan asks for few rows first, as many want no more, and then for more at a time. It keeps no more than about
// pageBytes of them.
const (
	firstPage = 128
	lastPage  = 4096
	pageBytes = 1 << 20
)

// page reads the next rows of a range, at most n. It reads less if they are large.
func page(ctx context.Context, s source, from, to []byte, n int, reverse, keysOnly bool) (rows []catalog.Row, more bool, err error) {
	order := 0
	if reverse {
		order = 1
	}
	err = s.do(ctx, func(q querier) error {
		rows, more = rows[:0], false
		found, err := q.Query(ctx, s.statements().scan[order][keysOnly], from, to, n)
		if err != nil {
			return err
		}
		defer found.Close()
		size := 0
		for found.Next() {
			var row catalog.Row
			if keysOnly {
				err = found.Scan(&row.Key)
			} else {
				var changes [][]byte
				if err = found.Scan(&row.Key, &row.Value, &changes); err == nil {
					row.Value, err = join(row.Key, row.Value, changes)
				}
			}
			if err != nil {
				return err
			}
			rows = append(rows, row)
			if size += len(row.Key) + len(row.Value); size > pageBytes {
				break
			}
		}
		found.Close()
		more = len(rows) == n || size > pageBytes
		return found.Err()
	})
	return rows, more, err
}

func scan(ctx context.Context, s source, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		from, to := notNil(from), to
		if len(to) == 0 {
			to = endless
		}
		left, size := opts.Limit, firstPage
		for {
			n := size
			if opts.Limit > 0 {
				n = min(n, left)
			}
			var rows []catalog.Row
			more := false
			err := ctx.Err()
			if err == nil && bytes.Compare(from, to) < 0 {
				rows, more, err = page(ctx, s, from, to, n, opts.Reverse, opts.KeysOnly)
			} else if err == nil { // nothing can be there, but a closed catalog says so
				err = s.do(ctx, func(querier) error { return nil })
			}
			if err != nil {
				yield(catalog.Row{}, err)
				return
			}
			for _, row := range rows {
				if err := ctx.Err(); err != nil {
					yield(catalog.Row{}, err)
					return
				}
				if !yield(row, nil) {
					return
				}
			}
			left -= len(rows)
			if !more || opts.Limit > 0 && left == 0 {
				return
			}
			last := rows[len(rows)-1].Key
			if opts.Reverse {
				to = last
			} else {
				from = catalog.After(last)
			}
			if len(rows) == n {
				size = min(4*size, lastPage)
			} else {
				size = max(2*len(rows), 1) // they are large
			}
		}
	}
}
