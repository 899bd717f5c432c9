package fs

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// On ESTALE the kernel unlocks the directories and makes the system call again, once, from the start of its
// path (retry_estale, Linux include/linux/namei.h). So a change of names that stands in the way of a recall
// can start over.

const (
	// A thread that starts over first waits until the names of its directories are expired, for restartWait
	// at most, or for lockedWait if it may hold the lock of one.
	restartWait, lockedWait = 2 * time.Second, 100 * time.Millisecond
	// restartMemory is for how long it is remembered that a thread starts over, should it make no change any more.
	restartMemory = 10 * time.Second
	maxRestarts   = 1 << 12
)

// changesNames reports whether a request of the kernel changes names in its directory, and may start over.
func changesNames(op uint32) bool {
	switch op {
	case opSymlink, opMknod, opMkdir, opUnlink, opRmdir, opRename, opLink, opCreate, opRename2:
		return true
	}
	return false
}

// restarts are the threads that start over. The zero value is ready.
type restarts struct {
	some    atomic.Int32 // the length of threads
	mu      sync.Mutex
	threads map[uint32]*again
}

// again is what is known of a thread that starts over.
type again struct {
	at      int64 // by now()
	dirs    []layout.FileID
	expired chan struct{} // closed when the kernel keeps no names of dirs any more; nil: there is nothing to wait for
	waited  bool          // the thread has made a request since
}

// add remembers a thread, and reports false if there are too many.
func (rs *restarts) add(thread uint32, dirs []layout.FileID, expired chan struct{}) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	t := now()
	if len(rs.threads) >= maxRestarts {
		for id, r := range rs.threads {
			if t-r.at > int64(restartMemory) {
				delete(rs.threads, id)
			}
		}
		if len(rs.threads) >= maxRestarts {
			return false
		}
	}
	if rs.threads == nil {
		rs.threads = map[uint32]*again{}
	}
	rs.threads[thread] = &again{at: t, dirs: dirs, expired: expired}
	rs.some.Store(int32(len(rs.threads)))
	return true
}

// begin is called when a thread makes a request. Its first one after it had to start over waits until
// nothing stands in the way. Its next change does not start over again, since the kernel would pass ESTALE
// on.
func (rs *restarts) begin(req *request) {
	if rs.some.Load() == 0 {
		return
	}
	rs.mu.Lock()
	r := rs.threads[req.pid]
	if r == nil {
		rs.mu.Unlock()
		return
	}
	first := !r.waited
	r.waited = true
	if recent := now()-r.at < int64(restartMemory); !recent || changesNames(req.op) {
		delete(rs.threads, req.pid)
		rs.some.Store(int32(len(rs.threads)))
		if recent {
			req.firm.Store(true)
		}
	}
	rs.mu.Unlock()
	if !first || r.expired == nil {
		return
	}
	wait := lockedWait
	if req.op == opLookup && !slices.Contains(r.dirs, req.id) {
		wait = restartWait
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-r.expired:
	case <-timer.C:
	}
}

// Yields is for metaclient.YieldKey.
func (r *request) Yields(op metarpc.Op, back bool) bool {
	switch op {
	case metarpc.OpCreate, metarpc.OpMakeNode, metarpc.OpLink, metarpc.OpRemove, metarpc.OpRename:
		return (back || r.overtaken.Load()) && r.startOver()
	}
	return false
}

// startOver reports whether the request may be answered with ESTALE so that its thread starts over. The
// kernel is then made to ask for all names in the directories of the request, so that the same change is in
// nobody's way soon after.
func (r *request) startOver() bool {
	if !changesNames(r.op) || r.pid == 0 || r.firm.Load() || r.fs.kernelThread(r.pid) {
		r.firm.Store(true)
		return false
	}
	dirs := []layout.FileID{r.id}
	if r.into != 0 {
		dirs = append(dirs, r.into)
	}
	expired := make(chan struct{})
	if !r.fs.restarts.add(r.pid, dirs, expired) {
		return false
	}
	r.fs.spawn(func() { // ends when the names are expired, or may not be kept any more
		defer close(expired)
		r.fs.expireNames(r.fs.ctx, dirs...)
	})
	return true
}

// again is called before the request is answered with ESTALE for a reason of its own.
func (r *request) again() {
	if r.pid != 0 {
		r.fs.restarts.add(r.pid, nil, nil)
	}
}
