package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// pipes is a listener whose connections are pipes, so that a test bubble's clock governs them.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "pipe"} }

func (p *pipes) dial() (net.Conn, error) {
	a, b := net.Pipe()
	select {
	case p.conns <- b:
		return a, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// bubble runs a test in a bubble in which time passes only when all wait, with a service on an engine in memory. The
// lease is a minute.
func bubble(t *testing.T, f func(t *testing.T, h *host)) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, memorytest.New())
		var p *pipes
		h.listen = func() net.Listener {
			p = newPipes()
			return p
		}
		h.dial = func() (net.Conn, error) { return p.dial() }
		h.start()
		f(t, h)
	})
}

// renewing keeps a client's lease until the test ends or the function it returns is called.
func renewing(c *client) (stop func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for retry.Pause(ctx, 20*time.Second) == nil {
			must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

func TestLeaseExpiry(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		dead, live := h.client(), h.client()
		defer renewing(live)()
		id := dead.create(layout.RootID, "f")
		orphan := dead.create(layout.RootID, "orphan")
		live.remove(layout.RootID, "orphan")
		if a := live.attr(orphan); a.Nlink != 0 {
			t.Errorf("orphan: %+v", a)
		}
		if _, err := dead.layout(id, 0, 4*testUnit); err != nil {
			t.Fatal(err)
		}
		h.files.write(t, id, 3*testUnit)
		const mtime = 1000
		dead.report(true, metarpc.SizeReport{ID: id, End: 2 * testUnit, Mtime: mtime})
		if a := live.attr(id); a.Size != 2*testUnit {
			t.Errorf("size %d while it is provisional", a.Size)
		}
		time.Sleep(59 * time.Second)
		must[metarpc.Empty](dead, metarpc.OpRenew, &metarpc.Empty{})
		time.Sleep(59 * time.Second)
		if a := live.attr(orphan); a.Nlink != 0 { // the lease has not run out
			t.Errorf("orphan: %+v", a)
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if a := live.attr(id); a.Size != 3*testUnit || a.Mtime <= mtime {
			t.Errorf("after the end of the session: %+v, want the size that the data files have", a)
		}
		live.wantGone(orphan)
		for _, prefix := range []byte{schema.PrefixWriter, schema.PrefixOrphan} {
			if n := countRows(t.Context(), h.engine, prefix); n != 0 {
				t.Errorf("%d rows of %q left", n, prefix)
			}
		}
		if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 1 {
			t.Errorf("%d sessions left", n)
		}
		dead.drop()
		if _, w := dead.greet(); w.Status != metarpc.StatusBadSession {
			t.Errorf("a dead session comes back: %v", w.Status)
		}
		if n := len(h.files.unstable); n != 0 {
			t.Errorf("%d data files are not stable", n)
		}
		checkCatalog(t, h.engine)
	})
}

// TestEndedSessionSurvivesRestart lets the service die while data servers are away from which a dead client's size is to be
// learnt.
func TestEndedSessionSurvivesRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		c := h.client()
		id := c.create(layout.RootID, "f")
		if _, err := c.layout(id, 0, 1); err != nil {
			t.Fatal(err)
		}
		h.files.write(t, id, 100)
		c.report(true, metarpc.SizeReport{ID: id, End: 100, Mtime: 50})
		h.files.fail(errors.New("away"))
		must[metarpc.Empty](c, metarpc.OpEndSession, &metarpc.Empty{})
		time.Sleep(10 * time.Minute)
		other := h.client()
		if a := other.attr(id); a.Size != 100 {
			t.Errorf("size %d while the data servers are away", a.Size)
		}
		h.restart()
		if _, w := c.greet(); w.Status != metarpc.StatusBadSession {
			t.Errorf("a session that ended comes back: %v", w.Status)
		}
		h.files.fail(nil)
		time.Sleep(time.Minute)
		other.connect()
		if a := other.attr(id); a.Size != 100 {
			t.Errorf("size %d", a.Size)
		}
		if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 0 {
			t.Errorf("%d writer rows left", n)
		}
		checkCatalog(t, h.engine)
	})
}

func TestGrace(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		back, lost, other := h.client(), h.client(), h.client()
		kept := back.create(layout.RootID, "kept")
		forgotten := lost.create(layout.RootID, "forgotten")
		late := back.create(layout.RootID, "late")
		for _, name := range []string{"kept", "forgotten"} {
			other.remove(layout.RootID, name)
		}
		h.restart()
		if !must[metarpc.StatusResult](func() *client { other.connect(); return other }(), metarpc.OpStatus, &metarpc.Empty{}).Grace {
			t.Error("no grace period")
		}
		defer renewing(other)()
		time.Sleep(30 * time.Second)
		back.connect()
		defer renewing(back)()
		// Nobody has said yet that it is open.
		_, err := ask[metarpc.RemoveResult](other, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "late"})
		wantStatus(t, err, metarpc.StatusGrace)
		must[metarpc.AttrResult](back, metarpc.OpOpen, &metarpc.OpenArgs{ID: kept, Reclaim: true})
		must[metarpc.AttrResult](back, metarpc.OpOpen, &metarpc.OpenArgs{ID: late, Reclaim: true})
		back.report(true, metarpc.SizeReport{ID: kept, End: 10})
		if a := other.attr(kept); a.Size != 10 {
			t.Errorf("reclaimed size: %+v", a)
		}
		must[metarpc.Empty](back, metarpc.OpReclaimComplete, &metarpc.Empty{})
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if must[metarpc.StatusResult](other, metarpc.OpStatus, &metarpc.Empty{}).Grace {
			t.Error("still in grace")
		}
		other.remove(layout.RootID, "late")
		for _, id := range []layout.FileID{kept, late} {
			if a := back.attr(id); a.Nlink != 0 {
				t.Errorf("%+v", a)
			}
		}
		other.wantGone(forgotten)
		lost.drop()
		if _, w := lost.greet(); w.Status != metarpc.StatusBadSession {
			t.Errorf("a session comes back after the grace period: %v", w.Status)
		}
		must[metarpc.Empty](back, metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{kept, late}})
		checkCatalog(t, h.engine)
		if n := countRows(t.Context(), h.engine, schema.PrefixOrphan); n != 0 {
			t.Errorf("%d orphans left", n)
		}
	})
}

// TestStrayRows starts on a catalog that has rows of sessions it does not have.
func TestStrayRows(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.touch(layout.RootID, "f")
	stray := metarpc.SessionID{1, 2, 3}
	put(t, h, schema.WriterKey(id, stray), nil)
	put(t, h, schema.WriterKey(id+1000, stray), nil)
	put(t, h, schema.ReplyKey(metarpc.SessionID{4}, 200), schema.Encode(&schema.Reply{Sequence: 1}))
	h.restart()
	waittest.Until(t, "clean", func() bool {
		return countRows(t.Context(), h.engine, schema.PrefixWriter) == 0 &&
			countRows(t.Context(), h.engine, schema.PrefixReply) == 1 && countRows(t.Context(), h.engine, schema.PrefixSession) == 1
	})
	c.connect()
	c.attr(id)
}

// TestSizeAfterRestart looks at files whose writers have not come back yet.
func TestSizeAfterRestart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		writer, reader := h.client(), h.client()
		var ids [3]layout.FileID
		for i := range ids {
			ids[i] = writer.create(layout.RootID, fmt.Sprint(i))
			if _, err := writer.layout(ids[i], 0, 1); err != nil {
				t.Fatal(err)
			}
			h.files.write(t, ids[i], 100)
			writer.report(true, metarpc.SizeReport{ID: ids[i], End: 100, Mtime: 5})
		}
		writer.report(false, metarpc.SizeReport{ID: ids[2], End: 100, Mtime: 5})
		h.restart()
		reader.connect()
		defer renewing(reader)()
		if a := reader.attr(ids[0]); a.Size != 100 {
			t.Errorf("size goes back: %+v", a)
		}
		for _, e := range reader.list(layout.RootID, 10) {
			if e.Attr.Size != 100 {
				t.Errorf("size goes back: %+v", e)
			}
		}
		writer.connect()
		must[metarpc.Empty](writer, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: ids[:]})
		if n := countRows(t.Context(), h.engine, schema.PrefixWriter); n != 2 {
			t.Errorf("%d writer rows, want those of the two files that are not durable", n)
		}

		// Without data servers it takes a lease, and then the last durable size is shown.
		h.restart()
		h.files.hold()
		reader.connect()
		start := time.Now()
		if a := reader.attr(ids[0]); a.Size != 0 {
			t.Errorf("%+v", a)
		}
		if took := time.Since(start); took != h.lease {
			t.Errorf("took %v", took)
		}
	})
}

// TestOrphans follows files without names to their last close.
func TestOrphans(t *testing.T) {
	h := startMemory(t)
	a, b := h.client(), h.client()
	id := a.create(layout.RootID, "f")
	must[metarpc.AttrResult](b, metarpc.OpOpen, &metarpc.OpenArgs{ID: id})
	if _, err := a.layout(id, 0, 3*testUnit); err != nil {
		t.Fatal(err)
	}
	must[metarpc.Empty](a, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "user.a"})
	over := b.touch(layout.RootID, "over")
	must[metarpc.Empty](b, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "over", NewParent: layout.RootID, NewName: "f"})
	if got := must[metarpc.LookupResult](a, metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "f"}).Attr.ID; got != over {
		t.Errorf("name leads to %d, want %d", got, over)
	}
	if at := b.attr(id); at.Nlink != 0 {
		t.Errorf("%+v", at)
	}
	_, err := ask[metarpc.AttrResult](a, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: layout.RootID, Name: "again"})
	wantStatus(t, err, metarpc.Status(syscall.ENOENT))
	a.closeFile(id)
	b.attr(id)
	if n := countRows(t.Context(), h.engine, schema.PrefixGarbage); n != 0 {
		t.Errorf("%d data files are garbage while the file is open", n)
	}
	b.closeFile(id)
	b.wantGone(id)
	if n := countRows(t.Context(), h.engine, schema.PrefixGarbage); n != 2 {
		t.Errorf("%d data files are garbage, want 2", n)
	}
	for _, prefix := range []byte{schema.PrefixOrphan, schema.PrefixWriter, schema.PrefixLayout, schema.PrefixXattr} {
		if n := countRows(t.Context(), h.engine, prefix); n != 0 {
			t.Errorf("%d rows of %q left", n, prefix)
		}
	}
	checkCatalog(t, h.engine)
	h.svc.mu.Lock()
	defer h.svc.mu.Unlock()
	if len(h.svc.files) != 0 {
		t.Errorf("records left: %v", h.svc.files)
	}
}

// TestOpenAgainstRemove opens, closes and removes files at the same time: a file that was opened is there until it is
// closed, and nothing is left over.
func TestOpenAgainstRemove(t *testing.T) {
	h := startMemory(t)
	a, b, x := h.client(), h.client(), h.client()
	for i := range 200 {
		name := fmt.Sprint(i)
		id := x.touch(layout.RootID, name)
		var wg sync.WaitGroup
		for _, c := range []*client{a, b} {
			wg.Go(func() {
				_, err := ask[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id})
				if statusOf(err) == metarpc.Status(syscall.ESTALE) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				wantStatus(t, c.there(id), metarpc.Status(syscall.EINVAL))
				c.closeFile(id)
			})
		}
		wg.Go(func() { x.remove(layout.RootID, name) })
		wg.Wait()
		x.wantGone(id)
	}
	checkCatalog(t, h.engine)
	if n := countRows(t.Context(), h.engine, schema.PrefixOrphan); n != 0 {
		t.Errorf("%d orphans left", n)
	}
}

// TestOpenWaitsForRemoval opens a file whose removal is decided and not yet done: either it is open and stays, or it is gone.
func TestOpenWaitsForRemoval(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	a, b := h.client(), h.client()
	id := a.touch(layout.RootID, "f")
	deciding, decide := make(chan struct{}), make(chan struct{})
	engine.hook(func(batch *catalog.Batch) error {
		for _, key := range batch.Deletes {
			if bytes.Equal(key, schema.InodeKey(id)) {
				close(deciding)
				<-decide
			}
		}
		return nil
	})
	rm, rmCh := a.begin(metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "f"})
	<-deciding
	op, opCh := b.begin(metarpc.OpOpen, &metarpc.OpenArgs{ID: id})
	select {
	case <-opCh:
		close(decide)
		t.Fatal("open answers while it is not known whether the file goes")
	case <-time.After(20 * time.Millisecond):
	}
	close(decide)
	if err := a.finish(rm, rmCh, &metarpc.RemoveResult{}); err != nil {
		t.Error(err)
	}
	wantStatus(t, b.finish(op, opCh, &metarpc.AttrResult{}), metarpc.Status(syscall.ESTALE))
}

// TestSlots checks what a client gets that does not use its slots as it should, and one that does.
func TestSlots(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	status := func(ch chan []byte) metarpc.Status {
		t.Helper()
		r, _, err := metarpc.ParseReplyHeader(<-ch)
		if err != nil {
			t.Fatal(err)
		}
		return r.Status
	}
	renew := func(slot int, seq uint64) metarpc.CallHeader {
		return metarpc.CallHeader{Slot: slot, Sequence: seq, Op: metarpc.OpRenew}
	}
	for i, row := range []struct {
		slot int
		seq  uint64
		want metarpc.Status
	}{
		{0, 5, metarpc.StatusOK},
		{0, 5, metarpc.StatusOK}, // nobody can tell
		{0, 4, metarpc.StatusBadSequence},
		{0, 6, metarpc.StatusOK},
		{c.welcome.Slots, 1, metarpc.StatusBadSlot},
		{c.welcome.Slots - 1, 1, metarpc.StatusOK},
	} {
		if got := status(c.send(renew(row.slot, row.seq), &metarpc.Empty{})); got != row.want {
			t.Errorf("row %d: %v, want %v", i, got, row.want)
		}
	}

	// A call that takes long: resent on a new connection it is not executed again, and answers there.
	other := h.client()
	id := other.create(layout.RootID, "f")
	if _, err := other.layout(id, 0, 1); err != nil {
		t.Fatal(err)
	}
	release := h.files.hold()
	defer release()
	args := &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: 0}
	hdr := metarpc.CallHeader{Slot: 3, Sequence: 1000, Op: metarpc.OpSetAttr}
	c.send(hdr, args)
	h.files.awaitStalled(1)
	if got := status(c.send(renew(3, 1001), &metarpc.Empty{})); got != metarpc.StatusBadSlot {
		t.Errorf("another call on a busy slot: %v", got)
	}
	c.connect()
	ch := c.send(hdr, args)
	if got := status(c.send(renew(4, 1000), &metarpc.Empty{})); got != metarpc.StatusOK { // read after the resent one
		t.Errorf("renew: %v", got)
	}
	h.files.mu.Lock()
	if h.files.stalled != 1 {
		t.Errorf("%d executions", h.files.stalled)
	}
	h.files.mu.Unlock()
	release()
	if got := status(ch); got != metarpc.StatusOK {
		t.Errorf("resent call: %v", got)
	}
	if got := status(c.send(metarpc.CallHeader{Slot: 3, Sequence: 1001, Op: 999}, &metarpc.Empty{})); got != metarpc.StatusBadArgs {
		t.Errorf("unknown op: %v", got)
	}
}

// TestNewestConnection checks that a session leaves its old connection when it appears on a new one.
func TestNewestConnection(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	old := c.conn
	c.mu.Lock()
	c.conn = nil // connect would close it
	c.mu.Unlock()
	c.connect()
	old.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := old.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("old connection: %v", err)
	}
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
}

// Connections that say nothing make room for others of their address, those of clients that renew their sessions do
// not; another address has room all the same.
func TestUnusedConnections(t *testing.T) {
	h := newHost(t, memorytest.New())
	h.config = func(c *Config) {
		c.Door = &admit.Door{Log: c.Log}
		c.Door.Callers.Most = 3
	}
	h.start()
	var silent []net.Conn
	for range 2 {
		conn, err := h.dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		silent = append(silent, conn)
	}
	clients := []*client{h.client(), h.client(), h.client()}
	for _, conn := range silent {
		conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a silent connection was not ended: %v", err)
		}
	}
	conn, err := h.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection beyond those of clients was not refused: %v", err)
	}
	h.from("127.0.0.6")
	for _, c := range append(clients, h.client()) {
		if got := c.attr(layout.RootID); got.ID != layout.RootID {
			t.Errorf("the root's attributes are %+v", got)
		}
	}
}

func TestHello(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	for _, row := range []struct {
		name string
		edit func(*metarpc.Hello)
		want metarpc.Status
	}{
		{"later versions", func(m *metarpc.Hello) { m.Lowest, m.Highest = 99, 100 }, metarpc.StatusVersion},
		{"no such session", func(m *metarpc.Hello) { m.Session[0]++ }, metarpc.StatusBadSession},
		{"another client's session", func(m *metarpc.Hello) { m.Client.ID[0]++ }, metarpc.StatusBadSession},
		{"its session", func(*metarpc.Hello) {}, metarpc.StatusOK},
		{"more versions", func(m *metarpc.Hello) { m.Highest = 100 }, metarpc.StatusOK},
	} {
		other := h.newClient()
		other.hello = c.hello
		row.edit(&other.hello)
		conn, w := other.greet()
		if w.Status != row.want || w.Status != metarpc.StatusOK && w.Message == "" {
			t.Errorf("%s: %v %q, want %v", row.name, w.Status, w.Message, row.want)
		}
		if w.Volume != h.svc.volume.ID {
			t.Errorf("%s: the welcome is of volume %x", row.name, w.Volume)
		}
		conn.Close()
	}
	for name, bytes := range map[string]string{
		"http":     "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
		"no hello": "\x00\x00\x00\x01\x90",
		"no magic": "\x00\x00\x00\x07\x96\x00\xa4nfs4",
	} {
		conn, err := h.dial()
		if err != nil {
			t.Fatal(err)
		}
		conn.Write([]byte(bytes))
		conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: read %d, %v", name, n, err)
		}
		conn.Close()
	}
	// After the hello, what is no frame of a client ends the connection and not the session.
	conn, _ := c.greet()
	frame, _ := metarpc.AppendWelcome(nil, &metarpc.Welcome{Magic: metarpc.Magic})
	conn.Write(frame)
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on")
	}
	conn.Close()
	c.connect()
	must[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
}

// TestShutdown lets a call end that is being executed, refuses others, and resumes with the next service.
func TestShutdown(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	id := c.create(layout.RootID, "f")
	if _, err := c.layout(id, 0, 1); err != nil {
		t.Fatal(err)
	}
	release := h.files.hold()
	defer release()
	hdr, ch := c.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetSize, Size: 5})
	h.files.awaitStalled(1)
	down := make(chan error, 1)
	svc := h.svc
	go func() { down <- svc.Shutdown(context.Background()) }()
	waittest.Until(t, "draining", svc.draining.Load)
	_, err := ask[metarpc.Empty](c, metarpc.OpRenew, &metarpc.Empty{})
	wantStatus(t, err, metarpc.StatusShutdown)
	select {
	case err := <-down:
		t.Fatalf("Shutdown did not wait: %v", err)
	default:
	}
	release()
	var r metarpc.AttrResult
	if err := c.finish(hdr, ch, &r); err != nil || r.Attr.Size != 5 {
		t.Errorf("the call in progress: %+v %v", r, err)
	}
	if err := <-down; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	h.start()
	c.connect()
	if a := c.attr(id); a.Size != 5 {
		t.Errorf("%+v", a)
	}
}

// TestShutdownWelcomes has a client connect while the service goes down: it is told of the session that is in the
// catalog, so it can come back, and the next service's grace period does not wait for a lease.
func TestShutdownWelcomes(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	begun, release := make(chan struct{}), make(chan struct{})
	engine.hook(func(b *catalog.Batch) error {
		if len(b.Puts) == 1 && b.Puts[0].Key[0] == schema.PrefixSession {
			close(begun)
			<-release
		}
		return nil
	})
	c := h.newClient()
	welcomed := make(chan struct{})
	var hello metarpc.Welcome
	go func() {
		defer close(welcomed)
		conn, w := c.greet()
		hello = *w
		conn.Close()
	}()
	<-begun
	engine.hook(nil)
	down := make(chan error, 1)
	svc := h.svc
	go func() { down <- svc.Shutdown(context.Background()) }()
	waittest.Until(t, "draining", svc.draining.Load)
	close(release)
	<-welcomed
	if err := <-down; err != nil || hello.Session == (metarpc.SessionID{}) {
		t.Fatalf("%v %+v", err, hello)
	}
	h.start()
	c.hello.Session = hello.Session
	c.connect()
	must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
	select {
	case <-h.svc.graceOver:
	case <-time.After(10 * time.Second):
		t.Error("the grace period goes on")
	}
}

// TestSlowReader sees to it that a client which does not read costs bounded memory and nobody else's time.
func TestSlowReader(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	dir := c.mkdir(layout.RootID, "d")
	for i := range 200 {
		c.touch(dir, fmt.Sprintf("%0200d", i))
	}
	slow := h.newClient()
	conn, w := slow.greet()
	defer conn.Close()
	conn.SetWriteDeadline(time.Now().Add(2 * time.Second))
	sent := 0
	for seq := uint64(1); ; seq++ {
		frame, _ := metarpc.AppendCall(nil, metarpc.CallHeader{Slot: int(seq) % w.Slots, Sequence: seq, Op: metarpc.OpReadDir},
			&metarpc.ReadDirArgs{ID: dir, Limit: 1000})
		if _, err := conn.Write(frame); err != nil {
			break
		}
		sent++
		if seq%64 == 0 {
			h.svc.mu.Lock()
			for sc := range h.svc.conns {
				sc.mu.Lock()
				if most := maxQueued + w.Slots*200*400; sc.queued > most {
					t.Errorf("%d bytes wait for a client that does not read, want at most %d", sc.queued, most)
				}
				sc.mu.Unlock()
			}
			h.svc.mu.Unlock()
			c.attr(dir)
		}
	}
	if sent < w.Slots {
		t.Errorf("only %d calls taken", sent)
	}
}
