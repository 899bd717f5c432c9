package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/server/data"
)

// shutdownTime is how long requests that have begun may take to end.
const shutdownTime = 20 * time.Second

func runData(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nEach directory is exported as / at the address of the same place in the list. Clients and the metadata\n" +
		"service need no port mapper. Runs until SIGTERM or SIGINT, which let requests that have begun end. It tells its clients, which wait for it, for 5 s at most.\n")
	dirs := fl.StringSlice("dir", nil, "directories for data files, made if missing")
	addrs := fl.StringSlice("listen", nil, "addresses HOST:PORT, as many as directories")
	ioMode := ioFlag(fl)
	local := localFlag(fl)
	secret := newTLSFlags(fl).accepting()
	watching := newWatchFlags(fl)
	if err := parse(c, fl, args, "dir", "listen"); err != nil {
		return err
	}
	io, err := data.ParseIO(*ioMode)
	if err != nil {
		return usagef("data: --io: %v", err)
	}
	lend, err := data.ParseLocal(*local)
	if err != nil {
		return usagef("data: --localio: %v", err)
	}
	servers := dataServers{io: io, local: lend, required: secret.required}
	if servers.tls, err = secret.server(); err != nil {
		return err
	}
	if len(*dirs) == 0 || len(*dirs) != len(*addrs) {
		return usagef("data: %d directories and %d addresses: give one address for each directory", len(*dirs), len(*addrs))
	}
	log, err := watching.log(c)
	if err != nil {
		return err
	}
	for i, dir := range *dirs {
		l, err := listen((*addrs)[i], "2049")
		if err == nil {
			err = servers.start(dir, l, log)
		}
		if err != nil {
			return errors.Join(err, servers.stop())
		}
		log.Info("data server ready", "dir", dir, "addr", l.Addr())
	}
	stop, err := servers.seen.serve(watching, log)
	if err != nil {
		return errors.Join(err, servers.stop())
	}
	defer stop()
	return servers.run(ctx)
}

func ioFlag(fl *pflag.FlagSet) *string {
	return fl.String("io", data.IOAuto.String(), "how data files are read and written: direct (past the page cache, with O_DIRECT), buffered, or auto:\n"+
		"large requests direct if the file system can, the rest buffered")
}

func localFlag(fl *pflag.FlagSet) *string {
	return fl.String("localio", data.LocalRW.String(), "what clients on this host may do by descriptors of data files, without RPC: rw (read and write), ro (read), or off.\n"+
		"A client that does not answer any more cannot be fenced while it has descriptors to write by")
}

// dataServers are the data servers of this process, and its namespaces.
type dataServers struct {
	io       data.IO
	local    data.Local
	list     []*data.Server
	failed   chan error     // of those that stopped serving by themselves
	tls      *rpctls.Server // nil = none is offered
	required bool

	namespaces namespaces
	seen       watch
}

// start serves dir on l.
func (d *dataServers) start(dir string, l net.Listener, log *slog.Logger) error {
	s, err := data.Open(data.Config{Dir: dir, IO: d.io, Local: d.local, Log: log, TLS: d.tls, RequireTLS: d.required})
	if err != nil {
		l.Close()
		return err
	}
	if d.failed == nil {
		d.failed = make(chan error, 1)
	}
	d.list = append(d.list, s)
	d.seen.server(dir, s)
	go func() { // ends at Shutdown
		if err := s.Serve(l); err != nil {
			select {
			case d.failed <- fmt.Errorf("data server %s: %w", dir, err):
			default: // one is enough to stop
			}
		}
	}()
	return nil
}

// run waits for the end.
func (d *dataServers) run(ctx context.Context) error {
	var err error
	select {
	case <-ctx.Done():
	case err = <-d.failed:
	}
	return errors.Join(err, d.stop())
}

func (d *dataServers) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	errs := make(chan error)
	for _, s := range d.list {
		go func() { errs <- s.Shutdown(ctx) }()
	}
	err := d.namespaces.stop(ctx)
	for range d.list {
		err = errors.Join(err, <-errs)
	}
	d.list = nil
	return err
}
