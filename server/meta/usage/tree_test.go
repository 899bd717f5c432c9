package usage

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// volume is a catalog with nothing in it but directories, and files that have one name or none.
type volume struct {
	t      *testing.T
	engine catalog.Engine
	trees  []*Tree // by shard
	rows   map[layout.FileID]schema.Inode
	next   layout.FileID
}

func newVolume(t *testing.T, shards int) *volume {
	v := &volume{t: t, engine: memorytest.New(), rows: map[layout.FileID]schema.Inode{}, next: layout.RootID + 1}
	for shard := range shards {
		v.trees = append(v.trees, NewTree(v.engine, shard, shards, slog.New(slog.DiscardHandler)))
	}
	var c Change
	root := schema.Inode{Mode: syscall.S_IFDIR, Parent: layout.RootID}
	v.rows[layout.RootID] = root
	c.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	c.Charge(&root, 1)
	v.commit(&c)
	return v
}

func (v *volume) commit(c *Change) {
	v.t.Helper()
	if err := v.engine.Commit(v.t.Context(), &c.Batch); err != nil {
		v.t.Fatal(err)
	}
}

// change commits a change of the row of an inode.
func (v *volume) change(id layout.FileID, f func(c *Change, row *schema.Inode)) {
	v.t.Helper()
	var c Change
	row := v.rows[id]
	f(&c, &row)
	c.Put(schema.InodeKey(id), schema.Encode(&row))
	v.commit(&c)
	v.rows[id] = row
}

// add makes an inode, of any shard.
func (v *volume) add(row schema.Inode) layout.FileID {
	v.t.Helper()
	id := layout.FileID(rand.IntN(len(v.trees)))*layout.ShardChunk + v.next
	v.next++
	v.rows[id] = row
	v.change(id, func(c *Change, row *schema.Inode) {
		c.Charge(row, 1)
		if row.IsDir() {
			c.Add(schema.CountersKey(row.Parent), schema.CounterSubdirs, 1)
		}
	})
	return id
}

func (v *volume) dir(in layout.FileID) layout.FileID {
	v.t.Helper()
	return v.add(schema.Inode{Mode: syscall.S_IFDIR, Parent: in})
}

func (v *volume) file(in layout.FileID, size int64) layout.FileID {
	v.t.Helper()
	return v.add(schema.Inode{Mode: syscall.S_IFREG, Parent: in, Size: size})
}

// move gives an inode another directory.
func (v *volume) move(id, to layout.FileID) {
	v.t.Helper()
	v.change(id, func(c *Change, row *schema.Inode) {
		from := row.Parent
		if !row.IsDir() {
			c.Rehome(row, to)
			return
		}
		c.Add(schema.CountersKey(from), schema.CounterSubdirs, -1)
		c.Add(schema.CountersKey(to), schema.CounterSubdirs, 1)
		row.Parent = to
		if err := v.trees[0].TakeBack(v.t.Context(), c, id, from, to); err != nil {
			v.t.Fatal(err)
		}
	})
	for _, tree := range v.trees {
		tree.ForgetParents()
	}
}

// remove removes a directory with nothing in it.
func (v *volume) remove(id layout.FileID) {
	v.t.Helper()
	var c Change
	row := v.rows[id]
	c.Delete(schema.InodeKey(id))
	c.Delete(schema.CountersKey(id))
	c.Add(schema.CountersKey(row.Parent), schema.CounterSubdirs, -1)
	c.Charge(&row, -1)
	if err := v.trees[0].TakeBack(v.t.Context(), &c, id, row.Parent, 0); err != nil {
		v.t.Fatal(err)
	}
	v.commit(&c)
	delete(v.rows, id)
}

// within reports whether an inode is a directory, or in it at any depth.
func (v *volume) within(id, dir layout.FileID) bool {
	for id != dir && id != layout.RootID && id != 0 {
		id = v.rows[id].Parent
	}
	return id == dir
}

// below adds up what is below a directory.
func (v *volume) below(dir layout.FileID) (u Sum) {
	for id, row := range v.rows {
		switch {
		case id == dir || !v.within(id, dir):
		case row.IsDir():
			u.Dirs++
		default:
			u = u.Plus(Sum{Bytes: row.Size, Files: 1})
		}
	}
	return u
}

func (v *volume) count(prefix byte) (n int) {
	from, to := schema.Of(prefix)
	for range v.engine.Scan(context.Background(), from, to, catalog.ScanOptions{KeysOnly: true}) {
		n++
	}
	return n
}

// TestTree does random things and compares what is counted with what there is.
func TestTree(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards), func(t *testing.T) {
			v := newVolume(t, shards)
			dirs := []layout.FileID{layout.RootID}
			var files []layout.FileID
			dir := func() layout.FileID { return dirs[rand.IntN(len(dirs))] }
			for step := range 1500 {
				switch d := dir(); rand.IntN(7) {
				case 0:
					if len(dirs) < 40 {
						dirs = append(dirs, v.dir(d))
					}
				case 1, 2:
					files = append(files, v.file(d, rand.Int64N(1000)))
				case 3:
					if len(files) > 0 {
						v.move(files[rand.IntN(len(files))], []layout.FileID{d, 0}[rand.IntN(2)])
					}
				case 4:
					if to := dir(); d != layout.RootID && !v.within(to, d) {
						v.move(d, to)
					}
				case 5:
					if d != layout.RootID && v.below(d) == (Sum{}) {
						v.remove(d)
						dirs = slices.DeleteFunc(dirs, func(id layout.FileID) bool { return id == d })
					}
				case 6:
					if len(files) > 0 {
						v.change(files[rand.IntN(len(files))], func(c *Change, row *schema.Inode) {
							before := *row
							row.Size, row.UID = rand.Int64N(1000), rand.Uint32N(3)
							c.Recharge(&before, row)
						})
					}
				}
				tree := v.trees[rand.IntN(shards)]
				if step%7 == 0 {
					if err := tree.Propagate(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if step%10 != 0 {
					continue
				}
				d := dir()
				if got, err := tree.Of(t.Context(), d); err != nil || got != v.below(d) {
					t.Fatalf("step %d: directory %d has %+v (%v), there is %+v", step, d, got, err, v.below(d))
				}
			}
			if _, err := v.trees[0].Of(t.Context(), layout.RootID); err != nil {
				t.Fatal(err)
			}
			if n := v.count(schema.PrefixDirty); n > 0 {
				t.Errorf("%d directories are dirty after all have told", n)
			}
		})
	}
}

// TestRun has news reach the root without anybody asking.
func TestRun(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			v := newVolume(t, shards)
			ctx, cancel := context.WithCancel(t.Context())
			for _, tree := range v.trees {
				go tree.Run(ctx) // ends with ctx
			}
			at := layout.FileID(layout.RootID)
			for range 5 {
				at = v.dir(at)
			}
			v.file(at, 100)
			for _, tree := range v.trees {
				tree.Soon()
			}
			wait := 2 * period
			if shards > 1 {
				wait = 12 * (lookEvery + period) // the path may change the shard in each directory, and a pass may just be over
			}
			time.Sleep(wait)
			counters, err := schema.ReadCounters(ctx, v.engine, layout.RootID)
			if want := (Sum{Bytes: 100, Files: 1, Dirs: 5}); err != nil || totalOf(counters) != want {
				t.Errorf("%d shards: the root has been told %+v (%v), want %+v", shards, totalOf(counters), err, want)
			}
			cancel()
			synctest.Wait()
		})
	}
}
