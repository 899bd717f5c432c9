package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, path, text string, sync bool) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if sync {
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
}

// What was synced survives a power cut, and what was not is lost.
func TestDiskCut(t *testing.T) {
	d := NewDisk(t, 32<<20)
	kept, lost := filepath.Join(d.Dir, "kept"), filepath.Join(d.Dir, "lost")
	write(t, kept, "synced", true)
	write(t, lost, "not synced", false)
	d.Cut()
	if err := os.WriteFile(filepath.Join(d.Dir, "new"), nil, 0o600); err == nil {
		t.Error("a file is made while the power is off")
	}
	d.Remount()
	if b, err := os.ReadFile(kept); err != nil || string(b) != "synced" {
		t.Errorf("what was synced: %q, %v", b, err)
	}
	if b, _ := os.ReadFile(lost); len(b) > 0 {
		t.Errorf("what was not synced: %q", b)
	}
	write(t, lost, "not synced", false)
	d.Remount()
	if b, err := os.ReadFile(lost); string(b) != "not synced" {
		t.Errorf("after unmounting: %q, %v", b, err)
	}
}

// A mount namespace that somebody has made keeps the file system that was cut mounted.
func TestDiskMountedElsewhere(t *testing.T) {
	d := NewDisk(t, 32<<20)
	other := exec.Command("unshare", "--mount", "sh", "-c", "echo ready; read line")
	hold, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ready, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		hold.Close()
		other.Wait()
	}()
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(d.Dir, "kept")
	for i := range 3 {
		write(t, kept, fmt.Sprint(i), true)
		d.Cut()
		d.Remount()
		if b, err := os.ReadFile(kept); err != nil || string(b) != fmt.Sprint(i) {
			t.Fatalf("cut %d: %q, %v", i, b, err)
		}
	}
}

func TestDiskFailures(t *testing.T) {
	d := NewDisk(t, 32<<20)
	old := filepath.Join(d.Dir, "old")
	write(t, old, "before", true)
	undo := d.FailWrites()
	f, err := os.Create(filepath.Join(d.Dir, "new"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err == nil {
		t.Error("new bytes were synced on a disk that fails")
	}
	if g, err := os.OpenFile(old, os.O_WRONLY|os.O_SYNC, 0); err != nil {
		t.Error(err)
	} else {
		if _, err := g.WriteAt([]byte("BEFORE"), 0); err != nil {
			t.Errorf("overwriting: %v", err)
		}
		g.Close()
	}
	undo()
	if _, err := f.WriteAt(bytes.Repeat([]byte("y"), 1<<20), 0); err != nil {
		t.Error(err)
	}
	if err := f.Sync(); err != nil {
		t.Errorf("a disk that works again: %v", err)
	}
	d.ReadOnly()
	if _, err := f.WriteAt([]byte("z"), 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to what is read-only: %v", err)
	}
	f.Close()
	d.Remount()
	write(t, old, "after", true)
}

func TestDiskFreeze(t *testing.T) {
	d := NewDisk(t, 32<<20)
	d.Freeze()
	var thawed atomic.Bool
	var tid atomic.Int64
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // ends with the goroutine
		tid.Store(int64(unix.Gettid()))
		err := os.Mkdir(filepath.Join(d.Dir, "dir"), 0o755)
		if !thawed.Load() {
			err = errors.New("a directory was made on a frozen file system")
		}
		done <- err
	}()
	Await(t, "a thread that waits for the disk", func() bool {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", tid.Load()))
		_, state, _ := bytes.Cut(stat, []byte(") "))
		return len(done) > 0 || bytes.HasPrefix(state, []byte("D"))
	})
	thawed.Store(true)
	d.Thaw()
	if err := <-done; err != nil {
		t.Error(err)
	}
	d.Freeze() // and the end of the test thaws it
}
