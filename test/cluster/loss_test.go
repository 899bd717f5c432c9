package cluster

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var long = flag.Bool("long", false, "TestLoss has all services and etcd members lost, and the quorum")

// What the loss of one process costs at most, as docs/growing.md says. Calls may take slack longer here: the machine
// has other things to do.
const (
	memberLease   = 5 * time.Second // the default of weftd
	killedCost    = memberLease + 2*time.Second
	frozenCost    = memberLease + 3*time.Second
	etcdCost      = 5 * time.Second
	quorumCost    = 5 * time.Second // from when it is back
	returnedCost  = time.Second
	slack         = 6 * time.Second
	quorumAway    = 30 * time.Second
	lossCallers   = 10
	lossKeepEvery = 20 // rounds of a caller
)

// TestLoss has services and etcd members killed and frozen, one after the other, and looks how long callers wait for
// any of their calls.
func TestLoss(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Cluster: true})
	m, second := v.Mount(), v.Mount()
	l := startLoss(t, m.Dir, len(v.Cluster.Owners()))
	l.await(3, 0)
	l.report("healthy", l.took(time.Time{}), 0)

	n := int(*seed % 3)
	t.Logf("-seed %d", *seed)
	services, etcd := v.Cluster.Services[:], v.Cluster.Etcd[:]
	if *long {
		for _, s := range services {
			l.service(v.Cluster, s, true)
			l.service(v.Cluster, s, false)
		}
		for _, e := range etcd {
			l.etcd(e, true)
			l.etcd(e, false)
		}
		for i := range 4 { // 0: both are frozen, 3: both are killed
			l.quorum([]*harness.Member{etcd[(n+i)%3], etcd[(n+i+1)%3]}, []bool{i&1 != 0, i&2 != 0})
		}
	} else {
		l.service(v.Cluster, services[n], true)
		l.service(v.Cluster, services[(n+1)%3], false)
		l.etcd(etcd[n], true)
		l.etcd(etcd[(n+1)%3], false)
	}
	l.end(second.Dir)
	m.Unmount()
	second.Unmount()
	v.Stop()
	v.Fsck()
}

// loss is callers that work in directories of all shards, and how long their calls take.
type loss struct {
	t       *testing.T
	dirs    []string // below the mount, by shard
	callers []*lossCaller
	stop    chan struct{}
	all     sync.WaitGroup
}

type lossCaller struct {
	l      *loss
	shards []int
	rounds atomic.Int64
	kept   map[string]bool // paths below the mount; the caller's until it has ended

	mu    sync.Mutex
	began time.Time // of the call under way; zero: none is
	calls []lossCall
}

type lossCall struct {
	what  string
	began time.Time
	took  time.Duration
}

// startLoss makes a directory in each shard and starts the callers.
func startLoss(t *testing.T, mount string, shards int) *loss {
	l := &loss{t: t, dirs: make([]string, shards), stop: make(chan struct{})}
	for n, missing := 0, shards; missing > 0; n++ {
		name := fmt.Sprint("of-a-shard-", n)
		if shard := harness.MakeDir(t, filepath.Join(mount, name), shards); l.dirs[shard] == "" {
			l.dirs[shard] = name
			missing--
		}
	}
	for i := range lossCallers {
		c := &lossCaller{l: l, kept: map[string]bool{}}
		for shard := i; shard < shards; shard += lossCallers {
			c.shards = append(c.shards, shard)
		}
		l.callers = append(l.callers, c)
		l.all.Go(func() { c.run(mount, i) }) // ends with l.stop, or the first error
	}
	return l
}

// run makes, finds, renames and removes files until it is told to stop.
func (c *lossCaller) run(mount string, number int) {
	for n := 0; ; n++ {
		select {
		case <-c.l.stop:
			return
		case <-time.After(5 * time.Millisecond):
		}
		dir := c.l.dirs[c.shards[n%len(c.shards)]]
		a, b := filepath.Join(dir, fmt.Sprintf("a%d-%d", number, n)), filepath.Join(dir, fmt.Sprintf("b%d-%d", number, n))
		oldPath, newPath := filepath.Join(mount, a), filepath.Join(mount, b)
		gone := func(path string) func() error {
			return func() error {
				if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("stat of a name that is gone: %w", err)
				}
				return nil
			}
		}
		there := func(path string) func() error {
			return func() error { _, err := os.Lstat(path); return err }
		}
		steps := []struct {
			what string
			call func() error
		}{
			{"create", func() error {
				f, err := os.OpenFile(oldPath, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
				if err == nil {
					err = f.Close()
				}
				return err
			}},
			{"stat", there(oldPath)},
			{"rename", func() error { return os.Rename(oldPath, newPath) }},
			{"stat", gone(oldPath)},
			{"stat", there(newPath)},
			{"remove", func() error { return os.Remove(newPath) }},
			{"stat", gone(newPath)},
		}
		if n%lossKeepEvery == 0 {
			steps = steps[:5]
			c.kept[b] = true
		}
		for _, step := range steps {
			if err := c.time(step.what, step.call); err != nil {
				c.l.t.Errorf("caller %d, round %d: %s: %v", number, n, step.what, err)
				return
			}
		}
		c.rounds.Add(1)
	}
}

func (c *lossCaller) time(what string, call func() error) error {
	began := time.Now()
	c.mu.Lock()
	c.began = began
	c.mu.Unlock()
	err := call()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.began = time.Time{}
	c.calls = append(c.calls, lossCall{what, began, time.Since(began)})
	return err
}

// await waits until so much time is over and each caller has since made so many rounds more.
func (l *loss) await(rounds int64, least time.Duration) {
	l.t.Helper()
	began := time.Now()
	before := make([]int64, len(l.callers))
	for i, c := range l.callers {
		before[i] = c.rounds.Load()
	}
	time.Sleep(least)
	for i, c := range l.callers {
		for c.rounds.Load() < before[i]+rounds {
			if time.Since(began) > 2*time.Minute || l.t.Failed() {
				l.t.Fatalf("caller %d has made %d of %d rounds in %v", i, c.rounds.Load()-before[i], rounds, time.Since(began))
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// took takes the calls that have ended, and returns the longest of each caller, of those that were under way at since
// or later.
func (l *loss) took(since time.Time) []lossCall {
	var longest []lossCall
	for _, c := range l.callers {
		c.mu.Lock()
		var most lossCall
		for _, call := range c.calls {
			if call.began.Add(call.took).After(since) && call.took > most.took {
				most = call
			}
		}
		c.calls = nil
		c.mu.Unlock()
		longest = append(longest, most)
	}
	slices.SortFunc(longest, func(a, b lossCall) int { return int(b.took - a.took) })
	return longest
}

// report compares what calls took with what they may take; 0 is for ever.
func (l *loss) report(what string, longest []lossCall, bound time.Duration) {
	l.t.Helper()
	text := ""
	for _, c := range longest {
		text += fmt.Sprintf(" %.2f", c.took.Seconds())
	}
	l.t.Logf("%s: the longest call of each caller, in seconds:%s", what, text)
	if bound > 0 && longest[0].took > bound+slack {
		l.t.Errorf("%s: a %s took %v, want %v", what, longest[0].what, longest[0].took.Round(time.Millisecond), bound)
	}
}

// service loses a service for longer than its lease, and has it back.
func (l *loss) service(c *harness.Cluster, m *harness.Member, kill bool) {
	l.t.Helper()
	at := time.Now()
	what, bound := l.lose(m, kill, killedCost, frozenCost)
	l.await(3, memberLease+time.Second)
	l.report(what, l.took(at), bound)
	at = time.Now()
	l.restore(m, kill)
	c.Await(m)
	c.Owners() // it has shards again
	l.await(3, 0)
	l.report(m.Name+" is back", l.took(at), returnedCost)
}

// etcd loses a member of etcd, and has it back.
func (l *loss) etcd(m *harness.Member, kill bool) {
	l.t.Helper()
	at := time.Now()
	what, bound := l.lose(m, kill, etcdCost, etcdCost)
	l.await(3, etcdCost)
	l.restore(m, kill)
	l.await(3, time.Second)
	l.report(what+" and is back", l.took(at), bound)
}

// quorum loses two members of etcd, and has the first of them back, and then the other.
func (l *loss) quorum(members []*harness.Member, kill []bool) {
	l.t.Helper()
	what := ""
	for i, m := range members {
		name, _ := l.lose(m, kill[i], 0, 0)
		what += name + ", "
	}
	time.Sleep(quorumAway)
	at := time.Now()
	l.restore(members[0], kill[0])
	l.await(1, 0)
	waited := time.Since(at)
	l.t.Logf("%sthe quorum is back: all callers have made a round after %v", what, waited.Round(time.Millisecond))
	if waited > quorumCost+slack {
		l.t.Errorf("calls went on %v after the quorum was back", waited)
	}
	l.restore(members[1], kill[1])
	l.await(3, time.Second)
}

func (l *loss) lose(m *harness.Member, kill bool, killed, frozen time.Duration) (what string, bound time.Duration) {
	l.took(time.Time{})
	if kill {
		m.Kill()
		return m.Name + " is killed", killed
	}
	m.Freeze()
	return m.Name + " is frozen", frozen
}

func (l *loss) restore(m *harness.Member, killed bool) {
	if killed {
		m.Start()
	} else {
		m.Thaw()
	}
}

// end stops the callers, and looks through another mount whether the names are there that should be, and no others.
func (l *loss) end(mount string) {
	l.t.Helper()
	close(l.stop)
	l.all.Wait()
	kept := 0
	for _, dir := range l.dirs {
		entries, err := os.ReadDir(filepath.Join(mount, dir))
		if err != nil {
			l.t.Fatal(err)
		}
		for _, e := range entries {
			name := filepath.Join(dir, e.Name())
			if !slices.ContainsFunc(l.callers, func(c *lossCaller) bool { return c.kept[name] }) {
				l.t.Errorf("%s is there", name)
			}
			kept++
		}
	}
	want, rounds := 0, int64(0)
	for _, c := range l.callers {
		want += len(c.kept)
		rounds += c.rounds.Load()
	}
	if kept != want {
		l.t.Errorf("%d names, want %d", kept, want)
	}
	l.t.Logf("%d rounds, %d names kept", rounds, kept)
}
