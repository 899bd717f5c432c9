package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync/atomic"

	"github.com/weftfs/weft/server/catalog"
)

// ErrFenced: the process is no longer a member, as others have taken its shards. It is an ErrClosed: nothing was applied, and nothing ever will be.
var ErrFenced = fmt.Errorf("%w: other metadata services have taken over from this one", catalog.ErrClosed)

// fence is the catalog as one incarnation has it, where every commit is guarded by its member row, or as one service has it, where every commit is
// guarded by the row of its shard: what a service has sent, and has not heard of, is not carried out when the shard is another one's.
type fence struct {
	catalog.Engine
	guard  catalog.Guard
	parent *fence // of a service: the member's; it has no guard in the service's batches, since who takes the shard changes its row
	down   atomic.Bool
	fell   func() // called when it is found that the guard does not hold, perhaps several times
}

// Unwrap returns the catalog that all services share, see catalog.RoomOf.
func (f *fence) Unwrap() catalog.Engine { return f.Engine }

// ended says that there are no reads either: whoever tries again after a lost race would do so for ever.
func (f *fence) ended() bool { return f.down.Load() || f.parent != nil && f.parent.ended() }

// fall ends everything.
func (f *fence) fall() {
	f.down.Store(true)
	f.fell()
}

// Commit implements [catalog.Engine]. The guard is the last one, so that those of b keep their numbers.
func (f *fence) Commit(ctx context.Context, b *catalog.Batch) error {
	if f.ended() {
		return ErrFenced
	}
	guarded := *b
	guarded.Guards = append(slices.Clip(b.Guards), f.guard)
	err := f.Engine.Commit(ctx, &guarded)
	if guard := (*catalog.GuardError)(nil); errors.As(err, &guard) && guard.Index == len(b.Guards) {
		f.fall()
		return ErrFenced
	}
	return err
}

// Caps implements [catalog.Engine]: the guard takes room.
func (f *fence) Caps() catalog.Caps {
	c := f.Engine.Caps()
	c.MaxKeys--
	c.MaxBatchBytes -= len(f.guard.Key) + len(f.guard.Value)
	return c
}

// Get implements [catalog.Reader].
func (f *fence) Get(ctx context.Context, key []byte) ([]byte, error) {
	if f.ended() {
		return nil, ErrFenced
	}
	return f.Engine.Get(ctx, key)
}

// GetMany implements [catalog.Reader].
func (f *fence) GetMany(ctx context.Context, keys [][]byte) ([][]byte, error) {
	if f.ended() {
		return nil, ErrFenced
	}
	return f.Engine.GetMany(ctx, keys)
}

// Scan implements [catalog.Reader].
func (f *fence) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	if f.ended() {
		return func(yield func(catalog.Row, error) bool) { yield(catalog.Row{}, ErrFenced) }
	}
	return f.Engine.Scan(ctx, from, to, opts)
}

// Snapshot implements [catalog.Engine].
func (f *fence) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if f.ended() {
		return nil, ErrFenced
	}
	return f.Engine.Snapshot(ctx)
}

// Close implements [catalog.Engine], but leaves the catalog open, which is the process's.
func (f *fence) Close() error { return nil }
