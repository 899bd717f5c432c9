package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/schema"
)

// Whatever rows there are, a plan is even, all find the same, nothing moves that need not, and following it one shard at a time, in any order, ends there
// after no more moves than it had in the beginning.
func TestPlan(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		v := &view{shards: make([]shardRow, 1+r.IntN(40))}
		for range 1 + r.IntN(7) {
			var m memberRow
			for i := range m.id {
				m.id[i] = byte(r.Uint32())
			}
			m.Draining = r.IntN(4) == 0
			v.members = append(v.members, m)
		}
		slices.SortFunc(v.members, func(a, b memberRow) int { return slices.Compare(a.id[:], b.id[:]) })
		for i := range v.shards {
			switch n := r.IntN(len(v.members) + 2); {
			case n < len(v.members):
				v.shards[i].owner = v.members[n].id
			case n == len(v.members):
				v.shards[i].owner = memberID{1} // who is gone
			}
		}
		can := 0
		for _, m := range v.members {
			if !m.Draining {
				can++
			}
		}
		have := func() map[memberID]int {
			n := map[memberID]int{}
			for _, s := range v.shards {
				n[s.owner]++
			}
			return n
		}
		plan := v.plan()
		moves := 0
		for i := range plan {
			if plan[i] != v.shards[i].owner {
				moves++
			}
		}
		least := 0 // what those have who are to have none, and what nobody has
		for _, m := range v.members {
			if m.Draining {
				least += have()[m.id]
			}
		}
		for _, s := range v.shards {
			if v.member(s.owner) == nil {
				least++
			}
		}
		steps := 0
		for ; ; steps++ {
			next := v.plan()
			var open []int
			for i := range next {
				if next[i] != v.shards[i].owner {
					open = append(open, i)
				}
			}
			if len(open) == 0 || can == 0 {
				break
			}
			i := open[r.IntN(len(open))]
			v.shards[i].owner = next[i]
		}
		if steps > moves || can > 0 && moves < least {
			t.Errorf("seed %d: %d steps for %d moves, of which at least %d had to be", seed, steps, moves, least)
		}
		for id, n := range have() {
			if can > 0 && (v.member(id) == nil || v.member(id).Draining || n > (len(v.shards)+can-1)/can) {
				t.Errorf("seed %d: %v has %d of %d shards, %d members can have some", seed, id, n, len(v.shards), can)
			}
		}
		if can > 0 {
			for _, m := range v.members {
				if n := have()[m.id]; !m.Draining && n < len(v.shards)/can {
					t.Errorf("seed %d: %v has %d of %d shards, %d members can have some", seed, m.id, n, len(v.shards), can)
				}
			}
		}
	}
}

// The fence refuses everything once the member row is gone, and guards keep their numbers.
func TestFence(t *testing.T) {
	engine := memorytest.New()
	fell := 0
	key := schema.MemberKey([16]byte{1})
	f := &fence{Engine: engine, guard: catalog.Guard{Kind: catalog.Present, Key: key}, fell: func() { fell++ }}
	if caps := engine.Caps(); f.Caps().MaxKeys != caps.MaxKeys-1 || f.Caps().MaxBatchBytes != caps.MaxBatchBytes-len(key) {
		t.Errorf("caps %+v of %+v", f.Caps(), caps)
	}
	var member catalog.Batch
	member.Put(key, nil)
	if err := engine.Commit(t.Context(), &member); err != nil {
		t.Fatal(err)
	}
	guards := make([]catalog.Guard, 0, 5)
	b := catalog.Batch{Guards: guards}
	b.GuardAbsent([]byte("a"))
	i := b.GuardPresent([]byte("b"))
	var guard *catalog.GuardError
	if err := f.Commit(t.Context(), &b); !errors.As(err, &guard) || guard.Index != i || fell != 0 {
		t.Fatal(err, fell)
	}
	if len(b.Guards) != 2 || guards[:3][2].Key != nil {
		t.Error("the caller's batch was changed")
	}
	if err := f.Commit(t.Context(), new(catalog.Batch)); err != nil {
		t.Error(err)
	}
	// A service's is that of its row; it ends with the member's.
	shard := schema.ShardKey(3)
	svc := &fence{Engine: engine, guard: catalog.Guard{Kind: catalog.Equal, Key: shard, Value: []byte("1")}, parent: f, fell: func() {}}
	second := &fence{Engine: engine, guard: catalog.Guard{Kind: catalog.Equal, Key: shard, Value: []byte("2")}, parent: f, fell: func() {}}
	for _, row := range []string{"1", "2"} {
		var b catalog.Batch
		b.Put(shard, []byte(row))
		if err := f.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		if err := svc.Commit(t.Context(), new(catalog.Batch)); (err == nil) != (row == "1") || err != nil && !errors.Is(err, ErrFenced) {
			t.Errorf("row %s: %v", row, err)
		}
	}
	if err := second.Commit(t.Context(), new(catalog.Batch)); err != nil {
		t.Error(err)
	}
	member.Reset()
	member.Delete(key)
	if err := engine.Commit(t.Context(), &member); err != nil {
		t.Fatal(err)
	}
	if err := f.Commit(t.Context(), new(catalog.Batch)); !errors.Is(err, ErrFenced) || !errors.Is(err, catalog.ErrClosed) || errors.As(err, &guard) || fell != 1 {
		t.Error("an empty batch:", err, fell)
	}
	if err := second.Commit(t.Context(), new(catalog.Batch)); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	if _, err := f.Get(t.Context(), key); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	if _, err := f.GetMany(t.Context(), nil); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	if _, err := f.Snapshot(t.Context()); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	for _, err := range f.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if !errors.Is(err, ErrFenced) {
			t.Error(err)
		}
	}
}

func TestJoinAndLeave(t *testing.T) {
	bubble(t, 16, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.await(2*time.Second, "a:1")
		b := w.start("b:1")
		w.await(5*time.Second, "a:1", "b:1")
		before := w.owners()
		w.start("c:1")
		w.await(5*time.Second, "a:1", "b:1", "c:1")
		for shard, owner := range w.owners() {
			if owner != before[shard] && owner != "c:1" {
				t.Errorf("shard %d moved from %s to %s when c joined", shard, before[shard], owner)
			}
		}
		// Who leaves has its shards served elsewhere when it has left.
		if err := a.leave(20 * time.Second); err != nil {
			t.Error(err)
		}
		w.await(0, "b:1", "c:1")
		if err := b.leave(20 * time.Second); err != nil {
			t.Error(err)
		}
		w.await(0, "c:1")
		// The last one need not wait for anybody, nor has the next.
		began := time.Now()
		if err := w.procs[2].leave(20 * time.Second); err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("the last one took %v to leave", d)
		}
		from, to := schema.Of(schema.PrefixBeat)
		for kv := range w.engine.Scan(t.Context(), from, to, catalog.ScanOptions{}) {
			t.Errorf("%q is left", kv.Key)
		}
		a.up()
		w.await(2*time.Second, "a:1")
	})
}

// A shard is away for a moment only when members come and go, one after the other.
func TestAway(t *testing.T) {
	bubble(t, 16, func(t *testing.T, w *world) {
		a := w.start("a:1")
		b := w.start("b:1")
		w.await(5*time.Second, "a:1", "b:1")
		since := map[int]time.Time{}
		longest, most := time.Duration(0), 0
		watch := func(until func() bool) {
			for !until() {
				away := 0
				for shard, owner := range w.owners() {
					if owner != "" {
						delete(since, shard)
						continue
					}
					away++
					if since[shard].IsZero() {
						since[shard] = time.Now()
					}
					longest = max(longest, time.Since(since[shard]))
				}
				most = max(most, away)
				time.Sleep(5 * time.Millisecond)
			}
		}
		began := time.Now()
		w.start("c:1")
		watch(func() bool { return time.Since(began) > 5*time.Second })
		w.await(0, "a:1", "b:1", "c:1")
		for _, p := range []*proc{a, b} { // a rolling restart
			done := make(chan error)
			go func() { done <- p.leave(20 * time.Second) }()
			watch(func() bool {
				select {
				case err := <-done:
					if err != nil {
						t.Error(err)
					}
					return true
				default:
					return false
				}
			})
			p.up()
			began := time.Now()
			watch(func() bool { return time.Since(began) > 5*time.Second })
		}
		t.Logf("a shard was away for %v at most, %d of 16 at a time", longest, most)
		if longest > 200*time.Millisecond || most > 3 {
			t.Errorf("a shard was away for %v, %d at a time", longest, most)
		}
	})
}

func TestKill(t *testing.T) {
	bubble(t, 16, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.start("b:1")
		w.start("c:1")
		w.await(8*time.Second, "a:1", "b:1", "c:1")
		time.Sleep(1234 * time.Millisecond)
		before := w.owners()
		a.kill()
		w.await(2*DefaultLease, "b:1", "c:1")
		for shard, owner := range w.owners() {
			if before[shard] != "a:1" && owner != before[shard] {
				t.Errorf("shard %d moved from %s to %s when a died", shard, before[shard], owner)
			}
		}
		a.up()
		w.await(8*time.Second, "a:1", "b:1", "c:1")
	})
}

// Who cannot reach the catalog stops answering before others take over.
func TestCutOff(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.start("b:1")
		w.await(8*time.Second, "a:1", "b:1")
		m := a.running()
		began := time.Now()
		a.cutOff()
		for m.alive() && time.Since(began) < DefaultLease {
			time.Sleep(time.Millisecond)
		}
		silent := time.Since(began)
		if silent > DefaultLease-DefaultLease/5 {
			t.Errorf("it answers %v after it was cut off", silent)
		}
		for shard, owner := range w.owners() { // nobody else has it yet
			if s := w.procs[1].stub(shard); owner != "" && s == nil {
				t.Errorf("shard %d is served by %s", shard, owner)
			}
		}
		if n := w.owners(); slices.Index(n, "") < 0 {
			t.Errorf("all shards are served when the one that was cut off has stopped: %v", n)
		}
		w.await(2*DefaultLease-silent, "b:1")
		a.reconnect()
		w.await(8*time.Second, "a:1", "b:1")
		if now := a.running(); now == m || now.id == m.id {
			t.Error("it did not join again as another member")
		}

		// The catalog is away for all: when it is back they go on as they were.
		ma, mb := a.running(), w.procs[1].running()
		a.cutOff()
		w.procs[1].cutOff()
		time.Sleep(3 * DefaultLease)
		if n := w.owners(); slices.ContainsFunc(n, func(owner string) bool { return owner != "" }) {
			t.Errorf("without a catalog shards are served by %v", n)
		}
		a.reconnect()
		w.procs[1].reconnect()
		time.Sleep(2 * time.Second)
		w.await(0, "a:1", "b:1")
		if a.running() != ma || w.procs[1].running() != mb {
			t.Error("a catalog that was away for a moment made members new")
		}
	})
}

// A process that is stopped and goes on cannot commit, nor answer what it has executed.
func TestPaused(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.start("b:1")
		w.await(8*time.Second, "a:1", "b:1")
		var old *stub
		for shard := range 4 {
			if s := a.stub(shard); s != nil {
				old = s
			}
		}
		a.pause()
		answers := make(chan error, 2)
		go func() { answers <- old.ask(context.Background(), true) }()
		go func() { answers <- old.ask(context.Background(), false) }()
		w.await(2*DefaultLease, "b:1")
		if err := w.procs[1].stub(old.shard).ask(t.Context(), true); err != nil {
			t.Error(err)
		}
		a.resume()
		for range 2 {
			if err := <-answers; err == nil {
				t.Error("it has answered")
			}
		}
		w.await(8*time.Second, "a:1", "b:1")
	})
}

func TestDrain(t *testing.T) {
	bubble(t, 6, func(t *testing.T, w *world) {
		a := w.start("a:1")
		drain := func(address string, cancel bool) error {
			return members{a.running()}.Drain(t.Context(), address, cancel)
		}
		w.await(8*time.Second, "a:1")
		if err := drain("a:1", false); !errors.Is(err, syscall.EBUSY) {
			t.Error("drain the only one:", err)
		}
		w.start("b:1")
		w.await(8*time.Second, "a:1", "b:1")
		if err := drain("c:1", false); !errors.Is(err, syscall.ENOENT) {
			t.Error("drain an unknown one:", err)
		}
		var b catalog.Batch
		for i, shard := range []int{0, 1, 2, 2, 5} {
			b.Put(schema.SessionKey(metarpc.SessionID{byte(i)}), schema.Encode(&schema.Session{Shard: shard, Ended: i == 2}))
		}
		if err := w.engine.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
		for _, addr := range []string{"b:1", "a:1"} { // another one, oneself
			other := map[string]string{"b:1": "a:1", "a:1": "b:1"}[addr]
			if err := drain(addr, false); err != nil {
				t.Fatal(err)
			}
			w.await(time.Second, other)
			list, err := members{a.running()}.List(t.Context())
			if err != nil || list.Shards != 6 || len(list.Services) != 2 {
				t.Fatalf("%+v, %v", list, err)
			}
			for _, s := range list.Services {
				want := metarpc.MetaService{Address: addr, Host: "h", Program: "p", State: metarpc.MetaDraining, Lowest: metarpc.Lowest, Highest: metarpc.Version}
				if s.Address == other {
					want = metarpc.MetaService{Address: other, Host: "h", Program: "p", Shards: []int{0, 1, 2, 3, 4, 5}, Sessions: 4, Lowest: metarpc.Lowest, Highest: metarpc.Version}
				}
				if s.Started == 0 || s.Silent > int64(2*time.Second) {
					t.Errorf("%+v", s)
				}
				s.Started, s.Silent = 0, 0
				if !reflect.DeepEqual(s, want) {
					t.Errorf("%+v, want %+v", s, want)
				}
			}
			if err := drain(addr, true); err != nil {
				t.Fatal(err)
			}
			w.await(2*time.Second, "a:1", "b:1")
		}
		w.procs[1].pause()
		time.Sleep(DefaultLease - time.Second)
		list, err := members{a.running()}.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list.Services {
			if s.Address == "b:1" && s.Silent < int64(DefaultLease-3*time.Second) {
				t.Errorf("%+v", s)
			}
		}
	})
}

// Clients are told who has what, and all are told the same.
func TestRing(t *testing.T) {
	bubble(t, 3, func(t *testing.T, w *world) {
		w.start("a:1")
		w.start("b:1")
		w.start("c:1")
		w.await(8*time.Second, "a:1", "b:1", "c:1")
		time.Sleep(2 * time.Second)
		owners := w.owners()
		hello := func(addr string, shard int, version uint32) *metarpc.Welcome {
			nc, err := w.dial(t.Context(), addr)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			b, err := metarpc.AppendHello(nil, &metarpc.Hello{Magic: metarpc.Magic, Lowest: version, Highest: version, Shard: shard})
			if err != nil {
				t.Fatal(err)
			}
			go nc.Write(b)
			frame, err := metarpc.ReadFrame(bufio.NewReader(nc), nil, metarpc.MaxHello)
			if err != nil {
				t.Fatal(err)
			}
			welcome, err := metarpc.ParseWelcome(frame, metarpc.Spoken)
			if err != nil {
				t.Fatal(err)
			}
			return welcome
		}
		var first metarpc.Ring
		for _, addr := range []string{"a:1", "b:1", "c:1"} {
			for shard := range 4 { // the last one there is not
				got := hello(addr, shard, metarpc.Version)
				want := metarpc.StatusMoved
				if shard < 3 && owners[shard] == addr {
					want = metarpc.StatusOK
				}
				if got.Status != want {
					t.Errorf("shard %d at %s: %v %s", shard, addr, got.Status, got.Message)
				}
				if want == metarpc.StatusMoved && got.Volume != w.volume {
					t.Errorf("shard %d at %s: moved, in volume %x", shard, addr, got.Volume)
				}
				if first.Epoch == 0 {
					first = got.Ring
				}
				if !reflect.DeepEqual(got.Ring, first) {
					t.Errorf("shard %d at %s: %+v, want %+v", shard, addr, got.Ring, first)
				}
			}
			if addr == owners[0] {
				continue // a service that speaks another version cannot know for which shard it was; this one's is a stub
			}
			if got := hello(addr, 3, metarpc.Version+1); got.Status != metarpc.StatusVersion {
				t.Errorf("another version at %s: %+v", addr, got)
			}
		}
		for shard, owner := range first.Owners {
			if first.Services[owner] != owners[shard] {
				t.Errorf("shard %d is said to be with %s, want %s", shard, first.Services[owner], owners[shard])
			}
		}
		w.procs[0].leave(10 * time.Second)
		later := w.procs[1].running().ring()
		if later.Epoch <= first.Epoch || len(later.Services) != 2 {
			t.Errorf("%+v after %+v", later, first)
		}
		w.procs[1].cutOff()
		time.Sleep(DefaultLease)
		nc, err := w.dial(t.Context(), "b:1")
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		b, _ := metarpc.AppendHello(nil, &metarpc.Hello{Magic: metarpc.Magic, Lowest: metarpc.Version, Highest: metarpc.Version})
		go nc.Write(b)
		frame, err := metarpc.ReadFrame(nc, nil, metarpc.MaxHello)
		if err != nil {
			t.Fatal(err)
		}
		// It may only say what is true for ever, and that it cannot say more.
		said, err := metarpc.ParseWelcome(frame, metarpc.Spoken)
		if said != nil {
			said.Message = ""
		}
		if want := (metarpc.Welcome{Magic: metarpc.Magic, Version: metarpc.Version, Status: metarpc.StatusShutdown, Volume: w.volume}); err != nil || !reflect.DeepEqual(*said, want) {
			t.Errorf("a process that is cut off from the catalog has said %+v, %v", said, err)
		}
	})
}

func TestPeers(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		a := w.start("a:1")
		b := w.start("b:1")
		w.await(8*time.Second, "a:1", "b:1")
		time.Sleep(2 * time.Second)
		p := peers{a.running()}
		h := &meta.Hold{Shard: 1, Row: []byte("row"), Change: 2, Oldest: 3, Items: []meta.HoldItem{{ID: 4, Lease: metarpc.LeaseNames, Last: true}, {ID: 5}}}
		for shard, owner := range w.owners() { // here and there
			held, err := p.Hold(t.Context(), shard, h)
			want := &meta.Held{State: meta.HoldPending, Row: fmt.Append(nil, shard, h.Shard, h.Row, h.Change, h.Oldest, h.Items)}
			if err != nil || !reflect.DeepEqual(held, want) {
				t.Errorf("hold at shard %d, %s: %+v, %v; want %+v", shard, owner, held, err, want)
			}
			if err := p.Settle(t.Context(), shard, &meta.Settle{Row: []byte("row"), Oldest: 3, Changes: []meta.Settled{{Change: 2, Committed: true}}}); err != nil {
				t.Error(err)
			}
			if err := p.Settle(t.Context(), shard, &meta.Settle{}); err == nil {
				t.Error("the error of a service is not told")
			}
			after := locktable.Wait{Number: 7, Waiter: locktable.Owner{Number: 8}, Holder: locktable.Owner{Client: [16]byte{9}}}
			waits, err := p.LockWaits(t.Context(), shard, after)
			if want := []locktable.Wait{(&stub{shard: shard}).wait(), after}; !slices.Equal(waits, want) {
				t.Errorf("%+v, %v; want %+v", waits, err, want)
			}
		}
		// An answer that is too large is an error, and the connection goes on.
		there := slices.Index(w.owners(), "b:1")
		conn, err := a.running().peer(t.Context(), &memberRow{id: b.running().id})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Hold(t.Context(), there, &meta.Hold{Change: tooLarge}); err == nil || conn.broken() != nil {
			t.Errorf("a hold with an answer that is larger than a frame: %v; the connection: %v", err, conn.broken())
		}
		if _, err := p.Hold(t.Context(), 4, h); err == nil {
			t.Error("hold at a shard that is not")
		}
		// A token that is not the callee's, and a member that is not there, are found out.
		b.running().mu.Lock()
		other := *b.running().view.member(b.running().id)
		b.running().mu.Unlock()
		other.Token[0]++
		if nc, _, _, err := a.running().connect(t.Context(), &other); err == nil {
			t.Errorf("connected with a wrong token: %v", nc)
		}
		other.id[0]++
		if nc, _, _, err := a.running().connect(t.Context(), &other); err == nil {
			t.Errorf("connected with a wrong member: %v", nc)
		}
		// Who does not prove anything is not served.
		nc, err := w.dial(t.Context(), "b:1")
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		hello := &peerrpc.Hello{Magic: peerrpc.Magic, Lowest: peerrpc.Lowest, Highest: peerrpc.Version, From: a.running().id, To: b.running().id}
		go func() {
			write(nc, hello)
			write(nc, &peerrpc.Proof{})
			write(nc, &peerrpc.Call{Op: peerrpc.OpLook, Wait: 1})
		}()
		if frame, err := metarpc.ReadFrame(nc, nil, peerrpc.MaxHello); err != nil {
			t.Error(err)
		} else if c, err := peerrpc.ParseChallenge(frame); err != nil || c.Status != peerrpc.StatusOK {
			t.Error(c, err)
		}
		if frame, err := metarpc.ReadFrame(nc, nil, peerrpc.MaxFrame); err == nil {
			t.Errorf("who has proved nothing hears %x", frame)
		}
		// A peer that dies fails calls; its shards are called elsewhere later.
		dead := slices.Index(w.owners(), "b:1")
		b.kill()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := p.Hold(ctx, dead, h); err == nil {
			t.Error("a hold at a dead member")
		}
		w.await(2*DefaultLease, "a:1")
		if _, err := p.Hold(t.Context(), dead, h); err != nil {
			t.Error(err)
		}
	})
}

// The catalog gets a later format when all members know it, and who does not know it joins no more.
func TestFormats(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		const later = schema.FormatNewest + 1
		a := w.start("a:1")
		b := w.start("b:1")
		w.await(8*time.Second, "a:1", "b:1")
		// knows rewrites a member's row as one that knows the later format, and has fields of its own, would have written it.
		knows := func(p *proc) {
			key := schema.MemberKey(p.running().id)
			raw, err := w.engine.Get(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			var row schema.Member
			if err := schema.Decode(raw, &row); err != nil || row.Format != schema.FormatNewest || row.Lowest != metarpc.Lowest || row.Highest != metarpc.Version {
				t.Fatalf("%+v, %v", row, err)
			}
			row.Format = later
			raw = append(schema.Encode(&row), 0xa5, 'l', 'a', 't', 'e', 'r', 0x92, 1, 2)
			raw[0] += 2
			var b catalog.Batch
			b.Put(key, raw)
			if err := w.engine.Commit(t.Context(), &b); err != nil {
				t.Fatal(err)
			}
		}
		raise := func() (*catalog.Batch, error) {
			raw, err := w.engine.Get(t.Context(), schema.KeyVolume)
			if err != nil {
				t.Fatal(err)
			}
			var volume schema.Volume
			if err := schema.Decode(raw, &volume); err != nil {
				t.Fatal(err)
			}
			volume.Format = later
			b := new(catalog.Batch)
			b.GuardEqual(schema.KeyVolume, raw)
			b.Put(schema.KeyVolume, schema.Encode(&volume))
			return b, schema.RaiseFormat(t.Context(), w.engine, b, later)
		}
		knows(a)
		if _, err := raise(); err == nil || !strings.Contains(err.Error(), "service at b:1 (p) does not know format 10 of the catalog") {
			t.Error("while one does not know it:", err)
		}
		knows(b)
		batch, err := raise()
		if err != nil {
			t.Fatal(err)
		}
		c := w.start("c:1")
		if err := w.engine.Commit(t.Context(), batch); !errors.As(err, new(*catalog.GuardError)) {
			t.Error("after one has joined:", err)
		}
		if _, err := raise(); err == nil {
			t.Error("while one that has joined does not know it")
		}
		// Another version keeps what it does not know of a row that it changes.
		w.await(8*time.Second, "a:1", "b:1", "c:1")
		ms, key := members{c.running()}, schema.MemberKey(a.running().id)
		before, err := w.engine.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		for _, cancel := range []bool{false, true} {
			if err := ms.Drain(t.Context(), "a:1", cancel); err != nil {
				t.Fatal(err)
			}
			after, err := w.engine.Get(t.Context(), key)
			if err != nil || bytes.Equal(after, before) != cancel || !bytes.HasSuffix(after, []byte("later\x92\x01\x02")) {
				t.Errorf("%x became %x, %v", before, after, err)
			}
		}
		if err := c.leave(20 * time.Second); err != nil {
			t.Fatal(err)
		}
		if batch, err = raise(); err == nil {
			err = w.engine.Commit(t.Context(), batch)
		}
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{Engine: w.engine, Address: "d:1", Log: w.log, Clock: func() time.Duration { return time.Since(w.epoch) },
			Open: func(context.Context, *Incarnation) (Host, error) {
				return nil, errors.New("it has joined")
			}}
		if n, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "the catalog has format 10, this program knows formats 3 to 9: upgrade weftd") {
			t.Error("who does not know it:", n, err)
		}
		if _, err := a.node.join(t.Context()); err == nil || !strings.Contains(err.Error(), "upgrade weftd") {
			t.Error("who does not know it and joins again:", err)
		}
		w.await(8*time.Second, "a:1", "b:1")
	})
}

// Members speak with each other the highest version that both know; the error of those without one says which is to be upgraded.
func TestPeerVersions(t *testing.T) {
	bubble(t, 4, func(t *testing.T, w *world) {
		speaking := func(addr string, lowest, highest uint32) *proc {
			p := &proc{w: w, addr: addr, edit: func(cfg *Config) { cfg.SpeaksToPeers = metarpc.Versions{Lowest: lowest, Highest: highest} }}
			w.procs = append(w.procs, p)
			p.up()
			return p
		}
		a := speaking("a:1", 3, 5)
		b := speaking("b:1", 2, 4)
		c := speaking("c:1", 4, 9)
		old := speaking("d:1", 1, 1)
		w.await(20*time.Second, "a:1", "b:1", "c:1", "d:1")
		time.Sleep(2 * time.Second)
		for _, row := range []struct {
			from, to *proc
			want     uint32
			text     string // of the error if there is none
		}{
			{a, b, 4, ""}, {b, a, 4, ""}, {a, c, 5, ""}, {c, b, 4, ""},
			{a, old, 0, "calls speaks versions 3 to 5 of the protocol between services, the one that is called version 1: upgrade weftd of the one that is called"},
			{old, b, 0, "calls speaks version 1 of the protocol between services, the one that is called versions 2 to 4: upgrade weftd of the one that calls"},
		} {
			m := row.from.running()
			m.mu.Lock()
			to := m.view.member(row.to.running().id)
			m.mu.Unlock()
			nc, _, version, err := m.connect(t.Context(), to)
			switch {
			case row.text == "" && (err != nil || version != row.want):
				t.Errorf("%s to %s: version %d, %v; want %d", row.from.addr, row.to.addr, version, err, row.want)
			case row.text != "" && (err == nil || !strings.Contains(err.Error(), row.text)):
				t.Errorf("%s to %s: %v, want %q", row.from.addr, row.to.addr, err, row.text)
			}
			if nc != nil {
				nc.Close()
			}
			shard := slices.Index(w.owners(), row.to.addr)
			waits, err := peers{m}.LockWaits(t.Context(), shard, locktable.Wait{})
			if (err == nil) != (row.text == "") || err == nil && waits[0] != (&stub{shard: shard}).wait() {
				t.Errorf("%s to %s: %+v, %v", row.from.addr, row.to.addr, waits, err)
			}
		}
	})
}

// Services that do not start are tried again, with rows of their own, and can be given away.
func TestNoStart(t *testing.T) {
	bubble(t, 2, func(t *testing.T, w *world) {
		rows := map[string]bool{}
		refuse := true
		p := &proc{w: w, addr: "a:1"}
		w.procs = append(w.procs, p)
		p.up()
		m := p.running()
		host := m.host
		m.mu.Lock()
		m.host = hostFunc(func(ctx context.Context, shard int, row []byte, engine catalog.Engine) (Service, error) {
			w.mu.Lock()
			key := fmt.Sprintf("%d %x", shard, row)
			again := rows[key]
			rows[key] = true
			no := refuse
			w.mu.Unlock()
			if again {
				t.Errorf("row %x for two services", row)
			}
			if no {
				return nil, errors.New("not now")
			}
			return host.Service(ctx, shard, row, engine)
		})
		m.mu.Unlock()
		time.Sleep(20 * time.Second)
		b := w.start("b:1")
		w.await(3*time.Second, "", "b:1")
		w.mu.Lock()
		refuse = false
		w.mu.Unlock()
		w.await(time.Minute, "a:1", "b:1")
		b.kill()
		w.await(2*DefaultLease, "a:1")
	})
}

type hostFunc func(ctx context.Context, shard int, row []byte, engine catalog.Engine) (Service, error)

func (f hostFunc) Service(ctx context.Context, shard int, row []byte, engine catalog.Engine) (Service, error) {
	return f(ctx, shard, row, engine)
}
func (hostFunc) Close() error { return nil }

// Random histories: whatever happens to processes, no two services answer for one shard, and when it is over all are served.
func TestHistories(t *testing.T) {
	histories := 12
	if testing.Short() {
		histories = 3
	}
	base := rand.Uint64()
	for i := range uint64(histories) {
		seed := base + i
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, 1+int(seed%9), func(t *testing.T, w *world) {
				if seed%2 == 0 {
					w.engine = faultytest.New(w.engine, faultytest.Config{
						Seed: seed, Delay: 10 * time.Millisecond, Conflict: 0.02, Lost: 0.02, Applied: 0.02, Late: 0.03, Slow: 0.02,
						LateBy: 8 * time.Second, SlowBy: 3 * time.Second, SnapshotReads: 300,
					})
				}
				history(t, w, seed)
			})
		})
	}
}

func history(t *testing.T, w *world, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 4 {
		w.start(fmt.Sprintf("%c:1", 'a'+i))
	}
	stop := make(chan struct{})
	clients := w.clients(stop, seed)
	gone := map[*proc]bool{}
	for range 60 {
		time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
		p := w.procs[r.IntN(len(w.procs))]
		if gone[p] {
			p.restart()
			delete(gone, p)
			continue
		}
		switch r.IntN(8) {
		case 0:
			p.kill()
			gone[p] = true
		case 1:
			p.resume()
			p.reconnect()
			p.leave(time.Duration(r.IntN(5000)) * time.Millisecond)
			gone[p] = true
		case 2:
			p.pause()
		case 3:
			p.cutOff()
		case 4:
			if m := p.node.member(); m != nil {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				members{m}.Drain(ctx, w.procs[r.IntN(len(w.procs))].addr, r.IntN(2) == 0)
				cancel()
			}
		case 5:
			p.resume()
		case 6:
			p.reconnect()
		case 7:
			p.resume()
			p.reconnect()
		}
	}
	for _, p := range w.procs {
		p.resume()
		p.reconnect()
		if gone[p] {
			p.restart()
		}
	}
	time.Sleep(4 * DefaultLease)
	for _, p := range w.procs {
		if err := (members{p.running()}).Drain(t.Context(), p.addr, true); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(4 * DefaultLease)
	close(stop)
	clients.Wait()
	// Faults of the catalog go on. So a member that was slow to beat may not answer just now, or even be about to join
	// again.
	served := func() (count map[string]int, even bool) {
		count, even = map[string]int{}, true
		for _, owner := range w.owners() {
			count[owner]++
			even = even && owner != "" && count[owner] <= (w.shards+3)/4
		}
		return count, even
	}
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		count, even := served()
		if even {
			break
		}
		if time.Since(began) > 4*DefaultLease {
			t.Errorf("in the end shards are served by %v", count)
			break
		}
	}
	t.Logf("%d answers, epochs %v", w.answers, w.answered)
	if w.answers < 1000 {
		t.Errorf("only %d calls were answered", w.answers)
	}
}

// restart is up where clients look at the process meanwhile.
func (p *proc) restart() {
	p.mu.Lock()
	p.paused, p.cut = nil, nil
	p.mu.Unlock()
	p.up()
}

// The shards of a process that is killed, or stopped, are served by others a lease, a look and a start of a service
// after it was last seen.
func TestTakeOver(t *testing.T) {
	bubble(t, 6, func(t *testing.T, w *world) {
		w.start("a:1")
		b := w.start("b:1")
		const most = DefaultLease + DefaultLease/5 + 150*time.Millisecond
		for i := range 20 {
			w.await(4*DefaultLease, "a:1", "b:1")
			time.Sleep(2*DefaultLease + time.Duration(i)*DefaultLease/20)
			began := time.Now()
			if i%2 == 0 {
				b.kill()
			} else {
				b.pause()
			}
			w.await(most, "a:1")
			t.Logf("taken after %v", time.Since(began))
			if i%2 == 0 {
				b.restart()
			} else {
				b.resume()
			}
		}
	})
}

// A client that comes while a process is no member, or while it is about to serve the shard, waits, and need not come
// again. It hears why if that takes too long.
func TestHelloWaits(t *testing.T) {
	bubble(t, 1, func(t *testing.T, w *world) {
		a := w.start("a:1")
		w.await(4*time.Second, "a:1")
		hello := func(want metarpc.Status) <-chan time.Duration {
			nc, err := w.dial(t.Context(), "a:1")
			if err != nil {
				t.Fatal(err)
			}
			b, err := metarpc.AppendHello(nil, &metarpc.Hello{Magic: metarpc.Magic, Lowest: metarpc.Version, Highest: metarpc.Version})
			if err != nil {
				t.Fatal(err)
			}
			took := make(chan time.Duration, 1)
			go func() { // ends with the answer, or the connection
				defer nc.Close()
				began := time.Now()
				nc.Write(b)
				frame, err := metarpc.ReadFrame(nc, nil, metarpc.MaxHello)
				if err != nil {
					took <- 0
					return
				}
				welcome, err := metarpc.ParseWelcome(frame, metarpc.Spoken)
				if err != nil || welcome.Status != want || welcome.Volume == [16]byte{} || (want == metarpc.StatusShutdown) != strings.Contains(welcome.Message, "quorum") {
					t.Errorf("%+v, %v", welcome, err)
				}
				took <- time.Since(began)
			}()
			return took
		}
		a.cutOff()
		time.Sleep(DefaultLease)
		early, late := hello(metarpc.StatusOK), hello(metarpc.StatusOK)
		time.Sleep(helloTimeout / 2)
		a.reconnect()
		for _, took := range []<-chan time.Duration{early, late} {
			if d := <-took; d < helloTimeout/2 || d > helloTimeout/2+DefaultLease/5+aliveLook {
				t.Errorf("answered after %v", d)
			}
		}
		a.cutOff()
		time.Sleep(DefaultLease)
		if d := <-hello(metarpc.StatusShutdown); d < awayTimeout || d > helloTimeout-time.Second { // the client still listens
			t.Errorf("answered after %v by a process that has no catalog", d)
		}
		a.reconnect()
		if err := a.leave(time.Minute); err != nil {
			t.Fatal(err)
		}
		a.restart()
		for !a.running().has(0) {
			time.Sleep(time.Millisecond)
		}
		if d := <-hello(metarpc.StatusOK); d == 0 || d > startTimeout {
			t.Errorf("answered after %v by a process that has just started", d)
		}
	})
}
