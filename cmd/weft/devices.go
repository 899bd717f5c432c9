package main

import (
	"log/slog"
	"net/netip"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
)

func addrsOf(dev layout.Device) (addrs []netip.AddrPort) {
	for _, a := range dev.Addrs {
		addrs = append(addrs, a.Addr)
	}
	return addrs
}

// mayHaveMoved has followDevices look where devices are.
func (d *daemon) mayHaveMoved() {
	select {
	case d.moved <- struct{}{}:
	default:
	}
}

// followDevices has devices that are in use reached where the metadata service says they are now. Requests that wait
// for a device go there, too. It ends with d.ctx.
func (d *daemon) followDevices() {
	for {
		select {
		case <-d.moved:
		case <-d.ctx.Done():
			return
		}
		d.remotes.Range(func(id, remote any) bool {
			dev, ok := d.whereIs(id.(layout.DeviceID))
			if !ok {
				return true
			}
			addrs := addrsOf(dev)
			if err := remote.(*nfs3.Target).SetAddrs(addrs); err != nil {
				slog.Warn("the metadata service tells addresses of a data server that cannot be used", "device", dev.ID, "err", err)
				return true
			}
			if local, ok := d.locals.Load(id); ok {
				local.(*localio.Target).SetAddrs(addrs)
			}
			return true
		})
		d.spaces.Range(func(id, _ any) bool {
			if dev, ok := d.whereIs(id.(layout.DeviceID)); ok {
				d.nvme.Move(&dev)
			}
			return true
		})
	}
}

// whereIs asks the metadata service for a device, which stays where it is if that does not know it now.
func (d *daemon) whereIs(id layout.DeviceID) (dev layout.Device, ok bool) {
	dev, err := d.meta.Device(d.ctx, id)
	if err != nil && d.ctx.Err() == nil {
		slog.Debug("it is not known whether a data server has other addresses", "device", id, "err", err)
	}
	return dev, err == nil
}
