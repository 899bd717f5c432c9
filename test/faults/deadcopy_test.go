package faults

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// oldFileOp is something that is done to a file that has been there for long.
type oldFileOp struct {
	name string
	do   func(path string) error
	want []byte // what is in the file then; nil: it is gone
}

// writeAt writes to a file in place.
func writeAt(path string, flags int, data []byte, sync bool) error {
	f, err := os.OpenFile(path, os.O_WRONLY|flags, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if sync && err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// The names of those that need something else than an old file.
const (
	createBeside = "create beside" // a place for a new file
	renameOver   = "rename over"   // another file, whose name ends in .src
)

var (
	oldData = bytes.Repeat([]byte("old"), 4000)
	newData = bytes.Repeat([]byte("new"), 4000)

	oldFileOps = []oldFileOp{
		{"read", func(p string) error { _, err := os.ReadFile(p); return err }, oldData},
		{"overwrite", func(p string) error { return writeAt(p, 0, newData, false) }, newData},
		{"overwrite and fsync", func(p string) error { return writeAt(p, 0, newData, true) }, newData},
		{"append", func(p string) error { return writeAt(p, os.O_APPEND, newData, false) }, append(bytes.Clone(oldData), newData...)},
		{"O_TRUNC", func(p string) error { return writeAt(p, os.O_TRUNC, newData[:100], false) }, newData[:100]},
		{"truncate", func(p string) error { return os.Truncate(p, 100) }, oldData[:100]},
		{createBeside, func(p string) error { return writeAt(p+".new", os.O_CREATE|os.O_EXCL, newData, true) }, oldData},
		{renameOver, func(p string) error { return os.Rename(p+".src", p) }, newData},
		{"remove", os.Remove, nil},
	}
)

// deadHarm is what happens to a data server or its disk.
type deadHarm struct {
	name  string
	begin func(*testing.T, *harness.DataServer, *harness.Disk) (end func())
	// What becomes of a read and of an append with fsync of a file whose only copy is there: "" if it is done, waits,
	// or else the error.
	read, write string
	planned     bool // it is waited for, see docs/stops.md
}

const waits = "waits"

var deadHarms = []deadHarm{
	{name: "kill -9", read: waits, write: waits, begin: func(_ *testing.T, d *harness.DataServer, _ *harness.Disk) func() { d.Kill(); return d.Start }},
	{name: "SIGTERM", read: waits, write: waits, planned: true, begin: func(_ *testing.T, d *harness.DataServer, _ *harness.Disk) func() { d.Stop(); return d.Start }},
	{name: "SIGSTOP", read: waits, write: waits, begin: func(_ *testing.T, d *harness.DataServer, _ *harness.Disk) func() { d.Pause(); return d.Continue }},
	{name: "DROP", read: waits, write: waits, begin: func(t *testing.T, d *harness.DataServer, _ *harness.Disk) func() {
		harness.Run(t, "", "nft", fmt.Sprintf("add rule inet weft in tcp dport %s drop; add rule inet weft in tcp sport %[1]s drop", d.Port()))
		return func() { harness.Run(t, "", "nft", "flush chain inet weft in") }
	}},
	{name: "frozen", write: waits, begin: func(_ *testing.T, _ *harness.DataServer, disk *harness.Disk) func() { disk.Freeze(); return disk.Thaw }},
	{name: "EIO", read: "Input/output error", write: "Input/output error", begin: func(_ *testing.T, d *harness.DataServer, disk *harness.Disk) func() {
		disk.Cut()
		return startAnew(d, disk)
	}},
	{name: "ENOSPC", write: "No space left on device", begin: func(_ *testing.T, d *harness.DataServer, _ *harness.Disk) func() { return d.Fill() }},
}

// What goes on meanwhile.
const (
	idle      = "idle"          // nothing, until the metadata service knows; then a few files are used
	fioBeside = "fio verify"    // fio writes and verifies a file, and a few are used at once
	inTurn    = "files in turn" // many files are used at once, one after the other
)

// deadCell is one case of TestDeadCopy.
type deadCell struct {
	harm            int // of deadHarms
	servers, copies int
	meanwhile       string
}

func (c deadCell) String() string {
	return fmt.Sprintf("%s, %d servers, %d copies, %s", deadHarms[c.harm].name, c.servers, c.copies, c.meanwhile)
}

// deadCells are all cells, or as few of them as there can be with each pair of values that can occur.
func deadCells(all bool) (cells []deadCell) {
	for i := range deadHarms {
		for j, meanwhile := range []string{idle, fioBeside, inTurn} {
			few := 1 + (i+j)%3
			for copies := 1; copies <= 3; copies++ {
				for servers := max(copies, 2); servers <= 3; servers++ {
					two := servers == 2
					if all || copies == few && (copies == 3 || two == (copies == 1+i%2)) {
						cells = append(cells, deadCell{i, servers, copies, meanwhile})
					}
				}
			}
		}
	}
	return cells
}

// TestDeadCells: each pair of values of two dimensions that occurs in some cell occurs in one of the few.
func TestDeadCells(t *testing.T) {
	pairs := func(cells []deadCell) map[string]bool {
		found := map[string]bool{}
		for _, c := range cells {
			values := []string{deadHarms[c.harm].name, fmt.Sprint(c.servers, " servers"), fmt.Sprint(c.copies, " copies"), c.meanwhile}
			for i := range values {
				for j := range i {
					found[values[j]+", "+values[i]] = true
				}
			}
		}
		return found
	}
	all, few := deadCells(true), deadCells(false)
	have := pairs(few)
	for pair := range pairs(all) {
		if !have[pair] {
			t.Errorf("no cell has %s", pair)
		}
	}
	if least := 3 * len(deadHarms); len(few) != least || len(all) != 5*least {
		t.Errorf("%d cells, and %d of all", len(few), len(all))
	}
}

// opTimes says how long one operation took on many files in turn.
type opTimes struct{ longest, all time.Duration }

// deadWorld is a volume whose data servers are harmed in turn.
type deadWorld struct {
	v     *harness.Volume
	m     *harness.Mount // of the present cell
	disks []*harness.Disk
	rng   *rand.Rand
}

// TestDeadCopyOfTwo and TestDeadCopyOfThree use old files, and make new ones, before and after one of so many data
// servers is harmed. A dead copy costs its wait once, not for each file. Files whose only copy is there wait for it,
// or get the error of its disk; and others do not mind.
//
// Where all data servers have a copy of each file none is made meanwhile, as new files wait for all their copies.
func TestDeadCopyOfTwo(t *testing.T)   { deadCopy(t, "TestDeadCopyOfTwo", 2) }
func TestDeadCopyOfThree(t *testing.T) { deadCopy(t, "TestDeadCopyOfThree", 3) }

// deadCopy runs the cells that have so many data servers, as the test with this name.
func deadCopy(t *testing.T, name string, servers int) {
	harness.NeedMount(t)
	harness.Need(t, "fio")
	if !*long { // with room in the bounds
		t.Parallel()
	}
	if !ownNetwork(t, name) { // which also keeps each from starting programs while another one has files open that wait
		return
	}
	t.Logf("-seed %d", *seed)
	w := &deadWorld{rng: rand.New(rand.NewPCG(*seed, uint64(servers)))}
	for range servers {
		w.disks = append(w.disks, harness.NewDisk(t, 64<<20))
	}
	w.v = harness.NewVolume(t, harness.Options{DataServers: servers, Apart: true, Remote: true, Disks: w.disks})
	over := true // the cell before has come to its end
	for _, c := range deadCells(*long) {
		if c.servers == servers && over {
			t.Run(c.String(), func(t *testing.T) {
				over = false
				w.run(t, c)
				over = true
			})
		}
	}
	w.v.Stop()
	w.v.Fsck()
}

// isOn reports whether a data server has a copy of a file.
func (w *deadWorld) isOn(t *testing.T, path string, d *harness.DataServer) bool {
	t.Helper()
	for _, mirror := range harness.LayoutOf(t, path).Mirrors {
		for _, s := range mirror.Servers {
			if w.v.ServerAt(s.Address) == d {
				return true
			}
		}
	}
	return false
}

// status is what `weft status` says is wrong with a data server, and how many data files are still to be removed.
func (w *deadWorld) status(t *testing.T, d *harness.DataServer) (problem string, garbage int) {
	t.Helper()
	time.Sleep(100 * time.Millisecond) // between the many times that it is asked for
	var st []struct {
		Service struct{ Garbage int }
		Devices []struct{ Address, Problem string }
	}
	unmarshal(t, harness.Weft(t, "status", "--json", w.m.Dir), &st)
	for _, is := range st[0].Devices {
		if is.Address == d.URL() {
			return is.Problem, st[0].Service.Garbage
		}
	}
	t.Fatalf("%s is not in the list: %+v", d.URL(), st)
	return "", 0
}

// program is one that uses files of the mount. This process could not start others while it had a file open that waits.
type program struct {
	name  string
	out   bytes.Buffer
	ended chan error // gets how it ended
}

func startProgram(t *testing.T, name string, args ...string) *program {
	t.Helper()
	p := &program{name: name, ended: make(chan error, 1)}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	go func() { p.ended <- cmd.Wait() }() // ends with the program
	return p
}

// ends waits for the end of the program, which has to be with this error, "" for none.
func (p *program) ends(t *testing.T, want string) {
	t.Helper()
	select {
	case err := <-p.ended:
		if out := p.out.String(); (err != nil) != (want != "") || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want %q\n%.4000s", p.name, err, want, out)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: not after a minute", p.name)
	}
}

func (w *deadWorld) run(t *testing.T, c deadCell) {
	harm := deadHarms[c.harm]
	n := w.rng.IntN(c.servers)
	d := w.v.Servers[n]
	files := 3
	if c.meanwhile == inTurn {
		files = 8
		if *long {
			files = 30
		}
	}
	w.m = w.v.Mount(mountOptions()...) // which waits no longer for disks that hung before, as they may be slow
	top := filepath.Join(w.m.Dir, strings.ReplaceAll(c.String(), " ", "-"))
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "layout", "set", top, "--stripe-count", "1", "--mirrors", fmt.Sprint(c.copies))
	// place makes a file. If it has one copy that is on d, or elsewhere.
	place := func(path string, data []byte, there bool) {
		t.Helper()
		for range 100 {
			if err := os.WriteFile(path, data, 0o644); err != nil {
				t.Fatal(err)
			}
			if c.copies > 1 || w.isOn(t, path, d) == there {
				return
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		t.Fatalf("%s: no file is where it should be", path)
	}
	ops := slices.DeleteFunc(slices.Clone(oldFileOps), func(op oldFileOp) bool { return op.name == createBeside && c.copies == c.servers })
	w.rng.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
	path := func(round, op string, i int) string { return filepath.Join(top, round, op, fmt.Sprint(i)) }
	for _, round := range []string{"healthy", "harmed"} {
		for _, op := range ops {
			if err := os.MkdirAll(filepath.Dir(path(round, op.name, 0)), 0o755); err != nil {
				t.Fatal(err)
			}
			for i := range files {
				place(path(round, op.name, i), oldData, false)
				if op.name == renameOver {
					place(path(round, op.name, i)+".src", newData, false)
				}
			}
		}
	}
	// More than a dead copy costs on an idle machine: it may be busy if not all cells are run.
	moreEach, moreAll, times := 6*time.Second, 10*time.Second, 4.0
	if *long {
		moreEach, moreAll, times = 2*time.Second, 2*time.Second, 1.5
	}
	if harm.planned {
		moreEach, moreAll = moreEach+5*time.Second, moreAll+5*time.Second
	}
	endFio := func() {}
	if c.meanwhile == fioBeside {
		file, stop := filepath.Join(top, "fio"), filepath.Join(t.TempDir(), "stop")
		place(file, make([]byte, 1<<20), false) // fio would make it anew to have it grow
		fio := startProgram(t, "fio", "sh", "-c", `stop=$1; shift; while [ ! -e "$stop" ]; do fio "$@" || exit 1; done`, "sh", stop, "--name=v", "--filename="+file,
			"--rw=randwrite", "--bsrange=4k-64k", "--size=1m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_backlog=16", "--verify_state_save=0",
			"--fsync=16", "--thinktime=2ms", "--overwrite=1", fmt.Sprint("--randseed=", *seed), fmt.Sprint("--max_latency=", time.Second+moreEach))
		endFio = func() {
			if err := os.WriteFile(stop, nil, 0o644); err != nil {
				t.Fatal(err)
			}
			fio.ends(t, "")
		}
	}
	harness.Weft(t, "sync", w.m.Dir)
	known := func() {
		t.Helper()
		harness.Await(t, harm.name+": the status says so", func() bool {
			problem, _ := w.status(t, d)
			return problem != ""
		})
	}
	well := func() {
		t.Helper()
		harness.Await(t, "data servers that are well, and what is removed being gone", func() bool {
			problem, garbage := w.status(t, d)
			return problem == "" && garbage == 0
		})
	}
	use := func(round string) map[string]opTimes {
		t.Helper()
		took := map[string]opTimes{}
		for _, op := range ops {
			if round == "harmed" && op.name == createBeside && c.copies == 1 {
				known() // until then it may be there
			}
			var sum opTimes
			for i := range files {
				start := time.Now()
				inTime(t, op.name, func() error { return op.do(path(round, op.name, i)) })
				last := time.Since(start)
				sum.longest, sum.all = max(sum.longest, last), sum.all+last
			}
			took[op.name] = sum
			for i := range files {
				got, err := os.ReadFile(path(round, op.name, i))
				if gone := errors.Is(err, os.ErrNotExist); gone != (op.want == nil) || err != nil && !gone || !bytes.Equal(got, op.want) {
					t.Errorf("%s, file %d: %d bytes, %v", op.name, i, len(got), err)
				}
			}
		}
		return took
	}
	healthy := use("healthy")
	onlyRead, onlyWritten := filepath.Join(top, "read"), filepath.Join(top, "written")
	if c.copies == 1 {
		place(onlyRead, oldData, true)
		place(onlyWritten, oldData, true)
		harness.Weft(t, "sync", w.m.Dir)
	}
	well() // no disk gets room later
	end := harm.begin(t, d, w.disks[n])
	ended := false
	t.Cleanup(func() {
		if !ended {
			end()
		}
	})
	if c.meanwhile == idle {
		known()
	}
	only := map[*program]string{}
	if c.copies == 1 {
		only[startProgram(t, "a read of the only copy", "dd", "if="+onlyRead, "of=/dev/null", "status=none")] = harm.read
		only[startProgram(t, "an append to the only copy", "dd", "if=/dev/zero", "of="+onlyWritten, "bs=64k", "count=1", "oflag=append", "conv=notrunc,fsync", "status=none")] = harm.write
	}
	harmed := use("harmed")
	for _, op := range ops {
		was, is := healthy[op.name], harmed[op.name]
		round := func(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
		t.Logf("%-20s longest %v (healthy %v), all %v (healthy %v)", op.name, round(is.longest), round(was.longest), round(is.all), round(was.all))
		if is.longest > was.longest+moreEach {
			t.Errorf("%s takes too long", op.name)
		}
		if c.meanwhile == inTurn && is.all > time.Duration(times*float64(was.all))+moreAll {
			t.Errorf("%s takes too long for all files", op.name)
		}
	}
	if c.copies == 1 {
		known()
		for p, want := range only {
			if want == waits {
				if len(p.ended) > 0 {
					t.Errorf("%s has ended: %v\n%s", p.name, <-p.ended, p.out.String())
				}
			} else {
				p.ends(t, want)
			}
		}
	}
	ended = true
	end()
	for p, want := range only {
		if want == waits {
			p.ends(t, "")
		}
	}
	endFio()
	w.m.AwaitCopies()
	well()
	harness.Weft(t, "sync", w.m.Dir)
	w.m.Verify()
	if err := os.RemoveAll(top); err != nil {
		t.Error(err)
	}
	w.m.Unmount()
}
