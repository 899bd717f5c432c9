package pebble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	cpebble "github.com/cockroachdb/pebble/v2"
)

// lineEvery is how often each message is logged at most that Pebble may repeat without pause.
const lineEvery = time.Minute

// sparing logs each message once in lineEvery, with the number of lines that were left out before.
type sparing struct {
	log *slog.Logger

	mu       sync.Mutex
	messages map[string]spared
}

type spared struct {
	at   time.Time // of the last line
	left int       // lines left out since then
}

func (s *sparing) line(level slog.Level, message string, args ...any) {
	s.mu.Lock()
	m := s.messages[message]
	out := time.Since(m.at) >= lineEvery
	if out {
		s.messages[message] = spared{at: time.Now()}
	} else {
		m.left++
		s.messages[message] = m
	}
	s.mu.Unlock()
	if !out {
		return
	}
	if m.left > 0 {
		args = append(args, "left_out", m.left)
	}
	s.log.Log(context.Background(), level, message, args...)
}

// libraryLogger passes Pebble's own messages to slog, and to fatal what it cannot go on after.
type libraryLogger struct {
	log   *slog.Logger
	fatal func(error)
}

func (l *libraryLogger) Infof(format string, args ...any) { l.logf(slog.LevelDebug, format, args) }

func (l *libraryLogger) Errorf(format string, args ...any) { l.logf(slog.LevelError, format, args) }

func (l *libraryLogger) Fatalf(format string, args ...any) {
	l.fatal(errors.New("pebble: " + fmt.Sprintf(format, args...)))
}

func (l *libraryLogger) logf(level slog.Level, format string, args []any) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, "pebble: "+fmt.Sprintf(format, args...))
	}
}

// events logs what Pebble does: work in the background at debug, anything that slows down or endangers the catalog
// above it. The values are formatted only if they are logged. Of an error only the message is logged: Pebble's errors
// have stacks.
func events(log *slog.Logger) *cpebble.EventListener {
	often := &sparing{log: log, messages: map[string]spared{}}
	return &cpebble.EventListener{
		FlushEnd:        func(info cpebble.FlushInfo) { log.Debug("pebble: flush", "info", info) },
		CompactionEnd:   func(info cpebble.CompactionInfo) { log.Debug("pebble: compaction", "info", info) },
		ManifestCreated: func(info cpebble.ManifestCreateInfo) { log.Debug("pebble: manifest", "info", info) },
		WALCreated:      func(info cpebble.WALCreateInfo) { log.Debug("pebble: log", "info", info) },
		FormatUpgrade:   func(v cpebble.FormatMajorVersion) { log.Debug("pebble: format", "version", v) },

		WriteStallBegin: func(info cpebble.WriteStallBeginInfo) {
			often.line(slog.LevelWarn, "catalog: commits wait for the disk", "reason", info.Reason)
		},
		WriteStallEnd: func() { often.line(slog.LevelInfo, "catalog: commits go on") },
		DiskSlow:      func(info cpebble.DiskSlowInfo) { often.line(slog.LevelWarn, "catalog: slow disk", "info", info) },
		BackgroundError: func(err error) {
			often.line(slog.LevelError, "catalog: work in the background failed", "err", err.Error())
		},
		DataCorruption: func(info cpebble.DataCorruptionInfo) { log.Error("catalog: corrupt file", "info", info) },
	}
}
