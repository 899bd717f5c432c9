package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/version"
)

// command is one verb of weft. Its run parses the arguments after the verb.
type command struct {
	name  string
	args  string // as shown in the usage line
	short string
	run   func(ctx context.Context, c *command, args []string) error
}

var commands []*command

func init() {
	commands = []*command{
		{"mount", "[-f [--ready-fd N] [--ready-file FILE]] [-o OPTION,...] HOST[:PORT][,HOST...]:/[SUBDIR] MOUNTPOINT", "mount a file system", runMount},
		{"umount", "[--force] MOUNTPOINT", "make everything stable, unmount, and wait until the serving process has ended", runUmount},
		{"sync", "[MOUNTPOINT]", "return when everything written is stable (of all mounts without MOUNTPOINT)", runSync},
		{"layout", "FILE|DIR [--json]", "show where a file's data lies, or how a directory's new files will be laid out", runLayout},
		{"layout set", "DIR [--stripe-unit SIZE] [--stripe-count N] [--mirrors N] [--min-copies N]", "say how new files in a directory are laid out", runLayoutSet},
		{"layout move", "FILE|DIR --to DEVICE|local", "move the data of a file, or of all files below a directory, to a data server", runLayoutMove},
		{"prefetch", "PATH... [--mirror-to local|DEVICE] [--cache-size SIZE]", "copy files, and those below directories, to a data server of this host, to be read there", runPrefetch},
		{"evict", "PATH... [--from local|all|DEVICE]", "drop the copies that prefetch has made", runEvict},
		{"du", "DIR... [--bytes] [--json]", "show what is below directories, without looking for it", runDu},
		{"status", "[MOUNTPOINT] [--json]", "show how mounts, their metadata service and their data servers are", runStatus},
		{"top", "[MOUNTPOINT] [--once] [--every TIME]", "show live what a mount does, and how fast", runTop},
		{"trace", "[MOUNTPOINT] [--slow TIME] [--op OP,...] [--path GLOB] [--json]", "show requests as they are answered, and what each had to wait for", runTrace},
		{"doctor", "[MOUNTPOINT] [--report FILE]", "look for what is wrong with this host and its mounts, and say what to do", runDoctor},
		{"bench", "[DIR] [--time TIME] [--json]", "measure for two minutes what a directory's mount and each data server can do", runBench},
		{"nvme-policy", "MOUNTPOINT adaptive|numa|round-robin|queue-depth", "say how a mount chooses among several paths to NVMe namespaces", runPolicy},
		{"admin device add", "nfs://HOST:PORT/EXPORT|nvme://HOST:PORT[/NQN#NSID] [--force] [--server HOST[:PORT]]", "make a data server, or NVMe namespaces, part of the volume", runDeviceAdd},
		{"admin device drain", "DEVICE [--wait|--cancel] [--server HOST[:PORT]]", "move everything off a data server, which gets nothing new; DEVICE as ls shows it", runDeviceDrain},
		{"admin device remove", "DEVICE [--lost] [--server HOST[:PORT]]", "take a data server that is drained and empty out of the volume; DEVICE as ls shows it", runDeviceRemove},
		{"admin device ls", "[--server HOST[:PORT]] [--json]", "list the volume's data servers", runDeviceList},
		{"admin resilver", "[--server HOST[:PORT]]", "wait until no file has a copy that is to be made anew", runResilver},
		{"admin verify", "[DIR|FILE] [--repair] [--rate SIZE]", "compare the copies of mirrored files, while they are in use", runVerify},
		{"admin quota set", "DIR|--user USER|--group GROUP [--bytes SIZE] [--files N] [--server HOST[:PORT]]", "limit what there may be below a directory, or belong to a user or a group", runQuotaSet},
		{"admin quota get", "DIR|--user USER|--group GROUP [--server HOST[:PORT]] [--json]", "show what is used, and the limits", runQuotaGet},
		{"admin quota ls", "[--server HOST[:PORT]] [--json]", "list all quotas", runQuotaList},
		{"admin client set", "WHO(OPTION,...) [--force] [--server HOST[:PORT]]", "say what clients may do: a network, or those with a certificate", runClientSet},
		{"admin client rm", "WHO [--server HOST[:PORT]]", "take the rule for some clients away", runClientRemove},
		{"admin client ls", "[--server HOST[:PORT]] [--json]", "list the rules for clients, in the order in which they count", runClientList},
		{"admin meta ls", "[--server HOST[:PORT]] [--json]", "list the volume's metadata services, and which of its shards each of them has", runMetaList},
		{"admin meta drain", "HOST:PORT [--cancel] [--server HOST[:PORT]]", "have a metadata service give its shards to the others; HOST:PORT as ls shows it", runMetaDrain},
		{"join", "HOST[:PORT] --token-file FILE|--renew [--dir DIR]", "get this host's certificate from a certificate authority", runJoin},
		{"install", "[--prefix DIR] [--root DIR] [--remove]", "install the programs, what mount(8) calls, manual pages, completions and systemd units", runInstall},
		{"completion", "bash|zsh|fish", "print what a shell sources to complete weft's commands and options", runCompletion},
		{"version", "", "print the version", runVersion},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if helper := helperOf(filepath.Base(os.Args[0])); helper != nil {
		program = filepath.Base(os.Args[0])
		if os.Getenv("PATH") == "" { // mount(8) leaves nothing of the environment
			os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
		}
		err = helper.dispatch(ctx, os.Args[1:])
	} else {
		err = dispatch(ctx, os.Args[1:])
	}
	stop()
	os.Exit(exitCode(err))
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 {
		usage(os.Stderr)
		return &exitError{exitUsage, errors.New("which command?")}
	}
	switch args[0] {
	case "help", "--help", "-h":
		usage(os.Stdout)
		return nil
	case "--version":
		args = []string{"version"}
	}
	// The longest verb wins: "layout set DIR" before "layout FILE".
	var best *command
	words := 0
	for _, c := range commands {
		verb := strings.Fields(c.name)
		if len(verb) > words && len(args) >= len(verb) && strings.Join(args[:len(verb)], " ") == c.name {
			best, words = c, len(verb)
		}
	}
	if best == nil && strings.Contains(args[0], ":/") {
		return helpers[0].dispatch(ctx, args) // as mount.fuse(8) calls whatever type a FUSE file system has
	}
	if best == nil {
		return usagef("no command %q; there are %s; see weft --help", strings.Join(args, " "), verbs())
	}
	return best.dispatch(ctx, args[words:])
}

func (c *command) dispatch(ctx context.Context, args []string) error {
	err := c.run(ctx, c, args)
	if errors.Is(err, pflag.ErrHelp) {
		return nil
	}
	return err
}

// title is what one types.
func (c *command) title() string {
	if slices.Contains(helpers, c) {
		return c.name
	}
	return "weft " + c.name
}

func verbs() string {
	var names []string
	for _, c := range commands {
		names = append(names, c.name)
	}
	return strings.Join(names, ", ")
}

func usage(w *os.File) {
	fmt.Fprintf(w, "weft %s: a parallel file system client\n\nUsage:\n", version.String())
	for _, c := range commands {
		fmt.Fprintf(w, "  weft %s %s\n        %s\n", c.name, c.args, c.short)
	}
	fmt.Fprintf(w, "\n`weft COMMAND --help` shows a command's options and their defaults.\n")
}

// helpTo gets what --help would print, if it is not nil.
var helpTo func(fl *pflag.FlagSet, more string)

// flags makes the flag set of a command; more is printed by --help below the flags.
func (c *command) flags(more string) *pflag.FlagSet {
	fl := pflag.NewFlagSet(c.name, pflag.ContinueOnError)
	fl.SortFlags = false
	fl.Usage = func() {
		if helpTo != nil {
			helpTo(fl, more)
			return
		}
		fmt.Printf("Usage: %s %s\n\n%s.\n", c.title(), c.args, strings.ToUpper(c.short[:1])+c.short[1:])
		if fl.HasFlags() {
			fmt.Printf("\n%s", fl.FlagUsages())
		}
		fmt.Print(more)
	}
	return fl
}

// parse parses args and checks how many operands there are.
func (c *command) parse(fl *pflag.FlagSet, args []string, least, most int) error {
	if err := fl.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return usagef("%s: %v; see %s --help", c.name, err, c.title())
	}
	if n := fl.NArg(); n < least || n > most {
		return usagef("%s: %d operands given; usage: %s %s", c.name, n, c.title(), c.args)
	}
	return nil
}

func runVersion(_ context.Context, c *command, args []string) error {
	if err := c.parse(c.flags(""), args, 0, 0); err != nil {
		return err
	}
	fmt.Println("weft", version.String())
	return nil
}
