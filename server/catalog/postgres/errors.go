package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weftfs/weft/server/catalog"
)

// errUnreplicated: the server gave up waiting for the synchronous standby because it was asked to.
var errUnreplicated = errors.New("the wait for the synchronous standby was cancelled")

// raised reports whether weft_commit ended with this SQLSTATE.
func raised(err error, code string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == code
}

// harmlessError wraps an error with which nothing can have been applied.
type harmlessError struct{ error }

func (e harmlessError) Unwrap() error { return e.error }

// notApplied marks an error that came before the commit of a transaction.
func notApplied(err error) error {
	if err == nil {
		return nil
	}
	return harmlessError{err}
}

// outcome turns the error of a commit into what callers can tell apart. An error message of severity ERROR means that
// the server has rolled back; FATAL may come after the commit, from a server that is being stopped. Anything else is a
// lost connection.
func outcome(err error) error {
	var pg *pgconn.PgError
	var harmless harmlessError
	switch {
	case err == nil, errors.Is(err, catalog.ErrUnknown):
		return err
	case errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR":
		switch pg.Code {
		case "40001", "40P01": // serialization_failure, deadlock_detected
			return fmt.Errorf("%w: %w", catalog.ErrConflict, err)
		case "53100": // disk_full
			return fmt.Errorf("%w: make room on the disk of the PostgreSQL server: %w", catalog.ErrFull, err)
		case "53200": // out_of_memory: of the lock table, see maxLocks
			return fmt.Errorf("%w: %w (raise the server's max_locks_per_transaction)", catalog.ErrConflict, err)
		}
		return err
	case errors.As(err, &harmless), pgconn.SafeToRetry(err):
		return err
	}
	return fmt.Errorf("%w: %w", catalog.ErrUnknown, err)
}

// transient reports whether what failed with err may succeed when it is tried again, on another connection. It is for
// errors after which nothing was applied.
func transient(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch pg.Code[:2] {
		case "08", "57": // connection exceptions; operator intervention, such as a server that starts, stops or cancels
			return true
		case "53": // insufficient resources, such as connections; a disk that is full is not waited for
			return pg.Code != "53100"
		}
		return pg.Code == "25006" || pg.Code == "40001" || pg.Code == "40P01" // read_only_sql_transaction: a standby
	}
	var connect *pgconn.ConnectError
	var parse *pgconn.ParseConfigError
	switch {
	case errors.As(err, &parse):
		return false
	case errors.As(err, &connect):
		return true
	case errors.Is(err, catalog.ErrUnknown), errors.Is(err, catalog.ErrConflict), isOurs(err):
		return false
	}
	return lost(err)
}

// lost reports whether err is that of a connection that is gone.
func lost(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		pgconn.SafeToRetry(err)
}

// isOurs reports whether err is an answer of this package rather than a failure below it.
func isOurs(err error) bool {
	for _, ours := range []error{
		catalog.ErrNotFound, catalog.ErrNotCounters, catalog.ErrCorrupt, catalog.ErrNoCatalog, catalog.ErrNotCatalog, catalog.ErrClosed,
		catalog.ErrSnapshotExpired,
	} {
		if errors.Is(err, ours) {
			return true
		}
	}
	return false
}

const (
	firstWait = 10 * time.Millisecond
	lastWait  = time.Second
)

// persist calls f until it succeeds, fails for good, or ctx ends. What is lost with a connection comes back with another.
func (e *Engine) persist(ctx context.Context, f func() error) error {
	wait := firstWait
	for {
		err := f()
		switch {
		case err == nil:
			e.down.ended()
			return nil
		case ctx.Err() != nil && !errors.Is(err, catalog.ErrUnknown):
			return ctx.Err()
		case !transient(err):
			return err
		}
		if !cancelled(err) {
			e.down.began(err)
		}
		t := time.NewTimer(wait/2 + rand.N(wait/2))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-e.closing.Done():
			t.Stop()
			return catalog.ErrClosed
		}
		wait = min(2*wait, lastWait)
	}
}

// cancelled: a request to cancel an earlier call on the same connection came late, or an administrator made one.
func cancelled(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "57014"
}

// reachability logs when the server is lost and when it is found again, and not what happens in between.
type reachability struct {
	log *slog.Logger

	mu    sync.Mutex
	since time.Time // zero: it is reachable
}

func (r *reachability) began(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since.IsZero() {
		r.since = time.Now()
		r.log.Warn("PostgreSQL does not answer or accepts no writes; trying again", "error", err)
	}
}

func (r *reachability) ended() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.since.IsZero() {
		r.log.Info("PostgreSQL answers again", "after", time.Since(r.since).Round(time.Millisecond))
		r.since = time.Time{}
	}
}
