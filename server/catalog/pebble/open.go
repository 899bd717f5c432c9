package pebble

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	cpebble "github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/weftfs/weft/server/catalog"
)

// Open opens the catalog in cfg.Dir, or makes one there if the directory is empty or absent. Errors are one line:
//
//	catalog.ErrLocked      another process, or an Engine of this one, has it open
//	catalog.ErrNoCatalog   there is none and cfg.MustExist is set
//	catalog.ErrNotCatalog  the directory holds something else; nothing in it was touched
//	catalog.ErrCorrupt     files are damaged or missing; nothing was removed
//	others                 the system said no
func Open(cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	fail := func(err error) (*Engine, error) { return nil, fmt.Errorf("open %s: %w", cfg.Dir, err) }

	dir, err := makeDir(&cfg)
	if err != nil {
		return fail(err)
	}
	found, err := inspect(cfg.fs, dir)
	if err != nil {
		return fail(err)
	}
	if !found && cfg.MustExist {
		return fail(catalog.ErrNoCatalog)
	}
	lock, err := cpebble.LockDirectory(dir, cfg.fs)
	if err != nil {
		return fail(classifyLock(err))
	}
	e, err := open(&cfg, dir, lock)
	if err != nil {
		return fail(errors.Join(err, lock.Close()))
	}
	return e, nil
}

// makeDir makes the directory if it may, and returns its name without symbolic links: Pebble's lock recognises a
// directory that this process has open only by its name.
func makeDir(cfg *Config) (string, error) {
	dir := cfg.Dir
	if _, err := cfg.fs.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if cfg.MustExist {
			return "", catalog.ErrNoCatalog
		}
		if err := makeDurable(cfg.fs, dir); err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	if cfg.fs != vfs.Default {
		return dir, nil
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// makeDurable makes a directory in one that exists, and syncs that one.
func makeDurable(fsys vfs.FS, dir string) error {
	parent, err := fsys.OpenDir(fsys.PathDir(dir))
	if err != nil {
		return err
	}
	return errors.Join(fsys.MkdirAll(dir, 0o700), parent.Sync(), parent.Close())
}

// inspect reports whether dir holds a catalog (true) or nothing (false). It does not need the lock, since it looks only
// at what stays the same while a catalog is open: that there is a marker, and whose merge operator it names.
func inspect(fsys vfs.FS, dir string) (bool, error) {
	names, err := fsys.List(dir)
	if err != nil {
		return false, err
	}
	var marked bool
	var data, options, foreign string
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, "marker.manifest."):
			marked = true
		case isData(name):
			data = name
		case strings.HasPrefix(name, "OPTIONS-"):
			options = max(options, name) // the newest: their numbers have a fixed width until a million
		case strings.HasPrefix(name, manifestPrefix), strings.HasPrefix(name, "marker."),
			strings.HasPrefix(name, "temporary."), strings.HasPrefix(name, witnessName),
			name == "LOCK", name == "lost+found", name == reserveName:
		default:
			foreign = name
		}
	}
	switch {
	case options != "":
		if err := inspectOptions(fsys, fsys.PathJoin(dir, options)); err != nil {
			return false, err
		}
	case !marked && data == "" && foreign != "":
		return false, fmt.Errorf("%w: the directory has %q in it; give an empty one", catalog.ErrNotCatalog, foreign)
	}
	if err := inspectFormat(fsys, dir); err != nil {
		return false, err
	}
	if !marked && data != "" {
		return false, fmt.Errorf("%w: %q is there but no marker.manifest; restore the directory from a backup, "+
			"or empty it if it never was in use", catalog.ErrCorrupt, data)
	}
	return marked, nil
}

// isData reports whether name is that of a table, blob or log file of Pebble's, such as 000012.sst.
func isData(name string) bool {
	number, kind, _ := strings.Cut(name, ".")
	return strings.Trim(number, "0123456789-") == "" && number != "" && slices.Contains([]string{"sst", "blob", "log"}, kind)
}

// inspectFormat refuses a catalog that a newer library has converted.
func inspectFormat(fsys vfs.FS, dir string) error {
	value, err := atomicfs.ReadMarker(fsys, dir, "format-version")
	if err != nil {
		return classifyOpen(err)
	}
	version, err := strconv.ParseUint(value, 10, 64)
	if err == nil && version > uint64(cpebble.FormatNewest) {
		return fmt.Errorf("written by a newer weftd: its format is %d, this one reads up to %d", version, cpebble.FormatNewest)
	}
	return nil // a marker that is no number is for Pebble to refuse
}

// maxOptions is the most of Pebble's OPTIONS file that is read; it has a few kilobytes.
const maxOptions = 1 << 20

// inspectOptions tells a store of Pebble's that is no catalog by its merge operator.
func inspectOptions(fsys vfs.FS, name string) error {
	f, err := fsys.Open(name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // replaced by a process that is just opening the catalog; the lock will tell
		}
		return err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxOptions))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	switch {
	case !bytes.Contains(text, []byte("merger=")):
		return classifyOpen(fmt.Errorf("%s names no merge operator", name))
	case !bytes.Contains(text, []byte("merger="+mergerName+"\n")):
		return fmt.Errorf("%w: %s does not name %s", catalog.ErrNotCatalog, name, mergerName)
	}
	return nil
}

// classifyLock tells a lock held by somebody from a failing system. Pebble's error for a lock of the same process
// has no type, but it is the only one that carries no errno.
func classifyLock(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) && errno != syscall.EAGAIN && errno != syscall.EACCES {
		return err
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		return err // the LOCK file could not be opened
	}
	return catalog.ErrLocked
}

// open opens the catalog in dir, whose lock is held. The engine owns lock if open succeeds.
func open(cfg *Config, dir string, lock *cpebble.Lock) (*Engine, error) {
	manifests := &manifestFS{FS: cfg.fs, log: cfg.Logger, ahead: zeroAhead}
	if disk, err := cfg.fs.GetDiskUsage(dir); err == nil {
		cfg.MemTableBytes = int(max(min(uint64(cfg.MemTableBytes), disk.TotalBytes/logShare), minMemTableBytes))
		manifests.ahead = min(zeroAhead, cfg.MemTableBytes/8)
	}
	manifest, err := atomicfs.ReadMarker(cfg.fs, dir, "manifest")
	if err != nil {
		return nil, classifyOpen(err)
	}
	if manifest != "" {
		if err := manifests.checkManifest(dir, manifest); err != nil {
			return nil, classifyOpen(err)
		}
	}
	e := &Engine{
		dir:       dir,
		lock:      lock,
		fatal:     cfg.Fatal,
		latches:   &latchTable{seed: maphash.MakeSeed()},
		snapshots: make(map[*snapshot]struct{}),
	}
	if cfg.Reserve {
		if e.room, err = newRoom(dir, cfg.Logger, e.fail); err != nil {
			return nil, err
		}
		manifests.FS, manifests.room = &roomFS{cfg.fs, e.room}, e.room
	}
	// What is fatal to an open catalog is an error to return while it is being opened.
	var opened atomic.Bool
	opts := cfg.options()
	opts.EventListener = events(cfg.Logger)
	opts.ErrorIfNotExists = manifest != ""
	opts.FS = manifests
	opts.Lock = lock
	if e.room != nil {
		e.room.fit(opts)
	}
	opts.Logger = &libraryLogger{cfg.Logger, func(err error) {
		if opened.Load() {
			e.fail(err)
		} else {
			cfg.Logger.Error("catalog: cannot be opened", "dir", dir, "err", err)
		}
	}}
	opts.WithFSDefaults() // watches for slow writes
	if e.db, err = cpebble.Open(dir, opts); err != nil {
		return nil, errors.Join(classifyOpen(err), e.room.close())
	}
	opened.Store(true)
	if e.room != nil {
		e.room.opened.Store(true)
		e.keeper.Go(e.keepRoom) // until Close
	}
	return e, nil
}

// classifyOpen makes ErrCorrupt of everything that is not the system saying no: a file is missing, cut off, or does not
// parse.
func classifyOpen(err error) error {
	var errno syscall.Errno
	switch {
	case errors.Is(err, catalog.ErrCorrupt):
		return fmt.Errorf("%w; restore the directory from a backup", err)
	case errors.As(err, &errno) && errno != syscall.ENOENT:
		return err
	}
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	return fmt.Errorf("%w: %s; restore the directory from a backup", catalog.ErrCorrupt, text)
}
