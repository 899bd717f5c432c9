package schema

import (
	"context"
	"errors"
	"fmt"

	"github.com/weftfs/weft/server/meta/catalog"
)

// RaiseFormat adds to a batch the guard under which the catalog may get a format that it has not had: that there are no members but those which know it. An error names
// those that do not. The caller puts the volume row.
func RaiseFormat(ctx context.Context, r catalog.Reader, b *catalog.Batch, format int) error {
	ring, err := r.Get(ctx, KeyRing) // before the members
	switch {
	case errors.Is(err, catalog.ErrNotFound):
		b.GuardAbsent(KeyRing)
	case err != nil:
		return err
	default:
		b.GuardEqual(KeyRing, ring)
	}
	from, to := Of(PrefixMember)
	for kv, err := range r.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		var m Member
		if err := Decode(kv.Value, &m); err != nil {
			return fmt.Errorf("member row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		if m.Format < format {
			return fmt.Errorf("the metadata service at %s (%s) does not know format %d of the catalog, which is needed for this: upgrade weftd there first", m.Address, m.Program, format)
		}
	}
	return nil
}
