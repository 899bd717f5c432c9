package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// maintain maintains the world's volume by a catalog.
func (w *world) maintain(engine catalog.Engine, f func(context.Context, catalog.Engine) error) error {
	return Maintain(w.t.Context(), MaintenanceConfig{Engine: engine, Program: "mender", Host: "h9", Log: w.log,
		Clock: func() time.Duration { return time.Since(w.epoch) }}, f)
}

// unused is Unused by the world's clock.
func (w *world) unused() error {
	_, _, err := alone(w.t.Context(), w.engine, func() time.Duration { return time.Since(w.epoch) })
	return err
}

// users is how many members and maintainers have rows.
func (w *world) users() (n int) {
	w.t.Helper()
	members, maintainer, err := users(w.t.Context(), w.engine)
	if err != nil {
		w.t.Error(err)
	}
	if maintainer != nil {
		n++
	}
	return n + len(members)
}

func mark(ctx context.Context, engine catalog.Engine, key string) error {
	var b catalog.Batch
	b.Put([]byte(key), nil)
	return engine.Commit(ctx, &b)
}

func (w *world) marked(key string) bool {
	_, err := w.engine.Get(w.t.Context(), []byte(key))
	return err == nil
}

func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	for _, word := range words {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v, want %q", err, words)
			return
		}
	}
}

// While a member lives nobody has the volume to himself, and is told who it is. The members do not notice.
func TestMaintainRefused(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		w.start("a:1")
		w.await(2*time.Second, "a:1")
		began := time.Now()
		err := w.maintain(w.engine, func(context.Context, catalog.Engine) error {
			t.Error("it is done while a member lives")
			return nil
		})
		wantError(t, err, "a:1", "stop it")
		wantError(t, w.unused(), "a:1", "stop it")
		if d := time.Since(began); d > 2*DefaultLease {
			t.Errorf("that took %v", d)
		}
		if n := w.users(); n != 1 {
			t.Errorf("%d users are left", n)
		}
		w.await(0, "a:1")
		// Not either if somebody joins while it is found out.
		began = time.Now()
		w.procs[0].kill()
		joined := make(chan struct{})
		go func() {
			defer close(joined)
			time.Sleep(DefaultLease - time.Second)
			w.start("b:1")
		}()
		err = w.maintain(w.engine, func(context.Context, catalog.Engine) error {
			t.Errorf("it is done after %v, while a member lives", time.Since(began))
			return nil
		})
		<-joined
		wantError(t, err, "b:1", "stop it")
		w.await(2*DefaultLease, "b:1")
	})
}

// While somebody has the volume to himself nobody joins, nor does somebody else do so.
func TestMaintain(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.await(2*time.Second, "a:1")
		if err := a.leave(time.Second); err != nil {
			t.Error(err)
		}
		began := time.Now()
		err := w.maintain(w.engine, func(ctx context.Context, engine catalog.Engine) error {
			if d := time.Since(began); d > time.Second {
				t.Errorf("it begins after %v, though nobody was there", d)
			}
			began = time.Now()
			for range 3 {
				time.Sleep(MaintenanceLease)
				wantError(t, a.tryUp(), "mender", "h9", "wait")
				wantError(t, w.maintain(w.engine, func(context.Context, catalog.Engine) error {
					t.Error("two have the volume to themselves")
					return nil
				}), "mender", "h9", "wait")
				wantError(t, w.unused(), "mender", "h9", "wait")
			}
			if err := mark(ctx, engine, "zz"); err != nil {
				t.Error(err)
			}
			return errors.New("what came of it")
		})
		if err == nil || err.Error() != "what came of it" {
			t.Error(err)
		}
		if !w.marked("zz") || w.users() != 0 {
			t.Errorf("done: %v; %d users are left", w.marked("zz"), w.users())
		}
		a.up()
		w.await(2*time.Second, "a:1")
	})
}

// What a member sends that was taken for dead has no effect, neither its own nor that of its services.
func TestMaintainAfterDead(t *testing.T) {
	bubble(t, 40, func(t *testing.T, w *world) {
		p := w.start("a:1")
		w.await(8*time.Second, "a:1")
		m := p.running()
		var services []*stub
		for shard := range w.shards {
			services = append(services, p.stub(shard))
		}
		p.pause()
		err := w.maintain(w.engine, func(ctx context.Context, engine catalog.Engine) error {
			p.resume()
			if err := mark(t.Context(), m.fence, "y"); !errors.Is(err, ErrFenced) {
				t.Errorf("a commit of the dead member: %v", err)
			}
			for shard, s := range services {
				// Not by way of the fence of the process, which may know already.
				guarded := &fence{Engine: w.engine, guard: s.engine.(*fence).guard, fell: func() {}}
				if err := mark(t.Context(), guarded, "y"); !errors.Is(err, ErrFenced) {
					t.Errorf("a commit of the dead member's service of shard %d: %v", shard, err)
				}
			}
			time.Sleep(MaintenanceLease) // it tries to join again
			if n := w.users(); n != 1 {
				t.Errorf("%d users", n)
			}
			return mark(ctx, engine, "zz")
		})
		if err != nil || w.marked("y") || !w.marked("zz") {
			t.Errorf("%v; marks %v, %v", err, w.marked("y"), w.marked("zz"))
		}
		w.await(2*DefaultLease, "a:1")
	})
}

// Whoever loses the catalog while he has the volume to himself stops in time, and others go on.
func TestMaintainCutOff(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		p := &proc{w: w}
		err := w.maintain(cable{w.engine, p}, func(ctx context.Context, engine catalog.Engine) error {
			time.Sleep(3 * MaintenanceLease)
			if ctx.Err() != nil {
				t.Error("it ends though nothing has happened")
			}
			p.cutOff()
			began := time.Now()
			<-ctx.Done()
			if d := time.Since(began); d >= MaintenanceLease {
				t.Errorf("it goes on for %v", d)
			}
			w.start("b:1") // after the rest of the lease
			w.await(2*time.Second, "b:1")
			if d := time.Since(began); d < MaintenanceLease*4/5 || d > 3*MaintenanceLease {
				t.Errorf("somebody joins after %v", d)
			}
			p.reconnect()
			if err := mark(context.WithoutCancel(ctx), &fence{Engine: w.engine, guard: engine.(*fence).guard, fell: func() {}}, "y"); !errors.Is(err, ErrFenced) {
				t.Errorf("a commit that comes late: %v", err)
			}
			return ctx.Err()
		})
		if !errors.Is(err, errSilent) || w.marked("y") || w.users() != 1 {
			t.Errorf("%v; mark %v, %d users", err, w.marked("y"), w.users())
		}
		w.await(0, "b:1")
	})
}

// The row of who was killed is in the way for his lease, of services as well as of the next one.
func TestMaintainerKilled(t *testing.T) {
	for _, next := range []string{"service", "maintenance"} {
		bubble(t, 2, func(t *testing.T, w *world) {
			var b catalog.Batch
			b.Put(schema.KeyMaintenance, schema.Encode(&schema.Maintenance{ID: [16]byte{1}, Lease: int64(MaintenanceLease)}))
			b.Put(schema.BeatKey([16]byte{1}), catalog.EncodeCounters(7))
			if err := w.engine.Commit(t.Context(), &b); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if next == "service" {
				w.start("a:1")
			} else if err := w.maintain(w.engine, func(context.Context, catalog.Engine) error { return nil }); err != nil {
				t.Error(err)
			}
			if d := time.Since(began); d < MaintenanceLease || d > MaintenanceLease+2*time.Second {
				t.Errorf("the next %s comes after %v", next, d)
			}
			if w.marked(string(schema.KeyMaintenance)) || w.marked(string(schema.BeatKey([16]byte{1}))) {
				t.Error("rows are left")
			}
		})
	}
}

// Unused tells members that live from such as died.
func TestUnused(t *testing.T) {
	bubble(t, 2, func(t *testing.T, w *world) {
		began := time.Now()
		if err := w.unused(); err != nil || time.Since(began) > 0 {
			t.Errorf("no members: %v after %v", err, time.Since(began))
		}
		w.start("a:1").kill()
		w.start("b:1").kill()
		if err := w.unused(); err != nil || time.Since(began) < DefaultLease {
			t.Errorf("dead members: %v after %v", err, time.Since(began))
		}
		if n := w.users(); n != 2 {
			t.Errorf("%d rows of dead members, of 2", n)
		}
	})
}
