package main

import (
	"fmt"
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
