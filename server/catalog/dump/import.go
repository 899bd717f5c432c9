package dump

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	// importCommits are under way at the same time, of at most importBytes each: a distributed engine takes its time for each.
	importCommits = 8
	importBytes   = 1 << 20

	// leap is how far numbers are moved on where they may have been given out since a backup: a multiple of layout.ShardChunk.
	leap = 1 << 32

	// A commit whose outcome is unknown is tried again, after retryTime and then twice as long, up to retryMost, for half a minute altogether: in
	// that time a distributed engine has found another leader.
	retryTime = time.Millisecond
	retryMost = time.Second
	retries   = 40
)

// ImportConfig says what to import where.
type ImportConfig struct {
	Engine catalog.Engine
	// Shards is how many shards the volume has then; 0 = as many as it had. The sessions of a volume that gets another number are ended.
	Shards   int
	Progress func(Progress) // nil = nobody wants to know
}

// Imported is what was imported.
type Imported struct {
	Progress
	Volume   schema.Volume
	Kind     Kind
	Sessions int // that were ended
}

// ErrNotEmpty: there is something in the catalog already.
var ErrNotEmpty = errors.New("the catalog is not empty")

// Import puts what is in a file into an empty catalog, or one where an import has not ended, reads it again, and makes it a volume if it is
// what was in the file. Nothing is a volume there before.
func Import(ctx context.Context, r io.Reader, cfg ImportConfig) (*Imported, error) {
	if cfg.Shards < 0 || cfg.Shards > layout.MaxShards {
		return nil, fmt.Errorf("%d shards: want 1 to %d", cfg.Shards, layout.MaxShards)
	}
	im := &importing{cfg: cfg, counted: countingReader{r: r}, sum: sha256.New()}
	var err error
	if im.r, err = NewReader(&im.counted); err != nil {
		return nil, err
	}
	if err := im.prepare(ctx); err != nil {
		return nil, err
	}
	if err := im.fill(ctx); err != nil {
		return nil, err
	}
	if err := im.verify(ctx); err != nil {
		return nil, fmt.Errorf("read again what was imported: %w", err)
	}
	if err := im.finish(ctx); err != nil {
		return nil, err
	}
	im.p.Bytes = im.counted.n
	return &Imported{Progress: im.p, Volume: im.volume, Kind: im.r.Header.Kind, Sessions: im.sessions}, nil
}

type importing struct {
	cfg     ImportConfig
	counted countingReader
	r       *Reader
	p       Progress

	volume   schema.Volume // as it is to be
	row      []byte        // of it
	reshard  bool          // it gets another number of shards
	mark     []byte        // value of KeyImport
	sessions int
	sum      hash.Hash // of all rows as they are to be
}

// prepare decides what the volume will be, and looks at what is in the catalog.
func (im *importing) prepare(ctx context.Context) error {
	var err error
	im.row = im.r.Header.Volume
	if im.volume, err = volumeOf(im.row); err != nil {
		return err
	}
	if im.cfg.Shards != 0 && im.cfg.Shards != im.volume.ShardCount() {
		im.reshard = true
		im.volume.Format = schema.Raised(im.volume.Format, schema.FormatShards)
		im.volume.Shards = im.cfg.Shards
		im.row = schema.Encode(&im.volume)
	}
	im.mark = make([]byte, 16)
	rand.Read(im.mark)
	var first []byte
	for row, err := range im.cfg.Engine.Scan(ctx, nil, nil, catalog.ScanOptions{Limit: 1, KeysOnly: true}) {
		if err != nil {
			return err
		}
		first = bytes.Clone(row.Key)
	}
	switch raw, err := im.cfg.Engine.Get(ctx, schema.KeyVolume); {
	case err == nil:
		var there schema.Volume
		if schema.Decode(raw, &there) != nil {
			return fmt.Errorf("%w: it has a volume that cannot be read", ErrNotEmpty)
		}
		return fmt.Errorf("%w: it has volume %x", ErrNotEmpty, there.ID)
	case !errors.Is(err, catalog.ErrNotFound):
		return err
	}
	old, err := im.cfg.Engine.Get(ctx, schema.KeyImport)
	switch {
	case err == nil: // it is anybody's to go on
	case !errors.Is(err, catalog.ErrNotFound):
		return err
	case first != nil:
		return fmt.Errorf("%w: it has a row %.40q and others, and no volume", ErrNotEmpty, first)
	}
	return im.commit(ctx, func(b *catalog.Batch) {
		if old != nil {
			b.GuardEqual(schema.KeyImport, old)
		} else {
			b.GuardRangeEmpty(nil, nil)
		}
		b.Put(schema.KeyImport, im.mark)
	}, func(ctx context.Context) (bool, error) { return im.is(ctx, schema.KeyImport, im.mark) })
}

// is reports whether a row has a value.
func (im *importing) is(ctx context.Context, key, value []byte) (bool, error) {
	got, err := im.cfg.Engine.Get(ctx, key)
	if errors.Is(err, catalog.ErrNotFound) {
		return false, nil
	}
	return err == nil && bytes.Equal(got, value), err
}

// commit commits what fill puts into a batch, again when it is not known whether it happened. done reports whether it has; nil says that
// doing it twice is as good.
func (im *importing) commit(ctx context.Context, fill func(*catalog.Batch), done func(context.Context) (bool, error)) error {
	b := catalog.Batch{Grows: true}
	fill(&b)
	for try := 0; ; try++ {
		err := im.cfg.Engine.Commit(ctx, &b)
		guard := (*catalog.GuardError)(nil)
		switch {
		case err == nil:
			return nil
		case errors.As(err, &guard):
			if try > 0 && done != nil {
				if ok, err := done(ctx); ok || err != nil {
					return err
				}
			}
			return fmt.Errorf("somebody else is using the catalog: %w", err)
		case !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown) || try == retries:
			return err
		}
		select {
		case <-time.After(min(retryTime<<min(try, 10), retryMost)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// batch is rows that are to be committed together, and go on until room says that they are enough.
type batch struct {
	rows  []catalog.Row
	bytes int
}

// fill puts all rows but the volume row, several batches at a time.
func (im *importing) fill(ctx context.Context) error {
	caps := im.cfg.Engine.Caps()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	batches := make(chan *batch)
	var commits sync.WaitGroup
	for range importCommits {
		commits.Go(func() { // commits until there are no more
			for rows := range batches {
				if ctx.Err() != nil {
					continue
				}
				err := im.commit(ctx, func(b *catalog.Batch) {
					b.Durability = catalog.NoSync // that of the volume row is Sync
					b.GuardEqual(schema.KeyImport, im.mark)
					b.Puts = rows.rows
				}, nil)
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	fixed := len(schema.KeyImport) + len(im.mark)
	most := min(importBytes, caps.MaxBatchBytes) - fixed
	now := new(batch)
	send := func() {
		if len(now.rows) > 0 {
			batches <- now
			now = new(batch)
		}
	}
	var failed error
	for row, err := range im.r.Rows() {
		if err == nil {
			row, err = im.convert(row)
		}
		if err == nil {
			err = context.Cause(ctx)
		}
		if err == nil && (len(row.Value) > caps.MaxValue || len(row.Key)+len(row.Value)+fixed > caps.MaxBatchBytes) {
			err = fmt.Errorf("row %.40q has %d bytes: %w for the engine", row.Key, len(row.Value), catalog.ErrTooLarge)
		}
		if err != nil {
			failed = err
			break
		}
		if row.Key == nil {
			continue
		}
		n := len(row.Key) + len(row.Value)
		if now.bytes+n > most || len(now.rows)+2 > caps.MaxKeys {
			send()
		}
		now.rows = append(now.rows, catalog.Row{Key: bytes.Clone(row.Key), Value: bytes.Clone(row.Value)})
		now.bytes += n
		im.sum.Write(appendRow(nil, row.Key, row.Value))
		if im.p.count(row.Key); im.p.Rows%progressRows == 0 && im.cfg.Progress != nil {
			im.p.Bytes = im.counted.n
			im.cfg.Progress(im.p)
		}
	}
	if failed == nil {
		send()
	}
	close(batches)
	commits.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return failed
}

// convert returns a row as it is to be; one without a key is left out.
func (im *importing) convert(row catalog.Row) (catalog.Row, error) {
	past := im.r.Header.Kind == KindBackup
	var err error
	switch {
	case row.Key[0] == schema.PrefixShard && im.reshard:
		return catalog.Row{}, nil
	case row.Key[0] == schema.PrefixNamespace && im.volume.ShardCount() > 1:
		return row, errors.New("the volume has NVMe namespaces, which one with several shards cannot have: import it with one shard")
	case row.Key[0] == schema.PrefixSession && (past || im.reshard):
		var s schema.Session
		if err = schema.Decode(row.Value, &s); err == nil && !s.Ended {
			s.Ended = true
			im.sessions++
		}
		if s.Shard >= im.volume.ShardCount() {
			s.Shard = 0
		}
		row.Value = schema.Encode(&s)
	case row.Key[0] == schema.PrefixDevice && past:
		var d schema.Device
		err = schema.Decode(row.Value, &d)
		d.Next += leap
		row.Value = schema.Encode(&d)
	case bytes.Equal(row.Key, schema.KeyNextInode) && past:
		var next catalog.Counters
		if next, err = catalog.DecodeCounters(row.Value); err == nil && len(next) > 0 {
			next[0] += leap
			row.Value = catalog.EncodeCounters(next...)
		}
	}
	if err != nil {
		return row, fmt.Errorf("row %q: %w: %w", row.Key, catalog.ErrCorrupt, err)
	}
	return row, nil
}

// verify reads the catalog and compares it with what was to be there. Nobody changes it meanwhile, so that several snapshots do.
func (im *importing) verify(ctx context.Context) error {
	sum, rows, extra := sha256.New(), int64(0), 0
	var next []byte
	for done := false; !done; {
		snap, err := im.cfg.Engine.Snapshot(ctx)
		if err != nil {
			return err
		}
		done = true
		for row, err := range snap.Scan(ctx, next, nil, catalog.ScanOptions{}) {
			if errors.Is(err, catalog.ErrSnapshotExpired) {
				done = false
				break
			}
			if err != nil {
				return errors.Join(err, snap.Close())
			}
			next = append(append(next[:0], row.Key...), 0)
			if !kept(row.Key) {
				extra++ // KeyImport
				continue
			}
			sum.Write(appendRow(nil, row.Key, row.Value))
			rows++
		}
		if err := snap.Close(); err != nil && done {
			return err
		}
	}
	if rows != im.p.Rows || extra != 1 || !bytes.Equal(sum.Sum(nil), im.sum.Sum(nil)) {
		return fmt.Errorf("%w: %d rows, with another checksum than that of the %d rows that were put: empty it and import once more",
			catalog.ErrCorrupt, rows, im.p.Rows)
	}
	return nil
}

// finish makes a volume of what is there.
func (im *importing) finish(ctx context.Context) error {
	return im.commit(ctx, func(b *catalog.Batch) {
		b.GuardEqual(schema.KeyImport, im.mark)
		b.Delete(schema.KeyImport)
		b.GuardAbsent(schema.KeyVolume)
		b.Put(schema.KeyVolume, im.row)
	}, func(ctx context.Context) (bool, error) { return im.is(ctx, schema.KeyVolume, im.row) })
}
