package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
)

// deviceUse is what one mount does at a device, since it was mounted.
type deviceUse struct {
	Path        string          `json:"path"` // tcp, tls or nvme-tcp; empty while nothing could be set up
	Why         string          `json:"why"`  // what decided on the path
	Connections []connectionUse `json:"connections"`
	Paths       []pathUse       `json:"paths,omitempty"` // to an NVMe namespace, which has no connections here
	Outstanding int64           `json:"outstanding"`     // requests without an answer
	Down        bool            `json:"down"`            // mirrored data goes on without it
	Reads       opUse           `json:"reads"`
	Writes      opUse           `json:"writes"`
	Commits     opUse           `json:"commits"`
	Resent      uint64          `json:"resent"`  // because their connection or path was lost
	Jukebox     uint64          `json:"jukebox"` // answers that told to ask again later
	Errors      uint64          `json:"errors"`  // requests that failed
	Error       string          `json:"error,omitempty"`
	ErrorAt     time.Time       `json:"error_at,omitzero"`
	Trouble     string          `json:"trouble,omitempty"` // why connections are missing that are needed
	Since       time.Time       `json:"trouble_since,omitzero"`
}

// connectionUse is one connection that there is, or may be.
type connectionUse struct {
	Address     string    `json:"address"`
	Up          bool      `json:"up"`
	Since       time.Time `json:"since,omitzero"` // of being up, or of the loss
	Outstanding int       `json:"outstanding"`
	Ops         uint64    `json:"ops"` // this and the bytes since it is up
	Read        uint64    `json:"bytes_read"`
	Written     uint64    `json:"bytes_written"`
	RTT         int64     `json:"rtt_ns"`      // of the network alone, as the kernel has measured lately
	Retransmits uint32    `json:"retransmits"` // packets that were sent again
	Error       string    `json:"error,omitempty"`
}

// pathUse is one way to an NVMe namespace.
type pathUse struct {
	Address string `json:"address"`
	State   string `json:"state"` // of the controller there, such as live
	Use     string `json:"use"`   // optimized, non-optimized or out
	Why     string `json:"why,omitempty"`
	Group   uint32 `json:"ana_group,omitempty"`
	Latency int64  `json:"latency_ns"` // smoothed
	Ops     uint64 `json:"ops"`
	Bytes   uint64 `json:"bytes"`
	Errors  uint64 `json:"errors"`
}

// opUse is what requests of one kind came to that were answered.
type opUse struct {
	Ops   uint64 `json:"ops"`
	Bytes uint64 `json:"bytes"`
	Time  int64  `json:"time_ns"` // of all together
	P50   int64  `json:"p50_ns"`
	P99   int64  `json:"p99_ns"`
	// Latency counts by time: element i is for less than 2^i nanoseconds, and at least half of that.
	Latency []uint64 `json:"latency"`
}

func useOf(st *dataplane.DeviceStats, secret rpctls.Policy) *deviceUse {
	u := &deviceUse{
		Connections: []connectionUse{}, Outstanding: st.Outstanding, Down: st.Down,
		Reads: opUseOf(&st.Reads), Writes: opUseOf(&st.Writes), Commits: opUseOf(&st.Commits),
		Errors: st.Errors, ErrorAt: st.ErrTime,
	}
	if st.Err != nil {
		u.Error = filename.OneLine(st.Err)
	}
	target := rpcTarget(st.Target)
	if target == nil {
		return u
	}
	t := target.Stats()
	u.Path, u.Why = "tcp", "xprtsec="+string(secret)
	if t.TLS {
		u.Path = "tls"
	}
	u.Resent, u.Jukebox = t.Resent, t.Jukebox
	if u.Since = t.Trouble; !t.Trouble.IsZero() {
		u.Trouble = filename.OneLine(t.Err)
	}
	for _, c := range t.Connections {
		use := connectionUse{
			Address: c.Addr.String(), Up: c.Up, Since: c.Since, Outstanding: c.Outstanding,
			Ops: c.Ops, Read: c.BytesRead, Written: c.BytesWritten, RTT: int64(c.RTT), Retransmits: c.Retransmits,
		}
		if c.Err != nil {
			use.Error = filename.OneLine(c.Err)
		}
		u.Connections = append(u.Connections, use)
	}
	return u
}

// rpcTarget is what makes the calls to a device; nil if there is nothing.
func rpcTarget(t dataplane.Target) *nfs3.Target {
	if l, ok := t.(*localio.Target); ok {
		return l.Remote.(*nfs3.Target)
	}
	target, _ := t.(*nfs3.Target)
	return target
}

// downDevices is what the metadata service has said, for the data plane.
func downDevices(down []metarpc.DownDevice) (list []dataplane.DownDevice) {
	for _, d := range down {
		list = append(list, dataplane.DownDevice{Device: d.Device, Silent: d.Silent, For: time.Duration(d.For)})
	}
	return list
}

// silentDevices returns the devices that do not answer the mount: the data plane has found them down, or the mount has
// no connection to them.
func silentDevices(p *dataplane.Plane) []layout.DeviceID {
	ids := p.FoundDown()
	for _, st := range p.Stats() {
		if t := rpcTarget(st.Target); t != nil && !t.Stats().Trouble.IsZero() && !slices.Contains(ids, st.Device) {
			ids = append(ids, st.Device)
		}
	}
	return ids
}

// onNamespace is why there is no short way to an NVMe namespace.
const onNamespace = "it is an NVMe namespace"

// reach says how the mount reaches the device.
func (d *deviceStatus) reach(ctx context.Context, stats *dataplane.DeviceStats) {
	switch t := stats.Target.(type) {
	case nil:
		d.Reason = "it could not be reached at all"
	case *localio.Target:
		st := t.Status(ctx)
		d.Local, d.Reason, d.OpsLocal, d.OpsRPC = st.Local, st.Because, st.OpsLocal, st.OpsRPC
		if st.Local {
			d.Reason = st.ReadOnly
		}
	case *nvmetcp.Target:
		d.Reason, d.OpsRPC = onNamespace, stats.Ops()
	default:
		d.Reason, d.OpsRPC = "it was mounted with localio=off", stats.Ops()
	}
}

func opUseOf(st *dataplane.OpStats) opUse {
	u := opUse{
		Ops: st.Ops(), Bytes: st.Bytes, Time: int64(st.Time),
		P50: int64(st.Latency.Quantile(0.5)), P99: int64(st.Latency.Quantile(0.99)), Latency: []uint64{},
	}
	last := 0
	for i, n := range st.Latency {
		if n > 0 {
			last = i + 1
		}
	}
	u.Latency = append(u.Latency, st.Latency[:last]...)
	return u
}

// up counts the connections that are there, and the paths that are usable.
func (u *deviceUse) up() (n int) {
	for _, c := range u.Connections {
		if c.Up {
			n++
		}
	}
	for _, p := range u.Paths {
		if p.Use != "out" {
			n++
		}
	}
	return n
}

// print writes some lines below that of the device.
func (u *deviceUse) print(w io.Writer, indent string) {
	switch {
	case u.Path == "":
		fmt.Fprintf(w, "%sno connections, %d outstanding", indent, u.Outstanding)
	case len(u.Paths) > 0:
		fmt.Fprintf(w, "%s%s (%s), %d of %d paths usable, %d outstanding", indent, u.Path, u.Why, u.up(), len(u.Paths), u.Outstanding)
	default:
		fmt.Fprintf(w, "%s%s (%s), %d of %d connections up, %d outstanding", indent, u.Path, u.Why, u.up(), len(u.Connections), u.Outstanding)
	}
	also(w, u.Down, ", mirrored data goes on without it")
	also(w, u.Resent > 0, ", %d resent", u.Resent)
	also(w, u.Jukebox > 0, ", %d JUKEBOX", u.Jukebox)
	fmt.Fprintln(w)
	for i := range u.Paths {
		u.Paths[i].print(w, indent)
	}
	u.Reads.print(w, indent+"read    ")
	u.Writes.print(w, indent+"written ")
	also(w, u.Trouble != "" && u.Since.IsZero(), "%s%s\n", indent, u.Trouble)
	also(w, u.Trouble != "" && !u.Since.IsZero(), "%sconnections lost %s and not back: %s\n", indent, humanize.Time(u.Since), u.Trouble)
	also(w, u.Errors > 0, "%s%d requests failed, the last one %s: %s\n", indent, u.Errors, humanize.Time(u.ErrorAt), u.Error)
}

func (u *opUse) print(w io.Writer, what string) {
	also(w, u.Ops > 0, "%s%s in %d requests, p50 %v, p99 %v\n", what, humanize.IBytes(u.Bytes), u.Ops, rough(u.P50), rough(u.P99))
}

// rough rounds a time to the two digits that a histogram has at most.
func rough(ns int64) time.Duration {
	unit := time.Duration(1)
	for time.Duration(ns) >= 100*unit {
		unit *= 10
	}
	return time.Duration(ns).Round(unit)
}

// usageOf is what the metadata service is told of devices.
func usageOf(all []dataplane.DeviceStats) []metarpc.DeviceStats {
	usage := make([]metarpc.DeviceStats, len(all))
	for i := range all {
		st := &all[i]
		usage[i] = metarpc.DeviceStats{Device: st.Device, Reads: ioStats(&st.Reads), Writes: ioStats(&st.Writes), Outstanding: st.Outstanding}
	}
	return usage
}

func ioStats(st *dataplane.OpStats) metarpc.IOStats {
	return metarpc.IOStats{Ops: st.Ops(), Bytes: st.Bytes, Time: int64(st.Time)}
}
