package datafile

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// layoutOf reads a file's layout row.
func (w *world) layoutOf(id layout.FileID) (row schema.Layout) {
	w.t.Helper()
	raw, err := w.engine.Get(w.t.Context(), schema.LayoutKey(id))
	if err == nil {
		err = schema.Decode(raw, &row)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return row
}

// owned checks that each data file of a layout belongs to whom the layout says, and returns the owners.
func (w *world) owned(row schema.Layout) (owners []layout.Credential) {
	w.t.Helper()
	for _, files := range row.Mirrors {
		for _, f := range files {
			for j := range w.exports {
				if w.device(j).id != f.Device {
					continue
				}
				attr := dataFiles(w.exports[j])[f.Number]
				if attr.UID != f.UID || attr.GID != f.GID || attr.Mode != 0o640 {
					w.t.Errorf("data file %d on export %d: %d:%d, mode %o, the layout says %d:%d", f.Number, j, attr.UID, attr.GID, attr.Mode, f.UID, f.GID)
				}
			}
			owners = append(owners, layout.Credential{UID: f.UID, GID: f.GID})
		}
	}
	return owners
}

func TestFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		row := w.file(5, layout.Policy{StripeCount: 4}, 10*unit)
		before := w.owned(row)
		fenced := func() []layout.Credential {
			t.Helper()
			if err := w.m.Fence(t.Context(), 5); err != nil {
				t.Fatal(err)
			}
			after := w.owned(w.layoutOf(5))
			for i := range after {
				if after[i].UID == before[i].UID || after[i].GID == before[i].GID {
					t.Errorf("data file %d is still of %v", i, after[i])
				}
			}
			return after
		}
		before = fenced()
		before = fenced()

		// While a server is away the others' data files are fenced, and are known to be.
		w.exports[0].SetDown(true)
		down := w.device(0).id
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := w.m.Fence(ctx, 5); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("server away: %v", err)
		}
		i := 0
		for _, files := range w.layoutOf(5).Mirrors {
			for _, f := range files {
				if same := f.UID == before[i].UID; same != (f.Device == down) {
					t.Errorf("data file %d: same owner %t", i, same)
				}
				i++
			}
		}
		before = w.owned(w.layoutOf(5))
		time.AfterFunc(time.Minute, func() { w.exports[0].SetDown(false) })
		before = fenced()

		// A wider layout comes while a fence waits: it waits too, and has the new owners.
		w.inode(6, layout.Policy{StripeCount: 4})
		narrow := w.file(6, layout.Policy{StripeCount: 4}, 1)
		for j := range w.exports {
			if w.device(j).id == narrow.Mirrors[0][0].Device {
				w.exports[j].SetDown(true)
				time.AfterFunc(time.Minute, func() { w.exports[j].SetDown(false) })
			}
		}
		fencing := make(chan error, 1)
		go func() { fencing <- w.m.Fence(t.Context(), 6) }()
		synctest.Wait()
		wide, err := w.m.Assign(t.Context(), 6, w.inode(6, layout.Policy{StripeCount: 4}), 0, 10*unit, session, false, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := <-fencing; err != nil {
			t.Error(err)
		}
		if wide.Mirrors[0][0].UID == narrow.Mirrors[0][0].UID {
			t.Error("a layout with the old owner")
		}
		w.owned(wide)

		// Of no data files, and of a file that is removed meanwhile.
		w.inode(7, layout.Policy{})
		if err := w.m.Fence(t.Context(), 7); err != nil {
			t.Errorf("no data files: %v", err)
		}
		w.exports[1].SetDown(true)
		go func() { fencing <- w.m.Fence(t.Context(), 5) }()
		synctest.Wait()
		w.remove(5)
		w.exports[1].SetDown(false)
		if err := <-fencing; err != nil && !errors.Is(err, nfs3.ErrStale) {
			t.Errorf("removed: %v", err)
		}
		calm()
		w.check()
	})
}

// A fence that is executed late must not undo a later one: it is bound to the state of the file in which it was sent.
func TestLateFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		row := w.file(5, layout.Policy{}, unit)
		server, handle := w.server(0), row.Mirrors[0][0].Handle
		calls, busy := 0, 1
		w.net.SetHook(func(ctx context.Context, call string, after bool) error {
			if call != "SETATTR" || after || calls > 2*busy {
				return nil
			}
			if calls++; calls%2 == 1 && calls < 2*busy {
				return server.SetAttr(ctx, handle, nfs3.Sattr{SetSize: true, Size: 70}, nil) // a write gets in between
			}
			return nil
		})
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if calls != 3 { // the fence, the write, the fence again
			t.Errorf("%d calls: the first fence was not refused", calls)
		}
		first := w.owned(w.layoutOf(5))[0]

		// Somebody who writes all the time does not keep it away.
		calls, busy = 0, 1000
		if err := w.m.Fence(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		if w.owned(w.layoutOf(5))[0] == first {
			t.Error("not fenced")
		}
	})
}

// TestOwners: both numbers of an owner are drawn, each from 31 bits.
func TestOwners(t *testing.T) {
	if bits := 2 * math.Log2(lastID-firstID); math.Round(bits) < 62 {
		t.Errorf("owners have %.1f bits, want 62", bits)
	}
	const draws = 4096
	var ones, same [31]int
	for range draws {
		o := randomOwner()
		for _, id := range []uint32{o.UID, o.GID} {
			if id < firstID || id >= lastID {
				t.Fatalf("owner %+v", o)
			}
		}
		for bit := range ones {
			ones[bit] += int(o.UID >> bit & 1)
			same[bit] += int(^(o.UID ^ o.GID) >> bit & 1)
		}
	}
	for bit := range ones {
		if n := ones[bit]; n < draws*2/5 || n > draws*3/5 {
			t.Errorf("bit %d is set in %d of %d users", bit, n, draws)
		}
		if n := same[bit]; n < draws*2/5 || n > draws*3/5 {
			t.Errorf("bit %d of the group is that of the user in %d of %d owners", bit, n, draws)
		}
	}
}
