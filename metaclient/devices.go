package metaclient

import (
	"context"
	"fmt"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// deviceTable is what the service last said of its devices.
type deviceTable struct {
	mu      sync.Mutex
	known   map[layout.DeviceID]layout.Device
	current int // counts connections, and what services tell of devices
	asked   int // current when known was asked for
}

// expireDevices has services asked anew where devices are. Those may have moved while there was no connection, and a
// service that tells which devices are down may do so because one has other addresses.
func (v *Volume) expireDevices() {
	v.devices.expire()
	if v.cfg.OnDevices != nil {
		v.cfg.OnDevices()
	}
}

// expire makes the next look-up ask the service.
func (t *deviceTable) expire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.current++
}

// get looks a device up. current is for put.
func (t *deviceTable) get(id layout.DeviceID) (d layout.Device, ok bool, current int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, ok = t.known[id]
	return d, ok && t.asked == t.current, t.current
}

func (t *deviceTable) put(known map[layout.DeviceID]layout.Device, current int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if current >= t.asked {
		t.known, t.asked = known, current
	}
}

// Device says where a device is. The service is asked if the device is not known, or not since Config.OnDevices was
// called last.
func (c *Client) Device(ctx context.Context, id layout.DeviceID) (layout.Device, error) {
	d, ok, current := c.v.devices.get(id)
	if ok {
		return d, nil
	}
	infos, err := c.Devices(ctx)
	if err != nil {
		return layout.Device{}, fmt.Errorf("device %v: %w", id, err)
	}
	known := make(map[layout.DeviceID]layout.Device, len(infos))
	away := false
	for i := range infos {
		dev := &infos[i].Device
		if len(dev.Addrs) == 0 {
			away = away || dev.ID == id
			continue
		}
		d, err := dev.Layout()
		if err != nil {
			return layout.Device{}, fmt.Errorf("%w: %w", metarpc.ErrMalformed, err)
		}
		known[d.ID] = d
	}
	c.v.devices.put(known, current)
	d, ok = known[id]
	switch {
	case away: // it is waited for like one that does not answer
		return layout.Device{}, &metarpc.Error{
			Op: metarpc.OpDevices, Status: metarpc.StatusLayoutUnavailable, Message: fmt.Sprintf("the metadata service has not found the address of device %v yet", id),
		}
	case !ok:
		return layout.Device{}, fmt.Errorf("device %v: the metadata service does not know it", id)
	}
	return d, nil
}
