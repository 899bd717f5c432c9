package fsck

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/schema"
)

// Kind is a kind of problem.
type Kind string

// The kinds, and what a repair does.
const (
	MissingRoot    Kind = "missing-root"          // there is no root directory: an empty one is made
	DanglingEntry  Kind = "dangling-entry"        // its inode does not exist: removed
	StrayEntry     Kind = "stray-entry"           // its directory does not exist: removed
	SecondEntry    Kind = "second-entry"          // the directory it names has another entry already: removed
	MisplacedEntry Kind = "misplaced-entry"       // under a wrong cookie: moved
	EntryType      Kind = "wrong-entry-type"      // the entry's type is not the inode's: set
	Parent         Kind = "wrong-parent"          // a directory names another parent than the one it is in: set
	Unlinked       Kind = "unlinked-inode"        // no entry: linked into lost+found
	Loop           Kind = "unreachable-directory" // a directory inside itself: linked into lost+found
	LinkCount      Kind = "wrong-link-count"      // set
	DirCounters    Kind = "wrong-directory-counters"
	DirUsage       Kind = "wrong-directory-usage" // what a directory has, or was told by those in it: set
	Told           Kind = "untold-usage"          // a directory's parent does not know all it has: the service tells it
	OwnerUsage     Kind = "wrong-owner-usage"     // what a user and a group have: set
	Home           Kind = "wrong-home"            // an inode is charged to a directory where it has no name: to none
	Usage          Kind = "wrong-usage-counter"
	NextInode      Kind = "wrong-next-inode"  // inodes with higher numbers exist: raised
	XattrCount     Kind = "wrong-xattr-count" // set
	XattrFlags     Kind = "wrong-xattr-flags" // the inode tells of other attributes than it has: set
	BadACL         Kind = "bad-acl"           // not an access control list, so nobody but root gets past it: removed
	LinkedOrphan   Kind = "linked-orphan"     // an inode marked as nameless has a name: the mark is removed
	StrayRow       Kind = "stray-row"         // belongs to an inode, session or device that does not exist: removed
	BadLayout      Kind = "bad-layout"        // names unknown devices, or is no layout at all: left
	SharedDataFile Kind = "shared-data-file"  // several layouts have it: the later ones get an empty one
	GarbageInUse   Kind = "garbage-in-use"    // also in a layout: no longer garbage
	NextNumber     Kind = "wrong-next-number" // data files with higher numbers exist: raised
	InUse          Kind = "wrong-in-use"      // counter of a device's data files: set
	OrphanDataFile Kind = "orphan-data-file"  // neither in a layout nor garbage: becomes garbage
	Missing        Kind = "missing-data-file" // in a layout, not on the data server: an empty one is made, which is stale if there is another copy
	NoGoodCopy     Kind = "no-good-copy"      // all copies of a column are stale: left
	FillRow        Kind = "wrong-fill-row"    // says that a layout lacks good copies, or does not: set
	LostCache      Kind = "lost-cache"        // its data file is missing, another file's or on no known device: the file does without it
	CacheRow       Kind = "wrong-cache-row"   // says of a device's caches what layouts do not, or lacks one: set
	StaleHandle    Kind = "stale-handle"      // a layout's handle is not the data file's: replaced
	Owner          Kind = "wrong-owner"       // of a data file: set
	BeyondSize     Kind = "data-beyond-size"  // a data file is longer than the file: the file's size is raised
	ForeignFile    Kind = "foreign-file"      // something else among the data files: left
	Format         Kind = "wrong-format"      // there is what only later formats of catalogs have: raised
	NamespaceRow   Kind = "missing-namespace" // the row that says how a namespace is cut: made anew as the label has it
	Label          Kind = "wrong-label"       // of a namespace: both copies are written anew
)

// Of the space of namespaces there are the kinds that package extent has, too.

// Problem is something that is not as it should be.
type Problem struct {
	Kind     Kind          `json:"kind"`
	Inode    layout.FileID `json:"inode,omitempty"`
	Path     filename.JSON `json:"path,omitempty"`      // of the inode or entry; of several, one
	Device   string        `json:"device,omitempty"`    // URL of the data server or namespace
	DataFile string        `json:"data_file,omitempty"` // below the volume's directory
	Detail   string        `json:"detail,omitempty"`
	Repaired bool          `json:"repaired"`
	Lost     bool          `json:"lost,omitempty"` // bytes of the file are gone

	dir  layout.FileID // of the entry in question, if it is one
	name string
	key  []byte // of that entry, where it matters

	on     *device // that the data file in question is on, if it is one
	number uint64  // of the data file
	rows   string  // what the catalog had of it, see online.go
}

func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(string(p.Kind))
	for _, word := range []struct {
		format string
		value  any
		show   bool
	}{
		{" inode %d", p.Inode, p.Inode != 0},
		{" %s", filename.Quote(string(p.Path)), p.Path != ""},
		{" on %s", p.Device, p.Device != ""},
		{" data file %s", p.DataFile, p.DataFile != ""},
		{": %s", p.Detail, p.Detail != ""},
		{" (data lost)", nil, p.Lost},
		{" (repaired)", nil, p.Repaired},
	} {
		switch {
		case word.show && word.value == nil:
			b.WriteString(word.format)
		case word.show:
			fmt.Fprintf(&b, word.format, word.value)
		}
	}
	return b.String()
}

// MaxListed is how many problems a Report lists; the rest are only counted.
const MaxListed = 10000

// Report is what a run found.
type Report struct {
	Volume      string `json:"volume"`
	Inodes      int64  `json:"inodes"`
	Directories int64  `json:"directories"`
	Entries     int64  `json:"entries"`
	DataFiles   int64  `json:"data_files"` // in layouts

	// Work that the service will finish.
	Garbage     int64 `json:"pending_garbage"`     // data files to be removed
	Orphans     int64 `json:"pending_orphans"`     // inodes without names to be removed
	Truncations int64 `json:"pending_truncations"` // data files to be cut
	Writers     int64 `json:"pending_writers"`     // sizes to be found out
	Copies      int64 `json:"pending_copies"`      // of mirrored data, to be filled

	// Busy is what looked wrong on data servers and changed whenever it was looked at again, so that it is not known to be.
	Busy int64 `json:"busy,omitempty"`

	Spaces []Space `json:"namespaces,omitempty"`

	Counts   map[Kind]int64 `json:"counts"`
	Repaired int64          `json:"repaired"`
	Problems []Problem      `json:"problems"`
}

// Space is what the bytes of a namespace are used for that data files can have, after all repairs.
type Space struct {
	Device    string `json:"device"` // URL
	Total     int64  `json:"total"`  // the sum of the others
	Used      int64  `json:"used"`
	Condemned int64  `json:"condemned"` // nobody's any more; the service frees them
	Free      int64  `json:"free"`
}

// Clean reports whether nothing was found, repaired or not.
func (r *Report) Clean() bool { return len(r.Counts) == 0 }

// Unrepaired is how many problems are left.
func (r *Report) Unrepaired() int64 {
	var n int64
	for _, count := range r.Counts {
		n += count
	}
	return n - r.Repaired
}

// ErrCouldNotRun: not everything could be looked at, so nothing is known. Repairs made before are good.
var ErrCouldNotRun = errors.New("could not run")

// DefaultTimeout is for how long an answer of a data server is waited.
const DefaultTimeout = 15 * time.Second

// Config says what to check.
type Config struct {
	Engine catalog.Engine // not closed; nobody else uses it
	// Snapshot takes the place of Engine where services use the catalog meanwhile: it returns a view of the latest revision.
	Snapshot func(context.Context) (catalog.Snapshot, error)
	Rate     int64         // with Snapshot: so many rows and data files are looked at in a second, at most; 0 = no bound
	Settle   time.Duration // with Snapshot: between two looks at what seems wrong; 0 = DefaultSettle

	Dial store.Dialer // nil = store.DialNFS
	// DialNamespace reaches a device of a volume that is a namespace; nil = datafile.DialNamespace.
	DialNamespace func(ctx context.Context, volume [16]byte, row *schema.Device) (Namespace, error)
	Secrets       *nvmeauth.Secrets // those of the volume's service; nil = none
	Repair        bool
	Log           *slog.Logger   // nil = slog.Default
	Timeout       time.Duration  // a device that does not answer for so long cannot be reached; 0 = DefaultTimeout
	Progress      func(Progress) // is told how far it is, often and one after the other; nil = nobody wants to know
}

// Progress is how far a run is.
type Progress struct {
	Phase string // what is being looked at
	Rows  int64  // of the catalog, and data files, that were looked at
	Files int64  // inodes that there are, once it is known
}

// Share is about how much is done, 0 to 1; 0 if that is not known yet.
func (p Progress) Share() float64 {
	const each = 4 // an inode has an entry, a layout and a data file
	if p.Files == 0 {
		return 0
	}
	return min(0.99, float64(p.Rows)/float64(p.Files*each))
}

// Validate checks the configuration.
func (c *Config) Validate() error {
	if (c.Engine == nil) == (c.Snapshot == nil) {
		return errors.New("fsck: no catalog, or two")
	}
	if c.Snapshot == nil && (c.Rate != 0 || c.Settle != 0) || c.Rate < 0 || c.Settle < 0 {
		return fmt.Errorf("fsck: rate %d, settle %v", c.Rate, c.Settle)
	}
	if c.Snapshot != nil && c.Repair {
		return errors.New("fsck: what services use is not repaired")
	}
	if c.Timeout < 0 {
		return fmt.Errorf("fsck: timeout %v", c.Timeout)
	}
	return nil
}

// Check looks at everything. It returns ErrCouldNotRun if a device cannot be reached or the catalog cannot be
// read.
func Check(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = store.DialNFS
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.DialNamespace == nil {
		cfg.DialNamespace = func(ctx context.Context, volume [16]byte, row *schema.Device) (Namespace, error) {
			return datafile.DialNamespace(ctx, volume, row, cfg.Secrets, cfg.Log)
		}
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	c := newChecker(cfg)
	defer c.disconnect()
	phases := []phase{
		{"data servers", c.connect},
		{"labels", c.checkLabels},
		{"inodes", c.checkInodes},
		{"entries", c.checkEntries},
		{"connectivity", c.checkConnected},
		{"links", c.checkLinks},
		{"directories", c.checkCounters},
		{"rows of inodes", c.checkRows},
		{"layouts", c.checkLayouts},
		{"garbage", c.checkGarbage},
		{"data files", c.checkDataFiles},
		{"namespaces", c.checkSpaces},
		{"shared data files", c.checkShared},
		{"sizes", c.checkSizes},
		{"usage", c.checkUsage},
		{"totals", c.checkTotals},
		{"paths", c.findPaths},
	}
	if cfg.Snapshot != nil {
		if err := c.begin(ctx); err != nil {
			return nil, fmt.Errorf("fsck: %w: %w", ErrCouldNotRun, err)
		}
		defer c.end()
		phases = c.online(phases)
	}
	for _, phase := range phases {
		cfg.Log.Debug("fsck", "phase", phase.name)
		c.passed(0, phase.name)
		if err := phase.run(ctx); err != nil {
			return nil, fmt.Errorf("fsck: %s: %w: %w", phase.name, ErrCouldNotRun, err)
		}
	}
	return &c.report, nil
}

// phase is a part of a run.
type phase struct {
	name string
	run  func(context.Context) error
}

func newChecker(cfg Config) *checker {
	return &checker{
		cfg:      cfg,
		report:   Report{Counts: map[Kind]int64{}},
		dirs:     map[layout.FileID]*directory{},
		devices:  map[layout.DeviceID]*device{},
		unknown:  map[layout.DeviceID]bool{},
		sessions: map[string]bool{},
		beyond:   map[layout.FileID]int64{},
	}
}

// checker is one run.
type checker struct {
	cfg    Config
	volume schema.Volume

	// There are problems by which usage is wrong.
	disturbed bool

	mu       sync.Mutex // see the package comment; taken only while data servers are listed
	report   Report
	inodes   []inode // in the order of their ids
	dirs     map[layout.FileID]*directory
	lost     layout.FileID // of lost+found; 0 until it is needed
	devices  map[layout.DeviceID]*device
	unknown  map[layout.DeviceID]bool // that layouts name, and the catalog has not
	sessions map[string]bool          // that exist
	beyond   map[layout.FileID]int64  // files with data beyond their size, and its end
	shared   []slot                   // that have a data file which another one has as well

	// While services use the catalog, see online.go.
	frozen   *frozen
	looking  bool      // what is found is only suspected
	suspects []Problem // what was

	far struct { // mu is taken under checker.mu, and nothing under it
		mu sync.Mutex
		Progress
	}
}

// inode is what is remembered of an inode.
type inode struct {
	id    layout.FileID
	home  layout.FileID // of what is no directory, as its row says
	size  int64
	mode  uint32
	nlink uint32
	links uint32            // entries found
	extra int32             // extended attributes found, minus those that the inode tells of
	told  metarpc.AttrFlags // what the inode tells of its attributes
	flags metarpc.AttrFlags // what was found
	state state
}

type state uint8

const (
	orphan    state = 1 << iota // marked as nameless
	unsettled                   // a writer or a truncation will change its size
	atHome                      // it has a name in its home
)

// directory is what is remembered of a directory.
type directory struct {
	parent  layout.FileID // as its inode says
	in      layout.FileID // where its entry is; 0 = nowhere
	name    string
	entries int64 // found
	subdirs int64
	counted bool // it has a counter row

	direct, sub, told usage // sub is the sum of what those in it have told
	dirty             bool  // it is to tell more
}

// find returns what is remembered of an inode, or nil.
func (c *checker) find(id layout.FileID) *inode {
	i, ok := slices.BinarySearchFunc(c.inodes, id, func(n inode, id layout.FileID) int {
		switch {
		case n.id < id:
			return -1
		case n.id > id:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &c.inodes[i]
}

// found records a problem. In a repairing run it commits what fix puts into a batch first; a nil fix means that there is
// no repair. A commit that fails ends the run.
func (c *checker) found(ctx context.Context, p Problem, fix func(b *catalog.Batch) error) error {
	if c.cfg.Repair && fix != nil {
		var b catalog.Batch
		if err := fix(&b); err != nil {
			return fmt.Errorf("repair of %v: %w", p, err)
		}
		if err := c.cfg.Engine.Commit(ctx, &b); err != nil {
			return fmt.Errorf("repair of %v: %w", p, err)
		}
		p.Repaired = true
	}
	c.record(p)
	return nil
}

// record counts and lists a problem, or notes it as one that is suspected.
func (c *checker) record(p Problem) {
	if c.looking {
		c.suspects = append(c.suspects, p)
		return
	}
	c.cfg.Log.Debug("fsck", "problem", p.String())
	c.report.Counts[p.Kind]++
	c.disturbed = c.disturbed || disturbing[p.Kind]
	if p.Repaired {
		c.report.Repaired++
	}
	if len(c.report.Problems) < MaxListed {
		c.report.Problems = append(c.report.Problems, p)
	}
}

// progressRows is after how many rows progress is told.
const progressRows = 1 << 10

// passed counts what was looked at; phase is not empty if another one begins.
func (c *checker) passed(rows int64, phase string) {
	if c.cfg.Progress == nil {
		return
	}
	c.far.mu.Lock()
	defer c.far.mu.Unlock()
	p := &c.far.Progress
	before := p.Rows / progressRows
	if p.Rows += rows; phase != "" {
		p.Phase, p.Files = phase, int64(len(c.inodes))
	}
	if phase != "" || p.Rows/progressRows > before {
		c.cfg.Progress(*p)
	}
}

// scan calls f with each row of a prefix. f may change rows.
func (c *checker) scan(ctx context.Context, prefix byte, f func(key, value []byte) error) error {
	from, to := schema.Of(prefix)
	for row, err := range c.cfg.Engine.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return err
		}
		c.passed(1, "")
		if err := f(slices.Clone(row.Key), slices.Clone(row.Value)); err != nil {
			return err
		}
	}
	return nil
}

// counters reads a counter row, which may be absent.
func (c *checker) counters(ctx context.Context, key []byte) (catalog.Counters, error) {
	value, err := schema.FindRow(ctx, c.cfg.Engine, key)
	if err != nil {
		return nil, err
	}
	return schema.DecodeCounters(key, value)
}

// change makes a batch put an inode row that f has changed.
func (c *checker) change(ctx context.Context, b *catalog.Batch, id layout.FileID, f func(*schema.Inode)) error {
	key := schema.InodeKey(id)
	old, err := c.cfg.Engine.Get(ctx, key)
	if err != nil {
		return err
	}
	var row schema.Inode
	if err := schema.DecodeRow(key, old, &row); err != nil {
		return err
	}
	f(&row)
	row.Ctime = time.Now().UnixNano()
	b.GuardEqual(key, old)
	b.Put(key, schema.Encode(&row))
	return nil
}

// findPaths gives the problems their paths, as they are now.
func (c *checker) findPaths(ctx context.Context) error {
	type place struct {
		dir  layout.FileID
		name string
	}
	wanted := map[layout.FileID]place{}
	for i := range c.report.Problems {
		p := &c.report.Problems[i]
		if p.Inode != 0 && p.dir == 0 && c.dirs[p.Inode] == nil {
			wanted[p.Inode] = place{}
		}
	}
	if len(wanted) > 0 {
		err := c.scan(ctx, schema.PrefixEntry, func(key, value []byte) error {
			var e schema.Entry
			if err := schema.DecodeRow(key, value, &e); err != nil {
				return err
			}
			if at, ok := wanted[e.ID]; ok && at.dir == 0 {
				at.dir, _, at.name = schema.EntryOf(key)
				wanted[e.ID] = at
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for i := range c.report.Problems {
		p := &c.report.Problems[i]
		at := wanted[p.Inode]
		switch {
		case p.dir != 0:
			p.Path = filename.JSON(c.path(p.dir, p.name))
		case c.dirs[p.Inode] != nil:
			p.Path = filename.JSON(c.path(p.Inode, ""))
		case at.dir != 0:
			p.Path = filename.JSON(c.path(at.dir, at.name))
		}
	}
	return nil
}

// path returns the path of name in a directory, or of the directory. It begins with "?" if it does not lead to the
// root.
func (c *checker) path(dir layout.FileID, name string) string {
	names := []string{name}
	for steps := 0; ; steps++ {
		d := c.dirs[dir]
		if dir == layout.RootID {
			break
		}
		if d == nil || d.in == 0 || steps > len(c.dirs) {
			names = append(names, "?")
			slices.Reverse(names)
			return strings.TrimSuffix(strings.Join(names, "/"), "/")
		}
		names = append(names, d.name)
		dir = d.in
	}
	slices.Reverse(names)
	return "/" + strings.TrimSuffix(strings.Join(names, "/"), "/")
}

// sortedDevices returns the devices in the order of ids, so that runs are alike.
func (c *checker) sortedDevices() []*device {
	return slices.SortedFunc(maps.Values(c.devices), func(a, b *device) int { return slices.Compare(a.id[:], b.id[:]) })
}
