package crash

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
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

var (
	seed       = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of what is done, and of the harm")
	duration   = flag.Duration("duration", 60*time.Second, "how long TestOrder does rounds")
	cuts       = flag.Int("cuts", 10, "how often TestPowerCut cuts the power")
	mounts     = flag.Int("mounts", 3, "how many mounts write the same blocks")
	namespaces = flag.Bool("namespaces", false, "TestOrder on NVMe namespaces, too")
	local      = flag.Bool("local", false, "data servers lend descriptors of their files; then power is not cut in TestOrder")
	options    = flag.String("o", "", "mount options, such as transport=device")
	without    = flag.String("without", "", "operations and harm that are left out, such as append,punch,service kill")
)

const (
	// lease is short: dead clients are waited for.
	lease = 4 * time.Second
	// roundTime is how long harm is done before the blocks are looked at.
	roundTime = 20 * time.Second
	// threads is how many writers a worker has.
	threads = 2
	// endTime is enough for a worker to end once all servers are well.
	endTime = 2 * time.Minute
)

func TestMain(m *testing.M) {
	flag.Parse()
	if how := os.Getenv(workerEnv); how != "" {
		if err := serveWork(how); err != nil {
			fmt.Println(err)
		}
		return
	}
	os.Exit(m.Run())
}

// list splits a flag.
func list(s string) []string { return strings.FieldsFunc(s, func(c rune) bool { return c == ',' }) }

// site is a volume with its mounts, each with a worker.
type site struct {
	t       *testing.T
	v       *harness.Volume
	disks   []*harness.Disk // that of the service, then those of the data servers; nil: power is not cut
	dir     string          // of logs
	clients []*client
	made    int // mounts so far
	seed    uint64
	// Of a round:
	work    work
	history *history
	names   map[string]string        // which log there is of each directory of names
	writers int                      // so far
	harmed  map[string]int64         // since when
	leaving int                      // how many of those are mounts that are told to end
	stopped map[string]func()        // what makes those go on that stand still
	ending  map[string]chan struct{} // closed when a server that was told to end has ended
	said    []string                 // by workers: what is no operation
}

// client is a mount with the process that writes through it.
type client struct {
	m      *harness.Mount // nil while there is none
	number int            // each mount that is made has one of its own
	worker *worker
}

// worker is a process that serves work.
type worker struct {
	cmd   *exec.Cmd
	in    io.Closer
	out   strings.Builder
	logs  []string
	ended chan struct{} // closed when it has ended
}

// newSite makes one with so many data servers that are processes of their own, or so many namespaces.
func newSite(t *testing.T, servers, nvme int) *site {
	s := &site{t: t, dir: t.TempDir(), seed: *seed}
	opts := harness.Options{DataServers: servers, NVMe: nvme, Apart: nvme == 0, Lease: lease, Remote: !*local}
	if nvme == 0 && !*local {
		for range 1 + servers {
			s.disks = append(s.disks, harness.NewDisk(t, 256<<20))
		}
		opts.Disk, opts.Disks = s.disks[0], s.disks[1:]
	}
	s.v = harness.NewVolume(t, opts)
	return s
}

// mount gives a client a new mount.
func (s *site) mount(c *client) {
	s.t.Helper()
	c.m, c.number = s.v.Mount(append(list(*options), "mirror-timeout=1s")...), s.made
	s.made++
}

// begin starts a client's worker.
func (s *site) begin(c *client) {
	s.t.Helper()
	w := s.work
	w.Mount, w.Log, w.Writers = c.m.Dir, filepath.Join(s.dir, fmt.Sprint("log", s.made, "-", s.writers)), nil
	for range threads {
		s.writers++
		w.Writers = append(w.Writers, s.writers)
	}
	if w.Names != "" {
		w.Names = filepath.Join(w.Names, fmt.Sprint(c.number))
		if err := os.Mkdir(filepath.Join(c.m.Dir, w.Names), 0o755); err != nil {
			s.t.Fatal(err)
		}
		s.names[w.Names] = w.Log + ".names"
	}
	how, err := json.Marshal(w)
	if err != nil {
		s.t.Fatal(err)
	}
	run := &worker{cmd: harness.Self(workerEnv + "=" + string(how)), ended: make(chan struct{})}
	for _, number := range w.Writers {
		run.logs = append(run.logs, fmt.Sprint(w.Log, ".", number))
	}
	run.cmd.Stdout = &run.out
	if run.in, err = run.cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	if err := run.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() { // ends with the process
		run.cmd.Wait()
		close(run.ended)
	}()
	s.t.Cleanup(func() {
		run.cmd.Process.Kill()
		<-run.ended
	})
	c.worker = run
}

// end waits for a client's worker, which was told to end or has lost its mount, and takes what it has logged.
func (s *site) end(c *client) {
	s.t.Helper()
	if c.worker == nil {
		return
	}
	select {
	case <-c.worker.ended:
	case <-time.After(endTime):
		c.worker.cmd.Process.Signal(syscall.SIGQUIT)
		s.t.Fatalf("a worker of mount %d has not ended %v after all was well again; it is still at:\n%s", c.number, endTime, s.unfinished(c.worker))
	}
	for _, path := range c.worker.logs {
		if err := s.history.addLog(path, c.number); err != nil {
			s.t.Fatal(err)
		}
	}
	if out := c.worker.out.String(); out != "" {
		s.said = append(s.said, fmt.Sprintf("a worker of mount %d: %s", c.number, out))
	}
	if strings.Contains(c.m.Log(), "ended the session") {
		s.history.stops[c.number] = append(s.history.stops[c.number], span{0, forever})
	}
	c.worker = nil
}

// unfinished is what the writers of a worker have begun and not ended.
func (s *site) unfinished(w *worker) string {
	h, all := newHistory(), ""
	for _, path := range w.logs {
		if err := h.addLog(path, 0); err != nil {
			s.t.Error(err)
		}
	}
	for _, o := range h.ops {
		if o.End == 0 {
			all += fmt.Sprintf("\twriter %d: %s of %s, %d+%d, for %v\n", o.Writer, o.Kind, o.File, o.Block, o.Count, time.Duration(now()-o.Begin))
		}
	}
	return all
}

// round makes the files of a round and starts all workers.
func (s *site) round(name string, files []file, names bool) {
	s.t.Helper()
	s.history, s.names, s.harmed = newHistory(), map[string]string{}, map[string]int64{}
	s.stopped, s.ending, s.said = map[string]func(){}, map[string]chan struct{}{}, nil
	s.work = work{Seed: s.seed, Rare: s.seed%2 == 0, Without: list(*without)}
	s.seed++
	root := s.clients[0].m.Dir
	mkdir := func(path string) {
		if err := os.Mkdir(filepath.Join(root, path), 0o755); err != nil {
			s.t.Fatal(err)
		}
	}
	mkdir(name)
	for _, f := range files {
		f.Path = filepath.Join(name, f.Path)
		if dir := filepath.Dir(f.Path); !slices.ContainsFunc(s.work.Files, func(f file) bool { return filepath.Dir(f.Path) == dir }) {
			mkdir(dir)
			copies := "1"
			if filepath.Base(dir) == "two" {
				copies = "2"
			}
			harness.Weft(s.t, "layout", "set", filepath.Join(root, dir), "--stripe-unit", "16KiB", "--stripe-count", "2", "--mirrors", copies)
		}
		if err := os.WriteFile(filepath.Join(root, f.Path), nil, 0o644); err != nil {
			s.t.Fatal(err)
		}
		s.work.Files = append(s.work.Files, f)
	}
	if names {
		s.work.Names = filepath.Join(name, "names")
		mkdir(s.work.Names)
	}
	for _, c := range s.clients {
		s.begin(c)
	}
}

// filesIn are those of a round, in directories of one copy, and of two.
func filesIn(dirs ...string) (files []file) {
	for _, dir := range dirs {
		files = append(files,
			file{Path: dir + "/blocks", Block: 4096, Blocks: 12},
			file{Path: dir + "/small", Block: 512, Blocks: 10},
			file{Path: dir + "/log", Block: 512})
	}
	return files
}

// harm is something that is done to a part of the site, and undone some time later.
type harm struct {
	at, hold  time.Duration
	who, what string
	client    int // if it is one
	server    int
}

func (h harm) String() string {
	return fmt.Sprintf("%6.2fs %s: %s for %.2fs", h.at.Seconds(), h.who, h.what, h.hold.Seconds())
}

// plan draws the harm of a round.
func (s *site) plan(rng *rand.Rand, d time.Duration) (all []harm) {
	for at := time.Duration(0); ; {
		at += time.Duration((0.3 + 2*rng.Float64()) * float64(time.Second))
		if at > d {
			return all
		}
		// Most of it is over soon, so that there is something to lose the next time.
		h := harm{at: at, hold: time.Duration(math.Pow(rng.Float64(), 2) * float64(lease))}
		kinds := []string{"kill", "term", "stop"}
		switch n := rng.IntN(10); {
		case n < 3:
			h.who = "service"
			if s.disks != nil {
				kinds = append(kinds, "cut")
			}
		case n < 6 && len(s.v.Servers) > 0:
			h.server = rng.IntN(len(s.v.Servers))
			h.who = fmt.Sprint("server ", h.server)
			if s.disks != nil {
				kinds = append(kinds, "cut", "cut")
			}
		default:
			h.client = rng.IntN(len(s.clients))
			h.who = fmt.Sprint("mount ", h.client)
		}
		h.what = kinds[rng.IntN(len(kinds))]
		if h.what == "stop" && rng.IntN(2) == 0 {
			h.hold *= 2
		}
		who, _, _ := strings.Cut(h.who, " ")
		if !slices.Contains(list(*without), who+" "+h.what) {
			all = append(all, h)
		}
	}
}

// do does the harm.
func (s *site) do(h harm) {
	s.harmed[h.who] = now()
	switch who, _, _ := strings.Cut(h.who, " "); who + " " + h.what {
	case "service kill", "service cut":
		s.v.Kill()
		if h.what == "cut" {
			s.disks[0].Cut()
		}
	case "service term":
		s.tellToEnd(h.who, s.v.Stop)
	case "service stop":
		s.v.Pause()
		s.stopped[h.who] = s.v.Continue
	case "server kill", "server cut":
		s.v.Servers[h.server].Kill()
		if h.what == "cut" {
			s.disks[1+h.server].Cut()
		}
	case "server term":
		s.tellToEnd(h.who, s.v.Servers[h.server].Stop)
	case "server stop":
		s.v.Servers[h.server].Pause()
		s.stopped[h.who] = s.v.Servers[h.server].Continue
	case "mount kill":
		s.kill(s.clients[h.client])
	case "mount term":
		s.leaving++
		s.clients[h.client].worker.in.Close()
	case "mount stop":
		m := s.clients[h.client].m
		m.Signal(syscall.SIGSTOP)
		s.stopped[h.who] = func() { m.Signal(syscall.SIGCONT) }
	}
}

// tellToEnd has a server end while others are harmed, which it may wait for.
func (s *site) tellToEnd(who string, stop func()) {
	ended := make(chan struct{})
	s.ending[who] = ended
	go func() { // ends with the server
		defer close(ended)
		stop()
	}()
}

// kill ends a mount as the kernel does when it is out of memory.
func (s *site) kill(c *client) {
	c.m.Signal(syscall.SIGKILL)
	c.m.Abort()
}

// undo ends the harm. It reports false if that has to be tried later.
func (s *site) undo(h harm) bool {
	if ended := s.ending[h.who]; ended != nil {
		select {
		case <-ended:
			delete(s.ending, h.who)
		default:
			return false
		}
	}
	c := s.clients[h.client]
	switch who, _, _ := strings.Cut(h.who, " "); who + " " + h.what {
	case "service cut":
		s.disks[0].Remount()
		s.v.Start()
	case "service kill", "service term":
		s.v.Start()
	case "server cut":
		s.disks[1+h.server].Remount()
		s.v.Servers[h.server].Start()
		s.history.cuts = append(s.history.cuts, span{s.harmed[h.who], now()})
	case "server kill", "server term":
		s.v.Servers[h.server].Start()
	case "service stop", "server stop", "mount stop":
		s.stopped[h.who]()
		delete(s.stopped, h.who)
		if who == "mount" {
			s.history.stops[c.number] = append(s.history.stops[c.number], span{s.harmed[h.who], now()})
		}
	case "mount kill":
		if _, ok := s.harmed["service"]; ok {
			return false
		}
		s.anew(c)
	case "mount term":
		if len(s.harmed) > s.leaving { // it may wait for what is harmed
			return false
		}
		s.leaving--
		s.end(c)
		c.m.Unmount()
		s.anew(c)
	}
	delete(s.harmed, h.who)
	return true
}

// release ends what a test that fails has left, so that its end does not wait for what stands still.
func (s *site) release() {
	if !s.t.Failed() {
		return
	}
	for _, goOn := range s.stopped {
		goOn()
	}
	for _, ended := range s.ending {
		<-ended
	}
	for _, c := range s.clients {
		if c.m != nil {
			c.m.Abort()
		}
	}
}

// anew gives a client whose mount has gone another one, and a worker.
func (s *site) anew(c *client) {
	s.end(c)
	s.mount(c)
	s.begin(c)
}

// harass does the harm of a plan, and returns when all of it is undone.
func (s *site) harass(plan []harm) (done []harm) {
	began := time.Now()
	type later struct {
		harm
		at time.Duration
	}
	var undo []later
	for len(plan)+len(undo) > 0 {
		at := time.Since(began)
		for len(plan) > 0 && plan[0].at <= at {
			if _, already := s.harmed[plan[0].who]; !already {
				s.do(plan[0])
				done = append(done, plan[0])
				undo = append(undo, later{plan[0], at + plan[0].hold})
			}
			plan = plan[1:]
		}
		undo = slices.DeleteFunc(undo, func(u later) bool { return u.at <= at && s.undo(u.harm) })
		time.Sleep(10 * time.Millisecond)
	}
	return done
}

// settle ends all workers.
func (s *site) settle() {
	s.t.Helper()
	for _, c := range s.clients {
		c.worker.in.Close()
	}
	for _, c := range s.clients {
		s.end(c)
	}
}

// contents reads a file through each mount, and each of its copies by itself. It waits until all are the same, which
// copies may not be before the sessions of mounts that were lost have ended; at the latest after a minute.
func (s *site) contents(f file) (all [][]string) {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		all = nil
		for _, c := range s.clients {
			b, err := os.ReadFile(filepath.Join(c.m.Dir, f.Path))
			if err != nil {
				s.t.Fatalf("mount %d: %v", c.number, err)
			}
			all = append(all, decodeAll(b, f.Block))
		}
		if len(s.v.Servers) > 0 {
			all = append(all, s.copies(f, len(all[0]))...)
		}
		if time.Now().After(deadline) || !slices.ContainsFunc(all, func(one []string) bool { return !slices.Equal(one, all[0]) }) {
			return all
		}
	}
}

// copies reads so many blocks of each copy of a file from the data files. A data file has its bytes where the file
// has them.
func (s *site) copies(f file, blocks int) (all [][]string) {
	s.t.Helper()
	l := harness.LayoutOf(s.t, filepath.Join(s.clients[0].m.Dir, f.Path))
	for _, m := range l.Mirrors {
		whole := make([]byte, blocks*f.Block)
		for i, d := range m.Servers {
			if d.DataFile == "" {
				continue
			}
			b, err := os.ReadFile(s.v.ServerAt(d.Address).Path(d.DataFile))
			if err != nil {
				s.t.Fatal(err)
			}
			for at := int64(i) * l.StripeUnit; at < int64(min(len(b), len(whole))); at += int64(len(m.Servers)) * l.StripeUnit {
				copy(whole[at:min(at+l.StripeUnit, int64(len(whole)))], b[at:])
			}
		}
		all = append(all, decodeAll(whole, f.Block))
	}
	return all
}

// check looks at all blocks when nothing is done any more. It returns how many operations there were.
func (s *site) check() int {
	s.t.Helper()
	at := now()
	c := newChecker(s.history)
	for _, f := range s.work.Files {
		if f.Blocks > 0 {
			c.checkBlocks(f, s.contents(f), at)
		} else {
			c.checkLog(f, s.contents(f), at)
		}
	}
	for _, found := range c.found {
		s.t.Error(found)
	}
	return len(s.history.ops)
}

// TestOrder has several mounts write, overwrite, append, truncate, punch and lock the same few blocks, while one or
// the other process is killed, told to end or stopped, and the power of disks is cut. Each block is what some order
// of the operations explains that respects what was promised.
func TestOrder(t *testing.T) {
	t.Run("files", func(t *testing.T) {
		order(t, newSite(t, 3, 0), *duration, "one", "two")
	})
	if *namespaces {
		t.Run("namespaces", func(t *testing.T) {
			order(t, newSite(t, 0, 2), *duration, "one")
		})
	}
}

func order(t *testing.T, s *site, d time.Duration, dirs ...string) {
	t.Logf("-seed %d -mounts %d", *seed, *mounts)
	defer s.release()
	for range *mounts {
		c := &client{}
		s.clients = append(s.clients, c)
		s.mount(c)
	}
	ops := 0
	for end, i := time.Now().Add(d), 0; time.Now().Before(end); i++ {
		rng := rand.New(rand.NewPCG(s.seed, 2))
		plan := s.plan(rng, min(roundTime, d))
		name := fmt.Sprint("round", i)
		began := s.seed
		s.round(name, filesIn(dirs...), false)
		done := s.harass(plan)
		s.settle()
		ops += s.check()
		if t.Failed() {
			t.Logf("round %d, -seed %d:", i, began)
			for _, h := range done {
				t.Log(h)
			}
			t.FailNow()
		}
		if err := os.RemoveAll(filepath.Join(s.clients[0].m.Dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d operations", ops)
	for _, c := range s.clients {
		c.m.Unmount()
	}
	s.v.Stop()
	s.v.Fsck()
}

// TestPowerCut cuts the power of the disks of the service and of the data servers at a random moment. What was
// promised is there when they are back: by fsync, by weft sync, by unlock of a file that another mount has open, and
// names by fsync of their directory. Mounts that live on lose nothing at all, and their programs get no error.
func TestPowerCut(t *testing.T) {
	if *local {
		t.Skip("mounts that have descriptors of files would keep their disks in use")
	}
	t.Logf("-seed %d -cuts %d", *seed, *cuts)
	s := newSite(t, 2, 0)
	defer s.release()
	ops := 0
	for i := range *cuts {
		rng := rand.New(rand.NewPCG(s.seed, 3))
		began, name := s.seed, fmt.Sprint("cut", i)
		s.clients = []*client{{}, {}}
		for _, c := range s.clients {
			s.mount(c)
		}
		s.round(name, filesIn("one", "two"), true)
		wait := func() { time.Sleep(time.Duration(rng.Int64N(int64(time.Second)))) }
		wait()
		if rng.IntN(2) == 0 {
			c := s.clients[0]
			at := now()
			harness.Weft(t, "sync", c.m.Dir)
			s.history.syncs[c.number] = append(s.history.syncs[c.number], span{at, now()})
		}
		wait()
		survive := rng.IntN(3) == 0
		lost := s.lose(rng, survive)
		s.v.Fsck()
		s.v.Start()
		s.history.cuts = append(s.history.cuts, span{lost, now()})
		if survive {
			wait()
			s.settle()
			for _, said := range s.said {
				t.Error(said)
			}
			for _, o := range s.history.ops {
				if o.Err != "" {
					t.Errorf("writer %d: %s of %s: %s", o.Writer, o.Kind, o.File, o.Err)
				}
			}
		} else {
			for _, c := range s.clients {
				s.end(c)
				s.mount(c)
			}
		}
		ops += s.check()
		for dir, log := range s.names {
			changes, err := readNames(log)
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range checkNames(filepath.Join(s.clients[0].m.Dir, dir), changes) {
				t.Error(found)
			}
			ops += len(changes)
		}
		if t.Failed() {
			t.Fatalf("cut %d, -seed %d -cuts 1; mounts survive: %v", i, began, survive)
		}
		if err := os.RemoveAll(filepath.Join(s.clients[0].m.Dir, name)); err != nil {
			t.Fatal(err)
		}
		for _, c := range s.clients {
			c.m.Unmount()
		}
	}
	t.Logf("%d operations", ops)
	if ops == 0 {
		t.Error("nothing was done")
	}
}

// lose cuts the power of everything, or of all but the mounts. It returns when, once disks and data servers are back.
func (s *site) lose(rng *rand.Rand, survive bool) (at int64) {
	s.t.Helper()
	at = now()
	kills := []func(){s.v.Kill}
	for _, d := range s.v.Servers {
		kills = append(kills, d.Kill)
	}
	if !survive {
		for _, c := range s.clients {
			kills = append(kills, func() { s.kill(c) })
		}
	}
	for _, i := range rng.Perm(len(kills)) {
		kills[i]()
	}
	for _, d := range s.disks {
		d.Cut()
	}
	for _, d := range s.disks {
		d.Remount()
	}
	for _, d := range s.v.Servers {
		d.Start()
	}
	return at
}
