package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// softDeadline is when a call is taken to wait for ever. It is much more than what the mounts wait.
const softDeadline = 2 * time.Minute

// ends returns what a call of the file system returns.
func ends(t *testing.T, what string, call func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(softDeadline):
		t.Fatalf("%s has not ended after %v", what, softDeadline)
		return nil
	}
}

// TestSoft stops the metadata service. On soft mounts what needs it fails, on a hard one it waits; reads and writes go on by the layouts that there
// are. When the service goes on, so does everything.
func TestSoft(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true, Remote: true, Lease: 5 * time.Minute})
	if v.Cluster != nil {
		t.Skip("one service is stopped here")
	}
	t.Logf("seed %d", *seed)
	rng := rand.NewChaCha8([32]byte{byte(*seed), byte(*seed >> 8)})
	old, later := make([]byte, 3<<20), make([]byte, 3<<20)
	rng.Read(old)
	rng.Read(later)
	hard := v.Mount(mountOptions()...)
	type user struct {
		name string
		want error
		m    *harness.Mount
		read *os.File // that it has read
		file *os.File // that it has written
	}
	users := []*user{{name: "soft", want: syscall.EIO}, {name: "softerr", want: syscall.ETIMEDOUT}}
	for _, name := range []string{"read", "soft", "softerr", "uncached"} {
		if err := os.WriteFile(filepath.Join(hard.Dir, name), old, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, len(old))
	same := func(f *os.File, want []byte) {
		t.Helper()
		err := ends(t, "a read", func() error { _, err := f.ReadAt(buf, 0); return err })
		if err != nil || !bytes.Equal(buf, want) {
			t.Errorf("read of %s: %v; wrong bytes: %v", f.Name(), err, !bytes.Equal(buf, want))
		}
	}
	for _, u := range users {
		u.m = v.Mount(append(mountOptions(), u.name, "timeo=10", "retrans=1")...)
		var err, err2 error
		u.read, err = os.Open(filepath.Join(u.m.Dir, "read"))
		u.file, err2 = os.OpenFile(filepath.Join(u.m.Dir, u.name), os.O_RDWR, 0)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		defer u.read.Close()
		defer u.file.Close()
		same(u.read, old)
		if _, err := u.file.WriteAt(old, 0); err != nil {
			t.Fatal(err)
		}
		if err := u.file.Sync(); err != nil {
			t.Fatal(err)
		}
		// So mkdir(2) need not ask for the name first, and is what is given up.
		if _, err := os.Stat(filepath.Join(u.m.Dir, u.name+".d")); !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}

	v.Pause()
	goOn := sync.OnceFunc(v.Continue)
	t.Cleanup(goOn)
	waiting := make(chan error, 1)
	go func() { // ends when the service goes on
		_, err := os.ReadDir(hard.Dir)
		waiting <- err
	}()
	for _, u := range users {
		for what, call := range map[string]func() error{
			"stat":  func() error { _, err := os.Stat(filepath.Join(u.m.Dir, "uncached")); return err },
			"mkdir": func() error { return os.Mkdir(filepath.Join(u.m.Dir, u.name+".d"), 0o755) },
		} {
			if err := ends(t, what, call); !errors.Is(err, u.want) {
				t.Errorf("%s: %s: %v, want %v", u.name, what, err, u.want)
			}
		}
		same(u.read, old)
		if err := ends(t, "a write", func() error { _, err := u.file.WriteAt(later, 0); return err }); err != nil {
			t.Errorf("%s: write: %v", u.name, err)
		}
		same(u.file, later)
		if err := ends(t, "fsync", u.file.Sync); !errors.Is(err, u.want) {
			t.Errorf("%s: fsync: %v, want %v", u.name, err, u.want)
		}
	}
	if len(waiting) > 0 {
		t.Errorf("the hard mount has not waited: %v", <-waiting)
	}

	goOn()
	if err := ends(t, "readdir of the hard mount", func() error { return <-waiting }); err != nil {
		t.Errorf("the hard mount: %v", err)
	}
	for _, u := range users {
		for _, call := range []func() error{
			func() error { _, err := os.Stat(filepath.Join(u.m.Dir, "uncached")); return err },
			u.file.Sync,
			func() error { return os.Mkdir(filepath.Join(u.m.Dir, u.name+".e"), 0o755) },
			u.file.Close,
		} {
			if err := ends(t, "a call", call); err != nil {
				t.Errorf("%s, when the service is back: %v", u.name, err)
			}
		}
		// What was given up is carried out once the service hears of it. If the kernel had forgotten that there is no such name it asked for that first, and then
		// there was no mkdir.
		sent := callsSent(t, u.m, "MAKENODE")
		if sent != 1 && sent != 2 {
			t.Errorf("%s: %d calls to make directories, want 2, or 1", u.name, sent)
		}
		for _, dir := range []string{u.m.Dir, hard.Dir} {
			if sent == 1 {
				break
			}
			harness.Await(t, "the directory that was given up", func() bool {
				_, err := os.Stat(filepath.Join(dir, u.name+".d"))
				return err == nil
			})
		}
		if got, err := os.ReadFile(filepath.Join(hard.Dir, u.name)); err != nil || !bytes.Equal(got, later) {
			t.Errorf("%s: another mount reads %d bytes, %v; wrong bytes: %v", u.name, len(got), err, !bytes.Equal(got, later))
		}
	}
	for _, u := range users {
		u.read.Close()
		u.m.Unmount()
	}
	hard.Unmount()
	v.Stop()
	v.Fsck()
}

// callsSent is how many calls of a kind a mount has sent to the metadata service.
func callsSent(t *testing.T, m *harness.Mount, op string) int {
	t.Helper()
	var st []struct {
		Service struct{ Calls map[string]int }
	}
	if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil || len(st) != 1 {
		t.Fatal(st, err)
	}
	return st[0].Service.Calls[op]
}
