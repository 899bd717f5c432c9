package metarpc

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"syscall"

	"github.com/weftfs/weft/layout"
)

// checker is implemented by what has bounds beyond its types. op matters where calls share a structure.
type checker interface{ check(op Op) error }

func check(op Op, v any) error {
	if c, ok := v.(checker); ok {
		return c.check(op)
	}
	return nil
}

// badValue is a refusal with a better status than StatusBadArgs.
type badValue struct {
	status Status
	text   string
}

func (e *badValue) Error() string { return e.text }

func refuse(errno syscall.Errno, format string, args ...any) error {
	return &badValue{Status(errno), fmt.Sprintf(format, args...)}
}

func checkName(name string) error {
	switch {
	case len(name) > MaxName:
		return refuse(syscall.ENAMETOOLONG, "name of %d bytes, want at most %d", len(name), MaxName)
	case name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("%q is no name", name)
	}
	return nil
}

func checkID(id layout.FileID) error {
	if id == 0 {
		return fmt.Errorf("inode 0")
	}
	return nil
}

func checkIDs(ids []layout.FileID) error {
	if len(ids) > MaxBatch {
		return fmt.Errorf("%d inodes in one call, want at most %d", len(ids), MaxBatch)
	}
	for _, id := range ids {
		if id == 0 {
			return checkID(id)
		}
	}
	return nil
}

// checkOwner refuses the number that means "leave it" to chown(2) and is nobody's.
func checkOwner(id uint32) error {
	if id == math.MaxUint32 {
		return fmt.Errorf("%d is no user or group", id)
	}
	return nil
}

func checkAccess(a Access) error {
	if a&^accessAll != 0 {
		return fmt.Errorf("access %#x", uint32(a))
	}
	return nil
}

// checkLease refuses what is not among the leases that belong in a place.
func checkLease(l, of Lease) error {
	if l&^of != 0 {
		return fmt.Errorf("lease %#x where at most %#x belongs", uint8(l), uint8(of))
	}
	return nil
}

func checkPerm(mode uint32) error {
	if mode&^0o7777 != 0 {
		return fmt.Errorf("mode %#o is more than permission bits", mode)
	}
	return nil
}

func checkRange(off, n int64) error {
	if off < 0 || off == math.MaxInt64 || n <= 0 {
		return fmt.Errorf("range of %d bytes at %d", n, off)
	}
	return nil
}

func checkText(what, s string, limit int) error {
	if len(s) > limit {
		return fmt.Errorf("%s of %d bytes, want at most %d", what, len(s), limit)
	}
	return nil
}

func (c *ClientInfo) check(Op) error {
	if c.PID < 0 {
		return fmt.Errorf("process %d", c.PID)
	}
	return first(checkText("host name", c.Host, MaxText), checkText("program", c.Program, MaxText),
		checkText("mount point", c.Mount, MaxText))
}

func (r *Ring) check() error {
	if len(r.Owners) < 1 || len(r.Owners) > layout.MaxShards {
		return fmt.Errorf("ring of %d shards, want 1 to %d", len(r.Owners), layout.MaxShards)
	}
	if len(r.Services) > MaxServices {
		return fmt.Errorf("ring of %d services, want at most %d", len(r.Services), MaxServices)
	}
	for _, addr := range r.Services {
		if err := checkAddress(addr); err != nil {
			return err
		}
	}
	for shard, owner := range r.Owners {
		if owner < -1 || owner >= len(r.Services) {
			return fmt.Errorf("shard %d is service %d's of %d", shard, owner, len(r.Services))
		}
	}
	return nil
}

func checkAddress(addr string) error {
	if addr == "" || len(addr) > MaxAddress {
		return fmt.Errorf("service address of %d bytes, want 1 to %d", len(addr), MaxAddress)
	}
	return nil
}

func (c Cred) check(Op) error {
	err := first(checkOwner(c.UID), checkOwner(c.GID))
	if len(c.Groups) > MaxGroups {
		err = first(err, fmt.Errorf("%d groups, want at most %d", len(c.Groups), MaxGroups))
	}
	return err
}

func (a *OpenArgs) check(Op) error {
	return first(checkID(a.ID), checkAccess(a.Access), a.Pinned.checkAny())
}

// checkAny accepts a CopyRef that names nothing, too.
func (c *CopyRef) checkAny() error {
	if len(c.Handle) > maxHandle {
		return fmt.Errorf("file handle of %d bytes, want at most %d", len(c.Handle), maxHandle)
	}
	return nil
}

func (a *IDArgs) check(Op) error { return checkID(a.ID) }

func (a *NameArgs) check(Op) error { return first(checkID(a.Parent), checkName(a.Name)) }

func (a *ParentArgs) check(Op) error { return first(checkID(a.ID), checkID(a.Top)) }

func (a *SetAttrArgs) check(Op) error {
	err := checkID(a.ID)
	if a.Mask&^setAll != 0 {
		err = first(err, fmt.Errorf("attribute mask %#x", uint32(a.Mask)))
	}
	if a.Mask&SetMode != 0 {
		err = first(err, checkPerm(a.Mode))
	}
	if a.Mask&SetUID != 0 {
		err = first(err, checkOwner(a.UID))
	}
	if a.Mask&SetGID != 0 {
		err = first(err, checkOwner(a.GID))
	}
	if a.Mask&SetSize != 0 && a.Size < 0 {
		err = first(err, fmt.Errorf("size %d", a.Size))
	}
	return err
}

func (a *CreateArgs) check(Op) error {
	return first(checkID(a.Parent), checkName(a.Name), checkPerm(a.Mode), checkPerm(a.Umask), checkAccess(a.Access), checkNear(a.Near))
}

func (a *TmpFileArgs) check(Op) error {
	return first(checkID(a.Parent), checkPerm(a.Mode), checkPerm(a.Umask))
}

func (a *MakeNodeArgs) check(Op) error {
	err := first(checkID(a.Parent), checkName(a.Name), checkPerm(a.Mode&^syscall.S_IFMT), checkPerm(a.Umask))
	link := false
	switch a.Mode & syscall.S_IFMT {
	case syscall.S_IFLNK:
		link = true
	case syscall.S_IFREG, syscall.S_IFDIR, syscall.S_IFIFO, syscall.S_IFSOCK, syscall.S_IFCHR, syscall.S_IFBLK:
	default:
		err = first(err, fmt.Errorf("mode %#o has no type of inode", a.Mode))
	}
	switch {
	case len(a.Target) > MaxSymlink:
		err = first(err, refuse(syscall.ENAMETOOLONG, "target of %d bytes, want at most %d", len(a.Target), MaxSymlink))
	case link == (a.Target == "") || strings.Contains(a.Target, "\x00"):
		err = first(err, fmt.Errorf("target %q for mode %#o", a.Target, a.Mode))
	}
	return err
}

func (a *LinkArgs) check(Op) error {
	return first(checkID(a.ID), checkID(a.Parent), checkName(a.Name))
}

func (a *RemoveArgs) check(Op) error { return first(checkID(a.Parent), checkName(a.Name)) }

func (a *RenameArgs) check(Op) error {
	err := first(checkID(a.OldParent), checkName(a.OldName), checkID(a.NewParent), checkName(a.NewName))
	if a.Flags > RenameExchange {
		err = first(err, fmt.Errorf("rename flags %#x", a.Flags))
	}
	return err
}

func (a *ReadDirArgs) check(Op) error {
	err := checkID(a.ID)
	if a.Cookie > math.MaxInt64 {
		err = first(err, fmt.Errorf("directory cookie %d", a.Cookie))
	}
	if a.Limit < 1 || a.Limit > MaxPage {
		err = first(err, fmt.Errorf("page of %d entries, want 1 to %d", a.Limit, MaxPage))
	}
	return err
}

func (a *XattrArgs) check(op Op) error {
	switch {
	case a.Name == "" || len(a.Name) > MaxXattrKey:
		return refuse(syscall.ERANGE, "attribute name of %d bytes, want 1 to %d", len(a.Name), MaxXattrKey)
	case strings.Contains(a.Name, "\x00"):
		return fmt.Errorf("attribute name %q", a.Name)
	case len(a.Value) > MaxXattr:
		return refuse(syscall.E2BIG, "attribute value of %d bytes, want at most %d", len(a.Value), MaxXattr)
	case a.Flags&^(XattrCreate|XattrReplace) != 0:
		return fmt.Errorf("attribute flags %#x", a.Flags)
	case op != OpSetXattr && (len(a.Value) != 0 || a.Flags != 0):
		return fmt.Errorf("value or flags where only a name belongs")
	}
	return checkID(a.ID)
}

func (a *CloseArgs) check(Op) error { return checkIDs(a.IDs) }

func (a *LeaseReturnArgs) check(Op) error { return checkIDs(a.IDs) }

func (a *SizeQueryArgs) check(Op) error { return checkIDs(a.IDs) }

func (a *LeaseRecallArgs) check(Op) error {
	if len(a.Items) > MaxBatch {
		return fmt.Errorf("%d items in one recall, want at most %d", len(a.Items), MaxBatch)
	}
	for i := range a.Items {
		if err := first(checkID(a.Items[i].ID), checkLease(a.Items[i].Lease, leaseAll)); err != nil {
			return err
		}
	}
	return nil
}

func (a *LockArgs) check(Op) error {
	err := checkID(a.ID)
	if a.Type >= lockTypeEnd {
		err = first(err, fmt.Errorf("lock type %d", a.Type))
	}
	if a.Start < 0 || a.End < a.Start {
		err = first(err, fmt.Errorf("lock from byte %d to %d", a.Start, a.End))
	}
	return err
}

func (a *LockReadyArgs) check(Op) error { return checkID(a.ID) }

func (a *LeaseShrinkArgs) check(Op) error {
	if a.Keep < 0 {
		return fmt.Errorf("leases on %d inodes", a.Keep)
	}
	return nil
}

func (a *ReserveArgs) check(Op) error {
	err := first(checkID(a.ID), checkRange(0, a.Len))
	if len(a.Ended) > MaxBatch || len(a.GivenUp) > MaxBatch {
		err = first(err, fmt.Errorf("%d and %d places in one call, want at most %d", len(a.Ended), len(a.GivenUp), MaxBatch))
	}
	return err
}

func (a *ReserveRecallArgs) check(Op) error { return checkID(a.ID) }

// MaxNear bounds LayoutGetArgs.Near and CreateArgs.Near.
const MaxNear = 64

func checkNear(near []layout.DeviceID) error {
	if len(near) > MaxNear {
		return fmt.Errorf("%d data servers on the client's host, want at most %d", len(near), MaxNear)
	}
	return nil
}

func (a *LayoutGetArgs) check(Op) error {
	err := first(checkID(a.ID), checkRange(a.Off, a.Len))
	if a.IOMode != layout.IOModeRead && a.IOMode != layout.IOModeRW {
		err = first(err, fmt.Errorf("iomode %v", a.IOMode))
	}
	if a.Pin >= pinEnd || a.Pin == PinAny && a.IOMode == layout.IOModeRW {
		err = first(err, fmt.Errorf("pin %d with iomode %v", a.Pin, a.IOMode))
	}
	if a.Renew && (a.IOMode != layout.IOModeRW || a.Pin != PinNone) {
		err = first(err, fmt.Errorf("renewal with iomode %v and pin %d", a.IOMode, a.Pin))
	}
	return first(err, checkNear(a.Near))
}

func (a *CacheStartArgs) check(Op) error {
	err := checkID(a.ID)
	if n := len(a.Devices); n == 0 || n > MaxNear {
		err = first(err, fmt.Errorf("%d data servers to choose from, want 1 to %d", n, MaxNear))
	}
	if a.Limit < 0 {
		err = first(err, fmt.Errorf("caches of %d bytes", a.Limit))
	}
	return err
}

func (a *CacheDoneArgs) check(Op) error { return checkCopies(a.ID, []CopyRef{a.Copy}) }

func (a *CacheDropArgs) check(Op) error { return checkID(a.ID) }

func (a *MetaDrainArgs) check(Op) error { return checkAddress(a.Address) }

func (r *MetaListResult) check(Op) error {
	if r.Shards < 1 || r.Shards > layout.MaxShards {
		return fmt.Errorf("volume of %d shards, want 1 to %d", r.Shards, layout.MaxShards)
	}
	if len(r.Services) > MaxServices {
		return fmt.Errorf("%d services, want at most %d", len(r.Services), MaxServices)
	}
	for i := range r.Services {
		s := &r.Services[i]
		if s.State >= metaStateEnd || s.Silent < 0 || s.Sessions < 0 {
			return fmt.Errorf("service in state %d, silent for %d ns, with %d sessions", s.State, s.Silent, s.Sessions)
		}
		for _, shard := range s.Shards {
			if shard < 0 || shard >= r.Shards {
				return fmt.Errorf("shard %d of %d", shard, r.Shards)
			}
		}
		err := first(checkAddress(s.Address), checkText("host name", s.Host, MaxText), checkText("program", s.Program, MaxText))
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *LayoutReturnArgs) check(Op) error { return checkIDs(a.IDs) }

func checkCopies(id layout.FileID, copies []CopyRef) error {
	if len(copies) > layout.MaxPolicyMirror*layout.MaxStripeCount {
		return fmt.Errorf("%d copies of inode %d", len(copies), id)
	}
	for i := range copies {
		if n := len(copies[i].Handle); n == 0 || n > maxHandle {
			return fmt.Errorf("file handle of %d bytes, want 1 to %d", n, maxHandle)
		}
	}
	return checkID(id)
}

func (a *LayoutErrorArgs) check(Op) error {
	return first(checkCopies(a.ID, a.Copies), checkText("reason", a.Reason, MaxText))
}

func (a *CopiesStaleArgs) check(Op) error { return checkCopies(a.ID, a.Copies) }

func (a *LayoutCommitArgs) check(Op) error {
	if len(a.Reports) > MaxBatch {
		return fmt.Errorf("%d reports in one call, want at most %d", len(a.Reports), MaxBatch)
	}
	ranges, places := 0, 0
	for i := range a.Reports {
		r := &a.Reports[i]
		if r.ID == 0 || r.End < 0 {
			return fmt.Errorf("report of inode %d ending at %d", r.ID, r.End)
		}
		if a.Provisional && len(r.Written) > 0 {
			return fmt.Errorf("provisional report of inode %d that makes blocks valid", r.ID)
		}
		if r.Used < UsedLost {
			return fmt.Errorf("report of inode %d, of which %d bytes are used", r.ID, r.Used)
		}
		if s := r.Set; s.Ctime < 0 || s.Mask&^(SetAtime|SetMtime) != 0 || s.Ctime == 0 && s != (Times{}) || a.Provisional && s != (Times{}) {
			return fmt.Errorf("report of inode %d, of which times were set: %+v, provisional %t", r.ID, s, a.Provisional)
		}
		for k := range r.Written {
			if err := r.Written[k].check(r.ID); err != nil {
				return err
			}
			ranges += len(r.Written[k].Ranges)
		}
		for _, p := range r.Reserved {
			if err := checkRange(p.Off, p.Len); err != nil || p.Number == 0 || p.Mtime <= 0 {
				return fmt.Errorf("report of inode %d with place %d of %d bytes at %d, made at %d", r.ID, p.Number, p.Len, p.Off, p.Mtime)
			}
		}
		places += len(r.Ended) + len(r.GivenUp) + len(r.Reserved)
	}
	if places > MaxPlaces {
		return fmt.Errorf("%d places of appends in one call, want at most %d", places, MaxPlaces)
	}
	if ranges > MaxRanges {
		return fmt.Errorf("%d ranges in one call, want at most %d", ranges, MaxRanges)
	}
	return nil
}

// check checks what is said of a data file of an inode.
func (w *Written) check(id layout.FileID) error {
	if err := checkCopies(id, []CopyRef{w.Copy}); err != nil {
		return err
	}
	var end int64
	for _, r := range w.Ranges {
		if r.Off < end || r.Len <= 0 || r.Len > math.MaxInt64-r.Off || (r.Off|r.Len)%layout.MinBlock != 0 {
			return fmt.Errorf("inode %d: %d bytes written at %d, after %d: want whole blocks in their order", id, r.Len, r.Off, end)
		}
		end = r.Off + r.Len
	}
	return nil
}

func (a *ReportDevicesArgs) check(Op) error {
	if len(a.Devices) > MaxBatch {
		return fmt.Errorf("report of %d devices, want at most %d", len(a.Devices), MaxBatch)
	}
	return nil
}

func (a *DeviceStatesArgs) check(Op) error {
	if len(a.Down) > MaxBatch {
		return fmt.Errorf("%d devices are down, want at most %d", len(a.Down), MaxBatch)
	}
	for i := range a.Down {
		if d := &a.Down[i]; d.For < 0 {
			return fmt.Errorf("device %v is down for %d ns", d.Device, d.For)
		}
	}
	return nil
}

func (a *LayoutStatsArgs) check(Op) error {
	if a.Span <= 0 || len(a.Devices) > MaxBatch {
		return fmt.Errorf("statistics of %d devices over %d ns, want at most %d", len(a.Devices), a.Span, MaxBatch)
	}
	for i := range a.Devices {
		if d := &a.Devices[i]; min(d.Reads.Time, d.Writes.Time, d.Outstanding) < 0 {
			return fmt.Errorf("device %v: reads of %d ns, writes of %d ns, %d requests outstanding", d.Device, d.Reads.Time, d.Writes.Time, d.Outstanding)
		}
	}
	return nil
}

func (a *LayoutMoveArgs) check(Op) error {
	if a.Device == (layout.DeviceID{}) {
		return fmt.Errorf("a move of inode %d to no device", a.ID)
	}
	return checkID(a.ID)
}

func (a *VerifyArgs) check(Op) error {
	if a.Len > MaxVerify {
		return fmt.Errorf("%d bytes to be compared, want at most %d", a.Len, MaxVerify)
	}
	return first(checkID(a.ID), checkRange(a.Off, a.Len))
}

func (a *AddDeviceArgs) check(Op) error { return checkText("URL", a.URL, MaxText) }

func (a *LayoutRecallArgs) check(Op) error { return first(checkID(a.ID), checkRange(a.Off, a.Len)) }

// Results come from the service, which a client does not trust with its memory or its loops.

func (a *Attr) check(Op) error {
	if a.ID == 0 || a.Size < 0 {
		return fmt.Errorf("attributes of inode %d with size %d", a.ID, a.Size)
	}
	if a.Flags&^attrFlagsAll != 0 {
		return fmt.Errorf("attribute flags %#x", uint32(a.Flags))
	}
	if a.Used < 0 {
		return fmt.Errorf("attributes of inode %d, of which %d bytes are used", a.ID, a.Used)
	}
	return nil
}

func (r *VerifyResult) check(Op) error {
	if r.Next <= 0 || r.Size < 0 {
		return fmt.Errorf("compared up to %d of %d bytes", r.Next, r.Size)
	}
	for i := range r.Differ {
		d := &r.Differ[i]
		if d.Off < 0 || d.Len <= 0 || len(d.Good) == 0 || len(d.Bad) == 0 {
			return fmt.Errorf("%d and %d copies differ in %d bytes at %d", len(d.Good), len(d.Bad), d.Len, d.Off)
		}
	}
	return nil
}

func (r *AttrResult) check(op Op) error {
	allowed := LeaseAttrs
	if op == OpMakeNode && r.Attr.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		allowed |= LeaseNames
	}
	return first(r.Attr.check(op), checkLease(r.Lease, allowed))
}

func (r *CreateResult) check(op Op) error {
	if r.Granted && !r.Created || len(r.Segments) > 0 && !r.Granted {
		return fmt.Errorf("%d layout segments of inode %d: created %t, granted %t", len(r.Segments), r.Attr.ID, r.Created, r.Granted)
	}
	for i := range r.Segments {
		seg, err := r.Segments[i].Layout()
		if err != nil {
			return err
		}
		if seg.IOMode != layout.IOModeRW {
			return fmt.Errorf("%v layout of a new file", seg.IOMode)
		}
	}
	return first(r.Attr.check(op), checkLease(r.Lease, LeaseAttrs))
}

func (r *LookupResult) check(op Op) error {
	err := first(checkLease(r.Lease, LeaseAttrs), checkLease(r.Names, LeaseNames))
	if r.Attr.ID != 0 {
		err = first(err, r.Attr.check(op))
	}
	return err
}

func (r *ReserveResult) check(Op) error {
	if r.Off < 0 || r.Mtime <= 0 {
		return fmt.Errorf("append at %d, made at %d", r.Off, r.Mtime)
	}
	return nil
}

func (r *LockResult) check(Op) error {
	switch {
	case r.Type >= lockTypeEnd:
		return fmt.Errorf("lock type %d", r.Type)
	case r.Start < 0 || r.End < r.Start:
		return fmt.Errorf("lock from byte %d to %d", r.Start, r.End)
	}
	return checkText("host name", r.Host, MaxText)
}

func (r *ReadDirResult) check(op Op) error {
	if len(r.Entries) > MaxPage || len(r.Entries) == 0 && !r.EOF {
		return fmt.Errorf("directory page of %d entries, end %t", len(r.Entries), r.EOF)
	}
	if err := checkLease(r.Names, LeaseNames); err != nil {
		return err
	}
	last := uint64(FirstCookie)
	for i := range r.Entries {
		e := &r.Entries[i]
		if e.Cookie < last || e.Cookie > math.MaxInt64 {
			return fmt.Errorf("directory cookie %d after %d", e.Cookie, last)
		}
		last = e.Cookie
		if err := first(checkName(e.Name), e.Attr.check(op), checkLease(e.Lease, LeaseAttrs)); err != nil {
			return err
		}
	}
	return nil
}

func (r *BytesResult) check(op Op) error {
	limit := MaxXattr
	if op == OpReadLink {
		limit = MaxSymlink
	}
	if len(r.Value) > limit {
		return fmt.Errorf("value of %d bytes, want at most %d", len(r.Value), limit)
	}
	return nil
}

func (r *NamesResult) check(Op) error {
	for _, name := range r.Names {
		if name == "" || len(name) > MaxXattrKey || strings.Contains(name, "\x00") {
			return fmt.Errorf("attribute name %q", name)
		}
	}
	return nil
}

func (r *LayoutResult) check(Op) error {
	for i := range r.Segments {
		if _, err := r.Segments[i].Layout(); err != nil {
			return err
		}
	}
	return r.Pinned.checkAny()
}

func (r *CacheStartResult) check(Op) error {
	if r.Size < 0 || len(r.Segments) > 1 {
		return fmt.Errorf("cache of %d bytes in %d segments", r.Size, len(r.Segments))
	}
	for i := range r.Segments {
		seg, err := r.Segments[i].Layout()
		if err != nil {
			return err
		}
		if seg.IOMode != layout.IOModeRW || !seg.Contains(0, r.Size) {
			return fmt.Errorf("%v layout of %v for a cache of %d bytes", seg.IOMode, seg.Range, r.Size)
		}
	}
	return nil
}

func (r *CacheDropResult) check(Op) error {
	if r.Caches < 0 || r.Bytes < 0 {
		return fmt.Errorf("%d caches of %d bytes", r.Caches, r.Bytes)
	}
	return nil
}

func (r *LayoutCommitResult) check(Op) error {
	if len(r.Attrs) > MaxBatch {
		return fmt.Errorf("%d attribute records, want at most %d", len(r.Attrs), MaxBatch)
	}
	for i := range r.Attrs {
		if a := &r.Attrs[i]; a.Size < 0 {
			return a.check(0)
		}
	}
	return nil
}

func (r *DevicesResult) check(Op) error {
	for i := range r.Devices {
		if err := r.Devices[i].Device.check(); err != nil {
			return err
		}
	}
	return nil
}

func (r *AddDeviceResult) check(Op) error { return r.Info.Device.check() }

func (d *Device) check() error {
	if len(d.Addrs) == 0 {
		return nil // the service does not know them
	}
	_, err := d.Layout()
	return err
}

func (r *StatFSResult) check(Op) error {
	if r.Total < 0 || r.Free < 0 || r.Avail < 0 || r.Files < 0 || r.MaxFiles < 0 {
		return fmt.Errorf("negative space: %d total, %d free, %d available, %d files of %d", r.Total, r.Free, r.Avail, r.Files, r.MaxFiles)
	}
	return nil
}

func (n *QuotaName) check() error {
	switch {
	case n.Kind == 0 || n.Kind >= quotaEnd:
		return fmt.Errorf("quota of kind %d", n.Kind)
	case n.Kind == QuotaTree && n.ID == 0, n.Kind != QuotaTree && n.ID >= math.MaxUint32:
		return fmt.Errorf("quota of kind %d for %d", n.Kind, n.ID)
	}
	return nil
}

func (a *QuotaSetArgs) check(Op) error {
	if a.Bytes < QuotaKeep || a.Files < QuotaKeep {
		return fmt.Errorf("quota of %d bytes and %d files", a.Bytes, a.Files)
	}
	return a.Name.check()
}

func (a *ClientSetArgs) check(Op) error {
	if (a.Whose == "") == (a.Rule == "") {
		return errors.New("a rule, or whose rule to remove, is wanted")
	}
	return first(checkText("whose rule", a.Whose, MaxRule), checkText("rule", a.Rule, MaxRule))
}

func (r *ClientListResult) check(Op) error {
	if len(r.Rules) > MaxBatch || len(r.Given) > MaxBatch {
		return fmt.Errorf("%d and %d rules", len(r.Rules), len(r.Given))
	}
	for _, rule := range slices.Concat(r.Rules, r.Given) {
		if err := checkText("rule", rule, MaxRule); err != nil {
			return err
		}
	}
	return nil
}

func (a *QuotasArgs) check(Op) error {
	if a.After && a.Name == (QuotaName{}) {
		return nil
	}
	return a.Name.check()
}

func (r *QuotasResult) check(Op) error {
	if len(r.Quotas) > MaxBatch || len(r.Quotas) == 0 && !r.EOF {
		return fmt.Errorf("page of %d quotas, end %t", len(r.Quotas), r.EOF)
	}
	for i := range r.Quotas {
		q := &r.Quotas[i]
		err := first(q.Name.check(), checkText("path", q.Path, MaxText))
		if q.Bytes < 0 || q.Files < 0 {
			err = first(err, fmt.Errorf("quota of %d bytes and %d files", q.Bytes, q.Files))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
