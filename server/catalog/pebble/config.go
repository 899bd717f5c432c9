package pebble

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"

	cpebble "github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/weftfs/weft/internal/descriptors"
)

// Config says where the catalog is and how much memory it may use. Zero values mean the defaults given.
type Config struct {
	// Dir is the directory of the catalog. It holds nothing else; it is made if its parent exists.
	Dir string

	// MustExist makes Open fail with ErrNoCatalog instead of making an empty catalog. A service that has run before
	// sets it, so that a file system that was not mounted does not look like a catalog without files.
	MustExist bool

	// MemTableBytes is how many bytes of changes are kept in memory before they go to a table on disk, and
	// MemTables how many of those may wait for the disk before commits wait. Default 64 MiB and 4. Memory is taken
	// as needed, from 256 KiB up. Pebble's own 4 MiB gives far fewer commits per second. A log is allocated ahead for a
	// whole memtable, so that memtables are smaller where that would be more than 1 % of the disk.
	MemTableBytes int
	MemTables     int

	// CacheBytes is the size of the cache of table blocks. Default 256 MiB, taken as needed.
	CacheBytes int64

	// Reserve makes the catalog keep a part of the disk for the time when it is full, see Room in the package comment. A
	// copy of a catalog that is only read needs none.
	Reserve bool

	// Logger gets changes of state (warnings and errors) and Pebble's events (debug). Default slog.Default().
	Logger *slog.Logger

	// Fatal is called once when the log or the MANIFEST could not be written, so that later commits can no longer be
	// told apart from lost ones. From then on every call returns ErrClosed. It should end the process, and the default
	// does: it logs the error and exits with status 1. The next Open recovers what was acknowledged. With Reserve a lack
	// of room is such an error only while the catalog is opened or closed.
	Fatal func(error)

	fs vfs.FS // tests put a failing or crashing file system here
}

// Default sizes, see Config. They are what the engine comparison found to matter.
const (
	defaultMemTableBytes = 64 << 20
	defaultMemTables     = 4
	defaultCacheBytes    = 256 << 20

	// maxOpenFiles is Pebble's own default; the share of descriptors may allow fewer.
	maxOpenFiles = 1000

	// logShare divides the size of the disk: Pebble allocates 1.1 memtables for a log, which is 1 % of the disk then.
	logShare = 110

	minMemTableBytes = 64 << 10
	maxMemTableBytes = 1 << 30
)

// Validate returns an error that names the first field out of range.
func (c *Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("pebble: Config.Dir is empty")
	case c.MemTableBytes != 0 && (c.MemTableBytes < minMemTableBytes || c.MemTableBytes > maxMemTableBytes):
		return fmt.Errorf("pebble: Config.MemTableBytes is %d, want %d to %d", c.MemTableBytes, minMemTableBytes, maxMemTableBytes)
	case c.MemTables != 0 && (c.MemTables < 2 || c.MemTables > 64):
		return fmt.Errorf("pebble: Config.MemTables is %d, want 2 to 64", c.MemTables)
	case c.CacheBytes < 0:
		return fmt.Errorf("pebble: Config.CacheBytes is %d", c.CacheBytes)
	}
	return nil
}

// withDefaults returns c with every zero value replaced.
func (c Config) withDefaults() Config {
	if c.MemTableBytes == 0 {
		c.MemTableBytes = defaultMemTableBytes
	}
	if c.MemTables == 0 {
		c.MemTables = defaultMemTables
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = defaultCacheBytes
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Fatal == nil {
		logger := c.Logger
		c.Fatal = func(err error) {
			logger.Error("catalog stopped, exiting", "err", err)
			os.Exit(1)
		}
	}
	if c.fs == nil {
		c.fs = vfs.Default
	}
	return c
}

const (
	// format is the newest on-disk format of Pebble 2.1. It is named here rather than taken as the library's newest
	// because opening a catalog raises it for good: a newer library must not do that by itself. This one brings log
	// records that tell a torn tail from corruption.
	format = cpebble.FormatValueSeparation

	bloomBits = 10 // per key: 1 % false positives, so looking up an absent name reads no table

	// Commits stop when this many sublevels of young tables wait for compaction. It is high because reads
	// slowing down is better than creates stopping.
	l0StopWrites = 1000
)

// options returns Pebble's options for c, which has its defaults. EventListener, Logger and FS are the caller's to set.
func (c *Config) options() *cpebble.Options {
	opts := &cpebble.Options{
		CacheSize:                   c.CacheBytes,
		FormatMajorVersion:          format,
		L0StopWritesThreshold:       l0StopWrites,
		MaxOpenFiles:                min(maxOpenFiles, descriptors.Tables.Part()),
		MemTableSize:                uint64(c.MemTableBytes),
		MemTableStopWritesThreshold: c.MemTables,
		Merger:                      counterMerger,
		// Half the cores at most, so that compactions leave room for the service; more than 4 gain little on one disk.
		CompactionConcurrencyRange: func() (lower, upper int) { return 1, max(1, min(4, runtime.GOMAXPROCS(0)/2)) },
	}
	for i := range opts.Levels {
		opts.Levels[i].FilterPolicy = bloom.FilterPolicy(bloomBits)
	}
	return opts
}
