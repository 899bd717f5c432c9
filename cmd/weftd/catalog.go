package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/dump"
	"github.com/weftfs/weft/server/catalog/etcd"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/catalog/postgres"
	"github.com/weftfs/weft/server/cluster"
)

// catalogHelp says how catalogs are named.
const catalogHelp = "CATALOG is the directory of weftd meta or weftd single (pebble:DIR, or just DIR), or the URL of one that services share\n(postgres://... or etcd://...)"

// engines opens the catalogs of distributed engines by the scheme of their URL. With mustExist the catalog must not be empty.
var engines = map[string]func(ctx context.Context, url string, mustExist bool, log *slog.Logger) (catalog.Engine, error){
	"postgres": func(ctx context.Context, url string, mustExist bool, log *slog.Logger) (catalog.Engine, error) {
		return postgres.Open(ctx, postgres.Config{URL: url, MustExist: mustExist, Logger: log})
	},
	"etcd": func(ctx context.Context, url string, mustExist bool, log *slog.Logger) (catalog.Engine, error) {
		cfg, err := etcd.ParseURL(url)
		if err != nil {
			return nil, err
		}
		cfg.MustExist, cfg.Logger = mustExist, log
		return etcd.Open(ctx, cfg)
	},
}

// catalogName is where a catalog is.
type catalogName struct {
	dir string // of weftd, for the embedded engine
	url string // of a distributed one
}

func (c catalogName) String() string {
	if c.dir != "" {
		return c.dir
	}
	return c.url
}

// parseCatalog reads the name of a catalog.
func parseCatalog(s string) (catalogName, error) {
	if dir, ok := strings.CutPrefix(s, "pebble:"); ok && dir != "" {
		return catalogName{dir: dir}, nil
	}
	scheme, _, ok := strings.Cut(s, "://")
	switch {
	case ok && engines[scheme] != nil:
		return catalogName{url: s}, nil
	case ok:
		return catalogName{}, fmt.Errorf("%q: no engine %q: want %s", s, scheme,
			strings.Join(append(slices.Sorted(maps.Keys(engines)), "pebble"), ", "))
	case s == "":
		return catalogName{}, errors.New("a catalog has a name: DIR, or a URL")
	}
	return catalogName{dir: s}, nil
}

// openCatalog opens a catalog. The embedded engine has its directory to itself then; a distributed one may have others that use it.
func openCatalog(ctx context.Context, name catalogName, mustExist bool, log *slog.Logger) (catalog.Engine, error) {
	if name.dir != "" {
		return openEngine(name.dir, mustExist, log)
	}
	scheme, _, _ := strings.Cut(name.url, "://")
	return engines[scheme](ctx, name.url, mustExist, log)
}

// alone opens a catalog that nobody else uses.
func alone(ctx context.Context, name catalogName, mustExist bool, log *slog.Logger) (engine catalog.Engine, err error) {
	if name.dir == "" {
		if engine, err = openCatalog(ctx, name, mustExist, log); err != nil {
			return nil, err
		}
		if err := cluster.Unused(ctx, engine); err != nil {
			return nil, errors.Join(err, engine.Close())
		}
		return engine, nil
	}
	if mustExist {
		if _, err := os.Stat(filepath.Join(name.dir, "catalog")); err != nil {
			return nil, fmt.Errorf("%s is not a directory of weftd meta or weftd single: %w", name.dir, err)
		}
	}
	lock, err := lockDir(name.dir)
	if err != nil {
		return nil, err
	}
	if engine, err = openCatalog(ctx, name, mustExist, log); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return &lockedEngine{engine, lock}, nil
}

// lockedEngine is an engine with the lock of weftd's directory.
type lockedEngine struct {
	catalog.Engine
	lock *os.File
}

func (e *lockedEngine) Close() error { return errors.Join(e.Engine.Close(), e.lock.Close()) }

// live is a catalog that services may be using.
type live struct {
	name   catalogName
	engine catalog.Engine // of a distributed one, else nil
	log    *slog.Logger
}

// openLive opens such a catalog for reading.
func openLive(ctx context.Context, name catalogName, log *slog.Logger) (*live, error) {
	l := &live{name: name, log: log}
	var err error
	if name.dir == "" {
		l.engine, err = openCatalog(ctx, name, true, log)
	}
	return l, err
}

func (l *live) close() error {
	if l.engine == nil {
		return nil
	}
	return l.engine.Close()
}

// snapshot returns a view of the latest revision. Of an embedded catalog it is in a copy that the running service makes; the error is
// errNoService if none runs.
func (l *live) snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if l.engine != nil {
		return l.engine.Snapshot(ctx)
	}
	copied, err := takeCheckpoint(ctx, l.name.dir)
	if err != nil {
		return nil, err
	}
	engine, err := pebble.Open(pebble.Config{Dir: copied.dir, MustExist: true, Logger: l.log})
	if err != nil {
		return nil, errors.Join(err, copied.Close())
	}
	snap, err := engine.Snapshot(ctx)
	if err != nil {
		return nil, errors.Join(err, engine.Close(), copied.Close())
	}
	return &copySnapshot{snap, engine, copied}, nil
}

// copySnapshot is a snapshot of a copy, which ends with it.
type copySnapshot struct {
	catalog.Snapshot
	engine catalog.Engine
	copied *checkpoint
}

func (s *copySnapshot) Close() error {
	return errors.Join(s.Snapshot.Close(), s.engine.Close(), s.copied.Close())
}

// catalogFlags parses what the commands have in common.
func catalogFlags(c *command, fl *pflag.FlagSet, args []string) (progress.Form, error) {
	fl.String("from", "", "where it comes from")
	fl.String("to", "", "where it goes to")
	form := progress.Flag(fl)
	err := parse(c, fl, args, "from", "to")
	return *form, err
}

// quiet is a log of what goes wrong.
func quiet() *slog.Logger {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	slog.SetDefault(log)
	return log
}

func runExport(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\n" + catalogHelp + ", which no service may use meanwhile; FILE may be - for standard output. Import it with\n" +
		"weftd catalog import, and start no service on CATALOG any more then: the volume is where it was imported. Clients that wait go on there.\n")
	form, err := catalogFlags(c, fl, args)
	if err != nil {
		return err
	}
	name, err := parseCatalog(fl.Lookup("from").Value.String())
	if err != nil {
		return usagef("catalog export: --from: %v", err)
	}
	engine, err := alone(ctx, name, true, quiet())
	if errors.Is(err, errRunning) {
		return fmt.Errorf("%w: stop it, or use weftd catalog backup", err)
	}
	if err != nil {
		return err
	}
	err = writeDump(ctx, form, fl.Lookup("to").Value.String(), dump.ExportConfig{Kind: dump.KindExport, Snapshot: engine.Snapshot})
	return errors.Join(err, engine.Close())
}

func runBackup(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\n" + catalogHelp + "; its service may be running, which must be on this host then; FILE may\n" +
		"be - for standard output. The file is the catalog of one moment. Whoever imports it goes back to that: what was made since is lost, and the bytes\n" +
		"of files that were removed since are. Clients mount anew then, and weftd fsck --repair should be run first.\n")
	form, err := catalogFlags(c, fl, args)
	if err != nil {
		return err
	}
	name, err := parseCatalog(fl.Lookup("from").Value.String())
	if err != nil {
		return usagef("catalog backup: --from: %v", err)
	}
	log := quiet()
	l, err := openLive(ctx, name, log)
	if err != nil {
		return err
	}
	to := fl.Lookup("to").Value.String()
	err = writeDump(ctx, form, to, dump.ExportConfig{Kind: dump.KindBackup, Snapshot: l.snapshot})
	switch {
	case errors.Is(err, errNoService):
		var engine catalog.Engine
		if engine, err = alone(ctx, name, true, log); err == nil {
			err = writeDump(ctx, form, to, dump.ExportConfig{Kind: dump.KindBackup, Snapshot: engine.Snapshot})
			err = errors.Join(err, engine.Close())
		}
	case errors.Is(err, catalog.ErrSnapshotExpired):
		err = fmt.Errorf("%w: the engine does not keep a view of the catalog for as long as this takes: have it keep it longer, "+
			"or stop all services and use weftd catalog export", err)
	}
	return errors.Join(err, l.close())
}

// writeDump writes a file, which gets its name when it is complete.
func writeDump(ctx context.Context, form progress.Form, to string, cfg dump.ExportConfig) error {
	out, done := os.Stdout, func() error { return nil }
	if to != "-" {
		if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
			if err == nil {
				err = fmt.Errorf("%s: %w: choose another name", to, os.ErrExist)
			}
			return err
		}
		var err error
		if out, err = os.CreateTemp(filepath.Dir(to), filepath.Base(to)+".part"); err != nil {
			return err
		}
		defer os.Remove(out.Name()) // it is not there any more if all went well
		defer out.Close()
		done = func() error { return publish(out, to) }
	}
	bar := showDump(form)
	cfg.Progress = func(p dump.Progress) { bar.tell(p, p.Share()) }
	p, err := dump.Export(ctx, out, cfg)
	if err == nil {
		bar.tell(p, 1)
	}
	bar.shown.Stop()
	if err == nil {
		err = done()
	}
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("interrupted: %w", err)
		}
		return err
	}
	fmt.Fprintf(os.Stderr, "%v: %s\n", cfg.Kind, bar.summary(p))
	return nil
}

// publish gives a file its name, durably.
func publish(f *os.File, name string) error {
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	err := unix.Renameat2(unix.AT_FDCWD, f.Name(), unix.AT_FDCWD, name, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not every file system can; it was not there a while ago
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: f.Name(), New: name, Err: err}
	}
	dir, err := os.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func runImport(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\n" + catalogHelp + ", which must be empty, or not be there. What was imported is read again and compared.\n" +
		"FILE may be - for standard input. An import that was interrupted leaves a catalog that no service uses; run it again.\n")
	shards := fl.Int("shards", 0, "among how many shards metadata services divide the volume; more than one only if they share the catalog. Clients mount\nanew if that is another number than before (default: as many as it has; in a directory one)")
	form, err := catalogFlags(c, fl, args)
	if err != nil {
		return err
	}
	if fl.Changed("shards") && *shards < 1 {
		return usagef("catalog import: --shards %d: want at least 1", *shards)
	}
	name, err := parseCatalog(fl.Lookup("to").Value.String())
	if err != nil {
		return usagef("catalog import: --to: %v", err)
	}
	if name.dir != "" {
		if *shards > 1 {
			return usagef("catalog import: --shards %d: the catalog of one directory is one service's, which has all shards", *shards)
		}
		*shards = 1
	}
	in, size := os.Stdin, int64(0)
	if from := fl.Lookup("from").Value.String(); from != "-" {
		if in, err = os.Open(from); err != nil {
			return err
		}
		defer in.Close()
	}
	if info, err := in.Stat(); err == nil && info.Mode().IsRegular() {
		size = info.Size()
	}
	buffered := bufio.NewReaderSize(in, 1<<20)
	if _, err := buffered.Peek(1); err != nil && err != io.EOF { // before a catalog is made
		return err
	}
	engine, err := alone(ctx, name, false, quiet())
	if err != nil {
		return err
	}
	bar := showDump(form)
	got, err := dump.Import(ctx, buffered, dump.ImportConfig{Engine: engine, Shards: *shards, Progress: func(p dump.Progress) {
		bar.tell(p, float64(p.Bytes)/float64(max(size, 1)))
	}})
	if err == nil {
		bar.tell(got.Progress, 1)
	}
	bar.shown.Stop()
	if err = errors.Join(err, engine.Close()); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("interrupted: %w", err)
		}
		return err
	}
	fmt.Fprintf(os.Stderr, "import: volume %x, %s\n", got.Volume.ID, bar.summary(got.Progress))
	if got.Kind == dump.KindBackup {
		fmt.Fprintln(os.Stderr, "It is as it was when the backup was made: run weftd fsck --repair before a service uses it.")
	}
	if got.Sessions > 0 {
		fmt.Fprintf(os.Stderr, "%d clients that had it mounted must mount it anew.\n", got.Sessions)
	}
	return nil
}
