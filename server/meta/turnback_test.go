package meta

import (
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// hesitate has a client say to each callback, before it answers, what comes out of the channel, which the test closes.
func (c *client) hesitate() chan metarpc.Status {
	c.first = make(chan metarpc.Status)
	return c.first
}

func dirArgs(parent layout.FileID, name string) *metarpc.MakeNodeArgs {
	return &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: syscall.S_IFDIR | 0755}
}

// Two clients change one directory, and neither can answer its recall before its own change is answered. The change of
// the one that says so is turned back, and nothing of it is done.
func TestTurnBack(t *testing.T) {
	h := startMemory(t)
	a, b := h.root(), h.root()
	dir := a.mkdir(layout.RootID, "d")
	for _, c := range []*client{a, b} {
		if c.namesLease(dir) == 0 {
			t.Fatal("no lease")
		}
	}
	ofA, ofB := a.hesitate(), b.hesitate()
	first, fromFirst := a.begin(metarpc.OpMakeNode, dirArgs(dir, "a"))
	second, fromSecond := b.begin(metarpc.OpMakeNode, dirArgs(dir, "b"))
	ofA <- metarpc.StatusWorking // so the change of b waits
	ofB <- metarpc.StatusStuck
	if err := b.finish(second, fromSecond, &metarpc.AttrResult{}); statusOf(err) != metarpc.StatusTurnedBack {
		t.Errorf("the change that stood in the way: %v", err)
	}
	close(ofA)
	close(ofB)
	if err := a.finish(first, fromFirst, &metarpc.AttrResult{}); err != nil {
		t.Errorf("the other change: %v", err)
	}
	if r := must[metarpc.LookupResult](a, metarpc.OpLookup, &metarpc.NameArgs{Parent: dir, Name: "b"}); r.Attr.ID != 0 {
		t.Error("the change that was turned back was made")
	}
	b.mkdir(dir, "b")
}

// A change in another directory is not turned back, nor is one of a client that does not know that.
func TestTurnBackNotOthers(t *testing.T) {
	h := startMemory(t)
	a, b := h.root(), h.newClient()
	b.cred = metarpc.Cred{}
	b.hello.Highest = metarpc.TurnsBack - 1
	b.connect()
	c := h.root()
	dir, other := a.mkdir(layout.RootID, "d"), a.mkdir(layout.RootID, "other")
	for _, cl := range []*client{a, b, c} {
		cl.namesLease(dir)
		cl.namesLease(other)
	}
	said := map[*client]chan metarpc.Status{a: a.hesitate(), b: b.hesitate(), c: c.hesitate()}
	type made struct {
		by *client
		h  metarpc.CallHeader
		ch chan []byte
	}
	var all []made
	begin := func(by *client, dir layout.FileID, name string) {
		h, ch := by.begin(metarpc.OpMakeNode, dirArgs(dir, name))
		all = append(all, made{by, h, ch})
	}
	begin(a, dir, "a")   // recalls from b and c
	begin(b, dir, "b")   // of an old client
	begin(c, other, "c") // elsewhere
	said[a] <- metarpc.StatusWorking
	said[b] <- metarpc.StatusStuck
	said[c] <- metarpc.StatusStuck
	for _, ch := range said {
		close(ch)
	}
	for _, m := range all {
		if err := m.by.finish(m.h, m.ch, &metarpc.AttrResult{}); err != nil {
			t.Errorf("%+v: %v", m.h, err)
		}
	}
}

// What a service of another shard holds for a change of a client that is not known here is turned back, too.
func TestTurnBackHold(t *testing.T) {
	c := startCluster(t, 2, nil)
	cl := c.client()
	svc := c.svc(0)
	cl.namesLease(layout.RootID)
	said := cl.hesitate()
	asker := schema.Encode(&schema.Shard{Member: [16]byte{2}, Epoch: 1})
	hold := func(change uint64) *Hold {
		return &Hold{Shard: 1, Row: asker, To: svc.epoch, Change: change, Oldest: 1,
			Items: []HoldItem{{ID: layout.RootID, Lease: metarpc.LeaseNames}}}
	}
	state := func(change uint64) HoldState {
		held, err := svc.Hold(t.Context(), hold(change))
		if err != nil {
			t.Fatal(err)
		}
		return held.State
	}
	if s := state(1); s != HoldPending {
		t.Errorf("the first: %d", s)
	}
	if s := state(2); s != HoldPending {
		t.Errorf("the second: %d", s)
	}
	said <- metarpc.StatusStuck // to the recall of one of them
	close(said)
	first, second := state(1), state(2)
	if min(first, second) != HoldReady || max(first, second) != HoldGrace {
		t.Errorf("when the recall of one is stuck: %d and %d", first, second)
	}
	st := &Settle{Shard: 1, Row: asker, Oldest: 3, Changes: []Settled{{Change: 1, To: svc.epoch}, {Change: 2, To: svc.epoch}}}
	if err := svc.Settle(t.Context(), st); err != nil {
		t.Fatal(err)
	}
	c.check()
}
