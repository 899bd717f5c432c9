package datafile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/schema"
)

// undecided is an engine that does not say how commits end that give data files away, and keeps those waiting that find it out.
type undecided struct {
	catalog.Engine
	mu   sync.Mutex
	on   bool
	done bool          // the first one is applied all the same
	tell chan struct{} // closed by the test
	lost *catalog.Batch
}

func (e *undecided) Commit(ctx context.Context, b *catalog.Batch) error {
	gives := false
	for _, key := range b.Deletes {
		gives = gives || key[0] == schema.PrefixGarbage && len(b.Puts) > 0
	}
	e.mu.Lock()
	on, again := e.on, e.lost != nil
	if on && gives {
		e.lost = b
	}
	e.mu.Unlock()
	switch {
	case !on || !gives:
	case !again && e.done:
		return errors.Join(e.Engine.Commit(ctx, b), catalog.ErrUnknown)
	case !again:
		return catalog.ErrUnknown
	default:
		select {
		case <-e.tell:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e.Engine.Commit(ctx, b)
}

// The caller of what takes data files goes while it is not known whether they were given to the file. They are held until it is, and then the file's, or in the pool.
func TestUnknownOutcome(t *testing.T) {
	for _, done := range []bool{false, true} {
		for _, gone := range []bool{false, true} { // the file, before it is found out
			for name, take := range map[string]func(ctx context.Context, w *world, ino schema.Inode) error{
				"assign": func(ctx context.Context, w *world, ino schema.Inode) error {
					_, err := w.m.Assign(ctx, 5, ino, 0, 3*unit, session, false, nil, nil)
					return err
				},
				"cache": func(ctx context.Context, w *world, _ schema.Inode) error {
					_, _, err := w.m.StartCache(ctx, 5, w.device(2).id, 1, session)
					return err
				},
				"copy": func(ctx context.Context, w *world, _ schema.Inode) error {
					_, _, err := w.m.StartFill(ctx, 5, nil)
					return err
				},
				"move": func(ctx context.Context, w *world, _ schema.Inode) error {
					to := 0
					for row := w.row(5); row.Has(func(f *schema.DataFile) bool { return f.Device == w.device(to).id }); {
						to++
					}
					_, _, err := w.m.MoveTo(ctx, 5, w.device(to).id)
					if err == nil {
						_, _, err = w.m.StartFill(ctx, 5, nil)
					}
					return err
				},
			} {
				if done && gone { // then there is nothing to be found out
					continue
				}
				t.Run(fmt.Sprintf("%s, done %t, gone %t", name, done, gone), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						w := newWorld(t, 3)
						if err := w.m.Close(); err != nil {
							t.Fatal(err)
						}
						engine := &undecided{Engine: w.engine, done: done, tell: make(chan struct{})}
						w.start(engine)
						calm()
						ino := w.inode(5, layout.Policy{Mirrors: 2, StripeCount: 1})
						if name != "assign" {
							row, err := w.m.Assign(t.Context(), 5, ino, 0, 1, session, false, nil, nil)
							if err != nil {
								t.Fatal(err)
							}
							if name == "copy" {
								f := &row.Mirrors[1][0]
								if _, err := w.m.MarkStale(t.Context(), 5, []metarpc.CopyRef{{Device: f.Device, Handle: f.Handle}}); err != nil {
									t.Fatal(err)
								}
							}
							calm()
						}
						engine.mu.Lock()
						engine.on = true
						engine.mu.Unlock()
						ctx, cancel := context.WithCancel(t.Context())
						ended := make(chan error, 1)
						go func() { ended <- take(ctx, w, ino) }()
						synctest.Wait()
						cancel()
						if err := <-ended; !errors.Is(err, catalog.ErrUnknown) {
							t.Fatalf("%v", err)
						}
						calm()
						held := 0
						for i := range w.exports {
							d := w.device(i)
							held += len(d.held) - len(d.pool)
						}
						if held == 0 {
							t.Error("nothing is held while it is not known whose it is")
						}
						if gone {
							var b catalog.Batch
							b.Delete(schema.InodeKey(5))
							if name == "assign" {
								w.commit(&b)
							} else {
								w.remove(5)
							}
						}
						known, cancel := context.WithTimeout(t.Context(), time.Hour)
						defer cancel()
						if !gone {
							if err := w.m.AwaitKnown(known, 5); !errors.Is(err, context.DeadlineExceeded) {
								t.Errorf("what became of it is known too early: %v", err)
							}
						}
						close(engine.tell)
						if err := w.m.AwaitKnown(t.Context(), 5); err != nil {
							t.Error(err)
						}
						before := w.rows(schema.PrefixLayout)
						if len(before) == 0 != gone {
							t.Errorf("%d layouts", len(before))
						}
						if err := engine.Engine.Commit(t.Context(), engine.lost); err == nil {
							t.Error("what was lost can still be committed")
						}
						calm()
						w.check()
					})
				})
			}
		}
	}
}

// Callers come and go, and many outcomes are not known. When it is over everything is somebody's.
func TestUnknownOutcomes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		engine := faultytest.New(keptOpen{w.engine}, faultytest.Config{
			Seed: seed, Delay: 5 * time.Millisecond, Conflict: 0.05, Lost: 0.15, Applied: 0.15, Late: 0.15, LateBy: 100 * time.Millisecond,
		})
		w.start(engine)
		calm()
		var workers sync.WaitGroup
		for n := range 8 {
			workers.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(n)))
				id := layout.FileID(1000 * (n + 1))
				var ino schema.Inode
				for i := range 150 {
					if i%10 == 0 {
						id++
						ino = schema.Inode{Nlink: 1, Policy: schema.PolicyOf(layout.Policy{StripeCount: 1 + rng.IntN(3), Mirrors: 1 + rng.IntN(2)})}
						var b catalog.Batch
						b.Put(schema.InodeKey(id), schema.Encode(&ino))
						if err := w.engine.Commit(t.Context(), &b); err != nil {
							t.Error(err)
						}
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.Int64N(int64(40*time.Millisecond))))
					if rng.IntN(3) > 0 {
						_, _ = w.m.Assign(ctx, id, ino, 0, int64(1+rng.IntN(2*unit)), session, false, nil, nil)
					} else {
						_, _, _ = w.m.StartCache(ctx, id, w.device(rng.IntN(3)).id, 1, session)
					}
					cancel()
				}
			})
		}
		workers.Wait()
		calm()
		if err := engine.Close(); err != nil { // waits for late commits
			t.Fatal(err)
		}
		w.check()
	})
}

type keptOpen struct{ catalog.Engine }

func (keptOpen) Close() error { return nil }
