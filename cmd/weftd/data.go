package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/weftfs/weft/server/data"
)

// shutdownTime is how long requests that have begun may take to end.
const shutdownTime = 20 * time.Second

func runData(ctx context.Context, c *command, args []string) error {
	fl := c.flags("\nEach directory is exported as / at the address of the same place in the list. Clients and the metadata\n" +
		"service need no port mapper. Runs until SIGTERM or SIGINT, which let requests that have begun end.\n")
	dirs := fl.StringSlice("dir", nil, "directories for data files, made if missing")
	addrs := fl.StringSlice("listen", nil, "addresses HOST:PORT, as many as directories")
	verbose := fl.BoolP("verbose", "v", false, "log more")
	if err := c.parse(fl, args, "dir", "listen"); err != nil {
		return err
	}
	if len(*dirs) == 0 || len(*dirs) != len(*addrs) {
		return usagef("data: %d directories and %d addresses: give one address for each directory", len(*dirs), len(*addrs))
	}
	log := newLog(*verbose)
	var servers dataServers
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
	return servers.run(ctx)
}

// dataServers are the data servers of this process.
type dataServers struct {
	list   []*data.Server
	failed chan error // of those that stopped serving by themselves
}

// start serves dir on l.
func (d *dataServers) start(dir string, l net.Listener, log *slog.Logger) error {
	s, err := data.Open(data.Config{Dir: dir, Log: log})
	if err != nil {
		l.Close()
		return err
	}
	if d.failed == nil {
		d.failed = make(chan error, 1)
	}
	d.list = append(d.list, s)
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
	var err error
	for range d.list {
		err = errors.Join(err, <-errs)
	}
	d.list = nil
	return err
}
