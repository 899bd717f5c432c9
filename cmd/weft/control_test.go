package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestOutside has users of a host, of unshare -Ur, and of a rootless container.
func TestOutside(t *testing.T) {
	for uidMap, want := range map[string][3]int{ // users 0, 7 and 70000
		"":                                   {0, 7, 70000},
		"         0          0 4294967295\n": {0, 7, 70000},
		"         0       1000          1\n": {1000, 7, 70000},
		"         0       1000          1\n         1     100000      65536\n": {1000, 100006, 70000},
	} {
		for i, uid := range []int{0, 7, 70000} {
			if got := outside(uidMap, uid); got != want[i] {
				t.Errorf("user %d of %q is %d outside, want %d", uid, uidMap, got, want[i])
			}
		}
	}
}

func TestControl(t *testing.T) {
	if hostRoot() && os.MkdirAll("/run/weft", 0o700) != nil {
		t.Skip("missing: a /run that can be written")
	}
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	// No kernel has this many FUSE mounts.
	minor := uint32(1<<19 + os.Getpid()%(1<<19))
	m := mountEntry{Dev: unix.Mkdev(0, minor), Owner: os.Getuid(), Mountpoint: "/mnt/x"}
	if pid := serverOf(t.Context(), m); pid != 0 {
		t.Fatalf("process %d answers before there is a socket", pid)
	}
	if err := control(t.Context(), m, controlRequest{Op: "sync"}, nil); !errors.Is(err, errNoServer) {
		t.Fatalf("no socket: %v", err)
	}
	l, err := listenControl(minor)
	if err != nil {
		t.Fatal(err)
	}
	path := l.Addr().String()
	t.Cleanup(func() { l.Close() })
	cancelled := make(chan struct{})
	served := make(chan struct{})
	go func() { // ends with the socket
		serveControl(context.Background(), l, func(ctx context.Context, req controlRequest, far *news) (any, error) {
			switch req.Op {
			case "layout":
				return req.File + 1, nil
			case "wait":
				<-ctx.Done()
				close(cancelled)
				return nil, ctx.Err()
			case "long":
				far.bytes.Add(5)
				<-ctx.Done()
				return nil, fmt.Errorf("in order again: %w", unix.EBUSY)
			case "status":
				<-ctx.Done()
				return mountStatus{PID: 1}, nil
			}
			return nil, fmt.Errorf("no %s here", req.Op)
		})
		close(served)
	}()
	if pid := serverOf(t.Context(), m); pid != os.Getpid() {
		t.Errorf("served by %d, want %d", pid, os.Getpid())
	}
	var got int
	if err := control(t.Context(), m, controlRequest{Op: "layout", File: 41}, &got); err != nil || got != 42 {
		t.Errorf("%d, %v", got, err)
	}
	if err := control(t.Context(), m, controlRequest{Op: "nonsense"}, nil); err == nil || !strings.Contains(err.Error(), "/mnt/x: no nonsense here") {
		t.Errorf("an error of the other side: %v", err)
	}
	// A caller that gives up ends its request.
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() { asked <- control(ctx, m, controlRequest{Op: "wait"}, nil) }()
	cancel()
	if err := <-asked; !errors.Is(err, context.Canceled) && !errors.Is(err, errNoServer) {
		t.Errorf("given up: %v", err)
	}
	// One who is patient hears how far it is, and what became of it.
	ctx, cancel = context.WithCancel(t.Context())
	err = controlPatiently(ctx, m, controlRequest{Op: "long"}, nil, func(r *controlReply) {
		if r.Progress != 5 {
			t.Errorf("%d bytes more", r.Progress)
		}
		cancel()
	})
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "in order again") {
		t.Errorf("at the end: %v", err)
	}
	// A process that does not say how its mount is keeps no command waiting for ever.
	long := answerTime
	answerTime = 10 * time.Millisecond
	st, err := m.status(t.Context())
	answerTime = long
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errNoServer) || st.PID != 0 {
		t.Errorf("without an answer: process %d, %v", st.PID, err)
	}
	// What belongs to another user is not asked.
	other := m
	other.Owner++
	if pid := serverOf(t.Context(), other); pid != 0 {
		t.Errorf("asked process %d for a mount of another user", pid)
	}
	// The kernel has given the number to another mount before the process of this one has ended.
	next, err := listenControl(minor)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	<-served
	if pid := serverOf(t.Context(), m); pid != os.Getpid() {
		t.Error("the end of a mount takes away the socket of the next one with its number")
	}
	next.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stays behind: %v", err)
	}
}

// TestPrivateDir refuses a directory that somebody else may have prepared.
func TestPrivateDir(t *testing.T) {
	dir := t.TempDir() + "/weft"
	if err := os.Symlink(t.TempDir(), dir); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(dir); err == nil {
		t.Error("a symbolic link is taken")
	}
	if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(dir); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if os.Getuid() == 0 {
		if err := os.Chown(dir, 1, 1); err != nil {
			t.Fatal(err)
		}
		if err := makePrivate(dir); err == nil {
			t.Error("another user's directory is taken")
		}
	}
}
