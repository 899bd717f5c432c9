package meta

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// view is what a client keeps under leases, by the rules of the protocol and nothing more.
type view struct {
	c *client

	mu      sync.Mutex
	clock   int
	since   int                   // when the last restarted service was found
	changed map[layout.FileID]int // when last recalled, or changed by a call of its own that was answered
	busy    map[layout.FileID]int // own changes that are outstanding
	attrs   map[layout.FileID]metarpc.Attr
	names   map[layout.FileID]map[string]layout.FileID // by directory; 0 = no such name
	hits    atomic.Int64
}

func newView(c *client) *view {
	v := &view{
		c: c, changed: map[layout.FileID]int{}, busy: map[layout.FileID]int{},
		attrs: map[layout.FileID]metarpc.Attr{}, names: map[layout.FileID]map[string]layout.FileID{},
	}
	back := func(op metarpc.BackOp, args any) metarpc.Status {
		if a, ok := args.(*metarpc.LeaseRecallArgs); ok {
			v.mu.Lock()
			defer v.mu.Unlock()
			for _, it := range a.Items {
				v.drop(it.ID, it.Lease)
			}
		}
		return metarpc.StatusOK
	}
	parts := c.parts
	if len(parts) == 0 {
		parts = []*client{c}
	}
	for _, c := range parts {
		c.mu.Lock()
		c.back = back
		c.mu.Unlock()
	}
	return v
}

// drop forgets what is kept of an inode; v.mu is held.
func (v *view) drop(id layout.FileID, lease metarpc.Lease) {
	v.clock++
	v.changed[id] = v.clock
	if lease&metarpc.LeaseAttrs != 0 {
		delete(v.attrs, id)
	}
	if lease&metarpc.LeaseNames != 0 {
		delete(v.names, id)
	}
}

// ask is the moment in which something is asked.
func (v *view) ask() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.clock
}

// mayKeep says whether an answer may be kept; v.mu is held.
func (v *view) mayKeep(id layout.FileID, asked int) bool {
	return v.changed[id] <= asked && v.since <= asked && v.busy[id] == 0
}

// restarted forgets everything, as a service was restarted.
func (v *view) restarted() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.clock++
	v.since = v.clock
	clear(v.attrs)
	clear(v.names)
}

func (v *view) keepAttr(a metarpc.Attr, lease metarpc.Lease, asked int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if lease&metarpc.LeaseAttrs != 0 && v.mayKeep(a.ID, asked) {
		v.attrs[a.ID] = a
	}
}

func (v *view) keepName(dir layout.FileID, name string, id layout.FileID, lease metarpc.Lease, asked int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if lease&metarpc.LeaseNames == 0 || !v.mayKeep(dir, asked) {
		return
	}
	if v.names[dir] == nil {
		v.names[dir] = map[string]layout.FileID{}
	}
	v.names[dir][name] = id
}

// alter makes a call that changes inodes.
func alter[R any](v *view, op metarpc.Op, args any, ids ...layout.FileID) (R, error) {
	v.mu.Lock()
	for _, id := range ids {
		v.busy[id]++
	}
	v.mu.Unlock()
	r, err := ask[R](v.c, op, args)
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, id := range ids {
		v.busy[id]--
		v.drop(id, metarpc.LeaseAttrs|metarpc.LeaseNames)
	}
	return r, err
}

func (v *view) attr(id layout.FileID) metarpc.Attr {
	v.mu.Lock()
	a, ok := v.attrs[id]
	v.mu.Unlock()
	if ok {
		v.hits.Add(1)
		return a
	}
	asked := v.ask()
	r := must[metarpc.AttrResult](v.c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id})
	v.keepAttr(r.Attr, r.Lease, asked)
	return r.Attr
}

func (v *view) lookup(dir layout.FileID, name string) layout.FileID {
	v.mu.Lock()
	id, ok := v.names[dir][name]
	v.mu.Unlock()
	if ok {
		v.hits.Add(1)
		return id
	}
	asked := v.ask()
	r := must[metarpc.LookupResult](v.c, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: name})
	v.keepAttr(r.Attr, r.Lease, asked)
	v.keepName(dir, name, r.Attr.ID, r.Names, asked)
	return r.Attr.ID
}

// list reads a directory and keeps all of it, also that there are no other names.
func (v *view) list(dir layout.FileID, all []string) {
	asked := v.ask()
	r := must[metarpc.ReadDirResult](v.c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: dir, Limit: 100})
	for _, e := range r.Entries {
		v.keepAttr(e.Attr, e.Lease, asked)
		v.keepName(dir, e.Name, e.Attr.ID, r.Names, asked)
	}
	for _, name := range all {
		if r.EOF && !slices.ContainsFunc(r.Entries, func(e metarpc.DirEntry) bool { return e.Name == name }) {
			v.keepName(dir, name, 0, r.Names, asked)
		}
	}
}

// history is what something has been, in order. At any time it is one of what it was when the last change was answered and
// of what changes begun since make of it.
type history[T comparable] struct {
	turn sync.Mutex // of who changes it

	mu     sync.Mutex
	states []T
	known  []bool // a state may be known only when the change that makes it is answered
	done   int    // the last state whose change is answered
}

func newHistory[T comparable](first T) *history[T] {
	return &history[T]{states: []T{first}, known: []bool{true}}
}

// begin comes before a change, end after it was answered; h.turn is held over both.
func (h *history[T]) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.states, h.known = append(h.states, *new(T)), append(h.known, false)
}

func (h *history[T]) end(state T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.done = len(h.states) - 1
	h.states[h.done], h.known[h.done] = state, true
}

func (h *history[T]) now() T {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.states[h.done]
}

// see has read look at it and reports whether what it finds can be.
func (h *history[T]) see(read func() T) (got T, ok bool) {
	h.mu.Lock()
	from := h.done
	h.mu.Unlock()
	got = read()
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := from; i < len(h.states); i++ {
		if h.states[i] == got || !h.known[i] {
			return got, true
		}
	}
	return got, false
}

// TestCoherence has several sessions keep what they may and change names and attributes in one directory, at random. Nobody
// ever sees what was before a change that has been answered, whoever made it.
func TestCoherence(t *testing.T) {
	t.Run("one shard", func(t *testing.T) {
		h := startMemory(t)
		first := h.client()
		testCoherence(t, h.client, first, first.mkdir(layout.RootID, "d"), nil, nil)
		checkCatalog(t, h.engine)
		h.svc.mu.Lock()
		defer h.svc.mu.Unlock()
		for id, l := range h.svc.leases {
			if l.changing != 0 || len(l.holders) == 0 {
				t.Errorf("inode %d left as %+v", id, l)
			}
			for _, sess := range l.holders {
				if sess.leases[id] == 0 {
					t.Errorf("inode %d: session %v holds nothing", id, sess)
				}
			}
		}
	})
	// The names are in a directory of one shard, the files with the times in those of others, where they get and lose other names, too.
	for _, how := range []string{"well", "messages are lost", "and services, too"} {
		t.Run("three shards, "+how, func(t *testing.T) {
			var luck *rand.Rand
			if how != "well" {
				luck = rand.New(rand.NewPCG(rand.Uint64(), 1))
			}
			c := startCluster(t, 3, luck)
			first := c.client()
			var disturb func([]*view)
			if how == "and services, too" {
				disturb = func(views []*view) {
					k := rand.IntN(3)
					c.kill(k)
					c.start(k)
					c.comeBack(k, []*client{first})
					for _, v := range views {
						v.restarted() // before it says that it has reclaimed all that it relies on
						c.comeBack(k, []*client{v.c})
					}
				}
			}
			testCoherence(t, c.client, first, c.dirAt(first, 1, "d"), []layout.FileID{layout.RootID, c.dirAt(first, 2, "e")}, disturb)
			c.check()
		})
	}
}

// testCoherence is TestCoherence with clients and a directory. The files with the times are in the root, or in homes.
// Now and then disturb is called, if there is one.
func testCoherence(t *testing.T, newClient func() *client, first *client, dir layout.FileID, homes []layout.FileID, disturb func([]*view)) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	all := []string{"a", "b", "c", "d"}
	type nameOf = *history[layout.FileID]
	truth := map[string]nameOf{}
	for _, name := range all {
		truth[name] = newHistory(layout.FileID(0))
	}
	var files []layout.FileID
	times := map[layout.FileID]*history[int64]{}
	links := map[layout.FileID]*history[uint32]{} // how many names they have
	for i := range 3 {
		home := layout.RootID
		if len(homes) > 0 {
			home = homes[i%len(homes)]
		}
		id := first.touch(home, fmt.Sprint("f", i))
		links[id] = newHistory(uint32(1))
		must[metarpc.AttrResult](first, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime, Mtime: 1})
		files, times[id] = append(files, id), newHistory(int64(1))
	}
	var dirTime atomic.Int64 // when the last change in dir that was answered began

	stop := make(chan struct{})
	var wg sync.WaitGroup
	var views []*view
	var reads, changes atomic.Int64
	for s := range 3 {
		v := newView(newClient())
		views = append(views, v)
		for w := range 2 {
			rng := rand.New(rand.NewPCG(seed, uint64(10*s+w)))
			wg.Go(func() { // changes
				private := fmt.Sprintf("new-%d-%d", s, w)
				for {
					select {
					case <-stop:
						return
					default:
					}
					time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond) // so that something is read from what is kept
					changes.Add(1)
					if len(homes) > 0 && rng.IntN(4) == 0 {
						id := files[rng.IntN(len(files))]
						tr := links[id]
						name := fmt.Sprint("link-", id)
						tr.turn.Lock()
						n := tr.now()
						tr.begin()
						var err error
						if n == 1 {
							_, err = alter[metarpc.AttrResult](v, metarpc.OpLink, &metarpc.LinkArgs{ID: id, Parent: dir, Name: name}, id, dir)
						} else {
							_, err = alter[metarpc.RemoveResult](v, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: name}, id, dir)
						}
						tr.end(3 - n)
						tr.turn.Unlock()
						if err != nil {
							t.Error(err)
							return
						}
						continue
					}
					if rng.IntN(3) == 0 {
						id := files[rng.IntN(len(files))]
						tr := times[id]
						tr.turn.Lock()
						next := tr.now() + 1
						tr.begin()
						_, err := alter[metarpc.AttrResult](v, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMtime, Mtime: next}, id)
						tr.end(next)
						tr.turn.Unlock()
						if err != nil {
							t.Error(err)
							return
						}
						continue
					}
					i, j := rng.IntN(len(all)), rng.IntN(len(all))
					tr, other := truth[all[i]], truth[all[j]]
					if i < j {
						tr.turn.Lock()
						other.turn.Lock()
					} else if i > j {
						other.turn.Lock()
						tr.turn.Lock()
					} else {
						tr.turn.Lock()
					}
					began := time.Now().UnixNano()
					var err error
					switch {
					case tr.now() == 0:
						tr.begin()
						var r metarpc.AttrResult
						r, err = alter[metarpc.AttrResult](v, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: dir, Name: all[i], Mode: syscall.S_IFIFO}, dir)
						tr.end(r.Attr.ID)
					case i != j && other.now() != 0 && rng.IntN(2) == 0:
						was, is := tr.now(), other.now()
						tr.begin()
						other.begin()
						_, err = alter[metarpc.Empty](v, metarpc.OpRename, &metarpc.RenameArgs{OldParent: dir, OldName: all[i], NewParent: dir, NewName: all[j],
							Flags: metarpc.RenameExchange}, dir, was, is)
						tr.end(is)
						other.end(was)
					case rng.IntN(2) == 0:
						id := must[metarpc.CreateResult](v.c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: private}).Attr.ID
						v.c.closeFile(id)
						tr.begin()
						_, err = alter[metarpc.Empty](v, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: private, NewParent: dir, NewName: all[i]},
							layout.RootID, dir, id)
						tr.end(id)
					default:
						was := tr.now()
						tr.begin()
						_, err = alter[metarpc.RemoveResult](v, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: dir, Name: all[i]}, dir, was)
						tr.end(0)
					}
					for last := dirTime.Load(); last < began && !dirTime.CompareAndSwap(last, began); last = dirTime.Load() {
					}
					tr.turn.Unlock()
					if i != j {
						other.turn.Unlock()
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for w := range 2 {
			rng := rand.New(rand.NewPCG(seed, uint64(10*s+w+5)))
			wg.Go(func() { // looks
				for {
					select {
					case <-stop:
						return
					default:
					}
					reads.Add(1)
					switch rng.IntN(8) {
					case 0:
						v.list(dir, all)
					case 1:
						at := dirTime.Load()
						if a := v.attr(dir); a.Mtime < at {
							t.Errorf("the directory's time is %d, a change that began at %d has been answered", a.Mtime, at)
							return
						}
					case 2:
						id := files[rng.IntN(len(files))]
						if got, ok := links[id].see(func() uint32 { return v.attr(id).Nlink }); !ok {
							t.Errorf("inode %d has %d names, which is over", id, got)
							return
						}
					case 3, 4:
						id := files[rng.IntN(len(files))]
						if got, ok := times[id].see(func() int64 { return v.attr(id).Mtime }); !ok {
							t.Errorf("inode %d has time %d, which is over", id, got)
							return
						}
					default:
						name := all[rng.IntN(len(all))]
						if got, ok := truth[name].see(func() layout.FileID { return v.lookup(dir, name) }); !ok {
							t.Errorf("%q leads to inode %d, which is over", name, got)
							return
						}
					}
				}
			})
		}
	}
	wait := 2 * time.Second
	if testing.Short() {
		wait = 500 * time.Millisecond
	}
	hits := func() (n int64) {
		for _, v := range views {
			n += v.hits.Load()
		}
		return n
	}
	enough := func() bool { return hits() > 0 && changes.Load() >= 20 }
	begun := time.Now()
	for took := time.Duration(0); took < wait || took < time.Minute && !enough(); took = time.Since(begun) {
		time.Sleep(wait / 8)
		if disturb != nil {
			disturb(views)
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d changes, %d looks, %d of them at what was kept", changes.Load(), reads.Load(), hits())
	if !enough() {
		t.Error("too little happened")
	}
}

// TestCallbacksThatReport has clients report, and give layouts back, before they answer any callback, as they may, while
// all do to the same files what calls back the others. Nobody waits for ever.
func TestCallbacksThatReport(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	h := startMemory(t)
	var cs []*client
	for range 3 {
		cs = append(cs, h.root())
	}
	var files []layout.FileID
	for i := range 2 {
		files = append(files, cs[0].touch(layout.RootID, fmt.Sprint(i)))
	}
	for _, c := range cs {
		for _, id := range files {
			c.open(id)
		}
	}
	var callbacks, calls atomic.Int64
	for _, c := range cs {
		answer := func(id layout.FileID) {
			n := callbacks.Add(1)
			c.report(n%2 == 0, metarpc.SizeReport{ID: id, End: n % 1000, Mtime: n})
			if n%4 == 0 {
				must[metarpc.Empty](c, metarpc.OpLayoutReturn, &metarpc.LayoutReturnArgs{IDs: []layout.FileID{id}})
			}
		}
		c.mu.Lock()
		c.recall = func(a *metarpc.LayoutRecallArgs) metarpc.Status {
			answer(a.ID)
			return metarpc.StatusOK
		}
		c.back = func(op metarpc.BackOp, args any) metarpc.Status {
			switch args := args.(type) {
			case *metarpc.SizeQueryArgs:
				for _, id := range args.IDs {
					answer(id)
				}
			case *metarpc.LeaseRecallArgs:
				for _, it := range args.Items {
					if slices.Contains(files, it.ID) && h.svc.writes(c.hello.Session, it.ID) { // it reports only what it has a layout for
						answer(it.ID)
					}
				}
			}
			return metarpc.StatusOK
		}
		c.mu.Unlock()
	}
	stop := make(chan struct{})
	ended := make(chan struct{})
	var wg sync.WaitGroup
	for i, c := range cs {
		for k := range 3 {
			rng := rand.New(rand.NewPCG(seed, uint64(10*i+k)))
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					calls.Add(1)
					id := files[rng.IntN(len(files))]
					var err error
					switch rng.IntN(7) {
					case 0:
						_, err = ask[metarpc.AttrResult](c, metarpc.OpSetAttr, setSize(id, rng.Int64N(1000)))
					case 1:
						_, err = ask[metarpc.AttrResult](c, metarpc.OpSetAttr, &metarpc.SetAttrArgs{ID: id, Mask: metarpc.SetMode, Mode: 0o600})
					case 2:
						_, err = ask[metarpc.LayoutResult](c, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: id, IOMode: layout.IOModeRW, Len: 1, Append: rng.IntN(2) == 0})
					case 3:
						_, err = ask[metarpc.ReserveResult](c, metarpc.OpReserve, &metarpc.ReserveArgs{ID: id, Len: 1})
					case 4:
						_, err = ask[metarpc.AttrResult](c, metarpc.OpOpen, &metarpc.OpenArgs{ID: id})
					case 5:
						_, err = ask[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: layout.RootID, OldName: "0", NewParent: layout.RootID, NewName: "1", Flags: metarpc.RenameExchange})
					default:
						_, err = ask[metarpc.ReadDirResult](c, metarpc.OpReadDir, &metarpc.ReadDirArgs{ID: layout.RootID, Limit: 10})
					}
					switch statusOf(err) {
					case metarpc.StatusOK, metarpc.StatusLayoutUnavailable, metarpc.StatusGrace:
					default:
						t.Error(err)
					}
				}
			})
		}
	}
	time.AfterFunc(time.Second, func() { close(stop) })
	go func() {
		wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(30 * time.Second): // half a lease
		t.Fatal("somebody waits for ever")
	}
	t.Logf("%d calls, %d callbacks that report", calls.Load(), callbacks.Load())
	if callbacks.Load() == 0 {
		t.Error("no callbacks")
	}
	if n := countRows(t.Context(), h.engine, schema.PrefixSession); n != 3 {
		t.Errorf("%d sessions are left", n)
	}
	checkCatalog(t, h.engine)
}

// writes reports whether a session may write a file.
func (s *Service) writes(sess metarpc.SessionID, id layout.FileID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := s.sessions[sess].claims[id]
	return cl != nil && cl.writer
}
