package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/test/harness"
)

var failures = flag.Int("failures", 10, "how many path failures one after the other TestPaths has")

const (
	// targetEnv makes this test binary an NVMe target with one port, "ADDR FILE...", that serves these files, which others may serve as well.
	// It does each line of standard input, and answers it with one: "down", "up", or "ana STATE".
	targetEnv = "WEFT_TEST_TARGET"
	targetNQN = "nqn.2026-01.io.weft:paths"

	// paceEnv makes this test binary use a file of stamped blocks until standard input ends, and print what became of that: "write FILE" or
	// "read FILE".
	paceEnv    = "WEFT_TEST_PACE"
	paceBlock  = 4096
	paceBlocks = 4096 // of the file
	paceMost   = 64   // that a call has
	// paceSlow is how long a call takes that is remembered.
	paceSlow = 50 * time.Millisecond
)

// sharedFile is a Backing that several processes may serve at once, as the controllers of a subsystem do. Their page cache is the same.
type sharedFile struct{ *os.File }

func (f sharedFile) Size() (int64, error) { return f.Seek(0, io.SeekEnd) }

func (f sharedFile) Sync() error { return unix.Fdatasync(int(f.Fd())) }

func (f sharedFile) Zero(off, n int64, release bool) error {
	mode := uint32(unix.FALLOC_FL_ZERO_RANGE)
	if release {
		mode = unix.FALLOC_FL_PUNCH_HOLE
	}
	return unix.Fallocate(int(f.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

// serveTarget is the process that targetEnv says.
func serveTarget(how string) error {
	words := strings.Fields(how)
	s := nvme.Subsystem{NQN: targetNQN, Serial: "paths", AnyHost: true}
	for i, path := range words[1:] {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		s.Namespaces = append(s.Namespaces, nvme.Namespace{NSID: uint32(i + 1), Backing: sharedFile{f}, BlockSize: 4096, NGUID: [16]byte{0x77, 15: byte(i)}})
	}
	target, err := nvmetest.New(nvme.Config{Subsystems: []nvme.Subsystem{s}, Ports: []nvme.Port{{ID: 1, Listen: words[0]}}})
	if err != nil {
		return err
	}
	defer target.Shutdown(context.Background())
	states := map[string]wire.ANAState{}
	for _, s := range []wire.ANAState{wire.ANAOptimized, wire.ANANonOptimized, wire.ANAInaccessible, wire.ANAChange} {
		states[s.String()] = s
	}
	fmt.Println("ready")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		verb, state, _ := strings.Cut(lines.Text(), " ")
		err := errors.New("no such command")
		switch {
		case verb == "down":
			err = target.PortDown(1)
		case verb == "up":
			err = target.PortUp(1)
		case verb == "ana":
			err = target.SetANA(1, 1, states[state])
		}
		if err != nil {
			return fmt.Errorf("%s: %w", lines.Text(), err)
		}
		fmt.Println("done")
	}
	return nil
}

// pathTarget is one of the processes by which the namespaces are reached.
type pathTarget struct {
	t     *testing.T
	addr  string
	files []string
	cmd   *exec.Cmd
	in    io.Writer
	out   *bufio.Scanner
}

func (p *pathTarget) start() {
	p.t.Helper()
	p.cmd = harness.Self(targetEnv + "=" + p.addr + " " + strings.Join(p.files, " "))
	p.cmd.Stderr = io.Discard
	in, out := startPiped(p.t, p.cmd)
	p.in, p.out = in, bufio.NewScanner(out)
	p.answer("ready")
}

func (p *pathTarget) answer(want string) {
	p.t.Helper()
	if !p.out.Scan() || p.out.Text() != want {
		p.t.Fatalf("the target at %s says %q, %v; want %q", p.addr, p.out.Text(), p.out.Err(), want)
	}
}

func (p *pathTarget) do(command string) {
	p.t.Helper()
	fmt.Fprintln(p.in, command)
	p.answer("done")
}

func (p *pathTarget) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// packets has something done to all packets from and to the port, for some time.
func (p *pathTarget) packets(verdict string, away time.Duration) {
	p.t.Helper()
	_, port, _ := strings.Cut(p.addr, ":")
	harness.Run(p.t, "", "nft", fmt.Sprintf("add rule inet weft in tcp dport %s %s; add rule inet weft in tcp sport %[1]s %[2]s", port, verdict))
	time.Sleep(away)
	harness.Run(p.t, "", "nft", "flush chain inet weft in")
}

// pathFailures are what may become of a path for some time. Afterwards it is as before.
var pathFailures = []struct {
	name string
	do   func(p *pathTarget, away time.Duration)
}{
	{"reset", func(p *pathTarget, _ time.Duration) {
		p.packets("tcp flags & rst == 0 reject with tcp reset", 100*time.Millisecond)
	}},
	{"silent", func(p *pathTarget, away time.Duration) { p.packets("drop", 2*away) }},
	{"port closed", func(p *pathTarget, away time.Duration) {
		p.do("down")
		time.Sleep(away)
		p.do("up")
	}},
	{"killed", func(p *pathTarget, away time.Duration) {
		p.kill()
		time.Sleep(away)
		p.start()
	}},
	{"ANA", func(p *pathTarget, away time.Duration) {
		for _, state := range []wire.ANAState{wire.ANAInaccessible, wire.ANAChange, wire.ANANonOptimized} {
			p.do("ana " + state.String())
			time.Sleep(away / 3)
		}
		p.do("ana " + wire.ANAOptimized.String())
	}},
}

// stamp fills a block so that what it is of is told by all of it.
func stamp(b []byte, n int, version uint64) {
	for at := 0; at < len(b); at += 16 {
		binary.BigEndian.PutUint64(b[at:], uint64(n)<<16|uint64(at))
		binary.BigEndian.PutUint64(b[at+8:], version)
	}
}

// versionOf returns a block's version, 0 if nothing was written there.
func versionOf(b []byte, n int) (version uint64, err error) {
	if at := binary.BigEndian.Uint64(b); at == 0 && n != 0 || binary.BigEndian.Uint64(b[8:]) == 0 {
		for i, v := range b {
			if v != 0 {
				return 0, fmt.Errorf("block %d was never written and has %#x at byte %d", n, v, i)
			}
		}
		return 0, nil
	}
	version = binary.BigEndian.Uint64(b[8:])
	for at := 0; at < len(b); at += 16 {
		block, v := binary.BigEndian.Uint64(b[at:]), binary.BigEndian.Uint64(b[at+8:])
		if block != uint64(n)<<16|uint64(at) || v != version {
			return 0, fmt.Errorf("block %d of version %d has at byte %d that of block %d, version %d", n, version, at, block>>16, v)
		}
	}
	return version, nil
}

// paced is what became of the use of a file.
type paced struct {
	Calls int
	Bytes int64
	Slow  []slowCall
	Error string
}

// slowCall is a system call that took more than paceSlow.
type slowCall struct {
	What  string
	Begun time.Time
	Took  time.Duration
}

// call does a system call and takes its time.
func (p *paced) call(what string, n int, do func() error) error {
	begun := time.Now()
	err := do()
	took := time.Since(begun)
	p.Calls++
	p.Bytes += int64(n)
	if took > paceSlow {
		p.Slow = append(p.Slow, slowCall{what, begun, took})
	}
	if err != nil {
		return fmt.Errorf("call %d, after %v: %w", p.Calls, took, err)
	}
	return nil
}

// paceForever is the process that paceEnv says.
func paceForever(how string) {
	var stop atomic.Bool
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	p := new(paced)
	if err := p.use(how, &stop); err != nil {
		p.Error = err.Error()
	}
	json.NewEncoder(os.Stdout).Encode(p)
}

// use writes blocks of a file, or looks at those that another process writes: none is ever another one's or older
// than it was, nor half of one unless it is being written.
func (p *paced) use(how string, stop *atomic.Bool) error {
	verb, path, _ := strings.Cut(how, " ")
	writes := verb == "write"
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	rng := rand.New(rand.NewPCG(*seed, uint64(len(how))))
	versions := make([]uint64, paceBlocks)
	buf := make([]byte, paceMost*paceBlock)
	for version := uint64(1); !stop.Load(); version++ {
		n := 1 + rng.IntN(paceMost>>rng.IntN(6))
		first := rng.IntN(paceBlocks - n)
		b, off := buf[:n*paceBlock], int64(first)*paceBlock
		switch kind := rng.IntN(100); {
		case writes && kind < 3:
			if err := p.call("fsync", 0, f.Sync); err != nil {
				return err
			}
		case writes && kind < 55:
			for i := range n {
				versions[first+i] = version
				stamp(b[i*paceBlock:][:paceBlock], first+i, version)
			}
			if err := p.call("write", len(b), func() error { _, err := f.WriteAt(b, off); return err }); err != nil {
				return err
			}
		default:
			if err := p.call("read", len(b), func() error { _, err := f.ReadAt(b, off); return err }); err != nil {
				return err
			}
			for i := range n {
				block := b[i*paceBlock:][:paceBlock]
				got, err := versionOf(block, first+i)
				if err != nil && !writes { // as in any file system, it may have been read while it was written
					if _, again := f.ReadAt(block, off+int64(i)*paceBlock); again != nil {
						return again
					}
					got, err = versionOf(block, first+i)
				}
				if want := versions[first+i]; err == nil && (got < want || writes && got > want) {
					err = fmt.Errorf("block %d has version %d, want %d", first+i, got, want)
				}
				if err != nil {
					return err
				}
				versions[first+i] = got
			}
		}
	}
	return p.call("fsync at the end", 0, f.Sync)
}

// beginPace starts such a process; the function that it returns ends it.
func beginPace(t *testing.T, verb, path string) (end func() *paced) {
	t.Helper()
	in, out := startPiped(t, harness.Self(paceEnv+"="+verb+" "+path, "-seed", fmt.Sprint(*seed)))
	return func() *paced {
		t.Helper()
		in.Close()
		p := new(paced)
		if err := json.NewDecoder(out).Decode(p); err != nil {
			t.Fatalf("%s %s: %v", verb, path, err)
		}
		return p
	}
}

// pathVolume is a volume of two namespaces that are reached by two target processes each.
type pathVolume struct {
	dir, addr string
	targets   []*pathTarget
	meta      *harness.Proc
}

func newPathVolume(t *testing.T) *pathVolume {
	t.Helper()
	v := &pathVolume{dir: harness.Dir(t), addr: harness.FreeAddr(t)}
	var files []string
	for i := range 2 {
		path := filepath.Join(v.dir, fmt.Sprint("ns", i))
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 512<<20)); err != nil {
			t.Fatal(err)
		}
		files = append(files, path)
	}
	v.meta = harness.Spawn(t, "weftd", "meta", "--dir", filepath.Join(v.dir, "meta"), "--listen", v.addr)
	harness.AwaitListen(t, v.addr)
	for range 2 {
		p := &pathTarget{t: t, addr: harness.FreeAddr(t), files: files}
		p.start()
		v.targets = append(v.targets, p)
		for i := range files {
			harness.Weft(t, "admin", "device", "add", fmt.Sprintf("nvme://%s/%s#%d", p.addr, targetNQN, i+1), "--server", v.addr)
		}
	}
	return v
}

// usable is how many paths a mount can use.
func usable(t *testing.T, m *harness.Mount) (n int) {
	t.Helper()
	var st []struct {
		Devices []struct {
			Mount struct {
				Paths []struct{ Use string }
			}
		}
	}
	if err := json.Unmarshal([]byte(harness.Weft(t, "status", "--json", m.Dir)), &st); err != nil {
		t.Fatal(err)
	}
	for _, d := range st[0].Devices {
		for _, p := range d.Mount.Paths {
			if p.Use != "out" {
				n++
			}
		}
	}
	return n
}

// finish checks what is left of a volume that nobody has mounted any more.
func (v *pathVolume) finish(t *testing.T) {
	t.Helper()
	v.meta.End(syscall.SIGTERM)
	if out, err := exec.Command(harness.Bin(t, "weftd"), "fsck", "--dir", filepath.Join(v.dir, "meta")).CombinedOutput(); err != nil {
		t.Errorf("weftd fsck: %v\n%s", err, out)
	}
}

// TestPaths takes one of two paths away at a time, by chance. Programs on two mounts see no error and no wrong byte, and how long they
// had to wait is printed.
func TestPaths(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "fio")
	if !ownNetwork(t, "TestPaths") {
		return
	}
	t.Logf("-seed %d -failures %d", *seed, *failures)
	rng := rand.New(rand.NewPCG(*seed, 6))
	v := newPathVolume(t)
	options := append([]string{"nvme-keepalive=500ms", "nvme-policy=round-robin"}, mountOptions()...)
	a, b := harness.MountAt(t, v.addr, options...), harness.MountAt(t, v.addr, options...)
	harness.Weft(t, "layout", "set", a.Dir, "--stripe-unit", "64KiB", "--stripe-count", "2")

	names := []string{"0", "1"}
	for _, name := range names {
		path := filepath.Join(a.Dir, name)
		if err := errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, paceBlocks*paceBlock)); err != nil {
			t.Fatal(err)
		}
	}
	var ends []func() *paced
	for i, name := range names { // each is written on one mount, and read on both
		here, there := []*harness.Mount{a, b}[i], []*harness.Mount{b, a}[i]
		ends = append(ends, beginPace(t, "write", filepath.Join(here.Dir, name)),
			beginPace(t, "read", filepath.Join(here.Dir, name)), beginPace(t, "read", filepath.Join(there.Dir, name)))
	}
	var loads sync.WaitGroup
	var stop, failed atomic.Bool
	loads.Go(func() { // ends when it is told to, or with an error
		dir := filepath.Join(b.Dir, "fio")
		err := os.Mkdir(dir, 0o755)
		n := 0
		for ; err == nil && !stop.Load(); n++ {
			err = quiet(dir, "fio", "--name=v", "--rw=randrw", "--bsrange=4k-256k", "--size=8m", "--numjobs=2", "--verify=crc32c",
				"--verify_fatal=1", "--do_verify=1", "--end_fsync=1", fmt.Sprint("--randseed=", *seed))
		}
		if err != nil {
			failed.Store(true)
			t.Errorf("fio, round %d: %v", n, err)
		}
		t.Logf("fio: %d rounds", n)
	})

	var begun []time.Time
	var kinds []int
	for i := 0; i < *failures && !failed.Load(); i++ {
		for _, m := range []*harness.Mount{a, b} {
			harness.Await(t, "4 usable paths", func() bool { return usable(t, m) == 4 })
		}
		kind := rng.IntN(len(pathFailures))
		if i < len(pathFailures) {
			kind = i // each at least once
		}
		begun, kinds = append(begun, time.Now()), append(kinds, kind)
		pathFailures[kind].do(v.targets[rng.IntN(2)], time.Duration(100+rng.IntN(500))*time.Millisecond)
	}
	for _, m := range []*harness.Mount{a, b} {
		harness.Await(t, "4 usable paths at the end", func() bool { return usable(t, m) == 4 })
	}
	stop.Store(true)
	loads.Wait()

	longest := make([]slowCall, len(pathFailures))
	count := make([]int, len(pathFailures))
	for _, k := range kinds {
		count[k]++
	}
	var all paced
	for _, end := range ends {
		p := end()
		if p.Error != "" {
			t.Error(p.Error)
		}
		all.Calls, all.Bytes = all.Calls+p.Calls, all.Bytes+p.Bytes
		for _, s := range p.Slow {
			half := s.Begun.Add(s.Took / 2)
			i := sort.Search(len(begun), func(i int) bool { return begun[i].After(half) }) - 1
			if i >= 0 && s.Took > longest[kinds[i]].Took {
				longest[kinds[i]] = s
			}
		}
	}
	t.Logf("%d calls, %d MiB beside fio", all.Calls, all.Bytes>>20)
	for i, s := range longest {
		pause := fmt.Sprint("less than ", paceSlow)
		if s.Took > 0 {
			pause = fmt.Sprintf("%v (%s)", s.Took.Round(time.Millisecond), s.What)
		}
		t.Logf("%s: %d times, longest pause %s", pathFailures[i].name, count[i], pause)
	}
	if all.Calls < 10*(*failures) {
		t.Errorf("%d calls during %d failures", all.Calls, *failures)
	}
	a.Unmount()
	b.Unmount()
	v.finish(t)
}

// TestNoPath takes all paths away. Soft mounts give calls up, a hard one waits and goes on when there is a path.
func TestNoPath(t *testing.T) {
	harness.NeedMount(t)
	v := newPathVolume(t)
	type user struct {
		m    *harness.Mount
		path string
		end  func() *paced
	}
	var users []user
	for i, options := range []string{"soft,timeo=10,retrans=1", "softerr,timeo=10,retrans=1", "hard"} {
		m := harness.MountAt(t, v.addr, append(mountOptions(), options, "nvme-keepalive=500ms")...)
		u := user{m: m, path: filepath.Join(m.Dir, fmt.Sprint(i))}
		if err := os.WriteFile(u.path, make([]byte, paceBlocks*paceBlock), 0o644); err != nil {
			t.Fatal(err)
		}
		harness.Await(t, "4 usable paths", func() bool { return usable(t, m) == 4 })
		u.end = beginPace(t, "write", u.path)
		users = append(users, u)
	}
	for _, p := range v.targets {
		p.kill()
	}
	for i, want := range []error{syscall.EIO, syscall.ETIMEDOUT} {
		p := users[i].end()
		if !strings.Contains(p.Error, want.Error()) {
			t.Errorf("a soft mount with no path: %q, want %v", p.Error, want)
		}
		t.Logf("soft, with 2 s to wait: %s", p.Error)
	}
	back := time.Now()
	for _, p := range v.targets {
		p.start()
	}
	for _, u := range users {
		harness.Await(t, "4 usable paths again", func() bool { return usable(t, u.m) == 4 })
	}
	p := users[2].end()
	waited := slices.ContainsFunc(p.Slow, func(s slowCall) bool { return s.Begun.Before(back) && s.Begun.Add(s.Took).After(back) })
	if p.Error != "" || !waited {
		t.Errorf("a hard mount with no path: %q, calls that took longer: %v", p.Error, p.Slow)
	}
	data := make([]byte, 1<<20)
	for _, u := range users {
		rand.NewChaCha8([32]byte{byte(*seed)}).Read(data)
		if err := os.WriteFile(u.path, data, 0o644); err != nil {
			t.Error(err)
		} else if got, err := os.ReadFile(u.path); err != nil || !bytes.Equal(got, data) {
			t.Errorf("after it: %d bytes, %v; wrong bytes: %v", len(got), err, !bytes.Equal(got, data))
		}
		u.m.Unmount()
	}
	v.finish(t)
}
