package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/internal/metrics"
	"github.com/weftfs/weft/internal/version"
)

// serveMetrics tells how the mount is, if an option says where.
func (d *daemon) serveMetrics() (stop func() error, err error) {
	if d.cfg.options.metrics == "" {
		return func() error { return nil }, nil
	}
	s, err := metrics.Listen(d.cfg.options.metrics, metrics.Config{Collect: d.collect, Ready: d.ready, Profile: d.cfg.options.profile, Log: slog.Default()})
	if err != nil {
		return nil, err
	}
	return s.Close, nil
}

// ready is nil if the metadata service was heard within the lease, and every data server that was used is reachable.
func (d *daemon) ready(context.Context) error {
	var problems []error
	for _, s := range d.meta.State().Sessions {
		if !s.Alive {
			problems = append(problems, fmt.Errorf("metadata service %s: %s", s.Addr, problemOf(&s)))
		}
	}
	for _, st := range d.data.Stats() {
		if use := useOf(&st, d.cfg.options.secrecy.data); use.Trouble != "" {
			problems = append(problems, fmt.Errorf("device %v: %s", st.Device, use.Trouble))
		}
	}
	return errors.Join(problems...)
}

func (d *daemon) collect(e metrics.Emit) {
	e.Gauge("weft_build_info", "The version, as a label.", 1, "version", version.String())
	e.Gauge("weft_mount_info", "What is mounted where, as labels.", 1, "source", d.cfg.name, "mountpoint", d.cfg.mountpoint)
	ops, failed := d.fsys.Requests()
	for op, counts := range ops {
		e.Histogram("weft_fuse_request_duration_seconds", "How long requests of the kernel took, from when they were read to their answer.", counts, "op", op)
	}
	for errno, n := range failed {
		e.Counter("weft_fuse_errors_total", "Requests of the kernel that were answered with an error.", float64(n), "errno", unix.ErrnoName(errno))
	}
	e.Gauge("weft_retained_bytes", "Written data that data servers have not made stable yet.", float64(d.data.Retained()))
	e.Gauge("weft_retained_limit_bytes", "How much of it there may be.", float64(d.cfg.options.retain))
	passed, _ := d.fsys.Passed()
	e.Gauge("weft_passthrough_files", "Open files that the kernel serves by itself.", float64(len(passed)))

	state := d.meta.State()
	for op, n := range state.Calls {
		e.Counter("weft_meta_calls_sent_total", "Calls that were sent to metadata services.", float64(n), "op", strings.ToLower(op.String()))
	}
	for op, counts := range state.Took {
		e.Histogram("weft_meta_call_duration_seconds", "How long calls to metadata services took, from when they were sent to their answer.", counts, "op", strings.ToLower(op.String()))
	}
	e.Flag("weft_meta_connected", "Whether there are connections to all metadata services that are needed.", state.Connected)
	e.Flag("weft_meta_lease_valid", "Whether what is kept under leases holds.", state.Alive)
	e.Counter("weft_meta_reconnects_total", "Connections to metadata services that were made anew.", float64(state.Reconnects))
	e.Gauge("weft_meta_leased_inodes", "Inodes that need not be asked for.", float64(state.Leases))
	e.Gauge("weft_meta_layouts", "Layouts that are kept.", float64(state.Layouts))

	for _, st := range d.data.Stats() {
		d.collectDevice(e, &st)
	}
}

func (d *daemon) collectDevice(e metrics.Emit, st *dataplane.DeviceStats) {
	id := st.Device.String()
	for _, kind := range []struct {
		op    string
		stats *dataplane.OpStats
	}{{"read", &st.Reads}, {"write", &st.Writes}, {"commit", &st.Commits}} {
		e.Histogram("weft_device_request_duration_seconds", "How long requests to data servers took, with or without RPC.",
			&hist.Counts{N: kind.stats.Latency, Sum: kind.stats.Time}, "device", id, "op", kind.op)
		if kind.op != "commit" {
			e.Counter("weft_device_bytes_total", "Bytes read from and written to data servers.", float64(kind.stats.Bytes), "device", id, "op", kind.op)
		}
	}
	e.Gauge("weft_device_outstanding_requests", "Requests to the data server that are under way.", float64(st.Outstanding), "device", id)
	e.Counter("weft_device_errors_total", "Requests to the data server that failed.", float64(st.Errors), "device", id)
	if !st.ErrTime.IsZero() {
		e.Gauge("weft_device_last_error_timestamp_seconds", "When the last one did.", float64(st.ErrTime.UnixNano())/float64(time.Second), "device", id)
	}
	use := useOf(st, d.cfg.options.secrecy.data)
	e.Flag("weft_device_reachable", "Whether connections to the data server are there that are needed.", use.Trouble == "", "device", id)
	e.Counter("weft_device_resent_requests_total", "Requests that were sent again as their connection was lost.", float64(use.Resent), "device", id)
	e.Counter("weft_device_delayed_answers_total", "Answers that told to ask again later.", float64(use.Jukebox), "device", id)
	var dev deviceStatus
	now, cancel := context.WithCancel(context.Background())
	cancel() // it is not waited for
	dev.reach(now, st)
	path := "nfs"
	if _, ok := st.Target.(*nvmetcp.Target); ok {
		path = "nvme"
	}
	e.Counter("weft_device_path_requests_total", "Requests by the way they took.", float64(dev.OpsLocal), "device", id, "path", "local")
	e.Counter("weft_device_path_requests_total", "Requests by the way they took.", float64(dev.OpsRPC), "device", id, "path", path)
}
