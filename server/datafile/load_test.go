package datafile

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// report says that a client had so many requests under way at a device, on average, in the last minute.
func (w *world) report(session metarpc.SessionID, i int, mean float64) {
	w.m.Report(session, time.Minute, []metarpc.DeviceStats{{
		Device: w.device(i).id, Writes: metarpc.IOStats{Ops: 1, Time: int64(mean * float64(time.Minute))},
	}})
}

// load is what people are told of a device's load.
func (w *world) load(i int) float64 {
	return float64(w.m.Devices(w.t.Context())[w.index(i)].Load) / 1000
}

// index is the place of a device in the order of ids.
func (w *world) index(i int) int {
	for n, d := range w.m.all() {
		if d == w.device(i) {
			return n
		}
	}
	return -1
}

func TestLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		one, two := metarpc.SessionID{1}, metarpc.SessionID{2}
		check := func(what string, want float64) {
			t.Helper()
			time.Sleep(refresh) // until it has been added up
			synctest.Wait()
			if got := w.load(0); math.Abs(got-want) > 0.1*want+0.01 {
				t.Errorf("%s: load %v, want about %v", what, got, want)
			}
			if got := w.load(1); got != 0 {
				t.Errorf("%s: the other device has a load of %v", what, got)
			}
		}
		check("before anything", 0)
		w.report(one, 0, 8)
		w.report(two, 0, 4)
		check("two clients", 12)
		time.Sleep(time.Minute - refresh)
		w.report(one, 0, 2) // the mean with 8
		check("less of one", 9)
		time.Sleep(2*time.Minute - 2*refresh)
		check("none of either for two minutes more", 4.0/4+5.0/2)
		w.m.Forget(one)
		check("one has gone", 4.0/4)
		time.Sleep(10 * time.Minute)
		check("long after", 0)
		if n := len(w.device(0).loads); n != 0 {
			t.Errorf("%d clients are remembered", n)
		}
		// A device that answers nothing is as busy as what waits for it.
		w.m.Report(one, time.Minute, []metarpc.DeviceStats{{Device: w.device(0).id, Outstanding: 30}, {Device: layout.DeviceID{99}}})
		check("one that does not answer", 30)
		// A client that says to speak of a day is not believed for that long.
		w.m.Report(two, 24*time.Hour, []metarpc.DeviceStats{{Device: w.device(0).id, Reads: metarpc.IOStats{Ops: 1, Time: math.MaxInt64}}})
		time.Sleep((forgetLoad + 2) * maxSpan)
		check("after a report of a day", 0)
	})
}

// placed makes files of one data file each and counts them by export.
func (w *world) placed(files int) []int {
	w.t.Helper()
	on := make([]int, len(w.exports))
	for n := range files {
		row := w.file(layout.FileID(1000+n), layout.Policy{StripeCount: 1}, 1)
		for i := range w.exports {
			if w.device(i).id == row.Mirrors[0][0].Device {
				on[i]++
			}
		}
		synctest.Wait() // pools are full again
		w.remove(layout.FileID(1000 + n))
	}
	return on
}

// New files go where there is clearly less to do and clearly more space free, and everywhere in turn if there is no clear difference.
func TestPlaceByLoadAndSpace(t *testing.T) {
	const tib = 1 << 40
	type device struct {
		load        float64
		total, free uint64
	}
	idle := device{0, tib, tib / 2}
	with := func(load float64, total, free uint64) device { return device{load, total, free} }
	for name, c := range map[string]struct {
		devices []device
		avoided []int
	}{
		"equal":                    {[]device{idle, idle, idle, idle}, nil},
		"a busy one":               {[]device{idle, with(9, tib, tib/2), idle, idle}, []int{1}},
		"all busy":                 {[]device{with(9, tib, tib/2), with(12, tib, tib/2), with(17, tib, tib/2)}, nil},
		"one is clearly busier":    {[]device{with(9, tib, tib/2), with(30, tib, tib/2), with(17, tib, tib/2)}, []int{1}},
		"hardly anything to do":    {[]device{with(0.9, tib, tib/2), idle, idle}, nil},
		"one is nearly full":       {[]device{idle, idle, with(0, tib, tib/10)}, []int{2}},
		"it is the share":          {[]device{with(0, 10*tib, 5*tib), with(0, tib, tib/2), with(0, tib/10, tib/25)}, nil},
		"a new one that is empty":  {[]device{with(0, tib, tib/5), with(0, tib, tib), with(0, tib, tib/5)}, []int{0, 2}},
		"a new one that is busy":   {[]device{with(0, tib, tib/5), with(50, tib, tib), with(0, tib, tib/5)}, nil},
		"both":                     {[]device{idle, with(9, tib, tib/10), with(9, tib, tib/2), with(0, tib, tib/10)}, []int{1, 2, 3}},
		"one says nothing of size": {[]device{idle, with(0, 0, 0), with(0, tib, tib/10)}, []int{2}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, len(c.devices))
				for i, d := range c.devices {
					w.exports[i].SetSpace(d.total, d.free, false)
					w.report(session, i, d.load)
				}
				time.Sleep(2 * refresh)
				synctest.Wait()
				const files = 60
				avoided := map[int]bool{}
				for _, i := range c.avoided {
					avoided[i] = true
				}
				// In turn means by a hash: an even share is allowed to vary by half.
				share := files / (len(c.devices) - len(avoided))
				on := w.placed(files)
				for i, n := range on {
					if avoided[i] != (n == 0) || !avoided[i] && (n < share/2 || n > share*3/2) {
						t.Errorf("files on the devices: %v, avoided should be %v", on, c.avoided)
						break
					}
				}
			})
		})
	}
}

// What a layout needs comes before what would be nice: mirrors stay on different devices, and a wide file uses all.
func TestPlaceDespiteLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		for i := range 3 {
			w.report(session, i, 20)
		}
		time.Sleep(2 * refresh)
		synctest.Wait()
		for id := layout.FileID(10); id < 20; id++ {
			row := w.file(id, layout.Policy{StripeCount: 2, Mirrors: 2}, 1<<30)
			used := map[layout.DeviceID]bool{}
			for _, files := range row.Mirrors {
				for _, f := range files {
					used[f.Device] = true
				}
			}
			if len(used) != 4 {
				t.Errorf("file %d has its four data files on %d devices", id, len(used))
			}
			row = w.file(id+100, layout.Policy{StripeCount: 1, Mirrors: 2}, 1)
			idle := w.device(3).id
			a, b := row.Mirrors[0][0].Device, row.Mirrors[1][0].Device
			if a == b || a != idle && b != idle {
				t.Errorf("file %d has its copies on %v and %v, where %v is idle", id+100, a, b, idle)
			}
			synctest.Wait()
		}
		calm()
		w.check()
	})
}
