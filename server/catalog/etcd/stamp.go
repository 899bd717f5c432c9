package etcd

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// stamp is the engine's row that tells what became of its last transaction, see Numbers in the package comment. Only the
// committer uses it.
type stamp struct {
	key    []byte // nil: there is no row
	value  []byte // of the row when last seen
	number uint64 // of the last transaction
}

// The last byte of a stamp says what became of the transaction whose number is before it.
const (
	stampNew     = 'n' // there was none
	stampApplied = 'a'
	stampRefused = 'r'
)

func (s *stamp) with(outcome byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, s.number), outcome)
}

// carryOut makes the transaction t, once, however many calls that takes. If it is refused it returns what the else branch of
// t gave: at that moment if sure, or else later. With an error nothing was applied, unless it is ErrUnknown.
func (s *stamp) carryOut(e *Engine, t *pb.TxnRequest) (applied bool, answers []*pb.ResponseOp, sure bool, err error) {
	s.number++
	yes, no := s.with(stampApplied), s.with(stampRefused)
	guards, puts, reads := t.Compare, t.Success, t.Failure
	unclear := false // a call that was made may still be carried out
	for {
		if s.key == nil {
			if err := s.create(e); err != nil {
				return false, nil, false, err
			}
		}
		same := compare(&catalog.Guard{Kind: catalog.Equal, Key: s.key, Value: s.value})
		resp, repeated, err := e.cluster.txnMany(e.life, &pb.TxnRequest{
			Compare: append(slices.Clip(guards), same),
			Success: append(slices.Clip(puts), opPut(s.key, yes)),
			Failure: append(slices.Clip(reads), opRange(&pb.RangeRequest{Key: s.key}), opTxn(&pb.TxnRequest{
				Compare: []*pb.Compare{same}, Success: []*pb.RequestOp{opPut(s.key, no)},
			})),
		})
		unclear = unclear || repeated
		switch {
		case err != nil && unclear:
			return false, nil, false, fmt.Errorf("%w: %w", catalog.ErrUnknown, err)
		case err != nil:
			return false, nil, false, err
		case resp.Succeeded:
			s.value = yes
			return true, nil, false, nil
		case len(resp.Responses) != len(reads)+2:
			return false, nil, false, fmt.Errorf("etcd answered %d operations, %d were asked for", len(resp.Responses), len(reads)+2)
		}
		answers, was := resp.Responses[:len(reads)], rowOf(resp.Responses[len(reads)])
		switch {
		case !was.present && unclear:
			s.key = nil
			return false, nil, false, fmt.Errorf("%w: the engine's row is gone that would tell", catalog.ErrUnknown)
		case !was.present: // it looked like that of an engine that was not closed
			s.key = nil
		case bytes.Equal(was.value, s.value):
			s.value = no
			return false, answers, true, nil
		default: // an earlier call was carried out: of this transaction, or of one before it whose outcome nobody learned
			s.value = was.value
			if applied := bytes.Equal(was.value, yes); applied || bytes.Equal(was.value, no) {
				return applied, answers, false, nil
			}
		}
	}
}

// create makes a row for s under a new key. If it is not clear whether a call made it, the next one tries another key: a row
// that came late under the key in use would undo what was noted there.
func (s *stamp) create(e *Engine) error {
	for failed := 0; ; failed++ {
		var id [8]byte
		_, _ = rand.Read(id[:]) // it does not fail
		key, value := fmt.Appendf(nil, "%s%x", e.keys.stamps, id), s.with(stampNew)
		resp, err := e.cluster.txn(e.life, failed, &pb.TxnRequest{
			Compare: []*pb.Compare{compare(&catalog.Guard{Kind: catalog.Absent, Key: key})},
			Success: []*pb.RequestOp{opPut(key, value)},
		})
		if err == nil && !resp.Succeeded {
			continue
		}
		if err == nil {
			s.key, s.value = key, value
			return nil
		}
		if !errors.Is(err, errUnclear) {
			return err
		}
		if stop := e.cluster.rest(e.life, failed+1); stop != nil {
			return fmt.Errorf("%w: %w", stop, err)
		}
	}
}

// remove removes the row, after which no transaction numbered there can be carried out any more. If that fails others
// will, see Old revisions in the package comment.
func (s *stamp) remove(ctx context.Context, c *cluster) {
	if s.key != nil {
		_, _ = c.txn(ctx, 0, &pb.TxnRequest{Success: []*pb.RequestOp{opDelete(s.key)}})
	}
}
