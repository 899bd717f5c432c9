package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/filename"
)

const (
	// slowTime is how long a request of the kernel may take before it is worth a word.
	slowTime = 10 * time.Second
	// slowLook is how often it is looked for such ones.
	slowLook = 2 * time.Second
	// slowShown is how many of them are shown to people.
	slowShown = 5
)

// slowRequest is a request of the kernel that a program has been waiting for.
type slowRequest struct {
	Op       string        `json:"op"`
	Inode    uint64        `json:"inode"`
	Path     filename.JSON `json:"path,omitempty"` // below the mount point; empty if it is not known
	PID      uint32        `json:"pid"`            // the thread that waits
	Since    time.Time     `json:"since"`
	WaitsFor string        `json:"waits_for"`
}

func (r *slowRequest) String() string {
	what := fmt.Sprintf("inode %d", r.Inode)
	if r.Path != "" {
		what += fmt.Sprintf(" (%s)", filename.Quote(string(r.Path)))
	}
	return fmt.Sprintf("%s of %s, by process %d, for %v; waits for %s", r.Op, what, r.PID, time.Since(r.Since).Round(time.Second), r.WaitsFor)
}

// slow are the requests that have taken long so far.
func (d *daemon) slow() []slowRequest {
	list := []slowRequest{}
	flights := d.fsys.Flights(slowTime)
	if len(flights) == 0 {
		return list
	}
	data, metadata, names := d.waitsForData(), d.waitsForMetadata(), d.fsys.Names()
	for _, f := range flights {
		why := metadata
		switch f.Op {
		case "read", "write", "fsync", "flush", "fallocate", "copy_file_range":
			why = slices.Concat(data, metadata)
		}
		if len(why) == 0 {
			why = []string{"something in this process"}
		}
		list = append(list, slowRequest{f.Op, uint64(f.ID), filename.JSON(names.Path(f.ID)), f.PID, f.Began, strings.Join(why, ", or ")})
	}
	return list
}

// waitsForMetadata is which metadata services do not answer.
func (d *daemon) waitsForMetadata() (why []string) {
	for _, s := range d.meta.State().Sessions {
		switch {
		case s.Problem != nil:
			why = append(why, fmt.Sprintf("metadata service %s (%s)", s.Addr, problemOf(&s)))
		case s.Busy > 0:
			why = append(why, fmt.Sprintf("answers of metadata service %s", s.Addr))
		}
	}
	return why
}

// waitsForData is which data servers do not answer: those that cannot be reached, or else all that have requests.
func (d *daemon) waitsForData() (why []string) {
	var busy []string
	for _, st := range d.data.Stats() {
		use := useOf(&st, d.cfg.options.secrecy.data)
		name := st.Device.String()[:8]
		if len(use.Connections) > 0 {
			name += " at " + use.Connections[0].Address
		}
		switch {
		case use.Trouble != "":
			why = append(why, fmt.Sprintf("device %s (%s, since %s)", name, use.Trouble, use.Since.Format(time.RFC3339)))
		case st.Outstanding > 0:
			busy = append(busy, fmt.Sprintf("%d answers of device %s", st.Outstanding, name))
		}
	}
	if why == nil {
		return busy
	}
	return why
}

// watchSlow tells the log of requests that take long, once of each, and when none does any more. It ends with ctx.
func (d *daemon) watchSlow(ctx context.Context) {
	tick := time.NewTicker(slowLook)
	defer tick.Stop()
	told := map[fs.Flight]bool{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		list := d.slow()
		now := map[fs.Flight]bool{}
		fresh := 0
		for _, r := range list {
			f := fs.Flight{Op: r.Op, PID: r.PID, Began: r.Since}
			now[f] = true
			if told[f] {
				continue
			}
			if fresh++; fresh <= slowShown {
				slog.Warn("a request takes long", "op", r.Op, "inode", r.Inode, "pid", r.PID, "since", r.Since.Format(time.RFC3339), "waits_for", r.WaitsFor)
			}
		}
		if fresh > slowShown {
			slog.Warn("more requests take long", "more", fresh-slowShown, "all", len(list))
		}
		if len(list) == 0 && len(told) > 0 {
			slog.Info("requests that took long have been answered", "requests", len(told))
		}
		told = now
	}
}

func (st *mountStatus) printSlow(out io.Writer) {
	for i, r := range st.Slow {
		if i == slowShown {
			fmt.Fprintf(out, "  waiting     and %d more\n", len(st.Slow)-i)
			break
		}
		fmt.Fprintf(out, "  waiting     %s\n", &r)
	}
}
