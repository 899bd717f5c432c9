package coherence

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// appendKinds are files as appends meet them.
var appendKinds = []struct {
	name    string
	options harness.Options
	layout  []string
}{
	{"one copy", harness.Options{Lease: lease}, nil},
	{"mirrors", harness.Options{Lease: lease}, []string{"--mirrors", "2"}},
	{"small stripes", harness.Options{Lease: lease}, []string{"--stripe-unit", "4KiB", "--stripe-count", "4"}},
	{"namespaces", harness.Options{Lease: lease, NVMe: 2}, nil},
}

// eachAppendKind runs a test with two mounts of a volume for each of them.
func eachAppendKind(t *testing.T, do func(t *testing.T, v *harness.Volume, a, b *harness.Mount)) {
	for _, kind := range appendKinds {
		t.Run(kind.name, func(t *testing.T) {
			v := harness.NewVolume(t, kind.options)
			a, b := twoMounts(v)
			if kind.layout != nil {
				harness.Weft(t, append([]string{"layout", "set", a.Dir}, kind.layout...)...)
			}
			do(t, v, a, b)
		})
	}
}

// openAppend opens a file for appending; what this process starts does not inherit it.
func openAppend(t *testing.T, path string) *os.File {
	return open(t, path, os.O_CREATE|os.O_WRONLY|os.O_APPEND)
}

// shareAppends makes appends to a file ask the service for their places: another mount has read it since the last
// lease.
func shareAppends(t *testing.T, path string) {
	t.Helper()
	if _, err := os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
}

// TestAppendsBesideTruncation appends on one mount while another one makes the file shorter. What is appended lies
// behind what is left, with nothing in between: a place at the old end of the file must not outlive that.
func TestAppendsBesideTruncation(t *testing.T) {
	const left = 20
	head := bytes.Repeat([]byte("h"), left)
	eachAppendKind(t, func(t *testing.T, _ *harness.Volume, a, b *harness.Mount) {
		for _, way := range []struct {
			name string
			left int
			cut  func(path string) error
		}{
			{"truncate", 0, func(path string) error { return unix.Truncate(path, 0) }},
			{"O_TRUNC", 0, func(path string) error {
				f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
				if err == nil {
					err = f.Close()
				}
				return err
			}},
			{"ftruncate to the middle", left, func(path string) error {
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				if err == nil {
					err = errors.Join(f.Truncate(left), f.Close())
				}
				return err
			}},
		} {
			t.Run(way.name, func(t *testing.T) {
				here, there := filepath.Join(a.Dir, way.name), filepath.Join(b.Dir, way.name)
				w := openAppend(t, here)
				rounds := 40
				if *long {
					rounds = 150
				}
				for round := range rounds {
					if err := errors.Join(unix.Truncate(there, 0), os.WriteFile(there, head[:way.left], 0o644)); err != nil {
						t.Fatal(err)
					}
					shareAppends(t, there)
					add := func(n int) error {
						for i := range n {
							if _, err := fmt.Fprintf(w, "%04d.%02d.\n", round, i); err != nil {
								return err
							}
						}
						return nil
					}
					if err := add(5); err != nil {
						t.Fatal(err)
					}
					cut := make(chan error, 1)
					begin := make(chan struct{})
					go func() { // ends with the truncation
						<-begin
						cut <- way.cut(there)
					}()
					close(begin)
					if err := errors.Join(add(6), <-cut); err != nil {
						t.Fatal(err)
					}
					got, err := os.ReadFile(here)
					if err != nil || !bytes.HasPrefix(got, head[:way.left]) || (len(got)-way.left)%9 != 0 || bytes.Contains(got, []byte{0}) {
						t.Fatalf("round %d: %q, %v", round, got, err)
					}
					for rest := got[way.left:]; len(rest) > 0; rest = rest[9:] {
						if rest[8] != '\n' || !bytes.HasPrefix(rest, fmt.Appendf(nil, "%04d.", round)) {
							t.Fatalf("round %d: %q", round, got)
						}
					}
				}
			})
		}
	})
}

// TestAppendsFollowed appends on two mounts to a file that others follow, each in its way: whatever is shown to be
// there is whole records.
func TestAppendsFollowed(t *testing.T) {
	const size = 16
	eachAppendKind(t, func(t *testing.T, v *harness.Volume, a, b *harness.Mount) {
		c := v.Mount(mountOptions()...)
		const name = "followed"
		openAppend(t, filepath.Join(a.Dir, name))
		records := 300
		if *long {
			records = 1500
		}
		var writers, followers sync.WaitGroup
		over := make(chan struct{})
		for _, m := range []*harness.Mount{a, b} {
			w := openAppend(t, filepath.Join(m.Dir, name))
			writers.Go(func() { // ends with its last record
				for i := range records {
					if _, err := fmt.Fprintf(w, "%s %09d....\n", m.Dir[len(m.Dir)-1:], i); err != nil {
						t.Errorf("record %d: %v", i, err)
						return
					}
					time.Sleep(300 * time.Microsecond) // the others shall get on, too; nothing depends on how long it is
				}
			})
		}
		go func() { // ends with the writers
			writers.Wait()
			close(over)
		}()
		whole := func(what string, got []byte) bool {
			if at := bytes.IndexByte(got, 0); at >= 0 || len(got)%size != 0 {
				t.Errorf("%s: %d bytes, NUL at %d", what, len(got), at)
				return false
			}
			return true
		}
		// follow calls look until the writers have ended, and once more.
		follow := func(look func() bool) {
			followers.Go(func() { // ends with the writers, or a failure
				for last := false; look() && !last; {
					select {
					case <-over:
						last = true
					default:
					}
				}
			})
		}
		for _, m := range []*harness.Mount{a, b, c} {
			path := filepath.Join(m.Dir, name)
			tail := open(t, path, os.O_RDONLY)
			read := 0
			follow(func() bool {
				b, err := io.ReadAll(tail)
				if read += len(b); err != nil {
					t.Error(err)
				}
				return err == nil && whole("follower", b)
			})
			by := open(t, path, os.O_RDONLY)
			last := int64(0)
			sees := func(what string, size int64, err error) bool {
				if err != nil || size < last {
					t.Errorf("%s: %d bytes after %d, %v", what, size, last, err)
					return false
				}
				b := make([]byte, size-last)
				n, err := by.ReadAt(b, last)
				if n != len(b) {
					t.Errorf("%s: %d bytes, of which the last %d are %d: %v", what, size, len(b), n, err)
				}
				last = size
				return n == len(b) && whole(what, b)
			}
			follow(func() bool {
				info, err := os.Stat(path)
				if err != nil {
					return sees("stat", 0, err)
				}
				if !sees("stat", info.Size(), nil) {
					return false
				}
				end, err := by.Seek(0, io.SeekEnd)
				if !sees("SEEK_END", end, err) || last == 0 {
					return err == nil
				}
				hole, err := by.Seek(last-1, unix.SEEK_HOLE)
				return sees("SEEK_HOLE", hole, err)
			})
		}
		writers.Wait()
		followers.Wait()
		got, err := os.ReadFile(filepath.Join(c.Dir, name))
		if err != nil || len(got) != 2*records*size {
			t.Errorf("%d bytes, want %d: %v", len(got), 2*records*size, err)
		}
		whole("the file", got)
	})
}

// A write that has returned is seen by everybody at once, though appends are reported late.
func TestAppendsReturned(t *testing.T) {
	eachAppendKind(t, func(t *testing.T, _ *harness.Volume, a, b *harness.Mount) {
		here, there := filepath.Join(a.Dir, "f"), filepath.Join(b.Dir, "f")
		w, x := openAppend(t, here), openAppend(t, there)
		want := ""
		for i := range 60 {
			for _, f := range []*os.File{w, x} {
				record := fmt.Sprintf("%s %d\n", f.Name(), i)
				if _, err := f.WriteString(record); err != nil {
					t.Fatal(err)
				}
				want += record
				for _, path := range []string{there, here} {
					if info, err := os.Stat(path); err != nil || info.Size() != int64(len(want)) {
						t.Fatalf("%s: %d bytes, want %d (%v)", path, info.Size(), len(want), err)
					}
				}
			}
		}
		for _, path := range []string{there, here} {
			if got, err := os.ReadFile(path); err != nil || string(got) != want {
				t.Errorf("%s: %d bytes of %d, %v", path, len(got), len(want), err)
			}
		}
	})
}

// A copy of a growing file that is continued with rsync --append has no zeros in it.
func TestAppendsRsync(t *testing.T) {
	harness.Need(t, "rsync")
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	a, b := twoMounts(v)
	copied := filepath.Join(t.TempDir(), "copy")
	var writers sync.WaitGroup
	over := make(chan struct{})
	openAppend(t, filepath.Join(a.Dir, "log"))
	for _, m := range []*harness.Mount{a, b} {
		w := openAppend(t, filepath.Join(m.Dir, "log"))
		writers.Go(func() { // ends with its last record
			for i := range 400 {
				if _, err := fmt.Fprintf(w, "%09d.....\n", i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	go func() { // ends with the writers
		writers.Wait()
		close(over)
	}()
	for last := false; ; {
		if out, err := exec.Command("rsync", "--append", "--inplace", filepath.Join(b.Dir, "log"), copied).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if last {
			break
		}
		select {
		case <-over:
			last = true
		default:
		}
	}
	got, err := os.ReadFile(copied)
	if err != nil || len(got) != 2*400*15 || bytes.IndexByte(got, 0) >= 0 {
		t.Errorf("%d bytes, NUL at %d, %v", len(got), bytes.IndexByte(got, 0), err)
	}
}

// TestAppendsOfLost has a mount that appends killed, or stopped, while another one appends, too. Everybody else goes
// on: they see the file with all that has returned, and zeros at most where the lost one was writing.
func TestAppendsOfLost(t *testing.T) {
	if *mounts == 1 {
		t.Skip("missing: a second mount, which -mounts 2 makes")
	}
	for _, way := range []struct {
		name string
		sig  syscall.Signal
	}{{"killed", syscall.SIGKILL}, {"stopped", syscall.SIGSTOP}} {
		t.Run(way.name, func(t *testing.T) {
			// It is not the lease that ends it. What the data servers have lent a stopped process, nobody can take away
			// before.
			v := harness.NewVolume(t, harness.Options{Lease: time.Minute, Remote: way.sig == syscall.SIGSTOP})
			a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
			here, there := filepath.Join(a.Dir, "f"), filepath.Join(b.Dir, "f")
			const size = 12
			record := strings.Repeat(".", size-1) + "\n"
			x := openAppend(t, there)
			// So a writes nowhere but where the service says, from the first append on.
			if _, err := x.WriteString(record); err != nil {
				t.Fatal(err)
			}
			// A child appends through a, so that nothing of this process hangs with it.
			child := exec.Command("sh", "-c", `i=0; exec >>"$0"; while printf '%011d\n' $i; do i=$((i+1)); echo $i >&2; done`, here)
			said, err := child.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				child.Process.Kill()
				a.Abort()
				child.Wait()
			}()
			returned, mine := 0, 1
			say := make(chan int, 1<<16)
			go func() { // ends with the child
				defer close(say)
				var n int
				for {
					if _, err := fmt.Fscanln(said, &n); err != nil {
						return
					}
					say <- n
				}
			}()
			for returned < 50 {
				returned = <-say
				if _, err := x.WriteString(record); err != nil {
					t.Fatal(err)
				}
				mine++
			}
			a.Signal(way.sig)
			within(t, patience, "append", func() error { _, err := x.WriteString(record); return err })
			mine++
			var got []byte
			within(t, patience, "read", func() error { got, err = os.ReadFile(there); return err })
			for more := true; more; {
				select {
				case n, ok := <-say:
					returned, more = max(returned, n), ok
				default:
					more = false
				}
			}
			records, zeros := 0, 0
			for rest := got; len(rest) > 0; rest = rest[min(size, len(rest)):] {
				switch r := rest[:min(size, len(rest))]; {
				case len(r) < size:
					t.Errorf("part of a record: %q", r)
				case bytes.Count(r, []byte{0}) == size:
					zeros++
				case r[size-1] == '\n' && r[0] == '.':
					mine--
				case r[size-1] == '\n':
					records++
				default:
					t.Errorf("record %q", r)
				}
			}
			if records < returned || zeros > 1 || mine != 0 {
				t.Errorf("%d records of %d that had returned, %d places without data, %d records of the other mount are missing", records, returned, zeros, mine)
			}
			if info, err := os.Stat(there); err != nil || info.Size() != int64(len(got)) {
				t.Errorf("size %d after %d bytes were read, %v", info.Size(), len(got), err)
			}
			// What is appended from now on comes right behind.
			if _, err := x.WriteString("end"); err != nil {
				t.Fatal(err)
			}
			if again, err := os.ReadFile(there); err != nil || !bytes.Equal(again, append(got, "end"...)) {
				t.Errorf("%d bytes after %d, %v", len(again), len(got), err)
			}
		})
	}
}
