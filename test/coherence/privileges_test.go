package coherence

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// stranger is the user who overwrites programs of root.
const stranger = 65534

// asStranger calls f in a thread that has the rights of stranger in file systems, and no capabilities there.
func asStranger(f func() error) error {
	done := make(chan error)
	go func() { // ends with its thread, which nobody else gets
		runtime.LockOSThread()
		unix.SetfsgidRetGid(stranger)
		unix.SetfsuidRetUid(stranger)
		done <- f()
	}()
	return <-done
}

// programs are one of root's, and one that takes its place: that prints "root" if it has root's privileges, and the
// first never does.
func programs(t *testing.T) (good, evil []byte) {
	t.Helper()
	harness.Need(t, "id", "whoami")
	for name, b := range map[string]*[]byte{"id": &good, "whoami": &evil} {
		path, err := exec.LookPath(name)
		if err == nil {
			*b, err = os.ReadFile(path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return good, evil
}

// execute runs a program as stranger and returns what it prints. One that is half overwritten prints nothing.
func execute(path string) (string, error) {
	cmd := exec.Command(path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	out, err := cmd.Output()
	return string(bytes.TrimSpace(out)), err
}

// install makes a program that is executed as root and that everybody may write. All of it is durable, so that its
// attributes may be kept.
func install(path string, contents []byte) error {
	os.Remove(path)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = f.Write(contents)
	return errors.Join(err, f.Sync(), f.Close(), unix.Chmod(path, 0o4777))
}

// armedNow reports whether a program has a set-user-ID bit; the kernel is asked for the mode alone, as by stat -c %A.
func armedNow(path string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MODE, &st)
	return st.Mode&unix.S_ISUID != 0, err
}

// overwrite is a way to begin to overwrite a program: after it there is no bit any more. The rest follows by ordinary
// writes.
type overwrite struct {
	name  string
	begin func(path string, f *os.File, contents []byte) error // f is nil with path only
	flags int                                                  // of open(2), or one of these
}

const (
	byPath = -1 - iota // it is not opened before
	byRoot             // nor is it stranger who begins
)

var overwrites = []overwrite{
	{"write", func(_ string, f *os.File, b []byte) error { _, err := f.WriteAt(b[:1], 0); return err }, os.O_WRONLY},
	{"append", func(_ string, f *os.File, b []byte) error { _, err := f.Write(b[:1]); return err }, os.O_WRONLY | os.O_APPEND},
	{"O_TRUNC", func(string, *os.File, []byte) error { return nil }, os.O_WRONLY | os.O_TRUNC},
	{"truncate", func(path string, _ *os.File, _ []byte) error { return unix.Truncate(path, 0) }, byPath},
	{"ftruncate", func(_ string, f *os.File, _ []byte) error { return f.Truncate(10) }, os.O_RDWR},
	{"fallocate", func(_ string, f *os.File, _ []byte) error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
	}, os.O_RDWR},
	{"mmap", func(_ string, f *os.File, b []byte) error {
		m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		copy(m, b)
		return errors.Join(unix.Msync(m, unix.MS_SYNC), unix.Munmap(m))
	}, os.O_RDWR},
	{"chown", func(path string, _ *os.File, _ []byte) error { return unix.Chown(path, stranger, stranger) }, byRoot},
}

// overwritten does it as stranger, and then looks whether the bit is gone everywhere.
func (o *overwrite) overwritten(path string, contents []byte, mounts ...string) error {
	var f *os.File
	begin := func() (err error) {
		if o.flags >= 0 {
			if f, err = os.OpenFile(path, o.flags, 0); err != nil {
				return err
			}
		}
		return o.begin(path, f, contents)
	}
	var err error
	if o.flags == byRoot {
		err = begin()
	} else {
		err = asStranger(begin)
	}
	if f != nil {
		defer f.Close()
	}
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if armed, err := armedNow(filepath.Join(m, filepath.Base(path))); err != nil || armed {
			return fmt.Errorf("%s: still with its bit through %s: %v, %w", o.name, m, armed, errOutlived)
		}
	}
	return asStranger(func() error {
		g, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = g.WriteAt(contents, 0)
		return errors.Join(err, g.Close())
	})
}

var errOutlived = errors.New("a bit outlived an overwrite")

// TestOverwritten has programs of root's overwritten by another user while they are executed, all through two mounts,
// several at a time.
func TestOverwritten(t *testing.T) {
	good, evil := programs(t)
	v := harness.NewVolume(t, harness.Options{})
	a, b := twoMounts(v)
	rounds := 4
	if *long {
		rounds = 60
	}
	var refused, ran atomic.Int64
	for _, o := range overwrites {
		t.Run(o.name, func(t *testing.T) {
			var all sync.WaitGroup
			for n := range 4 {
				all.Go(func() { // ends with its rounds
					by := []string{a.Dir, b.Dir}[n%2]
					name := fmt.Sprintf("program%d", n)
					for round := range rounds {
						if err := install(filepath.Join(a.Dir, name), good); err != nil {
							t.Error(err)
							return
						}
						var stop atomic.Bool
						var executing sync.WaitGroup
						for _, m := range []string{a.Dir, b.Dir} {
							if armed, err := armedNow(filepath.Join(m, name)); err != nil || !armed {
								t.Errorf("installed by %s, seen by %s: %v, %v", a.Dir, m, armed, err)
							}
							if round%2 == 0 {
								continue // the overwrite comes at once
							}
							executing.Go(func() { // ends when it is told to
								for !stop.Load() {
									out, err := execute(filepath.Join(m, name))
									if ran.Add(1); out == "root" {
										t.Errorf("%s through %s: executed as root, by %s", o.name, by, m)
									}
									if errors.Is(err, unix.ESTALE) {
										t.Errorf("execve: %v", err)
									}
								}
							})
						}
						err := tryFor(50, &refused, func() error { return o.overwritten(filepath.Join(by, name), evil, a.Dir, b.Dir) })
						if errors.Is(err, unix.ETXTBSY) {
							stop.Store(true)
							executing.Wait()
							harness.Await(t, "the end of the executions", func() bool {
								err = o.overwritten(filepath.Join(by, name), evil, a.Dir, b.Dir)
								return !errors.Is(err, unix.ETXTBSY)
							})
						}
						stop.Store(true)
						executing.Wait()
						if err != nil {
							t.Error(err)
						}
						for _, m := range []string{a.Dir, b.Dir} {
							var out string
							var err error
							harness.Await(t, "an end of ETXTBSY", func() bool { // a child of this process may have a file that was written
								out, err = execute(filepath.Join(m, name))
								return !errors.Is(err, unix.ETXTBSY)
							})
							if out != "nobody" {
								t.Errorf("%s through %s: executed at last by %s: %q, %v", o.name, by, m, out, err)
							}
						}
					}
				})
			}
			all.Wait()
		})
	}
	t.Logf("%d executions, %d overwrites refused", ran.Load(), refused.Load())
}

// tryFor repeats what is refused with ETXTBSY.
func tryFor(times int, refused *atomic.Int64, f func() error) (err error) {
	for range times {
		if err = f(); !errors.Is(err, unix.ETXTBSY) {
			return err
		}
		refused.Add(1)
		time.Sleep(time.Millisecond)
	}
	return err
}

// TestArmed has a program get its privileges, from one mount, while another user has it open for writing through
// another: what is written from then on takes them away.
func TestArmed(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	a, b := twoMounts(v)
	for n, by := range []string{a.Dir, b.Dir} {
		for _, c := range []struct {
			name string
			arm  func(path string) error
		}{
			{"chmod", func(path string) error { return unix.Chmod(path, 0o4777) }},
			{"setxattr", func(path string) error { return unix.Setxattr(path, capability, rootCapabilities, 0) }},
		} {
			name := fmt.Sprint(c.name, n)
			path := filepath.Join(a.Dir, name)
			if err := errors.Join(os.WriteFile(path, nil, 0o666), os.Chmod(path, 0o666)); err != nil {
				t.Fatal(err)
			}
			var f *os.File
			write := func() error { _, err := f.WriteAt([]byte("x"), 0); return err }
			err := asStranger(func() (err error) {
				if f, err = os.OpenFile(filepath.Join(by, name), os.O_WRONLY, 0); err != nil {
					return err
				}
				return write()
			})
			if err != nil {
				t.Fatal(err)
			}
			for range 20 {
				if err := errors.Join(c.arm(path), asStranger(write)); err != nil {
					t.Fatal(err)
				}
				for _, m := range []string{a.Dir, b.Dir} {
					armed, err := armedNow(filepath.Join(m, name))
					_, capable := unix.Getxattr(filepath.Join(m, name), capability, make([]byte, 100))
					if err != nil || armed || capable != unix.ENODATA {
						t.Errorf("%s, written through %s, seen through %s: %v, %v, %v", c.name, by, m, armed, capable, err)
					}
				}
			}
			f.Close()
		}
	}
}

// TestACLMode changes access control lists, and with them modes, while others keep asking for the mode.
func TestACLMode(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	a, b := twoMounts(v)
	path := filepath.Join(a.Dir, "f")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var asking sync.WaitGroup
	for n := range 4 {
		asking.Go(func() { // ends when it is told to
			for !stop.Load() {
				unix.Stat(filepath.Join([]string{a.Dir, b.Dir}[n%2], "f"), new(unix.Stat_t))
			}
		})
	}
	defer asking.Wait()
	defer stop.Store(true)
	for n := range 200 {
		group := uint16(n % 8)
		if err := unix.Setxattr(path, "system.posix_acl_access", accessList(group), 0); err != nil {
			t.Fatal(err)
		}
		for _, m := range []string{a.Dir, b.Dir} {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(m, "f"), &st); err != nil || st.Mode != unix.S_IFREG|0o604|uint32(group)<<3 {
				t.Fatalf("list %d through %s: mode %#o, %v", n, m, st.Mode, err)
			}
		}
	}
}

// accessList is what system.posix_acl_access of a file has that stranger may read; group is its mask, which the mode shows.
func accessList(group uint16) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2) // POSIX_ACL_XATTR_VERSION
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 6, ^uint32(0)}, {2, 4, stranger}, {4, 4, ^uint32(0)}, {0x10, group, ^uint32(0)}, {0x20, 4, ^uint32(0)}} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

const capability = "security.capability"

// rootCapabilities is CAP_SETUID, permitted and effective (struct vfs_cap_data, revision 2).
var rootCapabilities = []byte{1, 0, 0, 2, 1 << 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

// TestOverwrittenProgram has a program executed through one mount for as long as it takes to find out what another one
// may do with it, also after the metadata service was restarted.
func TestOverwrittenProgram(t *testing.T) {
	harness.Need(t, "sleep")
	v := harness.NewVolume(t, harness.Options{})
	a, b := twoMounts(v)
	if a == b {
		t.Skip("missing: a second mount")
	}
	path, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	contents, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	there, here := filepath.Join(a.Dir, "program"), filepath.Join(b.Dir, "program")
	if err := install(there, contents); err != nil {
		t.Fatal(err)
	}
	early := open(t, here, os.O_WRONLY)
	cmd := exec.Command(there, "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	harness.Await(t, "execution", func() bool { err = cmd.Start(); return !errors.Is(err, unix.ETXTBSY) })
	if err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	t.Cleanup(end)
	attempts := map[string]func() error{
		"write":    func() error { return asStranger(func() error { _, err := early.WriteAt([]byte("x"), 0); return err }) },
		"open":     func() error { return asStranger(func() error { return os.WriteFile(here, []byte("x"), 0) }) },
		"truncate": func() error { return asStranger(func() error { return unix.Truncate(here, 0) }) },
	}
	for _, when := range []string{"", ", the service restarted"} {
		for name, attempt := range attempts {
			if err := attempt(); !errors.Is(err, unix.ETXTBSY) {
				t.Errorf("%s%s: %v, want ETXTBSY", name, when, err)
			}
		}
		if armed, err := armedNow(here); err != nil || !armed {
			t.Errorf("the program%s: %v, %v", when, armed, err)
		}
		v.Kill()
		v.Start()
	}
	// Its attributes are nobody's but the owner's.
	if err := errors.Join(unix.Chmod(here, 0o777), unix.Chmod(here, 0o4777)); err != nil {
		t.Error(err)
	}
	end()
	for name, attempt := range attempts {
		harness.Await(t, name+" when it is not executed any more", func() bool { return attempt() == nil })
	}
	if armed, err := armedNow(there); err != nil || armed {
		t.Errorf("the overwritten program: %v, %v", armed, err)
	}
}
