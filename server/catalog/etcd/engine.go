package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// Engine is a catalog in an etcd cluster. Others may use the same catalog at the same time.
type Engine struct {
	cfg     Config // with defaults
	caps    catalog.Caps
	keys    keyspace
	cluster *cluster

	gate    gate
	life    context.Context // ends when Close has waited long enough for calls
	end     context.CancelFunc
	workers sync.WaitGroup // committer, upkeep and watchQuota

	queue   queue
	stamp   stamp
	lookups lookups
	quota   quota
}

var (
	_ catalog.Engine   = (*Engine)(nil)
	_ catalog.Roomy    = (*Engine)(nil)
	_ catalog.Snapshot = (*snapshot)(nil)
)

// keyspace has the keys of a catalog in etcd, see Keys in the package comment.
type keyspace struct {
	format  []byte
	history []byte
	stamps  []byte // and the name of a stamp
	rows    []byte // and the key of a row
	end     []byte // the first key behind all rows
}

func keysBelow(prefix string) keyspace {
	rows := []byte(prefix + "/row/")
	return keyspace{
		format: []byte(prefix + "/format"), history: []byte(prefix + "/history"), stamps: []byte(prefix + "/stamp/"),
		rows: rows, end: catalog.PrefixEnd(rows),
	}
}

// row returns the key of a row, in memory of its own.
func (k *keyspace) row(key []byte) []byte {
	return append(append(make([]byte, 0, len(k.rows)+len(key)), k.rows...), key...)
}

// format is the value of the key of that name: what keys and values mean. Programs that mean something else must not
// touch the catalog.
const format = "weft catalog 1"

// Open opens a catalog, or makes an empty one. It waits for the cluster as long as ctx lives. What is wrong with the place:
// ErrNoCatalog, ErrNotCatalog.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	e := &Engine{
		cfg: cfg, caps: cfg.caps(), keys: keysBelow(cfg.Prefix), cluster: dial(cfg),
		queue: queue{filled: make(chan struct{}, 1)},
	}
	e.life, e.end = context.WithCancel(context.Background())
	if err := e.find(ctx); err != nil {
		e.end()
		return nil, errors.Join(fmt.Errorf("catalog etcd://%s%s: %w", strings.Join(cfg.Endpoints, ","), cfg.Prefix, err), e.cluster.close())
	}
	e.workers.Go(e.committer) // all end with e.life
	e.workers.Go(e.upkeep)
	e.workers.Go(e.watchQuota)
	return e, nil
}

// find looks whether there is a catalog, and makes one.
func (e *Engine) find(ctx context.Context) error {
	// Reading one key as often as a transaction may have operations also shows that it may.
	ask := &pb.TxnRequest{Success: []*pb.RequestOp{
		opRange(&pb.RangeRequest{Key: []byte(e.cfg.Prefix + "/"), RangeEnd: []byte(e.cfg.Prefix + "0"), Limit: 1, KeysOnly: true}),
	}}
	for len(ask.Success) < e.cfg.MaxTxnOps {
		ask.Success = append(ask.Success, opRange(&pb.RangeRequest{Key: e.keys.format}))
	}
	for {
		resp, err := e.cluster.txnRead(ctx, ask)
		if err != nil {
			return err
		}
		there := rowOf(resp.Responses[1])
		switch {
		case there.present && string(there.value) == format:
			return nil
		case there.present:
			return fmt.Errorf("%w that this program knows: it calls itself %q, and not %q", catalog.ErrNotCatalog, there.value, format)
		case rowOf(resp.Responses[0]).present:
			return fmt.Errorf("%w: there are other keys below %s/", catalog.ErrNotCatalog, e.cfg.Prefix)
		case e.cfg.MustExist:
			return catalog.ErrNoCatalog
		}
		// It may be made twice, by two who open it or by a call made again.
		if _, err := e.cluster.txnRead(ctx, &pb.TxnRequest{
			Compare: []*pb.Compare{compare(&catalog.Guard{Kind: catalog.Absent, Key: e.keys.format})},
			Success: []*pb.RequestOp{opPut(e.keys.format, []byte(format)), opPut(e.keys.history, nil)},
		}); err != nil {
			return err
		}
	}
}

// Caps implements [catalog.Engine].
func (e *Engine) Caps() catalog.Caps { return e.caps }

// begin begins a call, which ends with end. Its context is the caller's, and ends with the engine's life too.
func (e *Engine) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	if err := e.gate.enter(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(e.life, cancel)
	return ctx, func() { stop(); cancel(); e.gate.leave() }, nil
}

// because turns the error of a call that was given up for the sake of Close into ErrClosed.
func (e *Engine) because(err error) error {
	if err != nil && e.life.Err() != nil && errors.Is(err, context.Canceled) && !errors.Is(err, catalog.ErrUnknown) {
		return catalog.ErrClosed
	}
	return err
}

// closePatience is how long Close waits for calls in progress, which without an answer from the cluster may never end.
const closePatience = 10 * time.Second

// Close implements [catalog.Engine]. Calls that get no answer end after some seconds with ErrClosed or ErrUnknown.
func (e *Engine) Close() error {
	if !e.gate.close() {
		return catalog.ErrClosed
	}
	timer := time.AfterFunc(closePatience, e.end)
	e.gate.calls.Wait()
	timer.Stop()
	e.end()
	e.workers.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	e.stamp.remove(ctx, e.cluster)
	if err := e.cluster.close(); err != nil {
		return fmt.Errorf("close the connections to etcd: %w", err)
	}
	return nil
}
