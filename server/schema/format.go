package schema

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/weftfs/weft/server/catalog"
)

// MemberError says that a catalog cannot get a format, as there is a metadata service that does not know it.
type MemberError struct {
	Address, Program string // of the service
	Format           int
}

func (e *MemberError) Error() string {
	return fmt.Sprintf("the metadata service at %s (%s) does not know format %d of the catalog, which is needed for this: upgrade weftd there first", e.Address, e.Program, e.Format)
}

// Raise makes sure that a catalog with usage has a format, or a later one. What this format is for may be committed
// from then on: no service that does not know it can join. The error is a [*MemberError] if there is one already.
func Raise(ctx context.Context, engine catalog.Engine, format int, log *slog.Logger) error {
	for {
		raw, err := engine.Get(ctx, KeyVolume)
		if err != nil {
			return fmt.Errorf("read the volume: %w", err)
		}
		var volume Volume
		if err := Decode(raw, &volume); err != nil {
			return fmt.Errorf("volume row: %w: %w", catalog.ErrCorrupt, err)
		}
		if volume.Format >= format {
			return nil
		}
		var b catalog.Batch
		b.GuardEqual(KeyVolume, raw)
		if err := RaiseFormat(ctx, engine, &b, format); err != nil {
			return err
		}
		volume.Format = format
		b.Put(KeyVolume, Encode(&volume))
		err = engine.Commit(ctx, &b)
		if guard := (*catalog.GuardError)(nil); err != nil && !errors.As(err, &guard) &&
			!errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown) {
			return fmt.Errorf("raise the format of the catalog to %d: %w", format, err)
		}
		if err == nil {
			log.Info("the catalog has a later format from now on, which earlier versions of weftd do not know", "format", format)
		}
		// The row says whether there is more to do.
	}
}

// RaiseFormat adds to a batch the guard under which the catalog may get a format that it has not had: that there are no
// members but those which know it. The error is a [*MemberError] if there is one. The caller puts the volume row.
func RaiseFormat(ctx context.Context, r catalog.Reader, b *catalog.Batch, format int) error {
	ring, err := FindRow(ctx, r, KeyRing) // before the members
	if err != nil {
		return err
	}
	b.GuardRow(KeyRing, ring)
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
			return &MemberError{Address: m.Address, Program: m.Program, Format: format}
		}
	}
	return nil
}
