package model

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// Observe says what there is to see of a path: attributes, contents, target, names, extended attributes, and whether its
// directory lists it. Times and inode numbers are left out.
func (w *World) Observe(p string) string {
	path := w.path(p)
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	seen := fmt.Sprintf("%s: %v", p, err)
	if err == nil {
		seen = p + ": " + statLine(&st) + " " + w.contents(path, st.Mode)
	}
	names, err := list(filepath.Dir(path))
	listed := false
	for _, n := range names {
		listed = listed || strings.HasPrefix(n, filepath.Base(path)+" ")
	}
	return fmt.Sprintf("%s; listed %v, %v", seen, listed, errnoOf(err))
}

func (w *World) contents(path string, mode uint32) string {
	var seen string
	switch mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		seen = fmt.Sprint("-> ", target, errnoOf(err))
	case unix.S_IFDIR:
		names, err := list(path)
		seen = fmt.Sprint(names, errnoOf(err))
	case unix.S_IFREG:
		b, err := os.ReadFile(path)
		seen = fmt.Sprintf("%d bytes read, sha256 %.8x, %v", len(b), sha256.Sum256(b), errnoOf(err))
	}
	names := make([]byte, 1000)
	n, err := unix.Llistxattr(path, names)
	if err != nil {
		return fmt.Sprint(seen, " listxattr ", err)
	}
	var attrs []string
	for _, name := range strings.Split(string(names[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		value := make([]byte, 300)
		n, err := unix.Lgetxattr(path, name, value)
		attrs = append(attrs, fmt.Sprintf("%s=%x %v", name, value[:max(n, 0)], err))
	}
	sort.Strings(attrs)
	return fmt.Sprint(seen, " ", attrs)
}

func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name()+" "+e.Type().String())
	}
	return names, err
}

// A Watch has a file open, if there is a regular one at the path, and sees what happens to it.
type Watch struct{ fd int }

func (w *World) Watch(p string) *Watch {
	var st unix.Stat_t
	if unix.Lstat(w.path(p), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return &Watch{-1}
	}
	fd, err := unix.Open(w.path(p), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return &Watch{-1}
	}
	return &Watch{fd}
}

// Observe is what the open file is like, or "closed".
func (o *Watch) Observe() string {
	if o.fd < 0 {
		return "closed"
	}
	var st unix.Stat_t
	if err := unix.Fstat(o.fd, &st); err != nil {
		return fmt.Sprint("fstat: ", err)
	}
	b := make([]byte, st.Size+1)
	n, err := preadAll(o.fd, b, 0)
	return fmt.Sprintf("%s; %d bytes read, sha256 %.8x, %v", statLine(&st), n, sha256.Sum256(b[:n]), err)
}

func (o *Watch) Close() {
	if o.fd >= 0 {
		unix.Close(o.fd)
	}
}

// Exact is all of a path's attributes but the time of access, for mounts of one volume must agree also on what two file
// systems need not.
func (w *World) Exact(p string) string {
	var st unix.Stat_t
	if err := unix.Lstat(w.path(p), &st); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("inode %d rdev %d %s size %d mtime %d.%09d ctime %d.%09d", st.Ino, st.Rdev, statLine(&st), st.Size,
		st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec)
}
