package main

import (
	"bufio"
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// What a mount in the foreground does for whoever runs it in a container: it says when it can be used, fits the memory that it may have, and as
// process 1 is there for processes that have lost theirs.

// announce says that the mount can be used, and returns what takes that back.
func (cfg mountConfig) announce() (end func(), err error) {
	end = func() {}
	if cfg.readyFile != "" {
		if err := os.WriteFile(cfg.readyFile, []byte(cfg.mountpoint+"\n"), 0o644); err != nil {
			return nil, fmt.Errorf("--ready-file: %w", err)
		}
		end = func() { os.Remove(cfg.readyFile) }
	}
	if cfg.readyFD > 0 {
		unix.CloseOnExec(cfg.readyFD)
		f := os.NewFile(uintptr(cfg.readyFD), "--ready-fd")
		_, err := fmt.Fprintln(f, "ready")
		f.Close()
		if err != nil {
			end()
			return nil, fmt.Errorf("--ready-fd %d: %w", cfg.readyFD, err)
		}
	}
	return end, nil
}

// reap is for process 1, to which the kernel gives processes whose parent has ended: it takes note of their end. It runs as long as the process does. As root this
// process has no children of its own.
func reap() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	for range ended {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if pid <= 0 && err != unix.EINTR {
				break
			}
		}
	}
}

// memoryLimit is how much memory the process may have by its control groups (cgroups(7)), in bytes; 0 if they do not say. root is where proc and sys are.
func memoryLimit(root string) int64 {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0
	}
	least := int64(0)
	look := func(mount, dir, name string) {
		// In a container the group's path may be that outside, and the group itself what is mounted.
		for ; ; dir = path.Dir(dir) {
			limit, err := os.ReadFile(filepath.Join(root, mount, dir, name))
			if err == nil {
				n, err := strconv.ParseInt(string(bytes.TrimSpace(limit)), 10, 64) // or "max"
				if err == nil && n > 0 && n < 1<<60 && (least == 0 || n < least) {
					least = n
				}
			}
			if dir == "/" {
				return
			}
		}
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		parts := strings.SplitN(lines.Text(), ":", 3)
		if len(parts) != 3 || !path.IsAbs(parts[2]) {
			continue
		}
		switch dir := path.Clean(parts[2]); {
		case parts[1] == "":
			look("sys/fs/cgroup", dir, "memory.max")
			look("sys/fs/cgroup/unified", dir, "memory.max")
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			look("sys/fs/cgroup/memory", dir, "memory.limit_in_bytes")
		}
	}
	return least
}

const (
	// roomyMemory is how much memory is enough for the defaults.
	roomyMemory = 2 << 30
	leastHeap   = 48 << 20
)

// fit makes what takes memory smaller than its default, as far as it was not given, so that a mount fits the memory that it may have; 0 is no limit. It returns from
// where on the collector is to work harder, in bytes.
func (o *mountOptions) fit(limit int64, given []string) (heap int64) {
	if limit == 0 || limit >= roomyMemory {
		return heapLimit
	}
	was := func(name string) bool {
		return slices.ContainsFunc(given, func(word string) bool { return strings.HasPrefix(word, name+"=") })
	}
	if !was("retain") {
		o.retain = min(o.retain, max(limit/8, 16<<20))
	}
	if !was("readahead") { // of which there may be 16 times as much
		o.ahead = min(o.ahead, max(limit/256>>16<<16, 64<<10))
	}
	if !was("max_write") && limit < roomyMemory/2 {
		o.maxWrite = 1 << 20
	}
	heap = min(heapLimit, max(limit/4, leastHeap))
	ibytes := func(n int64) string { return humanize.IBytes(uint64(n)) }
	slog.Info("little memory may be used", "limit", ibytes(limit), "retain", ibytes(o.retain), "readahead", ibytes(o.ahead), "heap", ibytes(heap))
	return heap
}
