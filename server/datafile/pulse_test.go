package datafile

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
)

// TestPulse harms a data server and its file system: the device is down within seconds, and up again when a write was
// answered.
func TestPulse(t *testing.T) {
	for _, c := range []struct {
		name, problem string
		begin, end    func(*world)
	}{
		{"silent", "no answer", func(w *world) { w.exports[0].SetDown(true) }, func(w *world) { w.exports[0].SetDown(false) }},
		{"frozen", "does not answer", func(w *world) { w.exports[0].SetFrozen(true) }, func(w *world) { w.exports[0].SetFrozen(false) }},
		{"failing", "NFS3ERR_IO", func(w *world) { w.exports[0].SetSick(nfs3.ErrIO) }, func(w *world) { w.exports[0].SetSick(nil) }},
		{"refused", "refused", func(w *world) {
			w.net.SetHook(func(_ context.Context, call string, _ bool) error {
				if call == "NULL" {
					return syscall.ECONNREFUSED
				}
				return nil
			})
		}, func(w *world) { w.net.SetHook(nil) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1)
				calm()
				c.begin(w)
				time.Sleep(8 * time.Second)
				if info := w.m.Devices(t.Context())[0]; info.Reachable || !strings.Contains(info.Problem, c.problem) {
					t.Errorf("after 8 s: %+v", info)
				}
				time.Sleep(time.Hour)
				if info := w.m.Devices(t.Context())[0]; info.Reachable {
					t.Errorf("after an hour: %+v", info)
				}
				c.end(w)
				time.Sleep(lastWait + time.Second)
				if info := w.m.Devices(t.Context())[0]; !info.Reachable || info.Problem != "" {
					t.Errorf("well again: %+v", info)
				}
				calm()
				w.check()
			})
		})
	}
}

// TestOneMiss: one probe without an answer does not make a device down, nor does one pulse that fails.
func TestOneMiss(t *testing.T) {
	for _, call := range []string{"NULL", "WRITE"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 1)
			calm()
			var missed atomic.Bool
			w.net.SetHook(func(ctx context.Context, name string, _ bool) error {
				if name != call || missed.Swap(true) {
					return nil
				}
				if call == "WRITE" {
					return nfs3.ErrIO
				}
				<-ctx.Done()
				return ctx.Err()
			})
			for range 200 {
				time.Sleep(100 * time.Millisecond)
				if info := w.m.Devices(t.Context())[0]; !info.Reachable {
					t.Fatalf("%s: %+v", call, info)
				}
			}
			if !missed.Load() {
				t.Errorf("no %s", call)
			}
		})
	}
}

// TestFewPulses: pulses that fail become rare.
func TestFewPulses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		calm()
		var pulses atomic.Int64
		w.net.SetHook(func(_ context.Context, name string, _ bool) error {
			switch name {
			case "WRITE":
				pulses.Add(1)
				return nfs3.ErrIO
			case "FSSTAT":
				return nfs3.ErrIO
			}
			return nil
		})
		time.Sleep(time.Hour)
		if n, most := pulses.Load(), int64(time.Hour/lastWait)+3; n < most/2 || n > most {
			t.Errorf("%d pulses in an hour, want %d at most", n, most)
		}
	})
}

// TestPulseMoved: what pulses have said at a device's old address says nothing of the new one.
func TestPulseMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.exports[0].SetSick(nfs3.ErrIO)
		time.Sleep(time.Minute)
		w.exports[0].Move("10.0.1.1:2049")
		w.exports[0].SetSick(nil)
		if info, err := w.m.AddDevice(t.Context(), w.exports[0].URL(), false); err != nil || !info.Reachable {
			t.Errorf("%+v, %v", info, err)
		}
	})
}

// TestPulseAfterSilence: a data server that answers again, on a file system that is frozen by then, is not up before
// that takes a write.
func TestPulseAfterSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.exports[0].SetDown(true)
		time.Sleep(10 * time.Second)
		w.exports[0].SetFrozen(true)
		w.exports[0].SetDown(false)
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			if w.m.Devices(t.Context())[0].Reachable {
				t.Fatal("up without having taken a write")
			}
		}
		w.exports[0].SetFrozen(false)
		time.Sleep(time.Second)
		if info := w.m.Devices(t.Context())[0]; !info.Reachable {
			t.Errorf("%+v", info)
		}
	})
}

// TestNotWritable: a device that is read-only or full is up, and gets no new data files.
func TestNotWritable(t *testing.T) {
	for _, status := range []nfs3.Status{nfs3.ErrROFS, nfs3.ErrNoSpc} {
		t.Run(status.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1)
				row := w.file(5, layout.Policy{}, 10)
				calm()
				w.exports[0].SetSick(status)
				time.Sleep(pulsePeriod + probePeriod)
				if info := w.m.Devices(t.Context())[0]; !info.Reachable || !strings.Contains(info.Problem, "not writable") {
					t.Errorf("%+v", info)
				}
				_, err := w.m.Assign(t.Context(), 6, w.inode(6, layout.Policy{}), 0, 1, session, false, nil, nil)
				if full := errors.Is(err, ErrNoSpace); err == nil || full != (status == nfs3.ErrNoSpc) {
					t.Errorf("a new file: %v", err)
				}
				if err := w.m.Truncate(t.Context(), row, 0); err != nil {
					t.Errorf("a cut: %v", err)
				}
				time.Sleep(time.Hour)
				w.exports[0].SetSick(nil)
				if status == nfs3.ErrNoSpc {
					w.exports[0].SetSpace(1<<40, 1<<40, false) // there is more than before
					time.Sleep(refresh + 2*probePeriod)
				} else {
					time.Sleep(lastWait + probePeriod)
				}
				if info := w.m.Devices(t.Context())[0]; !info.Reachable || info.Problem != "" {
					t.Errorf("well again: %+v", info)
				}
				w.file(7, layout.Policy{}, 10)
				calm()
				w.check()
			})
		})
	}
}
