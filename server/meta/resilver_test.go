package meta

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// writtenBy makes a file and has a client write it.
func writtenBy(c *client, name string) layout.FileID {
	f := c.create(layout.RootID, name)
	must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
	return f
}

// degrade has files filled from now on that have n bytes.
func (h *host) degrade(n int64, ids ...layout.FileID) {
	h.t.Helper()
	h.files.mu.Lock()
	h.files.fillEnd = n
	h.files.filled = func(context.Context, layout.Range) error { return nil }
	h.files.mu.Unlock()
	for _, f := range ids {
		put(h.t, h, schema.FillKey(f), schema.Encode(&schema.Fill{}))
	}
	h.svc.resilverSoon()
}

// wait calls f until it is not told to ask again, and returns how long that took.
func (h *host) wait(f func() error) time.Duration {
	h.t.Helper()
	began := time.Now()
	for {
		err := f()
		if e := (*metarpc.Error)(nil); errors.As(err, &e) && e.Status == metarpc.StatusLayoutUnavailable {
			continue
		}
		if err != nil {
			h.t.Error(err)
		}
		return time.Since(began)
	}
}

// filledWithin waits until nothing is to be filled any more.
func (h *host) filledWithin(d time.Duration) {
	h.t.Helper()
	filled := func() bool { return countRows(h.t.Context(), h.engine, schema.PrefixFill) == 0 }
	if !waittest.Poll(d, 100*time.Millisecond, filled) {
		h.t.Fatalf("not filled after %v", d)
	}
}

func write(c *client, f layout.FileID, off int64) func() error {
	return func() error {
		_, err := ask[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Off: off, Len: 1})
		return err
	}
}

// TestFillYields writes and cuts a file all the time while it is filled by data servers that take a second for each
// block. Nobody waits for more than one block, and yet the filling ends.
func TestFillYields(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	bubble(t, func(t *testing.T, h *host) {
		const blocks = 32
		h.files.perBlock = 1 << 20
		a, b := h.client(), h.client()
		defer renewing(a)()
		defer renewing(b)()
		f := writtenBy(a, "f")
		must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead | metarpc.AccessWrite})
		h.degrade(blocks<<20, f)
		var longest atomic.Int64
		var calls sync.WaitGroup
		var over atomic.Bool
		for i, do := range []func(int64) func() error{
			func(off int64) func() error { return write(a, f, off) },
			func(off int64) func() error { return write(b, f, off) },
			func(off int64) func() error {
				return func() error {
					_, err := ask[metarpc.AttrResult](b, metarpc.OpSetAttr, setSize(f, off))
					return err
				}
			},
		} {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			calls.Go(func() {
				for !over.Load() {
					took := h.wait(do(rnd.Int64N(blocks << 20)))
					longest.Store(max(longest.Load(), int64(took)))
					time.Sleep(time.Duration(rnd.Int64N(int64(100 * time.Millisecond))))
				}
			})
		}
		h.filledWithin(blocks * 5 * time.Second)
		over.Store(true)
		calls.Wait()
		if d := time.Duration(longest.Load()); d > time.Second+100*time.Millisecond {
			t.Errorf("somebody waited for %v", d)
		}
	})
}

// TestFillSlowClient has a client that needs as long to give a range back as it had it, five seconds at most. Another
// one, which writes elsewhere all the time, does not wait for that for longer than a second, and the filling ends.
func TestFillSlowClient(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		slow, other := h.client(), h.client()
		defer renewing(slow)()
		defer renewing(other)()
		clean := make(chan time.Time, 1)
		clean <- time.Now()
		slow.mu.Lock()
		slow.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
			time.Sleep(min(time.Since(<-clean), 5*time.Second))
			clean <- time.Now()
			return metarpc.StatusOK
		}
		slow.mu.Unlock()
		f := writtenBy(other, "f")
		must[metarpc.AttrResult](slow, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead | metarpc.AccessWrite})
		must[metarpc.LayoutResult](slow, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Off: 1 << 20, Len: 1})
		time.Sleep(10 * time.Second)
		h.degrade(4*gateBytes, f)
		var over atomic.Bool
		var writes sync.WaitGroup
		longest := time.Duration(0)
		writes.Go(func() {
			for !over.Load() {
				longest = max(longest, h.wait(write(other, f, 0)))
				time.Sleep(50 * time.Millisecond)
			}
		})
		h.filledWithin(5 * time.Minute)
		over.Store(true)
		writes.Wait()
		if longest > idlePatience+100*time.Millisecond {
			t.Errorf("the other one waited for %v", longest)
		}
	})
}

// TestFillStuck has the filling of a file not begin: its range is open again after a second.
func TestFillStuck(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		h.files.begun = func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		f := writtenBy(c, "f")
		h.degrade(1<<20, f)
		for range 100 {
			if took := h.wait(write(c, f, 0)); took > idlePatience {
				t.Errorf("a writer waited for %v", took)
			}
			time.Sleep(300 * time.Millisecond)
		}
		h.files.mu.Lock()
		if h.files.started < 2 {
			t.Errorf("it was begun %d times", h.files.started)
		}
		h.files.begun = nil
		h.files.mu.Unlock()
		h.filledWithin(2 * resilverLook)
	})
}

// TestFillPace: with a bound of how much is copied nothing is closed while that is waited for.
func TestFillPace(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		h.svc.cfg.Resilver = minGate / 4
		c := h.client()
		defer renewing(c)()
		f := writtenBy(c, "f")
		began := time.Now()
		h.degrade(8*minGate, f)
		for countRows(t.Context(), h.engine, schema.PrefixFill) > 0 {
			if took := h.wait(write(c, f, 0)); took > 10*time.Millisecond {
				t.Errorf("a writer waited for %v", took)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(began); took < 7*4*time.Second || took > 9*4*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// TestFillTurns: a file whose filling fails does not keep those behind it from being filled, though the device that
// failed is left alone for a while.
func TestFillTurns(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		bad := writtenBy(c, "f")
		ids := []layout.FileID{writtenBy(c, "g"), writtenBy(c, "h"), writtenBy(c, "i")}
		var mu sync.Mutex
		left := time.Time{}
		h.files.mu.Lock()
		h.files.fillable = func(layout.FileID) bool {
			mu.Lock()
			defer mu.Unlock()
			return time.Now().After(left)
		}
		h.files.failing = func(id layout.FileID) error {
			if id != bad {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			left = time.Now().Add(resilverLook / 2)
			return errors.New("it cannot be read")
		}
		h.files.mu.Unlock()
		h.degrade(1<<20, append(ids, bad)...)
		time.Sleep(4 * resilverLook)
		for _, id := range ids {
			if id < bad {
				t.Fatalf("%d is in front of %d", id, bad)
			}
			if raw, _ := h.engine.Get(t.Context(), schema.FillKey(id)); raw != nil {
				t.Errorf("%d is not filled", id)
			}
		}
	})
}

// TestFillAsks: what is known of all files of a page is not asked again for each, as long as they cannot be filled.
func TestFillAsks(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		const files = 2*fillPage + 10
		var asked atomic.Int64
		h.files.mu.Lock()
		h.files.fillable = func(layout.FileID) bool {
			asked.Add(1)
			return false
		}
		h.files.mu.Unlock()
		for i := range layout.FileID(files) {
			put(t, h, schema.FillKey(1000+i), schema.Encode(&schema.Fill{}))
		}
		time.Sleep(resilverLook + resilverLook/2) // between two passes
		asked.Store(0)
		time.Sleep(10 * resilverLook)
		if n := asked.Load(); n != 10*files {
			t.Errorf("it is asked %d times of %d files", n, files)
		}
		f := writtenBy(c, "f")
		h.files.mu.Lock()
		h.files.fillable = func(id layout.FileID) bool { return id == f }
		h.files.mu.Unlock()
		h.degrade(1<<20, f)
		time.Sleep(time.Second)
		if raw, _ := h.engine.Get(t.Context(), schema.FillKey(f)); raw != nil {
			t.Error("one that can be filled is not")
		}
	})
}

// TestWaiting: what files with too few copies wait for is counted again and again, however many there are, and told.
func TestWaiting(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		const files = 2*fillPage + 10
		h.files.fillable = func(layout.FileID) bool { return false }
		h.files.waiting = map[layout.DeviceID]int{{5}: 1, {}: 2}
		for i := range layout.FileID(files) {
			put(t, h, schema.FillKey(1000+i), schema.Encode(&schema.Fill{}))
		}
		told := func() []metarpc.WaitingFiles {
			return must[metarpc.StatusResult](c, metarpc.OpStatus, &metarpc.Empty{}).Waiting
		}
		if w := told(); len(w) > 0 {
			t.Errorf("before it was counted: %v", w)
		}
		time.Sleep(resilverLook + time.Second)
		want := []metarpc.WaitingFiles{{Files: 2 * files}, {Device: layout.DeviceID{5}, Files: files}}
		if w := told(); !slices.Equal(w, want) {
			t.Errorf("%v, want %v", w, want)
		}
		if st, err := h.svc.Stats(t.Context(), false); err != nil || !slices.Equal(st.Waiting, want) {
			t.Errorf("%v, %v; want %v", st.Waiting, err, want)
		}
		h.files.mu.Lock()
		h.files.waiting = nil
		h.files.mu.Unlock()
		time.Sleep(resilverLook)
		if w := told(); len(w) > 0 {
			t.Errorf("nothing is waited for: %v", w)
		}
	})
}
