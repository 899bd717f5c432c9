package nvmetcp

import (
	"context"
	"fmt"
	"math"
	"syscall"

	"github.com/weftfs/weft/layout"
)

// maxZero is how many bytes are zeroed by one operation.
const maxZero = 1 << 30

// pieces runs do on each part of [off, off+n) that the column has, until it returns an error.
func (t *Target) pieces(ctx context.Context, call string, col layout.Column, off, n int64, do func(from, to int64) error) error {
	if off < 0 || n < 0 || off > math.MaxInt64-n {
		return fmt.Errorf("nvmetcp: %s of %d bytes at %d: %w", call, n, off, syscall.EFBIG)
	}
	for at := off; ; {
		t.mu.Lock()
		closed := t.closed
		t.mu.Unlock()
		if closed {
			return errTargetClosed
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		from, to := col.Next(at, off+n)
		if from == to {
			return nil
		}
		if err := do(from, to); err != nil {
			return err
		}
		at = to
	}
}

// Allocate implements dataplane.Sparser. The extents of a layout for writing are space that nobody else has, so there is
// nothing to do, or a layout that covers more is needed.
func (t *Target) Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, _ bool) error {
	return t.pieces(ctx, "ALLOCATE", col, off, n, func(from, to int64) error {
		x := find(df.Extents, from)
		for from < to {
			if x == len(df.Extents) || df.Extents[x].Off > from {
				return &LayoutError{Op: "ALLOCATE", Off: from, Len: to - from, Why: "a hole"}
			}
			e := &df.Extents[x]
			if e.State != layout.ExtentReadWrite && e.State != layout.ExtentInvalid {
				return &LayoutError{Op: "ALLOCATE", Off: from, Len: min(to, e.End()) - from, Why: e.State.String()}
			}
			from = e.End()
			x++
		}
		return nil
	})
}

// Deallocate implements dataplane.Sparser. The blocks stay the data file's, as zeros.
func (t *Target) Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error {
	return t.pieces(ctx, "DEALLOCATE", col, off, n, func(from, to int64) error {
		for from < to {
			m := min(to-from, maxZero-from%maxZero)
			ended := make(chan struct{})
			op := &layout.Op{File: df, Off: from, Done: func(*layout.Op) { close(ended) }}
			t.start(op, opZero, m)
			t.Flush()
			select {
			case <-ended:
				if op.Err != nil {
					return op.Err
				}
			case <-ctx.Done():
				return ctx.Err()
			}
			from += m
		}
		return nil
	})
}

// Seek implements dataplane.Sparser. Data is what is valid and what was written.
func (t *Target) Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error) {
	err = t.pieces(ctx, "SEEK", col, off, n, func(from, to int64) error {
		if found {
			return nil
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		t.look()
		w := t.files[string(df.Handles[0])]
		if w != nil && !t.adopt(w, df) {
			return &LayoutError{Op: "SEEK", Off: from, Len: to - from, Why: older}
		}
		for x := find(df.Extents, from); from < to; {
			e := layout.Extent{Off: from, Len: to - from, State: layout.ExtentNone}
			if x < len(df.Extents) && df.Extents[x].Off > from {
				e.Len = min(e.Len, df.Extents[x].Off-from)
			} else if x < len(df.Extents) {
				e = df.Extents[x]
			}
			next, data := min(to, e.End()), false
			switch {
			case e.State == layout.ExtentReadWrite || e.State == layout.ExtentRead:
				data = true
			case w == nil:
			case e.State == layout.ExtentInvalid:
				next, data = w.next(from, next, e.Addr-e.Off)
			default:
				next, _, data = w.where(from, next)
			}
			if x < len(df.Extents) && next == df.Extents[x].End() {
				x++
			}
			if data != hole {
				at, found = from, true
				return nil
			}
			from = next
		}
		return nil
	})
	return at, found, err
}
