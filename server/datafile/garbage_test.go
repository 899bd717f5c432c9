package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

func TestGarbage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		for id := layout.FileID(10); id < 30; id++ {
			w.file(id, layout.Policy{}, 10*unit)
		}
		w.exports[1].SetDown(true)
		for id := layout.FileID(10); id < 30; id++ {
			w.remove(id)
		}
		if n := w.m.GarbageCount(t.Context()); n != 40 {
			t.Errorf("%d pieces of garbage, 40 were discarded", n)
		}
		time.Sleep(time.Second)
		if n := len(dataFiles(w.exports[0])); n > testPool {
			t.Errorf("%d data files on the server that is up", n)
		}
		if n := w.m.GarbageCount(t.Context()); n != 20 {
			t.Errorf("%d pieces of garbage, 20 are on the server that is down", n)
		}
		w.exports[1].SetDown(false)
		calm()
		w.check()

		// The pool of one Manager is garbage for the next.
		w.restart()
		calm()
		w.check()
		for i := range w.exports {
			if n := len(dataFiles(w.exports[i])); n != testPool {
				t.Errorf("%d data files, the pool has %d", n, testPool)
			}
		}
	})
}

// A CREATE of the last Manager is executed after the next one started and found nothing to remove.
func TestLateCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		d := w.device(0)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		number, err := d.takeNumbers(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		w.start(w.engine)
		time.Sleep(settle / 2)
		st, err := store.Open(t.Context(), w.server(0), "/export", volume)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Create(t.Context(), number, layout.Credential{UID: firstID, GID: firstID}); err != nil {
			t.Fatal(err)
		}
		calm()
		w.check()
	})
}

// A catalog from before the last data files were made must not lead to the loss of what is in them.
func TestOldCatalog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		d := w.device(0)
		next := d.row.Next
		st, err := store.Open(t.Context(), w.server(0), "/export", volume)
		if err != nil {
			t.Fatal(err)
		}
		handle, err := st.Create(t.Context(), next, layout.Credential{UID: firstID, GID: firstID})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.server(0).SetAttr(t.Context(), handle, nfs3.Sattr{SetSize: true, Size: 10}, nil); err != nil {
			t.Fatal(err)
		}
		for id := layout.FileID(10); id < 10+2*testPool; id++ {
			if row := w.file(id, layout.Policy{}, 1); row.Mirrors[0][0].Number == next {
				t.Error("a file of unknown contents was assigned")
			}
		}
		w.restart()
		calm()
		if attr := dataFiles(w.exports[0])[next]; attr.Size != 10 {
			t.Errorf("the unknown file: %+v", attr)
		}
		if _, err := st.Remove(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// errCrashed is what a crashed process would not live to see.
var errCrashed = errors.New("crashed")

// crash stops everything at one point: what was on its way is executed or not, at random, and nothing that comes
// later is.
type crash struct {
	mu    sync.Mutex
	rng   *rand.Rand
	steps int // until the crash
	late  time.Duration
}

// step is called before and after each commit and call; it says whether to go on.
func (c *crash) step(call string) error {
	c.mu.Lock()
	c.steps--
	steps, late := c.steps, time.Duration(0)
	if steps == 0 && call == "CREATE" {
		late = c.late // it lies in the data server's socket buffer
	}
	c.mu.Unlock()
	switch {
	case steps > 0:
		return nil
	case late > 0:
		time.Sleep(late)
		return nil
	}
	return errCrashed
}

// pause takes a random while.
func (c *crash) pause(most time.Duration) {
	c.mu.Lock()
	d := time.Duration(c.rng.Int64N(int64(most)))
	c.mu.Unlock()
	time.Sleep(d)
}

func (c *crash) coin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rng.IntN(2) == 0
}

// crashingEngine shows commits before they are durable, which takes each of them a while (catalog, Durability).
type crashingEngine struct {
	catalog.Engine
	c    *crash
	sync time.Duration // the longest one

	mu        sync.Mutex
	committed int              // so far
	durable   int              // of these
	kept      catalog.Snapshot // with these; nil if there are none yet
}

func (e *crashingEngine) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := e.c.step("commit"); err != nil {
		return err
	}
	e.mu.Lock()
	err := e.Engine.Commit(ctx, b)
	view, viewErr := e.Engine.Snapshot(ctx)
	e.committed++
	number := e.committed
	e.mu.Unlock()
	if err := errors.Join(viewErr, e.c.step("visible")); err != nil {
		return err
	}
	if b.Durability == catalog.NoSync {
		return err
	}
	e.c.pause(e.sync)
	if crashed := e.c.step("durable"); crashed != nil {
		return crashed
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if number > e.durable {
		e.durable, e.kept = number, view
	}
	return err
}

// survives is the catalog after a loss of power: what was durable, or all that there was.
func (e *crashingEngine) survives(t *testing.T) *memorytest.Engine {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := catalog.Reader(e.Engine)
	if e.kept != nil && e.c.coin() {
		kept = e.kept
	}
	after := memorytest.New()
	for row, err := range kept.Scan(context.Background(), nil, nil, catalog.ScanOptions{}) {
		var b catalog.Batch
		b.Put(bytes.Clone(row.Key), bytes.Clone(row.Value))
		if err := errors.Join(err, after.Commit(context.Background(), &b)); err != nil {
			t.Fatal(err)
		}
	}
	return after
}

// After a crash at any point of making, assigning and discarding, and once the garbage is collected, every data
// file is in one layout or in the pool, and every layout has its data files.
func TestCrash(t *testing.T) {
	const lives = 50
	for seed := range uint64(lives) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t, 3)
			if err := w.m.Close(); err != nil {
				t.Fatal(err)
			}
			c := &crash{rng: rng, steps: 1 << 30}
			w.net.SetHook(func(ctx context.Context, call string, after bool) error { return c.step(call) })
			for life := range 4 {
				c.mu.Lock()
				c.steps = 1 + rng.IntN(3000)
				c.late = time.Duration(rng.Int64N(int64(settle)))
				c.mu.Unlock()
				engine := &crashingEngine{Engine: w.engine, c: c, sync: 2 * time.Second}
				w.start(engine)
				var wg sync.WaitGroup
				for worker := range 4 {
					work := rand.New(rand.NewPCG(seed, uint64(life*4+worker)))
					wg.Go(func() { w.churn(work, layout.FileID(1000*worker+10)) })
				}
				wg.Wait()
				// The next Manager starts while calls of the last one are still on their way.
				go w.m.Close()
				synctest.Wait()
				w.engine = engine.survives(t)
				c.mu.Lock()
				c.steps = 1 << 30
				c.mu.Unlock()
			}
			w.start(w.engine)
			calm()
			if w.check(); t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		})
	}
}

// churn makes, grows and removes files until something fails.
func (w *world) churn(rng *rand.Rand, base layout.FileID) {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	engine := w.m.cfg.Engine
	for {
		id := base + layout.FileID(rng.IntN(20))
		values, err := engine.GetMany(ctx, [][]byte{schema.InodeKey(id), schema.LayoutKey(id)})
		if err != nil {
			return
		}
		var b catalog.Batch
		switch {
		case values[0] == nil:
			ino := schema.Inode{Nlink: 1, Policy: schema.PolicyOf(layout.Policy{StripeCount: 1 + rng.IntN(3), Mirrors: 1 + rng.IntN(2)})}
			b.Put(schema.InodeKey(id), schema.Encode(&ino))
			err = engine.Commit(ctx, &b)
		case values[1] == nil || rng.IntN(2) == 0:
			var ino schema.Inode
			if err := schema.Decode(values[0], &ino); err != nil {
				panic(fmt.Sprint("inode row: ", err))
			}
			_, err = w.m.Assign(ctx, id, ino, 0, int64(1+rng.IntN(2*unit)), session, false, nil, nil)
		default:
			var row schema.Layout
			if err := schema.Decode(values[1], &row); err != nil {
				panic(fmt.Sprint("layout row: ", err))
			}
			b.GuardEqual(schema.LayoutKey(id), values[1])
			b.Delete(schema.LayoutKey(id))
			b.Delete(schema.InodeKey(id))
			w.m.Discard(&b, id, row)
			if err = engine.Commit(ctx, &b); err == nil {
				w.m.Kick()
			}
		}
		if err != nil {
			return
		}
	}
}
