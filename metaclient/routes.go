package metaclient

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// To whose Client each call goes: that of the directory, of the inode, or anybody's.

func (v *Volume) GetAttr(ctx context.Context, id layout.FileID) (Answer, error) {
	return v.of(id).GetAttr(ctx, id)
}

// CachedAttr is GetAttr if that needs no question, because there is a lease on the attributes. It neither blocks nor does I/O.
func (v *Volume) CachedAttr(id layout.FileID) (Answer, bool) {
	if c := v.have(id); c != nil {
		return c.CachedAttr(id)
	}
	return Answer{}, false
}

func (v *Volume) SetAttr(ctx context.Context, cred metarpc.Cred, args *metarpc.SetAttrArgs) (Answer, error) {
	return v.of(args.ID).SetAttr(ctx, cred, args)
}

func (v *Volume) GetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) ([]byte, error) {
	return v.of(id).GetXattr(ctx, cred, id, name)
}

func (v *Volume) SetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string, value []byte, flags uint32) error {
	return v.of(id).SetXattr(ctx, cred, id, name, value, flags)
}

func (v *Volume) ListXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID) ([]string, error) {
	return v.of(id).ListXattr(ctx, cred, id)
}

func (v *Volume) RemoveXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) error {
	return v.of(id).RemoveXattr(ctx, cred, id, name)
}

func (v *Volume) ReadLink(ctx context.Context, cred metarpc.Cred, id layout.FileID) (string, error) {
	return v.of(id).ReadLink(ctx, cred, id)
}

func (v *Volume) Lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (Answer, error) {
	return v.of(parent).Lookup(ctx, cred, parent, name)
}

func (v *Volume) Parent(ctx context.Context, id, top layout.FileID) (layout.FileID, error) {
	return v.of(id).Parent(ctx, id, top)
}

func (v *Volume) MakeNode(ctx context.Context, cred metarpc.Cred, args *metarpc.MakeNodeArgs) (Answer, error) {
	return v.of(args.Parent).MakeNode(ctx, cred, args)
}

func (v *Volume) Link(ctx context.Context, cred metarpc.Cred, id, parent layout.FileID, name string) (Answer, error) {
	return v.of(id).Link(ctx, cred, id, parent, name)
}

func (v *Volume) Remove(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string, dir bool) error {
	return v.of(parent).Remove(ctx, cred, parent, name, dir)
}

func (v *Volume) Rename(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error {
	return v.of(args.OldParent).Rename(ctx, cred, args)
}

func (v *Volume) ReadDir(ctx context.Context, cred metarpc.Cred, id layout.FileID, cookie uint64, limit int) (*DirPage, error) {
	return v.of(id).ReadDir(ctx, cred, id, cookie, limit)
}

func (v *Volume) Open(ctx context.Context, cred metarpc.Cred, args *metarpc.OpenArgs) (Answer, error) {
	return v.of(args.ID).Open(ctx, cred, args)
}

func (v *Volume) Create(ctx context.Context, cred metarpc.Cred, args *metarpc.CreateArgs) (a Answer, created bool, err error) {
	return v.of(args.Parent).Create(ctx, cred, args)
}

func (v *Volume) TmpFile(ctx context.Context, cred metarpc.Cred, args *metarpc.TmpFileArgs) (Answer, error) {
	return v.of(args.Parent).TmpFile(ctx, cred, args)
}

func (v *Volume) Release(id layout.FileID) {
	if c := v.have(id); c != nil {
		c.Release(id)
	}
}

func (v *Volume) LayoutError(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef, reason string) error {
	return v.of(id).LayoutError(ctx, id, copies, reason)
}

func (v *Volume) LayoutMove(ctx context.Context, cred metarpc.Cred, id layout.FileID, dev layout.DeviceID) (*metarpc.LayoutMoveResult, error) {
	return v.of(id).LayoutMove(ctx, cred, id, dev)
}

func (v *Volume) Verify(ctx context.Context, cred metarpc.Cred, args *metarpc.VerifyArgs) (*metarpc.VerifyResult, error) {
	return v.of(args.ID).Verify(ctx, cred, args)
}

func (v *Volume) CacheStart(ctx context.Context, cred metarpc.Cred, args *metarpc.CacheStartArgs) (*metarpc.CacheStartResult, error) {
	return v.of(args.ID).CacheStart(ctx, cred, args)
}

func (v *Volume) CacheDone(ctx context.Context, id layout.FileID, cache metarpc.CopyRef) error {
	return v.of(id).CacheDone(ctx, id, cache)
}

func (v *Volume) CacheDrop(ctx context.Context, cred metarpc.Cred, id layout.FileID, dev layout.DeviceID) (metarpc.CacheDropResult, error) {
	return v.of(id).CacheDrop(ctx, cred, id, dev)
}

func (v *Volume) DescribeLayout(ctx context.Context, id layout.FileID) (*metarpc.Described, error) {
	return v.of(id).DescribeLayout(ctx, id)
}

func (v *Volume) Reserve(ctx context.Context, args *metarpc.ReserveArgs, got func(metarpc.ReserveResult)) error {
	return v.of(args.ID).Reserve(ctx, args, got)
}

func (v *Volume) Layout(ctx context.Context, id layout.FileID, mode layout.IOMode, off, n int64, writes Writes) (*layout.Segment, error) {
	return v.of(id).Layout(ctx, id, mode, off, n, writes)
}

// CachedLayout returns a segment only if it is cached. It neither blocks nor does I/O.
func (v *Volume) CachedLayout(id layout.FileID, mode layout.IOMode, off, n int64) *layout.Segment {
	if c := v.have(id); c != nil {
		return c.CachedLayout(id, mode, off, n)
	}
	return nil
}

func (v *Volume) DropLayout(id layout.FileID, off int64) {
	if c := v.have(id); c != nil {
		c.DropLayout(id, off)
	}
}

func (v *Volume) DropExtents(id layout.FileID, off int64) {
	if c := v.have(id); c != nil {
		c.DropExtents(id, off)
	}
}

func (v *Volume) Forget(id layout.FileID) {
	if c := v.have(id); c != nil {
		c.Forget(id)
	}
}

func (v *Volume) Renew(ctx context.Context, id layout.FileID) ([]layout.Segment, error) {
	return v.of(id).Renew(ctx, id)
}

func (v *Volume) Pin(ctx context.Context, id layout.FileID, mode layout.IOMode, copies metarpc.Pin) (df *layout.DataFile, several bool, err error) {
	return v.of(id).Pin(ctx, id, mode, copies)
}

func (v *Volume) Lock(ctx context.Context, args *metarpc.LockArgs, stable func(context.Context) error) (shared bool, err error) {
	return v.of(args.ID).Lock(ctx, args, stable)
}

func (v *Volume) TestLock(ctx context.Context, args *metarpc.LockArgs) (metarpc.LockResult, error) {
	return v.of(args.ID).TestLock(ctx, args)
}

func (v *Volume) DropLocks(id layout.FileID, flock bool, owner uint64, stable func(context.Context) error) <-chan struct{} {
	return v.of(id).DropLocks(id, flock, owner, stable)
}

// Alive reports whether the leases that there are on an inode hold by our own clock.
func (v *Volume) Alive(id layout.FileID) bool {
	c := v.have(id)
	return c != nil && c.Alive()
}

// LayoutCommit is Client.LayoutCommit of files of any shards: those of one do not wait for those of others. If it fails, some may have been
// reported nevertheless.
func (v *Volume) LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error) {
	if len(reports) == 0 {
		return nil, nil
	}
	first := v.shard(reports[0].ID)
	if !slices.ContainsFunc(reports, func(r metarpc.SizeReport) bool { return v.shard(r.ID) != first }) {
		return v.of(reports[0].ID).LayoutCommit(ctx, reports, provisional)
	}
	parts := map[int][]int{} // which reports are each shard's
	for i := range reports {
		shard := v.shard(reports[i].ID)
		parts[shard] = append(parts[shard], i)
	}
	attrs := make([]metarpc.Attr, len(reports))
	var mu sync.Mutex
	var failed []error
	var all sync.WaitGroup
	for _, which := range parts {
		all.Go(func() { // reports to one shard
			mine := make([]metarpc.SizeReport, len(which))
			for n, i := range which {
				mine[n] = reports[i]
			}
			got, err := v.of(mine[0].ID).LayoutCommit(ctx, mine, provisional)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
				return
			}
			for n, i := range which {
				attrs[i] = got[n]
			}
		})
	}
	all.Wait()
	if len(failed) > 0 {
		return nil, errors.Join(failed...)
	}
	return attrs, nil
}

// KnownNames calls f with the names of which this client knows what they lead to.
func (v *Volume) KnownNames(f func(dir layout.FileID, name string, child layout.FileID)) {
	for i := range v.clients {
		if c := v.clients[i].Load(); c != nil {
			c.leases.each(f)
		}
	}
}

func (v *Volume) Devices(ctx context.Context) ([]metarpc.DeviceInfo, error) {
	return v.any().Devices(ctx)
}

func (v *Volume) Device(ctx context.Context, id layout.DeviceID) (layout.Device, error) {
	return v.any().Device(ctx, id)
}

func (v *Volume) AddDevice(ctx context.Context, url string, force bool) (metarpc.DeviceInfo, error) {
	return v.any().AddDevice(ctx, url, force)
}

func (v *Volume) DrainDevice(ctx context.Context, id layout.DeviceID, cancel bool) (metarpc.DeviceInfo, error) {
	return v.any().DrainDevice(ctx, id, cancel)
}

func (v *Volume) RemoveDevice(ctx context.Context, id layout.DeviceID, lost bool) error {
	return v.any().RemoveDevice(ctx, id, lost)
}

func (v *Volume) StatFS(ctx context.Context, id layout.FileID) (metarpc.StatFSResult, error) {
	return v.of(id).StatFS(ctx, id)
}

func (v *Volume) SetQuota(ctx context.Context, name metarpc.QuotaName, bytes, files int64) error {
	return v.any().SetQuota(ctx, name, bytes, files)
}

func (v *Volume) Quota(ctx context.Context, name metarpc.QuotaName) (metarpc.QuotaInfo, error) {
	return v.any().Quota(ctx, name)
}

func (v *Volume) SetClientRule(ctx context.Context, rule string, force bool) error {
	return v.any().SetClientRule(ctx, rule, force)
}

func (v *Volume) RemoveClientRule(ctx context.Context, whose string) error {
	return v.any().RemoveClientRule(ctx, whose)
}

func (v *Volume) ClientRules(ctx context.Context) (*metarpc.ClientListResult, error) {
	return v.any().ClientRules(ctx)
}

func (v *Volume) Quotas(ctx context.Context) ([]metarpc.QuotaInfo, error) {
	return v.any().Quotas(ctx)
}

// MetaList lists the services of the volume.
func (v *Volume) MetaList(ctx context.Context) (*metarpc.MetaListResult, error) {
	r := new(metarpc.MetaListResult)
	if err := v.any().do(ctx, metarpc.OpMetaList, metarpc.Cred{}, &metarpc.Empty{}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// MetaDrain has the service at an address give its shards to others and take none, or with cancel ends that.
func (v *Volume) MetaDrain(ctx context.Context, address string, cancel bool) (*metarpc.MetaListResult, error) {
	r := new(metarpc.MetaListResult)
	if err := v.any().do(ctx, metarpc.OpMetaDrain, metarpc.Cred{}, &metarpc.MetaDrainArgs{Address: address, Cancel: cancel}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// Status asks the services of all sessions that there are how they are, of those that are connected if any is. What several shards have is added
// up, a client with several sessions is told of once. It fails if none of them answers.
func (v *Volume) Status(ctx context.Context) (*metarpc.StatusResult, error) {
	list := v.all()
	if some := slices.DeleteFunc(slices.Clone(list), func(c *Client) bool { return !c.connected() }); len(some) > 0 {
		list = some
	}
	sum, err := statusOf(ctx, list)
	if sum != nil {
		err = nil
	}
	return sum, err
}

// WholeStatus is Status of all shards, with which it begins sessions. It fails if one of them does not answer.
func (v *Volume) WholeStatus(ctx context.Context) (*metarpc.StatusResult, error) {
	for shard := range v.clients {
		v.begin(shard)
	}
	return statusOf(ctx, v.all())
}

// statusOf adds up what those tell that answer.
func statusOf(ctx context.Context, list []*Client) (*metarpc.StatusResult, error) {
	answers, errs := make([]*metarpc.StatusResult, len(list)), make([]error, len(list))
	var all sync.WaitGroup
	for i, c := range list {
		all.Go(func() { answers[i], errs[i] = c.Status(ctx) }) // asks one shard
	}
	all.Wait()
	var sum *metarpc.StatusResult
	clients := map[[16]byte]int{} // which of sum.Sessions
	for _, r := range answers {
		if r == nil {
			continue
		}
		if sum == nil {
			sum = &metarpc.StatusResult{Program: r.Program, Started: r.Started}
		}
		sum.Grace = sum.Grace || r.Grace
		sum.Garbage = max(sum.Garbage, r.Garbage) // each counts all of it
		sum.Stale += r.Stale
		sum.Copied += r.Copied
		sum.HeldUp = append(sum.HeldUp, r.HeldUp...)
		if r.Catalog.Full || r.Catalog.Low && !sum.Catalog.Full || sum.Catalog == (metarpc.CatalogRoom{}) {
			sum.Catalog = r.Catalog // all services have the same one
		}
		for _, w := range r.Waiting {
			n := slices.IndexFunc(sum.Waiting, func(o metarpc.WaitingFiles) bool { return o.Device == w.Device })
			if n < 0 {
				sum.Waiting = append(sum.Waiting, w)
				continue
			}
			sum.Waiting[n].Files += w.Files
		}
		for _, s := range r.Sessions {
			n, ok := clients[s.Client.ID]
			if !ok {
				clients[s.Client.ID] = len(sum.Sessions)
				sum.Sessions = append(sum.Sessions, s)
				continue
			}
			one := &sum.Sessions[n]
			one.Renewed = max(one.Renewed, s.Renewed)
			one.Opens += s.Opens
			one.Layouts += s.Layouts
		}
	}
	return sum, errors.Join(errs...)
}
