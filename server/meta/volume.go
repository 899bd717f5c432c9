package meta

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/usage"
	"github.com/weftfs/weft/server/schema"
)

// OpenVolume returns the volume in the catalog. In an empty catalog it first makes one, with a root directory that
// belongs to root and has mode 0755; policy, its unset fields from DefaultPolicy, is its default then, and shards, 0 for 1, is how many shards it
// has. A volume of an earlier format without usage is upgraded; one of another format is refused, and so is a catalog that has rows and no
// volume: its import has not ended, or it is somebody else's.
func OpenVolume(ctx context.Context, engine catalog.Engine, policy layout.Policy, shards int) (schema.Volume, error) {
	for {
		vol, err := readVolume(ctx, engine)
		if !errors.Is(err, catalog.ErrNotFound) {
			return vol, err
		}
		err = makeVolume(ctx, engine, policy, shards)
		guard := (*catalog.GuardError)(nil)
		switch {
		case errors.As(err, &guard) && guard.Guard.Kind == catalog.RangeEmpty:
			return schema.Volume{}, errors.New("the catalog has rows and no volume: it is not weft's, or it has lost what it had")
		case errors.As(err, &guard) && string(guard.Guard.Key) == string(schema.KeyImport):
			return schema.Volume{}, errors.New("an import into the catalog has not ended: run it again until it does")
		case err != nil && guard == nil:
			return schema.Volume{}, fmt.Errorf("make the volume: %w", err)
		}
	}
}

func readVolume(ctx context.Context, engine catalog.Engine) (schema.Volume, error) {
	raw, err := engine.Get(ctx, schema.KeyVolume)
	if err != nil {
		return schema.Volume{}, fmt.Errorf("read the volume: %w", err)
	}
	var vol schema.Volume
	if err := schema.Decode(raw, &vol); err != nil {
		return schema.Volume{}, fmt.Errorf("the catalog's volume row, perhaps of another version of weft: %w", err)
	}
	if err := schema.CheckFormat(vol.Format); err != nil {
		return schema.Volume{}, err
	}
	if !schema.CountsUsage(vol.Format) {
		if vol, err = usage.Upgrade(ctx, engine, raw, vol); err != nil {
			return schema.Volume{}, fmt.Errorf("count the usage of a volume of an earlier version: %w", err)
		}
	}
	return vol, nil
}

func makeVolume(ctx context.Context, engine catalog.Engine, policy layout.Policy, shards int) error {
	policy = policy.Or(DefaultPolicy)
	if err := policy.Validate(); err != nil {
		return err
	}
	now := time.Now().UnixNano()
	vol := schema.Volume{Format: schema.Format, Created: now, Policy: schema.PolicyOf(policy)}
	if shards > 1 {
		vol.Format, vol.Shards = schema.FormatShards, shards
	}
	if policy.MinCopies != 0 {
		vol.Format = schema.FormatCopies
	}
	rand.Read(vol.ID[:])
	root := schema.Inode{
		Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID, Atime: now, Mtime: now, Ctime: now, Btime: now,
	}
	var b catalog.Batch
	b.GuardAbsent(schema.KeyVolume)
	b.GuardAbsent(schema.KeyImport)
	b.GuardRangeEmpty([]byte{'a'}, nil) // what is before it are processes, one of which is to make the volume
	b.Put(schema.KeyVolume, schema.Encode(&vol))
	b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(layout.RootID)+1))
	b.Put(schema.FilesKey(0), catalog.EncodeCounters(1))
	b.Add(schema.OwnerKey(root.UID, root.GID, 0), schema.OwnerFiles, 1)
	return engine.Commit(ctx, &b)
}

// numbers hands out inode numbers, none of them twice, whatever crashes.
type numbers struct {
	engine catalog.Engine
	shards int           // of the volume
	token  chan struct{} // whoever has taken the one token owns free
	free   []span        // by shard
}

// span are the numbers from next on that end before end.
type span struct {
	next, end layout.FileID
}

func newNumbers(engine catalog.Engine, shards int) *numbers {
	n := &numbers{engine: engine, shards: shards, token: make(chan struct{}, 1), free: make([]span, shards)}
	n.token <- struct{}{}
	return n
}

// take hands out a number of a shard.
func (n *numbers) take(ctx context.Context, shard int) (layout.FileID, error) {
	select {
	case <-n.token:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { n.token <- struct{}{} }()
	free := &n.free[shard]
	for free.next == free.end {
		if err := n.reserve(ctx, shard); err != nil {
			return 0, fmt.Errorf("reserve inode numbers: %w", err)
		}
	}
	free.next++
	return free.next - 1, nil
}

// reserve takes the next chunk of a shard. If somebody else took it first, it leaves the chunk empty. What is left of a chunk is lost with the
// process, and so are the chunks of other shards that lie before it.
func (n *numbers) reserve(ctx context.Context, shard int) error {
	raw, err := n.engine.Get(ctx, schema.KeyNextInode)
	if err != nil {
		return err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return err
	}
	if counters.Field(0) <= int64(layout.RootID) {
		return fmt.Errorf("the next inode number is %d: %w", counters.Field(0), catalog.ErrCorrupt)
	}
	first := layout.FileID(counters.Field(0))
	end := first + layout.ShardChunk
	if n.shards > 1 {
		// A volume that had one shard may go on in the middle of a chunk.
		for layout.ShardOf(first, n.shards) != shard {
			first += layout.ShardChunk - first%layout.ShardChunk
		}
		end = first + layout.ShardChunk - first%layout.ShardChunk
	}
	var b catalog.Batch
	b.GuardEqual(schema.KeyNextInode, raw)
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(end)))
	err = n.engine.Commit(ctx, &b)
	switch guard := (*catalog.GuardError)(nil); {
	case errors.As(err, &guard), errors.Is(err, catalog.ErrConflict), errors.Is(err, catalog.ErrUnknown):
		return nil
	case err != nil:
		return err
	}
	n.free[shard] = span{first, end}
	return nil
}
