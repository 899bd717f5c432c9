package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/hist"
	"github.com/weftfs/weft/internal/metrics"
	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/cluster"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/schema"
)

// watchFlags are those by which a serving process lets itself be seen.
type watchFlags struct {
	metrics, format  *string
	profile, verbose *bool
}

func newWatchFlags(fl *pflag.FlagSet) watchFlags {
	return watchFlags{
		metrics: fl.String("metrics", "", "address `HOST:PORT` for HTTP: /metrics in Prometheus' format, /healthz, /readyz (default: none)"),
		profile: fl.Bool("pprof", false, "also /debug/pprof/ there"),
		format:  fl.String("log-format", "text", "how lines are logged: text or json"),
		verbose: fl.BoolP("verbose", "v", false, "log more"),
	}
}

// log makes the log, on standard error.
func (f watchFlags) log(c *command) (*slog.Logger, error) {
	options := &slog.HandlerOptions{}
	if *f.verbose {
		options.Level = slog.LevelDebug
	}
	var handler slog.Handler
	switch *f.format {
	case "text":
		handler = slog.NewTextHandler(os.Stderr, options)
	case "json":
		handler = slog.NewJSONHandler(os.Stderr, options)
	default:
		return nil, usagef("%s: --log-format %q: want text or json", c.Name, *f.format)
	}
	if *f.profile && *f.metrics == "" {
		return nil, usagef("%s: --pprof needs --metrics", c.Name)
	}
	log := slog.New(handler)
	slog.SetDefault(log)
	return log, nil
}

// watch knows what a process serves, and tells how that is.
type watch struct {
	mu       sync.Mutex
	engine   catalog.Engine // nil: no metadata service
	services map[*meta.Service]bool
	past     meta.Stats // calls of services that are no more
	servers  map[string]*data.Server
}

// serve starts to tell it, if the flags say where.
func (w *watch) serve(f watchFlags, log *slog.Logger) (stop func() error, err error) {
	if *f.metrics == "" {
		return func() error { return nil }, nil
	}
	s, err := metrics.Listen(*f.metrics, metrics.Config{Collect: w.collect, Ready: w.ready, Profile: *f.profile, Log: log})
	if err != nil {
		return nil, fmt.Errorf("%w; choose another with --metrics", err)
	}
	return s.Close, nil
}

func (w *watch) catalog(engine catalog.Engine) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.engine = engine
}

func (w *watch) server(dir string, s *data.Server) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.servers == nil {
		w.servers = map[string]*data.Server{}
	}
	w.servers[dir] = s
}

// service watches a metadata service until it is shut down by what is returned.
func (w *watch) service(s *meta.Service, outer cluster.Service) cluster.Service {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.services == nil {
		w.services = map[*meta.Service]bool{}
	}
	w.services[s] = true
	return &watchedService{outer, w, s}
}

type watchedService struct {
	cluster.Service
	w     *watch
	inner *meta.Service
}

// Shutdown implements [cluster.Service].
func (s *watchedService) Shutdown(ctx context.Context) error {
	err := s.Service.Shutdown(ctx)
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	if s.w.services[s.inner] {
		delete(s.w.services, s.inner)
		calls, refusals := s.inner.Counted()
		addCalls(&s.w.past, calls, refusals)
	}
	return err
}

func addCalls(to *meta.Stats, calls map[metarpc.Op]*hist.Counts, refusals map[metarpc.Status]uint64) {
	if to.Calls == nil {
		to.Calls, to.Refusals = map[metarpc.Op]*hist.Counts{}, map[metarpc.Status]uint64{}
	}
	for op, counts := range calls {
		if to.Calls[op] == nil {
			to.Calls[op] = &hist.Counts{}
		}
		to.Calls[op].Join(counts)
	}
	for status, n := range refusals {
		to.Refusals[status] += n
	}
}

// ready is nil if the catalog answers, clients of before have come back, and data servers write.
func (w *watch) ready(ctx context.Context) error {
	w.mu.Lock()
	engine := w.engine
	grace := 0
	for s := range w.services {
		if s.InGrace() {
			grace++
		}
	}
	servers := len(w.servers)
	var broken []error
	for dir, s := range w.servers {
		if err := s.Ready(); err != nil {
			broken = append(broken, fmt.Errorf("data server %s: %w", dir, err))
		}
	}
	w.mu.Unlock()
	if len(broken) > 0 {
		return errors.Join(broken...)
	}
	if engine == nil {
		if servers == 0 {
			return errors.New("nothing is served yet")
		}
		return nil
	}
	if _, err := engine.Get(ctx, schema.KeyVolume); err != nil {
		return fmt.Errorf("the catalog does not answer: %w", err)
	}
	if grace > 0 {
		return fmt.Errorf("%d shards wait for clients of before the restart", grace)
	}
	return nil
}

// statsTime bounds what the catalog is asked for.
const statsTime = 3 * time.Second

func (w *watch) collect(e metrics.Emit) {
	e.Gauge("weft_build_info", "The version, as a label.", 1, "version", version.String())
	w.mu.Lock()
	var all []*meta.Service
	for s := range w.services {
		all = append(all, s)
	}
	sum := meta.Stats{}
	addCalls(&sum, w.past.Calls, w.past.Refusals)
	servers := map[string]*data.Server{}
	for dir, s := range w.servers {
		servers[dir] = s
	}
	isMeta := w.engine != nil
	w.mu.Unlock()
	if isMeta {
		collectMeta(e, all, &sum)
	}
	for dir, s := range servers {
		collectData(e, dir, s)
	}
}

func collectMeta(e metrics.Emit, services []*meta.Service, sum *meta.Stats) {
	ctx, cancel := context.WithTimeout(context.Background(), statsTime)
	defer cancel()
	grace := 0
	waiting := map[layout.DeviceID]int64{} // files
	for i, s := range services {
		st, err := s.Stats(ctx, i == 0)
		if err != nil {
			slog.Warn("not all metrics of a shard are known", "err", err)
		}
		addCalls(sum, st.Calls, st.Refusals)
		sum.Sessions += st.Sessions
		sum.Connected += st.Connected
		sum.Leases += st.Leases
		sum.Files += st.Files
		sum.Stale += st.Stale
		sum.Copied += st.Copied
		for _, w := range st.Waiting {
			waiting[w.Device] += w.Files
		}
		if st.Grace {
			grace++
		}
		if i == 0 {
			sum.Garbage, sum.Devices, sum.Catalog = st.Garbage, st.Devices, st.Catalog
		}
	}
	for op, counts := range sum.Calls {
		e.Histogram("weft_meta_call_duration_seconds", "How long calls of clients took, from their arrival to their answer.", counts, "op", strings.ToLower(op.String()))
	}
	for status, n := range sum.Refusals {
		e.Counter("weft_meta_call_errors_total", "Calls that were answered with an error.", float64(n), "error", statusName(status))
	}
	e.Gauge("weft_meta_shards", "Shards that this process serves.", float64(len(services)))
	e.Gauge("weft_meta_shards_in_grace", "Shards that wait for clients of before a restart.", float64(grace))
	e.Gauge("weft_meta_sessions", "Sessions of clients, one for each shard that a client uses.", float64(sum.Sessions))
	e.Gauge("weft_meta_sessions_connected", "Sessions of clients that have a connection.", float64(sum.Connected))
	e.Gauge("weft_meta_leased_inodes", "Inodes that clients have leases on.", float64(sum.Leases))
	e.Gauge("weft_meta_files", "Files that are open, written, or to be removed.", float64(sum.Files))
	e.Gauge("weft_meta_garbage_data_files", "Data files that wait for removal.", float64(sum.Garbage))
	e.Gauge("weft_meta_degraded_files", "Files with copies that are to be made anew.", float64(sum.Stale))
	e.Gauge("weft_meta_files_without_server", "Files with copies that are to be made anew once there is one more data server.", float64(waiting[layout.DeviceID{}]))
	e.Counter("weft_meta_copied_bytes_total", "Bytes that were copied to make copies anew.", float64(sum.Copied))
	collectRoom(e, sum.Catalog)
	for _, d := range sum.Devices {
		id := d.Device.ID.String()
		e.Flag("weft_device_up", "Whether the metadata service reaches the data server.", d.Reachable, "device", id)
		e.Flag("weft_device_writable", "Whether new data files can be made there.", d.Reachable && d.Problem == "", "device", id)
		e.Gauge("weft_device_complaints", "Clients that the data server does not answer, though it answers the metadata service.", float64(d.Complaints), "device", id)
		e.Flag("weft_device_draining", "Whether the data server is being emptied.", d.Draining, "device", id)
		e.Gauge("weft_device_free_bytes", "Free space of the data server.", float64(d.Free), "device", id)
		e.Gauge("weft_device_size_bytes", "Space of the data server.", float64(d.Total), "device", id)
		e.Gauge("weft_device_data_files", "Data files there.", float64(d.DataFiles), "device", id)
		e.Gauge("weft_device_waiting_files", "Files with copies that are to be made anew once the data server can be used.", float64(waiting[d.Device.ID]), "device", id)
	}
}

func collectRoom(e metrics.Emit, room catalog.Room) {
	e.Flag("weft_meta_catalog_full", "Whether the catalog has no room, so that nothing new can be made.", room.Full)
	e.Flag("weft_meta_catalog_low", "Whether the catalog has little room, or none.", room.Low)
	if room.Size > 0 {
		e.Gauge("weft_meta_catalog_free_bytes", "Bytes that are free for the catalog, without its reserve.", float64(room.Free))
		e.Gauge("weft_meta_catalog_size_bytes", "Bytes of the disk of the catalog.", float64(room.Size))
		e.Gauge("weft_meta_catalog_reserve_bytes", "Bytes that the catalog keeps for what makes room.", float64(room.Reserve))
	}
}

// statusName is an errno's name, or what the protocol calls the status.
func statusName(s metarpc.Status) string {
	if name := unix.ErrnoName(unix.Errno(s)); s < 1000 && name != "" {
		return name
	}
	return s.String()
}

func collectData(e metrics.Emit, dir string, s *data.Server) {
	st, err := s.Stats()
	if err != nil {
		slog.Warn("free space of a data server is not known", "dir", dir, "err", err)
	}
	dir = filepath.Clean(dir)
	for proc, counts := range st.Procs {
		e.Histogram("weft_data_call_duration_seconds", "How long NFS calls took, without sending their answers.", counts, "dir", dir, "procedure", strings.ToLower(proc.String()))
	}
	for status, n := range st.Errors {
		e.Counter("weft_data_call_errors_total", "NFS calls that were answered with an error.", float64(n), "dir", dir, "error", nfs3.Status(status).String())
	}
	e.Gauge("weft_data_connections", "Connections of clients.", float64(st.Connections), "dir", dir)
	e.Gauge("weft_data_free_bytes", "Free space of the file system.", float64(st.Free), "dir", dir)
	e.Gauge("weft_data_size_bytes", "Space of the file system.", float64(st.Total), "dir", dir)
}
