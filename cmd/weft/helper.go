package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/filename"
)

// helpers are what mount(8) and umount(8) call ("External helpers" in their manuals), by the name of a link to weft. Those with
// fuse in the name are found by the type that the kernel shows of a mount, the others by that of fstab(5).
var helpers []*command

func init() {
	helpers = []*command{
		{Name: "mount.weft", Args: "HOST[:PORT][,HOST...]:/[SUBDIR] MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTION,...] [-t TYPE]", Short: "mount a file system, or remount it, for mount(8)", Run: runMountHelper},
		{Name: "umount.weft", Args: "MOUNTPOINT [-flnrv] [-N NAMESPACE] [-t TYPE]", Short: "make everything stable, unmount, and wait until the serving process has ended, for umount(8)", Run: runUmountHelper},
	}
}

// helperOf is the helper that a program of that name is, or nil.
func helperOf(name string) *command {
	name = strings.Replace(name, ".fuse.", ".", 1)
	if i := slices.IndexFunc(helpers, func(c *command) bool { return c.Name == name }); i >= 0 {
		return helpers[i]
	}
	return nil
}

func runMountHelper(ctx context.Context, c *command, args []string) error {
	fl := c.Flags(optionsHelp())
	lists := fl.StringArrayP("options", "o", nil, "`OPTION`s, separated by commas, see below")
	sloppy := fl.BoolP("sloppy", "s", false, "ignore options that there are none of")
	fake := fl.BoolP("fake", "f", false, "look whether everything is right, and do not mount")
	noTable := fl.BoolP("no-mtab", "n", false, "leave mount(8)'s own table of mounts alone")
	verbose := fl.BoolP("verbose", "v", false, "say what is done")
	namespace := namespaceFlag(fl)
	fl.StringP("types", "t", fsType, "type of the file system, of which there is one")
	if err := parse(c, fl, args, 2, 2); err != nil {
		return err
	}
	if err := enterNamespace(*namespace, c, args); err != nil {
		return err
	}
	words := optionWords(*lists)
	if *sloppy || slices.Contains(words, "sloppy") {
		words = known(words)
	}
	cfg, err := newMountConfig(fl.Arg(0), fl.Arg(1), words)
	if err != nil {
		return usagef("%v", err)
	}
	if cfg.options.remount {
		if err := remount(ctx, cfg, *fake); err != nil {
			return mountErr(err)
		}
		if *verbose {
			fmt.Printf("%s: %s remounted with %s\n", program.Name, filename.Quote(cfg.mountpoint), strings.Join(words, ","))
		}
		return nil
	}
	if err := errors.Join(checkMountpoint(cfg.mountpoint), cfg.check()); err != nil {
		return mountErr(err)
	}
	if *fake {
		if *verbose {
			fmt.Printf("%s: %s would be mounted on %s with the options %s\n", program.Name, filename.Quote(cfg.name), filename.Quote(cfg.mountpoint), strings.Join(words, ","))
		}
		return nil
	}
	server := []string{"-o", strings.Join(words, ","), "--", cfg.name, cfg.mountpoint}
	if err := startServer(ctx, cfg, server); err != nil {
		return mountErr(err)
	}
	if !*noTable && !slices.ContainsFunc(words, keptByMount) && os.Geteuid() == 0 {
		keepInTable(cfg.name, cfg.mountpoint, *verbose)
	}
	if m, err := mountAt(cfg.mountpoint); err == nil && *verbose {
		fmt.Printf("%s: %s mounted on %s type %s, served by process %d\n", program.Name, filename.Quote(m.Source), filename.Quote(m.Mountpoint), fsType, serverOf(ctx, m))
	}
	return nil
}

// keptByMount reports whether mount(8), which called us, keeps an option in its own table when we have succeeded.
func keptByMount(word string) bool {
	name, _, _ := strings.Cut(word, "=")
	return slices.Contains([]string{"_netdev", "user", "users", "owner", "group", "uhelper"}, name)
}

// keepInTable has mount(8) note in its own table that a mount needs the network. umount(8) finds umount.fuse.weft only for mounts that are
// noted there: of others it asks the kernel, which says no more than fuse. And systemd unmounts such mounts before the network goes.
// Nothing depends on it, so that it is no error where there is no mount(8).
func keepInTable(source, mountpoint string, verbose bool) {
	cmd := exec.Command("mount", "--fake", "--internal-only", "-t", fsType, "-o", "_netdev", "--", source, mountpoint)
	if out, err := cmd.CombinedOutput(); err != nil && verbose {
		fmt.Printf("%s: not noted by mount(8), so umount(8) does not call us: %v %s\n", program.Name, err, filename.OneLine(errors.New(strings.TrimSpace(string(out)))))
	}
}

// mountTable is mount(8)'s own table.
const mountTable = "/run/mount/utab"

// dropFromTable has umount(8) forget what mount(8) noted of a mount that is gone. umount(8) does it itself where it has called us.
func dropFromTable(mountpoint string) {
	if table, err := os.ReadFile(mountTable); err == nil && strings.Contains(string(table), " TARGET="+mountpoint+" ") {
		exec.Command("umount", "--fake", "--internal-only", "--", mountpoint).Run()
	}
}

func runUmountHelper(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("")
	var how umountConfig
	fl.BoolVarP(&how.force, "force", "f", false, "unmount even if servers are dead or programs use the mount: what is not stable yet is lost")
	fl.BoolVarP(&how.lazy, "lazy", "l", false, "take the mount out of the tree now; it is served until nobody uses it, and what was written made stable then")
	fl.BoolP("no-mtab", "n", false, "no effect")
	fl.BoolVarP(&how.readOnly, "read-only", "r", false, "if the mount is busy remount it read-only")
	fl.BoolVarP(&how.verbose, "verbose", "v", false, "say what is done")
	namespace := namespaceFlag(fl)
	fl.StringP("types", "t", fsType, "type of the file system, of which there is one")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	if err := enterNamespace(*namespace, c, args); err != nil {
		return err
	}
	return mountErr(umount(ctx, fl.Arg(0), how))
}

func namespaceFlag(fl *pflag.FlagSet) *string {
	return fl.StringP("namespace", "N", "", "do it in this mount namespace: a file such as /proc/PID/ns/mnt, or a PID")
}

// enterNamespace runs this program again in another mount namespace, if one is named. It returns if it cannot, or is there.
func enterNamespace(name string, c *command, args []string) error {
	if name == "" {
		return nil
	}
	if _, err := strconv.Atoi(name); err == nil {
		name = filepath.Join("/proc", name, "ns", "mnt")
	}
	var here, there unix.Stat_t
	if err := unix.Stat(name, &there); err != nil {
		return usagef("-N %s: %v; want a file such as /proc/PID/ns/mnt, or a PID", name, err)
	}
	if err := unix.Stat("/proc/self/ns/mnt", &here); err == nil && here.Ino == there.Ino && here.Dev == there.Dev {
		return nil
	}
	// A process with threads cannot change its mount namespace, but one of its threads can, which then becomes the process.
	runtime.LockOSThread()
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Unshare(unix.CLONE_FS)
	}
	if err == nil {
		err = unix.Setns(fd, unix.CLONE_NEWNS)
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", append([]string{program.Name}, args...), os.Environ())
	}
	return cli.Exit(exitFailed, fmt.Errorf("-N %s: %w", name, err))
}
