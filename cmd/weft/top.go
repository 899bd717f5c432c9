package main

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/dustin/go-humanize"
	"github.com/gdamore/tcell/v2"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/filename"
)

// topSample is what a mount says to weft top, since it was mounted, or for files since somebody looks.
type topSample struct {
	At       time.Time        `json:"at"`
	Status   mountStatus      `json:"status"`
	Requests map[string]opUse `json:"requests"` // of the kernel
	Flights  int              `json:"flights"`  // of these, how many are under way
	Files    []topFile        `json:"files"`
}

type topFile struct {
	Inode   uint64        `json:"inode"`
	PID     uint32        `json:"pid"`
	Path    filename.JSON `json:"path"` // empty if it is not known
	Ops     uint64        `json:"ops"`
	Read    int64         `json:"bytes_read"`
	Written int64         `json:"bytes_written"`
}

// topFiles is how many files are named.
const topFiles = 40

func (d *daemon) top(ctx context.Context) topSample {
	s := topSample{At: time.Now(), Requests: map[string]opUse{}, Files: []topFile{}, Flights: len(d.fsys.Flights(0))}
	ops, _ := d.fsys.Requests()
	for op, counts := range ops {
		s.Requests[op] = opUseOf(&dataplane.OpStats{Latency: counts.N, Time: counts.Sum})
	}
	names := d.fsys.Names()
	for i, f := range d.fsys.Files() {
		file := topFile{Inode: uint64(f.ID), PID: f.PID, Ops: f.Reads + f.Writes, Read: f.Read, Written: f.Written}
		if i < topFiles {
			file.Path = filename.JSON(cmp.Or(names.Path(f.ID), openPath(f.PID, file.Inode, d.cfg.mountpoint)))
		}
		s.Files = append(s.Files, file)
	}
	s.Status = d.status(ctx)
	return s
}

// openPath is under which name a process has an inode of a mount open, below the mount point; empty if it has not.
func openPath(pid uint32, inode uint64, mountpoint string) string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	for _, fd := range fds {
		path, err := os.Readlink(filepath.Join(dir, fd.Name()))
		below, ok := strings.CutPrefix(path, strings.TrimSuffix(mountpoint, "/")+"/")
		if err != nil || !ok {
			continue
		}
		// Its descriptor tells without asking the file system, which is this process.
		if info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name())); err == nil && strings.Contains(string(info), fmt.Sprintf("\nino:\t%d\n", inode)) {
			return below
		}
	}
	return ""
}

const topHelp = "\nShows each second what a mount does: how much is read and written and how fast, at which data servers, in which files, and who asks the metadata\n" +
	"service. Keys: q ends it, Tab shows the next mount, Space stops and goes on.\n"

func runTop(ctx context.Context, c *command, args []string) error {
	fl := c.Flags(topHelp)
	once := fl.Bool("once", false, "print one screen and end, also where there is no terminal")
	every := fl.Duration("every", time.Second, "how long between two looks, 100ms to 1m")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	if *every < 100*time.Millisecond || *every > time.Minute {
		return usagef("top: --every %v: want 100ms to 1m", *every)
	}
	mounts, err := selectMounts(fl.Args())
	if err != nil {
		return err
	}
	if len(mounts) == 0 {
		return usagef("top: nothing is mounted here")
	}
	if *once {
		width, height := 80, 24
		if ws, err := unix.IoctlGetWinsize(int(os.Stdout.Fd()), unix.TIOCGWINSZ); err == nil && ws.Col > 0 {
			width, height = int(ws.Col), int(ws.Row)
		}
		if len(fl.Args()) == 0 && len(mounts) > 1 {
			return usagef("top --once: several volumes are mounted here: name a mount point")
		}
		v := &topView{every: *every}
		for i := range 2 {
			if i > 0 {
				time.Sleep(*every)
			}
			v.look(ctx, mounts[0])
		}
		fmt.Println(strings.Join(v.lines(width, height), "\n"))
		return v.err
	}
	screen, err := tcell.NewScreen()
	if err == nil {
		err = screen.Init()
	}
	if err != nil {
		return fmt.Errorf("top: this is no terminal it knows (TERM=%s): %w; weft top --once prints a screen", os.Getenv("TERM"), err)
	}
	defer screen.Fini()
	return showTop(ctx, screen, mounts, *every)
}

// showTop draws on a screen until somebody ends it.
func showTop(ctx context.Context, screen tcell.Screen, mounts []mountEntry, every time.Duration) error {
	events := make(chan tcell.Event)
	quit := make(chan struct{})
	defer close(quit)
	go screen.ChannelEvents(events, quit) // ends with quit
	tick := time.NewTicker(every)
	defer tick.Stop()
	at, paused := 0, false
	v := &topView{every: every}
	v.look(ctx, mounts[at])
	for {
		v.draw(screen)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if !paused {
				v.look(ctx, mounts[at])
			}
		case event := <-events:
			switch e := event.(type) {
			case nil:
				return nil
			case *tcell.EventResize:
				screen.Sync()
			case *tcell.EventKey:
				switch {
				case e.Key() == tcell.KeyCtrlC || e.Key() == tcell.KeyEscape || e.Rune() == 'q':
					return nil
				case e.Key() == tcell.KeyTab:
					at = (at + 1) % len(mounts)
					v = &topView{every: every}
					v.look(ctx, mounts[at])
				case e.Rune() == ' ':
					paused = !paused
				}
			}
		}
	}
}

// topView is what is seen of a mount.
type topView struct {
	mount       mountEntry
	every       time.Duration
	before, now *topSample // before is nil at first
	err         error      // why there is no later one
}

// look asks the serving process, which waits for the metadata service for statusTime. Keys wait meanwhile.
func (v *topView) look(ctx context.Context, m mountEntry) {
	ctx, cancel := context.WithTimeout(ctx, statusTime+2*time.Second)
	defer cancel()
	v.mount = m
	s := new(topSample)
	if v.err = m.askState(ctx, "top", s); v.err == nil {
		v.before, v.now = v.now, s
	}
}

func (v *topView) draw(screen tcell.Screen) {
	screen.Clear()
	width, height := screen.Size()
	for y, line := range v.lines(width, height) {
		style := tcell.StyleDefault
		if y == 0 || line != "" && line == strings.ToUpper(line) { // the heads of tables
			style = style.Bold(true)
		}
		x := 0
		for _, r := range line {
			screen.SetContent(x, y, r, nil, style)
			x++
		}
	}
	screen.Show()
}

// lines is the screen of some columns and lines.
func (v *topView) lines(width, height int) []string {
	out := []string{fmt.Sprintf("%s on %s", filename.Quote(v.mount.Source), filename.Quote(v.mount.Mountpoint))}
	if v.err != nil {
		out = append(out, v.err.Error())
	}
	if v.now == nil || v.before == nil {
		if v.err == nil {
			out = append(out, "looking ...")
		}
		return fit(out, width, height)
	}
	span := v.now.At.Sub(v.before.At).Seconds()
	r := rates{span}
	st := &v.now.Status
	out[0] += fmt.Sprintf("   weft %s, since %s", st.Version, humanize.Time(st.Since))
	var readWas, readIs, writtenWas, writtenIs uint64
	for i := range v.now.Status.Devices {
		d := &v.now.Status.Devices[i]
		if d.Mount == nil {
			continue
		}
		old := deviceUseIn(&v.before.Status, d.ID)
		readIs += d.Mount.Reads.Bytes
		readWas += old.Reads.Bytes
		writtenIs += d.Mount.Writes.Bytes
		writtenWas += old.Writes.Bytes
	}
	request := func(name string) string {
		now := v.now.Requests[name]
		then := v.before.Requests[name]
		p50, p99 := between(&then, &now)
		return fmt.Sprintf("%8s/s  p50 %6s  p99 %6s", r.count(then.Ops, now.Ops), p50, p99)
	}
	calls := func(s *topSample) (n uint64) {
		for _, c := range s.Status.Service.Calls {
			n += c
		}
		return n
	}
	all := func(s *topSample) (n uint64) {
		for _, u := range s.Requests {
			n += u.Ops
		}
		return n
	}
	service := "ok"
	if !st.Service.Connected || st.Service.Problem != "" {
		service = cmp.Or(st.Service.Problem, "not connected")
	}
	out = append(out,
		fmt.Sprintf("read     %10s/s  %s", r.bytes(readWas, readIs), request("read")),
		fmt.Sprintf("written  %10s/s  %s", r.bytes(writtenWas, writtenIs), request("write")),
		fmt.Sprintf("requests %10s/s  %d under way; %s written and not stable yet", r.count(all(v.before), all(v.now)), v.now.Flights, humanize.IBytes(uint64(st.Retained))),
		fmt.Sprintf("metadata %10s calls/s  %s: %s", r.count(calls(v.before), calls(v.now)), st.Service.Address, service),
	)
	for i := range min(len(st.Slow), 3) {
		out = append(out, "waiting  "+st.Slow[i].String())
	}
	tables := [][]string{v.devices(r, width), v.files(r, width), v.clients(r, width)}
	for i, t := range tables {
		rest := height - len(out) - 1
		if i < len(tables)-1 {
			rest = rest * 2 / 3 // the others get what is left
		}
		if len(t) > 1 && rest > 1 {
			out = append(append(out, ""), t[:min(len(t), rest)]...)
		}
	}
	return fit(out, width, height)
}

func (v *topView) devices(r rates, width int) []string {
	name := max(width-52, leastName)
	t := []string{fmt.Sprintf("%-*s %10s %10s %7s %7s %7s %5s", name, "DEVICE", "READ/S", "WRITTEN/S", "OPS/S", "P50", "P99", "WAIT")}
	for i := range v.now.Status.Devices {
		d := &v.now.Status.Devices[i]
		what := d.Address
		if u, err := url.Parse(d.Address); err == nil && u.Host != "" {
			what = u.Host
		}
		if !d.Reachable || d.Mount == nil {
			t = append(t, fmt.Sprintf("%-*s %s", name, cut(what, name), cmp.Or(d.Problem, "not used by this mount")))
			continue
		}
		now, old := d.Mount, deviceUseIn(&v.before.Status, d.ID)
		path := now.Path
		if d.Local {
			path = "local"
		}
		if !d.Local && len(now.Connections) > 0 {
			path += fmt.Sprintf(" %d/%d", now.up(), len(now.Connections))
		}
		was, is := joined(&old.Reads, &old.Writes), joined(&now.Reads, &now.Writes)
		p50, p99 := between(&was, &is)
		t = append(t, fmt.Sprintf("%-*s %10s %10s %7s %7s %7s %5d", name, cut(what, name-len(path)-1)+" "+path, r.bytes(old.Reads.Bytes, now.Reads.Bytes), r.bytes(old.Writes.Bytes, now.Writes.Bytes),
			r.count(was.Ops, is.Ops), p50, p99, now.Outstanding))
	}
	return t
}

func (v *topView) files(r rates, width int) []string {
	name := max(width-40, leastName)
	t := []string{fmt.Sprintf("%-*s %10s %10s %7s %9s", name, "FILE", "READ/S", "WRITTEN/S", "OPS/S", "PROCESS")}
	old := map[uint64]topFile{}
	for _, f := range v.before.Files {
		old[f.Inode] = f
	}
	list := slices.Clone(v.now.Files)
	bytes := func(f topFile) int64 { return f.Read + f.Written - old[f.Inode].Read - old[f.Inode].Written }
	slices.SortStableFunc(list, func(a, b topFile) int { return cmp.Compare(bytes(b), bytes(a)) })
	for _, f := range list {
		was := old[f.Inode]
		if f.Ops == was.Ops {
			continue
		}
		what := "inode " + strconv.FormatUint(f.Inode, 10)
		if f.Path != "" {
			what = filename.Quote(string(f.Path))
		}
		if runes := []rune(what); len(runes) > name {
			what = "..." + string(runes[len(runes)-name+3:]) // its end says more
		}
		t = append(t, fmt.Sprintf("%-*s %10s %10s %7s %9d", name, what, r.bytes(uint64(was.Read), uint64(f.Read)), r.bytes(uint64(was.Written), uint64(f.Written)), r.count(was.Ops, f.Ops), f.PID))
	}
	return t
}

func (v *topView) clients(r rates, width int) []string {
	name := max(width-29, leastName)
	t := []string{fmt.Sprintf("%-*s %10s %8s %8s", name, "CLIENT", "CALLS/S", "OPEN", "WRITING")}
	old := map[string]uint64{}
	for _, c := range v.before.Status.Service.Clients {
		old[c.ID] = c.Calls
	}
	list := slices.Clone(v.now.Status.Service.Clients)
	calls := func(c clientStatus) uint64 { return c.Calls - min(old[c.ID], c.Calls) }
	slices.SortStableFunc(list, func(a, b clientStatus) int { return cmp.Compare(calls(b), calls(a)) })
	for _, c := range list {
		what := c.Host
		if c.Mount != "" {
			what += " " + filename.Quote(string(c.Mount))
		}
		t = append(t, fmt.Sprintf("%-*s %10s %8d %8d", name, cut(what, name), r.count(0, calls(c)), c.Opens, c.Layouts))
	}
	return t
}

// deviceUseIn is what a mount had done at a device.
func deviceUseIn(st *mountStatus, id string) *deviceUse {
	for i := range st.Devices {
		if d := &st.Devices[i]; d.ID == id && d.Mount != nil {
			return d.Mount
		}
	}
	return &deviceUse{}
}

// joined is two kinds of requests together.
func joined(a, b *opUse) opUse {
	u := opUse{Ops: a.Ops + b.Ops, Bytes: a.Bytes + b.Bytes, Latency: make([]uint64, max(len(a.Latency), len(b.Latency)))}
	for _, of := range []*opUse{a, b} {
		for i, n := range of.Latency {
			u.Latency[i] += n
		}
	}
	return u
}

// between are the percentiles of what was answered from one moment to another.
func between(was, is *opUse) (p50, p99 string) {
	var l dataplane.Latency
	for i := range min(len(is.Latency), len(l)) {
		l[i] = is.Latency[i]
		if i < len(was.Latency) {
			l[i] -= min(was.Latency[i], l[i])
		}
	}
	if is.Ops <= was.Ops {
		return "-", "-"
	}
	return shortTime(l.Quantile(0.5)), shortTime(l.Quantile(0.99))
}

// shortTime has two digits or three.
func shortTime(d time.Duration) string {
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= 100*unit {
			return d.Round(unit).String()
		}
		if d >= unit {
			return d.Round(unit / 10).String()
		}
	}
	return d.String()
}

// rates are by second.
type rates struct{ span float64 }

func (r rates) per(was, is uint64) float64 {
	if is < was || r.span <= 0 { // it was mounted anew
		return 0
	}
	return float64(is-was) / r.span
}

func (r rates) count(was, is uint64) string {
	n := r.per(was, is)
	if n > 0 && n < 9.95 {
		return strconv.FormatFloat(n, 'f', 1, 64)
	}
	return strconv.FormatFloat(n, 'f', 0, 64)
}

func (r rates) bytes(was, is uint64) string { return humanize.IBytes(uint64(r.per(was, is))) }

// leastName is how wide the first column of a table is at least.
const leastName = 10

func cut(s string, width int) string {
	if runes := []rune(s); len(runes) > max(width, 0) {
		return string(runes[:max(width, 0)])
	}
	return s
}

// fit cuts what does not fit, and makes harmless what names have in them for terminals.
func fit(lines []string, width, height int) []string {
	lines = lines[:min(len(lines), height)]
	for i, line := range lines {
		line = strings.Map(func(r rune) rune {
			if unicode.IsPrint(r) {
				return r
			}
			return '?'
		}, line)
		lines[i] = strings.TrimRight(cut(line, width), " ")
	}
	return lines
}
