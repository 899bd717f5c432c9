package metaclient

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// yielder yields if it is told to, and notes what it was asked.
type yielder struct {
	yields bool
	asked  []bool
}

func (y *yielder) Yields(op metarpc.Op, back bool) bool {
	y.asked = append(y.asked, back)
	return y.yields && op == metarpc.OpRemove
}

// A change that the service turns back, or puts off, ends if its caller wants to start over, and is made again otherwise.
func TestTurnedBack(t *testing.T) {
	for _, fail := range []metarpc.Status{metarpc.StatusTurnedBack, metarpc.StatusGrace} {
		for _, yields := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				l := &leaser{fail: fail}
				s.handle = l.handle
				c := connected(t, s, Config{})
				y := &yielder{yields: yields}
				time.AfterFunc(time.Second, func() {
					l.mu.Lock()
					defer l.mu.Unlock()
					l.fail = metarpc.StatusOK
				})
				err := c.Remove(context.WithValue(t.Context(), YieldKey{}, y), metarpc.Cred{}, 1, "a", false)
				var status *metarpc.Error
				if back := errors.As(err, &status) && status.Status == metarpc.StatusTurnedBack; back != yields || !yields && err != nil {
					t.Errorf("%v, yields %v: %v", fail, yields, err)
				}
				if len(y.asked) == 0 || y.asked[0] != (fail == metarpc.StatusTurnedBack) || yields != (len(y.asked) == 1) {
					t.Errorf("%v, yields %v: asked %v", fail, yields, y.asked)
				}
				synctest.Wait()
				if len(c.leases.pending)+len(c.leases.nameChanges)+len(c.leases.changes) != 0 || c.State().Busy != 0 {
					t.Errorf("left behind: %v, %v", c.leases.pending, c.leases.nameChanges)
				}
			})
		}
	}
}

// The service hears that a recall is stuck, if it knows what that means. Under the leases of one that does not a name is
// kept for a second at most.
func TestStuck(t *testing.T) {
	for _, version := range []uint32{metarpc.TurnsBack, metarpc.TurnsBack - 1} {
		synctest.Test(t, func(t *testing.T) {
			s := newService(t)
			s.speaks = metarpc.Versions{Lowest: metarpc.Lowest, Highest: version}
			s.handle = (&leaser{}).handle
			var stuck func()
			told, heard := make(chan struct{}), make(chan struct{})
			c := connected(t, s, Config{OnLeaseRecall: func(ctx context.Context, _ []metarpc.LeaseItem) {
				stuck = ctx.Value(StuckKey{}).(func())
				close(told)
				<-heard
			}})
			for range 2 { // the second time from the cache
				a, err := c.Lookup(t.Context(), metarpc.Cred{}, 1, "a")
				if long := a.KeepName > unaskedKeep; err != nil || a.KeepName <= 0 || long != (version == metarpc.TurnsBack) {
					t.Errorf("version %d: a name is kept for %v, %v", version, a.KeepName, err)
				}
			}
			args := &metarpc.LeaseRecallArgs{Items: []metarpc.LeaseItem{{ID: 1, Lease: metarpc.LeaseNames}}}
			s.backCall(t, metarpc.BackHeader{Number: 1, Op: metarpc.BackLeaseRecall}, args)
			<-told
			stuck()
			stuck()
			close(heard)
			var got []metarpc.Status
			for len(got) == 0 || got[len(got)-1] != metarpc.StatusOK {
				b := <-s.backs
				if b.Number != 1 {
					t.Errorf("%+v", b)
				}
				got = append(got, b.Status)
			}
			if want := map[bool]int{true: 3, false: 1}[version == metarpc.TurnsBack]; len(got) != want {
				t.Errorf("version %d: %v", version, got)
			}
			stuck() // after the answer it does no harm
			synctest.Wait()
		})
	}
}
