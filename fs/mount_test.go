package fs

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/mountinfo"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// A mount that the test process serves itself can hang: a system call on it may hold the thread that is needed to answer.
// So the tests here start this binary again, as the process that serves.

// serveEnv is the mount point that a process of the tests is to serve. It reads commands from descriptor 3 and answers
// each on descriptor 4.
const serveEnv = "WEFT_FS_TEST_SERVE"

// TestServe is not a test but the serving process.
func TestServe(t *testing.T) {
	mountpoint := os.Getenv(serveEnv)
	if mountpoint == "" {
		t.Skip("runs only as the serving process of other tests")
	}
	commands, answers := os.NewFile(3, "commands"), os.NewFile(4, "answers")
	flags, _ := strconv.ParseUint(os.Getenv(serveEnv+"_FLAGS"), 0, 64)
	maxWrite, _ := strconv.Atoi(os.Getenv(serveEnv + "_MAX_WRITE"))
	transport, _ := strconv.Atoi(os.Getenv(serveEnv + "_TRANSPORT"))
	const memory = 64 << 20 // the race detector wants several times as much
	cached := func(c *Config) { c.CachePages = os.Getenv(serveEnv+"_CACHE") != "" }
	r := newRig(t, newService(4, 1<<20), cached)
	server, err := r.Mount(MountConfig{
		Mountpoint: mountpoint, Source: "meta.example:7049:/", Flags: uintptr(flags), MaxWrite: maxWrite,
		Transport: Transport(transport), Memory: memory,
	})
	if err != nil {
		fmt.Fprintf(answers, "%v\n", err)
		return
	}
	rigs, servers := []*rig{r}, []*Server{server}
	if dir := os.Getenv(serveEnv + "_SECOND"); dir != "" {
		r := newRig(t, r.s, cached)
		server, err := r.Mount(MountConfig{
			Mountpoint: dir, Source: "meta.example:7049:/",
			Transport: Transport(transport), Memory: memory,
		})
		if err != nil {
			fmt.Fprintf(answers, "%v\n", err)
			return
		}
		rigs, servers = append(rigs, r), append(servers, server)
	}
	fmt.Fprintf(answers, "ready %d %d\n", server.ControlID(), server.MaxWrite())
	var answering sync.Mutex
	go func() {
		for lines := bufio.NewScanner(commands); lines.Scan(); {
			answering.Lock()
			answer := "ok"
			command, which, _ := strings.Cut(lines.Text(), " ")
			k, _ := strconv.Atoi(which)
			switch command {
			case "calls":
				answer = rigs[k].m.report(&rigs[k].m.calls)
			case "held":
				answer = strconv.Itoa(rigs[k].held())
			case "asked":
				answer = rigs[k].m.report(&rigs[k].m.asked)
			case "pause":
				for _, s := range r.s.servers {
					s.Pause()
				}
			case "resume":
				for _, s := range r.s.servers {
					s.Resume()
				}
			case "restart":
				for _, s := range r.s.servers {
					s.Restart()
				}
			case "slow":
				for _, f := range r.faults {
					f.SetRules(faultytest.Rule{Delay: 3 * time.Millisecond})
				}
			case "unmount":
				if err := server.Unmount(); err != nil {
					answer = err.Error()
				}
			case "rss":
				answer = rss()
			default:
				answer = "unknown command " + command
			}
			fmt.Fprintln(answers, answer)
			answering.Unlock()
		}
		// The test is over; what it started may still be ending.
		for _, server := range servers {
			// By force, which root may: whoever has made a mount namespace meanwhile has a copy, which would keep the mount alive.
			for range 400 {
				if unix.Unmount(server.mountpoint, unix.MNT_FORCE) == nil || server.Unmount() == nil {
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
		}
	}()
	for _, server := range servers {
		server.Wait()
	}
	answering.Lock()
	//lint:ignore SA2001 it waits until a command to unmount has been answered
	answering.Unlock()
}

// rss is the memory of this process that is resident.
func rss() string {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(line, ":"); name == "VmRSS" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// mount is a mount served by another process.
type testMount struct {
	t        *testing.T
	dir      string
	id       string
	maxWrite int
	commands *os.File
	answers  *bufio.Reader
	ended    chan error
	pid      int
}

func needMount(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("missing: /dev/fuse")
	}
}

// publicDir is a directory that any user can reach.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "weft-fs-test")
	ok(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	ok(t, os.Chmod(dir, 0755))
	return dir
}

// eachTransport runs a test over every way to serve the FUSE device.
func eachTransport(t *testing.T, f func(t *testing.T)) {
	for _, transport := range []Transport{GoFuse, DeviceLoop} {
		t.Run(transport.String(), func(t *testing.T) {
			t.Setenv(serveEnv+"_TRANSPORT", strconv.Itoa(int(transport)))
			f(t)
		})
	}
}

// startMount serves a mount until the end of the test.
func startMount(t *testing.T, env ...string) *testMount {
	t.Helper()
	needMount(t)
	m, said := tryMount(t, publicDir(t), nil, env...)
	if _, err := fmt.Sscanf(said, "ready %s %d", &m.id, &m.maxWrite); err != nil {
		t.Fatalf("mount: %s", said)
	}
	return m
}

// tryMount returns what the serving process says first.
func tryMount(t *testing.T, dir string, change func(*exec.Cmd), env ...string) (*testMount, string) {
	t.Helper()
	commandsR, commandsW, err1 := os.Pipe()
	answersR, answersW, err2 := os.Pipe()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestServe$", "-test.v", "-test.timeout=10m")
	cmd.Env = append(append(os.Environ(), serveEnv+"="+dir), env...)
	cmd.ExtraFiles = []*os.File{commandsR, answersW}
	cmd.Stdout, cmd.Stderr = &log, &log
	if change != nil {
		change(cmd)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	commandsR.Close()
	answersW.Close()
	m := &testMount{t: t, dir: dir, commands: commandsW, answers: bufio.NewReader(answersR), ended: make(chan error, 1), pid: cmd.Process.Pid}
	go func() { m.ended <- cmd.Wait() }()
	t.Cleanup(func() {
		commandsW.Close()
		defer answersR.Close()
		select {
		case err := <-m.ended:
			if err != nil {
				t.Errorf("serving process: %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("the serving process does not end")
			cmd.Process.Signal(syscall.SIGQUIT)
			<-m.ended
		}
		unix.Unmount(dir, unix.MNT_DETACH) // if it was left
		if t.Failed() {
			t.Logf("serving process:\n%s", log.String())
		}
	})
	said, err := m.answers.ReadString('\n')
	if err != nil && said == "" {
		said = err.Error()
	}
	return m, strings.TrimSpace(said)
}

func (m *testMount) command(c string) string {
	m.t.Helper()
	fmt.Fprintln(m.commands, c)
	answer, err := m.answers.ReadString('\n')
	if err != nil {
		m.t.Fatalf("%s: %v", c, err)
	}
	return strings.TrimSpace(answer)
}

func (m *testMount) path(name string) string { return filepath.Join(m.dir, name) }

// must fails the test on an error.
func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestMountFiles(t *testing.T) { eachTransport(t, testMountFiles) }

func testMountFiles(t *testing.T) {
	m := startMount(t)
	if m.maxWrite < 1<<20 {
		t.Errorf("requests of %d bytes at most", m.maxWrite)
	}
	for _, c := range []struct {
		name string
		run  func(t *testing.T, dir string)
	}{
		{"create and stat", func(t *testing.T, dir string) {
			f := must[*os.File](t)(os.OpenFile(dir+"/f", os.O_RDWR|os.O_CREATE|os.O_EXCL, 0640))
			defer f.Close()
			must[int](t)(f.Write([]byte("hello")))
			var st unix.Stat_t
			ok(t, unix.Stat(dir+"/f", &st))
			if st.Size != 5 || st.Mode != unix.S_IFREG|0640 || st.Nlink != 1 || st.Uid != 0 || time.Since(time.Unix(st.Mtim.Unix())) > time.Minute {
				t.Errorf("stat: %+v", st)
			}
			var fst unix.Stat_t
			ok(t, unix.Fstat(int(f.Fd()), &fst))
			if fst.Ino != st.Ino {
				t.Errorf("fstat says inode %d, stat %d", fst.Ino, st.Ino)
			}
			if _, err := os.OpenFile(dir+"/f", os.O_CREATE|os.O_EXCL, 0600); !errors.Is(err, unix.EEXIST) {
				t.Errorf("second exclusive create: %v", err)
			}
			var stx unix.Statx_t
			ok(t, unix.Statx(unix.AT_FDCWD, dir+"/f", 0, unix.STATX_ALL, &stx))
			if stx.Mask&unix.STATX_BTIME == 0 || stx.Btime.Sec == 0 || stx.Ino != st.Ino {
				t.Errorf("statx: %+v", stx)
			}
		}},
		{"directories", func(t *testing.T, dir string) {
			ok(t, os.Mkdir(dir+"/d", 0755))
			ok(t, os.WriteFile(dir+"/d/f", nil, 0644))
			if err := unix.Rmdir(dir + "/d"); err != unix.ENOTEMPTY {
				t.Errorf("rmdir of a full directory: %v", err)
			}
			if err := unix.Unlink(dir + "/d"); err != unix.EISDIR && err != unix.EPERM {
				t.Errorf("unlink of a directory: %v", err)
			}
			if err := unix.Rmdir(dir + "/d/f"); err != unix.ENOTDIR {
				t.Errorf("rmdir of a file: %v", err)
			}
			if _, err := os.Stat(dir + "/d/f/x"); !errors.Is(err, unix.ENOTDIR) {
				t.Errorf("stat below a file: %v", err)
			}
			ok(t, os.Mkdir(dir+"/d/sub", 0700))
			var st unix.Stat_t
			ok(t, unix.Stat(dir+"/d", &st))
			if st.Nlink != 3 {
				t.Errorf("%d links, want 3", st.Nlink)
			}
			ok(t, os.RemoveAll(dir+"/d"))
			if _, err := os.Stat(dir + "/d"); !errors.Is(err, iofs.ErrNotExist) {
				t.Errorf("stat of what was removed: %v", err)
			}
		}},
		{"many entries", func(t *testing.T, dir string) {
			var want []string
			for n := range 1500 {
				name := fmt.Sprintf("entry-%d-%s", n, strings.Repeat("x", n%100))
				ok(t, os.WriteFile(filepath.Join(dir, name), nil, 0644))
				want = append(want, name)
			}
			slices.Sort(want)
			entries := must[[]os.DirEntry](t)(os.ReadDir(dir))
			var got []string
			for _, e := range entries {
				got = append(got, e.Name())
			}
			if !slices.Equal(got, want) {
				t.Errorf("%d entries, want %d", len(got), len(want))
			}
			// While names come and go, those that stay are listed once.
			d := must[*os.File](t)(os.Open(dir))
			defer d.Close()
			seen := map[string]int{}
			for n := 0; ; n++ {
				names, err := d.Readdirnames(50)
				for _, name := range names {
					seen[name]++
				}
				if err == io.EOF {
					break
				}
				ok(t, err)
				ok(t, os.Remove(filepath.Join(dir, want[2*n])))
				ok(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("new", n)), nil, 0644))
			}
			for n, name := range want {
				if n%2 == 1 && seen[name] != 1 || seen[name] > 1 {
					t.Fatalf("%s was listed %d times", name, seen[name])
				}
			}
		}},
		{"links", func(t *testing.T, dir string) {
			ok(t, os.WriteFile(dir+"/f", []byte("x"), 0644))
			ok(t, os.Link(dir+"/f", dir+"/g"))
			var st unix.Stat_t
			ok(t, unix.Stat(dir+"/f", &st))
			if st.Nlink != 2 {
				t.Errorf("%d links, want 2", st.Nlink)
			}
			ok(t, os.Symlink("g", dir+"/s"))
			if got := must[string](t)(os.Readlink(dir + "/s")); got != "g" {
				t.Errorf("readlink: %q", got)
			}
			if got := must[[]byte](t)(os.ReadFile(dir + "/s")); string(got) != "x" {
				t.Errorf("read through the link: %q", got)
			}
			if _, err := os.OpenFile(dir+"/s", unix.O_NOFOLLOW, 0); !errors.Is(err, unix.ELOOP) {
				t.Errorf("open of a link: %v", err)
			}
			if err := os.Symlink(strings.Repeat("x", 4096), dir+"/long"); !errors.Is(err, unix.ENAMETOOLONG) {
				t.Errorf("long symlink: %v", err)
			}
			if err := os.WriteFile(filepath.Join(dir, strings.Repeat("n", 256)), nil, 0644); !errors.Is(err, unix.ENAMETOOLONG) {
				t.Errorf("long name: %v", err)
			}
			ok(t, os.WriteFile(filepath.Join(dir, strings.Repeat("n", 255)), nil, 0644))
		}},
		{"rename", func(t *testing.T, dir string) {
			ok(t, os.WriteFile(dir+"/a", []byte("a"), 0644))
			ok(t, os.WriteFile(dir+"/b", []byte("b"), 0644))
			ok(t, os.Rename(dir+"/a", dir+"/b"))
			if got := must[[]byte](t)(os.ReadFile(dir + "/b")); string(got) != "a" {
				t.Errorf("after rename: %q", got)
			}
			ok(t, os.WriteFile(dir+"/a", []byte("new"), 0644))
			ok(t, unix.Renameat2(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/b", unix.RENAME_EXCHANGE))
			if got := must[[]byte](t)(os.ReadFile(dir + "/b")); string(got) != "new" {
				t.Errorf("after exchange: %q", got)
			}
			if err := unix.Renameat2(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/b", unix.RENAME_NOREPLACE); err != unix.EEXIST {
				t.Errorf("rename without replacing: %v", err)
			}
			if err := unix.Renameat2(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/b", unix.RENAME_WHITEOUT); err != unix.EINVAL {
				t.Errorf("whiteout: %v", err)
			}
			ok(t, os.MkdirAll(dir+"/d/e", 0755))
			if err := os.Rename(dir+"/d", dir+"/d/e/f"); !errors.Is(err, unix.EINVAL) {
				t.Errorf("rename into itself: %v", err)
			}
			ok(t, os.Rename(dir+"/d/e", dir+"/e"))
			ok(t, os.Remove(dir+"/d"))
		}},
		{"attributes", func(t *testing.T, dir string) {
			p := dir + "/f"
			ok(t, os.WriteFile(p, []byte("x"), 0644))
			ok(t, os.Chmod(p, 0400))
			ok(t, os.Chown(p, 12, 34))
			at, mt := time.Unix(1_000_000_000, 123_456_789), time.Unix(1_500_000_000, 987_654_321)
			ok(t, os.Chtimes(p, at, mt))
			var st unix.Stat_t
			ok(t, unix.Stat(p, &st))
			if st.Mode&07777 != 0400 || st.Uid != 12 || st.Gid != 34 || time.Unix(st.Atim.Unix()) != at || time.Unix(st.Mtim.Unix()) != mt {
				t.Errorf("stat: %+v", st)
			}
			// cp -p sets the time before it closes.
			f := must[*os.File](t)(os.OpenFile(p, os.O_WRONLY, 0))
			must[int](t)(f.Write([]byte("y")))
			ts := []unix.Timeval{{Sec: 5}, {Sec: 7}}
			ok(t, unix.Futimes(int(f.Fd()), ts))
			ok(t, f.Close())
			time.Sleep(1500 * time.Millisecond) // the flusher has reported
			ok(t, unix.Stat(p, &st))
			if st.Mtim.Sec != 7 {
				t.Errorf("mtime that was set is now %v", time.Unix(st.Mtim.Unix()))
			}
		}},
		{"truncate", func(t *testing.T, dir string) {
			p := dir + "/f"
			data := pattern(1, 3<<20)
			ok(t, os.WriteFile(p, data, 0644))
			ok(t, os.Truncate(p, 1<<20+5))
			if got := must[[]byte](t)(os.ReadFile(p)); !bytes.Equal(got, data[:1<<20+5]) {
				t.Error("contents differ after truncation")
			}
			ok(t, os.Truncate(p, 2<<20))
			if got := must[[]byte](t)(os.ReadFile(p)); !bytes.Equal(got, append(data[:1<<20+5:1<<20+5], make([]byte, 1<<20-5)...)) {
				t.Error("contents differ after extension")
			}
			f := must[*os.File](t)(os.OpenFile(p, os.O_RDWR|os.O_TRUNC, 0))
			defer f.Close()
			if st := must[os.FileInfo](t)(f.Stat()); st.Size() != 0 {
				t.Errorf("size after O_TRUNC is %d", st.Size())
			}
			must[int](t)(f.WriteAt([]byte("x"), 9))
			ok(t, f.Truncate(5))
			if got := must[[]byte](t)(os.ReadFile(p)); !bytes.Equal(got, make([]byte, 5)) {
				t.Errorf("after ftruncate: %q", got)
			}
		}},
		{"append", func(t *testing.T, dir string) {
			p := dir + "/log"
			var wg sync.WaitGroup
			for w := range 4 {
				wg.Go(func() {
					f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0644)
					if err != nil {
						t.Error(err)
						return
					}
					defer f.Close()
					for n := range 100 {
						if _, err := fmt.Fprintf(f, "writer %d line %d\n", w, n); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			got := map[string]bool{}
			for line := range strings.Lines(string(must[[]byte](t)(os.ReadFile(p)))) {
				got[line] = true
			}
			if len(got) != 400 {
				t.Errorf("%d different lines, want 400", len(got))
			}
			// Whether to append may change while a file is open.
			f := must[*os.File](t)(os.OpenFile(p, os.O_WRONLY|os.O_TRUNC, 0))
			defer f.Close()
			must[int](t)(f.Write([]byte("123")))
			must[int](t)(unix.FcntlInt(f.Fd(), unix.F_SETFL, unix.O_APPEND))
			must[int](t)(unix.Pwrite(int(f.Fd()), []byte("4"), 0))
			if got := must[[]byte](t)(os.ReadFile(p)); string(got) != "1234" {
				t.Errorf("after F_SETFL: %q", got)
			}
		}},
		{"unlinked", func(t *testing.T, dir string) {
			f := must[*os.File](t)(os.Create(dir + "/f"))
			must[int](t)(f.Write([]byte("one")))
			ok(t, os.Remove(dir+"/f"))
			must[int](t)(f.Write([]byte("two")))
			time.Sleep(1200 * time.Millisecond)
			buf := make([]byte, 10)
			n, err := f.ReadAt(buf, 0)
			if string(buf[:n]) != "onetwo" || err != io.EOF {
				t.Errorf("read: %q, %v", buf[:n], err)
			}
			if st := must[os.FileInfo](t)(f.Stat()); st.Sys().(*syscall.Stat_t).Nlink != 0 {
				t.Error("it still has links")
			}
			ok(t, f.Close())
		}},
		{"extended attributes", func(t *testing.T, dir string) {
			p := dir + "/f"
			ok(t, os.WriteFile(p, nil, 0644))
			ok(t, unix.Setxattr(p, "user.name", []byte("value"), 0))
			buf := make([]byte, 100)
			if n := must[int](t)(unix.Getxattr(p, "user.name", buf)); string(buf[:n]) != "value" {
				t.Errorf("value %q", buf[:n])
			}
			if n := must[int](t)(unix.Getxattr(p, "user.name", nil)); n != 5 {
				t.Errorf("size %d", n)
			}
			if n := must[int](t)(unix.Listxattr(p, buf)); string(buf[:n]) != "user.name\x00" {
				t.Errorf("list %q", buf[:n])
			}
			if _, err := unix.Getxattr(p, "user.none", buf); err != unix.ENODATA {
				t.Errorf("missing: %v", err)
			}
			if err := unix.Setxattr(p, "system.posix_acl_access", []byte("x"), 0); err == nil {
				t.Error("an ACL that is not enforced was accepted")
			}
			ok(t, unix.Removexattr(p, "user.name"))
		}},
		{"allocate, seek and copy", func(t *testing.T, dir string) {
			f := must[*os.File](t)(os.Create(dir + "/f"))
			defer f.Close()
			ok(t, unix.Fallocate(int(f.Fd()), 0, 0, 100_000))
			if st := must[os.FileInfo](t)(f.Stat()); st.Size() != 100_000 {
				t.Errorf("size %d", st.Size())
			}
			data := pattern(1, 100_000)
			must[int](t)(f.WriteAt(data, 0))
			ok(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 10_000, 20_000))
			clear(data[10_000:30_000])
			if got := must[[]byte](t)(os.ReadFile(dir + "/f")); !bytes.Equal(got, data) {
				t.Error("contents differ")
			}
			if off := must[int64](t)(unix.Seek(int(f.Fd()), 5, unix.SEEK_HOLE)); off != 3*4096 {
				t.Errorf("hole at %d", off)
			}
			g := must[*os.File](t)(os.Create(dir + "/g"))
			defer g.Close()
			var from int64
			for from < 100_000 {
				n, err := unix.CopyFileRange(int(f.Fd()), &from, int(g.Fd()), nil, 100_000, 0)
				if n == 0 || err != nil {
					t.Fatalf("copy_file_range: %d, %v", n, err)
				}
			}
			if got := must[[]byte](t)(os.ReadFile(dir + "/g")); !bytes.Equal(got, data) {
				t.Error("copy differs")
			}
			tmp := must[*os.File](t)(os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0600))
			must[int](t)(tmp.Write(data))
			ok(t, unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", tmp.Fd()), unix.AT_FDCWD, dir+"/named", unix.AT_SYMLINK_FOLLOW))
			ok(t, tmp.Close())
			if got := must[[]byte](t)(os.ReadFile(dir + "/named")); !bytes.Equal(got, data) {
				t.Error("a file that got a name late differs")
			}
		}},
		{"locks", func(t *testing.T, dir string) {
			a := must[*os.File](t)(os.Create(dir + "/f"))
			b := must[*os.File](t)(os.Open(dir + "/f"))
			ok(t, unix.Flock(int(a.Fd()), unix.LOCK_EX|unix.LOCK_NB))
			if err := unix.Flock(int(b.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
				t.Errorf("second flock: %v", err)
			}
			lock := unix.Flock_t{Type: unix.F_WRLCK, Len: 10}
			ok(t, unix.FcntlFlock(a.Fd(), unix.F_OFD_SETLK, &lock))
			lock.Type = unix.F_RDLCK
			if err := unix.FcntlFlock(b.Fd(), unix.F_OFD_SETLK, &lock); err != unix.EAGAIN && err != unix.EACCES {
				t.Errorf("second lock: %v", err)
			}
			ok(t, a.Close())
			ok(t, unix.Flock(int(b.Fd()), unix.LOCK_EX|unix.LOCK_NB))
			ok(t, b.Close())
		}},
		{"special files", func(t *testing.T, dir string) {
			ok(t, unix.Mkfifo(dir+"/fifo", 0600))
			go func() {
				if err := os.WriteFile(dir+"/fifo", []byte("through"), 0); err != nil {
					t.Error(err)
				}
			}()
			if got := must[[]byte](t)(os.ReadFile(dir + "/fifo")); string(got) != "through" {
				t.Errorf("through the FIFO: %q", got)
			}
			ok(t, unix.Mknod(dir+"/null", unix.S_IFCHR|0666, int(unix.Mkdev(1, 3))))
			if got := must[[]byte](t)(os.ReadFile(dir + "/null")); len(got) != 0 {
				t.Errorf("from the device: %q", got)
			}
		}},
		{"mmap", func(t *testing.T, dir string) {
			data := pattern(1, 2<<20+123)
			f := must[*os.File](t)(os.OpenFile(dir+"/f", os.O_RDWR|os.O_CREATE, 0644))
			defer f.Close()
			must[int](t)(f.Write(data))
			for _, how := range []int{unix.MAP_PRIVATE, unix.MAP_SHARED} {
				mem, err := unix.Mmap(int(f.Fd()), 0, len(data), unix.PROT_READ|unix.PROT_WRITE, how)
				if err == unix.ENODEV && how == unix.MAP_SHARED {
					t.Skip("missing: shared mappings of direct I/O files (Linux 6.6)")
				}
				ok(t, err)
				if !bytes.Equal(mem, data) {
					t.Error("mapping differs from the file")
				}
				copy(mem[1<<20-5:], "0123456789")
				if how == unix.MAP_SHARED {
					ok(t, unix.Msync(mem, unix.MS_SYNC))
					copy(data[1<<20-5:], "0123456789")
				}
				ok(t, unix.Munmap(mem))
				if got := must[[]byte](t)(os.ReadFile(dir + "/f")); !bytes.Equal(got, data) {
					t.Errorf("file differs after a mapping of kind %d", how)
				}
			}
		}},
		{"direct", func(t *testing.T, dir string) {
			f := must[*os.File](t)(os.OpenFile(dir+"/f", os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0644))
			defer f.Close()
			data := pattern(1, 777_777) // any alignment will do
			must[int](t)(f.WriteAt(data, 333))
			buf := make([]byte, len(data))
			must[int](t)(f.ReadAt(buf, 333))
			if !bytes.Equal(buf, data) {
				t.Error("contents differ")
			}
		}},
		{"synchronous", func(t *testing.T, dir string) {
			f := must[*os.File](t)(os.OpenFile(dir+"/f", os.O_RDWR|os.O_CREATE|os.O_SYNC, 0644))
			defer f.Close()
			data := pattern(1, 100_000)
			must[int](t)(f.Write(data))
			if got := m.command("restart"); got != "ok" {
				t.Fatal(got)
			}
			if got := must[[]byte](t)(os.ReadFile(dir + "/f")); !bytes.Equal(got, data) {
				t.Error("contents differ after the data servers restarted")
			}
			ok(t, f.Sync())
			d := must[*os.File](t)(os.Open(dir))
			defer d.Close()
			ok(t, d.Sync())
		}},
		{"programs", func(t *testing.T, dir string) {
			for _, script := range []string{
				"mkdir src && cp -a /etc/ssl /etc/default src/ && cp -a src copy && diff -r --no-dereference src copy",
				"tar cf a.tar src && mkdir x && tar xf a.tar -C x && diff -r --no-dereference src x/src",
				"cp /bin/true prog && ./prog && rm prog",
				"seq 100000 >n && sort -rn n | sort -n | cmp - n && sed -i s/7/seven/ n && grep -q seven n",
				"dd if=/dev/zero of=z bs=3M count=5 conv=fsync 2>/dev/null && test $(stat -c %s z) = 15728640",
				"ln -s z l && test -L l && mv z y && ! cat l 2>/dev/null && rm -rf src copy x a.tar",
			} {
				cmd := exec.Command("sh", "-ec", script)
				cmd.Dir = dir
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("%s: %v\n%s", script, err, out)
				}
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := m.path(strings.ReplaceAll(c.name, " ", "-"))
			ok(t, os.Mkdir(dir, 0755))
			c.run(t, dir)
		})
	}
}

// What a user who is not root may do is checked by the kernel, from the attributes the service gives it.
func TestMountPermissions(t *testing.T) { eachTransport(t, testMountPermissions) }

func testMountPermissions(t *testing.T) {
	m := startMount(t)
	ok(t, os.Chmod(m.dir, 0755))
	ok(t, os.WriteFile(m.path("secret"), []byte("s"), 0600))
	ok(t, os.Mkdir(m.path("theirs"), 0700))
	ok(t, os.Chown(m.path("theirs"), 65534, 65534))
	ok(t, os.WriteFile(m.path("prog"), []byte("#!/bin/sh\n"), 0755))
	ok(t, os.Chown(m.path("prog"), 65534, 65534))
	ok(t, os.Chmod(m.path("prog"), 06755))
	cmd := exec.Command("sh", "-c", `
		cat secret 2>/dev/null && echo read a secret
		echo x 2>/dev/null >root-made && echo made a file in the root
		chmod 777 secret 2>/dev/null && echo changed a mode
		rm -f secret 2>/dev/null && echo removed a secret
		echo data >theirs/f || echo could not write
		test "$(cat theirs/f)" = data || echo could not read
		test "$(stat -c %u:%g theirs/f)" = 65534:65534 || echo wrong owner
		echo more >>prog
		test "$(stat -c %a prog)" = 755 || echo "set-ID bits survive a write: $(stat -c %a prog)"
	`)
	cmd.Dir = m.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

// Much data at once, in requests as large as the kernel makes them, from several processes and threads.
func TestMountConcurrency(t *testing.T) { eachTransport(t, testMountConcurrency) }

func testMountConcurrency(t *testing.T) {
	m := startMount(t)
	const region, regions = 4 << 20, 8
	rounds := 25
	if testing.Short() {
		rounds = 8
	}
	p := m.path("shared")
	var wg sync.WaitGroup
	sums := make([][32]byte, regions)
	for n := range regions {
		wg.Go(func() {
			f, err := os.OpenFile(p, os.O_RDWR|os.O_CREATE, 0644)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			rnd := rand.New(rand.NewPCG(uint64(n), 1))
			model := make([]byte, region)
			for range rounds {
				off := rnd.IntN(region)
				part := model[off:min(region, off+rnd.IntN(3<<20))]
				if rnd.IntN(2) == 0 {
					copy(part, pattern(rnd.Uint64(), min(len(part), 1000)))
					if _, err := f.WriteAt(part, int64(n*region+off)); err != nil {
						t.Errorf("write: %v", err)
					}
					continue
				}
				got := make([]byte, len(part))
				k, err := f.ReadAt(got, int64(n*region+off))
				if err != nil && err != io.EOF {
					t.Errorf("read: %v", err)
				}
				if !bytes.Equal(got[:k], part[:k]) || len(bytes.Trim(part[k:], "\x00")) > 0 {
					t.Error("read other data than was written")
				}
			}
			if _, err := f.WriteAt(model, int64(n*region)); err != nil {
				t.Errorf("write: %v", err)
			}
			sums[n] = sha256.Sum256(model)
		})
	}
	wg.Wait()
	m.command("restart")
	for n := range regions {
		out, err := exec.Command("sh", "-c", fmt.Sprintf("dd if=%s bs=%d skip=%d count=1 iflag=fullblock 2>/dev/null | sha256sum", p, region, n)).Output()
		if err != nil || string(out[:64]) != fmt.Sprintf("%x", sums[n]) {
			t.Errorf("region %d differs when another process reads it", n)
		}
	}
	// 8 MiB at a time, and with asynchronous requests of the kernel for a mapping.
	data := pattern(7, 40<<20)
	f := must[*os.File](t)(os.Create(m.path("big")))
	for off := 0; off < len(data); off += 8 << 20 {
		must[int](t)(f.WriteAt(data[off:off+8<<20], int64(off)))
	}
	ok(t, f.Sync())
	ok(t, f.Close())
	if got := must[[]byte](t)(os.ReadFile(m.path("big"))); !bytes.Equal(got, data) {
		t.Error("large file differs")
	}
	if out, err := exec.Command("grep", "-c", "-a", "x", m.path("big")).CombinedOutput(); err != nil {
		t.Errorf("grep: %v: %s", err, out)
	}
}

const busyEnv = "WEFT_FS_TEST_BUSY"

// TestBusy is not a test but a program that a timer's signals interrupt all the time, while it writes and reads a file.
func TestBusy(t *testing.T) {
	p := os.Getenv(busyEnv)
	if p == "" {
		t.Skip("runs only as a process of another test")
	}
	alarms := make(chan os.Signal, 1)
	signal.Notify(alarms, syscall.SIGALRM)
	// In microseconds. The Go runtime installs its handlers with SA_RESTART, which does not help: the kernel restarts only
	// what ended with ERESTARTSYS.
	interval := unix.Timeval{Usec: 1000}
	must[unix.Itimerval](t)(unix.Setitimer(unix.ItimerReal, unix.Itimerval{Interval: interval, Value: interval}))
	fd := must[int](t)(unix.Open(p, unix.O_RDWR|unix.O_CREAT, 0644))
	data, buf := pattern(1, 200_000), make([]byte, 200_000)
	for n := range 50 {
		if k, err := unix.Pwrite(fd, data, int64(n)); k != len(data) || err != nil {
			t.Fatalf("write: %d, %v", k, err)
		}
		if k, err := unix.Pread(fd, buf, int64(n)); k != len(buf) || err != nil || !bytes.Equal(buf, data) {
			t.Fatalf("read: %d, %v", k, err)
		}
		if err := unix.Mkdir(fmt.Sprint(p, ".", n), 0755); err != nil {
			t.Fatalf("mkdir: %v", err)
		}
		ok(t, unix.Fsync(fd))
	}
	ok(t, unix.Close(fd))
	if len(alarms) == 0 {
		t.Error("there were no signals")
	}
}

// Signals that do not kill a program do not disturb it; those that do end its wait.
func TestMountSignals(t *testing.T) { eachTransport(t, testMountSignals) }

func testMountSignals(t *testing.T) {
	m := startMount(t)
	m.command("slow")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestBusy$", "-test.v")
	cmd.Env = append(os.Environ(), busyEnv+"="+m.path("busy"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ok(t, os.WriteFile(m.path("f"), pattern(1, 1<<20), 0644))
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		for _, script := range []string{"exec cat f", "echo x >>f"} {
			m.command("pause")
			cmd := exec.Command("sh", "-c", "exec 3<>f; touch .started; "+script)
			cmd.Dir = m.dir
			ok(t, cmd.Start())
			waittest.Until(t, "it starts", func() bool { _, err := os.Stat(m.path(".started")); return err == nil })
			time.Sleep(50 * time.Millisecond)
			ok(t, cmd.Process.Signal(sig))
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			select {
			case <-ended:
			case <-time.After(15 * time.Second):
				t.Errorf("%s does not end by %v while data servers do not answer", script, sig)
			}
			m.command("resume")
			ok(t, os.Remove(m.path(".started")))
		}
	}
}

func TestMountEnds(t *testing.T) { eachTransport(t, testMountEnds) }

func testMountEnds(t *testing.T) {
	m := startMount(t)
	if e := must[mountinfo.Mount](t)(findMount(m.dir)); e.Type != fsType || e.Source != "meta.example:7049:/" || fmt.Sprint(unix.Minor(e.Dev)) != m.id {
		t.Errorf("mounted as %+v, connection %s", e, m.id)
	}
	f := must[*os.File](t)(os.Create(m.path("f")))
	if got := m.command("unmount"); !strings.Contains(got, "busy") {
		t.Errorf("unmount while a file is open: %s", got)
	}
	must[int](t)(f.Write([]byte("x")))
	ok(t, f.Close())
	t.Logf("resident memory: %s", m.command("rss"))
	if got := m.command("unmount"); got != "ok" {
		t.Errorf("unmount: %s", got)
	}
	if _, err := findMount(m.dir); err == nil {
		t.Error("it is still mounted")
	}

	// The kernel's way out when nothing else helps.
	m = startMount(t)
	ok(t, os.WriteFile(m.path("f"), pattern(1, 1<<20), 0644))
	m.command("pause")
	stuck := exec.Command("cat", m.path("f"))
	ok(t, stuck.Start())
	time.Sleep(50 * time.Millisecond)
	control := t.TempDir()
	ok(t, unix.Mount("fusectl", control, "fusectl", 0, ""))
	ok(t, os.WriteFile(filepath.Join(control, m.id, "abort"), []byte("1"), 0))
	ok(t, unix.Unmount(control, 0))
	stuck.Wait()
	if _, err := os.Stat(m.path("f")); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("stat after abort: %v", err)
	}
	ok(t, unix.Unmount(m.dir, unix.MNT_DETACH))
	// What it has not made stable it tries to, as long as the rig lets it.
	fmt.Fprintln(m.commands, "resume") // nobody answers if it has ended already
	select {
	case err := <-m.ended:
		m.ended <- err
	case <-time.After(20 * time.Second):
		t.Error("the serving process does not end after an abort")
	}
}

func TestMountFlags(t *testing.T) { eachTransport(t, testMountFlags) }

func testMountFlags(t *testing.T) {
	m := startMount(t, serveEnv+fmt.Sprint("_FLAGS=", unix.MS_RDONLY|unix.MS_NOEXEC|unix.MS_NODEV|unix.MS_NOSUID), serveEnv+"_MAX_WRITE=65536")
	if m.maxWrite != 65536 {
		t.Errorf("requests of up to %d bytes, want 65536", m.maxWrite)
	}
	if err := os.WriteFile(m.path("f"), nil, 0644); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only mount: %v", err)
	}
	var st unix.Statfs_t
	ok(t, unix.Statfs(m.dir, &st))
	if want := int64(unix.ST_RDONLY | unix.ST_NOEXEC | unix.ST_NODEV | unix.ST_NOSUID); st.Flags&want != want {
		t.Errorf("flags %#x, want %#x", st.Flags, want)
	}
	if st.Blocks*uint64(st.Frsize) != 1<<40 || st.Namelen != 255 {
		t.Errorf("statfs: %+v", st)
	}
}

func TestMountErrors(t *testing.T) { eachTransport(t, testMountErrors) }

func testMountErrors(t *testing.T) {
	needMount(t)
	m := startMount(t)
	file := filepath.Join(t.TempDir(), "file")
	ok(t, os.WriteFile(file, nil, 0644))
	for _, c := range []struct{ dir, want string }{
		{"/nonexistent/dir", "does not exist"},
		{file, "is not a directory"},
		{m.dir, "is already a weft mount of meta.example:7049:/"},
	} {
		_, said := tryMount(t, c.dir, nil)
		if !strings.Contains(said, c.want) || strings.Contains(said, "\n") {
			t.Errorf("mount on %s: %q, want something with %q", c.dir, said, c.want)
		}
	}
}

// An ordinary user mounts with fusermount3.
func TestMountHelper(t *testing.T) { eachTransport(t, testMountHelper) }

func testMountHelper(t *testing.T) {
	needMount(t)
	if _, err := exec.LookPath(helper); err != nil {
		t.Skipf("missing: %s", helper)
	}
	var st unix.Stat_t
	ok(t, unix.Stat("/dev/fuse", &st))
	if st.Mode&0666 != 0666 {
		ok(t, os.Chmod("/dev/fuse", 0666))
		t.Cleanup(func() { os.Chmod("/dev/fuse", os.FileMode(st.Mode&07777)) })
	}
	base := publicDir(t)
	dir, program := filepath.Join(base, "mnt"), filepath.Join(base, "test")
	ok(t, os.Mkdir(dir, 0755))
	ok(t, os.Chown(dir, 65534, 65534))
	ok(t, os.WriteFile(program, must[[]byte](t)(os.ReadFile("/proc/self/exe")), 0755))
	user := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	m, said := tryMount(t, dir, func(cmd *exec.Cmd) {
		cmd.Path, cmd.SysProcAttr, cmd.Dir = program, user, base
	}, serveEnv+fmt.Sprint("_FLAGS=", unix.MS_NOATIME))
	if !strings.HasPrefix(said, "ready") {
		t.Fatalf("mount: %s", said)
	}
	// The root of the volume belongs to root; only the user who mounted may look at all.
	cmd := exec.Command("sh", "-ec", "ls -la "+dir+" && test $(stat -f -c %T "+dir+") = fuseblk -o $(stat -f -c %T "+dir+") = fuse")
	cmd.SysProcAttr = user
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if e := must[mountinfo.Mount](t)(findMount(dir)); e.Type != fsType || e.Source != "meta.example:7049:/" {
		t.Errorf("mounted as %+v", e)
	}
	if got := m.command("unmount"); got != "ok" {
		t.Errorf("unmount: %s", got)
	}
}

func TestChooseMaxWrite(t *testing.T) {
	page := os.Getpagesize()
	discard := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		wanted, pages, can int // can is what the limit may be raised to
		err                error
		want               int
	}{
		{0, 2048, 0, nil, 8 << 20},
		{0, 5000, 0, nil, 8 << 20},
		{0, 256, 2048, nil, 8 << 20},
		{0, 256, 0, nil, 1 << 20},
		{0, 1500, 0, nil, 4 << 20},
		{0, 64, 0, nil, 64 * page},
		{0, 0, 0, errors.New("unreadable"), 1 << 20},
		{128 << 10, 256, 0, nil, 128 << 10},
		{2 << 20, 256, 512, nil, 2 << 20},
		{2 << 20, 256, 0, nil, 1 << 20},
	} {
		if os.Getuid() != 0 && c.can > 0 {
			continue
		}
		pages := c.pages * 4096 / page
		got := chooseMaxWrite(c.wanted, func(set int) (int, error) {
			if set != 0 {
				if set*page > c.can*4096 {
					return 0, unix.EROFS
				}
				pages = set
			}
			return pages, c.err
		}, discard)
		if got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestCallerFate(t *testing.T) {
	if got := callerFate(0); got != unknown {
		t.Errorf("pid 0 is %v", got)
	}
	if got := callerFate(uint32(os.Getpid())); got != alive {
		t.Errorf("this process is %v", got)
	}
	cmd := exec.Command("sleep", "100")
	ok(t, cmd.Start())
	if got := callerFate(uint32(cmd.Process.Pid)); got != alive {
		t.Errorf("a sleeping process is %v", got)
	}
	ok(t, cmd.Process.Kill())
	waittest.Until(t, "a killed process is seen to be dying", func() bool {
		return callerFate(uint32(cmd.Process.Pid)) == dying
	})
	cmd.Wait()
	if got := callerFate(uint32(cmd.Process.Pid)); got != dying {
		t.Errorf("a process that is no more is %v", got)
	}
}

func TestConfig(t *testing.T) {
	s := newService(1, 1<<20)
	r := newRig(t, s)
	for _, c := range []struct {
		name string
		cfg  Config
		ok   bool
	}{
		{"complete", Config{Meta: r.m, Data: r.plane}, true},
		{"no service", Config{Data: r.plane}, false},
		{"no data plane", Config{Meta: r.m}, false},
	} {
		err := c.cfg.Validate()
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.ok && (c.cfg.Root != layout.RootID || c.cfg.Log == nil) {
			t.Errorf("%s: defaults are not filled in: %+v", c.name, c.cfg)
		}
	}
	for _, c := range []MountConfig{{}, {Source: "a\nb"}, {Source: "s", MaxWrite: 100}, {Source: "s", MaxWrite: 5000}, {Source: "s", MaxWrite: 16 << 20}} {
		if c.Validate() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
