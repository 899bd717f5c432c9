package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var (
	kills = flag.Int("kills", 4, "how often to kill")
	seed  = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of random data and choices")
	// options are those of every mount.
	local   = flag.Bool("local", false, "data servers lend descriptors of their files")
	options = flag.String("o", "", "mount options, such as transport=device")
)

// load writes files until told to stop and remembers what was acknowledged. File contents follow from name and version,
// so nothing big need be remembered.
type load struct {
	dir  string
	name string // what its files begin with, where others have theirs
	stop atomic.Bool
	wg   sync.WaitGroup
	mu   sync.Mutex
	kept
}

// kept is what is left of a load when it has ended.
type kept struct {
	Files map[string]promise
	Error string
}

// A promise is what a file must hold: one of its versions from least on. The application learnt that version least is
// safe; a later one may have replaced it without the acknowledgement having arrived.
type promise struct {
	Least   int
	Version int // the last one begun
	Gone    bool
	Doubt   bool // removal was begun and not acknowledged
}

func content(name string, version int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprintf("%s-%d", name, version))
	src := rand.NewChaCha8(key)
	size := src.Uint64() % (64 << 10)
	if src.Uint64()%8 == 0 {
		size *= 50
	}
	b := make([]byte, size)
	src.Read(b)
	return b
}

// start runs workers. fsync tells whether a version counts as acknowledged at fsync or already at close.
func (l *load) start(workers int, fsync bool) {
	l.Files = map[string]promise{}
	for w := range workers {
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			rng := rand.New(rand.NewPCG(*seed, uint64(l.name[0])<<8|uint64(w)))
			for i := 0; !l.stop.Load(); i++ {
				name := fmt.Sprintf("%s%d-%d", l.name, w, rng.IntN(60))
				var err error
				if rng.IntN(6) == 0 {
					err = l.remove(name)
				} else {
					err = l.write(name, fsync, rng.IntN(3) == 0)
				}
				if err != nil && !l.stop.Load() {
					l.mu.Lock()
					l.Error = errors.Join(errors.New(l.Error), err).Error()
					l.mu.Unlock()
					return
				}
			}
		}()
	}
}

// write makes the next version of a file: in place, or beside and renamed.
func (l *load) write(name string, fsync, replace bool) error {
	l.mu.Lock()
	p := l.Files[name]
	if !p.Gone && p.Version > 0 {
		replace = true // in place there would be a moment with neither version
	}
	p.Version++
	l.Files[name] = p
	version := p.Version
	l.mu.Unlock()
	path := filepath.Join(l.dir, name)
	target := path
	if replace {
		target += ".new"
	}
	f, err := os.Create(target)
	if err != nil {
		return err
	}
	data := content(name, version)
	for len(data) > 0 {
		n := min(len(data), 128<<10)
		if _, err := f.Write(data[:n]); err != nil {
			f.Close()
			return err
		}
		data = data[n:]
	}
	if fsync {
		if err := f.Sync(); err != nil {
			f.Close()
			return err
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	if replace {
		if err := os.Rename(target, path); err != nil {
			return err
		}
	}
	l.mu.Lock()
	l.Files[name] = promise{Least: version, Version: version}
	l.mu.Unlock()
	return nil
}

func (l *load) remove(name string) error {
	l.mu.Lock()
	p, ok := l.Files[name]
	if !ok || p.Gone {
		l.mu.Unlock()
		return nil
	}
	p.Doubt = true
	l.Files[name] = p
	l.mu.Unlock()
	if err := os.Remove(filepath.Join(l.dir, name)); err != nil {
		return err
	}
	l.mu.Lock()
	l.Files[name] = promise{Least: p.Least, Version: p.Version, Gone: true}
	l.mu.Unlock()
	return nil
}

// check compares what is there with what was promised.
func (l *load) check(t *testing.T) {
	t.Helper()
	bad := 0
	for name, p := range l.Files {
		got, err := os.ReadFile(filepath.Join(l.dir, name))
		ok := false
		switch {
		case errors.Is(err, os.ErrNotExist):
			ok = p.Gone || p.Doubt || p.Least == 0
		case err != nil:
		default:
			for v := max(p.Least, 1); v <= p.Version && !ok; v++ {
				ok = bytes.Equal(got, content(name, v))
			}
			if p.Gone {
				ok = p.Version > p.Least // made again in place, and that was not acknowledged
			} else if p.Least == 0 {
				ok = true // never acknowledged: anything may be there
			}
		}
		if !ok {
			bad++
			t.Errorf("%s: %d bytes, error %v; promised %+v (%d bytes)", name, len(got), err, p, len(content(name, max(p.Least, 1))))
			if bad == 10 {
				t.Fatal("and more")
			}
		}
	}
}

// loadEnv makes this test binary run a load until standard input ends, and print what is left of it: "HOW NAME DIR", HOW
// being fsync or close. A process that has files of the mount open cannot start others while the servers are dead: between fork and exec
// the child closes its copies of them, and each close waits for the servers.
const loadEnv = "WEFT_TEST_LOAD"

func mountOptions() []string {
	return strings.FieldsFunc(*options, func(c rune) bool { return c == ',' })
}

func TestMain(m *testing.M) {
	flag.Parse()
	if call, dir, ok := strings.Cut(os.Getenv(callEnv), " "); ok {
		fmt.Println(callForever(call, dir))
		return
	}
	if path := os.Getenv(verifyEnv); path != "" {
		fmt.Println(verifyForever(path))
		return
	}
	if how := os.Getenv(scribbleEnv); how != "" {
		scribbleForever(how)
		return
	}
	if how := os.Getenv(targetEnv); how != "" {
		if err := serveTarget(how); err != nil {
			fmt.Println(err)
		}
		return
	}
	if how := os.Getenv(paceEnv); how != "" {
		paceForever(how)
		return
	}
	if os.Getenv(rewriteEnv) != "" {
		rewriteAll()
		return
	}
	if how := os.Getenv(drivesEnv); how != "" {
		serveDrives(how)
		return
	}
	if how := os.Getenv(stampEnv); how != "" {
		stampForever(how)
		return
	}
	if dir := os.Getenv(watchEnv); dir != "" {
		if err := watchForever(dir); err != nil {
			fmt.Println(err)
		}
		return
	}
	if path := os.Getenv(retainEnv); path != "" {
		if err := retainForever(path); err != nil {
			fmt.Println(err)
		}
		return
	}
	how := strings.SplitN(os.Getenv(loadEnv), " ", 3)
	if len(how) < 3 {
		os.Exit(m.Run())
	}
	l := &load{dir: how[2], name: how[1]}
	l.start(4, how[0] == "fsync")
	io.Copy(io.Discard, os.Stdin)
	l.stop.Store(true)
	l.wg.Wait()
	json.NewEncoder(os.Stdout).Encode(l.kept)
}

// startPiped starts a process that ends with the test, and returns its standard input and output.
func startPiped(t *testing.T, cmd *exec.Cmd) (in io.WriteCloser, out io.Reader) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if out, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	return in, out
}

// begin runs a load in a process of its own; the function it returns ends it.
func begin(t *testing.T, how, name, dir string) (end func() *load) {
	cmd := harness.Self(fmt.Sprintf("%s=%s %s %s", loadEnv, how, name, dir), "-seed", fmt.Sprint(*seed))
	in, out := startPiped(t, cmd)
	return func() *load {
		t.Helper()
		in.Close()
		l := &load{dir: dir, name: name}
		if err := errors.Join(json.NewDecoder(out).Decode(&l.kept), cmd.Wait()); err != nil {
			t.Fatalf("the load: %v", err)
		}
		if len(l.Files) == 0 {
			t.Fatal("the load wrote nothing")
		}
		return l
	}
}

// TestKillServer kills weftd again and again while two mounts work in one directory, which send again what is not
// stable every second time. Nobody gets an error, everything that was closed is there, also for the other mount, and
// each time the volume is consistent.
func TestKillServer(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: !*local})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 99))
	endA, endB := begin(t, "close", "a", a.Dir), begin(t, "close", "b", b.Dir)
	for i := range *kills {
		time.Sleep(time.Duration(200+rng.IntN(1500)) * time.Millisecond)
		v.Kill()
		v.Fsck()
		if i%2 == 1 && v.Cluster == nil {
			v.Forget()
		}
		v.Start()
		if t.Failed() {
			t.Fatalf("after kill %d", i+1)
		}
	}
	loads := []*load{endA(), endB()}
	check := func(dirs ...string) {
		t.Helper()
		for _, l := range loads {
			for _, l.dir = range dirs {
				l.check(t)
			}
		}
	}
	for _, l := range loads {
		if l.Error != "" {
			t.Errorf("an application got an error: %s", l.Error)
		}
		t.Logf("%d files written", len(l.Files))
	}
	check(a.Dir, b.Dir)
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
	v.Start()
	check(v.Mount(mountOptions()...).Dir)
}

// TestKillBoth kills the mount's process together with weftd. What was fsynced must be there; the rest may be what a local
// file system would leave. The dead client keeps others from changing anything for its lease and no longer.
func TestKillBoth(t *testing.T) {
	const lease = 3 * time.Second
	v := harness.NewVolume(t, harness.Options{Remote: !*local, Lease: lease})
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 98))
	for i := range max(2, *kills/4) {
		m := v.Mount(mountOptions()...)
		name := fmt.Sprint("round", i)
		if err := os.Mkdir(filepath.Join(m.Dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		end := begin(t, "fsync", "w", filepath.Join(m.Dir, name))
		time.Sleep(time.Duration(500+rng.IntN(1000)) * time.Millisecond)
		v.Kill()
		m.Abort()
		l := end() // its errors are our doing
		v.Fsck()
		v.Start()
		began := time.Now()
		m = v.Mount(mountOptions()...)
		l.dir = filepath.Join(m.Dir, name)
		l.check(t)
		if err := os.Mkdir(filepath.Join(m.Dir, name, "after"), 0o755); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > lease+10*time.Second {
			t.Errorf("mounting and making a directory took %v", took)
		}
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}

// TestKillDuringCopy is a tree copy that a kill interrupts only in time.
func TestKillDuringCopy(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: !*local})
	m := v.Mount(mountOptions()...)
	src := filepath.Join(strings.TrimSpace(harness.Run(t, "", "go", "env", "GOROOT")), "src", "crypto")
	cp := exec.Command("cp", "-a", src, m.Dir+"/copy")
	if err := cp.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cp.Process.Kill() })
	time.Sleep(time.Second)
	v.Kill()
	v.Fsck()
	v.Forget()
	v.Start()
	if err := cp.Wait(); err != nil {
		t.Fatalf("cp: %v", err)
	}
	if out := harness.Run(t, "", "diff", "-r", src, m.Dir+"/copy"); out != "" {
		t.Fatalf("the copy differs:\n%.2000s", out)
	}
}
