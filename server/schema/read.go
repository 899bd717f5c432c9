package schema

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
)

// DecodeRow reads a row as Decode does, and its error has the key in it. What cannot be read is a fault of the catalog,
// never of a caller.
func DecodeRow(key, raw []byte, row any) error {
	if err := Decode(raw, row); err != nil {
		return fmt.Errorf("row %q: %w: %w", key, catalog.ErrCorrupt, err)
	}
	return nil
}

// DecodeCounters reads a counter row. A nil raw is one that is not there.
func DecodeCounters(key, raw []byte) (catalog.Counters, error) {
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return nil, fmt.Errorf("row %q: %w", key, err)
	}
	return counters, nil
}

// FindRow returns the row of a key as it is stored, nil if there is none.
func FindRow(ctx context.Context, r catalog.Reader, key []byte) ([]byte, error) {
	value, err := r.Get(ctx, key)
	if errors.Is(err, catalog.ErrNotFound) {
		return nil, nil
	}
	return value, err
}

// ReadRow reads the row of a key into row and returns it as it is stored, for a guard. Without such a row it returns
// nil and leaves row as it was.
func ReadRow(ctx context.Context, r catalog.Reader, key []byte, row any) ([]byte, error) {
	raw, err := r.Get(ctx, key)
	if errors.Is(err, catalog.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return raw, DecodeRow(key, raw, row)
}

// ReadCounters reads the counters of a directory.
func ReadCounters(ctx context.Context, r catalog.Reader, dir layout.FileID) (catalog.Counters, error) {
	key := CountersKey(dir)
	raw, err := r.GetMany(ctx, [][]byte{key})
	if err != nil {
		return nil, err
	}
	return DecodeCounters(key, raw[0])
}

// ScanRows scans all rows of a prefix and refuses keys that do not have a length they must have.
func ScanRows(ctx context.Context, r catalog.Reader, prefix byte, lengths ...int) iter.Seq2[catalog.Row, error] {
	from, to := Of(prefix)
	return func(yield func(catalog.Row, error) bool) {
		for kv, err := range r.Scan(ctx, from, to, catalog.ScanOptions{}) {
			if err == nil && !slices.Contains(lengths, len(kv.Key)) {
				err = fmt.Errorf("row %q: %w: a key of %d bytes", kv.Key, catalog.ErrCorrupt, len(kv.Key))
			}
			if !yield(kv, err) || err != nil {
				return
			}
		}
	}
}
