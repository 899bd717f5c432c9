package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weftfs/weft/server/catalog"
)

const (
	// A call that has no answer after gap is made of the next member, too, and again after each gap; each of them gets
	// maxPatience to answer. So a cluster that is slow is waited for, and one that has a leader again is asked soon,
	// also if the next member is still away: what was asked before may never be answered, as a member forgets it when it
	// loses the leader. All calls can be made again.
	gap         = time.Second
	maxPatience = 8 * time.Second

	// patience is what a member gets for a call that is made of one at a time. The next one gets longer, up to
	// maxPatience.
	patience = 2 * time.Second

	// The first try at another member is at once; these are the waits when all have been tried.
	firstPause = 20 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

// cluster makes calls of one etcd cluster. There is a client for each member, and all calls go to one of them, the current one,
// until it fails: etcd's own balancer gives each member a share of the calls, and would give one that hangs its share until a
// keepalive finds out, which grpc sends every 10 seconds at most.
type cluster struct {
	log     *slog.Logger
	members []*member
	current atomic.Int32  // index of the member that calls go to
	id      atomic.Uint64 // of the cluster; 0 until a member has answered

	mu    sync.Mutex
	since time.Time     // of the first failure since the last success; zero if there was none
	back  chan struct{} // closed, and replaced, when there is a success after failures
}

type member struct {
	endpoint string
	config   clientv3.Config
	wrap     func(pb.KVClient) pb.KVClient // not nil in tests

	mu     sync.Mutex
	client *clientv3.Client // nil until the member is needed
}

func dial(cfg Config) *cluster {
	c := &cluster{log: cfg.Logger, back: make(chan struct{})}
	scheme := "http://"
	if cfg.TLS != nil {
		scheme = "https://"
	}
	for _, endpoint := range cfg.Endpoints {
		c.members = append(c.members, &member{endpoint: endpoint, wrap: cfg.wrap, config: clientv3.Config{
			Endpoints: []string{scheme + endpoint}, TLS: cfg.TLS, Username: cfg.Username, Password: cfg.Password,
			DialTimeout: patience, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: patience,
			MaxUnaryRetries: 1, // no more than one try: who calls knows whether another one is right
			Logger:          zap.NewNop(),
			DialOptions: []grpc.DialOption{
				grpc.WithConnectParams(grpc.ConnectParams{
					Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
					MinConnectTimeout: maxPatience,
				}),
				grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)), // of a page of long rows
			},
		}})
	}
	c.current.Store(int32(rand.IntN(len(c.members))))
	return c
}

// kv returns what makes calls of m. They do not wait for a member that is down, as those of clientv3.KV do.
func (m *member) kv() (pb.KVClient, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.client == nil {
		client, err := clientv3.New(m.config) // with a password it logs in
		if err != nil {
			return nil, err
		}
		m.client = client
	}
	kv := pb.NewKVClient(m.client.ActiveConnection())
	if m.wrap != nil {
		kv = m.wrap(kv)
	}
	return kv, nil
}

func (c *cluster) close() error {
	var errs []error
	for _, m := range c.members {
		if m.client == nil {
			continue
		}
		if err := m.client.Close(); !errors.Is(err, context.Canceled) { // Close cancels, and says so
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// errUnclear wraps the error of a call that a member may or may not have carried out, or may still.
var errUnclear = errors.New("no answer")

// answer is what a call returns.
type answer interface{ GetHeader() *pb.ResponseHeader }

// once makes a call of one member. Its error is errUnclear if the call is worth another try.
func once[R answer](ctx context.Context, c *cluster, at int32, call func(context.Context, pb.KVClient) (R, error)) (resp R, err error) {
	m := c.members[at]
	kv, err := m.kv()
	if err == nil {
		resp, err = call(ctx, kv)
	}
	if err == nil {
		if id := resp.GetHeader().GetClusterId(); id != c.id.Load() && !c.id.CompareAndSwap(0, id) {
			err = fmt.Errorf("%w: it is a member of cluster %x, not of %x", errUnclear, id, c.id.Load())
		}
	}
	if err != nil {
		return resp, fmt.Errorf("etcd member %s: %w", m.endpoint, refine(err))
	}
	c.worked(at)
	return resp, nil
}

// try makes a call of the current member, the one after as many failures in a row as failed. Its error is errUnclear if
// the call is worth another try, at another member if need be, to which try has then turned.
func try[R answer](ctx context.Context, c *cluster, failed int, call func(context.Context, pb.KVClient) (R, error)) (R, error) {
	at := c.current.Load()
	limited, cancel := context.WithTimeout(ctx, min(patience<<min(failed/len(c.members), 8), maxPatience))
	defer cancel()
	resp, err := once(limited, c, at, call)
	if errors.Is(err, errUnclear) && ctx.Err() == nil {
		c.failed(at, err)
	}
	return resp, err
}

// ask makes a call again and again, of one member after the other, until there is an answer or ctx ends. Several
// members may have the call at a time, and may carry it out, or do so later; repeated says that it was made more than
// once. When a member has answered another call after none had, it gets this one at once; the next time only after a
// gap, as what it has answered may be what takes no leader.
func ask[R answer](ctx context.Context, c *cluster, call func(context.Context, pb.KVClient) (R, error)) (resp R, repeated bool, err error) {
	type outcome struct {
		resp R
		err  error
		of   int // which of the calls
	}
	asking, cancel := context.WithCancel(ctx)
	defer cancel() // of the calls that are not waited for any more
	outcomes := make(chan outcome)
	next := time.NewTimer(gap)
	defer next.Stop()
	err = errUnclear
	hurried := false
	for made := 1; ; made++ {
		back := c.answers()
		at := c.current.Load()
		go func() { // makes one call; ends with it, or soon after asking
			limited, cancel := context.WithTimeout(asking, maxPatience)
			defer cancel()
			resp, err := once(limited, c, at, call)
			select {
			case outcomes <- outcome{resp, err, made}:
			case <-asking.Done():
			}
		}()
		for waiting := true; waiting; {
			select {
			case o := <-outcomes:
				if !errors.Is(o.err, errUnclear) {
					return o.resp, repeated, o.err
				}
				if err = o.err; o.of == made {
					next.Reset(c.pause(made))
				}
			case <-next.C:
				c.failed(at, err)
				waiting, hurried = false, false
			case <-back:
				if back = nil; !hurried {
					waiting, hurried = false, true
				}
			case <-ctx.Done():
				return resp, true, fmt.Errorf("%w: %w", ctx.Err(), err)
			}
		}
		repeated = true
		next.Reset(gap)
	}
}

// answers returns what is closed when a member answers after failures.
func (c *cluster) answers() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.back
}

// worked notes that a member has answered. After failures calls go to it.
func (c *cluster) worked(at int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since.IsZero() {
		return
	}
	c.log.Info("catalog: etcd answers again", "member", c.members[at].endpoint, "after", time.Since(c.since).Round(time.Millisecond))
	c.since = time.Time{}
	c.current.Store(at)
	close(c.back)
	c.back = make(chan struct{})
}

// failed turns to the next member unless another call has already.
func (c *cluster) failed(at int32, err error) {
	next := (at + 1) % int32(len(c.members))
	if !c.current.CompareAndSwap(at, next) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since.IsZero() {
		c.since = time.Now()
		c.log.Warn("catalog: etcd does not answer", "member", c.members[at].endpoint, "err", err, "next", c.members[next].endpoint)
	}
}

// pause is how long to wait before the try that comes after as many failures in a row as failed.
func (c *cluster) pause(failed int) time.Duration {
	rounds := failed / len(c.members)
	if rounds == 0 {
		return 0
	}
	return rand.N(min(firstPause<<min(rounds, 10), lastPause))
}

// rest waits for that long.
func (c *cluster) rest(ctx context.Context, failed int) error {
	timer := time.NewTimer(c.pause(failed))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *cluster) rangeRead(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	resp, _, err := ask(ctx, c, func(ctx context.Context, kv pb.KVClient) (*pb.RangeResponse, error) { return kv.Range(ctx, req) })
	return resp, err
}

// txnRead makes a transaction without effects.
func (c *cluster) txnRead(ctx context.Context, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	resp, _, err := c.txnMany(ctx, req)
	return resp, err
}

// txnMany makes a transaction that may be made any number of times; repeated says that it was more than once.
func (c *cluster) txnMany(ctx context.Context, req *pb.TxnRequest) (resp *pb.TxnResponse, repeated bool, err error) {
	return ask(ctx, c, func(ctx context.Context, kv pb.KVClient) (*pb.TxnResponse, error) { return kv.Txn(ctx, req) })
}

// txn makes a transaction, in one try.
func (c *cluster) txn(ctx context.Context, failed int, req *pb.TxnRequest) (*pb.TxnResponse, error) {
	return try(ctx, c, failed, func(ctx context.Context, kv pb.KVClient) (*pb.TxnResponse, error) { return kv.Txn(ctx, req) })
}

// refine says what an error of a call means: errUnclear, or that nothing was applied and why.
func refine(err error) error {
	if errors.Is(err, errUnclear) {
		return err
	}
	var known rpctypes.EtcdError
	if errors.As(rpctypes.Error(err), &known) {
		switch {
		case errors.Is(known, rpctypes.ErrNoSpace):
			return fmt.Errorf("%w: etcd has used up its space quota and takes no changes until it is compacted and defragmented, or has a larger "+
				"--quota-backend-bytes, and its alarm is disarmed (etcdctl compact, defrag, alarm disarm): %w", catalog.ErrFull, known)
		case errors.Is(known, rpctypes.ErrCompacted):
			return fmt.Errorf("%w: %w", catalog.ErrSnapshotExpired, known)
		case errors.Is(known, rpctypes.ErrTooManyOps), errors.Is(known, rpctypes.ErrRequestTooLarge):
			return fmt.Errorf("%w: over a limit of the cluster, see --max-txn-ops and --max-request-bytes: %w", catalog.ErrTooLarge, known)
		case errors.Is(known, rpctypes.ErrCorrupt):
			return fmt.Errorf("%w: %w", catalog.ErrCorrupt, known)
		// Of a token that has to be got anew, which the client has done, and of a server that is overloaded.
		case errors.Is(known, rpctypes.ErrInvalidAuthToken), errors.Is(known, rpctypes.ErrAuthOldRevision),
			errors.Is(known, rpctypes.ErrUserEmpty), errors.Is(known, rpctypes.ErrTooManyRequests), errors.Is(known, rpctypes.ErrFutureRev):
			return fmt.Errorf("%w: %w", errUnclear, known)
		}
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.NotFound, codes.PermissionDenied, codes.ResourceExhausted, codes.OutOfRange,
		codes.Unimplemented, codes.Unauthenticated, codes.DataLoss:
		return err
	}
	return fmt.Errorf("%w: %w", errUnclear, err)
}
