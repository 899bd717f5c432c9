package locktest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cases are run on a local directory, too: what they expect is what Linux does.
var cases = []struct {
	name string
	run  func(t *testing.T, a, b *Worker)
}{
	{"fcntl", func(t *testing.T, a, b *Worker) {
		a.Do("posix f w 10 10", "ok")
		b.Do("posix f r 0 10", "ok")
		b.Do("posix f r 0 11", "EAGAIN")
		b.Do("posix f w 20 0", "ok")
		a.Do("posix f r 1000000 1", "EAGAIN")
		a.Do("posix f r 10 10", "ok") // downgrade
		b.Do("posix f r 5 10", "ok")
		a.Do("posix f w 10 10", "EAGAIN")
		b.Do("posix f u 0 20", "ok")
		a.Do("posix f w 10 10", "ok") // upgrade
		a.Do("posix f u 12 2", "ok")
		b.Do("posix f w 12 2", "ok")
		b.Do("posix f w 11 1", "EAGAIN")
		b.Do("posix f w 14 1", "EAGAIN")
	}},
	{"F_GETLK", func(t *testing.T, a, b *Worker) {
		a.Do("posix f w 10 10", "ok")
		by := fmt.Sprint(" by ", a.cmd.Process.Pid)
		b.Do("get f r 0 0", "w 10 10"+by)
		b.Do("get f r 0 10", "free")
		a.Do("get f w 0 0", "free")
		a.Do("posix f r 30 0", "ok")
		b.Do("get f r 20 0", "free")
		b.Do("get f w 20 0", "r 30 0"+by)
	}},
	{"F_SETLKW", func(t *testing.T, a, b *Worker) {
		a.Do("posix f w 0 10", "ok")
		b.Blocks("posixw f w 5 10")
		a.Do("posix f u 0 5", "ok")
		a.Do("posix f u 5 5", "ok")
		b.Want("after waiting", "ok")
		a.Do("posix f r 14 1", "EAGAIN")
	}},
	{"F_OFD_SETLK", func(t *testing.T, a, b *Worker) {
		a.Do("open g 1", "ok")
		a.Do("ofd f w 0 10", "ok")
		a.Do("ofd g w 0 10", "EAGAIN") // though it is the same process
		a.Do("posix f w 0 10", "EAGAIN")
		b.Do("posix f r 0 1", "EAGAIN")
		a.Do("close g", "ok")
		b.Do("posix f r 0 1", "EAGAIN")
		b.Blocks("ofdw f w 0 10")
		a.Do("close f", "ok") // the end of the open file
		b.Want("after waiting", "ok")
		b.Do("posix f r 0 1", "EAGAIN")
	}},
	{"flock", func(t *testing.T, a, b *Worker) {
		a.Do("open g 1", "ok")
		a.Do("ex f", "ok")
		a.Do("sh g", "EAGAIN")
		a.Do("posix g w 0 10", "ok") // the two kinds do not meet
		b.Do("ex f", "EAGAIN")
		b.Blocks("shw f")
		a.Do("sh f", "ok") // downgrade
		b.Want("after waiting", "ok")
		a.Do("sh g", "ok")
		a.Do("ex f", "EAGAIN") // and has lost it
		a.Do("un g", "ok")
		b.Do("ex f", "ok")
		a.Do("close g", "ok")
		b.Do("shw f", "ok") // its own lock is not in the way
		a.Do("sh f", "ok")
	}},
	{"closing", func(t *testing.T, a, b *Worker) {
		a.Do("posix f w 0 10", "ok")
		a.Do("openr g 1", "ok")
		b.Do("posix f r 0 10", "EAGAIN")
		a.Do("close g", "ok") // any descriptor of the file
		b.Do("posix f r 0 10", "ok")
		// A lock that was set through a descriptor for reading ends with it, too.
		a.Do("openr g 1", "ok")
		a.Do("posix g r 0 10", "ok")
		b.Do("posix f w 0 10", "EAGAIN")
		a.Do("close g", "ok")
		b.Do("posix f w 0 10", "ok")
	}},
	{"deadlock", func(t *testing.T, a, b *Worker) {
		a.Do("open g 2", "ok")
		b.Do("open g 2", "ok")
		a.Do("posix f w 0 1", "ok")
		b.Do("posix g w 0 1", "ok")
		a.Blocks("posixw g w 0 1")
		b.Do("posixw f w 0 1", "EDEADLK")
		b.Do("posix g u 0 1", "ok")
		a.Want("after waiting", "ok")
	}},
	{"signals", func(t *testing.T, a, b *Worker) {
		a.Do("posix f w 0 10", "ok")
		a.Do("ex f", "ok")
		for _, command := range []string{"posixw f r 5 1", "ofdw f r 5 1", "exw f"} {
			b.Blocks(command)
			b.Signal(unix.SIGUSR2) // begins anew
			select {
			case got := <-b.answers:
				t.Errorf("%s after a signal with SA_RESTART: %s", command, got)
			case <-time.After(50 * time.Millisecond):
			}
			b.Signal(unix.SIGUSR1)
			b.Want(command, "EINTR")
		}
		a.Do("posix f u 0 10", "ok")
		a.Do("un f", "ok")
		a.Do("posix f w 0 10", "ok") // nothing was left behind
		a.Do("ex f", "ok")
	}},
	{"killed holder", func(t *testing.T, a, b *Worker) {
		c := New(t, a.Dir)
		c.Do("open f 1", "ok")
		c.Do("posix f w 0 10", "ok")
		c.Do("ofd f w 20 10", "ok")
		c.Do("ex f", "ok")
		a.Blocks("posixw f w 0 30")
		b.Blocks("exw f")
		c.Kill()
		a.Want("after the kill", "ok")
		b.Want("after the kill", "ok")
	}},
	{"killed waiter", func(t *testing.T, a, b *Worker) {
		c := New(t, a.Dir)
		c.Do("open f 1", "ok")
		a.Do("posix f w 0 10", "ok")
		c.Blocks("posixw f w 0 20")
		c.Kill()
		a.Do("posix f u 0 10", "ok")
		b.Do("posix f w 0 0", "ok")
	}},
	{"inherited", func(t *testing.T, a, b *Worker) {
		f, err := os.OpenFile(filepath.Join(a.Dir, "1"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		c, d := New(t, a.Dir, f), New(t, a.Dir, f)
		// Locks of a process are its own, though the descriptor is of the same open file.
		c.Do("posix shared0 w 0 10", "ok")
		d.Do("posix shared0 w 0 10", "EAGAIN")
		// Locks of the open file are shared, and go with the last descriptor.
		c.Do("ofd shared0 w 20 10", "ok")
		d.Do("ofd shared0 w 25 10", "ok")
		c.Do("ex shared0", "ok")
		d.Do("ex shared0", "ok")
		a.Do("ofd f r 34 1", "EAGAIN")
		c.Kill()
		d.Do("posix shared0 w 0 10", "ok")
		a.Do("ofd f r 20 1", "EAGAIN")
		a.Do("sh f", "EAGAIN")
		d.Do("ofd shared0 u 20 5", "ok")
		a.Do("ofd f r 20 1", "ok")
		f.Close()
		b.Do("sh f", "EAGAIN")
		d.Do("close shared0", "ok")
		a.Do("ofdw f w 0 0", "ok") // these two wait, since FUSE tells of the end of an open file a moment later
		b.Do("exw f", "ok")
	}},
}

// Run runs all cases between a process that works in dirA and one that works in dirB: the same directory, twice, or seen
// through two mounts.
func Run(t *testing.T, dirA, dirB string) {
	for n, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			sub := fmt.Sprint("locks", n)
			if err := os.Mkdir(filepath.Join(dirA, sub), 0o755); err != nil {
				t.Fatal(err)
			}
			a, b := New(t, filepath.Join(dirA, sub)), New(t, filepath.Join(dirB, sub))
			a.Do("open f 1", "ok")
			b.Do("open f 1", "ok")
			c.run(t, a, b)
		})
	}
}
