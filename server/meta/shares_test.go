package meta

import (
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// share asks until something is granted, and reports whether that is shared.
func (w *rangeWriter) share(args metarpc.LayoutGetArgs) (layout.Range, bool) {
	w.t.Helper()
	args.ID, args.IOMode = w.id, layout.IOModeRW
	for {
		r, err := ask[metarpc.LayoutResult](w.client, metarpc.OpLayoutGet, &args)
		if statusOf(err) == metarpc.StatusLayoutUnavailable {
			continue
		}
		if err != nil || len(r.Segments) == 0 {
			w.t.Fatalf("%d bytes at %d: %v", args.Len, args.Off, err)
		}
		return layout.Range{Off: r.Segments[0].Off, Len: r.Segments[0].Len}, r.Segments[0].Shared
	}
}

// mustShare has 10 bytes granted in the shared portion want.
func (w *rangeWriter) mustShare(off int64, want layout.Range) {
	w.t.Helper()
	if got, shared := w.share(metarpc.LayoutGetArgs{Off: off, Len: 10}); got != want || !shared {
		w.t.Errorf("10 bytes at %d: granted %v, shared %v; want %v", off, got, shared, want)
	}
}

// mustHave has 10 bytes granted to nobody else.
func (w *rangeWriter) mustHave(off int64, want layout.Range) {
	w.t.Helper()
	if got, shared := w.share(metarpc.LayoutGetArgs{Off: off, Len: 10}); got != want || shared {
		w.t.Errorf("10 bytes at %d: granted %v, shared %v; want %v alone", off, got, shared, want)
	}
}

// TestRangesShared follows a file with one copy that two clients write: the second one to ask takes a range, the third time it is asked for it is
// shared, by both. What is beside it is not. After a while it is given back, and who still writes has it alone.
func TestRangesShared(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 2)
		a, b := w[0], w[1]
		defer renewing(a.client)()
		defer renewing(b.client)()
		a.mustHave(0, all)
		b.mustHave(5*mib, upTo(5*mib, layout.ToEOF))
		a.wantRecalls(upTo(5*mib, layout.ToEOF))
		start := time.Now()
		a.mustShare(5*mib+7, upTo(5*mib, 6*mib))
		a.wantRecalls()
		b.wantRecalls(upTo(5*mib, 6*mib))
		b.mustShare(5*mib, upTo(5*mib, 6*mib))
		a.mustHave(3*mib, upTo(0, 5*mib))
		b.mustHave(7*mib, upTo(6*mib, layout.ToEOF))
		if got, shared := a.share(metarpc.LayoutGetArgs{Off: 5*mib - 5, Len: 10}); got != upTo(0, 5*mib) || shared {
			t.Errorf("across the border: %v, shared %v", got, shared)
		}
		time.Sleep(sharedTime - time.Since(start) + time.Second)
		a.wantRecalls(upTo(5*mib, 6*mib))
		b.wantRecalls(upTo(5*mib, 6*mib))
		a.mustHave(5*mib, upTo(0, 6*mib))
		b.wantRecalls()
		// It is known for a while to be written by several.
		b.mustShare(5*mib, upTo(5*mib, 6*mib))
		a.wantRecalls(upTo(5*mib, 6*mib))
		time.Sleep(3 * sharedTime)
		a.mustHave(5*mib, upTo(0, 6*mib))
		b.mustHave(6*mib, upTo(6*mib, layout.ToEOF))
	})
}

// TestRangesSharedGrow has two clients go through a file together: what becomes shared is twice as large each time, and soon is the whole
// file. Everybody gives back before what he had of it alone.
func TestRangesSharedGrow(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 3)
		a, b, c := w[0], w[1], w[2]
		a.mustHave(0, all)
		b.mustHave(0, all)
		a.mustShare(0, upTo(0, mib))
		has, asks := b, a // has is who has what follows
		for off, size := int64(mib), int64(2*mib); size < 16*mib; off, size = off+size, 2*size {
			asks.mustHave(off, upTo(off, layout.ToEOF))
			has.mustShare(off, upTo(off, off+size))
			has, asks = asks, has
		}
		has.recalls()
		asks.recalls()
		c.mustShare(100*mib, all)
		has.wantRecalls(all)
		asks.wantRecalls()
		asks.mustShare(1, all)
	})
	// Clients that each have their part of the file take it once.
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 12)
		for i, o := range w {
			o.mustHave(int64(i)*10*mib, upTo(int64(i)*10*mib, layout.ToEOF))
		}
		for i, o := range w[:11] {
			o.mustHave(int64(i)*10*mib, upTo(int64(i)*10*mib, int64(i+1)*10*mib))
		}
	})
}

// TestRangesAppend has clients append: they are not asked to give back what others append beside. Who writes elsewhere is alone there.
func TestRangesAppend(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 3)
		place := func(off int64) metarpc.LayoutGetArgs { return metarpc.LayoutGetArgs{Off: off, Len: 10, Append: true} }
		for n := range int64(100) {
			if got, shared := w[n%2].share(place(10 * n)); got != all || shared {
				t.Fatalf("append %d: %v, shared %v", n, got, shared)
			}
		}
		w[0].wantRecalls()
		w[1].wantRecalls()
		w[2].mustHave(20*mib, upTo(20*mib, layout.ToEOF))
		w[0].wantRecalls(upTo(20*mib, layout.ToEOF))
		w[1].wantRecalls(upTo(20*mib, layout.ToEOF))
		w[0].share(place(2000))
		w[1].share(place(2010))
		w[0].wantRecalls()
		w[1].wantRecalls()
		// One that appends and writes elsewhere is one that writes.
		w[0].mustHave(5*mib, upTo(5*mib, 20*mib))
		w[1].wantRecalls(upTo(5*mib, 20*mib))
		w[1].share(place(2020))
		w[0].wantRecalls(upTo(0, 20*mib))
		w[2].wantRecalls()
	})
	// Of mirrored files the bytes side by side are somebody's alone as well.
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 2, 2)
		w[0].share(metarpc.LayoutGetArgs{Len: 10, Append: true})
		w[1].share(metarpc.LayoutGetArgs{Off: 10, Len: 10, Append: true})
		w[0].wantRecalls(all)
	})
}

// TestRangesNotShared has clients go on taking a range from one another if one of them knows nothing of shared ones, and if the file has
// several copies.
func TestRangesNotShared(t *testing.T) {
	for _, copies := range []int{1, 2} {
		bubble(t, func(t *testing.T, h *host) {
			w := rangeWriters(t, h, copies, 2)
			old := h.newClient()
			old.cred, old.hello.Highest = metarpc.Cred{}, sharing-1
			old.connect()
			old.open(w[0].id)
			w = append(w, newRangeWriter(old, w[0].id))
			for _, o := range w {
				defer renewing(o.client)()
			}
			if copies == 1 {
				w[0].mustHave(0, all)
				w[1].mustHave(0, all)
				w[0].mustShare(0, upTo(0, mib))
				w[1].mustShare(0, upTo(0, mib))
				w[0].recalls()
				w[1].recalls()
				w[2].mustHave(0, upTo(0, mib))
				w[0].wantRecalls(upTo(0, mib))
				w[1].wantRecalls(upTo(0, mib))
			}
			for n := range 20 {
				if _, shared := w[n%3].share(metarpc.LayoutGetArgs{Len: 10}); shared {
					t.Fatalf("shared, the %d. time", n)
				}
			}
		})
	}
}

// TestRangesSharedRestart starts the service again, which knows nothing of what was shared: that is recalled before anybody has it alone.
func TestRangesSharedRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 3)
		for _, o := range w[:2] {
			o.mustHave(0, all)
		}
		for _, o := range w[:2] {
			o.mustShare(0, upTo(0, mib))
			o.recalls()
		}
		h.restart()
		for _, o := range w {
			o.connect()
			o.open(o.id)
			must[metarpc.Empty](o.client, metarpc.OpReclaimComplete, &metarpc.Empty{})
		}
		w[2].mustHave(0, all)
		w[0].wantRecalls(all)
		w[1].wantRecalls(all)
	})
}

// TestRangesPassed has a client's kernel write a file by itself: nothing of that can be taken back, so whoever else writes the file shares all of
// it, until the kernel has closed it.
func TestRangesPassed(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w := rangeWriters(t, h, 1, 2)
		a, b := w[0], w[1]
		defer renewing(a.client)()
		defer renewing(b.client)()
		b.mustHave(5*mib, all)
		var l metarpc.LayoutResult
		for {
			r, err := ask[metarpc.LayoutResult](a.client, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{
				ID: a.id, IOMode: layout.IOModeRW, Len: layout.ToEOF, Pin: metarpc.PinOnly, Near: []layout.DeviceID{{1}}})
			if statusOf(err) != metarpc.StatusLayoutUnavailable {
				if err != nil || len(r.Pinned.Handle) == 0 {
					t.Fatalf("pinned %v, %v", r, err)
				}
				l = r
				break
			}
		}
		b.wantRecalls(all)
		if !l.Segments[0].Shared {
			t.Error("what another client has written is the kernel's alone")
		}
		b.mustShare(7*mib, all)
		a.wantRecalls()
		b.mustShare(0, all)
		time.Sleep(3 * sharedTime)
		b.wantRecalls()
		must[metarpc.Empty](a.client, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{a.id}})
		time.Sleep(3 * sharedTime)
		b.wantRecalls(all)
		b.mustHave(0, all)
	})
}
