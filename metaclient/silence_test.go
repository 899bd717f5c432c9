package metaclient

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// freeze has shards' services answer nothing more on the connections that there are, and their address answer no hello.
func (cl *cluster) freeze(addr string, shards ...int) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.dead[addr] = silent
	for _, shard := range shards {
		s := cl.parts[shard]
		s.mu.Lock()
		cl.frozen[shard] = s.hellos
		s.mu.Unlock()
	}
}

// thawed waits if a shard's service is frozen, and nobody has come to the one that follows it.
func (cl *cluster) thawed(shard int) {
	s := cl.parts[shard]
	s.mu.Lock()
	hellos := s.hellos
	s.mu.Unlock()
	cl.mu.Lock()
	last, frozen := cl.frozen[shard]
	cl.mu.Unlock()
	if frozen && hellos == last {
		<-s.ctx.Done()
	}
}

// follow has the service at an index of the ring follow that of a shard, whose connections stay as they are.
func (cl *cluster) follow(shard, owner int) {
	s := cl.parts[shard]
	s.mu.Lock()
	s.instance[1]++
	s.mu.Unlock()
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.ring.Epoch++
	cl.ring.Owners[shard] = owner
}

// A service that gives no sign of life while calls wait is left if there are others, in all sessions, and the one that
// follows it is found soon.
func TestSilentService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		cl.ring.Owners = []int{0, 1, 1}
		v := cl.connect(Config{})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 10)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		cl.freeze("b:1", 1, 2)
		const left = silentLeave * silentRound
		begun := time.Now()
		done := make(chan error, 1)
		go func() { // ends with the call
			_, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)})
			done <- err
		}()
		connected := func(want bool) {
			t.Helper()
			synctest.Wait()
			for _, shard := range []int{1, 2} { // of which one has no calls
				if got := v.State().Sessions[shard].Connected; got != want {
					t.Errorf("shard %d after %v: connected %t", shard, time.Since(begun), got)
				}
			}
		}
		time.Sleep(left - time.Millisecond)
		connected(true)
		time.Sleep(silentRound)
		connected(false)
		// Nobody follows it yet.
		time.Sleep(20*time.Second + 123*time.Millisecond)
		if len(done) > 0 {
			t.Fatal(<-done)
		}
		if _, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(0, 10)}); err != nil {
			t.Error(err)
		}
		cl.follow(1, 2)
		begun = time.Now()
		if err := <-done; err != nil || time.Since(begun) > movedPause+slowHello {
			t.Errorf("%v, %v after another service had the shard", err, time.Since(begun))
		}
		if st := v.State().Sessions[1]; st.Addr != "c:1" || st.Reconnects != 1 {
			t.Errorf("%+v", st)
		}
	})
}

// A service that works on a call for long is not left, and gives a sign of life now and then.
func TestSlowCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const long = time.Hour
		cl := newCluster(t)
		handle := cl.parts[1].handle
		cl.parts[1].handle = func(op metarpc.Op, args any) (metarpc.Status, any) {
			if op == metarpc.OpSetAttr {
				sleep(cl.parts[1].ctx, long)
			}
			return handle(op, args)
		}
		v := cl.connect(Config{})
		if _, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)}); err != nil {
			t.Error(err)
		}
		n, least, most := cl.parts[1].executed(metarpc.OpRenew), int(long/((silentAsk+2)*silentRound)), int(long/(silentAsk*silentRound))
		if st := v.State(); st.Reconnects != 0 || n < least || n > most {
			t.Errorf("%d reconnects, %d signs of life asked for in %v, want %d to %d", st.Reconnects, n, long, least, most)
		}
	})
}

// Services are asked for a sign of life without calls, too, each in one of its sessions, and one that gives none is
// left.
func TestSilentIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		cl.ring.Owners = []int{0, 1, 1}
		v := cl.connect(Config{})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 10)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Hour)
		asked := cl.parts[1].executed(metarpc.OpRenew) + cl.parts[2].executed(metarpc.OpRenew)
		// Each of the two sessions renews its lease besides.
		if least, most := int(time.Hour/(idleAsk+idleRound)), int(time.Hour/idleAsk+2*time.Hour/(cl.parts[1].lease/3)); asked < least || asked > most {
			t.Errorf("%d signs of life asked for, want %d to %d", asked, least, most)
		}
		if st := v.State(); st.Reconnects != 0 {
			t.Errorf("%d reconnects", st.Reconnects)
		}
		cl.freeze("b:1", 1, 2)
		time.Sleep(idleAsk + idleRound + (silentLeave-silentAsk+1)*silentRound)
		synctest.Wait()
		for _, shard := range []int{1, 2} {
			if v.State().Sessions[shard].Connected {
				t.Errorf("shard %d: still connected", shard)
			}
		}
		cl.follow(1, 2)
		cl.follow(2, 2)
		time.Sleep(movedPause + slowHello)
		synctest.Wait()
		for _, shard := range []int{1, 2} { // and has told that service what it had
			if st := v.State().Sessions[shard]; st.Addr != "c:1" || !st.Connected || cl.parts[shard].executed(metarpc.OpReclaimComplete) != 1 {
				t.Errorf("shard %d: %+v", shard, st)
			}
		}
	})
}

// Where there is no other service to go to, one that does not answer is waited for.
func TestSilentOnlyService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.lease = time.Hour
		st := stalling(s)
		c := connected(t, s, Config{})
		st.begin()
		done := make(chan error)
		go func() { // ends with the call
			done <- c.SetXattr(t.Context(), metarpc.Cred{}, 1, "user.a", nil, 0)
		}()
		time.Sleep(time.Minute)
		if got := c.State(); !got.Connected || got.Reconnects != 0 {
			t.Errorf("%+v", got)
		}
		st.end()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Services that have all lost their catalog answer no hello. When they have it back, nobody pauses.
func TestSilentServices(t *testing.T) {
	for _, away := range []time.Duration{5 * time.Second, 31 * time.Second, 58 * time.Second, 10 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			cl := newCluster(t)
			v := cl.connect(Config{})
			if _, err := v.GetAttr(t.Context(), in(1, 10)); err != nil {
				t.Fatal(err)
			}
			back := make(chan struct{})
			for _, s := range cl.parts {
				tell := s.welcome
				s.welcome = func(nc net.Conn, w *metarpc.Welcome) bool {
					select {
					case <-back:
					case <-s.ctx.Done():
						return false
					}
					return tell(nc, w)
				}
			}
			var waiting atomic.Int64
			v.dial = func(ctx context.Context, addr string) (net.Conn, error) { // at another address than the shard's, too, hellos wait
				if addr == "b:1" {
					return cl.dial(ctx, addr)
				}
				waiting.Add(1)
				defer waiting.Add(-1)
				select {
				case <-back:
					return cl.dial(ctx, addr)
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			cl.parts[1].hangUp()
			done := make(chan error)
			go func() { // ends with the call
				_, err := v.SetAttr(t.Context(), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)})
				done <- err
			}()
			time.Sleep(away)
			close(back)
			begun := time.Now()
			if err := <-done; err != nil || time.Since(begun) > movedPause {
				t.Errorf("away for %v: %v after %v", away, err, time.Since(begun))
			}
			synctest.Wait()
			if n := waiting.Load(); n != 0 {
				t.Errorf("%d connections are still being made", n)
			}
		})
	}
}

// A call that was put off for long is made again soon after it need not be any more.
func TestLongGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var over atomic.Bool
		s.handle = func(op metarpc.Op, _ any) (metarpc.Status, any) {
			if op == metarpc.OpSetXattr && !over.Load() {
				return metarpc.StatusGrace, nil
			}
			return metarpc.StatusOK, nil
		}
		c := connected(t, s, Config{})
		for range 20 {
			over.Store(false)
			done := make(chan error)
			go func() { // ends with the call
				done <- c.SetXattr(t.Context(), metarpc.Cred{}, 1, "user.a", nil, 0)
			}()
			time.Sleep(time.Minute)
			over.Store(true)
			begun := time.Now()
			if err := <-done; err != nil || time.Since(begun) > gracePause {
				t.Errorf("%v after %v", err, time.Since(begun))
			}
		}
	})
}
