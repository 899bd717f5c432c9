// Package storetest is a network of NFSv3 data servers in memory, for tests of what uses package store. It keeps names,
// attributes and the bytes that were written. A server that is down makes calls wait, as a Server does.
//
// A Net has one lock, held during each call; hooks are called without it.
package storetest

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/store"
)

var (
	// ErrClosed is the error of calls on a closed Server.
	ErrClosed = errors.New("storetest: closed")
	// ErrRefused is the error of Mount if there is nobody.
	ErrRefused = errors.New("storetest: connection refused")

	errBusy = errors.New("storetest: JUKEBOX")
)

// Net is data servers by address.
type Net struct {
	mu      sync.Mutex
	hook    Hook
	exports map[netip.AddrPort]*Export
	changed chan struct{} // closed when something is moved or comes up
	next    uint64
}

// Hook is called before and after each call; a call that it fails before is not executed, one that it fails after is.
type Hook func(ctx context.Context, call string, after bool) error

// SetHook has f called from now on.
func (n *Net) SetHook(f Hook) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hook = f
}

// step calls the hook, if there is one.
func (n *Net) step(ctx context.Context, call string, after bool) error {
	n.mu.Lock()
	hook := n.hook
	n.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, call, after)
}

// Export is what one data server keeps; it has one export, named by its path.
type Export struct {
	net   *Net
	path  string
	id    uint64
	root  *node
	nodes map[uint64]*node
	addr  netip.AddrPort
	down  bool
	stops bool
	noSpc bool
	// sick is what WRITE and CREATE answer; frozen makes them wait.
	sick   error
	frozen bool
	stuck  bool            // READ and WRITE of data files wait
	busy   map[string]bool // handles of files whose owner it does not change
	total  uint64
	avail  uint64
}

type node struct {
	id    uint64
	attr  nfs3.Fattr
	data  []byte           // of a regular file; as long as the last byte written
	names map[string]*node // of a directory
}

// New returns an empty network.
func New() *Net {
	return &Net{exports: map[netip.AddrPort]*Export{}, changed: make(chan struct{})}
}

// Export starts a data server with one empty export.
func (n *Net) Export(addr, path string) *Export {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next++
	e := &Export{net: n, path: path, id: n.next, nodes: map[uint64]*node{}, total: 1 << 40, avail: 1 << 39}
	e.root = e.node(nfs3.TypeDir)
	e.move(netip.MustParseAddrPort(addr))
	return e
}

func (n *Net) signal() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// Move gives the data server another address; whoever had it loses it.
func (e *Export) Move(addr string) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.move(netip.MustParseAddrPort(addr))
}

func (e *Export) move(addr netip.AddrPort) {
	if e.net.exports[e.addr] == e {
		delete(e.net.exports, e.addr)
	}
	e.addr = addr
	e.net.exports[addr] = e
	e.net.signal()
}

// SetDown makes the data server unreachable or reachable again.
func (e *Export) SetDown(down bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.down = down
	e.net.signal()
}

// SetStopping has the data server announce that it stops, or be back or forgotten.
func (e *Export) SetStopping(stops bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.stops = stops
}

// SetHeld has the server say JUKEBOX to every change of a file's owner, as if somebody on its host held the file, or not.
func (e *Export) SetHeld(handle []byte, held bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.busy == nil {
		e.busy = map[string]bool{}
	}
	e.busy[string(handle)] = held
	e.net.signal()
}

// SetSpace sets what FSSTAT tells, and whether CREATE is refused with ErrNoSpc.
func (e *Export) SetSpace(total, avail uint64, refuse bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.total, e.avail, e.noSpc = total, avail, refuse
}

// SetSick has the server answer every WRITE with err, and CREATEs of what is not there; nil ends that.
func (e *Export) SetSick(err error) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.sick = err
}

// SetFrozen makes whatever changes something wait, as a frozen file system does, until it is thawed.
func (e *Export) SetFrozen(frozen bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.frozen = frozen
	e.net.signal()
}

// SetStuck makes READ and WRITE of data files wait, though the pulse file is written, until it is unstuck.
func (e *Export) SetStuck(stuck bool) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.stuck = stuck
	e.net.signal()
}

// isStuck reports whether what is read and written of a file waits; the Net is locked.
func (e *Export) isStuck(d *node) bool { return e.stuck && d.attr.Mode == 0o640 }

// Wipe empties the export.
func (e *Export) Wipe() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	clear(e.nodes)
	e.root = e.node(nfs3.TypeDir)
}

// URL is how the data server is added.
func (e *Export) URL() string {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	return "nfs://" + e.addr.String() + e.path
}

// Walk calls f with the path and attributes of everything in the export, in order.
func (e *Export) Walk(f func(path string, attr nfs3.Fattr)) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.root.walk("", f)
}

func (d *node) walk(path string, f func(string, nfs3.Fattr)) {
	for _, name := range d.sorted() {
		child := d.names[name]
		f(path+"/"+name, child.attr)
		child.walk(path+"/"+name, f)
	}
}

func (d *node) sorted() []string {
	names := make([]string, 0, len(d.names))
	for name := range d.names {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (e *Export) node(t nfs3.Ftype) *node {
	e.net.next++
	d := &node{id: e.net.next, attr: nfs3.Fattr{Type: t, Nlink: 1, FSID: e.id, FileID: e.net.next}}
	if t == nfs3.TypeDir {
		d.names = map[string]*node{}
	}
	e.nodes[d.id] = d
	e.touch(d)
	return d
}

// touch sets the ctime to a new one.
func (e *Export) touch(d *node) {
	e.net.next++
	d.attr.Ctime = nfs3.Time{Sec: uint32(e.net.next >> 20), Nsec: uint32(e.net.next & (1<<20 - 1))}
}

func (e *Export) handle(d *node) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, e.id), d.id)
}

func (e *Export) find(handle []byte) (*node, error) {
	if len(handle) != 16 {
		return nil, nfs3.ErrBadHandle
	}
	d := e.nodes[binary.BigEndian.Uint64(handle[8:])]
	if d == nil || binary.BigEndian.Uint64(handle) != e.id {
		return nil, nfs3.ErrStale
	}
	return d, nil
}

func (e *Export) dir(handle []byte) (*node, error) {
	d, err := e.find(handle)
	if err == nil && d.names == nil {
		err = nfs3.ErrNotDir
	}
	return d, err
}

func (d *node) set(set *nfs3.Sattr) {
	if set.SetMode {
		d.attr.Mode = set.Mode
	}
	if set.SetUID {
		d.attr.UID = set.UID
	}
	if set.SetGID {
		d.attr.GID = set.GID
	}
	if set.SetSize {
		d.attr.Size = set.Size
		d.data = d.data[:min(uint64(len(d.data)), set.Size)]
	}
}

// Dial is a store.Dialer.
func (n *Net) Dial(name string, addrs []netip.AddrPort, _ uint16) (store.Server, error) {
	return &server{net: n, addrs: addrs, closed: make(chan struct{})}, nil
}

// server is a client's side of a data server.
type server struct {
	net       *Net
	addrs     []netip.AddrPort
	closed    chan struct{}
	closeOnce sync.Once
}

// call waits until the data server is up, unless it is a MNT, and runs f on what it keeps.
func (s *server) call(ctx context.Context, name string, f func(e *Export) error) error {
	if err := s.net.step(ctx, name, false); err != nil {
		return err
	}
	for {
		ran, changed, err := s.try(name, f)
		if errors.Is(err, errBusy) {
			select {
			case <-ctx.Done():
				return errors.Join(ctx.Err(), store.ErrDelayed)
			case <-s.closed:
				return ErrClosed
			case <-changed:
			}
			continue
		}
		if ran {
			if hookErr := s.net.step(ctx, name, true); hookErr != nil {
				return hookErr
			}
			return err
		}
		if name == "MNT" {
			return ErrRefused
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.closed:
			return ErrClosed
		case <-changed:
		}
	}
}

// changes are the calls that a frozen file system keeps waiting.
var changes = []string{"WRITE", "CREATE", "MKDIR", "SETATTR", "REMOVE", "COMMIT"}

func (s *server) try(name string, f func(e *Export) error) (ran bool, changed chan struct{}, err error) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	for _, addr := range s.addrs {
		if e := s.net.exports[addr]; e != nil && !e.down && !(e.frozen && slices.Contains(changes, name)) {
			return true, s.net.changed, f(e)
		}
	}
	return false, s.net.changed, nil
}

func (s *server) Mount(ctx context.Context, export string) (root []byte, err error) {
	err = s.call(ctx, "MNT", func(e *Export) error {
		if export != e.path {
			return nfs3.ErrNoEnt
		}
		root = e.handle(e.root)
		return nil
	})
	return root, err
}

func (s *server) Null(ctx context.Context) error {
	return s.call(ctx, "NULL", func(*Export) error { return nil })
}

func (s *server) Stopping() bool {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return slices.ContainsFunc(s.addrs, func(addr netip.AddrPort) bool {
		e := s.net.exports[addr]
		return e != nil && e.stops
	})
}

func (s *server) FSInfo(ctx context.Context, file []byte) (res nfs3.FsinfoRes, err error) {
	err = s.call(ctx, "FSINFO", func(e *Export) error {
		_, err := e.find(file)
		res = nfs3.FsinfoRes{Rtmax: 1 << 20, Wtmax: 1 << 20, MaxFileSize: 1 << 62}
		return err
	})
	return res, err
}

func (s *server) FSStat(ctx context.Context, file []byte) (res nfs3.FsstatRes, err error) {
	err = s.call(ctx, "FSSTAT", func(e *Export) error {
		d, err := e.find(file)
		if err != nil {
			return err
		}
		res = nfs3.FsstatRes{
			Attr:       nfs3.PostOpAttr{Present: true, Attr: d.attr},
			TotalBytes: e.total, FreeBytes: e.avail, AvailBytes: e.avail,
		}
		return nil
	})
	return res, err
}

func (s *server) Lookup(ctx context.Context, dir []byte, name string) (handle []byte, attr nfs3.PostOpAttr, err error) {
	err = s.call(ctx, "LOOKUP", func(e *Export) error {
		d, err := e.dir(dir)
		if err != nil {
			return err
		}
		child := d.names[name]
		if child == nil {
			return nfs3.ErrNoEnt
		}
		handle, attr = e.handle(child), nfs3.PostOpAttr{Present: true, Attr: child.attr}
		return nil
	})
	return handle, attr, err
}

func (s *server) Read(ctx context.Context, file []byte, cred layout.Credential, off int64, buf []byte) (n int, err error) {
	err = s.call(ctx, "READ", func(e *Export) error {
		d, err := e.find(file)
		if err != nil {
			return err
		}
		if d.attr.UID != cred.UID {
			return nfs3.ErrAcces
		}
		if e.isStuck(d) {
			return errBusy
		}
		clear(buf)
		n = int(max(min(int64(d.attr.Size)-off, int64(len(buf))), 0))
		copy(buf[:n], d.data[min(off, int64(len(d.data))):])
		return nil
	})
	return n, err
}

func (s *server) Write(ctx context.Context, file []byte, cred layout.Credential, off int64, data []byte) error {
	return s.call(ctx, "WRITE", func(e *Export) error {
		d, err := e.find(file)
		if err != nil {
			return err
		}
		if d.attr.UID != cred.UID {
			return nfs3.ErrAcces
		}
		if e.isStuck(d) {
			return errBusy
		}
		if e.sick != nil {
			return e.sick
		}
		if more := off + int64(len(data)) - int64(len(d.data)); more > 0 {
			d.data = append(d.data, make([]byte, more)...)
		}
		copy(d.data[off:], data)
		d.attr.Size = max(d.attr.Size, uint64(off)+uint64(len(data)))
		e.touch(d)
		return nil
	})
}

// Data is what a regular file holds.
func (n *Net) Data(handle []byte) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.exports {
		if d, err := e.find(handle); err == nil {
			return append(slices.Clone(d.data), make([]byte, d.attr.Size-uint64(len(d.data)))...)
		}
	}
	return nil
}

func (s *server) GetAttr(ctx context.Context, file []byte) (attr nfs3.Fattr, err error) {
	err = s.call(ctx, "GETATTR", func(e *Export) error {
		d, err := e.find(file)
		if err == nil {
			attr = d.attr
		}
		return err
	})
	return attr, err
}

func (s *server) SetAttr(ctx context.Context, file []byte, set nfs3.Sattr, guard *nfs3.Time) error {
	return s.call(ctx, "SETATTR", func(e *Export) error {
		d, err := e.find(file)
		if err != nil {
			return err
		}
		if set.SetUID && e.busy[string(file)] {
			return errBusy
		}
		if guard != nil && *guard != d.attr.Ctime {
			return nfs3.ErrNotSync
		}
		d.set(&set)
		e.touch(d)
		return nil
	})
}

// make adds a node to a directory, or finds the regular file that is to be made; the Net is locked.
func (e *Export) make(dir []byte, name string, t nfs3.Ftype, set *nfs3.Sattr) (*node, error) {
	d, err := e.dir(dir)
	switch {
	case err != nil:
		return nil, err
	case d.names[name] != nil && t == nfs3.TypeReg && d.names[name].attr.Type == t:
		return d.names[name], nil // UNCHECKED
	case d.names[name] != nil:
		return nil, nfs3.ErrExist
	case e.sick != nil:
		return nil, e.sick
	case e.noSpc:
		return nil, nfs3.ErrNoSpc
	}
	child := e.node(t)
	child.set(set)
	d.names[name] = child
	return child, nil
}

func (s *server) Create(ctx context.Context, dir []byte, name string, set nfs3.Sattr) (handle []byte, attr nfs3.PostOpAttr, err error) {
	err = s.call(ctx, "CREATE", func(e *Export) error {
		d, err := e.make(dir, name, nfs3.TypeReg, &set)
		if err == nil {
			handle, attr = e.handle(d), nfs3.PostOpAttr{Present: true, Attr: d.attr}
		}
		return err
	})
	return handle, attr, err
}

func (s *server) Mkdir(ctx context.Context, dir []byte, name string, set nfs3.Sattr) (handle []byte, err error) {
	err = s.call(ctx, "MKDIR", func(e *Export) error {
		d, err := e.make(dir, name, nfs3.TypeDir, &set)
		if err == nil {
			handle = e.handle(d)
		}
		return err
	})
	return handle, err
}

func (s *server) Remove(ctx context.Context, dir []byte, name string) error {
	return s.call(ctx, "REMOVE", func(e *Export) error {
		d, err := e.dir(dir)
		if err != nil {
			return err
		}
		child := d.names[name]
		if child == nil {
			return nfs3.ErrNoEnt
		}
		if child.names != nil {
			return nfs3.ErrIsDir
		}
		delete(d.names, name)
		delete(e.nodes, child.id)
		return nil
	})
}

func (s *server) Commit(ctx context.Context, file []byte) error {
	return s.call(ctx, "COMMIT", func(e *Export) error {
		_, err := e.find(file)
		return err
	})
}

// pageSize makes listings of a few files take several calls.
const pageSize = 3

func (s *server) ReadDir(ctx context.Context, dir []byte, cookie uint64, verf nfs3.CookieVerf) (res nfs3.ReaddirPlusRes, err error) {
	err = s.call(ctx, "READDIRPLUS", func(e *Export) error {
		d, err := e.dir(dir)
		if err != nil {
			return err
		}
		children := make([]nfs3.EntryPlus, 0, len(d.names))
		for name, child := range d.names {
			fh, err := nfs3.NewFileHandle(e.handle(child))
			if err != nil {
				return err
			}
			children = append(children, nfs3.EntryPlus{
				Entry: nfs3.Entry{FileID: child.id, Name: name, Cookie: child.id},
				Attr:  nfs3.PostOpAttr{Present: true, Attr: child.attr},
				FH:    nfs3.PostOpFH{Present: true, FH: fh},
			})
		}
		slices.SortFunc(children, func(a, b nfs3.EntryPlus) int { return cmp.Compare(a.Cookie, b.Cookie) })
		first, _ := slices.BinarySearchFunc(children, cookie+1, func(c nfs3.EntryPlus, at uint64) int { return cmp.Compare(c.Cookie, at) })
		rest := children[first:]
		res.EOF = len(rest) <= pageSize
		res.Entries = rest[:min(len(rest), pageSize)]
		return nil
	})
	return res, err
}

func (s *server) Close() error {
	s.closeOnce.Do(func() { close(s.closed) })
	return nil
}
