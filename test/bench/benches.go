package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const bareName = "bare go-fuse in memory"

var benches = []bench{
	{name: "fuse-seqread-1m-bare", unit: "MB/s", baseline: bareName, measure: data("--rw=read", "--bs=1m", "--ioengine=psync")},
	{name: "fuse-seqwrite-1m-bare", unit: "MB/s", baseline: bareName, measure: data("--rw=write", "--bs=1m", "--ioengine=psync")},
	{name: "fuse-randread-4k-bare", unit: "IOPS", baseline: bareName, measure: data("--rw=randread", "--bs=4k", "--ioengine=psync")},
	{name: "dp-seqread-1m", unit: "MB/s", baseline: tcpName, goal: atLeast(0.85), measure: dpFiles(seqRead)},
	{name: "dp-seqwrite-1m", unit: "MB/s", baseline: tcpName, goal: atLeast(0.85), measure: dpFiles(seqWrite)},
	{name: "ganesha-dp-seqread-1m", unit: "MB/s", baseline: nfsName, goal: atLeast(1), measure: dpGanesha(seqRead)},
	{name: "ganesha-dp-seqwrite-1m", unit: "MB/s", baseline: nfsName, goal: atLeast(1), measure: dpGanesha(seqWrite)},
	{name: "ganesha-dp-randread-4k", unit: "IOPS", baseline: nfsName, goal: atLeast(1), measure: dpGanesha(randRead)},
	{name: "nvme-seqread-1m", unit: "MB/s", baseline: tcpName, goal: atLeast(0.85), measure: nvmeIO(seqRead, 16)},
	{name: "nvme-seqwrite-1m", unit: "MB/s", baseline: tcpName, goal: atLeast(0.85), measure: nvmeIO(seqWrite, 16)},
	{name: "nvme-randread-4k", unit: "IOPS", baseline: tcpName, goal: atLeast(0.6), measure: nvmeIO(randRead, 32)},
	{name: "nvme-fuse-seqread-1m", unit: "MB/s", baseline: nfsVolume, goal: atLeast(0.9), measure: nvmeFUSE(seqRead, 8)},
	{name: "nvme-fuse-seqwrite-1m", unit: "MB/s", baseline: nfsVolume, goal: atLeast(0.9), measure: nvmeFUSE(seqWrite, 8)},
	{name: "nvme-fuse-randread-4k", unit: "IOPS", baseline: nfsVolume, goal: atLeast(0.9), measure: nvmeFUSE(randRead, 32)},
	{name: "nvme-spread", unit: "MB", baseline: "the namespace with the fewest", goal: atMost(1.05), measure: nvmeSpread},
	{name: "nvme-paths-event", unit: "ms", baseline: "the time allowed", goal: atMost(1), measure: nvmeEvent},
	{name: "nvme-paths-dead", unit: "ms", baseline: "the time-out of commands", goal: atMost(2), measure: nvmeDead},
	{name: "nvme-boot-storm", unit: "s", baseline: "1 discovery endpoint", measure: nvmeStorm},
	{name: "server-seqread-1m", unit: "MB/s", baseline: ganeshaName, goal: atLeast(1.1), measure: server(seqRead)},
	{name: "server-seqwrite-1m", unit: "MB/s", baseline: ganeshaName, goal: atLeast(1.1), measure: server(seqWrite)},
	{name: "server-randread-4k", unit: "IOPS", baseline: ganeshaName, goal: atLeast(1.1), measure: server(randRead)},
	{name: "server-bigset-seqread", unit: "MB/s", baseline: "the raw disk", goal: atLeast(0.9), measure: bigSet},
	{name: "server-bigset-buffered", unit: "MB/s", baseline: "the raw disk", measure: bigSetBuffered},
	{name: "stripe-scale-2", unit: "MB/s", baseline: "1 server", goal: atLeast(1.9), measure: scale(shape{rate: slowRate}, 2, connections, 1, connections)},
	{name: "stripe-scale-4", unit: "MB/s", baseline: "1 server", goal: atLeast(3.7), measure: scale(shape{rate: slowRate}, 4, connections, 1, connections)},
	{name: "nconnect-scale-2", unit: "MB/s", baseline: "1 connection", goal: atLeast(1.9), measure: scale(shape{connRate: slowRate / 2}, 1, 2, 1, 1)},
	{name: "nconnect-scale-4", unit: "MB/s", baseline: "1 connection", goal: atLeast(3.8), measure: scale(shape{connRate: slowRate / 2}, 1, 4, 1, 1)},
	{name: "nconnect-scale-8", unit: "MB/s", baseline: "1 connection", goal: atLeast(7.6), measure: scale(shape{connRate: slowRate / 2}, 1, 8, 1, 1)},
	{name: "fuse-seqread-1m-psync", unit: "MB/s", baseline: "data plane, depth 1", goal: atLeast(0.5), measure: fioData(seqRead, 1, "--ioengine=psync")},
	{name: "fuse-seqread-1m-qd8", unit: "MB/s", baseline: "data plane, depth 8", goal: atLeast(0.5), measure: fioData(seqRead, 8, "--ioengine=io_uring", "--iodepth=8")},
	{name: "fuse-seqwrite-1m-psync", unit: "MB/s", baseline: "data plane, depth 1", goal: atLeast(0.5), measure: fioData(seqWrite, 1, "--ioengine=psync")},
	{name: "fuse-seqwrite-1m-qd8", unit: "MB/s", baseline: "data plane, depth 8", goal: atLeast(0.5), measure: fioData(seqWrite, 8, "--ioengine=io_uring", "--iodepth=8")},
	{name: "cpu-seqread", unit: "s/GB", baseline: "bare go-fuse and NFSv3 loop", goal: atMost(1.1), measure: cpuSeqRead},
	{name: "fuse-randread-4k-qd16", unit: "IOPS", baseline: "bare go-fuse that sleeps", goal: atLeast(0.95), measure: slowRandRead(16)},
	{name: "fuse-randread-4k-qd64", unit: "IOPS", baseline: "bare go-fuse that sleeps", goal: atLeast(0.9), measure: slowRandRead(64)},
	{name: "slow-mirror", unit: "µs p99.9", baseline: "both copies fast", goal: atMost(2), measure: slowMirror},
	{name: "blackhole-qd64", unit: "IOPS", baseline: "all 4 servers alive", goal: atLeast(0.9), measure: blackHole},
	{name: "cp-2g", unit: "MB/s", baseline: "nfs-cp, same NFS-Ganesha", goal: atLeast(2), measure: copyFile},
	{name: "fuse-8m-psync", unit: "MB/s", baseline: "1 server", goal: atLeast(3), measure: eightMiB},
	{name: "fuse-shared-write", unit: "IOPS", baseline: "1 writer", goal: atLeast(3.5), measure: sharedWrite},
	{name: "shared-strided-2", unit: "MB/s", baseline: ownName, goal: atLeast(0.5), measure: sharedFile(2, strided)},
	{name: "shared-strided-4", unit: "MB/s", baseline: ownName, goal: atLeast(0.5), measure: sharedFile(4, strided)},
	{name: "shared-blocks-2", unit: "MB/s", baseline: ownName, goal: atLeast(0.9), measure: sharedFile(2, inBlocks)},
	{name: "shared-blocks-4", unit: "MB/s", baseline: ownName, goal: atLeast(0.9), measure: sharedFile(4, inBlocks)},
	{name: "lock-write-unlock", unit: "op/s", baseline: "the writes alone", measure: lockWriteUnlock},
	{name: "md-create-1", unit: "op/s", baseline: bareName, goal: atLeast(0.3), durable: true, third: "local disk", measure: metadata(1, create)},
	{name: "md-create-16", unit: "op/s", baseline: bareName, goal: atLeast(0.4), durable: true, third: "local disk", measure: metadata(16, create)},
	{name: "md-mkdir-1", unit: "op/s", baseline: bareName, goal: atLeast(0.3), durable: true, third: "local disk", measure: metadata(1, mkdir)},
	{name: "md-unlink-1", unit: "op/s", baseline: bareName, goal: atLeast(0.3), durable: true, third: "local disk", measure: metadata(1, unlink)},
	{name: "md-stat-leased", unit: "op/s", baseline: bareName, goal: atLeast(0.95), third: "local disk", measure: metadata(1, statLeased)},
	{name: "md-stat-cold", unit: "op/s", baseline: bareName, goal: atLeast(0.4), third: "local disk", measure: statCold},
	{name: "md-hotdir", unit: "op/s", baseline: "16 directories", goal: atLeast(0.7), durable: true, measure: hotDir},
	{name: "md-neighbour", unit: "op/s", baseline: "alone", goal: atLeast(0.7), durable: true, third: "without a rule", skip: 2, measure: neighbour},
	{name: "mdrpc-create-pebble", unit: "op/s", baseline: rawEngine, goal: atLeast(0.35), durable: true, measure: rpcCreates(pebbleUnderTest)},
	{name: "mdrpc-create-etcd", unit: "op/s", baseline: rawEngine, goal: atLeast(0.7), durable: true, measure: rpcCreates(etcdUnderTest)},
	{name: "mdrpc-create-postgres", unit: "op/s", baseline: rawEngine, goal: atLeast(0.7), durable: true, measure: rpcCreates(postgresUnderTest)},
	{name: "md-depth", unit: "µs", baseline: "10,000 files", goal: atMost(1.5), durable: true, measure: depth},
	{name: "untar-10k", unit: "files/s", baseline: localName, durable: true, measure: trees(smallFiles, untar)},
	{name: "ls-lR-10k", unit: "files/s", baseline: localName, measure: trees(smallFiles, lsLR)},
	{name: "find-10k", unit: "files/s", baseline: localName, measure: trees(smallFiles, findSize)},
	{name: "git-status-10k", unit: "files/s", baseline: localName, measure: trees(smallFiles, gitStatus)},
	{name: "rm-rf-10k", unit: "files/s", baseline: localName, durable: true, measure: trees(smallFiles, rmRF)},
	{name: "untar", unit: "files/s", baseline: localName, goal: atLeast(0.16), durable: true, measure: trees(goTree, untar)},
	{name: "rm-rf", unit: "files/s", baseline: localName, goal: atLeast(0.25), durable: true, measure: trees(goTree, rmRF)},
	{name: "git-clone", unit: "files/s", baseline: localName, goal: atLeast(0.3), durable: true, measure: trees(goTree, gitClone)},
	{name: "loop-randread-4k-qd1", unit: "IOPS", baseline: goFuseName, goal: atLeast(0.9), measure: transports(fastServer, loopRun.io, "--rw=randread", "--bs=4k", "--ioengine=psync")},
	{name: "loop-randread-4k-qd16", unit: "IOPS", baseline: goFuseName, goal: atLeast(2.5), measure: transports(fastServer, loopRun.io, "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--iodepth=16")},
	{name: "loop-randread-4k-qd16-cpu", unit: "I/O per CPU s", baseline: goFuseName, goal: atLeast(2), measure: transports(fastServer, loopRun.perCPU, "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--iodepth=16")},
	{name: "loop-randread-4k-qd64", unit: "IOPS", baseline: goFuseName + ", 0.5 ms", goal: atLeast(1.5), measure: transports(slowServer, loopRun.io, "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--iodepth=64")},
	{name: "loop-randread-4k-4jobs", unit: "IOPS", baseline: goFuseName, goal: atLeast(1.5), measure: transports(fastServer, loopRun.io, "--rw=randread", "--bs=4k", "--ioengine=psync", "--numjobs=4")},
	{name: "loop-seqread-1m-qd8", unit: "MB/s", baseline: goFuseName, goal: atLeast(0.95), measure: transports(fastServer, loopRun.mb, "--rw=read", "--bs=1m", "--ioengine=io_uring", "--iodepth=8")},
	{name: "loop-seqwrite-1m-qd8", unit: "MB/s", baseline: goFuseName, goal: atLeast(0.95), measure: transports(fastServer, loopRun.mb, "--rw=write", "--bs=1m", "--ioengine=io_uring", "--iodepth=8")},
	{name: "local-dp-randread-4k-disk", unit: "IOPS", baseline: "fio io_uring, the same file", goal: atLeast(0.8), measure: localDisk(false)},
	{name: "local-dp-randread-4k-disk-cpu", unit: "µs per I/O", baseline: "fio io_uring, the same file", goal: atMost(1.5), measure: localDisk(true)},
	{name: "local-dp-randread-4k-vs-rpc", unit: "IOPS", baseline: "by RPC, same server", goal: atLeast(8), measure: localCallers},
	{name: "local-dp-write-4k-vs-rpc", unit: "IOPS", baseline: "by RPC, same server", goal: atLeast(3), measure: localWrites},
	{name: "local-seqread-1m-vs-rpc", unit: "MB/s", baseline: "localio=off", goal: atLeast(1.8), measure: localRead},
	{name: "local-pt-seqread-1m-tmpfs", unit: "MB/s", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(seqRead, tmpfs)},
	{name: "local-pt-seqwrite-1m-tmpfs", unit: "MB/s", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(seqWrite, tmpfs)},
	{name: "local-pt-randread-4k-tmpfs", unit: "IOPS", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(randRead, tmpfs)},
	{name: "local-pt-seqread-1m-disk", unit: "MB/s", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(seqRead, disk)},
	{name: "local-pt-seqwrite-1m-disk", unit: "MB/s", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(seqWrite, disk)},
	{name: "local-pt-randread-4k-disk", unit: "IOPS", baseline: passName, third: rawName, goal: atLeast(0.97), measure: localPassed(randRead, disk)},
	{name: "prefetched-read-1m", unit: "MB/s", baseline: passName, third: rawName, goal: atLeast(0.95), measure: prefetched},
	{name: "local-striped-seqread-1m", unit: "MB/s", baseline: "bare go-fuse, pread", goal: atLeast(0.95), measure: localStriped(seqRead)},
	{name: "local-striped-seqwrite-1m", unit: "MB/s", baseline: "bare go-fuse, pwrite", goal: atLeast(0.95), measure: localStriped(seqWrite)},
	{name: "lab-kernel-seqread-1m", unit: "MB/s", baseline: kernelName, guest: true, measure: onGuest(seqRead, 8)},
	{name: "lab-kernel-seqwrite-1m", unit: "MB/s", baseline: kernelName, guest: true, measure: onGuest(seqWrite, 8)},
	{name: "lab-kernel-randread-4k", unit: "IOPS", baseline: kernelName, guest: true, measure: onGuest(randRead, 16)},
}

// The metadata loads.
const statBatch = 50

var (
	create     = load{1, prepareCreate}
	mkdir      = load{1, prepareMkdir}
	unlink     = load{1, prepareUnlink}
	statLeased = load{statBatch, prepareStat}
)

// data runs a fio job on weft, with catalog and data servers on tmpfs, and on the bare file system.
func data(args ...string) func(*lab) (figures, error) {
	job := append(args, timed)
	fill := []string{"--rw=write", "--bs=1m", "--ioengine=psync"}
	one := func(dir string) (float64, error) {
		if _, err := fio(dir, fill...); err != nil {
			return 0, err
		}
		r, err := fio(dir, job...)
		if args[1] == "--bs=4k" {
			return r.iops, err
		}
		return r.bw / 1e6, err
	}
	return func(l *lab) (f figures, err error) {
		err = l.onWeft(l.mem, func(dir string) (err error) { f.weft, err = one(dir); return })
		if err == nil {
			err = l.onBare(time.Minute, 0, func(dir string) (err error) { f.baseline, err = one(dir); return })
		}
		return f, err
	}
}

// onWeft runs do on a mount of a new volume.
func (l *lab) onWeft(where string, do func(dir string) error) error {
	v, err := l.volume(where)
	if err != nil {
		return err
	}
	return v.use(do)
}

func (l *lab) onBare(validity time.Duration, files int, do func(dir string) error) error {
	return l.onBareProcess(validity, files, 0, func(dir string, _ *process) error { return do(dir) })
}

// onBareProcess is onBare whose READs take a while; do gets to know the serving process.
func (l *lab) onBareProcess(validity time.Duration, files int, delay time.Duration, do func(dir string, p *process) error) error {
	if turns != nil {
		return nil // a baseline
	}
	dir, p, err := l.bare(validity, files, delay, "")
	if err != nil {
		return err
	}
	return errors.Join(do(dir, p), p.stop())
}

// hotDir measures creates by 16 workers in one directory, on weft, against the same in a directory each.
func hotDir(l *lab) (f figures, err error) {
	one := func(dirs int) (v float64, err error) {
		err = l.onWeft(l.disk, func(dir string) (err error) { v, err = rate(dir, 16, dirs, create); return })
		return v, err
	}
	if f.weft, err = one(1); err == nil {
		f.baseline, err = one(16)
	}
	return f, err
}

// A load prepares a directory for a worker and returns what the worker calls n times, each time with
// another i. A call does batch operations. Names begin with who, which no other worker in the directory
// has.
type load struct {
	batch   int
	prepare func(dir, who string, n int) (op func(i int) error, err error)
}

// perWorker is how many operations a worker does, perTurn in one turn.
const perWorker, perTurn = 2000, 200

// metadata measures operations by workers in a directory each, on weft with its catalog on the disk, on the bare file
// system, and on the disk's file system.
func metadata(workers int, what load) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		rate := func(dir string) (float64, error) { return rate(dir, workers, workers, what) }
		err = l.onWeft(l.disk, func(dir string) (err error) { f.weft, err = rate(dir); return })
		if err == nil {
			err = l.onBare(time.Minute, 0, func(dir string) (err error) { f.baseline, err = rate(dir); return })
		}
		if err != nil || turns != nil {
			return f, err
		}
		local, err := os.MkdirTemp(l.disk, "local")
		if err != nil {
			return f, err
		}
		f.disk, err = rate(local)
		return f, errors.Join(err, os.RemoveAll(local))
	}
}

// rate is operations per second of all workers together, which share so many directories.
func rate(dir string, workers, dirs int, what load) (float64, error) {
	for d := range dirs {
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprint("w", d)), 0o755); err != nil {
			return 0, err
		}
	}
	n := perWorker
	if turns != nil {
		n = perTurn
	}
	return inTurns(func(t *turn) (figure, ops float64, took time.Duration, err error) {
		took, err = rateOnce(t, dir, workers, dirs, n, what)
		ops = float64(workers * n * what.batch)
		return ops / took.Seconds(), ops, took, err
	})
}

func rateOnce(t *turn, dir string, workers, dirs, n int, what load) (took time.Duration, err error) {
	ops := make([]func(int) error, workers)
	for w := range workers {
		who := fmt.Sprint("t", t.index, "w", w, "-")
		if ops[w], err = what.prepare(filepath.Join(dir, fmt.Sprint("w", w%dirs)), who, n); err != nil {
			return 0, err
		}
	}
	if err := t.begin(); err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	start := time.Now()
	for _, op := range ops {
		wg.Add(1)
		go func() { // one worker
			defer wg.Done()
			for i := range n {
				if err := op(i); err != nil {
					failed.Store(&err)
					return
				}
			}
		}()
	}
	wg.Wait()
	took = time.Since(start)
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return took, nil
}

func prepareCreate(dir, who string, _ int) (func(int) error, error) {
	return func(i int) error { return touch(filepath.Join(dir, fmt.Sprint(who, i))) }, nil
}

func touch(path string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	return unix.Close(fd)
}

func prepareMkdir(dir, who string, _ int) (func(int) error, error) {
	return func(i int) error { return unix.Mkdir(filepath.Join(dir, fmt.Sprint(who, i)), 0o755) }, nil
}

func prepareUnlink(dir, who string, n int) (func(int) error, error) {
	for i := range n {
		if err := touch(filepath.Join(dir, fmt.Sprint(who, i))); err != nil {
			return nil, err
		}
	}
	return func(i int) error { return unix.Unlink(filepath.Join(dir, fmt.Sprint(who, i))) }, nil
}

// prepareStat asks again and again for attributes that the client may keep.
func prepareStat(dir, who string, _ int) (func(int) error, error) {
	const files = 100
	for i := range files {
		if err := touch(filepath.Join(dir, fmt.Sprint(who, i))); err != nil {
			return nil, err
		}
	}
	return func(i int) error {
		path := filepath.Join(dir, fmt.Sprint(who, i%files))
		for range statBatch {
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// statCold asks once for each of many files that this mount has not seen; the baseline's kernel caches nothing.
func statCold(l *lab) (f figures, err error) {
	all := func(dir string) (float64, error) {
		n := perWorker
		if turns != nil {
			n /= turns.n
		}
		return inTurns(func(t *turn) (figure, ops float64, took time.Duration, err error) {
			start := time.Now()
			for i := range n {
				var st unix.Stat_t
				if err := unix.Stat(filepath.Join(dir, fmt.Sprint("f", t.index*n+i)), &st); err != nil {
					return 0, 0, 0, err
				}
			}
			took = time.Since(start)
			return float64(n) / took.Seconds(), float64(n), took, nil
		})
	}
	fill := func(dir string) error {
		for i := range perWorker {
			if err := touch(filepath.Join(dir, fmt.Sprint("f", i))); err != nil {
				return err
			}
		}
		return nil
	}
	v, err := l.volume(l.disk)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, v.close()) }()
	for _, do := range []func(dir string) error{fill, func(dir string) (err error) { f.weft, err = all(dir); return }} {
		dir, end, err := v.mount()
		if err != nil {
			return f, err
		}
		if err := errors.Join(do(dir), end()); err != nil {
			return f, err
		}
	}
	err = l.onBare(0, perWorker, func(dir string) (err error) { f.baseline, err = all(dir); return })
	if err != nil || turns != nil {
		return f, err
	}
	local, err := os.MkdirTemp(l.disk, "local")
	if err != nil {
		return f, err
	}
	if err = fill(local); err == nil {
		f.disk, err = all(local)
	}
	return f, errors.Join(err, os.RemoveAll(local))
}
