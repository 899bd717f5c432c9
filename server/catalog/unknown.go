package catalog

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/weftfs/weft/internal/retry"
)

const (
	// FindOut waits so long before it commits again, doubled each time up to the second.
	firstAgain = time.Millisecond
	lastAgain  = time.Second
)

// FindOut finds out what became of b, whose Commit returned ErrUnknown, by committing it again until that has an outcome or ctx
// ends. It returns nil if b was applied, then or now; what Commit returns with which nothing is applied if it was not, and never will be; or ErrUnknown, with
// the error of ctx, if ctx ended before that was known.
//
// b must be as it was, and such that it can do no harm twice: once it was applied a guard does not hold any more, or to apply it again changes nothing. What its
// guards want must not come back once it is gone, and the caller sees to it that nobody changes what b puts and deletes meanwhile, or
// takes it for not applied if somebody does.
func FindOut(ctx context.Context, e Engine, b *Batch) error {
	for wait := firstAgain; ; wait = min(2*wait, lastAgain) {
		if err := retry.Pause(ctx, wait); err != nil {
			return errors.Join(ErrUnknown, err)
		}
		err := e.Commit(ctx, b)
		if guard := (*GuardError)(nil); errors.As(err, &guard) {
			var done bool
			if done, err = applied(ctx, e, b); done {
				return nil
			} else if err == nil {
				return guard
			}
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrClosed):
			return errors.Join(ErrUnknown, err)
		}
	}
}

// applied reports whether all rows are as b leaves those that it puts or deletes.
func applied(ctx context.Context, r Reader, b *Batch) (bool, error) {
	var keys [][]byte
	for _, row := range b.Puts {
		keys = append(keys, row.Key)
	}
	values, err := r.GetMany(ctx, append(keys, b.Deletes...))
	if err != nil {
		return false, err
	}
	for i, value := range values {
		if i < len(b.Puts) && (value == nil || !bytes.Equal(value, b.Puts[i].Value)) || i >= len(b.Puts) && value != nil {
			return false, nil
		}
	}
	return true, nil
}
