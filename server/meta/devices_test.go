package meta

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// toldClient remembers which devices it was told of.
type toldClient struct {
	*client
	mu   sync.Mutex
	told [][]layout.DeviceID
	slow chan struct{} // not answered before it is closed; nil: answered at once
}

func (h *host) toldClient(speaks metarpc.Versions) *toldClient {
	c := &toldClient{client: h.newClient()}
	c.hello.Lowest, c.hello.Highest = speaks.Lowest, speaks.Highest
	c.back = func(op metarpc.BackOp, args any) metarpc.Status {
		a, ok := args.(*metarpc.DeviceStatesArgs)
		if !ok {
			return metarpc.StatusOK
		}
		ids := []layout.DeviceID{}
		for _, d := range a.Down {
			ids = append(ids, d.Device)
		}
		c.mu.Lock()
		c.told = append(c.told, ids)
		slow := c.slow
		c.mu.Unlock()
		if slow != nil {
			<-slow
		}
		return metarpc.StatusOK
	}
	c.connect()
	return c
}

// expect holds what it was told since the last call.
func (c *toldClient) expect(what string, want ...[]layout.DeviceID) {
	c.t.Helper()
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.EqualFunc(c.told, want, slices.Equal) {
		c.t.Errorf("%s: told %v, want %v", what, c.told, want)
	}
	c.told = nil
}

// All sessions are told which devices are down, when that changes and when they get a connection. One that is slow is
// told the latest states alone, and one of an older version nothing.
func TestTellDevices(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		one, two, three := layout.DeviceID{1}, layout.DeviceID{2}, layout.DeviceID{3}
		ids := func(ids ...layout.DeviceID) []layout.DeviceID { return ids }
		old := h.toldClient(metarpc.Versions{Lowest: metarpc.Lowest, Highest: 6})
		a, b := h.toldClient(metarpc.Spoken), h.toldClient(metarpc.Spoken)
		a.expect("while none is down")
		h.files.setDown(one)
		a.expect("one is down", ids(one))
		b.expect("one is down", ids(one))

		slow := make(chan struct{})
		b.mu.Lock()
		b.slow = slow
		b.mu.Unlock()
		for _, down := range [][]layout.DeviceID{{one, two}, {two}, {two, three}} {
			h.files.setDown(down...)
			time.Sleep(2 * tellPause)
		}
		a.expect("three changes", ids(one, two), ids(two), ids(two, three))
		b.expect("three changes, not answered", ids(one, two))
		close(slow)
		b.expect("answered", ids(two, three))
		for _, down := range [][]layout.DeviceID{{one}, {two}, nil, {three}} {
			h.files.setDown(down...)
		}
		time.Sleep(2 * tellPause)
		a.expect("four changes at a time", ids(three))

		c := h.toldClient(metarpc.Spoken)
		c.expect("a new session", ids(three))
		a.connect()
		a.expect("another connection", ids(three))
		h.files.setDown()
		time.Sleep(2 * tellPause)
		for _, c := range []*toldClient{a, c} {
			c.expect("all are up", ids())
		}
		h.restart()
		a.connect()
		a.expect("another instance", ids())
		old.connect()
		old.expect("an older version")
		must[metarpc.AttrResult](old.client, metarpc.OpGetAttr, &metarpc.IDArgs{ID: layout.RootID})
	})
}

// What a client reports goes to the devices, until its session ends.
func TestReportDevices(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		must[metarpc.Empty](c, metarpc.OpReportDevices, &metarpc.ReportDevicesArgs{Devices: []layout.DeviceID{{1}, {2}}})
		h.files.mu.Lock()
		if got := h.files.complaints[c.hello.Session]; !slices.Equal(got, []layout.DeviceID{{1}, {2}}) {
			t.Errorf("complaints %v", got)
		}
		h.files.mu.Unlock()
		must[metarpc.Empty](c, metarpc.OpEndSession, &metarpc.Empty{})
		synctest.Wait()
		h.files.mu.Lock()
		defer h.files.mu.Unlock()
		if n := len(h.files.complaints); n > 0 {
			t.Errorf("%d are remembered", n)
		}
	})
}
