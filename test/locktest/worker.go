package locktest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// workerEnv is the directory that a worker works in.
const workerEnv = "WEFT_TEST_LOCK_WORKER"

// Serve is the worker. It reads commands from its standard input and answers each on descriptor 3. Files that it shares with
// others are its descriptors from 4 on.
func Serve(t *testing.T) {
	dir := os.Getenv(workerEnv)
	if dir == "" {
		t.Skip("runs only as a process of other tests")
	}
	runtime.LockOSThread()
	signals := make(chan os.Signal, 10)
	signal.Notify(signals, unix.SIGUSR1, unix.SIGUSR2)
	interrupts(t, unix.SIGUSR1)
	answers := os.NewFile(3, "answers")
	fmt.Fprintln(answers, "ready", unix.Gettid())
	files := map[string]int{}
	for i := 4; i < 8; i++ {
		files[fmt.Sprint("shared", i-4)] = i
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Fprintln(answers, obey(dir, files, strings.Fields(lines.Text())))
	}
}

// interrupts makes a signal end system calls with EINTR; Go asks the kernel to begin them again.
func interrupts(t *testing.T, sig unix.Signal) {
	var action struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	p := uintptr(unsafe.Pointer(&action))
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), 0, p, 8, 0, 0); e != 0 {
		t.Fatal(e)
	}
	const restart = 0x10000000 // SA_RESTART
	action.flags &^= restart
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), p, 0, 8, 0, 0); e != 0 {
		t.Fatal(e)
	}
}

// obey carries out a command:
//
//	open|openr NAME FILE | close NAME | write NAME     (openr is for reading only)
//	posix|ofd|posixw|ofdw NAME r|w|u START LENGTH    (F_SETLK, F_OFD_SETLK, and those that wait)
//	get|ofdget NAME r|w START LENGTH
//	sh|ex|un|shw|exw NAME                            (flock(2); those that wait end in w)
func obey(dir string, files map[string]int, args []string) string {
	answer := func(err error) string {
		if err == nil {
			return "ok"
		}
		return unix.ErrnoName(err.(syscall.Errno))
	}
	command, name := args[0], args[1]
	fd := files[name]
	switch command {
	case "open":
		fd, err := unix.Open(filepath.Join(dir, args[2]), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0644)
		files[name] = fd
		return answer(err)
	case "openr":
		fd, err := unix.Open(filepath.Join(dir, args[2]), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		files[name] = fd
		return answer(err)
	case "close":
		return answer(unix.Close(fd))
	case "write":
		_, err := unix.Pwrite(fd, []byte("x"), 0)
		return answer(err)
	case "sh", "ex", "un", "shw", "exw":
		how := map[string]int{"sh": unix.LOCK_SH, "ex": unix.LOCK_EX, "un": unix.LOCK_UN}[command[:2]]
		if !strings.HasSuffix(command, "w") {
			how |= unix.LOCK_NB
		}
		return answer(unix.Flock(fd, how))
	}
	start, _ := strconv.ParseInt(args[3], 0, 64)
	length, _ := strconv.ParseInt(args[4], 0, 64)
	lk := unix.Flock_t{Type: map[string]int16{"r": unix.F_RDLCK, "w": unix.F_WRLCK, "u": unix.F_UNLCK}[args[2]], Start: start, Len: length}
	op := map[string]int{
		"posix": unix.F_SETLK, "posixw": unix.F_SETLKW, "get": unix.F_GETLK,
		"ofd": unix.F_OFD_SETLK, "ofdw": unix.F_OFD_SETLKW, "ofdget": unix.F_OFD_GETLK,
	}[command]
	err := unix.FcntlFlock(uintptr(fd), op, &lk)
	if err != nil || !strings.HasSuffix(command, "get") {
		return answer(err)
	}
	if lk.Type == unix.F_UNLCK {
		return "free"
	}
	return fmt.Sprintf("%s %d %d by %d", map[int16]string{unix.F_RDLCK: "r", unix.F_WRLCK: "w"}[lk.Type], lk.Start, lk.Len, lk.Pid)
}

// Worker is a process that uses locks.
type Worker struct {
	// Dir is where its files are.
	Dir     string
	t       *testing.T
	cmd     *exec.Cmd
	thread  int
	in      *os.File
	answers chan string
	killed  bool
}

// New starts a worker, which ends with the test. Shared files are descriptors of the same open files as those of the test.
func New(t *testing.T, dir string, shared ...*os.File) *Worker {
	t.Helper()
	inR, inW, err1 := os.Pipe()
	outR, outW, err2 := os.Pipe()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	a := &Worker{t: t, Dir: dir, cmd: exec.Command("/proc/self/exe", "-test.run=^TestLockWorker$", "-test.timeout=10m"), in: inW, answers: make(chan string, 10)}
	a.cmd.Env = append(os.Environ(), workerEnv+"="+dir)
	a.cmd.Stderr = os.Stderr
	a.cmd.Stdin, a.cmd.ExtraFiles = inR, append([]*os.File{outW}, shared...)
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	inR.Close()
	outW.Close()
	go func() { // ends with the worker
		defer close(a.answers)
		defer outR.Close()
		for lines := bufio.NewScanner(outR); lines.Scan(); {
			a.answers <- lines.Text()
		}
	}()
	t.Cleanup(a.Kill)
	if _, err := fmt.Sscanf(a.answer(), "ready %d", &a.thread); err != nil {
		t.Fatal(err)
	}
	return a
}

// Kill ends the worker with SIGKILL and waits for its end; a second call does nothing.
func (a *Worker) Kill() {
	if !a.killed {
		a.killed = true
		a.in.Close()
		a.cmd.Process.Kill()
		a.cmd.Wait()
	}
}

func (a *Worker) answer() string {
	a.t.Helper()
	select {
	case s := <-a.answers:
		return s
	case <-time.After(20 * time.Second):
		a.t.Fatal("a worker does not answer")
		return ""
	}
}

// Tell gives a command, and Answers gets the answer, for those who do not know how long that may take.
func (a *Worker) Tell(command string)    { fmt.Fprintln(a.in, command) }
func (a *Worker) Answers() <-chan string { return a.answers }

// Ask gives a command and returns the answer.
func (a *Worker) Ask(command string) string {
	a.t.Helper()
	a.Tell(command)
	return a.answer()
}

// Do gives a command and checks the answer.
func (a *Worker) Do(command, want string) {
	a.t.Helper()
	a.Tell(command)
	a.Want(command, want)
}

// Want checks the answer to a command that blocked.
func (a *Worker) Want(what, want string) {
	a.t.Helper()
	if got := a.answer(); got != want {
		a.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// blocked is how long a request takes at most, on a busy machine, to get to where it waits.
const blocked = 300 * time.Millisecond

// Blocks gives a command that must not be answered soon.
func (a *Worker) Blocks(command string) {
	a.t.Helper()
	a.Tell(command)
	select {
	case got := <-a.answers:
		a.t.Errorf("%s: %s, want to wait", command, got)
	case <-time.After(blocked):
	}
}

// Signal interrupts the thread that carries out commands.
func (a *Worker) Signal(sig syscall.Signal) {
	a.t.Helper()
	if err := unix.Tgkill(a.cmd.Process.Pid, a.thread, sig); err != nil {
		a.t.Fatal(err)
	}
}
