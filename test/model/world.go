package model

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A world is a directory tree on which operations are done, and the files it has open.
type world struct {
	root string
	fds  [maxOpen]int // -1 is closed
}

const maxOpen = 8

func newWorld(root string) *world {
	w := &world{root: root}
	for i := range w.fds {
		w.fds[i] = -1
	}
	return w
}

func (w *world) close() {
	for i, fd := range w.fds {
		if fd >= 0 {
			unix.Close(fd)
			w.fds[i] = -1
		}
	}
}

func (w *world) path(p string) string { return filepath.Join(w.root, p) }

// op is one operation with all its parameters drawn, so that it can be done in several worlds. It returns what is to be compared.
type op struct {
	desc string
	do   func(w *world) (any, error)
}

// script draws operations.
type script struct {
	rng     *rand.Rand
	maxSize int64
}

// path draws a path of a small tree, so that names meet often.
func (s *script) path() string {
	depth := 1 + s.rng.IntN(3)
	var parts []string
	for i := range depth {
		if i < depth-1 {
			parts = append(parts, fmt.Sprintf("d%d", s.rng.IntN(3)))
		} else {
			parts = append(parts, string("abcdefgh"[s.rng.IntN(8)]))
		}
	}
	return strings.Join(parts, "/")
}

// dir draws the path of what is most likely a directory.
func (s *script) dir() string {
	p := fmt.Sprintf("d%d", s.rng.IntN(3))
	if s.rng.IntN(2) == 0 {
		p += fmt.Sprintf("/d%d", s.rng.IntN(3))
	}
	return p
}

// any draws either.
func (s *script) any() string {
	if s.rng.IntN(3) == 0 {
		return s.dir()
	}
	return s.path()
}

// offset draws a place in a file: anywhere, or around a power of two, where boundaries of blocks and units are.
func (s *script) offset() int64 {
	if s.rng.IntN(2) == 0 {
		return s.rng.Int64N(s.maxSize)
	}
	return max(0, min(s.maxSize-1, int64(1)<<(10+s.rng.IntN(14))+s.rng.Int64N(5)-2))
}

func (s *script) length() int {
	switch s.rng.IntN(4) {
	case 0:
		return 1 + s.rng.IntN(100)
	case 1:
		return 4096
	case 2:
		return 1 + s.rng.IntN(64<<10)
	}
	return int(1 + s.rng.Int64N(s.maxSize/2))
}

func (s *script) bytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(s.rng.Uint32())
	}
	rand.NewChaCha8(seed).Read(b)
	return b
}

func (s *script) next() op {
	slot := s.rng.IntN(maxOpen)
	switch n := s.rng.IntN(100); {
	case n < 8:
		p := s.path()
		flags := unix.O_RDWR | []int{0, unix.O_CREAT, unix.O_CREAT, unix.O_CREAT | unix.O_TRUNC, unix.O_CREAT | unix.O_EXCL, unix.O_APPEND | unix.O_CREAT}[s.rng.IntN(6)]
		return op{fmt.Sprintf("open %s %#o as %d", p, flags, slot), func(w *world) (any, error) {
			if w.fds[slot] >= 0 {
				err := unix.Close(w.fds[slot])
				w.fds[slot] = -1
				if err != nil {
					return nil, fmt.Errorf("close: %w", err)
				}
			}
			fd, err := unix.Open(w.path(p), flags|unix.O_CLOEXEC, 0o644)
			if err == nil {
				w.fds[slot] = fd
			}
			return nil, err
		}}
	case n < 28:
		off, data := s.offset(), s.bytes(s.length())
		return onFD(slot, fmt.Sprintf("pwrite %d bytes at %d to", len(data), off), func(fd int) (any, error) {
			return pwriteAll(fd, data, off)
		})
	case n < 32:
		data := s.bytes(s.length())
		return onFD(slot, fmt.Sprintf("write %d bytes to", len(data)), func(fd int) (any, error) {
			return unix.Write(fd, data)
		})
	case n < 46:
		off, length := s.offset(), s.length()
		return onFD(slot, fmt.Sprintf("pread %d bytes at %d of", length, off), func(fd int) (any, error) {
			b := make([]byte, length)
			n, err := preadAll(fd, b, off)
			return fmt.Sprintf("%d bytes, sha256 %x", n, sha256.Sum256(b[:n])), err
		})
	case n < 50:
		size := s.offset()
		return onFD(slot, fmt.Sprintf("ftruncate to %d", size), func(fd int) (any, error) {
			return nil, unix.Ftruncate(fd, size)
		})
	case n < 52:
		return onFD(slot, "fsync", func(fd int) (any, error) { return nil, unix.Fsync(fd) })
	case n < 55:
		return onFD(slot, "fstat", func(fd int) (any, error) {
			var st unix.Stat_t
			err := unix.Fstat(fd, &st)
			return statLine(&st), err
		})
	case n < 57:
		p, size := s.path(), s.offset()
		return op{fmt.Sprintf("truncate %s to %d", p, size), func(w *world) (any, error) { return nil, unix.Truncate(w.path(p), size) }}
	case n < 64:
		p := s.dir()
		return op{"mkdir " + p, func(w *world) (any, error) { return nil, unix.Mkdir(w.path(p), 0o755) }}
	case n < 66:
		p := s.any()
		return op{"rmdir " + p, func(w *world) (any, error) { return nil, unix.Rmdir(w.path(p)) }}
	case n < 71:
		p := s.any()
		return op{"unlink " + p, func(w *world) (any, error) { return nil, unix.Unlink(w.path(p)) }}
	case n < 79:
		from, to := s.any(), s.any()
		flags := []uint{0, 0, 0, unix.RENAME_NOREPLACE, unix.RENAME_EXCHANGE}[s.rng.IntN(5)]
		return op{fmt.Sprintf("rename %s to %s, flags %d", from, to, flags), func(w *world) (any, error) {
			return nil, unix.Renameat2(unix.AT_FDCWD, w.path(from), unix.AT_FDCWD, w.path(to), flags)
		}}
	case n < 82:
		from, to := s.path(), s.path()
		return op{fmt.Sprintf("link %s to %s", from, to), func(w *world) (any, error) { return nil, unix.Link(w.path(from), w.path(to)) }}
	case n < 85:
		target, p := s.any(), s.path()
		return op{fmt.Sprintf("symlink %s to %s", p, target), func(w *world) (any, error) { return nil, unix.Symlink(target, w.path(p)) }}
	case n < 87:
		p, mode := s.any(), s.rng.Uint32()&0o7777|0o700
		return op{fmt.Sprintf("chmod %s %#o", p, mode), func(w *world) (any, error) { return nil, unix.Chmod(w.path(p), mode) }}
	case n < 89:
		p, sec, nsec := s.any(), s.rng.Int64N(2e9), s.rng.Int64N(1e9)
		return op{fmt.Sprintf("utimens %s %d.%09d", p, sec, nsec), func(w *world) (any, error) {
			ts := []unix.Timespec{{Sec: sec, Nsec: nsec}, {Sec: sec + 1, Nsec: nsec}}
			if err := unix.UtimesNanoAt(unix.AT_FDCWD, w.path(p), ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return nil, err
			}
			var st unix.Stat_t
			err := unix.Lstat(w.path(p), &st)
			return st.Mtim, err
		}}
	case n < 91:
		p, uid := s.any(), s.rng.IntN(3)
		return op{fmt.Sprintf("lchown %s %d", p, uid), func(w *world) (any, error) { return nil, unix.Lchown(w.path(p), uid, uid) }}
	case n < 93:
		p, name, val, flags := s.any(), fmt.Sprintf("user.%c", 'a'+s.rng.IntN(3)), s.bytes(s.rng.IntN(200)), s.rng.IntN(3)
		return op{fmt.Sprintf("setxattr %s %s, %d bytes, flags %d", p, name, len(val), flags), func(w *world) (any, error) {
			return nil, unix.Lsetxattr(w.path(p), name, val, flags)
		}}
	case n < 95:
		p, name := s.any(), fmt.Sprintf("user.%c", 'a'+s.rng.IntN(3))
		return op{fmt.Sprintf("getxattr and remove %s %s", p, name), func(w *world) (any, error) {
			b := make([]byte, 300)
			n, err := unix.Lgetxattr(w.path(p), name, b)
			if err != nil {
				return nil, err
			}
			return b[:n], unix.Lremovexattr(w.path(p), name)
		}}
	case n < 98:
		p := s.any()
		return op{"lstat " + p, func(w *world) (any, error) {
			var st unix.Stat_t
			err := unix.Lstat(w.path(p), &st)
			return statLine(&st), err
		}}
	default:
		p := s.dir()
		return op{"list " + p, func(w *world) (any, error) {
			entries, err := os.ReadDir(w.path(p))
			var names []string
			for _, e := range entries {
				names = append(names, e.Name()+" "+e.Type().String())
			}
			sort.Strings(names)
			return names, errnoOf(err)
		}}
	}
}

func onFD(slot int, desc string, do func(fd int) (any, error)) op {
	return op{fmt.Sprintf("%s %d", desc, slot), func(w *world) (any, error) {
		if w.fds[slot] < 0 {
			return nil, nil
		}
		return do(w.fds[slot])
	}}
}

func pwriteAll(fd int, b []byte, off int64) (int, error) {
	done := 0
	for done < len(b) {
		n, err := unix.Pwrite(fd, b[done:], off+int64(done))
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func preadAll(fd int, b []byte, off int64) (int, error) {
	done := 0
	for done < len(b) {
		n, err := unix.Pread(fd, b[done:], off+int64(done))
		if n <= 0 || err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// statLine is what must agree of two files' attributes. Directory sizes and times differ by nature.
func statLine(st *unix.Stat_t) string {
	size := st.Size
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		size = 0
	}
	return fmt.Sprintf("mode %#o nlink %d uid %d gid %d size %d", st.Mode, st.Nlink, st.Uid, st.Gid, size)
}

func errnoOf(err error) error {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

// step does o in both worlds and says how they disagree, if they do.
func step(o op, a, b *world) error {
	ra, ea := o.do(a)
	rb, eb := o.do(b)
	if fmt.Sprint(ea) != fmt.Sprint(eb) || fmt.Sprintf("%v", ra) != fmt.Sprintf("%v", rb) {
		return fmt.Errorf("%s:\n  weft:  %v, %v\n  plain: %v, %v", o.desc, ra, ea, rb, eb)
	}
	return nil
}

// compareTrees walks both worlds and compares everything.
func compareTrees(a, b *world) error {
	la, err := listing(a.root)
	if err != nil {
		return err
	}
	lb, err := listing(b.root)
	if err != nil {
		return err
	}
	for i := range max(len(la), len(lb)) {
		var x, y string
		if i < len(la) {
			x = la[i]
		}
		if i < len(lb) {
			y = lb[i]
		}
		if x != y {
			return fmt.Errorf("trees differ:\n  weft:  %s\n  plain: %s", x, y)
		}
	}
	return nil
}

// listing has a line for each file of a tree, with its contents' digest.
func listing(root string) ([]string, error) {
	var lines []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if rel == "." {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		line := rel + ": " + statLine(&st)
		switch {
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + target
		case d.Type().IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" sha256 %x", sha256.Sum256(content))
		}
		names := make([]byte, 1000)
		n, err := unix.Llistxattr(path, names)
		if err != nil {
			return fmt.Errorf("%s: listxattr: %w", path, err)
		}
		var attrs []string
		for name := range bytes.SplitSeq(names[:n], []byte{0}) {
			if strings.HasPrefix(string(name), "user.") {
				attrs = append(attrs, string(name))
			}
		}
		sort.Strings(attrs)
		lines = append(lines, fmt.Sprintf("%s %v", line, attrs))
		return nil
	})
	return lines, err
}
