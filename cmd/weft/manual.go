package main

import (
	"context"
	"os"

	"github.com/weftfs/weft/internal/manual"
)

func describeProgram() *manual.Program {
	p := program.Manual()
	for i := range mountOptionTable {
		p.AddOption(mountOptionTable[i].usage(), mountOptionTable[i].help, false)
	}
	for i := range generalOptionTable {
		p.AddOption(generalOptionTable[i].usage(), generalOptionTable[i].help, true)
	}
	for i := range p.Commands {
		if p.Commands[i].Name == "mount" {
			p.Commands[i].More = "" // the options, which have a section of their own
		}
	}
	return p
}

func runCompletion(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nFor bash: source <(weft completion bash). weft install puts them where shells look for them.\n")
	if err := parse(c, fl, args, 1, 1); err != nil {
		return err
	}
	if err := describeProgram().Completion(os.Stdout, fl.Arg(0)); err != nil {
		return usagef("completion: %v", err)
	}
	return nil
}

// Sections of the manual pages.
var (
	sectionSources = manual.Section{Title: "SOURCES", Text: `
HOST[:PORT][,HOST...]:/[SUBDIR] is a volume, or a directory of it, that cannot be left upwards. Of several hosts one that answers is used; those that share the volume are learnt from it.
An IPv6 address stands in brackets. The port is 7049 if it is not said.`}
	sectionFstab = manual.Section{Title: "FSTAB", Text: `
A line of /etc/fstab:

    meta1,meta2:/  /mnt/weft  weft  _netdev,nofail,noatime  0  0

With x-systemd.automount it is mounted when it is first used. With bg, or nofail, a metadata service that is down when the host starts does not keep it from starting; to have
systemd wait for the service meanwhile, nofail,retry=10000,x-systemd.mount-timeout=infinity. Who may mount it besides root is said by user or users.

mount -o remount changes ro, rw, nosuid, nodev, noexec and the rules for access times; weft's own options stay as they are until the file system is mounted anew.`}
	sectionMountExit = manual.Section{Title: "EXIT STATUS", Text: `
0: done. 1: wrong arguments, or no permission. 2: the system has not what it takes, such as memory. 8: interrupted. 32: it failed.`}
	sectionExit = manual.Section{Title: "EXIT STATUS", Text: `
0: done. 1: wrong arguments. 2: it could not be done, or, of doctor, something was found. 8, 32, of mount and umount: interrupted, failed, as those of mount(8).`}
	sectionFiles = manual.Section{Title: "FILES", Text: `
/run/weft/: sockets of mounts, by which status and other commands ask them.

/run/weft/localio/: sockets of data servers on this host.

/var/log/weft/MOUNTPOINT.log: what a mount logs, unless the option log says otherwise. For others than root of the host both are in $XDG_RUNTIME_DIR/weft, or /tmp/weft-UID; root of a user namespace, such as a rootless container, has the UID of the user outside.

/var/cache/weft/: addresses that NVMe discovery controllers have told.`}
	sectionSee = manual.Section{Title: "SEE ALSO", Text: "weft(8), mount.weft(8), weftd(8), mount(8), umount(8), fstab(5), nfs(5), fuse(4)"}
)
