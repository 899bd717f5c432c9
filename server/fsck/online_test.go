package fsck

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// online checks while services may be running. After the n-th snapshot was taken, from 1 on, then is called with n.
func (w *tree) online(then func(n int)) *Report {
	w.t.Helper()
	var mu sync.Mutex
	taken := 0
	report, err := Check(w.t.Context(), Config{Dial: w.net.Dial, Log: silent, Snapshot: func(ctx context.Context) (catalog.Snapshot, error) {
		snap, err := w.engine.Snapshot(ctx)
		mu.Lock()
		defer mu.Unlock()
		if taken++; then != nil {
			then(taken)
		}
		return snap, err
	}})
	if err != nil {
		w.t.Fatal(err)
	}
	return report
}

// TestOnlineDamage finds each kind of damage as a run does that is alone with the catalog, and changes nothing.
func TestOnlineDamage(t *testing.T) {
	for _, d := range damages {
		t.Run(strings.ReplaceAll(d.name, " ", "-"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTree(t)
				w.settle()
				if r := w.online(nil); !r.Clean() {
					t.Errorf("before: %v", r.Problems)
				}
				d.do(w)
				before := w.dump()
				alone, report := w.check(false), w.online(nil)
				if !maps.Equal(report.Counts, alone.Counts) || report.Busy != 0 {
					t.Errorf("found %v, alone %v: %v", report.Counts, alone.Counts, report.Problems)
				}
				if !maps.Equal(before, w.dump()) {
					t.Error("a check changed something")
				}
				d.look(t, report)
			})
		})
	}
}

// create makes a file of so many bytes, as the service and a client would.
func (w *tree) create(id layout.FileID, length int64) {
	w.t.Helper()
	w.add(id, dirA, fmt.Sprint("file", id), syscall.S_IFREG)
	w.do(func(b *catalog.Batch) { b.Max(schema.KeyNextInode, 0, int64(id)+1) })
	w.write(id, 1, length, length)
}

// unlink removes a file, and its data files at once.
func (w *tree) unlink(id, dir layout.FileID, name string) {
	w.t.Helper()
	row := w.layout(id)
	w.do(func(b *catalog.Batch) {
		b.Delete(schema.InodeKey(id))
		b.Delete(schema.LayoutKey(id))
		b.Delete(schema.EntryKey(dir, name))
		b.Add(schema.CountersKey(dir), schema.CounterEntries, -1)
		b.Add(schema.FilesKey(0), 0, -1)
		w.m.Discard(b, id, row)
	})
	w.m.Kick()
	time.Sleep(time.Minute) // of the bubble
}

// TestOnlineChanges changes what a run has read already: none of it is a problem.
func TestOnlineChanges(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(w *tree)
	}{
		{"unlink", func(w *tree) { w.unlink(small, dirA, "small") }},
		{"create", func(w *tree) {
			for i := range layout.FileID(20) {
				w.create(100+i, 3*unit)
			}
		}},
		{"create and unlink", func(w *tree) {
			w.create(100, unit)
			w.unlink(100, dirA, "file100")
		}},
		{"fence", func(w *tree) {
			if err := w.m.Fence(w.t.Context(), wide); err != nil {
				w.t.Fatal(err)
			}
		}},
		{"append", func(w *tree) {
			for i := range w.layout(wide).Mirrors[0] {
				_, server := w.at(&w.layout(wide).Mirrors[0][i])
				if err := server.SetAttr(w.t.Context(), w.layout(wide).Mirrors[0][i].Handle, nfs3.Sattr{SetSize: true, Size: 20 * unit}, nil); err != nil {
					w.t.Fatal(err)
				}
			}
			w.do(func(b *catalog.Batch) { w.change(b, wide, func(row *schema.Inode) { row.Size = 20 * unit }) })
		}},
		{"writer begins", func(w *tree) {
			w.do(func(b *catalog.Batch) { b.Put(schema.WriterKey(wide, session), nil) })
			file, _, server := w.first(wide)
			if err := server.SetAttr(w.t.Context(), file.Handle, nfs3.Sattr{SetSize: true, Size: 30 * unit}, nil); err != nil {
				w.t.Fatal(err)
			}
		}},
		{"rename", func(w *tree) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.EntryKey(dirA, "small"))
				b.Add(schema.CountersKey(dirA), schema.CounterEntries, -1)
				w.entry(b, small, dirB, "other", syscall.S_IFREG)
			})
		}},
	} {
		for at := 1; at <= 4; at++ { // in each of the first snapshots' times
			t.Run(fmt.Sprint(c.name, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newTree(t)
					// The changes here charge nobody.
					w.do(func(b *catalog.Batch) {
						b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: uncounted, ID: volume}))
					})
					w.settle()
					w.start()
					time.Sleep(time.Second)
					r := w.online(func(n int) {
						if n == at {
							c.do(w)
						}
					})
					if !r.Clean() || r.Busy != 0 {
						t.Errorf("%v, %d busy", r.Problems, r.Busy)
					}
					w.stop()
					if r := w.check(false); !r.Clean() {
						t.Errorf("afterwards, alone: %v", r.Problems)
					}
				})
			})
		}
	}
}

// TestOnlineDamageAmidChanges finds what is wrong, and nothing else, while files come and go.
func TestOnlineDamageAmidChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		w.settle()
		w.start()
		time.Sleep(time.Second)
		file, st, _ := w.first(wide)
		if found, err := st.Remove(t.Context(), file.Number); err != nil || !found {
			t.Fatal(found, err)
		}
		if _, err := st.Create(t.Context(), 1<<40, layout.Credential{UID: 1 << 20, GID: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		r := w.online(func(n int) {
			w.create(100+layout.FileID(n), 3*unit)
			if n > 1 {
				w.unlink(99+layout.FileID(n), dirA, fmt.Sprint("file", 99+n))
			}
		})
		want := map[Kind]int64{Missing: 1, OrphanDataFile: 1, NextNumber: 1}
		if !maps.Equal(r.Counts, want) || r.Busy != 0 {
			t.Errorf("%v, %d busy: %v", r.Counts, r.Busy, r.Problems)
		}
		for _, p := range r.Problems {
			if p.Kind == Missing && (p.Path != "/a/wide" || !p.Lost) {
				t.Errorf("%+v", p)
			}
		}
		w.stop()
	})
}

// TestOnlineBusy does not say of what changes all the time that it is wrong.
func TestOnlineBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		file, st, _ := w.first(small)
		if found, err := st.Remove(t.Context(), file.Number); err != nil || !found {
			t.Fatal(found, err)
		}
		r := w.online(func(n int) {
			w.do(func(b *catalog.Batch) { w.change(b, small, func(row *schema.Inode) { row.Mtime++ }) })
		})
		if !r.Clean() || r.Busy != 1 {
			t.Errorf("%v, %d busy", r.Problems, r.Busy)
		}
	})
}

// TestOnlineRate takes the time that the rate asks for.
func TestOnlineRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		rows := len(w.dump())
		began := time.Now()
		_, err := Check(t.Context(), Config{Dial: w.net.Dial, Log: silent, Snapshot: w.engine.Snapshot, Rate: 20})
		if took := time.Since(began); err != nil || took < time.Duration(rows)*time.Second/20-time.Second || took > time.Minute {
			t.Errorf("%d rows in %v: %v", rows, took, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := Check(ctx, Config{Dial: w.net.Dial, Log: silent, Snapshot: w.engine.Snapshot, Rate: 1}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("interrupted: %v", err)
		}
	})
}

// shortLived gives snapshots that can be read so many times.
type shortLived struct {
	engine *memorytest.Engine
	reads  int
	taken  int
}

func (s *shortLived) snapshot(ctx context.Context) (catalog.Snapshot, error) {
	s.taken++
	snap, err := s.engine.Snapshot(ctx)
	return &shortSnapshot{Snapshot: snap, reads: s.reads}, err
}

type shortSnapshot struct {
	catalog.Snapshot
	mu    sync.Mutex
	reads int
}

func (s *shortSnapshot) expired() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reads--; s.reads < 0 {
		return catalog.ErrSnapshotExpired
	}
	return nil
}

func (s *shortSnapshot) Get(ctx context.Context, key []byte) ([]byte, error) {
	if err := s.expired(); err != nil {
		return nil, err
	}
	return s.Snapshot.Get(ctx, key)
}

func (s *shortSnapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		if err := s.expired(); err != nil {
			yield(catalog.Row{}, err)
			return
		}
		s.Snapshot.Scan(ctx, from, to, opts)(yield)
	}
}

// TestOnlineSnapshotExpires cannot say anything of a catalog that it has not seen as a whole. While it looks at data files it may take other
// snapshots.
func TestOnlineSnapshotExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTree(t)
		s := &shortLived{engine: w.engine, reads: 10}
		_, err := Check(t.Context(), Config{Dial: w.net.Dial, Log: silent, Snapshot: s.snapshot})
		if !errors.Is(err, catalog.ErrSnapshotExpired) || !errors.Is(err, ErrCouldNotRun) {
			t.Errorf("%v", err)
		}
		c := newChecker(Config{})
		if c.frozen, err = freeze(t.Context(), s.snapshot, &pace{}); err != nil {
			t.Fatal(err)
		}
		c.frozen.renew, s.taken = true, 0
		for range 100 {
			if _, err := c.frozen.Get(t.Context(), schema.KeyVolume); err != nil {
				t.Fatal(err)
			}
		}
		if s.taken != 9 {
			t.Errorf("%d more snapshots", s.taken)
		}
		c.end()
	})
}

// TestOnlineSpaces checks namespaces.
func TestOnlineSpaces(t *testing.T) {
	for _, d := range spaceDamages {
		t.Run(strings.ReplaceAll(d.name, " ", "-"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, disks := newSpaces(t)
				d.do(w, disks)
				alone, err := w.run(disks, false)
				if err != nil {
					t.Fatal(err)
				}
				online, err := w.runWith(disks, Config{Snapshot: w.engine.Snapshot})
				if err != nil || !maps.Equal(online.Counts, alone.Counts) || online.Busy != 0 {
					t.Errorf("%v, alone %v, %v", online, alone.Counts, err)
				}
			})
		})
	}
}

func TestOnlineConfig(t *testing.T) {
	engine := memorytest.New()
	for _, cfg := range []Config{
		{}, {Engine: engine, Snapshot: engine.Snapshot}, {Snapshot: engine.Snapshot, Repair: true}, {Engine: engine, Rate: 5},
		{Snapshot: engine.Snapshot, Rate: -1}, {Engine: engine, Settle: 1},
	} {
		if err := cfg.Validate(); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}
