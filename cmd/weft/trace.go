package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/layout"
)

// traceLine is a request of the kernel that was answered.
type traceLine struct {
	At       time.Time     `json:"at"` // when it came
	Op       string        `json:"op"`
	Inode    uint64        `json:"inode"`          // of a request that names something: of the directory
	Name     filename.JSON `json:"name,omitempty"` // there
	Path     filename.JSON `json:"path,omitempty"` // below the mount point, with the name; empty if it is not known
	PID      uint32        `json:"pid"`            // the thread that waited
	Command  filename.JSON `json:"command,omitempty"`
	Offset   int64         `json:"offset"` // this and the bytes of reads and writes
	Bytes    int           `json:"bytes"`
	Took     int64         `json:"took_ns"`
	Daemon   int64         `json:"daemon_ns"` // Took without the two that follow
	Metadata int64         `json:"metadata_ns"`
	Data     int64         `json:"data_ns"`
	Device   string        `json:"device,omitempty"` // to which that request went that took longest
	Slowest  int64         `json:"slowest_ns"`       // of that request
}

const (
	// traceRoom is how many lines wait for the one who shows them.
	traceRoom = 50_000
	// traceLook is how long requests are gathered before it is looked for their paths.
	traceLook = progressTime
)

// trace has far tell of requests until ctx ends.
func (d *daemon) trace(ctx context.Context, req *controlRequest, far *news) (any, error) {
	t, err := d.fsys.Trace(req.Ops, req.Least)
	if err != nil {
		return nil, err
	}
	defer d.fsys.EndTrace(t)
	tick := time.NewTicker(traceLook)
	defer tick.Stop()
	var batch []fs.Traced
	names, lost := d.fsys.Names(), int64(0)
	commands := map[uint32]string{} // asked at once, as threads end
	for {
		select {
		case r := <-t.C:
			if len(batch) == traceRoom {
				lost++
				continue
			}
			if _, known := commands[r.PID]; !known {
				comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", r.PID))
				commands[r.PID] = strings.TrimSpace(string(comm))
			}
			batch = append(batch, r)
		case <-tick.C:
			var lines []traceLine
			if len(batch) > 0 {
				before := names
				names = d.fsys.Names()
				lines = d.traceLines(batch, func(id layout.FileID) string { return cmp.Or(names.Path(id), before.Path(id)) }, commands, string(req.Name))
				clear(commands)
			}
			batch = batch[:0]
			lost += far.trace(lines, lost+t.Lost())
		case <-ctx.Done():
			return struct{}{}, nil
		}
	}
}

// traceLines are those of requests whose path matches a pattern, or of all if that is empty. known tells what paths are, commands the names of threads.
func (d *daemon) traceLines(batch []fs.Traced, known func(layout.FileID) string, commands map[uint32]string, pattern string) (lines []traceLine) {
	slices.SortStableFunc(batch, func(a, b fs.Traced) int { return a.Began.Compare(b.Began) })
	paths := map[layout.FileID]string{}
	for i := range batch {
		r := &batch[i]
		where, ok := paths[r.ID]
		if !ok {
			where = cmp.Or(known(r.ID), openPath(r.PID, uint64(r.ID), d.cfg.mountpoint))
			paths[r.ID] = where
		}
		if where != "" && r.Name != "" {
			where = path.Join(where, r.Name)
		}
		if pattern != "" && !matchPath(pattern, where) {
			continue
		}
		line := traceLine{
			At: r.Began, Op: r.Op, Inode: uint64(r.ID), Name: filename.JSON(r.Name), Path: filename.JSON(where), PID: r.PID, Command: filename.JSON(commands[r.PID]), Offset: r.Off, Bytes: r.Bytes,
			Took: int64(r.Took), Daemon: int64(max(0, r.Took-r.Metadata-r.Data)), Metadata: int64(r.Metadata), Data: int64(r.Data), Slowest: int64(r.Slowest),
		}
		if r.Slowest > 0 {
			line.Device = r.Device.String()
		}
		lines = append(lines, line)
	}
	return lines
}

// matchPath reports whether a pattern of path.Match is that of a path, or of a directory above it. One without a slash is compared with single names.
func matchPath(pattern, where string) bool {
	for where != "" && where != "." {
		what := where
		if !strings.Contains(pattern, "/") {
			what = path.Base(where)
		}
		if ok, _ := path.Match(pattern, what); ok {
			return true
		}
		where = path.Dir(where)
	}
	return false
}

const traceHelp = "\nPrints a line for each request of the kernel that a mount has answered, until it is interrupted: how long it took, and how long of that it\n" +
	"waited for metadata services and for data servers, their networks included (DAEMON is the rest); which device had the request that took\n" +
	"longest; which thread waited; for reads and writes how many bytes at which offset. What the kernel answers by itself is not shown, and\n" +
	"requests that still wait are shown by weft status.\n\n" +
	"GLOB is a pattern as of the shell for a file, or a directory above it: a path below the mount point, or without a slash any name.\n"

func runTrace(ctx context.Context, c *command, args []string) error {
	fl := c.Flags(traceHelp)
	slow := fl.Duration("slow", 0, "only requests that took at least so long, as 100ms")
	ops := fl.StringSlice("op", nil, "only requests of these kinds, as read,write,lookup")
	pattern := fl.String("path", "", "only requests for what `GLOB` matches")
	asJSON := fl.Bool("json", false, "print an object for each request, in a line")
	if err := parse(c, fl, args, 0, 1); err != nil {
		return err
	}
	for _, op := range *ops {
		if !slices.Contains(fs.OpNames(), op) {
			return usagef("trace: --op %s: there is no such kind of request, but %s", op, strings.Join(fs.OpNames(), ", "))
		}
	}
	if _, err := path.Match(*pattern, ""); err != nil {
		return usagef("trace: --path %s: this is no pattern: %v", *pattern, err)
	}
	if *slow < 0 {
		return usagef("trace: --slow %v: want a time of 0 or more", *slow)
	}
	mounts, err := selectMounts(fl.Args())
	switch {
	case err != nil:
		return err
	case len(mounts) == 0:
		return usagef("trace: nothing is mounted here")
	case len(mounts) > 1:
		return usagef("trace: several volumes are mounted here: name a mount point")
	}
	m := mounts[0]
	out := json.NewEncoder(os.Stdout)
	out.SetEscapeHTML(false)
	if !*asJSON {
		if err := tellNetworks(ctx, m); err != nil {
			return err
		}
		fmt.Println(traceHead)
	}
	lost := int64(0)
	req := controlRequest{Op: "trace", Ops: *ops, Least: *slow, Name: filename.JSON(*pattern)}
	err = controlPatiently(ctx, m, req, &struct{}{}, func(r *controlReply) {
		for i := range r.Trace {
			if *asJSON {
				out.Encode(&r.Trace[i])
			} else {
				fmt.Println(&r.Trace[i])
			}
		}
		if r.Lost > lost {
			fmt.Fprintf(os.Stderr, "weft: %d requests were too many to be shown: ask for less with --slow, --op or --path\n", r.Lost-lost)
			lost = r.Lost
		}
	})
	if ctx.Err() != nil {
		return nil // interrupted: that is how it ends
	}
	return err
}

// tellNetworks prints how fast the networks to data servers are, with which the times at devices can be compared.
func tellNetworks(ctx context.Context, m mountEntry) error {
	st, err := m.status(ctx)
	if err != nil {
		return err
	}
	for i := range st.Devices {
		d := &st.Devices[i]
		if d.Mount == nil || d.Local {
			continue
		}
		rtt, again := int64(0), uint32(0)
		for _, c := range d.Mount.Connections {
			if c.Up && c.RTT > 0 && (rtt == 0 || c.RTT < rtt) {
				rtt = c.RTT
			}
			again += c.Retransmits
		}
		if rtt > 0 {
			fmt.Printf("# device %s (%s): its network takes %s there and back, %s packets were sent again\n", d.ID[:8], d.Mount.Connections[0].Address, shortTime(time.Duration(rtt)), humanize.Comma(int64(again)))
		}
	}
	return nil
}

const traceFormat = "%-15s %-15s %7s %7s %8s %7s %8s %-8s %-20s %-22s %s"

var traceHead = strings.TrimSpace(fmt.Sprintf(traceFormat, "TIME", "REQUEST", "TOOK", "DAEMON", "METADATA", "DATA", "SLOWEST", "DEVICE", "THREAD", "BYTES@OFFSET", "PATH"))

func (l *traceLine) String() string {
	span := func(ns int64) string {
		if ns == 0 {
			return "-"
		}
		return shortTime(time.Duration(ns))
	}
	bytes := "-"
	if l.Op == "read" || l.Op == "write" {
		bytes = fmt.Sprintf("%d@%d", l.Bytes, l.Offset)
	}
	device := "-"
	if l.Device != "" {
		device = l.Device[:8]
	}
	what := "inode " + strconv.FormatUint(l.Inode, 10)
	switch {
	case l.Path != "":
		what = filename.Quote(string(l.Path))
	case l.Name != "":
		what += " " + filename.Quote(string(l.Name))
	}
	thread := fmt.Sprintf("%d/?", l.PID)
	if l.Command != "" {
		thread = fmt.Sprintf("%d/%s", l.PID, filename.Quote(string(l.Command)))
	}
	return fmt.Sprintf(traceFormat, l.At.Format("15:04:05.000000"), l.Op, span(l.Took), span(l.Daemon), span(l.Metadata), span(l.Data), span(l.Slowest), device, thread, bytes, what)
}
