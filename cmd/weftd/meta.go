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
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/cluster"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/meta"
)

var defaultPort = strconv.Itoa(metarpc.DefaultPort)

func runMeta(ctx context.Context, c *command, args []string) error {
	fl := c.Flags("\nRuns until SIGTERM or SIGINT, which let requests that have begun end, and give what the service has to others if it shares a catalog.\n")
	dir := fl.String("dir", "", "directory for the catalog and for what the service keeps by itself, made if missing")
	name := fl.String("catalog", "", "catalog that several services can share, as URL : etcd://HOST:PORT[,HOST:PORT].../NAME or postgres://...; made if missing")
	advertise := fl.String("advertise", "", "address HOST:PORT at which clients and other services reach this one, on a shared catalog (default: that of --listen)")
	shards := fl.Int("shards", defaultShards, "shards of a volume that is made now on a shared catalog, among which its services divide the inodes")
	memberLease := fl.Duration("member-lease", cluster.DefaultLease, "on a shared catalog others take over from a service that is silent for so long")
	addr := fl.String("listen", ":"+defaultPort, "address HOST:PORT")
	servers := fl.StringArray("data-server", nil, "data server to add to the volume, HOST:PORT:/EXPORT (may be repeated)")
	secretFile := secretFlag(fl)
	lease := fl.Duration("lease", meta.DefaultLease, "how long a client that is silent keeps what it holds")
	rate := rateFlag(fl)
	exports := exportFlag(fl)
	nvme := discoveryFlag(fl)
	secret := newTLSFlags(fl).accepting().dialing("data servers and other metadata services")
	watching := newWatchFlags(fl)
	if err := parse(c, fl, args); err != nil {
		return err
	}
	where, err := metaCatalog(c, *dir, *name)
	if err != nil {
		return err
	}
	for _, flag := range []string{"advertise", "shards", "member-lease"} {
		if where.url == "" && fl.Changed(flag) {
			return usagef("meta: --%s is for a catalog that several services can share, which --catalog names", flag)
		}
	}
	if *shards < 1 || *shards > layout.MaxShards {
		return usagef("meta: --shards %d: want 1 to %d", *shards, layout.MaxShards)
	}
	urls := make([]string, len(*servers))
	for i, s := range *servers {
		url, err := deviceURL(s)
		if err != nil {
			return usagef("meta: --data-server %v", err)
		}
		urls[i] = url
	}
	client, err := secret.client()
	if err != nil {
		return err
	}
	if where.url != "" && secret.required && client == nil {
		return usagef("meta: --tls-required: the services of a shared catalog need it between them, too: say --xprtsec mtls")
	}
	secrets, err := readSecrets(*secretFile)
	if err != nil {
		return err
	}
	log, err := watching.log(c)
	if err != nil {
		return err
	}
	door, err := secret.door(log)
	if err != nil {
		return err
	}
	cfg := meta.Config{Lease: *lease, Resilver: int64(*rate), Exports: exports.rules, Door: door, Program: "weftd " + version.String()}
	files := datafile.Config{Dial: store.DialTLS(client), Secrets: secrets, Log: log, Discovery: *nvme, DiscoveryFile: discoveryFile(*dir)}
	l, err := listen(*addr, defaultPort)
	if err != nil {
		return err
	}
	var seen watch
	stop, err := seen.serve(watching, log)
	if err != nil {
		l.Close()
		return err
	}
	defer stop()
	if where.url != "" {
		return runCluster(ctx, clusterConfig{
			seen:    &seen,
			catalog: where, advertise: *advertise, shards: *shards, lease: *memberLease, urls: urls, log: log,
			files: files, meta: cfg, tls: client,
		}, l)
	}
	files.DiscoveryFile = discoveryFile(where.dir)
	m, err := openMeta(ctx, where.dir, files, cfg, log)
	if err != nil {
		l.Close()
		return err
	}
	seen.catalog(m.engine)
	seen.service(m.service, m.service)
	addDevices(m.ctx, m.files, urls, log)
	return m.run(ctx, l)
}

// metaCatalog is the catalog that --dir and --catalog name.
func metaCatalog(c *command, dir, name string) (catalogName, error) {
	if name == "" {
		if dir == "" {
			return catalogName{}, usagef("meta: --dir or --catalog is missing; usage: weftd meta %s", c.Args)
		}
		return catalogName{dir: dir}, nil
	}
	where, err := parseCatalog(name)
	if err != nil {
		return catalogName{}, usagef("meta: --catalog %v", err)
	}
	if where.dir != "" && dir != "" && where.dir != dir {
		return catalogName{}, usagef("meta: the catalog of --catalog %s is in its directory, not in --dir %s", name, dir)
	}
	return where, nil
}

// discoveryFile is where a service on a shared catalog remembers what NVMe discovery controllers have told, if it has a directory.
func discoveryFile(dir string) string {
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "nvme-discovery")
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
	copies  *checkpoints
	files   *datafile.Manager
	service *meta.Service
	ctx     context.Context // of the adding of data servers
	stop    context.CancelFunc
}

// openEngine opens the catalog in dir, which must exist already if mustExist.
func openEngine(dir string, mustExist bool, log *slog.Logger) (*pebble.Engine, error) {
	if !mustExist {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	engine, err := pebble.Open(pebble.Config{Dir: filepath.Join(dir, "catalog"), MustExist: mustExist, Reserve: true, Logger: log})
	if errors.Is(err, catalog.ErrLocked) {
		return nil, fmt.Errorf("%s: %w: %w", dir, errRunning, err)
	}
	return engine, err
}

// openMeta starts a service on the catalog in dir; files and cfg say all but what is there.
func openMeta(ctx context.Context, dir string, files datafile.Config, cfg meta.Config, log *slog.Logger) (*metaService, error) {
	engine, err := openEngine(dir, false, log)
	if err != nil {
		return nil, err
	}
	m := &metaService{log: log, engine: engine}
	m.ctx, m.stop = context.WithCancel(ctx)
	if m.copies, err = serveCheckpoints(dir, engine, log); err != nil {
		return nil, errors.Join(err, m.close())
	}
	volume, err := meta.OpenVolume(ctx, engine, layout.Policy{}, 1)
	if err == nil {
		files.Engine, files.Volume = engine, volume.ID
		m.files, err = datafile.New(files)
	}
	if err == nil {
		cfg.Engine, cfg.Files, cfg.Log = engine, m.files, log
		m.service, err = meta.New(ctx, cfg)
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

// addDevices makes data servers part of the volume, in the background until they answer or ctx ends.
func addDevices(ctx context.Context, files *datafile.Manager, urls []string, log *slog.Logger) {
	for _, url := range urls {
		go func() { // ends with success, or with ctx
			for wait := time.Second; ; wait = min(2*wait, time.Minute) {
				_, err := files.AddDevice(ctx, url, false)
				if err == nil || ctx.Err() != nil {
					return
				}
				log.Warn("cannot add data server, trying again", "url", url, "in", wait, "err", err)
				select {
				case <-time.After(wait):
				case <-ctx.Done():
				}
			}
		}()
	}
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
	if m.copies != nil {
		err = errors.Join(err, m.copies.close())
	}
	return errors.Join(err, m.engine.Close())
}
