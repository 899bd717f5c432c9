package metaclient

import (
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// What was done at devices is reported once, and nothing is where nothing was.
func TestUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var mu sync.Mutex // guards what follows
		var reports []*metarpc.LayoutStatsArgs
		refused := metarpc.StatusOK
		var usage []metarpc.DeviceStats
		hangUp := false
		s.handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			mu.Lock()
			defer mu.Unlock()
			if op != metarpc.OpLayoutStats {
				return metarpc.StatusOK, nil
			}
			reports = append(reports, args.(*metarpc.LayoutStatsArgs))
			return refused, nil
		}
		s.cut = func(_ string, op metarpc.Op) bool {
			mu.Lock()
			defer mu.Unlock()
			cut := hangUp && op == metarpc.OpLayoutStats
			hangUp = hangUp && !cut
			return cut
		}
		connected(t, s, Config{UsagePeriod: 10 * time.Second, Usage: func() []metarpc.DeviceStats {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(usage)
		}})
		// after lets a period pass in which the totals become those, and wants the reports.
		after := func(what string, totals []metarpc.DeviceStats, want ...*metarpc.LayoutStatsArgs) {
			t.Helper()
			mu.Lock()
			usage, reports = totals, nil
			mu.Unlock()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !reflect.DeepEqual(reports, want) {
				t.Errorf("%s: reported %+v, want %+v", what, reports, want)
			}
		}
		report := func(devices ...metarpc.DeviceStats) *metarpc.LayoutStatsArgs {
			return &metarpc.LayoutStatsArgs{Span: int64(10 * time.Second), Devices: devices}
		}
		io := func(ops uint64) metarpc.IOStats {
			return metarpc.IOStats{Ops: ops, Bytes: 10 * ops, Time: int64(100 * ops)}
		}
		a, b := layout.DeviceID{1}, layout.DeviceID{2}

		after("nothing", nil)
		after("nothing but connections", []metarpc.DeviceStats{{Device: a}})
		first := []metarpc.DeviceStats{{Device: a, Reads: io(5), Writes: io(1)}, {Device: b}}
		after("the first requests", first, report(first[0]))
		after("nothing more", first)
		second := []metarpc.DeviceStats{{Device: a, Reads: io(5), Writes: io(4)}, {Device: b, Reads: io(7)}}
		after("some more", second, report(metarpc.DeviceStats{Device: a, Writes: io(3)}, metarpc.DeviceStats{Device: b, Reads: io(7)}))
		second[0].Outstanding = 9
		after("one that does not answer", second, report(metarpc.DeviceStats{Device: a, Outstanding: 9}))
		second[0].Outstanding = 0

		// A report that was refused is not made again; one that a lost connection took is.
		second[1].Reads, refused = io(8), metarpc.StatusInternal
		after("refused", second, report(metarpc.DeviceStats{Device: b, Reads: io(1)}))
		refused = metarpc.StatusOK
		after("after a refusal", second)
		many := second
		for i := range metarpc.MaxBatch {
			many = append(many, metarpc.DeviceStats{Device: layout.DeviceID{3, byte(i), byte(i >> 8)}, Reads: io(2)})
		}
		many[1].Reads, hangUp = io(9), true
		after("a connection that is lost, and more devices than fit", many)
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		if len(reports) != 2 || len(reports[0].Devices) != metarpc.MaxBatch || len(reports[1].Devices) != 1 {
			t.Errorf("%d reports of %d devices", len(reports), metarpc.MaxBatch+1)
		}
		if got := reports[0].Devices[0]; got != (metarpc.DeviceStats{Device: b, Reads: io(1)}) {
			t.Errorf("reported %+v", got)
		}
	})
}
