package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/localio"
)

const (
	moveWorkers = 4 // files moved at a time; the service does as many
	movePoll    = 200 * time.Millisecond
)

// toLocal is the device that is one on the host of the mount.
const toLocal = "local"

// moveState is how far the moving of a file is; see metarpc.LayoutMoveResult.
type moveState struct {
	Device   string `json:"device"` // its whole id
	Finished bool   `json:"finished"`
	Empty    bool   `json:"empty"`
	Done     int64  `json:"done"`
	Size     int64  `json:"size"`
	Waits    string `json:"waits,omitempty"`
}

// move answers a request to move a file's data, on behalf of whoever has mounted the file system.
func (d *daemon) move(ctx context.Context, file layout.FileID, to string) (*moveState, error) {
	id, err := d.moveTarget(ctx, file, to)
	if err != nil {
		return nil, err
	}
	who := metarpc.Cred{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	r, err := d.meta.LayoutMove(ctx, who, file, id)
	if err != nil {
		return nil, err
	}
	return &moveState{Device: id.String(), Finished: r.Finished, Empty: r.Empty, Done: r.Done, Size: r.Size, Waits: r.Waits}, nil
}

// moveTarget is the device that a file's data is to be moved to.
func (d *daemon) moveTarget(ctx context.Context, file layout.FileID, to string) (id layout.DeviceID, err error) {
	if len(to) == hex.EncodedLen(len(id)) { // as most requests have it
		if _, err := hex.Decode(id[:], []byte(to)); err == nil {
			return id, nil
		}
	}
	if to != toLocal {
		info, err := findDevice(ctx, d.meta, to)
		return info.Device.ID, err
	}
	near := map[layout.DeviceID]bool{}
	for _, id := range d.locally((*localio.Target).Near) {
		near[id] = true
	}
	desc, err := d.meta.DescribeLayout(ctx, file)
	if err != nil {
		return id, err
	}
	infos, err := d.meta.Devices(ctx)
	if err != nil {
		return id, err
	}
	has := map[layout.DeviceID]int{}
	for _, servers := range desc.Mirrors {
		for _, s := range servers {
			has[s.Device]++
		}
	}
	// A file that lies whole on one of them stays there.
	var best *metarpc.DeviceInfo
	for i := range infos {
		info := &infos[i]
		if !near[info.Device.ID] || info.Draining {
			continue
		}
		a, b := 0, 0
		if best != nil {
			a, b = has[info.Device.ID], has[best.Device.ID]
		}
		if best == nil || a > b || a == b && info.Free > best.Free {
			best = info
		}
	}
	if best == nil {
		return id, errors.New("none of the volume's data servers is on this host; weft status says why")
	}
	return best.Device.ID, nil
}

// mover moves files to a device, several at once.
type mover struct {
	mount mountEntry
	to    string
	shown *progress.Shown

	mu       sync.Mutex
	progress moveProgress
	moving   map[layout.FileID]moveState
	sizes    map[layout.FileID]int64 // of those
}

// moveProgress is how far all of it is.
type moveProgress struct {
	files, moved, empty, there, failed int   // files is all that there are, the others have been dealt with
	bytes, done                        int64 // of all files, and of those that have been dealt with
	copied                             int64
	counted                            bool // files and bytes are all
	waits                              string
}

func runLayoutMove(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nThe data is copied while the files are in use. A file of which there is one copy lies on that data server as a whole afterwards; of a mirrored\n" +
		"file the first copy does, of each part that has no copy there. Of a directory all regular files below it are moved. DEVICE is the beginning of\n" +
		"a data server's id, or its address, as weft status shows it; local is one on this host, that with the most free space if there are several.\n" +
		"Who interrupts it leaves files behind that are being moved: with these it goes on. It takes the file's owner, or root, who must be who mounted the\n" +
		"file system. Exit code 2 says that not everything could be moved.\n")
	to := fl.String("to", "", "DEVICE, or local")
	form := progress.Flag(fl)
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	if *to == "" {
		return usagef("layout move: where to? Give --to DEVICE or --to local")
	}
	path := fl.Arg(0)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return fmt.Errorf("%s: only regular files have data, and directories files", filename.Quote(path))
	}
	m, err := mountOf(st.Dev)
	if err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	mv := &mover{mount: m, to: *to, moving: map[layout.FileID]moveState{}, sizes: map[layout.FileID]int64{}}
	began := time.Now()
	mv.shown = progress.Show(*form, func() progress.State {
		p := mv.now()
		return p.state(time.Since(began))
	})
	return mv.all(ctx, path, st.Dev)
}

// fileToMove is a regular file.
type fileToMove struct {
	path string
	id   layout.FileID
	size int64
}

// walk calls f with each regular file below path, or path itself, that is on the device dev, once. It goes on after errors, which
// it calls failed with.
func walk(ctx context.Context, path string, dev uint64, f func(fileToMove), failed func(error)) {
	linked := map[uint64]bool{} // inodes with several names
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // or a link to a directory would not be followed
	}
	filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return filepath.SkipAll
		}
		var info fs.FileInfo
		if err == nil {
			info, err = entry.Info()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // somebody has removed it meanwhile
		}
		if err != nil {
			failed(err)
			return nil
		}
		st := info.Sys().(*syscall.Stat_t)
		switch {
		case st.Dev != dev && entry.IsDir():
			return filepath.SkipDir
		case st.Dev != dev || !info.Mode().IsRegular() || linked[st.Ino]:
			return nil
		case st.Nlink > 1:
			linked[st.Ino] = true
		}
		f(fileToMove{path, layout.FileID(st.Ino), info.Size()})
		return nil
	})
}

// all moves all files below path.
func (mv *mover) all(ctx context.Context, path string, dev uint64) error {
	var work sync.WaitGroup
	work.Go(func() { // counts what there is; errors are the other walk's
		walk(ctx, path, dev, func(f fileToMove) {
			mv.mu.Lock()
			defer mv.mu.Unlock()
			mv.progress.files++
			mv.progress.bytes += f.size
		}, func(error) {})
		mv.mu.Lock()
		defer mv.mu.Unlock()
		mv.progress.counted = true
	})
	files := make(chan fileToMove)
	for range moveWorkers {
		work.Go(func() { // moves files until there are no more
			for f := range files {
				mv.one(ctx, f)
			}
		})
	}
	walk(ctx, path, dev, func(f fileToMove) {
		select {
		case files <- f:
		case <-ctx.Done():
		}
	}, func(err error) { mv.fail(err) })
	close(files)
	work.Wait()
	mv.shown.Stop()
	p := mv.now()
	fmt.Println(p.summary(mv.shown.Took()))
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted; the files that were being moved are moved all the same")
	case p.failed > 0:
		return fmt.Errorf("%d files could not be moved", p.failed)
	}
	return nil
}

// one moves a file.
func (mv *mover) one(ctx context.Context, f fileToMove) {
	req := controlRequest{Op: "layout move", File: f.id, Device: mv.to}
	for {
		var st moveState
		err := control(ctx, mv.mount, req, &st)
		mv.mu.Lock()
		if err == nil && !st.Finished {
			mv.moving[f.id], mv.sizes[f.id] = st, f.size
			mv.mu.Unlock()
			req.Device = st.Device
			pause := time.NewTimer(movePoll)
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
			pause.Stop()
			continue
		}
		_, begun := mv.moving[f.id]
		delete(mv.moving, f.id)
		delete(mv.sizes, f.id)
		p := &mv.progress
		switch {
		case err != nil:
		case st.Empty:
			p.empty++
		case begun || st.Size > 0:
			p.moved++
			p.copied += f.size
		default:
			p.there++
		}
		p.done += f.size
		mv.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			mv.fail(fmt.Errorf("%s: %w", filename.Quote(f.path), err))
		}
		return
	}
}

// fail says what could not be moved.
func (mv *mover) fail(err error) {
	mv.mu.Lock()
	mv.progress.failed++
	mv.mu.Unlock()
	mv.shown.Print("weft: " + filename.OneLine(err))
}

// now is how far it is.
func (mv *mover) now() moveProgress {
	mv.mu.Lock()
	defer mv.mu.Unlock()
	p := mv.progress
	for id, st := range mv.moving {
		done := min(st.Done, mv.sizes[id])
		p.done += done
		p.copied += done
		if st.Waits != "" {
			p.waits = st.Waits
		}
	}
	return p
}

// rate is bytes per second.
func (p *moveProgress) rate(took time.Duration) float64 {
	return float64(p.copied) / max(took.Seconds(), 1e-3)
}

// state is how far it is, for people and programs.
func (p *moveProgress) state(took time.Duration) progress.State {
	return progress.State{Counts: []progress.Count{
		{Unit: progress.Bytes, Done: p.done, Total: p.bytes, More: !p.counted},
		{Unit: "files", Done: int64(p.moved + p.empty + p.there + p.failed), Total: int64(p.files), More: !p.counted},
	}, Rate: p.rate(took), Waits: p.waits}
}

// summary says what has become of it.
func (p *moveProgress) summary(took time.Duration) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%d files moved, %s in %v, %s/s", p.moved, humanize.IBytes(uint64(p.copied)), took.Round(100*time.Millisecond), humanize.IBytes(uint64(p.rate(took))))
	also(&s, p.there > 0, "; %d were there already", p.there)
	also(&s, p.empty > 0, "; %d have no data yet", p.empty)
	also(&s, p.failed > 0, "; %d could not be moved", p.failed)
	return s.String()
}
