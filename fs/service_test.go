package fs

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// service is a metadata service in memory, with data servers in memory behind it.
type service struct {
	servers  []*targettest.Server
	unit     int64
	cookie   func(name string) uint64
	lease    time.Duration // 0: none are given
	mirrors  bool          // files have two copies of each column
	exacting bool          // and are to have two good ones
	filled   atomic.Bool   // they have them again
	patience time.Duration // of mounts with a copy that does not answer
	space    *space        // files lie on it, if there is one
	shards   int           // 0: one

	mu        sync.Mutex
	lastPlace uint64
	places    map[uint64]int64 // of appends, with their lengths, that nobody has said to be written or given up
	nodes     map[layout.FileID]*node
	last      layout.FileID
	sessions  []*session
	cutting   *sync.Cond // truncating has changed
	locks     fakeLocks
}

type node struct {
	leases     map[*session]metarpc.Lease
	changing   int          // no leases are given
	attr       metarpc.Attr // Size is the durable one
	entries    map[string]layout.FileID
	target     string
	xattrs     map[string][]byte
	files      []*layout.DataFile // all or only the first, nil if there are none
	second     []*layout.DataFile // the second copies, if the service makes any
	truncating bool
	blocks     blocks // if it lies on a namespace
}

// session is one client's. It is the Meta of one FS.
type session struct {
	s *service
	// hook is called before each call, with its name; an error ends the call.
	hook func(ctx context.Context, call string) error
	fs   *FS
	// commit is called before size reports and access times are taken; nil: nothing is. s.mu guards it.
	commit func(ctx context.Context, reports []metarpc.SizeReport)
	placed func() // after a place is given, before the caller goes on; nil: nothing
	// pinned is Pin; nil: there is nothing to pin, which takes data servers with files.
	// shared says that other sessions have the files open whose locks are set and taken away here, and may write what this one writes.
	shared atomic.Bool
	pinned func(ctx context.Context, id layout.FileID, mode layout.IOMode, copies metarpc.Pin) (*layout.DataFile, bool, error)

	// Guarded by s.mu:
	opens       map[layout.FileID]bool
	provisional map[layout.FileID]metarpc.SizeReport
	cache       map[layout.FileID][]layout.Segment
	writes      map[layout.FileID]writing
	holds       map[layout.FileID]layout.IOMode // what it has on a namespace
	cached      map[cached]bool                 // what the lease of the node covers
	granted     []layout.FileID                 // files that were made with a layout
	calls       map[string]int                  // that went to the service
	asked       map[string]int                  // of the FS
	dead        bool                            // its lease may have run out
	turns       map[chan struct{}]bool          // changes of names that wait
	silent      bool                            // nothing has been heard of the service for too long, for who waits on a soft mount
}

// writing is how a session writes to a file.
type writing uint8

const (
	appends writing = iota + 1
	writes
	writesAndAppends
)

// cached is something of a node that its session has asked for: a name of a directory, or its attributes.
type cached struct {
	id   layout.FileID
	name string
}

func newService(servers int, unit int64) *service {
	s := &service{unit: unit, cookie: spreadCookie, lease: time.Minute, nodes: map[layout.FileID]*node{}, last: layout.RootID, places: map[uint64]int64{}}
	s.cutting = sync.NewCond(&s.mu)
	for n := range servers {
		s.servers = append(s.servers, targettest.NewServer(uint64(n+1)))
	}
	at := time.Now().UnixNano()
	s.nodes[layout.RootID] = &node{
		attr:    metarpc.Attr{ID: layout.RootID, Mode: unix.S_IFDIR | 0755, Nlink: 2, Atime: at, Mtime: at, Ctime: at, Btime: at},
		entries: map[string]layout.FileID{}, xattrs: map[string][]byte{}, leases: map[*session]metarpc.Lease{},
	}
	return s
}

func (s *service) session() *session {
	m := &session{
		s: s, hook: func(context.Context, string) error { return nil },
		opens: map[layout.FileID]bool{}, provisional: map[layout.FileID]metarpc.SizeReport{},
		cache: map[layout.FileID][]layout.Segment{}, calls: map[string]int{}, asked: map[string]int{},
		writes: map[layout.FileID]writing{}, holds: map[layout.FileID]layout.IOMode{}, cached: map[cached]bool{},
		turns: map[chan struct{}]bool{},
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions = append(s.sessions, m)
	return m
}

// rig is an FS on a session, its data servers behind targets that can be made to fail.
type rig struct {
	*FS
	t      testing.TB
	s      *service
	m      *session
	plane  *dataplane.Plane
	faults []*faultytest.Target
	raw    *raw
	leaves bool // the test leaves data that is not stable
}

func newRig(t testing.TB, s *service, change ...func(*Config)) *rig {
	t.Helper()
	targets := map[layout.DeviceID]dataplane.Target{}
	var faults []*faultytest.Target
	for _, server := range s.servers {
		target := faultytest.New(server.NewTarget(1<<20, 1<<20), faultytest.Config{Seed: 1})
		targets[server.ID()] = target
		faults = append(faults, target)
	}
	r := newRigOver(t, s, targets, change...)
	r.faults = faults
	return r
}

// newRigOver makes a rig whose data servers are behind other targets.
func newRigOver(t testing.TB, s *service, targets map[layout.DeviceID]dataplane.Target, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, s: s, m: s.session()}
	log := slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	plane, err := dataplane.New(dataplane.Config{
		Dial:        func(id layout.DeviceID) (dataplane.Target, error) { return targets[id], nil },
		RetainBytes: 16 << 20, MirrorTimeout: s.patience, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.plane = plane
	cfg := Config{Meta: r.m, Data: plane, Log: log}
	for _, f := range change {
		f(&cfg)
	}
	if r.FS, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	r.m.fs = r.FS
	r.kernelThread = func(uint32) bool { return false } // any number is a thread here
	r.raw = r.RawFileSystem().(*raw)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := r.Close(ctx); err != nil {
			t.Logf("close: %v", err)
		}
		plane.Close()
		for _, f := range r.faults {
			f.Close()
		}
		for n := range r.buckets {
			if left := len(r.buckets[n].inodes); left > 0 && !t.Failed() && !r.leaves {
				t.Errorf("%d inodes are still held", left)
			}
		}
	})
	return r
}

// testLog passes log lines to a test.
type testLog struct{ t testing.TB }

func (l testLog) Write(b []byte) (int, error) {
	l.t.Log(string(b))
	return len(b), nil
}

func refusal(op metarpc.Op, e syscall.Errno) error {
	return &metarpc.Error{Op: op, Status: metarpc.Status(e)}
}

// enter begins a call; s.mu is held when it returns without an error.
func (m *session) enter(ctx context.Context, call string) error {
	m.s.mu.Lock()
	m.calls[call]++
	m.asked[call]++
	hook := m.hook
	m.s.mu.Unlock()
	if err := hook(ctx, call); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	m.s.mu.Lock()
	return nil
}

// called is how often a call was made.
func (m *session) called(call string) int {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	return m.calls[call]
}

// report tells how often each call was made since the last time it was told.
func (m *session) report(counts *map[string]int) string {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	var list []string
	for _, call := range slices.Sorted(maps.Keys(*counts)) {
		list = append(list, fmt.Sprintf("%s=%d", strings.ReplaceAll(call, " ", "-"), (*counts)[call]))
	}
	clear(*counts)
	return strings.Join(list, " ")
}

func (m *session) setHook(hook func(ctx context.Context, call string) error) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.hook = hook
}

// attr is a node's as everybody sees it. mu is held.
func (s *service) attr(n *node) metarpc.Attr {
	a := n.attr
	if n.xattrs[capability] != nil {
		a.Flags |= metarpc.AttrXattrs | metarpc.AttrCapability
	}
	for _, m := range s.sessions {
		if p, ok := m.provisional[a.ID]; ok {
			a.Size = max(a.Size, p.End)
			a.Mtime = max(a.Mtime, p.Mtime)
		}
	}
	if a.Mode&unix.S_IFMT == unix.S_IFLNK {
		a.Size = int64(len(n.target))
	}
	return a
}

func (m *session) node(op metarpc.Op, id layout.FileID) (*node, error) {
	n := m.s.nodes[id]
	if n == nil {
		return nil, refusal(op, syscall.ENOENT)
	}
	return n, nil
}

func (m *session) child(op metarpc.Op, parent layout.FileID, name string) (dir, n *node, err error) {
	if dir, err = m.node(op, parent); err != nil {
		return nil, nil, err
	}
	if dir.entries == nil {
		return nil, nil, refusal(op, syscall.ENOTDIR)
	}
	return dir, m.s.nodes[dir.entries[name]], nil
}

// hit reports whether a question can be answered without the service. mu is held.
func (m *session) hit(call string, id layout.FileID, name string, lease metarpc.Lease) bool {
	n := m.s.nodes[id]
	if n == nil || m.dead || !m.cached[cached{id, name}] || n.leases[m]&lease == 0 {
		return false
	}
	m.asked[call]++
	return true
}

// grant gives the session a lease if nothing is in the way. mu is held.
func (m *session) grantLease(n *node, name string, lease metarpc.Lease) (keep time.Duration) {
	for _, o := range m.s.sessions {
		if o != m && o.writes[n.attr.ID] != 0 {
			return 0
		}
	}
	if n.changing > 0 || m.s.lease == 0 || m.dead {
		return 0
	}
	n.leases[m] |= lease
	m.cached[cached{n.attr.ID, name}] = true
	return m.s.lease
}

// answer is what the session learns of a node. mu is held.
func (m *session) answer(n *node) metaclient.Answer {
	return metaclient.Answer{Keep: m.grantLease(n, "", metarpc.LeaseAttrs), Attr: m.s.attr(n)}
}

// change makes way for a change of what affects says, which may be called more than once: nobody else has leases there when
// it returns. mu is held, but not all the time.
func (m *session) change(affects func() []metarpc.LeaseItem) { m.changeUnless(affects, nil) }

// changeNames is change for a change of names, which is turned back if it stands in the way of a recall of the session,
// unless its caller would rather wait.
func (m *session) changeNames(ctx context.Context, op metarpc.Op, affects func() []metarpc.LeaseItem) error {
	y, ok := ctx.Value(metaclient.YieldKey{}).(metaclient.Yielder)
	if !m.changeUnless(affects, func() bool { return ok && y.Yields(op, true) }) {
		return &metarpc.Error{Op: op, Status: metarpc.StatusTurnedBack}
	}
	return nil
}

// changeUnless is change, but ends and reports false if the session is stuck and yields, which may be nil, agrees.
func (m *session) changeUnless(affects func() []metarpc.LeaseItem, yields func() bool) bool {
	s := m.s
	turned := make(chan struct{}, 1)
	if yields != nil {
		m.turns[turned] = true
		defer delete(m.turns, turned)
	}
	type opened struct {
		o  *session
		id layout.FileID
	}
	told := map[opened]bool{}
	for {
		items := map[*session][]metarpc.LeaseItem{}
		var nodes []*node
		for _, it := range affects() {
			n := s.nodes[it.ID]
			if n == nil {
				continue
			}
			nodes = append(nodes, n)
			for _, o := range s.sessions {
				had := n.leases[o]&it.Lease != 0
				if it.Lease&metarpc.LeaseData != 0 && o.opens[it.ID] && !told[opened{o, it.ID}] {
					had = true
					told[opened{o, it.ID}] = true
				}
				if o == m || !had {
					continue
				}
				n.leases[o] &^= it.Lease
				items[o] = append(items[o], it)
			}
		}
		if len(items) == 0 {
			return true
		}
		for _, n := range nodes {
			n.changing++
		}
		s.mu.Unlock()
		var recalls sync.WaitGroup
		for o, list := range items {
			if o.fs != nil {
				ctx := context.WithValue(context.Background(), metaclient.StuckKey{}, o.stuck)
				recalls.Go(func() { o.fs.OnLeaseRecall(ctx, list) })
			}
		}
		over := make(chan struct{})
		go func() { recalls.Wait(); close(over) }() // ends with the answers
		back := false
		for waiting := true; waiting && !back; {
			select {
			case <-over:
				waiting = false
			case <-turned:
				back = yields()
			}
		}
		s.mu.Lock()
		for _, n := range nodes {
			n.changing--
		}
		if back {
			return false
		}
	}
}

// stuck turns the session's changes back that wait.
func (m *session) stuck() {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	for turned := range m.turns {
		select {
		case turned <- struct{}{}:
		default:
		}
	}
}

// attrsOf is for changes of the attributes of one node.
func attrsOf(id layout.FileID) func() []metarpc.LeaseItem {
	return func() []metarpc.LeaseItem { return []metarpc.LeaseItem{{ID: id, Lease: metarpc.LeaseAttrs}} }
}

// names is for changes of names of one or more directories, and the nodes they lead to.
func (s *service) names(at ...metarpc.NameArgs) func() []metarpc.LeaseItem {
	return func() (items []metarpc.LeaseItem) {
		for _, a := range at {
			items = append(items, metarpc.LeaseItem{ID: a.Parent, Lease: metarpc.LeaseAttrs | metarpc.LeaseNames})
			if dir := s.nodes[a.Parent]; dir != nil && dir.entries[a.Name] != 0 {
				items = append(items, metarpc.LeaseItem{ID: dir.entries[a.Name], Lease: metarpc.LeaseAttrs})
			}
		}
		return items
	}
}

func (m *session) GetAttr(ctx context.Context, id layout.FileID) (metaclient.Answer, error) {
	if a, ok := m.CachedAttr(id); ok {
		return a, nil
	}
	if err := m.enter(ctx, "GetAttr"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	m.query(ctx, id)
	n, err := m.node(metarpc.OpGetAttr, id)
	if err != nil {
		return metaclient.Answer{}, err
	}
	return m.answer(n), nil
}

// query asks those who write to the file for the size. mu is held, but not all the time.
func (m *session) query(ctx context.Context, id layout.FileID) {
	for _, o := range m.s.sessions {
		if o != m && o.writes[id] >= writes && o.fs != nil {
			m.s.mu.Unlock()
			o.fs.OnSizeQuery(ctx, []layout.FileID{id})
			m.s.mu.Lock()
		}
	}
}

func (m *session) CachedAttr(id layout.FileID) (metaclient.Answer, bool) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if !m.hit("GetAttr", id, "", metarpc.LeaseAttrs) {
		return metaclient.Answer{}, false
	}
	return m.answer(m.s.nodes[id]), true
}

// KnownNames knows all there are.
func (m *session) KnownNames(f func(dir layout.FileID, name string, child layout.FileID)) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	for dir, n := range m.s.nodes {
		for name, child := range n.entries {
			f(dir, name, child)
		}
	}
}

func (m *session) Patient(ctx context.Context, _ layout.FileID) (context.Context, func()) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if !m.silent {
		return ctx, func() {}
	}
	waiting, cancel := context.WithCancelCause(ctx)
	cancel(errSilent)
	return waiting, func() {}
}

// errSilent is what calls end with that are given up.
var errSilent = layout.Patience{Time: time.Second, Errno: syscall.ETIMEDOUT}.Over(nil)

func (m *session) setSilent(silent bool) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.silent = silent
}

func (m *session) Shards() int { return max(1, m.s.shards) }

func (m *session) Alive(layout.FileID) bool {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	return !m.dead
}

func (m *session) SetAttr(ctx context.Context, cred metarpc.Cred, args *metarpc.SetAttrArgs) (metaclient.Answer, error) {
	if err := m.enter(ctx, "SetAttr"); err != nil {
		return metaclient.Answer{}, err
	}
	s := m.s
	defer s.mu.Unlock()
	if args.Mask&metarpc.SetSize != 0 {
		m.change(func() []metarpc.LeaseItem {
			return []metarpc.LeaseItem{{ID: args.ID, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}}
		})
		n, err := m.node(metarpc.OpSetAttr, args.ID)
		if err != nil {
			return metaclient.Answer{}, err
		}
		if err := m.truncate(ctx, n, args.Size); err != nil {
			return metaclient.Answer{}, err
		}
	}
	m.change(attrsOf(args.ID))
	n, err := m.node(metarpc.OpSetAttr, args.ID)
	if err != nil {
		return metaclient.Answer{}, err
	}
	at := time.Now().UnixNano()
	a := &n.attr
	if args.Mask&(metarpc.SetUID|metarpc.SetGID) != 0 && n.entries == nil {
		a.Mode &^= setIDBits(a.Mode)
	}
	if args.Mask&metarpc.ClearPrivileges != 0 {
		a.Mode &^= setIDBits(a.Mode)
	}
	if args.Mask&(metarpc.ClearPrivileges|metarpc.SetSize) != 0 {
		delete(n.xattrs, capability)
	}
	if args.Mask&metarpc.SetMode != 0 {
		a.Mode = a.Mode&unix.S_IFMT | args.Mode
	}
	if args.Mask&metarpc.SetUID != 0 {
		a.UID = args.UID
	}
	if args.Mask&metarpc.SetGID != 0 {
		a.GID = args.GID
	}
	if args.Mask&metarpc.SetAtime != 0 {
		a.Atime = args.Atime
	}
	if args.Mask&metarpc.SetAtimeNow != 0 {
		a.Atime = at
	}
	if args.Mask&(metarpc.SetMtime|metarpc.SetMtimeNow) != 0 {
		a.Mtime = args.Mtime
		if args.Mask&metarpc.SetMtimeNow != 0 {
			a.Mtime = at
		}
		for _, o := range s.sessions {
			if p, ok := o.provisional[a.ID]; ok {
				p.Mtime = 0
				o.provisional[a.ID] = p
			}
		}
	}
	a.Ctime = at
	return m.answer(n), nil
}

// truncate recalls the layouts of others, then cuts. mu is held, but not while it waits.
func (m *session) truncate(ctx context.Context, n *node, size int64) error {
	s, id := m.s, n.attr.ID
	for n.truncating {
		s.cutting.Wait()
	}
	n.truncating = true
	defer func() {
		n.truncating = false
		s.cutting.Broadcast()
	}()
	for _, o := range s.sessions {
		recalled := o != m && len(o.cache[id]) > 0
		if s.space != nil {
			recalled = o.holds[id] != 0 // also if it is the one that cuts
		}
		if !recalled || o.fs == nil {
			continue
		}
		s.mu.Unlock()
		err := o.fs.OnRecall(context.Background(), id, size, layout.ToEOF)
		s.mu.Lock()
		if err != nil {
			return err
		}
	}
	n.attr.Size = size
	if s.space != nil {
		s.cut(n, size)
	}
	for _, o := range s.sessions {
		if p, ok := o.provisional[id]; ok {
			p.End = min(p.End, size)
			o.provisional[id] = p
		}
	}
	for _, f := range n.files {
		s.server(f.Device).Truncate(f, size)
	}
	return nil
}

func (s *service) server(id layout.DeviceID) *targettest.Server {
	for _, server := range s.servers {
		if server.ID() == id {
			return server
		}
	}
	return nil
}

func (m *session) GetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) ([]byte, error) {
	if err := m.enter(ctx, "GetXattr"); err != nil {
		return nil, err
	}
	defer m.s.mu.Unlock()
	n, err := m.node(metarpc.OpGetXattr, id)
	if err != nil {
		return nil, err
	}
	v, ok := n.xattrs[name]
	if !ok {
		return nil, refusal(metarpc.OpGetXattr, syscall.ENODATA)
	}
	return v, nil
}

func (m *session) SetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string, value []byte, flags uint32) error {
	if err := m.enter(ctx, "SetXattr"); err != nil {
		return err
	}
	defer m.s.mu.Unlock()
	m.change(attrsOf(id))
	n, err := m.node(metarpc.OpSetXattr, id)
	if err != nil {
		return err
	}
	_, ok := n.xattrs[name]
	switch {
	case ok && flags&metarpc.XattrCreate != 0:
		return refusal(metarpc.OpSetXattr, syscall.EEXIST)
	case !ok && flags&metarpc.XattrReplace != 0:
		return refusal(metarpc.OpSetXattr, syscall.ENODATA)
	}
	n.xattrs[name] = slices.Clone(value)
	return nil
}

func (m *session) ListXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID) ([]string, error) {
	if err := m.enter(ctx, "ListXattr"); err != nil {
		return nil, err
	}
	defer m.s.mu.Unlock()
	n, err := m.node(metarpc.OpListXattr, id)
	if err != nil {
		return nil, err
	}
	return slices.Sorted(maps.Keys(n.xattrs)), nil
}

func (m *session) RemoveXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) error {
	if err := m.enter(ctx, "RemoveXattr"); err != nil {
		return err
	}
	defer m.s.mu.Unlock()
	m.change(attrsOf(id))
	n, err := m.node(metarpc.OpRemoveXattr, id)
	if err != nil {
		return err
	}
	if _, ok := n.xattrs[name]; !ok {
		return refusal(metarpc.OpRemoveXattr, syscall.ENODATA)
	}
	delete(n.xattrs, name)
	return nil
}

func (m *session) ReadLink(ctx context.Context, cred metarpc.Cred, id layout.FileID) (string, error) {
	if err := m.enter(ctx, "ReadLink"); err != nil {
		return "", err
	}
	defer m.s.mu.Unlock()
	n, err := m.node(metarpc.OpReadLink, id)
	if err != nil {
		return "", err
	}
	return n.target, nil
}

func (m *session) Lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (metaclient.Answer, error) {
	m.s.mu.Lock()
	hit := m.hit("Lookup", parent, name, metarpc.LeaseNames)
	if hit {
		id := m.s.nodes[parent].entries[name]
		hit = id == 0 || m.cached[cached{id, ""}] && m.s.nodes[id].leases[m]&metarpc.LeaseAttrs != 0
	}
	if hit {
		defer m.s.mu.Unlock()
		return m.lookup(parent, name)
	}
	m.s.mu.Unlock()
	if err := m.enter(ctx, "Lookup"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	if dir := m.s.nodes[parent]; dir != nil {
		m.query(ctx, dir.entries[name])
	}
	return m.lookup(parent, name)
}

func (m *session) lookup(parent layout.FileID, name string) (a metaclient.Answer, err error) {
	dir, n, err := m.child(metarpc.OpLookup, parent, name)
	if err != nil {
		return a, err
	}
	if n == nil {
		a, err = metaclient.Answer{}, refusal(metarpc.OpLookup, syscall.ENOENT)
	} else {
		a = m.answer(n)
	}
	a.KeepName = m.grantLease(dir, name, metarpc.LeaseNames)
	return a, err
}

// add makes a node with a name. mu is held.
func (m *session) add(op metarpc.Op, cred metarpc.Cred, parent layout.FileID, name string, mode, rdev uint32, target string) (*node, error) {
	dir, n, err := m.child(op, parent, name)
	if err == nil && n != nil {
		err = refusal(op, syscall.EEXIST)
	}
	if err != nil {
		return nil, err
	}
	s := m.s
	s.last++
	at := time.Now().UnixNano()
	n = &node{
		attr:   metarpc.Attr{ID: s.last, Mode: mode, Nlink: 1, UID: cred.UID, GID: cred.GID, Rdev: rdev, Atime: at, Mtime: at, Ctime: at, Btime: at},
		target: target, xattrs: map[string][]byte{}, leases: map[*session]metarpc.Lease{},
	}
	if mode&unix.S_IFMT == unix.S_IFDIR {
		n.entries = map[string]layout.FileID{}
		n.attr.Nlink = 2
		dir.attr.Nlink++
	}
	s.nodes[s.last] = n
	dir.entries[name] = s.last
	dir.attr.Mtime, dir.attr.Ctime = at, at
	return n, nil
}

// made is the answer to a call that has made a name.
func (m *session) made(n *node, parent layout.FileID, name string) metaclient.Answer {
	a := m.answer(n)
	a.KeepName = m.grantLease(m.s.nodes[parent], name, metarpc.LeaseNames)
	return a
}

func (m *session) MakeNode(ctx context.Context, cred metarpc.Cred, args *metarpc.MakeNodeArgs) (metaclient.Answer, error) {
	if err := m.enter(ctx, "MakeNode"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	err := m.changeNames(ctx, metarpc.OpMakeNode, m.s.names(metarpc.NameArgs{Parent: args.Parent, Name: args.Name}))
	if err != nil {
		return metaclient.Answer{}, err
	}
	mode := args.Mode
	if args.Target == "" {
		mode &^= args.Umask
	}
	n, err := m.add(metarpc.OpMakeNode, cred, args.Parent, args.Name, mode, args.Rdev, args.Target)
	if err != nil {
		return metaclient.Answer{}, err
	}
	return m.made(n, args.Parent, args.Name), nil
}

func (m *session) Link(ctx context.Context, cred metarpc.Cred, id, parent layout.FileID, name string) (metaclient.Answer, error) {
	if err := m.enter(ctx, "Link"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	err := m.changeNames(ctx, metarpc.OpLink, func() []metarpc.LeaseItem {
		return append(attrsOf(id)(), m.s.names(metarpc.NameArgs{Parent: parent, Name: name})()...)
	})
	if err != nil {
		return metaclient.Answer{}, err
	}
	n, err := m.node(metarpc.OpLink, id)
	if err != nil {
		return metaclient.Answer{}, err
	}
	dir, there, err := m.child(metarpc.OpLink, parent, name)
	if err == nil && there != nil {
		err = refusal(metarpc.OpLink, syscall.EEXIST)
	}
	if err != nil {
		return metaclient.Answer{}, err
	}
	dir.entries[name] = id
	n.attr.Nlink++
	return m.made(n, parent, name), nil
}

// unlink takes away one name. mu is held.
func (s *service) unlink(dir *node, name string) {
	n := s.nodes[dir.entries[name]]
	delete(dir.entries, name)
	n.attr.Nlink--
	if n.entries != nil {
		n.attr.Nlink = 0
		dir.attr.Nlink--
	}
	s.reap(n)
}

// reap removes a node without names that nobody has open. mu is held.
func (s *service) reap(n *node) {
	if n.attr.Nlink > 0 {
		return
	}
	for _, m := range s.sessions {
		if m.opens[n.attr.ID] {
			return
		}
	}
	delete(s.nodes, n.attr.ID)
}

func (m *session) Remove(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string, dir bool) error {
	if err := m.enter(ctx, "Remove"); err != nil {
		return err
	}
	defer m.s.mu.Unlock()
	if err := m.changeNames(ctx, metarpc.OpRemove, m.s.names(metarpc.NameArgs{Parent: parent, Name: name})); err != nil {
		return err
	}
	d, n, err := m.child(metarpc.OpRemove, parent, name)
	switch {
	case err != nil:
		return err
	case n == nil:
		return refusal(metarpc.OpRemove, syscall.ENOENT)
	case dir && n.entries == nil:
		return refusal(metarpc.OpRemove, syscall.ENOTDIR)
	case !dir && n.entries != nil:
		return refusal(metarpc.OpRemove, syscall.EISDIR)
	case len(n.entries) > 0:
		return refusal(metarpc.OpRemove, syscall.ENOTEMPTY)
	}
	m.s.unlink(d, name)
	return nil
}

func (m *session) Rename(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error {
	if err := m.enter(ctx, "Rename"); err != nil {
		return err
	}
	defer m.s.mu.Unlock()
	err := m.changeNames(ctx, metarpc.OpRename, m.s.names(metarpc.NameArgs{Parent: args.OldParent, Name: args.OldName},
		metarpc.NameArgs{Parent: args.NewParent, Name: args.NewName}))
	if err != nil {
		return err
	}
	from, n, err := m.child(metarpc.OpRename, args.OldParent, args.OldName)
	if err != nil {
		return err
	}
	to, there, err := m.child(metarpc.OpRename, args.NewParent, args.NewName)
	switch {
	case err != nil:
		return err
	case n == nil:
		return refusal(metarpc.OpRename, syscall.ENOENT)
	case there != nil && args.Flags&metarpc.RenameNoReplace != 0:
		return refusal(metarpc.OpRename, syscall.EEXIST)
	case there == nil && args.Flags&metarpc.RenameExchange != 0:
		return refusal(metarpc.OpRename, syscall.ENOENT)
	case n == there:
		return nil
	}
	if args.Flags&metarpc.RenameExchange != 0 {
		from.entries[args.OldName], to.entries[args.NewName] = there.attr.ID, n.attr.ID
		return nil
	}
	if there != nil {
		if (n.entries == nil) != (there.entries == nil) {
			return refusal(metarpc.OpRename, syscall.EISDIR)
		}
		if len(there.entries) > 0 {
			return refusal(metarpc.OpRename, syscall.ENOTEMPTY)
		}
		m.s.unlink(to, args.NewName)
	}
	delete(from.entries, args.OldName)
	to.entries[args.NewName] = n.attr.ID
	if n.entries != nil {
		from.attr.Nlink--
		to.attr.Nlink++
	}
	return nil
}

// spreadCookie makes cookies as the service does.
func spreadCookie(name string) uint64 {
	h := sha256.Sum256([]byte(name))
	return max(binary.BigEndian.Uint64(h[:])>>1, metarpc.FirstCookie)
}

func (m *session) ReadDir(ctx context.Context, cred metarpc.Cred, id layout.FileID, cookie uint64, limit int) (*metaclient.DirPage, error) {
	if err := m.enter(ctx, "ReadDir"); err != nil {
		return nil, err
	}
	defer m.s.mu.Unlock()
	n, err := m.node(metarpc.OpReadDir, id)
	if err != nil {
		return nil, err
	}
	var all []metaclient.DirEntry
	for name, id := range n.entries {
		if c := m.s.cookie(name); c > cookie {
			all = append(all, metaclient.DirEntry{Name: name, Cookie: c, Answer: metaclient.Answer{Attr: metarpc.Attr{ID: id}}})
		}
	}
	slices.SortFunc(all, func(a, b metaclient.DirEntry) int {
		return cmp.Or(cmp.Compare(a.Cookie, b.Cookie), cmp.Compare(a.Name, b.Name))
	})
	page := min(limit, len(all))
	for page > 0 && page < len(all) && all[page].Cookie == all[page-1].Cookie {
		page++
	}
	for i := range all[:page] {
		a := &all[i].Answer
		*a = m.answer(m.s.nodes[a.Attr.ID])
		a.KeepName = m.grantLease(n, all[i].Name, metarpc.LeaseNames)
	}
	return &metaclient.DirPage{Entries: all[:page], EOF: page == len(all)}, nil
}

func (m *session) Parent(ctx context.Context, id, top layout.FileID) (layout.FileID, error) {
	if err := m.enter(ctx, "Parent"); err != nil {
		return 0, err
	}
	defer m.s.mu.Unlock()
	if _, err := m.node(metarpc.OpParent, id); err != nil {
		return 0, err
	}
	parent := m.s.parent(id)
	for at := id; at != top; at = m.s.parent(at) {
		if at == layout.RootID || at == 0 {
			return 0, refusal(metarpc.OpParent, syscall.EACCES)
		}
	}
	return parent, nil
}

// parent is a directory that has a name of an inode; mu is held.
func (s *service) parent(id layout.FileID) layout.FileID {
	for dir, n := range s.nodes {
		for _, child := range n.entries {
			if child == id {
				return dir
			}
		}
	}
	return 0
}

func (m *session) StatFS(ctx context.Context, _ layout.FileID) (metarpc.StatFSResult, error) {
	if err := m.enter(ctx, "StatFS"); err != nil {
		return metarpc.StatFSResult{}, err
	}
	defer m.s.mu.Unlock()
	return metarpc.StatFSResult{Total: 1 << 40, Free: 1 << 39, Avail: 1 << 38, Files: int64(len(m.s.nodes))}, nil
}

func (m *session) Open(ctx context.Context, cred metarpc.Cred, args *metarpc.OpenArgs) (metaclient.Answer, error) {
	if err := m.enter(ctx, "Open"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	m.query(ctx, args.ID)
	n, err := m.node(metarpc.OpOpen, args.ID)
	if err != nil {
		return metaclient.Answer{}, err
	}
	m.opens[args.ID] = true
	return m.answer(n), nil
}

func (m *session) Create(ctx context.Context, cred metarpc.Cred, args *metarpc.CreateArgs) (metaclient.Answer, bool, error) {
	if err := m.enter(ctx, "Create"); err != nil {
		return metaclient.Answer{}, false, err
	}
	defer m.s.mu.Unlock()
	err := m.changeNames(ctx, metarpc.OpCreate, m.s.names(metarpc.NameArgs{Parent: args.Parent, Name: args.Name}))
	if err != nil {
		return metaclient.Answer{}, false, err
	}
	_, n, err := m.child(metarpc.OpCreate, args.Parent, args.Name)
	if err == nil && n != nil && args.Exclusive {
		err = refusal(metarpc.OpCreate, syscall.EEXIST)
	}
	if err != nil {
		return metaclient.Answer{}, false, err
	}
	created := n == nil
	if created {
		if n, err = m.add(metarpc.OpCreate, cred, args.Parent, args.Name, unix.S_IFREG|args.Mode&^args.Umask, 0, ""); err != nil {
			return metaclient.Answer{}, false, err
		}
	}
	m.opens[n.attr.ID] = true
	if created && args.Layout && m.s.space == nil {
		m.granted = append(m.granted, n.attr.ID)
		m.claim(n.attr.ID, writes)
		if _, err := m.grant(n.attr.ID, layout.IOModeRW, 0, 1); err != nil {
			return metaclient.Answer{}, false, err
		}
	}
	return m.made(n, args.Parent, args.Name), created, nil
}

// claim takes the leases of others on a file that the session is going to write to. mu is held, but not all the time.
func (m *session) claim(id layout.FileID, how writing) {
	m.writes[id] = max(m.writes[id], how) // from now on others get no leases
	m.change(func() []metarpc.LeaseItem {
		return []metarpc.LeaseItem{{ID: id, Lease: metarpc.LeaseAttrs | metarpc.LeaseData}}
	})
}

func (m *session) Reserve(ctx context.Context, args *metarpc.ReserveArgs, got func(metarpc.ReserveResult)) error {
	r, err := m.reserve(ctx, args)
	if err == nil {
		got(r)
		if m.placed != nil {
			m.placed()
		}
	}
	return err
}

func (m *session) reserve(ctx context.Context, args *metarpc.ReserveArgs) (r metarpc.ReserveResult, err error) {
	if err := m.enter(ctx, "Reserve"); err != nil {
		return r, err
	}
	defer m.s.mu.Unlock()
	m.s.settle(args.Ended, args.GivenUp)
	m.claim(args.ID, appends)
	m.query(ctx, args.ID)
	f, err := m.node(metarpc.OpReserve, args.ID)
	if err != nil {
		return r, err
	}
	m.s.lastPlace++
	m.s.places[m.s.lastPlace] = args.Len
	r = metarpc.ReserveResult{Off: m.s.attr(f).Size, Mtime: max(f.attr.Mtime, time.Now().UnixNano()), Number: m.s.lastPlace}
	f.attr.Size, f.attr.Mtime = r.Off+args.Len, r.Mtime // others see it before it is written
	return r, nil
}

// settle takes note of what becomes of places. mu is held.
func (s *service) settle(ended, givenUp []uint64) {
	for _, n := range slices.Concat(ended, givenUp) {
		delete(s.places, n)
	}
}

func (m *session) TmpFile(ctx context.Context, cred metarpc.Cred, args *metarpc.TmpFileArgs) (metaclient.Answer, error) {
	if err := m.enter(ctx, "TmpFile"); err != nil {
		return metaclient.Answer{}, err
	}
	defer m.s.mu.Unlock()
	const name = "\x00" // which no other file has
	n, err := m.add(metarpc.OpTmpFile, cred, args.Parent, name, unix.S_IFREG|args.Mode&^args.Umask, 0, "")
	if err != nil {
		return metaclient.Answer{}, err
	}
	delete(m.s.nodes[args.Parent].entries, name)
	n.attr.Nlink = 0
	m.opens[n.attr.ID] = true
	return m.answer(n), nil
}

// Pin has what pinned says.
func (m *session) Pin(ctx context.Context, id layout.FileID, mode layout.IOMode, copies metarpc.Pin) (*layout.DataFile, bool, error) {
	if m.pinned == nil {
		return nil, false, nil
	}
	return m.pinned(ctx, id, mode, copies)
}

func (m *session) Release(id layout.FileID) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	delete(m.opens, id)
	if n := m.s.nodes[id]; n != nil {
		m.s.reap(n)
	}
}

func (m *session) LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error) {
	call := "LayoutCommit"
	switch {
	case provisional:
		call = "LayoutCommit provisional"
	case !slices.ContainsFunc(reports, func(r metarpc.SizeReport) bool { return r.Atime == 0 }):
		call = "LayoutCommit atimes"
	}
	m.s.mu.Lock()
	commit := m.commit
	m.s.mu.Unlock()
	if commit != nil {
		commit(ctx, reports)
	}
	if err := m.enter(ctx, call); err != nil {
		return nil, err
	}
	defer m.s.mu.Unlock()
	var attrs []metarpc.Attr
	for _, r := range reports {
		n := m.s.nodes[r.ID]
		m.s.settle(r.Ended, r.GivenUp)
		switch {
		case n == nil:
			attrs = append(attrs, metarpc.Attr{})
			continue
		case len(r.Written) > 0 && !m.s.validate(n, r.Written):
			return nil, refusal(metarpc.OpLayoutCommit, syscall.ESTALE)
		case provisional:
			p := m.provisional[r.ID]
			m.provisional[r.ID] = metarpc.SizeReport{ID: r.ID, End: max(p.End, r.End), Mtime: max(p.Mtime, r.Mtime)}
		default:
			setTimes(&n.attr, r.Set)
			if p, ok := m.provisional[r.ID]; ok && r.Set.Mask&metarpc.SetMtime != 0 {
				p.Mtime = 0
				m.provisional[r.ID] = p
			}
			n.attr.Size = max(n.attr.Size, r.End)
			n.attr.Mtime = max(n.attr.Mtime, r.Mtime)
			n.attr.Atime = max(n.attr.Atime, r.Atime)
		}
		attrs = append(attrs, m.s.attr(n))
	}
	return attrs, nil
}

// There are no caches here.
func (m *session) CacheStart(context.Context, metarpc.Cred, *metarpc.CacheStartArgs) (*metarpc.CacheStartResult, error) {
	return nil, errors.ErrUnsupported
}

func (m *session) CacheDone(context.Context, layout.FileID, metarpc.CopyRef) error {
	return errors.ErrUnsupported
}

func (m *session) CacheDrop(context.Context, metarpc.Cred, layout.FileID, layout.DeviceID) (metarpc.CacheDropResult, error) {
	return metarpc.CacheDropResult{}, errors.ErrUnsupported
}

func (m *session) DescribeLayout(context.Context, layout.FileID) (*metarpc.Described, error) {
	return nil, errors.ErrUnsupported
}

func (m *session) LayoutError(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef, _ string) error {
	if err := m.enter(ctx, "LayoutError"); err != nil {
		return err
	}
	n, err := m.node(metarpc.OpLayoutError, id)
	if err != nil {
		m.s.mu.Unlock()
		return err
	}
	var stale []metarpc.CopyRef
	for k := range n.files {
		for _, ref := range copies {
			good := 0
			var named *layout.DataFile
			for _, d := range append([]*layout.DataFile{n.files[k]}, n.mirrored(k)...) {
				if d.State == layout.CopyGood {
					good++
				}
				if d.Device == ref.Device && bytes.Equal(d.Handles[0], ref.Handle) {
					named = d
				}
			}
			if named != nil && good > 1 {
				changed := *named
				changed.State = layout.CopyStale
				n.exchange(named, &changed)
			}
		}
	}
	for _, d := range append(slices.Clone(n.files), n.second...) {
		if d.State == layout.CopyStale {
			stale = append(stale, metarpc.CopyRef{Device: d.Device, Handle: d.Handles[0]})
		}
	}
	sessions := slices.Clone(m.s.sessions)
	m.s.mu.Unlock()
	for _, o := range sessions {
		if o.fs != nil && len(stale) > 0 {
			o.fs.OnCopiesStale(id, stale)
		}
	}
	return nil
}

// mirrored is the second copy of a column, if there is one.
func (n *node) mirrored(k int) []*layout.DataFile {
	if k < len(n.second) {
		return n.second[k : k+1]
	}
	return nil
}

func (n *node) exchange(old, now *layout.DataFile) {
	for _, files := range [][]*layout.DataFile{n.files, n.second} {
		for k := range files {
			if files[k] == old {
				files[k] = now
			}
		}
	}
}

func (m *session) Layout(ctx context.Context, id layout.FileID, mode layout.IOMode, off, n int64, use metaclient.Writes) (*layout.Segment, error) {
	how := writing(0)
	if mode == layout.IOModeRW {
		how = map[metaclient.Writes]writing{metaclient.AtPlaces: appends, metaclient.Anywhere: writes, metaclient.AtEnd: writesAndAppends}[use]
	}
	for {
		m.s.mu.Lock()
		claimed := m.writes[id] >= how
		m.s.mu.Unlock()
		if seg := m.CachedLayout(id, mode, off, n); seg != nil && claimed {
			return seg, nil
		}
		if err := m.enter(ctx, "Layout"); err != nil {
			return nil, err
		}
		if how != 0 {
			m.claim(id, how)
		}
		granted, err := m.grant(id, mode, off, n)
		m.s.mu.Unlock()
		if err != nil || !granted {
			return nil, err
		}
	}
}

// awaited reports whether the service knows that the session appends under a lease.
func (m *session) awaited(id layout.FileID) bool {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	return m.writes[id] == writesAndAppends
}

func (m *session) Renew(ctx context.Context, id layout.FileID) ([]layout.Segment, error) {
	if err := m.enter(ctx, "Renew"); err != nil {
		return nil, err
	}
	defer m.s.mu.Unlock()
	f, err := m.node(metarpc.OpLayoutGet, id)
	if err != nil {
		return nil, err
	}
	if m.s.space != nil {
		return []layout.Segment{m.s.extents(f, layout.IOModeRW, layout.Range{Len: layout.ToEOF})}, nil
	}
	seg := m.segment(f, layout.IOModeRW)
	return []layout.Segment{seg}, nil
}

// grant adds segments to the cache. It reports false for a hole. mu is held.
func (m *session) grant(id layout.FileID, mode layout.IOMode, off, n int64) (bool, error) {
	s := m.s
	f, err := m.node(metarpc.OpLayoutGet, id)
	if err != nil {
		return false, err
	}
	for f.truncating {
		s.cutting.Wait()
	}
	if s.space != nil {
		return true, m.grantExtents(f, mode, off, n)
	}
	if mode == layout.IOModeRW {
		want := 1
		if n > s.unit-off {
			want = len(s.servers)
		}
		for k := len(f.files); k < want; k++ {
			f.files = append(f.files, s.servers[(int(id)+k)%len(s.servers)].NewFile())
			if s.mirrors {
				f.second = append(f.second, s.servers[(int(id)+k+1)%len(s.servers)].NewFile())
			}
		}
	}
	seg := m.segment(f, mode)
	if len(f.files) == 0 || !seg.Contains(off, 1) {
		return false, nil
	}
	m.cache[id] = append(m.cache[id], seg)
	return true, nil
}

// segment is how a file's data files are used now. mu is held.
func (m *session) segment(f *node, mode layout.IOMode) layout.Segment {
	s := m.s
	seg := layout.Segment{IOMode: mode, StripeUnit: s.unit, Range: layout.Range{Len: layout.ToEOF}, Mirrors: make([]layout.Mirror, 1)}
	seg.Shared = mode == layout.IOModeRW && m.shared.Load()
	for _, d := range f.files {
		seg.Mirrors[0].Servers = append(seg.Mirrors[0].Servers, *d)
	}
	if s.mirrors {
		seg.Mirrors = append(seg.Mirrors, layout.Mirror{})
		for _, d := range f.second {
			seg.Mirrors[1].Servers = append(seg.Mirrors[1].Servers, *d)
		}
	}
	if seg.Exacting = s.exacting; s.exacting && !s.filled.Load() {
		stale := func(d *layout.DataFile) bool { return d.State == layout.CopyStale }
		seg.Few = slices.ContainsFunc(f.files, stale) || slices.ContainsFunc(f.second, stale)
	}
	if len(f.files) < len(s.servers) {
		seg.Len = s.unit
	}
	return seg
}

func (m *session) CachedLayout(id layout.FileID, mode layout.IOMode, off, n int64) *layout.Segment {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	l := layout.Layout{Segments: m.cache[id]}
	seg, _ := l.Find(mode, off, n)
	return seg
}

func (m *session) DropLayout(id layout.FileID, off int64) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.cache[id] = slices.DeleteFunc(slices.Clone(m.cache[id]), func(seg layout.Segment) bool {
		return seg.Overlaps(layout.Range{Off: off, Len: layout.ToEOF})
	})
}

func (m *session) DropExtents(id layout.FileID, off int64) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.cache[id] = slices.DeleteFunc(slices.Clone(m.cache[id]), func(seg layout.Segment) bool {
		return seg.OnNamespaces && seg.Overlaps(layout.Range{Off: off, Len: layout.ToEOF})
	})
}

func (m *session) Forget(id layout.FileID) {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	delete(m.cache, id)
	delete(m.writes, id)
	delete(m.holds, id)
}
