package fsck

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/server/schema"
)

// disk is a namespace.
type disk struct {
	id    extent.Identity
	block int64
	data  []byte
	dead  error
}

func (d *disk) Identity() extent.Identity { return d.id }
func (d *disk) Block() int64              { return d.block }
func (d *disk) Size() int64               { return int64(len(d.data)) }
func (d *disk) Close() error              { return nil }

func (d *disk) ReadAt(ctx context.Context, p []byte, off int64) error {
	copy(p, d.data[off:])
	return d.dead
}

func (d *disk) WriteAt(ctx context.Context, p []byte, off int64) error {
	copy(d.data[off:], p)
	return d.dead
}

// The inodes, and the data files of namespaces 0 and 1.
const (
	oneBlock layout.FileID = 10 + iota // 0:1, of which the first block is valid
	striped                            // 0:2 and 1:1, two units each, all valid
	blank                              // 0:3 and 1:2, mirrors without units
	last

	waste = 4 // 0:4, garbage with a unit; 0:9 is no more, and its unit is condemned
	gone  = 9
	mib   = 1 << 20
)

// newSpaces is a volume on two namespaces of 15 units, and nothing of it is damaged.
func newSpaces(t *testing.T) (*tree, []*disk) {
	w := &tree{t: t, engine: memorytest.New()}
	disks := make([]*disk, 2)
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: uncounted, ID: volume}))
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(last)))
	root := schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID}
	b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	b.Add(schema.FilesKey(0), 0, 1)
	w.commit(&b)
	for i := range disks {
		d := &disk{id: extent.Identity{NGUID: [16]byte{1, byte(i)}}, block: 4096, data: make([]byte, 16*mib)}
		disks[i] = d
		ns, err := extent.NewNamespace(d.id, d.block, d.Size(), mib)
		if err != nil {
			t.Fatal(err)
		}
		label := extent.LabelOf(volume, nsID(i), &ns)
		raw := extent.AppendLabel(nil, &label)
		copy(d.data, raw)
		copy(d.data[extent.BackupLabel(d.Size()):], raw)
		b.Reset()
		if err := extent.Add(t.Context(), w.engine, &b, nsID(i), ns); err != nil {
			t.Fatal(err)
		}
		b.Put(schema.DeviceKey(nsID(i)), schema.Encode(&schema.Device{Host: "10.0.0.1", Port: 4420, NQN: fmt.Sprint("nqn.test:", i), NSID: 1, Next: 20}))
		w.commit(&b)
	}
	file := func(i int, number uint64) schema.DataFile {
		return schema.DataFile{Device: nsID(i), Number: number, Handle: handleOf(number)}
	}
	for id, c := range map[layout.FileID]struct {
		size int64
		row  schema.Layout
	}{
		oneBlock: {100, schema.Layout{StripeUnit: unit, Width: 1, Mirrors: [][]schema.DataFile{{file(0, 1)}}}},
		striped:  {4 * mib, schema.Layout{StripeUnit: unit, Width: 2, Mirrors: [][]schema.DataFile{{file(0, 2), file(1, 1)}}}},
		blank:    {0, schema.Layout{StripeUnit: unit, Width: 1, Mirrors: [][]schema.DataFile{{file(0, 3)}, {file(1, 2)}}}},
	} {
		w.add(id, layout.RootID, fmt.Sprint("f", id), syscall.S_IFREG)
		w.do(func(b *catalog.Batch) {
			w.change(b, id, func(row *schema.Inode) { row.Size = c.size })
			b.Put(schema.LayoutKey(id), schema.Encode(&c.row))
			for _, files := range c.row.Mirrors {
				for i := range files {
					b.Add(schema.InUseKey(files[i].Device), 0, 1)
				}
			}
		})
	}
	w.extents(0, 1, layout.Column{}, 100, 4096)
	w.extents(0, 2, layout.Column{Unit: unit, Count: 2}, 4*mib, 4*mib)
	w.extents(1, 1, layout.Column{Unit: unit, Count: 2, Index: 1}, 4*mib, 4*mib)
	w.extents(0, waste, layout.Column{}, mib, 0)
	w.extents(0, gone, layout.Column{}, mib, mib)
	if err := w.space(0).Remove(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	w.do(func(b *catalog.Batch) {
		b.Put(schema.GarbageKey(nsID(0), waste), nil)
		b.Put(schema.GarbageKey(nsID(1), 15), nil)
	})
	return w, disks
}

func nsID(i int) layout.DeviceID { return layout.DeviceID{0x70, byte(i)} }

func (w *tree) space(i int) *extent.Space {
	w.t.Helper()
	s, err := extent.Open(w.t.Context(), w.engine, nsID(i))
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// extents gives a data file space for so many bytes of its file, the first of which become valid.
func (w *tree) extents(i int, number uint64, column layout.Column, n, valid int64) {
	w.t.Helper()
	s := w.space(i)
	g, err := extent.Allocate(w.t.Context(), []extent.Request{{Space: s, Number: number, Column: column, Range: layout.Range{Len: n}}}, nil)
	if err == nil && valid > 0 {
		err = s.Validate(w.t.Context(), number, g[0].Generation, column, []layout.Range{{Len: valid}})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// run checks the volume.
func (w *tree) run(disks []*disk, repair bool) (*Report, error) {
	return w.runWith(disks, Config{Engine: w.engine, Repair: repair})
}

func (w *tree) runWith(disks []*disk, cfg Config) (*Report, error) {
	dial := func(ctx context.Context, is [16]byte, row *schema.Device) (Namespace, error) {
		if is != volume {
			w.t.Errorf("volume %x", is)
		}
		for i, d := range disks {
			if row.NQN == fmt.Sprint("nqn.test:", i) && row.NSID == 1 {
				return d, nil
			}
		}
		return nil, errors.New("no such namespace")
	}
	cfg.DialNamespace, cfg.Log, cfg.Timeout = dial, silent, time.Minute
	return Check(w.t.Context(), cfg)
}

func (w *tree) changeDevice(i int, f func(*schema.Device)) {
	w.t.Helper()
	var row schema.Device
	w.row(schema.DeviceKey(nsID(i)), &row)
	f(&row)
	w.do(func(b *catalog.Batch) { b.Put(schema.DeviceKey(nsID(i)), schema.Encode(&row)) })
}

func (w *tree) put(key []byte, row any) {
	w.do(func(b *catalog.Batch) { b.Put(key, schema.Encode(row)) })
}

var spaceDamages = []struct {
	name   string
	do     func(w *tree, disks []*disk)
	want   map[Kind]int64
	inode  layout.FileID // of one of the problems
	left   bool          // there is no repair
	repair func(w *tree, disks []*disk)
}{
	{name: "nothing", do: func(*tree, []*disk) {}, want: map[Kind]int64{}},
	{
		name: "data file that no layout has",
		do:   func(w *tree, _ []*disk) { w.extents(1, 7, layout.Column{}, mib, mib) },
		want: map[Kind]int64{OrphanDataFile: 1},
		repair: func(w *tree, _ []*disk) {
			if !w.has(schema.GarbageKey(nsID(1), 7)) {
				w.t.Error("it is no garbage")
			}
		},
	},
	{
		name: "data file with a number that was never taken",
		do:   func(w *tree, _ []*disk) { w.extents(1, 1<<40, layout.Column{}, mib, 0) },
		want: map[Kind]int64{OrphanDataFile: 1, NextNumber: 1},
	},
	{
		name: "condemned units of a number that was never taken",
		do: func(w *tree, _ []*disk) {
			w.extents(1, 30, layout.Column{}, mib, 0)
			if err := w.space(1).Remove(w.t.Context(), 30); err != nil {
				w.t.Fatal(err)
			}
		},
		want: map[Kind]int64{NextNumber: 1},
	},
	{
		name: "garbage that a layout has",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.GarbageKey(nsID(0), 2), nil) })
		},
		want: map[Kind]int64{GarbageInUse: 1}, inode: striped,
	},
	{
		name: "layout gone",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Delete(schema.LayoutKey(striped)) })
		},
		want: map[Kind]int64{OrphanDataFile: 2, InUse: 2},
	},
	{
		name: "data file of two files",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, blank, func(row *schema.Layout) { row.Mirrors[1][0] = w.layout(striped).Mirrors[0][1] })
			})
		},
		want: map[Kind]int64{SharedDataFile: 1}, inode: blank,
		repair: func(w *tree, _ []*disk) {
			if f := w.layout(blank).Mirrors[1][0]; f.Number != 20 || !slices.Equal(f.Handle, handleOf(20)) || f.State != layout.CopyStale {
				w.t.Errorf("%+v", f)
			}
			if end, err := w.space(1).Size(w.t.Context(), 1); end != 4*mib || err != nil {
				w.t.Errorf("%d, %v", end, err)
			}
		},
	},
	{
		name: "handle of another data file",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) {
				w.changeLayout(b, oneBlock, func(row *schema.Layout) { row.Mirrors[0][0].Handle = handleOf(2) })
			})
		},
		want: map[Kind]int64{StaleHandle: 1}, inode: oneBlock,
		repair: func(w *tree, _ []*disk) {
			if f := w.layout(oneBlock).Mirrors[0][0]; !slices.Equal(f.Handle, handleOf(1)) {
				w.t.Errorf("%x", f.Handle)
			}
		},
	},
	{
		name: "wrong count of data files",
		do:   func(w *tree, _ []*disk) { w.do(func(b *catalog.Batch) { b.Add(schema.InUseKey(nsID(1)), 0, 2) }) },
		want: map[Kind]int64{InUse: 1},
	},
	{
		name: "valid beyond the size",
		do:   func(w *tree, _ []*disk) { w.extents(0, 1, layout.Column{}, 3*4096, 3*4096) },
		want: map[Kind]int64{BeyondSize: 1}, inode: oneBlock,
		repair: func(w *tree, _ []*disk) {
			if size := w.inode(oneBlock).Size; size != 3*4096 {
				w.t.Errorf("%d bytes", size)
			}
		},
	},
	{
		name: "valid beyond the size, while somebody writes",
		do: func(w *tree, _ []*disk) {
			w.extents(0, 1, layout.Column{}, 3*4096, 3*4096)
			w.do(func(b *catalog.Batch) {
				b.Put(schema.WriterKey(oneBlock, session), nil)
				b.Put(schema.SessionKey(session), schema.Encode(&schema.Session{}))
			})
		},
		want: map[Kind]int64{},
	},
	{
		name: "map of free units gone",
		do:   func(w *tree, _ []*disk) { w.do(func(b *catalog.Batch) { b.Delete(schema.UnitsKey(nsID(0), 0)) }) },
		want: map[Kind]int64{Kind(extent.FreeUnits): 1},
	},
	{
		name: "units that nobody has",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.UnitsKey(nsID(1), 0), slices.Repeat([]byte{0xff}, 8)) })
		},
		want: map[Kind]int64{Kind(extent.LostUnits): 1},
	},
	{
		name: "no map of free units",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.UnitsKey(nsID(0), 0), []byte("?")) })
		},
		want: map[Kind]int64{Kind(extent.BadGroup): 1},
	},
	{
		name: "counters of units",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Add(schema.SpaceKey(nsID(0)), schema.SpaceTaken, 1) })
		},
		want: map[Kind]int64{Kind(extent.SpaceCounters): 1},
	},
	{
		name: "row of a data file",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.ExtentFileKey(nsID(0), 2), []byte("?")) })
		},
		want: map[Kind]int64{Kind(extent.FileRow): 1}, inode: striped,
	},
	{
		name: "row of condemned units",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.CondemnedKey(nsID(0), 3, 1, 15), []byte("?")) })
		},
		want: map[Kind]int64{Kind(extent.BadCondemned): 1}, inode: blank,
	},
	{
		name: "condemned, and a data file's",
		do: func(w *tree, _ []*disk) {
			list, _, err := w.space(0).Lookup(w.t.Context(), 2, layout.Range{Len: mib}, layout.IOModeRW, 1)
			if err != nil {
				w.t.Fatal(err)
			}
			w.put(schema.CondemnedKey(nsID(0), gone, 9, list[0].Addr/mib), &schema.Condemned{Count: 1})
			w.do(func(b *catalog.Batch) { b.Add(schema.SpaceKey(nsID(0)), schema.SpaceCondemned, 1) })
		},
		want: map[Kind]int64{Kind(extent.BadCondemned): 1},
	},
	{
		name: "unit of two data files, without data",
		do: func(w *tree, _ []*disk) {
			list, _, err := w.space(0).Lookup(w.t.Context(), 2, layout.Range{Len: mib}, layout.IOModeRW, 1)
			if err != nil {
				w.t.Fatal(err)
			}
			run := schema.ExtentRun{At: 0, Unit: list[0].Addr / mib, Count: 1, Generation: 1}
			w.put(schema.ExtentsKey(nsID(0), 3, 0), &schema.Extents{Runs: []schema.ExtentRun{run}})
			w.put(schema.ExtentFileKey(nsID(0), 3), &schema.ExtentFile{Generation: 1, Units: 1})
			w.do(func(b *catalog.Batch) { b.Add(schema.SpaceKey(nsID(0)), schema.SpaceTaken, 1) })
		},
		want: map[Kind]int64{Kind(extent.SharedUnits): 1}, inode: blank,
	},
	{
		name: "extents that cannot be read",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.ExtentsKey(nsID(0), 2, 9), []byte("?")) })
		},
		want: map[Kind]int64{Kind(extent.BadExtents): 1}, inode: striped, left: true,
	},
	{
		name: "extents gone",
		do: func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) {
				b.Delete(schema.ExtentsKey(nsID(0), 1, 0))
				b.Delete(schema.ExtentFileKey(nsID(0), 1))
			})
		},
		want: map[Kind]int64{Kind(extent.LostUnits): 1, Kind(extent.SpaceCounters): 1},
	},
	{
		name: "row of a namespace gone",
		do:   func(w *tree, _ []*disk) { w.do(func(b *catalog.Batch) { b.Delete(schema.NamespaceKey(nsID(1))) }) },
		want: map[Kind]int64{NamespaceRow: 1},
		repair: func(w *tree, _ []*disk) {
			if ns := w.space(1).Namespace(); ns.Unit != mib || ns.Size != 16*mib || ns.NGUID[1] != 1 {
				w.t.Errorf("%+v", ns)
			}
		},
	},
	{
		name: "rows of a namespace that there is not",
		do: func(w *tree, _ []*disk) {
			ns := w.space(0).Namespace()
			w.put(schema.NamespaceKey(nsID(5)), &ns)
			w.put(schema.ExtentFileKey(nsID(5), 1), &schema.ExtentFile{})
			w.put(schema.CondemnedKey(nsID(6), 1, 1, 1), &schema.Condemned{Count: 1})
			w.do(func(b *catalog.Batch) {
				b.Put(schema.UnitsKey(nsID(5), 0), make([]byte, 8))
				b.Put(schema.SpaceKey(nsID(5)), catalog.EncodeCounters(1))
			})
		},
		want: map[Kind]int64{StrayRow: 5},
	},
	{
		name: "device gone",
		do:   func(w *tree, _ []*disk) { w.do(func(b *catalog.Batch) { b.Delete(schema.DeviceKey(nsID(1))) }) },
		want: map[Kind]int64{BadLayout: 2, StrayRow: 6}, left: true,
		repair: func(w *tree, _ []*disk) {
			if end, err := w.space(1).Size(w.t.Context(), 1); end != 4*mib || err != nil {
				w.t.Errorf("extents of a file are gone: %d, %v", end, err)
			}
		},
	},
	{
		name: "format of before",
		do: func(w *tree, _ []*disk) {
			w.put(schema.KeyVolume, &schema.Volume{Format: uncounted, ID: volume})
		},
		want: map[Kind]int64{Format: 1},
	},
	{
		name: "first label gone",
		do:   func(_ *tree, disks []*disk) { clear(disks[0].data[:extent.LabelSize]) },
		want: map[Kind]int64{Label: 1},
		repair: func(w *tree, disks []*disk) {
			l, err := extent.ParseLabel(disks[0].data)
			if err != nil || l.Generation != 2 || w.space(0).Namespace().Label != 2 {
				w.t.Errorf("%+v, %v", l, err)
			}
		},
	},
	{
		name: "second label damaged",
		do:   func(_ *tree, disks []*disk) { disks[1].data[extent.BackupLabel(16*mib)+30]++ },
		want: map[Kind]int64{Label: 1},
	},
	{
		name: "label of an earlier row",
		do: func(w *tree, _ []*disk) {
			ns := w.space(0).Namespace()
			ns.Label = 7
			w.put(schema.NamespaceKey(nsID(0)), &ns)
		},
		want: map[Kind]int64{Label: 1},
		repair: func(w *tree, disks []*disk) {
			if l, err := extent.ParseLabel(disks[0].data); err != nil || l.Generation != 8 {
				w.t.Errorf("%+v, %v", l, err)
			}
		},
	},
}

func TestSpaceDamage(t *testing.T) {
	for _, d := range spaceDamages {
		t.Run(strings.ReplaceAll(d.name, " ", "-"), func(t *testing.T) {
			w, disks := newSpaces(t)
			d.do(w, disks)
			before := w.dump()
			check := func(repair bool) *Report {
				t.Helper()
				r, err := w.run(disks, repair)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range r.Spaces {
					if s.Total != 14*mib || s.Total != s.Used+s.Condemned+s.Free {
						t.Errorf("%+v", s)
					}
				}
				return r
			}
			r := check(false)
			if !maps.Equal(r.Counts, d.want) {
				t.Errorf("found %v, want %v: %v", r.Counts, d.want, r.Problems)
			}
			if r.Repaired != 0 || !maps.Equal(before, w.dump()) {
				t.Error("a check changed something")
			}
			if d.inode != 0 && !slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Inode == d.inode && p.Path != "" }) {
				t.Errorf("no problem is about inode %d: %v", d.inode, r.Problems)
			}
			if _, err := json.Marshal(r); err != nil {
				t.Error(err)
			}
			if r := check(true); r.Unrepaired() > 0 != d.left {
				t.Errorf("%d problems left: %v", r.Unrepaired(), r.Problems)
			}
			if r := check(false); !r.Clean() != d.left {
				t.Errorf("after the repair: %v", r.Problems)
			}
			if d.repair != nil {
				d.repair(w, disks)
			}
		})
	}
}

// What is not the namespace that the catalog knows is not looked at, and nothing is written to it.
func TestSpaceCouldNotRun(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(w *tree, disks []*disk)
		want string
	}{
		{"not there", func(w *tree, _ []*disk) { w.changeDevice(1, func(row *schema.Device) { row.NSID = 9 }) }, "nvme://10.0.0.1:4420/nqn.test:1#9: no such namespace"},
		{"does not answer", func(_ *tree, disks []*disk) { disks[0].dead = errors.New("dead") }, "read the label: dead"},
		{"another device", func(w *tree, _ []*disk) {
			w.changeDevice(0, func(row *schema.Device) { row.NQN = "nqn.test:1" })
			w.changeDevice(1, func(row *schema.Device) { row.NQN = "nqn.test:0" })
		}, "it has device"},
		{"blank", func(_ *tree, disks []*disk) { clear(disks[0].data) }, "it has nothing"},
		{"somebody's", func(_ *tree, disks []*disk) { copy(disks[0].data[512:], "EFI PART"); disks[0].data[0] = 1 }, "GPT"},
		{"another volume's", func(w *tree, disks []*disk) {
			ns := w.space(0).Namespace()
			l := extent.LabelOf([16]byte{9}, nsID(0), &ns)
			copy(disks[0].data, extent.AppendLabel(nil, &l))
		}, "of the weft volume"},
		{"a copy", func(_ *tree, disks []*disk) { disks[0].id.NGUID[5] = 5 }, "it is namespace"},
		{"other blocks", func(_ *tree, disks []*disk) { disks[0].block = 512 }, "in blocks of 512"},
		{"another size", func(_ *tree, disks []*disk) {
			disks[0].data = append(disks[0].data, make([]byte, mib)...)
			copy(disks[0].data[extent.BackupLabel(17*mib):], disks[0].data[:extent.LabelSize])
		}, "give it the size"},
		{"row that cannot be read", func(w *tree, _ []*disk) {
			w.do(func(b *catalog.Batch) { b.Put(schema.NamespaceKey(nsID(0)), []byte("?")) })
		}, "corrupt"},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			w, disks := newSpaces(t)
			c.do(w, disks)
			before, head := w.dump(), slices.Clone(disks[0].data[:mib])
			r, err := w.run(disks, true)
			if r != nil || !errors.Is(err, ErrCouldNotRun) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, %v; want %q", r, err, c.want)
			}
			if !maps.Equal(before, w.dump()) || !slices.Equal(head, disks[0].data[:mib]) {
				t.Error("something was changed")
			}
		})
	}
}

// A namespace that a target serves and the service has reserved is reached by fsck, which leaves it as it is.
func TestRealNamespace(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	path := filepath.Join(t.TempDir(), "drive")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 32*mib)); err != nil {
		t.Fatal(err)
	}
	backing, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { backing.Close() })
	target, err := nvmetest.New(nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: "nqn.2024-01.test.weft:0", Serial: "1", AnyHost: true, Namespaces: []nvme.Namespace{{NSID: 1, Backing: backing, BlockSize: 4096, UUID: [16]byte{7}}}}},
		Ports:      []nvme.Port{{ID: 1, Listen: "127.0.0.1:0"}},
		Log:        silent,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Shutdown(ctx) })

	w := &tree{t: t, engine: memorytest.New(), net: storetest.New()}
	w.do(func(b *catalog.Batch) {
		b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: uncounted, ID: volume}))
		b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(last)))
		root := schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID}
		b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
		b.Add(schema.FilesKey(0), 0, 1)
	})
	w.add(oneBlock, layout.RootID, "f", syscall.S_IFREG)
	manage := func() {
		t.Helper()
		w.start()
		if info, err := w.m.AddDevice(ctx, "nvme://"+target.Addr(1)+"/nqn.2024-01.test.weft:0#1", false); err != nil || !info.Reachable {
			t.Fatalf("%+v, %v", info, err)
		}
	}
	manage()
	if _, err := w.m.Assign(ctx, oneBlock, w.inode(oneBlock), 0, 3*mib, session, false, nil, nil); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.do(func(b *catalog.Batch) { b.Delete(schema.WriterKey(oneBlock, session)) })
	check := func(repair bool, want map[Kind]int64) {
		t.Helper()
		r, err := Check(ctx, Config{Engine: w.engine, Repair: repair, Log: silent})
		if err != nil || !maps.Equal(r.Counts, want) {
			t.Fatalf("%+v, %v; want %v", r, err, want)
		}
		if len(r.Spaces) != 1 || r.Spaces[0].Used < 3*mib {
			t.Errorf("%+v", r.Spaces)
		}
	}
	check(false, map[Kind]int64{})
	if _, err := backing.WriteAt(make([]byte, extent.LabelSize), extent.BackupLabel(32*mib)); err != nil {
		t.Fatal(err)
	}
	check(false, map[Kind]int64{Label: 1})
	check(true, map[Kind]int64{Label: 1})
	check(false, map[Kind]int64{})
	manage() // it is the device still
	w.stop()
	check(false, map[Kind]int64{})

	if err := target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	r, err := Check(ctx, Config{Engine: w.engine, Log: silent, Timeout: 2 * time.Second})
	if !errors.Is(err, ErrCouldNotRun) || !strings.Contains(err.Error(), "namespace nvme://127.0.0.1:") {
		t.Errorf("%+v, %v", r, err)
	}
}
