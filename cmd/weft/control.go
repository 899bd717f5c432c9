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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/layout"
)

// A serving process listens on a UNIX socket named for its FUSE connection. A connection carries one request and one
// answer, both JSON; before the answer to a long request there may be others that only say how far it has got. A caller who sends no
// more wants the request to end, and may still read the answer. The socket, not the mount, is what other commands use, so they work when the mount hangs.

// controlRequest asks a serving process for something.
type controlRequest struct {
	Op     string        `json:"op"` // "status", "top", "sync", "remount", "stacks", "layout", "layout move", "devices", "prefetch", "evict", "nvme policy", "trace", "verify"
	File   layout.FileID `json:"file,omitempty"`
	Device string        `json:"device,omitempty"` // where to move the file's data

	Name    filename.JSON     `json:"name,omitempty"`    // of data servers: devices; of the policy; what paths are like: trace
	Devices []layout.DeviceID `json:"devices,omitempty"` // prefetch, evict
	Limit   int64             `json:"limit,omitempty"`   // prefetch, as Run; see fs.CacheRequest
	Run     uint64            `json:"run,omitempty"`
	Flags   uintptr           `json:"flags,omitempty"` // remount: of mount(2), which are in force now or will be at once
	Ops     []string          `json:"ops,omitempty"`   // trace, as fs.FS.Trace; none: all
	Least   time.Duration     `json:"least,omitempty"`
	Verify  *verifyRange      `json:"verify,omitempty"`

	Reachable bool `json:"reachable,omitempty"` // sync: with an error instead of waiting for data servers that are out of reach
}

type controlReply struct {
	Progress int64           `json:"progress,omitempty"` // bytes more that are done; the answer is still to come
	Trace    []traceLine     `json:"trace,omitempty"`    // more lines; the answer is still to come
	Lost     int64           `json:"lost,omitempty"`     // lines that were not told, in all
	Error    filename.JSON   `json:"error,omitempty"`
	Errno    unix.Errno      `json:"errno,omitempty"` // of the error, if it has one
	Result   json.RawMessage `json:"result,omitempty"`
}

// controlError is an error that a serving process has told.
type controlError struct {
	text  string
	errno unix.Errno
}

func (e *controlError) Error() string { return e.text }

// Unwrap makes the errno one that errors.Is finds.
func (e *controlError) Unwrap() error { return e.errno }

// progressTime is how often it is told how far a request has got.
const progressTime = time.Second / 5

// news collects what is to be told.
type news struct {
	bytes atomic.Int64

	mu    sync.Mutex
	lines []traceLine
	lost  int64
}

// trace adds lines, and says how many there are in all that nobody will be told. It returns how many of lines there was no room for.
func (p *news) trace(lines []traceLine, lost int64) (more int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if room := traceRoom - len(p.lines); len(lines) > room {
		lines, more = lines[:room], int64(len(lines)-room)
	}
	p.lines = append(p.lines, lines...)
	p.lost = lost + more
	return more
}

// take returns what there is to be told, if there is something that was not told before.
func (p *news) take(told int64) (reply controlReply, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reply = controlReply{Progress: p.bytes.Swap(0), Trace: p.lines, Lost: p.lost}
	p.lines = nil
	return reply, reply.Progress > 0 || len(reply.Trace) > 0 || reply.Lost > told
}

// tell sends what there is, now and then, until over is closed.
func (p *news) tell(to *json.Encoder, over <-chan struct{}) {
	ticker := time.NewTicker(progressTime)
	defer ticker.Stop()
	lost := int64(0)
	for {
		select {
		case <-ticker.C:
			if reply, ok := p.take(lost); ok {
				lost = reply.Lost
				to.Encode(reply)
			}
		case <-over:
			return
		}
	}
}

// outside is the number that a user of this user namespace has in the one around it, as the kernel shows it in uidMap:
// root of a rootless container is somebody else there. A user without one stays what he is.
func outside(uidMap string, uid int) int {
	for line := range strings.Lines(uidMap) {
		var inside, there, count int
		if n, err := fmt.Sscan(line, &inside, &there, &count); err == nil && n == 3 && inside <= uid && uid-inside < count {
			return there + uid - inside
		}
	}
	return uid
}

// hostUID is the number of a user outside of the user namespace that we are in.
func hostUID(uid int) int {
	uidMap, _ := os.ReadFile("/proc/self/uid_map") // there is none without user namespaces
	return outside(string(uidMap), uid)
}

// hostRoot reports whether we are root of the host, whose directories are root's.
func hostRoot() bool { return hostUID(os.Getuid()) == 0 }

// controlDirs is where the sockets of mounts made by uid may be, the place for new ones first: those of the host's root
// in /run/weft, others' in their runtime directory, or in /tmp if they have none.
func controlDirs(uid int) []string {
	there := hostUID(uid)
	if there == 0 {
		return []string{"/run/weft"}
	}
	dirs := []string{fmt.Sprintf("/run/user/%d/weft", there), fmt.Sprintf("/tmp/weft-%d", there)}
	if uid != os.Getuid() {
		return dirs
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return append([]string{filepath.Join(dir, "weft")}, dirs...)
	}
	return []string{dirs[1], dirs[0]}
}

// privateDir makes our directory for sockets and logs.
func privateDir() (string, error) {
	dir := controlDirs(os.Getuid())[0]
	return dir, makePrivate(dir)
}

// makePrivate makes a directory that nobody else may enter. In /tmp its name could be somebody else's already.
func makePrivate(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() {
		return fmt.Errorf("%s is not a directory of ours: remove it, or set XDG_RUNTIME_DIR to one", dir)
	}
	return os.Chmod(dir, 0o700)
}

func controlSocket(dir string, minor uint32) string {
	return filepath.Join(dir, fmt.Sprintf("mount-%d.sock", minor))
}

// controlListener is the socket of a mount. Its name has the mount's minor device number. The kernel may give that to
// another mount before our process has ended, which then makes its own socket of this name.
type controlListener struct {
	*net.UnixListener
	path string
	made os.FileInfo
}

// listenControl makes the socket of the mount with the given minor device number. Only the mount's owner may use it.
func listenControl(minor uint32) (net.Listener, error) {
	dir, err := privateDir()
	if err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	path := controlSocket(dir, minor)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	made, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &controlListener{l, path, made}, nil
}

// Close removes the socket, if it is still that of this mount.
func (l *controlListener) Close() error {
	lock, err := lockDir(filepath.Dir(l.path))
	if err != nil {
		return errors.Join(err, l.UnixListener.Close())
	}
	defer lock.Close()
	if now, gone := os.Lstat(l.path); gone == nil && os.SameFile(now, l.made) {
		err = os.Remove(l.path)
	}
	return errors.Join(err, l.UnixListener.Close())
}

// lockDir locks a directory in which processes make and remove sockets, until the returned file is closed.
func lockDir(dir string) (lock *os.File, err error) {
	if lock, err = os.Open(dir); err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), lock.Close())
	}
	return lock, nil
}

// serveControl answers requests until l is closed. Each connection has a goroutine that ends with it.
func serveControl(ctx context.Context, l net.Listener, handle func(context.Context, controlRequest, *news) (any, error)) {
	in := descriptors.Listener(l)
	for {
		c, err := in.Accept()
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
			var far news
			out := json.NewEncoder(c)
			over, told := make(chan struct{}), make(chan struct{})
			go func() { // ends with the request
				defer close(told)
				far.tell(out, over)
			}()
			result, err := handle(ctx, req, &far)
			close(over)
			<-told
			if err == nil {
				reply.Result, err = json.Marshal(result)
			}
			if err != nil {
				reply.Error, reply.Errno = filename.JSON(err.Error()), errnoIn(err)
			}
			out.Encode(reply)
		}()
	}
}

// errNoServer tells that no process serves a mount any more, or none that we may talk to.
var errNoServer = errors.New("its serving process does not answer (it died, or belongs to somebody else)")

// dialControl connects to the process that serves m and returns its number. What answers must belong to the mount's
// owner: in /tmp anybody could have made a socket of that name.
func dialControl(ctx context.Context, m mountEntry) (net.Conn, int, error) {
	for _, dir := range controlDirs(m.Owner) {
		d := net.Dialer{Timeout: 5 * time.Second}
		c, err := d.DialContext(ctx, "unix", controlSocket(dir, m.minor()))
		if err != nil {
			continue
		}
		if peer, err := peerOf(c.(*net.UnixConn)); err == nil && int(peer.Uid) == m.Owner {
			return c, int(peer.Pid), nil
		}
		c.Close()
	}
	return nil, 0, fmt.Errorf("%s: %w", filename.Quote(m.Mountpoint), errNoServer)
}

// peerOf is who made the socket that c is connected to.
func peerOf(c *net.UnixConn) (peer *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	failed := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(err, failed)
}

// serverOf is the number of the process that serves m, also when it does not answer, or 0 if there is none.
func serverOf(ctx context.Context, m mountEntry) int {
	c, pid, err := dialControl(ctx, m)
	if err != nil {
		return 0
	}
	c.Close()
	return pid
}

// errnoIn is the errno of an error, 0 if it has none.
func errnoIn(err error) unix.Errno {
	var has interface{ Errno() unix.Errno }
	errno := unix.Errno(0)
	if !errors.As(err, &has) {
		errors.As(err, &errno)
		return errno
	}
	return has.Errno()
}

// control sends req to the process that serves m and decodes its result into result.
func control(ctx context.Context, m mountEntry, req controlRequest, result any) error {
	return controlWith(ctx, m, req, result, 0, func(*controlReply) {})
}

// controlPatiently is control of a request that says how far it has got, and that has something to put in order should ctx end.
func controlPatiently(ctx context.Context, m mountEntry, req controlRequest, result any, far func(*controlReply)) error {
	return controlWith(ctx, m, req, result, cancelTime, far)
}

func controlWith(ctx context.Context, m mountEntry, req controlRequest, result any, patience time.Duration, far func(*controlReply)) error {
	c, _, err := dialControl(ctx, m)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() {
		c.(*net.UnixConn).CloseWrite()
		c.SetReadDeadline(time.Now().Add(patience))
	})
	defer stop()
	if err := json.NewEncoder(c).Encode(req); err != nil && ctx.Err() == nil {
		return fmt.Errorf("%s: %w", filename.Quote(m.Mountpoint), err)
	}
	in := json.NewDecoder(c)
	for {
		var reply controlReply
		err := in.Decode(&reply)
		switch {
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("%s: %w", filename.Quote(m.Mountpoint), context.Cause(ctx))
		case err != nil:
			return fmt.Errorf("%s: %w: %v", filename.Quote(m.Mountpoint), errNoServer, err)
		case reply.Error != "":
			return fmt.Errorf("%s: %w", filename.Quote(m.Mountpoint), &controlError{string(reply.Error), reply.Errno})
		case reply.Result != nil:
			return json.Unmarshal(reply.Result, result)
		}
		far(&reply)
	}
}
