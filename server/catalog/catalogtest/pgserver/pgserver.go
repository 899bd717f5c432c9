// Package pgserver runs PostgreSQL servers of a test's own: started, killed, restarted, with a synchronous standby that can
// be promoted. They listen on a UNIX socket in a directory of their own, so any number can run at a time.
//
// PostgreSQL refuses to run as root, so its programs run as the user postgres then, which its packages make.
package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options says how a server runs.
type Options struct {
	// Durable leaves fsync on. Without it the data survives the death of the server, but not that of the machine, and a test
	// is not at the mercy of the disk.
	Durable bool
	// Settings are configuration parameters.
	Settings map[string]string
}

// Server is a PostgreSQL server. It ends with the test.
type Server struct {
	tb   testing.TB
	dir  string // has the data, the socket and the log
	opts Options
	cmd  *exec.Cmd // nil while it is stopped
	done chan struct{}
}

// startPatience is how long a server may take to accept connections, recovery included.
const startPatience = 60 * time.Second

// Start makes a new database cluster and starts its server. It skips the test if PostgreSQL is not installed.
func Start(tb testing.TB, opts Options) *Server {
	tb.Helper()
	s := newServer(tb, opts)
	s.run("initdb", "-D", s.data(), "-U", userName, "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
	s.Start()
	return s
}

const userName = "weft"

// newServer makes the server's directory and removes it at the end.
func newServer(tb testing.TB, opts Options) *Server {
	tb.Helper()
	if program("initdb") == "" {
		tb.Skip("no PostgreSQL here: apt-get install postgresql")
	}
	dir, err := os.MkdirTemp("", "weft-pg-")
	if err != nil {
		tb.Fatal(err)
	}
	s := &Server{tb: tb, dir: dir, opts: opts}
	tb.Cleanup(func() {
		s.Kill()
		if tb.Failed() {
			s.showLog()
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	if uid, gid, other := runAs(tb); other {
		if err := os.Chown(dir, uid, gid); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}

// program returns the path of one of PostgreSQL's programs, which distributions keep outside PATH, or "".
func program(name string) string {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	slices.SortFunc(found, func(a, b string) int { return version(b) - version(a) })
	if len(found) > 0 {
		return found[0]
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// version is 15 for /usr/lib/postgresql/15/bin/initdb.
func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

// runAs returns the user that servers run as, and whether it is not the one who runs the test.
func runAs(tb testing.TB) (uid, gid int, other bool) {
	if os.Geteuid() != 0 {
		return 0, 0, false
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		tb.Fatalf("PostgreSQL does not run as root: %v", err)
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err := errors.Join(err1, err2); err != nil {
		tb.Fatal(err)
	}
	return uid, gid, true
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(program(name), args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
	// SIGQUIT stops a server at once, should the test die without its cleanup.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGQUIT}
	if uid, gid, other := runAs(s.tb); other {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
	return cmd
}

// run runs a program to its end.
func (s *Server) run(name string, args ...string) {
	s.tb.Helper()
	if out, err := s.command(name, args...).CombinedOutput(); err != nil {
		s.tb.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// Start starts a server that was killed, and waits until it accepts connections.
func (s *Server) Start() {
	s.tb.Helper()
	settings := map[string]string{
		"listen_addresses": "", "unix_socket_directories": s.dir, "fsync": "off", "full_page_writes": "off",
		"max_connections": "200", "shared_buffers": "64MB", "wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on",
		"log_min_messages": "warning", "log_min_error_statement": "panic",
	}
	if s.opts.Durable {
		settings["fsync"], settings["full_page_writes"] = "on", "on"
	}
	for name, value := range s.opts.Settings {
		settings[name] = value
	}
	args := []string{"-D", s.data()}
	for name, value := range settings {
		args = append(args, "-c", name+"="+value)
	}
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		s.tb.Fatal(err)
	}
	defer log.Close()
	cmd := s.command("postgres", args...)
	cmd.Stdout, cmd.Stderr = log, log
	started, done := make(chan error), make(chan struct{})
	go func() { // ends with the server
		// Pdeathsig tells of the end of the thread that started the process, and a thread of a test may end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
			close(done)
		}
	}()
	if err := <-started; err != nil {
		s.tb.Fatal(err)
	}
	s.cmd, s.done = cmd, done
	deadline := time.Now().Add(startPatience)
	for {
		err := s.Try("SELECT 1")
		if err == nil {
			return
		}
		select {
		case <-done:
			s.showLog()
			s.tb.Fatal("the PostgreSQL server ended")
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			s.showLog()
			s.tb.Fatalf("the PostgreSQL server accepts no connection after %v: %v", startPatience, err)
		}
	}
}

func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

func (s *Server) showLog() {
	log, _ := os.ReadFile(s.logFile())
	s.tb.Logf("log of the PostgreSQL server in %s:\n%s", s.dir, log[max(0, len(log)-8<<10):])
}

// URL connects to the server's only database.
func (s *Server) URL() string { return Together(s) }

// Together returns a URL that names several servers.
func Together(servers ...*Server) string {
	var hosts []string
	for _, s := range servers {
		hosts = append(hosts, s.dir)
	}
	values := url.Values{"host": {strings.Join(hosts, ",")}, "port": {"5432"}, "sslmode": {"disable"}}
	return "postgres://" + userName + "@/postgres?" + values.Encode()
}

// Try runs a statement.
func (s *Server) Try(sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// Exec runs a statement, which must succeed.
func (s *Server) Exec(sql string) {
	s.tb.Helper()
	if err := s.Try(sql); err != nil {
		s.tb.Fatalf("%s: %v", sql, err)
	}
}

// Kill kills the server with everything it has started, as a power failure of its machine would, except that what it has
// written is not lost. It may be called again.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	// Stopped first, so that it starts no more; its processes do not end with it by themselves at once.
	s.Signal(syscall.SIGSTOP)
	pids := children(s.cmd.Process.Pid)
	for _, pid := range append(pids, s.cmd.Process.Pid) {
		syscall.Kill(pid, syscall.SIGKILL) // one that is gone is what is wanted
	}
	<-s.done
	for _, pid := range pids { // the next server would find them at work; they are no children of ours to wait for
		for alive(pid) {
			time.Sleep(time.Millisecond)
		}
	}
	s.cmd = nil
}

// alive reports whether a process has not ended yet. Whoever should wait for it may never do so.
func alive(pid int) bool {
	state, _ := stat(pid)
	return state != "" && state != "Z" && state != "X"
}

// stat returns a process's state and parent, or nothing if there is none. The name, in parentheses, may hold anything;
// what is wanted comes behind it (proc_pid_stat(5)).
func stat(pid int) (state, parent string) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if err != nil || len(fields) < 2 {
		return "", ""
	}
	return string(fields[0]), string(fields[1])
}

// Signal sends a signal to the server's first process.
func (s *Server) Signal(sig syscall.Signal) { s.cmd.Process.Signal(sig) }

// SignalAll sends a signal to all processes of the server.
func (s *Server) SignalAll(sig syscall.Signal) {
	for _, pid := range append(children(s.cmd.Process.Pid), s.cmd.Process.Pid) {
		syscall.Kill(pid, sig)
	}
}

// children returns the processes that pid has started.
func children(pid int) []int {
	var all []int
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, path := range processes {
		child, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			continue
		}
		if _, parent := stat(child); parent == strconv.Itoa(pid) {
			all = append(all, child)
		}
	}
	return all
}

// Standby starts a copy of the server that follows it, and makes the server wait for it with every synchronous commit.
func (s *Server) Standby() *Server {
	s.tb.Helper()
	standby := newServer(s.tb, s.opts)
	s.run("pg_basebackup", "-h", s.dir, "-U", userName, "-D", standby.data(), "-R", "-X", "stream", "-c", "fast")
	standby.Start()
	s.Exec("ALTER SYSTEM SET synchronous_standby_names = '*'")
	s.Exec("SELECT pg_reload_conf()")
	deadline := time.Now().Add(startPatience)
	for s.Try("DO $$ BEGIN ASSERT (SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync') = 1; END $$") != nil {
		if time.Now().After(deadline) {
			s.tb.Fatalf("the standby does not follow after %v", startPatience)
		}
		time.Sleep(20 * time.Millisecond) // there is no event to wait for
	}
	return standby
}

// Promote makes a standby accept writes. Nobody follows it, so it waits for nobody.
func (s *Server) Promote() {
	s.tb.Helper()
	s.run("pg_ctl", "promote", "-D", s.data(), "-w", "-t", fmt.Sprint(int(startPatience/time.Second)))
}
