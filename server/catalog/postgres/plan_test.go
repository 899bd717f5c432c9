package postgres

import (
	"encoding/binary"
	"testing"

	"github.com/weftfs/weft/server/catalog"
)

// TestPlanLocks has batches lock everything only when they need more locks than maxLocks, however often they name what these are of.
func TestPlanLocks(t *testing.T) {
	for _, c := range []struct {
		rows, locks int
	}{
		{100, 102}, // and the class, and everything, shared
		{maxLocks - 2, maxLocks},
		{maxLocks - 1, 1},
	} {
		var b catalog.Batch
		for i := range c.rows {
			key := append([]byte("i classes"), binary.BigEndian.AppendUint32(nil, uint32(i))...)
			b.GuardEqual(key, []byte("old"))
			b.Put(key, []byte("new"))
		}
		p, err := newPlan(7, &b, false)
		if err != nil {
			t.Fatal(err)
		}
		everything := p.everything()
		if c.locks == 1 {
			everything |= exclusive
		}
		found := false
		for _, l := range p.locks {
			found = found || l == everything
		}
		if len(p.locks) != c.locks || !found {
			t.Errorf("%d rows: %d locks, want %d; everything as it should be: %v", c.rows, len(p.locks), c.locks, found)
		}
	}
}
