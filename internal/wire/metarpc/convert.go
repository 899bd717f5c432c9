package metarpc

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/weftfs/weft/layout"
)

// maxHandle is NFS3_FHSIZE (RFC 1813 section 2.4): the devices of this protocol are NFSv3 servers.
const maxHandle = 64

// Layout is the segment that s is the wire form of. It is valid and shares the handles' bytes with s.
func (s *Segment) Layout() (*layout.Segment, error) {
	l := &layout.Segment{
		Range: layout.Range{Off: s.Off, Len: s.Len}, IOMode: s.IOMode, StripeUnit: s.StripeUnit,
		Mirrors: make([]layout.Mirror, len(s.Mirrors)),
		Flags:   s.Flags, StatsHint: s.StatsHint, Shared: s.Shared, Exacting: s.Exacting, Few: s.Few,
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
				Generation: f.Generation,
			}
			for _, e := range f.Extents {
				servers[j].Extents = append(servers[j].Extents, layout.Extent{Off: e.Off, Len: e.Len, Addr: e.Addr, State: e.State})
			}
			l.OnNamespaces = l.OnNamespaces || servers[j].OnNamespace()
		}
		l.Mirrors[i].Servers = servers
	}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	return l, nil
}

// plainDataFile is the form of a data file without its optional fields.
type plainDataFile struct {
	//lint:ignore U1000 msgpack finds it by reflection
	_msgpack   struct{} `msgpack:",as_array"`
	Device     layout.DeviceID
	Efficiency uint32
	Handle     []byte
	UID, GID   uint32
	State      layout.CopyState
}

// wholeDataFile is the form of one with them: DataFile without its methods.
type wholeDataFile DataFile

// EncodeMsgpack implements [msgpack.CustomEncoder].
func (f *DataFile) EncodeMsgpack(e *msgpack.Encoder) error {
	if f.Generation != 0 || len(f.Extents) > 0 {
		return e.Encode((*wholeDataFile)(f))
	}
	return e.Encode(&plainDataFile{
		Device: f.Device, Efficiency: f.Efficiency, Handle: f.Handle, UID: f.UID, GID: f.GID, State: f.State,
	})
}

// DecodeMsgpack implements [msgpack.CustomDecoder]. The input has the shape of a DataFile.
func (f *DataFile) DecodeMsgpack(d *msgpack.Decoder) error {
	n, err := d.DecodeArrayLen()
	if err != nil {
		return err
	}
	err = d.DecodeMulti(&f.Device, &f.Efficiency, &f.Handle, &f.UID, &f.GID, &f.State)
	if err == nil && n > 6 {
		err = d.DecodeMulti(&f.Generation, &f.Extents)
	}
	if len(f.Extents) == 0 {
		f.Extents = nil
	}
	return err
}

// Layout is the device that d is the wire form of. It is valid.
func (d *Device) Layout() (layout.Device, error) {
	l := layout.Device{ID: d.ID}
	switch len(d.Namespace) {
	case 0:
		l.Versions = []layout.Version{{Version: 3, RSize: d.RSize, WSize: d.WSize}}
	case 1:
		n := &d.Namespace[0]
		l.Namespace = &layout.Namespace{NQN: n.NQN, NSID: n.NSID, NGUID: n.NGUID, EUI64: n.EUI64, UUID: n.UUID, Block: n.Block, Reserved: n.Reserved}
	default:
		return layout.Device{}, fmt.Errorf("device %v: %d namespaces", d.ID, len(d.Namespace))
	}
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

// Key is the reservation key by which a session's client registers with namespaces that the service keeps a reservation on. It is never zero.
func (id SessionID) Key() uint64 { return max(1, binary.BigEndian.Uint64(id[:8])) }
