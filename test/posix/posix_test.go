package posix

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var (
	long    = flag.Bool("long", false, "also the checks that take long: 65,000 links and subdirectories")
	options = flag.String("o", "", "mount options, such as transport=device")
)

func mountOptions() []string {
	return strings.FieldsFunc(*options, func(c rune) bool { return c == ',' })
}

// fewest is how many checks there must be, so that none gets lost unnoticed.
const fewest = 1500

// timeLimit is for one check on one file system.
func timeLimit() time.Duration {
	if *long {
		return 10 * time.Minute
	}
	return 40 * time.Second
}

// inside says that this process has a mount namespace of its own, childEnv that it is a helper (child_test.go).
const (
	inside   = "WEFT_POSIX_INSIDE"
	childEnv = "WEFT_POSIX_CHILD"
)

// TestMain runs the tests in a process with a mount namespace of its own: what they mount goes away with it.
func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child(name)
	}
	unix.Umask(0o022)
	if os.Getenv(inside) == "" && os.Getuid() == 0 {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
		if err := cmd.Run(); err != nil {
			if cmd.ProcessState == nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.Exit(1)
		}
		os.Exit(0)
	}
	leaveMounts()
	os.Exit(m.Run())
}

// leaveMounts takes from a mount namespace of our own the copies of other people's mounts of weft, which would be served for
// as long as we run, whatever those who made them do.
func leaveMounts() {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil || os.Getenv(inside) == "" {
		return
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "fuse.weft" {
			unix.Unmount(f[1], unix.MNT_DETACH)
		}
	}
}

// checks are all there are.
func checks() []check {
	all := [][]check{
		openChecks(), ioChecks(), sizeChecks(), mapChecks(), nameChecks(), renameChecks(), linkChecks(), nodeChecks(),
		permissionChecks(), modeChecks(), aclChecks(), xattrChecks(), timeChecks(), dirChecks(), lockChecks(), otherChecks(),
	}
	if *long {
		all = append(all, longChecks())
	}
	var out []check
	for _, group := range all {
		out = append(out, group...)
	}
	return out
}

// A place is a file system under test.
type place struct{ name, dir string }

// TestCalls runs every check on weft, on the local disk's file system and on tmpfs, and holds the answers against the
// table and against each other.
func TestCalls(t *testing.T) {
	keepThread(t)
	weft := place{"weft", harness.NewVolume(t, harness.Options{}).Mount(mountOptions()...).Dir}
	harness.Whole(t, weft.dir, *options)
	local := localPlaces(t)
	places := append([]place{weft}, local...)
	all := checks()
	if len(all) < fewest {
		t.Errorf("%d checks, want %d at least", len(all), fewest)
	}
	start := time.Now()
	answers := make([][]string, len(places)) // by place and check
	for p := range places {
		answers[p] = runAll(places[p], all)
		t.Logf("%s: %d checks in %.1fs", places[p].name, len(all), time.Since(start).Seconds())
		start = time.Now()
	}
	names, used := map[string]bool{}, map[difference]bool{}
	for i, c := range all {
		if names[c.name] {
			t.Errorf("two checks have the name %s", c.name)
		}
		names[c.name] = true
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			if want == "" {
				want = answers[1][i]
			}
			for p, where := range places {
				got := answers[p][i]
				var listed []difference
				for _, d := range differences {
					if d.matches(where.name, c.name) {
						listed = append(listed, d)
						used[d] = used[d] || got != want
					}
				}
				switch {
				case got == want || len(listed) > 0:
				case p > 0 && !known(where.name):
					t.Logf("%s: %s, want %s", where.name, got, want)
				default:
					t.Errorf("%s: %s, want %s", where.name, got, want)
				}
			}
		})
	}
	for _, d := range differences {
		for _, where := range places {
			// A kernel that serves files by itself differs less.
			passed := where.name == "weft" && strings.Contains(*options, "passthrough=rw")
			if differs, asked := used[d]; d.concerns(where.name) && asked && !differs && !passed {
				t.Errorf("%s: %s: listed as a difference, and does not differ", d.where, d.check)
			}
		}
	}
}

// keepThread keeps the test's thread from ending before the test: the processes that it starts would be killed, since they are
// to die with who started them, and threads of apart end.
func keepThread(t *testing.T) {
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
}

// runAll gives each check's answer. Several run at a time, since most of their time is waiting.
func runAll(where place, all []check) []string {
	answers := make([]string, len(all))
	var wg sync.WaitGroup
	next := make(chan int)
	for range 20 {
		wg.Go(func() { // ends when the checks are used up
			for i := range next {
				answers[i] = run(where, i, all[i])
			}
		})
	}
	for i := range all {
		next <- i
	}
	close(next)
	wg.Wait()
	return answers
}

// run gives a check's answer, which says so if the check did not end. Local file systems are small and are kept clear; weft's
// volume goes away as a whole.
func run(where place, i int, c check) string {
	w := world(filepath.Join(where.dir, fmt.Sprint("c", i)))
	done := make(chan string, 1)
	go func() { // ends with the check
		defer func() {
			if p := recover(); p != nil {
				done <- clean(where, fmt.Sprint("broke: ", p))
			}
		}()
		try(unix.Mkdir(string(w), 0o755))
		if where.name != "weft" {
			defer os.RemoveAll(string(w))
		}
		done <- clean(where, say(c.do(w)))
	}()
	select {
	case answer := <-done:
		return answer
	case <-time.After(timeLimit()):
		return fmt.Sprint("did not end in ", timeLimit())
	}
}

var caseDir = regexp.MustCompile(`/c\d+\b`)

// clean takes out what differs from place to place.
func clean(where place, s string) string {
	return caseDir.ReplaceAllString(strings.ReplaceAll(s, where.dir, ""), "")
}

// known says that differences are known and checked for a local file system. Other ones are looked at for information.
func known(name string) bool { return name == "ext4" || name == "tmpfs" }

// localPlaces are the local disk's file system and a tmpfs. The former is ext4 in a file if that can be made.
func localPlaces(t *testing.T) []place {
	base := harness.Dir(t)
	out := []place{{"", filepath.Join(base, "disk")}, {"tmpfs", filepath.Join(base, "tmpfs")}}
	for _, p := range out {
		try(os.Mkdir(p.dir, 0o755))
	}
	image := filepath.Join(base, "image")
	try(os.WriteFile(image, nil, 0o600))
	try(os.Truncate(image, 4<<30))
	// Large inodes and ea_inode, so that extended attributes of 64 KiB fit.
	if msg, err := exec.Command("mkfs.ext4", "-q", "-O", "ea_inode", "-N", "200000", image).CombinedOutput(); err != nil {
		t.Logf("no ext4 of our own: mkfs.ext4: %v %s", err, msg)
	} else if msg, err := exec.Command("mount", "-o", "loop,relatime", image, out[0].dir).CombinedOutput(); err != nil {
		t.Logf("no ext4 of our own: mount: %v %s", err, msg)
	} else {
		t.Cleanup(func() { unix.Unmount(out[0].dir, unix.MNT_DETACH) })
	}
	if err := unix.Mount("tmpfs", out[1].dir, "tmpfs", 0, "mode=755,size=2g"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(out[1].dir, unix.MNT_DETACH) })
	var st unix.Statfs_t
	try(unix.Statfs(out[0].dir, &st))
	out[0].name = fmt.Sprintf("file system type %#x", st.Type)
	if st.Type == unix.EXT4_SUPER_MAGIC {
		out[0].name = "ext4"
	}
	return out
}
