package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
	"github.com/weftfs/weft/metaclient"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

const (
	// connectTime is how long a mount waits for a metadata service.
	connectTime = 30 * time.Second
	// localTime is how long the first request to a device waits until it is known whether that is on this host.
	localTime = 250 * time.Millisecond
	// lingerTime is how long the serving process stays for data that is not stable, once the mount is gone.
	lingerTime = 30 * time.Second
	// retryTime is how long a mount in the background tries to reach a metadata service, if it is not said; as in nfs(5).
	retryTime = 10000 * time.Minute
	// retryPause is the longest pause between two attempts.
	retryPause = 10 * time.Second
	// heapLimit is from where on the collector works harder, in bytes. go-fuse pools request buffers by size, up to 8 MiB
	// each; what a pool holds survives a collection, so without a limit requests of many sizes let the heap grow to
	// gigabytes (2.8 GB were seen). Retained data is not on the heap.
	heapLimit = 384 << 20
)

// daemon is a serving process.
type daemon struct {
	cfg mountConfig
	// flagsMu guards cfg.options.flags once the mount is there.
	flagsMu sync.Mutex
	since   time.Time
	secret  *rpctls.Client // of connections to data servers, nil = none
	meta    *metaclient.Volume
	data    *dataplane.Plane
	fsys    *fs.FS
	server  *fs.Server
	remotes sync.Map      // from layout.DeviceID to *nfs3.Target
	locals  sync.Map      // from layout.DeviceID to *localio.Target
	moved   chan struct{} // has a token when devices may have other addresses

	nvme   *nvmetcp.Initiator
	spaces sync.Map        // from layout.DeviceID to *layout.Namespace
	key    atomic.Uint64   // of the last session, see reservationKey
	ctx    context.Context // of attempts to reach namespaces
	stop   context.CancelFunc
}

// serveMount mounts, tells whoever waits (see readiness), and serves until unmounted. The first signal ends ctx.
func serveMount(ctx context.Context, cfg mountConfig) error {
	ready := readiness()
	out := os.Stderr
	if cfg.options.log != "" {
		var err error
		if out, err = cfg.openLog(); err != nil {
			ready(err)
			return err
		}
	}
	var handler slog.Handler = slog.NewTextHandler(out, nil)
	if cfg.options.logJSON {
		handler = slog.NewJSONHandler(out, nil)
	}
	slog.SetDefault(slog.New(handler))
	debug.SetMemoryLimit(cfg.options.fit(memoryLimit("/"), cfg.own))
	if os.Getpid() == 1 && os.Geteuid() == 0 {
		go reap()
	}
	// The directory where it was started may be somebody's to unmount or remove; no path here is relative to it.
	if err := os.Chdir("/"); err != nil {
		ready(err)
		return err
	}
	d := &daemon{cfg: cfg, since: time.Now(), moved: make(chan struct{}, 1)}
	d.ctx, d.stop = context.WithCancel(context.Background())
	fail := func(err error) error {
		if d.server != nil {
			d.server.Unmount()
		}
		err = errors.Join(err, d.close())
		ready(err)
		return err
	}
	if err := d.start(ctx, ready); err != nil {
		return fail(err)
	}
	control, err := listenControl(d.server.ControlID())
	if err != nil {
		return fail(fmt.Errorf("control socket: %w", err))
	}
	go serveControl(context.Background(), control, d.control) // ends with the socket
	stopMetrics, err := d.serveMetrics()
	if err != nil {
		control.Close()
		return fail(err)
	}
	defer stopMetrics()
	end, err := cfg.announce()
	if err != nil {
		control.Close()
		return fail(err)
	}
	defer end()
	slog.Info("mounted", "source", cfg.name, "on", cfg.mountpoint, "version", version.String(), "max_write", d.server.MaxWrite())
	ready(nil)
	go d.unmountOnSignal(ctx) // ends with the process
	go d.watchSlow(ctx)       // ends with the process
	d.server.Wait()
	control.Close()
	slog.Info("unmounted", "from", cfg.mountpoint)
	return d.close()
}

// start connects and mounts. If that goes on in the background ready is told.
func (d *daemon) start(ctx context.Context, ready func(error)) error {
	var front atomic.Pointer[fs.FS]           // set before there is anything to recall
	var plane atomic.Pointer[dataplane.Plane] // set before anything is done at devices
	var err error
	d.cfg.options.secrecy = d.cfg.options.secrecy.settle()
	var toService *rpctls.Client
	if toService, d.secret, err = d.cfg.options.secrecy.clients(); err != nil {
		return err
	}
	client := clientInfo(d.cfg.mountpoint)
	if err = d.newInitiator(client.ID); err != nil {
		return err
	}
	d.meta, err = d.reachService(ctx, ready, metaclient.Config{
		Addrs:    d.cfg.source.addrs,
		TLS:      toService,
		Client:   client,
		Patience: d.cfg.options.patience(),
		OnRecall: func(ctx context.Context, id layout.FileID, off, n int64) error {
			if f := front.Load(); f != nil {
				return f.OnRecall(ctx, id, off, n)
			}
			return nil
		},
		OnLeaseRecall: func(ctx context.Context, items []metarpc.LeaseItem) {
			if f := front.Load(); f != nil {
				f.OnLeaseRecall(ctx, items)
			}
		},
		OnCopiesStale: func(id layout.FileID, copies []metarpc.CopyRef) {
			if f := front.Load(); f != nil {
				f.OnCopiesStale(id, copies)
			}
		},
		OnSizeQuery: func(ctx context.Context, ids []layout.FileID) {
			if f := front.Load(); f != nil {
				f.OnSizeQuery(ctx, ids)
			}
		},
		OnReserveRecall: func(ctx context.Context, id layout.FileID, upto uint64) {
			if f := front.Load(); f != nil {
				f.OnReserveRecall(ctx, id, upto)
			}
		},
		OnLost: func(shard int) {
			if f := front.Load(); f != nil {
				f.OnLost(shard)
			}
		},
		OnReset: func(ctx context.Context, shard int, lost bool) {
			if f := front.Load(); f != nil {
				if lost {
					d.rekey(ctx)
				}
				f.OnReset(ctx, shard, lost)
			}
		},
		OnLockLost: func(id layout.FileID, flock bool, owner uint64) {
			if f := front.Load(); f != nil {
				f.OnLockLost(id, flock, owner)
			}
		},
		Waiting: func() bool {
			p := plane.Load()
			return p != nil && p.Outstanding() > 0
		},
		Near:    d.near,
		Lending: func() []layout.DeviceID { return d.locally((*localio.Target).Lends) },
		OnDown: func(down []metarpc.DownDevice) {
			if p := plane.Load(); p != nil {
				p.SetDown(downDevices(down))
			}
		},
		OnDevices: d.mayHaveMoved,
		Down: func() []layout.DeviceID {
			if p := plane.Load(); p != nil {
				return silentDevices(p)
			}
			return nil
		},
		Usage: func() []metarpc.DeviceStats {
			if p := plane.Load(); p != nil {
				return usageOf(p.Stats())
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	connect, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	d.reservationKey() // so that there always is one
	root, err := d.lookupRoot(connect)
	if err != nil {
		return err
	}
	d.data, err = dataplane.New(dataplane.Config{
		Dial: d.dialDevice, RetainBytes: d.cfg.options.retain, Patience: d.cfg.options.patience(),
		MirrorTimeout: d.cfg.options.mirror, OnDown: d.meta.ReportDown,
	})
	if err != nil {
		return err
	}
	plane.Store(d.data)
	d.meta.TellDown()
	go d.followDevices() // ends with d.ctx
	pass, copies := d.cfg.options.passthrough()
	d.fsys, err = fs.New(fs.Config{
		Meta: d.meta, Data: d.data, Root: root,
		Passthrough: pass, Copies: copies, Lend: d.lend,
		Atime: fs.AtimeOf(d.cfg.options.flags), CachePages: d.cfg.options.cache == cacheLease, StableClose: d.cfg.options.stable,
		ReadAhead: d.cfg.options.ahead, Near: d.near, Patience: d.cfg.options.patience(),
	})
	if err != nil {
		return err
	}
	front.Store(d.fsys)
	d.server, err = d.fsys.Mount(fs.MountConfig{
		Mountpoint: d.cfg.mountpoint,
		Source:     d.cfg.name,
		Flags:      d.cfg.options.flags,
		AllowOther: d.cfg.options.forAll,
		MaxWrite:   int(d.cfg.options.maxWrite),
		Transport:  d.cfg.options.transport,
	})
	if err != nil {
		return err
	}
	d.findLocal(connect)
	return nil
}

// reachService connects to a metadata service, as often as bg and retry say.
func (d *daemon) reachService(ctx context.Context, ready func(error), cfg metaclient.Config) (*metaclient.Volume, error) {
	retry := d.cfg.options.retry
	if retry < 0 {
		retry = 0
		if d.cfg.options.background {
			retry = retryTime
		}
	}
	end := time.Now().Add(retry)
	for pause := time.Second; ; pause = min(2*pause, retryPause) {
		try, cancel := context.WithTimeout(ctx, connectTime)
		v, err := metaclient.Dial(try, cfg)
		cancel()
		if err == nil || ctx.Err() != nil || !unreachable(err) || time.Until(end) <= 0 {
			return v, err
		}
		if pause == time.Second {
			slog.Warn("no metadata service can be reached; it is tried again", "source", d.cfg.name, "until", end.Format(time.RFC3339), "err", err)
			if d.cfg.options.background {
				ready(&backgroundError{err})
			}
		}
		select {
		case <-time.After(min(pause, time.Until(end))):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// unreachable reports whether a service may be reached later: its host, the service or the network may still be starting.
func unreachable(err error) bool {
	var network net.Error
	var unavailable *metaclient.UnavailableError
	return errors.As(err, &network) || errors.As(err, &unavailable) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// lookupRoot finds the directory of the volume that is to be mounted.
func (d *daemon) lookupRoot(ctx context.Context) (layout.FileID, error) {
	id := layout.RootID
	at := "/"
	if top := d.meta.Top(); top != "" && !strings.HasPrefix(d.cfg.source.dir+"/", top+"/") {
		return 0, fmt.Errorf("the rules for clients let this host use %s of the volume alone (path=), and not %s: mount %s",
			filename.Quote(top), filename.Quote(d.cfg.source.dir), source{d.cfg.source.addrs, top}.shown())
	}
	for _, name := range strings.FieldsFunc(d.cfg.source.dir, func(r rune) bool { return r == '/' }) {
		at = path.Join(at, name)
		found, err := d.meta.Lookup(ctx, metarpc.Cred{}, id, name)
		switch above := (source{d.cfg.source.addrs, path.Dir(at)}).shown(); {
		case errnoIn(err) == unix.ENOENT:
			return 0, fmt.Errorf("the volume has no directory %s: mount %s and make it there, or mount another one", filename.Quote(at), above)
		case err != nil:
			return 0, fmt.Errorf("directory %s of the volume: %w", filename.Quote(at), err)
		case found.Attr.Mode&unix.S_IFMT != unix.S_IFDIR:
			return 0, fmt.Errorf("%s of the volume is not a directory: mount the one that it is in, %s", filename.Quote(at), above)
		}
		id = found.Attr.ID
	}
	return id, nil
}

// dialDevice makes the way to a data server.
func (d *daemon) dialDevice(id layout.DeviceID) (dataplane.Target, error) {
	dev, err := d.meta.Device(metaclient.Soft(context.Background()), id) // for which requests of applications wait
	if err != nil {
		return nil, err
	}
	if dev.Namespace != nil {
		return d.dialNamespace(dev)
	}
	cfg := nfs3.Config{
		Name:        id.String(),
		Connections: d.cfg.options.nconnect,
		RSize:       int(d.cfg.options.rsize),
		WSize:       int(d.cfg.options.wsize),
		Timeout:     d.cfg.options.timeo,
		Patience:    d.cfg.options.patience(),
		TLS:         d.secret,

		ReservedPort: !d.cfg.options.anyPort,
	}
	cfg.Addrs = addrsOf(dev)
	remote, err := nfs3.New(cfg)
	if err != nil {
		return nil, err
	}
	d.remotes.Store(id, remote)
	defer d.mayHaveMoved() // since the service was asked
	if d.cfg.options.local == localOff {
		return remote, nil
	}
	local := localio.New(localio.Config{
		Name: cfg.Name, Addrs: cfg.Addrs, TLS: d.secret, ReadOnly: d.cfg.options.local == localRO, Patience: cfg.Patience,
		Export: d.localExport(id, remote),
	}, remote)
	// So that the first requests take the short way, too, if there is one.
	ctx, cancel := context.WithTimeout(context.Background(), localTime)
	defer cancel()
	local.Status(ctx)
	d.locals.Store(id, local)
	return local, nil
}

// findLocal looks for data servers on this host, if there may be some, so that the first files can be placed there.
func (d *daemon) findLocal(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, statusTime)
	defer cancel()
	if sockets, _ := os.ReadDir(wire.Dir); d.cfg.options.local == localOff || len(sockets) == 0 && len(d.cfg.options.exports) == 0 {
		return
	}
	devices, err := d.meta.Devices(ctx)
	if err != nil {
		slog.Warn("it is not known which data servers there are; those on this host are found when they are used", "err", err)
		return
	}
	var all sync.WaitGroup
	for _, info := range devices {
		if len(info.Device.Namespace) == 0 {
			all.Go(func() { d.data.Connect(ctx, info.Device.ID) }) // who uses it gets the error
		}
	}
	all.Wait()
	for _, e := range d.cfg.options.exports {
		if !slices.ContainsFunc(devices, func(info metarpc.DeviceInfo) bool { return e.names(info) }) {
			slog.Warn("there is no data server of that address and export; weft admin device ls shows them", "option", e)
		}
	}
}

// near returns the data servers on this host.
func (d *daemon) near() []layout.DeviceID { return d.locally((*localio.Target).Near) }

// locally returns the data servers on this host of which is says so.
func (d *daemon) locally(is func(*localio.Target) bool) (ids []layout.DeviceID) {
	d.locals.Range(func(id, t any) bool {
		if is(t.(*localio.Target)) {
			ids = append(ids, id.(layout.DeviceID))
		}
		return len(ids) < metarpc.MaxNear
	})
	return ids
}

// lend returns a descriptor of a data file on this host.
func (d *daemon) lend(ctx context.Context, df *layout.DataFile, write bool) (int, error) {
	t, ok := d.locals.Load(df.Device)
	if !ok {
		return -1, fmt.Errorf("device %v is not on this host", df.Device)
	}
	return t.(*localio.Target).Lend(ctx, df, write)
}

// unmountOnSignal unmounts at SIGTERM and SIGINT; a mount in use is detached, and served until its last user is gone.
func (d *daemon) unmountOnSignal(ctx context.Context) {
	<-ctx.Done()
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGTERM, os.Interrupt)
	for ; ; <-again {
		// Once this mount is detached, what is there is another's.
		m, err := mountAt(d.cfg.mountpoint)
		if err != nil || m.minor() != d.server.ControlID() {
			slog.Warn("detached already; served until nobody uses it", "on", d.cfg.mountpoint)
			continue
		}
		if err = unmount(m.Mountpoint, 0); err != nil {
			slog.Warn("the mount is busy: detached, and served until nobody uses it", "on", m.Mountpoint, "err", err, "users", users(m, false))
			err = unmount(m.Mountpoint, unix.MNT_DETACH)
		}
		if err != nil {
			slog.Error("unmount", "err", err)
		}
	}
}

// close makes everything stable, as far as lingerTime allows, and ends the parts.
func (d *daemon) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), lingerTime)
	defer cancel()
	var err error
	if d.fsys != nil {
		reachable, stop := d.whileReachable(ctx)
		defer stop()
		if err = causeOf(reachable, d.fsys.Close(reachable)); err != nil {
			err = fmt.Errorf("what was written last is not all stable: %w", err)
			slog.Error("unmounted too early", "err", err, "bytes", d.data.Retained())
		}
	}
	d.stop()
	if d.data != nil {
		err = errors.Join(err, d.data.Close())
	}
	if d.nvme != nil {
		err = errors.Join(err, d.nvme.Close())
	}
	if d.meta != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err != nil {
			cancel() // the session runs out instead, and the service finds out what was written
		}
		if e := d.meta.Close(ctx); e != nil {
			slog.Warn("the metadata service will notice the end of the session by itself", "err", e)
		}
	}
	return err
}

// control answers a request on the control socket.
func (d *daemon) control(ctx context.Context, req controlRequest, far *news) (any, error) {
	switch req.Op {
	case "top":
		return d.top(ctx), nil
	case "status":
		return d.status(ctx), nil
	case "remount":
		return d.remounted(req.Flags), nil
	case "sync":
		if req.Reachable {
			reachable, stop := d.whileReachable(ctx)
			defer stop()
			return struct{}{}, causeOf(reachable, d.fsys.Sync(reachable))
		}
		return struct{}{}, d.fsys.Sync(ctx)
	case "stacks":
		return allStacks(), nil
	case "layout":
		l, err := d.meta.DescribeLayout(ctx, req.File)
		if err != nil {
			return nil, err
		}
		return describe(*l), nil
	case "nvme policy":
		policy, err := nvmetcp.ParsePolicy(string(req.Name))
		if err == nil {
			d.nvme.SetPolicy(policy)
		}
		return struct{}{}, err
	case "layout move":
		return d.move(ctx, req.File, req.Device)
	case "verify":
		if req.Verify == nil {
			return nil, unix.EINVAL
		}
		return d.verify(ctx, req.File, *req.Verify)
	case "devices":
		return d.cacheDevices(ctx, string(req.Name))
	case "prefetch":
		return d.fsys.Cache(ctx, self(), req.File, fs.CacheRequest{
			Devices: req.Devices, Limit: req.Limit, Run: req.Run, Progress: func(n int64) { far.bytes.Add(n) },
		})
	case "trace":
		return d.trace(ctx, &req, far)
	case "evict":
		caches, bytes, err := d.fsys.Uncache(ctx, self(), req.File, req.Devices)
		return metarpc.CacheDropResult{Caches: caches, Bytes: bytes}, err
	}
	return nil, fmt.Errorf("this serving process (weft %s) does not know the request %q", version.String(), req.Op)
}

// statusTime bounds how long status waits for the metadata service.
const statusTime = 3 * time.Second

func (d *daemon) status(ctx context.Context) mountStatus {
	st := mountStatus{
		PID:       os.Getpid(),
		Version:   version.String(),
		Since:     d.since,
		MaxWrite:  d.server.MaxWrite(),
		Transport: d.server.Transport().String(),
		Options:   strings.Join(d.cfg.own, ","),
		Retained:  d.data.Retained(),
		Devices:   []deviceStatus{},
		Slow:      d.slow(),
		Discovery: discoveryOf(d.nvme.Discovery()),
	}
	state := d.meta.State()
	st.Service = serviceStatus{
		Address: state.Addr, XprtSec: string(d.cfg.options.secrecy.policy), Connected: state.Connected, Calls: map[string]uint64{}, Leases: state.Leases,
	}
	for op, n := range state.Calls {
		st.Service.Calls[op.String()] = n
	}
	st.Service.Problem = problemOf(&state.State)
	st.Service.addShards(&state)
	ctx, cancel := context.WithTimeout(ctx, statusTime)
	defer cancel()
	if slices.ContainsFunc(state.Sessions, func(s metaclient.State) bool { return s.Connected }) {
		d.askService(ctx, &st)
	}
	d.addUse(ctx, &st)
	d.addPassthrough(&st)
	return st
}

// problemOf says since when and why there is no connection, if there is none.
func problemOf(s *metaclient.State) string {
	if s.Problem == nil {
		return ""
	}
	if s.Since.IsZero() {
		return fmt.Sprintf("not connected yet: %v", s.Problem)
	}
	return fmt.Sprintf("not connected since %s: %v", s.Since.Format(time.RFC3339), s.Problem)
}

// addShards adds where the shards are, and the sessions, if the volume has several.
func (st *serviceStatus) addShards(state *metaclient.VolumeState) {
	if len(state.Ring.Owners) <= 1 {
		return
	}
	st.Shards, st.Epoch = len(state.Ring.Owners), state.Ring.Epoch
	for _, addr := range state.Ring.Services {
		st.Services = append(st.Services, ringService{Address: addr, Shards: []int{}})
	}
	for shard, owner := range state.Ring.Owners {
		if owner >= 0 {
			st.Services[owner].Shards = append(st.Services[owner].Shards, shard)
		} else if len(st.Services) > 0 {
			st.Unserved = append(st.Unserved, shard)
		}
	}
	for i := range state.Sessions {
		s := &state.Sessions[i]
		st.Parts = append(st.Parts, sessionStatus{s.Shard, s.Addr, s.Connected, problemOf(s), s.Since, s.Reconnects, s.Leases})
	}
}

// addUse adds how the mount reaches devices and what it does there, also at those of which the service says nothing.
func (d *daemon) addUse(ctx context.Context, st *mountStatus) {
	subsystems := d.nvme.Stats()
	for _, stats := range d.data.Stats() {
		id := stats.Device.String()
		i := slices.IndexFunc(st.Devices, func(dev deviceStatus) bool { return dev.ID == id })
		if i < 0 {
			i = len(st.Devices)
			st.Devices = append(st.Devices, deviceStatus{ID: id, Problem: "the metadata service says nothing of it"})
		}
		st.Devices[i].reach(ctx, &stats)
		use := useOf(&stats, d.cfg.options.secrecy.data)
		if ns, ok := d.spaces.Load(stats.Device); ok {
			use.addPaths(subsystems, ns.(*layout.Namespace))
		}
		if stats.Ops() > 0 || stats.Outstanding > 0 || stats.Errors > 0 || use.Down || use.Trouble != "" || len(use.Paths) > 0 {
			st.Devices[i].Mount = use
		}
	}
}

// addPassthrough adds what the kernel serves by itself.
func (d *daemon) addPassthrough(st *mountStatus) {
	files, why := d.fsys.Passed()
	st.Passthrough = []passedFile{}
	for _, f := range files {
		mode := "ro"
		if f.Writes {
			mode = "rw"
		}
		st.Passthrough = append(st.Passthrough, passedFile{uint64(f.ID), f.Device.String(), mode, f.Since, f.PIDs})
	}
	if why != nil {
		st.NoPassthrough = why.Error()
	}
}

// waitingFiles is how many files wait for a data server, see metarpc.WaitingFiles.
func waitingFiles(st *metarpc.StatusResult) map[layout.DeviceID]int64 {
	files := map[layout.DeviceID]int64{}
	for _, w := range st.Waiting {
		files[w.Device] = w.Files
	}
	return files
}

// askService adds what the metadata service says, and sees to it that each device is looked at.
func (d *daemon) askService(ctx context.Context, st *mountStatus) {
	service, err := d.meta.Status(ctx)
	if err == nil {
		st.Service.Version = service.Program
		st.Service.Sessions = len(service.Sessions)
		for _, s := range service.Sessions {
			st.Service.Clients = append(st.Service.Clients, clientStatus{
				fmt.Sprintf("%x", s.Client.ID), s.Client.Host, filename.JSON(s.Client.Mount), s.Address, time.Unix(0, s.Renewed), s.Opens, s.Layouts, s.Calls,
			})
		}
		st.Service.Grace = service.Grace
		st.Service.Garbage = service.Garbage
		st.Service.Stale, st.Service.Copied = service.Stale, service.Copied
		st.Service.Catalog = catalogOf(service.Catalog)
		for _, held := range service.HeldUp {
			st.Service.HeldUp = append(st.Service.HeldUp, heldUp{uint64(held.ID), held.What, time.Unix(0, held.Since), held.Hosts})
		}
		var devices []metarpc.DeviceInfo
		if devices, err = d.meta.Devices(ctx); err == nil {
			connect, cancel := context.WithTimeout(ctx, statusTime/2) // a namespace that is away is not waited for
			defer cancel()
			var all sync.WaitGroup
			waiting := waitingFiles(service)
			st.Service.NoServer = waiting[layout.DeviceID{}]
			for _, info := range devices {
				dev := deviceOf(info)
				dev.Waiting = waiting[info.Device.ID]
				st.Devices = append(st.Devices, dev)
				all.Go(func() {
					if err := d.data.Connect(connect, info.Device.ID); err != nil {
						slog.Debug("device", "id", info.Device.ID, "err", err)
					}
				})
			}
			all.Wait()
		}
	}
	if err != nil {
		st.Service.Problem = err.Error()
	}
}
