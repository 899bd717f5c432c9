package faultytest

import (
	"context"
	"syscall"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// OnSparse sets what is called before each call of dataplane.Sparser, with its name in capitals. An error ends the call
// without passing it on.
func (t *Target) OnSparse(hook func(call string) error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.onSparse = hook
}

type unsupported struct{}

func (unsupported) Error() string        { return "the wrapped target is no dataplane.Sparser" }
func (unsupported) Errno() syscall.Errno { return syscall.EOPNOTSUPP }

// sparser returns the wrapped target for a call that is to be passed on.
func (t *Target) sparser(call string) (dataplane.Sparser, error) {
	t.mu.Lock()
	hook, closed := t.onSparse, t.closed
	t.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if hook != nil {
		if err := hook(call); err != nil {
			return nil, err
		}
	}
	if s, ok := t.inner.(dataplane.Sparser); ok {
		return s, nil
	}
	return nil, unsupported{}
}

// Allocate implements dataplane.Sparser.
func (t *Target) Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error {
	s, err := t.sparser("ALLOCATE")
	if err != nil {
		return err
	}
	return s.Allocate(ctx, df, col, off, n, keepSize)
}

// Deallocate implements dataplane.Sparser.
func (t *Target) Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error {
	s, err := t.sparser("DEALLOCATE")
	if err != nil {
		return err
	}
	return s.Deallocate(ctx, df, col, off, n)
}

// Seek implements dataplane.Sparser.
func (t *Target) Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error) {
	s, err := t.sparser("SEEK")
	if err != nil {
		return 0, false, err
	}
	return s.Seek(ctx, df, col, off, n, hole)
}
