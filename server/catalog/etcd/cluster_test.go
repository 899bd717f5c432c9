package etcd

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// outage is a cluster that has lost its leader, and has one again at a time, when one member is still frozen. Calls
// that were made before are never answered.
type outage struct {
	until  time.Time
	frozen int
}

// outageMember is one of its members.
type outageMember struct {
	pb.KVClient
	o  *outage
	at int
}

func (m outageMember) Range(ctx context.Context, _ *pb.RangeRequest, _ ...grpc.CallOption) (*pb.RangeResponse, error) {
	if m.at == m.o.frozen || time.Now().Before(m.o.until) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	time.Sleep(time.Millisecond)
	return &pb.RangeResponse{Header: &pb.ResponseHeader{ClusterId: 1}}, nil
}

// TestLeaderBack: when a cluster has a leader again all waiting calls are answered soon, although one of three members
// is still frozen. One call finds a member that answers within two gaps. The other calls, and new ones, go there at
// once.
func TestLeaderBack(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			o := &outage{until: time.Now().Add(5*time.Second + time.Duration(rnd.Int64N(int64(25*time.Second)))), frozen: rnd.IntN(3)}
			c := &cluster{log: slog.New(slog.DiscardHandler), back: make(chan struct{})}
			for at := range 3 {
				c.members = append(c.members, &member{client: new(clientv3.Client), wrap: func(pb.KVClient) pb.KVClient { return outageMember{o: o, at: at} }})
			}
			c.current.Store(int32(rnd.IntN(3)))
			ask := func() time.Time {
				if _, err := c.rangeRead(t.Context(), new(pb.RangeRequest)); err != nil {
					t.Error(err)
				}
				return time.Now()
			}
			const asks = 5
			var all sync.WaitGroup
			var mu sync.Mutex
			var first, last time.Time
			for range 1 + rnd.IntN(asks) {
				after := time.Duration(rnd.Int64N(int64(4 * time.Second)))
				all.Go(func() { // ends with its answer
					time.Sleep(after)
					at := ask()
					mu.Lock()
					defer mu.Unlock()
					if first.IsZero() {
						first = at
					}
					last = at
				})
			}
			all.Wait()
			if took := last.Sub(o.until); took > 2*gap+10*time.Millisecond {
				t.Errorf("the last one is answered after %v", took)
			}
			if took := last.Sub(first); took > 10*time.Millisecond {
				t.Errorf("the last one is answered %v after the first", took)
			}
			if took := ask().Sub(last); took > 10*time.Millisecond {
				t.Errorf("a new call is answered after %v", took)
			}
		})
	}
}
