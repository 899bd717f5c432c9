package meta

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

func setSize(id layout.FileID, size int64) *metarpc.SetAttrArgs {
	return &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: size}
}

// row is the inode row, without what is reported.
func (h *host) row(id layout.FileID) schema.Inode {
	h.t.Helper()
	row, _, err := h.svc.inode(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	return row
}

func TestSizes(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	past := time.Now().Add(-time.Hour).UnixNano()

	// Provisional: visible everywhere, in memory only, the largest wins.
	a.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: past})
	b.report(true, metarpc.SizeReport{ID: id, End: 60, Mtime: past + 5})
	want := a.attr(id)
	if want.Size != 100 || want.Mtime < past+5 {
		t.Errorf("%+v", want)
	}
	if e := b.list(layout.RootID, 10); len(e) != 1 || e[0].Attr != want {
		t.Errorf("readdir: %+v, want %+v", e, want)
	}
	if r := must[metarpc.LookupResult](b, metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "f"}); r.Attr != want {
		t.Errorf("lookup: %+v, want %+v", r.Attr, want)
	}
	if row := h.row(id); row.Size != 0 {
		t.Errorf("provisional size in the catalog: %+v", row)
	}

	// Durable: many in one call, some for files that are gone, one file twice.
	gone := a.touch(layout.RootID, "gone")
	a.remove(layout.RootID, "gone")
	dir := a.mkdir(layout.RootID, "d")
	recent := time.Now().UnixNano()
	attrs := a.report(false, metarpc.SizeReport{ID: id, End: 100, Mtime: past}, metarpc.SizeReport{ID: gone, End: 1},
		metarpc.SizeReport{ID: dir, End: 5}, metarpc.SizeReport{ID: id, End: 70, Mtime: recent})
	if attrs[0] != attrs[3] || attrs[0].Size != 100 || attrs[0].Mtime != recent || attrs[1] != (metarpc.Attr{}) || attrs[2] != (metarpc.Attr{}) {
		t.Errorf("%+v", attrs)
	}
	if row := h.row(id); row.Size != 100 || row.Mtime != recent {
		t.Errorf("%+v", row)
	}
	if now := a.attr(id); now != attrs[0] {
		t.Errorf("%+v, the report was answered with %+v", now, attrs[0])
	}

	// A report made durable changes nothing that was visible.
	later := time.Now().UnixNano()
	a.report(true, metarpc.SizeReport{ID: id, End: 300, Mtime: later})
	before := b.attr(id)
	a.report(false, metarpc.SizeReport{ID: id, End: 300, Mtime: later})
	if after := b.attr(id); after != before || after.Mtime != later {
		t.Errorf("%+v, while provisional %+v", after, before)
	}

	// A time set by hand is not taken back by what was written before.
	a.report(true, metarpc.SizeReport{ID: id, End: 400, Mtime: time.Now().UnixNano()})
	must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime, Mtime: 77})
	a.report(false, metarpc.SizeReport{ID: id, End: 400})
	if now := b.attr(id); now.Mtime != 77 || now.Size != 400 {
		t.Errorf("%+v", now)
	}
	// And one in the future only until the next write.
	future := time.Now().Add(time.Hour).UnixNano()
	must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime, Mtime: future})
	recent = time.Now().UnixNano()
	for _, provisional := range []bool{true, false} {
		if at := a.report(provisional, metarpc.SizeReport{ID: id, Mtime: recent})[0]; at.Mtime != recent {
			t.Errorf("%+v", at)
		}
	}
}

// TestSizeNeverGoesBack reads a size while it turns from provisional to durable, again and again.
func TestSizeNeverGoesBack(t *testing.T) {
	h := startMemory(t)
	w, r := h.client(), h.client()
	id := w.create(layout.RootID, "f")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for end := int64(1); end <= 300; end++ {
			w.report(true, metarpc.SizeReport{ID: id, End: end, Mtime: end})
			w.report(false, metarpc.SizeReport{ID: id, End: end, Mtime: end})
		}
	}()
	last := int64(0)
	for {
		attr := r.attr(id)
		if attr.Size < last {
			t.Fatalf("size %d after %d", attr.Size, last)
		}
		last = attr.Size
		for _, e := range r.list(layout.RootID, 10) {
			if e.Attr.Size < last {
				t.Fatalf("readdir: size %d after %d", e.Attr.Size, last)
			}
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

// TestSharedFile has many clients report the same file and change its attributes at the same time.
func TestSharedFile(t *testing.T) {
	for kind, open := range engines {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t, open(t)).start()
			first := h.client()
			id := first.create(layout.RootID, "f")
			var others []metarpc.SizeReport
			for i := range 20 {
				others = append(others, metarpc.SizeReport{ID: first.touch(layout.RootID, fmt.Sprint(i)), End: 7})
			}
			const each = 10
			var wg sync.WaitGroup
			for n := range 12 {
				c := h.client()
				wg.Go(func() {
					c.open(id)
					for _, o := range others {
						c.open(o.ID)
					}
					for i := range each {
						c.report(false, append([]metarpc.SizeReport{{ID: id, End: int64(n*each + i + 1)}}, others...)...)
						must[metarpc.AttrResult](c, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: layout.RootID, Name: fmt.Sprintf("%d-%d", n, i)})
					}
				})
			}
			wg.Wait()
			if a := first.attr(id); a.Size != 12*each || a.Nlink != 12*each+1 {
				t.Errorf("%+v", a)
			}
			checkCatalog(t, h.engine)
		})
	}
}

func TestLayouts(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	read := func(off int64) []metarpc.Segment {
		t.Helper()
		return must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRead, Off: off, Len: 10}).Segments
	}
	if s := read(0); len(s) != 0 {
		t.Errorf("a file without data files: %+v", s)
	}
	if end, err := c.layout(id, 0, 10); err != nil || end != testUnit {
		t.Errorf("narrow: %d %v", end, err)
	}
	if s := read(0); len(s) != 1 || s[0].IOMode != layout.IOModeRead {
		t.Errorf("%+v", s)
	}
	if s := read(testUnit); len(s) != 0 {
		t.Errorf("a range without data files: %+v", s)
	}
	if end, err := c.layout(id, testUnit, 1); err != nil || end != layout.ToEOF {
		t.Errorf("wide: %d %v", end, err)
	}
	if s := read(5 * testUnit); len(s) != 1 {
		t.Errorf("%+v", s)
	}

	// What Assign says of why not.
	for _, row := range []struct {
		err  error
		want metarpc.Status
	}{
		{fmt.Errorf("none of 3 answers: %w", syscall.ECONNREFUSED), metarpc.StatusLayoutUnavailable},
		{fmt.Errorf("all full: %w", syscall.ENOSPC), metarpc.Status(syscall.ENOSPC)},
	} {
		h.files.mu.Lock()
		h.files.assign = row.err
		h.files.mu.Unlock()
		_, err := c.layout(id, 0, 1)
		wantStatus(t, err, row.want)
	}
	h.files.mu.Lock()
	h.files.assign = nil
	h.files.mu.Unlock()

	// A layout given back leaves no trace, unless there is something to report.
	back := &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id, 999, id}}
	c.report(true, metarpc.SizeReport{ID: id, End: 5, Mtime: 1})
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, back)
	if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 1 {
		t.Errorf("%d writer rows, want 1", n)
	}
	c.report(false, metarpc.SizeReport{ID: id, End: 5, Mtime: 1})
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, back)
	if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 0 {
		t.Errorf("%d writer rows, want 0", n)
	}
	c.closeFile(id)
	h.svc.mu.Lock()
	if len(h.svc.files) != 0 {
		t.Errorf("records left: %v", h.svc.files)
	}
	h.svc.mu.Unlock()
	// Getting and giving back at the same time never leaves a layout without its row.
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 100 {
				if _, err := c.layout(id, 0, 1); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 100 {
				must[metarpc.Empty](c, metarpc.OpLayoutReturn, back)
			}
		})
	}
	wg.Wait()
	if _, err := c.layout(id, 0, 1); err != nil {
		t.Error(err)
	}
	if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 1 {
		t.Errorf("%d writer rows for a layout that is out", n)
	}
}

// TestTruncate follows a truncation with another writer step by step.
func TestTruncate(t *testing.T) {
	h := startMemory(t)
	a, b, x := h.client(), h.client(), h.client()
	id := a.create(layout.RootID, "f")
	for _, c := range []*client{a, b} {
		if _, err := c.layout(id, 0, 4*testUnit); err != nil {
			t.Fatal(err)
		}
	}
	const size = testUnit + 100
	h.files.write(t, id, 4*testUnit)
	b.report(true, metarpc.SizeReport{ID: id, End: 4 * testUnit, Mtime: 1})
	recalled, answer := make(chan *metarpc.LayoutRecallArgs), make(chan struct{})
	b.recall = func(args *metarpc.LayoutRecallArgs) metarpc.Status {
		recalled <- args
		<-answer
		return metarpc.StatusOK
	}
	a.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
		t.Error("the client that truncates is recalled")
		return metarpc.StatusOK
	}
	release := h.files.hold()
	defer release()
	hdr, ch := a.begin(metarpc.OpSetAttr, setSize(id, size))

	// Recalling: what b says of its writes is still taken, nothing past the size is granted.
	if args := <-recalled; *args != (metarpc.LayoutRecallArgs{ID: id, Off: size, Len: layout.ToEOF}) {
		t.Errorf("recall of %+v", args)
	}
	if at := b.report(false, metarpc.SizeReport{ID: id, End: 4*testUnit + 5, Mtime: 2})[0]; at.Size != 4*testUnit+5 {
		t.Errorf("report while recalling: %+v", at)
	}
	_, err := b.layout(id, size, 10)
	wantStatus(t, err, metarpc.StatusLayoutUnavailable)
	if end, err := b.layout(id, 0, layout.ToEOF); err != nil || end != size {
		t.Errorf("layout up to %d while recalling: %v", end, err)
	}
	close(answer)

	// Cutting: the size is set, late reports are clipped, still nothing past the size is granted.
	h.files.awaitStalled(1)
	if at := x.attr(id); at.Size != size {
		t.Errorf("size while the data files are cut: %+v", at)
	}
	for _, provisional := range []bool{true, false} {
		if at := b.report(provisional, metarpc.SizeReport{ID: id, End: 4 * testUnit})[0]; at.Size != size {
			t.Errorf("late report: %+v", at)
		}
	}
	_, err = b.layout(id, size+5, 10)
	wantStatus(t, err, metarpc.StatusLayoutUnavailable)
	waiting := make(chan error, 1)
	go func() {
		for {
			_, err := b.layout(id, size, 10)
			if statusOf(err) != metarpc.StatusLayoutUnavailable {
				waiting <- err
				return
			}
		}
	}()
	release()
	var r metarpc.AttrResult
	if err := a.finish(hdr, ch, &r); err != nil || r.Attr.Size != size {
		t.Errorf("%+v %v", r, err)
	}
	if err := <-waiting; err != nil {
		t.Errorf("layout after the truncation: %v", err)
	}
	if end := h.files.end(t, id); end > size {
		t.Errorf("data files reach to %d", end)
	}
	if n := countRows(t.Context(), h.engine, schema.PrefixTruncate); n != 0 {
		t.Errorf("%d intents left", n)
	}
	if at := b.report(false, metarpc.SizeReport{ID: id, End: 2 * testUnit, Mtime: time.Now().UnixNano()})[0]; at.Size != 2*testUnit {
		t.Errorf("growing again: %+v", at)
	}
}

// TestGrow checks that a file nobody may be writing grows without its data files being touched.
func TestGrow(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	h.files.hold() // for ever: nothing asks for it
	for _, size := range []int64{0, 10, 1 << 40, 5} {
		if a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, size)).Attr; a.Size != size {
			t.Errorf("without data files: %+v", a)
		}
	}
	if _, err := c.layout(id, 0, 1); err != nil {
		t.Fatal(err)
	}
	must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
	if a := must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, 1<<30)).Attr; a.Size != 1<<30 {
		t.Errorf("%+v", a)
	}
}

// TestUnreportedWrites truncates a file to more than the service knows that it has, while a writer has written more.
func TestUnreportedWrites(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	if _, err := c.layout(id, 0, 1); err != nil {
		t.Fatal(err)
	}
	h.files.write(t, id, 1000)
	must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, 500))
	if end := h.files.end(t, id); end != 500 {
		t.Errorf("data files reach to %d", end)
	}
}

// TestRecallTimeout ends the session of a client that does not give its layout back.
func TestRecallTimeout(t *testing.T) {
	for _, row := range []struct {
		name   string
		before func(c *client)
		takes  time.Duration // at most
	}{
		{"silent", func(c *client) {
			go func() { // it is alive
				for range 6 {
					if retry.Pause(c.t.Context(), 15*time.Second) != nil {
						return
					}
					c.begin(metarpc.OpRenew, &metarpc.Empty{})
				}
			}()
			c.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
				<-c.t.Context().Done()
				return metarpc.StatusOK
			}
		}, 2*time.Minute + time.Second},
		{"refuses", func(c *client) {
			c.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status { return metarpc.StatusInternal }
		}, 2*time.Minute + time.Second}, // others wait until it cannot rely on what it knows any more
		{"away", func(c *client) { c.drop() }, 2*time.Minute + time.Second},
	} {
		t.Run(row.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host) {
				a, b := h.client(), h.client()
				defer renewing(a)()
				id := a.create(layout.RootID, "f")
				if _, err := b.layout(id, 0, 10); err != nil {
					t.Fatal(err)
				}
				h.files.write(t, id, 10)
				row.before(b)
				start := time.Now()
				must[metarpc.AttrResult](a, metarpc.OpSetAttr, setSize(id, 5))
				if took := time.Since(start); took > row.takes {
					t.Errorf("took %v", took)
				}
				synctest.Wait()
				if at := a.attr(id); at.Size != 5 {
					t.Errorf("%+v", at)
				}
				if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 1 {
					t.Errorf("%d sessions", n)
				}
				b.drop()
				if _, w := b.greet(); w.Status != metarpc.StatusBadSession {
					t.Errorf("the session comes back: %v", w.Status)
				}
			})
		})
	}
}

// TestRecallAcrossConnections has a recall answered on the connection after the one it was first sent on.
func TestRecallAcrossConnections(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	if _, err := b.layout(id, 0, 10); err != nil {
		t.Fatal(err)
	}
	recalls := make(chan struct{}, 10)
	b.recall = func(*metarpc.LayoutRecallArgs) metarpc.Status {
		recalls <- struct{}{}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.conn != nil && len(recalls) == 1 { // the answer to the first one is lost
			b.conn.Close()
		}
		return metarpc.StatusOK
	}
	hdr, ch := a.begin(metarpc.OpSetAttr, setSize(id, 5))
	waittest.Until(t, "first recall", func() bool { return len(recalls) == 1 })
	b.connect()
	var r metarpc.AttrResult
	if err := a.finish(hdr, ch, &r); err != nil {
		t.Error(err)
	}
	if len(recalls) != 2 {
		t.Errorf("%d recalls", len(recalls))
	}
}

// TestTruncateSurvivesRestart kills the service while data files are being cut.
func TestTruncateSurvivesRestart(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	if _, err := c.layout(id, 0, 10); err != nil {
		t.Fatal(err)
	}
	h.files.write(t, id, 1000)
	h.files.hold()
	hdr, ch := c.begin(metarpc.OpSetAttr, setSize(id, 100))
	h.files.awaitStalled(1)
	h.restart()
	select {
	case body := <-ch: // the service said that it goes down
		if r, _, err := metarpc.ParseReplyHeader(body); err != nil || r.Status != metarpc.StatusShutdown {
			t.Errorf("%+v %v", r, err)
		}
	default:
	}
	release := sync.OnceFunc(func() {
		h.files.mu.Lock()
		defer h.files.mu.Unlock()
		close(h.files.stall)
		h.files.stall = nil
	})
	defer release()
	c.connect()
	h.files.awaitStalled(1) // the new service has gone on with it
	must[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
	_, err := c.layout(id, 100, 10)
	wantStatus(t, err, metarpc.StatusLayoutUnavailable)
	if end, err := c.layout(id, 0, 1000); err != nil || end != 100 {
		t.Errorf("layout to %d %v", end, err)
	}
	again := c.send(hdr, setSize(id, 100)) // answered when it is safe to write again
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
	select {
	case <-again:
		t.Error("answered while the data files are being cut")
	case <-time.After(20 * time.Millisecond):
	}
	release()
	var r metarpc.AttrResult
	if err := c.finish(hdr, again, &r); err != nil || r.Attr.Size != 100 {
		t.Errorf("%+v %v", r, err)
	}
	if end := h.files.end(t, id); end != 100 {
		t.Errorf("data files reach to %d", end)
	}
	if _, err := c.layout(id, 100, 10); err != nil {
		t.Error(err)
	}
	if n := countRows(t.Context(), h.engine, schema.PrefixTruncate); n != 0 {
		t.Errorf("%d intents left", n)
	}
}

// TestRemoveDuringTruncate removes a file whose truncation hangs on a data server.
func TestRemoveDuringTruncate(t *testing.T) {
	h := startMemory(t)
	c, x := h.client(), h.client()
	id := c.touch(layout.RootID, "f")
	if _, err := c.layout(id, 0, 10); err != nil {
		t.Fatal(err)
	}
	c.closeFile(id)
	h.files.hold()
	hdr, ch := c.begin(metarpc.OpSetAttr, setSize(id, 100))
	h.files.awaitStalled(1)
	x.remove(layout.RootID, "f")
	var r metarpc.AttrResult
	if err := c.finish(hdr, ch, &r); err != nil {
		t.Error(err)
	}
	for _, prefix := range []byte{schema.PrefixTruncate, schema.PrefixWriter, schema.PrefixLayout} {
		if n := countRows(t.Context(), h.engine, prefix); n != 0 {
			t.Errorf("%d rows of %q left", n, prefix)
		}
	}
	checkCatalog(t, h.engine)
	waittest.Until(t, "no records", func() bool {
		h.svc.mu.Lock()
		defer h.svc.mu.Unlock()
		return len(h.svc.files) == 0
	})
}

// TestConcurrentTruncates sets sizes of one file from several clients that hold layouts, while they report.
func TestConcurrentTruncates(t *testing.T) {
	h := newHost(t, memorytest.New()).start()
	id := h.client().touch(layout.RootID, "f")
	var wg sync.WaitGroup
	for n := range 4 {
		c := h.client()
		wg.Go(func() {
			for i := range 30 {
				for {
					_, err := c.layout(id, 0, 4*testUnit)
					if err == nil {
						break
					}
					if statusOf(err) != metarpc.StatusLayoutUnavailable {
						t.Error(err)
						return
					}
				}
				c.report(i%2 == 0, metarpc.SizeReport{ID: id, End: int64(i * 100), Mtime: int64(i)})
				must[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, int64(n*1000)))
			}
		})
	}
	wg.Wait()
	last := h.client()
	if a := must[metarpc.AttrResult](last, metarpc.OpSetAttr, setSize(id, 123)).Attr; a.Size != 123 || last.attr(id) != a {
		t.Errorf("%+v, now %+v", a, last.attr(id))
	}
	if n := countRows(t.Context(), h.engine, schema.PrefixTruncate); n != 0 {
		t.Errorf("%d intents left", n)
	}
}
