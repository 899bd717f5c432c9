package descriptors

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// giveEvery is how often caches are asked to give back what is idle.
const giveEvery = 100 * time.Millisecond

// calmTime is how long no call has failed at the end of a shortage (a test changes it), and trial how many descriptors
// can be had then.
var calmTime = 10 * time.Second

const trial = 8

// shortage is the state of the process.
var shortage struct {
	scarce atomic.Bool

	giving sync.Mutex // held while caches give back; before mu
	gave   time.Time  // when they last did; guarded by giving

	mu       sync.Mutex
	caches   map[*func() int]struct{}
	since    time.Time // of the shortage
	last     time.Time // failure
	failures int
	given    int
}

// OnShortage registers a function of a cache. The function closes descriptors that are not used, and returns how many.
// Any goroutine may call it until unregister has returned.
func OnShortage(give func() int) (unregister func()) {
	s := &shortage
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.caches == nil {
		s.caches = map[*func() int]struct{}{}
	}
	s.caches[&give] = struct{}{}
	return func() {
		s.mu.Lock()
		delete(s.caches, &give)
		s.mu.Unlock()
		s.giving.Lock()
		//lint:ignore SA2001 it waits for a call that may be running
		s.giving.Unlock()
	}
}

// Scarce reports whether there is a shortage.
func Scarce() bool { return shortage.scarce.Load() }

// Short reports whether err is EMFILE or ENFILE. If so, it has the caches close their idle descriptors first.
func Short(err error) bool {
	if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
		return false
	}
	s := &shortage
	s.mu.Lock()
	s.last = time.Now()
	s.failures++
	if first := !s.scarce.Swap(true); first {
		s.since = s.last
		slog.Error("no descriptors are left: idle ones are closed, and new requests use as few as they can",
			"limit", limit, "err", err)
		time.AfterFunc(calmTime, calm)
	}
	s.mu.Unlock()
	s.giving.Lock()
	defer s.giving.Unlock()
	if time.Since(s.gave) < giveEvery {
		return true
	}
	s.mu.Lock()
	all := make([]func() int, 0, len(s.caches))
	for give := range s.caches {
		all = append(all, *give)
	}
	s.mu.Unlock()
	given := 0
	for _, give := range all {
		given += give()
	}
	s.gave = time.Now()
	s.mu.Lock()
	s.given += given
	s.mu.Unlock()
	return true
}

// calm ends the shortage, or looks again later.
func calm() {
	s := &shortage
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait := calmTime - time.Since(s.last); wait > 0 {
		time.AfterFunc(wait, calm)
		return
	}
	if !tried() {
		time.AfterFunc(calmTime, calm)
		return
	}
	slog.Info("there are descriptors again", "after", time.Since(s.since).Round(time.Second), "failures", s.failures, "given_back", s.given)
	s.failures, s.given = 0, 0
	s.scarce.Store(false)
}

// tried reports whether a few descriptors can be had.
func tried() bool {
	var fds []int
	defer func() {
		for _, fd := range fds {
			syscall.Close(fd)
		}
	}()
	for range trial {
		fd, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0) // not dup(2), which ENFILE does not concern
		if err != nil {
			return !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE)
		}
		fds = append(fds, fd)
	}
	return true
}

// Retry returns what do returns. After a failure for want of descriptors it calls it once more.
func Retry[T any](do func() (T, error)) (T, error) {
	v, err := do()
	if err != nil && Short(err) {
		v, err = do()
	}
	return v, err
}
