package datafile

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
)

// hosts knows hosts by their names.
type hosts struct {
	mu   sync.Mutex
	of   map[string][]netip.AddrPort
	asks int
}

func (h *hosts) resolve(_ context.Context, host string, _ uint16) ([]netip.AddrPort, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asks++
	if len(h.of[host]) == 0 {
		return nil, fmt.Errorf("no host %s", host)
	}
	return slices.Clone(h.of[host]), nil
}

func (h *hosts) asked() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asks
}

func (h *hosts) set(host string, addrs ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of[host] = nil
	for _, addr := range addrs {
		h.of[host] = append(h.of[host], netip.MustParseAddrPort(addr))
	}
}

// TestNamedDevice: clients are told where the host of a data server is, and of each change, once the data server is
// reached there.
func TestNamedDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 0)
		h := &hosts{of: map[string][]netip.AddrPort{}}
		w.resolve = h.resolve
		w.restart()
		e, other := w.export(), w.export()
		h.set("ds", "10.0.0.1:2049")
		h.set("10.0.0.2", "10.0.0.2:2049")
		if _, err := w.m.AddDevice(t.Context(), "nfs://ds:2049/export", false); err != nil {
			t.Fatal(err)
		}
		first := w.m.Devices(t.Context())[0].Device.ID
		var epoch uint64
		step := func(what string, news bool, want ...string) {
			t.Helper()
			time.Sleep(2*lookUpPeriod + lastWait)
			for _, info := range w.m.Devices(t.Context()) {
				slices.Sort(info.Device.Addrs)
				if info.Device.ID == first && (!info.Reachable || !slices.Equal(info.Device.Addrs, want)) {
					t.Errorf("%s: reachable %v at %v (%s), want %v", what, info.Reachable, info.Device.Addrs, info.Problem, want)
				}
			}
			states := w.news(epoch)
			if (states != nil) != news {
				t.Errorf("%s: news %+v, want some: %v", what, states, news)
			}
			if states != nil {
				epoch = states.Epoch
			}
		}
		step("new", true, "10.0.0.1:2049")
		step("nothing", false, "10.0.0.1:2049")
		h.set("ds", "10.0.0.1:2049", "10.1.0.1:2049")
		step("one more", true, "10.0.0.1:2049", "10.1.0.1:2049")
		h.set("ds", "10.1.0.1:2049", "10.0.0.1:2049")
		step("another order", false, "10.0.0.1:2049", "10.1.0.1:2049")
		h.set("ds")
		step("no answer", false, "10.0.0.1:2049", "10.1.0.1:2049")
		h.set("ds", "10.0.0.1:2049")
		step("one less", true, "10.0.0.1:2049")

		h.set("ds", "10.0.0.9:2049")
		step("another one, where nothing is", false, "10.0.0.1:2049")
		if _, err := w.m.AddDevice(t.Context(), other.URL(), false); err != nil {
			t.Fatal(err)
		}
		h.set("ds", "10.0.0.2:2049")
		step("another one, where another data server is", false, "10.0.0.1:2049")
		h.set("ds", "10.0.0.9:2049")
		e.Move("10.0.0.9:2049")
		step("moved", true, "10.0.0.9:2049")
		w.file(5, layout.Policy{StripeCount: 2}, 4<<20)

		before := h.asked()
		step("nothing", false, "10.0.0.9:2049")
		if n := h.asked() - before; n == 0 || n > 6 {
			t.Errorf("%d look-ups in %v", n, 2*lookUpPeriod+lastWait)
		}
	})
}
