package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// onFile is what exports are to a file with two copies, of which the second one is stale.
type onFile struct {
	row         schema.Layout
	good, stale int
	others      []int
}

// degraded makes file 5 with a megabyte or more, and one good copy of two.
func (w *world) degraded(size int) onFile {
	w.t.Helper()
	row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 2}, int64(size))
	w.put(row, 0, bytes.Repeat([]byte("data"), size/4))
	if _, err := w.m.MarkStale(w.t.Context(), 5, refs(row.Mirrors[1][0])); err != nil {
		w.t.Fatal(err)
	}
	of := onFile{row: row}
	for i := range w.exports {
		switch w.device(i).id {
		case row.Mirrors[0][0].Device:
			of.good = i
		case row.Mirrors[1][0].Device:
			of.stale = i
		default:
			of.others = append(of.others, i)
		}
	}
	calm()
	return of
}

// try does what the service does once with file 5, and returns the longest time that a range was closed. tried says
// that there was something to fill.
func (w *world) try(chunk int64) (closed time.Duration, tried bool, err error) {
	w.t.Helper()
	ctx := w.t.Context()
	if can, err := w.m.Fillable(ctx, 5, nil); err != nil || !can {
		return 0, false, err
	}
	gate := func(f func() error) error {
		began := time.Now()
		err := f()
		closed = max(closed, time.Since(began))
		return err
	}
	var row schema.Layout
	var off int64
	err = gate(func() (err error) {
		row, off, err = w.m.StartFill(ctx, 5, nil)
		return err
	})
	if err != nil || len(row.Copies(layout.CopyFilling)) == 0 {
		return closed, true, err
	}
	for end := int64(layout.ToEOF); off < end; {
		err := gate(func() (err error) {
			off, end, err = w.m.Fill(ctx, 5, row, off, chunk, unpaced, never)
			return err
		})
		if e := (*FillError)(nil); errors.As(err, &e) {
			if _, err := w.m.MarkStale(ctx, 5, e.Failed); err != nil {
				w.t.Fatal(err)
			}
		}
		if err != nil {
			return closed, true, err
		}
	}
	_, err = w.m.EndFill(ctx, 5, row)
	return closed, true, err
}

// TestFillAroundHarm harms a device that a new copy may go to, at any time before the filling: that never keeps a
// range closed for more than a second, and the copy is made on another device within seconds.
func TestFillAroundHarm(t *testing.T) {
	harms := map[string]func(w *world, i int){
		"down":   func(w *world, i int) { w.exports[i].SetDown(true) },
		"frozen": func(w *world, i int) { w.exports[i].SetFrozen(true) },
		"sick":   func(w *world, i int) { w.exports[i].SetSick(nfs3.ErrIO) },
		"stuck":  func(w *world, i int) { w.exports[i].SetStuck(true) },
	}
	for name, harm := range harms {
		for after := time.Duration(0); after < 6*time.Second; after += 700 * time.Millisecond {
			t.Run(fmt.Sprint(name, after), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, 4)
					of := w.degraded(4 << 20)
					harmed := []int{of.others[0], of.stale} // whichever of the two is chosen first
					for _, i := range harmed {
						harm(w, i)
					}
					began := time.Now()
					time.Sleep(after)
					for w.hasFill(5) {
						closed, _, err := w.try(1 << 20)
						if closed > fillPatience {
							t.Errorf("a range was closed for %v: %v", closed, err)
						}
						time.Sleep(100 * time.Millisecond)
						if time.Since(began) > time.Minute {
							t.Fatalf("not full after a minute: %v", err)
						}
					}
					if took := time.Since(began) - after; took > 4*time.Second {
						t.Errorf("full after %v", took)
					}
					row := w.layoutOf(5)
					if got := row.Mirrors[1][0].Device; got != w.device(of.others[1]).id {
						t.Errorf("the new copy is on device %v", got)
					}
					w.equalCopies(row)
				})
			})
		}
	}
}

// TestFillNotMet: a device that was not looked at since the start is neither copied from nor to.
func TestFillNotMet(t *testing.T) {
	for _, harmed := range []string{"source", "targets"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 3)
			of := w.degraded(1 << 20)
			for _, i := range append(of.others, of.stale) {
				w.exports[i].SetDown(harmed == "targets")
			}
			w.exports[of.good].SetDown(harmed == "source")
			w.restart()
			for range 50 {
				if can, err := w.m.Fillable(t.Context(), 5, nil); can || err != nil {
					t.Errorf("without its %s: fillable %v, %v", harmed, can, err)
				}
				time.Sleep(100 * time.Millisecond)
			}
			for _, e := range w.exports {
				e.SetDown(false)
			}
			time.Sleep(lastWait + time.Second)
			if _, _, err := w.try(1 << 20); err != nil || w.hasFill(5) {
				t.Errorf("with all back: %v", err)
			}
		})
	}
}

// TestFillEndsWithDevice has a fill end at once when its device goes down. It goes on where it was when the device is
// back.
func TestFillEndsWithDevice(t *testing.T) {
	for _, which := range []string{"source", "target"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 3)
			of := w.degraded(4 << 20)
			for _, i := range of.others { // there is one place
				w.exports[i].SetDown(true)
			}
			time.Sleep(10*time.Second + probePeriod/2)
			row, _, err := w.m.StartFill(t.Context(), 5, nil)
			if err == nil {
				_, _, err = w.m.Fill(t.Context(), 5, row, 0, 1<<20, unpaced, never)
			}
			if err != nil {
				t.Fatal(err)
			}
			at := of.good
			if which == "target" {
				at = of.stale
			}
			w.exports[at].SetStuck(true)
			w.net.SetHook(func(_ context.Context, call string, _ bool) error {
				if call == "NULL" {
					return syscall.ECONNREFUSED
				}
				return nil
			})
			began := time.Now()
			_, _, err = w.m.Fill(t.Context(), 5, row, 1<<20, 1<<20, unpaced, never)
			if e := (*FillError)(nil); err == nil || errors.As(err, &e) {
				t.Errorf("%s: %v", which, err)
			}
			if took := time.Since(began); took > probePeriod/2+10*time.Millisecond {
				t.Errorf("%s: it ended after %v", which, took)
			}
			w.net.SetHook(nil)
			w.exports[at].SetStuck(false)
			time.Sleep(lastWait + fillAgain)
			if _, done, err := w.m.StartFill(t.Context(), 5, nil); err != nil || done != 1<<20 {
				t.Errorf("%s: it goes on at %d, %v", which, done, err)
			}
			if _, _, err := w.try(1 << 20); err != nil || w.hasFill(5) {
				t.Errorf("%s: %v", which, err)
			}
			w.equalCopies(w.layoutOf(5))
		})
	}
}

// TestFillBackOff: a device that is up, but on which fills fail, is tried again later and later, and as before when
// one has gone well.
func TestFillBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		of := w.degraded(1 << 20)
		for _, i := range of.others {
			w.exports[i].SetDown(true)
		}
		time.Sleep(10 * time.Second)
		w.exports[of.stale].SetStuck(true)
		tries := func(d time.Duration) (at []time.Duration) {
			for began := time.Now(); time.Since(began) < d; time.Sleep(time.Second) {
				if _, tried, err := w.try(1 << 20); tried {
					at = append(at, time.Since(began).Round(time.Second))
					if err == nil {
						break
					}
				}
			}
			return at
		}
		at := tries(time.Hour)
		if n, most := len(at), int(time.Hour/mostFillAgain)+8; n < most/2 || n > most {
			t.Errorf("%d tries in an hour, at %v", n, at)
		}
		for i := range len(at) - 2 {
			if at[i+2]-at[i+1] < at[i+1]-at[i]-2*time.Second {
				t.Errorf("tried at %v", at)
				break
			}
		}
		w.exports[of.stale].SetStuck(false)
		tries(time.Hour)
		if w.hasFill(5) {
			t.Error("it is well, and nothing is filled")
		}
		if d := w.device(of.stale); d.fillWait != 0 {
			t.Errorf("it is well, and would be left for %v", d.fillWait)
		}
	})
}

// TestFillOtherSource: a copy that cannot be read is left for another one within the second.
func TestFillOtherSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 3}, 1<<20)
		w.put(row, 0, bytes.Repeat([]byte("data"), 1<<18))
		if _, err := w.m.MarkStale(t.Context(), 5, refs(row.Mirrors[2][0])); err != nil {
			t.Fatal(err)
		}
		calm()
		for i := range w.exports {
			if w.device(i).id == row.Mirrors[0][0].Device {
				w.exports[i].SetStuck(true)
			}
		}
		closed, _, err := w.try(1 << 20)
		if err != nil || closed > fillPatience || w.hasFill(5) {
			t.Errorf("%v, a range was closed for %v", err, closed)
		}
		w.equalCopies(w.layoutOf(5))
	})
}

// TestFillSlow: a copy on a device that is late now and then gets on, and is not begun anew.
func TestFillSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		of := w.degraded(16 << 20)
		for _, i := range of.others {
			w.exports[i].SetDown(true)
		}
		time.Sleep(10 * time.Second)
		writes, number := 0, uint64(0)
		w.net.SetHook(func(ctx context.Context, call string, _ bool) error {
			if call == "WRITE" && ctx.Value(slowKey{}) != nil {
				if writes++; writes%10 == 0 {
					<-ctx.Done()
					return ctx.Err()
				}
			}
			return nil
		})
		ctx := context.WithValue(t.Context(), slowKey{}, true)
		fails := 0
		for w.hasFill(5) {
			row, off, err := w.m.StartFill(t.Context(), 5, nil)
			if err != nil {
				t.Fatal(err)
			}
			if is := row.Mirrors[1][0].Number; number == 0 {
				number = is
			} else if is != number {
				t.Fatal("it is begun anew")
			}
			for end := int64(layout.ToEOF); off < end && err == nil; {
				off, end, err = w.m.Fill(ctx, 5, row, off, 64<<20, unpaced, never)
			}
			if e := (*FillError)(nil); errors.As(err, &e) {
				t.Fatalf("it is given up: %v", err)
			}
			if err == nil {
				_, err = w.m.EndFill(t.Context(), 5, row)
			}
			if err != nil {
				if fails++; fails > 10 {
					t.Fatal(err)
				}
				time.Sleep(mostFillAgain)
			}
		}
		if fails == 0 {
			t.Error("it was never late")
		}
		w.equalCopies(w.layoutOf(5))
	})
}

type slowKey struct{}

// TestFillEnough: somebody who waits has a fill end after a block that takes long.
func TestFillEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		w.degraded(8 << 20)
		row, _, err := w.m.StartFill(t.Context(), 5, nil)
		if err != nil {
			t.Fatal(err)
		}
		enough := make(chan struct{})
		close(enough)
		n := 0
		slowly := func(ctx context.Context, _ int) error {
			time.Sleep(2 * fillTurn)
			return nil
		}
		for off, end := int64(0), int64(layout.ToEOF); off < end; n++ {
			was := off
			if off, end, err = w.m.Fill(t.Context(), 5, row, off, 64<<20, slowly, enough); err != nil {
				t.Fatal(err)
			}
			if off-was > fillBlock && off < end {
				t.Fatalf("%d bytes were copied", off-was)
			}
		}
		if n != 8 {
			t.Errorf("in %d parts", n)
		}
		if _, err := w.m.EndFill(t.Context(), 5, row); err != nil {
			t.Fatal(err)
		}
		w.equalCopies(w.layoutOf(5))
	})
}
