package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
)

// The rows of data servers on the same host.

// byDescriptor makes targets that reach their server without RPC.
func byDescriptor(addr netip.AddrPort) (dataplane.Target, error) {
	remote, err := nfs3.New(nfs3.Config{Name: addr.String(), Addrs: []netip.AddrPort{addr}, Connections: connections})
	if err != nil {
		return nil, err
	}
	t := localio.New(localio.Config{Name: addr.String(), Addrs: []netip.AddrPort{addr}, Log: slog.New(slog.DiscardHandler)}, remote)
	if st := t.Status(context.Background()); !st.Local {
		return nil, errors.Join(fmt.Errorf("the data server is not local: %s", st.Because), t.Close())
	}
	return t, nil
}

// localServer starts a data server whose file belongs to a user, as data files do.
func (l *lab) localServer(where string, args ...string) (*columns, error) {
	c, err := l.dataServers(where, 1, args...)
	if err != nil {
		return nil, err
	}
	const user = 1
	if err := os.Chown(c.paths()[0], user, user); err != nil {
		return nil, errors.Join(err, c.close())
	}
	c.files[0].cred = layout.Credential{UID: user, GID: user}
	return c, nil
}

// localDisk measures random reads past the page cache, by their number or by what one takes of processors, against fio on the
// data server's file.
func localDisk(cpu bool) func(*lab) (figures, error) {
	const depth = 32
	return func(l *lab) (f figures, err error) {
		c, err := l.localServer(l.disk, "--io=direct")
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, c.close()) }()
		before, err := cpuOf(os.Getpid())
		if err != nil {
			return f, err
		}
		iops, err := planeBy(byDescriptor, c.files, randRead, depth, sample)
		if err != nil {
			return f, err
		}
		after, err := cpuOf(os.Getpid())
		if err != nil {
			return f, err
		}
		r, err := fioOn("/", c.paths()[0], "--rw=randread", "--bs=4k", "--ioengine=io_uring", fmt.Sprint("--iodepth=", depth), timed)
		f.weft, f.baseline = iops, r.iops
		if cpu {
			f.weft, f.baseline = (after-before)/(iops*sample.Seconds())*1e6, r.cpu/(r.bytes/float64(randRead.size))*1e6
		}
		return f, err
	}
}

// localCallers measures 16 callers that read one block after the other.
func localCallers(l *lab) (f figures, err error) {
	c, err := l.localServer(l.mem)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if f.weft, err = callers(byDescriptor, c.files, randRead, 16); err == nil {
		f.baseline, err = callers(byRPC(connections), c.files, randRead, 16)
	}
	return f, err
}

// callers has n goroutines that wait for each read before the next.
func callers(dial dialer, files []file, w workload, n int) (float64, error) {
	return inTurns(func(*turn) (float64, float64, time.Duration, error) {
		requests, took, err := callersOnce(dial, files, w, n)
		return w.figure(requests, took), float64(requests), took, err
	})
}

func callersOnce(dial dialer, files []file, w workload, n int) (done int64, took time.Duration, err error) {
	p, seg, err := newPlane(files, dial)
	if err != nil {
		return 0, 0, err
	}
	defer p.Close()
	pf := p.NewFile()
	var requests atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, n)
	all := &offsets{workload: w}
	begin := time.Now()
	for range n {
		wg.Go(func() { // a caller
			done := make(chan error, 1)
			r := &dataplane.Read{Segment: seg, Buf: make([]byte, w.size), Done: func(_ int, err error) { done <- err }}
			count := int64(0)
			for time.Since(begin) < sample {
				r.Off = all.take()
				pf.StartRead(r)
				p.Flush()
				if err := <-done; err != nil {
					errs <- err
					return
				}
				count++
			}
			requests.Add(count)
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return 0, 0, err
	default:
		return requests.Load(), time.Since(begin), nil
	}
}

// localWrites measures eight writes at a time.
func localWrites(l *lab) (f figures, err error) {
	c, err := l.localServer(l.mem)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if f.weft, err = planeBy(byDescriptor, c.files, randWrite, 8, sample); err == nil {
		f.baseline, err = plane(c.files, randWrite, connections, 8, sample)
	}
	return f, err
}

// localRead measures a mount that goes by descriptors against one that does not.
func localRead(l *lab) (f figures, err error) {
	v, err := l.volume(l.mem)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, v.close()) }()
	for _, m := range []struct {
		option string
		figure *float64
	}{{"localio=rw", &f.weft}, {"localio=off", &f.baseline}} {
		dir, end, err := v.mount(m.option)
		if err != nil {
			return f, err
		}
		*m.figure, err = seqRead.fio(dir, "--ioengine=io_uring", "--iodepth=8")
		if err := errors.Join(err, end()); err != nil {
			return f, err
		}
	}
	return f, nil
}

// localStriped measures a mount whose four data servers are local against the simplest FUSE server that keeps its data in a file.
func localStriped(w workload) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		v, err := l.volume(l.mem)
		if err != nil {
			return f, err
		}
		err = v.use(func(dir string) (err error) { f.weft, err = w.fio(dir, "--ioengine=psync"); return }, "localio=rw")
		if err != nil {
			return f, err
		}
		where, err := os.MkdirTemp(l.mem, "bare")
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(where)) }()
		dir, p, err := l.bare(time.Minute, 0, 0, where)
		if err != nil {
			return f, err
		}
		f.baseline, err = w.fio(dir, "--ioengine=psync")
		return f, errors.Join(err, p.stop())
	}
}

const (
	passName = "bare go-fuse, passthrough"
	rawName  = "the file itself"
)

// tmpfs and disk are where a row has its data.
func tmpfs(l *lab) string { return l.mem }
func disk(l *lab) string  { return l.disk }

// localPassed measures a file that the kernel serves by itself against one of the simplest FUSE server that lets it, and a plain file.
func localPassed(w workload, where func(*lab) string) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		v, err := l.volume(where(l))
		if err != nil {
			return f, err
		}
		err = v.use(func(dir string) (err error) {
			dir = filepath.Join(dir, "local")
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			if _, err := l.weft("layout", "set", dir, "--placement", "local"); err != nil {
				return err
			}
			f.weft, err = w.fio(dir, "--ioengine=psync")
			return err
		}, "localio=rw", "passthrough=rw")
		if err != nil {
			return f, err
		}
		f.baseline, f.disk, err = l.passedAndRaw(where(l), func(dir string) (float64, error) { return w.fio(dir, "--ioengine=psync") })
		return f, err
	}
}

// prefetched measures a file of remote data servers that was copied to one on this host, as localPassed does.
func prefetched(l *lab) (f figures, err error) {
	far, err := l.dataServers(l.mem, 2, "--localio=off")
	if err != nil {
		return f, err
	}
	v, err := l.volumeOn(far)
	if err != nil {
		return f, errors.Join(err, far.close())
	}
	near, err := l.dataServers(l.mem, 1)
	if err != nil {
		return f, errors.Join(err, v.close())
	}
	defer func() { err = errors.Join(err, near.close()) }()
	read := func(dir string) (float64, error) {
		r, err := fio(dir, "--rw=read", "--bs=1m", "--ioengine=psync", timed)
		return seqRead.ofFio(r), err
	}
	err = v.use(func(dir string) (err error) {
		if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=psync"); err != nil {
			return err
		}
		if _, err := l.weft("admin", "device", "add", "nfs://"+near.files[0].addr.String()+"/", "--server", v.addr); err != nil {
			return err
		}
		if _, err := l.weft("prefetch", dir); err != nil {
			return err
		}
		f.weft, err = read(dir)
		return err
	}, "localio=rw")
	if err != nil {
		return f, err
	}
	f.baseline, f.disk, err = l.passedAndRaw(l.mem, func(dir string) (float64, error) {
		if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=psync"); err != nil {
			return 0, err
		}
		return read(dir)
	})
	return f, err
}

// passedAndRaw measures the simplest FUSE server that lets the kernel read and write its file, and a plain file.
func (l *lab) passedAndRaw(where string, measure func(dir string) (float64, error)) (passed, raw float64, err error) {
	if turns != nil {
		return 0, 0, nil // baselines
	}
	backing, err := os.MkdirTemp(where, "backing")
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(backing)) }()
	dir, p, err := l.bare(time.Minute, 0, 0, backing, passArg)
	if err != nil {
		return 0, 0, err
	}
	passed, err = measure(dir)
	if err = errors.Join(err, p.stop()); err != nil {
		return 0, 0, err
	}
	raw, err = measure(backing)
	return passed, raw, err
}
