package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/fs"
	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/filename"
)

// remount gives a mount other flags: those that the options have, as mount(8) wants it, which merges those of fstab(5), or of the mount, into
// what was asked for. fake only looks whether it could be done.
//
// Flags are the kernel's, which refuses ro with EBUSY while files are open for writing, as on any file system; the serving process has
// to know some of them, too. Weft's own options stay what they are, so that none may be given that is another.
func remount(ctx context.Context, cfg mountConfig, fake bool) error {
	m, err := mountAt(cfg.mountpoint)
	if err != nil {
		return err
	}
	if _, err := topmost(m); err != nil {
		return err
	}
	if there, err := parseSource(m.Source); err != nil || there.String() != cfg.source.String() {
		return fmt.Errorf("%s is a mount of %s, not of %s", filename.Quote(m.Mountpoint), filename.Quote(m.Source), filename.Quote(cfg.name))
	}
	st, err := m.status(ctx)
	if err != nil {
		return err
	}
	if err := sameOptions(strings.Split(st.Options, ","), cfg.own); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return cli.Exit(exitUsage, fmt.Errorf("remount %s: only root may", filename.Quote(m.Mountpoint)))
	}
	if fake {
		return nil
	}
	return setFlags(ctx, m, cfg.options.flags)
}

// setFlags gives a mount flags of mount(2).
func setFlags(ctx context.Context, m mountEntry, flags uintptr) error {
	readOnly := flags&unix.MS_RDONLY != 0
	tell := func(flags uintptr) (before uintptr, err error) {
		err = control(ctx, m, controlRequest{Op: "remount", Flags: flags}, &before)
		return before, err
	}
	before := uintptr(0)
	if !readOnly { // from then on it may be written to
		var err error
		if before, err = tell(flags); err != nil {
			return err
		}
	}
	remount := flags | unix.MS_REMOUNT
	if flags&(unix.MS_NOATIME|unix.MS_STRICTATIME) == 0 {
		remount |= unix.MS_RELATIME // or the kernel would keep what it has
	}
	if err := unix.Mount(m.Source, m.Mountpoint, fsType, remount, ""); err != nil {
		if !readOnly {
			_, undo := tell(before)
			return errors.Join(fmt.Errorf("remount %s: %w", filename.Quote(m.Mountpoint), err), undo)
		}
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%s is busy: files are open for writing, %s", filename.Quote(m.Mountpoint), users(m, true))
		}
		return fmt.Errorf("remount %s: %w", filename.Quote(m.Mountpoint), err)
	}
	if !readOnly {
		return nil
	}
	if _, err := tell(flags); err != nil {
		return err
	}
	// As on a local file system nothing is written afterwards.
	if err := control(ctx, m, controlRequest{Op: "sync"}, &struct{}{}); err != nil {
		return fmt.Errorf("%s is read-only now, but not everything could be made stable: %w", filename.Quote(m.Mountpoint), err)
	}
	return nil
}

// remountReadOnly gives a mount the flag ro beside those that the kernel shows.
func remountReadOnly(ctx context.Context, m mountEntry) error {
	shown, err := topmost(m)
	if err != nil {
		return err
	}
	o, err := parseOptions(known(optionWords([]string{shown})))
	if err != nil {
		return err
	}
	return setFlags(ctx, m, o.flags|unix.MS_RDONLY)
}

// sameOptions refuses options that a mount with the options has does not have already.
func sameOptions(has, given []string) error {
	running, err := parseOptions(has)
	if err != nil {
		return fmt.Errorf("the mount's options: %w", err)
	}
	with := running
	if err := with.add(given); err != nil {
		return err
	}
	if reflect.DeepEqual(with, running) {
		return nil
	}
	for _, word := range given {
		one := running
		if err := one.add([]string{word}); err != nil || !reflect.DeepEqual(one, running) {
			return usagef("option %q: the mount has another value, or the default, and a remount cannot change it: unmount and mount again", word)
		}
	}
	return usagef("options %s: not those of the mount, and a remount cannot change them: unmount and mount again", strings.Join(given, ","))
}

// remounted takes over flags that a remount has given to the mount, or is about to give, and returns those of before.
func (d *daemon) remounted(flags uintptr) uintptr {
	d.flagsMu.Lock()
	defer d.flagsMu.Unlock()
	before := d.cfg.options.flags
	d.cfg.options.flags = flags
	_, copies := d.cfg.options.passthrough()
	d.fsys.Remounted(fs.AtimeOf(flags), copies)
	return before
}
