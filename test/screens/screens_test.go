package screens

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/weftfs/weft/test/harness"
)

// masks turn what differs from run to run into words.
var masks = []struct {
	what *regexp.Regexp
	word string
}{
	{regexp.MustCompile(`/tmp/\S*/mnt\d*`), "MOUNT"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "ADDRESS"},
	{regexp.MustCompile(`device [0-9a-f]{8}`), "device ID"},
	{regexp.MustCompile(`weftd? [^ ,]+`), "VERSION"},
	{regexp.MustCompile(`now|\d+ (seconds?|minutes?) ago`), "AGO"},
	{regexp.MustCompile(`\d[\d.]* ([KMGT]i)?B`), "SIZE"},
	{regexp.MustCompile(`\b\d[\d.]*(ns|µs|ms|s)\b`), "TIME"},
	{regexp.MustCompile(`p50 +-  p99 +-`), "p50 TIME p99 TIME"},
	{regexp.MustCompile(`\d[\d.]*`), "N"},
	{regexp.MustCompile(`(?m)^\S+ MOUNT `), "HOST MOUNT "},
	{regexp.MustCompile(` +`), " "},
	{regexp.MustCompile(`(?m) +$`), ""},
}

func masked(s string) string {
	for _, m := range masks {
		s = m.what.ReplaceAllString(s, m.word)
	}
	return s
}

const wantTop = `read SIZE/s N/s pN TIME pN TIME
written SIZE/s N/s pN TIME pN TIME
requests N/s N under way; SIZE written and not stable yet
metadata N calls/s ADDRESS: ok

DEVICE READ/S WRITTEN/S OPS/S PN PN WAIT
ADDRESS local SIZE SIZE N TIME TIME N
ADDRESS local SIZE SIZE N TIME TIME N

FILE READ/S WRITTEN/S OPS/S PROCESS
dir/busy SIZE SIZE N N

CLIENT CALLS/S OPEN WRITING
HOST MOUNT N N N
`

const wantStatus = `ADDRESS:/ on MOUNT
 served by process N, VERSION, since AGO
 requests up to SIZE, transport=gofuse; SIZE written and not stable yet
 metadata ADDRESS, VERSION, N sessions, N data files to remove
 device ID nfs://ADDRESS/ SIZE free of SIZE N data files ok
 local: yes; N requests without RPC, N with it
 tcp (xprtsec=none), N of N connections up, N outstanding
 read SIZE in N requests, pN TIME, pN TIME
 written SIZE in N requests, pN TIME, pN TIME
`

// TestScreens shows a mount that is busy.
func TestScreens(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "tmux")
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	m := v.Mount()
	if err := os.Mkdir(filepath.Join(m.Dir, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(m.Dir, "dir", "busy"))
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var load sync.WaitGroup
	load.Go(func() { // ends with stop
		b := make([]byte, 2<<20) // both data servers
		for !stop.Load() {
			if _, err := f.WriteAt(b, 0); err != nil {
				t.Error(err)
			}
			if _, err := f.ReadAt(b, 0); err != nil {
				t.Error(err)
			}
		}
	})
	for _, size := range [][2]int{{80, 24}, {200, 50}} {
		t.Run(fmt.Sprintf("%dx%d", size[0], size[1]), func(t *testing.T) {
			s := open(t, size, harness.Bin(t, "weft"), "top", m.Dir)
			var screen string
			harness.Await(t, "a screen with the busy file", func() bool {
				screen = s.show()
				return strings.Contains(screen, "dir/busy") && strings.Contains(screen, "CLIENT")
			})
			first, rest, _ := strings.Cut(screen, "\n")
			if want := v.Addr + ":/ on "; !strings.HasPrefix(first, want) {
				t.Errorf("%q, want it to begin with %q", first, want)
			}
			if got := masked(rest); got != wantTop {
				t.Errorf("the screen is\n%s\nwithout what differs\n%s\nwant\n%s", screen, got, wantTop)
			}
			for line := range strings.Lines(screen) {
				if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > size[0] {
					t.Errorf("%d columns: %s", n, line)
				}
			}
			s.tmux("send-keys", "q")
			harness.Await(t, "the end", func() bool { return strings.Contains(s.show(), "status 0") })

			s = open(t, size, harness.Bin(t, "weft"), "status", m.Dir)
			harness.Await(t, "the status", func() bool {
				screen = s.show()
				return strings.Contains(screen, "written ") && strings.Contains(screen, "status 0")
			})
			if got := masked(screen); !strings.HasPrefix(got, wantStatus) {
				t.Errorf("the screen is\n%s\nwithout what differs\n%s\nwant it to begin with\n%s", screen, got, wantStatus)
			}
		})
	}
	once := harness.Weft(t, "top", "--once", "--every", "200ms", m.Dir)
	if _, rest, _ := strings.Cut(once, "\n"); masked(rest) != wantTop {
		t.Errorf("weft top --once:\n%s", once)
	}
	stop.Store(true)
	load.Wait()
	f.Close()
	m.Unmount()
}

// terminal is a terminal with a program in it.
type terminal struct {
	t      *testing.T
	socket string
}

func open(t *testing.T, size [2]int, args ...string) *terminal {
	t.Helper()
	s := &terminal{t, filepath.Join(harness.Dir(t), "tmux")}
	t.Cleanup(func() { exec.Command("tmux", "-S", s.socket, "kill-server").Run() })
	command := `"$@"; echo "status $?"; sleep 600`
	s.tmux(append([]string{"-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(size[0]), "-y", fmt.Sprint(size[1]), "sh", "-c", command, "sh"}, args...)...)
	return s
}

func (s *terminal) tmux(args ...string) string {
	s.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", s.socket, "-u"}, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("tmux %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// show is what is on the screen, without empty lines at the end. A line that was wrapped is one.
func (s *terminal) show() string {
	return strings.TrimRight(s.tmux("capture-pane", "-p", "-J"), " \n") + "\n"
}

// TestHung: a request that is not answered is named, with what it waits for, by weft status, weft top and the log, and again when it is over.
func TestHung(t *testing.T) {
	harness.NeedMount(t)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	m := v.Mount()
	name := filepath.Join(m.Dir, "f")
	if err := os.WriteFile(name, make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", m.Dir)
	v.Servers[0].Pause()
	read := make(chan error, 1)
	go func() { // ends when the data server goes on
		b, err := os.ReadFile(name)
		if err == nil && len(b) != 1<<20 {
			err = fmt.Errorf("%d bytes", len(b))
		}
		read <- err
	}()
	var status string
	harness.Await(t, "the request in weft status", func() bool {
		status = harness.Weft(t, "status", m.Dir)
		return strings.Contains(status, "waiting ")
	})
	if want := regexp.MustCompile(fmt.Sprintf(`waiting     read of inode \d+ \(f\), by process \d+, for 1\ds; waits for .*device [0-9a-f]{8} at 127\.0\.0\.1:%s`, v.Servers[0].Port())); !want.MatchString(status) {
		t.Errorf("weft status says\n%s", status)
	}
	if top := harness.Weft(t, "top", "--once", m.Dir); !strings.Contains(top, "\nwaiting  read of inode ") {
		t.Errorf("weft top says\n%s", top)
	}
	harness.Await(t, "the log", func() bool { return strings.Contains(m.Log(), `msg="a request takes long" op=read`) })
	v.Servers[0].Continue()
	if err := <-read; err != nil {
		t.Error(err)
	}
	harness.Await(t, "the end in the log", func() bool { return strings.Contains(m.Log(), "requests that took long have been answered") })
	if status := harness.Weft(t, "status", m.Dir); strings.Contains(status, "waiting ") {
		t.Errorf("weft status goes on:\n%s", status)
	}
	m.Unmount()
}

// traced is what a test wants to know of a line of weft trace --json.
type traced struct {
	Op, Path, Device, Command string
	Took                      time.Duration `json:"took_ns"`
	Daemon                    time.Duration `json:"daemon_ns"`
	Metadata                  time.Duration `json:"metadata_ns"`
	Data                      time.Duration `json:"data_ns"`
	Slowest                   time.Duration `json:"slowest_ns"`
}

// TestTrace has requests wait for the metadata service and for a data server, each for a known time, and looks where weft trace says it went.
func TestTrace(t *testing.T) {
	harness.NeedMount(t)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	m := v.Mount()
	dir := filepath.Join(m.Dir, "dir")
	name := filepath.Join(dir, "f")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(name, make([]byte, 1<<20), 0o644)); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", m.Dir)
	const pause = 400 * time.Millisecond
	var slow, all, text trace
	slow.start(t, m.Dir, "--json", "--slow", (pause / 2).String(), "--path", "dir")
	all.start(t, m.Dir, "--json", "--op", "read,mkdir", "--path", "?ew*")
	text.start(t, m.Dir)
	// Until all three see what is done.
	made := 0
	harness.Await(t, "the traces", func() bool {
		v.Pause()
		time.AfterFunc(pause, v.Continue)
		made++
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprint("new", made)), 0o755); err != nil {
			t.Fatal(err)
		}
		return strings.Contains(slow.output(), `"mkdir"`) && strings.Contains(all.output(), `"mkdir"`) && strings.Contains(text.output(), "mkdir")
	})
	mkdir := slow.find(t, "mkdir", "")
	if mkdir.Metadata < pause/2 || mkdir.Data != 0 || mkdir.Device != "" || mkdir.Daemon > pause/2 || !strings.HasPrefix(mkdir.Path, "dir/new") {
		t.Errorf("a mkdir that waited for the metadata service: %+v", mkdir)
	}
	hold := func() {
		v.Servers[0].Pause()
		time.AfterFunc(pause, v.Servers[0].Continue)
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []struct {
		op string
		do func() error
	}{
		{"read", func() error {
			hold()
			_, err := f.ReadAt(make([]byte, 1000), 0)
			return err
		}},
		{"write", func() error {
			hold()
			_, err := f.WriteAt([]byte("new"), 10)
			return err
		}},
		{"fsync", func() error {
			hold()
			return f.Sync()
		}},
	} {
		if err := what.do(); err != nil {
			t.Fatal(err)
		}
		op := what.op
		harness.Await(t, "a slow "+op, func() bool { return strings.Contains(slow.output(), `"`+op+`"`) })
		got := slow.find(t, op, "dir/f")
		if got.Data < pause/2 || got.Metadata > pause/2 || got.Slowest < pause/2 || got.Slowest > got.Took || got.Device == "" || got.Daemon+got.Metadata+got.Data < got.Took {
			t.Errorf("a %s that waited for the data server: %+v", op, got)
		}
		if !strings.HasPrefix(got.Command, "screens") {
			t.Errorf("%q has asked for it", got.Command)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	harness.Await(t, "the write", func() bool { return strings.Contains(text.output(), " 3@10 ") })
	out := text.output()
	if line := regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d\.\d{6} write +\S+s +\S+ +\S+ +\S+s +\S+s [0-9a-f]{8} \d+/screens\S* +3@10 +dir/f$`); !line.MatchString(out) {
		t.Errorf("weft trace says\n%s", out)
	}
	if strings.Contains(all.output(), `"dir/f"`) || strings.Contains(slow.output(), `"getattr"`) {
		t.Errorf("what was not asked for:\n%s%s", all.output(), slow.output())
	}
	for _, c := range []*trace{&slow, &all, &text} {
		c.stop(t)
	}
	m.Unmount()
}

// trace is weft trace while it runs.
type trace struct {
	cmd *exec.Cmd
	mu  sync.Mutex
	out strings.Builder
}

func (c *trace) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Write(b)
}

func (c *trace) output() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.String()
}

func (c *trace) start(t *testing.T, args ...string) {
	c.cmd = exec.Command(harness.Bin(t, "weft"), append([]string{"trace"}, args...)...)
	c.cmd.Stdout, c.cmd.Stderr = c, c
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.cmd.Process.Kill() })
}

// stop interrupts it, which is how it ends well.
func (c *trace) stop(t *testing.T) {
	c.cmd.Process.Signal(os.Interrupt)
	if err := c.cmd.Wait(); err != nil {
		t.Errorf("%v: %v\n%s", c.cmd.Args, err, c.output())
	}
}

// find is the slowest request of a kind, for a path if that is not empty.
func (c *trace) find(t *testing.T, op, path string) (found traced) {
	t.Helper()
	in := json.NewDecoder(strings.NewReader(c.output()))
	for in.More() {
		var got traced
		if err := in.Decode(&got); err != nil {
			t.Fatalf("%v in\n%s", err, c.output())
		}
		if got.Op == op && (path == "" || got.Path == path) && got.Took > found.Took {
			found = got
		}
	}
	if found.Op == "" {
		t.Errorf("no %s of %s in\n%s", op, path, c.output())
	}
	return found
}
