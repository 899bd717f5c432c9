package meta

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/schema"
)

// Files is what the service asks of data servers. Package datafile has it.
type Files interface {
	// Assign gives the file data files for [off, off+n) if it lacks them, and returns the layout row. That row and
	// the session's writer row are durable when it returns; that row also says whether the session is awaited after a
	// restart. An error that is ENOSPC or ESTALE (errors.Is) is the caller's; after any other the range may be asked
	// for again later. near are the data servers on the session's host. drop is called for each copy on a data server
	// that is down, if another one may be used, and reports whether the copy may be made stale with the same commit;
	// nil: none is. If ctx ends the rows may change until AwaitKnown returns.
	Assign(ctx context.Context, id layout.FileID, ino schema.Inode, off, n int64, session metarpc.SessionID, appends bool, near []layout.DeviceID, drop func(metarpc.CopyRef) bool) (schema.Layout, error)
	// AssignNew adds to the batch that makes a file what gives it the data files for its first stripe unit, and session's writer row. It waits
	// for nothing: ok is false, and nothing added, if that cannot be done at once, or would not be all that a layout for writing needs.
	// Otherwise settle must be called when it is known how the batch's commit ended, once, with nil or why nothing was committed.
	AssignNew(b *catalog.Batch, id layout.FileID, ino schema.Inode, session metarpc.SessionID, near []layout.DeviceID) (row schema.Layout, settle func(error), ok bool)
	// AwaitKnown waits until it is known what has been committed for a file by calls that have returned.
	AwaitKnown(ctx context.Context, id layout.FileID) error
	// Segments is a row as layouts for clients.
	Segments(row schema.Layout, mode layout.IOMode) []metarpc.Segment
	// OnNamespaces reports whether a row has a data file on an NVMe namespace. Layouts say then where its bytes are (Extents), which
	// changes when somebody writes.
	OnNamespaces(row schema.Layout) bool
	// Extents completes segments of a row by the extents of such data files. Those that would have too many, and those for writing where
	// the data files have no space, end earlier.
	Extents(ctx context.Context, row schema.Layout, segments []metarpc.Segment) ([]metarpc.Segment, error)
	// Validate makes blocks valid that somebody has written who has the file's layout for writing. It is durable when what is committed
	// next is. What is said of data files that the file does not have any more is not done. An error that is ESTALE (errors.Is) says that blocks
	// were taken away since.
	Validate(ctx context.Context, id layout.FileID, written []metarpc.Written) error
	// FenceSession returns when nothing that a session has sent to the namespaces that a row has data files on is carried out any more. It
	// waits as Truncate does.
	FenceSession(ctx context.Context, row schema.Layout, session metarpc.SessionID) error
	// Describe is a row for people; the zero row is that of a file without data files.
	Describe(row schema.Layout, ino schema.Inode) metarpc.Described
	// Discard adds what makes the row's data files garbage to the batch that deletes the row.
	Discard(b *catalog.Batch, id layout.FileID, row schema.Layout)
	// Kick tells that there is new garbage.
	Kick()
	// Truncate cuts every data file that is longer. While a data server is away it waits, until ctx ends. An error with a
	// method LateCopies names copies of data that was cut elsewhere; nothing else is missing then.
	Truncate(ctx context.Context, row schema.Layout, size int64) error
	// Grow makes such data files as long as size, if they are shorter. It waits as Truncate does.
	Grow(ctx context.Context, row schema.Layout, refs []metarpc.CopyRef, size int64) error
	// Whole returns a good copy on one of near that has every byte of the file at its offset, now and when the file has grown; one
	// without a handle if there is none. Of mirrored files there is one only with mirrors, but for caches. several says that it is not the
	// only one.
	Whole(row schema.Layout, near []layout.DeviceID, mirrors bool) (ref metarpc.CopyRef, several bool)
	// MayBeWhole reports whether such a file may have such a copy, and no other, once it has data files for writing.
	MayBeWhole(row schema.Layout, ino schema.Inode, near []layout.DeviceID) bool
	// Sync makes every data file stable and returns the end of the longest. It waits as Truncate does.
	Sync(ctx context.Context, row schema.Layout) (end int64, err error)
	// Fence gives every data file of a file new owners, so that nobody can write it with a layout that was granted before.
	// When it returns the data servers have confirmed that, and the layout row has the new owners. It waits as Truncate
	// does. Of a column with several copies it makes all but one stale. An error with a method HeldCopies names copies that data servers
	// cannot fence because somebody on their hosts has them open; all others are fenced.
	Fence(ctx context.Context, id layout.FileID) error
	// StartReplace begins to make new data files for such, which are filled as StartFill's are, and returns the layout. Nobody has a
	// layout for writing the file, or gets one before the fence is done.
	StartReplace(ctx context.Context, id layout.FileID, held []metarpc.CopyRef) (schema.Layout, error)
	// MarkStale records durably that copies may lack data, but never the last good one of a column. It returns all copies of
	// the file that are stale then.
	MarkStale(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef) ([]metarpc.CopyRef, error)

	// Waiting counts what files with copies to be made wait for, and adds that to sum: data servers which are known,
	// but cannot be used, or, as the zero device, any one more. A file may wait for several.
	Waiting(ctx context.Context, ids []layout.FileID, sum map[layout.DeviceID]int64) error
	// Fillable reports whether StartFill would find something to fill now. Copies that are pinned do not move; as long as they are,
	// nothing takes their places.
	Fillable(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) (bool, error)
	// MayFill returns those of the files for which Fillable may say so, asked for all of them together.
	MayFill(ctx context.Context, ids []layout.FileID) ([]layout.FileID, error)
	// StartFill begins, or goes on, to make new copies for those that are stale, and returns the layout and up to where copies that
	// are being filled are full. Nobody has a layout for writing the file meanwhile.
	StartFill(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) (row schema.Layout, done int64, err error)
	// Fill copies a range of the file to the copies that are being filled, and returns up to where that is done, and
	// where the good ones end. Nobody has a layout for writing the range meanwhile. copied is called with the number
	// of bytes before they are copied. After an error copies that are being filled may be written to later, until
	// StartFill is called again. It returns early, but with something done, if enough is closed, and then fails soon
	// where data servers do not answer: an error with a method FailedCopies names copies that are not worth another
	// try. nil for enough says that others wait for the copying.
	Fill(ctx context.Context, id layout.FileID, row schema.Layout, off, n int64, copied func(context.Context, int) error, enough <-chan struct{}) (done, end int64, err error)
	// Compare compares the good copies of a range of the file, which nobody writes meanwhile. It returns how many there are at most, and
	// where they differ.
	Compare(ctx context.Context, id layout.FileID, off, n int64) (copies int, differ []metarpc.Difference, err error)
	// Moving lists files that have data files on devices that are drained, at most limit of them, after the file from.
	Moving(ctx context.Context, from layout.FileID, limit int) ([]layout.FileID, error)
	// MoveTo records that the data of a file is to lie on a device, with which StartFill begins then; there says that it does, data that
	// there is any. The errors ENODEV, ENOSPC and EBUSY (errors.Is) are the caller's; StartFill may return the first two, too. StopMove
	// gives it up. DropMoved ends it when it is done.
	MoveTo(ctx context.Context, id layout.FileID, dev layout.DeviceID) (data, there bool, err error)
	StopMove(ctx context.Context, id layout.FileID) error
	// DrainDevice sets whether a device is drained.
	DrainDevice(ctx context.Context, id layout.DeviceID, cancel bool) (metarpc.DeviceInfo, error)
	// RemoveDevice forgets a device that is drained and that no layout has a data file on, else the error is EBUSY. With lost
	// it does without what would have to be removed there.
	RemoveDevice(ctx context.Context, id layout.DeviceID, lost bool) error
	// Exchange puts data files that have moved into the places of those they were copied from, which are stale then, with
	// whatever else there was for the moving. Nobody may write the file. What is pinned stays. DropMoved makes those garbage, once nobody reads them.
	Exchange(ctx context.Context, id layout.FileID, pinned []metarpc.CopyRef) error
	DropMoved(ctx context.Context, id layout.FileID) error
	// EndFill makes the copies that were being filled in row good, and reports whether all copies of the file are.
	EndFill(ctx context.Context, id layout.FileID, row schema.Layout) (complete bool, err error)

	// CacheRoom says why a device cannot take a cache of n bytes now; pending are the bytes of caches there that are being filled. The error
	// is ENOSPC (errors.Is) if that is why.
	CacheRoom(dev layout.DeviceID, n, pending int64) error
	// StartCache gives a file a cache of n bytes on a device, to be filled by a session; nobody has a layout for writing the file
	// meanwhile. Asked again it returns the same one. ok is false if the file has no data. An error that is EBUSY says that another
	// session fills one there.
	StartCache(ctx context.Context, id layout.FileID, dev layout.DeviceID, n int64, session metarpc.SessionID) (cache schema.Cache, ok bool, err error)
	// CacheSegments is the layout by which a cache is filled.
	CacheSegments(cache schema.Cache) []metarpc.Segment
	// EndCache makes the cache that session has filled good, durably. It reports false if the file has it no longer.
	EndCache(ctx context.Context, id layout.FileID, ref metarpc.CopyRef, session metarpc.SessionID) (good bool, err error)
	// StaleCaches ends such caches, durably: those that were being filled are garbage then, the others stale. It returns those caches as
	// they were, and the others. DiscardCaches makes garbage of stale ones, once nobody reads them.
	StaleCaches(ctx context.Context, id layout.FileID, such func(*schema.Cache) bool) (ended, kept []schema.Cache, err error)
	DiscardCaches(ctx context.Context, id layout.FileID, refs []metarpc.CopyRef) error

	// Report takes in what a client has done at devices in a time of this length, which counts for where new data files go.
	// Forget forgets what a session has reported, and complained of, as it has ended.
	Report(session metarpc.SessionID, span time.Duration, devices []metarpc.DeviceStats)
	Forget(session metarpc.SessionID)
	// Complain takes in which devices do not answer a client, all of them, until the next such call, Forget, or
	// metarpc.ReportLifetime.
	Complain(session metarpc.SessionID, devices []layout.DeviceID)
	// DeviceStates returns which devices are down, as soon as there is something newer to tell than an epoch. It fails
	// when ctx ends or there will be no more.
	DeviceStates(ctx context.Context, epoch uint64) (*metarpc.DeviceStatesArgs, error)

	Devices(ctx context.Context) []metarpc.DeviceInfo
	// LearnDevices makes Devices tell of all that other services have done to devices before it is called.
	LearnDevices(ctx context.Context) error
	// AddDevice makes an export or a namespace a device. With force a namespace is taken whatever is on it.
	AddDevice(ctx context.Context, url string, force bool) (metarpc.DeviceInfo, error)
	StatFS() (total, free, avail int64) // bytes
	GarbageCount(ctx context.Context) int64
}

// Defaults of a Config.
const (
	DefaultLease  = 30 * time.Second
	DefaultSlots  = 128
	DefaultLeases = 1 << 16
)

// DefaultPolicy is how files are laid out where neither the administrator nor a directory says anything.
var DefaultPolicy = layout.Policy{StripeUnit: 1 << 20, StripeCount: 4, Mirrors: 1}

// Config is what a Service works with.
type Config struct {
	Engine  catalog.Engine // not closed by the Service
	Files   Files          // not closed by the Service
	Log     *slog.Logger   // nil = slog.Default
	Lease   time.Duration  // a session lives so long without a frame; 0 = DefaultLease
	Slots   int            // calls a session may have outstanding; 0 = DefaultSlots
	Leases  int            // inodes a session may have leases on; 0 = DefaultLeases
	Policy  layout.Policy  // default policy of a volume that is made now; unset fields from DefaultPolicy
	Program string         // "weftd 1.2.3", for Status
	// Resilver bounds how fast copies of mirrored data are made anew, bytes per second; 0 = as fast as they can be.
	Resilver int64
	Exports  admit.Rules // what clients may do, the first that fits; nil = all of them everything that their users may

	Shards int // of a volume that is made now; 0 = 1
	Shard  int // which of the volume's shards is served
	// Row is the shard's row in the catalog (schema.ShardKey) as it was written for this Service before it was made, for no earlier one and with the
	// fence in force that keeps all earlier ones from changing the catalog: who finds another row there knows that the Service is none any more.
	// nil = the volume has one shard.
	Row []byte
	// Alive reports whether no other process can be serving the shard yet. What was executed is answered only if it does afterwards.
	// nil = there are no others.
	Alive func() bool
	Ring  func() metarpc.Ring // that clients are told; nil = there is one service
	Peers Peers               // nil = the volume has one shard
	// Members are the processes that serve the volume. nil = there is no other than this one.
	Members Members
	// Door is where Serve lets clients in. nil = in clear text.
	Door *admit.Door
	// Speaks are the versions of the protocol; zero = all that this program knows. Tests choose others.
	Speaks metarpc.Versions
}

// Members are the processes that serve the volume's shards.
type Members interface {
	List(ctx context.Context) (*metarpc.MetaListResult, error)
	// Drain has the one that clients reach at an address, which List says, give its shards to others and take none, or with cancel ends that.
	// It returns when that is recorded. The errors ENOENT, no service has the address, and EBUSY, nobody else could take the shards
	// (errors.Is), are the caller's.
	Drain(ctx context.Context, address string, cancel bool) error
}

// Validate checks the configuration.
func (c *Config) Validate() error {
	if c.Engine == nil || c.Files == nil {
		return errors.New("metadata service: no catalog or no data files")
	}
	if c.Lease != 0 && (c.Lease < metarpc.MinLease || c.Lease > metarpc.MaxLease) {
		return fmt.Errorf("metadata service: lease of %v, want %v to %v", c.Lease, metarpc.MinLease, metarpc.MaxLease)
	}
	if c.Slots < 0 || c.Slots > metarpc.MaxSlots {
		return fmt.Errorf("metadata service: %d slots, want 1 to %d", c.Slots, metarpc.MaxSlots)
	}
	if c.Shard < 0 || c.Shard >= layout.MaxShards {
		return fmt.Errorf("metadata service: shard %d, want 0 to %d", c.Shard, layout.MaxShards-1)
	}
	if c.Shards < 0 || c.Shards > layout.MaxShards {
		return fmt.Errorf("metadata service: %d shards, want 1 to %d", c.Shards, layout.MaxShards)
	}
	if c.Resilver < 0 {
		return fmt.Errorf("metadata service: %d bytes per second for new copies", c.Resilver)
	}
	if c.Leases < 0 {
		return fmt.Errorf("metadata service: leases on %d inodes", c.Leases)
	}
	return c.Policy.Validate()
}

func (c *Config) setDefaults() {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Lease == 0 {
		c.Lease = DefaultLease
	}
	if c.Slots == 0 {
		c.Slots = DefaultSlots
	}
	if c.Leases == 0 {
		c.Leases = DefaultLeases
	}
	if c.Door == nil {
		c.Door = &admit.Door{Log: c.Log}
	}
	c.Speaks = c.Speaks.Or(metarpc.Spoken)
}
