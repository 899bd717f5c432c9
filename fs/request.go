package fs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// An INTERRUPT of the kernel says that a signal arrived at a thread which waits for a request, nothing more. It may be a
// profiler's timer, the Go runtime's preemption, or a child that ended. Programs expect no EINTR from files, and a
// mkdir(2) that is repeated because of one may find its own directory. So an interrupted request goes on, unless the
// caller has been killed or is exiting: the kernel, too, lets only such signals interrupt its own network file systems.

// fate is what became of the thread that made a request.
type fate int

const (
	alive   fate = iota
	dying        // nobody will look at the answer
	unknown      // it is in a process namespace that is not visible from here
)

const (
	// The kernel sends one INTERRUPT for each request and does not say when a second signal kills the caller.
	interruptPoll = 100 * time.Millisecond
	// unknownPatience is how long an interrupted request of an unknown caller is given.
	unknownPatience = 2 * time.Second
	// exitPatience is how long a close(2) may take before its caller is suspected of exiting, for which there is no
	// INTERRUPT.
	exitPatience = 10 * time.Second
)

// Fields of procStat; proc(5) counts from 1.
const (
	statState  = 0
	statFlags  = 9 - 3
	statSignal = 31 - 3
)

// procStat reads the fields of a thread from the third on, those behind its name (proc(5), stat).
func procStat(pid uint32) (fields []string, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/stat")
	if err != nil {
		return nil, err
	}
	// The name, field 2, is in parentheses and may hold anything.
	fields = strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) <= statSignal {
		return nil, fmt.Errorf("/proc/%d/stat: %d fields", pid, len(fields))
	}
	return fields, nil
}

// isKernelThread reports whether a thread is one of the kernel's own, such as those of its NFS server, or may be one.
func isKernelThread(pid uint32) bool {
	fields, err := procStat(pid)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH)
	}
	const kernelThread = 0x00200000 // PF_KTHREAD
	f, err := strconv.ParseUint(fields[statFlags], 10, 64)
	return err != nil || f&kernelThread != 0
}

// callerFate looks at the thread pid (proc(5), stat): it is dying if it exits or SIGKILL is pending. To any signal that
// ends a process the kernel adds a SIGKILL for each thread.
func callerFate(pid uint32) fate {
	if pid == 0 {
		return unknown
	}
	fields, err := procStat(pid)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		if _, err := os.Stat("/proc/self/stat"); err != nil {
			return unknown // no procfs
		}
		return dying
	}
	if err != nil {
		return unknown
	}
	f, err1 := strconv.ParseUint(fields[statFlags], 10, 64)
	s, err2 := strconv.ParseUint(fields[statSignal], 10, 64)
	const exiting = 0x4 // PF_EXITING
	switch {
	case err1 != nil || err2 != nil:
		return unknown
	case f&exiting != 0 || s&(1<<(unix.SIGKILL-1)) != 0:
		return dying
	}
	return alive
}

// abandoned waits until either the request has finished, or nobody is left who wants it.
func (fs *FS) abandoned(finished <-chan struct{}, pid uint32, interrupted bool) bool {
	since := time.Now()
	tick := time.NewTicker(interruptPoll)
	defer tick.Stop()
	for {
		who := fs.caller(pid)
		if who == dying || who == unknown && interrupted && time.Since(since) > unknownPatience || fs.disconnected() {
			return true
		}
		select {
		case <-finished:
			return false
		case <-tick.C:
		}
	}
}

// application marks what an application waits for.
var application = metaclient.Soft(context.Background())

// request is the context of the handler of one request, which an application waits for. It is done when nobody wants the answer any more.
type request struct {
	fs     *FS
	cancel <-chan struct{} // closed by the kernel's INTERRUPT, and when the mount ends
	flight
	journey
	name string        // in the directory, if it names something there
	into layout.FileID // the new directory of a rename
	// closes says that this is part of a close(2), which an exiting process waits for without a signal.
	closes bool

	mu       sync.Mutex
	done     chan struct{} // made when somebody asks for it
	finished chan struct{}
	err      error
}

var _ context.Context = (*request)(nil)

// end is called when the handler returns.
//
// With a single thread for Go code a goroutine of the transport that always finds the next request waiting does not give
// that thread up for 10 ms at a time, since system calls that return at once do not; and the scheduler looks only at each
// 61st turn for those that have come back from slower ones. Stalls of 2 s were seen. So each request is a turn.
func (r *request) end() {
	r.fs.answered(&r.flight, &r.journey, r.name, 0, 0)
	if r.fs.yield {
		defer runtime.Gosched()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done != nil {
		close(r.finished)
	}
}

// Done starts watching the caller; most handlers never have to wait for anything that asks.
func (r *request) Done() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done == nil {
		r.done, r.finished = make(chan struct{}), make(chan struct{})
		// The goroutine watches the caller and ends with the request.
		go r.watch()
	}
	return r.done
}

func (r *request) watch() {
	var exiting <-chan time.Time
	if r.closes {
		timer := time.NewTimer(exitPatience)
		defer timer.Stop()
		exiting = timer.C
	}
	interrupted := true
	select {
	case <-r.finished:
		return
	case <-r.cancel:
	case <-exiting:
		interrupted = false
	}
	if !r.fs.abandoned(r.finished, r.pid, interrupted) {
		return
	}
	r.mu.Lock()
	r.err = context.Canceled
	r.mu.Unlock()
	close(r.done)
}

// Err, Deadline and Value make request a context.Context.
func (r *request) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *request) Deadline() (time.Time, bool) { return time.Time{}, false }

func (r *request) Value(key any) any {
	if _, ok := key.(metaclient.YieldKey); ok {
		return r
	}
	if v := r.value(key); v != nil {
		return v
	}
	return application.Value(key)
}
