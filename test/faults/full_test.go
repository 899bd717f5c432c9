package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// catalogOf is what `weft status` says of the room of a mount's catalog.
func catalogOf(t *testing.T, m *harness.Mount) (state string, reserve int64) {
	t.Helper()
	var list []struct {
		Service struct {
			Catalog struct {
				State   string `json:"state"`
				Reserve int64  `json:"reserve_bytes"`
			} `json:"catalog"`
		} `json:"service"`
	}
	if err := json.Unmarshal([]byte(harness.Weft(t, "status", m.Dir, "--json")), &list); err != nil || len(list) != 1 {
		t.Fatalf("%d mounts, %v", len(list), err)
	}
	return list[0].Service.Catalog.State, list[0].Service.Catalog.Reserve
}

// eat makes another program take what is free of a disk, but for so many bytes.
func eat(t *testing.T, disk string, leave int64) {
	t.Helper()
	var st unix.Statfs_t
	f, err := os.OpenFile(filepath.Join(disk, "other"), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err := errors.Join(err, unix.Statfs(disk, &st)); err != nil {
		t.Fatal(err)
	}
	if n := int64(st.Bavail)*st.Bsize - leave; n > 0 {
		if err := unix.Fallocate(int(f.Fd()), 0, size, n); err != nil && err != unix.ENOSPC { // weftd may have taken it meanwhile
			t.Fatal(err)
		}
	}
}

// TestCatalogDiskFull has another program fill the disk of the catalog. Nothing new can be made then, all else goes on,
// also when the service was stopped or killed and started again, and with room everything is as before.
func TestCatalogDiskFull(t *testing.T) {
	if os.Getenv(harness.ClusterEnv) != "" {
		t.Skip("the catalog of a cluster is on no disk of the service")
	}
	disk := harness.NewDisk(t, 64<<20)
	v := harness.NewVolume(t, harness.Options{Disk: disk, Apart: true, DataServers: 1})
	m := v.Mount()
	in := func(format string, args ...any) string { return filepath.Join(m.Dir, fmt.Sprintf(format, args...)) }
	if err := errors.Join(
		os.WriteFile(in("keep"), []byte("old"), 0o644), unix.Mknod(in("empty"), unix.S_IFREG|0o644, 0),
		os.Mkdir(in("dir"), 0o755), os.WriteFile(in("dir/f"), []byte("f"), 0o644),
	); err != nil {
		t.Fatal(err)
	}
	open, err := os.OpenFile(in("open"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if _, err := open.WriteString("written before"); err != nil {
		t.Fatal(err)
	}
	if state, reserve := catalogOf(t, m); state != "ok" || reserve != 4<<20 {
		t.Errorf("at first the catalog is %s, with a reserve of %d bytes", state, reserve)
	}
	eat(t, disk.Dir, 6<<20)
	harness.Await(t, "a warning", func() bool { state, _ := catalogOf(t, m); return state == "low" })
	pid := v.Pid()
	made := 0
	fill := func() {
		t.Helper()
		eat(t, disk.Dir, 100<<10)
		for ; ; made++ {
			f, err := os.OpenFile(in("x%d", made), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
			if errors.Is(err, syscall.ENOSPC) {
				return
			}
			if err != nil || made > 1_000_000 {
				t.Fatalf("file %d: %v", made, err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	fill()
	for what, err := range map[string]error{
		"mkdir":    os.Mkdir(in("newdir"), 0o755),
		"symlink":  os.Symlink("keep", in("symlink")),
		"link":     os.Link(in("keep"), in("link")),
		"setxattr": unix.Setxattr(in("keep"), "user.new", []byte("1"), 0),
		"write":    os.WriteFile(in("empty"), []byte("the first bytes of a file"), 0o644),
	} {
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: %v", what, err)
		}
	}
	removed := 0
	goesOn := func() {
		t.Helper()
		if state, _ := catalogOf(t, m); state != "full" {
			t.Errorf("the catalog is %s", state)
		}
		if text, err := os.ReadFile(in("keep")); err != nil || string(text) != "old" {
			t.Errorf("%q, %v", text, err)
		}
		if list, err := os.ReadDir(m.Dir); err != nil || len(list) != made-removed+4 {
			t.Errorf("%d names, %v; %d were made, %d removed", len(list), err, made+4, removed)
		}
		_, err := open.WriteAt([]byte("WRITTEN"), 0)
		lock := unix.Flock_t{Type: unix.F_WRLCK}
		err = errors.Join(err, open.Sync(), open.Truncate(7), unix.FcntlFlock(open.Fd(), unix.F_SETLK, &lock),
			os.Chmod(in("keep"), 0o600), os.Rename(in("keep"), in("kept")), os.Rename(in("kept"), in("keep")))
		if err != nil {
			t.Error(err)
		}
		text := make([]byte, 20)
		if n, err := open.ReadAt(text, 0); string(text[:n]) != "WRITTEN" || err != io.EOF {
			t.Errorf("%q, %v", text[:n], err)
		}
	}
	goesOn()
	out, err := exec.Command(harness.Bin(t, "weft"), "doctor", m.Dir).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "nothing new can be made in the volume") {
		t.Errorf("doctor: %v, %s", err, out)
	}
	if v.Pid() != pid {
		t.Error("the service was restarted")
	}
	for _, end := range []func(){v.Stop, v.Kill} {
		for range 20 {
			if err := os.Remove(in("x%d", removed)); err != nil {
				t.Fatal(err)
			}
			removed++
		}
		end()
		eat(t, disk.Dir, 0)
		v.Start()
		fill() // the catalog has removed logs
		goesOn()
	}
	if err := errors.Join(os.Remove(in("dir/f")), os.Remove(in("dir"))); err != nil {
		t.Error(err)
	}
	other := v.Mount()
	if text, err := os.ReadFile(filepath.Join(other.Dir, "keep")); err != nil || string(text) != "old" {
		t.Errorf("another mount: %q, %v", text, err)
	}
	if log := v.Log(); strings.Count(log, "\n") > 60 || !strings.Contains(log, "its disk is full") {
		t.Errorf("the log has %d lines:\n%s", strings.Count(log, "\n"), log)
	}
	if err := os.Remove(filepath.Join(disk.Dir, "other")); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "a new file", func() bool {
		err := os.WriteFile(in("new"), []byte("new"), 0o644)
		if err != nil && !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		return err == nil
	})
	if text, err := os.ReadFile(filepath.Join(other.Dir, "new")); err != nil || string(text) != "new" {
		t.Errorf("%q, %v", text, err)
	}
	open.Close()
	other.Unmount()
	m.Unmount()
	v.Stop()
	v.Fsck()
}
