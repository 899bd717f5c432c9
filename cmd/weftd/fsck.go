package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/progress"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/cluster"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/fsck"
)

// Exit codes of fsck.
const (
	fsckFound       = 1 // problems, repaired or not
	fsckCouldNotRun = 2
)

// couldNotRun gives an error of fsck its exit code.
func couldNotRun(err error) error {
	return cli.Exit(fsckCouldNotRun, fmt.Errorf("fsck: %w", err))
}

func runFsck(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nExit codes: 0 clean, 1 problems found (repaired or not), 2 could not run. The data servers must be running,\n" +
		"except those of weftd single, which fsck starts and stops if it is not --online. Without --repair nothing is changed. With --online what seems wrong on\n" +
		"data servers is looked at several times, as it may be on its way; repairs need the services stopped, and keep\n" +
		"those of a shared catalog from starting.\n" + catalogHelp + ".\n")
	dir := fl.String("dir", "", "directory of a stopped weftd meta or weftd single; the same as --catalog")
	name := fl.String("catalog", "", "CATALOG of the volume")
	online := fl.Bool("online", false, "check the volume while its services run; the embedded engine's on the service's host")
	rate := fl.Int64("rate", 0, "with --online: rows of the catalog and data files to look at in a second, at most (default: no bound)")
	repair := fl.Bool("repair", false, "mend what is found; no bytes of a file are dropped")
	secret := newTLSFlags(fl).dialing("data servers")
	secretFile := secretFlag(fl)
	asJSON := fl.Bool("json", false, "print one JSON object")
	form := progress.Flag(fl)
	verbose := fl.BoolP("verbose", "v", false, "log more")
	if err := parse(c, fl, args); err != nil {
		return err
	}
	switch {
	case fl.Changed("dir") == fl.Changed("catalog"):
		return usagef("fsck: give --dir or --catalog; usage: weftd %s %s", c.Name, c.Args)
	case *online && *repair:
		return usagef("fsck: --online --repair: stop the services to repair what they use")
	case fl.Changed("rate") && (!*online || *rate < 1):
		return usagef("fsck: --rate goes with --online, and is at least 1")
	}
	if *name == "" {
		*name = *dir
	}
	where, err := parseCatalog(*name)
	if err != nil {
		return usagef("fsck: %v", err)
	}
	dial, err := secret.dialer()
	if err != nil {
		return couldNotRun(err)
	}
	secrets, err := readSecrets(*secretFile)
	if err != nil {
		return couldNotRun(err)
	}
	// What the parts log at their start and end is of no interest here.
	level := slog.LevelWarn
	if *verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	slog.SetDefault(log)
	cfg := fsck.Config{Dial: dial, Secrets: secrets, Repair: *repair, Rate: *rate, Log: log}
	var far atomic.Pointer[fsck.Progress]
	far.Store(&fsck.Progress{Phase: "begins"})
	cfg.Progress = func(p fsck.Progress) { far.Store(&p) }
	shown := progress.Show(*form, func() progress.State {
		p := far.Load()
		return progress.State{Doing: p.Phase, Counts: []progress.Count{{Unit: "rows", Done: p.Rows}}, Share: p.Share()}
	})
	var report *fsck.Report
	if *online {
		report, err = checkLive(ctx, where, cfg)
	} else {
		report, err = check(ctx, where, cfg)
	}
	shown.Stop()
	if err != nil {
		return couldNotRun(err)
	}
	if *asJSON {
		err = json.NewEncoder(os.Stdout).Encode(report)
	} else {
		err = printReport(report)
	}
	if err != nil {
		return couldNotRun(err)
	}
	if !report.Clean() {
		return cli.Exit(fsckFound, errors.New("")) // the findings have been printed
	}
	return nil
}

// check runs fsck on a catalog that nobody else uses meanwhile: of a shared one nobody can begin to while it is repaired.
func check(ctx context.Context, name catalogName, cfg fsck.Config) (report *fsck.Report, err error) {
	if name.dir == "" && cfg.Repair {
		engine, err := openCatalog(ctx, name, true, cfg.Log)
		if err != nil {
			return nil, err
		}
		host, err := os.Hostname()
		if err != nil {
			host = "an unknown host" // it is for people only
		}
		err = cluster.Maintain(ctx, cluster.MaintenanceConfig{Engine: engine, Program: "weftd fsck --repair", Host: host, Log: cfg.Log},
			func(ctx context.Context, engine catalog.Engine) (err error) {
				cfg.Engine = engine
				report, err = fsck.Check(ctx, cfg)
				return err
			})
		return report, errors.Join(err, engine.Close())
	}
	engine, err := alone(ctx, name, true, cfg.Log)
	if errors.Is(err, errRunning) {
		return nil, fmt.Errorf("%w: stop it, or check with --online", err)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	servers := dataServers{local: data.LocalOff}
	defer func() { err = errors.Join(err, servers.stop()) }()
	if name.dir != "" {
		if err := servers.startAgain(name.dir, cfg.Log); err != nil {
			return nil, err
		}
	}
	cfg.Engine = engine
	return fsck.Check(ctx, cfg)
}

// checkLive runs fsck on a catalog that services use.
func checkLive(ctx context.Context, name catalogName, cfg fsck.Config) (report *fsck.Report, err error) {
	l, err := openLive(ctx, name, cfg.Log)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	cfg.Snapshot = l.snapshot
	report, err = fsck.Check(ctx, cfg)
	switch {
	case errors.Is(err, errNoService):
		err = fmt.Errorf("%w: leave out --online", err)
	case errors.Is(err, catalog.ErrSnapshotExpired):
		err = fmt.Errorf("%w: the engine does not keep a view of the catalog for as long as this takes: have it keep it longer, or raise --rate", err)
	}
	return report, err
}

func printReport(r *fsck.Report) error {
	for _, p := range r.Problems {
		fmt.Println(p)
	}
	fmt.Printf("%d inodes (%d directories), %d entries, %d data files\n", r.Inodes, r.Directories, r.Entries, r.DataFiles)
	for _, s := range r.Spaces {
		fmt.Printf("namespace %s: of %d bytes, files have %d, %d are to be freed, %d are free\n", s.Device, s.Total, s.Used, s.Condemned, s.Free)
	}
	if n := r.Garbage + r.Orphans + r.Truncations + r.Writers + r.Copies; n > 0 {
		fmt.Printf("left for the service to finish: %d data files to remove, %d files without names, %d truncations, %d sizes to find out, %d copies to fill\n",
			r.Garbage, r.Orphans, r.Truncations, r.Writers, r.Copies)
	}
	if r.Busy > 0 {
		fmt.Printf("%d data files changed whenever they were looked at: look again when there is less to do\n", r.Busy)
	}
	if r.Clean() {
		fmt.Println("clean")
		return nil
	}
	var found int64
	for _, n := range r.Counts {
		found += n
	}
	_, err := fmt.Printf("%d problems, %d repaired\n", found, r.Repaired)
	return err
}
