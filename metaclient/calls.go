package metaclient

import (
	"context"
	"fmt"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// The calls by name. Those without a credential are the same for everybody.

func (c *Client) attr(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args any) (metarpc.Attr, error) {
	var r metarpc.AttrResult
	err := c.do(ctx, op, cred, args, &r, nil)
	return r.Attr, err
}

func (c *Client) GetAttr(ctx context.Context, id layout.FileID) (metarpc.Attr, error) {
	return c.attr(ctx, metarpc.OpGetAttr, metarpc.Cred{}, &metarpc.IDArgs{ID: id})
}

func (c *Client) SetAttr(ctx context.Context, cred metarpc.Cred, args *metarpc.SetAttrArgs) (metarpc.Attr, error) {
	return c.attr(ctx, metarpc.OpSetAttr, cred, args)
}

func (c *Client) Lookup(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string) (metarpc.Attr, error) {
	var r metarpc.LookupResult
	err := c.do(ctx, metarpc.OpLookup, cred, &metarpc.NameArgs{Parent: parent, Name: name}, &r, nil)
	if err == nil && r.Attr.ID == 0 {
		err = &metarpc.Error{Op: metarpc.OpLookup, Status: metarpc.Status(syscall.ENOENT)}
	}
	return r.Attr, err
}

// Create makes a regular file or finds it, and opens it as Open does.
func (c *Client) Create(ctx context.Context, cred metarpc.Cred, args *metarpc.CreateArgs) (metarpc.CreateResult, error) {
	r, err := c.create(ctx, metarpc.OpCreate, cred, args)
	if err != nil {
		return metarpc.CreateResult{}, err
	}
	id := r.Attr.ID
	if r.Created {
		c.opens.hold(id) // nobody else can have known it, so no Close of it is outstanding
		return r, nil
	}
	// A Close of a file that was there may have been outstanding, and been executed after this call. Open waits for it.
	r.Attr, err = c.Open(ctx, cred, &metarpc.OpenArgs{ID: id, Access: args.Access})
	if err != nil {
		c.opens.stray(id)
		return metarpc.CreateResult{}, err
	}
	return r, nil
}

// TmpFile makes a regular file without a name, and opens it as Open does.
func (c *Client) TmpFile(ctx context.Context, cred metarpc.Cred, args *metarpc.TmpFileArgs) (metarpc.CreateResult, error) {
	r, err := c.create(ctx, metarpc.OpTmpFile, cred, args)
	if err == nil {
		c.opens.hold(r.Attr.ID)
	}
	return r, err
}

func (c *Client) create(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args any) (r metarpc.CreateResult, err error) {
	err = c.do(ctx, op, cred, args, &r, func(o *outcome) {
		if o.err != nil || o.status != metarpc.StatusOK || !o.abandoned {
			return
		}
		var r metarpc.CreateResult
		if metarpc.DecodeResult(op, o.raw, &r) == nil {
			c.opens.stray(r.Attr.ID)
		}
	})
	return r, err
}

func (c *Client) MakeNode(ctx context.Context, cred metarpc.Cred, args *metarpc.MakeNodeArgs) (metarpc.Attr, error) {
	return c.attr(ctx, metarpc.OpMakeNode, cred, args)
}

func (c *Client) Link(ctx context.Context, cred metarpc.Cred, id, parent layout.FileID, name string) (metarpc.Attr, error) {
	return c.attr(ctx, metarpc.OpLink, cred, &metarpc.LinkArgs{ID: id, Parent: parent, Name: name})
}

// Remove is unlink(2), or rmdir(2) with dir.
func (c *Client) Remove(ctx context.Context, cred metarpc.Cred, parent layout.FileID, name string, dir bool) error {
	return c.do(ctx, metarpc.OpRemove, cred, &metarpc.RemoveArgs{Parent: parent, Name: name, Dir: dir}, nil, nil)
}

func (c *Client) Rename(ctx context.Context, cred metarpc.Cred, args *metarpc.RenameArgs) error {
	return c.do(ctx, metarpc.OpRename, cred, args, nil, nil)
}

// ReadDir reads a page of about limit entries, those whose cookies are greater than cookie, in the order of their cookies.
func (c *Client) ReadDir(ctx context.Context, cred metarpc.Cred, id layout.FileID, cookie uint64, limit int) (*metarpc.ReadDirResult, error) {
	r := new(metarpc.ReadDirResult)
	args := &metarpc.ReadDirArgs{ID: id, Cookie: cookie, Limit: limit}
	if err := c.do(ctx, metarpc.OpReadDir, cred, args, r, nil); err != nil {
		return nil, err
	}
	if len(r.Entries) > 0 && r.Entries[0].Cookie <= cookie { // or a reader would go round for ever
		return nil, fmt.Errorf("%w: directory %d, cookie %d after %d", metarpc.ErrMalformed, id, r.Entries[0].Cookie, cookie)
	}
	return r, nil
}

func (c *Client) ReadLink(ctx context.Context, cred metarpc.Cred, id layout.FileID) (string, error) {
	var r metarpc.BytesResult
	err := c.do(ctx, metarpc.OpReadLink, cred, &metarpc.IDArgs{ID: id}, &r, nil)
	return string(r.Value), err
}

func (c *Client) GetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) ([]byte, error) {
	var r metarpc.BytesResult
	err := c.do(ctx, metarpc.OpGetXattr, cred, &metarpc.XattrArgs{ID: id, Name: name}, &r, nil)
	return r.Value, err
}

// SetXattr's flags are metarpc.XattrCreate and metarpc.XattrReplace.
func (c *Client) SetXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string, value []byte, flags uint32) error {
	args := &metarpc.XattrArgs{ID: id, Name: name, Value: value, Flags: flags}
	return c.do(ctx, metarpc.OpSetXattr, cred, args, nil, nil)
}

func (c *Client) ListXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID) ([]string, error) {
	var r metarpc.NamesResult
	err := c.do(ctx, metarpc.OpListXattr, cred, &metarpc.IDArgs{ID: id}, &r, nil)
	return r.Names, err
}

func (c *Client) RemoveXattr(ctx context.Context, cred metarpc.Cred, id layout.FileID, name string) error {
	return c.do(ctx, metarpc.OpRemoveXattr, cred, &metarpc.XattrArgs{ID: id, Name: name}, nil, nil)
}

// Open makes the service keep the file, should it lose its last name, until Release or the end of the session. Opens
// are not counted: one Release ends them all.
func (c *Client) Open(ctx context.Context, cred metarpc.Cred, args *metarpc.OpenArgs) (metarpc.Attr, error) {
	id := args.ID
	if err := c.opens.take(ctx, id); err != nil {
		return metarpc.Attr{}, c.wrap(metarpc.OpOpen, err)
	}
	var r metarpc.AttrResult
	err := c.do(ctx, metarpc.OpOpen, cred, args, &r, func(o *outcome) {
		ok := o.err == nil && o.status == metarpc.StatusOK
		if ok && o.abandoned {
			c.opens.stray(id)
		}
		c.opens.end(id, ok && !o.abandoned)
	})
	return r.Attr, err
}

// Release follows Open and Create when the last user of the file is gone. It does not wait; the service hears of it soon.
func (c *Client) Release(id layout.FileID) { c.opens.letGo(id) }

// LayoutCommit reports sizes and times; there is an attribute record for each report, with ID 0 for a file that is
// gone. A long list is sent in parts, of which the first that fails ends the rest.
func (c *Client) LayoutCommit(ctx context.Context, reports []metarpc.SizeReport, provisional bool) ([]metarpc.Attr, error) {
	attrs := make([]metarpc.Attr, 0, len(reports))
	for len(reports) > 0 {
		n := min(len(reports), metarpc.MaxBatch)
		args := &metarpc.LayoutCommitArgs{Reports: reports[:n], Provisional: provisional}
		var r metarpc.LayoutCommitResult
		if err := c.do(ctx, metarpc.OpLayoutCommit, metarpc.Cred{}, args, &r, nil); err != nil {
			return attrs, err
		}
		if len(r.Attrs) != n {
			return attrs, fmt.Errorf("%w: %d attribute records for %d reports", metarpc.ErrMalformed, len(r.Attrs), n)
		}
		attrs, reports = append(attrs, r.Attrs...), reports[n:]
	}
	return attrs, nil
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

// AddDevice adds the data server at nfs://HOST:PORT/EXPORT, or answers the one that is known by that address.
func (c *Client) AddDevice(ctx context.Context, url string) (metarpc.DeviceInfo, error) {
	var r metarpc.AddDeviceResult
	err := c.do(ctx, metarpc.OpAddDevice, metarpc.Cred{}, &metarpc.AddDeviceArgs{URL: url}, &r, nil)
	return r.Info, err
}

func (c *Client) StatFS(ctx context.Context) (metarpc.StatFSResult, error) {
	var r metarpc.StatFSResult
	err := c.do(ctx, metarpc.OpStatFS, metarpc.Cred{}, &metarpc.Empty{}, &r, nil)
	return r, err
}

func (c *Client) Status(ctx context.Context) (*metarpc.StatusResult, error) {
	r := new(metarpc.StatusResult)
	if err := c.do(ctx, metarpc.OpStatus, metarpc.Cred{}, &metarpc.Empty{}, r, nil); err != nil {
		return nil, err
	}
	return r, nil
}
