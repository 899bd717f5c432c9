package posix

import (
	"bytes"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// pattern is n bytes that differ from their neighbours and from those a page or a stripe unit away.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + (i+i/4096+i/(1<<20))%26)
	}
	return b
}

// stripe is the unit in which weft places bytes on its data servers by default.
const stripe = 1 << 20

func ioChecks() []check {
	var out []check
	// Reads of any length at any place of a file of a size, in one call each.
	for _, size := range []int{0, 1, 4095, 4096, 4097, stripe, stripe + 1, 4*stripe + 5} {
		for _, off := range []int{0, 1, 4095, 4096, stripe - 1, stripe, 4*stripe + 4, 4*stripe + 5, 9 * stripe} {
			for _, n := range []int{1, 4096, 3 * stripe} {
				if off > size+1 && n != 4096 {
					continue
				}
				want := max(0, min(n, size-off))
				out = append(out, check{fmt.Sprintf("pread %d at %d of %d", n, off, size), fmt.Sprint(want, " true"), func(w world) any {
					all := pattern(size)
					fd := opened(w.file("f", string(all)), unix.O_RDONLY)
					defer unix.Close(fd)
					b := make([]byte, n)
					got := must(unix.Pread(fd, b, int64(off)))
					return say(got, bytes.Equal(b[:got], all[min(off, size):min(off+got, size)]))
				}})
			}
		}
	}
	// Writes at any place of a file that was there, with what is left around them and holes between.
	for _, size := range []int{0, 10, 4096, stripe + 100} {
		for _, off := range []int{0, 5, 4095, 4096, stripe - 2, 3*stripe - 7} {
			for _, n := range []int{1, 4097, stripe + 3} {
				out = append(out, check{fmt.Sprintf("pwrite %d at %d of %d", n, off, size), fmt.Sprint(n, " ", max(size, off+n), " true"), func(w world) any {
					old, more := pattern(size), bytes.ToUpper(pattern(n))
					fd := opened(w.file("f", string(old)), unix.O_RDWR)
					defer unix.Close(fd)
					got := must(unix.Pwrite(fd, more, int64(off)))
					want := make([]byte, max(size, off+n))
					copy(want, old)
					copy(want[off:], more)
					return say(got, fstat(fd).Size, read(w.at("f")) == string(want))
				}})
			}
		}
	}
	// Calls on descriptors of each kind that may not do them.
	for _, kind := range []string{"file", "dir", "fifo"} {
		for _, access := range accesses {
			if kind == "dir" && access.flags != unix.O_RDONLY || kind == "fifo" && access.flags == unix.O_WRONLY {
				continue
			}
			for _, call := range fdCalls {
				out = append(out, check{fmt.Sprintf("%s on %s opened %s", call.name, kind, access.name), "", func(w world) any {
					fd := opened(w.make(kind, "it"), access.flags|unix.O_NONBLOCK)
					defer unix.Close(fd)
					return call.do(fd)
				}})
			}
		}
	}
	rw := unix.O_RDWR | unix.O_CREAT
	file := func(w world, content string) int { return opened(w.file("f", content), unix.O_RDWR) }
	return append(out, []check{
		{"read moves the offset", "3 def", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			b := make([]byte, 3)
			must(unix.Read(fd, b))
			off := must(unix.Seek(fd, 0, 1))
			must(unix.Read(fd, b))
			return say(off, string(b))
		}},
		{"pread leaves the offset", "0", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			must(unix.Pread(fd, make([]byte, 3), 1))
			return must(unix.Seek(fd, 0, 1))
		}},
		{"read at the end", "0 6", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			must(unix.Seek(fd, 0, 2))
			return say(must(unix.Read(fd, make([]byte, 3))), must(unix.Seek(fd, 0, 1)))
		}},
		{"pread at a negative offset", "EINVAL", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			_, err := unix.Pread(fd, make([]byte, 3), -1)
			return err
		}},
		{"pwrite at a negative offset", "EINVAL", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			_, err := unix.Pwrite(fd, make([]byte, 3), -1)
			return err
		}},
		{"write of nothing changes nothing", "0 6 true", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			before := fstat(fd)
			n := must(unix.Write(fd, nil))
			return say(n, fstat(fd).Size, before.Mtim == fstat(fd).Mtim)
		}},
		{"write of nothing beyond the end does not extend", "6", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			must(unix.Pwrite(fd, nil, 100))
			return fstat(fd).Size
		}},
		{"read into memory that is not there", "EFAULT", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			_, _, e := unix.Syscall(unix.SYS_READ, uintptr(fd), 8, 3)
			return errnoOf(e)
		}},
		{"write from memory that is not there", "EFAULT 6", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			_, _, e := unix.Syscall(unix.SYS_WRITE, uintptr(fd), 8, 3)
			return say(errnoOf(e), fstat(fd).Size)
		}},
		{"preadv gathers", "6 ab cdef", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			a, b := make([]byte, 2), make([]byte, 4)
			return say(must(unix.Preadv(fd, [][]byte{a, b}, 0)), string(a), string(b))
		}},
		{"preadv across the end", "3 de f", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			a, b := make([]byte, 2), make([]byte, 4)
			n := must(unix.Preadv(fd, [][]byte{a, b}, 3))
			return say(n, string(a), string(b[:1]))
		}},
		{"pwritev scatters", "6 xABcdeff", func(w world) any {
			fd := file(w, "x")
			defer unix.Close(fd)
			n := must(unix.Pwritev(fd, [][]byte{[]byte("AB"), []byte("cd"), []byte("ef")}, 1))
			must(unix.Pwrite(fd, []byte("f"), 7))
			return say(n, read(w.at("f")))
		}},
		{"readv with empty parts", "6", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			return must(unix.Readv(fd, [][]byte{{}, make([]byte, 3), {}, make([]byte, 3), {}}))
		}},
		{"writev of 1024 parts", "2048 2048", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			parts := make([][]byte, 1024)
			for i := range parts {
				parts[i] = []byte("ab")
			}
			return say(must(unix.Writev(fd, parts)), fstat(fd).Size)
		}},
		{"writev of 1025 parts", "EINVAL", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			parts := make([][]byte, 1025)
			for i := range parts {
				parts[i] = []byte("ab")
			}
			_, err := unix.Writev(fd, parts)
			return err
		}},
		{"preadv2 RWF_NOWAIT", "true", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			n, err := unix.Preadv2(fd, [][]byte{make([]byte, 6)}, 0, unix.RWF_NOWAIT)
			return n == 6 || err == unix.EAGAIN || err == unix.EOPNOTSUPP
		}},
		{"preadv2 RWF_HIPRI", "", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			n, err := unix.Preadv2(fd, [][]byte{make([]byte, 6)}, 0, unix.RWF_HIPRI)
			return say(n, err)
		}},
		{"preadv2 unknown flag", "EOPNOTSUPP", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			_, err := unix.Preadv2(fd, [][]byte{make([]byte, 6)}, 0, 1<<20)
			return err
		}},
		{"preadv2 at the file offset", "2 2 cd", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			b := make([]byte, 2)
			must(unix.Preadv2(fd, [][]byte{b}, -1, 0))
			off := must(unix.Seek(fd, 0, 1))
			n := must(unix.Preadv2(fd, [][]byte{b}, -1, 0))
			return say(off, n, string(b))
		}},
		{"pwritev2 RWF_APPEND", "2 abcdefgh 0", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			n := must(unix.Pwritev2(fd, [][]byte{[]byte("gh")}, 0, unix.RWF_APPEND))
			return say(n, read(w.at("f")), must(unix.Seek(fd, 0, 1)))
		}},
		{"pwritev2 RWF_NOAPPEND", "2 ghcdef", func(w world) any {
			w.file("f", "abcdef")
			fd := opened(w.at("f"), unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(fd)
			n := must(unix.Pwritev2(fd, [][]byte{[]byte("gh")}, 0, 0x20))
			return say(n, read(w.at("f")))
		}},
		{"pwritev2 RWF_SYNC", "2 ghcdef", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			n := must(unix.Pwritev2(fd, [][]byte{[]byte("gh")}, 0, unix.RWF_SYNC))
			return say(n, read(w.at("f")))
		}},
		{"pwritev2 RWF_DSYNC", "2 ghcdef", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			n := must(unix.Pwritev2(fd, [][]byte{[]byte("gh")}, 0, unix.RWF_DSYNC))
			return say(n, read(w.at("f")))
		}},
		{"pwrite at 16 TiB less two pages", "4096 17592186040320", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			off := int64(16<<40) - 8192
			n, err := unix.Pwrite(fd, make([]byte, 4096), off)
			if err != nil {
				return err
			}
			return say(n, fstat(fd).Size)
		}},
		{"read what was written near 16 TiB", "3 far 0", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			off := int64(16<<40) - 8192
			if _, err := unix.Pwrite(fd, []byte("far"), off); err != nil {
				return err
			}
			b := make([]byte, 10)
			n := must(unix.Pread(fd, b, off))
			far := string(b[:n])
			must(unix.Pread(fd, b[:1], off/2))
			return say(n, far, b[0])
		}},
		{"pwrite at the largest offset", "", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			_, err := unix.Pwrite(fd, []byte("x"), 1<<63-1)
			return err
		}},
		{"pwrite just below the largest offset", "EFBIG", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			_, err := unix.Pwrite(fd, []byte("x"), 1<<63-2)
			return err
		}},
		{"pread at the largest offset", "", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			_, err := unix.Pread(fd, make([]byte, 1), 1<<63-1)
			return err
		}},
		{"copy_file_range within a file", "3 abcabc", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			from, to := int64(0), int64(3)
			n, err := unix.CopyFileRange(fd, &from, fd, &to, 3, 0)
			if err != nil {
				return err
			}
			return say(n, read(w.at("f")))
		}},
		{"copy_file_range overlapping", "EINVAL", func(w world) any {
			fd := file(w, "abcdef")
			defer unix.Close(fd)
			from, to := int64(0), int64(1)
			_, err := unix.CopyFileRange(fd, &from, fd, &to, 3, 0)
			return err
		}},
		{"copy_file_range across the end", "2 ef 6 2", func(w world) any {
			in := file(w, "abcdef")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			must(unix.Seek(in, 4, 0))
			n, err := unix.CopyFileRange(in, nil, out, nil, 100, 0)
			if err != nil {
				return err
			}
			return say(n, read(w.at("g")), must(unix.Seek(in, 0, 1)), must(unix.Seek(out, 0, 1)))
		}},
		{"copy_file_range of much", "true", func(w world) any {
			all := pattern(3*stripe + 17)
			in := file(w, string(all))
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			for {
				n, err := unix.CopyFileRange(in, nil, out, nil, 1<<30, 0)
				if err != nil {
					return err
				}
				if n == 0 {
					break
				}
			}
			return read(w.at("g")) == string(all)
		}},
		{"copy_file_range beyond the end copies nothing", "0 0", func(w world) any {
			in := file(w, "abc")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			from := int64(10)
			n, err := unix.CopyFileRange(in, &from, out, nil, 3, 0)
			if err != nil {
				return err
			}
			return say(n, fstat(out).Size)
		}},
		{"copy_file_range to a descriptor for reading", "EBADF", func(w world) any {
			in := file(w, "abc")
			out := opened(w.file("g", ""), unix.O_RDONLY)
			defer unix.Close(in)
			defer unix.Close(out)
			_, err := unix.CopyFileRange(in, nil, out, nil, 3, 0)
			return err
		}},
		{"copy_file_range to an O_APPEND descriptor", "EBADF", func(w world) any {
			in := file(w, "abc")
			out := opened(w.at("g"), rw|unix.O_APPEND)
			defer unix.Close(in)
			defer unix.Close(out)
			_, err := unix.CopyFileRange(in, nil, out, nil, 3, 0)
			return err
		}},
		{"copy_file_range from a directory", "EISDIR", func(w world) any {
			in := opened(w.dir("d"), unix.O_RDONLY)
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			_, err := unix.CopyFileRange(in, nil, out, nil, 3, 0)
			return err
		}},
		{"copy_file_range with flags", "EINVAL", func(w world) any {
			in := file(w, "abc")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			_, err := unix.CopyFileRange(in, nil, out, nil, 3, 1)
			return err
		}},
		{"copy_file_range over what was not yet stable", "ABC", func(w world) any {
			in := opened(w.at("f"), rw)
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			must(unix.Pwrite(out, []byte("abc"), 0))
			must(unix.Pwrite(in, []byte("ABC"), 0))
			from, to := int64(0), int64(0)
			if _, err := unix.CopyFileRange(in, &from, out, &to, 3, 0); err != nil {
				return err
			}
			return read(w.at("g"))
		}},
		{"sendfile out of a file", "6 abcdef", func(w world) any {
			in := file(w, "abcdef")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			n, err := unix.Sendfile(out, in, nil, 100)
			return say(n, orText(err, func() string { return read(w.at("g")) }))
		}},
		{"sendfile with an offset", "2 cd 4 0", func(w world) any {
			in := file(w, "abcdef")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			off := int64(2)
			n, err := unix.Sendfile(out, in, &off, 2)
			return say(n, orText(err, func() string { return say(read(w.at("g")), off, must(unix.Seek(in, 0, 1))) }))
		}},
		{"sendfile of 3 MiB", "true", func(w world) any {
			all := pattern(3 * stripe)
			in := file(w, string(all))
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			for {
				n, err := unix.Sendfile(out, in, nil, 1<<22)
				if err != nil {
					return err
				}
				if n == 0 {
					return read(w.at("g")) == string(all)
				}
			}
		}},
		{"splice file to pipe to file", "6 6 abcdef", func(w world) any {
			in := file(w, "abcdef")
			out := opened(w.at("g"), rw)
			defer unix.Close(in)
			defer unix.Close(out)
			r, wr, err := os.Pipe()
			try(err)
			defer r.Close()
			defer wr.Close()
			n, err := unix.Splice(in, nil, int(wr.Fd()), nil, 100, 0)
			if err != nil {
				return err
			}
			m, err := unix.Splice(int(r.Fd()), nil, out, nil, 6, 0)
			if err != nil {
				return err
			}
			return say(n, m, read(w.at("g")))
		}},
		{"splice to an O_APPEND file", "EINVAL", func(w world) any {
			out := opened(w.at("g"), rw|unix.O_APPEND)
			defer unix.Close(out)
			r, wr, err := os.Pipe()
			try(err)
			defer r.Close()
			defer wr.Close()
			wr.WriteString("x")
			_, err = unix.Splice(int(r.Fd()), nil, out, nil, 1, 0)
			return err
		}},
		{"fsync of a file", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			return unix.Fsync(fd)
		}},
		{"fsync of a file opened for reading", "ok", func(w world) any {
			fd := opened(w.file("f", "abc"), unix.O_RDONLY)
			defer unix.Close(fd)
			return unix.Fsync(fd)
		}},
		{"fdatasync of a file", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			return unix.Fdatasync(fd)
		}},
		{"fsync of a directory", "ok", func(w world) any {
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			return unix.Fsync(fd)
		}},
		{"fdatasync of a directory", "ok", func(w world) any {
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			return unix.Fdatasync(fd)
		}},
		{"fsync of an unlinked file", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			must(unix.Write(fd, []byte("more")))
			return unix.Fsync(fd)
		}},
		{"fsync of a fifo", "EINVAL", func(w world) any {
			fd := opened(w.make("fifo", "p"), unix.O_RDWR)
			defer unix.Close(fd)
			return unix.Fsync(fd)
		}},
		{"syncfs", "ok", func(w world) any {
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			return unix.Syncfs(fd)
		}},
		{"sync_file_range", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			return unix.SyncFileRange(fd, 0, 0, unix.SYNC_FILE_RANGE_WRITE)
		}},
		{"readahead", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			_, _, e := unix.Syscall(unix.SYS_READAHEAD, uintptr(fd), 0, 4096)
			return errnoOf(e)
		}},
		{"posix_fadvise", "ok", func(w world) any {
			fd := file(w, "abc")
			defer unix.Close(fd)
			return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
		}},
		{"read of a directory", "EISDIR", func(w world) any {
			fd := opened(string(w), unix.O_RDONLY)
			defer unix.Close(fd)
			_, err := unix.Read(fd, make([]byte, 10))
			return err
		}},
		{"unlinked file stays usable", "still here 0 more", func(w world) any {
			fd := file(w, "still here")
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			b := make([]byte, 10)
			must(unix.Pread(fd, b, 0))
			must(unix.Pwrite(fd, []byte("more"), 0))
			c := make([]byte, 4)
			must(unix.Pread(fd, c, 0))
			return say(string(b), fstat(fd).Nlink, string(c))
		}},
		{"unlinked file is truncated and grows", "2 4", func(w world) any {
			fd := file(w, "still here")
			defer unix.Close(fd)
			try(unix.Unlink(w.at("f")))
			try(unix.Ftruncate(fd, 2))
			size := fstat(fd).Size
			must(unix.Pwrite(fd, []byte("ab"), 2))
			return say(size, fstat(fd).Size)
		}},
		{"replaced file stays usable", "old new", func(w world) any {
			fd := file(w, "old")
			defer unix.Close(fd)
			try(unix.Rename(w.file("g", "new"), w.at("f")))
			b := make([]byte, 10)
			n := must(unix.Pread(fd, b, 0))
			return say(string(b[:n]), read(w.at("f")))
		}},
		{"fd of a closed file", "EBADF", func(w world) any {
			fd := file(w, "old")
			unix.Close(fd)
			_, err := unix.Pread(-1, make([]byte, 1), 0)
			return err
		}},
		{"what one descriptor writes another reads", "new", func(w world) any {
			p := w.file("f", "old")
			one, two := opened(p, unix.O_RDWR), opened(p, unix.O_RDWR)
			defer unix.Close(one)
			defer unix.Close(two)
			b := make([]byte, 3)
			must(unix.Pread(two, b, 0))
			must(unix.Pwrite(one, []byte("new"), 0))
			must(unix.Pread(two, b, 0))
			return string(b)
		}},
		{"many small writes in one stripe unit", "true", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			all := pattern(1000)
			for i := range all {
				must(unix.Pwrite(fd, all[i:i+1], int64(i)))
			}
			return read(w.at("f")) == string(all)
		}},
		{"backward writes", "true", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			all := pattern(64 << 10)
			for off := len(all) - 4096; off >= 0; off -= 4096 {
				must(unix.Pwrite(fd, all[off:off+4096], int64(off)))
			}
			return read(w.at("f")) == string(all)
		}},
	}...)
}

func orText(err error, text func() string) any {
	if err != nil {
		return err
	}
	return text()
}

var fdCalls = []struct {
	name string
	do   func(fd int) any
}{
	{"read", func(fd int) any { n, err := unix.Read(fd, make([]byte, 2)); return say(n, err) }},
	{"write", func(fd int) any { n, err := unix.Write(fd, []byte("xy")); return say(n, err) }},
	{"pread", func(fd int) any { n, err := unix.Pread(fd, make([]byte, 2), 1); return say(n, err) }},
	{"pwrite", func(fd int) any { n, err := unix.Pwrite(fd, []byte("xy"), 1); return say(n, err) }},
	{"ftruncate", func(fd int) any { return unix.Ftruncate(fd, 1) }},
	{"fallocate", func(fd int) any { return unix.Fallocate(fd, 0, 0, 10) }},
	{"lseek SEEK_SET", func(fd int) any { n, err := unix.Seek(fd, 0, 0); return say(n, err) }},
	{"fsync", func(fd int) any { return unix.Fsync(fd) }},
	{"fchdir", func(fd int) any { return apart(func() any { return unix.Fchdir(fd) }) }},
	{"getdents", func(fd int) any { _, err := unix.Getdents(fd, make([]byte, 4096)); return err }},
	{"fchmod", func(fd int) any { return unix.Fchmod(fd, 0o600) }},
	{"flock", func(fd int) any { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }},
	{"fcntl F_SETLK for reading", func(fd int) any {
		return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_RDLCK})
	}},
	{"fcntl F_SETLK for writing", func(fd int) any {
		return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	}},
	{"FIONREAD", func(fd int) any { n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); return say(n, err) }},
	{"unknown ioctl", func(fd int) any { _, err := unix.IoctlGetInt(fd, 0x5eaf); return err }},
}
