package main

import (
	"golang.org/x/sys/unix"
)

// generalOptionTable has the options that weft shares with all file systems: flags of the mount, which a remount changes, and what
// mount(8) hands on from fstab(5), or from /proc/self/mountinfo for a remount.
var generalOptionTable = []option{
	flagOption("ro", unix.MS_RDONLY, true, "mount read-only"),
	flagOption("rw", unix.MS_RDONLY, false, "mount read-write (default)"),
	flagOption("nosuid", unix.MS_NOSUID, true, "ignore set-user-ID and set-group-ID bits"),
	flagOption("suid", unix.MS_NOSUID, false, "honour them (default)"),
	flagOption("nodev", unix.MS_NODEV, true, "do not interpret device files"),
	flagOption("dev", unix.MS_NODEV, false, "interpret them (default)"),
	flagOption("noexec", unix.MS_NOEXEC, true, "do not execute programs"),
	flagOption("exec", unix.MS_NOEXEC, false, "execute them (default)"),
	flagOption("nosymfollow", unix.MS_NOSYMFOLLOW, true, "do not follow symbolic links (Linux 5.10)"),
	flagOption("symfollow", unix.MS_NOSYMFOLLOW, false, "follow them (default)"),
	atimeOption("relatime", 0, "change access times once after each change of a file, and once a day (default)"),
	atimeOption("strictatime", unix.MS_STRICTATIME, "change access times at each access"),
	atimeOption("noatime", unix.MS_NOATIME, "never change access times"),
	atimeOption("atime", 0, "the same as relatime"),
	flagOption("nodiratime", unix.MS_NODIRATIME, true, "never change access times of directories"),
	flagOption("diratime", unix.MS_NODIRATIME, false, "change them like those of files (default)"),
	{"defaults", "", "rw, suid, dev, exec, relatime", func(o *mountOptions, _ string) error { o.flags = 0; return nil }},
	{"remount", "", "give a mount that is there the flags above that stand beside it, all others being off; weft's own options stay as they are", func(o *mountOptions, _ string) error {
		o.remount = true
		return nil
	}},
	{"allow_other", "", "let users other than the one who mounts use it; always so if that is root, /etc/fuse.conf has to say user_allow_other otherwise", func(o *mountOptions, _ string) error {
		o.forAll = true
		return nil
	}},

	ignoredOption("_netdev", "", "for mount(8) and systemd: the file system needs the network"),
	ignoredOption("nofail", "", "for mount(8) and systemd: go on without it"),
	ignoredOption("auto", "", "for mount(8): mount -a mounts it"),
	ignoredOption("noauto", "", "for mount(8): it does not"),
	ignoredOption("user", "[NAME]", "for mount(8): any user may mount it, and mount(8) adds nosuid, nodev and noexec"),
	ignoredOption("nouser", "", "for mount(8)"),
	ignoredOption("users", "", "for mount(8): any user may mount and unmount it, with the same additions"),
	ignoredOption("nousers", "", "for mount(8)"),
	ignoredOption("owner", "", "for mount(8)"),
	ignoredOption("noowner", "", "for mount(8)"),
	ignoredOption("group", "", "for mount(8)"),
	ignoredOption("nogroup", "", "for mount(8)"),
	ignoredOption("comment", "TEXT", "for mount(8)"),
	ignoredOption("uhelper", "NAME", "for umount(8)"),
	ignoredOption("x-*", "[VALUE]", "for mount(8), systemd and others, such as x-systemd.automount"),
	ignoredOption("sloppy", "", "for automounters: as mount.weft -s"),
	ignoredOption("async", "", "no effect: fsync(2) and O_SYNC say what is to be stable"),
	ignoredOption("dirsync", "", "no effect: changes of directories are durable when they return"),
	ignoredOption("lazytime", "", "no effect: access times are reported lazily"),
	ignoredOption("nolazytime", "", "no effect"),
	ignoredOption("norelatime", "", "no effect"),
	ignoredOption("lookupcache", "all|none", "no effect: the kernel keeps names for as long as they are sure not to change"),
	ignoredOption("nostrictatime", "", "no effect"),
	ignoredOption("nomand", "", "no effect"),
	ignoredOption("noiversion", "", "no effect"),
	ignoredOption("silent", "", "no effect"),
	ignoredOption("loud", "", "no effect"),
	ignoredOption("fd", "N", "set by weft itself, as those that follow, which a remount gets back from the kernel"),
	ignoredOption("rootmode", "MODE", "set by weft itself"),
	ignoredOption("user_id", "UID", "set by weft itself"),
	ignoredOption("group_id", "GID", "set by weft itself"),
	ignoredOption("default_permissions", "", "set by weft itself"),
	ignoredOption("max_read", "N", "set by weft itself; max_write says how large requests are"),
	ignoredOption("blksize", "N", "set by weft itself"),
	ignoredOption("fsname", "NAME", "set by weft itself"),
	ignoredOption("subtype", "NAME", "set by weft itself"),
}

// elsewhereOptions are options of nfs(5) that cannot mean here what they mean there, and what to do.
var elsewhereOptions = map[string]string{
	"port":    "the port stands in the source, as in HOST:PORT:/",
	"proto":   "all connections are TCP; leave it out",
	"tcp":     "all connections are TCP; leave it out",
	"vers":    "weft finds out by itself what the service speaks; leave it out",
	"nfsvers": "weft finds out by itself what the service speaks; leave it out",
	"sec":     "connections are protected by xprtsec",
	"intr":    "whatever waits can be interrupted by a signal; leave it out",
	"nointr":  "whatever waits can be interrupted by a signal; leave it out",
	"noac":    "attributes are always those of the service; leave it out",
	"actimeo": "attributes are kept under leases, not for a time; leave it out",
	"nolock":  "locks always hold between mounts; leave it out",
	"lock":    "locks always hold between mounts; leave it out",
	"sync":    "close=stable has close(2) wait until data is stable, O_SYNC each write(2)",
}

// ignoredOption is one that is for others than the serving process.
func ignoredOption(name, value, help string) option {
	return option{name, value, help, func(*mountOptions, string) error { return nil }}
}
