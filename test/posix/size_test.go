package posix

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"
)

func sizeChecks() []check {
	var out []check
	// Cutting and extending, by path and by descriptor.
	for _, from := range []int{0, 10, 4096, stripe + 5} {
		for _, to := range []int{0, 1, 4095, 4097, stripe, 5 * stripe} {
			for _, how := range []string{"truncate", "ftruncate"} {
				out = append(out, check{fmt.Sprintf("%s from %d to %d", how, from, to), fmt.Sprint(to, " true"), func(w world) any {
					old := pattern(from)
					p := w.file("f", string(old))
					if how == "truncate" {
						try(unix.Truncate(p, int64(to)))
					} else {
						fd := opened(p, unix.O_RDWR)
						defer unix.Close(fd)
						try(unix.Ftruncate(fd, int64(to)))
					}
					want := make([]byte, to)
					copy(want, old)
					return say(lstat(p).Size, read(p) == string(want))
				}})
			}
		}
	}
	for _, kind := range kinds {
		want := map[string]string{
			"missing": "ENOENT", "file": "ok it=da", "empty": "ok it=\x00\x00", "dir": "EISDIR it/", "full": "EISDIR it/ it/inside=",
			"dangling": "ENOENT it->it.nowhere", "loop": "ELOOP it->it", "dirlink": "EISDIR it->it.target it.target/",
			"symlink": "ok it->it.target it.target=ta", "fifo": "EINVAL it(fifo)", "socket": "EINVAL it(socket)", "null": "EINVAL it(char 1:3)",
		}[kind]
		if kind == "missing" {
			want += " "
		}
		out = append(out, check{"truncate " + kind, want, func(w world) any { return say(unix.Truncate(w.make(kind, "it"), 2), w.tree()) }})
	}
	// fallocate in all modes at all places. What is written down is what a file system that can do it answers.
	for _, m := range []struct {
		name string
		mode uint32
	}{
		{"extend", 0},
		{"KEEP_SIZE", unix.FALLOC_FL_KEEP_SIZE},
		{"PUNCH_HOLE", unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE},
		{"PUNCH_HOLE without KEEP_SIZE", unix.FALLOC_FL_PUNCH_HOLE},
		{"ZERO_RANGE", unix.FALLOC_FL_ZERO_RANGE},
		{"ZERO_RANGE KEEP_SIZE", unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE},
		{"COLLAPSE_RANGE", unix.FALLOC_FL_COLLAPSE_RANGE},
		{"INSERT_RANGE", unix.FALLOC_FL_INSERT_RANGE},
		{"unknown mode", 0x4000},
	} {
		for _, at := range []struct{ off, n int64 }{{0, 100}, {100, 4096}, {9000, 5000}, {20000, 100}, {0, 0}, {-1, 10}, {0, -1}} {
			want := ""
			zeroes := m.mode == unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE || m.mode&unix.FALLOC_FL_ZERO_RANGE != 0
			const size = 10000
			switch {
			case at.off < 0 || at.n <= 0:
				want = "EINVAL 10000 true"
			case m.mode == unix.FALLOC_FL_PUNCH_HOLE:
				want = "EOPNOTSUPP 10000 true"
			case m.mode == 0 || zeroes || m.mode == unix.FALLOC_FL_KEEP_SIZE:
				end := int64(size)
				if m.mode&unix.FALLOC_FL_KEEP_SIZE == 0 {
					end = max(end, at.off+at.n)
				}
				want = fmt.Sprint("ok ", end, " true")
			}
			out = append(out, check{fmt.Sprintf("fallocate %s %d+%d of 10000", m.name, at.off, at.n), want, func(w world) any {
				all := pattern(size)
				p := w.file("f", string(all))
				fd := opened(p, unix.O_RDWR)
				defer unix.Close(fd)
				err := unix.Fallocate(fd, m.mode, at.off, at.n)
				if err == nil && zeroes && at.off < size {
					clear(all[at.off:min(size, at.off+at.n)])
				}
				st := fstat(fd)
				return say(err, st.Size, read(p) == string(append(all, make([]byte, max(0, st.Size-size))...)))
			}})
		}
	}
	// lseek in every way over a file with data, a hole and data: 1 MiB each, so that holes show on any file system.
	for _, whence := range []struct {
		name string
		n    int
	}{{"SEEK_SET", unix.SEEK_SET}, {"SEEK_CUR", unix.SEEK_CUR}, {"SEEK_END", unix.SEEK_END}, {"SEEK_DATA", unix.SEEK_DATA}, {"SEEK_HOLE", unix.SEEK_HOLE}, {"whence 9", 9}} {
		for _, off := range []int64{0, 1, 4096, stripe, stripe + 4096, 2 * stripe, 3*stripe - 1, 3 * stripe, 3*stripe + 1, -1, -3 * stripe, -3*stripe - 1, 1<<63 - 1} {
			want := ""
			const size = 3 * stripe
			switch base := map[int]int64{unix.SEEK_CUR: 10, unix.SEEK_END: size}[whence.n]; whence.n {
			case unix.SEEK_SET, unix.SEEK_CUR, unix.SEEK_END:
				switch {
				case off == 1<<63-1: // beyond what some can keep
				case base+off < 0:
					want = "EINVAL 10"
				default:
					want = fmt.Sprint(base+off, " ", base+off)
				}
			case unix.SEEK_DATA, unix.SEEK_HOLE:
				found := off
				switch {
				case off < 0 || off >= size:
					want = "ENXIO 10"
				case whence.n == unix.SEEK_DATA && off >= stripe && off < 2*stripe:
					found = 2 * stripe
				case whence.n == unix.SEEK_HOLE && off < stripe:
					found = stripe
				case whence.n == unix.SEEK_HOLE && off >= 2*stripe:
					found = size
				}
				if want == "" {
					want = fmt.Sprint(found, " ", found)
				}
			default:
				want = "EINVAL 10"
			}
			out = append(out, check{fmt.Sprintf("lseek %s %d", whence.name, off), want, func(w world) any {
				fd := opened(w.at("f"), unix.O_RDWR|unix.O_CREAT)
				defer unix.Close(fd)
				must(unix.Pwrite(fd, pattern(stripe), 0))
				must(unix.Pwrite(fd, pattern(stripe), 2*stripe))
				must(unix.Seek(fd, 10, 0))
				got, err := unix.Seek(fd, off, whence.n)
				now := must(unix.Seek(fd, 0, unix.SEEK_CUR))
				if err != nil {
					return say(err, now)
				}
				return say(got, now)
			}})
		}
	}
	rw := unix.O_RDWR | unix.O_CREAT
	return append(out, []check{
		{"truncate to a negative size", "EINVAL", func(w world) any { return unix.Truncate(w.file("f", ""), -1) }},
		{"ftruncate to a negative size", "EINVAL", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			return unix.Ftruncate(fd, -1)
		}},
		{"truncate to 16 TiB less a page", "17592186040320", func(w world) any {
			p := w.file("f", "")
			try(unix.Truncate(p, 16<<40-4096))
			return lstat(p).Size
		}},
		{"truncate to the largest size", "", func(w world) any { return unix.Truncate(w.file("f", ""), 1<<63-1) }},
		{"truncate longer makes zeros of what was cut", "ab(4*\\x00)", func(w world) any {
			p := w.file("f", "abcdef")
			try(unix.Truncate(p, 2))
			try(unix.Truncate(p, 6))
			return []byte(read(p))
		}},
		{"truncate and write beyond makes zeros of what was cut", "ab\\x00\\x00\\x00z", func(w world) any {
			fd := opened(w.file("f", "abcdef"), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Ftruncate(fd, 2))
			must(unix.Pwrite(fd, []byte("z"), 5))
			return []byte(read(w.at("f")))
		}},
		{"cut across stripes and grow again", "true", func(w world) any {
			fd := opened(w.file("f", string(pattern(4*stripe))), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Ftruncate(fd, stripe+10))
			try(unix.Ftruncate(fd, 4*stripe))
			want := pattern(4 * stripe)
			clear(want[stripe+10:])
			return read(w.at("f")) == string(want)
		}},
		{"ftruncate of a descriptor for reading", "EINVAL", func(w world) any {
			fd := opened(w.file("f", "abc"), unix.O_RDONLY)
			defer unix.Close(fd)
			return unix.Ftruncate(fd, 0)
		}},
		{"truncate to the same size moves the times", "true true", func(w world) any {
			p := w.file("f", "abc")
			before := aged(p)
			try(unix.Truncate(p, 3))
			st := lstat(p)
			return say(after(st.Mtim, before.Mtim), after(st.Ctim, before.Ctim))
		}},
		{"ftruncate to the same size moves the times", "true true", func(w world) any {
			p := w.file("f", "abc")
			fd := opened(p, unix.O_RDWR)
			defer unix.Close(fd)
			before := aged(p)
			try(unix.Ftruncate(fd, 3))
			st := lstat(p)
			return say(after(st.Mtim, before.Mtim), after(st.Ctim, before.Ctim))
		}},
		// Where it is not known what is allocated they are one less.
		{"blocks count what was written", "true", func(w world) any { return lstat(w.file("f", string(pattern(stripe)))).Blocks >= stripe/512-1 }},
		{"blocks do not count a hole", "true", func(w world) any {
			p := w.file("f", "")
			try(unix.Truncate(p, 64<<20))
			return lstat(p).Blocks < 1000
		}},
		{"blocks of a punched file", "true", func(w world) any {
			fd := opened(w.file("f", string(pattern(4*stripe))), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Fsync(fd))
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4*stripe); err != nil {
				return err
			}
			try(unix.Fsync(fd))
			return fstat(fd).Blocks < 1000
		}},
		{"lseek SEEK_DATA in an empty file", "ENXIO", func(w world) any {
			fd := opened(w.file("f", ""), unix.O_RDONLY)
			defer unix.Close(fd)
			_, err := unix.Seek(fd, 0, unix.SEEK_DATA)
			return err
		}},
		{"lseek SEEK_DATA in a file that is all hole", "ENXIO", func(w world) any {
			p := w.file("f", "")
			try(unix.Truncate(p, 1<<20))
			fd := opened(p, unix.O_RDONLY)
			defer unix.Close(fd)
			_, err := unix.Seek(fd, 0, unix.SEEK_DATA)
			return err
		}},
		{"lseek SEEK_HOLE in a file that is all hole", "0", func(w world) any {
			p := w.file("f", "")
			try(unix.Truncate(p, 1<<20))
			fd := opened(p, unix.O_RDONLY)
			defer unix.Close(fd)
			return must(unix.Seek(fd, 0, unix.SEEK_HOLE))
		}},
		{"lseek SEEK_HOLE finds what was punched", "1048576 2097152", func(w world) any {
			fd := opened(w.file("f", string(pattern(3*stripe))), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, stripe, stripe))
			hole := must(unix.Seek(fd, 0, unix.SEEK_HOLE))
			return say(hole, must(unix.Seek(fd, hole, unix.SEEK_DATA)))
		}},
		{"lseek beyond the end and write", "8 abc(4*\\x00)x", func(w world) any {
			fd := opened(w.file("f", "abc"), unix.O_RDWR)
			defer unix.Close(fd)
			must(unix.Seek(fd, 4, unix.SEEK_END))
			must(unix.Write(fd, []byte("x")))
			return say(fstat(fd).Size, []byte(read(w.at("f"))))
		}},
		{"lseek of a fifo", "ESPIPE", func(w world) any {
			fd := opened(w.make("fifo", "p"), unix.O_RDWR)
			defer unix.Close(fd)
			_, err := unix.Seek(fd, 0, 0)
			return err
		}},
		{"fallocate KEEP_SIZE then write into it", "true", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			if err := unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20); err != nil {
				return err
			}
			must(unix.Pwrite(fd, pattern(5000), 0))
			return read(w.at("f")) == string(pattern(5000))
		}},
		{"fallocate beyond the largest size", "EFBIG", func(w world) any {
			fd := opened(w.at("f"), rw)
			defer unix.Close(fd)
			return unix.Fallocate(fd, 0, 1<<62, 1<<62+1)
		}},
		{"fallocate moves ctime and, extending, the size", "true 5000", func(w world) any {
			p := w.file("f", "")
			fd := opened(p, unix.O_RDWR)
			defer unix.Close(fd)
			before := aged(p)
			try(unix.Fallocate(fd, 0, 0, 5000))
			return say(after(fstat(fd).Ctim, before.Ctim), fstat(fd).Size)
		}},
		{"punch across stripes", "true", func(w world) any {
			fd := opened(w.file("f", string(pattern(4*stripe))), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, stripe-100, 2*stripe+200))
			want := pattern(4 * stripe)
			clear(want[stripe-100 : 3*stripe+100])
			return bytes.Equal([]byte(read(w.at("f"))), want)
		}},
		{"punch, then write inside, then read all", "true", func(w world) any {
			fd := opened(w.file("f", string(pattern(2*stripe))), unix.O_RDWR)
			defer unix.Close(fd)
			try(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 2*stripe))
			must(unix.Pwrite(fd, []byte("in the middle"), stripe-5))
			want := make([]byte, 2*stripe)
			copy(want[stripe-5:], "in the middle")
			return bytes.Equal([]byte(read(w.at("f"))), want)
		}},
		{"RLIMIT_FSIZE and a write beyond it", "EFBIG", func(w world) any { return inChild("fsize", string(w)) }},
	}...)
}
