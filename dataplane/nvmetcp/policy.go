package nvmetcp

import (
	"fmt"
	"math"
	"sync/atomic"
)

// Policy is how one of several usable paths is chosen for each command.
type Policy uint32

const (
	// Adaptive takes the optimized path with the least product of the bytes under way on its controller, this command's included, and the
	// path's smoothed latency.
	Adaptive Policy = iota
	// NUMA stays on the nearest optimized path of the processor's memory node.
	NUMA
	// RoundRobin takes the optimized paths in turn.
	RoundRobin
	// QueueDepth takes the optimized path whose controller has the fewest commands under way.
	QueueDepth
)

var policyNames = [...]string{Adaptive: "adaptive", NUMA: "numa", RoundRobin: "round-robin", QueueDepth: "queue-depth"}

func (p Policy) String() string {
	if int(p) < len(policyNames) {
		return policyNames[p]
	}
	return fmt.Sprintf("policy(%d)", uint32(p))
}

// ParsePolicy is the inverse of String.
func ParsePolicy(s string) (Policy, error) {
	for i, name := range policyNames {
		if s == name {
			return Policy(i), nil
		}
	}
	return 0, fmt.Errorf("no path policy %q: there are adaptive, numa, round-robin and queue-depth", s)
}

// class is what a policy may do with a path.
type class uint32

const (
	classOut          class = iota // not now
	classOptimized                 // use
	classNonOptimized              // use when there is no optimized one
)

func (c class) String() string {
	return [...]string{"out", "optimized", "non-optimized"}[c]
}

// pathSet is the paths of one namespace; a change makes a new one.
type pathSet struct {
	list    []*path
	current []atomic.Pointer[path] // by memory node: the path used last
}

func newPathSet(list []*path) *pathSet {
	return &pathSet{list: list, current: make([]atomic.Pointer[path], topology().nodes)}
}

// choose returns the path for a command of n bytes from a processor of memory node, or nil if none is usable. now is in ns.
func (s *pathSet) choose(by Policy, node, n int, now int64) *path {
	switch by {
	case NUMA:
		return s.numa(node)
	case RoundRobin:
		return s.roundRobin(node)
	case QueueDepth:
		return s.queueDepth()
	}
	return s.adaptive(n, now)
}

// numa does as Linux: the path used last is kept while it is optimized.
func (s *pathSet) numa(node int) *path {
	if p := s.current[node].Load(); p != nil && p.usable() == classOptimized {
		return p
	}
	return s.search(node, topology().distance)
}

// search finds the nearest optimized path, else the nearest other one, and remembers it.
func (s *pathSet) search(node int, distance func(a, b int) int) *path {
	var best, other *path
	bestAt, otherAt := math.MaxInt, math.MaxInt
	for _, p := range s.list {
		d := distance(node, p.link.node)
		switch p.usable() {
		case classOptimized:
			if d < bestAt {
				best, bestAt = p, d
			}
		case classNonOptimized:
			if d < otherAt {
				other, otherAt = p, d
			}
		}
	}
	if best == nil {
		best = other
	}
	if best != nil {
		s.current[node].Store(best)
	}
	return best
}

// roundRobin does as Linux: it walks the list once from behind the path used last.
func (s *pathSet) roundRobin(node int) *path {
	last := s.current[node].Load()
	if last == nil {
		return s.search(node, func(int, int) int { return 0 })
	}
	if len(s.list) == 1 {
		if last.usable() == classOut {
			return nil
		}
		return last
	}
	at := 0
	for i, p := range s.list {
		if p == last {
			at = i
		}
	}
	var found *path
	for i := 1; i < len(s.list); i++ {
		p := s.list[(at+i)%len(s.list)]
		switch p.usable() {
		case classOptimized:
			s.current[node].Store(p)
			return p
		case classNonOptimized:
			found = p
		}
	}
	if c := last.usable(); c == classOptimized || c == classNonOptimized && found == nil {
		return last
	}
	if found != nil {
		s.current[node].Store(found)
	}
	return found
}

// queueDepth does as Linux: the fewest commands on the controller, for all its namespaces.
func (s *pathSet) queueDepth() *path {
	var best, other *path
	least, otherLeast := int64(math.MaxInt64), int64(math.MaxInt64)
	for _, p := range s.list {
		depth := p.link.commands.Load()
		switch p.usable() {
		case classOptimized:
			if depth < least {
				best, least = p, depth
			}
		case classNonOptimized:
			if depth < otherLeast {
				other, otherLeast = p, depth
			}
		}
		if least == 0 {
			break
		}
	}
	if best == nil {
		best = other
	}
	return best
}

// adaptive takes the least bytes times latency. A path that was never measured counts as the fastest of the others.
func (s *pathSet) adaptive(n int, now int64) *path {
	if len(s.list) == 1 {
		if p := s.list[0]; p.usable() != classOut {
			return p
		}
		return nil
	}
	pick, fastest := classNonOptimized, int64(math.MaxInt64)
	for _, p := range s.list {
		c := p.usable()
		if c == classOut || c == classNonOptimized && pick == classOptimized {
			continue
		}
		if c == classOptimized && pick != classOptimized {
			pick, fastest = c, math.MaxInt64
		}
		if l := p.expected(now); l != 0 {
			fastest = min(fastest, l)
		}
	}
	if fastest == math.MaxInt64 {
		fastest = 1
	}
	var best *path
	least := math.Inf(1)
	for _, p := range s.list {
		if p.usable() != pick {
			continue
		}
		l := p.expected(now)
		if l == 0 {
			l = fastest
		}
		if score := float64(p.link.cost.Load()+int64(n)+costPerCommand) * float64(l); score < least {
			best, least = p, score
		}
	}
	return best
}
