package localio

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
)

// ring is an io_uring (io_uring_setup(2)) for reads and writes that wait for a disk: each would otherwise hold a thread, and each
// wake-up of one costs more than the request. A goroutine waits until there are completions, by poll(2) of the ring itself.
type ring struct {
	fd   int
	file *os.File // fd
	poll syscall.RawConn
	gone chan struct{}

	rings, entries []byte // memory that is shared with the kernel
	sq, cq         queue
	array          []uint32
	sqes           []sqe
	cqes           []cqe

	ended func(k *task, res int32) over
	last  func(over)

	mu     sync.Mutex
	begun  uint32   // entries that the kernel was not told of
	bytes  int      // of these
	reaper int      // the number of the goroutine that reaps
	away   bool     // it is not at it, but calls last
	free   []uint32 // slots
	slots  []*task
	closed bool
}

// over is a request that has ended, but for its Done and the use of its file.
type over struct {
	op *layout.Op
	f  *file
}

// queue is the head and the tail of a ring.
type queue struct {
	head, tail *uint32
	mask       uint32
}

// sqe is struct io_uring_sqe, and cqe struct io_uring_cqe (linux/io_uring.h).
type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	len, rwFlags  uint32
	user          uint64
	_             [3]uint64
}

type cqe struct {
	user  uint64
	res   int32
	flags uint32
}

// params is struct io_uring_params.
type params struct {
	sqEntries, cqEntries, flags, threadCPU, threadIdle, features, wqFD uint32
	_                                                                  [3]uint32
	sqOff                                                              struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cqOff struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

const (
	ringEntries = 256 // requests under way
	// maxWorkers is how many threads the kernel may make for one thread that calls it, of those that begin requests
	// which would sleep. More would only wait for the same disk.
	maxWorkers = 32
	// promptBytes is for how much at a time io_uring_enter(2) is taken for a call that returns at once.
	promptBytes = 256 << 10
	opRead      = 22 // IORING_OP_READ, Linux 5.6
	opWrite     = 23
	singleMap   = 1 << 0     // IORING_FEAT_SINGLE_MMAP
	setWorkers  = 19         // IORING_REGISTER_IOWQ_MAX_WORKERS, Linux 5.15
	entriesAt   = 0x10000000 // IORING_OFF_SQES
)

// newRing makes one. Containers often may not.
//
// What the kernel has done is passed to ended, and what that returns to last, if it has an op. ended must not wait; last may wait for what
// is passed to ended later, if relieve is called.
func newRing(ended func(k *task, res int32) over, last func(over)) (r *ring, err error) {
	var p params
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, ringEntries, uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", errno)
	}
	made := &ring{fd: int(fd), gone: make(chan struct{}), slots: make([]*task, ringEntries), ended: ended, last: last}
	unix.CloseOnExec(made.fd)
	notBlocking := unix.SetNonblock(made.fd, true)
	made.file = os.NewFile(fd, "io_uring") // which polls what does not block
	defer func() {
		if err != nil {
			made.file.Close()
			made.unmap()
		}
	}()
	if notBlocking != nil {
		return nil, notBlocking
	}
	if p.features&singleMap == 0 {
		return nil, fmt.Errorf("io_uring of a kernel before 5.4: %w", unix.ENOSYS)
	}
	size := max(p.sqOff.array+p.sqEntries*4, p.cqOff.cqes+p.cqEntries*uint32(unsafe.Sizeof(cqe{})))
	if made.rings, err = unix.Mmap(made.fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, err
	}
	if made.entries, err = unix.Mmap(made.fd, entriesAt, int(p.sqEntries)*int(unsafe.Sizeof(sqe{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, err
	}
	// For files and for everything else. Kernels that do not know it have four for each processor.
	workers := [2]uint32{maxWorkers, 1}
	unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(made.fd), setWorkers, uintptr(unsafe.Pointer(&workers)), 2, 0, 0)
	at := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&made.rings[off])) }
	made.sq = queue{at(p.sqOff.head), at(p.sqOff.tail), *at(p.sqOff.mask)}
	made.cq = queue{at(p.cqOff.head), at(p.cqOff.tail), *at(p.cqOff.mask)}
	made.array = unsafe.Slice(at(p.sqOff.array), p.sqEntries)
	made.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&made.entries[0])), p.sqEntries)
	made.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&made.rings[p.cqOff.cqes])), p.cqEntries)
	for i := range uint32(ringEntries) {
		made.free = append(made.free, i)
	}
	if made.poll, err = made.file.SyscallConn(); err == nil {
		err = made.file.SetReadDeadline(time.Time{}) // it fails if the runtime cannot poll the ring
	}
	if err != nil {
		return nil, fmt.Errorf("poll of an io_uring: %w", err)
	}
	go made.reap(0) // ends with close
	return made, nil
}

// start queues a read or write of a task, which is whole in b; flush begins it. It reports whether there was room.
func (r *ring) start(k *task, fd int, write bool, b []byte, off int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || len(r.free) == 0 {
		return false
	}
	slot := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.slots[slot] = k
	tail := *r.sq.tail // ours alone
	i := tail & r.sq.mask
	r.sqes[i] = sqe{
		opcode: opRead, fd: int32(fd), off: uint64(off), addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), len: uint32(len(b)), user: uint64(slot),
	}
	if write {
		r.sqes[i].opcode = opWrite
	}
	r.array[i] = i
	atomic.StoreUint32(r.sq.tail, tail+1)
	r.begun++
	r.bytes += len(b)
	return true
}

// flush tells the kernel of what was started. That never sleeps, since the kernel begins requests so that they do not, and leaves those
// that would to threads of its own; but it copies what the page cache has. For a call that takes that little time the runtime's
// precautions, among them waking its monitor thread, would cost a fifth of all CPU time at depth 32.
func (r *ring) flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	enter := unix.RawSyscall6
	if r.bytes > promptBytes {
		enter = unix.Syscall6
	}
	r.bytes = 0
	for r.begun > 0 {
		n, _, errno := enter(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.begun), 0, 0, 0, 0)
		switch {
		case errno == 0:
			r.begun -= uint32(n)
		case errno == unix.EINTR:
		default: // EAGAIN, EBUSY: it has no memory just now, until others have ended, which takes the lock
			r.mu.Unlock()
			runtime.Gosched()
			r.mu.Lock()
		}
	}
}

// reap ends what the kernel has done, as long as it is the reaper of this number.
func (r *ring) reap(number int) {
	type end struct {
		k   *task
		res int32
	}
	var batch []end
	var overs []over
	for {
		if err := r.poll.Read(r.completed); err != nil {
			close(r.gone)
			return
		}
		for {
			batch = batch[:0]
			r.mu.Lock()
			head := *r.cq.head // the reaper's alone
			for tail := atomic.LoadUint32(r.cq.tail); head != tail; head++ {
				c := r.cqes[head&r.cq.mask]
				batch = append(batch, end{r.slots[c.user], c.res})
				r.slots[c.user] = nil
				r.free = append(r.free, uint32(c.user))
			}
			atomic.StoreUint32(r.cq.head, head)
			r.mu.Unlock()
			if len(batch) == 0 {
				break
			}
			overs = overs[:0]
			for i := range batch {
				if o := r.ended(batch[i].k, batch[i].res); o.op != nil {
					overs = append(overs, o)
				}
				batch[i].k = nil
			}
			r.mu.Lock()
			r.away = true
			r.mu.Unlock()
			for i := range overs {
				r.last(overs[i])
				overs[i] = over{}
			}
			r.mu.Lock()
			relieved := r.reaper != number
			if !relieved {
				r.away = false
			}
			r.mu.Unlock()
			if relieved {
				return
			}
		}
	}
}

// relieve has somebody else reap, should the reaper wait for whoever calls it.
func (r *ring) relieve() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.away {
		return
	}
	r.away = false
	r.reaper++
	number := r.reaper
	go r.reap(number) // ends with close
}

// completed reports whether there are completions. Only the reaper calls it.
func (r *ring) completed(uintptr) bool { return *r.cq.head != atomic.LoadUint32(r.cq.tail) }

// close ends the ring, in which nothing is under way any more.
func (r *ring) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.file.Close()
	<-r.gone
	r.unmap()
}

func (r *ring) unmap() {
	if r.entries != nil {
		unix.Munmap(r.entries)
	}
	if r.rings != nil {
		unix.Munmap(r.rings)
	}
}
