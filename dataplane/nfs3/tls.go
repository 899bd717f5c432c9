package nfs3

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/oncrpc"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// startTLS asks the server for TLS and does the handshake (RFC 9289 section 4.1). nc is closed after an error, which is a [*rpctls.HandshakeError].
func (t *Target) startTLS(ctx context.Context, nc *net.TCPConn, addr netip.AddrPort) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, min(t.cfg.Timeout, maxDial))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	t.mu.Lock()
	xid := t.nextXID()
	t.mu.Unlock()
	tc, err := t.cfg.TLS.Handshake(ctx, nc, addr.Addr(), oncrpc.Call{XID: xid, Prog: t.prog, Vers: wire.Version})
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		if cause := ctx.Err(); cause != nil {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		nc.Close()
		return nil, &rpctls.HandshakeError{Addr: addr.String(), Err: err}
	}
	return tc, nil
}
