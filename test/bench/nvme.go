package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// The rows of NVMe/TCP: our host and our target.

// nvmeCommand makes this program serve a file as a namespace: serve-nvme PORTS FILE. It writes the addresses of so many ports, in
// a line, to its standard output.
const nvmeCommand = "serve-nvme"

const (
	nvmeNQN   = "nqn.2024-01.io.github.weftfs:bench"
	nvmeNSID  = 1
	nvmeBlock = 4096 // bytes
)

func serveNVMe(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("%s takes PORTS FILE", nvmeCommand)
	}
	ports, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	_, addrs, end, err := nvmeTarget(args[1], ports)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		fmt.Print(a, " ")
	}
	fmt.Println()
	awaitTerm()
	return end()
}

// loadCommand makes this program measure our host on a namespace, whose first dataSize bytes it uses: load-nvme ADDR NQN NSID JOB DEPTH,
// with JOB as fio has it. It writes the figure.
const loadCommand = "load-nvme"

func loadNVMe(args []string) error {
	if len(args) != 5 {
		return fmt.Errorf("%s takes ADDR NQN NSID JOB DEPTH", loadCommand)
	}
	nsid, err := strconv.ParseUint(args[2], 10, 32)
	if err != nil {
		return err
	}
	w, ok := map[string]workload{"read": seqRead, "write": seqWrite, "randread": randRead}[args[3]]
	if !ok {
		return fmt.Errorf("no job %q", args[3])
	}
	depth, err := strconv.Atoi(args[4])
	if err != nil {
		return err
	}
	v, err := nvmeLoad(args[0], args[1], uint32(nsid), w, depth, sample)
	if err != nil {
		return err
	}
	fmt.Println(v)
	return nil
}

// nvmeTarget makes a target that serves a file at so many ports, 1 the first of them, and returns it with their addresses and its end.
func nvmeTarget(path string, ports int) (t *nvmetest.Target, addrs []netip.AddrPort, end func() error, err error) {
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		return nil, nil, nil, err
	}
	cfg := nvme.Config{
		Subsystems: []nvme.Subsystem{{
			NQN: nvmeNQN, Serial: "bench", AnyHost: true,
			Namespaces: []nvme.Namespace{{NSID: nvmeNSID, Backing: f, BlockSize: nvmeBlock, NGUID: [16]byte{1}}},
		}},
		Log: slog.New(slog.DiscardHandler),
	}
	for i := range ports {
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: uint16(i + 1), Listen: "127.0.0.1:0"})
	}
	if t, err = nvmetest.New(cfg); err != nil {
		return nil, nil, nil, errors.Join(err, f.Close())
	}
	for i := range ports {
		addrs = append(addrs, netip.MustParseAddrPort(t.Addr(uint16(i+1))))
	}
	return t, addrs, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		t.Shutdown(ctx) // an error says that connections were cut
		return f.Close()
	}, nil
}

// nvmeFile makes a file of dataSize bytes.
func (l *lab) nvmeFile() (path string, err error) {
	path = filepath.Join(l.mem, "namespace")
	return path, fillColumn(path, 0, 1)
}

// nvmeHost is how host i connects.
func nvmeHost(i int) nvmetcp.Config {
	id := wire.HostID{15: 1}
	id[0], id[1] = byte(i), byte(i>>8)
	return nvmetcp.Config{
		SubsysNQN: nvmeNQN, HostNQN: fmt.Sprint("nqn.2024-01.io.github.weftfs:host", i), HostID: id,
		Log: slog.New(slog.DiscardHandler),
	}
}

// openNVMe opens a namespace by the addresses of its subsystem, and waits until all are in use.
func openNVMe(cfg nvmetcp.InitiatorConfig, addrs []string, nqn string, nsid uint32) (*nvmetcp.Initiator, *nvmetcp.Namespace, error) {
	host := nvmeHost(0)
	cfg.HostNQN, cfg.HostID, cfg.Log = host.HostNQN, host.HostID, host.Log
	i, err := nvmetcp.NewInitiator(cfg)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	ns, err := i.Open(ctx, addrs, nqn, nsid)
	if err == nil {
		err = await("paths to the namespace", func() bool {
			return slices.ContainsFunc(i.Stats()[0].Namespaces, func(n nvmetcp.NamespaceStats) bool { return n.NSID == nsid && len(n.Paths) == len(addrs) })
		})
	}
	if err != nil {
		return nil, nil, errors.Join(err, i.Close())
	}
	return i, ns, nil
}

// nvmeIO measures our host on our target, one path, with depth commands outstanding, against the loop on the same file with as
// many at most.
func nvmeIO(w workload, depth int) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		path, err := l.nvmeFile()
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, os.Remove(path)) }()
		p, addrs, err := startAddrs(nvmeCommand, "1", path)
		if err != nil {
			return f, err
		}
		f.weft, err = nvmeLoad(addrs[0].String(), nvmeNQN, nvmeNSID, w, depth, sample)
		if err := errors.Join(err, p.stop()); err != nil {
			return f, err
		}
		if p, addrs, err = startAddrs(filesCommand, path); err != nil {
			return f, err
		}
		f.baseline, err = best(filesFormat{}, []file{{addr: addrs[0]}}, w, [2]int{1, 4}, [2]int{1, depth}, [2]int{2, depth / 2}, [2]int{4, depth / 4})
		return f, errors.Join(err, p.stop())
	}
}

// nvmeLoad keeps depth commands outstanding for so long, in the first dataSize bytes of a namespace.
func nvmeLoad(addr, nqn string, nsid uint32, w workload, depth int, long time.Duration) (float64, error) {
	return inTurns(func(t *turn) (float64, float64, time.Duration, error) {
		requests, took, err := nvmeLoadOnce(t, addr, nqn, nsid, w, depth, long)
		return w.figure(requests, took), float64(requests), took, err
	})
}

func nvmeLoadOnce(t *turn, addr, nqn string, nsid uint32, w workload, depth int, long time.Duration) (done int64, took time.Duration, err error) {
	host, ns, err := openNVMe(nvmetcp.InitiatorConfig{}, []string{addr}, nqn, nsid)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	block := ns.Format().BlockSize
	var requests atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, depth)
	all := &offsets{workload: w}
	if err := t.begin(); err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	for range depth {
		r := &nvmetcp.Request{}
		r.Op, r.Blocks, r.Data = wire.OpRead, uint32(w.size/block), make([]byte, w.size)
		if w.write {
			r.Op = wire.OpWrite
			dirty(r.Data)
		}
		start := func() {
			r.SLBA = uint64(all.take() / int64(block))
			ns.Start(r)
			ns.Flush()
		}
		r.Done = func(r *nvmetcp.Request) {
			if r.Err == nil {
				requests.Add(1)
				if time.Since(begin) < long {
					start()
					return
				}
			}
			errs <- r.Err
			wg.Done()
		}
		wg.Add(1)
		start()
	}
	wg.Wait()
	took = time.Since(begin)
	for range depth {
		if e := <-errs; e != nil {
			err = e // any of them: they are alike
		}
	}
	return requests.Load(), took, err
}

const nvmeSpaces = 4

// nvmeVolume starts a volume on nvmeSpaces namespaces, each of a controller of its own.
func (l *lab) nvmeVolume() (*volume, error) { return l.volume(l.mem, "--nvme", fmt.Sprint(nvmeSpaces)) }

// nfsVolume is the same without NVMe.
const nfsVolume = "4 NFSv3 data servers"

// nvmeFUSE runs a fio job on a file striped over four namespaces, against one striped over four NFSv3 data servers.
func nvmeFUSE(w workload, depth int) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		measure := func(v *volume, err error) (figure float64, _ error) {
			if err != nil {
				return 0, err
			}
			err = v.use(func(dir string) (err error) {
				figure, err = w.fio(dir, "--ioengine=io_uring", fmt.Sprint("--iodepth=", depth))
				return err
			})
			return figure, err
		}
		if f.weft, err = measure(l.nvmeVolume()); err == nil {
			f.baseline, err = measure(l.volume(l.mem))
		}
		return f, err
	}
}

// nvmeSpread reads a file that is striped over four namespaces once, and returns how much of it came from the one that most came from, and from
// the one that the least came from.
func nvmeSpread(l *lab) (f figures, err error) {
	v, err := l.nvmeVolume()
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, v.close()) }()
	dir, end, err := v.mount()
	if err != nil {
		return f, err
	}
	_, err = fio(dir, "--size=1g", "--rw=write", "--bs=1m", "--ioengine=psync")
	if err := errors.Join(err, end()); err != nil {
		return f, err
	}
	if dir, end, err = v.mount(); err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, end()) }()
	if _, err := fio(dir, "--size=1g", "--rw=randread", "--bs=64k", "--ioengine=io_uring", "--iodepth=8"); err != nil {
		return f, err
	}
	out, err := l.weft("status", dir, "--json")
	if err != nil {
		return f, err
	}
	var mounts []struct {
		Devices []struct {
			Mount struct{ Reads struct{ Bytes float64 } }
		}
	}
	if err := json.Unmarshal(out, &mounts); err != nil {
		return f, fmt.Errorf("status: %w", err)
	}
	var read []float64
	for _, d := range mounts[0].Devices {
		read = append(read, d.Mount.Reads.Bytes/1e6)
	}
	if len(read) != nvmeSpaces {
		return f, fmt.Errorf("the mount has %d devices, want %d", len(read), nvmeSpaces)
	}
	f.weft, f.baseline = slices.Max(read), slices.Min(read)
	return f, nil
}

const (
	nvmeEventTime = 50 * time.Millisecond  // that an event may take
	nvmeSilence   = 500 * time.Millisecond // time-out of commands
)

// nvmePaths makes a namespace that is reached in two ways, of which the second goes through a relay. One is used until it is no longer the best.
func (l *lab) nvmePaths(do func(t *nvmetest.Target, host *nvmetcp.Initiator, ns *nvmetcp.Namespace, addrs []string, r *relay) error) error {
	path, err := l.nvmeFile()
	if err != nil {
		return err
	}
	t, ports, end, err := nvmeTarget(path, 2)
	if err != nil {
		return err
	}
	r, err := newRelay(ports[1].String())
	if err == nil {
		addrs := []string{ports[0].String(), r.addr()}
		host, ns, e := openNVMe(nvmetcp.InitiatorConfig{Policy: nvmetcp.NUMA, IOTimeout: nvmeSilence}, addrs, nvmeNQN, nvmeNSID)
		if err = e; err == nil {
			err = errors.Join(do(t, host, ns, addrs, r), host.Close())
		}
		r.close()
	}
	return errors.Join(err, end(), os.Remove(path))
}

// readUntil reads, one block after the other, until ok, and returns when the last of them was done.
func readUntil(ns *nvmetcp.Namespace, ok func() bool) (time.Time, error) {
	r := &nvmetcp.Request{}
	r.Op, r.Blocks, r.Data = wire.OpRead, 1, make([]byte, nvmeBlock)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		if err := ns.Do(ctx, r); err != nil {
			return time.Time{}, err
		}
		if at := time.Now(); ok() {
			return at, nil
		}
	}
}

// commandsAt is how many commands a path has done.
func commandsAt(host *nvmetcp.Initiator, addr string) uint64 {
	for _, p := range host.Stats()[0].Namespaces[0].Paths {
		if p.Addr == addr {
			return p.Commands
		}
	}
	return 0
}

// nvmeEvent is the time, in ms, from the moment when the path in use stops being optimized, though it still serves, to the end of the first read
// on the other one.
func nvmeEvent(l *lab) (f figures, err error) {
	f.baseline = ms(nvmeEventTime)
	f.weft, err = inTurns(func(*turn) (figure, ops float64, took time.Duration, err error) {
		err = l.nvmePaths(func(t *nvmetest.Target, host *nvmetcp.Initiator, ns *nvmetcp.Namespace, addrs []string, _ *relay) error {
			if err := t.SetANA(2, 1, wire.ANANonOptimized); err != nil {
				return err
			}
			first := func() bool { return commandsAt(host, addrs[0]) > 100 }
			if _, err := readUntil(ns, first); err != nil {
				return err
			}
			if err := t.SetANA(2, 1, wire.ANAOptimized); err != nil {
				return err
			}
			time.Sleep(nvmeEventTime) // both are optimized, and the first is used
			before := commandsAt(host, addrs[1])
			begin := time.Now()
			if err := t.SetANA(1, 1, wire.ANANonOptimized); err != nil {
				return err
			}
			end, err := readUntil(ns, func() bool { return commandsAt(host, addrs[1]) > before })
			took = end.Sub(begin)
			return err
		})
		return ms(took), 1, took, err
	})
	return f, err
}

// nvmeDead is the time, in ms, from the moment when a connection in use falls silent to the end of the first read that was
// on it.
func nvmeDead(l *lab) (f figures, err error) {
	f.baseline = ms(nvmeSilence)
	f.weft, err = inTurns(func(*turn) (figure, ops float64, took time.Duration, err error) {
		err = l.nvmePaths(func(t *nvmetest.Target, host *nvmetcp.Initiator, ns *nvmetcp.Namespace, addrs []string, r *relay) error {
			if err := t.SetANA(1, 1, wire.ANANonOptimized); err != nil {
				return err
			}
			if _, err := readUntil(ns, func() bool { return commandsAt(host, addrs[1]) > 100 }); err != nil {
				return err
			}
			before := commandsAt(host, addrs[0])
			r.stall()
			begin := time.Now()
			end, err := readUntil(ns, func() bool { return commandsAt(host, addrs[0]) > before })
			took = end.Sub(begin)
			return err
		})
		return ms(took), 1, took, err
	})
	return f, err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// relay passes connections on until it is stalled: then they stay open, and nothing arrives any more.
type relay struct {
	l       net.Listener
	to      string
	silent  chan struct{} // closed by stall
	stalled sync.Once

	mu   sync.Mutex
	open []net.Conn
}

func newRelay(to string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{l: l, to: to, silent: make(chan struct{})}
	go func() { // ends with the listener
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				nc.Close()
				continue
			}
			r.mu.Lock()
			r.open = append(r.open, nc, far)
			r.mu.Unlock()
			go r.pass(nc, far) // as the next one: ends with either connection
			go r.pass(far, nc)
		}
	}()
	return r, nil
}

func (r *relay) addr() string { return r.l.Addr().String() }

func (r *relay) stall() { r.stalled.Do(func() { close(r.silent) }) }

func (r *relay) pass(from, to net.Conn) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-r.silent:
			return
		default:
		}
		if err == nil {
			_, err = to.Write(b[:n])
		}
		if err != nil {
			from.Close()
			to.Close()
			return
		}
	}
}

func (r *relay) close() {
	r.l.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, nc := range r.open {
		nc.Close()
	}
}

// nvmeStorm is how long it takes, in seconds, until the last of many hosts that begin together has asked a discovery service: that one of three
// endpoints which a hash of its name chooses, against one for all.
func nvmeStorm(l *lab) (f figures, err error) {
	var addrs []string
	for i := range 3 {
		path := filepath.Join(l.mem, fmt.Sprint("namespace", i))
		if err := os.WriteFile(path, make([]byte, nvmeBlock), 0o600); err != nil {
			return f, err
		}
		defer os.Remove(path)
		p, at, err := startAddrs(nvmeCommand, "1", path)
		if err != nil {
			return f, err
		}
		defer p.stop()
		addrs = append(addrs, at[0].String())
	}
	one := func(addrs []string) (float64, error) {
		return inTurns(func(*turn) (figure, ops float64, took time.Duration, err error) {
			figure, err = discoverAll(addrs)
			return figure, stormHosts, time.Duration(figure * float64(time.Second)), err
		})
	}
	if f.weft, err = one(addrs); err == nil {
		f.baseline, err = one(addrs[:1])
	}
	return f, err
}

// stormHosts are few enough: a target takes 937 connections of one address at 20,000 descriptors.
const stormHosts = 900

// discoverAll has all hosts ask at once.
func discoverAll(addrs []string) (float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	errs := make(chan error, stormHosts)
	begin := time.Now()
	for i := range stormHosts {
		go func() { // a host
			cfg := nvmetcp.DiscoveryConfig{Controller: nvmeHost(i), Addrs: addrs}
			cfg.Controller.SubsysNQN = wire.DiscoveryNQN
			d, err := nvmetcp.Discover(ctx, cfg)
			if err == nil && len(d.Addrs(nvmeNQN)) == 0 {
				err = d.Missing(nvmeNQN, cfg.Controller.HostNQN, addrs)
			}
			errs <- err
		}()
	}
	var failed error
	for range stormHosts {
		if err := <-errs; err != nil {
			failed = err // any of them: they are alike
		}
	}
	return time.Since(begin).Seconds(), failed
}
