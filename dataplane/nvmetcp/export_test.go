package nvmetcp

import (
	"context"
	"errors"
	"fmt"
)

// Open connects to the addresses of a subsystem. It returns when the first of them can be used, or none, or when ctx ends;
// the others go on being tried. It gives up with the errors of all addresses.
func Open(ctx context.Context, cfg SubsystemConfig) (*Subsystem, error) {
	return open(ctx, cfg, func(ctx context.Context, cfg Config) (controller, error) { return Connect(ctx, cfg) })
}

func open(ctx context.Context, cfg SubsystemConfig, dial func(context.Context, Config) (controller, error)) (*Subsystem, error) {
	s, err := newSubsystem(cfg, dial)
	if err != nil {
		return nil, err
	}
	if err := s.first(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// first waits until one member can be used, or all have failed.
func (s *Subsystem) first(ctx context.Context) error {
	for {
		s.mu.Lock()
		changed := s.changed
		var errs []error
		usable := false
		for _, m := range s.members {
			if m.scanned {
				usable = true
			} else if m.err != nil {
				errs = append(errs, m.err)
			}
		}
		all := len(errs) == len(s.members)
		s.mu.Unlock()
		if usable {
			return nil
		}
		if all {
			return errors.Join(errs...)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("nvmetcp: connecting to %s: %w", s.nqn, ctx.Err()))...)
		}
	}
}
