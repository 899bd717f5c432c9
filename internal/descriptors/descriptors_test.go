package descriptors

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// inChild reports whether the test runs in a process with the given limits, soft and hard. If not, it runs the test in
// one.
func inChild(t *testing.T, soft, hard int) bool {
	const env = "WEFT_TEST_DESCRIPTORS"
	if os.Getenv(env) == t.Name() {
		return true
	}
	cmd := exec.Command("sh", "-c", fmt.Sprintf(`ulimit -Sn %d && ulimit -Hn %d && exec "$@"`, soft, hard), "sh",
		os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), env+"="+t.Name())
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("in a process with few descriptors: %v\n%s", err, out)
	}
	return false
}

// lines collects what is logged.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), what)
}

func logged(t *testing.T) *lines {
	l := new(lines)
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(l, nil)))
	t.Cleanup(func() { slog.SetDefault(old) })
	return l
}

// fill opens files until there are no descriptors, and returns a function that closes them.
func fill(t *testing.T) (empty func() int) {
	var fds []int
	time.Sleep(time.Nanosecond) // with the first timer the runtime makes the descriptors of its own
	for {
		fd, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err == syscall.EMFILE {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	return func() int {
		n := len(fds)
		for _, fd := range fds {
			syscall.Close(fd)
		}
		fds = nil
		return n
	}
}

// The limit is the hard one, and children have the soft one.
func TestLimit(t *testing.T) {
	if !inChild(t, 64, 256) {
		return
	}
	if limit < 255 {
		t.Errorf("the limit is %d of 256", limit)
	}
	out, err := exec.Command("sh", "-c", "ulimit -Sn; ulimit -Hn").Output()
	if string(out) != "64\n256\n" {
		t.Errorf("a child has the limits %q, %v", out, err)
	}
}

func TestShares(t *testing.T) {
	for name, shares := range map[string][]*Share{"mount": {Lent, Backings, Dialed}, "server": {Accepted, Files, Tables, Dialed}} {
		sum := 0
		for _, s := range shares {
			sum += s.Size()
		}
		if sum > int(limit)*3/4 {
			t.Errorf("the shares of a %s are %d of %d", name, sum, limit)
		}
	}
	s := &Share{eighths: 2}
	for n := 1; n <= 3; n++ {
		s.Join()
		if got := s.Part(); got != s.Size()/n {
			t.Errorf("each of %d members has %d of %d", n, got, s.Size())
		}
	}
	s.Leave()
	if got := s.Part(); got != s.Size()/2 {
		t.Errorf("after one of 3 has left each has %d of %d", got, s.Size())
	}
	for range s.Size() {
		if !s.Take() {
			t.Fatal("used up early")
		}
	}
	for range 2 {
		if s.Take() {
			t.Error("more than all can be taken")
		}
	}
	s.Give()
	if !s.Take() || s.Take() {
		t.Error("what was given back can not be taken, or more")
	}
}

// In a shortage a cache closes what is idle and a Listener goes on, without spinning if that does not help, with two
// lines in the log.
func TestShortage(t *testing.T) {
	if !inChild(t, 64, 64) {
		return
	}
	calmTime = time.Hour // calm is called here
	out := logged(t)
	base, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		nc, err := net.Dial("tcp", base.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
	}
	l := Listener(base)
	accepted := make(chan error)
	accept := func() {
		nc, err := l.Accept()
		if err == nil {
			defer nc.Close()
		}
		accepted <- err
	}

	unregister := OnShortage(fill(t))
	go accept()
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	if !Scarce() || out.count("no descriptors are left") != 1 {
		t.Errorf("scarce %v, logged %d times", Scarce(), out.count("no descriptors are left"))
	}
	unregister()

	failed := func() int {
		shortage.mu.Lock()
		defer shortage.mu.Unlock()
		return shortage.failures
	}
	before, began := failed(), time.Now()
	empty := fill(t)
	go accept()
	for failed() < before+4 {
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-accepted:
		t.Fatalf("accepted without descriptors: %v", err)
	default:
	}
	if n, most := failed()-before, 1+int(time.Since(began)/acceptPause); n > most || !Scarce() {
		t.Errorf("%d failures, want %d at most; scarce %v", n, most, Scarce())
	}
	if tried() {
		t.Error("descriptors can be had though there are none")
	}
	empty()
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	if calm(); !Scarce() {
		t.Error("the shortage ended at once")
	}
	calmTime = 0
	if calm(); Scarce() {
		t.Error("the shortage did not end")
	}
	if out.count("no descriptors are left") != 1 || out.count("there are descriptors again") != 1 || out.count("\n") != 2 {
		t.Errorf("logged:\n%s", out.b.String())
	}

	go accept()
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	base.Close()
	go accept()
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("after the listener was closed: %v", err)
	}
}

// Retry calls once more after a shortage, and after nothing else.
func TestRetry(t *testing.T) {
	if !inChild(t, 64, 64) {
		return
	}
	out := logged(t)
	defer OnShortage(fill(t))()
	fd, err := Retry(func() (int, error) { return syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0) })
	if err != nil {
		t.Fatal(err)
	}
	syscall.Close(fd)
	if out.count("no descriptors are left") != 1 {
		t.Error("it worked at once")
	}
	calls := 0
	if _, err := Retry(func() (int, error) { calls++; return 0, syscall.ENOENT }); err != syscall.ENOENT || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

// failing is a listener whose Accept fails.
type failing struct {
	net.Listener
	errs []error
}

func (l *failing) Accept() (net.Conn, error) {
	err := l.errs[0]
	l.errs = l.errs[1:]
	if err != nil {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", err)}
	}
	return &net.TCPConn{}, nil
}

func (l *failing) Addr() net.Addr { return &net.TCPAddr{} }

// Errors of the network and of memory pass, with two lines in the log each time; one of the socket ends the loop.
func TestListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := logged(t)
		l := Listener(&failing{errs: []error{
			nil, syscall.ECONNABORTED, syscall.ENETDOWN, syscall.ENOBUFS, syscall.EPERM, nil, syscall.ENOMEM, nil, syscall.EINVAL,
		}})
		began := time.Now()
		for range 3 {
			if _, err := l.Accept(); err != nil {
				t.Fatal(err)
			}
		}
		if got := time.Since(began); got != 4*acceptPause {
			t.Errorf("after 4 failures it took %v", got)
		}
		if _, err := l.Accept(); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("a socket that does not listen: %v", err)
		}
		if out.count("cannot be accepted") != 2 || out.count("accepted again") != 2 || out.count("\n") != 4 {
			t.Errorf("logged:\n%s", out.b.String())
		}
	})
}
