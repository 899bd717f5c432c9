package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/version"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/cluster"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/meta"
)

// defaultShards is how many shards a volume gets that is made on a catalog which several services can share: more than there will be services, so
// that each can have about as many as the others.
const defaultShards = 16

// clusterConfig is what a process works with that serves a volume with others.
type clusterConfig struct {
	catalog   catalogName
	advertise string // HOST:PORT; empty = by the listener
	shards    int    // of a volume that is made now
	lease     time.Duration
	urls      []string         // data servers to add
	files     datafile.Config  // without what differs between incarnations
	meta      meta.Config      // without what differs between shards
	tls       *rpctls.Client   // for connections to other members; nil = in clear text
	peers     metarpc.Versions // see cluster.Config.SpeaksToPeers
	log       *slog.Logger
	seen      *watch
}

// advertised is the address that others are told of a listener.
func advertised(l net.Listener) (string, error) {
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("the name of this host, which clients and other services would be told: %w; say it with --advertise", err)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// runCluster serves a volume with others until ctx ends. It closes l.
func runCluster(ctx context.Context, cfg clusterConfig, l net.Listener) (err error) {
	defer l.Close()
	if cfg.advertise == "" {
		if cfg.advertise, err = advertised(l); err != nil {
			return err
		}
	}
	engine, err := openCatalog(ctx, cfg.catalog, false, cfg.log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	volume, err := meta.OpenVolume(ctx, engine, layout.Policy{}, cfg.shards)
	if err != nil {
		return err
	}
	cfg.seen.catalog(engine)
	cfg.files.Volume = volume.ID
	host, err := os.Hostname()
	if err != nil {
		host = "" // it is for people only
	}
	node, err := cluster.Start(ctx, cluster.Config{
		Engine: engine, Address: cfg.advertise, Host: host, Program: "weftd " + version.String(), Lease: cfg.lease, Log: cfg.log,
		Speaks: cfg.meta.Speaks, SpeaksToPeers: cfg.peers, Door: cfg.meta.Door, TLS: cfg.tls,
		Open: func(_ context.Context, in *cluster.Incarnation) (cluster.Host, error) {
			return cfg.host(in, volume.ShardCount())
		},
	})
	if err != nil {
		return err
	}
	cfg.log.Info("metadata service ready", "addr", l.Addr(), "advertise", cfg.advertise, "catalog", cfg.catalog, "version", version.String())
	served := make(chan error, 1)
	go func() { served <- node.Serve(l) }() // ends with the node
	select {
	case <-ctx.Done():
	case err = <-served:
	}
	leaving, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	return errors.Join(err, node.Leave(leaving))
}

// clusterHost makes the services of one incarnation.
type clusterHost struct {
	cfg    *clusterConfig
	in     *cluster.Incarnation
	shards int
	files  *datafile.Manager // nil: each service has its own
	ctx    context.Context   // of the adding of data servers
	stop   context.CancelFunc
}

func (cfg *clusterConfig) host(in *cluster.Incarnation, shards int) (*clusterHost, error) {
	h := &clusterHost{cfg: cfg, in: in, shards: shards}
	h.ctx, h.stop = context.WithCancel(context.Background())
	if shards == 1 { // there may be namespaces, which only one Manager at a time can look after
		return h, nil
	}
	files := cfg.files
	files.Engine, files.Member, files.Alive = in.Engine, in.ID, in.Alive
	files.Collects = func(id layout.DeviceID) bool { return in.Has(int(binary.BigEndian.Uint32(id[:])) % shards) }
	var err error
	if h.files, err = datafile.New(files); err != nil {
		h.stop()
		return nil, err
	}
	addDevices(h.ctx, h.files, cfg.urls, cfg.log)
	return h, nil
}

// Service implements [cluster.Host].
func (h *clusterHost) Service(ctx context.Context, shard int, row []byte, engine catalog.Engine) (cluster.Service, error) {
	files := h.files
	if files == nil {
		only := h.cfg.files
		only.Engine, only.Alive = engine, h.in.Alive
		var err error
		if files, err = datafile.New(only); err != nil {
			return nil, err
		}
	}
	c := h.cfg.meta
	c.Engine, c.Files, c.Log = engine, files, h.cfg.log.With("shard", shard)
	c.Resilver = (c.Resilver + int64(h.shards) - 1) / int64(h.shards)
	c.Shard, c.Row, c.Alive, c.Ring, c.Peers, c.Members = shard, row, h.in.Alive, h.in.Ring, h.in.Peers, h.in.Members
	svc, err := meta.New(ctx, c)
	switch {
	case err != nil && h.files == nil:
		return nil, errors.Join(err, files.Close())
	case err != nil:
		return nil, err
	case h.files != nil:
		return h.cfg.seen.service(svc, svc), nil
	}
	s := &onlyService{Service: svc, files: files}
	s.ctx, s.stop = context.WithCancel(h.ctx)
	addDevices(s.ctx, files, h.cfg.urls, h.cfg.log)
	return h.cfg.seen.service(svc, s), nil
}

// Close implements [cluster.Host].
func (h *clusterHost) Close() error {
	h.stop()
	if h.files == nil {
		return nil
	}
	return h.files.Close()
}

// onlyService is the service of a volume's only shard, with what it stands on.
type onlyService struct {
	*meta.Service
	files *datafile.Manager
	ctx   context.Context // of the adding of data servers
	stop  context.CancelFunc
	once  sync.Once
}

// Shutdown implements [cluster.Service].
func (s *onlyService) Shutdown(ctx context.Context) error {
	s.stop()
	err := s.Service.Shutdown(ctx)
	s.once.Do(func() { err = errors.Join(err, s.files.Close()) })
	return err
}
