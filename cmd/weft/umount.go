package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/mountinfo"
)

func runUmount(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	force := fl.BoolP("force", "f", false, "unmount even if servers are dead or programs use the mount: what is not stable yet is lost")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	if err := umount(ctx, fl.Arg(0), umountConfig{force: *force}); err != nil {
		return mountErr(err)
	}
	if abs, err := cleanMountpoint(fl.Arg(0)); err == nil {
		dropFromTable(abs)
	}
	return nil
}

// umountConfig says how to unmount.
type umountConfig struct {
	force    bool // without the servers and whoever uses the mount
	lazy     bool // at once, and served until nobody uses it
	readOnly bool // remount it read-only if it is busy
	verbose  bool
}

// umount makes everything stable, unmounts, and waits for the serving process.
func umount(ctx context.Context, path string, how umountConfig) error {
	m, err := mountAt(path)
	if err != nil {
		return err
	}
	if _, err := topmost(m); err != nil {
		return err
	}
	say := func(what string) {
		if how.verbose {
			fmt.Printf("%s: %s (%s) %s\n", program.Name, filename.Quote(m.Mountpoint), filename.Quote(m.Source), what)
		}
	}
	if how.force {
		err := forceUmount(ctx, m)
		if err == nil {
			say("unmounted by force")
		}
		return err
	}
	// Learn who serves it before it goes.
	server := serverOf(ctx, m)
	if how.lazy {
		err := unmount(m.Mountpoint, unix.MNT_DETACH)
		if err == nil {
			say("detached")
		}
		return err
	}
	if server != 0 {
		if err := control(ctx, m, controlRequest{Op: "sync", Reachable: true}, &struct{}{}); err != nil {
			return fmt.Errorf("not everything could be made stable: %w (weft umount --force unmounts all the same)", err)
		}
	}
	err = unmount(m.Mountpoint, 0)
	switch {
	case errors.Is(err, unix.EBUSY) && how.readOnly:
		if err := remountReadOnly(ctx, m); err != nil {
			return err
		}
		say("is busy, and read-only now")
		return nil
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s: target is busy: %s (weft umount --force unmounts all the same)", filename.Quote(m.Mountpoint), users(m, false))
	case err != nil:
		return err
	}
	err = waitServer(ctx, m, server)
	if err == nil {
		say("unmounted")
	}
	return err
}

// waitServer is waitGone after an unmount here. A mount namespace that was made meanwhile, for a container or a service, has
// a copy of the mount, which is served on: that is said, and not waited for, as umount(8) does not.
func waitServer(ctx context.Context, m mountEntry, server int) error {
	var hidden []string
	for range 60 {
		soon, cancel := context.WithTimeout(ctx, time.Second)
		err := waitGone(soon, server)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
		var others []string
		if others, hidden = elsewhere(m); len(others) > 0 {
			fmt.Fprintf(os.Stderr, "weft: unmounted here, but served on for other mount namespaces, which have a copy: %s\n", strings.Join(others, ", "))
			return nil
		}
	}
	if len(hidden) > 0 {
		return fmt.Errorf("unmounted, but the serving process %d has not ended: another mount namespace may have a copy, "+
			"of which programs in a chroot are all that can be seen: %s", server, strings.Join(hidden, ", "))
	}
	return fmt.Errorf("unmounted, but the serving process %d has not ended", server)
}

// elsewhere names a process of each other mount namespace that has the mount, as far as /proc shows them, and one of each
// namespace of which that is not to be seen, as all of its processes are in a chroot: they see what is mounted there.
func elsewhere(m mountEntry) (found, hidden []string) {
	own, _ := os.Readlink("/proc/self/ns/mnt")
	seen := map[string]bool{own: true}
	inside := map[string]string{} // process in a chroot, by namespace
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		ns, err := os.Readlink(p + "/ns/mnt")
		if err != nil || seen[ns] {
			continue
		}
		list, err := mountinfo.Read(filepath.Base(p))
		if err != nil {
			continue // it ended meanwhile: another process of the namespace may tell
		}
		comm, _ := os.ReadFile(p + "/comm")
		name := fmt.Sprintf("%s (pid %s)", filename.Escape(strings.TrimSpace(string(comm))), filepath.Base(p))
		has := slices.ContainsFunc(list, func(o mountinfo.Mount) bool { return o.Dev == m.Dev })
		_, whole := mountinfo.At(list, "/")
		switch seen[ns] = has || whole; {
		case has:
			found = append(found, "that of "+name)
		case !whole:
			inside[ns] = name
		}
	}
	for ns, name := range inside {
		if !seen[ns] {
			hidden = append(hidden, name)
		}
	}
	slices.Sort(hidden)
	return found, hidden
}

// unmount takes the mount away; who may not do it alone asks fusermount3.
func unmount(mountpoint string, flags int) error {
	err := unix.Unmount(mountpoint, flags|unix.UMOUNT_NOFOLLOW)
	if !errors.Is(err, unix.EPERM) {
		if err != nil {
			err = fmt.Errorf("unmount %s: %w", filename.Quote(mountpoint), err)
		}
		return err
	}
	args := []string{"-u", "--", mountpoint}
	if flags&unix.MNT_DETACH != 0 {
		args = append([]string{"-z"}, args...)
	}
	if out, err := exec.Command("fusermount3", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("unmount %s: %s", filename.Quote(mountpoint), strings.TrimSpace(string(out)))
	}
	return nil
}

// forceUmount ends m whatever state it is in: the kernel fails everything that waits for the serving process, the mount
// is detached, and the process ended.
func forceUmount(ctx context.Context, m mountEntry) error {
	release, err := m.pin()
	if err != nil {
		return err
	}
	defer release()
	pid := serverOf(ctx, m)
	if err := os.WriteFile(m.control("abort"), []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(os.Stderr, "weft: %v: going on without\n", err)
	}
	if err := unmount(m.Mountpoint, unix.MNT_DETACH); err != nil {
		return err
	}
	release()
	if pid == 0 {
		return nil
	}
	unix.Kill(pid, unix.SIGTERM)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if waitGone(ctx, pid) != nil {
		unix.Kill(pid, unix.SIGKILL)
	}
	return nil
}

// waitGone returns when the process has ended, or with the error of ctx; pid 0 is nobody.
func waitGone(ctx context.Context, pid int) error {
	if pid == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // it is gone
	}
	defer unix.Close(fd)
	for ctx.Err() == nil {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(poll, 100); n > 0 || err != nil && err != unix.EINTR {
			return nil
		}
	}
	return ctx.Err()
}

// users names processes that hold a mount busy, or that have files of it open for writing, as far as /proc shows them without
// touching the mount.
func users(m mountEntry, writing bool) string {
	var found []string
	procs, _ := os.ReadDir("/proc")
	for _, p := range procs {
		if p.Name()[0] < '0' || p.Name()[0] > '9' || len(found) == 5 {
			continue
		}
		links := []string{"cwd", "root", "exe"}
		if writing {
			links = nil
		}
		fds, _ := os.ReadDir("/proc/" + p.Name() + "/fd")
		for _, fd := range fds {
			if !writing || writes("/proc/"+p.Name()+"/fdinfo/"+fd.Name()) {
				links = append(links, "fd/"+fd.Name())
			}
		}
		for _, l := range links {
			target, err := os.Readlink("/proc/" + p.Name() + "/" + l)
			if err == nil && (target == m.Mountpoint || strings.HasPrefix(target, m.Mountpoint+"/")) {
				comm, _ := os.ReadFile("/proc/" + p.Name() + "/comm")
				found = append(found, fmt.Sprintf("%s (pid %s)", filename.Escape(strings.TrimSpace(string(comm))), p.Name()))
				break
			}
		}
	}
	if len(found) == 0 {
		return "some program uses it"
	}
	return "used by " + strings.Join(found, ", ")
}

// writes reports whether a file of /proc/PID/fdinfo tells of a descriptor to write by.
func writes(fdinfo string) bool {
	b, err := os.ReadFile(fdinfo)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if octal, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(octal), 8, 64)
			return err == nil && flags&unix.O_ACCMODE != unix.O_RDONLY
		}
	}
	return false
}
