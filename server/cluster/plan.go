package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// plan says who is to have each shard, by who has it now: zero where nobody can.
//
// Members that are in the view and not draining have equally many, or one more. Who has more than that gives some, and nothing else moves, so that
// every step of a change is planned for by each view of it: giving a shard away leaves the rest of the plan as it was, or makes one as short. Which shards
// a member gives, and who of several gets one, depends on hashes of member and shard (rendezvous hashing), so that all members find the same.
func (v *view) plan() []memberID {
	plan := make([]memberID, len(v.shards))
	have := map[memberID][]int{}
	var order []memberID
	for i := range v.members {
		if !v.members[i].Draining {
			order = append(order, v.members[i].id)
			have[v.members[i].id] = nil
		}
	}
	var free []int
	for shard := range v.shards {
		owner := v.shards[shard].owner
		if _, ok := have[owner]; ok {
			have[owner] = append(have[owner], shard)
		} else {
			free = append(free, shard)
		}
	}
	if len(order) == 0 { // all are draining: who has a shard keeps it
		for shard := range v.shards {
			if owner := v.shards[shard].owner; v.member(owner) != nil {
				plan[shard] = owner
			}
		}
		return plan
	}
	// Those that have most may have the ones over, so that they need not move.
	slices.SortFunc(order, func(a, b memberID) int {
		return cmp.Or(cmp.Compare(len(have[b]), len(have[a])), slices.Compare(a[:], b[:]))
	})
	quota := map[memberID]int{}
	each, over := len(v.shards)/len(order), len(v.shards)%len(order)
	for i, id := range order {
		quota[id] = each
		if i < over {
			quota[id]++
		}
	}
	for _, id := range order {
		shards := have[id]
		slices.SortFunc(shards, func(a, b int) int { return cmp.Compare(score(id, b), score(id, a)) })
		for len(shards) > quota[id] {
			free = append(free, shards[len(shards)-1])
			shards = shards[:len(shards)-1]
		}
		for _, shard := range shards {
			plan[shard] = id
		}
		quota[id] -= len(shards)
	}
	slices.Sort(free)
	for _, shard := range free {
		var best memberID
		found := false
		for _, id := range order {
			if quota[id] > 0 && (!found || score(id, shard) > score(best, shard)) {
				best, found = id, true
			}
		}
		quota[best]--
		plan[shard] = best
	}
	return plan
}

// score is how much a shard is a member's, compared to others.
func score(id memberID, shard int) uint64 {
	sum := sha256.Sum256(binary.BigEndian.AppendUint16(id[:], uint16(shard)))
	return binary.BigEndian.Uint64(sum[:8])
}
