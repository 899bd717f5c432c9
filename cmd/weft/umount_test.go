package main

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// hungMount is a mount whose serving process answers nothing. connected tells what that process sees of the mount.
func hungMount(t *testing.T) (m mountEntry, connected func() bool) {
	t.Helper()
	dir := t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("missing: /dev/fuse: ", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	err = unix.Mount("hung", dir, fsType, 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd))
	if err != nil {
		t.Skip("missing: the right to mount: ", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	if m, err = mountAt(dir); err != nil {
		t.Fatal(err)
	}
	return m, func() bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, 0); err != nil {
			t.Fatal(err)
		}
		return poll[0].Revents&unix.POLLERR == 0
	}
}

func TestTopmost(t *testing.T) {
	for at, want := range map[string]string{
		"/proc":      "another file system is mounted over the one on /proc (proc ",
		"/proc/none": "/proc/none was unmounted meanwhile",
	} {
		if _, err := topmost(mountEntry{Mountpoint: at}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A mount that has the number of one that is gone stays as it is when that one is unmounted by force.
func TestForceUmountOfAnother(t *testing.T) {
	m, connected := hungMount(t)
	other, otherConnected := hungMount(t)
	gone := mountEntry{Dev: m.Dev, Mountpoint: other.Mountpoint, Source: m.Source}
	check := func(what string) {
		t.Helper()
		if err := forceUmount(t.Context(), gone); err == nil {
			t.Errorf("%s: no error", what)
		}
		if !connected() {
			t.Fatalf("%s: a mount has lost its connection that was not to be unmounted", what)
		}
	}
	check("another mount is on its mount point")
	if !otherConnected() {
		t.Error("that one has lost its connection")
	}
	if err := unix.Unmount(other.Mountpoint, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	check("nothing is on its mount point")

	if err := forceUmount(t.Context(), m); err != nil || connected() {
		t.Errorf("a mount that is there: %v, connected %v", err, connected())
	}
	if _, err := mountAt(m.Mountpoint); err == nil {
		t.Error("it is still there")
	}
}

// TestElsewhere: a copy in another mount namespace is found though one of its processes is in a chroot, and of a
// namespace with no other processes it is known that nothing is known.
func TestElsewhere(t *testing.T) {
	m, _ := hungMount(t)
	// start runs a script in a mount namespace of its own. It returns its process, and the one in a chroot that it says.
	start := func(script string) (outer, inner string) {
		t.Helper()
		cmd := exec.Command("unshare", "--mount", "sh", "-c", script)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
			cmd.Wait()
		})
		if _, err := fmt.Fscan(out, &inner); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(cmd.Process.Pid), inner
	}
	has := func(list []string, pid string) bool {
		return strings.Contains(strings.Join(list, " "), "(pid "+pid+")")
	}
	_, inner := start(`exec chroot /usr /bin/sh -c 'echo $$; exec sleep 1000'`)
	if found, hidden := elsewhere(m); has(found, inner) || !has(hidden, inner) {
		t.Errorf("only process %s, in a chroot: found %q, hidden %q", inner, found, hidden)
	}
	outer, inner := start(`chroot /usr /bin/sh -c 'echo $$; exec sleep 1000' & exec sleep 1000`)
	if found, hidden := elsewhere(m); !has(found, outer) || has(hidden, inner) {
		t.Errorf("process %s, in a chroot, and %s: found %q, hidden %q", inner, outer, found, hidden)
	}
}
