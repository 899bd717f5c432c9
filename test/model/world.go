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

// A World is a directory tree on which operations are done, and the files it has open. The same tree may be reached by
// several mounts: then Root is that of the one to use next.
type World struct {
	Root string
	fds  [maxOpen]int    // -1 is closed
	name [maxOpen]string // what was opened, below Root
}

const maxOpen = 8

func NewWorld(root string) *World {
	w := &World{Root: root}
	for i := range w.fds {
		w.fds[i] = -1
	}
	return w
}

func (w *World) Close() {
	for i, fd := range w.fds {
		if fd >= 0 {
			unix.Close(fd)
			w.fds[i] = -1
		}
	}
}

func (w *World) path(p string) string { return filepath.Join(w.Root, p) }

// An Op is one operation with all its parameters drawn, so that it can be done in several worlds. Do returns what is to be
// compared.
type Op struct {
	Desc  string
	Do    func(w *World) (any, error)
	paths []string
	slot  int // of the open file it works on, or -1
}

// Paths are the files that the operation is about, below the root.
func (o *Op) Paths(w *World) []string {
	if o.slot >= 0 {
		if w.fds[o.slot] < 0 {
			return nil
		}
		return []string{w.name[o.slot]}
	}
	return o.paths
}

// Script draws operations.
type Script struct {
	Rng     *rand.Rand
	MaxSize int64 // of a file
}

// path draws a path of a small tree, so that names meet often.
func (s *Script) path() string {
	depth := 1 + s.Rng.IntN(3)
	var parts []string
	for i := range depth {
		if i < depth-1 {
			parts = append(parts, fmt.Sprintf("d%d", s.Rng.IntN(3)))
		} else {
			parts = append(parts, string("abcdefgh"[s.Rng.IntN(8)]))
		}
	}
	return strings.Join(parts, "/")
}

// dir draws the path of what is most likely a directory.
func (s *Script) dir() string {
	p := fmt.Sprintf("d%d", s.Rng.IntN(3))
	if s.Rng.IntN(2) == 0 {
		p += fmt.Sprintf("/d%d", s.Rng.IntN(3))
	}
	return p
}

// any draws either.
func (s *Script) any() string {
	if s.Rng.IntN(3) == 0 {
		return s.dir()
	}
	return s.path()
}

// offset draws a place in a file: anywhere, or around a power of two, where boundaries of blocks and units are.
func (s *Script) offset() int64 {
	if s.Rng.IntN(2) == 0 {
		return s.Rng.Int64N(s.MaxSize)
	}
	return max(0, min(s.MaxSize-1, int64(1)<<(10+s.Rng.IntN(14))+s.Rng.Int64N(5)-2))
}

func (s *Script) length() int {
	switch s.Rng.IntN(4) {
	case 0:
		return 1 + s.Rng.IntN(100)
	case 1:
		return 4096
	case 2:
		return 1 + s.Rng.IntN(64<<10)
	}
	return int(1 + s.Rng.Int64N(s.MaxSize/2))
}

func (s *Script) bytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(s.Rng.Uint32())
	}
	rand.NewChaCha8(seed).Read(b)
	return b
}

func (s *Script) Next() Op {
	slot := s.Rng.IntN(maxOpen)
	switch n := s.Rng.IntN(100); {
	case n < 8:
		p := s.path()
		flags := unix.O_RDWR | []int{0, unix.O_CREAT, unix.O_CREAT, unix.O_CREAT | unix.O_TRUNC, unix.O_CREAT | unix.O_EXCL, unix.O_APPEND | unix.O_CREAT}[s.Rng.IntN(6)]
		return Op{fmt.Sprintf("open %s %#o as %d", p, flags, slot), func(w *World) (any, error) {
			if w.fds[slot] >= 0 {
				err := unix.Close(w.fds[slot])
				w.fds[slot] = -1
				if err != nil {
					return nil, fmt.Errorf("close: %w", err)
				}
			}
			fd, err := unix.Open(w.path(p), flags|unix.O_CLOEXEC, 0o644)
			if err == nil {
				w.fds[slot], w.name[slot] = fd, p
			}
			return nil, err
		}, []string{p}, -1}
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
	case n < 47:
		off, length, mode := s.offset(), int64(s.length()), []uint32{0, unix.FALLOC_FL_ZERO_RANGE, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}[s.Rng.IntN(3)]
		length = min(length, s.MaxSize-off)
		return onFD(slot, fmt.Sprintf("fallocate mode %d, %d bytes at %d of", mode, length, off), func(fd int) (any, error) {
			return nil, unix.Fallocate(fd, mode, off, length)
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
		return Op{fmt.Sprintf("truncate %s to %d", p, size), func(w *World) (any, error) { return nil, unix.Truncate(w.path(p), size) }, []string{p}, -1}
	case n < 58:
		p, kind := s.path(), []uint32{unix.S_IFREG, unix.S_IFSOCK}[s.Rng.IntN(2)]
		return Op{fmt.Sprintf("mknod %s %#o", p, kind), func(w *World) (any, error) { return nil, unix.Mknod(w.path(p), kind|0o640, 0) }, []string{p}, -1}
	case n < 64:
		p := s.dir()
		return Op{"mkdir " + p, func(w *World) (any, error) { return nil, unix.Mkdir(w.path(p), 0o755) }, []string{p}, -1}
	case n < 66:
		p := s.any()
		return Op{"rmdir " + p, func(w *World) (any, error) { return nil, unix.Rmdir(w.path(p)) }, []string{p}, -1}
	case n < 71:
		p := s.any()
		return Op{"unlink " + p, func(w *World) (any, error) { return nil, unix.Unlink(w.path(p)) }, []string{p}, -1}
	case n < 79:
		from, to := s.any(), s.any()
		flags := []uint{0, 0, 0, unix.RENAME_NOREPLACE, unix.RENAME_EXCHANGE}[s.Rng.IntN(5)]
		return Op{fmt.Sprintf("rename %s to %s, flags %d", from, to, flags), func(w *World) (any, error) {
			return nil, unix.Renameat2(unix.AT_FDCWD, w.path(from), unix.AT_FDCWD, w.path(to), flags)
		}, []string{from, to}, -1}
	case n < 82:
		from, to := s.path(), s.path()
		return Op{fmt.Sprintf("link %s to %s", from, to), func(w *World) (any, error) { return nil, unix.Link(w.path(from), w.path(to)) }, []string{from, to}, -1}
	case n < 85:
		target, p := s.any(), s.path()
		return Op{fmt.Sprintf("symlink %s to %s", p, target), func(w *World) (any, error) { return nil, unix.Symlink(target, w.path(p)) }, []string{p}, -1}
	case n < 87:
		p, mode := s.any(), s.Rng.Uint32()&0o7777|0o700
		return Op{fmt.Sprintf("chmod %s %#o", p, mode), func(w *World) (any, error) { return nil, unix.Chmod(w.path(p), mode) }, []string{p}, -1}
	case n < 89:
		p, sec, nsec := s.any(), s.Rng.Int64N(2e9), s.Rng.Int64N(1e9)
		return Op{fmt.Sprintf("utimens %s %d.%09d", p, sec, nsec), func(w *World) (any, error) {
			ts := []unix.Timespec{{Sec: sec, Nsec: nsec}, {Sec: sec + 1, Nsec: nsec}}
			if err := unix.UtimesNanoAt(unix.AT_FDCWD, w.path(p), ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return nil, err
			}
			var st unix.Stat_t
			err := unix.Lstat(w.path(p), &st)
			return st.Mtim, err
		}, []string{p}, -1}
	case n < 91:
		p, uid := s.any(), s.Rng.IntN(3)
		return Op{fmt.Sprintf("lchown %s %d", p, uid), func(w *World) (any, error) { return nil, unix.Lchown(w.path(p), uid, uid) }, []string{p}, -1}
	case n < 93:
		p, name, val, flags := s.any(), fmt.Sprintf("user.%c", 'a'+s.Rng.IntN(3)), s.bytes(s.Rng.IntN(200)), s.Rng.IntN(3)
		return Op{fmt.Sprintf("setxattr %s %s, %d bytes, flags %d", p, name, len(val), flags), func(w *World) (any, error) {
			return nil, unix.Lsetxattr(w.path(p), name, val, flags)
		}, []string{p}, -1}
	case n < 95:
		p, name := s.any(), fmt.Sprintf("user.%c", 'a'+s.Rng.IntN(3))
		return Op{fmt.Sprintf("getxattr and remove %s %s", p, name), func(w *World) (any, error) {
			b := make([]byte, 300)
			n, err := unix.Lgetxattr(w.path(p), name, b)
			if err != nil {
				return nil, err
			}
			return b[:n], unix.Lremovexattr(w.path(p), name)
		}, []string{p}, -1}
	case n < 98:
		p := s.any()
		return Op{"lstat " + p, func(w *World) (any, error) {
			var st unix.Stat_t
			err := unix.Lstat(w.path(p), &st)
			return statLine(&st), err
		}, []string{p}, -1}
	default:
		p := s.dir()
		return Op{"list " + p, func(w *World) (any, error) {
			entries, err := os.ReadDir(w.path(p))
			var names []string
			for _, e := range entries {
				names = append(names, e.Name()+" "+e.Type().String())
			}
			sort.Strings(names)
			return names, errnoOf(err)
		}, []string{p}, -1}
	}
}

func onFD(slot int, desc string, do func(fd int) (any, error)) Op {
	return Op{fmt.Sprintf("%s %d", desc, slot), func(w *World) (any, error) {
		if w.fds[slot] < 0 {
			return nil, nil
		}
		return do(w.fds[slot])
	}, nil, slot}
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

// Step does o in both worlds and says how they disagree, if they do.
func Step(o Op, a, b *World) error {
	ra, ea := o.Do(a)
	rb, eb := o.Do(b)
	if fmt.Sprint(ea) != fmt.Sprint(eb) || fmt.Sprintf("%v", ra) != fmt.Sprintf("%v", rb) {
		return fmt.Errorf("%s:\n  weft:  %v, %v\n  plain: %v, %v", o.Desc, ra, ea, rb, eb)
	}
	return nil
}

// CompareTrees walks both worlds and compares everything.
func CompareTrees(a, b *World) error {
	la, err := listing(a.Root)
	if err != nil {
		return err
	}
	lb, err := listing(b.Root)
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
