package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/server/catalog/pebble"
)

// A service on an embedded catalog has the catalog's directory to itself. So it listens on a UNIX socket beside it, where weftd catalog
// backup and weftd fsck --online get a copy of the catalog as it is at that moment: a checkpoint, which is a directory in DIR/checkpoints.
// There is no request: who connects is told a name, in one line of JSON, and may use the copy until it closes the connection, or dies. Then
// the service removes it; what a killed service left is removed by the next one.

// checkpointAnswer is what the service says.
type checkpointAnswer struct {
	Name  string `json:"name,omitempty"` // in DIR/checkpoints
	Error string `json:"error,omitempty"`
}

func checkpointsDir(dir string) string { return filepath.Join(dir, "checkpoints") }

// controlPath is the socket in dir, by a name that is short enough for one: a path of more than 107 bytes is none. It is good until the
// file is closed.
func controlPath(dir string) (*os.File, string, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, "", &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), fmt.Sprintf("/proc/self/fd/%d/control.sock", fd), nil
}

// checkpoints serves copies of a catalog.
type checkpoints struct {
	engine *pebble.Engine
	dir    string // DIR/checkpoints
	log    *slog.Logger
	l      net.Listener
	at     *os.File // the directory of the socket
	stop   context.CancelFunc
	ended  chan struct{} // all goroutines
}

// serveCheckpoints serves copies of the catalog in dir until close. Only the user who runs the service, and root, get any.
func serveCheckpoints(dir string, engine *pebble.Engine, log *slog.Logger) (*checkpoints, error) {
	c := &checkpoints{engine: engine, dir: checkpointsDir(dir), log: log, ended: make(chan struct{})}
	if err := os.RemoveAll(c.dir); err != nil {
		return nil, err
	}
	at, path, err := controlPath(dir)
	if err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		at.Close()
		return nil, err
	}
	if c.l, err = net.Listen("unix", path); err != nil {
		at.Close()
		return nil, fmt.Errorf("control socket in %s: %w", dir, err)
	}
	c.at = at
	var ctx context.Context
	ctx, c.stop = context.WithCancel(context.Background())
	go c.serve(ctx) // until close
	return c, nil
}

// close ends the use of all copies and removes them.
func (c *checkpoints) close() error {
	c.stop()
	err := c.l.Close()
	<-c.ended
	return errors.Join(err, c.at.Close(), os.RemoveAll(c.dir))
}

func (c *checkpoints) serve(ctx context.Context) {
	defer close(c.ended)
	done := make(chan struct{})
	users := 0
	conns := make(chan net.Conn)
	go func() { // ends with the listener
		defer close(conns)
		in := descriptors.Listener(c.l)
		for {
			conn, err := in.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					c.log.Error("control socket", "err", err)
				}
				return
			}
			conns <- conn
		}
	}()
	for open := true; open || users > 0; {
		select {
		case conn, ok := <-conns:
			if !ok {
				open, conns = false, nil
				continue
			}
			users++
			go func() { // ends with the connection, or with ctx
				c.one(ctx, conn.(*net.UnixConn))
				done <- struct{}{}
			}()
		case <-done:
			users--
		}
	}
}

// one serves a connection.
func (c *checkpoints) one(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	uid, err := peerUID(conn)
	if err == nil && uid != 0 && uid != uint32(os.Geteuid()) {
		err = fmt.Errorf("the metadata service runs as user %d: be that user, or root", os.Geteuid())
	}
	var dir string
	if err == nil {
		if err = os.MkdirAll(c.dir, 0o700); err == nil {
			dir, err = c.make(ctx)
		}
	}
	answer := checkpointAnswer{Name: filepath.Base(dir)}
	if err != nil {
		answer = checkpointAnswer{Error: err.Error()}
	}
	if json.NewEncoder(conn).Encode(answer) == nil && err == nil {
		io.Copy(io.Discard, conn) // until it is closed
	}
	if dir != "" {
		if err := os.RemoveAll(dir); err != nil {
			c.log.Warn("cannot remove a copy of the catalog", "dir", dir, "err", err)
		}
	}
}

// make makes a copy.
func (c *checkpoints) make(ctx context.Context) (string, error) {
	dir, err := os.MkdirTemp(c.dir, "")
	if err != nil {
		return "", err
	}
	// The name is ours now; the engine wants to make the directory itself.
	if err := os.Remove(dir); err != nil {
		return "", err
	}
	began := time.Now()
	if err := c.engine.Checkpoint(ctx, dir); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	c.log.Info("copy of the catalog for a command", "dir", dir, "took", time.Since(began))
	return dir, nil
}

// peerUID is the user at the other end.
func peerUID(c *net.UnixConn) (uid uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	failed := raw.Control(func(fd uintptr) {
		var peer *unix.Ucred
		if peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = peer.Uid
		}
	})
	return uid, errors.Join(err, failed)
}

// checkpoint is a copy of the catalog of a running service, which is there until it is closed.
type checkpoint struct {
	dir  string
	conn net.Conn
}

func (c *checkpoint) Close() error { return c.conn.Close() }

// errNoService: no service listens in the directory.
var errNoService = errors.New("no metadata service runs there")

// takeCheckpoint asks the service that runs on dir for a copy of its catalog; the error is errNoService if there is no service.
func takeCheckpoint(ctx context.Context, dir string) (*checkpoint, error) {
	at, path, err := controlPath(dir)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%s: %w", dir, errNoService)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	var answer checkpointAnswer
	err = json.NewDecoder(io.LimitReader(conn, 64<<10)).Decode(&answer)
	if !stop() {
		err = context.Cause(ctx)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("no answer from the metadata service: %w", err)
	case answer.Error != "":
		err = fmt.Errorf("the metadata service says: %s", answer.Error)
	case answer.Name != filepath.Base(answer.Name) || answer.Name == "":
		err = fmt.Errorf("the metadata service names a copy %s", strconv.Quote(answer.Name))
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return &checkpoint{filepath.Join(checkpointsDir(dir), answer.Name), conn}, nil
}
