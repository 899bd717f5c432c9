package catalogtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync/atomic"

	"github.com/weftfs/weft/server/catalog"
)

// Resolve wraps an engine whose commits may end in ErrUnknown or ErrConflict, so that they do not: it does what callers
// have to. Every batch has a row of its own by which its outcome can be told later, as the reply record of a request does.
//
//	commit      the batch, with: marker is absent, put marker "applied"
//	unknown     fence: marker is absent, put marker "fenced"
//	fenced      the batch was not applied and, as its own guard fails, never will be: it is tried again with another marker
//	guard error the marker tells which of the two it was
//
// The markers stay, behind all keys that the suite uses, where the wrapped engine's callers do not see them.
func Resolve(inner catalog.Engine) catalog.Engine {
	return &resolver{Engine: inner, own: rand.Uint64()}
}

type resolver struct {
	catalog.Engine
	own  uint64 // tells the markers of this object from others' on the same catalog
	last atomic.Uint64
}

// hidden is where the markers begin.
var hidden = []byte("\xff\xff\xffmarker/")

const markerLen = 10 + 16

var (
	markApplied = []byte("applied")
	markFenced  = []byte("fenced")
)

// Caps leaves room for the marker.
func (r *resolver) Caps() catalog.Caps {
	caps := r.Engine.Caps()
	caps.MaxKeys -= 2
	caps.MaxBatchBytes -= 2*markerLen + len(markApplied)
	return caps
}

func (r *resolver) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(r.Caps()); err != nil {
		return err
	}
	for {
		marker := binary.BigEndian.AppendUint64(bytes.Clone(hidden), r.own)
		marker = binary.BigEndian.AppendUint64(marker, r.last.Add(1))
		marked := *b
		marked.Guards = append(withoutMarkers(b.Guards), catalog.Guard{Kind: catalog.Absent, Key: marker})
		marked.Puts = append(b.Puts[:len(b.Puts):len(b.Puts)], catalog.Row{Key: marker, Value: markApplied})
		err := r.Engine.Commit(ctx, &marked)
		switch {
		case errors.Is(err, catalog.ErrConflict):
			continue
		case !errors.Is(err, catalog.ErrUnknown):
			return err
		}
		applied, err := r.findOut(ctx, marker)
		if applied || err != nil {
			return err
		}
	}
}

// withoutMarkers copies guards, the ranges among them without the markers.
func withoutMarkers(guards []catalog.Guard) []catalog.Guard {
	copied := make([]catalog.Guard, len(guards), len(guards)+1)
	for i, g := range guards {
		if g.Kind == catalog.RangeEmpty && len(g.To) == 0 {
			g.To = hidden
		}
		copied[i] = g
	}
	return copied
}

// findOut tells whether the batch with this marker was applied; if not it never will be.
func (r *resolver) findOut(ctx context.Context, marker []byte) (bool, error) {
	for {
		fence := new(catalog.Batch) // with Sync, so that the answer is durable
		fence.GuardAbsent(marker)
		fence.Put(marker, markFenced)
		err := r.Engine.Commit(ctx, fence)
		guard := (*catalog.GuardError)(nil)
		switch {
		case err == nil:
			return false, nil
		case errors.As(err, &guard):
			value, err := r.Engine.Get(ctx, marker)
			if err == nil && !bytes.Equal(value, markApplied) && !bytes.Equal(value, markFenced) {
				err = fmt.Errorf("marker %q has %q", marker, value)
			}
			return bytes.Equal(value, markApplied), err
		case !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown):
			return false, err
		}
	}
}

func (r *resolver) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return r.Engine.Scan(ctx, from, beforeMarkers(to), opts)
}

func (r *resolver) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	inner, err := r.Engine.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	return markedSnapshot{inner}, nil
}

type markedSnapshot struct{ catalog.Snapshot }

func (s markedSnapshot) Scan(
	ctx context.Context, from, to []byte, opts catalog.ScanOptions,
) iter.Seq2[catalog.Row, error] {
	return s.Snapshot.Scan(ctx, from, beforeMarkers(to), opts)
}

func beforeMarkers(to []byte) []byte {
	if len(to) == 0 {
		return hidden
	}
	return to
}

// Spread returns one engine made of several that are open on the same catalog: each call goes to the next one. With it
// the suite tells whether they agree on the order of commits. Closing it closes all.
func Spread(engines ...catalog.Engine) catalog.Engine {
	return &spread{Engine: engines[0], all: engines}
}

type spread struct {
	catalog.Engine
	all  []catalog.Engine
	next atomic.Uint64
}

func (s *spread) any() catalog.Engine { return s.all[s.next.Add(1)%uint64(len(s.all))] }

func (s *spread) Commit(ctx context.Context, b *catalog.Batch) error { return s.any().Commit(ctx, b) }

func (s *spread) Get(ctx context.Context, key []byte) ([]byte, error) { return s.any().Get(ctx, key) }

func (s *spread) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	return s.any().GetMany(ctx, keys)
}

func (s *spread) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return s.any().Scan(ctx, from, to, opts)
}

func (s *spread) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	return s.any().Snapshot(ctx)
}

func (s *spread) Close() error {
	var errs []error
	for _, e := range s.all {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}
