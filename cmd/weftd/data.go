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
	"github.com/weftfs/weft/server/meta/datafile/store"
)

// shutdownTime is how long requests that have begun may take to end.
const shutdownTime = 20 * time.Second

func runData(ctx context.Context, c *command, args []string) error {
	fl := c.flags("\nEach directory is exported as / at the address of the same place in the list. Clients and the metadata\n" +
		"service need no port mapper. Runs until SIGTERM or SIGINT, which let requests that have begun end.\n")
	dirs := fl.StringSlice("dir", nil, "directories for data files, made if missing")
	addrs := fl.StringSlice("listen", nil, "addresses HOST:PORT, as many as directories")
	ioMode := ioFlag(fl)
	local := localFlag(fl)
	files := tlsFlags(fl, "certificates that sign those of clients: every client that asks for TLS needs one then")
	require := fl.Bool("tls-required", false, "refuse clients that do not ask for TLS")
	watching := newWatchFlags(fl)
	if err := c.parse(fl, args, "dir", "listen"); err != nil {
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
	if *require && files.Cert == "" {
		return usagef("data: --tls-required needs --tls-cert and --tls-key")
	}
	servers := dataServers{io: io, local: lend, required: *require}
	if *files != (rpctls.Files{}) {
		if servers.tls, err = rpctls.NewServer(*files); err != nil {
			return usagef("data: %v", err)
		}
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

// tlsFlags adds the flags that name certificates.
func tlsFlags(fl *pflag.FlagSet, ca string) *rpctls.Files {
	f := new(rpctls.Files)
	fl.StringVar(&f.Cert, "tls-cert", "", "PEM file of this server's certificate, with what leads from it to the CA")
	fl.StringVar(&f.Key, "tls-key", "", "PEM file of the key that belongs to it")
	fl.StringVar(&f.CA, "tls-ca", "", "PEM file of "+ca)
	fl.StringVar(&f.CRL, "tls-crl", "", "PEM file of certificates that are revoked, which need not exist yet")
	return f
}

// dialFlags adds the flags for connections to data servers. The function that it returns makes the dialer of them.
func dialFlags(fl *pflag.FlagSet) func() (store.Dialer, error) {
	policy := fl.String("xprtsec", string(rpctls.None), "connections to data servers: none, tls or mtls (RFC 9289)")
	files := tlsFlags(fl, "the certificates that sign those of data servers (default: the system's)")
	return func() (store.Dialer, error) {
		secret, err := rpctls.NewClient(rpctls.Policy(*policy), *files)
		if err != nil {
			return nil, usagef("%v", err)
		}
		return store.DialTLS(secret), nil
	}
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
