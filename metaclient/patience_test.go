package metaclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// stall has a service take everything and answer nothing, hellos included, as one does that is stopped or has lost its catalog.
type stall struct {
	mu   sync.Mutex
	over chan struct{} // nil while the service answers
}

func stalling(s *service) *stall {
	st := &stall{}
	s.cut = func(point string, _ metarpc.Op) bool { return point == "received" && st.wait(s.ctx) }
	s.welcome = func(net.Conn, *metarpc.Welcome) bool { return !st.wait(s.ctx) }
	return st
}

// wait reports whether there was a stall; then it is over.
func (st *stall) wait(ctx context.Context) bool {
	st.mu.Lock()
	over := st.over
	st.mu.Unlock()
	if over == nil {
		return false
	}
	select {
	case <-over:
	case <-ctx.Done():
	}
	return true
}

func (st *stall) begin() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.over = make(chan struct{})
}

func (st *stall) end() {
	st.mu.Lock()
	defer st.mu.Unlock()
	close(st.over)
	st.over = nil
}

var eio = layout.Patience{Time: 4 * time.Second, Errno: syscall.EIO}

// gaveUp checks that a call was given up, as soon as it should have been.
func gaveUp(t *testing.T, err error, p layout.Patience, began time.Time) {
	t.Helper()
	var over *layout.TimeoutError
	if !errors.As(err, &over) || over.Errno() != p.Errno || errors.Is(err, context.Canceled) {
		t.Errorf("%v, want a call that is given up with %v", err, p.Errno)
	}
	if took := time.Since(began); took != p.Time {
		t.Errorf("given up after %v, want %v", took, p.Time)
	}
}

// A call on a soft mount is given up when nothing is heard of the service, for whatever reason; a hard one goes on.
func TestSoft(t *testing.T) {
	for _, c := range []struct {
		name  string
		lose  func(s *service, st *stall, refuse *atomic.Bool)
		cause string
	}{
		{"stalled", func(_ *service, st *stall, _ *atomic.Bool) { st.begin() }, "as the mount is soft"},
		{"gone", func(s *service, _ *stall, refuse *atomic.Bool) { refuse.Store(true); s.hangUp() }, "connection refused"},
		{"no answer to a hello", func(s *service, st *stall, _ *atomic.Bool) { st.begin(); s.hangUp() }, "no connection"},
		{"session lost", func(s *service, _ *stall, refuse *atomic.Bool) {
			s.forget()
			s.hangUp()
			time.Sleep(backoffMin) // it has heard of that, and then the service goes
			refuse.Store(true)
			s.hangUp()
		}, "connection refused"},
	} {
		for _, errno := range []syscall.Errno{syscall.EIO, syscall.ETIMEDOUT} {
			t.Run(fmt.Sprint(c.name, " ", errno), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := layout.Patience{Time: 4 * time.Second, Errno: errno}
					s := newService(t)
					s.slots = metarpc.MinSlots
					var m mkdirs
					s.handle = m.handle
					st := stalling(s)
					var refuse atomic.Bool
					v, err := start(t.Context(), Config{Addrs: []string{"service:1"}, Log: quiet(), Patience: p},
						func(ctx context.Context, addr string) (net.Conn, error) {
							if refuse.Load() {
								return nil, syscall.ECONNREFUSED
							}
							return s.dial(ctx, addr)
						})
					if err != nil {
						t.Fatal(err)
					}
					defer v.Close(t.Context())
					c.lose(s, st, &refuse)
					synctest.Wait()
					hard := make(chan error, 1)
					go func() { _, err := v.StatFS(Hard(Soft(t.Context())), 1); hard <- err }()
					synctest.Wait()
					// More than there are slots: who gets none gives up as well.
					for n := range metarpc.MinSlots + 2 {
						began := time.Now()
						_, err := v.GetAttr(Soft(t.Context()), layout.FileID(100+n))
						gaveUp(t, err, p, began)
						if n == 0 && !strings.Contains(err.Error(), c.cause) {
							t.Errorf("%v, want %q in it", err, c.cause)
						}
					}
					time.Sleep(time.Hour)
					if len(hard) > 0 {
						t.Fatalf("a hard call: %v", <-hard)
					}
					refuse.Store(false)
					if st.over != nil {
						st.end()
					}
					if err := <-hard; err != nil {
						t.Errorf("a hard call: %v", err)
					}
					if _, err := v.GetAttr(Soft(t.Context()), 99); err != nil {
						t.Error(err)
					}
					synctest.Wait()
					if st := v.State(); st.Busy != 0 {
						t.Errorf("%d slots are busy", st.Busy)
					}
				})
			})
		}
	}
}

// Without Config.Patience calls wait, whatever their contexts say.
func TestHard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		st := stalling(s)
		c := connected(t, s, Config{})
		st.begin()
		done := make(chan error)
		go func() { _, err := c.StatFS(Soft(t.Context()), 1); done <- err }()
		time.Sleep(time.Hour)
		st.end()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// As long as the service is there, a call may take what it takes, and so may what is put off. The service is not asked more often than it takes to know.
func TestSoftWhileServiceWorks(t *testing.T) {
	const long = time.Hour
	for _, c := range []struct {
		name   string
		handle func(s *service) func(op metarpc.Op, args any) (metarpc.Status, any)
	}{
		{"a long call", func(s *service) func(op metarpc.Op, args any) (metarpc.Status, any) {
			return func(op metarpc.Op, args any) (metarpc.Status, any) {
				if op == metarpc.OpSetXattr && !sleep(s.ctx, long) {
					return metarpc.StatusShutdown, nil
				}
				return metarpc.StatusOK, nil
			}
		}},
		{"a grace period", func(*service) func(op metarpc.Op, args any) (metarpc.Status, any) {
			began := time.Now()
			return func(op metarpc.Op, args any) (metarpc.Status, any) {
				if op == metarpc.OpSetXattr && time.Since(began) < long {
					return metarpc.StatusGrace, nil
				}
				return metarpc.StatusOK, nil
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				s.handle = c.handle(s)
				p := layout.Patience{Time: 2 * time.Second, Errno: syscall.EIO}
				client := connected(t, s, Config{Patience: p})
				if err := client.SetXattr(Soft(t.Context()), metarpc.Cred{}, 7, "user.a", nil, 0); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Second)
				synctest.Wait()
				if n, most := s.executed(metarpc.OpRenew), int(long/(p.Time/2))+2; n > most {
					t.Errorf("%d signs of life asked for in %v", n, long)
				}
				if st := client.State(); st.Reconnects != 0 || st.Busy != 0 {
					t.Errorf("%d reconnects, %d slots are busy", st.Reconnects, st.Busy)
				}
			})
		})
	}
}

// A connection is not taken for dead because the answer to a question that was just asked has not come yet.
func TestSoftAskedLately(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(op metarpc.Op, _ any) (metarpc.Status, any) {
			switch op {
			case metarpc.OpRenew:
				sleep(s.ctx, time.Second)
			case metarpc.OpSetXattr:
				sleep(s.ctx, s.lease)
			}
			return metarpc.StatusOK, nil
		}
		c := connected(t, s, Config{Patience: eio})
		const before = 100 * time.Millisecond // the first tick, in which nothing has come
		time.Sleep(s.lease/3 - before - eio.Time/2)
		if err := c.SetXattr(Soft(t.Context()), metarpc.Cred{}, 7, "user.a", nil, 0); err != nil {
			t.Error(err)
		}
		if n := c.State().Reconnects; n != 0 || s.executed(metarpc.OpRenew) == 0 {
			t.Errorf("%d reconnects, %d signs of life asked for", n, s.executed(metarpc.OpRenew))
		}
	})
}

// What was given up is sent again and executed once, and its late answer is thrown away like that of what was interrupted.
func TestSoftLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var m mkdirs
		s.handle = m.handle
		st := stalling(s)
		c := connected(t, s, Config{Patience: eio})
		ctx := Soft(t.Context())
		if _, err := c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: 7}); err != nil {
			t.Fatal(err)
		}
		st.begin()
		began := time.Now()
		gaveUp(t, mkdir(ctx, c, "d"), eio, began)
		began = time.Now()
		_, err := c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: 6})
		gaveUp(t, err, eio, began)
		// An Open waits for the Close before it, and gives that up, too.
		c.Release(7)
		time.Sleep(2 * gather)
		began = time.Now()
		_, err = c.Open(ctx, metarpc.Cred{}, &metarpc.OpenArgs{ID: 7})
		gaveUp(t, err, eio, began)
		if m.count["d"] != 0 || c.State().Busy < 3 {
			t.Errorf("%v, %d slots are busy", m.count, c.State().Busy)
		}
		time.Sleep(time.Hour)
		st.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		if m.count["d"] != 1 || c.State().Busy != 0 {
			t.Errorf("executed %v, %d slots are busy", m.count, c.State().Busy)
		}
		if s.executed(metarpc.OpClose) != 2 || len(c.opens.files) != 0 {
			t.Errorf("%d calls to close files, ledger %v", s.executed(metarpc.OpClose), c.opens.files)
		}
		if err := mkdir(ctx, c, "e"); err != nil {
			t.Error(err)
		}
	})
}

// Waiting for a lock goes on as long as the service is there. One that was given up is not held, though it was granted.
func TestSoftLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		st := stalling(s)
		l := &locker{ctx: s.ctx}
		s.handle = l.handle
		l.set(always(metarpc.StatusLockWait), nil)
		c := connected(t, s, Config{Patience: eio})
		done := make(chan error, 1)
		go func() { done <- setLock(c, Soft(t.Context()), wait(record(1, metarpc.LockWrite, 10, 19))) }()
		time.Sleep(time.Hour)
		if len(done) > 0 {
			t.Fatalf("the service is there, and waiting for a lock ends: %v", <-done)
		}
		l.set(nil, nil)
		l.take()
		st.begin()
		var over *layout.TimeoutError
		if err := <-done; !errors.As(err, &over) {
			t.Errorf("the service is gone: %v", err)
		}
		// Who comes after that waits for what has become of it, but not for ever.
		began := time.Now()
		gaveUp(t, setLock(c, Soft(t.Context()), record(1, metarpc.LockRead, 30, 39)), eio, began)
		st.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		wantCalls(t, l, describe(wait(record(1, metarpc.LockWrite, 10, 19))), describe(record(1, metarpc.LockNone, 10, 19)))
		if c.locks.has(lockKey{lockedID, false, 1}, 0, 99) {
			t.Error("the lock is still held")
		}
	})
}

// One service is watched for each shard: that another one answers does not count.
func TestSoftShards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t)
		v := cl.connect(Config{Patience: eio})
		for shard := range 3 {
			if _, err := v.GetAttr(t.Context(), in(shard, 10)); err != nil {
				t.Fatal(err)
			}
		}
		cl.dead["b:1"] = silent
		cl.parts[1].hangUp()
		synctest.Wait()
		began := time.Now()
		done := make(chan error, 1)
		go func() {
			_, err := v.SetAttr(Soft(t.Context()), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(1, 10)})
			done <- err
		}()
		waiting, stop := v.Patient(Soft(t.Context()), in(1, 10))
		defer stop()
		for time.Since(began) < eio.Time-time.Second {
			if _, err := v.SetAttr(Soft(t.Context()), metarpc.Cred{}, &metarpc.SetAttrArgs{ID: in(0, 10)}); err != nil {
				t.Error(err)
			}
			time.Sleep(eio.Time / 8)
		}
		gaveUp(t, <-done, eio, began)
		<-waiting.Done()
		gaveUp(t, context.Cause(waiting), eio, began)
	})
}
