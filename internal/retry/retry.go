// Package retry waits between the tries of work that fails because others do something at the same time, or because
// something is away. Which failures are worth another try is the caller's to say.
//
// It has no state and no locks.
package retry

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Tries is how often a batch is tried before it is given up, see [BackOff].
const Tries = 200

const (
	firstWait = 500 * time.Microsecond // longest wait before the third try, doubled for each further one
	lastWait  = 20 * time.Millisecond  // up to this
)

// BackOff waits before a try, of which the first one has number 0. The first two tries come at once, each later one
// after a random time, so that tries that have collided go apart. It returns the error of ctx if that has ended.
func BackOff(ctx context.Context, try int) error {
	if try < 2 {
		return ctx.Err()
	}
	return Pause(ctx, rand.N(min(firstWait<<min(try-2, 10), lastWait)))
}

// Pause waits, and returns the error of ctx if that ends first.
func Pause(ctx context.Context, wait time.Duration) error {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Persist calls f until it succeeds or ctx ends, more and more seldom, and logs when it begins and ends to fail. The
// text of what f does begins the messages.
func Persist(ctx context.Context, log *slog.Logger, what string, f func() error) error {
	wait := 100 * time.Millisecond
	var since time.Time
	for {
		err := f()
		switch {
		case err == nil && since.IsZero():
			return nil
		case err == nil:
			log.Info(what+": succeeded", "after", time.Since(since).Round(time.Millisecond))
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case since.IsZero():
			since = time.Now()
			log.Warn(what+": failed; trying again", "error", err)
		}
		if err := Pause(ctx, wait); err != nil {
			return err
		}
		wait = min(2*wait, 15*time.Second)
	}
}
