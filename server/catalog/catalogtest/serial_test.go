package catalogtest

import "testing"

// TestFindCycle gives findCycle histories of two commits on two lists.
func TestFindCycle(t *testing.T) {
	for name, c := range map[string]struct {
		steps []step
		final [][]uint64
		ok    bool
	}{
		"one after the other": {[]step{
			{number: 1, lists: [2]int{0, 1}, seen: [2]int{0, 0}, begin: 0, end: 10},
			{number: 2, lists: [2]int{1, 0}, seen: [2]int{0, 1}, begin: 5, end: 15},
		}, [][]uint64{{1}, {2}}, true},
		"neither saw the other": {[]step{
			{number: 1, lists: [2]int{0, 1}, seen: [2]int{0, 0}, begin: 0, end: 10},
			{number: 2, lists: [2]int{1, 0}, seen: [2]int{0, 0}, begin: 5, end: 15},
		}, [][]uint64{{1}, {2}}, false},
		"the later one was not seen": {[]step{
			{number: 1, lists: [2]int{0, 1}, seen: [2]int{0, 0}, begin: 0, end: 10},
			{number: 2, lists: [2]int{2, 0}, seen: [2]int{0, 0}, begin: 20, end: 30},
		}, [][]uint64{{1}, nil, {2}}, false},
		"lost": {[]step{
			{number: 1, lists: [2]int{0, 1}, begin: 0, end: 10},
		}, [][]uint64{nil, nil}, false},
		"written twice": {[]step{
			{number: 1, lists: [2]int{0, 1}, begin: 0, end: 10},
		}, [][]uint64{{1, 1}, nil}, false},
	} {
		if got := findCycle(c.steps, c.final); (got == "") != c.ok {
			t.Errorf("%s: %q", name, got)
		}
	}
}
