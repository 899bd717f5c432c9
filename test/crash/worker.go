package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// workerEnv makes this test binary a worker: a process whose writers do random operations through one mount until
// standard input ends.
const workerEnv = "WEFT_TEST_CRASH_WORKER"

// work is what a worker is told, as JSON in workerEnv.
type work struct {
	Mount   string // where all of it is
	Files   []file
	Names   string   // directory, for a writer of names; empty: there is none
	Writers []int    // their numbers; their logs are LOG.NUMBER
	Log     string   // path
	Seed    uint64   // with the number of a writer, of what it does
	Rare    bool     // fsync is rare, so that other promises have something to hold
	Without []string // operations that are left out
}

// file is one that all writers have open.
type file struct {
	Path   string // below the mount
	Block  int    // bytes of a block
	Blocks int    // how many of them are written in place; 0: the file is appended to and truncated to nothing
}

// open is a file as a writer has it.
type open struct {
	file
	epoch              int
	plain, dsync, tail int // descriptors; those of one epoch are opened and closed together
}

// writer does operations one after the other.
type writer struct {
	work
	number int
	rng    *rand.Rand
	log    *os.File
	n      int
	stop   *atomic.Bool
	files  []*open
	buf    []byte
}

// errGone ends a writer: its mount is not there any more.
var errGone = errors.New("the mount is gone")

// serveWork is the worker.
func serveWork(how string) error {
	var w work
	if err := json.Unmarshal([]byte(how), &w); err != nil {
		return err
	}
	var stop atomic.Bool
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	var all sync.WaitGroup
	errs := make([]error, len(w.Writers)+1)
	for i, number := range w.Writers {
		all.Go(func() { errs[i] = runWriter(w, number, &stop) }) // ends with stop, or with the mount
	}
	if w.Names != "" {
		all.Go(func() { errs[len(w.Writers)] = runNames(w, &stop) }) // likewise
	}
	all.Wait()
	return errors.Join(errs...)
}

func runWriter(w work, number int, stop *atomic.Bool) error {
	log, err := os.OpenFile(fmt.Sprint(w.Log, ".", number), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	me := &writer{work: w, number: number, rng: rand.New(rand.NewPCG(w.Seed, uint64(number))), log: log, stop: stop}
	for _, f := range w.Files {
		me.files = append(me.files, &open{file: f, plain: -1, dsync: -1, tail: -1})
	}
	for !stop.Load() {
		f := me.files[me.rng.IntN(len(me.files))]
		if err := me.step(f); errors.Is(err, errGone) {
			break
		} else if err != nil {
			return fmt.Errorf("writer %d: %s: %w", number, f.Path, err)
		}
		time.Sleep(time.Duration(me.rng.IntN(4000)) * time.Microsecond)
	}
	for _, f := range me.files {
		if f.plain >= 0 {
			me.sync(f)
			f.close()
		}
	}
	return nil
}

func (f *open) close() {
	for _, fd := range []int{f.plain, f.dsync, f.tail} {
		if fd >= 0 {
			unix.Close(fd) // what it has to say was said before
		}
	}
	f.plain, f.dsync, f.tail = -1, -1, -1
}

// do logs an operation, carries it out and logs how it went. An error is no failure of the test: it is in the
// history, and the file is opened anew.
func (w *writer) do(f *open, o op, call func(o *op) error) bool {
	w.n++
	o.Writer, o.N, o.File, o.Epoch, o.Begin = w.number, w.n, f.Path, f.epoch, now()
	w.write(o)
	err := call(&o)
	o.End = now()
	if err != nil {
		o.Err = err.Error()
	}
	w.write(o)
	if err != nil {
		f.close()
	}
	return err == nil
}

func (w *writer) write(o op) {
	b, err := json.Marshal(o)
	if err == nil {
		_, err = w.log.Write(append(b, '\n'))
	}
	if err != nil {
		panic(err)
	}
}

// open opens the file; it is tried until the mount is gone or the writer is to end.
func (w *writer) open(f *open) error {
	path := filepath.Join(w.Mount, f.Path)
	for !w.stop.Load() {
		f.epoch++
		if w.do(f, op{Kind: opOpen}, func(*op) (err error) {
			for fd, flags := range map[*int]int{&f.plain: 0, &f.dsync: unix.O_DSYNC, &f.tail: unix.O_APPEND} {
				if *fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|flags, 0); err != nil {
					*fd = -1
					return err
				}
			}
			return nil
		}) {
			return nil
		}
		var st unix.Statfs_t
		switch err := unix.Statfs(w.Mount, &st); {
		case err == unix.ENOTCONN || err == unix.ECONNABORTED || err == unix.ENOENT:
			return errGone
		case err == nil && st.Type != unix.FUSE_SUPER_MAGIC:
			return errGone
		}
		time.Sleep(50 * time.Millisecond)
	}
	return errGone
}

// step does one operation, or those under a lock.
func (w *writer) step(f *open) error {
	if f.plain < 0 {
		if err := w.open(f); err != nil {
			return err
		}
	}
	at, n := 0, 1+w.rng.IntN(3)
	syncs := !w.Rare || w.rng.IntN(8) == 0
	if f.Blocks > 0 {
		at = w.rng.IntN(f.Blocks)
		n = min(n, f.Blocks-at)
	}
	chance := w.rng.IntN(100)
	if f.Blocks == 0 {
		switch {
		case chance < 65:
			w.append(f)
		case chance < 85:
			w.read(f, 0, 0)
		case chance < 87:
			w.truncate(f, 0)
		case syncs:
			w.sync(f)
		}
		return nil
	}
	switch {
	case chance < 30:
		w.overwrite(f, at, n, syncs && chance < 8)
	case chance < 60:
		w.read(f, at, n)
	case chance < 65:
		w.append(f)
	case chance < 69:
		w.truncate(f, at)
	case chance < 77:
		w.punch(f, at, n)
	case chance < 87:
		w.locked(f, at, n)
	case syncs:
		w.sync(f)
	}
	return nil
}

// left reports whether an operation is left out.
func (w *writer) left(k kind) bool {
	for _, name := range w.Without {
		if name == string(k) {
			return true
		}
	}
	return false
}

// bytes is a buffer for so many blocks.
func (w *writer) bytes(f *open, n int) []byte {
	if len(w.buf) < n*f.Block {
		w.buf = make([]byte, n*f.Block)
	}
	return w.buf[:n*f.Block]
}

// value fills a buffer for the next operation.
func (w *writer) value(f *open, n int) []byte {
	p := w.bytes(f, n)
	for i := range n {
		fill(p[i*f.Block:(i+1)*f.Block], value{writer: w.number, n: w.n + 1, index: i})
	}
	return p
}

func whole(n, want int, err error) error {
	if err == nil && n < want {
		return io.ErrShortWrite
	}
	return err
}

func (w *writer) overwrite(f *open, at, n int, dsync bool) bool {
	if w.left(opWrite) {
		return true
	}
	p, fd := w.value(f, n), f.plain
	if dsync {
		fd = f.dsync
	}
	return w.do(f, op{Kind: opWrite, Block: at, Count: n, Dsync: dsync}, func(*op) error {
		n, err := unix.Pwrite(fd, p, int64(at*f.Block))
		return whole(n, len(p), err)
	})
}

func (w *writer) append(f *open) {
	if w.left(opAppend) {
		return
	}
	p := w.value(f, 1)
	w.do(f, op{Kind: opAppend, Count: 1}, func(*op) error {
		n, err := unix.Write(f.tail, p)
		return whole(n, len(p), err)
	})
}

func (w *writer) truncate(f *open, blocks int) {
	if w.left(opTruncate) {
		return
	}
	w.do(f, op{Kind: opTruncate, Block: blocks}, func(*op) error { return unix.Ftruncate(f.plain, int64(blocks*f.Block)) })
}

func (w *writer) punch(f *open, at, n int) {
	if w.left(opPunch) {
		return
	}
	w.do(f, op{Kind: opPunch, Block: at, Count: n}, func(*op) error {
		return unix.Fallocate(f.plain, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(at*f.Block), int64(n*f.Block))
	})
}

// read reads so many blocks; 0 are all that the file has, up to its end.
func (w *writer) read(f *open, at, n int) bool {
	if w.left(opRead) {
		return true
	}
	p := w.bytes(f, max(n, 512))
	if n > 0 {
		p = p[:n*f.Block]
	}
	return w.do(f, op{Kind: opRead, Block: at, Count: n}, func(o *op) error {
		got, err := unix.Pread(f.plain, p, int64(at*f.Block))
		if err != nil {
			return err
		}
		if n > 0 { // beyond the end of the file is like zeros
			clear(p[got:])
			got = len(p)
		}
		o.Seen = decodeAll(p[:got], f.Block)
		return nil
	})
}

// decodeAll tells what each of a row of blocks is made of.
func decodeAll(p []byte, size int) (all []string) {
	for at := 0; at < len(p); at += size {
		all = append(all, decode(p[at:min(at+size, len(p))]).String())
	}
	return all
}

// sync makes stable what was written through each of the descriptors.
func (w *writer) sync(f *open) bool {
	if w.left(opSync) {
		return true
	}
	return w.do(f, op{Kind: opSync}, func(*op) error {
		return errors.Join(unix.Fsync(f.plain), unix.Fsync(f.dsync), unix.Fsync(f.tail))
	})
}

// locked does some operations under a lock of the open file or one of flock(2).
func (w *writer) locked(f *open, at, n int) {
	if w.left(opLock) {
		return
	}
	lock := func(kind int16, flock int) func(*op) error {
		if at%2 == 0 {
			return func(*op) error { return retry(func() error { return unix.Flock(f.plain, flock) }) }
		}
		lk := unix.Flock_t{Type: kind, Start: int64(at * f.Block), Len: int64(n * f.Block)}
		return func(*op) error {
			return retry(func() error { return unix.FcntlFlock(uintptr(f.plain), unix.F_OFD_SETLKW, &lk) })
		}
	}
	ok := w.do(f, op{Kind: opLock, Block: at, Count: n}, lock(unix.F_WRLCK, unix.LOCK_EX))
	for range 1 + w.rng.IntN(2) {
		ok = ok && w.read(f, at, n) && w.overwrite(f, at, n, false)
	}
	if ok {
		w.do(f, op{Kind: opUnlock, Block: at, Count: n}, lock(unix.F_UNLCK, unix.LOCK_UN))
	}
}

// retry makes a call again that a signal of the Go runtime has ended.
func retry(call func() error) error {
	for {
		if err := call(); err != syscall.EINTR {
			return err
		}
	}
}
