package dump

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// Progress is told from time to time how far a call is. Files is how many inodes the catalog has, Rows counts all rows that are done,
// Known those of which there are about three for each inode; Bytes is what was read or written of the file.
type Progress struct {
	Files, Rows, Known, Bytes int64
}

// Share is about how much of an export is done, 0 to 1.
func (p Progress) Share() float64 {
	return min(1, float64(p.Known)/float64(max(1, 3*p.Files)))
}

// progressRows is after how many rows progress is told.
const progressRows = 1 << 12

// ExportConfig says what to export.
type ExportConfig struct {
	Kind Kind
	// Snapshot returns a view of the latest revision.
	Snapshot func(context.Context) (catalog.Snapshot, error)
	Progress func(Progress) // nil = nobody wants to know
}

// ErrChanged: somebody has used the catalog while it was exported.
var ErrChanged = errors.New("the catalog was used meanwhile")

// Export writes a file of what is in a catalog. If the engine does not keep a snapshot for as long as it takes, the error of a backup is
// catalog.ErrSnapshotExpired, and an export goes on in a newer one, unless the catalog has been used since (ErrChanged).
func Export(ctx context.Context, w io.Writer, cfg ExportConfig) (Progress, error) {
	e := &exporting{cfg: cfg, counted: countingWriter{w: w}}
	err := e.run(ctx)
	if e.snap != nil {
		err = errors.Join(err, e.snap.Close())
	}
	e.p.Bytes = e.counted.n
	return e.p, err
}

type exporting struct {
	cfg     ExportConfig
	p       Progress
	counted countingWriter
	w       *Writer
	snap    catalog.Snapshot
	users   []byte // digest of the rows of processes and shards, in the first snapshot
	next    []byte // key to go on from
}

func (e *exporting) run(ctx context.Context) error {
	if err := e.open(ctx); err != nil {
		return err
	}
	value, err := e.snap.Get(ctx, schema.KeyVolume)
	if errors.Is(err, catalog.ErrNotFound) {
		return e.noVolume(ctx)
	}
	if err != nil {
		return err
	}
	if _, err := volumeOf(value); err != nil {
		return err
	}
	if e.p.Files, err = inodes(ctx, e.snap); err != nil {
		return err
	}
	if e.w, err = NewWriter(&e.counted, Header{Kind: e.cfg.Kind, Volume: value}); err != nil {
		return err
	}
	for {
		err := e.scan(ctx)
		if err == nil {
			break
		}
		if !errors.Is(err, catalog.ErrSnapshotExpired) || e.cfg.Kind != KindExport {
			return fmt.Errorf("after %d rows: %w", e.p.Rows, err)
		}
		e.snap.Close() // there is nothing left of it
		e.snap = nil
		if err := e.open(ctx); err != nil {
			return err
		}
	}
	if e.cfg.Kind == KindExport {
		// Also if the snapshot was good until the end: what somebody has changed since is missing.
		if err := e.snap.Close(); err != nil {
			return err
		}
		e.snap = nil
		if err := e.open(ctx); err != nil {
			return err
		}
	}
	return e.w.Close()
}

// open takes a snapshot, and of an export makes sure that nobody has used the catalog since the first one.
func (e *exporting) open(ctx context.Context) error {
	var err error
	if e.snap, err = e.cfg.Snapshot(ctx); err != nil || e.cfg.Kind != KindExport {
		return err
	}
	sum := sha256.New()
	for _, prefix := range []byte{schema.PrefixBeat, schema.PrefixMember, schema.PrefixShard, schema.KeyRing[0]} {
		from, to := schema.Of(prefix)
		for row, err := range e.snap.Scan(ctx, from, to, catalog.ScanOptions{}) {
			if err != nil {
				return err
			}
			sum.Write(appendRow(nil, row.Key, row.Value))
		}
	}
	users := sum.Sum(nil)
	if e.users != nil && !bytes.Equal(e.users, users) {
		return fmt.Errorf("%w, after %d rows: stop all metadata services, or make a backup", ErrChanged, e.p.Rows)
	}
	e.users = users
	return nil
}

// noVolume says what there is in place of a volume.
func (e *exporting) noVolume(ctx context.Context) error {
	if _, err := e.snap.Get(ctx, schema.KeyImport); err == nil {
		return errors.New("there is an import in the catalog that has not ended: run it again")
	}
	return errors.New("there is no volume in the catalog")
}

// scan writes the rows of a snapshot from e.next on.
func (e *exporting) scan(ctx context.Context) error {
	for row, err := range e.snap.Scan(ctx, e.next, nil, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		if kept(row.Key) {
			if err := e.w.Add(row.Key, row.Value); err != nil {
				return err
			}
			e.p.count(row.Key)
		}
		e.next = append(append(e.next[:0], row.Key...), 0)
		if e.p.Rows%progressRows == 0 && e.cfg.Progress != nil {
			e.p.Bytes = e.counted.n
			e.cfg.Progress(e.p)
		}
	}
	return nil
}

// count counts a row.
func (p *Progress) count(key []byte) {
	p.Rows++
	switch key[0] {
	case schema.PrefixEntry, schema.PrefixInode, schema.PrefixLayout, schema.PrefixCounters:
		p.Known++
	}
}

// inodes is how many inodes a catalog says it has.
func inodes(ctx context.Context, r catalog.Reader) (n int64, err error) {
	from, to := schema.Of(schema.PrefixFiles)
	for kv, err := range r.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return 0, err
		}
		counters, err := catalog.DecodeCounters(kv.Value)
		if err != nil {
			return 0, fmt.Errorf("row %q: %w", kv.Key, err)
		}
		n += counters.Field(0)
	}
	return n, nil
}

// volumeOf reads a volume row.
func volumeOf(value []byte) (row schema.Volume, err error) {
	if err := schema.Decode(value, &row); err != nil {
		return row, fmt.Errorf("volume row: %w: %w", catalog.ErrCorrupt, err)
	}
	return row, schema.CheckFormat(row.Format)
}

// countingWriter counts what passes.
type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// countingReader counts what passes.
type countingReader struct {
	r io.Reader
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
