package metaclient

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// The calls by name. Those without a credential are the same for everybody.

func (c *Client) GetAttr(ctx context.Context, id layout.FileID) (Answer, error) {
	if a, ok := c.CachedAttr(id); ok {
		return a, nil
	}
	return c.ask(ctx, metarpc.OpGetAttr, metarpc.Cred{}, id, &metarpc.IDArgs{ID: id}, nil)
}

func (c *Client) SetAttr(ctx context.Context, cred metarpc.Cred, args *metarpc.SetAttrArgs) (Answer, error) {
	return c.attrChange(ctx, metarpc.OpSetAttr, cred, args, c.leases.begin([]layout.FileID{args.ID}, false))
}

// Lookup's Answer tells with ENOENT, too, how long that may be kept.
func (c *Client) Lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (Answer, error) {
	for try := 1; ; try++ {
		a, err := c.lookup(ctx, cred, parent, name)
		if err != nil || !c.foreign(a.Attr.ID) {
			return a, err
		}
		if a, err = c.whole(ctx, a); err == nil || !vanished(err) || try == maxVanished {
			return a, err
		}
	}
}

// lookup is Lookup, but says of an inode of another shard no more than its number.
func (c *Client) lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (Answer, error) {
	a, ok := c.cachedLookup(parent, name)
	if !ok {
		asked := c.leases.ask()
		var r metarpc.LookupResult
		if err := c.do(ctx, metarpc.OpLookup, cred, &metarpc.NameArgs{Parent: parent, Name: name}, &r, nil); err != nil {
			return Answer{}, err
		}
		attrs, names := c.leases.looked(asked, parent, name, &r)
		a = c.answerWith(r.Attr, attrs, names)
	}
	if a.Attr.ID == 0 {
		return a, errNoName
	}
	return a, nil
}

// Parent returns the directory that a directory is in, which must be below top, or be it; see metarpc.ParentResult.
func (c *Client) Parent(ctx context.Context, id, top layout.FileID) (layout.FileID, error) {
	var r metarpc.ParentResult
	err := c.do(ctx, metarpc.OpParent, metarpc.Cred{}, &metarpc.ParentArgs{ID: id, Top: top}, &r, nil)
	return r.Parent, err
}

// Create makes a regular file or finds it, and opens it as Open does. With Layout a new one may come with a layout for writing, which is cached;
// args.Near is set here.
func (c *Client) Create(ctx context.Context, cred metarpc.Cred, args *metarpc.CreateArgs) (a Answer, created bool, err error) {
	if args.Layout && c.cfg.Near != nil {
		args.Near = c.cfg.Near()
	}
	for try := 1; ; try++ {
		ch := c.leases.beginIn(args.Parent, args.Name)
		a, created, err = c.create(ctx, metarpc.OpCreate, cred, args, ch)
		if err != nil || created {
			return a, created, err
		}
		// A Close of a file that was there may have been outstanding, and been executed after this call. Open waits for it. Who has a file of
		// another shard has not opened it yet.
		id, keep, found := a.Attr.ID, a.KeepName, time.Now()
		a, err = c.v.of(id).Open(ctx, cred, &metarpc.OpenArgs{ID: id, Access: args.Access})
		switch {
		case err == nil:
			if a.KeepName = keep; c.foreign(id) {
				a.KeepName = c.stillKept(keep, found)
			}
			return a, false, nil
		case !c.foreign(id):
			c.opens.stray(id)
			return Answer{}, false, err
		case !vanished(err) || try == maxVanished:
			return Answer{}, false, err
		}
	}
}

// TmpFile makes a regular file without a name, and opens it as Open does.
func (c *Client) TmpFile(ctx context.Context, cred metarpc.Cred, args *metarpc.TmpFileArgs) (Answer, error) {
	a, _, err := c.create(ctx, metarpc.OpTmpFile, cred, args, c.leases.begin(nil, false))
	return a, err
}

func (c *Client) create(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args any, ch *change) (a Answer, created bool, err error) {
	r := new(metarpc.CreateResult)
	var attrs, name bool
	cr := c.cache.create()
	err = c.change(ctx, op, cred, args, r, ch, func() {
		attrs = c.leases.keep(ch.asked, &r.Attr, r.Lease)
		for _, k := range ch.names {
			name = c.leases.keepName(ch.asked, k.dir, k.name, r.Attr.ID, 0)
		}
		if r.Created {
			c.leases.grown(ch, 1, 0, r.Attr.Btime)
		}
	}, func(o *outcome, ok bool) {
		switch {
		case ok && o.abandoned && !c.foreign(r.Attr.ID):
			c.opens.stray(r.Attr.ID)
		case ok && r.Created:
			// Before the session may be found lost, in which it is open. Nobody else can have known it, so no Close of it is
			// outstanding.
			c.opens.hold(r.Attr.ID)
		}
		if recalled := c.cache.created(cr); ok && r.Granted {
			c.granted(r, slices.Contains(recalled, r.Attr.ID), o.abandoned)
		}
	})
	if err != nil {
		return Answer{}, false, err
	}
	return c.answerWith(r.Attr, attrs, name), r.Created, nil
}

// granted takes in the layout that came with a new file, unless it was recalled before the answer came.
func (c *Client) granted(r *metarpc.CreateResult, recalled, abandoned bool) {
	id := r.Attr.ID
	segments, _ := segmentsOf(r.Segments) // which have been checked
	if len(segments) == 0 || abandoned {
		c.grants.stray(id)
		return
	}
	c.bind(segments)
	if !recalled {
		c.cache.add(id, segments, Anywhere)
	}
	c.grants.hold(id) // nobody else can have known the file, so no LayoutReturn of it is outstanding
}

func (c *Client) MakeNode(ctx context.Context, cred metarpc.Cred, args *metarpc.MakeNodeArgs) (Answer, error) {
	return c.attrChange(ctx, metarpc.OpMakeNode, cred, args, c.leases.beginIn(args.Parent, args.Name))
}

func (c *Client) Link(ctx context.Context, cred metarpc.Cred, id, parent layout.FileID, name string) (Answer, error) {
	var names []nameKey
	if !c.foreign(parent) { // or another session knows the names, and is told to forget them
		names = append(names, nameKey{parent, name})
	}
	ch := c.leases.begin([]layout.FileID{id, parent}, false, names...)
	return c.attrChange(ctx, metarpc.OpLink, cred, &metarpc.LinkArgs{ID: id, Parent: parent, Name: name}, ch)
}

// Remove is unlink(2), or rmdir(2) with dir.
func (c *Client) Remove(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string, dir bool) error {
	ch, ok := c.leases.meantIn(false, nameKey{parent, name})
	if !ok {
		c.Lookup(ctx, cred, parent, name) // an error is the removal's, too
		ch, _ = c.leases.meantIn(true, nameKey{parent, name})
	}
	r := new(metarpc.RemoveResult)
	return c.change(ctx, metarpc.OpRemove, cred, &metarpc.RemoveArgs{Parent: parent, Name: name, Dir: dir}, r, ch, func() {
		c.leases.keepName(ch.asked, parent, name, 0, 0)
		dirs := int32(0)
		if dir {
			dirs = -1
		}
		c.leases.grown(ch, -1, dirs, r.At)
	}, nil)
}

func (c *Client) Rename(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error {
	if c.foreign(args.NewParent) {
		return c.renameAway(ctx, cred, args)
	}
	ch, children := c.meaning(ctx, cred, nameKey{args.OldParent, args.OldName}, nameKey{args.NewParent, args.NewName})
	return c.change(ctx, metarpc.OpRename, cred, args, nil, ch, func() {
		c.keepRenamed(ch, children, args.Flags&metarpc.RenameExchange != 0)
	}, nil)
}

// renameAway is Rename to a directory of another shard. What its names mean is known to another session, and may be something else by the time of
// the change. So nothing is known of inodes any more if one of ours may be replaced; nor is then what the old name means.
func (c *Client) renameAway(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error {
	ch, _ := c.meaning(ctx, cred, nameKey{args.OldParent, args.OldName})
	if args.Flags&metarpc.RenameNoReplace == 0 {
		c.blind(ch)
	}
	return c.change(ctx, metarpc.OpRename, cred, args, nil, ch, nil, nil)
}

// ReadDir reads a page of about limit entries, those whose cookies are greater than cookie, in the order of their cookies.
func (c *Client) ReadDir(ctx context.Context, cred metarpc.Cred, id layout.FileID, cookie uint64, limit int) (*DirPage, error) {
	asked := c.leases.ask()
	var r metarpc.ReadDirResult
	args := &metarpc.ReadDirArgs{ID: id, Cookie: cookie, Limit: limit}
	if err := c.do(ctx, metarpc.OpReadDir, cred, args, &r, nil); err != nil {
		return nil, err
	}
	if len(r.Entries) > 0 && r.Entries[0].Cookie <= cookie { // or a reader would go round for ever
		return nil, fmt.Errorf("%w: directory %d, cookie %d after %d", metarpc.ErrMalformed, id, r.Entries[0].Cookie, cookie)
	}
	page := &DirPage{Entries: make([]DirEntry, len(r.Entries)), EOF: r.EOF}
	rest := max(0, c.valid.rest())
	c.leases.listed(asked, id, &r, func(i int, attrs, name bool) {
		e := &r.Entries[i]
		a := Answer{Attr: e.Attr}
		if attrs {
			a.Keep = rest
		}
		if name {
			a.KeepName = c.keepName(rest)
		}
		page.Entries[i] = DirEntry{Name: e.Name, Cookie: e.Cookie, Answer: a}
	})
	return page, nil
}

func (c *Client) ReadLink(ctx context.Context, cred metarpc.Cred, id layout.FileID) (string, error) {
	if c.Alive() {
		if target := c.leases.link(id); target != "" {
			return target, nil
		}
	}
	asked := c.leases.ask()
	var r metarpc.BytesResult
	if err := c.do(ctx, metarpc.OpReadLink, cred, &metarpc.IDArgs{ID: id}, &r, nil); err != nil {
		return "", err
	}
	target := string(r.Value)
	c.leases.linked(asked, id, target)
	return target, nil
}

// GetXattr's value must not be changed.
func (c *Client) GetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) ([]byte, error) {
	if isTrusted(name) && cred.UID != 0 {
		return nil, errNoXattr
	}
	computed := isComputed(name)
	if !computed && c.Alive() {
		value, ok := c.leases.xattr(id, name)
		switch {
		case ok && value == nil:
			return nil, errNoXattr
		case ok:
			return value, nil
		}
	}
	asked := c.leases.ask()
	var r metarpc.BytesResult
	err := c.do(ctx, metarpc.OpGetXattr, cred, &metarpc.XattrArgs{ID: id, Name: name}, &r, nil)
	var status *metarpc.Error
	switch {
	case computed:
	case err == nil:
		if r.Value == nil {
			r.Value = []byte{} // there is one, and it is empty
		}
		c.leases.gotXattr(asked, id, name, r.Value)
	case errors.As(err, &status) && status.Status == errNoXattr.Status:
		c.leases.gotXattr(asked, id, name, nil)
	}
	return r.Value, err
}

// SetXattr's flags are metarpc.XattrCreate and metarpc.XattrReplace.
func (c *Client) SetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string, value []byte, flags uint32) error {
	args := &metarpc.XattrArgs{ID: id, Name: name, Value: value, Flags: flags}
	return c.change(ctx, metarpc.OpSetXattr, cred, args, nil, c.leases.begin([]layout.FileID{id}, false), nil, nil)
}

func (c *Client) ListXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID) ([]string, error) {
	if c.Alive() {
		if names, ok := c.leases.xattrList(id); ok {
			return visible(names, cred), nil
		}
	}
	asked := c.leases.ask()
	var r metarpc.NamesResult
	if err := c.do(ctx, metarpc.OpListXattr, cred, &metarpc.IDArgs{ID: id}, &r, nil); err != nil {
		return nil, err
	}
	if cred.UID == 0 { // or it may not be the whole list
		c.leases.gotList(asked, id, r.Names)
	}
	return visible(r.Names, cred), nil
}

func (c *Client) RemoveXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) error {
	args := &metarpc.XattrArgs{ID: id, Name: name}
	return c.change(ctx, metarpc.OpRemoveXattr, cred, args, nil, c.leases.begin([]layout.FileID{id}, false), nil, nil)
}

// Open makes the service keep the file, should it lose its last name, until Release or the end of the session. Opens
// are not counted: one Release ends them all.
func (c *Client) Open(ctx context.Context, cred metarpc.Cred, args *metarpc.OpenArgs) (Answer, error) {
	id := args.ID
	ctx, stop := c.patient(ctx)
	defer stop()
	if err := c.opens.take(ctx, id); err != nil {
		return Answer{}, c.wrap(metarpc.OpOpen, err)
	}
	if args.Access&metarpc.AccessExec != 0 {
		c.execs.Store(id, nil)
	}
	return c.ask(ctx, metarpc.OpOpen, cred, id, args, func(o *outcome) {
		ok := o.err == nil && o.status == metarpc.StatusOK
		if ok && o.abandoned {
			c.opens.stray(id)
		}
		c.opens.end(id, ok && !o.abandoned)
	})
}

// Release follows Open and Create when the last user of the file is gone. It does not wait; the service hears of it soon.
func (c *Client) Release(id layout.FileID) {
	c.pins.Delete(id)
	c.execs.Delete(id)
	c.opens.letGo(id)
}

// LayoutError says which copies of a file may lack data that others have. When it returns nil, those that are stale have been
// told to Config.OnCopiesStale, and nobody takes them for good any more.
func (c *Client) LayoutError(ctx context.Context, id layout.FileID, copies []metarpc.CopyRef, reason string) error {
	args := &metarpc.LayoutErrorArgs{ID: id, Copies: copies, Reason: reason[:min(len(reason), metarpc.MaxText)]}
	// Recalls wait for writes, which wait for this.
	return c.do(prior(ctx), metarpc.OpLayoutError, metarpc.Cred{}, args, nil, nil)
}

// LayoutMove wants the data of a file to lie on a device, and tells how far that is.
func (c *Client) LayoutMove(ctx context.Context, cred metarpc.Cred, id layout.FileID, dev layout.DeviceID) (*metarpc.LayoutMoveResult, error) {
	r := new(metarpc.LayoutMoveResult)
	if err := c.do(ctx, metarpc.OpLayoutMove, cred, &metarpc.LayoutMoveArgs{ID: id, Device: dev}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// Verify compares copies of a range of a file.
func (c *Client) Verify(ctx context.Context, cred metarpc.Cred, args *metarpc.VerifyArgs) (*metarpc.VerifyResult, error) {
	r := new(metarpc.VerifyResult)
	if err := c.do(ctx, metarpc.OpVerify, cred, args, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// CacheStart asks for a data file to copy a file to that the session has open.
func (c *Client) CacheStart(ctx context.Context, cred metarpc.Cred, args *metarpc.CacheStartArgs) (*metarpc.CacheStartResult, error) {
	r := new(metarpc.CacheStartResult)
	if err := c.do(ctx, metarpc.OpCacheStart, cred, args, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// CacheDone says that a cache has all bytes of the file.
func (c *Client) CacheDone(ctx context.Context, id layout.FileID, cache metarpc.CopyRef) error {
	return c.do(ctx, metarpc.OpCacheDone, metarpc.Cred{}, &metarpc.CacheDoneArgs{ID: id, Copy: cache}, nil, nil)
}

// CacheDrop takes a file's cache on a device away, or all of them if the device is zero.
func (c *Client) CacheDrop(ctx context.Context, cred metarpc.Cred, id layout.FileID, dev layout.DeviceID) (r metarpc.CacheDropResult, err error) {
	err = c.do(ctx, metarpc.OpCacheDrop, cred, &metarpc.CacheDropArgs{ID: id, Device: dev}, &r, nil)
	return r, err
}

// LayoutCommit reports sizes and times; there is an attribute record for each report, with ID 0 for a file that is
// gone. A long list is sent in parts, of which the first that fails ends the rest; so is a report of many ranges, with the size in the last
// part.
func (c *Client) LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error) {
	attrs := make([]metarpc.Attr, 0, len(reports))
	for len(reports) > 0 {
		call, rest := nextReports(reports)
		n, whole := len(call), len(reports)-len(rest)
		args := &metarpc.LayoutCommitArgs{Reports: call, Provisional: provisional}
		ids := make([]layout.FileID, n)
		for i := range args.Reports {
			ids[i] = args.Reports[i].ID
		}
		ch := c.leases.begin(ids, false)
		r := new(metarpc.LayoutCommitResult)
		err := c.change(ctx, metarpc.OpLayoutCommit, metarpc.Cred{}, args, r, ch, func() {
			for i := range r.Attrs {
				if r.Attrs[i].ID != 0 {
					c.leases.keep(ch.asked, &r.Attrs[i], 0)
				}
			}
		}, nil)
		if err != nil {
			return attrs, err
		}
		if len(r.Attrs) != n {
			return attrs, fmt.Errorf("%w: %d attribute records for %d reports", metarpc.ErrMalformed, len(r.Attrs), n)
		}
		attrs, reports = append(attrs, r.Attrs[:whole]...), rest
	}
	return attrs, nil
}

// nextReports is what one call can tell of reports, and the rest; what is told of the first of the rest is not in it any more.
func nextReports(reports []metarpc.SizeReport) (call, rest []metarpc.SizeReport) {
	room, places := metarpc.MaxRanges, metarpc.MaxPlaces
	for n := range min(len(reports), metarpc.MaxBatch) {
		r := &reports[n]
		if places -= len(r.Ended) + len(r.GivenUp) + len(r.Reserved); places < 0 && n > 0 {
			return reports[:n], reports[n:]
		}
		now, later := splitReport(*r, room)
		if len(later.Written) == 0 {
			for _, w := range now.Written {
				room -= len(w.Ranges)
			}
			continue
		}
		call = slices.Clone(reports[:n])
		if len(now.Written) > 0 {
			call = append(call, now)
		}
		return call, append([]metarpc.SizeReport{later}, reports[n+1:]...)
	}
	n := min(len(reports), metarpc.MaxBatch)
	return reports[:n], reports[n:]
}

// splitReport makes two of a report that has more ranges than there is room for; later has none otherwise.
func splitReport(r metarpc.SizeReport, room int) (now, later metarpc.SizeReport) {
	for n, w := range r.Written {
		if room -= len(w.Ranges); room >= 0 {
			continue
		}
		now, later = metarpc.SizeReport{ID: r.ID, Written: slices.Clone(r.Written[:n])}, r
		later.Written = slices.Clone(r.Written[n:])
		if fit := len(w.Ranges) + room; fit > 0 {
			part := w
			part.Ranges = w.Ranges[:fit]
			now.Written = append(now.Written, part)
			later.Written[0].Ranges = w.Ranges[fit:]
		}
		return now, later
	}
	return r, later
}

// Reserve finds a place for an append at the end of a file, and the time of the append. It ends a lease on the
// attributes: the service tells a size without the place until that is written, and such an answer must not be kept.
//
// The goroutine that reads the answer calls got with the place, even if the caller has left. It does so before it reads
// the next frame, so got runs before OnReset for a restarted service. got must not block.
func (c *Client) Reserve(ctx context.Context, args *metarpc.ReserveArgs, got func(metarpc.ReserveResult)) error {
	var r metarpc.ReserveResult
	ch := c.leases.begin([]layout.FileID{args.ID}, false)
	c.leases.recall([]metarpc.LeaseItem{{ID: args.ID, Lease: metarpc.LeaseAttrs}})
	return c.change(ctx, metarpc.OpReserve, metarpc.Cred{}, args, &r, ch, nil, func(_ *outcome, ok bool) {
		if ok {
			got(r)
		}
	})
}

func (c *Client) DescribeLayout(ctx context.Context, id layout.FileID) (*metarpc.Described, error) {
	r := new(metarpc.Described)
	if err := c.do(ctx, metarpc.OpDescribeLayout, metarpc.Cred{}, &metarpc.IDArgs{ID: id}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}

func (c *Client) Devices(ctx context.Context) ([]metarpc.DeviceInfo, error) {
	var r metarpc.DevicesResult
	err := c.do(ctx, metarpc.OpDevices, metarpc.Cred{}, &metarpc.Empty{}, &r, nil)
	return r.Devices, err
}

// AddDevice adds the data server at nfs://HOST:PORT/EXPORT or the namespace at nvme://HOST:PORT/NQN#NSID, or answers the one that is known by
// that address, or by the namespace's identifiers. With force a namespace is taken though somebody else's data is on it.
func (c *Client) AddDevice(ctx context.Context, url string, force bool) (metarpc.DeviceInfo, error) {
	var r metarpc.AddDeviceResult
	err := c.do(ctx, metarpc.OpAddDevice, metarpc.Cred{}, &metarpc.AddDeviceArgs{URL: url, Force: force}, &r, nil)
	return r.Info, err
}

// DrainDevice makes the service move all data files of a device elsewhere, or ends that.
func (c *Client) DrainDevice(ctx context.Context, id layout.DeviceID, cancel bool) (metarpc.DeviceInfo, error) {
	var r metarpc.AddDeviceResult
	err := c.do(ctx, metarpc.OpDrainDevice, metarpc.Cred{}, &metarpc.DrainDeviceArgs{Device: id, Cancel: cancel}, &r, nil)
	return r.Info, err
}

// RemoveDevice takes a device that is drained and empty out of the volume; lost says that it is gone for good, with the
// garbage there.
func (c *Client) RemoveDevice(ctx context.Context, id layout.DeviceID, lost bool) error {
	return c.do(ctx, metarpc.OpRemoveDevice, metarpc.Cred{}, &metarpc.RemoveDeviceArgs{Device: id, Lost: lost}, &metarpc.Empty{}, nil)
}

// StatFS says how much room there is for an inode and what is beside it.
func (c *Client) StatFS(ctx context.Context, id layout.FileID) (metarpc.StatFSResult, error) {
	var r metarpc.StatFSResult
	err := c.do(ctx, metarpc.OpStatFS, metarpc.Cred{}, &metarpc.IDArgs{ID: id}, &r, nil)
	return r, err
}

// SetQuota limits what there may be below a directory, or belong to a user or a group; metarpc.QuotaKeep leaves a limit as it is.
func (c *Client) SetQuota(ctx context.Context, name metarpc.QuotaName, bytes, files int64) error {
	args := &metarpc.QuotaSetArgs{Name: name, Bytes: bytes, Files: files}
	return c.do(ctx, metarpc.OpQuotaSet, metarpc.Cred{}, args, &metarpc.Empty{}, nil)
}

// Quota tells what is used of a quota, whether or not there is a limit.
func (c *Client) Quota(ctx context.Context, name metarpc.QuotaName) (metarpc.QuotaInfo, error) {
	var r metarpc.QuotasResult
	err := c.do(ctx, metarpc.OpQuotas, metarpc.Cred{}, &metarpc.QuotasArgs{Name: name}, &r, nil)
	if err != nil || len(r.Quotas) == 0 {
		return metarpc.QuotaInfo{Name: name}, err
	}
	return r.Quotas[0], nil
}

// Quotas are all that have been set.
func (c *Client) Quotas(ctx context.Context) (all []metarpc.QuotaInfo, err error) {
	args := metarpc.QuotasArgs{After: true}
	for {
		var r metarpc.QuotasResult
		if err := c.do(ctx, metarpc.OpQuotas, metarpc.Cred{}, &args, &r, nil); err != nil {
			return nil, err
		}
		all = append(all, r.Quotas...)
		if r.EOF {
			return all, nil
		}
		args.Name = r.Quotas[len(r.Quotas)-1].Name
	}
}

// SetClientRule sets a rule for clients, as admit.Parse reads it; force: also if that cuts some off.
func (c *Client) SetClientRule(ctx context.Context, rule string, force bool) error {
	return c.do(ctx, metarpc.OpClientSet, metarpc.Cred{}, &metarpc.ClientSetArgs{Rule: rule, Force: force}, &metarpc.Empty{}, nil)
}

// RemoveClientRule removes the rule for clients.
func (c *Client) RemoveClientRule(ctx context.Context, whose string) error {
	return c.do(ctx, metarpc.OpClientSet, metarpc.Cred{}, &metarpc.ClientSetArgs{Whose: whose}, &metarpc.Empty{}, nil)
}

// ClientRules are the rules for clients.
func (c *Client) ClientRules(ctx context.Context) (*metarpc.ClientListResult, error) {
	r := new(metarpc.ClientListResult)
	return r, c.do(ctx, metarpc.OpClientList, metarpc.Cred{}, &metarpc.Empty{}, r, nil)
}

func (c *Client) Status(ctx context.Context) (*metarpc.StatusResult, error) {
	r := new(metarpc.StatusResult)
	if err := c.do(ctx, metarpc.OpStatus, metarpc.Cred{}, &metarpc.Empty{}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}
