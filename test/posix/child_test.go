package posix

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Helper processes: this test binary again. What a mapping does to a process that stores into it, or who owns locks, can
// only be seen from a process of one's own.
var children = map[string]func(args []string) any{
	"fsize":  childFsize,
	"map":    childMap,
	"locker": childLocker,
	"ids":    func(args []string) any { return say(os.Getuid(), open(args[0], unix.O_RDONLY)) },
}

// child is the helper's whole life.
func child(name string) {
	defer func() {
		if p := recover(); p != nil {
			fmt.Print("broke: ", p)
		}
		os.Exit(0)
	}()
	fmt.Print(say(children[name](os.Args[1:])))
}

func helper(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	return cmd
}

// inChild is the answer of a helper, or the signal that ended it.
func inChild(name string, args ...string) any {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := helper(ctx, name, args...).Output()
	if ctx.Err() != nil {
		return "the helper did not end"
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		// Go's runtime turns a SIGBUS of its own code into a crash that names it.
		for _, sig := range []string{"SIGBUS", "SIGSEGV"} {
			if strings.Contains(string(exit.Stderr), sig) {
				return sig
			}
		}
		return fmt.Sprintf("%v %s", err, exit.Stderr)
	}
	try(err)
	return string(out)
}

func childFsize(args []string) any {
	signal.Ignore(unix.SIGXFSZ)
	try(unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: 4096}))
	fd := opened(args[0]+"/f", unix.O_RDWR|unix.O_CREAT)
	_, err := unix.Pwrite(fd, []byte("x"), 4096)
	return err
}

// childMap does one thing with mappings of the file f, which holds "mapped".
func childMap(args []string) any {
	w := world(args[0])
	p := w.at("f")
	fd := opened(p, unix.O_RDWR)
	const rw = unix.PROT_READ | unix.PROT_WRITE
	mapped := func(flags int) []byte { return must(unix.Mmap(fd, 0, 4096, rw, flags)) }
	fill := func(n int) []byte {
		all := pattern(n)
		must(unix.Pwrite(fd, all, 0))
		return all
	}
	switch args[1] {
	case "shared store is seen by read":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Msync(m, unix.MS_SYNC))
		return read(p)
	case "private store is not seen by read":
		m := mapped(unix.MAP_PRIVATE)
		m[0] = 'M'
		return read(p)
	case "shared store is there after munmap":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Munmap(m))
		return read(p)
	case "shared store is there after close and reopen":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Munmap(m))
		try(unix.Close(fd))
		return read(p)
	case "write is seen in a shared mapping":
		m := mapped(unix.MAP_SHARED)
		_ = m[0]
		must(unix.Pwrite(fd, []byte("Written"), 0))
		return string(m[:7])
	case "two shared mappings are one":
		m, n := mapped(unix.MAP_SHARED), mapped(unix.MAP_SHARED)
		_ = n[0]
		m[0] = 'M'
		return string(n[:1])
	case "shared mapping of 3 MiB, stored all over":
		all := fill(3 * stripe)
		m := must(unix.Mmap(fd, 0, len(all), rw, unix.MAP_SHARED))
		for i := 100; i < len(all); i += 5000 {
			m[i], all[i] = '!', '!'
		}
		try(unix.Msync(m, unix.MS_SYNC))
		return read(p) == string(all)
	case "mapping outlives its descriptor":
		m := mapped(unix.MAP_SHARED)
		try(unix.Close(fd))
		return string(m[:6])
	case "mapping outlives its name":
		m := mapped(unix.MAP_SHARED)
		try(unix.Unlink(p))
		try(unix.Close(fd))
		return string(m[:6])
	case "access beyond the end":
		m := must(unix.Mmap(fd, 0, 8192, rw, unix.MAP_SHARED))
		return m[5000]
	case "access after truncation":
		fill(8192)
		m := must(unix.Mmap(fd, 0, 8192, rw, unix.MAP_SHARED))
		_ = m[5000]
		try(unix.Ftruncate(fd, 10))
		return m[5000]
	case "rest of the last page is zero":
		m := mapped(unix.MAP_SHARED)
		return m[100]
	case "store in the rest of the last page is not in the file":
		m := mapped(unix.MAP_SHARED)
		m[100] = 'x'
		try(unix.Munmap(m))
		return fstat(fd).Size
	case "fork shares a shared mapping":
		m := mapped(unix.MAP_SHARED)
		_ = m[0]
		cmd := exec.Command("/bin/sh", "-c", "printf C | dd of=\"$0\" conv=notrunc status=none", p)
		try(cmd.Run())
		return string(m[:1])
	case "mapping at an offset":
		all := fill(3 * 4096)
		m := must(unix.Mmap(fd, 4096, 4096, rw, unix.MAP_SHARED))
		return string(m) == string(all[4096:8192])
	case "mapping at an odd offset":
		_, err := unix.Mmap(fd, 1, 4096, rw, unix.MAP_SHARED)
		return err
	case "mapping of length 0":
		_, _, e := unix.Syscall6(unix.SYS_MMAP, 0, 0, rw, unix.MAP_SHARED, uintptr(fd), 0)
		return errnoOf(e)
	case "mapping of a directory":
		d := opened(string(w), unix.O_RDONLY)
		_, err := unix.Mmap(d, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		return err
	case "msync MS_ASYNC":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		return unix.Msync(m, unix.MS_ASYNC)
	case "msync of what is not mapped":
		_, _, e := unix.Syscall(unix.SYS_MSYNC, 1<<46, 4096, unix.MS_SYNC)
		return errnoOf(e)
	case "madvise MADV_DONTNEED keeps shared stores":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Madvise(m, unix.MADV_DONTNEED))
		return string(m[:1])
	case "store and then pread through O_DIRECT":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		b := must(unix.Mmap(-1, 0, 4096, rw, unix.MAP_ANON|unix.MAP_PRIVATE))
		d := opened(p, unix.O_RDONLY|unix.O_DIRECT)
		n := must(unix.Pread(d, b, 0))
		return string(b[:n])
	case "store and then fallocate punch":
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 6))
		return m[0]
	case "mmap moves mtime":
		before := aged(p)
		m := mapped(unix.MAP_SHARED)
		m[0] = 'M'
		try(unix.Msync(m, unix.MS_SYNC))
		return after(lstat(p).Mtim, before.Mtim)
	case "mremap longer":
		all := fill(3 * 4096)
		m := mapped(unix.MAP_SHARED)
		m = must(unix.Mremap(m, 3*4096, unix.MREMAP_MAYMOVE))
		return string(m) == string(all)
	case "mlock":
		return unix.Mlock(mapped(unix.MAP_SHARED))
	}
	return "no such thing: " + args[1]
}

// A locker is a helper that opens files and locks them as it is told, a line at a time.
type locker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func newLocker() *locker {
	l := &locker{cmd: helper(context.Background(), "locker")}
	l.in = must(l.cmd.StdinPipe())
	l.out = bufio.NewScanner(must(l.cmd.StdoutPipe()))
	try(l.cmd.Start())
	return l
}

// do sends an order and gives the answer.
func (l *locker) do(order ...any) string {
	l.send(order...)
	return l.answer()
}

func (l *locker) send(order ...any) { fmt.Fprintln(l.in, order...) }

func (l *locker) answer() string {
	if !l.out.Scan() {
		panic("the locker has ended")
	}
	return l.out.Text()
}

// end ends the process, as if it had called exit.
func (l *locker) end() {
	l.in.Close()
	l.cmd.Wait()
}

func (l *locker) kill() {
	l.cmd.Process.Kill()
	l.cmd.Wait()
}

func childLocker([]string) any {
	fds := map[string]int{}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		f := strings.Fields(in.Text())
		fmt.Println(say(lockerDo(fds, f)))
	}
	return ""
}

// lockerDo understands: open NAME PATH, openr NAME PATH, close NAME, read NAME N OFF, write NAME TEXT OFF,
// flock NAME sh|ex|un [wait], posix|ofd NAME r|w|u START LEN [wait|test].
func lockerDo(fds map[string]int, f []string) any {
	fd, number := fds[f[1]], func(s string) int64 {
		var n int64
		must(fmt.Sscan(s, &n))
		return n
	}
	last := f[len(f)-1]
	switch f[0] {
	case "open", "openr":
		flags := unix.O_RDWR | unix.O_CREAT
		if f[0] == "openr" {
			flags = unix.O_RDONLY
		}
		fd, err := unix.Open(f[2], flags|unix.O_CLOEXEC, 0o644)
		fds[f[1]] = fd
		return err
	case "close":
		return unix.Close(fd)
	case "read":
		b := make([]byte, number(f[2]))
		n, err := unix.Pread(fd, b, number(f[3]))
		if err != nil {
			return err
		}
		return string(b[:n])
	case "write":
		_, err := unix.Pwrite(fd, []byte(f[2]), number(f[3]))
		return err
	case "flock":
		how := map[string]int{"sh": unix.LOCK_SH, "ex": unix.LOCK_EX, "un": unix.LOCK_UN}[f[2]]
		if last != "wait" {
			how |= unix.LOCK_NB
		}
		return flock(fd, how)
	case "posix", "ofd":
		lk := unix.Flock_t{Type: map[string]int16{"r": unix.F_RDLCK, "w": unix.F_WRLCK, "u": unix.F_UNLCK}[f[2]], Start: number(f[3]), Len: number(f[4])}
		cmd := map[string]int{"posix": unix.F_SETLK, "posixwait": unix.F_SETLKW, "posixtest": unix.F_GETLK,
			"ofd": unix.F_OFD_SETLK, "ofdwait": unix.F_OFD_SETLKW, "ofdtest": unix.F_OFD_GETLK}[f[0]+strings.TrimLeft(last, "-0123456789")]
		err := unix.FcntlFlock(uintptr(fd), cmd, &lk)
		if err == nil && last == "test" {
			if lk.Type == unix.F_UNLCK {
				return "free"
			}
			return say(map[int16]string{unix.F_RDLCK: "r", unix.F_WRLCK: "w"}[lk.Type], lk.Start, lk.Len, lk.Pid > 0)
		}
		return err
	}
	return "no order " + f[0]
}

// flock goes on when a signal of Go's runtime has interrupted it.
func flock(fd, how int) error {
	for {
		if err := unix.Flock(fd, how); err != unix.EINTR {
			return err
		}
	}
}
