package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
)

// Config says where the catalog is. Zero values mean the defaults given.
type Config struct {
	// URL is a connection URL as libpq has them, postgres://user@host:port,host:port/database?..., and may hold
	//
	//	weft_table      name of the catalog's table, default "weft"; several catalogs fit one database
	//	search_path     schema that the table is in, default that of the user
	//	pool_max_conns  most connections for commits and reads, default 24; snapshots have up to 16 more
	//
	// Of several hosts the one that accepts writes is used, so naming the standby too is all that a failover needs.
	URL string

	// MustExist makes Open fail with ErrNoCatalog instead of making an empty catalog.
	MustExist bool

	// SnapshotAge is how long a snapshot can be read. While one is open the server keeps all row versions since, so it should
	// not be much longer than a walk over everything takes. Default 10 minutes.
	SnapshotAge time.Duration

	// Logger gets changes of state. Default slog.Default().
	Logger *slog.Logger

	foldEvery  int           // for tests, which have not the time to come to the constants of these names
	sweepEvery time.Duration //
}

const (
	defaultTable       = "weft"
	defaultConns       = 24 // three services fit the 100 connections that PostgreSQL allows by default
	maxSnapshots       = 16
	defaultSnapshotAge = 10 * time.Minute

	connectTimeout = 5 * time.Second
	// A host that is gone without a word is noticed after about this time: by keep-alives, or as nothing sent is acknowledged.
	deadAfter = 10 * time.Second
	// How long the answer to a call may take whose context has ended and which the server has been asked to cancel.
	cancelPatience = 5 * time.Second
)

// tableName leaves room for what is appended to it in PostgreSQL's 63 bytes, and needs no quotes.
var tableName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// place is what a URL says.
type place struct {
	pool  *pgxpool.Config
	table string
	shown string // the URL without its password, for logs and errors
}

// parse takes cfg.URL apart.
func (c *Config) parse() (*place, error) {
	shown, err := shownURL(c.URL)
	if err != nil {
		return nil, err
	}
	p := &place{table: defaultTable, shown: shown}
	head, query, _ := strings.Cut(c.URL, "?")
	given := map[string]bool{}
	var rest []string // for the server, as it came
	for _, parameter := range strings.Split(query, "&") {
		name, value, _ := strings.Cut(parameter, "=")
		given[name] = true
		if name == "weft_table" {
			p.table = value
		} else if parameter != "" {
			rest = append(rest, parameter)
		}
	}
	if !tableName.MatchString(p.table) {
		return nil, fmt.Errorf("catalog %s: weft_table=%q: want up to 40 of a-z, 0-9 and _, the first no digit", shown, p.table)
	}
	if p.pool, err = pgxpool.ParseConfig(head + "?" + strings.Join(rest, "&")); err != nil {
		return nil, fmt.Errorf("catalog %s: %w", shown, err)
	}
	if !given["pool_max_conns"] {
		p.pool.MaxConns = defaultConns
	}
	p.pool.PingTimeout = connectTimeout
	cc := p.pool.ConnConfig
	if !given["connect_timeout"] {
		cc.ConnectTimeout = connectTimeout
	}
	if !given["target_session_attrs"] {
		cc.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	cc.DialFunc = dial
	cc.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: cancelPatience}
	}
	cc.OnNotice = notice
	p.pool.AfterConnect = settings
	return p, nil
}

// shownURL returns the URL without its password.
func shownURL(s string) (string, error) {
	scheme, rest, _ := strings.Cut(s, "://")
	if scheme != "postgres" && scheme != "postgresql" {
		return "", errors.New("a PostgreSQL catalog is named by a URL that begins with postgres://")
	}
	rest, _, _ = strings.Cut(rest, "?") // a password may be there as well
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, _ := strings.Cut(rest[:at], ":")
		rest = user + rest[at:]
	}
	return scheme + "://" + rest, nil
}

func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: deadAfter / 2, Interval: deadAfter / 10, Count: 5},
		Control: func(network, _ string, raw syscall.RawConn) error {
			if !strings.HasPrefix(network, "tcp") {
				return nil
			}
			var failed error
			err := raw.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(deadAfter/time.Millisecond))
			})
			return errors.Join(err, failed)
		},
	}
	return descriptors.Retry(func() (net.Conn, error) { return d.DialContext(ctx, network, addr) })
}

// settings prepares a new connection for the statements of this package.
//
// Plans are made once and kept, so they must be right for tables of any size: what could be chosen for a small table and
// is a disaster for a large one is turned off, which leaves the index. What the server or the role may have set
// otherwise, and this package relies on, is set. A server that should commit less than durably is overruled; remote_apply is
// more than weft needs and stays.
func settings(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, `SELECT set_config(name, value, false) FROM (VALUES
		('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'),
		('plan_cache_mode', 'force_generic_plan'), ('jit', 'off'),
		('default_transaction_isolation', 'read committed'), ('default_transaction_deferrable', 'off'),
		('statement_timeout', '0'), ('lock_timeout', '0'), ('idle_in_transaction_session_timeout', '0'),
		('tcp_keepalives_idle', '30'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '3'),
		('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply')
			THEN current_setting('synchronous_commit') ELSE 'on' END)
	) AS s(name, value)`)
	return err
}

// unreplicated is the key of a connection's data that is set while a commit's wait for the standby was given up.
const unreplicated = "weft.unreplicated"

// notice remembers the one warning that matters: the wait for the synchronous standby was cancelled, so what was committed
// is visible though the standby may not have it.
func notice(conn *pgconn.PgConn, n *pgconn.Notice) {
	if n.SeverityUnlocalized == "WARNING" {
		conn.CustomData()[unreplicated] = true
	}
}
