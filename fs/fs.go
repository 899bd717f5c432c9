package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// Meta is what an FS needs of the metadata service; *metaclient.Volume is one.
//
// Calls wait through lost connections until they are answered or ctx ends; a refusal is a *metarpc.Error. The service
// may carry out a call after the end of its ctx. Values of the contexts that OnRecall and OnReset are called with are
// passed on.
type Meta interface {
	GetAttr(ctx context.Context, id layout.FileID) (metaclient.Answer, error)
	// CachedAttr is GetAttr if that needs no question, because there is a lease on the attributes. It does not block.
	CachedAttr(id layout.FileID) (metaclient.Answer, bool)
	SetAttr(ctx context.Context, cred metarpc.Cred, args *metarpc.SetAttrArgs) (metaclient.Answer, error)
	GetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) ([]byte, error)
	SetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string, value []byte, flags uint32) error
	ListXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID) ([]string, error)
	RemoveXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) error
	ReadLink(ctx context.Context, cred metarpc.Cred, id layout.FileID) (string, error)

	// KnownNames calls f, which must ask for nothing here, with the names of which it is known what they lead to. It does not block.
	KnownNames(f func(dir layout.FileID, name string, child layout.FileID))
	// Lookup's Answer tells with ENOENT, too, how long that may be kept.
	Lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (metaclient.Answer, error)
	// Parent returns the directory that a directory is in. An inode that is not below top, or top itself, is an error.
	Parent(ctx context.Context, id, top layout.FileID) (layout.FileID, error)
	MakeNode(ctx context.Context, cred metarpc.Cred, args *metarpc.MakeNodeArgs) (metaclient.Answer, error)
	Link(ctx context.Context, cred metarpc.Cred, id, parent layout.FileID, name string) (metaclient.Answer, error)
	Remove(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string, dir bool) error
	Rename(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error
	ReadDir(ctx context.Context, cred metarpc.Cred, id layout.FileID, cookie uint64, limit int) (*metaclient.DirPage, error)
	StatFS(ctx context.Context, id layout.FileID) (metarpc.StatFSResult, error)

	// Open, Create and TmpFile open a file for the whole session, however often they are called; one Release, which does not
	// wait, ends that.
	Open(ctx context.Context, cred metarpc.Cred, args *metarpc.OpenArgs) (metaclient.Answer, error)
	Create(ctx context.Context, cred metarpc.Cred, args *metarpc.CreateArgs) (answer metaclient.Answer, created bool, err error)
	TmpFile(ctx context.Context, cred metarpc.Cred, args *metarpc.TmpFileArgs) (metaclient.Answer, error)
	Release(id layout.FileID)
	LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error)
	// LayoutError says which copies of a file may differ from the others. What becomes of them has been told to OnCopiesStale
	// when it returns nil.
	LayoutError(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef, reason string) error
	// CacheStart begins a cache of a file that is open, CacheDone ends it; CacheDrop takes the one on a device away.
	CacheStart(ctx context.Context, cred metarpc.Cred, args *metarpc.CacheStartArgs) (*metarpc.CacheStartResult, error)
	CacheDone(ctx context.Context, id layout.FileID, cache metarpc.CopyRef) error
	CacheDrop(ctx context.Context, cred metarpc.Cred, id layout.FileID, dev layout.DeviceID) (metarpc.CacheDropResult, error)
	DescribeLayout(ctx context.Context, id layout.FileID) (*metarpc.Described, error)
	// Reserve finds the place of an append at the end of the file, and the time of the append. It calls got with the
	// place, even if ctx has ended, and before OnReset for a later instance of the service. got must not block.
	Reserve(ctx context.Context, args *metarpc.ReserveArgs, got func(metarpc.ReserveResult)) error

	// Layout returns a segment that holds the byte at off and may be used for mode, asking the service if none is
	// cached; nil is a hole. A layout for AtPlaces is used only where Reserve has said, so that nobody has to ask us
	// for the size; that ends with the first call for other writes. CachedLayout returns a segment only if it is
	// cached, and neither blocks nor does I/O. DropLayout makes the service be asked again from off on; Forget gives
	// all layouts of a file back that is not being written.
	Layout(ctx context.Context, id layout.FileID, mode layout.IOMode, off, n int64, writes metaclient.Writes) (*layout.Segment, error)
	CachedLayout(id layout.FileID, mode layout.IOMode, off, n int64) *layout.Segment
	DropLayout(id layout.FileID, off int64)
	// DropExtents is DropLayout of those segments that are on NVMe namespaces.
	DropExtents(id layout.FileID, off int64)
	Forget(id layout.FileID)
	// Renew returns segments with which what was written before may be committed, though layouts may have changed since. It may be called
	// while a recall is answered, as the service waits for nobody then.
	Renew(ctx context.Context, id layout.FileID) ([]layout.Segment, error)
	// Pin has a copy of an open file on this host kept up to date, for the kernel to read or with IOModeRW to write by itself,
	// until Release; nil if there is none. several says that there are other copies.
	Pin(ctx context.Context, id layout.FileID, mode layout.IOMode, copies metarpc.Pin) (df *layout.DataFile, several bool, err error)

	// Lock sets a lock or takes it away. With Wait it waits until it has the lock or ctx ends, which leaves everything as it
	// was; otherwise a lock that others have is EAGAIN. TestLock finds out who would be in the way. DropLocks takes all
	// locks of an owner on a file away; it does not wait, and the channel is closed when that is done.
	Lock(ctx context.Context, args *metarpc.LockArgs, stable func(context.Context) error) (shared bool, err error)
	TestLock(ctx context.Context, args *metarpc.LockArgs) (metarpc.LockResult, error)
	DropLocks(id layout.FileID, flock bool, owner uint64, stable func(context.Context) error) <-chan struct{}
	// Patient returns a context for who waits for what the service of the inode's shard has to do first. It ends with ctx, and if that is marked
	// by metaclient.Soft also when a call would be given up, with the call's error as its cause. stop follows.
	Patient(ctx context.Context, id layout.FileID) (waiting context.Context, stop func())
	// Alive reports whether the session with the service of the inode's shard cannot have ended yet by our own clock: whatever the service has
	// to tell us of the inode before it lets others make changes has been told.
	Alive(id layout.FileID) bool
	// Shards is in how many shards the inodes are, each of which another service may have (layout.ShardOf). It never changes.
	Shards() int
}

// Config is what an FS is made of.
type Config struct {
	Meta Meta
	Data *dataplane.Plane
	// Root is the directory to show as the root of the mount; 0 means the volume's.
	Root  layout.FileID
	Atime Atime // the zero value is relatime
	// CachePages lets the kernel keep pages of files that are opened for reading only, as long as leases allow.
	CachePages bool
	// StableClose makes close(2) of a file that is open for writing wait for what fsync(2) waits for.
	StableClose bool
	// ReadAhead is how far a file is read ahead that is read from front to back, in bytes, for each open file. 0 is not at all.
	// All together get memory for 16 times as much.
	ReadAhead int64
	// Passthrough says what the kernel serves by itself, of files with a copy that Lend lends a descriptor of, which is the caller's then:
	// those with no other copies, and those that Copies allows besides.
	Passthrough Passthrough
	Copies      metarpc.Pin
	Lend        func(ctx context.Context, df *layout.DataFile, write bool) (fd int, err error)
	// Near returns the data servers on this host, for files that are to be cached there; nil = there are none.
	Near func() []layout.DeviceID
	// Patience is for how long an fsync waits for further copies of a file, on a soft mount. The zero value is for
	// ever.
	Patience layout.Patience
	Log      *slog.Logger // nil means slog.Default()
}

// Validate checks the configuration and fills what is not set.
func (c *Config) Validate() error {
	switch {
	case c.Meta == nil:
		return errors.New("fs: no metadata service")
	case c.Data == nil:
		return errors.New("fs: no data plane")
	case c.Passthrough != PassNone && c.Lend == nil:
		return errors.New("fs: passthrough without anybody to lend data files")
	case c.ReadAhead != 0 && (c.ReadAhead < MinReadAhead || c.ReadAhead > MaxReadAhead):
		return fmt.Errorf("fs: read-ahead of %d bytes: want 0 or %d to %d", c.ReadAhead, MinReadAhead, MaxReadAhead)
	}
	if c.Root == 0 {
		c.Root = layout.RootID
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return nil
}

// FS is a volume as one mount shows it. StartRead and StartWrite serve data, RawFileSystem everything else.
type FS struct {
	meta Meta
	data *dataplane.Plane
	root layout.FileID
	log  *slog.Logger

	nearby  func() []layout.DeviceID
	caching caching

	kernel atomic.Pointer[kernel] // nil while there is no mount
	pages  *keptPages             // nil if the kernel is not to keep any
	places *places
	kept   keptNames
	ahead  *readAhead // nil: files are not read ahead
	pass   passthrough

	stableClose bool
	patience    layout.Patience
	// forgetting has an element for each thread that is in the kernel to drop pages.
	forgetting chan struct{}

	// ctx is what work runs under that no request waits for. It ends when Close has done all it could.
	ctx  context.Context
	stop context.CancelFunc
	// work counts the goroutines that run under ctx.
	work sync.WaitGroup

	// sessions are those with the services, by shard; see OnLost.
	sessions []atomic.Pointer[sessionLife]

	// clock counts questions to the service, and the changes after which answers to earlier ones about a size are out of date.
	clock atomic.Uint64

	waiting limiter // of messages about what is being tried again
	failing limiter // of messages about what has failed

	buckets  [64]bucket
	handles  handleTable
	flusher  flusher
	accesses *accesses
	given    given

	// filling says that of the files that were made here the last one of which that is known was written, and not closed empty. So the next one
	// is likely to be, and is made with a layout.
	filling atomic.Bool

	counts   counts
	flights  flights
	restarts restarts
	watched  watchedFiles
	tracers  atomic.Pointer[[]*Tracer] // nil: none

	lostLocks atomic.Int64 // open files through which a lock was set that has been lost

	// caller tells what became of the thread that made an interrupted request, thread what one does that was answered,
	// kernelThread whether it is one of the kernel's own, and disconnected whether the kernel has given up the whole mount.
	caller       func(pid uint32) fate
	thread       func(pid uint32) threadState
	disconnected func() bool
	kernelThread func(pid uint32) bool
	yield        bool // there is a single thread for Go code; see request.end
}

// New returns an FS. Close ends it.
func New(cfg Config) (*FS, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	fs := &FS{
		meta: cfg.Meta, data: cfg.Data, root: cfg.Root, log: cfg.Log, nearby: cfg.Near,
		places:       newPlaces(),
		stableClose:  cfg.StableClose,
		patience:     cfg.Patience,
		pass:         passthrough{mode: cfg.Passthrough, lend: cfg.Lend},
		forgetting:   make(chan struct{}, maxForgetting),
		caller:       callerFate,
		thread:       stateOf,
		disconnected: func() bool { return false },
		kernelThread: isKernelThread,
		yield:        runtime.GOMAXPROCS(0) == 1,
	}
	if fs.kept.most = mostKept; fs.patience.Time > 0 {
		fs.kept.most = softKept
	}
	var err error
	if fs.ahead, err = newReadAhead(cfg.ReadAhead); err != nil {
		return nil, fmt.Errorf("fs: %w", err)
	}
	if cfg.CachePages {
		fs.pages = &keptPages{stamps: map[layout.FileID]stamp{}}
	}
	fs.ctx, fs.stop = context.WithCancel(context.Background())
	fs.sessions = make([]atomic.Pointer[sessionLife], cfg.Meta.Shards())
	for shard := range fs.sessions {
		fs.beginSession(shard)
	}
	for i := range fs.buckets {
		fs.buckets[i].inodes = map[layout.FileID]*inode{}
	}
	fs.handles.open = map[uint64]*handle{}
	fs.caching.init()
	fs.flights.init()
	fs.flusher.kick = make(chan struct{}, 1)
	fs.accesses = newAccesses(fs, cfg.Atime)
	fs.pass.copies.Store(uint32(cfg.Copies))
	fs.spawn(fs.flushLoop)
	return fs, nil
}

// spawn runs work that no request waits for; f ends soon after fs.ctx does.
func (fs *FS) spawn(f func()) {
	fs.work.Add(1)
	go func() {
		defer fs.work.Done()
		f()
	}()
}

// carry runs f, a call of the service of an inode and what follows from its answer, to its end even if ctx ends first, or the service is given up
// by whoever waits on a soft mount. Otherwise the service might execute the call later than another one that was made because this one seemed to
// be over.
func carry[R any](ctx context.Context, fs *FS, id layout.FileID, f func(context.Context) (R, error)) (R, error) {
	type answer struct {
		r   R
		err error
	}
	answered := make(chan answer, 1)
	run, cancel := context.WithCancel(metaclient.Hard(context.WithoutCancel(ctx)))
	end := context.AfterFunc(fs.ctx, cancel)
	// The goroutine owns what f holds; it ends with the call.
	fs.spawn(func() {
		defer cancel()
		defer end()
		r, err := f(run)
		answered <- answer{r, err}
	})
	waiting, stop := fs.meta.Patient(ctx, id)
	defer stop()
	select {
	case a := <-answered:
		return a.r, a.err
	case <-waiting.Done():
		var none R
		return none, context.Cause(waiting)
	}
}

// limiter keeps a message that many requests have reason for to one line in a while.
type limiter struct {
	last atomic.Int64
	left atomic.Int64 // out since then
}

const messageInterval = 5 * time.Second

func (l *limiter) log(log *slog.Logger, level slog.Level, msg string, args ...any) {
	at, last := now(), l.last.Load()
	if last != 0 && at-last < int64(messageInterval) || !l.last.CompareAndSwap(last, at) {
		l.left.Add(1)
		return
	}
	if n := l.left.Swap(0); n > 0 {
		args = append(args, "more_like_this", n)
	}
	log.Log(context.Background(), level, msg, args...)
}

// nobody is on whose behalf the mount itself acts: what it does was authorised when the file was opened.
var nobody metarpc.Cred

// id is the file behind a FUSE node id. The root of a mount is node 1 whichever directory it shows. Inode 1 cannot be
// meant otherwise: below any other directory there is no way to the volume's root.
func (fs *FS) id(node uint64) layout.FileID {
	switch {
	case node == fuse.FUSE_ROOT_ID:
		return fs.root
	case node > firstExtraNode:
		return dirOfExtra(node)
	}
	return layout.FileID(node)
}

// node is the inverse of id, for all but directories that are known at several places.
func (fs *FS) node(id layout.FileID) uint64 {
	if id == fs.root {
		return fuse.FUSE_ROOT_ID
	}
	return uint64(id)
}

// bucket is a part of the table of inodes.
type bucket struct {
	mu     sync.RWMutex
	inodes map[layout.FileID]*inode
}

func (fs *FS) bucket(id layout.FileID) *bucket {
	return &fs.buckets[uint64(id)%uint64(len(fs.buckets))]
}

// peek returns what is known of a file that is open or dirty here, or nil. It stays in the table only as long as
// somebody holds it.
func (fs *FS) peek(id layout.FileID) *inode {
	s := fs.bucket(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.inodes[id]
}

// hold returns the state of a file and keeps it in the table until drop.
func (fs *FS) hold(id layout.FileID) *inode {
	s := fs.bucket(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.inodes[id]
	if i == nil {
		i = &inode{fs: fs, id: id, data: fs.data.NewFile()}
		s.inodes[id] = i
	}
	i.holds++
	return i
}

// again is hold for one who holds i already.
func (i *inode) again() *inode {
	s := i.fs.bucket(i.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	i.holds++
	return i
}

// drop ends a hold.
func (i *inode) drop() {
	s := i.fs.bucket(i.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if i.holds--; i.holds == 0 {
		delete(s.inodes, i.id)
	}
}

// all holds every inode there is; the caller drops them.
func (fs *FS) all() []*inode {
	return fs.such(func(layout.FileID) bool { return true })
}

// such holds some of the inodes; the caller drops them.
func (fs *FS) such(is func(layout.FileID) bool) (list []*inode) {
	for n := range fs.buckets {
		s := &fs.buckets[n]
		s.mu.Lock()
		for id, i := range s.inodes {
			if is(id) {
				i.holds++
				list = append(list, i)
			}
		}
		s.mu.Unlock()
	}
	return list
}

// handle is an open file.
type handle struct {
	i *inode
	// late is the number of late errors of the inode that this handle has reported, or that came before it.
	late atomic.Uint64
	// reads says that it was opened for reading only.
	reads bool
	way   way
	// lost says that a lock which was set through it has been lost.
	lost   atomic.Bool
	window window
}

// handleTable numbers the open files. Numbers are not used twice.
type handleTable struct {
	mu   sync.RWMutex
	last uint64
	open map[uint64]*handle
}

func (t *handleTable) add(h *handle) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	t.open[t.last] = h
	return t.last
}

func (t *handleTable) get(fh uint64) *handle {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.open[fh]
}

func (t *handleTable) remove(fh uint64) *handle {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.open[fh]
	delete(t.open, fh)
	return h
}

// numbers lists the open handles.
func (t *handleTable) numbers() []uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	list := make([]uint64, 0, len(t.open))
	for fh := range t.open {
		list = append(list, fh)
	}
	return list
}
