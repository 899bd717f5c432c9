package metaclient

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// reportPause is the shortest time between two reports of devices that do not answer.
const reportPause = time.Second

// downTable is which devices are down as services have said, each on the connection that a session has.
type downTable struct {
	mu   sync.Mutex
	told map[int]toldDown // by shard
}

type toldDown struct {
	states *metarpc.DeviceStatesArgs
	at     time.Time
}

// setDown takes in what a session was told; nil: its connection is lost. Whoever reads the connection calls it.
func (v *Volume) setDown(shard int, states *metarpc.DeviceStatesArgs) {
	t := &v.down
	t.mu.Lock()
	defer t.mu.Unlock()
	_, was := t.told[shard]
	switch {
	case states != nil:
		if t.told == nil {
			t.told = map[int]toldDown{}
		}
		t.told[shard] = toldDown{states, time.Now()}
	case !was:
		return
	default:
		delete(t.told, shard)
	}
	if v.cfg.OnDown != nil {
		v.cfg.OnDown(t.all(time.Now()))
	}
}

// TellDown calls Config.OnDown with what is known now, for a user who could not take it before.
func (v *Volume) TellDown() {
	v.down.mu.Lock()
	defer v.down.mu.Unlock()
	v.cfg.OnDown(v.down.all(time.Now()))
}

// all is which devices are down as any prober has said last; mu is held.
func (t *downTable) all(now time.Time) []metarpc.DownDevice {
	newest := map[[16]byte]toldDown{} // the sessions at one service need not have been told of a change at the same time
	for _, told := range t.told {
		if last, ok := newest[told.states.Prober]; !ok || told.states.Epoch > last.states.Epoch {
			newest[told.states.Prober] = told
		}
	}
	down := map[layout.DeviceID]metarpc.DownDevice{}
	for _, told := range newest {
		for _, d := range told.states.Down {
			d.For += int64(now.Sub(told.at))
			if other, ok := down[d.Device]; ok {
				d.Silent, d.For = d.Silent || other.Silent, min(d.For, other.For)
			}
			down[d.Device] = d
		}
	}
	list := make([]metarpc.DownDevice, 0, len(down))
	for _, d := range down {
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b metarpc.DownDevice) int { return bytes.Compare(a.Device[:], b.Device[:]) })
	return list
}

// says reports whether the session of a shard was told that a device is down.
func (t *downTable) says(shard int, id layout.DeviceID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	told, ok := t.told[shard]
	return ok && slices.ContainsFunc(told.states.Down, func(d metarpc.DownDevice) bool { return d.Device == id })
}

// ReportDown has the services told soon which devices do not answer (Config.Down). It does not wait.
func (v *Volume) ReportDown() {
	select {
	case v.report <- struct{}{}:
	default:
	}
}

// reportDown tells services of devices that do not answer: at once when ReportDown is called, and as long as there are
// some. It ends with v.ctx.
func (v *Volume) reportDown() {
	reported := map[*Client]bool{} // in whose sessions the last report named some
	for {
		t := time.NewTimer(metarpc.ReportPeriod)
		select {
		case <-v.ctx.Done():
			t.Stop()
			return
		case <-v.report:
			t.Stop()
		case <-t.C:
		}
		var sent bool
		if reported, sent = v.reportAll(v.cfg.Down(), reported); sent && !sleep(v.ctx, reportPause) {
			return
		}
	}
}

// reportAll sends one report to each service. It leaves out the devices that the service itself has called down. A
// service gets no empty report, unless the report before named devices.
func (v *Volume) reportAll(silent []layout.DeviceID, reported map[*Client]bool) (now map[*Client]bool, sent bool) {
	ctx, cancel := context.WithTimeout(v.ctx, metarpc.ReportPeriod)
	defer cancel()
	now = map[*Client]bool{}
	asked := map[string]bool{}
	var calls sync.WaitGroup
	for _, c := range v.all() {
		at, ok := c.takes(metarpc.OpReportDevices)
		if !ok || asked[at] {
			continue
		}
		asked[at] = true
		args := &metarpc.ReportDevicesArgs{}
		for _, id := range silent {
			if len(args.Devices) < metarpc.MaxBatch && !v.down.says(c.shard, id) {
				args.Devices = append(args.Devices, id)
			}
		}
		now[c] = len(args.Devices) > 0
		if !now[c] && !reported[c] {
			continue
		}
		sent = true
		calls.Go(func() { // ends with the answer, or ctx
			if err := c.do(ctx, metarpc.OpReportDevices, metarpc.Cred{}, args, nil, nil); err != nil && ctx.Err() == nil {
				v.log.Warn("metadata service: report of data servers that do not answer", "err", err)
			}
		})
	}
	calls.Wait()
	return now, sent
}

// takes returns the address of the service that the session is connected to, if that knows a call.
func (c *Client) takes(op metarpc.Op) (at string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil || !opIn(op, c.conn.welcome.Version) {
		return "", false
	}
	return c.conn.addr, true
}
