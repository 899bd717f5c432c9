package faults

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// callEnv makes this test binary repeat one of calls in the directory it names, for ever: "CALL DIR".
const callEnv = "WEFT_TEST_CALL"

// calls are what a process may be killed in. Each is done again and again, with i counting, in a directory of its own that
// has a file "f" of some size.
var calls = map[string]func(dir string, i int) error{
	"create": func(dir string, i int) error {
		fd, err := unix.Open(fmt.Sprint(dir, "/new", i%50), unix.O_CREAT|unix.O_RDWR|unix.O_TRUNC, 0o644)
		return errors.Join(err, unix.Close(fd))
	},
	"write": func(dir string, i int) error {
		return onFile(dir, 0, func(fd int) error {
			_, err := unix.Pwrite(fd, make([]byte, 1+i*7919%(1<<20)), int64(i*65537%(4<<20)))
			return err
		})
	},
	"append": func(dir string, i int) error {
		if i%50 == 0 {
			unix.Truncate(dir+"/f", 0)
		}
		return onFile(dir, unix.O_APPEND, func(fd int) error {
			_, err := unix.Write(fd, make([]byte, 1+i*7919%(1<<17)))
			return err
		})
	},
	"write-sync": func(dir string, i int) error {
		return onFile(dir, unix.O_DSYNC, func(fd int) error {
			_, err := unix.Pwrite(fd, make([]byte, 8192), int64(i*65537%(4<<20)))
			return err
		})
	},
	"fsync": func(dir string, i int) error {
		return onFile(dir, 0, func(fd int) error {
			_, err := unix.Pwrite(fd, []byte{1}, int64(i%100000))
			return errors.Join(err, unix.Fsync(fd))
		})
	},
	"read": func(dir string, i int) error {
		return onFile(dir, 0, func(fd int) error {
			_, err := unix.Pread(fd, make([]byte, 1<<20), 0)
			return err
		})
	},
	"mmap": func(dir string, i int) error {
		return onFile(dir, 0, func(fd int) error {
			m, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return err
			}
			for off := i % 4096; off < len(m); off += 4096 {
				m[off]++
			}
			return errors.Join(unix.Msync(m, unix.MS_SYNC), unix.Munmap(m))
		})
	},
	"truncate": func(dir string, i int) error { return unix.Truncate(dir+"/f", int64(i*99991%(6<<20))) },
	"fallocate": func(dir string, i int) error {
		mode := []uint32{0, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}[i%2]
		return onFile(dir, 0, func(fd int) error { return unix.Fallocate(fd, mode, int64(i*4099%(2<<20)), 1<<20) })
	},
	"mkdir": func(dir string, i int) error {
		d := fmt.Sprint(dir, "/d", i%3)
		return errors.Join(ignore(unix.Mkdir(d, 0o755), unix.EEXIST), ignore(unix.Rmdir(d), unix.ENOENT))
	},
	"unlink": func(dir string, i int) error {
		name := fmt.Sprint(dir, "/u", i%3)
		return errors.Join(os.WriteFile(name, make([]byte, 100_000), 0o644), unix.Unlink(name))
	},
	"rename": func(dir string, i int) error {
		return errors.Join(os.WriteFile(dir+"/tmp", make([]byte, 1000), 0o644), unix.Rename(dir+"/tmp", fmt.Sprint(dir, "/final", i%3)))
	},
	"link": func(dir string, i int) error {
		name := dir + "/link"
		return errors.Join(ignore(unix.Link(dir+"/f", name), unix.EEXIST), ignore(unix.Unlink(name), unix.ENOENT))
	},
	"symlink": func(dir string, i int) error {
		name := dir + "/symlink"
		return errors.Join(ignore(unix.Symlink("f", name), unix.EEXIST), ignore(unix.Unlink(name), unix.ENOENT))
	},
	"setattr": func(dir string, i int) error {
		return errors.Join(unix.Chmod(dir+"/f", uint32(0o600+i%64)), unix.Chown(dir+"/f", i%3, i%5), unix.Utimes(dir+"/f", []unix.Timeval{{Sec: int64(i)}, {Sec: int64(i)}}))
	},
	"setxattr": func(dir string, i int) error {
		return errors.Join(unix.Setxattr(dir+"/f", "user.x", make([]byte, i%1000), 0), ignore(unix.Removexattr(dir+"/f", "user.x"), unix.ENODATA))
	},
	"list": func(dir string, i int) error {
		_, err := os.ReadDir(dir)
		return err
	},
	"lock": func(dir string, i int) error {
		return onFile(dir, 0, func(fd int) error {
			return errors.Join(unix.FcntlFlock(uintptr(fd), unix.F_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK}), unix.Flock(fd, unix.LOCK_EX))
		})
	},
}

func onFile(dir string, flags int, do func(fd int) error) error {
	fd, err := unix.Open(dir+"/f", unix.O_RDWR|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return err
	}
	return errors.Join(do(fd), unix.Close(fd))
}

// ignore makes nothing of an error that two processes may cause each other.
func ignore(err error, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

func callForever(name, dir string) error {
	for i := 0; ; i++ {
		if err := calls[name](dir, i); err != nil {
			return err
		}
	}
}

// TestKilledCallers kills processes (kill -9) at random times of a system call that they do again and again. The calls end,
// the processes are gone, others can do the same at once, and the volume is consistent.
func TestKilledCallers(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: true})
	m := v.Mount(mountOptions()...)
	rng := rand.New(rand.NewPCG(*seed, 97))
	t.Logf("-seed %d -kills %d", *seed, *kills)
	for name, call := range calls {
		dir := filepath.Join(m.Dir, name)
		if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(dir+"/f", make([]byte, 1<<20), 0o644)); err != nil {
			t.Fatal(err)
		}
		for range *kills {
			cmd := harness.Self(callEnv + "=" + name + " " + dir)
			var said strings.Builder
			cmd.Stdout = &said
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(10+rng.IntN(60)) * time.Millisecond)
			cmd.Process.Kill()
			gone := make(chan error, 1)
			go func() { gone <- cmd.Wait() }() // ends with the process
			select {
			case <-gone:
			case <-time.After(20 * time.Second):
				t.Fatalf("%s: a killed process is not gone", name)
			}
			if said.Len() > 0 {
				t.Errorf("%s failed before it was killed: %s", name, said.String())
			}
		}
		if name == "mmap" {
			continue // a fault would take this process along
		}
		after := make(chan error, 1)
		go func() { after <- call(dir, 1) }() // ends with the call
		select {
		case err := <-after:
			if err != nil {
				t.Errorf("%s after those that were killed: %v", name, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s after those that were killed: no answer", name)
		}
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}
