package metaclient

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// speak has s speak other versions from its next connection on.
func (s *service) speak(speaks metarpc.Versions) {
	s.mu.Lock()
	s.speaks = speaks
	s.mu.Unlock()
	s.hangUp()
}

// A client speaks the highest version that the service knows, on each connection of a session anew.
func TestVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		s.handle = func(op metarpc.Op, _ any) (metarpc.Status, any) {
			if op == metarpc.OpMetaList {
				return metarpc.StatusOK, &metarpc.MetaListResult{Shards: 1, Services: []metarpc.MetaService{{Address: "a:1", Lowest: 2, Highest: 9}}}
			}
			return metarpc.StatusOK, nil
		}
		s.speaks = metarpc.Versions{Lowest: 2, Highest: 4}
		c := connected(t, s, Config{Speaks: metarpc.Versions{Lowest: 3, Highest: 5}})
		for _, row := range []struct {
			service metarpc.Versions
			want    uint32
		}{
			{metarpc.Versions{Lowest: 2, Highest: 4}, 4}, {metarpc.Versions{Lowest: 2, Highest: 3}, 3},
			{metarpc.Versions{Lowest: 3, Highest: 9}, 5}, {metarpc.Versions{Lowest: 1, Highest: 3}, 3},
		} {
			session := c.State().Session
			s.speak(row.service)
			time.Sleep(time.Second) // it connects again
			var r metarpc.MetaListResult
			if err := c.Call(t.Context(), metarpc.OpMetaList, 0, 0, &metarpc.Empty{}, &r); err != nil || len(r.Services) != 1 {
				t.Fatalf("service of %v: %+v, %v", row.service, r, err)
			}
			if got := r.Services[0].Highest == 9; got != (row.want >= 4) {
				t.Errorf("service of %v: %+v", row.service, r)
			}
			c.mu.Lock()
			if got := c.conn.welcome.Version; got != row.want {
				t.Errorf("service of %v: version %d, want %d", row.service, got, row.want)
			}
			c.mu.Unlock()
			if c.State().Session != session {
				t.Error("the session was lost")
			}
		}
	})
}

// A call of a newer version fails where an older one is spoken, and works again after that. What a newer service may have executed has no known outcome.
func TestNewCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opIn = func(op metarpc.Op, version uint32) bool {
			return version >= 4 || op != metarpc.OpMakeNode && op != metarpc.OpStatFS
		}
		defer func() { opIn = metarpc.Op.In }()
		s := newService(t)
		var m mkdirs
		b := &blocker{op: metarpc.OpMakeNode, gate: make(chan struct{}), next: m.handle, ctx: s.ctx}
		s.handle = b.handle
		c := connected(t, s, Config{})
		old := metarpc.Versions{Lowest: metarpc.Lowest, Highest: 3}

		sent, left := make(chan error, 1), make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { sent <- mkdir(t.Context(), c, "sent") }()
		go func() { left <- mkdir(ctx, c, "left") }()
		synctest.Wait()
		cancel()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		s.speak(old)
		var lost *OutcomeError
		if err := <-sent; !errors.As(err, &lost) || !errors.Is(err, errTooOld) {
			t.Errorf("call that a newer service may have executed: %v", err)
		}
		synctest.Wait()
		if busy := c.State().Busy; busy != 0 {
			t.Errorf("%d slots are busy", busy)
		}
		if err := mkdir(t.Context(), c, "new"); !errors.Is(errnoOf(err), syscall.EOPNOTSUPP) {
			t.Errorf("call that the service does not have: %v", err)
		}
		if _, err := c.GetAttr(t.Context(), 5); err != nil {
			t.Errorf("call that it has: %v", err)
		}
		close(b.gate)
		s.speak(metarpc.Spoken)
		time.Sleep(time.Second) // it connects again
		if err := mkdir(t.Context(), c, "new"); err != nil {
			t.Error(err)
		}
		if m.count["new"] != 1 {
			t.Errorf("executed %v", m.count)
		}
	})
}

// errnoOf is the errno of a reply.
func errnoOf(err error) error {
	var e *metarpc.Error
	if errors.As(err, &e) {
		return e.Errno()
	}
	return err
}
