package locks

import (
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
	"github.com/weftfs/weft/test/locktest"
)

// TestLockWorker is not a test but a process of the others.
func TestLockWorker(t *testing.T) { locktest.Serve(t) }

// Locks between two mounts are like those between two processes on a local directory.
func TestTwoMounts(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	locktest.Run(t, v.Mount().Dir, v.Mount().Dir)
}

// holders is two mounts, with a process each that has the same file open.
func holders(t *testing.T, lease time.Duration) (v *harness.Volume, m *harness.Mount, a, b *locktest.Worker) {
	t.Helper()
	v = harness.NewVolume(t, harness.Options{Lease: lease})
	m = v.Mount()
	a, b = locktest.New(t, m.Dir), locktest.New(t, v.Mount().Dir)
	a.Do("open f 1", "ok")
	b.Do("open f 1", "ok")
	return v, m, a, b
}

// Locks outlive a crash of the service, and others' waiting for them.
func TestServiceRestart(t *testing.T) {
	v, _, a, b := holders(t, 3*time.Second)
	a.Do("posix f w 0 10", "ok")
	a.Do("posix f r 2 3", "ok")
	a.Do("ex f", "ok")
	b.Do("ofd f w 20 10", "ok")
	b.Blocks("posixw f w 4 10")
	for range 2 {
		v.Kill()
		v.Start()
		a.Do("write f", "ok")
		a.Do("posix f r 20 1", "EAGAIN") // which waits until all have had their chance to come back
	}
	c := locktest.New(t, v.Mount().Dir)
	c.Do("open f 1", "ok")
	c.Do("posix f r 0 1", "EAGAIN")
	c.Do("posix f r 2 3", "ok")
	c.Do("posix f w 2 3", "EAGAIN")
	c.Do("sh f", "EAGAIN")
	c.Do("close f", "ok")
	a.Do("close f", "ok")
	b.Want("after the end of the other's locks", "ok")
}

// A process that is stopped with its mount loses its locks after a lease, and gets to know.
func TestStoppedHolder(t *testing.T) {
	const lease = 2 * time.Second
	_, m, a, b := holders(t, lease)
	a.Do("posix f w 0 10", "ok")
	a.Do("open g 2", "ok")
	stopped(t, m, func() {
		at := time.Now()
		b.Blocks("posixw f w 0 10")
		b.Want("after the lease", "ok")
		if took := time.Since(at); took < lease/2 || took > 10*lease {
			t.Errorf("the lock was free after %v", took)
		}
		b.Do("write f", "ok")
	})
	harness.Await(t, "its writes fail", func() bool { return a.Ask("write f") == "EIO" })
	a.Do("posix f w 20 10", "EIO")
	a.Do("write g", "ok") // no lock of that was lost
	a.Do("close f", "ok")
	a.Do("open f 1", "ok")
	a.Do("write f", "ok")
	a.Do("posix f w 0 10", "EAGAIN")
	b.Do("close f", "ok")
	a.Do("posix f w 0 10", "ok")
}

// A mount that is killed frees its locks after a lease.
func TestKilledMount(t *testing.T) {
	_, m, a, b := holders(t, 2*time.Second)
	a.Do("posix f w 0 10", "ok")
	a.Do("ex f", "ok")
	b.Blocks("posixw f w 0 10")
	m.Abort()
	b.Want("after the lease", "ok")
	b.Do("exw f", "ok")
}

// stopped calls f while the mount's process is stopped.
func stopped(t *testing.T, m *harness.Mount, f func()) {
	t.Helper()
	signal := func(sig syscall.Signal) {
		if err := syscall.Kill(m.Pid(), sig); err != nil {
			t.Error(err)
		}
	}
	signal(syscall.SIGSTOP)
	defer signal(syscall.SIGCONT)
	f()
}
