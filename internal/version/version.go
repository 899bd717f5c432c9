// Package version knows which weft this is.
package version

import "runtime/debug"

// stamped is set by scripts/build: go build -ldflags "-X github.com/weftfs/weft/internal/version.stamped=v1.2.3".
var stamped string

// String is the stamped version, else what the Go tool recorded, else "unknown".
func String() string {
	if stamped != "" {
		return stamped
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
