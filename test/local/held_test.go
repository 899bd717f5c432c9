package local

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// heldBytes is how long the file of these tests is: several stripe units on each data server.
const heldBytes = 8 << 20

// dataFilesOf is where the data files of a file are.
func dataFilesOf(t *testing.T, v *harness.Volume, path string) (paths []string) {
	t.Helper()
	for _, m := range harness.LayoutOf(t, path).Mirrors {
		for _, s := range m.Servers {
			paths = append(paths, v.ServerAt(s.Address).Path(s.DataFile))
		}
	}
	return paths
}

// awaitGone waits until files are removed.
func awaitGone(t *testing.T, paths []string) {
	t.Helper()
	for _, path := range paths {
		harness.Await(t, path+" is gone", func() bool {
			_, err := os.Stat(path)
			return os.IsNotExist(err)
		})
	}
}

// same checks what is in a file.
func same(t *testing.T, path string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		t.Fatalf("%s: %d bytes, %d wanted, other ones from %d on: %v", path, len(got), len(want), at, err)
	}
}

// A client that writes locally is stopped and stays so: once its lease is over, and some time more, its data files are replaced, and
// others go on. What it writes when it wakes up nobody sees.
func TestStoppedForLong(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: 2 * time.Second, Apart: true})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	harness.Await(t, "four data servers, for four data files", func() bool { return strings.Count(v.Log(), "data server can be used") == 4 })
	old, late, fresh := bytes.Repeat([]byte("old."), heldBytes/4), bytes.Repeat([]byte("late"), heldBytes/4), bytes.Repeat([]byte("new!"), heldBytes/4)
	f, err := os.Create(a.Dir + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(old); err != nil {
		t.Fatal(err)
	}
	r, err := os.Open(b.Dir + "/f") // by descriptors, too
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	same(t, b.Dir+"/f", old)
	before := dataFilesOf(t, v, b.Dir+"/f")
	if len(before) != 4 {
		t.Fatalf("data files %v", before)
	}
	if _, err := f.WriteAt(late, 0); err != nil { // which is not stable
		t.Fatal(err)
	}
	a.Signal(syscall.SIGSTOP)
	w, err := os.OpenFile(b.Dir+"/f", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.WriteAt(fresh, 0); err != nil { // waits for the fence
		t.Fatal(err)
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(v.Log(), "data files that could not be fenced were replaced") {
		t.Error("the log does not say that data files were replaced")
	}
	got := make([]byte, heldBytes)
	if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, fresh) {
		t.Errorf("who read it before reads other bytes than were written: %v", err)
	}
	same(t, b.Dir+"/f", fresh)
	awaitGone(t, before)
	a.Signal(syscall.SIGCONT)
	f.Sync() // what it wrote is lost
	f.Close()
	same(t, b.Dir+"/f", fresh)
	same(t, a.Dir+"/f", fresh)
	w.Close()
	r.Close()
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// Somebody has a data file open for writing whom no signal ends, as the kernel does for a file in passthrough: the client is gone,
// what the kernel has open is not.
func TestHeldByOthers(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: 2 * time.Second, Apart: true})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	old := bytes.Repeat([]byte("old."), heldBytes/4)
	if err := os.WriteFile(a.Dir+"/f", old, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(a.Dir+"/f", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(old[:4], 0); err != nil { // so that it has a layout
		t.Fatal(err)
	}
	before := dataFilesOf(t, v, b.Dir+"/f")
	held, err := os.OpenFile(before[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	stop, stopped := make(chan struct{}), make(chan struct{})
	defer func() {
		close(stop)
		<-stopped
	}()
	go func() { // writes on and on, until stop is closed
		defer close(stopped)
		bad := bytes.Repeat([]byte("BAD!"), 1<<18)
		for off := int64(0); ; off = (off + 1<<20) % heldBytes {
			select {
			case <-stop:
				return
			default:
			}
			held.WriteAt(bad, off)
		}
	}()
	a.Signal(syscall.SIGKILL)
	fresh := bytes.Repeat([]byte("new!"), heldBytes/4)
	w, err := os.OpenFile(b.Dir+"/f", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.WriteAt(fresh, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		same(t, b.Dir+"/f", fresh)
		time.Sleep(100 * time.Millisecond)
	}
	after := dataFilesOf(t, v, b.Dir+"/f")
	for i := range after {
		if (after[i] == before[i]) != (i > 0) {
			t.Errorf("column %d: %s, before it was %s", i, after[i], before[i])
		}
	}
	if n := strings.Count(v.Log(), "data files that could not be fenced were replaced"); n != 1 {
		t.Errorf("the log says %d times that data files were replaced", n)
	}
	awaitGone(t, before[:1])
	w.Close()
	a.Abort()
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// A client is killed that had a file open in passthrough for writing: the kernel goes on writing for whoever has the file open, and
// nobody sees that.
func TestHeldByKernel(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: 2 * time.Second, Apart: true})
	a, b := v.Mount(append(mountOptions(), "passthrough=rw")...), v.Mount(mountOptions()...)
	harness.Weft(t, "layout", "set", a.Dir, "--placement", "local")
	old, fresh := bytes.Repeat([]byte("old."), heldBytes/4), bytes.Repeat([]byte("new!"), heldBytes/4)
	if err := os.WriteFile(a.Dir+"/f", old, 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", a.Dir)
	f, err := os.OpenFile(a.Dir+"/f", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before := dataFilesOf(t, v, a.Dir+"/f")
	a.Signal(syscall.SIGKILL)
	harness.Await(t, "the end of the client", func() bool { return !a.Serving() })
	bad := bytes.Repeat([]byte("BAD!"), 1<<18)
	if _, err := f.WriteAt(bad, 0); err != nil {
		a.Abort()
		t.Fatalf("the kernel does not write it by itself: %v", err)
	}
	w, err := os.OpenFile(b.Dir+"/f", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.WriteAt(fresh, 0); err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < heldBytes; off += int64(len(bad)) {
		if _, err := f.WriteAt(bad, off); err != nil {
			t.Fatalf("the kernel does not go on: %v", err)
		}
	}
	same(t, b.Dir+"/f", fresh)
	if after := dataFilesOf(t, v, b.Dir+"/f"); len(after) != 1 || after[0] == before[0] {
		t.Errorf("data files %v, before it were %v", after, before)
	}
	awaitGone(t, before)
	f.Close()
	w.Close()
	a.Abort()
	b.Unmount()
	v.Stop()
	v.Fsck()
}

// A client dies that was writing a file which another one, who lives, has open in passthrough for writing: the file is fenced only when that
// one closes it, and weft status tells who is waited for. Until then its kernel goes on, and nothing of that is lost.
func TestHeldByLiving(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: 2 * time.Second, Apart: true})
	a, b := v.Mount(append(mountOptions(), "passthrough=rw")...), v.Mount(mountOptions()...)
	dead := v.Mount(mountOptions()...)
	devices(t, a)
	harness.Weft(t, "layout", "set", a.Dir, "--placement", "local")
	data := bytes.Repeat([]byte("old."), heldBytes/4)
	put(t, a.Dir+"/f", data)
	harness.Weft(t, "sync", a.Dir)
	f := open(t, a.Dir+"/f", os.O_RDWR)
	wantMode(t, a, f, "rw")
	before := dataFilesOf(t, v, b.Dir+"/f")
	g := open(t, dead.Dir+"/f", os.O_WRONLY)
	if _, err := g.WriteAt([]byte("dead"), 0); err != nil {
		t.Fatal(err)
	}
	copy(data, "dead")
	dead.Signal(syscall.SIGKILL)
	harness.Await(t, "the end of the client", func() bool { return !dead.Serving() })
	dead.Abort()
	g.Close()
	done := make(chan error, 1)
	go func() { done <- os.Truncate(b.Dir+"/f", heldBytes+4) }() // ends when the file is fenced
	for n := 0; n < 2; n++ {
		harness.Await(t, "who is waited for, in the status", func() bool {
			for _, held := range passingOf(t, b).Service.HeldUp {
				if strings.Contains(held.What, "lost client") && len(held.Hosts) == 1 {
					return true
				}
			}
			return false
		})
		if out := harness.Weft(t, "status", a.Dir); !strings.Contains(out, "held up") || !strings.Contains(out, fmt.Sprint(os.Getpid())) {
			t.Errorf("who holds it up is not in\n%s", out)
		}
		at := heldBytes/2 + n*100
		if _, err := f.WriteAt([]byte("by a kernel"), int64(at)); err != nil {
			t.Error(err)
		}
		copy(data[at:], "by a kernel")
		if err := f.Sync(); err != nil {
			t.Error(err)
		}
		want(t, "by a kernel", f, data)
		again := open(t, a.Dir+"/f", os.O_RDONLY)
		want(t, "opened meanwhile", again, data)
		again.Close()
	}
	select {
	case err := <-done:
		t.Fatalf("cut while a lost client's writes could still come: %v", err)
	default:
	}
	if now := dataFilesOf(t, v, b.Dir+"/f"); len(now) != 1 || now[0] != before[0] {
		t.Errorf("the kernel's data file %v was replaced by %v", before, now)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	data = append(data, 0, 0, 0, 0)
	for _, m := range []*harness.Mount{a, b} {
		same(t, m.Dir+"/f", data)
	}
	harness.Await(t, "that nothing is held up", func() bool { return len(passingOf(t, b).Service.HeldUp) == 0 })
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}
