package fsx

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// file is a file under test with the copy in memory that it must equal.
type file struct {
	path string
	form form
	fd   int
	rng  *rand.Rand

	good   []byte  // what the file must hold
	writer []int32 // for each byte of good the number of the operation that wrote it
	number int     // operations so far
	done   []string
	tally  map[string]int // by kind
}

// form says what kinds of operations there are.
type form struct {
	max   int64 // bytes of the largest file
	align int64 // of offsets and lengths
	flags int   // of open(2), beside O_RDWR
	maps  bool  // use mmap(2) as well
}

// remembered is how many operations are shown before a failure.
const remembered = 20

func newFile(path string, f form, seed, stream uint64) (*file, error) {
	x := &file{path: path, form: f, fd: -1, rng: rand.New(rand.NewPCG(seed, stream)), tally: map[string]int{}}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|f.flags, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	x.fd = fd
	return x, nil
}

func (x *file) close() error {
	err := unix.Close(x.fd)
	x.fd = -1
	return err
}

// An op has been drawn, and its effect on the copy in memory has happened. do does it to the file, and returns what is to
// be looked at again: a range that may have changed.
type op struct {
	desc     string
	do       func() error
	off, end int64
}

// next draws an operation and does it to the copy in memory.
func (x *file) next() op {
	x.number++
	size := int64(len(x.good))
	kinds := []struct {
		weight int
		draw   func(size int64) op
	}{
		{20, x.write}, {20, x.read}, {8, x.truncate}, {6, x.punch}, {6, x.zero}, {3, x.allocate}, {2, x.reserve},
		{6, x.copyRange}, {3, x.sync}, {3, x.reopen}, {2, x.vector}, {2, x.append}, {8, x.mapRead}, {8, x.mapWrite},
	}
	if !x.form.maps {
		kinds = kinds[:len(kinds)-2]
	}
	sum := 0
	for _, k := range kinds {
		sum += k.weight
	}
	n := x.rng.IntN(sum)
	for _, k := range kinds {
		if n -= k.weight; n < 0 {
			o := k.draw(size)
			kind, _, _ := strings.Cut(o.desc, " ")
			x.tally[kind]++
			x.done = append(x.done[max(0, len(x.done)-remembered+1):], fmt.Sprintf("%d %s, size %d to %d", x.number, o.desc, size, len(x.good)))
			return o
		}
	}
	panic("unreachable")
}

// run does an operation to the file and compares what it touched.
func (x *file) run(o op) error {
	if err := o.do(); err != nil {
		return err
	}
	if x.number%256 == 0 {
		return x.compare(0, int64(len(x.good)))
	}
	// What lies beside it shows an operation that reached too far.
	return x.compare(max(0, o.off-8192), min(int64(len(x.good)), o.end+8192))
}

// span draws an aligned range that begins below limit and ends at most at the largest size.
func (x *file) span(limit int64) (off, n int64) {
	a := x.form.align
	off = x.rng.Int64N(max(1, limit)) / a * a
	most := x.form.max - off
	switch x.rng.IntN(8) {
	case 0:
		n = 1 + x.rng.Int64N(16)
	case 1:
		n = 1 + x.rng.Int64N(most)
	default:
		n = 1 + x.rng.Int64N(min(most, 64<<10))
	}
	// Half of them end or begin at a boundary, where mistakes are.
	if x.rng.IntN(4) == 0 {
		off = off &^ 4095
	}
	if x.rng.IntN(4) == 0 {
		n = max(1, (off+n)&^4095-off)
	}
	n = min((n+a-1)/a*a, (x.form.max-off)/a*a)
	return off, n
}

// bytes are n random bytes where O_DIRECT may want them, none of which is zero.
func (x *file) bytes(n int64) []byte {
	b := aligned(n)
	for i := 0; i < len(b); i += 8 {
		for j, w := i, x.rng.Uint64(); j < min(i+8, len(b)); j, w = j+1, w>>8 {
			b[j] = byte(w) | 1
		}
	}
	return b
}

func aligned(n int64) []byte {
	b := make([]byte, n+4096)
	skip := 4096 - int64(uintptr(unsafe.Pointer(&b[0]))&4095)
	return b[skip : skip+n : skip+n]
}

// resize and set are what happens to the copy in memory.
func (x *file) resize(size int64) {
	grown := max(0, size-int64(len(x.good)))
	x.good = append(x.good, make([]byte, grown)...)[:size]
	x.writer = append(x.writer, make([]int32, grown)...)[:size]
	for i := size - grown; i < size; i++ {
		x.writer[i] = int32(x.number)
	}
}

func (x *file) set(off int64, b []byte) {
	if end := off + int64(len(b)); end > int64(len(x.good)) {
		x.resize(end)
	}
	copy(x.good[off:], b)
	for i := range b {
		x.writer[off+int64(i)] = int32(x.number)
	}
}

func (x *file) write(int64) op {
	off, n := x.span(x.form.max)
	b := x.bytes(n)
	x.set(off, b)
	return op{fmt.Sprintf("write %d at %d", n, off), func() error { return x.pwrite(b, off) }, off, off + n}
}

func (x *file) pwrite(b []byte, off int64) error {
	n, err := unix.Pwrite(x.fd, b, off)
	if err == nil && n != len(b) {
		err = fmt.Errorf("wrote %d bytes of %d", n, len(b))
	}
	return err
}

// vector writes two pieces with one call.
func (x *file) vector(int64) op {
	off, n := x.span(x.form.max)
	b := x.bytes(n)
	cut := n / 2 / x.form.align * x.form.align
	x.set(off, b)
	return op{fmt.Sprintf("pwritev %d+%d at %d", cut, n-cut, off), func() error {
		got, err := unix.Pwritev(x.fd, [][]byte{b[:cut], b[cut:]}, off)
		if err == nil && int64(got) != n {
			err = fmt.Errorf("wrote %d bytes of %d", got, n)
		}
		return err
	}, off, off + n}
}

// append writes at the end through a descriptor of its own.
func (x *file) append(size int64) op {
	_, n := x.span(x.form.max)
	n = min(n, x.form.max-size)
	if n <= 0 {
		return x.truncate(size)
	}
	b := x.bytes(n)
	x.set(size, b)
	return op{fmt.Sprintf("append %d at %d", n, size), func() error {
		fd, err := unix.Open(x.path, unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC|x.form.flags, 0)
		if err != nil {
			return err
		}
		got, err := unix.Write(fd, b)
		if err == nil && int64(got) != n {
			err = fmt.Errorf("wrote %d bytes of %d", got, n)
		}
		return errors.Join(err, unix.Close(fd))
	}, size, size + n}
}

// read is not confined to what there is: run looks at the range, this one also beyond the end.
func (x *file) read(int64) op {
	off, n := x.span(x.form.max)
	return op{fmt.Sprintf("read %d at %d", n, off), func() error {
		b := aligned(n)
		got, err := unix.Pread(x.fd, b, off)
		if err != nil {
			return err
		}
		if want := min(n, max(0, int64(len(x.good))-off)); int64(got) != want {
			return fmt.Errorf("read %d bytes, want %d", got, want)
		}
		return x.differs(b[:got], off, "read")
	}, off, off}
}

func (x *file) truncate(int64) op {
	size := x.rng.Int64N(x.form.max+1) / x.form.align * x.form.align
	if x.rng.IntN(4) == 0 {
		size &^= 4095
	}
	from := min(size, int64(len(x.good)))
	x.resize(size)
	return op{fmt.Sprintf("truncate to %d", size), func() error { return unix.Ftruncate(x.fd, size) }, from, size}
}

// punch and zero leave zeros.
func (x *file) punch(size int64) op {
	off, n := x.span(x.form.max)
	if end := min(off+n, size); off < end {
		x.set(off, make([]byte, end-off))
	}
	return op{fmt.Sprintf("punch %d at %d", n, off), func() error {
		return unix.Fallocate(x.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	}, off, off + n}
}

func (x *file) zero(size int64) op {
	off, n := x.span(x.form.max)
	mode, end := uint32(unix.FALLOC_FL_ZERO_RANGE), off+n
	name := "zero"
	if x.rng.IntN(2) == 0 {
		mode |= unix.FALLOC_FL_KEEP_SIZE
		name = "zero-keep-size"
		end = min(end, size)
	}
	if off < end {
		x.set(off, make([]byte, end-off))
	}
	return op{fmt.Sprintf("%s %d at %d", name, n, off), func() error { return unix.Fallocate(x.fd, mode, off, n) }, off, off + n}
}

func (x *file) allocate(size int64) op {
	off, n := x.span(x.form.max)
	if off+n > size {
		x.resize(off + n)
	}
	return op{fmt.Sprintf("fallocate %d at %d", n, off), func() error { return unix.Fallocate(x.fd, 0, off, n) }, off, off + n}
}

// reserve allocates beyond the size, which data servers need not be able to do; then nothing happens.
func (x *file) reserve(int64) op {
	off, n := x.span(x.form.max)
	return op{fmt.Sprintf("fallocate-keep-size %d at %d", n, off), func() error {
		err := unix.Fallocate(x.fd, unix.FALLOC_FL_KEEP_SIZE, off, n)
		if errors.Is(err, unix.EOPNOTSUPP) {
			x.tally["fallocate-keep-size refused"]++
			err = nil
		}
		return err
	}, off, off + n}
}

// copyRange copies within the file; ranges of one file must not overlap.
func (x *file) copyRange(size int64) op {
	off, n := x.span(size)
	n = min(n, size-off)
	to := x.rng.Int64N(x.form.max) / x.form.align * x.form.align
	n = min(n, x.form.max-to)
	if d := to - off; d < 0 {
		n = min(n, -d)
	} else {
		n = min(n, d)
	}
	n = n / x.form.align * x.form.align
	if n <= 0 {
		return x.read(size)
	}
	x.set(to, bytes.Clone(x.good[off:off+n]))
	return op{fmt.Sprintf("copy_file_range %d from %d to %d", n, off, to), func() error {
		from, at, left := off, to, int(n)
		for left > 0 {
			got, err := unix.CopyFileRange(x.fd, &from, x.fd, &at, left, 0)
			if err != nil {
				return err
			}
			if got == 0 {
				return fmt.Errorf("nothing more to copy with %d bytes left", left)
			}
			left -= got
		}
		return nil
	}, to, to + n}
}

func (x *file) sync(int64) op {
	if x.rng.IntN(2) == 0 {
		return op{"fdatasync", func() error { return unix.Fdatasync(x.fd) }, 0, 0}
	}
	return op{"fsync", func() error { return unix.Fsync(x.fd) }, 0, 0}
}

func (x *file) reopen(int64) op {
	flags := unix.O_RDWR | unix.O_CLOEXEC | x.form.flags
	name := "reopen"
	if x.rng.IntN(8) == 0 {
		flags |= unix.O_DSYNC
		name = "reopen-dsync"
	}
	return op{name, func() error {
		if err := unix.Close(x.fd); err != nil {
			return err
		}
		var err error
		x.fd, err = unix.Open(x.path, flags, 0)
		return err
	}, 0, int64(len(x.good))}
}

// mapRead looks at the file through a mapping, and that nothing is seen behind its end.
func (x *file) mapRead(size int64) op {
	if size == 0 {
		return x.write(size)
	}
	off, n := x.span(size)
	n = min(n, size-off)
	return op{fmt.Sprintf("mapread %d at %d", n, off), func() error {
		return x.mapped(off, n, unix.PROT_READ, false, func(m, rest []byte) error {
			if err := x.differs(m, off, "mapped"); err != nil {
				return err
			}
			if off+n == size {
				for i, c := range rest {
					if c != 0 {
						return fmt.Errorf("mapped: %#02x at %d behind the end of the file", c, size+int64(i))
					}
				}
			}
			return nil
		})
	}, off, off}
}

// mapWrite writes through a mapping, in a file that is made long enough before.
func (x *file) mapWrite(size int64) op {
	off, n := x.span(x.form.max)
	b := x.bytes(n)
	x.set(off, b)
	msync := x.rng.IntN(2) == 0
	return op{fmt.Sprintf("mapwrite %d at %d, msync %v", n, off, msync), func() error {
		if off+n > size {
			if err := unix.Ftruncate(x.fd, off+n); err != nil {
				return fmt.Errorf("ftruncate before it: %w", err)
			}
		}
		return x.mapped(off, n, unix.PROT_READ|unix.PROT_WRITE, msync, func(m, _ []byte) error {
			copy(m, b)
			return nil
		})
	}, off, off + n}
}

// mapped maps [off, off+n) and hands out that and what is left of the last page. A SIGBUS becomes an error. The pages of a
// mapping that is not synced stay with the kernel when it is gone.
func (x *file) mapped(off, n int64, prot int, msync bool, do func(m, rest []byte) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("fault in a mapping: %v", p)
		}
	}()
	start := off &^ 4095
	length := (off + n - start + 4095) &^ 4095
	m, err := unix.Mmap(x.fd, start, int(length), prot, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(m)
	if err := do(m[off-start:off-start+n], m[off-start+n:]); err != nil || !msync {
		return err
	}
	return unix.Msync(m, unix.MS_SYNC)
}

// compare looks at the size and at a range.
func (x *file) compare(from, to int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(x.fd, &st); err != nil {
		return err
	}
	if st.Size != int64(len(x.good)) {
		return fmt.Errorf("fstat: size %d, want %d", st.Size, len(x.good))
	}
	a := x.form.align
	from = from / a * a
	if from >= to {
		return nil
	}
	b := aligned((to - from + a - 1) / a * a)
	got, err := unix.Pread(x.fd, b, from)
	if err != nil {
		return fmt.Errorf("read to compare: %w", err)
	}
	if want := min(int64(len(b)), int64(len(x.good))-from); int64(got) != want {
		return fmt.Errorf("read to compare: %d bytes at %d, want %d", got, from, want)
	}
	return x.differs(b[:got], from, "compare")
}

// differs finds the first wrong byte.
func (x *file) differs(b []byte, off int64, what string) error {
	if len(b) == 0 {
		return nil
	}
	good := x.good[off : off+int64(len(b))]
	if bytes.Equal(b, good) {
		return nil
	}
	first, wrong := -1, 0
	for i := range b {
		if b[i] != good[i] {
			if wrong++; first < 0 {
				first = i
			}
		}
	}
	at := off + int64(first)
	return fmt.Errorf("%s: first wrong byte at %d (%#x): %#02x, want %#02x as operation %d left it; %d wrong bytes of %d from %d",
		what, at, at, b[first], good[first], x.writer[at], wrong, len(b), off)
}

// failed is err with what led to it.
func (x *file) failed(err error) error {
	return fmt.Errorf("operation %d: %w\nthe last operations:\n  %s", x.number, err, strings.Join(x.done, "\n  "))
}

// exercise does n operations, and then looks at the whole file through a new descriptor.
func (x *file) exercise(n int) error {
	for range n {
		if err := x.run(x.next()); err != nil {
			return x.failed(err)
		}
	}
	got, err := os.ReadFile(x.path)
	if err == nil && len(got) != len(x.good) {
		err = fmt.Errorf("at the end: %d bytes, want %d", len(got), len(x.good))
	}
	if err == nil {
		err = x.differs(got, 0, "at the end")
	}
	if err != nil {
		return x.failed(err)
	}
	return nil
}
