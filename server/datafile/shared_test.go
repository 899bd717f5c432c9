package datafile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

// memberEngine guards what a member commits by its row.
type memberEngine struct {
	catalog.Engine
	key []byte
}

func (e memberEngine) Commit(ctx context.Context, b *catalog.Batch) error {
	guarded := *b
	guarded.Guards = append(guarded.Guards[:len(b.Guards):len(b.Guards)], catalog.Guard{Kind: catalog.Present, Key: e.key})
	return e.Engine.Commit(ctx, &guarded)
}

// process is a Manager among several. Its world has the catalog and the data servers of all of them.
type process struct {
	*world
	id    [16]byte
	alive atomic.Bool
}

// newProcesses starts so many; the first one collects what dead ones leave.
func newProcesses(t *testing.T, n int) []*process {
	first := &world{t: t, engine: memorytest.New(), net: storetest.New()}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.FormatShards, ID: volume, Shards: 16}))
	first.commit(&b)
	var all []*process
	for i := range n {
		w := first
		if i > 0 {
			w = &world{t: t, engine: first.engine, net: first.net}
		}
		all = append(all, w.member(byte(i+1), i == 0))
	}
	return all
}

// member starts the Manager of a world as a member's.
func (w *world) member(id byte, collects bool) *process {
	p := &process{world: w, id: [16]byte{id}}
	p.alive.Store(true)
	var b catalog.Batch
	b.Put(schema.MemberKey(p.id), schema.Encode(&schema.Member{Format: schema.FormatNewest}))
	w.commit(&b)
	m, err := New(Config{
		Engine: memberEngine{w.engine, schema.MemberKey(p.id)}, Volume: volume, Dial: w.net.Dial, PoolSize: testPool, Log: slog.New(slog.DiscardHandler),
		Member: p.id, Alive: p.alive.Load, Collects: func(layout.DeviceID) bool { return collects },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.m = m
	w.t.Cleanup(func() { m.Close() })
	return p
}

// die ends a process that nobody hears of again.
func (p *process) die() {
	p.m.Close()
	var b catalog.Batch
	b.Delete(schema.MemberKey(p.id))
	p.commit(&b)
}

// add adds a data server through a process.
func (p *process) add(first *process) *storetest.Export {
	e := first.export()
	p.exports = first.exports
	if _, err := p.m.AddDevice(p.t.Context(), e.URL(), false); err != nil {
		p.t.Fatal(err)
	}
	return e
}

// checkAll proves that every data file is in exactly one layout, or in one pool, and that no garbage is left.
func checkAll(ps ...*process) {
	t := ps[0].t
	t.Helper()
	type name struct {
		device layout.DeviceID
		number uint64
	}
	owner := map[name]string{}
	claim := func(n name, who string) {
		if other, taken := owner[n]; taken {
			t.Errorf("data file %v is %s's and %s's", n, other, who)
		}
		owner[n] = who
	}
	inUse := map[layout.DeviceID]int64{}
	for key, value := range ps[0].rows(schema.PrefixLayout) {
		var row schema.Layout
		if err := schema.Decode(value, &row); err != nil {
			t.Fatal(err)
		}
		for _, files := range row.Mirrors {
			for _, f := range files {
				claim(name{f.Device, f.Number}, fmt.Sprint("inode ", schema.IDOf([]byte(key))))
				inUse[f.Device]++
			}
		}
	}
	garbage := ps[0].rows(schema.PrefixGarbage)
	for _, p := range ps {
		for _, d := range p.m.all() {
			for number := range d.held {
				claim(name{d.id, number}, fmt.Sprintf("process %x", p.id[:1]))
				key := string(schema.GarbageKey(d.id, number))
				if row, ok := garbage[key]; !ok || string(row) != string(p.id[:]) {
					t.Errorf("process %x has %x in its pool, whose row is %x %v", p.id[:1], number, row, ok)
				}
				delete(garbage, key)
			}
		}
	}
	for key, value := range garbage {
		t.Errorf("garbage is left: %x of %x", key, value)
	}
	for i := range ps[0].exports {
		d := ps[0].device(i)
		files := dataFiles(ps[0].exports[i])
		for number := range files {
			if _, ok := owner[name{d.id, number}]; !ok {
				t.Errorf("data file %x on export %d is nobody's", number, i)
			}
		}
		for n, who := range owner {
			if _, ok := files[n.number]; n.device == d.id && !ok {
				t.Errorf("data file %x on export %d, which is %s's, is missing", n.number, i, who)
			}
		}
		raw, err := ps[0].engine.Get(t.Context(), schema.InUseKey(d.id))
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			t.Fatal(err)
		}
		if counters, err := catalog.DecodeCounters(raw); err != nil || counters.Field(0) != inUse[d.id] {
			t.Errorf("export %d: counter says %v (%v), %d are in layouts", i, counters, err, inUse[d.id])
		}
	}
}

// Several processes make and remove files at the same time, one dies, another one comes: no data file is given out twice, and nothing is left behind.
func TestSharedPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := rand.Uint64()
		t.Log("seed", seed)
		ps := newProcesses(t, 3)
		for i := range 3 {
			ps[i].add(ps[0])
		}
		for _, p := range ps {
			p.exports = ps[0].exports
		}
		time.Sleep(2 * followPeriod)
		var work sync.WaitGroup
		var rows sync.Map
		for i, p := range ps {
			work.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				for n := range 60 {
					id := layout.FileID(100*(i+1) + n)
					ino := schema.Inode{Mode: 0o100644, Nlink: 1, Policy: schema.PolicyOf(layout.Policy{StripeUnit: 1 << 16, StripeCount: 1 + r.IntN(3), Mirrors: 1 + r.IntN(2)})}
					var b catalog.Batch
					b.Put(schema.InodeKey(id), schema.Encode(&ino))
					if err := p.engine.Commit(t.Context(), &b); err != nil {
						t.Error(err)
					}
					row, err := p.m.Assign(t.Context(), id, ino, 0, 1<<20, session, false, nil, nil)
					if err != nil {
						t.Error(err)
						return
					}
					rows.Store(id, row)
				}
			})
		}
		work.Wait()
		calm()
		checkAll(ps...)
		// Files are removed by other processes than those that made them.
		for i, p := range ps {
			for n := range 30 {
				p.remove(layout.FileID(100*((i+1)%3+1) + n))
			}
		}
		time.Sleep(10 * time.Second)
		checkAll(ps...)
		ps[2].remove(layout.FileID(160 - 1))
		ps[2].die() // with a pool, and with garbage
		late := (&world{t: t, engine: ps[0].engine, net: ps[0].net, exports: ps[0].exports}).member(9, false)
		calm()
		checkAll(ps[0], ps[1], late)
		// What they leave a Manager that is alone finds, as after an export to an embedded engine.
		late.m.Close()
		ps[1].m.Close()
		ps[0].restart()
		calm()
		ps[0].check()
	})
}

// What one process does to devices the others learn.
func TestSharedDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ps := newProcesses(t, 2)
		a, b := ps[0], ps[1]
		for range 3 {
			a.add(a)
		}
		b.exports = a.exports
		// A layout names a device before b has looked again.
		row := a.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 3, Mirrors: 1}, 10<<20)
		if n := len(b.m.all()); n != 0 {
			t.Fatalf("b knows %d devices already", n)
		}
		b.m.Segments(row, layout.IOModeRead)
		if n := len(b.m.Devices(t.Context())); n != 3 {
			t.Errorf("b knows %d devices of a layout", n)
		}
		a.add(a)
		b.exports = a.exports
		if err := b.m.LearnDevices(t.Context()); err != nil {
			t.Error(err)
		}
		if infos := b.m.Devices(t.Context()); len(infos) != 4 || !slices.ContainsFunc(infos, func(i metarpc.DeviceInfo) bool { return i.URL == a.exports[3].URL() }) {
			t.Errorf("b was to learn that there is %s: %+v", a.exports[3].URL(), infos)
		}
		if err := b.m.Truncate(t.Context(), row, 1000); err != nil {
			t.Error(err)
		}
		calm()
		checkAll(ps...)

		// One gets another address.
		moved := a.device(0)
		a.exports[0].Move("10.0.0.77:2049")
		if _, err := a.m.AddDevice(t.Context(), a.exports[0].URL(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * followPeriod)
		if d, err := b.m.device(moved.id); err != nil || d.url() != moved.url() || b.device(0).id != moved.id {
			t.Errorf("b: %v, %v; want it at %v", d.url(), err, moved.url())
		}

		// One is drained and removed; b has a pool there, and files have data.
		gone := a.device(1)
		if _, err := a.m.DrainDevice(t.Context(), gone.id, false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * followPeriod)
		if next := b.file(6, layout.Policy{StripeUnit: 1 << 16, StripeCount: 3, Mirrors: 1}, 10<<20); len(b.onDevice(6, gone.id)) != 0 {
			t.Errorf("b has given a file %+v of a device that is drained", next)
		}
		if ids, err := b.m.Moving(t.Context(), 0, 10); err != nil || len(ids) != 1 || ids[0] != 5 {
			t.Errorf("moving for b: %v, %v", ids, err)
		}
		a.remove(5)
		if err := b.m.RemoveDevice(t.Context(), gone.id, false); err != nil {
			t.Fatal(err)
		}
		b.noRows(gone.id)
		time.Sleep(2 * followPeriod)
		a.noRows(gone.id)
		if n := len(dataFiles(a.exports[1])); n != 0 {
			t.Errorf("%d data files are left there", n)
		}
		if err := a.m.RemoveDevice(t.Context(), gone.id, false); err != nil {
			t.Error("removed by another process:", err)
		}
		a.exports = append(a.exports[:1:1], a.exports[2:]...)
		b.exports = a.exports
		calm()
		checkAll(ps...)

		if _, err := a.m.AddDevice(t.Context(), "nvme://10.0.0.9:4420/nqn.2014-08.org.nvmexpress:uuid:1#1", true); !errors.Is(err, errShared) {
			t.Error("a namespace:", err)
		}
	})
}

// TestSharedFewCopies: processes make files, and others go on with them, while one of two data servers is away. The
// catalog gets its format from one of them; when the data server is back another process makes the copies.
func TestSharedFewCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ps := newProcesses(t, 3)
		for range 2 {
			ps[0].add(ps[0])
		}
		for _, p := range ps {
			p.exports = ps[0].exports
		}
		calm()
		ps[0].exports[0].SetDown(true)
		time.Sleep(10 * time.Second)
		policy := layout.Policy{StripeUnit: unit, StripeCount: 2, Mirrors: 2}
		var work sync.WaitGroup
		for i, p := range ps {
			work.Go(func() { // ends with its files
				for n := range layout.FileID(testPool) {
					id := layout.FileID(100*i) + n + 1
					if row := p.file(id, policy, 1); row.GoodCopies(0) != 1 || !p.hasFill(id) {
						t.Errorf("%d: %v", id, states(row))
					}
				}
			})
		}
		work.Wait()
		var volume schema.Volume
		if raw, err := ps[0].engine.Get(t.Context(), schema.KeyVolume); err != nil || schema.Decode(raw, &volume) != nil || volume.Format != schema.FormatCopies {
			t.Errorf("%+v, %v", volume, err)
		}
		ps[0].exports[0].SetDown(false)
		ps[1].die()
		calm()
		// The first one goes on with what the second one has made, and the third one fills it.
		for n := range layout.FileID(testPool) {
			id := 100 + n + 1
			row, err := ps[0].m.Assign(t.Context(), id, ps[0].inode(id, policy), unit, 1, session, false, nil, nil)
			if err != nil {
				t.Fatalf("%d: %v", id, err)
			}
			ps[0].put(row, 0, make([]byte, 2*unit))
		}
		for i := range ps {
			for n := range layout.FileID(testPool) {
				id := layout.FileID(100*i) + n + 1
				if may, err := ps[2].m.MayFill(t.Context(), []layout.FileID{id}); len(may) != 1 || err != nil {
					t.Errorf("%d may be filled: %v, %v", id, may, err)
				}
				if err := ps[2].fill(id, unit, nil); err != nil {
					t.Fatal(err)
				}
				row := ps[2].layoutOf(id)
				if row.Incomplete() || ps[2].hasFill(id) {
					t.Errorf("%d is not complete: %v", id, states(row))
				}
				ps[2].equalCopies(row)
				time.Sleep(10 * time.Second) // until the pools are full
			}
		}
		calm()
		checkAll(ps[0], ps[2])
	})
}

// Several processes are told of the same empty export at the same time: it becomes one device, with one label.
func TestSharedAdd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ps := newProcesses(t, 3)
		ps[0].net.SetHook(func(context.Context, string, bool) error { time.Sleep(time.Millisecond); return nil })
		e := ps[0].export()
		var adding sync.WaitGroup
		for _, p := range ps {
			p.exports = ps[0].exports
			adding.Go(func() {
				for {
					if _, err := p.m.AddDevice(t.Context(), e.URL(), false); err == nil {
						return
					}
					time.Sleep(100 * time.Millisecond)
				}
			})
		}
		adding.Wait()
		labels := 0
		e.Walk(func(path string, attr nfs3.Fattr) {
			if attr.Type == nfs3.TypeReg && strings.Count(path, "/") == 2 && strings.Contains(path, "/device-") {
				labels++
			}
		})
		if labels != 1 {
			t.Errorf("%d labels", labels)
		}
		for _, p := range ps {
			if n := len(p.m.all()); n != 1 {
				t.Errorf("a process knows %d devices", n)
			}
		}
		calm()
		checkAll(ps...)
	})
}

// A process that others may have taken over from sends nothing to data servers.
func TestSharedSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProcesses(t, 1)[0]
		p.add(p)
		row := p.file(5, layout.Policy{StripeUnit: 1 << 16, StripeCount: 1, Mirrors: 1}, 1<<20)
		p.put(row, 0, make([]byte, 3000))
		calm()
		p.alive.Store(false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.m.Truncate(ctx, row, 1000); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if attr := dataFiles(p.exports[0])[row.Mirrors[0][0].Number]; attr.Size != 3000 {
			t.Errorf("the data file has %d bytes", attr.Size)
		}
		p.alive.Store(true)
		if err := p.m.Truncate(t.Context(), row, 1000); err != nil {
			t.Error(err)
		}
		if attr := dataFiles(p.exports[0])[row.Mirrors[0][0].Number]; attr.Size != 1000 {
			t.Errorf("the data file has %d bytes", attr.Size)
		}
	})
}

// A device that has not been reached is known by the name that the administrator has said; clients are told addresses.
func TestAddresses(t *testing.T) {
	h := &hosts{of: map[string][]netip.AddrPort{}}
	h.set("ds", "127.0.0.1:2050", "[::1]:2050")
	m := &Manager{cfg: Config{Resolve: h.resolve}, log: slog.New(slog.DiscardHandler)}
	got := m.addresses(t.Context(), []string{"192.0.2.1:2049", "ds:2050", "[2001:db8::1]:2049", "none:2049"})
	if want := []string{"192.0.2.1:2049", "127.0.0.1:2050", "[::1]:2050", "[2001:db8::1]:2049"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
