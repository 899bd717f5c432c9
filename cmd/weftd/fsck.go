package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/meta/datafile/store"
	"github.com/weftfs/weft/server/meta/fsck"
)

// Exit codes of fsck.
const (
	fsckFound       = 1 // problems, repaired or not
	fsckCouldNotRun = 2
)

// exitStatus ends the program with a code; whatever there is to say has been said.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// couldNotRun gives an error of fsck its exit code.
func couldNotRun(err error) error {
	fmt.Fprintf(os.Stderr, "weftd: fsck: %s\n", oneLine(err))
	return exitStatus(fsckCouldNotRun)
}

func runFsck(ctx context.Context, c *command, args []string) error {
	fl := c.flags("\nExit codes: 0 clean, 1 problems found (repaired or not), 2 could not run. The data servers must be running,\n" +
		"except those of weftd single, which fsck starts and stops. Without --repair nothing is changed.\n")
	dir := fl.String("dir", "", "directory of a stopped weftd meta or weftd single")
	repair := fl.Bool("repair", false, "mend what is found; no bytes of a file are dropped")
	dialer := dialFlags(fl)
	asJSON := fl.Bool("json", false, "print one JSON object")
	verbose := fl.BoolP("verbose", "v", false, "log more")
	if err := c.parse(fl, args, "dir"); err != nil {
		return err
	}
	dial, err := dialer()
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
	report, err := check(ctx, *dir, *repair, dial, log)
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
		return exitStatus(fsckFound)
	}
	return nil
}

// check runs fsck on a directory that nobody else uses meanwhile.
func check(ctx context.Context, dir string, repair bool, dial store.Dialer, log *slog.Logger) (report *fsck.Report, err error) {
	if _, err := os.Stat(filepath.Join(dir, "catalog")); err != nil {
		return nil, fmt.Errorf("%s is not a directory of weftd meta or weftd single: %w", dir, err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	engine, err := openEngine(dir, true, log)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	servers := dataServers{local: data.LocalOff}
	defer func() { err = errors.Join(err, servers.stop()) }()
	if err := servers.startAgain(dir, log); err != nil {
		return nil, err
	}
	return fsck.Check(ctx, fsck.Config{Engine: engine, Dial: dial, Repair: repair, Log: log})
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
