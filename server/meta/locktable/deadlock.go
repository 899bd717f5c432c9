package locktable

import (
	"bytes"
	"cmp"
	"slices"
	"time"
)

const (
	// WaitsPart is how many waits a table tells at a time: less than a frame of package peerrpc has room for.
	WaitsPart = 1 << 13
	// longWait is how old a wait is before other shards are asked.
	longWait = 300 * time.Millisecond
)

// Owner is whoever has or wants a lock, in all shards the same.
type Owner struct {
	Client [16]byte
	Number uint64
}

func (o Owner) compare(p Owner) int {
	return cmp.Or(bytes.Compare(o.Client[:], p.Client[:]), cmp.Compare(o.Number, p.Number))
}

// Wait says that one owner of a record lock waits for another one to give up his. Number names the wait, among those of
// its shard; they count up.
type Wait struct {
	Number         uint64
	Waiter, Holder Owner
}

// compare puts the waits of a shard in the order in which they are told.
func (w Wait) compare(x Wait) int {
	return cmp.Or(cmp.Compare(w.Number, x.Number), w.Holder.compare(x.Holder))
}

// Edge is a wait in one of the shards.
type Edge struct {
	Shard int
	Wait
}

func (o owner) global() Owner { return Owner{o.sess.Client, o.number} }

// Waits returns who waits for whom, one part at a time: up to WaitsPart of those that come after the given one, by
// their numbers and then by their holders. If it returns fewer there are no more. Who waits for somebody for several
// locks is told of once in a part, with the least number.
func (t *Table) Waits(after Wait) []Wait {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	var waits []*wait
	for _, of := range t.waiting {
		for _, w := range of {
			if w.number >= after.Number && w.live(now) {
				waits = append(waits, w)
			}
		}
	}
	slices.SortFunc(waits, func(v, w *wait) int { return cmp.Compare(v.number, w.number) })
	var part []Wait
	told := map[[2]Owner]bool{}
	for _, w := range waits {
		waiter, begin := w.want.Owner.global(), len(part)
		for l := range w.file.records.Conflicts(w.want) {
			is := Wait{w.number, waiter, l.Owner.global()}
			if pair := [2]Owner{waiter, is.Holder}; is.compare(after) > 0 && !told[pair] {
				told[pair] = true
				part = append(part, is)
			}
		}
		slices.SortFunc(part[begin:], Wait.compare)
		if len(part) >= WaitsPart {
			return part[:WaitsPart]
		}
	}
	return part
}

// WaitsLong reports whether somebody waits for a record lock, and not only since now.
func (t *Table) WaitsLong() bool {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, waits := range t.waiting {
		if slices.ContainsFunc(waits, func(w *wait) bool { return w.live(now) && now.Sub(w.since) > longWait }) {
			return true
		}
	}
	return false
}

// victims returns the waits of a shard that end so that others can go on, each with a circle that it is in: of each
// circle that of the greatest owner, so that all shards choose the same one.
func victims(shard int, edges []Edge) map[uint64][]Edge {
	next := map[Owner][]Edge{}
	for _, e := range edges {
		next[e.Waiter] = append(next[e.Waiter], e)
	}
	found := map[uint64][]Edge{}
	for _, e := range edges {
		if e.Shard != shard || found[e.Number] != nil {
			continue
		}
		by := map[Owner]Edge{} // the wait by which an owner was come to
		for todo := []Edge{e}; len(todo) > 0; {
			last := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			if _, seen := by[last.Holder]; seen || last.Holder.compare(e.Waiter) > 0 {
				continue
			}
			by[last.Holder] = last
			if last.Holder == e.Waiter {
				circle := []Edge{last}
				for o := last.Waiter; o != e.Waiter; o = by[o].Waiter {
					circle = append(circle, by[o])
				}
				found[e.Number] = circle
				break
			}
			todo = append(todo, next[last.Holder]...)
		}
	}
	return found
}

// End has the waits of this shard end that would never end, as the given ones, which have been there at one moment,
// show. They are marked with their circles, and their clients are to be told.
func (t *Table) End(shard int, edges []Edge) (ready []Ready) {
	circles := victims(shard, edges)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, waits := range t.waiting {
		for _, w := range waits {
			if circle := circles[w.number]; circle != nil {
				w.circle = circle
				ready = append(ready, w.tell())
			}
		}
	}
	return ready
}
