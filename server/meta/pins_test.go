package meta

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// near and far are data servers, one of them on the host of the clients.
var near, far = layout.DeviceID{1}, layout.DeviceID{2}

// copyOn is a data file on a server.
func copyOn(id layout.DeviceID) []schema.DataFile {
	return []schema.DataFile{{Device: id, Number: uint64(id[0]), Handle: id[:1], UID: 1000, GID: 1000}}
}

// whole makes a file that client has open, with these copies.
func whole(t *testing.T, h *host, c *client, name string, copies ...[]schema.DataFile) layout.FileID {
	t.Helper()
	id := c.create(layout.RootID, name)
	setLayout(t, h, id, schema.Layout{StripeUnit: testUnit, Width: len(copies[0]), Mirrors: copies})
	return id
}

func setLayout(t *testing.T, h *host, id layout.FileID, row schema.Layout) {
	t.Helper()
	put(t, h, schema.LayoutKey(id), schema.Encode(&row))
}

// pin asks for a copy and reports whether it was pinned.
func (c *client) pin(id layout.FileID, mode layout.IOMode, copies metarpc.Pin) bool {
	c.t.Helper()
	r := must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: mode, Len: 1, Near: []layout.DeviceID{near}, Pin: copies})
	if len(r.Pinned.Handle) > 0 && (r.Pinned.Device != near || r.Pinned.Handle[0] != near[0] || len(r.Segments) == 0) {
		c.t.Errorf("pinned %+v of %+v", r.Pinned, r.Segments)
	}
	return len(r.Pinned.Handle) > 0
}

// pins is how many copies of a file are pinned.
func (h *host) pins(id layout.FileID) int {
	refs, thaw := h.svc.freezePins(id)
	thaw()
	return len(refs)
}

// heldUp is what the status says that a file holds up.
func (c *client) heldUp(id layout.FileID) (what string, hosts []string) {
	for _, held := range must[metarpc.StatusResult](c, metarpc.OpStatus, &metarpc.Empty{}).HeldUp {
		if held.ID == id {
			return held.What, held.Hosts
		}
	}
	return "", nil
}

// TestPin pins copies, where that can be.
func TestPin(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(a)()
		defer renewing(b)()
		stale := copyOn(near)
		stale[0].State = layout.CopyStale
		for _, c := range []struct {
			name      string
			row       schema.Layout
			read, any bool // can it be pinned as the only copy, or as one of several
		}{
			{"one copy", schema.Layout{Width: 1, Mirrors: [][]schema.DataFile{copyOn(near)}}, true, true},
			{"elsewhere", schema.Layout{Width: 1, Mirrors: [][]schema.DataFile{copyOn(far)}}, false, false},
			{"two copies", schema.Layout{Width: 1, Mirrors: [][]schema.DataFile{copyOn(far), copyOn(near)}}, false, true},
			{"stale", schema.Layout{Width: 1, Mirrors: [][]schema.DataFile{copyOn(far), stale}}, false, false},
			{"moving", schema.Layout{Width: 1, Moving: true, Mirrors: [][]schema.DataFile{copyOn(near), copyOn(far)}}, false, false},
			{"striped", schema.Layout{Width: 2, Mirrors: [][]schema.DataFile{append(copyOn(near), copyOn(far)...)}}, false, false},
			{"striped, short", schema.Layout{Width: 2, Mirrors: [][]schema.DataFile{copyOn(near)}}, false, false},
		} {
			id := a.create(layout.RootID, c.name)
			c.row.StripeUnit = testUnit
			setLayout(t, h, id, c.row)
			for _, ask := range []struct {
				mode   layout.IOMode
				copies metarpc.Pin
				want   bool
			}{{layout.IOModeRead, metarpc.PinOnly, c.read}, {layout.IOModeRead, metarpc.PinAny, c.any}, {layout.IOModeRW, metarpc.PinOnly, c.read}} {
				if got := a.pin(id, ask.mode, ask.copies); got != ask.want || h.pins(id) > 0 != ask.want {
					t.Errorf("%s: pinned for %v, %d: %v, %d pins", c.name, ask.mode, ask.copies, got, h.pins(id))
				}
				a.closeFile(id)
				if h.pins(id) != 0 {
					t.Errorf("%s: pinned when it is closed", c.name)
				}
				must[metarpc.Empty](a, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
				a.open(id)
			}
		}

		// Who has it not open pins nothing, nor does who may not write it for writing.
		one := whole(t, h, a, "one", copyOn(near))
		args := &metarpc.LayoutGetArgs{ID: one, IOMode: layout.IOModeRead, Len: 1, Near: []layout.DeviceID{near}, Pin: metarpc.PinOnly}
		_, err := ask[metarpc.LayoutResult](b, metarpc.OpLayoutGet, args)
		wantStatus(t, err, metarpc.Status(syscall.EBADF))
		must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: one, Access: metarpc.AccessRead})
		args.IOMode = layout.IOModeRW
		_, err = ask[metarpc.LayoutResult](b, metarpc.OpLayoutGet, args)
		wantStatus(t, err, metarpc.Status(syscall.EBADF))
		// It may be closed while it is pinned.
		if h.svc.setPin(h.svc.sessions[b.welcome.Session], 12345, metarpc.CopyRef{Device: near, Handle: near[:1]}, false) {
			t.Error("pinned a file that nobody has open")
		}

		// One copy can be written by all; of several none is pinned as long as somebody may write.
		two := whole(t, h, a, "two", copyOn(near), copyOn(far))
		b.open(one)
		b.open(two)
		for _, id := range []layout.FileID{one, two} {
			must[metarpc.LayoutResult](b, metarpc.OpLayoutGet, rw(id))
			if got := a.pin(id, layout.IOModeRead, metarpc.PinAny); got != (id == one) {
				t.Errorf("inode %d is pinned while it is written: %v", id, got)
			}
		}
		must[metarpc.Empty](b, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{two}})
		if !a.pin(two, layout.IOModeRead, metarpc.PinAny) {
			t.Error("not pinned when nobody writes any more")
		}

		// Not while somebody relies on it that nothing is.
		if !b.pin(one, layout.IOModeRead, metarpc.PinAny) || h.pins(one) != 2 {
			t.Errorf("%d pins of two sessions", h.pins(one))
		}
		b.closeFile(one)
		b.open(one)
		if h.pins(one) != 1 {
			t.Error("pinned by a session that has opened it again")
		}
		_, thaw := h.svc.freezePins(one)
		if b.pin(one, layout.IOModeRead, metarpc.PinAny) {
			t.Error("pinned while it is frozen")
		}
		thaw()
		// Nor while it is cut.
		release := h.files.hold()
		hdr, ch := b.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: one, Mask: metarpc.SetSize, Size: 0})
		synctest.Wait()
		if b.pin(one, layout.IOModeRead, metarpc.PinAny) {
			t.Error("pinned while it is cut")
		}
		release()
		if err := b.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		if !b.pin(one, layout.IOModeRead, metarpc.PinAny) {
			t.Error("not pinned when it is cut")
		}

		// The end of a session takes its pins along.
		must[metarpc.Empty](b, metarpc.OpEndSession, &metarpc.Empty{})
		synctest.Wait()
		if h.pins(one) != 1 {
			t.Errorf("%d pins when one of two sessions has ended", h.pins(one))
		}
	})
}

// TestPinnedCopyIsKept reports a pinned copy that cannot be written: it stays good until it is not pinned any more, and that is told.
func TestPinnedCopyIsKept(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader, writer := h.client(), h.client()
		defer renewing(reader)()
		defer renewing(writer)()
		id := whole(t, h, reader, "f", copyOn(near), copyOn(far))
		if !reader.pin(id, layout.IOModeRead, metarpc.PinAny) {
			t.Fatal("not pinned")
		}
		writer.open(id)
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(id))
		ref := func(id layout.DeviceID) metarpc.CopyRef { return metarpc.CopyRef{Device: id, Handle: id[:1]} }
		report := func(copies ...metarpc.CopyRef) []metarpc.CopyRef {
			must[metarpc.Empty](writer, metarpc.OpLayoutError, &metarpc.LayoutErrorArgs{ID: id, Copies: copies, Reason: "EIO"})
			h.files.mu.Lock()
			defer h.files.mu.Unlock()
			stale := h.files.stale
			h.files.stale = nil
			return stale
		}
		if stale := report(ref(near)); len(stale) != 0 {
			t.Errorf("%+v is stale", stale)
		}
		if what, hosts := writer.heldUp(id); what == "" || !slices.Equal(hosts, []string{"test"}) {
			t.Errorf("held up: %q by %q", what, hosts)
		}
		if stale := report(ref(near), ref(far)); len(stale) != 1 || stale[0].Device != far {
			t.Errorf("%+v is stale, want the copy that is not pinned", stale)
		}
		reader.closeFile(id)
		if what, _ := writer.heldUp(id); what != "" {
			t.Errorf("held up when it is closed: %q", what)
		}
		if stale := report(ref(near)); len(stale) != 1 {
			t.Errorf("%+v is stale when it is not pinned any more", stale)
		}
	})
}

// TestFenceWaitsForPins loses a client that was writing: if the file has several copies nobody decides between them as long as
// one is pinned.
func TestFenceWaitsForPins(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader, dead := h.client(), h.client()
		defer renewing(reader)()
		files := []layout.FileID{whole(t, h, reader, "one", copyOn(near)), whole(t, h, reader, "two", copyOn(near), copyOn(far))}
		var before []uint32
		for _, id := range files {
			if !reader.pin(id, layout.IOModeRead, metarpc.PinAny) {
				t.Fatal("not pinned")
			}
			dead.open(id)
			must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(id))
			before = append(before, h.owner(t, id))
		}
		dead.drop()
		time.Sleep(3 * h.lease)
		synctest.Wait()
		if h.owner(t, files[0]) == before[0] {
			t.Error("a file with one copy is not fenced")
		}
		if h.owner(t, files[1]) != before[1] {
			t.Error("a file of which a copy is pinned is fenced")
		}
		if what, hosts := reader.heldUp(files[1]); what == "" || len(hosts) != 1 {
			t.Errorf("held up: %q by %q", what, hosts)
		}
		reader.closeFile(files[1])
		synctest.Wait()
		if h.owner(t, files[1]) == before[1] {
			t.Error("not fenced when nothing is pinned any more")
		}
		if what, _ := reader.heldUp(files[1]); what != "" {
			t.Errorf("still held up: %q", what)
		}
	})
}

// TestGrowPinned makes files longer: data files that are read by kernels become longer, too.
func TestGrowPinned(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader, other := h.client(), h.client()
		id := whole(t, h, reader, "f", copyOn(near))
		grow := func(size int64) int64 {
			must[metarpc.AttrResult](other, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: size})
			h.files.mu.Lock()
			defer h.files.mu.Unlock()
			return h.files.grown
		}
		if to := grow(100); to != 0 {
			t.Errorf("data files that nobody has pinned are made %d bytes long", to)
		}
		reader.pin(id, layout.IOModeRead, metarpc.PinOnly)
		if to := grow(200); to != 200 {
			t.Errorf("the data file is made %d bytes long, want 200", to)
		}
	})
}

// TestGrowPinnedRestart kills the service between the intent of a size and the growth of the data file, or of the cache, that a kernel reads:
// it grows, though the next instance does not know yet that it is pinned.
func TestGrowPinnedRestart(t *testing.T) {
	for _, c := range []struct {
		name   string
		row    schema.Layout
		number uint64 // of the data file that grows
	}{
		{"data file", schema.Layout{Width: 1, Mirrors: [][]schema.DataFile{copyOn(near)}}, 1},
		{"cache", schema.Layout{Width: 2, Mirrors: [][]schema.DataFile{append(copyOn(far), copyOn(far)...)}, Caches: []schema.Cache{{File: copyOn(near)[0], Bytes: 100}}}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				reader, other := h.client(), h.client()
				id := reader.create(layout.RootID, "f")
				c.row.StripeUnit = testUnit
				setLayout(t, h, id, c.row)
				if !reader.pin(id, layout.IOModeRead, metarpc.PinAny) {
					t.Fatal("not pinned")
				}
				h.files.hold()
				other.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: 200})
				h.files.awaitStalled(1)
				h.restart()
				h.files.mu.Lock()
				before := h.files.grown
				close(h.files.stall)
				h.files.stall = nil
				h.files.mu.Unlock()
				synctest.Wait()
				if n := countRows(t.Context(), h.engine, schema.PrefixTruncate); n != 0 {
					t.Errorf("%d intents left", n)
				}
				h.files.mu.Lock()
				defer h.files.mu.Unlock()
				for number := range uint64(3) {
					want := int64(0)
					if number == c.number {
						want = 200
					}
					if got := h.files.length[number]; got != want {
						t.Errorf("data file %d has %d bytes, want %d; the longest before the restart %d", number, got, want, before)
					}
				}
			})
		})
	}
}

// TestPinsAfterRestart starts the service again: what was pinned is, as soon as its client is back, and until then nobody takes it
// for free.
func TestPinsAfterRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader, writer := h.client(), h.client()
		id := whole(t, h, reader, "f", copyOn(near), copyOn(far))
		if !reader.pin(id, layout.IOModeRead, metarpc.PinAny) {
			t.Fatal("not pinned")
		}
		writer.open(id)
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(id))
		ref := metarpc.CopyRef{Device: near, Handle: near[:1]}
		h.restart()
		writer.connect()
		defer renewing(writer)()
		must[metarpc.AttrResult](writer, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
		must[metarpc.Empty](writer, metarpc.OpReclaimComplete, &metarpc.Empty{})
		report := &metarpc.LayoutErrorArgs{ID: id, Copies: []metarpc.CopyRef{ref}, Reason: "EIO"}
		_, err := ask[metarpc.Empty](writer, metarpc.OpLayoutError, report)
		wantStatus(t, err, metarpc.StatusGrace)
		reader.connect()
		defer renewing(reader)()
		must[metarpc.AttrResult](reader, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true, Pinned: ref})
		must[metarpc.Empty](reader, metarpc.OpReclaimComplete, &metarpc.Empty{})
		must[metarpc.Empty](writer, metarpc.OpLayoutError, report)
		if len(h.files.stale) != 0 || h.pins(id) != 1 {
			t.Errorf("%+v is stale, %d pins", h.files.stale, h.pins(id))
		}
		reader.closeFile(id)
		must[metarpc.Empty](writer, metarpc.OpLayoutError, report)
		if len(h.files.stale) != 1 {
			t.Errorf("%+v is stale when nothing is pinned", h.files.stale)
		}
	})
}

// TestMoveWaitsForPins moves a file away from a data server when nobody has it pinned any more.
func TestMoveWaitsForPins(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader := h.client()
		defer renewing(reader)()
		id := whole(t, h, reader, "f", copyOn(near))
		reader.pin(id, layout.IOModeRead, metarpc.PinOnly)
		started := func() int {
			h.files.mu.Lock()
			defer h.files.mu.Unlock()
			return h.files.started
		}
		h.files.mu.Lock()
		h.files.moving = id
		h.files.filled = func(context.Context, layout.Range) error { return nil }
		h.files.mu.Unlock()
		time.Sleep(5 * resilverLook)
		synctest.Wait()
		if started() != 0 {
			t.Error("moved while it is pinned")
		}
		if what, hosts := reader.heldUp(id); what == "" || len(hosts) != 1 {
			t.Errorf("held up: %q by %q", what, hosts)
		}
		start := time.Now()
		reader.closeFile(id)
		synctest.Wait()
		if started() != 1 || time.Since(start) != 0 {
			t.Errorf("tried %d times %v after it was closed", started(), time.Since(start))
		}
	})
}

// TestNoCacheOfPassedWrites has a cache asked for of a file that a client's kernel may be writing.
func TestNoCacheOfPassedWrites(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer, reader := h.client(), h.client()
		defer renewing(writer)()
		defer renewing(reader)()
		id := whole(t, h, writer, "f", copyOn(near))
		if !writer.pin(id, layout.IOModeRW, metarpc.PinOnly) {
			t.Fatal("not pinned")
		}
		writer.report(false, metarpc.SizeReport{ID: id, End: 100})
		openRead(reader, id)
		_, err := ask[metarpc.CacheStartResult](reader, metarpc.OpCacheStart, cacheArgs(id))
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		writer.closeFile(id)
		if ref := makeCache(reader, cacheArgs(id)); len(ref.Handle) == 0 {
			t.Error("no cache when it is closed")
		}
	})
}

// TestPinnedCacheInGrace restarts the service while a cache is pinned, and has others do what would drop it before its reader has said so.
func TestPinnedCacheInGrace(t *testing.T) {
	for _, how := range []string{"fence", "drop", "grant"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				reader, writer, other := h.client(), h.client(), h.client()
				f := written(writer, "f", 100)
				ref := makeCache(reader, cacheArgs(f))
				h.pin(reader, f, ref)
				openWrite(writer, f)
				if n := mirrorsOf(writer, f, layout.IOModeRW); n != 2 {
					t.Fatalf("%d mirrors are written", n)
				}
				if how == "fence" { // of the writer, which waits for the pin
					end, end2 := renewing(reader), renewing(other)
					time.Sleep(3 * h.lease)
					synctest.Wait()
					end()
					end2()
				}
				h.restart()
				other.connect()
				defer renewing(other)()
				switch how {
				case "drop":
					openRead(other, f)
					_, err := ask[metarpc.CacheDropResult](other, metarpc.OpCacheDrop, &metarpc.CacheDropArgs{ID: f})
					wantStatus(t, err, metarpc.StatusGrace)
				case "grant":
					writer.connect()
					defer renewing(writer)()
					must[metarpc.AttrResult](writer, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
					writer.begin(metarpc.OpLayoutGet, rw(f))
				}
				synctest.Wait()
				reader.connect()
				defer renewing(reader)()
				must[metarpc.AttrResult](reader, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true, Pinned: ref})
				must[metarpc.Empty](reader, metarpc.OpReclaimComplete, &metarpc.Empty{})
				synctest.Wait()
				if c := h.caches(t, f); len(c) != 1 || c[0].File.State != layout.CopyGood || h.pins(f) != 1 {
					t.Errorf("%d pins, caches %+v", h.pins(f), c)
				}
			})
		})
	}
}

// TestCacheMadeMeanwhile has a cache become good while somebody else who wants it waits for room.
func TestCacheMadeMeanwhile(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(a)()
		defer renewing(b)()
		f := written(a, "f", 100)
		openRead(a, f)
		openRead(b, f)
		done := startCache(a, cacheArgs(f))
		release, err := h.svc.caches.take(t.Context(), devA)
		if err != nil {
			t.Fatal(err)
		}
		hdr, ch := b.begin(metarpc.OpCacheStart, cacheArgs(f))
		synctest.Wait()
		must[metarpc.Empty](a, metarpc.OpCacheDone, done)
		release()
		wantStatus(t, b.finish(hdr, ch, new(metarpc.CacheStartResult)), metarpc.Status(syscall.EBUSY))
		_, _, pending := h.svc.caches.usage(devA)
		if _, ok := h.svc.caches.oldest(devA, 0, nil); !ok || pending != 0 {
			t.Errorf("a good cache counts as being filled: %d bytes", pending)
		}
	})
}
