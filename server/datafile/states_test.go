package datafile

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/storetest"
)

// news returns what is told to somebody who knows what there was up to an epoch, nil if nothing is within two seconds.
func (w *world) news(epoch uint64) *metarpc.DeviceStatesArgs {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Second)
	defer cancel()
	states, err := w.m.DeviceStates(ctx, epoch)
	if err != nil && ctx.Err() == nil {
		w.t.Fatal(err)
	}
	return states
}

// TestDeviceStates: who waits for news is told when a device goes down, why, and when that is over.
func TestDeviceStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 3)
		calm()
		if states := w.news(0); states != nil {
			t.Fatalf("all are up: %+v", states)
		}
		var epoch uint64
		var prober [16]byte
		step := func(what string, f func(), want ...bool) { // of each device that is down, whether it is silent
			t.Helper()
			f()
			time.Sleep(lastWait + 5*time.Second)
			states := w.news(epoch)
			if states == nil || states.Epoch <= epoch || len(states.Down) != len(want) || epoch > 0 && states.Prober != prober {
				t.Fatalf("%s: %+v", what, states)
			}
			for i, silent := range want {
				if d := states.Down[i]; d.Silent != silent || d.For <= 0 || d.For > int64(time.Hour) {
					t.Errorf("%s: %+v", what, states)
				}
			}
			if epoch, prober = states.Epoch, states.Prober; w.news(epoch) != nil {
				t.Errorf("%s: told twice", what)
			}
		}
		var byID []*storetest.Export // as they are told
		for _, d := range w.m.all() {
			i := slices.IndexFunc(w.exports, func(e *storetest.Export) bool { return e.URL() == d.url().String() })
			byID = append(byID, w.exports[i])
		}
		a, b := byID[0], byID[1]
		step("silent", func() { a.SetDown(true) }, true)
		step("two", func() { b.SetFrozen(true) }, true, false)
		step("the first is frozen as well", func() { a.SetFrozen(true); a.SetDown(false) }, false, false)
		step("one", func() { a.SetFrozen(false) }, false)
		step("none", func() { b.SetFrozen(false) })
		step("moved while it is down", func() {
			a.SetDown(true)
			time.Sleep(10 * time.Second)
			a.Move("10.0.1.1:2049")
			a.SetDown(false)
			if _, err := w.m.AddDevice(t.Context(), a.URL(), false); err != nil {
				t.Error(err)
			}
		})
	})
}

// TestPartialPartition: a complaint has the device looked at, at once; it counts if the device answers, until it is
// taken back, not repeated, or forgotten.
func TestPartialPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		d := w.device(0)
		var nulls, pulses atomic.Int64
		w.net.SetHook(func(_ context.Context, call string, done bool) error {
			switch {
			case done:
			case call == "NULL":
				nulls.Add(1)
			case call == "WRITE":
				pulses.Add(1)
			}
			return nil
		})
		one, two := metarpc.SessionID{1}, metarpc.SessionID{2}
		complaints := func() uint32 {
			t.Helper()
			return w.m.Devices(t.Context())[0].Complaints
		}
		expect := func(what string, want uint32) {
			t.Helper()
			if got := complaints(); got != want {
				t.Errorf("%s: %d complaints, want %d", what, got, want)
			}
		}
		time.Sleep(probePeriod / 2) // it is not time for a probe
		nulls.Store(0)
		pulses.Store(0)
		w.m.Complain(one, []layout.DeviceID{d.id, {99}})
		expect("before it has answered", 0)
		synctest.Wait()
		if nulls.Load() != 1 || pulses.Load() != 1 {
			t.Errorf("%d probes and %d pulses, want one of each", nulls.Load(), pulses.Load())
		}
		time.Sleep(time.Nanosecond)
		w.m.Complain(two, []layout.DeviceID{d.id})
		synctest.Wait()
		if nulls.Load() != 1 {
			t.Error("probed again at once")
		}
		time.Sleep(2 * pulsePeriod)
		expect("two", 2)
		w.m.Complain(two, nil)
		expect("one was taken back", 1)
		time.Sleep(metarpc.ReportLifetime / 2)
		w.m.Complain(one, []layout.DeviceID{d.id})
		time.Sleep(metarpc.ReportLifetime * 3 / 4)
		expect("repeated", 1)
		time.Sleep(metarpc.ReportLifetime / 4)
		expect("not repeated", 0)
		w.m.Complain(one, []layout.DeviceID{d.id})
		time.Sleep(2 * pulsePeriod)
		expect("again", 1)
		w.m.Forget(one)
		expect("forgotten", 0)
		if n := len(d.complaints); n > 0 {
			t.Errorf("%d are remembered", n)
		}

		// What the service finds itself is no longer a complaint.
		w.net.SetHook(nil)
		w.exports[0].SetSick(nfs3.ErrIO)
		w.m.Complain(one, []layout.DeviceID{d.id})
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			expect("failing", 0)
		}
	})
}
