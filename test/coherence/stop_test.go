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
const patience = 10 * time.Second

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
	if path := os.Getenv(handEnv); path != "" {
		if err := serveHand(path); err != nil {
			fmt.Println(err)
		}
		return
	}
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
	v := harness.NewVolume(t, harness.Options{Lease: lease, Remote: true})
	a, b := twoMounts(v)
	for _, name := range []string{"dirty", "locked", "writer", "untouched"} {
		// Old bytes that were not stable could be lost with the client's session, too, and the file be empty: nobody knows of blocks of
		// a namespace before they are.
		f := open(t, filepath.Join(a.Dir, name), os.O_RDWR|os.O_CREATE)
		_, err := f.WriteAt(fill('0', writerSize), 0)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	// On namespaces others see zeros where nothing was stable when the client was lost.
	if err := open(t, a.Dir+"/untouched", os.O_RDWR).Sync(); err != nil {
		t.Fatal(err)
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

// handEnv makes this test binary do with the file it names what it is told on standard input, and say "ok" or the error.
const handEnv = "WEFT_TEST_HAND"

// hand is such a process. A process that has files of a mount open cannot start others while the servers are dead: the
// copies of the descriptors that exec closes wait for them.
type hand struct {
	in  io.Writer
	out *bufio.Reader
}

func newHand(t *testing.T, path string) *hand {
	t.Helper()
	cmd := harness.Self(handEnv + "=" + path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return &hand{in, bufio.NewReader(out)}
}

// do has the process do one thing and returns its answer.
func (h *hand) do(command string) string {
	fmt.Fprintln(h.in, command)
	line, err := h.out.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(line)
}

// serveHand is the other side.
func serveHand(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		kind, command, _ := strings.Cut(in.Text(), " ")
		how := map[string]int16{"try": unix.F_WRLCK, "wait": unix.F_WRLCK, "unlock": unix.F_UNLCK}[command]
		var err error
		switch {
		case kind == "write":
			_, err = f.WriteAt([]byte(command), 0)
		case kind == "read":
			b := make([]byte, 100)
			n, _ := f.ReadAt(b, 0)
			fmt.Println(string(b[:n]))
			continue
		case kind == "flock" && command == "wait":
			err = flock(f, how, 0)
		case kind == "flock":
			err = flock(f, how, unix.LOCK_NB)
		case command == "wait":
			err = lock(f, unix.F_SETLKW, how)
		default:
			err = lock(f, unix.F_SETLK, how)
		}
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok")
		}
	}
	return in.Err()
}

func flock(f *os.File, how int16, nonblock int) error {
	op := map[int16]int{unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[how]
	for {
		err := unix.Flock(int(f.Fd()), op|nonblock)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// TestRestart kills the metadata service while locks are held and waited for.
func TestRestart(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease, Remote: true})
	a, b := twoMounts(v)
	restart := func() {
		v.Kill()
		v.Start()
	}
	for _, kind := range []string{"fcntl", "flock"} {
		t.Run(kind, func(t *testing.T) {
			mine, theirs := newHand(t, filepath.Join(a.Dir, kind)), newHand(t, filepath.Join(b.Dir, kind))
			says := func(h *hand, command, want string) func() error {
				return func() error {
					if got := h.do(command); got != want {
						return fmt.Errorf("%q, want %q", got, want)
					}
					return nil
				}
			}
			held := unix.EAGAIN.Error()
			within(t, patience, "a lock", says(mine, kind+" try", "ok"))
			within(t, patience, "a write", says(mine, "write under-the-lock", "ok"))
			within(t, patience, "a lock of the other mount", says(theirs, kind+" try", held))
			restart()
			within(t, lease+patience, "the same after a restart", says(theirs, kind+" try", held))
			got := make(chan string, 1)
			go func() { got <- theirs.do(kind + " wait") }() // ends when the lock is free
			time.Sleep(300 * time.Millisecond)
			restart()
			select {
			case said := <-got:
				t.Fatalf("a lock that is held was given away in a restart: %s", said)
			case <-time.After(lease + 2*time.Second):
			}
			within(t, lease+patience, "unlock", says(mine, kind+" unlock", "ok"))
			select {
			case said := <-got:
				if said != "ok" {
					t.Errorf("the lock that was waited for: %s", said)
				}
			case <-time.After(lease + patience):
				t.Fatal("the lock that was waited for does not come")
			}
			within(t, patience, "read what was written", says(theirs, "read", "under-the-lock"))
		})
	}
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}
