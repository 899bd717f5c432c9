package meta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/schema"
)

// onceCall is a call of an op that may be executed only once.
type onceCall struct {
	name string
	op   metarpc.Op
	args any
}

// onceCalls prepares the root directory and returns a call for each such op, none of which succeeds twice in the same way.
func onceCalls(c *client) []onceCall {
	c.t.Helper()
	const root = layout.RootID
	d := c.mkdir(root, "d")
	f := c.touch(root, "f")
	c.touch(root, "unlink-me")
	c.mkdir(root, "rmdir-me")
	c.touch(root, "old")
	c.touch(root, "victim")
	long := c.create(root, "long")
	must[metarpc.Empty](c, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: "user.old", Value: []byte("x")})
	if _, err := c.layout(long, 0, 1); err != nil {
		c.t.Fatal(err)
	}
	return []onceCall{
		{"setattr", metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: f, Mask: metarpc.SetMode | metarpc.SetMtimeNow, Mode: 0o600}},
		{"truncate", metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: long, Mask: metarpc.SetSize, Size: 1000}},
		{"create", metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "new", Mode: 0o644, Exclusive: true}},
		{"create with a layout", metarpc.OpCreate, &metarpc.CreateArgs{Parent: root, Name: "to be written", Mode: 0o644, Exclusive: true, Layout: true}},
		{"mkdir", metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: root, Name: "newdir", Mode: syscall.S_IFDIR | 0o755}},
		{"link", metarpc.OpLink, &metarpc.LinkArgs{ID: f, Parent: d, Name: "hard"}},
		{"unlink", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "unlink-me"}},
		{"rmdir", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: root, Name: "rmdir-me", Dir: true}},
		{"rename", metarpc.OpRename, &metarpc.RenameArgs{OldParent: root, OldName: "old", NewParent: root, NewName: "victim"}},
		{"rename a directory", metarpc.OpRename, &metarpc.RenameArgs{OldParent: root, OldName: "newdir", NewParent: d, NewName: "sub"}},
		{"file without a name", metarpc.OpTmpFile, &metarpc.TmpFileArgs{Parent: root, Mode: 0o600}},
		{"setxattr", metarpc.OpSetXattr, &metarpc.XattrArgs{ID: f, Name: "user.a", Value: []byte("1"), Flags: metarpc.XattrCreate}},
		{"removexattr", metarpc.OpRemoveXattr, &metarpc.XattrArgs{ID: f, Name: "user.old"}},
	}
}

// TestOnceTable makes sure that onceCalls leaves no such op out.
func TestOnceTable(t *testing.T) {
	h := startMemory(t)
	seen := map[metarpc.Op]bool{}
	for _, call := range onceCalls(h.client()) {
		seen[call.op] = true
	}
	seen[metarpc.OpReserve] = true // changes nothing in the catalog; see TestReserveTwice
	for op := metarpc.Op(1); op.Valid(); op++ {
		if op.Once() != seen[op] {
			t.Errorf("%v: once %t, tested %t", op, op.Once(), seen[op])
		}
		if int(op) >= len(handlers) || handlers[op] == nil {
			t.Errorf("%v has no handler", op)
		}
	}
}

// TestExactlyOnce resends each call that must not be executed twice: to the same service, on another connection, and to
// the next one, as if the answer had been lost in the crash.
func TestExactlyOnce(t *testing.T) {
	hosts := map[string]func(*testing.T) (*host, *client){
		"shard 0 of 2": func(t *testing.T) (*host, *client) {
			c := startCluster(t, 2, nil)
			return c.hosts[0], c.client() // that of shard 0, which the root and all in it are of
		},
	}
	for kind, open := range engines {
		hosts[kind] = func(t *testing.T) (*host, *client) {
			h := newHost(t, open(t)).start()
			return h, h.client()
		}
	}
	for kind, open := range hosts {
		t.Run(kind, func(t *testing.T) {
			h, c := open(t)
			for _, call := range onceCalls(c) {
				hdr, ch := c.begin(call.op, call.args)
				first := <-ch
				r, bare, err := metarpc.ParseReplyHeader(first)
				if err != nil || r.Status != metarpc.StatusOK {
					t.Fatalf("%s: %+v %v", call.name, r, err)
				}
				result := call.op.NewResult()
				if err := metarpc.DecodeResult(call.op, bare, result); err != nil {
					t.Fatal(err)
				}
				later, err := metarpc.AppendReply(nil, metarpc.Version, r, withoutLease(result))
				if err != nil {
					t.Fatal(err)
				}
				later = later[4:] // the length
				h.settle()
				state := dump(t, h.engine)
				again := func(how string) {
					t.Helper()
					if second := <-c.send(hdr, call.args); !bytes.Equal(first, second) {
						t.Errorf("%s, %s: another answer: %x, first %x", call.name, how, second, first)
					}
					if after := dump(t, h.engine); !maps.Equal(state, after) {
						for key := range after {
							if state[key] == after[key] {
								delete(state, key)
								delete(after, key)
							}
						}
						t.Errorf("%s, %s: the catalog has changed from %q to %q", call.name, how, state, after)
					}
				}
				again("same connection")
				c.connect()
				again("next connection")
				h.restart()
				c.connect()
				first = later // no lease is behind what another instance said
				again("next service")
				again("next service, once more")
				must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
				// A file without a name that the client had open before is not open any more, but what it resent opens it.
				open := int64(0)
				if call.op == metarpc.OpTmpFile {
					open = 1
				}
				waittest.Until(t, "files without names are removed", func() bool {
					return countRows(t.Context(), h.engine, schema.PrefixOrphan) == open
				})
				c.free <- hdr.Slot
			}
			checkCatalog(t, h.engine)
		})
	}
}

// fault is what happens to a commit that does not say how it ended, and to the fence by which that is found out.
type fault int

const (
	faultDone         fault = iota + 1 // it is done
	faultLost                          // it is not
	faultFencesLost                    // it is done; some fences do not say how they ended, and are not done
	faultFenceDone                     // it is not; the fence is done, and does not say so
	faultBefore                        // it is done right before the fence
	faultAfter                         // it comes right after the fence
	faultLostAndAfter                  // the same, and the fence does not say that it is done
	faults
)

// uncertain is an engine whose commits sometimes do not say how they ended.
type uncertain struct {
	catalog.Engine
	next atomic.Int32 // the fault that the next commit has which is a call's; 0 = none

	mu   sync.Mutex
	now  fault
	lost int // fences that are lost
	late catalog.Batch
	came error // what became of late when it came
}

func (e *uncertain) Commit(ctx context.Context, b *catalog.Batch) error {
	if !slices.ContainsFunc(b.Puts, func(row catalog.Row) bool { return row.Key[0] == schema.PrefixReply }) {
		return e.Engine.Commit(ctx, b)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if fence := b.Len() == 2 && len(b.Guards) == 1; !fence {
		if e.now = fault(e.next.Swap(0)); e.now == 0 {
			return e.Engine.Commit(ctx, b)
		}
		e.late, e.lost = *b, 3
		if e.now == faultDone || e.now == faultFencesLost {
			return errors.Join(e.Engine.Commit(ctx, b), catalog.ErrUnknown)
		}
		return catalog.ErrUnknown
	}
	ctx = context.WithoutCancel(ctx)
	if e.now == faultFencesLost && e.lost > 0 {
		e.lost--
		return catalog.ErrUnknown
	}
	if e.now == faultBefore {
		e.came = e.Engine.Commit(ctx, &e.late)
	}
	err := e.Engine.Commit(ctx, b)
	if e.now == faultAfter || e.now == faultLostAndAfter {
		e.came = e.Engine.Commit(ctx, &e.late)
	}
	if e.now == faultFenceDone || e.now == faultLostAndAfter {
		err = errors.Join(err, catalog.ErrUnknown)
	}
	e.now = 0
	return err
}

// TestUnknownOutcome has each such call executed exactly once though the engine did not say whether it did.
func TestUnknownOutcome(t *testing.T) {
	for f := range faults - 1 {
		f++
		engine := &uncertain{Engine: memorytest.New()}
		h := newHost(t, engine).start()
		c := h.client()
		for _, call := range onceCalls(c) {
			engine.next.Store(int32(f))
			hdr, ch := c.begin(call.op, call.args)
			if err := c.finish(hdr, ch, call.op.NewResult()); err != nil {
				t.Errorf("fault %d: %s: %v", f, call.name, err)
			}
			if engine.next.Load() != 0 || engine.now != 0 {
				t.Errorf("fault %d: %s: not met", f, call.name)
			}
			if guard := (*catalog.GuardError)(nil); errors.As(engine.came, &guard) != (f == faultAfter || f == faultLostAndAfter) {
				t.Errorf("fault %d: %s: what came later: %v", f, call.name, engine.came)
			}
			engine.came = nil
		}
		// What the outcome of a change is told to has been told.
		h.svc.mu.Lock()
		for id, file := range h.svc.files {
			if file.removing || file.sizing || file.cut != nil || file.waiters != 0 {
				t.Errorf("fault %d: inode %d left as %+v", f, id, file)
			}
		}
		for id, l := range h.svc.leases {
			if l.changing != 0 {
				t.Errorf("fault %d: inode %d is marked", f, id)
			}
		}
		h.svc.mu.Unlock()
		checkCatalog(t, engine)
	}
}

// undecided is an engine that does not say how one commit ended, nor what became of it until the test lets it.
type undecided struct {
	catalog.Engine
	fault atomic.Int32  // what the next commit of a call is: faultDone or faultLost; 0 = neither
	met   chan struct{} // closed when somebody wants to know
	tell  chan struct{} // closed by the test
}

func (e *undecided) Commit(ctx context.Context, b *catalog.Batch) error {
	if !slices.ContainsFunc(b.Puts, func(row catalog.Row) bool { return row.Key[0] == schema.PrefixReply }) {
		return e.Engine.Commit(ctx, b)
	}
	switch fault(e.fault.Swap(0)) {
	case faultDone:
		return errors.Join(e.Engine.Commit(ctx, b), catalog.ErrUnknown)
	case faultLost:
		return catalog.ErrUnknown
	}
	if b.Len() == 2 && len(b.Guards) == 1 { // the fence
		close(e.met)
		select {
		case <-e.tell:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e.Engine.Commit(ctx, b)
}

// TestUnknownWhenItEnds ends a session, or the service, while it is not known what became of a call. Until that is known all that was marked stays so, and
// nothing that was taken is given back.
func TestUnknownWhenItEnds(t *testing.T) {
	for _, f := range []fault{faultDone, faultLost} {
		for _, stop := range []bool{false, true} {
			for _, op := range []metarpc.Op{metarpc.OpRemove, metarpc.OpCreate} {
				t.Run(fmt.Sprintf("%v, done %t, stop %t", op, f == faultDone, stop), func(t *testing.T) { unknownWhenItEnds(t, f, stop, op) })
			}
		}
	}
}

func unknownWhenItEnds(t *testing.T, f fault, stop bool, op metarpc.Op) {
	engine := &undecided{Engine: memorytest.New(), met: make(chan struct{}), tell: make(chan struct{})}
	h := newHost(t, engine).start()
	c, other := h.client(), h.client()
	dir := c.mkdir(layout.RootID, "d")
	name, args := "f", any(createToWrite(dir, "f"))
	var id layout.FileID
	if op == metarpc.OpRemove {
		id, args = c.touch(dir, name), &metarpc.RemoveArgs{Parent: dir, Name: name}
	}
	h.svc.mu.Lock()
	sess := h.svc.sessions[c.welcome.Session]
	h.svc.mu.Unlock()
	engine.fault.Store(int32(f))
	c.begin(op, args)
	<-engine.met
	if stop {
		h.kill(h.svc)
	} else {
		h.svc.end(sess, "the test ends it")
	}
	marked := func() bool {
		h.svc.mu.Lock()
		defer h.svc.mu.Unlock()
		l, file := h.svc.leases[dir], h.svc.files[id]
		return l != nil && l.changing > 0 && (op == metarpc.OpCreate || file != nil && file.removing)
	}
	settled := func() []error {
		h.files.mu.Lock()
		defer h.files.mu.Unlock()
		return h.files.settled
	}
	if !marked() || len(settled()) > 0 {
		t.Errorf("before it is known: marked %t, data files taken for %v", marked(), settled())
	}
	if stop {
		h.start()
		other.connect()
		h.svc.endGrace()
	} else {
		close(engine.tell)
		waittest.Until(t, "nothing is left of the session", func() bool {
			_, err := engine.Get(t.Context(), schema.SessionKey(sess.id))
			return errors.Is(err, catalog.ErrNotFound)
		})
		got := settled()
		if marked() || op == metarpc.OpCreate && (len(got) != 1 || (got[0] == nil) != (f == faultDone)) {
			t.Errorf("when it is known: marked %t, data files taken for %v", marked(), got)
		}
	}
	r := must[metarpc.LookupResult](other, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: name})
	if there := (op == metarpc.OpRemove) == (f == faultLost); (r.Attr.ID != 0) != there {
		t.Errorf("and then: %+v", r)
	}
	checkCatalog(t, engine)
}

// TestUnknownAssignment ends a session while data servers' side does not know whether it has made it a writer: its clean-up comes when that is known.
func TestUnknownAssignment(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	h := newHost(t, engine).start()
	c := h.client()
	id := c.create(layout.RootID, "f")
	h.svc.mu.Lock()
	sess := h.svc.sessions[c.welcome.Session]
	h.svc.mu.Unlock()
	known := make(chan struct{})
	h.files.mu.Lock()
	h.files.settling = known
	h.files.assigned = func() { h.svc.end(sess, "the test ends it") }
	h.files.mu.Unlock()
	var lost *catalog.Batch
	engine.hook(func(b *catalog.Batch) error {
		if slices.ContainsFunc(b.Puts, func(row catalog.Row) bool { return row.Key[0] == schema.PrefixLayout }) {
			lost = b
			return catalog.ErrUnknown
		}
		return nil
	})
	c.begin(metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: 1})
	waittest.Until(t, "the call waits", func() bool {
		h.files.mu.Lock()
		defer h.files.mu.Unlock()
		return slices.Contains(h.files.awaited, id)
	})
	engine.hook(nil)
	if err := engine.Commit(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	close(known)
	waittest.Until(t, "nothing is left of the session", func() bool {
		_, err := engine.Get(t.Context(), schema.SessionKey(sess.id))
		return errors.Is(err, catalog.ErrNotFound)
	})
	h.wantRows(1, 0)
}

// TestUnknownSession has sessions made though the engine does not say whether it did: one for each client, and none that nobody knows of.
func TestUnknownSession(t *testing.T) {
	for _, done := range []bool{false, true} {
		t.Run(fmt.Sprintf("done %t", done), func(t *testing.T) {
			engine := &hooked{Engine: memorytest.New()}
			h := newHost(t, engine).start()
			var lost []*catalog.Batch
			unknown := 3
			if done {
				unknown = 1
			}
			engine.hook(func(b *catalog.Batch) error {
				if unknown == 0 || len(b.Puts) != 1 || b.Puts[0].Key[0] != schema.PrefixSession {
					return nil
				}
				unknown--
				if done {
					return errors.Join(engine.Engine.Commit(t.Context(), b), catalog.ErrUnknown)
				}
				lost = append(lost, b)
				return catalog.ErrUnknown
			})
			sessions := func(ended bool) (n int) {
				for kv, err := range engine.Scan(t.Context(), []byte{schema.PrefixSession}, []byte{schema.PrefixSession + 1}, catalog.ScanOptions{}) {
					var row schema.Session
					if err := errors.Join(err, schema.Decode(kv.Value, &row)); err != nil {
						t.Fatal(err)
					}
					if row.Ended == ended {
						n++
					}
				}
				return n
			}
			c := h.client()
			if n := sessions(false); n != 1 || unknown != 0 {
				t.Fatalf("%d session rows, %d faults left", n, unknown)
			}
			must[metarpc.Empty](c, metarpc.OpEndSession, &metarpc.Empty{})
			waittest.Until(t, "the session has ended", func() bool { return sessions(true) == 1 && sessions(false) == 0 })
			h.kill(h.svc) // waits for the clean-up
			for _, b := range lost {
				if err := engine.Commit(t.Context(), b); err == nil {
					t.Error("a session that has ended is made once more")
				}
			}
			h.start()
			waittest.Until(t, "no session is left", func() bool { return sessions(true)+sessions(false) == 0 })
		})
	}
}

// TestReplayedCreateIsOpen checks that a file whose creation is answered by the next service is open there.
func TestReplayedCreateIsOpen(t *testing.T) {
	h := startMemory(t)
	c, other := h.client(), h.client()
	args := &metarpc.CreateArgs{Parent: layout.RootID, Name: "f", Mode: 0o644}
	hdr, ch := c.begin(metarpc.OpCreate, args)
	<-ch
	h.restart()
	c.connect()
	other.connect()
	var r metarpc.CreateResult
	if err := c.finish(hdr, c.send(hdr, args), &r); err != nil {
		t.Fatal(err)
	}
	h.svc.endGrace()
	other.remove(layout.RootID, "f")
	if a := c.attr(r.Attr.ID); a.Nlink != 0 {
		t.Errorf("%+v", a)
	}
	c.closeFile(r.Attr.ID)
	c.wantGone(r.Attr.ID)
}

// TestInodeNumbers checks that no number is given out twice, whatever happens, and that each is of the shard it was asked for.
func TestInodeNumbers(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			engine := memorytest.New()
			if _, err := OpenVolume(t.Context(), engine, layout.Policy{}, shards); err != nil {
				t.Fatal(err)
			}
			seen := map[layout.FileID]bool{layout.RootID: true}
			a, b := newNumbers(engine, shards), newNumbers(engine, shards)
			for i := range 3 * shards * layout.ShardChunk {
				n, shard := a, i%shards
				switch {
				case i/shards%3 == 0:
					n = b
				case i%1000 == 1: // a crash
					a = newNumbers(engine, shards)
				}
				id, err := n.take(t.Context(), shard)
				if err != nil {
					t.Fatal(err)
				}
				if seen[id] || layout.ShardOf(id, shards) != shard {
					t.Fatalf("number %d of shard %d: twice %t", id, shard, seen[id])
				}
				seen[id] = true
			}
		})
	}
}

func TestVolume(t *testing.T) {
	engine := memorytest.New()
	vol, err := OpenVolume(t.Context(), engine, layout.Policy{Mirrors: 2}, 1)
	if err != nil {
		t.Fatal(err)
	}
	want := layout.Policy{StripeUnit: DefaultPolicy.StripeUnit, StripeCount: DefaultPolicy.StripeCount, Mirrors: 2}
	if vol.Policy.Layout() != want || vol.ID == [16]byte{} {
		t.Errorf("%+v", vol)
	}
	again, err := OpenVolume(t.Context(), engine, layout.Policy{Mirrors: 3}, 1)
	if err != nil || again != vol {
		t.Errorf("%+v %v, want %+v", again, err, vol)
	}
	checkCatalog(t, engine)
	if few, err := OpenVolume(t.Context(), memorytest.New(), layout.Policy{Mirrors: 2, MinCopies: 2}, 16); err != nil || few.Format != schema.FormatCopies {
		t.Errorf("%+v, %v", few, err)
	}
	vol.Format = schema.FormatNewest + 1
	var b catalog.Batch
	later := append(schema.Encode(&vol), 0xc0) // may have other fields, too
	later[0]++
	for _, row := range [][]byte{schema.Encode(&vol), later} {
		b.Reset()
		b.Put(schema.KeyVolume, row)
		if err := engine.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		if _, err := New(t.Context(), Config{Engine: engine, Files: newFakeFiles(engine)}); err == nil || !strings.Contains(err.Error(), "has format 10, this program knows formats 3 to 9: upgrade weftd") {
			t.Errorf("a volume of another format: %v", err)
		}
	}
}

// hooked is an engine whose commits are first shown to a function, which may keep them waiting or refuse them.
type hooked struct {
	catalog.Engine
	mu     sync.Mutex
	before func(b *catalog.Batch) error
}

func (e *hooked) hook(before func(b *catalog.Batch) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.before = before
}

func (e *hooked) Commit(ctx context.Context, b *catalog.Batch) error {
	e.mu.Lock()
	before := e.before
	e.mu.Unlock()
	if before != nil {
		if err := before(b); err != nil {
			return err
		}
	}
	return e.Engine.Commit(ctx, b)
}

// TestContention checks that a change which never gets through ends with an error after a bounded number of tries, and that
// one contended file does not keep the reports of others from being recorded.
func TestContention(t *testing.T) {
	engine := &hooked{Engine: memorytest.New()}
	var refused atomic.Int64
	refuse := func(which func(b *catalog.Batch) bool) {
		refused.Store(0)
		engine.hook(func(b *catalog.Batch) error {
			if !which(b) {
				return nil
			}
			refused.Add(1)
			return catalog.ErrConflict
		})
	}
	h := newHost(t, engine).start()
	c := h.client()
	var reports []metarpc.SizeReport
	for i := range 10 {
		reports = append(reports, metarpc.SizeReport{ID: c.create(layout.RootID, string(rune('a'+i))), End: int64(i + 1)})
	}
	refuse(func(b *catalog.Batch) bool { return len(b.Guards) > 3 })
	for i, a := range c.report(false, reports...) {
		if a.Size != int64(i+1) {
			t.Errorf("%+v", a)
		}
	}
	if refused.Load() == 0 {
		t.Error("no conflict met")
	}
	refuse(func(b *catalog.Batch) bool { return len(b.Puts) > 0 })
	_, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "x"})
	wantStatus(t, err, metarpc.StatusInternal)
	if n := refused.Load(); n != retry.Tries {
		t.Errorf("%d tries, want %d", n, retry.Tries)
	}
}

func TestConfig(t *testing.T) {
	engine := memorytest.New()
	good := Config{Engine: engine, Files: newFakeFiles(engine)}
	for name, edit := range map[string]func(*Config){
		"no engine":       func(c *Config) { c.Engine = nil },
		"no files":        func(c *Config) { c.Files = nil },
		"short lease":     func(c *Config) { c.Lease = 1 },
		"long lease":      func(c *Config) { c.Lease = 2 * metarpc.MaxLease },
		"too many slots":  func(c *Config) { c.Slots = metarpc.MaxSlots + 1 },
		"negative slots":  func(c *Config) { c.Slots = -1 },
		"policy too wide": func(c *Config) { c.Policy.StripeCount = layout.MaxStripeCount + 1 },
	} {
		bad := good
		edit(&bad)
		if _, err := New(t.Context(), bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}

// TestOpenVolumeElsewhere does not make a volume of a catalog that has something else.
func TestOpenVolumeElsewhere(t *testing.T) {
	for _, c := range []struct{ key, want string }{
		{string(schema.KeyImport), "import"},
		{string(schema.InodeKey(7)), "no volume"},
	} {
		engine := memorytest.New()
		var b catalog.Batch
		b.Put([]byte(c.key), []byte("x"))
		if err := engine.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenVolume(t.Context(), engine, layout.Policy{}, 1); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("with row %q: %v", c.key, err)
		}
		if _, err := engine.Get(t.Context(), schema.KeyVolume); !errors.Is(err, catalog.ErrNotFound) {
			t.Errorf("with row %q a volume was made: %v", c.key, err)
		}
	}
	engine := memorytest.New()
	var b catalog.Batch
	b.Put(schema.MemberKey([16]byte{1}), schema.Encode(&schema.Member{}))
	if err := engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenVolume(t.Context(), engine, layout.Policy{}, 1); err != nil {
		t.Errorf("with a member: %v", err)
	}
}
