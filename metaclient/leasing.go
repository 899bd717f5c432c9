package metaclient

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// What the calls do with leases.

// Alive reports whether the leases of the session hold by our own clock: what the service lets others change it has told
// us before.
func (c *Client) Alive() bool { return c.valid.rest() > 0 }

// answerWith is an Answer of which some is kept.
func (c *Client) answerWith(attr metarpc.Attr, attrs, name bool) Answer {
	a := Answer{Attr: attr}
	if attrs || name {
		rest := max(0, c.valid.rest())
		if attrs {
			a.Keep = rest
		}
		if name {
			a.KeepName = c.keepName(rest)
		}
	}
	return a
}

// unaskedKeep is how long a name is kept under a lease of a service that does not turn changes back: a recall may then
// have to wait until the name is not kept any more.
const unaskedKeep = time.Second

// keepName is how long a name may be kept of which the lease lasts so long.
func (c *Client) keepName(rest time.Duration) time.Duration {
	if !c.turnsBack.Load() {
		return min(rest, unaskedKeep)
	}
	return rest
}

// CachedAttr returns attributes if there is a lease on them and they are known. It neither blocks nor does I/O.
func (c *Client) CachedAttr(id layout.FileID) (Answer, bool) {
	rest := c.valid.rest()
	if rest <= 0 {
		return Answer{}, false
	}
	attr, ok := c.leases.attrs(id)
	if !ok {
		return Answer{}, false
	}
	return Answer{Attr: attr, Keep: rest}, true
}

// cachedLookup is Lookup if it is known what the name means.
func (c *Client) cachedLookup(dir layout.FileID, name string) (a Answer, ok bool) {
	rest := c.valid.rest()
	if rest <= 0 {
		return Answer{}, false
	}
	child, attr, ok := c.leases.lookup(dir, name)
	switch {
	case !ok:
		return Answer{}, false
	case child == 0:
		return Answer{KeepName: c.keepName(rest)}, true
	case attr.ID != 0:
		return Answer{Attr: attr, Keep: rest, KeepName: c.keepName(rest)}, true
	case c.foreign(child):
		return Answer{Attr: metarpc.Attr{ID: child}, KeepName: c.keepName(rest)}, true
	}
	return Answer{}, false
}

// whole makes an answer of this session, of which nothing but the name counts if its inode is of another shard, one with what that shard's session
// says of the inode.
func (c *Client) whole(ctx context.Context, a Answer) (Answer, error) {
	asked := time.Now()
	b, err := c.v.of(a.Attr.ID).GetAttr(ctx, a.Attr.ID)
	if err != nil {
		return Answer{}, err
	}
	b.KeepName = c.stillKept(a.KeepName, asked)
	return b, nil
}

// stillKept is what is left of a time for which something may be kept, that was so long at a time before.
func (c *Client) stillKept(keep time.Duration, at time.Time) time.Duration {
	if keep == 0 {
		return 0
	}
	return max(0, min(keep-time.Since(at), c.valid.rest()))
}

// vanished reports whether a call has found that there is no such inode.
func vanished(err error) bool {
	var e *metarpc.Error
	return errors.As(err, &e) && (e.Status == metarpc.Status(syscall.ESTALE) || e.Status == metarpc.Status(syscall.ENOENT))
}

// maxVanished is how often a name is looked up that leads to an inode of another shard which is gone by the time it is asked for: somebody
// has removed it meanwhile, and may have made another one.
const maxVanished = 10

// ask makes a call that asks for an inode's attributes.
func (c *Client) ask(ctx context.Context, op metarpc.Op, cred metarpc.Cred, id layout.FileID, args any, hook func(*outcome)) (Answer, error) {
	asked := c.leases.ask()
	var r metarpc.AttrResult
	if err := c.do(ctx, op, cred, args, &r, hook); err != nil {
		return Answer{}, err
	}
	kept := r.Attr.ID == id && c.leases.answered(asked, &r.Attr, r.Lease)
	return c.answerWith(r.Attr, kept, false), nil
}

// change makes a call that changes something. result is nil or a pointer to a zero result, which has been decoded when
// keep is called; keep runs with leaseTable.mu held, and may be nil. after, which may be nil, learns the outcome and
// whether result is set, like a hook of do.
func (c *Client) change(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args, result any, ch *change, keep func(), after func(*outcome, bool)) error {
	var bad error
	err := c.do(ctx, op, cred, args, nil, func(o *outcome) {
		ok := o.err == nil && o.status == metarpc.StatusOK
		if ok && result != nil {
			bad = metarpc.DecodeResult(op, o.raw, result)
			ok = bad == nil
		}
		if ok {
			c.leases.end(ch, keep)
		} else {
			c.leases.end(ch, nil)
		}
		if after != nil {
			after(o, ok)
		}
	})
	if err != nil { // the hook may not have run yet
		return err
	}
	return bad
}

// attrChange is change for calls that answer with the attributes of an inode, and perhaps give it a name.
func (c *Client) attrChange(ctx context.Context, op metarpc.Op, cred metarpc.Cred, args any, ch *change) (Answer, error) {
	r := new(metarpc.AttrResult)
	var attrs, name bool
	err := c.change(ctx, op, cred, args, r, ch, func() {
		attrs = c.leases.keep(ch.asked, &r.Attr, r.Lease)
		for _, k := range ch.names {
			name = c.leases.keepName(ch.asked, k.dir, k.name, r.Attr.ID, 0)
		}
		if op != metarpc.OpMakeNode {
			return
		}
		dirs := int32(0)
		if r.Attr.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			dirs = 1
			c.leases.made(ch.asked, r.Attr.ID, r.Lease)
		}
		c.leases.grown(ch, 1, dirs, r.Attr.Btime)
	}, nil)
	if err != nil {
		return Answer{}, err
	}
	return c.answerWith(r.Attr, attrs, name), nil
}

// meaning begins a change of names and of the inodes that they belong to. It asks for what a name means if that is not
// known, since the service does not say afterwards which inodes have changed.
func (c *Client) meaning(ctx context.Context, cred metarpc.Cred, names ...nameKey) (*change, []layout.FileID) {
	var dirs []layout.FileID
	for _, k := range names {
		dirs = append(dirs, k.dir)
	}
	ch, children, ok := c.leases.meant(false, dirs, names...)
	if !ok {
		for _, k := range names {
			c.lookup(ctx, cred, k.dir, k.name) // an error is the change's, too
		}
		ch, children, _ = c.leases.meant(true, dirs, names...)
	}
	return ch, children
}

// blind says that a change may change inodes of which we do not know which.
func (c *Client) blind(ch *change) {
	c.leases.mu.Lock()
	defer c.leases.mu.Unlock()
	c.leases.blind(ch)
}

// keepRenamed keeps what names mean after a rename; leaseTable.mu is held. children is what they meant before.
func (c *Client) keepRenamed(ch *change, children []layout.FileID, exchange bool) {
	from, to := ch.names[0], ch.names[1]
	// Two names of one inode stay as they are (rename(2)). An inode that is not known is not there, which cannot be.
	if ch.unknown || children[0] == children[1] || children[0] == 0 {
		return
	}
	left := layout.FileID(0)
	if exchange {
		left = children[1]
	}
	c.leases.keepName(ch.asked, from.dir, from.name, left, 0)
	c.leases.keepName(ch.asked, to.dir, to.name, children[0], 0)
}

// isTrusted reports whether only the superuser sees an extended attribute (xattr(7)).
func isTrusted(name string) bool { return strings.HasPrefix(name, "trusted.") }

// isComputed reports whether the service makes up an extended attribute, so that no lease tells when it changes, nor do
// attributes whether there is any.
func isComputed(name string) bool { return strings.HasPrefix(name, "weft.") }

var (
	errNoName  = &metarpc.Error{Op: metarpc.OpLookup, Status: metarpc.Status(syscall.ENOENT)}
	errNoXattr = &metarpc.Error{Op: metarpc.OpGetXattr, Status: metarpc.Status(syscall.ENODATA)}
)

// visible is the part of a list of extended attributes that a user sees. It does not change names.
func visible(names []string, cred metarpc.Cred) []string {
	seen := make([]string, 0, len(names))
	for _, name := range names {
		if cred.UID == 0 || !isTrusted(name) {
			seen = append(seen, name)
		}
	}
	return seen
}

// renewed says that a call that was sent at a time has been answered; only who reads the connection calls it. If leases
// did not hold any more all is forgotten: the service may have given up on us.
func (c *Client) renewed(sent time.Time, lease time.Duration) {
	over := !c.Alive()
	if over {
		if items := c.leases.clear(); len(items) > 0 {
			c.tasks.Go(func() { c.leasesLost(prior(c.ctx), items) }) // tells the kernel; ends with that
		}
	}
	c.valid.extend(sent, lease)
}

// leasesLost tells who wants to know that there are no leases on all these inodes any more.
func (c *Client) leasesLost(ctx context.Context, items []metarpc.LeaseItem) {
	if c.cfg.OnLeaseRecall == nil {
		return
	}
	for len(items) > 0 {
		n := min(len(items), metarpc.MaxBatch)
		c.cfg.OnLeaseRecall(ctx, items[:n])
		items = items[n:]
	}
}

// returnLeases gives leases back that the table has no room for.
func (c *Client) returnLeases(ctx context.Context) {
	for {
		items := c.leases.batch(metarpc.MaxBatch)
		if len(items) == 0 {
			return
		}
		c.leasesLost(ctx, items) // before others may change what was leased
		ids := make([]layout.FileID, len(items))
		for i, it := range items {
			ids[i] = it.ID
		}
		err := c.do(ctx, metarpc.OpLeaseReturn, metarpc.Cred{}, &metarpc.LeaseReturnArgs{IDs: ids}, nil,
			func(*outcome) { c.leases.given(items) })
		if err != nil && c.ctx.Err() == nil {
			c.log.Error("metadata service: giving leases back", "inodes", len(ids), "err", err)
		}
	}
}
