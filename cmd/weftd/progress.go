package main

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/server/catalog/dump"
)

// dumping is how far an export or import is, from the goroutine that does it to the one that shows it.
type dumping struct {
	shown *progress.Shown
	last  atomic.Pointer[dumped]
}

type dumped struct {
	dump.Progress
	share float64
}

// showDump shows it until stop.
func showDump(form progress.Form) *dumping {
	d := new(dumping)
	d.last.Store(&dumped{})
	d.shown = progress.Show(form, func() progress.State {
		p := d.last.Load()
		return progress.State{Counts: []progress.Count{{Unit: "rows", Done: p.Rows}, {Unit: progress.Bytes, Done: p.Bytes}}, Share: p.share}
	})
	return d
}

// tell is called often. share is how much is done, 0 to 1; 0 if that is not known.
func (d *dumping) tell(p dump.Progress, share float64) { d.last.Store(&dumped{p, share}) }

func rates(p dump.Progress, took time.Duration) string {
	seconds := max(took.Seconds(), 1e-3)
	return fmt.Sprintf("%.0f rows/s, %s/s", float64(p.Rows)/seconds, humanize.IBytes(uint64(float64(p.Bytes)/seconds)))
}

// summary says what was done.
func (d *dumping) summary(p dump.Progress) string {
	took := d.shown.Took()
	return fmt.Sprintf("%d rows, %s in %v, %s", p.Rows, humanize.IBytes(uint64(p.Bytes)), took.Round(10*time.Millisecond), rates(p, took))
}
