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
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
)

// A serving process listens on a UNIX socket named for its FUSE connection. A connection carries one request and one
// answer, both JSON. The socket, not the mount, is what other commands use, so they work when the mount hangs.

// controlRequest asks a serving process for something.
type controlRequest struct {
	Op   string        `json:"op"` // "status", "sync", "layout"
	File layout.FileID `json:"file,omitempty"`
}

type controlReply struct {
	Error  string          `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
}

// controlDir is where sockets of mounts made by uid are: root's in /run/weft, others' in their runtime directory.
func controlDir(uid int) string {
	if uid == 0 {
		return "/run/weft"
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" && uid == os.Getuid() {
		return filepath.Join(dir, "weft")
	}
	return fmt.Sprintf("/tmp/weft-%d", uid)
}

func controlSocket(dir string, minor uint32) string {
	return filepath.Join(dir, fmt.Sprintf("mount-%d.sock", minor))
}

// listenControl makes the socket of the mount with the given minor device number. Only the mount's owner may use it.
func listenControl(minor uint32) (net.Listener, error) {
	dir := controlDir(os.Getuid())
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// In /tmp the name could be somebody else's.
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() {
		return nil, fmt.Errorf("%s: not a directory of ours", dir)
	}
	path := controlSocket(dir, minor)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return l, os.Chmod(path, 0o600)
}

// serveControl answers requests until l is closed. Each connection has a goroutine that ends with it.
func serveControl(ctx context.Context, l net.Listener, handle func(context.Context, controlRequest) (any, error)) {
	for {
		c, err := l.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				slog.Error("control socket", "err", err)
			}
			return
		}
		go func() {
			defer c.Close()
			var req controlRequest
			if err := json.NewDecoder(io.LimitReader(c, 64<<10)).Decode(&req); err != nil {
				return
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() { // ends the request when the caller goes away
				io.Copy(io.Discard, c)
				cancel()
			}()
			var reply controlReply
			result, err := handle(ctx, req)
			if err == nil {
				reply.Result, err = json.Marshal(result)
			}
			if err != nil {
				reply.Error = err.Error()
			}
			json.NewEncoder(c).Encode(reply)
		}()
	}
}

// errNoServer tells that no process serves a mount any more, or none that we may talk to.
var errNoServer = errors.New("its serving process does not answer (it died, or belongs to somebody else)")

// control sends req to the process that serves m and decodes its result into result.
func control(ctx context.Context, m mountEntry, req controlRequest, result any) error {
	var c net.Conn
	err := errNoServer
	dirs := []string{controlDir(os.Getuid())}
	if os.Getuid() == 0 {
		// Root may ask about other people's mounts too.
		others, _ := filepath.Glob("/tmp/weft-*")
		runtime, _ := filepath.Glob("/run/user/*/weft")
		dirs = append(append(dirs, others...), runtime...)
	}
	for _, dir := range dirs {
		d := net.Dialer{Timeout: 5 * time.Second}
		if c, err = d.DialContext(ctx, "unix", controlSocket(dir, m.minor())); err == nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", m.Mountpoint, errNoServer)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := json.NewEncoder(c).Encode(req); err != nil {
		return fmt.Errorf("%s: %w", m.Mountpoint, err)
	}
	var reply controlReply
	if err := json.NewDecoder(c).Decode(&reply); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", m.Mountpoint, context.Cause(ctx))
		}
		return fmt.Errorf("%s: %w: %v", m.Mountpoint, errNoServer, err)
	}
	if reply.Error != "" {
		return fmt.Errorf("%s: %s", m.Mountpoint, reply.Error)
	}
	return json.Unmarshal(reply.Result, result)
}
