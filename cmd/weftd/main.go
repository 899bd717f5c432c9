package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/version"
)

// Exit codes of weftd; those of fsck are in fsck.go.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

type command struct {
	name, args, short string
	run               func(ctx context.Context, c *command, args []string) error
}

var commands []*command

func init() {
	commands = []*command{
		{"meta", "--dir DIR|--catalog URL [--listen ADDR] [--data-server HOST:PORT:/EXPORT]... [--export RULE]...", "run the metadata service of a volume", runMeta},
		{"data", "--dir DIR[,DIR...] --listen ADDR[,ADDR...]", "run NFSv3 data servers, one for each directory and address", runData},
		{"single", "--dir DIR [--data-servers N] [--listen ADDR]", "run a metadata service and data servers on one machine", runSingle},
		{"fsck", "--dir DIR | --catalog CATALOG [--repair | --online [--rate N]] [--json]", "check a volume, which its services do not use meanwhile, or with --online do", runFsck},
		{"catalog export", "--from CATALOG --to FILE", "write the catalog of a volume that no service uses to a file, to be imported elsewhere", runExport},
		{"catalog backup", "--from CATALOG --to FILE", "write the catalog of a volume to a file while its services run", runBackup},
		{"catalog import", "--from FILE --to CATALOG [--shards N]", "make a catalog of what was exported or backed up", runImport},
		{"ca init", "--dir DIR [--name NAME]", "make a private certificate authority", runCAInit},
		{"ca issue", "--dir DIR --name NAME [--host HOST]... --out DIR [--life TIME]", "make a key and a certificate: of a client, or with --host of a service", runCAIssue},
		{"ca renew", "--dir DIR --out DIR [--life TIME]", "replace the certificate in a directory by one that is good for longer", runCARenew},
		{"ca revoke", "--dir DIR --name NAME|SERIAL", "revoke certificates, by their name or serial number", runCARevoke},
		{"ca token", "--dir DIR --name NAME [--host HOST]... [--out FILE] [--good TIME] [--life TIME]", "make a token by which one host can join", runCAToken},
		{"ca serve", "--dir DIR [--listen HOST:PORT]", "give certificates to hosts that join, and to those that have one the next", runCAServe},
		{"ca ls", "--dir DIR", "list the certificates of a certificate authority", runCAList},
		{"version", "", "print the version", runVersion},
	}
}

func main() {
	// The first signal lets requests that have begun end; a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(exitCode(dispatch(ctx, os.Args[1:])))
}

// oneLine is the message of err; errors that are joined are on lines of their own otherwise.
func oneLine(err error) string { return filename.Escape(strings.ReplaceAll(err.Error(), "\n", "; ")) }

func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	var found exitStatus
	if errors.As(err, &found) {
		return int(found)
	}
	fmt.Fprintf(os.Stderr, "weftd: %s\n", oneLine(err))
	if errors.As(err, new(usageError)) {
		return exitUsage
	}
	return exitFailed
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 {
		usage(os.Stderr)
		return usagef("which command?")
	}
	switch args[0] {
	case "help", "--help", "-h":
		usage(os.Stdout)
		return nil
	case "--version":
		args[0] = "version"
	case "manual": // for weft install
		return runManual(args[1:])
	}
	var names []string
	for _, c := range commands {
		verb := strings.Fields(c.name)
		if len(args) >= len(verb) && slices.Equal(args[:len(verb)], verb) {
			err := c.run(ctx, c, args[len(verb):])
			if errors.Is(err, pflag.ErrHelp) {
				return nil
			}
			return err
		}
		names = append(names, c.name)
	}
	return usagef("no command %q; there are %s; see weftd --help", strings.Join(args, " "), strings.Join(names, ", "))
}

func usage(w *os.File) {
	fmt.Fprintf(w, "weftd %s: the servers of the weft parallel file system\n\nUsage:\n", version.String())
	for _, c := range commands {
		fmt.Fprintf(w, "  weftd %s %s\n        %s\n", c.name, c.args, c.short)
	}
	fmt.Fprintf(w, "\n`weftd COMMAND --help` shows a command's options and their defaults.\n")
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
		fmt.Printf("Usage: weftd %s %s\n\n%s.\n", c.name, c.args, strings.ToUpper(c.short[:1])+c.short[1:])
		if fl.HasFlags() {
			fmt.Printf("\n%s", fl.FlagUsages())
		}
		fmt.Print(more)
	}
	return fl
}

// parse parses args; no command takes operands, and the flags named in required must be given.
func (c *command) parse(fl *pflag.FlagSet, args []string, required ...string) error {
	if err := fl.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return usagef("%s: %v; see weftd %s --help", c.name, err, c.name)
	}
	if fl.NArg() > 0 {
		return usagef("%s: %q is not an option; usage: weftd %s %s", c.name, fl.Arg(0), c.name, c.args)
	}
	for _, name := range required {
		if !fl.Changed(name) {
			return usagef("%s: --%s is missing; usage: weftd %s %s", c.name, name, c.name, c.args)
		}
	}
	return nil
}

func runVersion(_ context.Context, c *command, args []string) error {
	if err := c.parse(c.flags(""), args); err != nil {
		return err
	}
	fmt.Println("weftd", version.String())
	return nil
}

// listen listens on HOST:PORT, :PORT or HOST.
func listen(addr string, defaultPort string) (net.Listener, error) {
	full := addr
	if _, _, err := net.SplitHostPort(addr); err != nil {
		full = net.JoinHostPort(strings.Trim(addr, "[]"), defaultPort)
	}
	l, err := net.Listen("tcp", full)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("listen on %s: address already in use: choose another with --listen", addr)
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w (want HOST:PORT)", addr, err)
	}
	return l, nil
}
