package pebble

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	cpebble "github.com/cockroachdb/pebble/v2"
)

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
// above it. The values are formatted only if they are logged.
func events(log *slog.Logger) *cpebble.EventListener {
	return &cpebble.EventListener{
		FlushEnd:        func(info cpebble.FlushInfo) { log.Debug("pebble: flush", "info", info) },
		CompactionEnd:   func(info cpebble.CompactionInfo) { log.Debug("pebble: compaction", "info", info) },
		ManifestCreated: func(info cpebble.ManifestCreateInfo) { log.Debug("pebble: manifest", "info", info) },
		WALCreated:      func(info cpebble.WALCreateInfo) { log.Debug("pebble: log", "info", info) },
		FormatUpgrade:   func(v cpebble.FormatMajorVersion) { log.Debug("pebble: format", "version", v) },

		WriteStallBegin: func(info cpebble.WriteStallBeginInfo) {
			log.Warn("catalog: commits wait for the disk", "reason", info.Reason)
		},
		WriteStallEnd:   func() { log.Info("catalog: commits go on") },
		DiskSlow:        func(info cpebble.DiskSlowInfo) { log.Warn("catalog: slow disk", "info", info) },
		LowDiskSpace:    func(info cpebble.LowDiskSpaceInfo) { log.Warn("catalog: disk nearly full", "info", info) },
		BackgroundError: func(err error) { log.Error("catalog: work in the background failed", "err", err) },
		DataCorruption:  func(info cpebble.DataCorruptionInfo) { log.Error("catalog: corrupt file", "info", info) },
	}
}
