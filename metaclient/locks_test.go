package metaclient

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/filelock"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

const lockedID = layout.FileID(5)

// locker answers LOCK by a script and keeps record of it.
type locker struct {
	mu   sync.Mutex
	seen []string
	// answer is what LOCK answers; nil is always yes.
	answer func(a *metarpc.LockArgs) metarpc.Status
	gate   chan struct{} // LOCK waits for it before it answers; nil = does not
	ctx    context.Context
}

func (l *locker) handle(op metarpc.Op, args any) (metarpc.Status, any) {
	a, ok := args.(*metarpc.LockArgs)
	if !ok {
		if o, ok := args.(*metarpc.OpenArgs); ok {
			l.note(fmt.Sprintf("open %d", o.ID))
			return metarpc.StatusOK, &metarpc.AttrResult{Attr: metarpc.Attr{ID: o.ID}}
		}
		return metarpc.StatusOK, nil
	}
	l.note(describe(a))
	l.mu.Lock()
	gate, answer := l.gate, l.answer
	l.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-l.ctx.Done():
		}
	}
	if answer == nil {
		return metarpc.StatusOK, nil
	}
	return answer(a), nil
}

func (l *locker) note(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen, s)
}

// take returns what was called since it was asked last.
func (l *locker) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := l.seen
	l.seen = nil
	return seen
}

func (l *locker) set(answer func(*metarpc.LockArgs) metarpc.Status, gate chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answer, l.gate = answer, gate
}

// describe is "[reclaim ]TYPE[?] START-END of OWNER"; the question mark says that it would wait.
func describe(a *metarpc.LockArgs) string {
	s := [...]string{"unlock", "read", "write"}[a.Type]
	if a.Flock {
		s = "flock " + s
	}
	if a.Wait {
		s += "?"
	}
	if a.Reclaim {
		s = "reclaim " + s
	}
	if a.Alone {
		s += ", alone,"
	}
	end := fmt.Sprint(a.End)
	if a.End == filelock.ToEOF {
		end = ""
	}
	return fmt.Sprintf("%s %d-%s of %d", s, a.Start, end, a.Owner)
}

// setLock is Lock for those who keep nothing that could be older than the lock, and have written nothing.
func setLock(c interface {
	Lock(context.Context, *metarpc.LockArgs, func(context.Context) error) (bool, error)
}, ctx context.Context, a *metarpc.LockArgs) error {
	_, err := c.Lock(ctx, a, nil)
	return err
}

func record(owner uint64, typ metarpc.LockType, start, end int64) *metarpc.LockArgs {
	return &metarpc.LockArgs{ID: lockedID, Owner: owner, Type: typ, Start: start, End: end, PID: 7}
}

func whole(owner uint64, typ metarpc.LockType) *metarpc.LockArgs {
	return &metarpc.LockArgs{ID: lockedID, Owner: owner, Type: typ, Flock: true}
}

func wait(a *metarpc.LockArgs) *metarpc.LockArgs { a.Wait = true; return a }

func wantCalls(t *testing.T, l *locker, want ...string) {
	t.Helper()
	if got := l.take(); !slices.Equal(got, want) {
		t.Errorf("the service was asked\n\t%q, want\n\t%q", got, want)
	}
}

func always(status metarpc.Status) func(*metarpc.LockArgs) metarpc.Status {
	return func(*metarpc.LockArgs) metarpc.Status { return status }
}

// lockTest runs f in a bubble, with a client of a scripted service that has the file open.
func lockTest(t *testing.T, f func(t *testing.T, s *service, l *locker, c *Client), cfg ...Config) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := &locker{ctx: s.ctx}
		s.handle = l.handle
		c := connected(t, s, append(cfg, Config{})[0])
		if _, err := c.Open(t.Context(), metarpc.Cred{}, &metarpc.OpenArgs{ID: lockedID}); err != nil {
			t.Fatal(err)
		}
		l.take()
		f(t, s, l, c)
	})
}

// ready calls all clients back.
func (s *service) ready(a metarpc.LockReadyArgs) {
	b, err := metarpc.AppendCallBack(nil, metarpc.Version, metarpc.BackHeader{Number: 1, Op: metarpc.BackLockReady}, &a)
	if err != nil {
		s.t.Fatal(err)
	}
	s.send(b)
	if back := <-s.backs; back.Status != metarpc.StatusOK {
		s.t.Errorf("callback answered with %v", back.Status)
	}
}

func TestLockWait(t *testing.T) {
	for _, called := range []bool{true, false} {
		t.Run(fmt.Sprintf("called=%v", called), func(t *testing.T) {
			lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
				l.set(always(metarpc.StatusLockWait), nil)
				done := make(chan error, 1)
				go func() { done <- setLock(c, t.Context(), wait(record(1, metarpc.LockWrite, 0, 9))) }()
				synctest.Wait()
				wantCalls(t, l, "write? 0-9 of 1")
				if busy := c.State().Busy; busy != 0 {
					t.Errorf("waiting takes %d slots", busy)
				}
				l.set(nil, nil)
				time.Sleep(3 * turnMost) // until somebody reads
				at := time.Now()
				if called {
					s.ready(metarpc.LockReadyArgs{ID: lockedID, Owner: 2}) // somebody else
					s.ready(metarpc.LockReadyArgs{ID: lockedID, Owner: 1, Flock: true})
					synctest.Wait()
					wantCalls(t, l)
					s.ready(metarpc.LockReadyArgs{ID: lockedID, Owner: 1})
				}
				if err := <-done; err != nil {
					t.Error(err)
				}
				if took := time.Since(at); called && took > 0 || took > askLast {
					t.Errorf("asked again after %v", took)
				}
				wantCalls(t, l, "write? 0-9 of 1")
			})
		})
	}
}

// Who gives up waiting leaves no wait behind at the service, or has the lock.
func TestLockGiveUp(t *testing.T) {
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		for _, late := range []bool{false, true} {
			l.set(always(metarpc.StatusLockWait), nil)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- setLock(c, ctx, wait(record(1, metarpc.LockWrite, 0, 9))) }()
			synctest.Wait()
			if late {
				l.set(nil, nil)
			} else {
				l.set(always(metarpc.Status(syscall.EAGAIN)), nil)
			}
			cancel()
			if err := <-done; late != (err == nil) || !late && !errors.Is(err, context.Canceled) {
				t.Errorf("granted at the last moment %v: %v", late, err)
			}
			wantCalls(t, l, "write? 0-9 of 1", "write 0-9 of 1")
		}
		<-c.DropLocks(lockedID, false, 1, nil)
		wantCalls(t, l, "unlock 0- of 1")

		// Two threads wait for the same lock: one that gives up does not end the other's waiting.
		l.set(always(metarpc.StatusLockWait), nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		go func() { done <- setLock(c, ctx, wait(record(1, metarpc.LockWrite, 0, 9))) }()
		synctest.Wait()
		go func() { done <- setLock(c, t.Context(), wait(record(1, metarpc.LockWrite, 0, 9))) }()
		synctest.Wait()
		l.take()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		wantCalls(t, l)
		l.set(nil, nil)
		s.ready(metarpc.LockReadyArgs{ID: lockedID, Owner: 1})
		if err := <-done; err != nil {
			t.Error(err)
		}
		<-c.DropLocks(lockedID, false, 1, nil)
		if n := len(c.locks.owners); n != 0 {
			t.Errorf("%d owners are remembered of no locks", n)
		}
	})
}

// A call that was abandoned and granted all the same is undone before the next call of the same owner.
func TestLockAbandoned(t *testing.T) {
	for _, c := range []struct {
		name   string
		before []*metarpc.LockArgs
		ask    *metarpc.LockArgs
		answer metarpc.Status
		undo   []string
	}{
		{"nothing before", nil, record(1, metarpc.LockWrite, 10, 19), metarpc.StatusOK, []string{"unlock 10-19 of 1"}},
		{"an upgrade", []*metarpc.LockArgs{record(1, metarpc.LockRead, 0, 12), record(1, metarpc.LockWrite, 15, 16)},
			record(1, metarpc.LockWrite, 10, 19), metarpc.StatusOK,
			[]string{"read 10-12 of 1", "unlock 13-14 of 1", "unlock 17-19 of 1"}},
		{"what it had", []*metarpc.LockArgs{record(1, metarpc.LockWrite, 0, 99)}, record(1, metarpc.LockWrite, 10, 19),
			metarpc.StatusOK, nil},
		{"up to the end", []*metarpc.LockArgs{record(1, metarpc.LockRead, 50, filelock.ToEOF)},
			record(1, metarpc.LockWrite, 0, filelock.ToEOF), metarpc.StatusOK, []string{"read 50- of 1", "unlock 0-49 of 1"}},
		{"waiting", nil, wait(record(1, metarpc.LockWrite, 10, 19)), metarpc.StatusLockWait,
			[]string{"write 10-19 of 1", "unlock 10-19 of 1"}},
		{"refused", nil, record(1, metarpc.LockWrite, 10, 19), metarpc.Status(syscall.EAGAIN), nil},
		{"an unlock", []*metarpc.LockArgs{record(1, metarpc.LockRead, 0, 99)}, record(1, metarpc.LockNone, 10, 19),
			metarpc.StatusOK, nil},
		{"a conversion", []*metarpc.LockArgs{whole(1, metarpc.LockRead)}, whole(1, metarpc.LockWrite), metarpc.StatusOK,
			[]string{"flock unlock 0- of 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ask, undo, answer, before := c.ask, c.undo, c.answer, c.before
			lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
				for _, a := range before {
					if err := setLock(c, t.Context(), a); err != nil {
						t.Fatal(err)
					}
				}
				l.take()
				gate := make(chan struct{})
				l.set(always(answer), gate)
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- setLock(c, ctx, ask) }()
				synctest.Wait()
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) {
					t.Errorf("abandoned call: %v", err)
				}
				next := *record(1, metarpc.LockRead, 1000, 1000)
				next.Flock = ask.Flock
				go func() { done <- setLock(c, t.Context(), &next) }()
				synctest.Wait()
				wantCalls(t, l, describe(ask0(ask)))
				l.set(nil, nil)
				close(gate)
				if err := <-done; err != nil {
					t.Error(err)
				}
				wantCalls(t, l, append(slices.Clone(undo), describe(ask0(&next)))...)
			})
		})
	}
}

// ask0 is a request as the service sees it.
func ask0(a *metarpc.LockArgs) *metarpc.LockArgs {
	b := *a
	if b.Flock {
		b.Start, b.End = 0, filelock.ToEOF
	}
	return &b
}

// After a restart of the service locks are set again, once the files are open again.
func TestLockReclaim(t *testing.T) {
	type lost struct {
		flock bool
		owner uint64
	}
	losses := make(chan lost, 10)
	cfg := Config{OnLockLost: func(id layout.FileID, flock bool, owner uint64) { losses <- lost{flock, owner} }}
	told := func() (list []lost) {
		for len(losses) > 0 {
			list = append(list, <-losses)
		}
		slices.SortFunc(list, func(a, b lost) int { return int(a.owner) - int(b.owner) })
		return list
	}
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		for _, a := range []*metarpc.LockArgs{
			record(1, metarpc.LockWrite, 0, 99), record(1, metarpc.LockRead, 10, 19), record(2, metarpc.LockWrite, 200, 299),
			whole(3, metarpc.LockRead), record(4, metarpc.LockRead, 0, 9), record(4, metarpc.LockNone, 0, 99),
		} {
			if err := setLock(c, t.Context(), a); err != nil {
				t.Fatal(err)
			}
		}
		if setLock(c, t.Context(), record(4, metarpc.LockNone, 0, 99)) != nil {
			t.Error("unlocking what is not locked failed")
		}
		l.take()
		grace := true
		l.set(func(a *metarpc.LockArgs) metarpc.Status {
			switch {
			case !a.Reclaim && grace && a.Type != metarpc.LockNone:
				return metarpc.StatusGrace
			case a.Reclaim && a.Owner == 2:
				return metarpc.Status(syscall.EIO)
			}
			return metarpc.StatusOK
		}, nil)
		s.mu.Lock()
		s.instance[0]++
		s.mu.Unlock()
		s.hangUp()
		time.Sleep(5 * time.Second)
		got := l.take()
		if len(got) == 0 || got[0] != "open 5" {
			t.Fatalf("the file was not opened first: %q", got)
		}
		slices.Sort(got[1:])
		want := []string{
			"open 5", "reclaim flock read 0- of 3", "reclaim read 10-19 of 1", "reclaim write 0-9 of 1", "reclaim write 20-99 of 1",
			"reclaim write 200-299 of 2", "unlock 0- of 2",
		}
		if !slices.Equal(got, want) {
			t.Errorf("asked %q, want %q", got, want)
		}
		if got := told(); !slices.Equal(got, []lost{{false, 2}}) {
			t.Errorf("lost %+v", got)
		}

		// A new lock waits for the end of the grace period.
		at := time.Now()
		go func() {
			time.Sleep(10 * time.Second)
			l.set(nil, nil)
		}()
		if err := setLock(c, t.Context(), record(9, metarpc.LockWrite, 300, 399)); err != nil {
			t.Error(err)
		}
		if took := time.Since(at); took < 10*time.Second || took > 12*time.Second {
			t.Errorf("locked after %v", took)
		}

		// With the session everything is lost.
		s.forget()
		s.hangUp()
		time.Sleep(5 * time.Second)
		if got := told(); !slices.Equal(got, []lost{{false, 1}, {true, 3}, {false, 9}}) {
			t.Errorf("lost %+v", got)
		}
		l.take()
		<-c.DropLocks(lockedID, false, 1, nil)
		wantCalls(t, l) // there is none
		if n := len(c.locks.owners); n != 0 {
			t.Errorf("%d owners are remembered of no locks", n)
		}
	}, cfg)
}

// A lock that is asked for while the session is lost is set in the new one, when the file is open there.
func TestLockNewSession(t *testing.T) {
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		gate := make(chan struct{})
		l.set(always(metarpc.StatusLockWait), gate)
		done := make(chan error, 1)
		go func() { done <- setLock(c, t.Context(), wait(record(1, metarpc.LockWrite, 0, 9))) }()
		synctest.Wait()
		tries := 0
		l.set(func(*metarpc.LockArgs) metarpc.Status {
			if tries++; tries < 3 {
				return metarpc.Status(syscall.EBADF)
			}
			return metarpc.StatusOK
		}, nil)
		s.forget()
		s.hangUp()
		synctest.Wait()
		close(gate)
		if err := <-done; err != nil {
			t.Error(err)
		}
		c.Release(lockedID)
		time.Sleep(time.Second)
		l.set(always(metarpc.Status(syscall.EBADF)), nil)
		if err := setLock(c, t.Context(), record(2, metarpc.LockWrite, 0, 9)); lockStatus(err) != metarpc.Status(syscall.EBADF) {
			t.Errorf("lock of a file that is not open: %v", err)
		}
	})
}

// Closing the client ends those who wait for locks.
func TestLockClose(t *testing.T) {
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		l.set(always(metarpc.StatusLockWait), nil)
		done := make(chan error, 1)
		go func() { done <- setLock(c, t.Context(), wait(record(1, metarpc.LockWrite, 0, 9))) }()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		<-c.DropLocks(lockedID, false, 1, nil)
		if err := setLock(c, t.Context(), record(1, metarpc.LockWrite, 0, 9)); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// TestLockStable takes locks away under which something was written: in one call if no other session has seen the lock, or else after it was made
// stable, before anything that the same owner asks for later.
func TestLockStable(t *testing.T) {
	refused := func(a *metarpc.LockArgs) metarpc.Status {
		if a.Alone {
			return metarpc.StatusShared
		}
		return metarpc.StatusOK
	}
	unlocks := map[string]func(c *Client, ctx context.Context, stable func(context.Context) error) error{
		"unlock": func(c *Client, ctx context.Context, stable func(context.Context) error) error {
			_, err := c.Lock(ctx, record(1, metarpc.LockNone, 0, 9), stable)
			return err
		},
		"drop": func(c *Client, _ context.Context, stable func(context.Context) error) error {
			<-c.DropLocks(lockedID, false, 1, stable)
			return nil
		},
	}
	for name, unlock := range unlocks {
		t.Run(name, func(t *testing.T) {
			lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
				lock := func() {
					if err := setLock(c, t.Context(), record(1, metarpc.LockWrite, 0, 9)); err != nil {
						t.Error(err)
					}
				}
				end := map[string]string{"unlock": "9", "drop": ""}[name]
				lock()
				l.take()
				err := unlock(c, t.Context(), func(context.Context) error { t.Error("made stable"); return nil })
				if err != nil {
					t.Error(err)
				}
				wantCalls(t, l, "unlock, alone, 0-"+end+" of 1")
				for _, failed := range []error{nil, errors.New("no")} {
					lock()
					l.take()
					l.set(refused, nil)
					next := make(chan struct{})
					err := unlock(c, t.Context(), func(context.Context) error {
						wantCalls(t, l, "unlock, alone, 0-"+end+" of 1")
						go func() { // ends with the answer
							defer close(next)
							lock()
						}()
						synctest.Wait()
						wantCalls(t, l)
						return failed
					})
					if err != nil {
						t.Error(err)
					}
					<-next
					wantCalls(t, l, "unlock 0-"+end+" of 1", "write 0-9 of 1")
				}
			})
		})
	}
	// The service restarts, and nothing becomes stable before all is reclaimed.
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		if err := setLock(c, t.Context(), record(1, metarpc.LockWrite, 0, 9)); err != nil {
			t.Error(err)
		}
		l.take()
		l.set(refused, nil)
		complete := s.executed(metarpc.OpReclaimComplete)
		_, err := c.Lock(t.Context(), record(1, metarpc.LockNone, 0, 9), func(context.Context) error {
			wantCalls(t, l, "unlock, alone, 0-9 of 1")
			s.mu.Lock()
			s.instance[0]++
			s.mu.Unlock()
			s.hangUp()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			wantCalls(t, l, "open 5", "reclaim write 0-9 of 1")
			if n := s.executed(metarpc.OpReclaimComplete) - complete; n != 1 {
				t.Errorf("the service was told %d times that all is reclaimed", n)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		wantCalls(t, l, "unlock 0-9 of 1")
	})
	// Who is interrupted keeps the lock.
	lockTest(t, func(t *testing.T, s *service, l *locker, c *Client) {
		if err := setLock(c, t.Context(), record(1, metarpc.LockWrite, 0, 9)); err != nil {
			t.Error(err)
		}
		l.take()
		l.set(refused, nil)
		ctx, cancel := context.WithCancel(t.Context())
		_, err := c.Lock(ctx, record(1, metarpc.LockNone, 0, 9), func(context.Context) error { cancel(); return ctx.Err() })
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		wantCalls(t, l, "unlock, alone, 0-9 of 1")
		if !c.locks.has(lockKey{id: lockedID, owner: 1}, 0, 9) {
			t.Error("the lock is gone")
		}
		<-c.DropLocks(lockedID, false, 1, nil) // comes later, and is not kept waiting
	})
}
