package localio

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

// rpcConn is a connection to the data server for the calls of the proof. While a session lasts it stays open, unused.
type rpcConn struct {
	nc  net.Conn
	xid uint32
}

// dialRPC connects to the first address that works.
func dialRPC(ctx context.Context, addrs []netip.AddrPort, secret *rpctls.Client) (*rpcConn, error) {
	var errs []error
	for _, addr := range addrs {
		c, err := dialAddr(ctx, addr, secret)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func dialAddr(ctx context.Context, addr netip.AddrPort, secret *rpctls.Client) (*rpcConn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	limit(ctx, nc)
	c := &rpcConn{nc: nc, xid: 1}
	if secret == nil {
		return c, nil
	}
	tc, err := secret.Handshake(ctx, nc, addr.Addr(), oncrpc.Call{XID: c.xid, Prog: wire.Program, Vers: wire.Version})
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("TLS with %v: %w", addr, err)
	}
	c.nc = tc
	return c, nil
}

// limit makes what is done on a connection fail at the deadline of ctx.
func limit(ctx context.Context, nc net.Conn) {
	if t, ok := ctx.Deadline(); ok {
		nc.SetDeadline(t)
	}
}

// call runs a procedure. Results, if there are any, go to res.
func (c *rpcConn) call(proc wire.Proc, args []byte, res interface{ Decode(*xdr.Decoder) error }) error {
	c.xid++
	head := oncrpc.Call{XID: c.xid, Prog: wire.Program, Vers: wire.Version, Proc: uint32(proc)}
	b := append(head.Append(make([]byte, oncrpc.RecordMarkSize)), args...)
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	if _, err := c.nc.Write(b); err != nil {
		return err
	}
	b = b[:oncrpc.RecordMarkSize]
	if _, err := io.ReadFull(c.nc, b); err != nil {
		return err
	}
	n, last := oncrpc.ParseRecordMark(b)
	if !last || n > oncrpc.ReplyMax+wire.MaxMessage {
		return fmt.Errorf("reply of %d bytes", n)
	}
	b = make([]byte, n)
	if _, err := io.ReadFull(c.nc, b); err != nil {
		return err
	}
	d := xdr.NewDecoder(b)
	var reply oncrpc.Reply
	if err := reply.Decode(&d); err != nil {
		return err
	}
	if reply.XID != c.xid {
		return errors.New("reply to another call")
	}
	if err := reply.Err(); err != nil || res == nil {
		return err
	}
	return res.Decode(&d)
}

// channel is what the proof has of the connection.
func (c *rpcConn) channel() ([]byte, error) {
	tc, ok := c.nc.(*tls.Conn)
	if !ok {
		return nil, nil
	}
	state := tc.ConnectionState()
	return state.ExportKeyingMaterial(wire.ExporterLabel, nil, wire.ExporterSize)
}

// wait returns when the connection has ended.
func (c *rpcConn) wait() {
	c.nc.SetDeadline(time.Time{})
	io.Copy(io.Discard, c.nc)
}
