package metarpc

import (
	"fmt"
	"net/netip"

	"github.com/weftfs/weft/layout"
)

// maxHandle is NFS3_FHSIZE (RFC 1813 section 2.4): the devices of this protocol are NFSv3 servers.
const maxHandle = 64

// SegmentOf is the wire form of a segment whose data files have one handle each.
func SegmentOf(s *layout.Segment) Segment {
	w := Segment{
		Off: s.Off, Len: s.Len, IOMode: s.IOMode, StripeUnit: s.StripeUnit,
		Mirrors: make([][]DataFile, len(s.Mirrors)),
		Flags:   s.Flags, StatsHint: s.StatsHint,
	}
	for i, m := range s.Mirrors {
		w.Mirrors[i] = make([]DataFile, len(m.Servers))
		for j, f := range m.Servers {
			w.Mirrors[i][j] = DataFile{
				Device: f.Device, Efficiency: f.Efficiency, Handle: f.Handles[0], UID: f.Cred.UID, GID: f.Cred.GID, State: f.State,
			}
		}
	}
	return w
}

// Layout is the inverse of SegmentOf. The result is valid and shares the handles' bytes with s.
func (s *Segment) Layout() (*layout.Segment, error) {
	l := &layout.Segment{
		Range: layout.Range{Off: s.Off, Len: s.Len}, IOMode: s.IOMode, StripeUnit: s.StripeUnit,
		Mirrors: make([]layout.Mirror, len(s.Mirrors)),
		Flags:   s.Flags, StatsHint: s.StatsHint,
	}
	for i, files := range s.Mirrors {
		servers := make([]layout.DataFile, len(files))
		for j, f := range files {
			if len(f.Handle) > maxHandle {
				return nil, fmt.Errorf("layout segment: file handle of %d bytes, want at most %d", len(f.Handle), maxHandle)
			}
			servers[j] = layout.DataFile{
				Device: f.Device, Efficiency: f.Efficiency, Handles: [][]byte{f.Handle},
				Cred: layout.Credential{UID: f.UID, GID: f.GID}, State: f.State,
			}
		}
		l.Mirrors[i].Servers = servers
	}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	return l, nil
}

// DeviceOf is the wire form of an NFSv3 device.
func DeviceOf(d *layout.Device) Device {
	w := Device{ID: d.ID, Addrs: make([]string, len(d.Addrs)), RSize: d.Versions[0].RSize, WSize: d.Versions[0].WSize}
	for i, a := range d.Addrs {
		w.Addrs[i] = a.Addr.String()
	}
	return w
}

// Layout is the inverse of DeviceOf; the result is valid.
func (d *Device) Layout() (layout.Device, error) {
	l := layout.Device{ID: d.ID, Versions: []layout.Version{{Version: 3, RSize: d.RSize, WSize: d.WSize}}}
	if len(d.Addrs) > layout.MaxAddresses {
		return layout.Device{}, fmt.Errorf("device %v: %d addresses, want at most %d", d.ID, len(d.Addrs), layout.MaxAddresses)
	}
	for _, s := range d.Addrs {
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return layout.Device{}, fmt.Errorf("device %v: %w", d.ID, err)
		}
		a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
		netid := "tcp"
		if a.Addr().Is6() {
			netid = "tcp6"
		}
		l.Addrs = append(l.Addrs, layout.NetAddr{NetID: netid, Addr: a})
	}
	if err := l.Validate(); err != nil {
		return layout.Device{}, err
	}
	return l, nil
}
