package coherence

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// patience is what an operation may take beside the lease that it waits for.
const patience = 4 * time.Second

// within does something that may wait, and fails the test if it waits longer than d.
func within(t *testing.T, d time.Duration, what string, do func() error) {
	t.Helper()
	begun := time.Now()
	done := make(chan error, 1)
	go func() { done <- do() }() // ends when do does; a hanging one with the mount
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		t.Logf("%s: %v", what, time.Since(begun).Round(time.Millisecond))
	case <-time.After(d):
		t.Fatalf("%s: not after %v", what, d)
	}
}

// lock sets or waits for (F_OFD_SETLK, F_OFD_SETLKW) a lock on a whole file for its open file description.
func lock(f *os.File, cmd int, kind int16) error {
	for {
		err := unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: kind})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func fill(c byte, n int) []byte { return bytes.Repeat([]byte{c}, n) }

// writerEnv makes this test binary lock the file it names and write it again and again until that fails, and say so.
const writerEnv = "WEFT_TEST_WRITER"

func TestMain(m *testing.M) {
	flag.Parse()
	path := os.Getenv(writerEnv)
	if path == "" {
		os.Exit(m.Run())
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	}
	if err == nil {
		fmt.Println("locked")
	}
	block := fill('w', 64<<10)
	for i := 0; err == nil; i++ {
		_, err = f.WriteAt(block, int64(i%(writerSize/len(block))*len(block)))
	}
	fmt.Println(err)
}

const writerSize = 4 << 20

// TestStopped stops a client (SIGSTOP) that has leases, locks, layouts and data that is not stable. Others go on after
// its lease; when it goes on itself it changes nothing of what they wrote, tells who has lost what, and works again.
func TestStopped(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	for _, name := range []string{"dirty", "locked", "writer", "untouched"} {
		if err := os.WriteFile(filepath.Join(a.Dir, name), fill('0', writerSize), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(a.Dir+"/dir", 0o755), os.WriteFile(a.Dir+"/dir/name", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	// Leases: on names, of which one is missing, and attributes.
	if _, err := os.ReadDir(a.Dir + "/dir"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(a.Dir + "/dir/missing"); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	// A lock, and a process that has one and is writing all the time.
	locked := open(t, a.Dir+"/locked", os.O_RDWR)
	if err := lock(locked, unix.F_OFD_SETLK, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	writer := harness.Self(writerEnv + "=" + a.Dir + "/writer")
	out, err := writer.StdoutPipe()
	if err == nil {
		err = writer.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { writer.Process.Kill() })
	said := bufio.NewReader(out)
	if line, err := said.ReadString('\n'); line != "locked\n" {
		t.Fatalf("the writer: %q, %v", line, err)
	}
	time.Sleep(300 * time.Millisecond) // of writing
	// Data that is not stable: written at the last moment.
	dirty, untouched := open(t, a.Dir+"/dirty", os.O_RDWR), open(t, a.Dir+"/untouched", os.O_RDWR)
	for _, f := range []*os.File{dirty, untouched} {
		if _, err := f.WriteAt(fill('a', writerSize), 0); err != nil {
			t.Fatal(err)
		}
	}
	a.Signal(syscall.SIGSTOP)
	running := false
	t.Cleanup(func() {
		if !running {
			a.Signal(syscall.SIGCONT)
		}
	})
	stopped := time.Now()

	// The others.
	within(t, lease+patience, "create in a directory with leases", func() error { return os.WriteFile(b.Dir+"/dir/missing", []byte("b"), 0o644) })
	within(t, patience, "rename there", func() error { return os.Rename(b.Dir+"/dir/name", b.Dir+"/dir/renamed") })
	sums := map[string]string{}
	for _, name := range []string{"dirty", "locked", "writer"} {
		f := open(t, filepath.Join(b.Dir, name), os.O_RDWR)
		if name != "dirty" {
			within(t, lease+patience, "lock "+name, func() error { return lock(f, unix.F_OFD_SETLKW, unix.F_WRLCK) })
		}
		within(t, lease+patience, "truncate and write "+name, func() error {
			data := fill('b', writerSize/2+7)
			sums[name] = fmt.Sprintf("%x", sha256.Sum256(data))
			if err := f.Truncate(0); err != nil {
				return err
			}
			if _, err := f.WriteAt(data, 0); err != nil {
				return err
			}
			return f.Sync()
		})
	}
	if waited := time.Since(stopped); waited < lease+time.Second {
		time.Sleep(lease + time.Second - waited)
	}

	// A question to the sleeper, whose lease is over: no old answer.
	answer := make(chan error, 1)
	go func() { // ends with the answer
		_, err := os.Stat(a.Dir + "/dir/name")
		answer <- err
	}()
	select {
	case err := <-answer:
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a name that is gone, seen through the stopped client: %v", err)
		}
		answer <- err
	case <-time.After(time.Second):
	}
	a.Signal(syscall.SIGCONT)
	running = true
	if err := <-answer; !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a name that is gone, seen through the woken client: %v", err)
	}
	// The writer finds out that its lock is lost.
	told := make(chan string, 1)
	go func() { // ends with the writer
		rest, _ := io.ReadAll(said)
		told <- string(rest)
	}()
	select {
	case rest := <-told:
		if !strings.Contains(rest, unix.EIO.Error()) {
			t.Errorf("the writer that lost its lock: %q, want %v", rest, unix.EIO)
		}
	case <-time.After(20 * time.Second):
		t.Error("the writer that lost its lock goes on writing")
		writer.Process.Kill()
		<-told
	}
	writer.Wait()
	within(t, patience, "I/O with a lost lock", func() error {
		if _, err := locked.WriteAt([]byte("a"), 0); !errors.Is(err, unix.EIO) {
			return fmt.Errorf("write: %v, want %v", err, unix.EIO)
		}
		return nil
	})
	// What was not stable is lost, and fsync says so once; what others wrote there is untouched.
	within(t, patience, "fsync of a file with lost data", func() error {
		if err := dirty.Sync(); !errors.Is(err, unix.EIO) {
			return fmt.Errorf("%v, want %v", err, unix.EIO)
		}
		return nil
	})
	time.Sleep(2 * time.Second) // for whatever the woken client still sends
	for name, want := range sums {
		for _, m := range []*harness.Mount{b, a} {
			got, err := os.ReadFile(filepath.Join(m.Dir, name))
			if sum := fmt.Sprintf("%x", sha256.Sum256(got)); sum != want {
				t.Errorf("%s through %s: %d bytes (%v) are not what was written while the client was stopped: %q...", name, m.Dir, len(got), err, got[:min(8, len(got))])
			}
		}
	}
	// A file nobody else wrote has the old or the new bytes in each place.
	got, err := os.ReadFile(b.Dir + "/untouched")
	if rest := bytes.Trim(got, "0a"); err != nil || len(got) != writerSize || len(rest) != 0 {
		t.Errorf("the stopped client's own file: %d bytes, %v, with others in it: %q", len(got), err, rest[:min(8, len(rest))])
	}
	if log := lines(a.Log(), "lost", "WARN", "ERROR"); len(log) == 0 {
		t.Errorf("the woken client's log says nothing of what it lost:\n%s", a.Log())
	} else {
		t.Logf("the woken client says:\n%s", strings.Join(log, "\n"))
	}
	// It works again.
	within(t, patience, "create through the woken client", func() error { return os.WriteFile(a.Dir+"/dir/again", []byte("a"), 0o644) })
	if got, err := os.ReadFile(b.Dir + "/dir/again"); err != nil || string(got) != "a" {
		t.Errorf("what it made: %q, %v", got, err)
	}
	for _, f := range []*os.File{dirty, untouched, locked} {
		f.Close()
	}
	locked = open(t, a.Dir+"/locked", os.O_RDWR)
	if err := lock(locked, unix.F_OFD_SETLK, unix.F_WRLCK); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a lock that the other mount has now: %v, want %v", err, unix.EAGAIN)
	}
}

// TestRestart kills the metadata service while locks are held and waited for.
func TestRestart(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	kinds := []struct {
		name string
		try  func(f *os.File, how int16) error
		wait func(f *os.File, how int16) error
	}{
		{"fcntl", func(f *os.File, how int16) error { return lock(f, unix.F_OFD_SETLK, how) },
			func(f *os.File, how int16) error { return lock(f, unix.F_OFD_SETLKW, how) }},
		{"flock", func(f *os.File, how int16) error { return flock(f, how, unix.LOCK_NB) },
			func(f *os.File, how int16) error { return flock(f, how, 0) }},
	}
	restart := func() {
		v.Kill()
		v.Start()
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			mine, theirs := open(t, filepath.Join(a.Dir, k.name), os.O_RDWR|os.O_CREATE), open(t, filepath.Join(b.Dir, k.name), os.O_RDWR)
			if err := k.try(mine, unix.F_WRLCK); err != nil {
				t.Fatal(err)
			}
			if _, err := mine.WriteAt([]byte("under the lock"), 0); err != nil {
				t.Fatal(err)
			}
			refused := func() error {
				if err := k.try(theirs, unix.F_RDLCK); !errors.Is(err, unix.EAGAIN) {
					return fmt.Errorf("%v, want %v", err, unix.EAGAIN)
				}
				return nil
			}
			within(t, patience, "a lock of the other mount", refused)
			restart()
			within(t, lease+patience, "the same after a restart", refused)
			got := make(chan error, 1)
			go func() { got <- k.wait(theirs, unix.F_WRLCK) }() // ends when the lock is free
			time.Sleep(300 * time.Millisecond)
			restart()
			select {
			case err := <-got:
				t.Fatalf("a lock that is held was given away in a restart (%v)", err)
			case <-time.After(lease + 2*time.Second):
			}
			within(t, lease+patience, "unlock", func() error { return k.try(mine, unix.F_UNLCK) })
			within(t, lease+patience, "the lock that was waited for", func() error { return <-got })
			b := make([]byte, 20)
			if n, err := theirs.ReadAt(b, 0); string(b[:n]) != "under the lock" {
				t.Errorf("%q, %v", b[:n], err)
			}
		})
	}
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}

func flock(f *os.File, how int16, nonblock int) error {
	op := map[int16]int{unix.F_RDLCK: unix.LOCK_SH, unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[how]
	for {
		err := unix.Flock(int(f.Fd()), op|nonblock)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
