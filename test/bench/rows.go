package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The rows of the data plane and of data servers.

const (
	tcpName     = "bare Go TCP loop"
	nfsName     = "simple Go NFSv3 loop"
	ganeshaName = "NFS-Ganesha, same clients"
	connections = 4 // to each data server
)

// dpFiles measures the data plane on four data servers against a loop that knows nothing but sizes and offsets, on the same
// files.
func dpFiles(w workload) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		c, err := l.dataServers(l.mem, 4)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, c.close()) }()
		if f.weft, err = plane(c.files, w, connections, 16, sample); err != nil {
			return f, err
		}
		p, addrs, err := startAddrs(append([]string{filesCommand}, c.paths()...)...)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, p.stop()) }()
		var files []file
		for _, a := range addrs {
			files = append(files, file{addr: a})
		}
		f.baseline, err = best(filesFormat{}, files, w, [2]int{connections, 1}, [2]int{1, connections})
		return f, err
	}
}

// loopTries are the numbers of connections and depths of which a baseline takes the best.
func (w workload) loopTries() [][2]int {
	if w.size < 64<<10 {
		return [][2]int{{1, 16}, {4, 4}}
	}
	return [][2]int{{1, 4}, {4, 1}, {4, 4}}
}

// dpGanesha measures the data plane on one Ganesha, at its best depth, as the loop is.
func dpGanesha(w workload) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		c, end, err := l.ganesha()
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, end()) }()
		if f.weft, err = bestPlane(c.files, w); err != nil {
			return f, err
		}
		f.baseline, err = best(newNFSFormat(), c.files, w, w.loopTries()...)
		return f, err
	}
}

// server measures weftd data against Ganesha, with the same clients.
func server(w workload) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		c, err := l.dataServers(l.mem, 1)
		if err != nil {
			return f, err
		}
		f.weft, err = bestClient(c.files, w)
		if err := errors.Join(err, c.close()); err != nil {
			return f, err
		}
		c, end, err := l.ganesha()
		if err != nil {
			return f, err
		}
		f.baseline, err = bestClient(c.files, w)
		return f, errors.Join(err, end())
	}
}

// bestClient is what a server does for the simple loop or for the data plane, whichever asks it for more: with one core each, a
// slow client hides how fast the server is.
func bestClient(files []file, w workload) (float64, error) {
	simple, err := best(newNFSFormat(), files, w, w.loopTries()...)
	if err != nil {
		return 0, err
	}
	v, err := bestPlane(files, w)
	return max(v, simple), err
}

// bestPlane is the data plane at its best depth.
func bestPlane(files []file, w workload) (float64, error) {
	return bestOf(func(conns, depth int, long time.Duration) (float64, error) {
		return plane(files, w, conns, depth, long)
	}, [][2]int{{connections, 4}, {connections, 16}})
}

// scale measures the data plane on servers, or with connections, that are slow each: many against one.
func scale(s shape, servers, conns, baseServers, baseConns int) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		one := func(servers, conns int) (v float64, err error) {
			c, err := l.shapedServers(l.mem, slices.Repeat([]shape{s}, servers)...)
			if err != nil {
				return 0, err
			}
			v, err = plane(c.files, seqRead, conns, 16, sample)
			return v, errors.Join(err, c.close())
		}
		if f.weft, err = one(servers, conns); err == nil {
			f.baseline, err = one(baseServers, baseConns)
		}
		return f, err
	}
}

const (
	bigSetMemory = 256 << 20 // of the server, in bytes
	bigSetDepth  = 8
)

// bigSet measures a data server that has a third of the memory of what it is asked for, once, from the disk, against reading
// the same files past the page cache.
func bigSet(l *lab) (figures, error) { return bigSetWith(l, "--io=auto") }

// bigSetBuffered is what the page cache makes of that.
func bigSetBuffered(l *lab) (figures, error) { return bigSetWith(l, "--io=buffered") }

func bigSetWith(l *lab, args ...string) (f figures, err error) {
	c := new(columns)
	defer func() { err = errors.Join(err, c.close()) }()
	join, end, err := memoryGroup(bigSetMemory)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, end()) }()
	if c, err = l.dataServers(l.disk, 2, args...); err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, c.srv.stop()); c.srv = nil }() // before the group's end
	for i, path := range c.paths() {
		if err := fillColumn(path, 0, 1); err != nil { // all of it, in each: 1 GiB together
			return f, err
		}
		if err := dropPages(path); err != nil {
			return f, fmt.Errorf("file %d: %w", i, err)
		}
	}
	if err := join(c.srv.cmd.Process.Pid); err != nil {
		return f, err
	}
	if f.weft, err = readOnce(c.files); err != nil {
		return f, err
	}
	f.baseline, err = directRead(c.paths(), unit, bigSetDepth)
	return f, err
}

// dropPages makes a file's pages clean and drops them.
func dropPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// readOnce reads each file once, in order, bigSetDepth requests at once.
func readOnce(files []file) (float64, error) {
	begin := time.Now()
	for i := range files {
		var next, requests atomic.Int64
		var wg sync.WaitGroup
		errs := make(chan error, bigSetDepth)
		for range bigSetDepth {
			wg.Go(func() { // a connection
				errs <- loopConn(newNFSFormat(), &files[i], seqRead, 1, &requests, func() int64 {
					off := (next.Add(1) - 1) * unit
					if off >= dataSize {
						return noMore
					}
					return off
				})
			})
		}
		wg.Wait()
		for range bigSetDepth {
			if err := <-errs; err != nil {
				return 0, err
			}
		}
	}
	return float64(len(files)) * dataSize / 1e6 / time.Since(begin).Seconds(), nil
}

// On FUSE.

// fioData runs a fio job on weft, on the tmpfs, against the data plane alone, of depth requests.
func fioData(w workload, depth int, args ...string) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		err = l.onWeft(l.mem, func(dir string) (err error) { f.weft, err = w.fio(dir, args...); return })
		if err != nil {
			return f, err
		}
		c, err := l.dataServers(l.mem, 4)
		if err != nil {
			return f, err
		}
		f.baseline, err = plane(c.files, w, connections, depth, sample)
		return f, errors.Join(err, c.close())
	}
}

// fio fills a file and runs a job on it.
func (w workload) fio(dir string, args ...string) (float64, error) {
	r, err := w.fioCPU(dir, func() (float64, error) { return 0, nil }, args...)
	return w.ofFio(r), err
}

// ofFio is the figure of a job's result.
func (w workload) ofFio(r fioResult) float64 {
	if w.size < 64<<10 {
		return r.iops
	}
	return r.bw / 1e6
}

// rw is what fio calls the workload.
func (w workload) rw() string {
	switch {
	case w.write:
		return "--rw=write"
	case w.random:
		return "--rw=randread"
	}
	return "--rw=read"
}

// fioCPU does so, and adds to the CPU time that fio takes what others take meanwhile.
func (w workload) fioCPU(dir string, others func() (float64, error), args ...string) (r fioResult, err error) {
	if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=psync"); err != nil {
		return r, err
	}
	before, err := others()
	if err != nil {
		return r, err
	}
	if r, err = fio(dir, append([]string{w.rw(), fmt.Sprint("--bs=", w.size), timed}, args...)...); err != nil {
		return r, err
	}
	after, err := others()
	r.cpu += after - before
	return r, err
}

// slowRandRead measures random reads of servers that answer after half a millisecond, with the transport that is better at it,
// against a FUSE handler that sleeps so long.
func slowRandRead(depth int) func(*lab) (figures, error) {
	args := []string{"--ioengine=io_uring", fmt.Sprint("--iodepth=", depth)}
	return func(l *lab) (f figures, err error) {
		v, err := l.slowVolume(4, shape{delay: slowDelay})
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, v.close()) }()
		for _, transport := range []string{"device", "gofuse"} {
			dir, end, err := v.mount("transport=" + transport)
			if err != nil {
				return f, err
			}
			iops, err := randRead.fio(dir, args...)
			if err := errors.Join(err, end()); err != nil {
				return f, err
			}
			f.weft = max(f.weft, iops) // the best transport
		}
		err = l.onBareProcess(time.Minute, 0, slowDelay, func(dir string, _ *process) (err error) {
			f.baseline, err = randRead.fio(dir, args...)
			return err
		})
		return f, err
	}
}

const (
	slowDelay = 500 * time.Microsecond
	slowRate  = 100e6 // bytes per second
)

// eightMiB measures requests of 8 MiB, one at a time, on four servers against one.
func eightMiB(l *lab) (f figures, err error) {
	one := func(servers int) (v float64, err error) {
		vol, err := l.slowVolume(servers, shape{delay: slowDelay, rate: slowRate})
		if err != nil {
			return 0, err
		}
		err = vol.use(func(dir string) (err error) {
			v, err = workload{size: 8 << 20}.fio(dir, "--ioengine=psync")
			return
		}, "max_write=8MiB")
		return v, err
	}
	if f.weft, err = one(4); err == nil {
		f.baseline, err = one(1)
	}
	return f, err
}

// sharedWrite measures four writers of one file against one.
func sharedWrite(l *lab) (f figures, err error) {
	v, err := l.slowVolume(4, shape{delay: slowDelay})
	if err != nil {
		return f, err
	}
	return f, v.use(func(dir string) error {
		one := func(jobs int) (float64, error) {
			r, err := workload{write: true, size: 4 << 10}.fioCPU(dir, func() (float64, error) { return 0, nil },
				"--ioengine=psync", "--rw=randwrite", fmt.Sprint("--numjobs=", jobs), "--group_reporting")
			return r.iops, err
		}
		if f.weft, err = one(4); err == nil {
			f.baseline, err = one(1)
		}
		return err
	})
}

// cpuSeqRead compares what all processes take for a gigabyte: those of weft against those of the bare file system and of a
// loop on a data server together.
func cpuSeqRead(l *lab) (f figures, err error) {
	job := func(dir string, others func() (float64, error)) (float64, error) {
		r, err := seqRead.fioCPU(dir, others, "--ioengine=psync")
		return r.cpu / (r.bytes / 1e9), err
	}
	v, err := l.volume(l.mem)
	if err != nil {
		return f, err
	}
	err = v.use(func(dir string) (err error) {
		f.weft, err = job(dir, func() (float64, error) { return cpuOf(v.srv.cmd.Process.Pid, mountPID(dir)) })
		return err
	})
	if err != nil {
		return f, err
	}
	err = l.onBareProcess(time.Minute, 0, 0, func(dir string, p *process) (err error) {
		f.baseline, err = job(dir, func() (float64, error) { return cpuOf(p.cmd.Process.Pid) })
		return err
	})
	if err != nil {
		return f, err
	}
	c, err := l.dataServers(l.mem, 1)
	if err != nil {
		return f, err
	}
	both := []int{os.Getpid(), c.srv.cmd.Process.Pid}
	before, err := cpuOf(both...)
	if err != nil {
		return f, errors.Join(err, c.close())
	}
	bw, err := loop(newNFSFormat(), c.files, seqRead, 1, 1, sample)
	if err != nil {
		return f, errors.Join(err, c.close())
	}
	after, err := cpuOf(both...)
	f.baseline += (after - before) / (bw / 1e3 * sample.Seconds())
	return f, errors.Join(err, c.close())
}

// cpuOf is how long processes have used processors, in seconds.
func cpuOf(pids ...int) (sum float64, err error) {
	for _, pid := range pids {
		b, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "stat"))
		if err != nil {
			return 0, err
		}
		var utime, stime float64
		_, rest, _ := strings.Cut(string(b), ") ") // behind the name, which may have blanks
		if _, err := fmt.Sscan(strings.Join(strings.Fields(rest)[11:13], " "), &utime, &stime); err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		sum += (utime + stime) / 100 // USER_HZ
	}
	return sum, nil
}

const (
	mirrorDelay = 50 * time.Millisecond
	mirrorTime  = 4 * time.Second // for the slowest of a thousand reads to be several
)

// slowMirror measures the slowest in a thousand reads, one at a time, of a file of two copies, one on a server that answers late,
// against two fast servers.
func slowMirror(l *lab) (f figures, err error) {
	one := func(second shape) (v float64, err error) {
		c, err := l.shapedServers(l.mem, shape{}, second)
		if err != nil {
			return 0, err
		}
		vol, err := l.volumeOn(c)
		if err != nil {
			return 0, err
		}
		err = vol.use(func(dir string) error {
			if _, err := l.weft("layout", "set", dir, "--stripe-count", "1", "--mirrors", "2"); err != nil {
				return err
			}
			if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=io_uring", "--iodepth=16"); err != nil {
				return err
			}
			r, err := fio(dir, "--rw=randread", "--bs=4k", "--ioengine=psync", "--time_based", fmt.Sprint("--runtime=", mirrorTime.Seconds()))
			v = r.p999 * 1e6
			return err
		})
		return v, err
	}
	if f.weft, err = one(shape{delay: mirrorDelay}); err == nil {
		f.baseline, err = one(shape{})
	}
	return f, err
}

// blackHole measures reads of files on three data servers while the fourth takes requests, of which as many wait, and answers
// none, against the same reads alone with all alive.
func blackHole(l *lab) (f figures, err error) {
	s := shape{delay: slowDelay}
	live, err := l.shapedServers(l.mem, s, s, s)
	if err != nil {
		return f, err
	}
	hole, err := l.shapedServers(l.mem, s)
	if err != nil {
		return f, errors.Join(err, live.close())
	}
	v, err := l.volumeOn(live, hole)
	if err != nil {
		return f, err
	}
	err = v.use(func(dir string) error {
		if _, err := l.weft("layout", "set", dir, "--stripe-count", "1"); err != nil {
			return err
		}
		names := map[string]string{} // of a file on each server, by its address
		for i := 0; len(names) < 4; i++ {
			name := fmt.Sprint("w", i)
			if _, err := fioOn(dir, name, "--size=64m", "--rw=write", "--bs=1m", "--ioengine=psync"); err != nil {
				return err
			}
			at, err := l.dataFileOf(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			names[at.Address] = name
		}
		read := func(c *columns) (float64, error) {
			var files []string
			for _, f := range c.files {
				files = append(files, names[f.addr.String()+":/"])
			}
			r, err := fioOn(dir, strings.Join(files, ":"), fmt.Sprintf("--size=%dm", 64*len(files)), "--rw=randread", "--bs=4k",
				"--ioengine=io_uring", "--iodepth=64", timed)
			return r.iops, err
		}
		if f.baseline, err = read(live); err != nil {
			return err
		}
		waiting := make(chan error, 1)
		go func() { // ends when the server answers again
			_, err := read(hole)
			waiting <- err
		}()
		time.Sleep(time.Second) // fio takes a while to begin
		if err := hole.srv.cmd.Process.Signal(unix.SIGSTOP); err != nil {
			return err
		}
		f.weft, err = read(live)
		return errors.Join(err, hole.srv.cmd.Process.Signal(unix.SIGCONT), <-waiting)
	})
	return f, err
}

const copySize = 2 << 30

// copyFile measures cp of a file to the tmpfs against nfs-cp, of libnfs, of its data file from the same server.
func copyFile(l *lab) (f figures, err error) {
	c, end, err := l.ganesha()
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, end()) }()
	v, err := l.weftd(nil, "meta", "--dir", filepath.Join(l.mem, "volume"))
	if err != nil {
		return f, err
	}
	err = v.use(func(dir string) error {
		if _, err := l.weft("admin", "device", "add", c.url.String(), "--server", v.addr); err != nil {
			return err
		}
		if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=psync", "--end_fsync=1", fmt.Sprint("--size=", copySize)); err != nil {
			return err
		}
		path := filepath.Join(dir, "file")
		at, err := l.dataFileOf(path)
		if err != nil {
			return err
		}
		direct := c.url
		direct.Path += "/" + at.Path
		direct.RawQuery += "&nfsport=" + c.url.Port()
		direct.Host = c.url.Hostname() // libnfs takes no port here
		if f.weft, err = l.timeCopy("cp", path); err != nil {
			return err
		}
		f.baseline, err = l.timeCopy("nfs-cp", direct.String())
		return err
	})
	return f, err
}

// timeCopy copies a file of copySize bytes to the tmpfs by a program, and removes the copy. The memory for it has been in use
// before: in a virtual machine the first use of a page costs more than all the copying, and would count for whoever is first.
func (l *lab) timeCopy(program, from string) (float64, error) {
	to := filepath.Join(l.mem, "copy")
	if err := useMemory(to, copySize); err != nil {
		return 0, err
	}
	begin := time.Now()
	out, err := exec.Command(program, from, to).CombinedOutput()
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w: %s", program, from, err, out)
	}
	if st, err := os.Stat(to); err != nil || st.Size() != copySize {
		return 0, fmt.Errorf("%s %s: the copy is not whole, %v", program, from, err)
	}
	return copySize / 1e6 / took.Seconds(), os.Remove(to)
}

// useMemory has the file system give a file of n bytes memory, and removes it.
func useMemory(path string, n int) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, 1<<20)
	for ; n > 0 && err == nil; n -= len(b) {
		_, err = f.Write(b[:min(n, len(b))])
	}
	return errors.Join(err, os.Remove(path))
}
