package extent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/schema"
)

const mib = 1 << 20

var (
	volume = [16]byte{0xab, 1}
	dev    = layout.DeviceID{7, 8}
	ident  = Identity{NGUID: [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}
)

// place is a catalog that can be opened again and again.
type place struct {
	name string
	open func(*testing.T) catalog.Engine
}

// places are empty catalogs of every kind.
func places(t *testing.T) []place {
	inMemory := memorytest.New()
	dir := filepath.Join(t.TempDir(), "catalog")
	var open *pebble.Engine
	t.Cleanup(func() {
		if open != nil {
			open.Close()
		}
	})
	return []place{
		{"memory", func(*testing.T) catalog.Engine { return inMemory }},
		{"pebble", func(t *testing.T) catalog.Engine {
			if open != nil {
				if err := open.Close(); err != nil {
					t.Fatal(err)
				}
			}
			e, err := pebble.Open(pebble.Config{Dir: dir, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
			if err != nil {
				t.Fatal(err)
			}
			open = e
			return e
		}},
	}
}

// timed bounds a test.
func timed(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// tight is an engine that takes small batches, and can stop at one of them.
type tight struct {
	catalog.Engine
	caps    catalog.Caps
	left    int  // commits until it stops; 0 = never
	after   bool // the last one is carried out
	stopped bool
	commits int
	keys    int // most entries that a batch had
}

var errStopped = errors.New("the engine was stopped")

func (e *tight) Caps() catalog.Caps { return e.caps }

func (e *tight) Commit(ctx context.Context, b *catalog.Batch) error {
	if e.stopped {
		return errStopped
	}
	if err := b.Check(e.caps); err != nil {
		return err
	}
	e.commits++
	e.keys = max(e.keys, b.Len())
	if e.left > 0 {
		if e.left--; e.left == 0 {
			e.stopped = true
			if e.after {
				if err := e.Engine.Commit(ctx, b); err != nil {
					return err
				}
			}
			return errStopped
		}
	}
	return e.Engine.Commit(ctx, b)
}

func squeeze(e catalog.Engine) *tight {
	return &tight{Engine: e, caps: catalog.Caps{MaxBatchBytes: 256 << 10, MaxKeys: 32, MaxValue: 64 << 10}}
}

// format adds a namespace of so many units to a catalog that has a volume, and opens it. It bounds the test, which may hang in a loop that
// no context ends.
func format(t *testing.T, e catalog.Engine, block, unit, units int64) *Space {
	t.Helper()
	name := t.Name()
	hung := time.AfterFunc(5*time.Minute, func() { panic(name + " takes too long") })
	t.Cleanup(func() { hung.Stop() })
	ns, err := NewNamespace(ident, block, units*unit, unit)
	if err != nil {
		t.Fatal(err)
	}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.Format, ID: volume}))
	commit(t, e, &b)
	b.Reset()
	if err := Add(t.Context(), e, &b, dev, ns); err != nil {
		t.Fatal(err)
	}
	commit(t, e, &b)
	return open(t, e)
}

func open(t *testing.T, e catalog.Engine) *Space {
	t.Helper()
	s, err := Open(t.Context(), e, dev)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func commit(t *testing.T, e catalog.Engine, b *catalog.Batch) {
	t.Helper()
	if err := e.Commit(t.Context(), b); err != nil {
		t.Fatal(err)
	}
}

// allocate gives one data file space and returns the grant.
func allocate(t *testing.T, s *Space, number uint64, off, n int64) Grant {
	t.Helper()
	g, err := Allocate(t.Context(), []Request{{Space: s, Number: number, Range: layout.Range{Off: off, Len: n}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return g[0]
}

func validate(t *testing.T, s *Space, number, generation uint64, off, n int64) {
	t.Helper()
	if err := s.Validate(t.Context(), number, generation, layout.Column{}, []layout.Range{{Off: off, Len: n}}); err != nil {
		t.Fatal(err)
	}
}

// whole is all that a data file has, as written "off+len@addr state", in units of one MiB.
func whole(t *testing.T, s *Space, number uint64, mode layout.IOMode) string {
	t.Helper()
	list, _, err := s.Lookup(t.Context(), number, layout.Range{Len: layout.ToEOF}, mode, layout.MaxExtents)
	if err != nil {
		t.Fatal(err)
	}
	return text(list)
}

func text(list []layout.Extent) string {
	in := func(n int64) string {
		if n%mib == 0 {
			return fmt.Sprint(n / mib)
		}
		return fmt.Sprintf("%gK", float64(n)/1024)
	}
	out := ""
	for i, e := range list {
		if i > 0 {
			out += " "
		}
		out += in(e.Off) + "+" + in(e.Len)
		if e.State != layout.ExtentNone {
			out += "@" + in(e.Addr)
		}
		out += ":" + map[layout.ExtentState]string{
			layout.ExtentReadWrite: "rw", layout.ExtentRead: "r", layout.ExtentInvalid: "inv", layout.ExtentNone: "none",
		}[e.State]
	}
	return out
}

// fsck runs Check, with repairs if they are wanted, and returns what it found, as "kind kind".
func fsck(t *testing.T, s *Space, repair bool) (kinds []Kind, stat Stat) {
	t.Helper()
	stat, err := s.Check(t.Context(), func(f Finding, fix func(*catalog.Batch) error) error {
		kinds = append(kinds, f.Kind)
		if f.Detail == "" {
			t.Errorf("%s says nothing", f.Kind)
		}
		if !repair || fix == nil {
			return nil
		}
		var b catalog.Batch
		if err := fix(&b); err != nil {
			return err
		}
		if err := s.engine.Commit(t.Context(), &b); err != nil {
			return fmt.Errorf("repair of %+v: %w", f, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return kinds, stat
}

// clean fails unless Check finds nothing, and Stat is as it says.
func clean(t *testing.T, s *Space) {
	t.Helper()
	var found []Finding
	want, err := s.Check(t.Context(), func(f Finding, _ func(*catalog.Batch) error) error {
		found = append(found, f)
		return nil
	})
	if err != nil || len(found) > 0 {
		t.Fatalf("check: %+v, %v", found, err)
	}
	if got, err := s.Stat(t.Context()); err != nil || got != want {
		t.Fatalf("stat %+v, want %+v, %v", got, want, err)
	}
}
