package metaclient

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// That a session is lost is said before there is a new one, and only then.
func TestOnLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		var c *Client
		var lost []metarpc.SessionID
		reset := make(chan bool, 1)
		c = connected(t, s, Config{
			OnLost:  func(int) { lost = append(lost, c.State().Session) },
			OnReset: func(_ context.Context, _ int, lost bool) { reset <- lost },
		})
		old := c.State().Session
		s.hangUp()
		synctest.Wait()
		if len(lost) > 0 {
			t.Error("a reconnect was taken for a lost session")
		}
		s.forget()
		if !<-reset {
			t.Error("the reset does not say that the session was lost")
		}
		if len(lost) != 1 || lost[0] != old || c.State().Session == old {
			t.Errorf("lost %v, had %v, has %v", lost, old, c.State().Session)
		}
	})
}
