package etcd

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// marks is how many revisions the history row has when the oldest is dropped.
const marks = 10

// upkeep has old revisions compacted, and removes stamps of engines that are gone, until the engine's life ends. See Old
// revisions in the package comment.
func (e *Engine) upkeep() {
	var seen int64 // the revision at which the history row was written, when last looked at
	for {
		interval := e.cfg.Retention / marks
		timer := time.NewTimer(interval + rand.N(interval/4+1)) // apart from other engines
		select {
		case <-timer.C:
		case <-e.life.Done():
			timer.Stop()
			return
		}
		now, err := e.keepUp(e.life, seen)
		if err != nil && e.life.Err() == nil {
			e.cfg.Logger.Warn("catalog: cannot drop old revisions of etcd", "prefix", e.cfg.Prefix, "err", err)
		}
		seen = now
	}
}

// keepUp marks the revision in the history row if nobody has since it was seen, and drops what is older than the oldest mark.
// It returns the revision at which the row was written.
func (e *Engine) keepUp(ctx context.Context, seen int64) (int64, error) {
	resp, err := e.cluster.rangeRead(ctx, &pb.RangeRequest{Key: e.keys.history})
	if err != nil || len(resp.Kvs) == 0 {
		return 0, err
	}
	row := resp.Kvs[0]
	if row.ModRevision != seen {
		return row.ModRevision, nil
	}
	history, err := decodeHistory(row.Value)
	if err != nil {
		return seen, err
	}
	history = append(history, seen)
	var oldest int64
	if len(history) > marks {
		oldest = history[0]
		history = history[1:]
	}
	// If the answer is lost, the next look at the row finds it changed.
	answer, err := e.cluster.txn(ctx, 0, &pb.TxnRequest{
		Compare: []*pb.Compare{modified(e.keys.history, seen)},
		Success: []*pb.RequestOp{opPut(e.keys.history, encodeHistory(history))},
	})
	if err != nil || !answer.Succeeded {
		return seen, err
	}
	if seen = answer.Header.Revision; oldest == 0 {
		return seen, nil
	}
	return seen, errors.Join(e.compact(ctx, oldest), e.removeStamps(ctx, oldest))
}

func encodeHistory(revisions []int64) []byte {
	var b []byte
	for _, r := range revisions {
		b = append(strconv.AppendInt(b, r, 10), ' ')
	}
	return b
}

func decodeHistory(b []byte) ([]int64, error) {
	var revisions []int64
	for _, field := range bytes.Fields(b) {
		r, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil || r <= 0 || len(revisions) > 0 && r <= revisions[len(revisions)-1] {
			return nil, errors.Join(catalog.ErrCorrupt, errors.New("the history row is "+strconv.Quote(string(b[:min(len(b), 200)]))))
		}
		revisions = append(revisions, r)
	}
	return revisions, nil
}

// compact drops what is older than a revision.
func (e *Engine) compact(ctx context.Context, revision int64) error {
	if e.cfg.NoCompaction {
		return nil
	}
	_, err := try(ctx, e.cluster, 0, func(ctx context.Context, kv pb.KVClient) (*pb.CompactionResponse, error) {
		return kv.Compact(ctx, &pb.CompactionRequest{Revision: revision})
	})
	if errors.Is(err, catalog.ErrSnapshotExpired) { // somebody has dropped more
		return nil
	}
	return err
}

// removeStamps removes stamps that were last written before a revision.
func (e *Engine) removeStamps(ctx context.Context, revision int64) error {
	resp, err := e.cluster.rangeRead(ctx, &pb.RangeRequest{
		Key: e.keys.stamps, RangeEnd: catalog.PrefixEnd(e.keys.stamps), MaxModRevision: revision, KeysOnly: true,
	})
	if err != nil {
		return err
	}
	for part := range slices.Chunk(resp.Kvs, e.cfg.MaxTxnOps) {
		t := new(pb.TxnRequest)
		for _, kv := range part { // all or none; if one is in use again it is the next time's
			t.Compare = append(t.Compare, modified(kv.Key, kv.ModRevision))
			t.Success = append(t.Success, opDelete(kv.Key))
		}
		if _, err := e.cluster.txn(ctx, 0, t); err != nil {
			return err
		}
	}
	return nil
}

// modified is a comparison that holds if the key was last written at this revision.
func modified(key []byte, revision int64) *pb.Compare {
	return &pb.Compare{Key: key, Target: pb.Compare_MOD, TargetUnion: &pb.Compare_ModRevision{ModRevision: revision}}
}
