package meta

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

const mib = 1 << 20

// upTo is a range by where it begins and ends.
func upTo(from, to int64) layout.Range { return layout.Range{Off: from, Len: to - from} }

var all = layout.Range{Len: layout.ToEOF}

// rangeWriter is a client that keeps count of where it may write a file, or read one on namespaces.
type rangeWriter struct {
	*client
	id layout.FileID

	check func(mode layout.IOMode, got layout.Range) // is called with what is granted, once it holds that; nil: nothing is

	mu       sync.Mutex
	holds    []layout.Range
	reads    []layout.Range
	recalled []layout.Range
	hold     chan struct{} // it answers no recall before this is closed; nil: at once
}

// rangeWriters are clients that write a file with so many copies, which they have open.
func rangeWriters(t *testing.T, h *host, copies, n int) (list []*rangeWriter) {
	t.Helper()
	var id layout.FileID
	for i := range n {
		c := h.root()
		if i == 0 {
			var mirrors [][]schema.DataFile
			for m := range copies {
				mirrors = append(mirrors, copyOn(layout.DeviceID{byte(m + 1)}))
			}
			id = whole(t, h, c, "f", mirrors...)
		} else {
			c.open(id)
		}
		list = append(list, newRangeWriter(c, id))
	}
	return list
}

func newRangeWriter(c *client, id layout.FileID) *rangeWriter {
	w := &rangeWriter{client: c, id: id}
	c.recall, c.granted = w.giveBack, w.take
	return w
}

// take is called with a layout.
func (w *rangeWriter) take(r *metarpc.LayoutResult) {
	for _, seg := range r.Segments {
		got := layout.Range{Off: seg.Off, Len: seg.Len}
		w.mu.Lock()
		if seg.IOMode == layout.IOModeRW {
			w.holds = with(w.holds, got)
		} else {
			w.reads = with(w.reads, got)
		}
		w.mu.Unlock()
		if w.check != nil {
			w.check(seg.IOMode, got)
		}
	}
}

// giveBack answers a recall.
func (w *rangeWriter) giveBack(a *metarpc.LayoutRecallArgs) metarpc.Status {
	w.mu.Lock()
	r := layout.Range{Off: a.Off, Len: a.Len}
	w.recalled = append(w.recalled, r)
	hold := w.hold
	w.mu.Unlock()
	if hold != nil {
		<-hold
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holds, w.reads = without(w.holds, r), without(w.reads, r)
	return metarpc.StatusOK
}

// answerLater makes it answer recalls only when the function that it returns is called.
func (w *rangeWriter) answerLater() (answer func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	hold := make(chan struct{})
	w.hold = hold
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.hold = nil
		close(hold)
	}
}

// recalls are those since it was last asked.
func (w *rangeWriter) recalls() []layout.Range {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.recalled
	w.recalled = nil
	return r
}

// get asks once where it may write, the n bytes at off among it.
func (w *rangeWriter) get(off, n int64) (layout.Range, error) {
	return w.ask(layout.IOModeRW, off, n)
}

// ask asks for a layout of a mode.
func (w *rangeWriter) ask(mode layout.IOMode, off, n int64) (layout.Range, error) {
	r, err := ask[metarpc.LayoutResult](w.client, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: w.id, IOMode: mode, Off: off, Len: n})
	if err != nil || len(r.Segments) == 0 {
		return layout.Range{}, err
	}
	return layout.Range{Off: r.Segments[0].Off, Len: r.Segments[0].Len}, nil
}

// mustGet is get until it is granted, which must be want.
func (w *rangeWriter) mustGet(off, n int64, want layout.Range) {
	w.t.Helper()
	w.must(layout.IOModeRW, off, n, want)
}

// must is mustGet for a layout of a mode.
func (w *rangeWriter) must(mode layout.IOMode, off, n int64, want layout.Range) {
	w.t.Helper()
	for {
		got, err := w.ask(mode, off, n)
		if statusOf(err) == metarpc.StatusLayoutUnavailable {
			continue
		}
		if err != nil || got != want {
			w.t.Errorf("%d bytes at %d: granted %v, %v; want %v", n, off, got, err, want)
		}
		return
	}
}

func (w *rangeWriter) wantRecalls(want ...layout.Range) {
	w.t.Helper()
	if got := w.recalls(); !slices.Equal(got, want) {
		w.t.Errorf("recalled were %v, want %v", got, want)
	}
}

// TestRangesAlone writes a file on one client, with copies and without: it is not asked to give anything back.
func TestRangesAlone(t *testing.T) {
	for _, copies := range []int{1, 2} {
		bubble(t, func(t *testing.T, h *host) {
			a := rangeWriters(t, h, copies, 1)[0]
			for _, off := range []int64{7 * mib, 0, 100 * mib} {
				a.mustGet(off, 10, all)
			}
			a.wantRecalls()
		})
	}
}

// TestRangesTaken follows how a file is divided: who has a range gives back what another one wants of it, in whole units and up to where
// somebody else has the next, and nothing else.
func TestRangesTaken(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 3, 3)
		a, b, c := w[0], w[1], w[2]
		a.mustGet(0, 1, all)
		b.mustGet(5*mib+mib/3, 10, upTo(5*mib, layout.ToEOF))
		a.wantRecalls(upTo(5*mib, layout.ToEOF))
		a.mustGet(4*mib, mib, upTo(0, 5*mib))
		b.mustGet(9*mib, mib, upTo(5*mib, layout.ToEOF))
		b.wantRecalls()
		c.mustGet(2*mib+mib/2, mib, upTo(2*mib, 5*mib)) // across a border
		a.wantRecalls(upTo(2*mib, 5*mib))
		b.wantRecalls()
		a.mustGet(mib, 10, upTo(0, 2*mib))
	})
}

// TestRangesFromTwo takes a range that two clients have parts of.
func TestRangesFromTwo(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 3)
		w[0].mustGet(0, 1, all)
		w[1].mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		w[0].wantRecalls(upTo(5*mib, layout.ToEOF))
		w[2].mustGet(5*mib-1, 2, upTo(4*mib, layout.ToEOF))
		for _, o := range w[:2] {
			o.wantRecalls(upTo(4*mib, layout.ToEOF))
		}
		w[0].mustGet(0, 1, upTo(0, 4*mib))
		w[2].wantRecalls()
	})
}

// TestRangesBeside lets a third client go on while a range is being taken: it gets what nobody else has, and not what is being taken.
func TestRangesBeside(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 4)
		a, b, c, d := w[0], w[1], w[2], w[3]
		a.mustGet(0, 1, all)
		b.mustGet(10*mib, 1, upTo(10*mib, layout.ToEOF))
		c.mustGet(5*mib, 1, upTo(5*mib, 10*mib))
		a.recalls()
		answer := a.answerLater()
		_, err := d.get(2*mib, mib) // takes [2 MiB, 5 MiB) from a
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		start := time.Now()
		c.mustGet(6*mib, 1, upTo(5*mib, 10*mib))
		b.mustGet(20*mib, 1, upTo(10*mib, layout.ToEOF))
		// Also the one from which it is taken: it may need that in order to give the rest back.
		if got, err := a.get(0, 1); err != nil || got != upTo(0, 2*mib) {
			t.Errorf("granted %v, %v", got, err)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("others waited %v", took)
		}
		_, err = a.get(3*mib, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		answer()
		d.mustGet(2*mib, mib, upTo(2*mib, 5*mib))
		a.wantRecalls(upTo(2*mib, 5*mib))
		b.wantRecalls()
		c.wantRecalls()
	})
}

// TestRangesPromise has a client told to ask again before it gets its turn: it waits no longer than it may, whatever happens to the file
// meanwhile, and what was taken for it is kept for it for a while.
func TestRangesPromise(t *testing.T) {
	for _, returns := range []bool{true, false} {
		bubble(t, func(t *testing.T, h *host) {
			w := rangeWriters(t, h, 2, 3)
			a, b, c := w[0], w[1], w[2]
			for _, o := range w {
				defer renewing(o.client)()
			}
			a.mustGet(0, 1, all)
			answer := a.answerLater()
			start := time.Now()
			hdr, ch := b.begin(metarpc.OpLayoutGet, rw(a.id))
			for i := range 20 {
				time.Sleep(layoutWait / 10)
				c.report(true, metarpc.SizeReport{ID: a.id, End: int64(i)}) // the file's record changes
			}
			if len(ch) == 0 {
				t.Errorf("no answer after %v", time.Since(start))
			}
			wantStatus(t, b.finish(hdr, ch, new(metarpc.LayoutResult)), metarpc.StatusLayoutUnavailable)
			answer()
			synctest.Wait()
			start = time.Now()
			_, err := c.get(0, 1)
			wantStatus(t, err, metarpc.StatusLayoutUnavailable)
			if returns {
				b.mustGet(0, 1, all)
				c.mustGet(0, 1, all)
				b.wantRecalls(all)
				return
			}
			c.mustGet(0, 1, all)
			b.wantRecalls(all)
			if took := time.Since(start); took < promiseTime || took > promiseTime+2*layoutWait {
				t.Errorf("kept for %v", took)
			}
		})
	}
}

// TestRangesHeld leaves a client its range for a moment before the next one gets it.
func TestRangesHeld(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 2)
		w[0].mustGet(0, 1, all)
		for i := range 6 {
			start := time.Now()
			w[1-i%2].mustGet(0, 1, all)
			if took := time.Since(start); took != holdTime {
				t.Errorf("change %d took %v, want %v", i, took, holdTime)
			}
		}
	})
}

// TestRangesLostHolder takes a range from a client that does not answer, and from one that is gone: the file is fenced before somebody else
// gets it. One that ends its session has nothing any more.
func TestRangesLostHolder(t *testing.T) {
	for name, lose := range map[string]func(*rangeWriter){
		"deaf": func(w *rangeWriter) { w.recall = nil; deafToRecalls(w) },
		"gone": func(w *rangeWriter) { w.drop() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				w := rangeWriters(t, h, 2, 3)
				defer renewing(w[1].client)()
				defer renewing(w[2].client)()
				w[0].mustGet(0, 1, all)
				w[2].mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
				w[0].recalls()
				before := h.owner(t, w[0].id)
				lose(w[0])
				release := h.files.hold() // the fencing
				start := time.Now()
				for time.Since(start) < 3*h.lease {
					_, err := w[1].get(0, 1)
					wantStatus(t, err, metarpc.StatusLayoutUnavailable)
				}
				release()
				w[1].mustGet(0, 1, upTo(0, 5*mib))
				if h.owner(t, w[0].id) == before {
					t.Error("not fenced")
				}
				w[2].wantRecalls(all) // because of the new owners
			})
		})
	}
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 2)
		w[0].mustGet(0, 1, all)
		before := h.owner(t, w[0].id)
		must[metarpc.Empty](w[0].client, metarpc.OpEndSession, &metarpc.Empty{})
		w[1].mustGet(0, 1, all)
		if h.owner(t, w[0].id) != before {
			t.Error("fenced though its client ended the session")
		}
	})
}

// deafToRecalls makes a client renew its lease, but never answer a recall.
func deafToRecalls(w *rangeWriter) {
	w.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
		<-w.t.Context().Done()
		return metarpc.StatusOK
	}
	go func() {
		for range 8 {
			if retry.Pause(w.t.Context(), 10*time.Second) != nil {
				return
			}
			w.begin(metarpc.OpRenew, &metarpc.Empty{})
		}
	}()
}

// TestRangesRestart starts the service again while two clients have parts of a file. It does not know which, and asks.
func TestRangesRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 3)
		a, b, c := w[0], w[1], w[2]
		a.mustGet(0, 1, all)
		b.mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		a.recalls()
		h.restart()
		for _, o := range w {
			o.connect()
			o.open(o.id)
			must[metarpc.Empty](o.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		}
		c.mustGet(6*mib, 1, upTo(6*mib, layout.ToEOF))
		a.wantRecalls(upTo(6*mib, layout.ToEOF))
		b.wantRecalls(upTo(6*mib, layout.ToEOF))
		b.mustGet(5*mib, 1, upTo(5*mib, 6*mib))
		a.wantRecalls(upTo(5*mib, 6*mib))
		b.wantRecalls()
		c.wantRecalls()
	})
}

// TestRangesRemoved removes a file while a range of it is being taken.
func TestRangesRemoved(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 2)
		w[0].mustGet(0, 1, all)
		answer := w[0].answerLater()
		_, err := w[1].get(0, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		w[1].remove(layout.RootID, "f")
		w[0].closeFile(w[0].id)
		w[1].closeFile(w[0].id)
		w[0].wantGone(w[0].id)
		answer()
		time.Sleep(time.Second)
		synctest.Wait()
		h.svc.mu.Lock()
		defer h.svc.mu.Unlock()
		if len(h.svc.files) != 0 {
			t.Errorf("records left: %v", h.svc.files)
		}
	})
}

// TestRangesReturned gives a layout back: what the client had is free.
func TestRangesReturned(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 2)
		w[0].mustGet(0, 1, all)
		must[metarpc.Empty](w[0].client, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{w[0].id}})
		w[1].mustGet(0, 1, all)
		w[0].wantRecalls()
	})
}

// TestRangesOfFewerCopies has a file with one copy get a second one: who writes it must give back what he has for himself from then on.
func TestRangesOfFewerCopies(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 2)
		w[0].mustGet(0, 1, all)
		w[1].mustGet(0, 1, all)
		copies := [][]schema.DataFile{copyOn(near), copyOn(far)}
		err := h.svc.gated(t.Context(), w[0].id, all, func(ctx context.Context) error {
			setLayout(t, h, w[0].id, schema.Layout{StripeUnit: testUnit, Width: 1, Mirrors: copies})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		w[0].wantRecalls(all, all)
		w[1].wantRecalls(all)
		w[0].mustGet(0, 1, all)
		w[1].mustGet(0, 1, all)
		w[0].wantRecalls(all)
	})
}

// TestRenewal asks how data files are written now, in the middle of a recall that waits for it. It gives no right to anything.
func TestRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 3)
		a, b, c := w[0], w[1], w[2]
		renewal := &metarpc.LayoutGetArgs{ID: a.id, IOMode: layout.IOModeRW, Len: layout.ToEOF, Renew: true}
		_, err := ask[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, renewal)
		wantStatus(t, err, errPerm.Status)
		a.mustGet(0, 1, all)
		b.mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		a.recalls()
		answer := a.answerLater()
		_, err = c.get(0, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		start := time.Now()
		for _, o := range []*rangeWriter{a, b} {
			r := must[metarpc.LayoutResult](o.client, metarpc.OpLayoutGet, renewal)
			if len(r.Segments) != 1 || r.Segments[0].Mirrors[0][0].UID != h.owner(t, a.id) {
				t.Errorf("%+v", r.Segments)
			}
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
		answer()
		c.mustGet(0, 1, upTo(0, 5*mib))
		b.wantRecalls()
		// While somebody is being fenced it is too early.
		release := h.files.hold()
		defer renewing(a.client)()
		defer renewing(b.client)()
		c.drop()
		time.Sleep(2 * h.lease)
		_, err = ask[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, renewal)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		release()
		synctest.Wait()
		r := must[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, renewal)
		if got := r.Segments[0].Mirrors[0][0].UID; got != h.owner(t, a.id) {
			t.Errorf("owner %d", got)
		}
	})
}

// TestRangesRandom has clients ask for ranges at random, while the file is cut, gets times and is gated. At no moment two of them may write the
// same byte, and all get their turns.
func TestRangesRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	bubble(t, func(t *testing.T, h *host) {
		t.Logf("seed %d", seed)
		w := rangeWriters(t, h, 2, 4)
		var check sync.Mutex
		granted := make([]int, len(w))
		var writers sync.WaitGroup
		for i, o := range w {
			o.check = func(_ layout.IOMode, got layout.Range) {
				check.Lock()
				defer check.Unlock()
				granted[i]++
				for j, other := range w {
					if j == i {
						continue
					}
					other.mu.Lock()
					if slices.ContainsFunc(other.holds, got.Overlaps) {
						t.Errorf("writer %d was granted %v, writer %d has %v", i, got, j, other.holds)
					}
					other.mu.Unlock()
				}
			}
		}
		for i, o := range w {
			writers.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				for range 300 {
					off, n := rng.Int64N(8*mib), 1+rng.Int64N(2*mib)
					_, err := o.get(off, n)
					if s := statusOf(err); err != nil && s != metarpc.StatusLayoutUnavailable {
						t.Errorf("writer %d: %v", i, err)
						return
					}
					switch rng.IntN(10) {
					case 0:
						must[metarpc.AttrResult](o.client, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: o.id, Mask: metarpc.SetMtime, Mtime: rng.Int64()})
					case 1:
						must[metarpc.AttrResult](o.client, metarpc.OpSetAttr, setSize(o.id, rng.Int64N(8*mib)))
					case 2:
						err := h.svc.gated(t.Context(), o.id, layout.Range{Off: rng.Int64N(4 * mib), Len: mib}, func(context.Context) error { return nil })
						if err != nil {
							t.Error(err)
						}
					case 3:
						time.Sleep(time.Duration(rng.IntN(int(2 * holdTime))))
					}
				}
			})
		}
		writers.Wait()
		t.Logf("granted %v", granted)
		for i, n := range granted {
			if n < 30 {
				t.Errorf("writer %d got its turn %d times of 300: %v", i, n, granted)
			}
		}
	})
}

// TestRangeSets compares with and without to sets of numbers.
func TestRangeSets(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	const end = 40
	for range 200 {
		var ranges []layout.Range
		var want [end]bool
		for step := range 30 {
			r := upTo(rng.Int64N(end), 0)
			r.Len = rng.Int64N(end - r.Off + 1)
			toEnd := rng.IntN(5) == 0 // what goes on to the end of any file
			if toEnd {
				r.Len = end - r.Off
			}
			r.Len = max(r.Len, 1)
			taken := rng.IntN(2) == 0
			for i := r.Off; i < r.End(); i++ {
				want[i] = !taken
			}
			before := fmt.Sprint(ranges)
			if toEnd {
				r.Len = layout.ToEOF
			}
			if taken {
				ranges = without(ranges, r)
			} else {
				ranges = with(ranges, r)
			}
			var got [end]bool
			for n, o := range ranges {
				if o.Len <= 0 || n > 0 && ranges[n-1].End() > o.Off {
					t.Fatalf("seed %d, step %d: %v, taken %v: %v and %v", seed, step, before, taken, r, ranges)
				}
				for i := o.Off; i < min(o.End(), end); i++ {
					got[i] = true
				}
			}
			if got != want {
				t.Fatalf("seed %d, step %d: %v, taken %v: %v and %v", seed, step, before, taken, r, ranges)
			}
		}
	}
}
