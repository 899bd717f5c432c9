package meta

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/schema"
)

// OpenVolume returns the volume in the catalog. In an empty catalog it first makes one, with a root directory that
// belongs to root and has mode 0755; policy, its unset fields from DefaultPolicy, is its default then. A volume of another
// format is refused.
func OpenVolume(ctx context.Context, engine catalog.Engine, policy layout.Policy) (schema.Volume, error) {
	for {
		vol, err := readVolume(ctx, engine)
		if !errors.Is(err, catalog.ErrNotFound) {
			return vol, err
		}
		err = makeVolume(ctx, engine, policy)
		if guard := (*catalog.GuardError)(nil); err != nil && !errors.As(err, &guard) {
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
	return vol, nil
}

func makeVolume(ctx context.Context, engine catalog.Engine, policy layout.Policy) error {
	if err := policy.Validate(); err != nil {
		return err
	}
	now := time.Now().UnixNano()
	vol := schema.Volume{Format: schema.Format, Created: now, Policy: schema.PolicyOf(policy.Or(DefaultPolicy))}
	rand.Read(vol.ID[:])
	root := schema.Inode{
		Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID, Atime: now, Mtime: now, Ctime: now, Btime: now,
	}
	var b catalog.Batch
	b.GuardAbsent(schema.KeyVolume)
	b.Put(schema.KeyVolume, schema.Encode(&vol))
	b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(layout.RootID)+1))
	b.Put(schema.KeyUsage, catalog.EncodeCounters(1))
	return engine.Commit(ctx, &b)
}

// inodeChunk is how many inode numbers are reserved by one commit. What is left of a chunk is lost with the process.
const inodeChunk = 4096

// numbers hands out inode numbers, none of them twice, whatever crashes.
type numbers struct {
	engine catalog.Engine
	token  chan struct{} // whoever has taken the one token owns next and end
	next   layout.FileID
	end    layout.FileID
}

func newNumbers(engine catalog.Engine) *numbers {
	n := &numbers{engine: engine, token: make(chan struct{}, 1)}
	n.token <- struct{}{}
	return n
}

func (n *numbers) take(ctx context.Context) (layout.FileID, error) {
	select {
	case <-n.token:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { n.token <- struct{}{} }()
	for n.next == n.end {
		if err := n.reserve(ctx); err != nil {
			return 0, fmt.Errorf("reserve inode numbers: %w", err)
		}
	}
	n.next++
	return n.next - 1, nil
}

// reserve takes the next chunk. If somebody else took it first, it leaves the chunk empty.
func (n *numbers) reserve(ctx context.Context) error {
	raw, err := n.engine.Get(ctx, schema.KeyNextInode)
	if err != nil {
		return err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return err
	}
	first := counters.Field(0)
	if first <= int64(layout.RootID) {
		return fmt.Errorf("the next inode number is %d: %w", first, catalog.ErrCorrupt)
	}
	var b catalog.Batch
	b.GuardEqual(schema.KeyNextInode, raw)
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(first+inodeChunk))
	err = n.engine.Commit(ctx, &b)
	switch guard := (*catalog.GuardError)(nil); {
	case errors.As(err, &guard), errors.Is(err, catalog.ErrConflict), errors.Is(err, catalog.ErrUnknown):
		return nil
	case err != nil:
		return err
	}
	n.next, n.end = layout.FileID(first), layout.FileID(first)+inodeChunk
	return nil
}
