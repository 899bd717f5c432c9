package faults

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// seenDevice is a data server as a mount sees it.
type seenDevice struct {
	Address    string
	Reachable  bool
	Complaints int
	Mount      struct{ Down bool }
}

// awaitSeen waits until a mount says such things of a data server.
func awaitSeen(t *testing.T, what string, m *harness.Mount, d *harness.DataServer, such func(seenDevice) bool) {
	t.Helper()
	harness.Await(t, what, func() bool {
		time.Sleep(200 * time.Millisecond)
		out, err := exec.Command(harness.Bin(t, "weft"), "status", "--json", m.Dir).Output()
		if err != nil {
			return false // it has only begun
		}
		var st []struct{ Devices []seenDevice }
		unmarshal(t, string(out), &st)
		for _, dev := range st[0].Devices {
			if dev.Address == d.URL() {
				return such(dev)
			}
		}
		return false
	})
}

func isDown(dev seenDevice) bool { return dev.Mount.Down }
func isUp(dev seenDevice) bool   { return !dev.Mount.Down }

// openOld makes files with two copies each, and leaves them open when all is stable.
func openOld(t *testing.T, dir string, n int) (files []*os.File) {
	t.Helper()
	for i := range n {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint("old", i)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if _, err := f.WriteAt(oldData, 0); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// TestIdleMount has mounts do nothing while a data server is stopped, one that has files open there, and one that is
// made meanwhile. The metadata service has told them when they go on: none of their writes waits.
func TestIdleMount(t *testing.T) {
	const timeout = 20 * time.Second // what a write would wait
	v := harness.NewVolume(t, harness.Options{DataServers: 3, Apart: true, Remote: true})
	opts := append(mountOptions(), fmt.Sprint("mirror-timeout=", timeout))
	m := v.Mount(opts...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-count", "1", "--mirrors", "2")
	files := openOld(t, m.Dir, 12)
	d := v.Servers[0]
	d.Pause()
	awaitSeen(t, "the mount knows that the data server is down", m, d, isDown)
	write := func(what string, f *os.File) {
		t.Helper()
		began := time.Now()
		inTime(t, what, func() error {
			_, err := f.WriteAt(newData, 0)
			return errors.Join(err, f.Sync())
		})
		if took := time.Since(began); took > timeout/2 {
			t.Errorf("%s took %v", what, took)
		}
	}
	for _, f := range files[:8] {
		write("a write to "+f.Name(), f)
	}
	other := v.Mount(opts...)
	awaitSeen(t, "a new mount knows it, too", other, d, isDown)
	for _, f := range files[8:] {
		f.Close()
		f, err := os.OpenFile(filepath.Join(other.Dir, filepath.Base(f.Name())), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		write("the new mount's write to "+f.Name(), f)
		f.Close()
	}
	for _, f := range files[:8] {
		f.Close()
	}
	d.Continue()
	for _, m := range []*harness.Mount{m, other} {
		awaitSeen(t, "a mount knows that the data server is back", m, d, isUp)
	}
	m.AwaitCopies()
	allEqual(t, v, m)
	other.Unmount()
	m.Unmount()
}

// TestPartialPartition drops what one mount of two sends to a data server. Status says that it is only that mount which
// does not reach it, the other one goes on with all copies, and all is well when the packets pass again.
func TestPartialPartition(t *testing.T) {
	const group = 4242
	harness.NeedMount(t)
	if !ownNetwork(t, "TestPartialPartition") {
		return
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 3, Apart: true, Remote: true})
	whole := v.Mount(mountOptions()...)
	harness.Weft(t, "layout", "set", whole.Dir, "--stripe-count", "1", "--mirrors", "2")
	// What this process starts from now on is told from the rest by its group.
	if err := syscall.Setgid(group); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Setgid(0) })
	cut := v.Mount(mountOptions()...)
	files, d := openOld(t, cut.Dir, 6), v.Servers[0]
	harness.Run(t, "", "nft", fmt.Sprintf("add chain inet weft out { type filter hook output priority 0; }; "+
		"add rule inet weft out meta skgid %d tcp dport %s drop", group, d.Port()))
	write := func(f *os.File) {
		t.Helper()
		inTime(t, f.Name(), func() error {
			_, err := f.WriteAt(newData, 0)
			return errors.Join(err, f.Sync())
		})
	}
	for _, f := range files {
		write(f)
	}
	for _, m := range []*harness.Mount{cut, whole} {
		awaitSeen(t, "status says that one client is cut off", m, d, func(dev seenDevice) bool {
			return dev.Complaints == 1 && dev.Reachable && dev.Mount.Down == (m == cut)
		})
	}
	list := harness.Weft(t, "admin", "device", "ls", "--server", v.Addr)
	if !strings.Contains(list, "ok for the metadata service, but does not answer 1 of the clients") {
		t.Errorf("the list of devices does not say so:\n%s", list)
	}
	for _, f := range files {
		f.Close()
	}
	harness.Run(t, "", "nft", "flush chain inet weft out")
	awaitSeen(t, "status says that all is well", cut, d, func(dev seenDevice) bool {
		return dev.Complaints == 0 && dev.Reachable && isUp(dev)
	})
	cut.AwaitCopies()
	allEqual(t, v, cut)
	cut.Unmount()
	whole.Unmount()
}
