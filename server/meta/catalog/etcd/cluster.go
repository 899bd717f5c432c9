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

	"github.com/weftfs/weft/server/meta/catalog"
)

const (
	// A member gets patience to answer, the next one longer, up to maxPatience. All calls can be made again, so what
	// is lost when a slow member is given up is its work.
	patience    = 2 * time.Second
	maxPatience = 8 * time.Second

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
	since time.Time // of the first failure since the last success; zero if there was none
}

type member struct {
	endpoint string
	config   clientv3.Config
	wrap     func(pb.KVClient) pb.KVClient // not nil in tests

	mu     sync.Mutex
	client *clientv3.Client // nil until the member is needed
}

func dial(cfg Config) *cluster {
	c := &cluster{log: cfg.Logger}
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

// try makes a call of the current member, the one after as many failures in a row as failed. Its error is errUnclear if the
// call is worth another try, at another member if need be, to which try has then turned.
func (c *cluster) try(ctx context.Context, failed int, call func(context.Context, pb.KVClient) (*pb.ResponseHeader, error)) error {
	at := c.current.Load()
	m := c.members[at]
	limited, cancel := context.WithTimeout(ctx, min(patience<<min(failed/len(c.members), 8), maxPatience))
	defer cancel()
	var header *pb.ResponseHeader
	kv, err := m.kv()
	if err == nil {
		header, err = call(limited, kv)
	}
	if err == nil {
		if id := header.GetClusterId(); id != c.id.Load() && !c.id.CompareAndSwap(0, id) {
			err = fmt.Errorf("%w: it is a member of cluster %x, not of %x", errUnclear, id, c.id.Load())
		}
	}
	if err == nil {
		c.worked(m)
		return nil
	}
	if err = refine(err); errors.Is(err, errUnclear) && ctx.Err() == nil {
		c.failed(at, err)
	}
	return fmt.Errorf("etcd member %s: %w", m.endpoint, err)
}

// worked notes that a member has answered.
func (c *cluster) worked(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.since.IsZero() {
		c.log.Info("catalog: etcd answers again", "member", m.endpoint, "after", time.Since(c.since).Round(time.Millisecond))
		c.since = time.Time{}
	}
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

// rest waits before the try that comes after as many failures in a row as failed.
func (c *cluster) rest(ctx context.Context, failed int) error {
	rounds := failed / len(c.members)
	if rounds == 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(rand.N(min(firstPause<<min(rounds, 10), lastPause)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// read makes a call that changes nothing, again and again until there is an answer or ctx ends.
func (c *cluster) read(ctx context.Context, call func(context.Context, pb.KVClient) (*pb.ResponseHeader, error)) error {
	for failed := 0; ; failed++ {
		err := c.try(ctx, failed, call)
		if !errors.Is(err, errUnclear) {
			return err
		}
		if stop := c.rest(ctx, failed+1); stop != nil {
			return fmt.Errorf("%w: %v", stop, err)
		}
	}
}

func (c *cluster) rangeRead(ctx context.Context, req *pb.RangeRequest) (resp *pb.RangeResponse, err error) {
	err = c.read(ctx, func(ctx context.Context, kv pb.KVClient) (_ *pb.ResponseHeader, err error) {
		resp, err = kv.Range(ctx, req)
		return resp.GetHeader(), err
	})
	return resp, err
}

// txnRead makes a transaction without effects.
func (c *cluster) txnRead(ctx context.Context, req *pb.TxnRequest) (resp *pb.TxnResponse, err error) {
	err = c.read(ctx, func(ctx context.Context, kv pb.KVClient) (_ *pb.ResponseHeader, err error) {
		resp, err = kv.Txn(ctx, req)
		return resp.GetHeader(), err
	})
	return resp, err
}

// txn makes a transaction, in one try.
func (c *cluster) txn(ctx context.Context, failed int, req *pb.TxnRequest) (resp *pb.TxnResponse, err error) {
	err = c.try(ctx, failed, func(ctx context.Context, kv pb.KVClient) (_ *pb.ResponseHeader, err error) {
		resp, err = kv.Txn(ctx, req)
		return resp.GetHeader(), err
	})
	return resp, err
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
