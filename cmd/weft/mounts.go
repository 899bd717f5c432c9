package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/mountinfo"
)

// fsType is how the kernel names weft mounts.
const fsType = "fuse.weft"

// mountEntry is a weft mount of this mount namespace.
type mountEntry struct {
	Dev        uint64 // st_dev of its files
	Owner      int    // user that made it
	Mountpoint string
	Source     string
}

// minor is the number of its FUSE connection in /sys/fs/fuse/connections.
func (m mountEntry) minor() uint32 { return unix.Minor(m.Dev) }

// fuseConnections is where the kernel shows FUSE connections. systemd mounts it.
const fuseConnections = "/sys/fs/fuse/connections"

// control is a file of the kernel about the mount's FUSE connection. Where nobody has mounted these yet, root does it here.
func (m mountEntry) control(name string) string {
	if list, err := os.ReadDir(fuseConnections); err == nil && len(list) == 0 { // or it may not be read
		unix.Mount("fusectl", fuseConnections, "fusectl", 0, "")
	}
	return filepath.Join(fuseConnections, strconv.Itoa(int(m.minor())), name)
}

// pin keeps the mount there until release is called, once or more often, and fails if it is not there any more. The
// kernel gives the number of a FUSE connection that has ended to the next mount, so what is done by a number may hit
// a healthy mount otherwise: its programs would be told ENOTCONN. The serving process is not asked for anything.
func (m mountEntry) pin() (release func(), err error) {
	fd, err := unix.Open(m.Mountpoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filename.Quote(m.Mountpoint), err)
	}
	release = sync.OnceFunc(func() { unix.Close(fd) })
	dev, err := mountedAs(fd)
	if err == nil && dev != m.Dev {
		err = fmt.Errorf("%s was unmounted meanwhile", filename.Quote(m.Mountpoint))
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// mountedAs is the device number of the mount that a descriptor is on, or 0 if it was unmounted. fstat(2) would ask the
// serving process.
func mountedAs(fd int) (dev uint64, err error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(info), "mnt_id:")
	id, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	list, err := mountinfo.Read("self")
	if i := slices.IndexFunc(list, func(m mountinfo.Mount) bool { return m.ID == id }); i >= 0 {
		dev = list[i].Dev
	}
	return dev, err
}

// weftMounts lists the weft mounts in mount order.
func weftMounts() ([]mountEntry, error) {
	all, err := mountinfo.Read("self")
	if err != nil {
		return nil, err
	}
	return pickMounts(all)
}

// pickMounts returns those that are weft's.
func pickMounts(all []mountinfo.Mount) (list []mountEntry, err error) {
	for _, m := range all {
		if m.Type != fsType {
			continue
		}
		owner := -1
		for opt := range strings.SplitSeq(m.Super, ",") {
			if id, ok := strings.CutPrefix(opt, "user_id="); ok {
				if owner, err = strconv.Atoi(id); err != nil {
					return nil, fmt.Errorf("/proc/self/mountinfo: bad option %q", opt)
				}
			}
		}
		list = append(list, mountEntry{m.Dev, owner, m.Mountpoint, m.Source})
	}
	return list, nil
}

// mountAt finds the topmost weft mount at path without touching the mount itself, which may hang.
func mountAt(path string) (mountEntry, error) {
	abs, err := cleanMountpoint(path)
	if err != nil {
		return mountEntry{}, err
	}
	list, err := weftMounts()
	if err != nil {
		return mountEntry{}, err
	}
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].Mountpoint == abs {
			return list[i], nil
		}
	}
	return mountEntry{}, fmt.Errorf("%s is not a weft mount; `weft status` lists them", filename.Quote(path))
}

// topmost returns the mount's own options as the kernel shows them, or an error if another mount lies over it, which whatever is done by
// the mount point's name would befall.
func topmost(m mountEntry) (options string, err error) {
	all, err := mountinfo.Read("self")
	if err != nil {
		return "", err
	}
	top, found := mountinfo.At(all, m.Mountpoint)
	switch {
	case !found:
		return "", fmt.Errorf("%s was unmounted meanwhile", filename.Quote(m.Mountpoint))
	case top.Dev != m.Dev:
		return "", fmt.Errorf("another file system is mounted over the one on %s (%s %s %s): unmount that first",
			filename.Quote(m.Mountpoint), top.Type, filename.Quote(top.Source), top.Super)
	}
	return top.Options, nil
}

// mountOf finds the mount that serves the file with the given device number.
func mountOf(dev uint64) (mountEntry, error) {
	list, err := weftMounts()
	if err != nil {
		return mountEntry{}, err
	}
	for _, m := range list {
		if m.Dev == dev {
			return m, nil
		}
	}
	return mountEntry{}, fmt.Errorf("not on a weft mount")
}

// cleanMountpoint makes path absolute and free of symbolic links, as the kernel shows a mount point. Its last element may
// be a mount that does not answer: readlink(2) does not ask it, as stat(2) would.
func cleanMountpoint(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for range maxLinks {
		dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
		if err != nil {
			return "", err
		}
		abs = filepath.Join(dir, filepath.Base(abs))
		target, err := os.Readlink(abs)
		if err != nil {
			return abs, nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		abs = target
	}
	return "", fmt.Errorf("%s: %w", filename.Quote(path), unix.ELOOP)
}

// maxLinks is how many symbolic links a path may lead through, as in the kernel.
const maxLinks = 40
