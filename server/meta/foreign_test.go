package meta

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// sibling makes something in the root, whose shard is 0, and gives it the name x in a directory of shard 1.
func (c *cluster) sibling(cl *client, mode uint32) (dir, id layout.FileID) {
	c.t.Helper()
	dir = c.dirAt(cl, 1, "d")
	if mode == syscall.S_IFDIR {
		for name := 0; ; name++ {
			id = cl.mkdir(dir, fmt.Sprint("x", name))
			if layout.ShardOf(id, len(c.hosts)) == 0 {
				must[metarpc.Empty](cl, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: fmt.Sprint("x", name), NewParent: dir, NewName: "x"})
				c.sync()
				return dir, id
			}
			must[metarpc.RemoveResult](cl, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: fmt.Sprint("x", name), Dir: true})
		}
	}
	args := &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: "x", Mode: mode | 0o644}
	if mode == syscall.S_IFLNK {
		args.Target = "y"
	}
	id = must[metarpc.AttrResult](cl, metarpc.OpMakeNode, args).Attr.ID
	must[metarpc.Empty](cl, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "x", NewParent: dir, NewName: "x"})
	c.sync()
	return dir, id
}

// TestForeignShown looks at what is told of inodes of other shards that a directory has.
func TestForeignShown(t *testing.T) {
	for _, mode := range []uint32{syscall.S_IFREG, syscall.S_IFDIR, syscall.S_IFLNK, syscall.S_IFIFO} {
		t.Run(fmt.Sprintf("%o", mode), func(t *testing.T) {
			c := startCluster(t, 2, nil)
			cl := c.client()
			dir, id := c.sibling(cl, mode)
			want := metarpc.Attr{ID: id, Mode: mode}
			if mode == syscall.S_IFDIR {
				want = cl.attr(id)
			}
			l := must[metarpc.LookupResult](cl, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "x"})
			if l.Attr != want || l.Lease != 0 || l.Names != metarpc.LeaseNames {
				t.Errorf("lookup: %+v, want %+v without a lease", l, want)
			}
			r := must[metarpc.ReadDirResult](cl, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: 10})
			if len(r.Entries) != 1 || r.Entries[0].Attr != want || r.Entries[0].Lease != 0 {
				t.Errorf("readdir: %+v, want %+v without a lease", r, want)
			}
			r0, err := ask[metarpc.CreateResult](cl, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "x", Mode: 0o600})
			switch mode {
			case syscall.S_IFDIR:
				wantStatus(t, err, metarpc.Status(syscall.EISDIR))
			case syscall.S_IFREG:
				if err != nil || r0.Created || r0.Attr != want || r0.Lease != 0 {
					t.Errorf("create: %+v %v", r0, err)
				}
				_, err := ask[metarpc.LayoutResult](cl, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: 1})
				wantStatus(t, err, metarpc.Status(syscall.EBADF)) // it is not open
				_, err = ask[metarpc.CreateResult](cl, metarpc.OpCreate, &metarpc.CreateArgs{Parent: dir, Name: "x", Exclusive: true})
				wantStatus(t, err, metarpc.Status(syscall.EEXIST))
			default:
				wantStatus(t, err, metarpc.Status(syscall.EEXIST))
			}
			// Names of what is no directory are of its shard, those of directories of any.
			shards := map[int]bool{}
			for i := range 40 {
				made := must[metarpc.AttrResult](cl, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: fmt.Sprint(i), Mode: syscall.S_IFDIR | 0o755})
				shard := layout.ShardOf(made.Attr.ID, 2)
				shards[shard] = true
				if (made.Lease != 0) != (shard == 1) {
					t.Errorf("a new directory of shard %d came with lease %d", shard, made.Lease)
				}
			}
			if len(shards) != 2 {
				t.Error("all new directories are of one shard")
			}
			if shard := layout.ShardOf(cl.touch(dir, "file"), 2); shard != 1 {
				t.Errorf("a file of shard %d in a directory of shard 1", shard)
			}
			c.check()
		})
	}
}

// TestWrongShard makes calls in the session for another shard.
func TestWrongShard(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	dir, id := c.sibling(cl, syscall.S_IFREG)
	mine := cl.touch(dir, "mine")
	wrong := cl.parts[1]
	wrong.parts = nil
	for _, call := range []onceCall{
		{"getattr", metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}},
		{"remove", metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "x"}},
		{"rename", metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "x", NewParent: dir, NewName: "y"}},
		{"link", metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dir, Name: "y"}},
		{"close", metarpc.OpClose, &metarpc.CloseArgs{IDs: []layout.FileID{mine, id}}},
		{"layoutcommit", metarpc.OpLayoutCommit, &metarpc.LayoutCommitArgs{Reports: []metarpc.SizeReport{{ID: mine}, {ID: id}}}},
		{"leasereturn", metarpc.OpLeaseReturn, &metarpc.LeaseReturnArgs{IDs: []layout.FileID{mine, id}}},
	} {
		hdr, ch := wrong.begin(call.op, call.args)
		if err := wrong.finish(hdr, ch, call.op.NewResult()); statusOf(err) != metarpc.StatusBadArgs {
			t.Errorf("%s: %v", call.name, err)
		}
	}
	wrong.parts = cl.parts
	c.check()
}

// TestForeignRemoval removes what is of another shard than its directory.
func TestForeignRemoval(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	gone := func(id layout.FileID) func() bool {
		return func() bool { return statusOf(cl.there(id)) == metarpc.Status(syscall.ESTALE) }
	}
	for _, how := range []string{"unlink", "rename"} {
		remove := func(dir layout.FileID, isDir bool) error {
			if how == "unlink" {
				_, err := ask[metarpc.RemoveResult](cl, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: "x", Dir: isDir})
				return err
			}
			if isDir {
				cl.mkdir(dir, "other")
			} else {
				cl.touch(dir, "other")
			}
			_, err := ask[metarpc.Empty](cl, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: "other", NewParent: dir, NewName: "x"})
			return err
		}
		t.Run(how+" of a file", func(t *testing.T) {
			dir, id := c.sibling(cl, syscall.S_IFREG)
			if err := remove(dir, false); err != nil {
				t.Fatal(err)
			}
			waittest.Until(t, "the file is gone", gone(id))
		})
		t.Run(how+" of a file with two names", func(t *testing.T) {
			dir, id := c.sibling(cl, syscall.S_IFREG)
			must[metarpc.AttrResult](cl, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dir, Name: "second"})
			if err := remove(dir, false); err != nil {
				t.Fatal(err)
			}
			if a := cl.attr(id); a.Nlink != 1 {
				t.Errorf("%+v", a)
			}
		})
		t.Run(how+" of an open file", func(t *testing.T) {
			dir, id := c.sibling(cl, syscall.S_IFREG)
			cl.open(id)
			if err := remove(dir, false); err != nil {
				t.Fatal(err)
			}
			if a := cl.attr(id); a.Nlink != 0 {
				t.Errorf("%+v", a)
			}
			_, err := ask[metarpc.AttrResult](cl, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dir, Name: "again"})
			wantStatus(t, err, metarpc.Status(syscall.ENOENT))
			wantStatus(t, cl.there(id), metarpc.Status(syscall.EINVAL))
			waittest.Until(t, "its service knows that it has no name", func() bool {
				svc := c.svc(0)
				svc.mu.Lock()
				defer svc.mu.Unlock()
				return svc.files[id].orphan
			})
			cl.closeFile(id)
			cl.wantGone(id)
		})
		t.Run(how+" of a link", func(t *testing.T) {
			dir, id := c.sibling(cl, syscall.S_IFLNK)
			must[metarpc.Empty](cl, metarpc.OpSetXattr, &metarpc.XattrArgs{ID: id, Name: "trusted.a", Value: []byte("1")})
			if err := remove(dir, false); err != nil {
				t.Fatal(err)
			}
			cl.wantGone(id)
			if a := cl.attr(id); a.Nlink != 0 { // its service remembers it
				t.Errorf("%+v", a)
			}
		})
		t.Run(how+" of a directory", func(t *testing.T) {
			dir, id := c.sibling(cl, syscall.S_IFDIR)
			cl.touch(id, "a")
			wantStatus(t, remove(dir, true), metarpc.Status(syscall.ENOTEMPTY))
			cl.remove(id, "a")
			if how == "rename" {
				must[metarpc.RemoveResult](cl, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: "other", Dir: true})
			}
			if err := remove(dir, true); err != nil {
				t.Fatal(err)
			}
			if a := cl.attr(id); a.Nlink != 0 {
				t.Errorf("%+v", a)
			}
			_, err := ask[metarpc.AttrResult](cl, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: id, Name: "a", Mode: syscall.S_IFIFO})
			wantStatus(t, err, metarpc.Status(syscall.ENOENT))
			_, err = ask[metarpc.Empty](cl, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: "x", NewParent: id, NewName: "x"})
			wantStatus(t, err, metarpc.Status(syscall.ENOENT))
		})
	}
	c.check()
}

// holds reports whether a batch relies on what shard 0 holds.
func holds(b *catalog.Batch) bool {
	return slices.ContainsFunc(b.Guards, func(g catalog.Guard) bool { return string(g.Key) == string(schema.ShardKey(0)) })
}

// TestLostServices loses one of the two services that an operation needs, at each of its steps. The client is answered once and for good all
// the same, and nothing is left over.
func TestLostServices(t *testing.T) {
	ops := []struct {
		name string
		mode uint32
		call func(dir layout.FileID) onceCall
	}{
		{"unlink", syscall.S_IFREG, func(dir layout.FileID) onceCall {
			return onceCall{op: metarpc.OpRemove, args: &metarpc.RemoveArgs{Parent: dir, Name: "x"}}
		}},
		{"unlink of a link", syscall.S_IFLNK, func(dir layout.FileID) onceCall {
			return onceCall{op: metarpc.OpRemove, args: &metarpc.RemoveArgs{Parent: dir, Name: "x"}}
		}},
		{"rmdir", syscall.S_IFDIR, func(dir layout.FileID) onceCall {
			return onceCall{op: metarpc.OpRemove, args: &metarpc.RemoveArgs{Parent: dir, Name: "x", Dir: true}}
		}},
		{"rename over it", syscall.S_IFREG, func(dir layout.FileID) onceCall {
			return onceCall{op: metarpc.OpRename, args: &metarpc.RenameArgs{OldParent: dir, OldName: "other", NewParent: dir, NewName: "x"}}
		}},
	}
	// When the step is reached, and how the rest of the operation is kept from going on until release.
	type step func(c *cluster, reached func(), release <-chan struct{})
	before := func(c *cluster, reached func(), release <-chan struct{}) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.onHold = func(from, to int, _ *Hold) error {
			if from == 1 {
				reached()
				<-release
			}
			return nil
		}
	}
	between := func(c *cluster, reached func(), release <-chan struct{}) {
		c.onCommit(1, func(b *catalog.Batch) error {
			if holds(b) {
				reached()
				<-release
			}
			return nil
		})
	}
	after := func(c *cluster, reached func(), release <-chan struct{}) {
		e := c.engineOf(1)
		e.mu.Lock()
		e.after = func(b *catalog.Batch, err error) error {
			if holds(b) && err == nil {
				reached()
				<-release
			}
			return err
		}
		e.mu.Unlock()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.settle = func(from, to int, s *Settle) error { // what is lost does not hear it
			select {
			case <-release:
				return nil
			default:
				return errLost
			}
		}
	}
	steps := []struct {
		name string
		at   step
	}{{"before the hold", before}, {"before the commit", between}, {"before it is settled", after}}
	for _, op := range ops {
		for _, lost := range []int{1, 0} {
			for _, step := range steps {
				t.Run(fmt.Sprintf("%s, %s, %s", op.name, map[int]string{1: "who does it", 0: "who has the inode"}[lost], step.name), func(t *testing.T) {
					t.Parallel()
					c := startCluster(t, 2, nil)
					cl, other := c.client(), c.client()
					dir, id := c.sibling(cl, op.mode)
					if op.name == "rename over it" {
						cl.touch(dir, "other")
					}
					reached, release := make(chan struct{}), make(chan struct{})
					goOn := sync.OnceFunc(func() { close(release) })
					t.Cleanup(goOn)
					step.at(c, sync.OnceFunc(func() { close(reached) }), release)
					call := op.call(dir)
					answer := make(chan error, 1)
					go func() { // ends with the answer
						var err error
						if call.op == metarpc.OpRemove {
							_, err = ask[metarpc.RemoveResult](cl, call.op, call.args)
						} else {
							_, err = ask[metarpc.Empty](cl, call.op, call.args)
						}
						answer <- err
					}()
					select {
					case <-reached:
					case <-time.After(20 * time.Second):
						t.Fatal("it does not come so far")
					}
					if lost == 1 {
						c.engineOf(1).dead.Store(true)
						goOn()
					}
					c.kill(lost)
					c.start(lost)
					if lost == 1 && step.name == "before it is settled" && call.op == metarpc.OpRemove {
						// Somebody else gives the name to something else before the client asks again.
						c.comeBack(1, []*client{other})
						c.svc(1).endGrace()
						if _, err := ask[metarpc.AttrResult](other, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: "x", Mode: syscall.S_IFIFO}); err != nil {
							t.Error(err)
						}
						c.comeBack(1, []*client{cl})
						if err := <-answer; err != nil {
							t.Error(err)
						}
						if r := must[metarpc.LookupResult](cl, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "x"}); r.Attr.ID == 0 {
							t.Error("removed a second time")
						}
					} else {
						c.comeBack(lost, []*client{cl, other})
						if lost == 0 {
							goOn()
						}
						if err := <-answer; err != nil {
							t.Error(err)
						}
						r, err := ask[metarpc.LookupResult](cl, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "x"})
						if err != nil || r.Attr.ID == id || (call.op == metarpc.OpRemove) != (r.Attr.ID == 0) {
							t.Errorf("afterwards the name leads to %+v %v", r, err)
						}
					}
					waittest.Until(t, "the inode is gone", func() bool {
						_, err := c.engine.Get(t.Context(), schema.InodeKey(id))
						return errors.Is(err, catalog.ErrNotFound)
					})
					c.check()
				})
			}
		}
	}
}

// sync returns when nothing is held.
func (c *cluster) sync() {
	c.t.Helper()
	for k := range c.hosts {
		svc := c.svc(k)
		waittest.Until(c.t, "nothing is held", func() bool {
			svc.mu.Lock()
			defer svc.mu.Unlock()
			n := 0
			for i := range svc.peers {
				n += len(svc.peers[i].live)
			}
			for _, l := range svc.leases {
				n += l.changing
			}
			return n == 0
		})
	}
}

// TestHold looks at what a service answers to messages that come late, twice, in another order, or to somebody else.
func TestHold(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	id := cl.touch(layout.RootID, "f")
	svc := c.svc(0)
	asker := schema.Encode(&schema.Shard{Member: [16]byte{2}, Epoch: 1})
	hold := func(change, oldest uint64) *Hold {
		return &Hold{Shard: 1, Row: asker, To: svc.epoch, Change: change, Oldest: oldest, Items: []HoldItem{{ID: id, Lease: metarpc.LeaseAttrs, Last: true}}}
	}
	settle := func(oldest uint64, changes ...uint64) {
		t.Helper()
		st := &Settle{Shard: 1, Row: asker, Oldest: oldest}
		for _, change := range changes {
			st.Changes = append(st.Changes, Settled{Change: change, To: svc.epoch})
		}
		if err := svc.Settle(t.Context(), st); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, h *Hold, state HoldState) {
		t.Helper()
		held, err := svc.Hold(t.Context(), h)
		if err != nil || held.State != state || (state == HoldReady || state == HoldOther) && string(held.Row) != string(svc.cfg.Row) {
			t.Errorf("%s: %+v %v, want %d", what, held, err, state)
		}
	}
	marked := func() bool {
		svc.mu.Lock()
		defer svc.mu.Unlock()
		l, f := svc.leases[id], svc.files[id]
		return l != nil && l.changing > 0 || f != nil && f.removing
	}
	if r := must[metarpc.AttrResult](cl, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}); r.Lease == 0 {
		t.Fatal("no lease to be recalled")
	}
	var recalled atomic.Int64
	stuck := make(chan struct{})
	cl.mu.Lock()
	cl.back = func(metarpc.BackOp, any) metarpc.Status {
		if recalled.Add(1) > 1 {
			<-stuck
		}
		return metarpc.StatusOK
	}
	cl.mu.Unlock()
	want("the first", hold(1, 1), HoldReady)
	if r := must[metarpc.AttrResult](cl, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}); r.Lease != 0 || recalled.Load() != 1 {
		t.Errorf("lease %d while the inode is held; %d recalls", r.Lease, recalled.Load())
	}
	want("once more", hold(1, 1), HoldReady)
	want("another change of the same file", hold(2, 1), HoldPending)
	settle(1, 1)
	want("which goes on when the first is settled", hold(2, 1), HoldReady)
	want("a message of the first that is late", hold(1, 1), HoldOver)
	settle(2, 2)
	want("a message of a change that is too long ago to be known", hold(1, 1), HoldOver)
	waittest.Until(t, "nothing is held", func() bool { return !marked() })
	settle(3, 3)
	want("a hold after it was settled", hold(3, 3), HoldOver)

	if r := must[metarpc.AttrResult](cl, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}); r.Lease == 0 {
		t.Fatal("no lease to be recalled")
	}
	want("while a client does not answer", hold(4, 4), HoldPending)
	settle(4, 4)
	waittest.Until(t, "nothing is held, though the client has not answered", func() bool { return !marked() })
	close(stuck)

	other := hold(5, 5)
	other.To++
	want("of somebody else", other, HoldOther)
	other.To, other.Items = svc.epoch, []HoldItem{{ID: layout.ShardChunk}}
	if held, err := svc.Hold(t.Context(), other); err == nil {
		t.Errorf("of an inode of another shard: %+v", held)
	}
	if err := svc.Settle(t.Context(), &Settle{Shard: 1, Row: asker, Changes: []Settled{{Change: 6, To: svc.epoch + 1}}}); err == nil {
		t.Error("what a later service holds was settled here")
	}

	// The asker is another one already, and nobody settles.
	put(t, c.hosts[1], schema.ShardKey(1), schema.Encode(&schema.Shard{Member: [16]byte{3}, Epoch: 2}))
	want("of a service that is over", hold(7, 7), HoldReady)
	waittest.Until(t, "what it held is free", func() bool { return !marked() })

	c.kill(0)
	c.start(0)
	svc = c.svc(0)
	want("in the grace period", hold(8, 8), HoldGrace)
	c.comeBack(0, []*client{cl})
	want("after it", hold(8, 8), HoldReady)
	c.kill(0)
	if held, err := svc.Hold(t.Context(), hold(9, 9)); err == nil {
		t.Errorf("a stopped service: %+v", held)
	}
}

// TestUnreachable lets a client know soon that a service which it needs does not answer.
func TestUnreachable(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	dir, _ := c.sibling(cl, syscall.S_IFREG)
	c.kill(0)
	p := cl.parts[1]
	hdr, ch := p.begin(metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: "x"})
	began := time.Now()
	err := p.finish(hdr, ch, new(metarpc.RemoveResult))
	if wantStatus(t, err, metarpc.StatusGrace); time.Since(began) > 10*askPatience {
		t.Errorf("after %v", time.Since(began))
	}
	c.start(0)
	c.comeBack(0, []*client{cl})
	cl.remove(dir, "x")
	c.check()
}

// TestNotAlive keeps a service from answering that another one may have followed.
func TestNotAlive(t *testing.T) {
	var alive atomic.Bool
	alive.Store(true)
	h := startMemory(t)
	h.config = func(cfg *Config) { cfg.Alive = alive.Load }
	h.restart()
	c := h.client()
	id := c.touch(layout.RootID, "a")
	committed := make(chan struct{})
	alive.Store(false)
	_, ch := c.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: 0o600})
	go func() {
		select {
		case <-ch:
			t.Error("answered")
		case <-time.After(20 * aliveLook):
		}
		close(committed)
	}()
	<-committed
	alive.Store(true)
	_, again := c.begin(metarpc.OpGetAttr, &metarpc.IDArgs{ID: id})
	<-again
}

// TestUnheard has a service that may answer nobody for longer than leases last. No client loses its session for having been silent meanwhile, also
// not one that was being called back.
func TestUnheard(t *testing.T) {
	bubble(t, func(t *testing.T, h *host) {
		var alive atomic.Bool
		alive.Store(true)
		h.config = func(cfg *Config) { cfg.Alive = alive.Load }
		h.restart()
		c, leaseholder, dead := h.client(), h.client(), h.client()
		id := c.touch(layout.RootID, "a")
		leaseholder.attr(id)
		leaseholder.drop()
		hdr, ch := c.begin(metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: 0o600})
		synctest.Wait()
		alive.Store(false)
		dead.drop()
		time.Sleep(10 * h.lease)
		alive.Store(true)
		leaseholder.connect()
		if err := c.finish(hdr, ch, new(metarpc.AttrResult)); err != nil {
			t.Error(err)
		}
		if mode := leaseholder.attr(id).Mode; mode&0o777 != 0o600 {
			t.Errorf("mode %o", mode)
		}
		defer renewing(c)()
		defer renewing(leaseholder)()
		time.Sleep(3 * h.lease)
		synctest.Wait()
		if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 2 {
			t.Errorf("%d sessions, want those of the two clients that came back", n)
		}
	})
}

// TestCrossing has several clients move, link and remove names between directories of all shards at random, while messages and services are
// lost. Nobody waits for ever, and what is left fits together.
func TestCrossing(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	c := startCluster(t, 3, rand.New(rand.NewPCG(seed, 1)))
	var cs []*client
	for range 3 {
		cs = append(cs, c.client())
	}
	dirs := []layout.FileID{layout.RootID, c.dirAt(cs[0], 1, "d"), c.dirAt(cs[0], 2, "e"), c.dirAt(cs[0], 1, "f"), c.dirAt(cs[0], 2, "g")}
	var turn sync.RWMutex // a service is lost while nobody begins something
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var done, failed atomic.Int64
	for i, cl := range cs {
		for k := range 3 {
			rng := rand.New(rand.NewPCG(seed, uint64(10+10*i+k)))
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					turn.RLock()
					//lint:ignore SA2001 it waits while a service is killed and comes back
					turn.RUnlock()
					dir, to := dirs[rng.IntN(len(dirs))], dirs[rng.IntN(len(dirs))]
					name, second := string(rune('a'+rng.IntN(4))), string(rune('a'+rng.IntN(4)))
					var err error
					switch rng.IntN(7) {
					case 0:
						_, err = ask[metarpc.AttrResult](cl, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: name, Mode: syscall.S_IFDIR | 0o755})
					case 1:
						_, err = ask[metarpc.AttrResult](cl, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: name, Mode: syscall.S_IFREG | 0o644})
					case 2:
						var r metarpc.LookupResult
						if r, err = ask[metarpc.LookupResult](cl, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: name}); err == nil && r.Attr.ID != 0 {
							_, err = ask[metarpc.AttrResult](cl, metarpc.OpLink, &metarpc.LinkArgs{ID: r.Attr.ID, Parent: to, Name: second})
						}
					case 3:
						_, err = ask[metarpc.RemoveResult](cl, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: name, Dir: rng.IntN(2) == 0})
					default:
						_, err = ask[metarpc.Empty](cl, metarpc.OpRename, &metarpc.RenameArgs{
							OldParent: dir, OldName: name, NewParent: to, NewName: second, Flags: []uint32{0, 0, metarpc.RenameExchange}[rng.IntN(3)],
						})
					}
					switch status := statusOf(err); status {
					case metarpc.StatusOK:
						done.Add(1)
					case metarpc.Status(syscall.EEXIST), metarpc.Status(syscall.ENOENT), metarpc.Status(syscall.ENOTDIR), metarpc.Status(syscall.EISDIR),
						metarpc.Status(syscall.ENOTEMPTY), metarpc.Status(syscall.EINVAL), metarpc.Status(syscall.EPERM), metarpc.Status(syscall.ESTALE):
						failed.Add(1)
					default:
						t.Error(err)
						return
					}
				}
			})
		}
	}
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		time.Sleep(200 * time.Millisecond)
		k := rand.IntN(3)
		turn.Lock()
		c.kill(k)
		c.start(k)
		c.comeBack(k, cs)
		turn.Unlock()
	}
	time.Sleep(200 * time.Millisecond)
	close(stop)
	ended := make(chan struct{})
	go func() {
		wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(40 * time.Second):
		t.Fatal("somebody waits for ever")
	}
	t.Logf("%d operations, %d were refused", done.Load(), failed.Load())
	c.check()
}

// TestLoadsItsOwn starts a service where the catalog has work to be done for another shard.
func TestLoadsItsOwn(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	id := cl.touch(c.dirAt(cl, 1, "d"), "f")
	dev := layout.DeviceID{7}
	sess := cl.parts[1].hello.Session
	c.kill(0)
	c.kill(1) // whose work it is
	rows := map[string][]byte{
		string(schema.WriterKey(id, sess)):                     nil,
		string(schema.OrphanKey(id)):                           nil,
		string(schema.TruncateKey(id)):                         schema.Encode(&schema.Truncate{Size: 5}),
		string(schema.MoveKey(id)):                             schema.Encode(&schema.Move{Device: dev}),
		string(schema.FillKey(id)):                             schema.Encode(&schema.Fill{}),
		string(schema.CacheKey(dev, id)):                       schema.Encode(&schema.CacheUse{Session: sess, State: layout.CopyFilling}),
		string(schema.ReplyKey(sess, 3)):                       schema.Encode(&schema.Reply{Sequence: 9, Frame: []byte{1}}),
		string(schema.ReplyKey(metarpc.SessionID{9, 9, 9}, 3)): schema.Encode(&schema.Reply{Sequence: 9, Frame: []byte{1}}), // whose session has just ended
	}
	for key, row := range rows {
		put(t, c.hosts[0], []byte(key), row)
	}
	files := c.hosts[0].files
	files.mu.Lock()
	files.filled = func(context.Context, layout.Range) error { return nil }
	files.moving = id
	files.mu.Unlock()
	c.start(0)
	c.comeBack(0, []*client{cl})
	svc := c.svc(0)
	svc.resilverAll()
	if n := svc.staleFiles(t.Context()); n != 0 {
		t.Errorf("%d files have copies to be made", n)
	}
	svc.mu.Lock()
	if len(svc.files)+len(svc.moves)+len(svc.fading) != 0 || len(svc.sessions) != 1 {
		t.Errorf("files %v, moves %v, sessions %v, ended ones %v", svc.files, svc.moves, svc.sessions, svc.fading)
	}
	svc.mu.Unlock()
	if found := svc.caches.such(anyCached); len(found) != 0 {
		t.Errorf("caches %v", found)
	}
	files.mu.Lock()
	if files.started != 0 {
		t.Error("its copies are made anew")
	}
	files.moving = 0
	files.mu.Unlock()
	all := dump(t, c.engine)
	for key, row := range rows {
		if got, ok := all[key]; !ok || got != string(row) {
			t.Errorf("row %q is now %q, %t", key, got, ok)
		}
	}
}
