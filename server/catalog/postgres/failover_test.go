package postgres_test

import (
	"context"
	"errors"
	"fmt"
	neturl "net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/server/catalog/postgres"
)

// load has writers that commit one row after the other, each with a delta on a common counter row, and readers of what
// was acknowledged.
type load struct {
	engine catalog.Engine
	total  atomic.Int64 // acknowledged
	stop   chan struct{}
	group  sync.WaitGroup
	rows   [writers]int // acknowledged of each writer; to be read when the group has ended
}

const writers = 8

func startLoad(t *testing.T, e catalog.Engine) *load {
	l := &load{engine: e, stop: make(chan struct{})}
	ctx := t.Context()
	for w := range writers {
		l.group.Go(func() { // ends when stop is closed, or at an error
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				b := new(catalog.Batch)
				key := fmt.Appendf(nil, "row/%d/%06d", w, i)
				b.GuardAbsent(key)
				b.Put(key, key)
				b.Add([]byte("total"), 0, 1)
				if err := e.Commit(ctx, b); err != nil {
					t.Errorf("writer %d, row %d: %v", w, i, err)
					return
				}
				l.rows[w] = i + 1
				before := l.total.Add(1)
				value, err := e.Get(ctx, []byte("total"))
				if err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if n, err := catalog.DecodeCounters(value); err != nil || n.Field(0) < before {
					t.Errorf("%d rows counted, %v, after %d had been acknowledged", n.Field(0), err, before)
				}
			}
		})
	}
	return l
}

// awaitMore waits until so many more commits were acknowledged.
func (l *load) awaitMore(t *testing.T, n int64) {
	t.Helper()
	goal := l.total.Load() + n
	waittest.Poll(time.Minute, time.Millisecond, func() bool { return l.total.Load() >= goal || t.Failed() })
	if got := l.total.Load(); got < goal {
		t.Fatalf("%d of %d commits after a minute", got, goal)
	}
}

// finish stops the load and checks that all that was acknowledged is there, and once.
func (l *load) finish(t *testing.T) {
	t.Helper()
	close(l.stop)
	l.group.Wait()
	for w, want := range l.rows {
		from := fmt.Appendf(nil, "row/%d/", w)
		n := 0
		for row, err := range l.engine.Scan(t.Context(), from, catalog.PrefixEnd(from), catalog.ScanOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			if key := fmt.Sprintf("row/%d/%06d", w, n); string(row.Key) != key || string(row.Value) != key {
				t.Fatalf("%s has %q instead of %s", row.Key, row.Value, key)
			}
			n++
		}
		if n != want {
			t.Errorf("writer %d has %d rows, %d were acknowledged", w, n, want)
		}
	}
	value, err := l.engine.Get(t.Context(), []byte("total"))
	if err != nil {
		t.Fatal(err)
	}
	counted, err := catalog.DecodeCounters(value)
	if err != nil {
		t.Fatal(err)
	}
	if counted.Field(0) != l.total.Load() {
		t.Errorf("%d rows were counted, %d acknowledged", counted.Field(0), l.total.Load())
	}
}

// TestFailover kills the primary under load and promotes its synchronous standby.
func TestFailover(t *testing.T) {
	primary := pgserver.Start(t, pgserver.Options{})
	standby := primary.Standby()
	// The standby is named first: that it accepts no writes has to be found out.
	e := mustOpen(t, postgres.Config{URL: newTable(t, pgserver.Together(standby, primary))})
	snap, err := e.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l := startLoad(t, catalogtest.Resolve(e))
	l.awaitMore(t, 1000)
	primary.Kill()
	begin := time.Now()
	standby.Promote()
	t.Logf("promoted after %v", time.Since(begin).Round(time.Millisecond))
	l.awaitMore(t, 1)
	t.Logf("commits go on after %v", time.Since(begin).Round(time.Millisecond))
	l.awaitMore(t, 1000)
	l.finish(t)
	if _, err := snap.Get(t.Context(), []byte("total")); !errors.Is(err, catalog.ErrSnapshotExpired) {
		t.Errorf("a snapshot of the old primary: %v", err)
	}
	if err := snap.Close(); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestKill kills a single server under load, a few times, and starts it again.
func TestKill(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	e := mustOpen(t, postgres.Config{URL: newTable(t, server.URL())})
	l := startLoad(t, catalogtest.Resolve(e))
	for range 3 {
		l.awaitMore(t, 500)
		server.Kill()
		server.Start()
	}
	l.awaitMore(t, 500)
	l.finish(t)
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestNoSyncLost kills a server that has commits which it was not to wait for. What is there afterwards must be a beginning
// of what was committed, and all of it up to the last barrier.
func TestNoSyncLost(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{Settings: map[string]string{"wal_writer_delay": "10s", "wal_writer_flush_after": "0"}})
	e := mustOpen(t, postgres.Config{URL: newTable(t, server.URL())})
	put := func(i int) {
		b := &catalog.Batch{Durability: catalog.NoSync}
		b.Put(fmt.Appendf(nil, "%04d", i), nil)
		b.Add([]byte("n"), 0, 1)
		if err := e.Commit(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	const before, after = 100, 300
	for i := range before {
		put(i)
	}
	if err := e.Commit(t.Context(), new(catalog.Batch)); err != nil {
		t.Fatal(err)
	}
	for i := range after {
		put(before + i)
	}
	server.Kill()
	server.Start()
	n := 0
	for row, err := range e.Scan(t.Context(), nil, []byte("n"), catalog.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if string(row.Key) != fmt.Sprintf("%04d", n) {
			t.Fatalf("row %d is %s", n, row.Key)
		}
		n++
	}
	value, err := e.Get(t.Context(), []byte("n"))
	if err != nil {
		t.Fatal(err)
	}
	counted, err := catalog.DecodeCounters(value)
	if err != nil || counted.Field(0) != int64(n) {
		t.Errorf("%d rows are there and %v counted, %v", n, counted, err)
	}
	t.Logf("%d of %d commits without a barrier behind them are there", n-before, after)
	if n < before {
		t.Errorf("%d rows, %d were before the barrier", n, before)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestGuardErrorIsDurable is told that a row exists which was committed without waiting. After that it must survive.
func TestGuardErrorIsDurable(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{Settings: map[string]string{"wal_writer_delay": "10s", "wal_writer_flush_after": "0"}})
	e := mustOpen(t, postgres.Config{URL: newTable(t, server.URL())})
	lazy := &catalog.Batch{Durability: catalog.NoSync}
	lazy.Put([]byte("name"), nil)
	if err := e.Commit(t.Context(), lazy); err != nil {
		t.Fatal(err)
	}
	b := new(catalog.Batch)
	b.GuardAbsent([]byte("name"))
	if err := e.Commit(t.Context(), b); !errors.As(err, new(*catalog.GuardError)) {
		t.Fatal(err)
	}
	server.Kill()
	server.Start()
	if _, err := e.Get(t.Context(), []byte("name")); err != nil {
		t.Errorf("a row that was said to exist: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestStandbyStops has the synchronous standby stop answering: a commit waits for it, and one that is given up has an
// unknown outcome, since the server has it and will show it.
func TestStandbyStops(t *testing.T) {
	primary := pgserver.Start(t, pgserver.Options{})
	standby := primary.Standby()
	e := mustOpen(t, postgres.Config{URL: newTable(t, primary.URL())})
	conn, err := pgx.Connect(t.Context(), primary.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	standby.SignalAll(syscall.SIGSTOP)
	defer standby.SignalAll(syscall.SIGCONT)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { // ends with ctx
		b := new(catalog.Batch)
		b.Put([]byte("a"), nil)
		ended <- e.Commit(ctx, b)
	}()
	for waiting, begin := 0, time.Now(); waiting == 0; time.Sleep(time.Millisecond) {
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'").Scan(&waiting); err != nil {
			t.Fatal(err)
		}
		if time.Since(begin) > time.Minute {
			t.Fatal("the server does not wait for the standby")
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, catalog.ErrUnknown) {
		t.Errorf("a commit whose wait for the standby was given up: %v", err)
	}
	lazy := &catalog.Batch{Durability: catalog.NoSync}
	lazy.Put([]byte("b"), nil)
	if err := e.Commit(t.Context(), lazy); err != nil {
		t.Errorf("a commit that waits for nobody: %v", err)
	}
	standby.SignalAll(syscall.SIGCONT)
	if err := e.Commit(t.Context(), new(catalog.Batch)); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestContextEnds gives up calls that cannot go on: on a table that somebody has locked, and while there is no server.
func TestContextEnds(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	url := newTable(t, server.URL())
	e := mustOpen(t, postgres.Config{URL: url})
	conn, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := neturl.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "BEGIN; LOCK TABLE "+parsed.Query().Get("weft_table")); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	b := new(catalog.Batch)
	b.Put([]byte("a"), nil)
	if err := e.Commit(short, b); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("locked: commit: %v", err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Get(t.Context(), []byte("a")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("after a commit that was given up: %v", err)
	}
	server.Kill()
	ctx, cancelCtx := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelCtx()
	if _, err := e.Get(ctx, []byte("a")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no server: get: %v", err)
	}
	if _, err := e.Snapshot(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no server: snapshot: %v", err)
	}
	server.Start()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
