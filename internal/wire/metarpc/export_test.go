package metarpc

import "github.com/weftfs/weft/layout"

// SegmentOf is the wire form of a segment whose data files have one handle each.
func SegmentOf(s *layout.Segment) Segment {
	w := Segment{
		Off: s.Off, Len: s.Len, IOMode: s.IOMode, StripeUnit: s.StripeUnit,
		Mirrors: make([][]DataFile, len(s.Mirrors)),
		Flags:   s.Flags, StatsHint: s.StatsHint, Shared: s.Shared, Exacting: s.Exacting, Few: s.Few,
	}
	for i, m := range s.Mirrors {
		w.Mirrors[i] = make([]DataFile, len(m.Servers))
		for j, f := range m.Servers {
			w.Mirrors[i][j] = DataFile{
				Device: f.Device, Efficiency: f.Efficiency, Handle: f.Handles[0], UID: f.Cred.UID, GID: f.Cred.GID, State: f.State,
				Generation: f.Generation,
			}
			for _, e := range f.Extents {
				w.Mirrors[i][j].Extents = append(w.Mirrors[i][j].Extents, Extent{Off: e.Off, Len: e.Len, Addr: e.Addr, State: e.State})
			}
		}
	}
	return w
}

// DeviceOf is the wire form of an NFSv3 server or an NVMe namespace.
func DeviceOf(d *layout.Device) Device {
	w := Device{ID: d.ID, Addrs: make([]string, len(d.Addrs))}
	if n := d.Namespace; n != nil {
		w.Namespace = []Namespace{{NQN: n.NQN, NSID: n.NSID, NGUID: n.NGUID, EUI64: n.EUI64, UUID: n.UUID, Block: n.Block, Reserved: n.Reserved}}
	} else {
		w.RSize, w.WSize = d.Versions[0].RSize, d.Versions[0].WSize
	}
	for i, a := range d.Addrs {
		w.Addrs[i] = a.Addr.String()
	}
	return w
}
