package harness

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Proc is a server of the test.
type Proc struct {
	t    testing.TB
	name string
	cmd  *exec.Cmd
}

// Spawn starts weft or weftd as a server; it ends with the test. Its log is printed if the test fails.
func Spawn(t testing.TB, name string, args ...string) *Proc {
	t.Helper()
	log := openLog(t, t.TempDir(), name)
	p := &Proc{t: t, name: name, cmd: exec.Command(Bin(t, name), args...)}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.End(syscall.SIGKILL) })
	return p
}

// End sends a signal and waits for the end; a second call does nothing.
func (p *Proc) End(sig syscall.Signal) {
	if p.cmd == nil {
		return
	}
	p.cmd.Process.Signal(sig)
	timer := time.AfterFunc(40*time.Second, func() {
		p.t.Errorf("%s did not end within 40 s of %v", p.name, sig)
		p.cmd.Process.Kill()
	})
	p.cmd.Wait()
	timer.Stop()
	p.cmd = nil
}

// FreeAddr is a loopback address HOST:PORT that nobody listened on a moment ago.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return freeAddr(t)
}

// Dir makes a directory that every user may enter, on the disk.
func Dir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		os.Chmod(d, 0o755)
	}
	return dir
}

// Await polls until ok and fails the test if that takes longer than a minute.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after a minute", what)
		}
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
	v := &Volume{t: t, Addr: addr, opts: Options{Dir: Dir(t)}}
	return v.Mount(options...)
}
