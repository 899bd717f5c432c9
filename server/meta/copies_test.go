package meta

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// hearer collects what a client hears of stale copies.
type hearer struct {
	mu     sync.Mutex
	copies []metarpc.CopyRef
	hold   chan struct{} // it does not answer before this is closed; nil = at once
}

func (o *hearer) listen(c *client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back = func(op metarpc.BackOp, args any) metarpc.Status {
		if a, ok := args.(*metarpc.CopiesStaleArgs); ok {
			o.mu.Lock()
			o.copies = append(o.copies, a.Copies...)
			hold := o.hold
			o.mu.Unlock()
			if hold != nil {
				<-hold
			}
		}
		return metarpc.StatusOK
	}
}

func (o *hearer) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.copies)
}

// TestLayoutError reports a failed copy: it is recorded, and all who have the file open are told, before the answer.
func TestLayoutError(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer, reader, stranger := h.client(), h.client(), h.client()
		defer renewing(writer)()
		stop := renewing(reader)
		f := writer.create(layout.RootID, "f")
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		must[metarpc.AttrResult](reader, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead})
		var w, r, s hearer
		r.hold = make(chan struct{})
		w.listen(writer)
		r.listen(reader)
		s.listen(stranger)
		args := &metarpc.LayoutErrorArgs{ID: f, Copies: []metarpc.CopyRef{{Device: layout.DeviceID{1}, Handle: []byte{1}}}, Reason: "EIO"}

		// Only who may write the file has something to say about it.
		if _, err := ask[metarpc.Empty](reader, metarpc.OpLayoutError, args); err == nil || len(h.files.stale) != 0 {
			t.Errorf("report of a reader: %v", err)
		}
		hdr, ch := writer.begin(metarpc.OpLayoutError, args)
		synctest.Wait()
		if w.count() != 1 || r.count() != 1 || s.count() != 0 {
			t.Errorf("told: writer %d, reader %d, stranger %d", w.count(), r.count(), s.count())
		}
		if len(h.files.stale) != 1 || !bytes.Equal(h.files.stale[0].Handle, []byte{1}) {
			t.Error("others are told before it is recorded")
		}
		select {
		case <-ch:
			t.Error("answered before all had been told")
		default:
		}
		close(r.hold)
		if err := writer.finish(hdr, ch, new(metarpc.Empty)); err != nil {
			t.Error(err)
		}
		r.mu.Lock()
		r.hold = nil
		r.mu.Unlock()

		// Who cannot be told is waited for until he relies on nothing any more.
		stop()
		reader.drop()
		start := time.Now()
		must[metarpc.Empty](writer, metarpc.OpLayoutError, args)
		if took := time.Since(start); took < h.lease/2 || took > 3*h.lease {
			t.Errorf("answered after %v", took)
		}
	})
}

// twoCopies is the row of a file with a copy on device 1 and one on device 2.
func twoCopies() schema.Layout {
	mirrors := [][]schema.DataFile{copyOn(layout.DeviceID{1}), copyOn(layout.DeviceID{2})}
	return schema.Layout{StripeUnit: testUnit, Width: 1, Mirrors: mirrors}
}

// TestGrantDropsDown grants a layout of a file with a copy on a data server that is down: all who have the file open
// hear first that the copy is stale, once.
func TestGrantDropsDown(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer, reader := h.client(), h.client()
		defer renewing(writer)()
		defer renewing(reader)()
		f := writer.create(layout.RootID, "f")
		setLayout(t, h, f, twoCopies())
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		must[metarpc.AttrResult](reader, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Access: metarpc.AccessRead})
		r := hearer{hold: make(chan struct{})}
		r.listen(reader)
		h.files.mu.Lock()
		h.files.away = layout.DeviceID{1}
		h.files.mu.Unlock()
		hdr, ch := writer.begin(metarpc.OpLayoutGet, rw(f))
		synctest.Wait()
		if r.count() != 1 {
			t.Errorf("the reader was told of %d copies", r.count())
		}
		select {
		case <-ch:
			t.Error("granted before the reader had answered")
		default:
		}
		close(r.hold)
		got := new(metarpc.LayoutResult)
		if err := writer.finish(hdr, ch, got); err != nil {
			t.Fatal(err)
		}
		if state := got.Segments[0].Mirrors[0][0].State; state != layout.CopyStale {
			t.Errorf("granted with a copy that is %v", state)
		}
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		if r.count() != 1 {
			t.Errorf("the reader was told %d times", r.count())
		}
	})
}

// TestGrantKeepsPinned: a copy that a kernel writes by itself stays good.
func TestGrantKeepsPinned(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		defer renewing(c)()
		f := c.create(layout.RootID, "f")
		setLayout(t, h, f, twoCopies())
		must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
		h.svc.mu.Lock()
		for _, cl := range h.svc.files[f].claims {
			cl.open, cl.pin = true, metarpc.CopyRef{Device: layout.DeviceID{1}, Handle: []byte{1}}
		}
		h.svc.mu.Unlock()
		h.files.mu.Lock()
		h.files.away = layout.DeviceID{1}
		h.files.mu.Unlock()
		got := must[metarpc.LayoutResult](c, metarpc.OpLayoutGet, rw(f))
		if state := got.Segments[0].Mirrors[0][0].State; state != layout.CopyGood {
			t.Errorf("granted with a copy that is %v", state)
		}
	})
}

// TestResilver makes new copies of a file while a client writes it: layouts for writing are taken back range by range, and
// granted around the one that is being copied.
func TestResilver(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer := h.client()
		defer renewing(writer)()
		f := writer.create(layout.RootID, "f")
		must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		var mu sync.Mutex
		var recalled []layout.Range
		writer.mu.Lock()
		writer.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
			mu.Lock()
			defer mu.Unlock()
			recalled = append(recalled, layout.Range{Off: a.Off, Len: a.Len})
			return metarpc.StatusOK
		}
		writer.mu.Unlock()
		news := new(hearer)
		news.listen(writer)
		var copied []layout.Range
		h.files.fillEnd = gateBytes + 1
		h.files.mu.Lock()
		h.files.filled = func(ctx context.Context, r layout.Range) error {
			mu.Lock()
			copied = append(copied, r)
			last := recalled[len(recalled)-1]
			mu.Unlock()
			if last != r {
				t.Errorf("%v is copied, but %v was recalled last", r, last)
			}
			for _, c := range []struct{ off, from, end int64 }{
				{r.Off - 1, 0, r.Off},
				{r.End(), r.End(), layout.ToEOF},
			} {
				if c.off < 0 {
					continue
				}
				got := must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Off: c.off, Len: 1 << 40})
				if len(got.Segments) != 1 || got.Segments[0].Off != c.from || got.Segments[0].Off+got.Segments[0].Len != c.end {
					t.Errorf("while %v is copied the layout at %d is %+v", r, c.off, got.Segments)
				}
			}
			_, err := ask[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Off: r.Off, Len: 1})
			var refused *metarpc.Error
			if !errors.As(err, &refused) || refused.Status != metarpc.StatusLayoutUnavailable {
				t.Errorf("layout where it is copied: %v", err)
			}
			return nil
		}
		h.files.mu.Unlock()
		put(t, h, schema.FillKey(f), schema.Encode(&schema.Fill{}))
		h.svc.resilverSoon()
		synctest.Wait()
		time.Sleep(2 * resilverLook)
		mu.Lock()
		if len(copied) != 2 || copied[0].Off != 0 || copied[1].Off != copied[0].End() {
			t.Errorf("copied %v", copied)
		}
		if len(recalled) != 3 || recalled[0].Len != layout.ToEOF {
			t.Errorf("recalled %v", recalled)
		}
		mu.Unlock()
		got := must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		if got.Segments[0].Off != 0 {
			t.Errorf("afterwards the layout is %+v", got.Segments)
		}
		st := must[metarpc.StatusResult](writer, metarpc.OpStatus, &metarpc.Empty{})
		if st.Stale != 0 || st.Copied != gateBytes+1 {
			t.Errorf("status: %d files, %d bytes copied", st.Stale, st.Copied)
		}
	})
}

// TestGrantAcrossGate has a layout change under a gate while it is being granted: the client gets it as it is afterwards, and not
// as it was read, since no recall has taken that from it.
func TestGrantAcrossGate(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer := h.client()
		defer renewing(writer)()
		f := writer.create(layout.RootID, "f")
		changed := []byte("another data file")
		var once sync.Once
		h.files.mu.Lock()
		h.files.assigned = func() {
			once.Do(func() {
				err := h.svc.gated(t.Context(), f, layout.Range{Len: layout.ToEOF}, func(ctx context.Context) error {
					var row schema.Layout
					raw, err := schema.ReadRow(ctx, h.svc.engine, schema.LayoutKey(f), &row)
					if err != nil || raw == nil {
						return errors.Join(err, errors.New("there is no layout"))
					}
					row.Mirrors[0][0].Handle = changed
					put(t, h, schema.LayoutKey(f), schema.Encode(&row))
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		h.files.mu.Unlock()
		got := must[metarpc.LayoutResult](writer, metarpc.OpLayoutGet, rw(f))
		if handle := got.Segments[0].Mirrors[0][0].Handle; !bytes.Equal(handle, changed) {
			t.Errorf("granted is the data file %q, want %q", handle, changed)
		}
	})
}
