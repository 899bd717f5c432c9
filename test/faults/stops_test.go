package faults

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// TestPlannedStops restarts three data servers one after the other, each of which stays away for longer than
// mirror-timeout, while fio writes and verifies files with two copies. There is no error, and no copy has to be made anew.
func TestPlannedStops(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "fio")
	const away = 2 * time.Second
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 3, Apart: true, Room: 128 << 20})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "1", "--mirrors", "2")
	write := func(args ...string) error {
		return quiet(m.Dir, "fio", append(args, "--name=v", "--rw=randwrite", "--bsrange=4k-64k", "--size=4m", "--numjobs=4", "--verify=crc32c",
			"--verify_fatal=1", "--do_verify=1", "--verify_backlog=64", "--fsync=32", "--end_fsync=1", "--overwrite=1", fmt.Sprint("--randseed=", *seed))...)
	}
	if err := write(); err != nil { // which makes the files
		t.Fatal(err)
	}
	var writing sync.WaitGroup
	writing.Go(func() { // ends when all servers were restarted
		if err := write("--time_based", "--runtime=14"); err != nil {
			t.Error(err)
		}
	})
	state := func() (stale, copied int64) {
		t.Helper()
		var st []struct {
			Service struct {
				Stale  int64 `json:"stale_files"`
				Copied int64 `json:"copied_bytes"`
			}
		}
		if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
			t.Fatal(err)
		}
		return st[0].Service.Stale, st[0].Service.Copied
	}
	for i, d := range v.Servers {
		time.Sleep(time.Second)
		began := time.Now()
		d.Stop()
		t.Logf("server %d has ended after %v", i, time.Since(began).Round(time.Millisecond))
		writing.Go(func() { // ends when it is back
			// Not by this process, which could not start others with a file open that waits.
			if err := quiet(m.Dir, "sh", "-c", fmt.Sprint("echo weft >meanwhile-", i)); err != nil {
				t.Errorf("a new file: %v", err)
			}
		})
		time.Sleep(time.Until(began.Add(away)))
		d.Start()
		if stale, copied := state(); stale > 0 || copied > 0 {
			t.Errorf("server %d: %d files have copies that are not good, %d bytes were copied", i, stale, copied)
		}
	}
	writing.Wait()
	if stale, copied := state(); stale > 0 || copied > 0 {
		t.Errorf("at the end %d files have copies that are not good, %d bytes were copied", stale, copied)
	}
	m.AwaitCopies()
	m.Verify()

	// One that does not come back is waited for once, and not for long.
	v.Servers[0].Stop()
	began := time.Now()
	if err := write(); err != nil {
		t.Error(err)
	}
	t.Logf("without server 0: %v", time.Since(began).Round(time.Millisecond))
	v.Servers[0].Start()
	m.AwaitCopies()
	m.Verify()
	m.Unmount()
	v.Stop()
	v.Fsck()
}
