package extent

import (
	"fmt"
	"math"
	"testing"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// Each kind of damage is found, and repaired as far as it can be; nobody loses a valid block that was his alone, and nothing becomes free that somebody
// may still write.
func TestCheck(t *testing.T) {
	run := func(at, u, n int64, state schema.RunState) schema.ExtentRun {
		return schema.ExtentRun{At: at, Unit: u, Count: n, Generation: 1, State: state}
	}
	extents := func(runs ...schema.ExtentRun) []byte { return schema.Encode(&schema.Extents{Runs: runs}) }
	condemned := func(n int64) []byte { return schema.Encode(&schema.Condemned{Count: n}) }
	// Data file near has units 1 to 3, the first two valid; 4 and 5 are condemned; data file far has units 128 and 129.
	const near, far = 7, 1 << 63
	for _, c := range []struct {
		name   string
		damage func(b *catalog.Batch)
		want   string // kinds
		left   string // what a second run finds
		files  string // what the first data file has then
		free   int64  // units less than were free
	}{
		{"nothing", func(*catalog.Batch) {}, "[]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"group gone", func(b *catalog.Batch) { b.Delete(schema.UnitsKey(dev, 0)) },
			"[units-in-use-free]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"group of another size", func(b *catalog.Batch) { b.Put(schema.UnitsKey(dev, 0), []byte{1}) },
			"[bad-group]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"group that there is not", func(b *catalog.Batch) { b.Put(schema.UnitsKey(dev, 4), make([]byte, 8)) },
			"[bad-group]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"units that nobody has", func(b *catalog.Batch) { b.Put(schema.UnitsKey(dev, 2), []byte{1, 0, 0, 0xf0, 0, 0, 0, 0}) },
			"[lost-units]", "[]", "0+2@1:rw 2+1@3:inv", 5},
		{"taken and lost", func(b *catalog.Batch) { b.Put(schema.UnitsKey(dev, 0), []byte{0, 1, 0, 0, 0, 0, 0, 0}) },
			"[units-in-use-free lost-units]", "[]", "0+2@1:rw 2+1@3:inv", 1},
		{"counters gone", func(b *catalog.Batch) { b.Delete(schema.SpaceKey(dev)) },
			"[wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"counters wrong", func(b *catalog.Batch) { b.Add(schema.SpaceKey(dev), schema.SpaceCondemned, 1) },
			"[wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"no counters", func(b *catalog.Batch) { b.Put(schema.SpaceKey(dev), []byte{1}) },
			"[wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"data file's row gone", func(b *catalog.Batch) { b.Delete(schema.ExtentFileKey(dev, near)) },
			"[wrong-extent-file]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"data file's row wrong", func(b *catalog.Batch) {
			b.Put(schema.ExtentFileKey(dev, near), schema.Encode(&schema.ExtentFile{Generation: 1, Units: 9}))
		}, "[wrong-extent-file]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"no data file's row", func(b *catalog.Batch) { b.Put(schema.ExtentFileKey(dev, near), []byte("?")) },
			"[wrong-extent-file]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"an earlier generation", func(b *catalog.Batch) {
			b.Put(schema.ExtentFileKey(dev, far), schema.Encode(&schema.ExtentFile{Units: 2}))
		}, "[wrong-extent-file]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"extents gone", func(b *catalog.Batch) { b.Delete(schema.ExtentsKey(dev, near, 0)) },
			"[wrong-extent-file lost-units wrong-space-counter]", "[]", "", 0},
		{"no extents", func(b *catalog.Batch) { b.Put(schema.ExtentsKey(dev, near, 0), []byte("?")) },
			"[bad-extents wrong-extent-file lost-units wrong-space-counter]", "[bad-extents lost-units]", "-", 0},
		{"extents that overlap", func(b *catalog.Batch) { b.Put(schema.ExtentsKey(dev, near, 1), extents(run(1, 20, 1, 1))) },
			"[bad-extents]", "[bad-extents]", "-", 0},
		{"extents of the label", func(b *catalog.Batch) { b.Put(schema.ExtentsKey(dev, far, 9), extents(run(9, 0, 1, 1))) },
			"[bad-extents]", "[bad-extents]", "0+2@1:rw 2+1@3:inv", 0},
		{"units shared, one without data", func(b *catalog.Batch) {
			b.Put(schema.ExtentsKey(dev, far, 9), extents(run(9, 2, 1, schema.RunInvalid), run(10, 105, 1, schema.RunInvalid)))
			b.Put(schema.ExtentFileKey(dev, far), schema.Encode(&schema.ExtentFile{Generation: 1, Units: 4}))
			b.Add(schema.SpaceKey(dev), schema.SpaceTaken, 2)
		}, "[shared-units units-in-use-free]", "[]", "0+2@1:rw 2+1@3:inv", 1},
		{"units shared, all with data", func(b *catalog.Batch) {
			b.Put(schema.ExtentsKey(dev, far, 9), extents(run(9, 2, 1, schema.RunValid)))
			b.Put(schema.ExtentFileKey(dev, far), schema.Encode(&schema.ExtentFile{Generation: 1, Units: 3}))
			b.Add(schema.SpaceKey(dev), schema.SpaceTaken, 1)
		}, "[shared-units]", "[shared-units]", "0+2@1:rw 2+1@3:inv", 1},
		{"condemned and in use", func(b *catalog.Batch) { b.Put(schema.CondemnedKey(dev, 77, 2, 3), condemned(2)) },
			"[bad-condemned wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"condemned and free", func(b *catalog.Batch) { b.Put(schema.CondemnedKey(dev, 77, 2, 30), condemned(3)) },
			"[units-in-use-free wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 3},
		{"no condemned row", func(b *catalog.Batch) { b.Put(schema.CondemnedKey(dev, 77, 2, 30), []byte("?")) },
			"[bad-condemned]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"condemned beyond the end", func(b *catalog.Batch) { b.Put(schema.CondemnedKey(dev, 77, 2, 198), condemned(2)) },
			"[bad-condemned]", "[]", "0+2@1:rw 2+1@3:inv", 0},
		{"condemned row gone", func(b *catalog.Batch) { b.Delete(schema.CondemnedKey(dev, near, 2, 4)) },
			"[lost-units wrong-space-counter]", "[]", "0+2@1:rw 2+1@3:inv", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := memorytest.New()
			s := format(t, e, 4096, mib, 200)
			allocate(t, s, near, 0, 5*mib)
			validate(t, s, near, 1, 0, 2*mib)
			allocate(t, s, far, 0, 2*mib)
			if _, _, err := s.Truncate(t.Context(), near, 3*mib); err != nil {
				t.Fatal(err)
			}
			clean(t, s)
			before, _ := s.Stat(t.Context())
			var b catalog.Batch
			c.damage(&b)
			commit(t, e, &b)
			s = open(t, e)
			if kinds, _ := fsck(t, s, false); len(kinds) == 0 != (c.want == "[]") {
				t.Errorf("found %v without repair, want %s", kinds, c.want)
			}
			kinds, stat := fsck(t, s, true)
			if got := fmt.Sprint(kinds); got != c.want {
				t.Errorf("found %s, want %s", got, c.want)
			}
			kinds, again := fsck(t, s, false)
			if got := fmt.Sprint(kinds); got != c.left {
				t.Errorf("left %s, want %s", got, c.left)
			}
			if c.left == "[]" {
				clean(t, s)
				if stat != again {
					t.Errorf("%+v, then %+v", stat, again)
				}
				if stat.Free != before.Free-c.free*mib {
					t.Errorf("%d units free, before %d", stat.Free/mib, before.Free/mib)
				}
			}
			if c.files != "-" {
				if got := whole(t, s, near, layout.IOModeRW); got != c.files {
					t.Errorf("%s, want %s", got, c.files)
				}
				if c.left == "[]" { // it goes on
					g := allocate(t, s, 12345, 0, 4*mib)
					validate(t, s, 12345, g.Generation, 0, 4*mib)
					clean(t, s)
				}
			}
		})
	}
}

// What fsck condemns is freed like anything else, and what is condemned and free at once is not freed.
func TestLostUnits(t *testing.T) {
	e := squeeze(memorytest.New())
	format(t, e, 4096, mib, 200)
	var b catalog.Batch
	b.Put(schema.UnitsKey(dev, 1), []byte{0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55}) // in pieces that are too many for one batch
	commit(t, e, &b)
	s := open(t, e)
	if kinds, _ := fsck(t, s, true); len(kinds) != 3 || kinds[0] != LostUnits {
		t.Errorf("%v", kinds)
	}
	clean(t, s)
	var waiting []Waiting
	if err := s.Condemned(t.Context(), func(w Waiting) error { waiting = append(waiting, w); return nil }); err != nil || len(waiting) != 1 || waiting[0] != (Waiting{Nobody, 0, 32 * mib}) {
		t.Errorf("%v, %v", waiting, err)
	}
	if err := s.Release(t.Context(), Nobody, math.MaxUint64); err != nil {
		t.Error(err)
	}
	if st, _ := s.Stat(t.Context()); st.Free != st.Total {
		t.Errorf("%+v", st)
	}
	clean(t, s)
	b.Reset()
	b.Put(schema.CondemnedKey(dev, 4, 4, 10), schema.Encode(&schema.Condemned{Count: 1}))
	commit(t, e, &b)
	if err := s.Release(t.Context(), 4, 4); err == nil {
		t.Error("freed what is free")
	}
}
