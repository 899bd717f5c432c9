package etcd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftfs/weft/server/catalog"
)

// Scheme begins the URL of a catalog in etcd, see [ParseURL].
const Scheme = "etcd"

// Config says where the catalog is. Zero values mean the defaults given.
type Config struct {
	// Endpoints are the members of the cluster, each as host:port. One that answers suffices.
	Endpoints []string

	// Prefix is what the keys of the catalog begin with, followed by a slash. Default "/weft". It begins with a slash and does
	// not end with one. Whatever is below it belongs to the catalog.
	Prefix string

	// MustExist makes Open fail with ErrNoCatalog instead of making an empty catalog.
	MustExist bool

	// MaxTxnOps and MaxRequestBytes are the cluster's --max-txn-ops and --max-request-bytes. Default 128 and 1.5 MiB, as etcd's.
	// Open fails if the cluster allows fewer operations.
	MaxTxnOps       int
	MaxRequestBytes int

	// Retention is how long old revisions are kept and snapshots can be read. Default 10 minutes. The engine has the cluster
	// compact what is older, unless NoCompaction says that the administrator of the cluster cares for that, and keeps as much.
	Retention    time.Duration
	NoCompaction bool

	// TLS, if set, makes connections use it.
	TLS *tls.Config

	// Username and Password log in if the cluster has authentication enabled.
	Username, Password string

	// Logger gets changes of state. Default slog.Default().
	Logger *slog.Logger

	wrap func(pb.KVClient) pb.KVClient // tests lose calls here
}

// Defaults, see Config.
const (
	defaultPrefix          = "/weft"
	defaultMaxTxnOps       = 128
	defaultMaxRequestBytes = 3 << 19
	defaultRetention       = 10 * time.Minute
)

const (
	// minTxnOps leaves room for the batch of one operation of the metadata service.
	minTxnOps = 128
	// minRequestBytes leaves room for the longest values that the service puts.
	minRequestBytes = 1 << 20
	maxPrefix       = 256
)

// Validate returns an error that names the first field out of range.
func (c *Config) Validate() error {
	switch {
	case len(c.Endpoints) == 0:
		return errors.New("etcd: Config.Endpoints is empty")
	case c.Prefix != "" && (c.Prefix[0] != '/' || strings.HasSuffix(c.Prefix, "/") || len(c.Prefix) > maxPrefix):
		return fmt.Errorf("etcd: Config.Prefix is %q, want a slash and at most %d bytes that do not end with one", c.Prefix, maxPrefix)
	case c.MaxTxnOps != 0 && c.MaxTxnOps < minTxnOps:
		return fmt.Errorf("etcd: Config.MaxTxnOps is %d, want %d or more: start the members with --max-txn-ops", c.MaxTxnOps, minTxnOps)
	case c.MaxRequestBytes != 0 && c.MaxRequestBytes < minRequestBytes:
		return fmt.Errorf("etcd: Config.MaxRequestBytes is %d, want %d or more: start the members with --max-request-bytes",
			c.MaxRequestBytes, minRequestBytes)
	case c.Retention < 0:
		return fmt.Errorf("etcd: Config.Retention is %v", c.Retention)
	}
	for _, endpoint := range c.Endpoints {
		if _, port, err := net.SplitHostPort(endpoint); err != nil || port == "" {
			return fmt.Errorf("etcd: endpoint %q, want host:port", endpoint)
		}
	}
	return nil
}

// withDefaults returns c with every zero value replaced.
func (c Config) withDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = defaultPrefix
	}
	if c.MaxTxnOps == 0 {
		c.MaxTxnOps = defaultMaxTxnOps
	}
	if c.MaxRequestBytes == 0 {
		c.MaxRequestBytes = defaultMaxRequestBytes
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// caps returns the limits of a catalog with this configuration, which has its defaults.
func (c *Config) caps() catalog.Caps {
	// A request repeats the keys of guards and deltas, and counter rows, up to three times: with the longest keys that are some
	// 400 KiB for as many as default limits allow.
	bytes := c.MaxRequestBytes - min(512<<10, c.MaxRequestBytes/2)
	return catalog.Caps{
		MaxBatchBytes:  bytes,
		MaxKeys:        c.MaxTxnOps - reservedOps,
		MaxValue:       bytes / 2, // the row that is put, and the guard on what it was
		MaxSnapshotAge: c.Retention,
	}
}

// ParseURL returns the configuration that a URL means:
//
//	etcd://[user[:password]@]host:port[,host:port...][/prefix][?parameter=value[&...]]
//
// Parameters are max-txn-ops, max-request-bytes, retention (as 10m; 0 leaves compaction to the administrator, who keeps 10
// minutes or more), and tls=1, by which members are asked for certificates that this machine trusts.
func ParseURL(s string) (Config, error) {
	// url.Parse takes no list of hosts, so they are looked at apart from the rest.
	rest, ok := strings.CutPrefix(s, Scheme+"://")
	if !ok {
		return Config{}, fmt.Errorf("etcd: %q does not begin with %s://", s, Scheme)
	}
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	hosts, rest := rest[:end], rest[end:]
	var user string
	if at := strings.LastIndexByte(hosts, '@'); at >= 0 {
		user, hosts = hosts[:at+1], hosts[at+1:]
	}
	u, err := url.Parse(Scheme + "://" + user + "host" + rest)
	if err != nil {
		return Config{}, fmt.Errorf("etcd: %w", err)
	}
	c := Config{Endpoints: strings.Split(hosts, ","), Prefix: strings.TrimRight(u.Path, "/")}
	c.Username = u.User.Username()
	c.Password, _ = u.User.Password()
	parameters, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Config{}, fmt.Errorf("etcd: parameters %q: %w", u.RawQuery, err)
	}
	for name, values := range parameters {
		value := values[len(values)-1]
		switch name {
		case "max-txn-ops":
			c.MaxTxnOps, err = strconv.Atoi(value)
		case "max-request-bytes":
			c.MaxRequestBytes, err = strconv.Atoi(value)
		case "retention":
			c.Retention, err = time.ParseDuration(value)
			c.NoCompaction = c.Retention == 0
		case "tls":
			var wanted bool
			if wanted, err = strconv.ParseBool(value); wanted {
				c.TLS = new(tls.Config)
			}
		default:
			err = errors.New("there is no such parameter")
		}
		if err != nil {
			return Config{}, fmt.Errorf("etcd: %s=%s: %w", name, value, err)
		}
	}
	return c, c.Validate()
}
