package meta

import (
	"bufio"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// owner is the owner of a file's first data file.
func (h *host) owner(t *testing.T, id layout.FileID) uint32 {
	return h.files.row(t, id).Mirrors[0][0].UID
}

// deaf makes a client renew its lease for as long as the service listens, but never answer a callback.
func deaf(c *client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back = func(metarpc.BackOp, any) metarpc.Status {
		<-c.t.Context().Done()
		return metarpc.StatusOK
	}
	go func() {
		for range 8 {
			if retry.Pause(c.t.Context(), 10*time.Second) != nil {
				return
			}
			c.begin(metarpc.OpRenew, &metarpc.Empty{})
		}
	}()
}

// TestDeafSession ends the session of a client that lives and does not answer a recall. Nothing changes before it has to
// have noticed. Others go on meanwhile.
func TestDeafSession(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(a)()
		f, g := a.touch(layout.RootID, "f"), a.touch(layout.RootID, "g")
		b.attrLease(f)
		deaf(b)
		start := time.Now()
		hdr, ch := a.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode})
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: g, Mask: metarpc.SetMode})
		a.attr(f)
		if took := time.Since(start); took != 0 {
			t.Errorf("others waited %v", took)
		}
		if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		// A lease until it is given up, and one since its last frame was answered, with which it may have gone on.
		if took := time.Since(start); took <= h.lease+50*time.Second || took > 2*h.lease+time.Second {
			t.Errorf("changed after %v", took)
		}
		b.drop()
		if _, w := b.greet(); w.Status != metarpc.StatusBadSession {
			t.Errorf("the session comes back: %v", w.Status)
		}
	})
}

// TestDeadSession does what a client that is gone had a lease on: it costs the rest of its lease, once.
func TestDeadSession(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		defer renewing(a)()
		f, g := a.touch(layout.RootID, "f"), a.touch(layout.RootID, "g")
		b.attrLease(f)
		b.attrLease(g)
		b.drop()
		time.Sleep(30 * time.Second)
		start := time.Now()
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode})
		if took := time.Since(start); took < 30*time.Second || took > h.lease {
			t.Errorf("took %v", took)
		}
		start = time.Now()
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: g, Mask: metarpc.SetMode})
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
	})
}

// TestLeavingSession ends a session by its client's wish: nobody waits, nothing is fenced.
func TestLeavingSession(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		f := b.create(layout.RootID, "f")
		must[metarpc.LayoutResult](b, metarpc.OpLayoutGet, rw(f))
		b.attrLease(f)
		before := h.owner(t, f)
		must[metarpc.Empty](b, metarpc.OpEndSession, &metarpc.Empty{})
		start := time.Now()
		must[metarpc.AttrResult](a, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode})
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
		synctest.Wait()
		if h.owner(t, f) != before {
			t.Error("fenced")
		}
		if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 0 {
			t.Errorf("%d writer rows left", n)
		}
	})
}

// TestFence loses a client that was writing while data servers are away. Until they have confirmed that it cannot write any
// more, nobody else is given a layout or a place, and the file is not cut; who writes it already is given new layouts then.
func TestFence(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		dead, live, other := h.root(), h.root(), h.root()
		defer renewing(live)()
		defer renewing(other)()
		f := dead.create(layout.RootID, "f")
		for _, c := range []*client{live, other} {
			c.open(f)
		}
		must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(f))
		must[metarpc.LayoutResult](live, metarpc.OpLayoutGet, rw(f))
		recalled := make(chan *metarpc.LayoutRecallArgs, 10)
		live.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
			recalled <- a
			return metarpc.StatusOK
		}
		h.files.write(t, f, 100)
		before := h.owner(t, f)
		release := h.files.hold()
		dead.drop()
		time.Sleep(80 * time.Second)
		synctest.Wait()
		_, err := ask[metarpc.LayoutResult](other, metarpc.OpLayoutGet, rw(f))
		wantStatus(t, err, metarpc.StatusLayoutUnavailable)
		_, err = ask[metarpc.ReserveResult](other, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 1})
		wantStatus(t, err, metarpc.StatusGrace)
		must[metarpc.LayoutResult](other, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRead, Len: 1})
		hdr, ch := other.begin(metarpc.OpSetAttr, setSize(f, 10))
		time.Sleep(time.Minute)
		select {
		case <-ch:
			t.Error("cut while the dead client may still write")
		default:
		}
		if h.owner(t, f) != before || h.row(f).Size != 0 {
			t.Error("something has happened")
		}
		release()
		if err := other.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		if h.owner(t, f) == before {
			t.Error("the data files have the same owners")
		}
		synctest.Wait()
		for _, off := range []int64{10, 0} { // for the truncation, and because of the new owners
			if a := <-recalled; *a != (metarpc.LayoutRecallArgs{ID: f, Off: off, Len: layout.ToEOF}) {
				t.Errorf("%+v", a)
			}
		}
		if at := other.attr(f); at.Size != 10 {
			t.Errorf("%+v", at)
		}
		must[metarpc.LayoutResult](other, metarpc.OpLayoutGet, rw(f))
		if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 2 {
			t.Errorf("%d sessions", n)
		}
	})
}

// TestFenceBeforeSize checks the order in which a dead client's file is dealt with, also if the first try fails and if the
// service is restarted in between.
func TestFenceBeforeSize(t *testing.T) {
	for _, restart := range []bool{false, true} {
		bubble(t, func(t *testing.T, h *host) {
			dead, live := h.client(), h.client()
			f := dead.create(layout.RootID, "f")
			must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(f))
			before := h.owner(t, f)
			h.files.write(t, f, 100)
			h.files.fail(errors.New("out of order"))
			dead.drop()
			stop := renewing(live)
			time.Sleep(2 * h.lease)
			if h.owner(t, f) != before {
				t.Error("fenced though that failed")
			}
			h.files.write(t, f, 200) // late
			stop()
			if restart {
				h.restart()
				live.connect()
				must[metarpc.Empty](live, metarpc.OpReclaimComplete, &metarpc.Empty{})
				_, err := live.layout(f, 0, 1)
				wantStatus(t, err, metarpc.StatusLayoutUnavailable)
			}
			defer renewing(live)()
			h.files.fail(nil)
			time.Sleep(30 * time.Second)
			synctest.Wait()
			if h.owner(t, f) == before {
				t.Error("not fenced")
			}
			if row := h.row(f); row.Size != 200 {
				t.Errorf("%+v", row)
			}
		})
	}
}

// TestRemoveDuringFence removes a file whose fencing hangs on a data server.
func TestRemoveDuringFence(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		dead, live := h.root(), h.root()
		defer renewing(live)()
		f := live.touch(layout.RootID, "f")
		dead.open(f)
		must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(f))
		h.files.hold()
		dead.drop()
		time.Sleep(2 * h.lease)
		live.remove(layout.RootID, "f")
		synctest.Wait()
		for _, prefix := range []byte{schema.PrefixWriter, schema.PrefixLayout} {
			if n := countRows(t.Context(), h.engine, prefix); n != 0 {
				t.Errorf("%d rows of %q left", n, prefix)
			}
		}
		time.Sleep(time.Minute)
		if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 1 {
			t.Errorf("%d sessions left", n)
		}
		h.svc.mu.Lock()
		defer h.svc.mu.Unlock()
		if len(h.svc.files) != 0 {
			t.Errorf("records left: %v", h.svc.files)
		}
	})
}

// TestDeadWritersSize looks at a file whose writer is gone and has not said how far it got: its data files tell. If they are
// away it takes a lease.
func TestDeadWritersSize(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		dead, live := h.client(), h.client()
		defer renewing(live)()
		f := dead.create(layout.RootID, "f")
		must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(f))
		h.files.write(t, f, 100)
		dead.drop()
		start := time.Now()
		if at := live.attr(f); at.Size != 100 {
			t.Errorf("%+v", at)
		}
		if took := time.Since(start); took > h.lease*5/4+time.Second {
			t.Errorf("took %v", took)
		}
	})
	bubble(t, func(t *testing.T, h *host) {
		dead, live := h.client(), h.client()
		defer renewing(live)()
		f := dead.create(layout.RootID, "f")
		must[metarpc.LayoutResult](dead, metarpc.OpLayoutGet, rw(f))
		h.files.write(t, f, 100)
		defer h.files.hold()()
		dead.drop()
		start := time.Now()
		live.attr(f)
		if took := time.Since(start); took > h.lease*9/4+time.Second {
			t.Errorf("took %v", took)
		}
	})
}

// TestGraceEnds follows what ends a grace period, and what waits for that.
func TestGraceEnds(t *testing.T) {
	inGrace := func(c *client) bool {
		return must[metarpc.StatusResult](c, metarpc.OpStatus, &metarpc.Empty{}).Grace
	}
	mkdir := func(c *client, name string) error {
		_, err := ask[metarpc.AttrResult](c, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: name, Mode: syscall.S_IFDIR})
		return err
	}
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		f := a.create(layout.RootID, "f")
		g := a.create(layout.RootID, "g")
		if _, err := a.layout(f, 0, 1); err != nil {
			t.Fatal(err)
		}
		h.restart()
		a.connect()
		start := time.Now()
		wantStatus(t, mkdir(a, "d"), metarpc.StatusGrace)
		if took := time.Since(start); took != graceWait {
			t.Errorf("took %v", took)
		}
		for _, id := range []layout.FileID{f, g} {
			must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: id, Reclaim: true})
		}
		newcomer := h.client()
		wantStatus(t, mkdir(newcomer, "d"), metarpc.StatusGrace)
		// Who wrote a file before goes on with it; a new layout has to wait, as does an append.
		if _, err := a.layout(f, 0, 1); err != nil {
			t.Error(err)
		}
		_, err := a.layout(g, 0, 1)
		wantStatus(t, err, metarpc.StatusGrace)
		_, err = ask[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 1})
		wantStatus(t, err, metarpc.StatusGrace)
		// To look costs nothing, but comes without leases: somebody may still tell of the place of an append.
		if l := newcomer.attrLease(g); l != 0 {
			t.Errorf("lease %v", l)
		}
		must[metarpc.AttrResult](a, metarpc.OpOpen, &metarpc.OpenArgs{ID: f, Reclaim: true})
		a.report(true, metarpc.SizeReport{ID: f, End: 10})
		must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
		must[metarpc.Empty](newcomer, metarpc.OpReclaimComplete, &metarpc.Empty{})
		if !inGrace(a) {
			t.Error("over though b may come back")
		}
		hdr, ch := a.begin(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "d", Mode: syscall.S_IFDIR})
		synctest.Wait()
		b.connect()
		must[metarpc.Empty](b, metarpc.OpReclaimComplete, &metarpc.Empty{})
		if inGrace(a) {
			t.Error("not over though all are back")
		}
		if err := a.finish(hdr, ch, new(metarpc.AttrResult)); err != nil { // it waited
			t.Error(err)
		}
		if _, err := a.layout(g, 0, 1); err != nil {
			t.Error(err)
		}
	})

	// One comes back and ends its session, one does not come back.
	bubble(t, func(t *testing.T, h *host) {
		a, b, c := h.client(), h.client(), h.client()
		h.restart()
		a.connect()
		defer renewing(a)()
		must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
		b.connect()
		must[metarpc.Empty](b, metarpc.OpEndSession, &metarpc.Empty{})
		_ = c
		time.Sleep(h.lease - time.Second)
		wantStatus(t, mkdir(a, "d"), metarpc.StatusGrace)
		time.Sleep(h.lease/4 + 2*time.Second)
		synctest.Wait()
		if err := mkdir(a, "d"); err != nil {
			t.Error(err)
		}
	})
}

// TestDeafWriter looks at a file whose writer lives and does not say how far it has got: that ends its session, and the data
// files tell.
func TestDeafWriter(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w, r := h.client(), h.client()
		defer renewing(r)()
		f := w.create(layout.RootID, "f")
		must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(f))
		h.files.write(t, f, 100)
		deaf(w)
		before := h.owner(t, f)
		start := time.Now()
		if at := r.attr(f); at.Size != 100 {
			t.Errorf("%+v", at)
		}
		if took := time.Since(start); took != h.lease {
			t.Errorf("took %v", took)
		}
		synctest.Wait()
		if h.owner(t, f) == before {
			t.Error("not fenced")
		}
	})
}

// TestDeafOwner looks at a file whose writer is known to be deaf, and has a lease on the attributes that must run out before
// the size can be made durable. It is shown before.
func TestDeafOwner(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		w, r := h.client(), h.client()
		defer renewing(r)()
		f := w.create(layout.RootID, "f")
		must[metarpc.LayoutResult](w, metarpc.OpLayoutGet, rw(f))
		h.files.write(t, f, 100)
		w.attrLease(f)
		w.namesLease(layout.RootID)
		deaf(w)
		r.begin(metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "d", Mode: syscall.S_IFDIR | 0o755})
		time.Sleep(h.lease + time.Second)
		synctest.Wait()
		start := time.Now()
		if at := r.attr(f); at.Size != 100 || at.Mtime == 0 {
			t.Errorf("%+v", at)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
		time.Sleep(2 * h.lease)
		synctest.Wait()
		if row, _, err := h.svc.inode(t.Context(), f); err != nil || row.Size != 100 {
			t.Errorf("durable size %d, %v", row.Size, err)
		}
	})
}

// TestReserveAfterRestart appends after a restart: behind what others had reserved, and not yet written, before it.
func TestReserveAfterRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		f := a.create(layout.RootID, "f")
		must[metarpc.LayoutResult](a, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: f, IOMode: layout.IOModeRW, Len: 1, Append: true})
		off := must[metarpc.ReserveResult](a, metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 100}).Off
		h.restart()
		b.connect()
		must[metarpc.Empty](b, metarpc.OpReclaimComplete, &metarpc.Empty{})
		hdr, ch := b.begin(metarpc.OpReserve, &metarpc.ReserveArgs{ID: f, Len: 5})
		a.connect()
		a.report(true, metarpc.SizeReport{ID: f, End: off + 100})
		must[metarpc.Empty](a, metarpc.OpReclaimComplete, &metarpc.Empty{})
		var r metarpc.ReserveResult
		if err := b.finish(hdr, ch, &r); err != nil || r.Off != off+100 {
			t.Errorf("%+v %v", r, err)
		}
	})
}

// TestReserveSentAgain sends a Reserve again on the next connection. The append keeps its place.
func TestReserveSentAgain(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	f := c.create(layout.RootID, "f")
	args := &metarpc.ReserveArgs{ID: f, Len: 100}
	var first, again metarpc.ReserveResult
	hdr, ch := c.begin(metarpc.OpReserve, args)
	if err := c.finish(hdr, ch, &first); err != nil {
		t.Fatal(err)
	}
	c.drop()
	c.connect()
	h2, rest, err := metarpc.ParseReplyHeader(<-c.send(hdr, args))
	if err == nil {
		err = metarpc.DecodeResult(metarpc.OpReserve, rest, &again)
	}
	if err != nil || h2.Status != metarpc.StatusOK || again != first {
		t.Errorf("%v, %+v, %v, want %+v", h2.Status, again, err, first)
	}
	if next := must[metarpc.ReserveResult](c, metarpc.OpReserve, args); next.Off != first.Off+100 {
		t.Errorf("the next append goes to %d", next.Off)
	}
}

// TestReserveOrder gives no place behind one whose answer is not sent yet. If the service died now, the first place
// would be lost and read as zeros.
func TestReserveOrder(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		a, b := h.client(), h.client()
		f := a.create(layout.RootID, "f")
		b.open(f)
		must[metarpc.Empty](a, metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{f}})
		a.drop()
		args := &metarpc.ReserveArgs{ID: f, Len: 100}
		frame, err := metarpc.AppendCall(nil, metarpc.CallHeader{Slot: 1, Sequence: 100, Op: metarpc.OpReserve}, args)
		if err != nil {
			t.Fatal(err)
		}
		conn, _ := a.greet() // nobody reads it yet
		if _, err := conn.Write(frame); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		hdr, ch := b.begin(metarpc.OpReserve, args)
		synctest.Wait()
		select {
		case <-ch:
			t.Fatal("a place was given behind one that its session has not heard of")
		default:
		}
		read := bufio.NewReader(conn)
		go func() { // ends with the connection
			for {
				if _, err := metarpc.ReadFrame(read, nil, metarpc.MaxFrame); err != nil {
					return
				}
			}
		}()
		var r metarpc.ReserveResult
		if err := b.finish(hdr, ch, &r); err != nil || r.Off != 100 {
			t.Errorf("%+v, %v", r, err)
		}
		conn.Close()
	})
}
