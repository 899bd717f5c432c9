package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The rows of one file that several mounts write, and of locks.

const (
	recordSize  = 47_008 // bytes of a record of IO500's ior-hard
	sharedBytes = 1 << 30
	// sharedSample is long enough for what several mounts write to be measured anew.
	sharedSample = 6 * time.Second
	ownName      = "files of their own, O_DSYNC"
)

// strided are the offsets of the records of one of n mounts, one after the other in turn with those of the others.
func strided(mount, n, record int) (off int64, size int) {
	return int64(record*n+mount) * recordSize, recordSize
}

// inBlocks are those of a mount that has every n-th MiB for itself.
func inBlocks(mount, n, record int) (off int64, size int) {
	const each = (unit + recordSize - 1) / recordSize
	at := record % each * recordSize
	return int64(record/each*n+mount)*unit + int64(at), min(recordSize, unit-at)
}

// sharedFile measures n mounts that write one file, against the same records in files of their own on which each write is stable before it is
// answered. The first ends with an fsync.
func sharedFile(n int, place func(mount, n, record int) (int64, int)) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		v, err := l.volume(l.disk)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, v.close()) }()
		var dirs []string
		for range n {
			dir, end, err := v.mount()
			if err != nil {
				return f, err
			}
			defer func() { err = errors.Join(err, end()) }()
			dirs = append(dirs, dir)
		}
		if err := preallocate(filepath.Join(dirs[0], "shared")); err != nil {
			return f, err
		}
		f.weft, err = records(dirs, place, func(int) string { return "shared" }, 0)
		if err != nil {
			return f, err
		}
		own := func(mount int) string { return fmt.Sprint("own", mount) }
		for i, dir := range dirs {
			if err := preallocate(filepath.Join(dir, own(i))); err != nil {
				return f, err
			}
		}
		f.baseline, err = records(dirs, place, own, unix.O_DSYNC)
		return f, err
	}
}

// preallocate makes a file whose records change no size.
func preallocate(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fallocate(int(file.Fd()), 0, 0, sharedBytes), file.Sync(), file.Close())
}

// records has each mount write its records for a while, and returns how many MB they write in a second together.
func records(dirs []string, place func(mount, n, record int) (int64, int), name func(mount int) string, flags int) (float64, error) {
	var writers sync.WaitGroup
	errs := make([]error, len(dirs))
	written := make([]int64, len(dirs))
	start := time.Now()
	for i, dir := range dirs {
		writers.Go(func() { // writes the records of one mount
			file, err := os.OpenFile(filepath.Join(dir, name(i)), os.O_WRONLY|flags, 0)
			if err != nil {
				errs[i] = err
				return
			}
			data := make([]byte, recordSize)
			for record := 0; err == nil && time.Since(start) < sharedSample; record++ {
				off, size := place(i, len(dirs), record)
				_, err = file.WriteAt(data[:size], off%sharedBytes)
				written[i] += int64(size)
			}
			errs[i] = errors.Join(err, file.Sync(), file.Close())
		})
	}
	writers.Wait()
	took := time.Since(start)
	var sum int64
	for _, n := range written {
		sum += n
	}
	return float64(sum) / 1e6 / took.Seconds(), errors.Join(errs...)
}

// lockWriteUnlock measures a mount that writes 4 KiB under a lock that nobody else wants, against the writes alone.
func lockWriteUnlock(l *lab) (f figures, err error) {
	v, err := l.volume(l.mem)
	if err != nil {
		return f, err
	}
	return f, v.use(func(dir string) error {
		file, err := os.Create(filepath.Join(dir, "locked"))
		if err != nil {
			return err
		}
		data := make([]byte, 4<<10)
		all := func(locks bool) (float64, error) {
			ops, start := 0, time.Now()
			for ; time.Since(start) < sample; ops++ {
				lock := unix.Flock_t{Type: unix.F_WRLCK}
				var errs [3]error
				if locks {
					errs[0] = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLKW, &lock)
				}
				_, errs[1] = file.WriteAt(data, int64(ops%1024)*int64(len(data)))
				if lock.Type = unix.F_UNLCK; locks {
					errs[2] = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock)
				}
				if err := errors.Join(errs[:]...); err != nil {
					return 0, err
				}
			}
			return float64(ops) / time.Since(start).Seconds(), nil
		}
		f.weft, err = all(true)
		if err == nil {
			f.baseline, err = all(false)
		}
		return errors.Join(err, file.Close())
	})
}
