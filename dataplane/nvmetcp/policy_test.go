package nvmetcp

import (
	"container/heap"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// testPath makes a path on a live link of its own, which is on no memory node.
func testPath() *path {
	p := &path{link: &link{node: -1}}
	p.link.live.Store(true)
	return p
}

// testSet makes a set of paths with the given classes, each with a controller of its own.
func testSet(nodes int, classes ...class) *pathSet {
	var list []*path
	for range classes {
		list = append(list, testPath())
	}
	s := &pathSet{list: list, current: make([]atomic.Pointer[path], nodes)}
	for i, c := range classes {
		list[i].class.Store(uint32(c))
	}
	return s
}

const (
	o = classOptimized
	n = classNonOptimized
	x = classOut
)

func (s *pathSet) index(p *path) int {
	for i := range s.list {
		if s.list[i] == p {
			return i
		}
	}
	return -1
}

func TestPolicyNames(t *testing.T) {
	for p := Adaptive; p <= QueueDepth; p++ {
		got, err := ParsePolicy(p.String())
		if err != nil || got != p {
			t.Errorf("%v: parsed as %v, %v", p, got, err)
		}
	}
	if _, err := ParsePolicy("service-time"); err == nil {
		t.Error("service-time is a policy")
	}
}

// TestNUMAPath follows nvme_numa_path and __nvme_find_path of Linux.
func TestNUMAPath(t *testing.T) {
	distance := func(a, b int) int {
		if a == b || b < 0 {
			return 10
		}
		return 20
	}
	for _, c := range []struct {
		classes []class
		nodes   []int
		want    [2]int // from node 0 and 1
	}{
		{[]class{o, o}, []int{0, 1}, [2]int{0, 1}},
		{[]class{o, o}, []int{1, 0}, [2]int{1, 0}},
		{[]class{o, o}, []int{-1, 0}, [2]int{0, 0}}, // no node: near everywhere
		{[]class{n, o}, []int{0, 1}, [2]int{1, 1}},  // optimized and far before near
		{[]class{n, n}, []int{0, 1}, [2]int{0, 1}},
		{[]class{x, n}, []int{0, 1}, [2]int{1, 1}},
		{[]class{x, x}, []int{0, 1}, [2]int{-1, -1}},
		{[]class{x, o, o}, []int{0, 1, 1}, [2]int{1, 1}}, // first in the list
	} {
		for node, want := range c.want {
			s := testSet(2, c.classes...)
			for i := range s.list {
				s.list[i].link.node = c.nodes[i]
			}
			if got := s.index(s.search(node, distance)); got != want {
				t.Errorf("%v on nodes %v from node %d: path %d, want %d", c.classes, c.nodes, node, got, want)
			}
		}
	}
}

// TestNUMAStays: a path is kept while it is optimized, and one that is not is searched again for each command.
func TestNUMAStays(t *testing.T) {
	s := testSet(1, o, o)
	set := func(i int, c class) { s.list[i].class.Store(uint32(c)) }
	check := func(want int) {
		t.Helper()
		if got := s.index(s.choose(NUMA, 0, 0, 0)); got != want {
			t.Fatalf("path %d, want %d", got, want)
		}
	}
	check(0)
	set(0, n)
	check(1)
	set(0, o)
	check(1) // kept
	set(1, x)
	set(0, n)
	check(0)
	set(1, o)
	check(1)
}

// TestRoundRobin follows nvme_round_robin_path of Linux, each case from each path as the last one.
func TestRoundRobin(t *testing.T) {
	for _, c := range []struct {
		classes []class
		want    []int // when the last path was 0, 1, ...
	}{
		{[]class{o}, []int{0}},
		{[]class{n}, []int{0}},
		{[]class{x}, []int{-1}},
		{[]class{o, o, o}, []int{1, 2, 0}},
		{[]class{o, n, o}, []int{2, 2, 0}},
		{[]class{o, n, n}, []int{0, 0, 0}},
		{[]class{o, x, x}, []int{0, 0, 0}},
		{[]class{n, n, n}, []int{2, 0, 1}}, // the last one that was met
		{[]class{n, n}, []int{1, 0}},
		{[]class{n, x, x}, []int{0, 0, 0}},
		{[]class{x, n, n}, []int{2, 2, 1}},
		{[]class{x, x, x}, []int{-1, -1, -1}},
	} {
		for last, want := range c.want {
			s := testSet(1, c.classes...)
			s.current[0].Store(s.list[last])
			if got := s.index(s.choose(RoundRobin, 0, 0, 0)); got != want {
				t.Errorf("%v after path %d: path %d, want %d", c.classes, last, got, want)
			}
		}
	}
	s := testSet(1, x, n, o)
	s.list[0].link.node = 0
	if got := s.index(s.choose(RoundRobin, 0, 0, 0)); got != 2 {
		t.Errorf("at first: path %d, want 2", got)
	}
}

// TestQueueDepth follows nvme_queue_depth_path of Linux.
func TestQueueDepth(t *testing.T) {
	for _, c := range []struct {
		classes []class
		depths  []int64
		want    int
	}{
		{[]class{o, o}, []int64{3, 2}, 1},
		{[]class{o, o}, []int64{2, 2}, 0},
		{[]class{o, o, o}, []int64{1, 0, 0}, 1},
		{[]class{n, o}, []int64{0, 900}, 1},
		{[]class{n, n}, []int64{5, 4}, 1},
		{[]class{x, n}, []int64{0, 4}, 1},
		{[]class{x, x}, []int64{0, 0}, -1},
	} {
		s := testSet(1, c.classes...)
		for i, d := range c.depths {
			s.list[i].link.commands.Store(d)
		}
		if got := s.index(s.choose(QueueDepth, 0, 0, 0)); got != c.want {
			t.Errorf("%v with depths %v: path %d, want %d", c.classes, c.depths, got, c.want)
		}
	}
}

func TestAdaptive(t *testing.T) {
	const ms = int64(time.Millisecond)
	for _, c := range []struct {
		what    string
		classes []class
		cost    []int64
		latency []int64 // ns
		want    int
	}{
		{"idle", []class{o, o}, []int64{0, 0}, []int64{2 * ms, ms}, 1},
		{"busy enough", []class{o, o}, []int64{0, 3 << 20}, []int64{2 * ms, ms}, 0},
		{"unknown counts as the fastest", []class{o, o, o}, []int64{1 << 20, 0, 1 << 20}, []int64{ms, 0, 2 * ms}, 1},
		{"unknown and loaded", []class{o, o}, []int64{0, 1 << 20}, []int64{ms, 0}, 0},
		{"optimized before fast", []class{n, o}, []int64{0, 9 << 20}, []int64{1, 900 * ms}, 1},
		{"none optimized", []class{n, x, n}, []int64{1 << 20, 0, 0}, []int64{ms, ms, ms}, 2},
		{"all out", []class{x, x}, []int64{0, 0}, []int64{0, 0}, -1},
	} {
		s := testSet(1, c.classes...)
		for i := range s.list {
			s.list[i].link.cost.Store(c.cost[i])
			s.list[i].latency.Store(c.latency[i])
		}
		if got := s.index(s.choose(Adaptive, 0, 64<<10, 0)); got != c.want {
			t.Errorf("%s: path %d, want %d", c.what, got, c.want)
		}
	}
}

// done is a command's end in a simulation.
type done struct {
	at, took int64
	p        *path
	n        int
}

type ends []done

func (e ends) Len() int           { return len(e) }
func (e ends) Less(i, j int) bool { return e[i].at < e[j].at }
func (e ends) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *ends) Push(v any)        { *e = append(*e, v.(done)) }
func (e *ends) Pop() (v any)      { v, *e = (*e)[len(*e)-1], (*e)[:len(*e)-1]; return v }

// simulate keeps depth commands of size bytes under way for a time, on paths that serve one after the other at a rate in bytes per
// second. It returns the commands that each path has served.
func simulate(by Policy, rates []func(now int64) float64, depth, size int, length time.Duration) []int {
	s := testSet(1, make([]class, len(rates))...)
	for _, p := range s.list {
		p.class.Store(uint32(classOptimized))
	}
	free, served := make([]int64, len(rates)), make([]int, len(rates))
	var queue ends
	start := func(now int64) {
		p := s.choose(by, 0, size, now)
		i := s.index(p)
		p.started(size)
		free[i] = max(free[i], now) + int64(float64(size)/rates[i](now)*1e9)
		heap.Push(&queue, done{free[i], free[i] - now, p, size})
	}
	for range depth {
		start(0)
	}
	for now := int64(0); now < int64(length); {
		d := heap.Pop(&queue).(done)
		now = d.at
		d.p.ended(d.n)
		d.p.measured(d.took, now)
		served[s.index(d.p)]++
		start(now)
	}
	return served
}

// TestAdaptiveSendsLessToASlowPath: a path at a tenth of the rate gets about that share, and does not hold up the others, where
// round-robin is as slow as the slowest.
func TestAdaptiveSendsLessToASlowPath(t *testing.T) {
	rates := []func(int64) float64{func(int64) float64 { return 1e9 }, func(int64) float64 { return 1e8 }}
	adaptive := simulate(Adaptive, rates, 32, 128<<10, 10*time.Second)
	turns := simulate(RoundRobin, rates, 32, 128<<10, 10*time.Second)
	t.Logf("commands served: adaptive %v, round-robin %v", adaptive, turns)
	if adaptive[1]*5 > adaptive[0] {
		t.Errorf("adaptive gave the slow path %d of %d commands", adaptive[1], adaptive[0]+adaptive[1])
	}
	if sum, old := adaptive[0]+adaptive[1], turns[0]+turns[1]; sum < 3*old {
		t.Errorf("adaptive served %d commands, round-robin %d", sum, old)
	}
	if all := 10e9 / (128 << 10); float64(adaptive[0]+adaptive[1]) < 0.9*all {
		t.Errorf("adaptive served %d commands, the fast path alone could %d", adaptive[0]+adaptive[1], int(all))
	}
}

// TestAdaptiveComesBack: a path that was slow for a while gets its share again.
func TestAdaptiveComesBack(t *testing.T) {
	slow := func(now int64) float64 {
		if now < int64(5*time.Second) {
			return 1e6
		}
		return 1e9
	}
	served := simulate(Adaptive, []func(int64) float64{func(int64) float64 { return 1e9 }, slow}, 8, 128<<10, 15*time.Second)
	t.Logf("commands served: %v", served)
	if served[1]*4 < served[0] {
		t.Errorf("the path that has recovered served %d, the other %d", served[1], served[0])
	}
}

// TestAdaptiveIsEven: equal paths share the load.
func TestAdaptiveIsEven(t *testing.T) {
	rate := func(int64) float64 { return 5e8 }
	for _, depth := range []int{1, 4, 64} {
		served := simulate(Adaptive, []func(int64) float64{rate, rate, rate, rate}, depth, 64<<10, time.Second)
		if depth < 4 {
			continue // one at a time may well stay on one path
		}
		for i, k := range served {
			if sum := served[0] + served[1] + served[2] + served[3]; k*8 < sum {
				t.Errorf("depth %d: path %d served %d of %d", depth, i, k, sum)
			}
		}
	}
}

func TestChooseNeverTakesAPathThatIsOut(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 20000 {
		classes := make([]class, 1+r.IntN(5))
		s := testSet(1, classes...)
		var best class
		for _, p := range s.list {
			c := class(r.IntN(3))
			p.class.Store(uint32(c))
			p.latency.Store(r.Int64N(1e9))
			p.link.cost.Store(r.Int64N(1 << 30))
			p.link.commands.Store(r.Int64N(9))
			if c == classOptimized || c == classNonOptimized && best == classOut {
				best = c
			}
		}
		s.current[0].Store(s.list[r.IntN(len(s.list))])
		for by := Adaptive; by <= QueueDepth; by++ {
			p := s.choose(by, 0, r.IntN(1<<20), r.Int64N(1e12))
			if best == classOut && p != nil || best != classOut && (p == nil || p.usable() != best) {
				t.Fatalf("%v: chose %v, the best class is %d", by, p, best)
			}
		}
	}
}

func TestTopology(t *testing.T) {
	if m := topology(); m.nodes < 1 || m.here() < 0 || m.here() >= m.nodes || m.distance(0, -1) != near {
		t.Errorf("this machine: %+v", m)
	}
	if m := readMachine(t.TempDir()); m.nodes != 1 || m.distance(0, 0) != near {
		t.Errorf("a machine without nodes: %+v", m)
	}
}
