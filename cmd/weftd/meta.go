package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/catalog"
	"github.com/weftfs/weft/server/meta/catalog/pebble"
	"github.com/weftfs/weft/server/meta/datafile"
	"github.com/weftfs/weft/server/meta/datafile/store"
)

var defaultPort = strconv.Itoa(metarpc.DefaultPort)

func runMeta(ctx context.Context, c *command, args []string) error {
	fl := c.flags("\nRuns until SIGTERM or SIGINT, which let requests that have begun end.\n")
	dir := fl.String("dir", "", "directory for the catalog, made if missing")
	addr := fl.String("listen", ":"+defaultPort, "address HOST:PORT")
	servers := fl.StringArray("data-server", nil, "data server to add to the volume, HOST:PORT:/EXPORT (may be repeated)")
	lease := fl.Duration("lease", meta.DefaultLease, "how long a client that is silent keeps what it holds")
	rate := rateFlag(fl)
	exports := exportFlag(fl)
	nvme := discoveryFlag(fl)
	dialer := dialFlags(fl)
	verbose := fl.BoolP("verbose", "v", false, "log more")
	if err := c.parse(fl, args, "dir"); err != nil {
		return err
	}
	urls := make([]string, len(*servers))
	for i, s := range *servers {
		url, err := deviceURL(s)
		if err != nil {
			return usagef("meta: --data-server %v", err)
		}
		urls[i] = url
	}
	dial, err := dialer()
	if err != nil {
		return err
	}
	log := newLog(*verbose)
	l, err := listen(*addr, defaultPort)
	if err != nil {
		return err
	}
	m, err := openMeta(ctx, *dir, *lease, int64(*rate), exports.rules, *nvme, dial, log)
	if err != nil {
		l.Close()
		return err
	}
	for _, url := range urls {
		m.add(url)
	}
	return m.run(ctx, l)
}

// deviceURL turns HOST:PORT:/EXPORT into a URL.
func deviceURL(s string) (string, error) {
	at, export, ok := strings.Cut(s, ":/")
	if host, port, err := net.SplitHostPort(at); !ok || err != nil || host == "" || port == "" {
		return "", fmt.Errorf("%q: want HOST:PORT:/EXPORT", s)
	}
	return "nfs://" + at + "/" + export, nil
}

// metaService is a metadata service with what it stands on.
type metaService struct {
	log     *slog.Logger
	engine  catalog.Engine
	files   *datafile.Manager
	service *meta.Service
	ctx     context.Context // of the adding of data servers
	stop    context.CancelFunc
}

// openEngine opens the catalog in dir, which must exist already if mustExist.
func openEngine(dir string, mustExist bool, log *slog.Logger) (catalog.Engine, error) {
	if !mustExist {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	engine, err := pebble.Open(pebble.Config{Dir: filepath.Join(dir, "catalog"), MustExist: mustExist, Logger: log})
	if errors.Is(err, catalog.ErrLocked) {
		return nil, fmt.Errorf("%s: another weftd runs on this directory: %w", dir, err)
	}
	return engine, err
}

func openMeta(ctx context.Context, dir string, lease time.Duration, resilver int64, exports []meta.Export, nvme discovery, dial store.Dialer, log *slog.Logger) (*metaService, error) {
	engine, err := openEngine(dir, false, log)
	if err != nil {
		return nil, err
	}
	m := &metaService{log: log, engine: engine}
	m.ctx, m.stop = context.WithCancel(ctx)
	volume, err := meta.OpenVolume(ctx, engine, layout.Policy{})
	if err == nil {
		m.files, err = datafile.New(datafile.Config{
			Engine: engine, Volume: volume.ID, Dial: dial, Log: log, Discovery: nvme, DiscoveryFile: filepath.Join(dir, "nvme-discovery"),
		})
	}
	if err == nil {
		m.service, err = meta.New(ctx, meta.Config{
			Engine: engine, Files: m.files, Log: log, Lease: lease, Resilver: resilver, Exports: exports, Program: "weftd " + version.String(),
		})
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// add makes a data server part of the volume, in the background until it answers.
func (m *metaService) add(url string) {
	go func() { // ends with success, or with the service
		for wait := time.Second; ; wait = min(2*wait, time.Minute) {
			_, err := m.files.AddDevice(m.ctx, url, false)
			if err == nil || m.ctx.Err() != nil {
				return
			}
			m.log.Warn("cannot add data server, trying again", "url", url, "in", wait, "err", err)
			select {
			case <-time.After(wait):
			case <-m.ctx.Done():
			}
		}
	}()
}

// run serves on l until ctx ends.
func (m *metaService) run(ctx context.Context, l net.Listener) error {
	m.log.Info("metadata service ready", "addr", l.Addr(), "version", version.String())
	served := make(chan error, 1)
	go func() { served <- m.service.Serve(l) }() // ends at Shutdown
	var err error
	select {
	case <-ctx.Done():
	case err = <-served:
	}
	return errors.Join(err, m.close())
}

func (m *metaService) close() error {
	m.stop()
	var err error
	if m.service != nil {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
		err = m.service.Shutdown(ctx)
		cancel()
	}
	if m.files != nil {
		err = errors.Join(err, m.files.Close())
	}
	return errors.Join(err, m.engine.Close())
}
