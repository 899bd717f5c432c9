package flexfiles

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"
)

const (
	minNetAddr  = 4 + 4
	versionSize = 5 * 4
)

// AppendDevice encodes addresses and versions of dev as an ff_device_addr4.
func AppendDevice(b []byte, dev *layout.Device) []byte {
	b = xdr.AppendUint32(b, uint32(len(dev.Addrs)))
	for _, a := range dev.Addrs {
		b = appendNetAddr(b, a)
	}
	b = xdr.AppendUint32(b, uint32(len(dev.Versions)))
	for _, v := range dev.Versions {
		b = xdr.AppendUint32(b, v.Version)
		b = xdr.AppendUint32(b, v.Minor)
		b = xdr.AppendUint32(b, v.RSize)
		b = xdr.AppendUint32(b, v.WSize)
		b = xdr.AppendBool(b, v.TightlyCoupled)
	}
	return b
}

// DecodeDevice takes an ff_device_addr4, which is about the device id. The device is valid.
func DecodeDevice(d *xdr.Decoder, id layout.DeviceID) (layout.Device, error) {
	dev := layout.Device{ID: id}
	for range decodeCount(d, "addresses", layout.MaxAddresses, minNetAddr) {
		if a, ok := decodeNetAddr(d); ok {
			dev.Addrs = append(dev.Addrs, a)
		}
	}
	dev.Versions = make([]layout.Version, decodeCount(d, "versions", layout.MaxVersions, versionSize))
	for i := range dev.Versions {
		dev.Versions[i] = layout.Version{
			Version: d.Uint32(), Minor: d.Uint32(), RSize: d.Uint32(), WSize: d.Uint32(), TightlyCoupled: d.Bool(),
		}
	}
	err := d.Err()
	if err == nil {
		err = dev.Validate()
	}
	if err != nil {
		return layout.Device{}, fmt.Errorf("flexfiles: address of device %v: %w", id, err)
	}
	return dev, nil
}

// CheckHandles checks that f has a file handle for each version of dev, since the ones are told by the order of the
// others (RFC 8435 section 5.1).
func CheckHandles(f *layout.DataFile, dev *layout.Device) error {
	if len(f.Handles) != len(dev.Versions) {
		return fmt.Errorf("flexfiles: data file with %d handles on device %v of %d versions", len(f.Handles), dev.ID, len(dev.Versions))
	}
	return nil
}

// appendNetAddr encodes a netaddr4, an empty one if there is no address.
func appendNetAddr(b []byte, a layout.NetAddr) []byte {
	b = xdr.AppendString(b, a.NetID)
	if !a.Addr.IsValid() {
		return xdr.AppendString(b, "")
	}
	return xdr.AppendString(b, FormatUaddr(a.Addr))
}

// decodeNetAddr takes a netaddr4; false if its transport is unknown.
func decodeNetAddr(d *xdr.Decoder) (layout.NetAddr, bool) {
	netid, uaddr := d.String(maxString), d.String(maxString)
	if d.Err() != nil || !knownNetID(netid) {
		return layout.NetAddr{}, false
	}
	addr, err := ParseUaddr(netid, uaddr)
	if err != nil {
		d.Fail(err)
	}
	return layout.NetAddr{NetID: netid, Addr: addr}, err == nil
}

func knownNetID(netid string) bool {
	switch netid {
	case "tcp", "tcp6", "rdma", "rdma6":
		return true
	}
	return false
}

// FormatUaddr is the universal address of a: an IPv4 or IPv6 address in its usual form, and the upper and the lower byte
// of the port, all of it joined by dots.
func FormatUaddr(a netip.AddrPort) string {
	return fmt.Sprintf("%s.%d.%d", a.Addr(), a.Port()>>8, a.Port()&0xff)
}

// ParseUaddr reads a universal address, which is an IPv6 one if netid ends with a 6.
func ParseUaddr(netid, uaddr string) (netip.AddrPort, error) {
	bad := func(why string) (netip.AddrPort, error) {
		return netip.AddrPort{}, fmt.Errorf("address %q for %q: %s: %w", uaddr, netid, why, xdr.ErrInvalid)
	}
	rest, low, ok1 := cutLast(uaddr)
	host, high, ok2 := cutLast(rest)
	h, err1 := strconv.ParseUint(high, 10, 8)
	l, err2 := strconv.ParseUint(low, 10, 8)
	if !ok1 || !ok2 || err1 != nil || err2 != nil {
		return bad("it does not end with the two bytes of a port")
	}
	addr, err := netip.ParseAddr(host)
	switch {
	case err != nil:
		return bad("no IP address")
	case addr.Is6() != strings.HasSuffix(netid, "6"):
		return bad("of the other IP version")
	case addr.Zone() != "":
		return bad("a zone means nothing to another host")
	}
	return netip.AddrPortFrom(addr, uint16(h<<8|l)), nil
}

// cutLast cuts s at its last dot.
func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}
