package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/rpctls/tlstest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/fsck"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// everybodys is a catalog that nobody closes.
type everybodys struct{ catalog.Engine }

func (everybodys) Close() error { return nil }

// clusterWorld is a volume that several services serve, all in this process.
type clusterWorld struct {
	t      *testing.T
	engine catalog.Engine
	urls   []string
	log    *slog.Logger
	shards int
	addrs  []string

	files rpctls.Files   // of services that want TLS
	tls   *rpctls.Client // by which we come; nil = in clear text
}

func newClusterWorld(t *testing.T, shards int) *clusterWorld {
	w := &clusterWorld{t: t, engine: memorytest.New(), shards: shards, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	engines["memory"] = func(context.Context, string, bool, *slog.Logger) (catalog.Engine, error) {
		return everybodys{w.engine}, nil
	}
	t.Cleanup(func() { delete(engines, "memory") })
	var servers dataServers
	urls, err := servers.startSingle(t.TempDir(), 2, "127.0.0.1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := servers.stop(); err != nil {
			t.Error(err)
		}
	})
	w.urls = urls
	return w
}

// start starts a service, which stop ends as SIGTERM does.
func (w *clusterWorld) start() (addr string, stop func()) {
	w.t.Helper()
	return w.startAs(metarpc.Versions{}, metarpc.Versions{})
}

// startAs starts a service that speaks these versions with clients and with other services; zero = all there are.
func (w *clusterWorld) startAs(clients, peers metarpc.Versions) (addr string, stop func()) {
	w.t.Helper()
	l, err := listen("127.0.0.1:0", "0")
	if err != nil {
		w.t.Fatal(err)
	}
	where, err := parseCatalog("memory://")
	if err != nil {
		w.t.Fatal(err)
	}
	addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	log := w.log.With("service", addr)
	door := &admit.Door{Log: log}
	var toOthers *rpctls.Client
	if w.files != (rpctls.Files{}) {
		door.Require = true
		if door.TLS, err = rpctls.NewServer(w.files); err != nil {
			w.t.Fatal(err)
		}
		if toOthers, err = rpctls.NewClient(rpctls.Mutual, w.files); err != nil {
			w.t.Fatal(err)
		}
	}
	go func() { // ends with ctx
		done <- runCluster(ctx, clusterConfig{
			seen:    &watch{},
			catalog: where, shards: w.shards, lease: 4 * time.Second, urls: w.urls, log: log,
			files: datafile.Config{Log: log}, meta: meta.Config{Lease: 10 * time.Second, Program: "weftd test", Speaks: clients, Door: door}, peers: peers,
			tls: toOthers,
		}, l)
	}()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("service at %s: %v", addr, err)
		}
	}
	w.t.Cleanup(stop)
	w.addrs = append(w.addrs, addr)
	return addr, stop
}

// conn is a client's session of one shard.
type conn struct {
	t        *testing.T
	nc       net.Conn
	r        *bufio.Reader
	id       metarpc.SessionID
	shard    int
	sequence uint64
}

// reach connects to a service.
func (w *clusterWorld) reach(addr string) (net.Conn, error) {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	nc.SetDeadline(time.Now().Add(2 * time.Minute)) // for all of a test, also on a busy machine
	if w.tls == nil {
		return nc, nil
	}
	return w.tls.To(context.Background(), nc, addr, rpctls.Meta)
}

// hello says hello to a service.
func (w *clusterWorld) hello(addr string, shard int, session metarpc.SessionID) (*conn, *metarpc.Welcome, error) {
	nc, err := w.reach(addr)
	if err != nil {
		return nil, nil, err
	}
	c := &conn{t: w.t, nc: nc, r: bufio.NewReader(nc), shard: shard}
	b, err := metarpc.AppendHello(nil, &metarpc.Hello{Magic: metarpc.Magic, Lowest: metarpc.Lowest, Highest: metarpc.Version,
		Client: metarpc.ClientInfo{ID: [16]byte{9}, Host: "test"}, Session: session, Shard: shard})
	if err != nil {
		w.t.Fatal(err)
	}
	var welcome *metarpc.Welcome
	if _, err = nc.Write(b); err == nil {
		var frame []byte
		if frame, err = metarpc.ReadFrame(c.r, nil, metarpc.MaxHello); err == nil {
			welcome, err = metarpc.ParseWelcome(frame, metarpc.Spoken)
		}
	}
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	c.id = welcome.Session
	return c, welcome, nil
}

// session makes a session of a shard, or goes on with one, wherever the shard is.
func (w *clusterWorld) session(shard int, session metarpc.SessionID) *conn {
	w.t.Helper()
	var last error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		for _, addr := range w.addrs {
			c, welcome, err := w.hello(addr, shard, session)
			switch {
			case err != nil:
				last = err
			case welcome.Status == metarpc.StatusOK:
				w.t.Cleanup(func() { c.nc.Close() })
				return c
			default:
				last = errors.New(welcome.Message)
				c.nc.Close()
			}
		}
	}
	w.t.Fatalf("no session of shard %d: %v", shard, last)
	return nil
}

// ask makes a call, also through a grace period, and answers callbacks that come meanwhile.
func ask[R any](c *conn, op metarpc.Op, args any) (r R, err error) {
	for {
		c.sequence++
		b, err := metarpc.AppendCall(nil, metarpc.CallHeader{Slot: 0, Sequence: c.sequence, Op: op}, args)
		if err != nil {
			c.t.Fatal(err)
		}
		if _, err := c.nc.Write(b); err != nil {
			return r, err
		}
		for {
			frame, err := metarpc.ReadFrame(c.r, nil, metarpc.MaxFrame)
			if err != nil {
				return r, err
			}
			if kind, _ := metarpc.FrameKind(frame); kind != metarpc.KindReply {
				h, _, _ := metarpc.ParseCallBack(frame, metarpc.Version)
				b, err := metarpc.AppendBackReply(nil, metarpc.BackReply{Number: h.Number})
				if err == nil {
					_, err = c.nc.Write(b)
				}
				if err != nil {
					return r, err
				}
				continue
			}
			h, rest, err := metarpc.ParseReplyHeader(frame)
			switch {
			case err != nil:
				return r, err
			case h.Status == metarpc.StatusOK:
				return r, metarpc.DecodeResult(op, rest, &r)
			case h.Status != metarpc.StatusGrace:
				return r, &metarpc.Error{Op: op, Status: h.Status, Message: h.Message}
			}
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// await waits until the services of a volume are as want says.
func (w *clusterWorld) await(what string, want func(*metarpc.MetaListResult) bool) {
	w.t.Helper()
	var list metarpc.MetaListResult
	ok := waittest.Poll(30*time.Second, 50*time.Millisecond, func() bool {
		c := w.session(0, metarpc.SessionID{})
		var err error
		list, err = ask[metarpc.MetaListResult](c, metarpc.OpMetaList, &metarpc.Empty{})
		if err == nil {
			_, err = ask[metarpc.Empty](c, metarpc.OpEndSession, &metarpc.Empty{}) // or the next service of the shard waits for it
		}
		c.nc.Close()
		return err == nil && want(&list)
	})
	if !ok {
		w.t.Fatalf("%s: %+v", what, list)
	}
}

// even says that so many services have all shards.
func (w *clusterWorld) even(services int) {
	w.t.Helper()
	w.await(fmt.Sprintf("%d services", services), func(list *metarpc.MetaListResult) bool {
		shards := 0
		for _, s := range list.Services {
			if len(s.Shards) > (w.shards+services-1)/services {
				return false
			}
			shards += len(s.Shards)
		}
		return len(list.Services) == services && shards == w.shards
	})
}

// A client that knows only the service which its session is with finds the shard when that service is replaced by one
// at another address.
func TestReplaced(t *testing.T) {
	w := newClusterWorld(t, 1)
	w.urls = nil // data servers take no part
	_, stop := w.start()
	v, err := w.dial(1, metarpc.Spoken)
	if err != nil {
		t.Fatal(err)
	}
	w.start() // the one shard stays where it is
	w.even(2)
	stop()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	defer v.Close(ctx)
	if _, err := v.GetAttr(ctx, layout.RootID); err != nil {
		t.Errorf("the client does not find the other service: %v", err)
	}
}

// Three services share a volume; what a client has made it finds, by the same session, when the services that it talked to are no more.
func TestCluster(t *testing.T) {
	w := newClusterWorld(t, 6)
	first, stopFirst := w.start()
	w.start()
	w.start()
	w.even(3)
	sessions := make([]*conn, w.shards)
	for shard := range sessions {
		sessions[shard] = w.session(shard, metarpc.SessionID{})
	}
	root := sessions[layout.ShardOf(layout.RootID, w.shards)]

	var file metarpc.CreateResult
	for deadline := time.Now().Add(30 * time.Second); ; {
		var err error
		if file, err = ask[metarpc.CreateResult](root, metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "f", Mode: 0o644, Access: metarpc.AccessWrite}); err != nil {
			t.Fatal(err)
		}
		l, err := ask[metarpc.LayoutResult](root, metarpc.OpLayoutGet, &metarpc.LayoutGetArgs{ID: file.Attr.ID, IOMode: layout.IOModeRW, Len: 1 << 20})
		if err == nil && len(l.Segments) > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no layout: %+v, %v", l, err)
		}
		ask[metarpc.Empty](root, metarpc.OpRemove, &metarpc.RemoveArgs{Parent: layout.RootID, Name: "f"})
		time.Sleep(100 * time.Millisecond) // data servers are being added
	}
	devices, err := ask[metarpc.DevicesResult](root, metarpc.OpDevices, &metarpc.Empty{})
	if err != nil || len(devices.Devices) > len(w.urls) {
		t.Errorf("three services that were told of %d data servers: %+v, %v", len(w.urls), devices, err)
	}
	if _, err := ask[metarpc.MetaListResult](root, metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "nobody:1"}); !isErrno(err, syscall.ENOENT) {
		t.Error("drain of an unknown service:", err)
	}

	stopFirst()
	w.addrs = slices.DeleteFunc(w.addrs, func(addr string) bool { return addr == first })
	for shard, old := range sessions {
		c := w.session(shard, old.id)
		c.sequence = old.sequence
		if _, err := ask[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{}); err != nil {
			t.Errorf("shard %d: %v", shard, err)
		}
		sessions[shard] = c
	}
	root = sessions[layout.ShardOf(layout.RootID, w.shards)]
	found, err := ask[metarpc.LookupResult](root, metarpc.OpLookup, &metarpc.NameArgs{Parent: layout.RootID, Name: "f"})
	if err != nil || found.Attr.ID != file.Attr.ID {
		t.Errorf("%+v, %v", found, err)
	}
	if _, err := ask[metarpc.CreateResult](root, metarpc.OpCreate, &metarpc.CreateArgs{Parent: layout.RootID, Name: "g", Mode: 0o644, Access: metarpc.AccessWrite}); err != nil {
		t.Error(err)
	}
	w.even(2)
}

// A data server that one service has added every other knows at once: a client that has a layout of the one may ask the other where it is.
// Services that want TLS have it between them, too, and nothing else; a client does not pass for one of them.
func TestClusterTLS(t *testing.T) {
	authority := tlstest.New(t)
	w := newClusterWorld(t, 4)
	w.files = authority.Issue()
	client := func(f rpctls.Files, policy rpctls.Policy) *rpctls.Client {
		c, err := rpctls.NewClient(policy, f)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	trainer := client(authority.IssueClient("trainer"), rpctls.Mutual)
	w.tls = trainer
	w.start()
	w.start()
	w.even(2)
	// A rename between directories of two shards is one of two services, if these are not the same one's.
	root := w.session(layout.ShardOf(layout.RootID, w.shards), metarpc.SessionID{})
	var dirs []metarpc.Attr
	for i := range 8 {
		made, err := ask[metarpc.AttrResult](root, metarpc.OpMakeNode, &metarpc.MakeNodeArgs{Parent: layout.RootID, Name: fmt.Sprint("d", i), Mode: syscall.S_IFDIR | 0o755})
		if err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, made.Attr)
	}
	for i, d := range dirs {
		c := w.session(layout.ShardOf(d.ID, w.shards), metarpc.SessionID{})
		if _, err := ask[metarpc.CreateResult](c, metarpc.OpCreate, &metarpc.CreateArgs{Parent: d.ID, Name: "f", Mode: 0o644, Access: metarpc.AccessWrite}); err != nil {
			t.Fatal(err)
		}
		to := dirs[(i+1)%len(dirs)]
		if _, err := ask[metarpc.Empty](c, metarpc.OpRename, &metarpc.RenameArgs{OldParent: d.ID, OldName: "f", NewParent: to.ID, NewName: "g"}); err != nil {
			t.Errorf("from shard %d to shard %d: %v", layout.ShardOf(d.ID, w.shards), layout.ShardOf(to.ID, w.shards), err)
		}
	}

	for _, addr := range w.addrs {
		w.tls = nil
		for shard := range w.shards { // one that the service has, and one that it does not have
			if _, welcome, err := w.hello(addr, shard, metarpc.SessionID{}); err != nil || !strings.Contains(welcome.Message, "xprtsec=") {
				t.Errorf("in clear text: %+v, %v", welcome, err)
			}
		}
		w.tls = client(rpctls.Files{CA: w.files.CA}, rpctls.TLS)
		if _, welcome, err := w.hello(addr, 0, metarpc.SessionID{}); err == nil {
			t.Errorf("without a certificate: %+v", welcome)
		}
		w.tls = client(tlstest.New(t).IssueClient("trainer"), rpctls.Mutual)
		if _, welcome, err := w.hello(addr, 0, metarpc.SessionID{}); err == nil {
			t.Errorf("with a CA of its own: %+v", welcome)
		}
		for _, w.tls = range []*rpctls.Client{nil, trainer} {
			nc, err := w.reach(addr)
			if err != nil {
				t.Fatal(err)
			}
			b, err := peerrpc.Append(nil, peerrpc.Version, &peerrpc.Hello{Magic: peerrpc.Magic, Lowest: peerrpc.Version, Highest: peerrpc.Version})
			if err == nil {
				_, err = nc.Write(b)
			}
			if err != nil {
				t.Fatal(err)
			}
			if n, err := nc.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("a client that says it is a service: %d bytes, %v", n, err)
			}
			nc.Close()
		}
	}
	// What one has begun another does not go on with.
	w.tls = trainer
	mine := w.session(0, metarpc.SessionID{})
	w.tls = client(authority.IssueClient("other"), rpctls.Mutual)
	for _, addr := range w.addrs {
		if _, welcome, err := w.hello(addr, 0, mine.id); err != nil || welcome.Status == metarpc.StatusOK {
			t.Errorf("with another's session: %+v, %v", welcome, err)
		}
	}
	w.tls = trainer
	if again := w.session(0, mine.id); again.id != mine.id {
		t.Errorf("%v after %v", again.id, mine.id)
	}
}

func TestClusterDevices(t *testing.T) {
	w := newClusterWorld(t, 4)
	urls := w.urls
	w.urls = nil
	w.start()
	w.start()
	w.even(2)
	for n, url := range urls {
		for shard := range w.shards {
			c := w.session(shard, metarpc.SessionID{})
			if shard == 0 {
				if _, err := ask[metarpc.AddDeviceResult](c, metarpc.OpAddDevice, &metarpc.AddDeviceArgs{URL: url}); err != nil {
					t.Fatal(err)
				}
			}
			if devices, err := ask[metarpc.DevicesResult](c, metarpc.OpDevices, &metarpc.Empty{}); err != nil || len(devices.Devices) != n+1 {
				t.Errorf("the service of shard %d after %d were added: %+v, %v", shard, n+1, devices, err)
			}
		}
	}
}

// A shared catalog is repaired when no service is there, and told which one is.
func TestClusterRepair(t *testing.T) {
	w := newClusterWorld(t, 4)
	addr, stop := w.start()
	w.even(1)
	where, err := parseCatalog("memory://")
	if err != nil {
		t.Fatal(err)
	}
	cfg := fsck.Config{Repair: true, Log: w.log}
	if _, err := check(t.Context(), where, cfg); err == nil || !strings.Contains(err.Error(), addr) {
		t.Errorf("a repair while a service runs: %v", err)
	}
	stop()
	var b catalog.Batch
	b.Put(schema.OrphanKey(12345), nil)
	if err := w.engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if report, err := check(t.Context(), where, cfg); err != nil || report.Clean() || report.Unrepaired() != 0 {
		t.Errorf("a repair: %+v, %v", report, err)
	}
	if report, err := check(t.Context(), where, fsck.Config{Log: w.log}); err != nil || !report.Clean() {
		t.Errorf("after it: %+v, %v", report, err)
	}
	w.addrs = nil
	w.start()
	w.even(1)
}

func isErrno(err error, errno syscall.Errno) bool {
	var e *metarpc.Error
	return errors.As(err, &e) && e.Status == metarpc.Status(errno)
}

// A volume with one shard has one service at a time; the others stand by.
func TestStandby(t *testing.T) {
	w := newClusterWorld(t, 1)
	_, stop := w.start()
	w.start()
	w.await("two services", func(list *metarpc.MetaListResult) bool { return len(list.Services) == 2 })
	stop()
	w.addrs = w.addrs[1:]
	w.even(1)
	if vol, err := meta.OpenVolume(t.Context(), w.engine, layout.Policy{}, 1); err != nil || vol.Format != schema.Format {
		t.Errorf("%+v, %v", vol, err)
	}
}

func TestMetaCatalog(t *testing.T) {
	c := &command{Args: "ARGS"}
	for _, row := range []struct {
		dir, name string
		want      catalogName
	}{
		{"d", "", catalogName{dir: "d"}}, {"", "pebble:d", catalogName{dir: "d"}}, {"d", "pebble:d", catalogName{dir: "d"}}, {"", "d", catalogName{dir: "d"}},
	} {
		if got, err := metaCatalog(c, row.dir, row.name); err != nil || got != row.want {
			t.Errorf("%+v: %+v, %v", row, got, err)
		}
	}
	for _, row := range [][2]string{{"", ""}, {"", "nosql://h"}, {"d", "pebble:e"}} {
		if got, err := metaCatalog(c, row[0], row[1]); program.ExitCode(err) != exitUsage {
			t.Errorf("%v: %+v, %v", row, got, err)
		}
	}
}

func TestAdvertised(t *testing.T) {
	for _, listening := range []string{"127.0.0.1:0", ":0"} {
		l, err := net.Listen("tcp", listening)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		if listening != ":0" {
			host = "127.0.0.1"
		}
		if got, err := advertised(l); err != nil || got != net.JoinHostPort(host, port) {
			t.Errorf("%s: %s, %v", listening, got, err)
		}
	}
}
