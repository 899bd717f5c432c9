package meta

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

var (
	devA = layout.DeviceID{0xa}
	devB = layout.DeviceID{0xb}
)

// written makes a file of so many bytes that nobody has open or writes any more.
func written(c *client, name string, size int64) layout.FileID {
	c.t.Helper()
	f := c.create(layout.RootID, name)
	if _, err := c.layout(f, 0, size); err != nil {
		c.t.Fatal(err)
	}
	c.report(false, metarpc.SizeReport{ID: f, End: size})
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{f}})
	must[metarpc.Empty](c, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{f}})
	return f
}

func openRead(c *client, f layout.FileID) {
	c.t.Helper()
	must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead})
}

// cacheArgs ask for a cache on devA.
func cacheArgs(f layout.FileID) *metarpc.CacheStartArgs {
	return &metarpc.CacheStartArgs{ID: f, Devices: []layout.DeviceID{devA}, Run: 1}
}

// startCache starts a cache that is to be had, and returns what ends it.
func startCache(c *client, a *metarpc.CacheStartArgs) *metarpc.CacheDoneArgs {
	c.t.Helper()
	r := must[metarpc.CacheStartResult](c, metarpc.OpCacheStart, a)
	if len(r.Segments) != 1 {
		c.t.Fatalf("%+v", r)
	}
	df := r.Segments[0].Mirrors[0][0]
	return &metarpc.CacheDoneArgs{ID: a.ID, Copy: metarpc.CopyRef{Device: df.Device, Handle: df.Handle}}
}

// makeCache makes a cache as a client does that copies at no time.
func makeCache(c *client, a *metarpc.CacheStartArgs) metarpc.CopyRef {
	c.t.Helper()
	openRead(c, a.ID)
	done := startCache(c, a)
	must[metarpc.Empty](c, metarpc.OpCacheDone, done)
	return done.Copy
}

// mirrorsOf is how many mirrors a reader or writer of a file is given.
func mirrorsOf(c *client, f layout.FileID, mode layout.IOMode) int {
	c.t.Helper()
	r := must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: mode, Len: 1})
	return len(r.Segments[0].Mirrors)
}

func openWrite(c *client, f layout.FileID) {
	c.t.Helper()
	must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead | metarpc.AccessWrite})
}

// caches are those in a layout.
func (h *host) caches(t *testing.T, f layout.FileID) []schema.Cache {
	t.Helper()
	return h.files.row(t, f).Caches
}

// settled checks that the rows of caches by device and what is in memory are as the layouts of these files say.
func (h *host) settled(t *testing.T, files ...layout.FileID) {
	t.Helper()
	n, bytes := int64(0), int64(0)
	for _, f := range files {
		for _, c := range h.caches(t, f) {
			n++
			bytes += c.Bytes
		}
	}
	if rows := countRows(t.Context(), h.engine, schema.PrefixCache); rows != n {
		t.Errorf("%d caches have %d rows", n, rows)
	}
	var count, sum int64
	for _, dev := range []layout.DeviceID{devA, devB} {
		c, b, _ := h.svc.caches.usage(dev)
		count, sum = count+c, sum+b
	}
	if count != n || sum != bytes {
		t.Errorf("%d caches of %d bytes count as %d of %d", n, bytes, count, sum)
	}
}

// TestCacheAndWriter has a client write a file that is cached, or being cached: it gets a layout when nobody reads the cache any more.
func TestCacheAndWriter(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		maker, reader, writer := h.client(), h.client(), h.client()
		defer renewing(writer)()
		stop := renewing(reader)
		f := written(writer, "f", 100)
		if r := must[metarpc.CacheStartResult](writer, metarpc.OpCacheStart, cacheArgs(opened(writer, "empty"))); r.Cached || r.Segments != nil {
			t.Errorf("cache of nothing: %+v", r)
		}
		if _, err := ask[metarpc.CacheStartResult](maker, metarpc.OpCacheStart, cacheArgs(f)); err == nil {
			t.Error("a cache of a file that is not open")
		}
		ref := makeCache(maker, cacheArgs(f))
		h.settled(t, f)
		if r := must[metarpc.CacheStartResult](maker, metarpc.OpCacheStart, cacheArgs(f)); !r.Cached {
			t.Errorf("once more: %+v", r)
		}
		openRead(reader, f)
		if n := mirrorsOf(reader, f, layout.IOModeRead); n != 2 {
			t.Errorf("readers get %d mirrors", n)
		}
		var heard hearer
		heard.hold = make(chan struct{})
		heard.listen(reader)
		openWrite(writer, f)
		hdr, ch := writer.begin(metarpc.OpLayoutGet, rw(f))
		synctest.Wait()
		if heard.count() != 1 || !sameCopy(heard.copies[0], ref) {
			t.Errorf("the reader hears of %v", heard.copies)
		}
		if c := h.caches(t, f); len(c) != 1 || c[0].File.State != layout.CopyStale {
			t.Errorf("before all have been told: %+v", c)
		}
		select {
		case <-ch:
			t.Error("a layout for writing while somebody may read the cache")
		default:
		}
		close(heard.hold)
		var got metarpc.LayoutResult
		if err := writer.finish(hdr, ch, &got); err != nil || len(got.Segments[0].Mirrors) != 1 {
			t.Errorf("%+v, %v", got, err)
		}
		h.settled(t, f)
		if len(h.caches(t, f)) != 0 {
			t.Error("the cache is still there")
		}
		heard.mu.Lock()
		heard.hold = nil
		heard.mu.Unlock()

		// While it is copied the file is written: that is the end of the copy. The writer has its layouts taken back before.
		done := startCache(maker, cacheArgs(f))
		if must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f)); len(h.caches(t, f)) != 0 {
			t.Error("a cache is filled while the file is written")
		}
		_, err := ask[metarpc.Empty](maker, metarpc.OpCacheDone, done)
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		h.settled(t, f)

		// Who cannot be told is waited for until he relies on nothing any more.
		must[metarpc.Empty](writer, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{f}})
		must[metarpc.Empty](maker, metarpc.OpCacheDone, startCache(maker, cacheArgs(f)))
		defer renewing(maker)()
		stop()
		reader.drop()
		start := time.Now()
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		if took := time.Since(start); took < h.lease/2 || took > 3*h.lease {
			t.Errorf("granted after %v", took)
		}
	})
}

// opened makes an empty file that is open.
func opened(c *client, name string) layout.FileID { return c.create(layout.RootID, name) }

// TestCacheAndLostWriter loses a client that has written a file while a cache of it is begun: there is one only when it cannot write any
// more and is known to have written what it has; and what was being filled before it wrote goes.
func TestCacheAndLostWriter(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		maker, reader, writer, other := h.client(), h.client(), h.client(), h.client()
		defer renewing(maker)()
		defer renewing(reader)()
		defer renewing(other)()
		f, g := written(other, "f", 100), written(other, "g", 100)
		dead := make(chan struct{})
		defer close(dead)
		writer.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
			<-dead
			return metarpc.StatusOK
		}
		for _, id := range []layout.FileID{f, g} {
			openRead(maker, id)
			openRead(reader, id)
			openWrite(writer, id)
		}
		filling := startCache(maker, cacheArgs(g))
		for _, id := range []layout.FileID{f, g} {
			if n := mirrorsOf(writer, id, layout.IOModeRW); n != 1 {
				t.Errorf("the writer of %d has %d mirrors", id, n)
			}
			h.files.write(t, id, 300)
		}
		before := []uint32{h.owner(t, f), h.owner(t, g)}
		hdr, ch := maker.begin(metarpc.OpCacheStart, cacheArgs(f))
		synctest.Wait()
		writer.drop() // so the recall is never answered
		_, err := ask[metarpc.Empty](maker, metarpc.OpCacheDone, filling)
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		if n := mirrorsOf(reader, g, layout.IOModeRead); n != 1 || len(h.caches(t, g)) != 0 {
			t.Errorf("a cache that was being filled: readers have %d mirrors, %d caches", n, len(h.caches(t, g)))
		}
		var first metarpc.CacheStartResult
		refused := maker.finish(hdr, ch, &first)
		for n, id := range []layout.FileID{f, g} {
			r, err := first, refused
			if id == g {
				r, err = ask[metarpc.CacheStartResult](maker, metarpc.OpCacheStart, cacheArgs(id))
			}
			for try := 0; err != nil; try++ {
				if status := statusOf(err); status != metarpc.Status(syscall.EBUSY) && status != metarpc.StatusLayoutUnavailable || try == 20 {
					t.Fatalf("cache of %d: %v", id, err)
				}
				if c := h.caches(t, id); len(c) != 0 {
					t.Errorf("refused, and there is %+v", c)
				}
				time.Sleep(h.lease / 4)
				r, err = ask[metarpc.CacheStartResult](maker, metarpc.OpCacheStart, cacheArgs(id))
			}
			if len(r.Segments) != 1 || r.Size != 300 || h.owner(t, id) == before[n] {
				t.Errorf("a cache of %d bytes, want 300; the owner is %d, before that %d: %+v", r.Size, h.owner(t, id), before[n], r)
			}
		}
		h.settled(t, f, g)
	})
}

// TestCacheEnds drops caches in all other ways: asked for, by truncation, with the file, with the session that fills it.
func TestCacheEnds(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(b)()
		f, g := written(b, "f", 100), written(b, "g", 100)
		makeCache(a, cacheArgs(f))
		other := cacheArgs(f)
		other.Devices = []layout.DeviceID{devB}
		makeCache(a, other)
		if r := must[metarpc.CacheDropResult](b, metarpc.OpCacheDrop, &metarpc.CacheDropArgs{ID: f, Device: devB}); r.Caches != 1 || r.Bytes != 100 {
			t.Errorf("dropped %+v", r)
		}
		if c := h.caches(t, f); len(c) != 1 || c[0].File.Device != devA {
			t.Errorf("left are %+v", c)
		}
		h.settled(t, f, g)
		must[metarpc.AttrResult](b, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetSize, Size: 50})
		if c := h.caches(t, f); len(c) != 0 {
			t.Errorf("after a truncation: %+v", c)
		}
		done := startCache(a, cacheArgs(f))
		must[metarpc.AttrResult](b, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetSize, Size: 10})
		_, err := ask[metarpc.Empty](a, metarpc.OpCacheDone, done)
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		startCache(a, cacheArgs(f))
		must[metarpc.Empty](a, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{f}})
		must[metarpc.RemoveResult](b, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "f"})
		h.settled(t, g)

		openRead(a, g)
		startCache(a, cacheArgs(g))
		if _, _, pending := h.svc.caches.usage(devA); pending != 100 {
			t.Errorf("%d bytes are to come", pending)
		}
		openRead(b, g)
		_, err = ask[metarpc.CacheStartResult](b, metarpc.OpCacheStart, cacheArgs(g))
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		time.Sleep(3 * h.lease) // a is lost
		synctest.Wait()
		if c := h.caches(t, g); len(c) != 0 {
			t.Errorf("of a lost session: %+v", c)
		}
		h.settled(t, g)
	})
}

// TestCacheRestart restarts the service with caches in each state.
func TestCacheRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		full, filling, lost, dropped := written(a, "full", 1), written(a, "filling", 2), written(a, "lost", 3), written(a, "dropped", 4)
		makeCache(a, cacheArgs(full))
		makeCache(a, cacheArgs(dropped))
		openRead(a, filling)
		done := startCache(a, cacheArgs(filling))
		openRead(b, lost)
		startCache(b, cacheArgs(lost))
		if _, _, err := h.files.StaleCaches(t.Context(), dropped, anyCache); err != nil {
			t.Fatal(err)
		}
		h.restart()
		h.settled(t, full, filling, lost, dropped)
		var heard hearer
		heard.listen(a)
		a.connect()
		defer renewing(a)()
		synctest.Wait()
		if heard.count() != 1 {
			t.Errorf("heard of %d copies that an earlier instance has not told of", heard.count())
		}
		for _, f := range []layout.FileID{full, filling} {
			must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
		}
		must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
		must[metarpc.Empty](a, metarpc.OpCacheDone, done)
		time.Sleep(3 * h.lease) // b does not come back
		synctest.Wait()
		for f, want := range map[layout.FileID]int{full: 1, filling: 1, lost: 0, dropped: 0} {
			if c := h.caches(t, f); len(c) != want || want > 0 && c[0].File.State != layout.CopyGood {
				t.Errorf("inode %d: %+v", f, c)
			}
		}
		h.settled(t, full, filling, lost, dropped)
		if n := mirrorsOf(a, filling, layout.IOModeRead); n != 2 {
			t.Errorf("%d mirrors", n)
		}
	})
}

// pin makes a session pin a copy, or take the pin off.
func (h *host) pin(c *client, f layout.FileID, ref metarpc.CopyRef) {
	h.svc.mu.Lock()
	defer h.svc.mu.Unlock()
	file := h.svc.file(f)
	for _, cl := range file.claims {
		if cl.sess.id == c.hello.Session {
			cl.pin = ref
		}
	}
	h.svc.changedFile(file)
}

// TestPinnedCache has a reader whose kernel reads a cache: writers write it, too, and it stays until the reader closes.
func TestPinnedCache(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		reader, writer, dier := h.client(), h.client(), h.client()
		defer renewing(reader)()
		defer renewing(writer)()
		f := written(writer, "f", 100)
		ref := makeCache(reader, cacheArgs(f))
		h.pin(reader, f, ref)
		var heard hearer
		heard.listen(reader)
		openWrite(writer, f)
		if n := mirrorsOf(writer, f, layout.IOModeRW); n != 2 || heard.count() != 0 {
			t.Errorf("the writer has %d mirrors, the reader heard of %d", n, heard.count())
		}
		_, err := ask[metarpc.CacheDropResult](writer, metarpc.OpCacheDrop, &metarpc.CacheDropArgs{ID: f})
		wantStatus(t, err, metarpc.Status(syscall.EBUSY))
		must[metarpc.Empty](writer, metarpc.OpLayoutError, &metarpc.LayoutErrorArgs{ID: f, Copies: []metarpc.CopyRef{ref}, Reason: "EIO"})
		must[metarpc.AttrResult](writer, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetSize, Size: 50})
		if c := h.caches(t, f); len(c) != 1 || c[0].File.State != layout.CopyGood {
			t.Errorf("a pinned cache: %+v", c)
		}

		// Nobody knows what a lost writer has written of it, so the file is not fenced before the pin is gone.
		openWrite(dier, f)
		mirrorsOf(dier, f, layout.IOModeRW)
		time.Sleep(3 * h.lease)
		synctest.Wait()
		_, err = ask[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		h.pin(reader, f, metarpc.CopyRef{})
		time.Sleep(time.Second)
		synctest.Wait()
		if n := mirrorsOf(writer, f, layout.IOModeRW); n != 1 || len(h.caches(t, f)) != 0 {
			t.Errorf("%d mirrors and %d caches", n, len(h.caches(t, f)))
		}
		if heard.count() == 0 {
			t.Error("the reader has not heard of it")
		}
		h.settled(t, f)
	})
}

// TestCacheLimit fills a device up to a limit: those used longest ago go, but neither what the same run has asked for nor what is pinned.
func TestCacheLimit(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		var files []layout.FileID
		for i := range 6 {
			files = append(files, written(c, fmt.Sprint(i), 100))
		}
		limited := func(i int, run uint64) *metarpc.CacheStartArgs {
			a := cacheArgs(files[i])
			a.Limit, a.Run = 300, run
			return a
		}
		cached := func(want ...int) {
			t.Helper()
			have := map[layout.FileID]bool{}
			for i := range files {
				if len(h.caches(t, files[i])) > 0 {
					have[files[i]] = true
				}
			}
			for _, i := range want {
				if !have[files[i]] {
					t.Errorf("file %d is not cached", i)
				}
			}
			if len(have) != len(want) {
				t.Errorf("%d files are cached, want %v", len(have), want)
			}
			h.settled(t, files...)
		}
		for i := range 3 {
			makeCache(c, limited(i, 1))
		}
		openRead(c, files[3])
		_, err := ask[metarpc.CacheStartResult](c, metarpc.OpCacheStart, limited(3, 1))
		wantStatus(t, err, metarpc.Status(syscall.ENOSPC))
		cached(0, 1, 2)
		mirrorsOf(c, files[0], layout.IOModeRead) // so 1 is the one used longest ago
		makeCache(c, limited(3, 2))
		cached(0, 2, 3)
		h.pin(c, files[2], h.caches(t, files[2])[0].Ref())
		makeCache(c, limited(4, 3))
		cached(2, 3, 4)

		// One that is too large takes nothing away.
		large := written(c, "large", 301)
		openRead(c, large)
		a := limited(0, 9)
		a.ID = large
		_, err = ask[metarpc.CacheStartResult](c, metarpc.OpCacheStart, a)
		wantStatus(t, err, metarpc.Status(syscall.ENOSPC))
		cached(2, 3, 4)

		// After a restart those that were made last count as used last.
		h.restart()
		c.connect()
		must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: files[5], Reclaim: true})
		must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
		makeCache(c, limited(5, 3))
		cached(3, 4, 5)
	})
}

// TestCacheGivenUp ends a drop in the middle: it goes on in the background.
func TestCacheGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(a)()
		f := written(a, "f", 100)
		makeCache(a, cacheArgs(f))
		openRead(b, f)
		b.drop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := h.svc.dropCaches(ctx, f, anyCache); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("dropped while a reader may have it: %v", err)
		}
		if len(h.caches(t, f)) != 1 {
			t.Error("gone before its readers have been told")
		}
		time.Sleep(3 * h.lease)
		synctest.Wait()
		if len(h.caches(t, f)) != 0 {
			t.Error("nobody goes on with it")
		}
		h.settled(t, f)
	})
}
