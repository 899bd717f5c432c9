package meta

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// blockUsers are clients that use a file on a namespace.
func blockUsers(t *testing.T, h *host, n int) []*rangeWriter {
	t.Helper()
	h.files.blocks[layout.DeviceID{1}] = true
	return rangeWriters(t, h, 1, n)
}

// canRead asks once for a layout for reading the byte at off.
func (w *rangeWriter) canRead(off int64) (layout.Range, error) {
	return w.ask(layout.IOModeRead, off, layout.ToEOF)
}

// mustRead is canRead until it is granted, which must be want.
func (w *rangeWriter) mustRead(off int64, want layout.Range) {
	w.t.Helper()
	w.must(layout.IOModeRead, off, layout.ToEOF, want)
}

// lose ends the session of a client without its doing.
func (h *host) lose(c *client) {
	h.svc.mu.Lock()
	sess := h.svc.sessions[c.hello.Session]
	h.svc.mu.Unlock()
	h.svc.end(sess, "the test")
}

// TestBlockReaders reads a file on a namespace on several clients, and writes it on one: readers share, a writer shares with nobody, and
// only as much is taken as somebody wants.
func TestBlockReaders(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 4)
		a, b, c, d := w[0], w[1], w[2], w[3]
		start := time.Now()
		for _, o := range []*rangeWriter{a, b, c} {
			o.mustRead(0, all)
			o.mustRead(5*mib+testUnit+1, upTo(5*mib+testUnit, layout.ToEOF))
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("readers waited %v for each other", took)
		}
		d.mustGet(10*mib+1, 1, upTo(10*mib, layout.ToEOF))
		for _, o := range []*rangeWriter{a, b, c} {
			o.wantRecalls(upTo(10*mib, layout.ToEOF))
			o.mustRead(3, upTo(0, 10*mib))
		}
		a.mustGet(9*mib, mib, upTo(9*mib, 10*mib)) // its own layouts for reading are not in its way
		a.wantRecalls()
		b.wantRecalls(upTo(9*mib, 10*mib))
		d.wantRecalls()
		c.recalls()
		b.mustRead(20*mib, upTo(20*mib, layout.ToEOF))
		d.wantRecalls(upTo(20*mib, layout.ToEOF))
		a.wantRecalls()
		c.wantRecalls()
		c.mustRead(30*mib, upTo(30*mib, layout.ToEOF))
		b.wantRecalls()
	})
}

// TestBlockWriters has one copy of a file on a namespace written by two clients: not the same range at a time.
func TestBlockWriters(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		w[0].mustGet(0, 1, all)
		w[1].mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		w[0].wantRecalls(upTo(5*mib, layout.ToEOF))
	})
}

// TestBlockTurns has a writer and several readers ask again and again: all get on.
func TestBlockTurns(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 5)
		const turns = 100
		var users sync.WaitGroup
		start := time.Now()
		for i, o := range w {
			users.Go(func() {
				for n := 0; n < turns; {
					var err error
					if i == 0 {
						_, err = o.get(0, 1)
					} else {
						_, err = o.canRead(mib / 2)
					}
					switch {
					case err == nil:
						n++
						time.Sleep(time.Millisecond)
					case statusOf(err) != metarpc.StatusLayoutUnavailable:
						t.Errorf("client %d: %v", i, err)
						return
					}
				}
			})
		}
		users.Wait()
		// Whoever has it keeps it for holdTime, and each of these is followed by others at least every second time.
		if took, most := time.Since(start), 10*turns*holdTime; took > most {
			t.Errorf("took %v, want at most %v", took, most)
		}
	})
}

// TestBlockAnswer has a reader's layout recalled while its answer is still being made: the recall comes after it. What the data files
// have no space for is not granted.
func TestBlockAnswer(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		a, b := w[0], w[1]
		hold := make(chan struct{})
		var asked [][]metarpc.Segment
		h.files.extents = func(s []metarpc.Segment) []metarpc.Segment {
			asked = append(asked, s)
			<-hold
			return s
		}
		hdr, ch := a.begin(metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: a.id, IOMode: layout.IOModeRead, Off: 3 * mib, Len: layout.ToEOF})
		synctest.Wait()
		hdr2, ch2 := b.begin(metarpc.OpLayoutGet, rw(b.id))
		time.Sleep(2 * holdTime)
		a.wantRecalls()
		close(hold)
		var r metarpc.LayoutResult
		if err := a.finish(hdr, ch, &r); err != nil || len(r.Segments) != 1 || r.Segments[0].Off != 3*mib || r.Segments[0].Len != layout.ToEOF-3*mib {
			t.Errorf("%+v, %v", r.Segments, err)
		}
		if err := b.finish(hdr2, ch2, &r); err != nil || len(r.Segments) != 1 {
			t.Errorf("%+v, %v", r.Segments, err)
		}
		a.wantRecalls(all)
		if len(asked) != 2 || len(asked[1]) != 1 || asked[1][0].IOMode != layout.IOModeRW {
			t.Errorf("asked for the extents of %+v", asked)
		}
		extents := func(f func(s []metarpc.Segment) []metarpc.Segment) {
			h.files.mu.Lock()
			defer h.files.mu.Unlock()
			h.files.extents = f
		}
		extents(func(s []metarpc.Segment) []metarpc.Segment { return nil })
		_, err := b.get(0, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		if got, err := b.canRead(0); err != nil || got != (layout.Range{}) {
			t.Errorf("granted %v, %v", got, err)
		}
		extents(nil)
		b.mustGet(0, 1, all)
	})
}

// TestBlockGone gives back what a client reads, in all ways there are: nobody is asked for it then.
func TestBlockGone(t *testing.T) {
	for name, end := range map[string]func(*rangeWriter){
		"return": func(w *rangeWriter) {
			must[metarpc.Empty](w.client, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{w.id}})
		},
		"close": func(w *rangeWriter) { w.closeFile(w.id) },
		"end": func(w *rangeWriter) {
			must[metarpc.Empty](w.client, metarpc.OpEndSession, &metarpc.Empty{})
			synctest.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				h.files.barred = func(metarpc.SessionID) { t.Error("fenced") }
				w := blockUsers(t, h, 2)
				w[0].mustRead(0, all)
				end(w[0])
				start := time.Now()
				w[1].mustGet(0, 1, all)
				w[0].wantRecalls()
				if took := time.Since(start); took != 0 {
					t.Errorf("took %v", took)
				}
			})
		})
	}
}

// TestBlockLost loses a client that was reading, or writing, a file on a namespace. Until it cannot do that any more, nobody gets a layout that
// speaks against it, the file is not cut, and not removed though it has no name.
func TestBlockLost(t *testing.T) {
	for _, writes := range []bool{false, true} {
		t.Run(fmt.Sprint("writes ", writes), func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				w := blockUsers(t, h, 3)
				lost, live, other := w[0], w[1], w[2]
				defer renewing(live.client)()
				defer renewing(other.client)()
				barred := map[metarpc.SessionID]int{}
				h.files.barred = func(id metarpc.SessionID) { barred[id]++ }
				if writes {
					lost.mustGet(0, 1, all)
				} else {
					lost.mustRead(0, all)
				}
				release := h.files.hold()
				defer release()
				h.lose(lost.client)
				if writes {
					_, err := other.canRead(0)
					wantStatus(t, err, metarpc.StatusLayoutUnavailable)
				} else {
					other.mustRead(0, all) // as the other reads
				}
				_, err := live.get(5*mib, 1)
				wantStatus(t, err, metarpc.StatusLayoutUnavailable)
				hdr, ch := live.begin(metarpc.OpSetAttr, setSize(live.id, 100))
				live.remove(layout.RootID, "f")
				live.closeFile(live.id)
				other.closeFile(other.id)
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if err := live.there(live.id); statusOf(err) != metarpc.Status(syscall.EINVAL) || len(ch) > 0 {
					t.Errorf("gone or cut before the client was fenced: %v", err)
				}
				release()
				live.finish(hdr, ch, new(metarpc.AttrResult)) // it may be gone by then
				synctest.Wait()
				live.wantGone(live.id)
				if len(barred) != 1 || barred[lost.hello.Session] != 1 {
					t.Errorf("fenced: %v", barred)
				}
			})
		})
	}
}

// TestBlockLostPart loses a client that was reading a part of a file: the rest is written meanwhile.
func TestBlockLostPart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 3)
		lost, a, b := w[0], w[1], w[2]
		lost.mustRead(0, all)
		a.mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		release := h.files.hold()
		defer release()
		h.lose(lost.client)
		start := time.Now()
		b.mustGet(7*mib, 1, upTo(7*mib, layout.ToEOF))
		if took := time.Since(start); took > holdTime {
			t.Errorf("took %v", took)
		}
		_, err := b.get(4*mib, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		release()
		b.mustGet(4*mib, 1, upTo(4*mib, 5*mib))
	})
}

// TestBlockLostClosed removes a file that a lost client, of which it is not known after a restart what it had open, may still be writing.
func TestBlockLostClosed(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		lost.mustGet(0, 1, all)
		live.closeFile(live.id)
		h.restart()
		lost.drop()
		live.connect()
		must[metarpc.Empty](live.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		release := h.files.hold()
		defer release()
		hdr, ch := live.begin(metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "f"})
		time.Sleep(3 * h.lease)
		if err := live.finish(hdr, ch, new(metarpc.Empty)); statusOf(err) != metarpc.StatusGrace {
			t.Errorf("removed: %v", err)
		}
		_, err := ask[metarpc.RemoveResult](live.client, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "f"})
		wantStatus(t, err, metarpc.StatusGrace)
		release()
		synctest.Wait()
		live.remove(layout.RootID, "f")
		live.wantGone(live.id)
	})
}

// TestBlockLostLease ends a session of whose end its client need not know yet: it is fenced only when its lease is over, since it may send until then, and
// register with namespaces.
func TestBlockLostLease(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		lost.mustGet(0, 1, all)
		var fenced time.Time
		h.files.barred = func(metarpc.SessionID) { fenced = time.Now() }
		last := time.Now()
		h.lose(lost.client)
		live.mustGet(0, 1, all)
		if took := fenced.Sub(last); took < h.lease || took > h.lease+time.Second {
			t.Errorf("fenced %v after its last word, the lease is %v", took, h.lease)
		}
	})
}

// TestBlockLostBeside loses a client while a namespace is away: its other files are fenced and closed meanwhile.
func TestBlockLostBeside(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		plain := lost.create(layout.RootID, "g")
		setLayout(t, h, plain, schema.Layout{StripeUnit: testUnit, Width: 1, Mirrors: [][]schema.DataFile{copyOn(layout.DeviceID{2})}})
		must[metarpc.LayoutResult](lost.client, metarpc.OpLayoutGet, rw(plain))
		lost.mustRead(0, all)
		hold := make(chan struct{})
		h.files.barred = func(metarpc.SessionID) { <-hold }
		defer close(hold)
		before := h.owner(t, plain)
		h.lose(lost.client)
		synctest.Wait()
		if h.owner(t, plain) == before {
			t.Error("another file is not fenced")
		}
		if _, err := live.layout(plain, 0, 1); err != nil {
			t.Error(err)
		}
	})
}

// TestBlockLostAway loses a client while the namespace of one of its files is away: the other one is fenced and written meanwhile.
func TestBlockLostAway(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		ids := []layout.FileID{lost.id, lost.create(layout.RootID, "g")}
		setLayout(t, h, ids[1], schema.Layout{StripeUnit: testUnit, Width: 1, Mirrors: [][]schema.DataFile{copyOn(layout.DeviceID{1})}})
		for _, id := range ids {
			must[metarpc.LayoutResult](lost.client, metarpc.OpLayoutGet, rw(id))
		}
		live.open(ids[1])
		hold := make(chan struct{})
		defer close(hold)
		var asked atomic.Int32
		h.files.barred = func(metarpc.SessionID) {
			if asked.Add(1) == 1 {
				<-hold
			}
		}
		h.lose(lost.client)
		time.Sleep(2 * h.lease)
		granted := 0
		for _, id := range ids {
			if _, err := live.layout(id, 0, 1); err == nil {
				granted++
			}
		}
		if granted != 1 {
			t.Errorf("%d of 2 files can be written", granted)
		}
	})
}

// TestBlockCut cuts a file: whoever reads or writes it has given back all of it before, also the client that cuts it, and until
// that is done nobody gets anything: extents of before the cut are of an earlier generation, also those of what stays.
func TestBlockCut(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 3)
		a, b, c := w[0], w[1], w[2]
		a.mustRead(0, all)
		b.mustRead(0, all)
		c.mustGet(9*mib, 1, upTo(9*mib, layout.ToEOF))
		a.recalls()
		b.recalls()
		c.mustRead(0, all) // it writes the rest itself
		cut := 0
		h.files.cut = func(size int64) {
			cut++
			for i, o := range w {
				o.mu.Lock()
				if len(o.holds)+len(o.reads) > 0 {
					t.Errorf("cut to %d: client %d writes %v, reads %v", size, i, o.holds, o.reads)
				}
				o.mu.Unlock()
			}
		}
		release := h.files.hold()
		hdr, ch := a.begin(metarpc.OpSetAttr, setSize(a.id, 2*mib))
		h.files.awaitStalled(1)
		for _, o := range w {
			o.wantRecalls(all)
		}
		for _, off := range []int64{0, 3 * mib} {
			_, err := b.canRead(off)
			wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		}
		release()
		if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil || cut != 1 {
			t.Errorf("cut %d times: %v", cut, err)
		}
		b.mustRead(3*mib, upTo(3*mib, layout.ToEOF))
	})
}

// TestBlockCutClosed cuts a file that nobody has open. Who opens it before that is done gets nothing, not even in front of the new size: what he
// wrote there by extents of before the cut would not be taken.
func TestBlockCutClosed(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		a, b := w[0], w[1]
		a.report(false, metarpc.SizeReport{ID: a.id, End: 5 * mib})
		a.closeFile(a.id)
		b.closeFile(b.id)
		release := h.files.hold()
		defer release()
		hdr, ch := a.begin(metarpc.OpSetAttr, setSize(a.id, 2*mib))
		h.files.awaitStalled(1)
		b.open(b.id)
		_, err := b.get(0, 1)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		_, err = b.canRead(0)
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		release()
		if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		b.mustGet(0, 1, all)
	})
}

// TestBlockCutFirst cuts a file that has no data files when that begins, and gets some: these are given back before it is cut, too.
func TestBlockCutFirst(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		h.files.blocks[layout.DeviceID{1}] = true
		a, b := h.client(), h.client()
		id := a.create(layout.RootID, "f")
		w := newRangeWriter(h.root(), id)
		w.open(id)
		b.attr(id) // with a lease
		var asked atomic.Bool
		b.back = func(metarpc.BackOp, any) metarpc.Status {
			if asked.CompareAndSwap(false, true) {
				go w.mustGet(0, mib, upTo(0, 2*mib)) // ends with the answer
				time.Sleep(time.Second)
			}
			return metarpc.StatusOK
		}
		h.files.cut = func(int64) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.holds) > 0 {
				t.Errorf("cut while %v may be written", w.holds)
			}
		}
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, setSize(id, 2*mib))
		w.wantRecalls(all)
	})
}

// TestBlockGate copies a range of a file: it is neither read nor written there.
func TestBlockGate(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		w[0].mustRead(0, all)
		err := h.svc.gated(t.Context(), w[0].id, upTo(2*mib, 3*mib), func(context.Context) error {
			w[0].wantRecalls(upTo(2*mib, 3*mib))
			w[1].mustRead(0, upTo(0, 2*mib))
			w[1].mustRead(4*mib, upTo(4*mib, layout.ToEOF))
			_, err := w[1].canRead(2 * mib)
			wantStatus(t, err, metarpc.StatusLayoutUnavailable)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		w[0].wantRecalls()
		w[0].mustRead(2*mib, upTo(2*mib, layout.ToEOF))
	})
}

// TestBlockGateLost copies a file whose writer was lost, and fenced, before what he had written counted durably: up to there it is copied, as a
// namespace does not tell where a file ends.
func TestBlockGateLost(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		lost.mustGet(0, 1, all)
		lost.report(true, metarpc.SizeReport{ID: lost.id, End: 10000, Mtime: 5})
		f, err := h.svc.beginSizing(t.Context(), lost.id)
		if err != nil {
			t.Fatal(err)
		}
		h.lose(lost.client)
		time.Sleep(2 * h.lease)
		synctest.Wait()
		h.svc.mu.Lock()
		f.sizing = false // and whoever waits for that comes too late
		h.svc.mu.Unlock()
		err = h.svc.gated(t.Context(), lost.id, all, func(ctx context.Context) error {
			if row, _, err := h.svc.inode(ctx, lost.id); err != nil || row.Size != 10000 {
				t.Errorf("%d bytes to copy, %v", row.Size, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestBlockTimes sets times of a file that others read: they are not asked for anything.
func TestBlockTimes(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 3)
		w[0].mustRead(0, upTo(0, layout.ToEOF))
		w[1].mustGet(5*mib, 1, upTo(5*mib, layout.ToEOF))
		w[0].recalls()
		must[metarpc.AttrResult](w[2].client, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: w[0].id, Mask: metarpc.SetMtime, Mtime: 7})
		w[0].wantRecalls()
		w[1].wantRecalls(all)
	})
}

// TestBlockRestart starts the service again while one client reads a file and another writes it. Nobody gets anything before all have come back;
// then the one counts as reading everything, and the other as writing it.
func TestBlockRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 3)
		a, b, c := w[0], w[1], w[2]
		a.mustGet(0, 1, all)
		b.mustRead(5*mib, upTo(5*mib, layout.ToEOF))
		a.recalls()
		h.restart()
		for _, o := range w {
			o.connect()
			must[metarpc.AttrResult](o.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: o.id, Access: metarpc.AccessRead | metarpc.AccessWrite, Reclaim: true})
		}
		for _, o := range w {
			_, err := o.get(0, 1)
			wantStatus(t, err, metarpc.StatusGrace)
			_, err = o.canRead(0)
			wantStatus(t, err, metarpc.StatusGrace)
		}
		must[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: a.id, IOMode: layout.IOModeRW, Len: 1, Renew: true})
		a.report(false, metarpc.SizeReport{ID: a.id, End: 4096, Written: []metarpc.Written{blocksOf(0, 4096)}})
		for _, o := range w {
			must[metarpc.Empty](o.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		}
		c.mustRead(6*mib, upTo(6*mib, layout.ToEOF))
		a.wantRecalls(upTo(6*mib, layout.ToEOF))
		b.wantRecalls()
		c.mustGet(7*mib, 1, upTo(7*mib, layout.ToEOF))
		b.wantRecalls(upTo(7*mib, layout.ToEOF))
		a.wantRecalls()
	})
}

// TestBlockRestartLost starts the service again while a client that was reading is being fenced. Which files it read nobody knows then, so nobody
// may write one on a namespace before it has to have noticed that its session is over.
func TestBlockRestartLost(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		lost, live := w[0], w[1]
		defer renewing(live.client)()
		lost.mustRead(0, all)
		release := h.files.hold()
		h.lose(lost.client)
		synctest.Wait()
		h.kill(h.svc)
		release()
		h.start()
		start := time.Now()
		live.connect()
		live.open(live.id)
		must[metarpc.Empty](live.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		for {
			_, err := live.get(0, 1)
			if err == nil {
				break
			}
			wantStatus(t, err, metarpc.StatusGrace)
		}
		if took := time.Since(start); took < h.lease || took > h.lease+2*time.Second {
			t.Errorf("granted after %v", took)
		}
	})
}

// blocksOf is a report that blocks of the copy that rangeWriters makes were written.
func blocksOf(off, n int64) metarpc.Written {
	return metarpc.Written{Copy: metarpc.CopyRef{Device: layout.DeviceID{1}, Handle: []byte{1}}, Generation: 3, Ranges: []metarpc.Range{{Off: off, Len: n}}}
}

// TestBlockCommit makes blocks valid with the size that they belong to.
func TestBlockCommit(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		a, b := w[0], w[1]
		commit := func(c *rangeWriter, reports ...metarpc.SizeReport) error {
			_, err := ask[metarpc.LayoutCommitResult](c.client, metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: reports})
			return err
		}
		report := func(end int64, written ...metarpc.Written) metarpc.SizeReport {
			return metarpc.SizeReport{ID: a.id, End: end, Mtime: 5, Written: written}
		}
		b.mustRead(0, all)
		wantStatus(t, commit(b, report(10000, blocksOf(0, 4096))), errPerm.Status)
		if len(h.files.valid) != 0 {
			t.Errorf("valid: %v", h.files.valid)
		}
		a.mustGet(0, 1, all)
		if err := commit(a, report(4096, blocksOf(0, 4096)), report(9000, blocksOf(8192, 4096))); err != nil {
			t.Error(err)
		}
		if got := h.files.valid[a.id]; len(got) != 2 || got[0].Ranges[0].Off != 0 || got[1].Ranges[0].Off != 8192 {
			t.Errorf("valid: %v", got)
		}
		if size := b.attr(a.id).Size; size != 9000 {
			t.Errorf("size %d", size)
		}
		h.files.mu.Lock()
		h.files.validate = fmt.Errorf("data file 3: %w", syscall.ESTALE)
		h.files.mu.Unlock()
		err := commit(a, report(20000, blocksOf(12288, 4096)))
		wantStatus(t, err, errStale.Status)
		if !strings.Contains(fmt.Sprint(err), fmt.Sprintf("inode %d", a.id)) {
			t.Errorf("%v does not name the inode", err)
		}
		if size := b.attr(a.id).Size; size != 9000 {
			t.Errorf("size %d", size)
		}
	})
}

// TestBlockCache drops a cache that readers of a file on namespaces have in their layouts: they give them back first.
func TestBlockCache(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := blockUsers(t, h, 2)
		a := w[0]
		r := must[metarpc.CacheStartResult](a.client, metarpc.OpCacheStart, &metarpc.CacheStartArgs{ID: a.id, Devices: []layout.DeviceID{{2}}, Run: 1})
		if r.Size != 0 {
			t.Fatalf("%+v", r)
		}
		put(t, h, schema.LayoutKey(a.id), func() []byte {
			row := h.files.row(t, a.id)
			row.Caches = []schema.Cache{{Bytes: 10, File: schema.DataFile{Device: layout.DeviceID{2}, Number: 77, Handle: []byte{77}}}}
			return schema.Encode(&row)
		}())
		h.svc.caches.add(a.id, layout.DeviceID{2}, schema.CacheUse{Bytes: 10}, 1)
		a.mustRead(0, all)
		got := must[metarpc.CacheDropResult](w[1].client, metarpc.OpCacheDrop, &metarpc.CacheDropArgs{ID: a.id})
		if got.Caches != 1 {
			t.Errorf("%+v", got)
		}
		a.wantRecalls(all)
	})
}

// TestBlockRandom has clients read and write ranges of a file at random, while it is cut, gets times and is gated, clients are lost, and the service
// is started again. At no moment somebody may write what another one has, and nobody has anything of what is being cut.
func TestBlockRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	bubble(t, func(t *testing.T, h *host) {
		t.Logf("seed %d", seed)
		type user struct {
			*rangeWriter
			lost time.Time // when its session was ended without its doing
			stop func()    // it does not renew its lease any more
		}
		var check sync.Mutex // above rangeWriter.mu
		var users []*user    // also those that are lost
		// may reports what somebody may still do to a range.
		may := func(u *user, r layout.Range) (reads, writes bool) {
			u.mu.Lock()
			defer u.mu.Unlock()
			reads = slices.ContainsFunc(u.reads, r.Overlaps) && (u.lost.IsZero() || time.Since(u.lost) <= h.lease)
			return reads, slices.ContainsFunc(u.holds, r.Overlaps)
		}
		rng := rand.New(rand.NewPCG(seed, 99))
		var chance sync.Mutex
		pick := func(n int64) int64 {
			chance.Lock()
			defer chance.Unlock()
			return rng.Int64N(n)
		}
		granted := map[layout.IOMode]int{}
		add := func(w *rangeWriter) {
			u := &user{rangeWriter: w}
			w.check = func(mode layout.IOMode, got layout.Range) {
				check.Lock()
				defer check.Unlock()
				granted[mode]++
				for i, o := range users {
					if o == u {
						continue
					}
					if reads, writes := may(o, got); writes || reads && mode == layout.IOModeRW {
						t.Errorf("%v granted in mode %v, while client %d reads %v, writes %v, lost %v", got, mode, i, o.reads, o.holds, o.lost)
					}
				}
			}
			w.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status { // what is on its way takes a while
				time.Sleep(time.Duration(pick(int64(5 * time.Millisecond))))
				return w.giveBack(a)
			}
			check.Lock()
			defer check.Unlock()
			users = append(users, u)
		}
		for _, w := range blockUsers(t, h, 4) {
			add(w)
		}
		id := users[0].id
		h.files.extents = func(segments []metarpc.Segment) []metarpc.Segment {
			if pick(20) == 0 {
				return nil
			}
			for i := range segments {
				segments[i].Len = min(segments[i].Len, testUnit+pick(4*mib))
			}
			return segments
		}
		h.files.barred = func(sess metarpc.SessionID) {
			time.Sleep(time.Duration(pick(int64(time.Second))))
			check.Lock()
			defer check.Unlock()
			for _, u := range users {
				if u.hello.Session == sess {
					u.mu.Lock()
					u.holds, u.reads = nil, nil
					u.mu.Unlock()
				}
			}
		}
		h.files.cut = func(size int64) {
			check.Lock()
			defer check.Unlock()
			for i, u := range users {
				if reads, writes := may(u, upTo(size, layout.ToEOF)); reads || writes {
					t.Errorf("cut to %d while client %d reads %v, writes %v", size, i, u.reads, u.holds)
				}
			}
		}
		run := func(u *user, rng *rand.Rand) {
			for range 60 {
				mode := layout.IOModeRead
				if rng.IntN(3) == 0 {
					mode = layout.IOModeRW
				}
				off, n := rng.Int64N(8*mib), 1+rng.Int64N(2*mib)
				_, err := u.ask(mode, off, n)
				if s := statusOf(err); err != nil && s != metarpc.StatusLayoutUnavailable && s != metarpc.StatusGrace {
					t.Error(err)
					return
				}
				switch rng.IntN(14) {
				case 0:
					args := &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime, Mtime: rng.Int64()}
					if rng.IntN(2) == 0 {
						args = setSize(id, rng.Int64N(8*mib))
					}
					_, err := ask[metarpc.AttrResult](u.client, metarpc.OpSetAttr, args)
					if s := statusOf(err); s != metarpc.StatusOK && s != metarpc.StatusGrace {
						t.Error(err)
					}
				case 1:
					r := layout.Range{Off: rng.Int64N(4 * mib), Len: mib}
					err := h.svc.gated(t.Context(), id, r, func(context.Context) error {
						check.Lock()
						defer check.Unlock()
						for i, o := range users {
							if reads, writes := may(o, r); reads || writes {
								t.Errorf("gate of %v while client %d reads %v, writes %v", r, i, o.reads, o.holds)
							}
						}
						return nil
					})
					if err != nil && err != context.DeadlineExceeded { // after a restart it may have to wait longer
						t.Error(err)
					}
				case 2:
					u.mu.Lock()
					u.holds, u.reads = nil, nil
					u.mu.Unlock()
					must[metarpc.Empty](u.client, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
				case 3:
					time.Sleep(time.Duration(rng.IntN(int(2 * holdTime))))
				case 4:
					if rng.IntN(8) == 0 {
						check.Lock()
						u.mu.Lock()
						u.lost = time.Now()
						u.mu.Unlock()
						check.Unlock()
						u.stop()
						h.lose(u.client)
						return
					}
				}
			}
		}
		for round := range 6 {
			var group sync.WaitGroup
			for i, u := range users {
				if u.lost.IsZero() {
					u.stop = sync.OnceFunc(renewing(u.client))
					group.Go(func() { run(u, rand.New(rand.NewPCG(seed, uint64(round*100+i)))) })
				}
			}
			group.Wait()
			for _, u := range users {
				u.stop()
			}
			if round%2 == 1 {
				h.restart()
			}
			var live []func() // each of them stops renewing its lease
			for _, u := range users {
				if !u.lost.IsZero() {
					continue
				}
				if round%2 == 1 {
					u.connect()
					must[metarpc.AttrResult](u.client, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead | metarpc.AccessWrite, Reclaim: true})
					must[metarpc.Empty](u.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
				}
				live = append(live, renewing(u.client))
			}
			for len(live) < 4 {
				w := newRangeWriter(h.root(), id)
				w.openAwaited(id)
				live = append(live, renewing(w.client))
				add(w)
			}
			for _, stop := range live {
				stop()
			}
		}
		h.kill(h.svc)
		time.Sleep(time.Second) // for what recalls wait for
		t.Logf("granted %v, of %d clients", granted, len(users))
		for _, mode := range []layout.IOMode{layout.IOModeRead, layout.IOModeRW} {
			if granted[mode] < 100 {
				t.Errorf("granted %d times in mode %v", granted[mode], mode)
			}
		}
	})
}
