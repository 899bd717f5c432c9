package datafile

import (
	"context"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta/schema"
)

// OnNamespaces reports whether a layout has a data file on an NVMe namespace.
func (m *Manager) OnNamespaces(row schema.Layout) bool { return false }

// Extents completes segments of a layout.
func (m *Manager) Extents(ctx context.Context, row schema.Layout, segments []metarpc.Segment) ([]metarpc.Segment, error) {
	return segments, nil
}

// Validate makes blocks valid.
func (m *Manager) Validate(ctx context.Context, id layout.FileID, written []metarpc.Written) error {
	return nil
}

// FenceSession fences.
func (m *Manager) FenceSession(ctx context.Context, row schema.Layout, session metarpc.SessionID) error {
	return nil
}
