package faulty_test

import (
	"errors"
	"testing"
	"time"

	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/catalog/catalogtest"
	"github.com/weftfs/weft/server/meta/catalog/faulty"
	"github.com/weftfs/weft/server/meta/catalog/memory"
)

// TestContract holds for an engine with faults once its callers find out about unknown outcomes.
func TestContract(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	catalogtest.Run(t, func(*testing.T) catalog.Engine {
		return catalogtest.Resolve(faulty.New(memory.New(), faulty.Config{
			Seed: seed, Delay: 20 * time.Microsecond,
			Conflict: 0.05, Lost: 0.03, Applied: 0.03, Late: 0.03, Slow: 0.01,
			LateBy: time.Millisecond, SlowBy: time.Millisecond,
		}))
	})
}

func TestSnapshotsExpire(t *testing.T) {
	catalogtest.RunExpiry(t, func(*testing.T) catalog.Engine {
		return faulty.New(memory.New(), faulty.Config{Seed: 1, SnapshotReads: 100})
	})
}

// TestFaults looks at each fault by itself.
func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		cfg     faulty.Config
		want    error
		applied bool
	}{
		"conflict": {faulty.Config{Conflict: 1}, catalog.ErrConflict, false},
		"lost":     {faulty.Config{Lost: 1}, catalog.ErrUnknown, false},
		"applied":  {faulty.Config{Applied: 1}, catalog.ErrUnknown, true},
		"late":     {faulty.Config{Late: 1, LateBy: time.Millisecond}, catalog.ErrUnknown, true},
		"slow":     {faulty.Config{Slow: 1, SlowBy: time.Millisecond}, nil, true},
		"none":     {faulty.Config{}, nil, true},
	} {
		inner := memory.New()
		e := faulty.New(keepOpen{inner}, c.cfg)
		b := new(catalog.Batch)
		b.Put([]byte("key"), []byte("value"))
		if err := e.Commit(t.Context(), b); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
		b.Puts[0].Value = []byte("changed after the call")
		if err := e.Close(); err != nil { // waits for late commits
			t.Errorf("%s: close: %v", name, err)
		}
		got, err := inner.Get(t.Context(), []byte("key"))
		if (err == nil) != c.applied || c.applied && string(got) != "value" {
			t.Errorf("%s: afterwards %q, %v", name, got, err)
		}
	}
}

// keepOpen is not closed with the engine around it.
type keepOpen struct{ catalog.Engine }

func (keepOpen) Close() error { return nil }
