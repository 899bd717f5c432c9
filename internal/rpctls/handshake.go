package rpctls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

var (
	errNoTLS = errors.New("the server offers no TLS (RFC 9289), and clear text is not allowed; enable it there, or use xprtsec=none")
	errClear = errors.New("the server does not speak TLS, and clear text is not allowed; give it a certificate, or use xprtsec=none")
)

// HandshakeError says that a connection could not be made secret, and was not used.
type HandshakeError struct {
	Addr string
	Err  error
}

func (e *HandshakeError) Error() string { return fmt.Sprintf("TLS with %s: %v", e.Addr, e.Err) }

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.Err }

// Conn is a connection whose Close does not wait until the other side has been told.
type Conn struct{ *tls.Conn }

// Close closes the connection below.
func (c Conn) Close() error { return c.NetConn().Close() }

// Handshake asks the server at the other end of nc, whose address is addr, for TLS and does the handshake (RFC 9289 section
// 4.1). ask says the program and the version that are asked for, and the XID. ctx bounds the handshake alone. The server's certificate must
// name its IP address.
func (c *Client) Handshake(ctx context.Context, nc net.Conn, addr netip.Addr, ask oncrpc.Call) (*tls.Conn, error) {
	ask.Proc, ask.Cred = 0, oncrpc.Auth{Flavor: oncrpc.FlavorTLS}
	b := ask.Append(make([]byte, oncrpc.RecordMarkSize))
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
	if rep.XID != ask.XID {
		return nil, errors.New("answer to another question")
	}
	if !rep.OffersTLS() {
		return nil, errNoTLS
	}
	return c.Connect(ctx, nc, addr.WithZone("").String(), ALPN)
}

// Connect does the handshake on a connection to a server of this name or IP address, which speaks TLS from the first byte on. ctx bounds the
// handshake alone.
func (c *Client) Connect(ctx context.Context, nc net.Conn, name, protocol string) (*tls.Conn, error) {
	tc := tls.Client(nc, c.config(name, protocol))
	if err := tc.HandshakeContext(ctx); err != nil {
		if errors.As(err, new(tls.RecordHeaderError)) {
			err = errClear
		}
		return nil, err
	}
	if tc.ConnectionState().NegotiatedProtocol != protocol {
		return nil, fmt.Errorf("the server does not agree on the protocol %q", protocol)
	}
	return tc, nil
}

// To is Connect to an address HOST:PORT. An error is a [*HandshakeError], and closes nc.
func (c *Client) To(ctx context.Context, nc net.Conn, addr, protocol string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err == nil {
		var tc *tls.Conn
		if tc, err = c.Connect(ctx, nc, host, protocol); err == nil {
			return Conn{tc}, nil
		}
	}
	nc.Close()
	return nil, &HandshakeError{addr, err}
}

// Accept does the server's part of the handshake, which ctx bounds.
func (s *Server) Accept(ctx context.Context, nc net.Conn, protocol string) (*tls.Conn, error) {
	tc := tls.Server(nc, s.config(protocol))
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	if tc.ConnectionState().NegotiatedProtocol != protocol {
		return nil, fmt.Errorf("the client does not ask for the protocol %q", protocol)
	}
	return tc, nil
}
