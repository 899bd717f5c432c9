package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	weftfs "github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const (
	prefetchFiles = 8                // copied at the same time
	prefetchAhead = 1 << 16          // found and not yet copied
	prefetchNamed = 20               // files that are named of those that are left out
	localDevices  = "local"          // what --mirror-to calls the data servers on this host
	evictAll      = "all"            // what --from calls all data servers
	cancelTime    = 15 * time.Second // until what was begun is dropped
)

// cacheJob finds files for the commands below.
type cacheJob struct {
	name   string // of the data servers, as given
	mounts map[uint64]*cacheMount
}

// cacheMount is a mount that has some of the files.
type cacheMount struct {
	mountEntry
	devices []layout.DeviceID
}

// cacheFile is a file that was found.
type cacheFile struct {
	path  string
	id    layout.FileID
	size  int64
	mount *cacheMount
}

// find sends the regular files at and below paths. It returns what could not be looked at. Files on other mounts below are left out.
func (j *cacheJob) find(ctx context.Context, paths []string, found chan<- cacheFile) error {
	var failed []error
	for _, path := range paths {
		var top unix.Stat_t
		if err := unix.Stat(path, &top); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", filename.Quote(path), err))
			continue
		}
		mount, err := j.mount(ctx, top.Dev)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", filename.Quote(path), err))
			continue
		}
		real, err := filepath.EvalSymlinks(path) // WalkDir does not follow the first one either
		if err != nil {
			failed = append(failed, err)
			continue
		}
		err = filepath.WalkDir(real, func(name string, e fs.DirEntry, err error) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				failed = append(failed, err)
				return nil
			}
			if !e.IsDir() && !e.Type().IsRegular() {
				return nil
			}
			var st unix.Stat_t
			err = unix.Lstat(name, &st)
			switch {
			case errors.Is(err, unix.ENOENT): // gone since it was listed
				return nil
			case err != nil:
				failed = append(failed, fmt.Errorf("%s: %w", filename.Quote(name), err))
				return nil
			case st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Dev != top.Dev:
				return fs.SkipDir
			case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Dev != top.Dev:
				return nil
			}
			select {
			case found <- cacheFile{name, layout.FileID(st.Ino), st.Size, mount}:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		if err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// mount finds the process that serves a mount, and the devices there.
func (j *cacheJob) mount(ctx context.Context, dev uint64) (*cacheMount, error) {
	if m := j.mounts[dev]; m != nil {
		return m, nil
	}
	entry, err := mountOf(dev)
	if err != nil {
		return nil, err
	}
	m := &cacheMount{mountEntry: entry}
	if err := control(ctx, entry, controlRequest{Op: "devices", Name: filename.JSON(j.name)}, &m.devices); err != nil {
		return nil, err
	}
	j.mounts[dev] = m
	return m, nil
}

// cacheTally counts what a command has found and done.
type cacheTally struct {
	mu            sync.Mutex
	began         time.Time
	found, done   int   // files
	total, passed int64 // bytes of these
	all           bool  // everything is found

	copied, had, empty int // files
	bytes              int64
	left               []string // those that were left out, and why
	more               int      // and how many more
	full               error    // why there is no room for more
	failed             []error
}

// leave notes a file that was left out.
func (t *cacheTally) leave(path string, err error) {
	if len(t.left) == prefetchNamed {
		t.more++
		return
	}
	t.left = append(t.left, fmt.Sprintf("%s: %s", filename.Quote(path), filename.OneLine(err)))
}

// state is how far it is.
func (t *cacheTally) state() progress.State {
	t.mu.Lock()
	defer t.mu.Unlock()
	return progress.State{Counts: []progress.Count{
		{Unit: progress.Bytes, Done: t.passed, Total: t.total, More: !t.all},
		{Unit: "files", Done: int64(t.done), Total: int64(t.found), More: !t.all},
	}}
}

func runPrefetch(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nEach file gets a copy on a data server of this host, which is read there from then on, until somebody writes the file anywhere: that\n" +
		"drops the copy. A file that is being written meanwhile is left out. What is cached stays cached when the command is interrupted.\n")
	to := fl.String("mirror-to", localDevices, "the data server that gets the copies: local (one on this host), or the beginning of its id, or its address")
	form := progress.Flag(fl)
	size := fl.String("cache-size", "", "bytes that all caches there may have, such as 500GiB; those used longest ago go for new ones (default: what room there is)")
	if err := parse(c, fl, args, 1, maxPaths); err != nil {
		return err
	}
	limit := uint64(0)
	if fl.Changed("cache-size") {
		var err error
		if limit, err = humanize.ParseBytes(*size); err != nil || limit == 0 || limit > 1<<62 {
			return usagef("prefetch: --cache-size %q is not a size such as 500GiB", *size)
		}
	}
	t := &cacheTally{began: time.Now()}
	j := &cacheJob{name: *to, mounts: map[uint64]*cacheMount{}}
	run := rand.Uint64() | 1
	begin, stop := context.WithCancel(ctx) // what has begun when it ends goes on
	defer stop()
	shown := progress.Show(*form, t.state)
	err := j.each(begin, fl.Args(), func(size int64) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.found++
		t.total += size
	}, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.all = true
	}, func(f cacheFile) {
		seen := int64(0)
		var got weftfs.Cached
		req := controlRequest{Op: "prefetch", File: f.id, Devices: f.mount.devices, Limit: int64(limit), Run: run}
		err := controlPatiently(ctx, f.mount.mountEntry, req, &got, func(r *controlReply) {
			t.mu.Lock()
			defer t.mu.Unlock()
			seen += r.Progress
			t.passed += r.Progress
		})
		t.mu.Lock()
		defer t.mu.Unlock()
		t.done++
		t.passed += f.size - seen
		switch {
		case err == nil && got.Made:
			t.copied++
			t.bytes += got.Size
		case err == nil && got.Size == 0:
			t.empty++
		case err == nil:
			t.had++
		case errors.Is(err, syscall.ENOSPC):
			if t.full == nil {
				t.full = err
			}
			stop()
		case ctx.Err() != nil:
		case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.ESTALE), errors.Is(err, syscall.ENOENT):
			t.leave(f.path, err)
		default:
			t.failed = append(t.failed, fmt.Errorf("%s: %w", filename.Quote(f.path), err))
			if len(t.failed) > prefetchNamed {
				stop()
			}
		}
	})
	shown.Stop()
	return t.summary(ctx, err)
}

// maxPaths bounds the operands of a command that takes any number.
const maxPaths = 1 << 20

// summary prints what was done, and returns why that is not all.
func (t *cacheTally) summary(ctx context.Context, err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, line := range t.left {
		fmt.Fprintf(os.Stderr, "weft: not cached: %s\n", line)
	}
	also(os.Stderr, t.more > 0, "weft: not cached: %d more files\n", t.more)
	took := time.Since(t.began)
	fmt.Printf("cached %d files with %s in %v (%s/s)", t.copied, humanize.IBytes(uint64(t.bytes)), took.Round(time.Millisecond),
		humanize.IBytes(uint64(float64(t.bytes)/max(took.Seconds(), 1e-3))))
	left, rest := len(t.left)+t.more, t.found-t.done
	also(os.Stdout, t.had > 0, "; %d there already", t.had)
	also(os.Stdout, t.empty > 0, "; %d empty", t.empty)
	also(os.Stdout, left > 0, "; %d left out", left)
	also(os.Stdout, rest > 0, "; %d not begun", rest)
	fmt.Println()
	switch {
	case t.full != nil:
		return fmt.Errorf("%d files fit: %w", t.copied+t.had, t.full)
	case len(t.failed) > 0:
		return errors.Join(append(t.failed, err)...)
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}
	return err
}

// each finds the files at and below paths and calls do for several at a time. found is called for each as it is found, all once all
// are.
func (j *cacheJob) each(ctx context.Context, paths []string, found func(size int64), all func(), do func(cacheFile)) error {
	files := make(chan cacheFile)
	queue := make(chan cacheFile, prefetchAhead)
	var workers sync.WaitGroup
	for range prefetchFiles {
		workers.Go(func() { // takes files until there are no more
			for f := range queue {
				if ctx.Err() == nil {
					do(f)
				}
			}
		})
	}
	go func() { // hands out what is found; ends with files
		defer close(queue)
		for f := range files {
			found(f.size)
			queue <- f
		}
		all()
	}()
	err := j.find(ctx, paths, files)
	close(files)
	workers.Wait()
	return err
}

func runEvict(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	from := fl.String("from", localDevices, "the data servers that lose their copies: local (those on this host), all, or the beginning of one's id, or its address")
	if err := parse(c, fl, args, 1, maxPaths); err != nil {
		return err
	}
	var mu sync.Mutex // guards what follows
	var sum metarpc.CacheDropResult
	var failed []error
	more := 0
	j := &cacheJob{name: *from, mounts: map[uint64]*cacheMount{}}
	err := j.each(ctx, fl.Args(), func(int64) {}, func() {}, func(f cacheFile) {
		var got metarpc.CacheDropResult
		err := control(ctx, f.mount.mountEntry, controlRequest{Op: "evict", File: f.id, Devices: f.mount.devices}, &got)
		mu.Lock()
		defer mu.Unlock()
		sum.Caches, sum.Bytes = sum.Caches+got.Caches, sum.Bytes+got.Bytes
		switch {
		case err == nil, ctx.Err() != nil, errors.Is(err, syscall.ESTALE), errors.Is(err, syscall.ENOENT):
		case len(failed) < prefetchNamed:
			failed = append(failed, fmt.Errorf("%s: %w", filename.Quote(f.path), err))
		default:
			more++
		}
	})
	fmt.Printf("evicted %d copies with %s\n", sum.Caches, humanize.IBytes(uint64(sum.Bytes)))
	if ctx.Err() != nil {
		err = fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}
	if more > 0 {
		failed = append(failed, fmt.Errorf("and %d more", more))
	}
	return errors.Join(append(failed, err)...)
}

// cacheDevices are the data servers that a user has named.
func (d *daemon) cacheDevices(ctx context.Context, name string) (ids []layout.DeviceID, err error) {
	switch name {
	case localDevices:
		if len(d.near()) == 0 {
			d.findLocal(ctx)
		}
		if ids = d.near(); len(ids) == 0 {
			return nil, fmt.Errorf("no data server is known to be on this host: weft status says for each one why not")
		}
		return ids, nil
	case evictAll:
		return []layout.DeviceID{{}}, nil
	}
	info, err := findDevice(ctx, d.meta, name)
	return []layout.DeviceID{info.Device.ID}, err
}

// self is on whose behalf the mount's owner makes the requests of the commands.
func self() metarpc.Cred {
	return metarpc.Cred{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), ByUID: true}
}
