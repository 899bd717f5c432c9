package retry

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for try := range Tries {
			began := time.Now()
			if err := BackOff(t.Context(), try); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > lastWait || try < 2 && took > 0 || try == 2 && took > firstWait {
				t.Errorf("try %d: waited %v", try, took)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for _, try := range []int{0, 1, 2, 100} {
			if err := BackOff(ctx, try); !errors.Is(err, context.Canceled) {
				t.Errorf("try %d: %v", try, err)
			}
		}
	})
}

func TestPersist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text strings.Builder
		log := slog.New(slog.NewTextHandler(&text, nil))
		var tries []time.Duration
		began := time.Now()
		f := func() error {
			tries = append(tries, time.Since(began))
			if len(tries) < 3 {
				return errors.New("away")
			}
			return nil
		}
		if err := Persist(t.Context(), log, "work", f); err != nil {
			t.Fatal(err)
		}
		if len(tries) != 3 || tries[1] != 100*time.Millisecond || tries[2] != 300*time.Millisecond {
			t.Errorf("tried after %v", tries)
		}
		if s := text.String(); strings.Count(s, "work: failed; trying again") != 1 || strings.Count(s, "work: succeeded") != 1 {
			t.Errorf("logged %s", s)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := Persist(ctx, log, "work", func() error { return errors.New("away") })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("ended with %v", err)
		}
	})
}
