package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

const (
	goFuseName = "transport=gofuse"
	// loopSeconds is how long fio runs for one figure of a loop row.
	loopSeconds = 2
)

// transports runs a fio job on a mount served by the device loop and on one served by go-fuse's server, on the same servers, which
// have their files on tmpfs, and with as many threads as the goals are for.
func transports(start func(*lab) (*volume, error), figure func(loopRun) float64, args ...string) func(*lab) (figures, error) {
	one := func(v *volume, transport string) (float64, error) {
		dir, end, err := v.mount("transport=" + transport)
		if err != nil {
			return 0, err
		}
		r, err := runLoop(dir, args)
		return figure(r), errors.Join(err, end())
	}
	return func(l *lab) (f figures, err error) {
		v, err := start(l)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, v.close()) }()
		v.env = []string{"GOMAXPROCS=2"}
		if f.weft, err = one(v, "device"); err != nil {
			return f, err
		}
		f.baseline, err = one(v, "gofuse")
		return f, err
	}
}

// loopRun is what one job has done, and the CPU time of the serving process.
type loopRun struct{ fioResult }

func (r loopRun) io() float64     { return r.iops }
func (r loopRun) mb() float64     { return r.bw / 1e6 }
func (r loopRun) perCPU() float64 { return r.iops * loopSeconds / r.cpu }

func runLoop(dir string, args []string) (r loopRun, err error) {
	if _, err := os.Stat(filepath.Join(dir, "file")); err != nil {
		if _, err := fio(dir, "--rw=write", "--bs=1m", "--ioengine=psync"); err != nil {
			return r, err
		}
	}
	before, err := cpuOf(mountPID(dir))
	if err != nil {
		return r, err
	}
	if r.fioResult, err = fio(dir, append(args, "--time_based", fmt.Sprint("--runtime=", loopSeconds), "--group_reporting")...); err != nil {
		return r, err
	}
	after, err := cpuOf(mountPID(dir))
	r.cpu = after - before
	return r, err
}

// One data server: several would split each batch, for both transports.
func fastServer(l *lab) (*volume, error) {
	return l.weftd(nil, "single", "--dir", filepath.Join(l.mem, "volume"), "--data-servers", "1")
}

// slowServer answers after half a millisecond.
func slowServer(l *lab) (*volume, error) {
	return l.slowVolume(1, shape{delay: 500 * time.Microsecond})
}
