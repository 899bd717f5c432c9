package postgres

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
)

func openFolding(t *testing.T, url string, every int, sweep time.Duration) *Engine {
	e, err := Open(t.Context(), Config{
		URL: url, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), foldEvery: every, sweepEvery: sweep,
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestContractWhileFolding joins changes as often as can be.
func TestContractWhileFolding(t *testing.T) {
	t.Parallel()
	base := pgserver.Start(t, pgserver.Options{}).URL()
	n := 0
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		n++
		return openFolding(t, fmt.Sprintf("%s&weft_table=fold_%d", base, n), 2, time.Millisecond)
	})
}

// changes returns how many changes are outside rows.
func (e *Engine) changesThere(t *testing.T) int {
	t.Helper()
	n := 0
	if err := e.pool.QueryRow(t.Context(), e.names.sql("SELECT count(*) FROM $C")).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestFold has deltas on counters that stay, go, and are replaced. Joining while the row is in use leaves one change each;
// joining at rest leaves none.
func TestFold(t *testing.T) {
	base := pgserver.Start(t, pgserver.Options{}).URL()
	e := openFolding(t, base, 1<<30, time.Hour)
	ctx := t.Context()
	commit := func(build func(*catalog.Batch)) {
		t.Helper()
		b := new(catalog.Batch)
		build(b)
		if err := e.Commit(ctx, b); err != nil {
			t.Fatal(err)
		}
	}
	keys := [][]byte{[]byte("stays"), []byte("goes"), []byte("is put"), []byte("comes back")}
	for range 50 {
		commit(func(b *catalog.Batch) {
			for _, key := range keys {
				b.Add(key, 0, 1)
				b.Max(key, 1, 7)
			}
		})
	}
	if n := e.changesThere(t); n != 50*len(keys) {
		t.Errorf("%d changes, want %d: they would conflict otherwise", n, 50*len(keys))
	}
	check := func(when string, want string) {
		t.Helper()
		got := ""
		for row, err := range e.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			fields, err := catalog.DecodeCounters(row.Value)
			if err != nil {
				t.Fatal(err)
			}
			got += fmt.Sprintf("%s=%d ", row.Key, fields)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	// Somebody has the rows in use.
	conn, err := e.pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	p := plan{salt: e.salt}
	for _, key := range keys {
		p.shared(p.lock(key))
	}
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(ctx, e.sql.lock, p.locks); err != nil {
		t.Fatal(err)
	}
	if err := e.foldAll(ctx); err != nil {
		t.Fatal(err)
	}
	if n := e.changesThere(t); n != len(keys) {
		t.Errorf("%d changes of rows in use are left, want %d", n, len(keys))
	}
	check("joined in use", "comes back=[50 7] goes=[50 7] is put=[50 7] stays=[50 7] ")
	if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	conn.Release()

	commit(func(b *catalog.Batch) { b.Delete(keys[1]); b.Delete(keys[3]) })
	commit(func(b *catalog.Batch) { b.Put(keys[2], catalog.EncodeCounters(3)); b.Add(keys[3], 0, 1) })
	check("replaced", "comes back=[1] is put=[3] stays=[50 7] ")
	if err := e.foldAll(ctx); err != nil {
		t.Fatal(err)
	}
	if n := e.changesThere(t); n != 0 {
		t.Errorf("%d changes are left", n)
	}
	check("joined", "comes back=[1] is put=[3] stays=[50 7] ")
	commit(func(b *catalog.Batch) {
		b.GuardEqual(keys[0], catalog.EncodeCounters(50, 7))
		b.Add(keys[0], 0, 1)
		b.Add(keys[2], 0, math.MaxInt64)
	})
	check("and on", fmt.Sprintf("comes back=[1] is put=[%d] stays=[51 7] ", int64(math.MaxInt64)))
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestFoldKeepsUp has a hot row: changes must not pile up while it is in use without end.
func TestFoldKeepsUp(t *testing.T) {
	e := openFolding(t, pgserver.Start(t, pgserver.Options{}).URL(), 0, 0)
	key := []byte("hot")
	const workers, each = 8, 500
	var group sync.WaitGroup
	most := 0
	for w := range workers {
		group.Go(func() {
			for i := range each {
				b := &catalog.Batch{Durability: catalog.NoSync}
				b.Add(key, 0, 1)
				if err := e.Commit(t.Context(), b); err != nil {
					t.Error(err)
					return
				}
				if w == 0 && i%10 == 0 {
					most = max(most, e.changesThere(t))
				}
			}
		})
	}
	group.Wait()
	t.Logf("up to %d changes of %d were outside the row", most, workers*each)
	if most > workers*each/2 {
		t.Errorf("%d changes piled up", most)
	}
	value, err := e.Get(t.Context(), key)
	if fields, decodeErr := catalog.DecodeCounters(value); err != nil || decodeErr != nil || fields.Field(0) != workers*each {
		t.Errorf("%v, %v, %v", fields, err, decodeErr)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

func TestClassOf(t *testing.T) {
	for _, c := range []struct {
		from, to string
		class    string
		one      bool
	}{
		{"", "", "", false},
		{"12345678", "12345679", "", false},
		{"123456789", "", "", false},
		{"123456789", "123456789\x00", "123456789", true},
		{"123456789", "12345678:", "123456789", true},
		{"123456789", "12345678:\x00", "", false},
		{"123456789abc", "123456789abd", "123456789", true},
		{"123456789abc", "12345678:", "123456789", true},
		{"123456789abc", "12345678;", "", false},
		{"\xff\xff\xff\xff\xff\xff\xff\xff\xffa", "\xff\xff\xff\xff\xff\xff\xff\xff\xffb", "\xff\xff\xff\xff\xff\xff\xff\xff\xff", true},
	} {
		class, one := classOf([]byte(c.from), []byte(c.to))
		if one != c.one || one && string(class) != c.class {
			t.Errorf("%q to %q: %q, %v", c.from, c.to, class, one)
		}
	}
}

// TestLocksMeet draws pairs of batches and checks that two which do not commute have a lock in common, which one of
// them takes alone.
func TestLocksMeet(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	key := func() []byte { return fmt.Appendf(nil, "%0*d", 1+rng.IntN(12), rng.IntN(3)) }
	meet := func(a, b *plan) bool {
		for _, x := range a.locks {
			for _, y := range b.locks {
				if x&^exclusive == y&^exclusive && (x|y)&exclusive != 0 {
					return true
				}
			}
		}
		return false
	}
	for range 20000 {
		var reads, writes catalog.Batch
		written := key()
		inRange := false
		switch rng.IntN(3) {
		case 0:
			reads.GuardAbsent(written)
		case 1:
			reads.GuardEqual(written, nil)
		default:
			from, to := key(), key()
			if string(from) >= string(to) {
				from, to = to, catalog.After(from)
			}
			reads.GuardRangeEmpty(from, to)
			inRange = true
			if string(written) < string(from) || string(written) >= string(to) {
				continue
			}
		}
		deltas := rng.IntN(2) == 0
		if deltas {
			writes.Add(written, 0, 1)
		} else {
			writes.Put(written, nil)
		}
		careful := deltas && !inRange // otherwise weft_commit finds out that the form of the row changes, and who has it in use
		a, err := newPlan(1, &reads, false)
		if err != nil {
			t.Fatal(err)
		}
		b, err := newPlan(1, &writes, careful)
		if err != nil {
			t.Fatal(err)
		}
		if !meet(a, b) {
			t.Fatalf("%v does not meet a write of %q", reads.Guards, written)
		}
	}
}

// FuzzURL looks for URLs that crash, or whose password is shown.
func FuzzURL(f *testing.F) {
	for _, seed := range []string{
		"postgres://user:secret@host:5432,other/db?weft_table=t&pool_max_conns=3", "postgresql:///db?host=/run&password=secret",
		"postgres://u:secret@h/?sslmode=bad", "postgres://u:sec@ret@h", "mysql://", "postgres://%zz",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, url string) {
		p, err := (&Config{URL: url}).parse()
		if err == nil && (p.table == "" || p.pool.MaxConns < 1) {
			t.Errorf("%q: %+v", url, p)
		}
	})
}
