package fs

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// Traced is a request of the kernel that has been answered, and what it had to wait for.
type Traced struct {
	Flight
	Name  string // in the directory ID, if the request names something there
	Off   int64  // of a read or write
	Bytes int    // that were read or written
	Took  time.Duration
	// Metadata and Data are the parts of Took for which it waited for metadata services and for data servers, their networks included. What is
	// waited for at the same time counts for each. The rest was spent in this process, or waiting there for other requests.
	Metadata, Data time.Duration
	// Of the requests to data servers that it led to, the one that took longest went to Device and took Slowest; 0: there was none.
	Device  layout.DeviceID
	Slowest time.Duration
}

// Tracer collects requests as they are answered.
type Tracer struct {
	C <-chan Traced // is never closed

	c     chan Traced
	ops   [len(opNames)]bool
	least time.Duration
	lost  atomic.Int64
}

// tracerRoom is how many requests wait for whoever reads a Tracer.
const tracerRoom = 4096

// Trace begins to collect those requests of some kinds, or of all if ops is empty, that take at least so long. Whoever calls it reads C, and calls EndTrace.
func (fs *FS) Trace(ops []string, least time.Duration) (*Tracer, error) {
	t := &Tracer{c: make(chan Traced, tracerRoom), least: least}
	t.C = t.c
	for _, op := range ops {
		if !slices.Contains(opNames[:], op) || op == "" {
			return nil, fmt.Errorf("there are no requests of the kind %q, but: %s", op, strings.Join(OpNames(), ", "))
		}
	}
	for op, name := range opNames {
		t.ops[op] = name != "" && (len(ops) == 0 || slices.Contains(ops, name))
	}
	fs.changeTracers(func(all []*Tracer) []*Tracer { return append(all, t) })
	return t, nil
}

// EndTrace ends the collecting.
func (fs *FS) EndTrace(t *Tracer) {
	fs.changeTracers(func(all []*Tracer) []*Tracer {
		return slices.DeleteFunc(all, func(other *Tracer) bool { return other == t })
	})
}

// Lost is how many requests were not collected, since nobody had read C for too long.
func (t *Tracer) Lost() int64 { return t.lost.Load() }

// OpNames are the kinds of requests.
func OpNames() (names []string) {
	for _, name := range opNames {
		if name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (fs *FS) changeTracers(change func([]*Tracer) []*Tracer) {
	for {
		old := fs.tracers.Load()
		var all []*Tracer
		if old != nil {
			all = slices.Clone(*old)
		}
		fresh := new([]*Tracer)
		if *fresh = change(all); len(*fresh) == 0 {
			fresh = nil
		}
		if fs.tracers.CompareAndSwap(old, fresh) {
			return
		}
	}
}

// tracing reports whether somebody collects requests.
func (fs *FS) tracing() bool { return fs.tracers.Load() != nil }

// journey is what one request has gone through so far.
type journey struct {
	metadata, data atomic.Int64 // nanoseconds
	slowest        dataplane.Slowest
}

func (j *journey) reset() {
	j.metadata.Store(0)
	j.data.Store(0)
	j.slowest.Reset()
}

type journeyKey struct{}

// value is what a context of the request has under key, or nil.
func (j *journey) value(key any) any {
	switch key.(type) {
	case journeyKey:
		return j
	case metaclient.WaitedKey:
		return &j.metadata
	case dataplane.SlowestKey:
		return &j.slowest
	}
	return nil
}

// journeyContext counts what is waited for with it.
type journeyContext struct {
	context.Context
	*journey
}

func (c journeyContext) Value(key any) any {
	if v := c.value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// atData begins to wait for data servers; done ends it. slowest is nil if nobody wants to know.
func atData(ctx context.Context) (slowest *dataplane.Slowest, done func()) {
	j, _ := ctx.Value(journeyKey{}).(*journey)
	if j == nil {
		return nil, func() {}
	}
	began := time.Now()
	return &j.slowest, func() { j.data.Add(int64(time.Since(began))) }
}

// answered is called once when a request has been: n is how many bytes were read or written at off.
func (fs *FS) answered(f *flight, j *journey, name string, off int64, n int) {
	fs.flights.end(f)
	if int(f.op) >= len(opNames) {
		return
	}
	took := time.Since(f.began)
	fs.counts.ops[f.op].Add(took)
	tracers := fs.tracers.Load()
	if tracers == nil {
		return
	}
	for _, t := range *tracers {
		if !t.ops[f.op] || took < t.least {
			continue
		}
		r := Traced{
			Flight: Flight{opNames[f.op], f.pid, f.id, f.began}, Name: name, Off: off, Bytes: n,
			Took: took, Metadata: time.Duration(j.metadata.Load()), Data: time.Duration(j.data.Load()),
		}
		r.Device, r.Slowest = j.slowest.Get()
		select {
		case t.c <- r:
		default:
			t.lost.Add(1)
		}
	}
}
