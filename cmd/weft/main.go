package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/version"
)

type command = cli.Command

var program *cli.Program

func init() {
	program = cli.New("weft", "a parallel file system client", exitUsage, exitFailed, []*command{
		{Name: "mount", Args: "[-f [--ready-fd N] [--ready-file FILE]] [-o OPTION,...] HOST[:PORT][,HOST...]:/[SUBDIR] MOUNTPOINT", Short: "mount a file system", Run: runMount},
		{Name: "umount", Args: "[--force] MOUNTPOINT", Short: "make everything stable, unmount, and wait until the serving process has ended", Run: runUmount},
		{Name: "sync", Args: "[MOUNTPOINT]", Short: "return when everything written is stable (of all mounts without MOUNTPOINT)", Run: runSync},
		{Name: "layout", Args: "FILE|DIR [--json]", Short: "show where a file's data lies, or how a directory's new files will be laid out", Run: runLayout},
		{Name: "layout set", Args: "DIR [--stripe-unit SIZE] [--stripe-count N] [--mirrors N] [--min-copies N]", Short: "say how new files in a directory are laid out", Run: runLayoutSet},
		{Name: "layout move", Args: "FILE|DIR --to DEVICE|local", Short: "move the data of a file, or of all files below a directory, to a data server", Run: runLayoutMove},
		{Name: "prefetch", Args: "PATH... [--mirror-to local|DEVICE] [--cache-size SIZE]", Short: "copy files, and those below directories, to a data server of this host, to be read there", Run: runPrefetch},
		{Name: "evict", Args: "PATH... [--from local|all|DEVICE]", Short: "drop the copies that prefetch has made", Run: runEvict},
		{Name: "du", Args: "DIR... [--bytes] [--json]", Short: "show what is below directories, without looking for it", Run: runDu},
		{Name: "status", Args: "[MOUNTPOINT] [--json]", Short: "show how mounts, their metadata service and their data servers are", Run: runStatus},
		{Name: "top", Args: "[MOUNTPOINT] [--once] [--every TIME]", Short: "show live what a mount does, and how fast", Run: runTop},
		{Name: "trace", Args: "[MOUNTPOINT] [--slow TIME] [--op OP,...] [--path GLOB] [--json]", Short: "show requests as they are answered, and what each had to wait for", Run: runTrace},
		{Name: "doctor", Args: "[MOUNTPOINT] [--report FILE]", Short: "look for what is wrong with this host and its mounts, and say what to do", Run: runDoctor},
		{Name: "bench", Args: "[DIR] [--time TIME] [--json]", Short: "measure for two minutes what a directory's mount and each data server can do", Run: runBench},
		{Name: "nvme-policy", Args: "MOUNTPOINT adaptive|numa|round-robin|queue-depth", Short: "say how a mount chooses among several paths to NVMe namespaces", Run: runPolicy},
		{Name: "admin device add", Args: "nfs://HOST:PORT/EXPORT|nvme://HOST:PORT[/NQN#NSID] [--force] [--server HOST[:PORT]]", Short: "make a data server, or NVMe namespaces, part of the volume", Run: runDeviceAdd},
		{Name: "admin device drain", Args: "DEVICE [--wait|--cancel] [--server HOST[:PORT]]", Short: "move everything off a data server, which gets nothing new; DEVICE as ls shows it", Run: runDeviceDrain},
		{Name: "admin device remove", Args: "DEVICE [--lost] [--server HOST[:PORT]]", Short: "take a data server that is drained and empty out of the volume; DEVICE as ls shows it", Run: runDeviceRemove},
		{Name: "admin device ls", Args: "[--server HOST[:PORT]] [--json]", Short: "list the volume's data servers", Run: runDeviceList},
		{Name: "admin resilver", Args: "[--server HOST[:PORT]]", Short: "wait until no file has a copy that is to be made anew", Run: runResilver},
		{Name: "admin verify", Args: "[DIR|FILE] [--repair] [--rate SIZE]", Short: "compare the copies of mirrored files, while they are in use", Run: runVerify},
		{Name: "admin quota set", Args: "DIR|--user USER|--group GROUP [--bytes SIZE] [--files N] [--server HOST[:PORT]]", Short: "limit what there may be below a directory, or belong to a user or a group", Run: runQuotaSet},
		{Name: "admin quota get", Args: "DIR|--user USER|--group GROUP [--server HOST[:PORT]] [--json]", Short: "show what is used, and the limits", Run: runQuotaGet},
		{Name: "admin quota ls", Args: "[--server HOST[:PORT]] [--json]", Short: "list all quotas", Run: runQuotaList},
		{Name: "admin client set", Args: "WHO(OPTION,...) [--force] [--server HOST[:PORT]]", Short: "say what clients may do: a network, or those with a certificate", Run: runClientSet},
		{Name: "admin client rm", Args: "WHO [--server HOST[:PORT]]", Short: "take the rule for some clients away", Run: runClientRemove},
		{Name: "admin client ls", Args: "[--server HOST[:PORT]] [--json]", Short: "list the rules for clients, in the order in which they count", Run: runClientList},
		{Name: "admin meta ls", Args: "[--server HOST[:PORT]] [--json]", Short: "list the volume's metadata services, and which of its shards each of them has", Run: runMetaList},
		{Name: "admin meta drain", Args: "HOST:PORT [--cancel] [--server HOST[:PORT]]", Short: "have a metadata service give its shards to the others; HOST:PORT as ls shows it", Run: runMetaDrain},
		{Name: "join", Args: "HOST[:PORT] --token-file FILE|--renew [--dir DIR]", Short: "get this host's certificate from a certificate authority", Run: runJoin},
		{Name: "install", Args: "[--prefix DIR] [--root DIR] [--remove]", Short: "install the programs, what mount(8) calls, manual pages, completions and systemd units", Run: runInstall},
		{Name: "completion", Args: "bash|zsh|fish", Short: "print what a shell sources to complete weft's commands and options", Run: runCompletion},
		{Name: "version", Args: "", Short: "print the version", Run: runVersion},
	})
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if helper := helperOf(filepath.Base(os.Args[0])); helper != nil {
		program.Name = filepath.Base(os.Args[0])
		if os.Getenv("PATH") == "" { // mount(8) leaves nothing of the environment
			os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
		}
		err = helper.Run(ctx, helper, os.Args[1:])
	} else {
		err = dispatch(ctx, os.Args[1:])
	}
	stop()
	os.Exit(program.ExitCode(err))
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) > 0 && strings.Contains(args[0], ":/") {
		return helpers[0].Run(ctx, helpers[0], args) // as mount.fuse(8) calls whatever type a FUSE file system has
	}
	return program.Run(ctx, args)
}

// parse parses args and checks how many operands there are.
func parse(c *command, fl *pflag.FlagSet, args []string, least, most int) error {
	err := c.Parse(fl, args)
	if n := fl.NArg(); err == nil && (n < least || n > most) {
		return usagef("%s: %d operands given; usage: %s %s", c.Name, n, c.Title(), c.Args)
	}
	return err
}

func runVersion(_ context.Context, c *command, args []string) error {
	if err := parse(c, c.Flags(""), args, 0, 0); err != nil {
		return err
	}
	fmt.Println("weft", version.String())
	return nil
}
