package meta

import (
	"slices"
	"testing"
)

func TestVictims(t *testing.T) {
	owner := func(n uint64) LockOwner { return LockOwner{Client: [16]byte{byte(n)}, Number: n} }
	edge := func(shard int, number, waiter, holder uint64) lockEdge {
		return lockEdge{shard, LockWait{number, owner(waiter), owner(holder)}}
	}
	for name, c := range map[string]struct {
		edges []lockEdge
		want  map[int][]uint64 // by shard
	}{
		"nobody waits":  {nil, nil},
		"a chain":       {[]lockEdge{edge(0, 1, 1, 2), edge(1, 1, 2, 3), edge(0, 2, 4, 3)}, nil},
		"two":           {[]lockEdge{edge(0, 1, 1, 2), edge(1, 7, 2, 1)}, map[int][]uint64{1: {7}}},
		"three":         {[]lockEdge{edge(0, 1, 3, 1), edge(1, 2, 1, 2), edge(2, 3, 2, 3)}, map[int][]uint64{0: {1}}},
		"in one shard":  {[]lockEdge{edge(0, 1, 1, 2), edge(0, 2, 2, 1)}, map[int][]uint64{0: {2}}},
		"two circles":   {[]lockEdge{edge(0, 1, 1, 2), edge(1, 2, 2, 1), edge(0, 3, 3, 4), edge(1, 4, 4, 3)}, map[int][]uint64{1: {2, 4}}},
		"two holders":   {[]lockEdge{edge(0, 5, 2, 9), edge(0, 5, 2, 1), edge(1, 2, 1, 2)}, map[int][]uint64{0: {5}}},
		"a tail":        {[]lockEdge{edge(0, 1, 9, 2), edge(0, 2, 1, 2), edge(1, 3, 2, 1)}, map[int][]uint64{1: {3}}},
		"circle within": {[]lockEdge{edge(0, 1, 3, 2), edge(1, 1, 2, 1), edge(2, 1, 1, 2), edge(2, 2, 1, 3)}, map[int][]uint64{0: {1}, 1: {1}}},
	} {
		for shard := range 3 {
			got := victims(shard, c.edges)
			slices.Sort(got)
			if !slices.Equal(got, c.want[shard]) {
				t.Errorf("%s: shard %d gives up %d, want %d", name, shard, got, c.want[shard])
			}
		}
	}
}
