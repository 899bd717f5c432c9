package fs

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/layout"
)

// flight is a request of the kernel that is being served.
type flight struct {
	op    uint32 // of FUSE
	pid   uint32 // the thread that waits for it
	id    layout.FileID
	began time.Time

	// firm says that the request cannot start over, overtaken that a recall waits for it.
	firm, overtaken atomic.Bool

	shard      uint32
	prev, next *flight // in the shard's ring; nil: it is over
}

// flights are all that there are. The shard of each is left to chance, as many may be of one file, or of one thread.
type flights struct {
	shards [flightShards]struct {
		mu   sync.Mutex
		ring flight // its next is the oldest
		_    [64]byte
	}
}

const flightShards = 32

func (fl *flights) init() {
	for i := range fl.shards {
		r := &fl.shards[i].ring
		r.prev, r.next = r, r
	}
}

func (fl *flights) start(f *flight) {
	f.shard = rand.Uint32() % flightShards
	s := &fl.shards[f.shard]
	s.mu.Lock()
	f.prev, f.next = s.ring.prev, &s.ring
	f.prev.next, s.ring.prev = f, f
	s.mu.Unlock()
}

// end may be called again for one that is over.
func (fl *flights) end(f *flight) {
	s := &fl.shards[f.shard]
	s.mu.Lock()
	if f.next != nil {
		f.prev.next, f.next.prev = f.next, f.prev
		f.prev, f.next = nil, nil
	}
	s.mu.Unlock()
}

// overtake marks requests that may hold the lock of a directory: a recall waits for them. It reports
// whether one of them can start over.
func (fl *flights) overtake(ids []layout.FileID) (some bool) {
	for i := range fl.shards {
		s := &fl.shards[i]
		s.mu.Lock()
		for f := s.ring.next; f != &s.ring; f = f.next {
			if f.holds(ids) && !f.firm.Load() {
				f.overtaken.Store(true)
				some = true
			}
		}
		s.mu.Unlock()
	}
	return some
}

// holds reports whether a change of names may hold the lock of one of some directories. That of a directory that it
// moves or removes is also held.
func (f *flight) holds(ids []layout.FileID) bool {
	switch f.op {
	case opRmdir, opRename, opRename2:
		return true
	}
	return changesNames(f.op) && slices.Contains(ids, f.id)
}

// Flight is a request of the kernel that is being served.
type Flight struct {
	Op    string // as in FS.Requests
	PID   uint32 // the thread that waits for it
	ID    layout.FileID
	Began time.Time
}

// Flights are the requests of the kernel that have been served for so long, the oldest first. Those that
// wait for a lock of somebody else are not among them.
func (fs *FS) Flights(since time.Duration) (list []Flight) {
	until := time.Now().Add(-since)
	for i := range fs.flights.shards {
		s := &fs.flights.shards[i]
		s.mu.Lock()
		for f := s.ring.next; f != &s.ring && !f.began.After(until); f = f.next {
			if f.op != opSetlkw && int(f.op) < len(opNames) {
				list = append(list, Flight{opNames[f.op], f.pid, f.id, f.began})
			}
		}
		s.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b Flight) int { return cmp.Or(a.Began.Compare(b.Began), cmp.Compare(a.ID, b.ID)) })
	return list
}

// FileUse is what was read from a file and written to it.
type FileUse struct {
	ID            layout.FileID
	PID           uint32 // the thread that did so last
	Reads, Writes uint64
	Read, Written int64 // bytes
}

const (
	// filesWatched is of how many files it is counted what is done to them, and watchTime for how long
	// after somebody has asked.
	filesWatched = 4096
	watchTime    = 10 * time.Second
)

// watchedFiles counts by file while somebody looks at it.
type watchedFiles struct {
	on    atomic.Bool
	mu    sync.Mutex
	asked time.Time
	files map[layout.FileID]*FileUse
}

func (w *watchedFiles) add(f *flight, write bool, n int) {
	if !w.on.Load() {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.asked) > watchTime {
		w.on.Store(false)
		w.files = nil
		return
	}
	u := w.files[f.id]
	if u == nil {
		if len(w.files) >= filesWatched {
			return
		}
		u = &FileUse{ID: f.id}
		w.files[f.id] = u
	}
	u.PID = f.pid
	if write {
		u.Writes++
		u.Written += int64(n)
	} else {
		u.Reads++
		u.Read += int64(n)
	}
}

// Files is what was done to files since somebody began to ask, the one with most bytes first. It is counted
// only while somebody asks, every 10 s at least; what the kernel does by itself is not.
func (fs *FS) Files() (list []FileUse) {
	w := &fs.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.asked) > watchTime || w.files == nil {
		w.files = map[layout.FileID]*FileUse{}
	}
	w.asked = time.Now()
	w.on.Store(true)
	for _, u := range w.files {
		list = append(list, *u)
	}
	slices.SortFunc(list, func(a, b FileUse) int {
		return cmp.Or(cmp.Compare(b.Read+b.Written, a.Read+a.Written), cmp.Compare(a.ID, b.ID))
	})
	return list
}
