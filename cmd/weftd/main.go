package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/cli"
	"github.com/weftfs/weft/internal/version"
)

// Exit codes of weftd; those of fsck are in fsck.go.
const (
	exitFailed = 1
	exitUsage  = 2
)

func usagef(format string, args ...any) error { return cli.Usagef(format, args...) }

type command = cli.Command

var program *cli.Program

func init() {
	program = cli.New("weftd", "the servers of the weft parallel file system", exitUsage, exitFailed, []*command{
		{Name: "meta", Args: "--dir DIR|--catalog URL [--listen ADDR] [--data-server HOST:PORT:/EXPORT]... [--export RULE]...", Short: "run the metadata service of a volume", Run: runMeta},
		{Name: "data", Args: "--dir DIR[,DIR...] --listen ADDR[,ADDR...]", Short: "run NFSv3 data servers, one for each directory and address", Run: runData},
		{Name: "single", Args: "--dir DIR [--data-servers N] [--listen ADDR]", Short: "run a metadata service and data servers on one machine", Run: runSingle},
		{Name: "fsck", Args: "--dir DIR | --catalog CATALOG [--repair | --online [--rate N]] [--json]", Short: "check a volume, which its services do not use meanwhile, or with --online do", Run: runFsck},
		{Name: "catalog export", Args: "--from CATALOG --to FILE", Short: "write the catalog of a volume that no service uses to a file, to be imported elsewhere", Run: runExport},
		{Name: "catalog backup", Args: "--from CATALOG --to FILE", Short: "write the catalog of a volume to a file while its services run", Run: runBackup},
		{Name: "catalog import", Args: "--from FILE --to CATALOG [--shards N]", Short: "make a catalog of what was exported or backed up", Run: runImport},
		{Name: "ca init", Args: "--dir DIR [--name NAME]", Short: "make a private certificate authority", Run: runCAInit},
		{Name: "ca issue", Args: "--dir DIR --name NAME [--host HOST]... --out DIR [--life TIME]", Short: "make a key and a certificate: of a client, or with --host of a service", Run: runCAIssue},
		{Name: "ca renew", Args: "--dir DIR --out DIR [--life TIME]", Short: "replace the certificate in a directory by one that is good for longer", Run: runCARenew},
		{Name: "ca revoke", Args: "--dir DIR --name NAME|SERIAL", Short: "revoke certificates, by their name or serial number", Run: runCARevoke},
		{Name: "ca token", Args: "--dir DIR --name NAME [--host HOST]... [--out FILE] [--good TIME] [--life TIME]", Short: "make a token by which one host can join", Run: runCAToken},
		{Name: "ca serve", Args: "--dir DIR [--listen HOST:PORT]", Short: "give certificates to hosts that join, and to those that have one the next", Run: runCAServe},
		{Name: "ca ls", Args: "--dir DIR", Short: "list the certificates of a certificate authority", Run: runCAList},
		{Name: "version", Args: "", Short: "print the version", Run: runVersion},
	})
}

func main() {
	// The first signal lets requests that have begun end; a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(program.ExitCode(dispatch(ctx, os.Args[1:])))
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "manual" { // for weft install
		return runManual(args[1:])
	}
	return program.Run(ctx, args)
}

// parse parses args; no command takes operands, and the flags named in required must be given.
func parse(c *command, fl *pflag.FlagSet, args []string, required ...string) error {
	if err := c.Parse(fl, args); err != nil {
		return err
	}
	if fl.NArg() > 0 {
		return usagef("%s: %q is not an option; usage: %s %s", c.Name, fl.Arg(0), c.Title(), c.Args)
	}
	for _, name := range required {
		if !fl.Changed(name) {
			return usagef("%s: --%s is missing; usage: %s %s", c.Name, name, c.Title(), c.Args)
		}
	}
	return nil
}

func runVersion(_ context.Context, c *command, args []string) error {
	if err := parse(c, c.Flags(""), args); err != nil {
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
