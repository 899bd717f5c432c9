package postgres

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weftfs/weft/server/catalog"
)

// viewBegin starts a transaction that sees one revision. The second statement is what fixes which one.
const viewBegin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT 1"

// Snapshot implements [catalog.Engine]. It keeps a connection until it is closed or expires, and waits for one if very
// many are open.
func (e *Engine) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if err := e.begin(ctx); err != nil {
		return nil, err
	}
	defer e.gate.Leave()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(e.closing, func() { stop(catalog.ErrClosed) })()

	s := &snapshot{engine: e, turn: make(chan struct{}, 1)}
	err := e.persist(ctx, func() (err error) {
		if s.conn, err = e.views.Acquire(ctx); err != nil {
			return err
		}
		if s.tx, err = s.conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: viewBegin}); err != nil {
			s.conn.Release()
		}
		return err
	})
	if err != nil {
		if errors.Is(context.Cause(ctx), catalog.ErrClosed) {
			err = catalog.ErrClosed
		}
		return nil, err
	}
	e.snapMu.Lock()
	e.snapshots[s] = struct{}{}
	e.snapMu.Unlock()
	s.timer = time.AfterFunc(e.caps.MaxSnapshotAge, func() { s.end(catalog.ErrSnapshotExpired) })
	return s, nil
}

// snapshot is a transaction that only reads. Its calls are calls of the engine as well.
type snapshot struct {
	engine *Engine
	timer  *time.Timer
	turn   chan struct{} // holds one element while what follows is in use: a connection does one thing at a time
	conn   *pgxpool.Conn
	tx     pgx.Tx
	over   error // why it cannot be read any more

}

func (s *snapshot) statements() *statements { return s.engine.sql }

// do implements source. A connection that is lost takes the revision with it.
func (s *snapshot) do(ctx context.Context, f func(querier) error) error {
	if err := s.engine.begin(ctx); err != nil {
		return err
	}
	defer s.engine.gate.Leave()
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.turn }()
	if s.over != nil {
		return s.over
	}
	patient, stop := patiently(ctx)
	defer stop()
	err := f(bound{s.tx, patient})
	if err == nil || isOurs(err) {
		return err
	}
	s.finish(catalog.ErrSnapshotExpired)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w: its transaction is lost: %w", catalog.ErrSnapshotExpired, err)
}

// patiently returns a context that ends some time after ctx: to cancel a statement is to lose the transaction.
func patiently(ctx context.Context) (context.Context, func()) {
	patient, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(cancelPatience)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-patient.Done():
		}
	})
	return patient, func() { stop(); cancel() }
}

// bound is a querier with a context of its own.
type bound struct {
	q   querier
	ctx context.Context
}

func (b bound) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	return b.q.Query(b.ctx, sql, args...)
}

func (s *snapshot) Get(ctx context.Context, key []byte) ([]byte, error) { return get(ctx, s, key) }

func (s *snapshot) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	return getMany(ctx, s, keys)
}

func (s *snapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return scan(ctx, s, from, to, opts)
}

// Close implements [catalog.Snapshot].
func (s *snapshot) Close() error {
	s.end(catalog.ErrClosed)
	return nil
}

// end waits for the read in progress; reads from then on return why.
func (s *snapshot) end(why error) {
	s.turn <- struct{}{}
	s.finish(why)
	<-s.turn
}

// finish gives the connection back. It is the caller's turn.
func (s *snapshot) finish(why error) {
	if s.conn == nil {
		if errors.Is(why, catalog.ErrClosed) {
			s.over = why
		}
		return
	}
	s.over = why
	s.timer.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), cancelPatience)
	defer cancel()
	if err := s.tx.Rollback(ctx); err != nil { // the connection is of no use; Release drops it
		s.conn.Conn().Close(ctx)
	}
	s.conn.Release()
	s.conn, s.tx = nil, nil
	s.engine.snapMu.Lock()
	delete(s.engine.snapshots, s)
	s.engine.snapMu.Unlock()
}
