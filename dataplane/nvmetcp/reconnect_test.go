package nvmetcp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// life is a Controller without sockets.
type life struct {
	*Controller
	a        *association
	mu       sync.Mutex
	attempts []time.Duration // since the loss
	states   []State
	lost     time.Time
}

// live runs a Controller whose attempts to connect again are answered by try, given how many there were before.
func live(t *testing.T, cfg Config, try func(ctx context.Context, n int) error) *life {
	l := &life{}
	cfg.Addr, cfg.SubsysNQN, cfg.HostNQN, cfg.HostID, cfg.Log = "localhost:4420", testNQN, hostNQN, wire.HostID{1}, slog.New(slog.DiscardHandler)
	cfg.OnState = func(s State) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.states = append(l.states, s)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	l.Controller = newController(cfg)
	l.farewell = func(a *association) { a.fail(ErrClosed) }
	join := func() *association {
		a := newAssociation(l.Controller)
		a.info = &Info{KATO: cfg.KATO}
		l.live.Store(a)
		l.a = a
		return a
	}
	l.establish = func(ctx context.Context) (*association, error) {
		l.mu.Lock()
		n := len(l.attempts)
		l.attempts = append(l.attempts, time.Since(l.lost))
		l.mu.Unlock()
		if err := try(ctx, n); err != nil {
			return nil, err
		}
		return join(), nil
	}
	l.wg.Add(1)
	go l.run(join())
	return l
}

// lose ends the association.
func (l *life) lose(err error) {
	l.lost = time.Now()
	l.a.fail(err)
	synctest.Wait()
}

func (l *life) saw(t *testing.T, want ...State) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(l.states, want) {
		t.Errorf("states %v, want %v", l.states, want)
	}
}

var errRefused = errors.New("refused")

// TestReconnectDelays doubles the time between attempts up to the configured one, each a little less than that.
func TestReconnectDelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(t, Config{ReconnectDelay: 10 * time.Second}, func(_ context.Context, n int) error {
			if n < 8 {
				return errRefused
			}
			return nil
		})
		defer l.Close()
		l.lose(errHungUp)
		time.Sleep(5 * time.Second)
		if s := l.Stats(); s.State != StateConnecting || !errors.Is(s.Err, errRefused) || s.Attempts == 0 || s.Since.IsZero() {
			t.Errorf("%+v", s)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		var last time.Duration
		for i, want := range []time.Duration{1, 2, 4, 8, 10, 10, 10, 10, 10} {
			want *= time.Second
			if d := l.attempts[i] - last; d > want || d < want*8/10 {
				t.Errorf("attempt %d after %v, want %v", i, d, want)
			}
			last = l.attempts[i]
		}
		l.saw(t, StateResetting, StateConnecting, StateLive)
		if s := l.Stats(); s.Err != nil || s.Losses != 1 || s.Attempts != 0 || !s.Since.IsZero() {
			t.Errorf("%+v", s)
		}
	})
}

// TestControllerLoss gives up when the time is over, between two attempts or within one.
func TestControllerLoss(t *testing.T) {
	for name, try := range map[string]func(context.Context, int) error{
		"between": func(context.Context, int) error { return errRefused },
		"within": func(ctx context.Context, _ int) error {
			<-ctx.Done()
			return errRefused
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := live(t, Config{CtrlLossTimeout: 33 * time.Second, FastFail: 20 * time.Second}, try)
				l.lose(errHungUp)
				time.Sleep(33*time.Second - 1)
				synctest.Wait()
				l.saw(t, StateResetting, StateConnecting, StateFailing)
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				l.saw(t, StateResetting, StateConnecting, StateFailing, StateDead)
				var path *PathError
				cmd := &Command{Op: wire.OpFlush, NSID: 1}
				if err := l.Do(t.Context(), cmd); !errors.As(err, &path) || path.Sent || path.State != StateDead || path.Err == nil {
					t.Error(err)
				}
				l.Close()
			})
		})
	}
}

// TestForever does not give up.
func TestForever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(t, Config{CtrlLossTimeout: -1}, func(context.Context, int) error { return errRefused })
		l.lose(errHungUp)
		time.Sleep(24 * time.Hour)
		if s := l.State(); s != StateConnecting {
			t.Error(s)
		}
		begun := time.Now()
		l.Close()
		if d := time.Since(begun); d != 0 {
			t.Errorf("Close took %v", d)
		}
		if err := l.Do(t.Context(), &Command{Op: wire.OpFlush}); err != ErrClosed {
			t.Error(err)
		}
		l.saw(t, StateResetting, StateConnecting, StateDead)
	})
}

// TestFinal gives up when the controller says that it is no use.
func TestFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(t, Config{}, func(_ context.Context, n int) error { return &ConnectError{Final: n == 1, Err: errRefused} })
		l.lose(errHungUp)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(l.attempts) != 2 {
			t.Errorf("%d attempts", len(l.attempts))
		}
		l.saw(t, StateResetting, StateConnecting, StateDead)
		l.Close()
	})
}

// TestReset connects again at once.
func TestReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(t, Config{}, func(_ context.Context, n int) error { return nil })
		defer l.Close()
		time.Sleep(2 * time.Second)
		l.lost = time.Now()
		l.Reset("a test")
		l.Reset("again") // while it is at it
		synctest.Wait()
		if len(l.attempts) != 1 || l.attempts[0] != 0 {
			t.Errorf("attempts at %v", l.attempts)
		}
		l.saw(t, StateResetting, StateConnecting, StateLive)
		for i, err := range []error{&resetError{"too soon"}, errHungUp} {
			l.lose(err)
			time.Sleep(time.Second)
			synctest.Wait()
			if n := len(l.attempts); n != 2+i || l.attempts[n-1] < 800*time.Millisecond {
				t.Errorf("attempts at %v", l.attempts)
			}
			time.Sleep(time.Hour)
		}
	})
}

// TestKeepAliveTimes sends a Keep Alive each time, or with traffic only if there was none.
func TestKeepAliveTimes(t *testing.T) {
	k := keepAlive{every: 2 * time.Second}
	sent := 0
	for now := time.Duration(0); now < 20*time.Second; now += 250 * time.Millisecond {
		if k.due(now, uint64(now), false) {
			sent++
		}
	}
	if sent != 10 {
		t.Errorf("%d in 20 s, want 10", sent)
	}
	k = keepAlive{every: time.Second, traffic: true}
	var at []time.Duration
	answers := uint64(0)
	for now := time.Duration(0); now < 10*time.Second; now += 250 * time.Millisecond {
		if now > 3*time.Second && now < 6*time.Second {
			answers++
		}
		if k.due(now, answers, false) {
			at = append(at, now/time.Second)
		}
	}
	if want := []time.Duration{0, 1, 2, 3, 7, 8, 9}; !slices.Equal(at, want) {
		t.Errorf("at %v, want %v", at, want)
	}
	k = keepAlive{}
	if k.due(time.Hour, 0, false) {
		t.Error("without KATO")
	}
}

// TestCloseWhileConnecting ends also an association that comes when nobody wants it any more.
func TestCloseWhileConnecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(t, Config{}, func(ctx context.Context, n int) error {
			<-ctx.Done()
			return nil // it was there already
		})
		l.lose(errHungUp)
		time.Sleep(time.Minute)
		l.Close()
		l.saw(t, StateResetting, StateConnecting, StateLive, StateResetting, StateDead)
		if l.live.Load() != nil {
			t.Error("still live")
		}
	})
}

// TestCloseDuringLoss: Close in the middle of a loss does not tell of a write that the controller had given it up before the connection
// was even closed.
func TestCloseDuringLoss(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	c := newController(Config{Log: slog.New(slog.DiscardHandler)})
	a := newAssociation(c)
	a.info = &Info{KATO: time.Minute}
	q := newQueue(a, 1, here, 1)
	a.queues, a.io = []*queue{q}, []*queue{q}
	ended := make(chan error, 1)
	cmd := &Command{Op: wire.OpWriteZeroes, NSID: 1, Blocks: 1, Done: func(cmd *Command) { ended <- cmd.Err }}
	q.start(cmd)
	q.slots[0].capsule = 1
	q.out.pos.Store(1)
	q.mu.Lock()
	go a.fail(errHungUp)
	waittest.Until(t, "it fails", func() bool { return a.cause() != nil })
	a.fail(ErrClosed) // comes too late
	go a.stop()
	time.Sleep(20 * time.Millisecond)
	began := time.Now()
	q.mu.Unlock()
	select {
	case err := <-ended:
		var path *PathError
		if !errors.As(err, &path) || !path.Sent || path.Gone.Before(began.Add(time.Minute)) {
			t.Errorf("%v, gone at %v", err, path.Gone)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not end")
	}
}

// TestBusyKeepAliveIsNotSkipped: one that is answered late is followed by the next at once, not at the next time but one.
func TestBusyKeepAliveIsNotSkipped(t *testing.T) {
	k := keepAlive{every: 2 * time.Second}
	var at []time.Duration
	for now := time.Duration(0); now <= 6*time.Second; now += 500 * time.Millisecond {
		busy := now >= 2*time.Second && now < 3*time.Second
		if k.due(now, 0, busy) {
			at = append(at, now)
		}
	}
	if want := []time.Duration{0, 3 * time.Second, 5 * time.Second}; !slices.Equal(at, want) {
		t.Errorf("at %v, want %v", at, want)
	}
}
