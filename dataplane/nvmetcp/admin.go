package nvmetcp

import (
	"context"
	"fmt"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Admin runs an admin command, whose CID and SGL are set here, and waits for its answer. data is what the command sends or
// receives, in whole dwords and at most Limits.MaxTransfer. If ctx ends first the command is let go of: whether it was carried
// out is not known, but data is not touched any more.
//
// Errors are those of a Command. While the Controller is not live that is a *[PathError].
func (c *Controller) Admin(ctx context.Context, cmd wire.Command, data []byte) (wire.Completion, error) {
	a := c.live.Load()
	if a == nil {
		return wire.Completion{}, c.noPath()
	}
	if n := len(data); n > a.info.Limits.MaxTransfer || n%4 != 0 {
		err := fmt.Errorf("%d bytes of data, want whole dwords and at most %d bytes", n, a.info.Limits.MaxTransfer)
		return wire.Completion{}, &RequestError{Op: cmd.Name(true), Err: err}
	}
	return a.do(ctx, &cmd, data)
}

// identify runs Identify and returns the structure.
func (c *Controller) identify(ctx context.Context, args wire.Identify) ([]byte, error) {
	b := make([]byte, wire.IdentifySize)
	_, err := c.Admin(ctx, args.Command(), b)
	return b, err
}

// unreadable is an answer that makes no sense.
func (c *Controller) unreadable(what string, err error) error {
	return fmt.Errorf("nvmetcp: %s %s: %s: %w", c.cfg.Addr, c.cfg.SubsysNQN, what, err)
}

// IdentifyNamespace asks for a namespace. One that is not there comes without an error and does not Exist.
func (c *Controller) IdentifyNamespace(ctx context.Context, nsid uint32) (*wire.Namespace, error) {
	b, err := c.identify(ctx, wire.Identify{CNS: wire.CNSNamespace, NSID: nsid})
	if err != nil {
		return nil, err
	}
	ns := new(wire.Namespace)
	if err := ns.Decode(b); err != nil {
		return nil, c.unreadable(fmt.Sprintf("namespace %d", nsid), err)
	}
	return ns, nil
}

// NamespaceDescriptors asks for the identifiers of a namespace.
func (c *Controller) NamespaceDescriptors(ctx context.Context, nsid uint32) (*wire.Descriptors, error) {
	b, err := c.identify(ctx, wire.Identify{CNS: wire.CNSDescriptors, NSID: nsid})
	if err != nil {
		return nil, err
	}
	d := new(wire.Descriptors)
	if err := d.Decode(b); err != nil {
		return nil, c.unreadable(fmt.Sprintf("namespace %d", nsid), err)
	}
	return d, nil
}

// maxNamespaces bounds the list of namespaces.
const maxNamespaces = 1 << 16

// ActiveNamespaces asks for the NSIDs of all namespaces, which rise.
func (c *Controller) ActiveNamespaces(ctx context.Context) ([]uint32, error) {
	var nsids []uint32
	for after := uint32(0); ; after = nsids[len(nsids)-1] {
		b, err := c.identify(ctx, wire.Identify{CNS: wire.CNSActive, NSID: after})
		if err != nil {
			return nil, err
		}
		var more bool
		nsids, more, err = wire.ActiveNSIDs(nsids, b, after)
		switch {
		case err != nil:
			return nil, c.unreadable("list of namespaces", err)
		case !more:
			return nsids, nil
		case len(nsids) > maxNamespaces:
			return nil, c.unreadable("list of namespaces", fmt.Errorf("more than %d of them", maxNamespaces))
		}
	}
}

// discoveryChunk is how much of the discovery log is read at once; its controllers may take no more.
const discoveryChunk = 4096

// GetLogPage reads len(b) bytes of a log page, from args.Offset on, at once or in as few pieces as Limits.MaxTransfer allows; the
// discovery log in pieces of 4096. args.Length is ignored. Without args.RAE reading the last piece clears the page's event, and no
// other does.
//
// What is read in pieces may have changed between them; the pages that can be so long have a number in their header that
// tells. Controllers refuse an offset beyond what there is.
func (c *Controller) GetLogPage(ctx context.Context, args wire.GetLogPage, b []byte) error {
	info := c.Info()
	chunk := info.Limits.MaxTransfer
	if args.ID == wire.LogDiscovery {
		chunk = min(chunk, discoveryChunk)
	}
	if len(b) > chunk && info.Controller.LPA&wire.LPAOffset == 0 {
		return &RequestError{Op: "Get Log Page", Err: fmt.Errorf("%d bytes, but the controller sends %d and knows no offsets", len(b), chunk)}
	}
	clears := !args.RAE
	for len(b) > 0 {
		n := min(len(b), chunk)
		args.Length = uint64(n)
		args.RAE = !clears || n < len(b)
		if _, err := c.Admin(ctx, args.Command(), b[:n]); err != nil {
			return err
		}
		b = b[n:]
		args.Offset += uint64(n)
	}
	return nil
}

// GetFeature asks for a feature, whose value it returns; what else belongs to it goes into data.
func (c *Controller) GetFeature(ctx context.Context, f wire.Feature, data []byte) (uint32, error) {
	answer, err := c.Admin(ctx, f.Get(wire.NoSGL()), data)
	return answer.DW0(), err
}
