package faults

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// leaveWithin is for how long a data server that is dead may keep a mount from ending.
const leaveWithin = 15 * time.Second

// TestUnmountDead kills the data server that has what was written last. Then unmounting says so in time, and SIGTERM ends
// the serving process. What has another copy is stable.
func TestUnmountDead(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true, Remote: true})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	data := bytes.Repeat([]byte("weft"), 1<<20)
	write := func(dir string, args ...string) string {
		t.Helper()
		path := filepath.Join(m.Dir, dir, "f")
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, append([]string{"layout", "set", filepath.Dir(path)}, args...)...)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("double", "--mirrors", "2")
	single := write("single", "--stripe-count", "1")
	d := v.ServerAt(harness.LayoutOf(t, single).Mirrors[0].Servers[0].Address)
	d.Kill()

	began := time.Now()
	out, err := exec.Command(harness.Bin(t, "weft"), "umount", m.Dir).CombinedOutput()
	took := time.Since(began)
	t.Logf("weft umount: %v, %v: %s", took.Round(time.Millisecond), err, bytes.TrimSpace(out))
	if err == nil || !strings.Contains(string(out), "cannot be reached") || took > leaveWithin {
		t.Errorf("weft umount: %v after %v: %s", err, took, out)
	}
	if !harness.Mounted(m.Dir) {
		t.Error("it is not mounted any more")
	}

	began = time.Now()
	m.Signal(syscall.SIGTERM)
	harness.Await(t, "the serving process ends", func() bool { return !m.Serving() })
	if took := time.Since(began); took > leaveWithin {
		t.Errorf("the serving process ended after %v", took)
	} else {
		t.Logf("SIGTERM: %v", took.Round(time.Millisecond))
	}
	if log := m.Log(); !strings.Contains(log, "unmounted too early") {
		t.Errorf("the log does not say that something is lost:\n%s", log)
	}
	m.Abort()

	m = v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	if got, err := os.ReadFile(filepath.Join(m.Dir, "double", "f")); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the file with another copy: %d bytes, %v", len(got), err)
	}
	d.Start()
	m.AwaitCopies()
	m.Unmount()
	v.Stop()
	v.Fsck()
}
