package data

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
)

// tlsCall is the size of the call that asks for TLS, and the least size of any, mark included: NULL has no arguments,
// and the credential and the verifier are empty.
const tlsCall = oncrpc.RecordMarkSize + oncrpc.CallMin

// startTLS waits for the first call and, if that is a NULL call which asks for TLS (RFC 9289 section 4.1), answers it and
// does the handshake. Everything else is left to be read. What happens to the connection meanwhile ends the reading too.
func (c *conn) startTLS() error {
	b, err := c.in.in.Peek(tlsCall)
	if err != nil {
		return nil // serve finds out
	}
	if n, last := oncrpc.ParseRecordMark(b); !last || n != oncrpc.CallMin {
		return nil
	}
	d := xdr.NewDecoder(b[oncrpc.RecordMarkSize:])
	var call oncrpc.Call
	if call.Decode(&d) != nil || call.Proc != 0 || call.Cred.Flavor != oncrpc.FlavorTLS {
		return nil
	}
	if _, known := programs[call.Prog]; !known {
		return nil
	}
	if c.in.in.Buffered() > tlsCall {
		return errors.New("the client did not wait for the answer to its question")
	}
	c.in.in.Discard(tlsCall)
	reply := oncrpc.Reply{XID: call.XID, Verf: oncrpc.Auth{Body: []byte(oncrpc.StartTLS)}}
	out := reply.Append(make([]byte, oncrpc.RecordMarkSize))
	oncrpc.PutRecordMark(out, len(out)-oncrpc.RecordMarkSize, true)
	ctx, cancel := context.WithTimeout(context.Background(), stallTime)
	defer cancel()
	c.nc.SetWriteDeadline(time.Now().Add(stallTime))
	if _, err := c.nc.Write(out); err != nil {
		return nil // the client is gone
	}
	tc := tls.Server(c.nc, c.s.tls)
	if err := tc.HandshakeContext(ctx); err != nil {
		if c.draining.Load() {
			return nil
		}
		return fmt.Errorf("handshake: %w", err)
	}
	if tc.ConnectionState().NegotiatedProtocol != rpctls.ALPN {
		return fmt.Errorf("the client does not ask for the protocol %q", rpctls.ALPN)
	}
	c.become(tc)
	return nil
}

// become makes tc what calls are read from and replies written to.
func (c *conn) become(tc net.Conn) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.nc, c.secret, c.raw = tc, true, nil
	c.in.in = bufio.NewReaderSize(tc, inputSize)
}
