package fs

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// Atime says which accesses change st_atime, as the options of mount(8) do.
type Atime struct {
	Rule AtimeRule
	// NoDir leaves directories out.
	NoDir bool
}

// AtimeRule is a rule for the inodes that are not left out.
type AtimeRule int

// The rules.
const (
	AtimeRelative AtimeRule = iota // the first access after a change, and one in 24 hours
	AtimeStrict                    // every access
	AtimeNever
)

// AtimeOf returns what the flags of mount(2) ask for.
func AtimeOf(flags uintptr) Atime {
	a := Atime{NoDir: flags&unix.MS_NODIRATIME != 0}
	switch {
	case flags&(unix.MS_NOATIME|unix.MS_RDONLY) != 0:
		a.Rule = AtimeNever
	case flags&unix.MS_STRICTATIME != 0:
		a.Rule = AtimeStrict
	}
	return a
}

const (
	atimeAge   = 24 * time.Hour
	atimeDelay = 3 * time.Second // from an access to the report of it
	// atimePatience is how long the end of a mount waits for the last report. Nothing is lost that anybody was promised.
	atimePatience = 3 * time.Second
	// atimeInodes bounds the directories and links whose times are remembered and, separately, the accesses that are not
	// reported. More accesses than that are lost.
	atimeInodes = 16 << 10
)

// accessTimes are the times of an inode that the rules look at.
type accessTimes struct {
	atime   atomic.Int64 // nanoseconds since 1970; 0 is unknown
	changed atomic.Int64 // the later of mtime and ctime
}

// due decides about an access at a time.
func (t *accessTimes) due(rule AtimeRule, at int64) bool {
	switch rule {
	case AtimeNever:
		return false
	case AtimeStrict:
		return true
	}
	last := t.atime.Load()
	return last <= t.changed.Load() || at-last >= int64(atimeAge)
}

// heard takes what the service says.
func (t *accessTimes) heard(a *metarpc.Attr) {
	t.atime.Store(a.Atime)
	t.changed.Store(max(t.changed.Load(), a.Mtime, a.Ctime))
}

// accesses has the access times that the service has not been told of. Nobody waits for it and what it tells is nobody's
// business but stat(2)'s, so it is not as careful as sizes are: what cannot be reported is forgotten. Open files keep
// their accessTimes themselves.
type accesses struct {
	fs *FS
	// rule is what counts; a remount changes it.
	rule atomic.Pointer[Atime]

	mu     sync.Mutex
	known  map[layout.FileID]*accessTimes // of directories and symbolic links
	parts  []accessPart                   // by shard
	timer  *time.Timer                    // runs if there is anything pending
	closed bool
}

// accessPart has the accesses to inodes of one shard, which one service is told of. accesses.mu guards it.
type accessPart struct {
	pending map[layout.FileID]int64 // to report, nanoseconds since 1970
	// reporting is closed at the end of the report under way, of the inodes in sent.
	reporting chan struct{}
	sent      map[layout.FileID]int64
}

func newAccesses(fs *FS, rule Atime) *accesses {
	x := &accesses{fs: fs, known: map[layout.FileID]*accessTimes{}, parts: make([]accessPart, len(fs.sessions))}
	x.rule.Store(&rule)
	for n := range x.parts {
		x.parts[n].pending = map[layout.FileID]int64{}
	}
	return x
}

// part is where an inode's accesses are. mu is held.
func (x *accesses) part(id layout.FileID) *accessPart { return &x.parts[x.fs.shardOf(id)] }

// file notes a read of an open file.
func (x *accesses) file(i *inode) {
	rule := x.rule.Load().Rule
	if rule == AtimeNever {
		return
	}
	if at := time.Now().UnixNano(); i.times.due(rule, at) {
		x.note(i.id, &i.times, at)
	}
}

// other notes that a directory was listed, or a symbolic link followed. If nothing is known of it the access counts.
func (x *accesses) other(id layout.FileID, dir bool) {
	rule := x.rule.Load()
	if rule.Rule == AtimeNever || dir && rule.NoDir {
		return
	}
	at := time.Now().UnixNano()
	x.mu.Lock()
	t := x.remember(id)
	x.mu.Unlock()
	if t.due(rule.Rule, at) {
		x.note(id, t, at)
	}
}

// remember returns what is known of a directory or link. mu is held.
func (x *accesses) remember(id layout.FileID) *accessTimes {
	t := x.known[id]
	if t == nil {
		for old := range x.known {
			if len(x.known) < atimeInodes {
				break
			}
			delete(x.known, old)
		}
		t = new(accessTimes)
		x.known[id] = t
	}
	return t
}

// note has an access reported soon, if it is due. The service may have told of a time before the access that was noted last.
func (x *accesses) note(id layout.FileID, t *accessTimes, at int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.part(id)
	if noted := max(p.pending[id], p.sent[id]); noted > t.atime.Load() {
		t.atime.Store(noted)
		if !t.due(x.rule.Load().Rule, at) {
			return
		}
	}
	t.atime.Store(at)
	if _, ok := p.pending[id]; !ok && len(p.pending) >= atimeInodes/len(x.parts) || x.closed {
		return
	}
	p.pending[id] = at
	if x.timer == nil {
		x.timer = time.AfterFunc(atimeDelay, x.due)
	}
}

// due is called by the timer. It runs only after something was noted, so that an idle mount does nothing.
func (x *accesses) due() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.timer = nil
	if !x.closed {
		// The goroutine owns one report and ends with it.
		x.fs.spawn(func() { x.report(x.fs.ctx) })
	}
}

// show brings what the service says, and is about to be shown, together with what it was not told.
func (x *accesses) show(a *metarpc.Attr) {
	if x.rule.Load().Rule == AtimeNever {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.part(a.ID)
	for _, noted := range []map[layout.FileID]int64{p.pending, p.sent} {
		if at, ok := noted[a.ID]; ok {
			a.Atime = max(a.Atime, at)
		}
	}
	if kind := a.Mode & unix.S_IFMT; kind == unix.S_IFDIR || kind == unix.S_IFLNK {
		x.remember(a.ID).heard(a)
	}
}

// set is called before somebody sets the time of the last access, which wins over those that were noted before.
func (x *accesses) set(ctx context.Context, id layout.FileID) error {
	waiting, stop := x.fs.meta.Patient(ctx, id)
	defer stop()
	for {
		x.mu.Lock()
		p := x.part(id)
		delete(p.pending, id)
		_, sent := p.sent[id]
		reporting := p.reporting
		x.mu.Unlock()
		if !sent {
			return nil
		}
		select {
		case <-reporting:
		case <-waiting.Done():
			return context.Cause(waiting)
		}
	}
}

// report tells the services what is pending. What they do not take is dropped.
func (x *accesses) report(ctx context.Context) {
	var all sync.WaitGroup
	for n := range x.parts {
		x.mu.Lock()
		some := len(x.parts[n].pending) > 0 || x.parts[n].reporting != nil
		x.mu.Unlock()
		if some {
			all.Go(func() { x.reportPart(ctx, &x.parts[n]) }) // tells one service, and ends with that
		}
	}
	all.Wait()
}

// reportPart is report to one service.
func (x *accesses) reportPart(ctx context.Context, p *accessPart) {
	x.mu.Lock()
	for p.reporting != nil {
		reporting := p.reporting
		x.mu.Unlock()
		select {
		case <-reporting:
		case <-ctx.Done():
			return
		}
		x.mu.Lock()
	}
	p.sent, p.pending = p.pending, map[layout.FileID]int64{}
	p.reporting = make(chan struct{})
	left := maps.Clone(p.sent)
	x.mu.Unlock()
	for len(left) > 0 {
		var reports []metarpc.SizeReport
		for id, at := range left {
			if len(reports) == metarpc.MaxBatch {
				break
			}
			reports = append(reports, metarpc.SizeReport{ID: id, Atime: at})
			delete(left, id)
		}
		if _, err := x.fs.meta.LayoutCommit(ctx, reports, false); err != nil && ctx.Err() == nil {
			x.fs.waiting.log(x.fs.log, slog.LevelInfo, "access times could not be reported", "files", len(reports), "err", err)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	close(p.reporting)
	p.reporting, p.sent = nil, nil
}

// close reports what is pending, as far as ctx allows, and ends the reporting.
func (x *accesses) close(ctx context.Context) {
	x.mu.Lock()
	x.closed = true
	if x.timer != nil {
		x.timer.Stop()
	}
	x.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, atimePatience)
	defer cancel()
	x.report(ctx)
}
