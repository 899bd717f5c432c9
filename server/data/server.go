package data

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/callers"
	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// Bounds of a server.
const (
	maxIO           = 4 << 20   // bytes of one READ or WRITE
	prefIO          = 1 << 20   // what FSINFO recommends
	maxPayloads     = 512 << 20 // bytes of payload in memory, over all connections
	maxConnPayloads = 32 << 20  // and of one connection
	maxRequests     = 128       // that are read, run, or have a reply to be sent, per connection
	maxFiles        = 4096      // cached descriptors
)

// Config of a server.
type Config struct {
	Dir string // made if missing
	IO  IO     // how data files are read and written
	// Local is what clients on the same host get descriptors for. The socket for them is in LocalDir, which is made if missing.
	Local    Local
	LocalDir string       // default localio.Dir
	Log      *slog.Logger // nil: slog.Default()
	// TLS is offered to clients that ask for it (RFC 9289); nil: there is none.
	TLS *rpctls.Server
	// RequireTLS refuses everything but NULL on other connections.
	RequireTLS bool
}

// ErrLocked tells that another server runs on the directory.
var ErrLocked = errors.New("another data server runs on it")

// Server serves one directory.
type Server struct {
	log      *slog.Logger
	tls      *rpctls.Server // nil: not offered
	required bool
	lock     *os.File
	// unregister takes the cache off those that give descriptors back.
	unregister func()

	root     int // descriptor of the export
	rootFH   wire.FileHandle
	handles  handles
	io       transfers
	cache    cache
	payloads *semaphore.Weighted

	callers    callers.Table
	complaints callers.Complaints // about them
	refusals   callers.Refusals   // of what they have asked for

	id       localio.ID
	instance localio.ID
	leases   error   // why it cannot be known who writes a file
	broker   *broker // nil: there is none
	counts   counts
	remote   string // why

	verifier verifier

	mu        sync.Mutex
	listeners map[net.Listener]bool
	conns     map[*conn]bool
	ending    bool // Shutdown was called
	closing   bool
	closed    chan struct{}  // closed at the end of Shutdown
	wg        sync.WaitGroup // of connections
}

// Open prepares the directory and locks it.
func Open(cfg Config) (*Server, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.LocalDir == "" {
		cfg.LocalDir = localio.Dir
	}
	if cfg.RequireTLS && cfg.TLS == nil {
		return nil, errors.New("data server: TLS is required and there is no certificate for it")
	}
	s, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("data server directory %s: %w", cfg.Dir, err)
	}
	return s, nil
}

func open(cfg Config) (*Server, error) {
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	if err := makeDir(cfg.Dir); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrLocked
		}
		return nil, err
	}
	s := &Server{
		log:       cfg.Log,
		tls:       cfg.TLS,
		required:  cfg.RequireTLS,
		lock:      lock,
		payloads:  semaphore.NewWeighted(maxPayloads),
		listeners: map[net.Listener]bool{},
		conns:     map[*conn]bool{},
		closed:    make(chan struct{}),
	}
	s.cache.init(&s.handles, maxFiles)
	if err := s.openExport(cfg); err != nil {
		lock.Close()
		return nil, err
	}
	if err := s.openVerifier(cfg); err != nil {
		unix.Close(s.root)
		lock.Close()
		return nil, err
	}
	descriptors.Files.Join()
	s.unregister = descriptors.OnShortage(s.cache.giveBack)
	s.startBroker(cfg)
	if s.tls != nil && s.tls.Mutual() {
		go s.recheck() // ends with Shutdown
	}
	if s.io.Align > 0 {
		s.log.Info("data files are read and written with O_DIRECT", "dir", cfg.Dir, "from_bytes", s.io.Least, "aligned_to", s.io.Align)
	} else {
		s.log.Info("data files are read and written through the page cache", "dir", cfg.Dir, "because", s.io.why)
	}
	return s, nil
}

func (s *Server) openExport(cfg Config) error {
	export := filepath.Join(cfg.Dir, "export")
	if err := makeDir(export); err != nil {
		return err
	}
	key, err := loadKey(filepath.Join(cfg.Dir, "key"), export)
	if err != nil {
		return err
	}
	if s.root, err = unix.Open(export, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	if err = s.openRoot(key); err == nil {
		s.io, err = newTransfers(cfg.IO, s.root)
	}
	if err != nil {
		unix.Close(s.root)
	}
	s.id, s.leases = identity(key), probeLeases(export)
	return err
}

// openRoot makes the root's handle and finds out whether handles can be opened at all.
func (s *Server) openRoot(key []byte) (err error) {
	if s.handles, err = newHandles(key, s.root); err != nil {
		return err
	}
	if s.rootFH, _, err = s.handles.of(s.root, ""); err != nil {
		return fmt.Errorf("file handle of the export: %w", err)
	}
	probe, err := s.handles.open(s.rootFH)
	if err != nil {
		return fmt.Errorf("its file system opens no files by their handles (open_by_handle_at): %w", err)
	}
	unix.Close(probe.fd)
	return nil
}

// makeDir makes a directory, and its parents, so that it will still be there after a power cut.
func makeDir(dir string) error {
	parent := filepath.Dir(dir)
	err := os.Mkdir(dir, 0o755)
	if errors.Is(err, os.ErrNotExist) && parent != dir {
		if err := makeDir(parent); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o755)
	}
	if err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return syncDir(parent)
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// checkCapabilities tells what a process lacks that does not run as root. Without it a server would start, and fail at
// its first data file.
func checkCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData
	if err := unix.Capget(&header, &have[0]); err != nil {
		return err
	}
	var missing []string
	for _, c := range []struct {
		bit  int
		name string
	}{
		{unix.CAP_CHOWN, "CAP_CHOWN (give data files to their synthetic owners)"},
		{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE (open them)"},
		{unix.CAP_DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH (open them by file handle)"},
		{unix.CAP_FOWNER, "CAP_FOWNER (set their modes and times)"},
	} {
		if have[0].Effective&(1<<c.bit) == 0 {
			missing = append(missing, c.name)
		}
	}
	if missing != nil {
		return fmt.Errorf("a data server runs as root; this process lacks %s: %w", strings.Join(missing, ", "), unix.EPERM)
	}
	return nil
}

// Serve accepts connections until Shutdown, when it returns nil. It closes l.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil
	}
	s.listeners[l] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
	}()
	in := descriptors.Listener(l)
	for {
		nc, err := in.Accept()
		if err == nil {
			s.start(nc)
			continue
		}
		if s.isClosing() {
			return nil
		}
		return err
	}
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// start serves a connection, unless there are too many.
func (s *Server) start(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := newConn(s, nc)
	if s.closing {
		nc.Close()
		return
	}
	if !s.callers.Enter(c, nc.RemoteAddr()) {
		if dropped, ok := s.complaints.Pass(nc.RemoteAddr()); ok {
			s.log.Error("too many connections in use: another one is refused", "client", nc.RemoteAddr(), "connections", len(s.conns), "not_logged", dropped)
		}
		nc.Close()
		return
	}
	s.conns[c] = true
	s.wg.Add(1)
	go func() { // owns the connection and ends with it
		defer s.wg.Done()
		if err := c.serve(); err != nil {
			if dropped, ok := s.complaints.Pass(nc.RemoteAddr()); ok {
				s.log.Warn("connection closed", "client", nc.RemoteAddr(), "err", err, "not_logged", dropped)
			}
		}
		if s.broker != nil {
			s.broker.ended(c)
		}
		s.callers.Leave(c)
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		close(c.gone)
	}()
}

// Shutdown syncs what was written, for a while, so that the next server has less to wait for. Then it stops accepting,
// lets requests that have been read end and be answered, and closes everything. When ctx ends first the connections are
// cut, and only the requests, and syncs, that run are waited for: they use descriptors.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	first := !s.ending
	s.ending = true
	s.mu.Unlock()
	if first {
		s.lastSync(ctx)
	}
	s.mu.Lock()
	s.closing = true
	for l := range s.listeners {
		l.Close()
	}
	for c := range s.conns {
		c.drain()
	}
	s.mu.Unlock()
	if s.broker != nil {
		s.broker.shut()
	}
	if first {
		go func() { // ends with the last connection
			s.wg.Wait()
			s.unregister()
			descriptors.Files.Leave()
			s.cache.close()
			s.verifier.close()
			unix.Close(s.root)
			s.lock.Close()
			close(s.closed)
		}()
	}
	select {
	case <-s.closed:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	for c := range s.conns {
		c.nc.Close()
	}
	s.mu.Unlock()
	<-s.closed
	return ctx.Err()
}
