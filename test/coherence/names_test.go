package coherence

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestEntriesStay changes names all around in directories whose entries in the kernel are in use: by an overlay, by
// file systems that are mounted inside, and by a running program. None of these may notice.
func TestEntriesStay(t *testing.T) {
	t.Run("one", func(t *testing.T) { entriesStay(t, false) })
	t.Run("two", func(t *testing.T) { entriesStay(t, true) })
}

func entriesStay(t *testing.T, two bool) {
	duration := 3 * time.Second
	if *long {
		duration = 10 * time.Minute
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a := v.Mount(mountOptions()...)
	changing := []*harness.Mount{a}
	if two {
		changing = append(changing, v.Mount(mountOptions()...))
	}
	on := func(name string) string { return filepath.Join(a.Dir, name) }
	for _, dir := range []string{"low/d", "middle/d", "upper/d", "nest/sub", "bind", "proc", "prog/work"} {
		check(os.MkdirAll(on(dir), 0o755))
	}
	for _, name := range []string{"low/d/f", "middle/d/g", "upper/d/h", "prog/open"} {
		check(os.WriteFile(on(name), []byte(name), 0o644))
	}
	mount := func(source, target, kind string, flags uintptr, data string) {
		t.Helper()
		check(unix.Mount(source, target, kind, flags, data))
		t.Cleanup(func() { unix.Unmount(target, unix.MNT_DETACH) })
	}
	overlay := t.TempDir()
	mount("overlay", overlay, "overlay", 0, "lowerdir="+strings.Join([]string{on("upper"), on("middle"), on("low")}, ":"))
	mount("none", on("nest/sub"), "tmpfs", 0, "")
	check(os.WriteFile(on("nest/sub/inside"), []byte("inside"), 0o644))
	mount(on("low"), on("bind"), "", unix.MS_BIND, "")
	mount("proc", on("proc"), "proc", 0, "")

	sleep, err := exec.LookPath("sleep")
	check(err)
	program, err := os.ReadFile(sleep)
	check(err)
	check(os.WriteFile(on("prog/sleep"), program, 0o755))
	run := exec.Command(on("prog/sleep"), "inf")
	run.Dir = on("prog/work")
	run.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	open, err := os.Open(on("prog/open"))
	check(err)
	run.Stdin = open
	check(run.Start())
	open.Close()
	t.Cleanup(func() { run.Process.Kill(); run.Wait() })

	stop := harness.ChangeNames(t, *seed, changing, "", "low", "low/d", "middle", "upper/d", "nest", "prog", "prog/work")
	end := time.Now().Add(duration)
	pid := run.Process.Pid
	want := func(what, got string, err error, want string) {
		t.Helper()
		if err != nil || got != want {
			t.Fatalf("%s: %q, %v; want %q", what, got, err, want)
		}
	}
	for last := false; !last; {
		if last = time.Now().After(end); last {
			t.Logf("%d changes", stop())
		}
		for name, contents := range map[string]string{
			overlay + "/d/f": "low/d/f", overlay + "/d/g": "middle/d/g", overlay + "/d/h": "upper/d/h",
			on("nest/sub/inside"): "inside", on("bind/d/f"): "low/d/f", on(fmt.Sprintf("proc/%d/comm", pid)): "sleep\n",
		} {
			b, err := os.ReadFile(name)
			want(name, string(b), err, contents)
		}
		for link, path := range map[string]string{"exe": "prog/sleep", "cwd": "prog/work", "fd/0": "prog/open"} {
			got, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, link))
			want(link, got, err, on(path))
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := unix.Unmount(on("nest/sub"), 0); err != nil {
		t.Errorf("what was mounted inside: %v", err)
	}
}

// TestNamesBusy changes names through each of two mounts, and looks at once through both, while many threads look at
// the same names all the time and far more processes want to run than can. So answers that the kernel may keep are often
// made use of long after a change of what they say.
func TestNamesBusy(t *testing.T) {
	duration := 10 * time.Second
	if *long {
		duration = time.Hour
	}
	t.Logf("-seed %d", *seed)
	v := harness.NewVolume(t, harness.Options{Lease: 30 * time.Second})
	a, b := twoMounts(v)
	mounts := []*harness.Mount{a, b}
	const dirs, names, busy, lookers = 24, 3, 32, 4
	dir := func(n int) string { return fmt.Sprintf("d%d", n) }
	for n := range dirs {
		if err := os.Mkdir(filepath.Join(a.Dir, dir(n)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for range busy {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
	name := func(rng *rand.Rand) string { return filepath.Join(dir(rng.IntN(dirs)), fmt.Sprint(rng.IntN(names))) }
	var stop atomic.Bool
	var wg sync.WaitGroup
	for k, m := range mounts {
		for n := range lookers {
			wg.Go(func() { // ends with the test
				rng := rand.New(rand.NewPCG(*seed, uint64(k*lookers+n)))
				for !stop.Load() {
					path := filepath.Join(m.Dir, name(rng))
					if rng.IntN(2) == 0 {
						unix.Lstat(path, new(unix.Stat_t))
					} else if fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0); err == nil {
						unix.Close(fd)
					}
				}
			})
		}
	}
	rng := rand.New(rand.NewPCG(*seed, 1<<32))
	is := map[string]uint64{} // the inodes of names
	changes := 0
	for end := time.Now().Add(duration); time.Now().Before(end) && !t.Failed(); changes++ {
		m := mounts[rng.IntN(2)]
		one, other := name(rng), name(rng)
		switch {
		case is[one] == 0:
			f, err := os.OpenFile(filepath.Join(m.Dir, one), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil {
				t.Fatal(err)
			}
			var st unix.Stat_t
			err = unix.Fstat(int(f.Fd()), &st)
			if err = errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
			is[one] = st.Ino
		case one != other && rng.IntN(3) > 0:
			if err := os.Rename(filepath.Join(m.Dir, one), filepath.Join(m.Dir, other)); err != nil {
				t.Fatal(err)
			}
			is[other], is[one] = is[one], 0
		default:
			if err := os.Remove(filepath.Join(m.Dir, one)); err != nil {
				t.Fatal(err)
			}
			is[one] = 0
		}
		for _, path := range []string{one, other} {
			for k, m := range mounts {
				var st unix.Stat_t
				err := unix.Lstat(filepath.Join(m.Dir, path), &st)
				if err == unix.ENOENT {
					st.Ino, err = 0, nil
				}
				if err != nil || st.Ino != is[path] {
					t.Errorf("after change %d mount %d sees inode %d at %s, %v; want %d", changes, k, st.Ino, path, err, is[path])
				}
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d changes", changes)
	if changes == 0 {
		t.Error("no changes")
	}
}
