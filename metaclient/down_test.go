package metaclient

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

var devA, devB = layout.DeviceID{1}, layout.DeviceID{2}

// downs remembers what Config.OnDown was told.
type downs struct {
	mu   sync.Mutex
	told [][]metarpc.DownDevice
}

func (d *downs) on(down []metarpc.DownDevice) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.told = append(d.told, down)
}

// expect holds what was told since the last call.
func (d *downs) expect(t *testing.T, what string, want ...[]metarpc.DownDevice) {
	t.Helper()
	synctest.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.EqualFunc(d.told, want, slices.Equal) {
		t.Errorf("%s: told %v, want %v", what, d.told, want)
	}
	d.told = nil
}

// tellStates tells every client which devices are down.
func (s *service) tellStates(t *testing.T, prober byte, epoch uint64, down ...metarpc.DownDevice) {
	s.backCall(t, metarpc.BackHeader{Number: epoch, Op: metarpc.BackDeviceStates},
		&metarpc.DeviceStatesArgs{Prober: [16]byte{prober}, Epoch: epoch, Down: down})
	<-s.backs
}

// The client passes on which devices a service calls down, and forgets it when the connection ends.
func TestDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var d downs
		c := connected(t, s, Config{OnDown: d.on})
		c.v.TellDown()
		d.expect(t, "nothing", nil)
		a := metarpc.DownDevice{Device: devA, Silent: true, For: 5}
		s.tellStates(t, 1, 1, a)
		d.expect(t, "one", []metarpc.DownDevice{a})
		time.Sleep(10 * time.Nanosecond)
		c.v.TellDown()
		d.expect(t, "later", []metarpc.DownDevice{{Device: devA, Silent: true, For: 15}})
		b := metarpc.DownDevice{Device: devB, For: 7}
		s.tellStates(t, 1, 2, a, b)
		d.expect(t, "two", []metarpc.DownDevice{a, b})
		s.tellStates(t, 1, 3)
		d.expect(t, "none", nil)
		s.tellStates(t, 1, 4, b)
		s.hangUp()
		d.expect(t, "no connection", []metarpc.DownDevice{b}, nil)
		time.Sleep(time.Second)
		s.hangUp()
		time.Sleep(time.Second)
		d.expect(t, "connections on which nothing was said")
	})
}

// What several services say is put together; sessions at the same one need not have heard the newest at the same time.
func TestDownOfSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		var d downs
		v := cl.connect(Config{OnDown: d.on})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 1)); err != nil {
				t.Fatal(err)
			}
		}
		down := func(id layout.DeviceID, silent bool, ns int64) metarpc.DownDevice {
			return metarpc.DownDevice{Device: id, Silent: silent, For: ns}
		}
		all := func(down ...metarpc.DownDevice) []metarpc.DownDevice { return down }
		say := func(shard int, prober byte, epoch uint64, down ...metarpc.DownDevice) {
			cl.parts[shard].tellStates(t, prober, epoch, down...)
		}
		say(0, 1, 1, down(devA, true, 5))
		d.expect(t, "a first word", all(down(devA, true, 5)))
		say(1, 1, 2) // the same prober, newer
		d.expect(t, "it is up", nil)
		say(2, 7, 1, down(devA, false, 9), down(devB, false, 1))
		d.expect(t, "another prober", all(down(devA, false, 9), down(devB, false, 1)))
		say(0, 1, 3, down(devA, true, 20))
		d.expect(t, "both", all(down(devA, true, 9), down(devB, false, 1)))
		cl.parts[2].hangUp()
		synctest.Wait()
		d.expect(t, "one is away", all(down(devA, true, 20)))
	})
}

// A device that does not answer is reported at once and again and again, to each service that has not said so itself,
// and taken back at the end.
func TestReportDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var mu sync.Mutex
		var silent []layout.DeviceID
		reports := map[time.Duration][]layout.DeviceID{}
		began := time.Now()
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if a, ok := args.(*metarpc.ReportDevicesArgs); ok {
				mu.Lock()
				defer mu.Unlock()
				reports[time.Since(began)] = a.Devices
			}
			return metarpc.StatusOK, nil
		}
		c := connected(t, s, Config{Down: func() []layout.DeviceID {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(silent)
		}})
		set := func(ids ...layout.DeviceID) {
			mu.Lock()
			silent, reports, began = ids, map[time.Duration][]layout.DeviceID{}, time.Now()
			mu.Unlock()
			c.v.ReportDown()
		}
		expect := func(what string, want map[time.Duration][]layout.DeviceID) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !reflect.DeepEqual(reports, want) {
				t.Errorf("%s: %v, want %v", what, reports, want)
			}
		}
		type at = map[time.Duration][]layout.DeviceID
		const round = reportPause + metarpc.ReportPeriod
		set()
		time.Sleep(time.Minute + time.Second)
		expect("nothing", at{})
		set(devA)
		time.Sleep(2 * round)
		expect("one", at{0: {devA}, round: {devA}, 2 * round: {devA}})
		time.Sleep(2 * time.Second)
		set(devA, devB)
		time.Sleep(time.Millisecond)
		c.v.ReportDown()
		c.v.ReportDown()
		time.Sleep(reportPause)
		expect("two, and a hurry", at{0: {devA, devB}, reportPause: {devA, devB}})
		time.Sleep(2 * time.Second)
		s.tellStates(t, 1, 1, metarpc.DownDevice{Device: devA})
		set(devA, devB)
		time.Sleep(2 * time.Second)
		expect("the service knows of one", at{0: {devB}})
		set()
		time.Sleep(time.Minute)
		expect("none", at{0: nil})

		// One of an older version is not told.
		s.speak(metarpc.Versions{Lowest: metarpc.Lowest, Highest: 6})
		time.Sleep(10 * time.Second)
		set(devB)
		time.Sleep(time.Minute)
		expect("an older service", at{})
	})
}

// Each service gets one report, whatever sessions there are at it.
func TestReportOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		cl.mu.Lock()
		cl.ring.Epoch, cl.ring.Owners = 2, []int{0, 0, 1}
		cl.mu.Unlock()
		v := cl.connect(Config{Down: func() []layout.DeviceID { return []layout.DeviceID{devA} }})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 1)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * metarpc.ReportPeriod)
		v.ReportDown()
		time.Sleep(time.Second / 2)
		got := fmt.Sprint(cl.parts[0].executed(metarpc.OpReportDevices)+cl.parts[1].executed(metarpc.OpReportDevices), cl.parts[2].executed(metarpc.OpReportDevices))
		if got != "2 2" {
			t.Errorf("reports %s, want two to each service", got)
		}
	})
}
