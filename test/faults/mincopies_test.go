package faults

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// TestMinCopies makes files with two copies while one of two data servers is away. They are made at once with one copy,
// over a crash of the metadata service, and get the other copy when the data server is back. Where two copies are
// wanted at least a new file waits, and so does an fsync of an old one.
func TestMinCopies(t *testing.T) {
	const files = 40
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 2, Apart: true, Room: 256 << 20})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	strict := filepath.Join(m.Dir, "strict")
	if err := os.Mkdir(strict, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-count", "2", "--stripe-unit", "64KiB", "--mirrors", "2")
	harness.Weft(t, "layout", "set", strict, "--mirrors", "2", "--min-copies", "2")
	type status struct {
		Service struct {
			Stale  int64 `json:"stale_files"`
			NoRoom int64 `json:"files_without_server"`
		}
		Devices []struct {
			Address   string
			Reachable bool
			Waiting   int64 `json:"waiting_files"`
		}
	}
	look := func() status {
		t.Helper()
		var st []status
		if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
			t.Fatal(err)
		}
		return st[0]
	}
	path := func(i int) string { return filepath.Join(m.Dir, fmt.Sprint("file-", i)) }
	check := func(n int) {
		t.Helper()
		for i := range n {
			// dd reads from the data servers.
			cmd := fmt.Sprintf(`test "$(dd if=%s iflag=direct bs=64k status=none)" = weft-%d`, path(i), i)
			if err := quiet(m.Dir, "sh", "-c", cmd); err != nil {
				t.Fatalf("file %d: %v", i, err)
			}
		}
	}
	// Not by this process, which could not start others with a file open that waits.
	write := func(i int) {
		t.Helper()
		if err := quiet(m.Dir, "sh", "-c", fmt.Sprintf("echo weft-%d | dd of=%s conv=fsync status=none", i, path(i))); err != nil {
			t.Fatal(err)
		}
	}

	if err := quiet(strict, "sh", "-c", "echo old >old && sync old"); err != nil {
		t.Fatal(err)
	}

	v.Servers[0].Kill()
	harness.Await(t, "the metadata service to find the data server dead", func() bool {
		st := look()
		return len(st.Devices) == 2 && st.Devices[0].Reachable != st.Devices[1].Reachable
	})
	waits := make(chan error, 2)
	for _, cmd := range []string{"echo strict >new", "echo synced >>old && sync old"} {
		go func() { // ends when the data server is back
			waits <- quiet(strict, "sh", "-c", cmd)
		}()
	}
	began := time.Now()
	for i := range files {
		write(i)
	}
	took := time.Since(began)
	t.Logf("%d files: %v", files, took.Round(time.Millisecond))
	if took > 10*time.Second { // a second of waiting for each would be far more
		t.Errorf("%d new files took %v", files, took)
	}
	check(files)
	if st := look(); st.Service.Stale < files {
		t.Errorf("%d files have copies to be made, want %d at least", st.Service.Stale, files)
	}

	v.Kill()
	v.Start()
	write(files)
	check(files + 1)
	harness.Await(t, "the status to tell what files wait for", func() bool {
		st := look()
		for _, d := range st.Devices {
			if d.Waiting > 0 == d.Reachable {
				return false
			}
		}
		return st.Service.NoRoom == 0
	})
	select {
	case err := <-waits:
		t.Errorf("something is done with one copy where two are wanted at least: %v", err)
	default:
	}

	v.Servers[0].Start()
	m.AwaitCopies()
	m.Verify()
	for range cap(waits) {
		if err := <-waits; err != nil {
			t.Error(err)
		}
	}
	m.AwaitCopies()
	// What it has now is all that there is.
	v.Servers[1].Kill()
	check(files + 1)
	if err := quiet(strict, "sh", "-c", `test "$(dd if=old iflag=direct bs=64k status=none)" = "$(printf 'old\nsynced')"`); err != nil {
		t.Errorf("what was synced: %v", err)
	}
	v.Servers[1].Start()
	m.AwaitCopies()
	m.Verify()
	m.Unmount()
	v.Stop()
	v.Fsck()
}
