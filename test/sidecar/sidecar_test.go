package sidecar

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// start runs weft mount as process 1 of a new process namespace, with its mount visible from here. It returns the process as it is seen here, when it has said on
// --ready-fd that the mount can be used.
func start(t *testing.T, v *harness.Volume, dir, readyFile string, options string) (cmd *exec.Cmd, pid int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command("unshare", "--pid", "--fork", "--kill-child", harness.Bin(t, "weft"), "mount", "-f", "--ready-fd", "3", "--ready-file", readyFile, "-o", options, v.Addr+":/", dir)
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stderr = log
	err = cmd.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		syscall.Unmount(dir, syscall.MNT_DETACH)
		if t.Failed() {
			said, _ := os.ReadFile(log.Name())
			t.Logf("log:\n%s", said)
		}
	})
	said, err := bufio.NewReader(r).ReadString('\n')
	if err != nil || said != "ready\n" {
		t.Fatalf("--ready-fd: %q, %v", said, err)
	}
	if _, err := os.Stat(readyFile); err != nil {
		t.Fatal(err)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(children), &pid); err != nil {
		t.Fatalf("children of unshare: %q", children)
	}
	return cmd, pid
}

// TestProcessOne says when it is ready, reaps, and ends in order at SIGTERM.
func TestProcessOne(t *testing.T) {
	harness.Need(t, "unshare", "nsenter")
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	dir, ready := harness.Dir(t), filepath.Join(t.TempDir(), "ready")
	cmd, pid := start(t, v, dir, ready, "rw")
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	// Orphans of the namespace are its children.
	harness.Run(t, "", "nsenter", "-t", fmt.Sprint(pid), "-p", "sh", "-c", "for i in 1 2 3; do (sleep 0.2 &); done")
	children := func() string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	harness.Await(t, "no orphans are left", func() bool { return children() == "" })
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	if harness.Mounted(dir) {
		t.Error("still mounted")
	}
	if _, err := os.Stat(ready); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the readiness file: %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(v.Mount().Dir, "file")); err != nil || string(text) != "text" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestFailure says nothing on --ready-fd, and has mount(8)'s exit code.
func TestFailure(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ready := filepath.Join(t.TempDir(), "ready")
	cmd := exec.Command(harness.Bin(t, "weft"), "mount", "-f", "--ready-fd", "3", "--ready-file", ready, harness.FreeAddr(t)+":/", harness.Dir(t))
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Run()
	w.Close()
	if cmd.ProcessState.ExitCode() != 32 {
		t.Errorf("exit: %v", err)
	}
	if said, err := bufio.NewReader(r).ReadString('\n'); said != "" {
		t.Errorf("--ready-fd: %q, %v", said, err)
	}
	if _, err := os.Stat(ready); err == nil {
		t.Error("the readiness file is there")
	}
}

// TestMemory has a mount in a small control group, and much to write: it is not killed for what it takes.
func TestMemory(t *testing.T) {
	harness.Need(t, "unshare")
	group, procs, limit := "/sys/fs/cgroup/weft-test", "cgroup.procs", "memory.max"
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err == nil { // version 1
		group, limit = "/sys/fs/cgroup/memory/weft-test", "memory.limit_in_bytes"
	} else if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+memory"), 0); err != nil {
		t.Skipf("missing: a control group for memory: %v", err)
	}
	group = fmt.Sprint(group, os.Getpid())
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skipf("missing: a control group for memory: %v", err)
	}
	t.Cleanup(func() { harness.Await(t, "the control group is empty", func() bool { return os.Remove(group) == nil }) })
	const size = 256 << 20
	if err := os.WriteFile(filepath.Join(group, limit), []byte(fmt.Sprint(size)), 0); err != nil {
		t.Fatal(err)
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	// The shell is in the group, and becomes the mount.
	m := v.MountUnder([]string{"sh", "-c", "echo $$ >" + filepath.Join(group, procs) + ` && exec "$@"`, "sh"})
	if !strings.Contains(m.Log(), "little memory may be used") {
		t.Errorf("log: %s", m.Log())
	}
	done := make(chan error)
	const writers = 16
	for i := range writers {
		go func() { // ends with its file
			f, err := os.Create(filepath.Join(m.Dir, fmt.Sprint(i)))
			for n := 0; err == nil && n < 32; n++ {
				_, err = f.Write(make([]byte, 1<<20))
			}
			done <- errors.Join(err, f.Close())
		}()
	}
	for range writers {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for i := range writers {
		if b, err := os.ReadFile(filepath.Join(m.Dir, fmt.Sprint(i))); err != nil || len(b) != 32<<20 {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	}
	if !m.Serving() {
		t.Error("the mount was killed")
	}
}
