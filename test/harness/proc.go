package harness

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/internal/waittest"
)

// child is weft or weftd, started by the test.
type child struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended
	err   error         // how; read it after that
}

// launch starts weft or weftd. A test that dies takes it along.
func launch(t testing.TB, log *os.File, env []string, name string, args ...string) *child {
	t.Helper()
	return launchUnder(t, nil, log, env, name, args...)
}

// launchUnder does it by another program and its arguments.
func launchUnder(t testing.TB, starter []string, log *os.File, env []string, name string, args ...string) *child {
	t.Helper()
	return launchProgram(t, log, env, append(append(append([]string{}, starter...), Bin(t, name)), args...)...)
}

// launchProgram starts any program.
func launchProgram(t testing.TB, log *os.File, env []string, argv ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(argv[0], argv[1:]...), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stdout, c.cmd.Stderr = log, log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() { // ends with the process
		// Pdeathsig tells of the end of the thread that started the process, and a thread of a test may end: one that has
		// changed its credentials is not used again.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
			close(c.ended)
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *child) gone() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// end sends a signal, if it is not 0, waits for the end and says how it was.
func (c *child) end(t testing.TB, sig syscall.Signal) error {
	c.cmd.Process.Signal(sig)
	select {
	case <-c.ended:
	case <-time.After(endTime):
		t.Errorf("%v did not end within %v; the log shows where it stands", c.cmd.Args, endTime)
		c.dump()
		c.cmd.Process.Kill()
		<-c.ended
	}
	return c.err
}

// dump makes a process that hangs print its goroutines to its log, and end.
func (c *child) dump() {
	c.cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-c.ended:
	case <-time.After(5 * time.Second):
	}
}

// endTime is enough for what weft and weftd allow themselves when they are told to end.
const endTime = time.Minute

// Self is a command that runs this test binary again, with these flags and this in its environment, by which its TestMain
// knows what to do. It dies with the test.
func Self(env string, flags ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], flags...)
	cmd.Env = append(os.Environ(), env)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// Proc is a server of the test.
type Proc struct {
	t   testing.TB
	run *child // nil when it has ended
}

// Spawn starts weft or weftd as a server; it ends with the test. Its log is printed if the test fails.
func Spawn(t testing.TB, name string, args ...string) *Proc {
	t.Helper()
	p := &Proc{t: t, run: launch(t, openLog(t, t.TempDir(), name), nil, name, args...)}
	t.Cleanup(func() { p.End(syscall.SIGKILL) })
	return p
}

// End sends a signal and waits for the end; a second call does nothing.
func (p *Proc) End(sig syscall.Signal) {
	if p.run != nil {
		p.run.end(p.t, sig)
		p.run = nil
	}
}

// FreeAddr is a loopback address HOST:PORT for a server of the test, also when that is started again.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return porttest.For(t)
}

// Dir makes a directory on the disk. Every user may enter it: data servers act as other users.
func Dir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		os.Chmod(d, 0o755)
	}
	return dir
}

// Await is waittest.Until with longer pauses: ok asks programs and mounts.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !waittest.Poll(time.Minute, 20*time.Millisecond, ok) {
		t.Fatalf("not after a minute: %s", what)
	}
}

// AwaitListen waits until somebody listens at addr.
func AwaitListen(t testing.TB, addr string) {
	t.Helper()
	Await(t, "a server at "+addr, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// MountAt mounts ADDR:/ on a new directory, serving in the foreground, and returns the mount.
func MountAt(t testing.TB, addr string, options ...string) *Mount {
	t.Helper()
	NeedMount(t)
	v := &Volume{t: t, Addr: addr, base: Dir(t)}
	return v.Mount(options...)
}
