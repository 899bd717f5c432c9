package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/fold"
)

const (
	// foldEvery is after how many changes of a key by this process they are joined. A reader of a hot row joins half as many
	// on average for each process, which costs some 0.1 ms.
	foldEvery = 256
	// sweepEvery is how often the changes that are left over are looked for, and the half of it at random. What is rarely changed is joined
	// then, and what counts no more is deleted.
	sweepEvery = 30 * time.Second
	// maxCounted bounds the memory of the counts; they are estimates.
	maxCounted = 1 << 16
)

// folder joins changes in the background.
type folder struct {
	every int
	sweep time.Duration

	mu     sync.Mutex
	counts map[string]int // changes since the last fold

	queue chan []byte
	stop  func() // ends the work and waits for it
}

// count notes that keys had a change each.
func (f *folder) count(keys [][]byte) {
	if len(keys) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.counts) > maxCounted {
		clear(f.counts)
	}
	for _, key := range keys {
		n := f.counts[string(key)] + 1
		if n < f.every {
			f.counts[string(key)] = n
			continue
		}
		select {
		case f.queue <- append([]byte{}, key...):
			delete(f.counts, string(key))
		default: // the next change tries again
			f.counts[string(key)] = n
		}
	}
}

// startFolding starts the goroutine that joins changes. It ends with Close.
func (e *Engine) startFolding(every int, sweep time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	f := &e.folds
	f.every, f.sweep, f.counts, f.queue = every, sweep, map[string]int{}, make(chan []byte, 64)
	f.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		for {
			wait := time.NewTimer(f.sweep + rand.N(f.sweep/2))
			var err error
			select {
			case <-ctx.Done():
				wait.Stop()
				return
			case key := <-f.queue:
				err = e.foldKey(ctx, key)
			case <-wait.C:
				err = e.foldAll(ctx)
			}
			wait.Stop()
			if err != nil && ctx.Err() == nil { // it is tried again anyway
				e.log.Debug("joining changes of counters failed", "error", err)
			}
		}
	}()
}

// foldAll joins the changes of all keys that have some.
func (e *Engine) foldAll(ctx context.Context) error {
	for after := []byte{}; ; {
		var keys [][]byte
		err := e.persist(ctx, func() error {
			rows, err := e.pool.Query(ctx, e.sql.changed, after)
			if err == nil {
				keys, err = pgx.CollectRows(rows, pgx.RowTo[[]byte])
			}
			return err
		})
		if err != nil || len(keys) == 0 {
			return err
		}
		for _, key := range keys {
			if err := e.foldKey(ctx, key); err != nil {
				return err
			}
		}
		after = keys[len(keys)-1]
	}
}

// foldBegin starts a transaction whose commit waits for no disk.
const foldBegin = "BEGIN; SET LOCAL synchronous_commit = off"

// foldKey makes the changes of key fewer. If nobody has the key in use they go into the row. Otherwise those that are
// visible become one, which needs no lock: see Counter rows in the package comment.
func (e *Engine) foldKey(ctx context.Context, key []byte) error {
	conn, err := e.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: foldBegin})
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // after a commit it does nothing
	p := plan{salt: e.salt}
	var alone bool
	if err := tx.QueryRow(ctx, e.sql.try, p.everything()>>1, p.lock(key)>>1).Scan(&alone); err != nil {
		return err
	}
	if alone {
		err = e.joinChanges(ctx, tx, key)
	} else {
		err = e.compact(ctx, tx, key)
	}
	if err == nil {
		_, err = tx.Exec(ctx, e.sql.garbage, key)
	}
	if err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// joinChanges puts the changes of a counter row into its value. The row's lock is held alone.
func (e *Engine) joinChanges(ctx context.Context, tx pgx.Tx, key []byte) error {
	rows, err := tx.Query(ctx, e.sql.get, key)
	if err != nil {
		return err
	}
	var value []byte
	var changes [][]byte
	if rows.Next() {
		err = rows.Scan(&value, &changes)
	}
	rows.Close()
	if err == nil {
		err = rows.Err()
	}
	if err != nil || len(changes) == 0 {
		return err
	}
	if value, err = join(key, value, changes); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, e.sql.setValue, key, value); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, e.sql.cut, key)
	return err
}

// compact makes one change of those of key that can be seen.
func (e *Engine) compact(ctx context.Context, tx pgx.Tx, key []byte) error {
	type change struct {
		ID int64
		C  []byte
	}
	rows, err := tx.Query(ctx, e.sql.takeOut, key)
	if err != nil {
		return err
	}
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[change])
	if err != nil || len(changes) == 0 {
		return err
	}
	var all fold.Change
	for _, c := range changes {
		one, ok := fold.Decode(c.C)
		if !ok {
			return fmt.Errorf("%w: a change of %q is %x", catalog.ErrCorrupt, key, c.C)
		}
		for _, f := range one {
			all = all.Add(f)
		}
	}
	_, err = tx.Exec(ctx, e.sql.putBack, key, changes[0].ID, all.Append(nil))
	return err
}
