package postgres

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/internal/gate"
)

// limits are those of the other engines, so that what fits there fits here.
var limits = catalog.Caps{MaxBatchBytes: 16 << 20, MaxKeys: 1 << 14, MaxValue: 1 << 20}

// Engine is a catalog in a PostgreSQL database.
type Engine struct {
	shown string // the URL without its password
	log   *slog.Logger
	caps  catalog.Caps
	names *names
	sql   *statements
	salt  uint64

	pool  *pgxpool.Pool // commits and reads
	views *pgxpool.Pool // snapshots, each of which keeps a connection
	gate  gate.Gate
	lazy  atomic.Bool // there was a NoSync commit

	closing      context.Context // ends when Close begins
	startClosing func()

	down  reachability
	folds folder

	snapMu    sync.Mutex
	snapshots map[*snapshot]struct{} // the open ones
}

var (
	_ catalog.Engine   = (*Engine)(nil)
	_ catalog.Snapshot = (*snapshot)(nil)
)

// Open connects to the database and makes the catalog if there is none. While no server can be reached, or none that accepts
// writes, it tries again until ctx ends.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.SnapshotAge == 0 {
		cfg.SnapshotAge = defaultSnapshotAge
	}
	p, err := cfg.parse()
	if err != nil {
		return nil, err
	}
	e := &Engine{
		shown: p.shown, log: cfg.Logger.With("catalog", p.shown), caps: limits, snapshots: map[*snapshot]struct{}{},
	}
	e.down.log = e.log
	e.closing, e.startClosing = context.WithCancel(context.Background())
	e.caps.MaxSnapshotAge = cfg.SnapshotAge
	err = e.persist(ctx, func() error {
		conn, err := pgx.ConnectConfig(ctx, p.pool.ConnConfig)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		e.names, err = install(ctx, conn, p, cfg.MustExist, e.log)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", p.shown, err)
	}
	e.sql, e.salt = e.names.statements(), e.names.salt()

	views := p.pool.Copy()
	views.MaxConns, views.MinConns, views.MinIdleConns = maxSnapshots, 0, 0
	afterConnect := p.pool.AfterConnect
	p.pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if err := afterConnect(ctx, conn); err != nil {
			return err
		}
		_, err := conn.PgConn().Prepare(ctx, commitName, e.sql.commit, nil)
		return err
	}
	background := context.Background() // the pools live as long as the engine
	if e.pool, err = pgxpool.NewWithConfig(background, p.pool); err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", p.shown, err)
	}
	if e.views, err = pgxpool.NewWithConfig(background, views); err != nil {
		e.pool.Close()
		return nil, fmt.Errorf("open catalog %s: %w", p.shown, err)
	}
	e.startFolding(cmp.Or(cfg.foldEvery, foldEvery), cmp.Or(cfg.sweepEvery, sweepEvery))
	return e, nil
}

// commitName is the prepared statement that calls weft_commit.
const commitName = "weft_commit"

// Caps implements [catalog.Engine].
func (e *Engine) Caps() catalog.Caps { return e.caps }

// begin enters the gate unless ctx has ended.
func (e *Engine) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return e.gate.Enter()
}

// Commit implements [catalog.Engine].
//
// Nearly all batches are one call of weft_commit. It refuses those that have to change the form of a row which somebody
// else has in use, or look at counters that have changes outside their row. These go the longer way: a transaction of
// several statements which first takes all locks alone.
func (e *Engine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(e.caps); err != nil {
		return err
	}
	if err := e.begin(ctx); err != nil {
		return err
	}
	defer e.gate.Leave()
	p, err := newPlan(e.salt, b, false)
	if err != nil {
		return err
	}
	code, err := e.apply(ctx, p, e.call)
	if raised(err, raiseCareful) || err == nil && code == careful {
		if p, err = newPlan(e.salt, b, true); err != nil {
			return err
		}
		code, err = e.apply(ctx, p, e.carefully)
	}
	switch {
	case raised(err, raiseNotCounters):
		var pg *pgconn.PgError
		errors.As(err, &pg)
		return fmt.Errorf("%w: delta on %s", catalog.ErrNotCounters, pg.Detail)
	case err != nil:
		return err
	case code >= 0 && code < len(b.Guards):
		return &catalog.GuardError{Index: code, Guard: b.Guards[code]}
	case code != applied:
		return fmt.Errorf("catalog %s: weft_commit returned %d: is it the function that weft made?", e.shown, code)
	}
	if p.lazy {
		e.lazy.Store(true)
	}
	e.folds.count(p.changeKeys)
	return nil
}

// apply runs do on a connection, again if nothing can have been applied and it may go better the next time. It returns
// what weft_commit did.
func (e *Engine) apply(ctx context.Context, p *plan, do func(context.Context, *pgxpool.Conn, *plan) (int, error)) (code int, err error) {
	err = e.persist(ctx, func() error {
		conn, err := e.pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		delete(conn.Conn().PgConn().CustomData(), unreplicated)
		code, err = do(ctx, conn, p)
		if err == nil && conn.Conn().PgConn().CustomData()[unreplicated] != nil {
			err = errUnreplicated
		}
		return outcome(err)
	})
	return code, err
}

// call sends p in one round trip.
func (e *Engine) call(ctx context.Context, conn *pgxpool.Conn, p *plan) (int, error) {
	return callCommit(ctx, conn.Conn(), p.args(p.locks))
}

func callCommit(ctx context.Context, conn *pgx.Conn, args [][]byte) (int, error) {
	result := conn.PgConn().ExecPrepared(ctx, commitName, args, binaryFormat, binaryFormat)
	code := 0
	seen := false
	for result.NextRow() {
		if v := result.Values(); len(v) == 1 && len(v[0]) == 4 {
			code, seen = int(int32(binary.BigEndian.Uint32(v[0]))), true
		}
	}
	if _, err := result.Close(); err != nil {
		return 0, err
	}
	if !seen {
		return 0, fmt.Errorf("%w: weft_commit gave no answer", catalog.ErrUnknown)
	}
	return code, nil
}

// carefully does p in a transaction. Nothing is applied unless its last step, the commit, is reached.
func (e *Engine) carefully(ctx context.Context, conn *pgxpool.Conn, p *plan) (code int, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, notApplied(err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // after a commit it does nothing
	if _, err := tx.Exec(ctx, e.sql.lock, p.locks); err != nil {
		return 0, notApplied(err)
	}
	for i, key := range p.guardKeys {
		if p.guardKind[i] == int32(catalog.Equal) {
			if err := e.joinChanges(ctx, tx, key); err != nil {
				return 0, notApplied(err)
			}
		}
	}
	if code, err = callCommit(ctx, conn.Conn(), p.args(nil)); err != nil {
		return 0, notApplied(err)
	}
	return code, tx.Commit(ctx)
}

// Close implements [catalog.Engine].
func (e *Engine) Close() error {
	e.gate.Shut(catalog.ErrClosed)
	e.startClosing()
	if !e.gate.Close(catalog.ErrClosed) {
		return catalog.ErrClosed
	}
	e.folds.stop()
	e.closing = context.Background() // nobody is left to be hurried; what follows may take its time
	e.snapMu.Lock()
	var open []*snapshot
	for s := range e.snapshots {
		open = append(open, s)
	}
	e.snapMu.Unlock()
	for _, s := range open {
		s.end(catalog.ErrClosed)
	}
	var err error
	if e.lazy.Load() {
		err = e.barrier()
	}
	e.pool.Close()
	e.views.Close()
	return err
}

// closePatience is how long Close tries to make durable what was committed with NoSync.
const closePatience = 30 * time.Second

func (e *Engine) barrier() error {
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	for {
		_, err := e.apply(ctx, &plan{salt: e.salt}, e.call)
		if errors.Is(err, catalog.ErrUnknown) && ctx.Err() == nil { // a barrier can be repeated
			continue
		}
		if err != nil {
			return fmt.Errorf("catalog %s: make the last commits durable: %w", e.shown, err)
		}
		return nil
	}
}
