package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/etcd"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/catalog/postgres"
	"github.com/weftfs/weft/server/schema"
)

const (
	rawEngine   = "the engine alone"
	rpcSessions = 64 // each with a directory of its own
	rpcTime     = 3 * time.Second
)

// engineUnderTest starts an engine's server, should it have one, and says how weftd and this program open catalogs in it, each by another name.
type engineUnderTest func(l *lab) (weftd func(name string) []string, open func(name string) (catalog.Engine, error), end func() error, err error)

// rpcCreates measures creates of 64 sessions, without mounts, against commits of the same batches, by as many callers, to the engine.
func rpcCreates(engine engineUnderTest) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		weftd, open, end, err := engine(l)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, end()) }()
		dir := filepath.Join(l.disk, "mdrpc")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		v, err := l.weftd(nil, append([]string{"meta", "--dir", filepath.Join(dir, "weftd")}, weftd("volume")...)...)
		if err != nil {
			return f, err
		}
		f.weft, err = sessionCreates(v.addr)
		if err := errors.Join(err, v.srv.stop()); err != nil {
			return f, err
		}
		raw, err := open("raw")
		if err != nil {
			return f, err
		}
		f.baseline, err = engineCreates(raw)
		return f, errors.Join(err, raw.Close())
	}
}

// perSecond has 64 callers call do for a while, each with its number and how often it has called.
func perSecond(do func(ctx context.Context, caller, i int) error) (float64, error) {
	var done atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, rpcSessions)
	start := time.Now()
	for caller := range rpcSessions {
		wg.Go(func() { // ends after rpcTime
			for i := 0; time.Since(start) < rpcTime; i++ {
				if err := do(context.Background(), caller, i); err != nil {
					errs <- err
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	close(errs)
	return float64(done.Load()) / took, <-errs
}

// sessionCreates creates files, and lets go of them, in a session and a directory for each caller.
func sessionCreates(addr string) (rate float64, err error) {
	ctx := context.Background()
	cred := metarpc.Cred{}
	var clients []*metaclient.Volume
	var dirs []layout.FileID
	defer func() {
		for _, c := range clients {
			err = errors.Join(err, c.Close(ctx))
		}
	}()
	for i := range rpcSessions {
		info := metarpc.ClientInfo{Host: "bench", PID: os.Getpid(), Program: "bench", Mount: fmt.Sprint("session ", i)}
		rand.Read(info.ID[:])
		c, err := metaclient.Dial(ctx, metaclient.Config{Addrs: []string{addr}, Client: info, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			return 0, err
		}
		clients = append(clients, c)
		d, err := c.MakeNode(ctx, cred, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: fmt.Sprint("d", i), Mode: syscall.S_IFDIR | 0o755})
		if err != nil {
			return 0, err
		}
		dirs = append(dirs, d.Attr.ID)
	}
	return perSecond(func(ctx context.Context, caller, i int) error {
		a, _, err := clients[caller].Create(ctx, cred, &metarpc.CreateArgs{Parent: dirs[caller], Name: fmt.Sprint("file", i), Mode: 0o644, Exclusive: true})
		if err == nil {
			clients[caller].Release(a.Attr.ID)
		}
		return err
	})
}

// engineCreates commits the batch of a CREATE as package meta makes it: the directory is there and the name is not, the name, the inode, what the directory and
// the owner have, and the answer.
func engineCreates(engine catalog.Engine) (float64, error) {
	ctx := context.Background()
	const first = layout.FileID(1 << 20) // of the files; the directories' come before
	at := time.Now().UnixNano()
	for caller := range rpcSessions {
		b := new(catalog.Batch)
		b.Put(schema.InodeKey(layout.FileID(caller+2)), schema.Encode(&schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID}))
		if err := engine.Commit(ctx, b); err != nil {
			return 0, err
		}
	}
	answer := make([]byte, 200)
	return perSecond(func(ctx context.Context, caller, i int) error {
		dir, id := layout.FileID(caller+2), first+layout.FileID(i*rpcSessions+caller)
		entry := schema.EntryKey(dir, fmt.Sprint("file", i))
		row := schema.Inode{
			Mode: syscall.S_IFREG | 0o644, Nlink: 1, Parent: dir, Atime: at, Mtime: at, Ctime: at, Btime: at,
			Policy: schema.PolicyOf(layout.Policy{StripeUnit: 1 << 20, StripeCount: 4, Mirrors: 1, Placement: layout.PlacementSpread}),
		}
		b := new(catalog.Batch)
		b.GuardPresent(schema.InodeKey(dir))
		b.GuardAbsent(entry)
		b.Put(entry, schema.Encode(&schema.Entry{ID: id, Type: syscall.S_IFREG}))
		b.Put(schema.InodeKey(id), schema.Encode(&row))
		b.Put(schema.ReplyKey(metarpc.SessionID{byte(caller)}, 1), schema.Encode(&schema.Reply{Sequence: uint64(i), Frame: answer}))
		counters := schema.CountersKey(dir)
		b.Add(counters, schema.CounterEntries, 1)
		b.Max(counters, schema.CounterMtime, at)
		b.Max(counters, schema.CounterCtime, at)
		b.Add(counters, schema.CounterFiles, 1)
		b.Add(schema.DirtyKey(dir), 0, 1)
		b.Add(schema.OwnerKey(0, 0, 0), schema.OwnerFiles, 1)
		b.Add(schema.FilesKey(0), 0, 1)
		return engine.Commit(ctx, b)
	})
}

func pebbleUnderTest(l *lab) (weftd func(string) []string, open func(string) (catalog.Engine, error), end func() error, err error) {
	weftd = func(string) []string { return nil } // the catalog is in --dir
	open = func(name string) (catalog.Engine, error) {
		return pebble.Open(pebble.Config{Dir: filepath.Join(l.disk, "mdrpc", name)})
	}
	return weftd, open, func() error { return nil }, nil
}

// etcdUnderTest is a cluster of three members on this machine.
func etcdUnderTest(l *lab) (weftd func(string) []string, open func(string) (catalog.Engine, error), end func() error, err error) {
	dir, err := os.MkdirTemp(l.disk, "etcd")
	if err != nil {
		return nil, nil, nil, err
	}
	var members []*process
	end = func() error {
		var errs []error
		for _, p := range members {
			errs = append(errs, p.stop())
		}
		return errors.Join(append(errs, os.RemoveAll(dir))...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, end())
		}
	}()
	var clients, peers, initial []string
	for i := range 3 {
		client, err1 := freePort()
		peer, err2 := freePort()
		if err := errors.Join(err1, err2); err != nil {
			return nil, nil, nil, err
		}
		clients, peers = append(clients, client.String()), append(peers, "http://"+peer.String())
		initial = append(initial, fmt.Sprintf("m%d=%s", i, peers[i]))
	}
	for i, client := range clients {
		name := fmt.Sprint("m", i)
		p, err := start("etcd", "--name", name, "--data-dir", filepath.Join(dir, name), "--logger", "zap", "--log-level", "warn",
			"--listen-client-urls", "http://"+client, "--advertise-client-urls", "http://"+client,
			"--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i], "--initial-cluster", strings.Join(initial, ","))
		if err != nil {
			return nil, nil, nil, err
		}
		p.signaled = true
		members = append(members, p)
	}
	url := "etcd://" + strings.Join(clients, ",") + "/"
	open = func(name string) (catalog.Engine, error) {
		cfg, err := etcd.ParseURL(url + name)
		if err != nil {
			return nil, err
		}
		return etcd.Open(context.Background(), cfg)
	}
	weftd = func(name string) []string { return []string{"--catalog", url + name} }
	return weftd, open, end, await("etcd", func() bool {
		e, err := open("start")
		return err == nil && e.Close() == nil
	})
}

// postgresUnderTest is a server on this machine.
func postgresUnderTest(l *lab) (weftd func(string) []string, open func(string) (catalog.Engine, error), end func() error, err error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	if len(found) == 0 {
		return nil, nil, nil, errors.New("no PostgreSQL in /usr/lib/postgresql: install Debian's package postgresql")
	}
	dir, err := os.MkdirTemp(l.disk, "postgres")
	if err != nil {
		return nil, nil, nil, err
	}
	var p *process
	end = func() error {
		var err error
		if p != nil {
			err = p.stop()
		}
		return errors.Join(err, os.RemoveAll(dir))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, end())
		}
	}()
	// It does not run as root.
	as := []string{"--reuid=postgres", "--regid=postgres", "--clear-groups", "--pdeathsig=QUIT"}
	command := func(name string, args ...string) []string {
		return append(append(append([]string{}, as...), filepath.Join(found[len(found)-1], name)), args...)
	}
	if out, err := exec.Command("chown", "postgres", dir).CombinedOutput(); err != nil {
		return nil, nil, nil, fmt.Errorf("%w: %s", err, out)
	}
	data := filepath.Join(dir, "data")
	if out, err := exec.Command("setpriv", command("initdb", "-D", data, "-U", "weft", "-A", "trust", "--locale=C", "-E", "UTF8")...).CombinedOutput(); err != nil {
		return nil, nil, nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	port, err := freePort()
	if err != nil {
		return nil, nil, nil, err
	}
	if p, err = start("setpriv", command("postgres", "-D", data, "-p", fmt.Sprint(port.Port()), "-c", "listen_addresses=127.0.0.1",
		"-c", "unix_socket_directories="+dir, "-c", "shared_buffers=256MB")...); err != nil {
		return nil, nil, nil, err
	}
	url := fmt.Sprintf("postgres://weft@%v/postgres?sslmode=disable&weft_table=", port)
	open = func(name string) (catalog.Engine, error) {
		return postgres.Open(context.Background(), postgres.Config{URL: url + name})
	}
	weftd = func(name string) []string { return []string{"--catalog", url + name} }
	return weftd, open, end, await("PostgreSQL", func() bool {
		e, err := open("start")
		return err == nil && e.Close() == nil
	})
}
