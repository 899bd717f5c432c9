package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/pkg/xattr"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/layout"
)

const (
	benchBlock   = 1 << 20   // bytes of a request for bandwidth
	benchSmall   = 4 << 10   // bytes of one for latency
	benchFile    = 512 << 20 // bytes of a file, if there is room
	benchDepth   = 8         // requests for bandwidth under way
	benchCallers = 16        // of metadata calls at the same time
	benchLeast   = 10 * time.Second
)

// benchReport is the form of `weft bench --json`. Rates are in bytes or calls per second, latencies in nanoseconds.
type benchReport struct {
	Directory filename.JSON `json:"directory"`
	Devices   []benchDevice `json:"devices"`
	Striped   benchDevice   `json:"striped"` // of a file laid out as the directory says
	Metadata  []benchCalls  `json:"metadata"`
	Hints     []string      `json:"hints"`
}

// benchDevice is what a file on one data server allows.
type benchDevice struct {
	ID      string        `json:"id,omitempty"`
	Address string        `json:"address,omitempty"`
	By      string        `json:"by,omitempty"` // local, tcp, tls, nvme-tcp, or passthrough
	Write   float64       `json:"write"`        // with fsync at the end
	Read    float64       `json:"read"`
	Half    time.Duration `json:"read_4k_p50"` // of reads one after the other
	Most    time.Duration `json:"read_4k_p99"`
	Problem string        `json:"problem,omitempty"` // why the rest is not known
}

// benchCalls is what there may be of a metadata call.
type benchCalls struct {
	Call string        `json:"call"`
	One  float64       `json:"one"`  // by one caller
	Many float64       `json:"many"` // by benchCallers
	Half time.Duration `json:"one_p50"`
}

// bench is one run.
type bench struct {
	ctx   context.Context
	mount mountEntry
	dir   string // ours, to be removed
	part  time.Duration
	parts int          // of the whole
	size  int64        // bytes of a file, a multiple of benchBlock
	done  atomic.Int32 // parts that have ended
	what  atomic.Pointer[string]
}

func runBench(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nIt writes and reads a file on each data server, one after the other, and files that are laid out as the directory says; it makes and removes\n" +
		"files; and it names what stands out. It works in a directory of its own, which it removes, and takes up to " + humanize.IBytes(benchFile) + " at a time.\n" +
		"Others who use the volume meanwhile make it slower, and it makes them slower.\n")
	long := fl.Duration("time", 2*time.Minute, "how long, at least 10s")
	form := progress.Flag(fl)
	asJSON := fl.Bool("json", false, "print one object; rates are in bytes and calls per second, times in nanoseconds")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	if *long < benchLeast {
		return usagef("bench: --time %v: want at least %v", *long, benchLeast)
	}
	path := "."
	if fl.NArg() > 0 {
		path = fl.Arg(0)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	b := &bench{ctx: ctx}
	if b.mount, err = mountOf(st.Dev); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	if err := b.room(path); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp(path, ".weft-bench-"); err != nil {
		return err
	}
	report, err := b.run(path, *long, *form)
	if gone := os.RemoveAll(b.dir); gone != nil {
		err = errors.Join(err, fmt.Errorf("what the bench has made is not all removed: %w", gone))
	}
	if err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(report)
	}
	report.print(os.Stdout)
	return nil
}

// room decides how large files are: no more than a tenth of what is free.
func (b *bench) room(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return fmt.Errorf("%s: %w", filename.Quote(path), err)
	}
	free := int64(st.Bavail) * st.Bsize
	if b.size = min(benchFile, free/10) / benchBlock * benchBlock; b.size < 16*benchBlock {
		return fmt.Errorf("%s: only %s are free, which is too little for a bench", filename.Quote(path), humanize.IBytes(uint64(free)))
	}
	return nil
}

// run does all parts in the time given.
func (b *bench) run(path string, long time.Duration, form progress.Form) (*benchReport, error) {
	st, err := b.mount.status(b.ctx)
	if err != nil {
		return nil, err
	}
	r := &benchReport{Directory: filename.JSON(path), Hints: []string{}}
	b.parts = 3*(len(st.Devices)+1) + 4
	b.part = long / time.Duration(b.parts)
	stop := b.show(form)
	defer stop()
	files, err := b.place(st.Devices)
	if err != nil {
		return nil, err
	}
	for _, d := range st.Devices {
		result := benchDevice{ID: d.ID, Address: d.Address, Problem: d.Problem}
		switch name, ok := files[d.ID]; {
		case ok:
			if err := b.file(name, fmt.Sprintf("device %.8s", d.ID), &result); err != nil {
				return nil, fmt.Errorf("device %s (%s): %w", d.ID, d.Address, err)
			}
			if result.By, err = b.by(d); err != nil {
				return nil, err
			}
			if err := os.Remove(name); err != nil {
				return nil, err
			}
		case d.Reachable && d.Draining:
			result.Problem = "is drained, so it gets no new files"
		case d.Reachable:
			result.Problem = "gets no new files: it has little room, or much to do"
		}
		r.Devices = append(r.Devices, result)
	}
	if err := b.file(filepath.Join(b.dir, "striped"), "a striped file", &r.Striped); err != nil {
		return nil, err
	}
	if err := b.metadata(r); err != nil {
		return nil, err
	}
	r.Hints = r.hints()
	return r, nil
}

// place makes files that lie each on one data server, and returns them by the server's id.
func (b *bench) place(devices []deviceStatus) (map[string]string, error) {
	dir := filepath.Join(b.dir, "each")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	one := layout.Policy{StripeCount: 1, Mirrors: 1, Placement: layout.PlacementSpread}
	if err := xattr.Set(dir, layoutXattr, []byte(one.String())); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, errnoOf(err))
	}
	want := 0
	for _, d := range devices {
		if d.Reachable && !d.Draining {
			want++
		}
	}
	files := map[string]string{}
	for i := 0; len(files) < want && i < 16*want; i++ {
		name := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(name, make([]byte, benchSmall), 0o600); err != nil {
			return nil, err
		}
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			return nil, err
		}
		var l fileLayout
		if err := control(b.ctx, b.mount, controlRequest{Op: "layout", File: layout.FileID(st.Ino)}, &l); err != nil {
			return nil, err
		}
		device := l.Mirrors[0].Servers[0].Device
		if _, ok := files[device]; !ok {
			files[device] = name
		} else if err := os.Remove(name); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// by is how requests went to a device since its status before.
func (b *bench) by(before deviceStatus) (string, error) {
	st, err := b.mount.status(b.ctx)
	if err != nil {
		return "", err
	}
	for _, d := range st.Devices {
		local, rpc := d.OpsLocal-before.OpsLocal, d.OpsRPC-before.OpsRPC
		switch {
		case d.ID != before.ID:
		case local > rpc:
			return "local", nil
		case d.Mount != nil:
			return d.Mount.Path, nil
		}
	}
	return "passthrough", nil
}

// file writes and reads one file in all ways.
func (b *bench) file(name, what string, r *benchDevice) error {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	b.begin("writing " + what)
	blocks := b.size / benchBlock
	data, err := unix.Mmap(-1, 0, benchBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned
	if err != nil {
		return err
	}
	defer unix.Munmap(data)
	for i := range data {
		data[i] = byte(rand.Uint32()) // neither holes nor compressible
	}
	written, took, err := b.blocks(func(block int64) error {
		_, err := f.WriteAt(data, block%blocks*benchBlock)
		return err
	}, f.Sync)
	if err != nil {
		return err
	}
	r.Write = float64(written*benchBlock) / took.Seconds()
	blocks = min(blocks, written)
	b.begin("reading " + what)
	buffers := sync.Pool{New: func() any {
		p, err := unix.Mmap(-1, 0, benchBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			panic(err) // a MiB more is not to be had
		}
		return &p
	}}
	read, took, err := b.blocks(func(block int64) error {
		p := buffers.Get().(*[]byte)
		defer buffers.Put(p)
		_, err := f.ReadAt(*p, block%blocks*benchBlock)
		return err
	}, nil)
	if err != nil {
		return err
	}
	r.Read = float64(read*benchBlock) / took.Seconds()
	b.begin("reading little of " + what)
	var times []time.Duration
	for end := time.Now().Add(b.part); time.Now().Before(end) && b.ctx.Err() == nil; {
		from := time.Now()
		if _, err := f.ReadAt(data[:benchSmall], rand.Int64N(blocks*(benchBlock/benchSmall))*benchSmall); err != nil {
			return err
		}
		times = append(times, time.Since(from))
	}
	r.Half, r.Most = percentiles(times)
	b.done.Add(1)
	return b.ctx.Err()
}

// blocks does something to one block after the other, several at a time, for as long as a part lasts, and once each at least. It returns how many it were,
// and how long they and end took.
func (b *bench) blocks(do func(block int64) error, end func() error) (n int64, took time.Duration, err error) {
	began := time.Now()
	var next, done atomic.Int64
	var failed atomic.Pointer[error]
	var all sync.WaitGroup
	for range benchDepth {
		all.Go(func() { // ends with the part
			for first := true; first || time.Since(began) < b.part && b.ctx.Err() == nil && failed.Load() == nil; first = false {
				if err := do(next.Add(1) - 1); err != nil {
					failed.Store(&err)
					return
				}
				done.Add(1)
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return 0, 0, *err
	}
	if end != nil {
		err = end()
	}
	b.done.Add(1)
	return done.Load(), time.Since(began), errors.Join(err, b.ctx.Err())
}

// metadata makes and removes files.
func (b *bench) metadata(r *benchReport) error {
	create, unlink := benchCalls{Call: "create"}, benchCalls{Call: "unlink"}
	for _, callers := range []int{1, benchCallers} {
		var counts []int
		var dirs []string
		for i := range callers {
			dirs = append(dirs, filepath.Join(b.dir, fmt.Sprintf("%d-%d", callers, i)))
			if err := os.Mkdir(dirs[i], 0o700); err != nil {
				return err
			}
			counts = append(counts, 1<<30)
		}
		b.begin(fmt.Sprintf("making files, %d at a time", callers))
		made, rate, half, err := b.calls(dirs, counts, func(name string) error {
			fd, err := unix.Open(name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("make a file: %w", err)
		}
		b.begin(fmt.Sprintf("removing files, %d at a time", callers))
		_, gone, halfGone, err := b.calls(dirs, made, unix.Unlink)
		if err != nil {
			return fmt.Errorf("remove a file: %w", err)
		}
		if callers == 1 {
			create.One, create.Half, unlink.One, unlink.Half = rate, half, gone, halfGone
		} else {
			create.Many, unlink.Many = rate, gone
		}
	}
	r.Metadata = []benchCalls{create, unlink}
	return nil
}

// calls does something for each of so many names in each directory, until that is done or the part is over.
func (b *bench) calls(dirs []string, counts []int, do func(name string) error) (done []int, rate float64, half time.Duration, err error) {
	began := time.Now()
	done = make([]int, len(dirs))
	times := make([][]time.Duration, len(dirs))
	errs := make([]error, len(dirs))
	var all sync.WaitGroup
	for i, dir := range dirs {
		all.Go(func() { // ends with the part
			for n := 0; n < counts[i] && (n == 0 || time.Since(began) < b.part) && b.ctx.Err() == nil; n++ {
				from := time.Now()
				if errs[i] = do(filepath.Join(dir, fmt.Sprint(n))); errs[i] != nil {
					return
				}
				times[i] = append(times[i], time.Since(from))
				done[i]++
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	b.done.Add(1)
	flat := slices.Concat(times...)
	half, _ = percentiles(flat)
	return done, float64(len(flat)) / took.Seconds(), half, errors.Join(errors.Join(errs...), b.ctx.Err())
}

// percentiles are the middle one of times and one that 99 of 100 are not above. It changes their order.
func percentiles(times []time.Duration) (half, most time.Duration) {
	if len(times) == 0 {
		return 0, 0
	}
	slices.Sort(times)
	return times[len(times)/2], times[len(times)*99/100]
}

// begin says what is being done now.
func (b *bench) begin(what string) { b.what.Store(&what) }

// show shows how far it is until the function that it returns is called.
func (b *bench) show(form progress.Form) (stop func()) {
	b.begin("making files")
	began := time.Now()
	return progress.Show(form, func() progress.State {
		left := time.Duration(b.parts)*b.part - time.Since(began)
		return progress.State{Share: float64(b.done.Load()) / float64(b.parts), Left: max(left.Round(time.Second), 0), Doing: *b.what.Load()}
	}).Stop
}

// hints are what stands out.
func (r *benchReport) hints() []string {
	hints := []string{}
	known := slices.DeleteFunc(slices.Clone(r.Devices), func(d benchDevice) bool { return d.Read == 0 })
	middle := func(of func(benchDevice) float64, but string) float64 {
		var others []float64
		for _, d := range known {
			if d.ID != but {
				others = append(others, of(d))
			}
		}
		slices.Sort(others)
		if len(others) == 0 {
			return 0
		}
		return others[len(others)/2]
	}
	best := 0.0
	for _, d := range known {
		best = max(best, d.Read)
		var slow []string
		for _, m := range []struct {
			what string
			of   func(benchDevice) float64
		}{
			{"writes", func(d benchDevice) float64 { return d.Write }},
			{"reads", func(d benchDevice) float64 { return d.Read }},
		} {
			if others := middle(m.of, d.ID); m.of(d) < 0.6*others {
				slow = append(slow, fmt.Sprintf("%s %s/s where others do %s/s", m.what, humanize.IBytes(uint64(m.of(d))), humanize.IBytes(uint64(others))))
			}
		}
		if others := time.Duration(middle(func(d benchDevice) float64 { return float64(d.Most) }, d.ID)); others > 0 && d.Most > 3*others {
			slow = append(slow, fmt.Sprintf("answers one small read of 100 only after %v, others after %v", d.Most.Round(time.Microsecond), others.Round(time.Microsecond)))
		}
		if len(slow) > 0 {
			hints = append(hints, fmt.Sprintf("device %.8s (%s) is slow: it %s. Look at its disk and at the way to it; while it is so, files that are striped over it are no faster",
				d.ID, d.Address, strings.Join(slow, ", ")))
		}
	}
	for _, d := range r.Devices {
		if d.Problem != "" {
			hints = append(hints, fmt.Sprintf("device %.8s (%s): %s", d.ID, d.Address, d.Problem))
		}
	}
	if len(known) > 1 && r.Striped.Read > 0 && r.Striped.Read < 1.2*best {
		hints = append(hints, fmt.Sprintf("a file that is striped as this directory says is read with %s/s, and one on a single data server with %s/s: this host's network or processors are the limit, "+
			"or the directory's stripe count is 1 (weft layout DIR)", humanize.IBytes(uint64(r.Striped.Read)), humanize.IBytes(uint64(best))))
	}
	for _, m := range r.Metadata {
		if m.Half > 10*time.Millisecond {
			hints = append(hints, fmt.Sprintf("%s takes %v: the way to the metadata service is long, or the disk of its catalog slow to sync", m.Call, m.Half.Round(100*time.Microsecond)))
		}
	}
	return hints
}

func (r *benchReport) print(out io.Writer) {
	w := newTable(out)
	rate := func(n float64) string { return humanize.IBytes(uint64(n)) + "/s" }
	fmt.Fprintf(w, "data on\tby\twrite\tread\t4 KiB read, half\t99 of 100\n")
	for _, d := range append(slices.Clone(r.Devices), r.Striped) {
		name := fmt.Sprintf("device %.8s  %s", d.ID, d.Address)
		if d.ID == "" {
			name = "all, as this directory's files are"
		}
		if d.Problem != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, d.Problem)
			continue
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%v\t%v\n", name, d.By, rate(d.Write), rate(d.Read), d.Half.Round(time.Microsecond), d.Most.Round(time.Microsecond))
	}
	fmt.Fprintf(w, "\nfiles\t1 caller\t%d callers\thalf of them within\n", benchCallers)
	for _, m := range r.Metadata {
		fmt.Fprintf(w, "%s\t%.0f/s\t%.0f/s\t%v\n", m.Call, m.One, m.Many, m.Half.Round(time.Microsecond))
	}
	w.Flush()
	fmt.Fprintln(out)
	for _, h := range r.Hints {
		fmt.Fprintln(out, "* "+h)
	}
	if len(r.Hints) == 0 {
		fmt.Fprintln(out, "Nothing stands out.")
	}
}
