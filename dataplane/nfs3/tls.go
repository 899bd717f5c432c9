package nfs3

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

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// TLSError says that a connection could not be made secret, so that it was not used.
type TLSError struct {
	Addr netip.AddrPort
	Err  error
}

func (e *TLSError) Error() string { return fmt.Sprintf("TLS with %v: %v", e.Addr, e.Err) }

// Unwrap returns the cause.
func (e *TLSError) Unwrap() error { return e.Err }

var (
	errNoTLS  = errors.New("the server offers no TLS (RFC 9289), and clear text is not allowed; enable it there, or use xprtsec=none")
	errNoALPN = fmt.Errorf("the server does not agree on the protocol %q", rpctls.ALPN)
)

// startTLS asks the server for TLS and does the handshake (RFC 9289 section 4.1). nc is closed after an error.
func (t *Target) startTLS(nc *net.TCPConn, addr netip.AddrPort) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(t.ctx, min(t.cfg.Timeout, maxDial))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	tc, err := t.handshake(ctx, nc, addr)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		if cause := ctx.Err(); cause != nil {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		nc.Close()
		return nil, &TLSError{addr, err}
	}
	return tc, nil
}

func (t *Target) handshake(ctx context.Context, nc *net.TCPConn, addr netip.AddrPort) (*tls.Conn, error) {
	t.mu.Lock()
	xid := t.nextXID()
	t.mu.Unlock()
	call := oncrpc.Call{XID: xid, Prog: t.prog, Vers: wire.Version, Cred: oncrpc.Auth{Flavor: oncrpc.FlavorTLS}}
	b := call.Append(make([]byte, oncrpc.RecordMarkSize))
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	if _, err := nc.Write(b); err != nil {
		return nil, err
	}
	// Not a byte more than the reply: what follows is TLS.
	b = b[:oncrpc.RecordMarkSize]
	if _, err := io.ReadFull(nc, b); err != nil {
		return nil, fmt.Errorf("no answer to the question for it: %w", err)
	}
	n, last := oncrpc.ParseRecordMark(b)
	if !last || n > oncrpc.ReplyMax {
		return nil, fmt.Errorf("answer of %d bytes to the question for it", n)
	}
	b = make([]byte, n)
	if _, err := io.ReadFull(nc, b); err != nil {
		return nil, fmt.Errorf("no answer to the question for it: %w", err)
	}
	d := xdr.NewDecoder(b)
	var rep oncrpc.Reply
	if err := rep.Decode(&d); err != nil {
		return nil, fmt.Errorf("answer to the question for it: %w", err)
	}
	if rep.XID != xid {
		return nil, errors.New("answer to another question")
	}
	if !rep.OffersTLS() {
		return nil, errNoTLS
	}
	cfg := t.cfg.TLS.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName = addr.Addr().WithZone("").String()
	}
	tc := tls.Client(nc, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if tc.ConnectionState().NegotiatedProtocol != rpctls.ALPN {
		return nil, errNoALPN
	}
	return tc, nil
}
