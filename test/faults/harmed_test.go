package faults

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// deviceHarm is something that happens to a data server or its disk.
type deviceHarm struct {
	name  string
	begin func(*harness.DataServer, *harness.Disk) (end func())
	up    bool // it is up meanwhile, but not writable
	full  bool
}

var deviceHarms = []deviceHarm{
	// Syncs fail with ENOSPC. It comes first: what is freed later can be written.
	{name: "thin", up: true, begin: func(_ *harness.DataServer, disk *harness.Disk) func() { return disk.FailWrites() }},
	{name: "killed", begin: func(d *harness.DataServer, _ *harness.Disk) func() { d.Kill(); return d.Start }},
	{name: "stopped", begin: func(d *harness.DataServer, _ *harness.Disk) func() { d.Pause(); return d.Continue }},
	{name: "frozen", begin: func(_ *harness.DataServer, disk *harness.Disk) func() { disk.Freeze(); return disk.Thaw }},
	{name: "dead", begin: func(d *harness.DataServer, disk *harness.Disk) func() { disk.Cut(); return startAnew(d, disk) }},
	{name: "full", up: true, full: true, begin: func(d *harness.DataServer, _ *harness.Disk) func() { return d.Fill() }},
	{name: "read-only", up: true, begin: func(d *harness.DataServer, disk *harness.Disk) func() { disk.ReadOnly(); return startAnew(d, disk) }},
}

// startAnew ends a data server and starts it when its disk was mounted anew.
func startAnew(d *harness.DataServer, disk *harness.Disk) func() {
	return func() {
		d.Kill()
		disk.Remount()
		d.Start()
	}
}

// inTime calls f and fails the test if it does not return within a minute.
func inTime(t *testing.T, what string, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: not after a minute", what)
	}
}

// writeSynced writes to a file in place, or makes it, and syncs it.
func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// TestHarmedDevices has one data server of three harmed in all ways, in turn. The list of devices says what is wrong, new
// files with two copies are made elsewhere, and what is there is read if it can be. Once the harm is over the data server
// is used again.
func TestHarmedDevices(t *testing.T) {
	const size = 64 << 10
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 98))
	var disks []*harness.Disk
	for range 3 {
		disks = append(disks, harness.NewDisk(t, 64<<20))
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 3, Apart: true, Remote: true, Disks: disks})
	m := v.Mount(mountOptions()...)
	single, double := filepath.Join(m.Dir, "single"), filepath.Join(m.Dir, "double")
	for copies, dir := range []string{single, double} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "layout", "set", dir, "--stripe-count", "1", "--mirrors", fmt.Sprint(copies+1))
	}
	state := func(d *harness.DataServer) (up bool, problem string) {
		time.Sleep(200 * time.Millisecond) // between the many times that it is asked for
		var list []struct {
			Address, Problem string
			Reachable        bool
		}
		unmarshal(t, harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr), &list)
		for _, is := range list {
			if is.Address == d.URL() {
				return is.Reachable, is.Problem
			}
		}
		t.Fatalf("%s is not in the list: %+v", d.URL(), list)
		return false, ""
	}
	isOn := func(path string, d *harness.DataServer) bool {
		for _, mirror := range harness.LayoutOf(t, path).Mirrors {
			for _, s := range mirror.Servers {
				if v.ServerAt(s.Address) == d {
					return true
				}
			}
		}
		return false
	}
	data := bytes.Repeat([]byte("weft"), size/4)
	// makeOn writes files in dir until n have a copy on d, and returns these.
	makeOn := func(dir, name string, d *harness.DataServer, n int) (paths []string) {
		t.Helper()
		for i := 0; len(paths) < n; i++ {
			if i == 500 {
				t.Fatalf("%d of %d files in %s are at %s: it is not used", len(paths), i, dir, d.URL())
			}
			path := filepath.Join(dir, fmt.Sprint(name, i))
			if err := writeSynced(path, data); err != nil {
				t.Fatal(err)
			}
			if isOn(path, d) {
				paths = append(paths, path)
			}
		}
		return paths
	}
	for _, harm := range deviceHarms {
		n := rng.IntN(len(disks))
		d := v.Servers[n]
		olds, mirrored := makeOn(single, harm.name, d, 4), makeOn(double, harm.name, d, 1)[0]
		end := harm.begin(d, disks[n])
		harness.Await(t, harm.name+": the list of devices says so", func() bool {
			up, problem := state(d)
			return up == harm.up && problem != ""
		})
		_, problem := state(d)
		t.Logf("%s: %s", harm.name, problem)
		made := 0
		elsewhere := func() bool {
			made++
			path := filepath.Join(double, fmt.Sprint(harm.name, "-new", made))
			inTime(t, harm.name+": a new file", func() error { return writeSynced(path, data) })
			return !isOn(path, d)
		}
		harness.Await(t, harm.name+": new files are made elsewhere", elsewhere) // it may be another service than the one that was asked
		for range 8 {
			if !elsewhere() {
				t.Errorf("%s: a new file is there", harm.name)
			}
		}
		if harm.up {
			other := v.Mount(mountOptions()...) // which has nothing in memory
			for _, old := range olds {
				inTime(t, harm.name+": read", func() error {
					got, err := os.ReadFile(filepath.Join(other.Dir, "single", filepath.Base(old)))
					if err == nil && !bytes.Equal(got, data) {
						err = fmt.Errorf("%d bytes that are not what was written", len(got))
					}
					return err
				})
			}
			other.Unmount()
		}
		if harm.full {
			inTime(t, "overwrite", func() error { return writeSynced(olds[0], slices.Repeat([]byte{'x'}, size)) })
			inTime(t, "truncate", func() error { return os.Truncate(olds[1], 100) })
			inTime(t, "remove", func() error { return os.Remove(olds[2]) })
		}
		inTime(t, harm.name+": truncate a file with a copy there", func() error { return os.Truncate(mirrored, 100) })
		end()
		harness.Await(t, harm.name+": it is up again", func() bool {
			up, problem := state(d)
			return up && problem == ""
		})
		makeOn(double, harm.name+"-then", d, 1)
		m.AwaitCopies()
		if got, err := os.ReadFile(mirrored); err != nil || !bytes.Equal(got, data[:100]) {
			t.Errorf("%s: %s has %d bytes, %v", harm.name, mirrored, len(got), err)
		}
	}
	harness.Weft(t, "sync", m.Dir)
	allEqual(t, v, m)
	m.Unmount()
	v.Stop()
	v.Fsck()
}
