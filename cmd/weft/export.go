package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
)

// localExport is what the option local-export says: that dir on this host is an export of a data server.
type localExport struct {
	host   string // as in the data server's URL, or one of its addresses
	port   string // empty: any
	export string // absolute and clean, as dir
	dir    string
}

// parseLocalExport reads HOST[:PORT]:EXPORT=DIR; an IPv6 address stands in brackets.
func parseLocalExport(s string) (e localExport, err error) {
	addr, rest, ok := strings.Cut(s, ":/")
	export, dir, has := strings.Cut(rest, "=")
	if !ok || !has || !filepath.IsAbs(dir) {
		return e, errors.New("want ADDR:EXPORT=DIR, such as 10.1.0.7:/srv/weft=/srv/weft, with paths from / on")
	}
	e = localExport{host: addr, export: path.Clean("/" + export), dir: filepath.Clean(dir)}
	if inner, ok := strings.CutPrefix(addr, "["); ok && strings.HasSuffix(inner, "]") {
		e.host = strings.TrimSuffix(inner, "]")
	} else if strings.Contains(addr, ":") {
		if e.host, e.port, err = net.SplitHostPort(addr); err != nil {
			return e, fmt.Errorf("%q is not HOST or HOST:PORT (an IPv6 address stands in brackets)", addr)
		}
		if n, err := strconv.ParseUint(e.port, 10, 16); err != nil || n == 0 {
			return e, fmt.Errorf("%q is not a port (1 to 65535)", e.port)
		}
	}
	if e.host == "" || strings.ContainsAny(e.host, "[]/ ") {
		return e, fmt.Errorf("%q is not a host", e.host)
	}
	return e, nil
}

// String is the option.
func (e localExport) String() string {
	addr := e.host
	if strings.Contains(addr, ":") {
		addr = "[" + addr + "]"
	}
	if e.port != "" {
		addr += ":" + e.port
	}
	return "local-export=" + addr + ":" + e.export + "=" + e.dir
}

// names reports whether e speaks of a data server.
func (e localExport) names(info metarpc.DeviceInfo) bool {
	u, err := url.Parse(info.URL)
	if err != nil || path.Clean(u.Path) != e.export || e.port != "" && e.port != u.Port() {
		return false
	}
	if strings.EqualFold(u.Hostname(), e.host) {
		return true
	}
	ip, err := netip.ParseAddr(e.host)
	for _, addr := range info.Device.Addrs {
		if a, bad := netip.ParseAddrPort(addr); err == nil && bad == nil && a.Addr().Unmap() == ip.Unmap() {
			return true
		}
	}
	return false
}

// localExport returns what the options say of a data server, nil if that is nothing.
func (d *daemon) localExport(id layout.DeviceID, remote *nfs3.Target) *localio.Export {
	if len(d.cfg.options.exports) == 0 {
		return nil
	}
	info, err := d.deviceInfo(context.Background(), id)
	if err != nil {
		slog.Warn("it is not known what a data server exports; it is reached by RPC", "device", id, "err", err)
		return nil
	}
	for _, e := range d.cfg.options.exports {
		if e.names(info) {
			return &localio.Export{
				Statement: e.String(), Dir: e.dir,
				Lookup: func(ctx context.Context, name string) ([]byte, error) { return d.lookupExport(ctx, id, remote, name) },
			}
		}
	}
	return nil
}

// deviceInfo is what the metadata service says of a data server now.
func (d *daemon) deviceInfo(ctx context.Context, id layout.DeviceID) (info metarpc.DeviceInfo, err error) {
	devices, err := d.meta.Devices(ctx)
	if err != nil {
		return info, err
	}
	for _, info := range devices {
		if info.Device.ID == id {
			return info, nil
		}
	}
	return info, fmt.Errorf("the metadata service does not know device %v", id)
}

// lookupExport looks up a name in the root of a data server's export.
func (d *daemon) lookupExport(ctx context.Context, id layout.DeviceID, remote *nfs3.Target, name string) ([]byte, error) {
	info, err := d.deviceInfo(ctx, id)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(info.URL)
	if err != nil {
		return nil, err
	}
	dev, err := info.Device.Layout()
	if err != nil {
		return nil, err
	}
	port, _ := strconv.ParseUint(u.Query().Get("mountport"), 10, 16) // 0: to be found out
	err = errors.New("the data server has no address")
	for _, addr := range addrsOf(dev) {
		var root []byte
		if root, err = nfs3.MountAt(ctx, addr, uint16(port), u.Path, d.secret); err == nil {
			fh, _, err := remote.Lookup(ctx, layout.Credential{}, root, name)
			return fh, err
		}
	}
	return nil, err
}
