package data

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
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
	tc, err := c.s.tls.Accept(ctx, c.nc, rpctls.ALPN)
	if err != nil {
		if c.draining.Load() {
			return nil
		}
		return err
	}
	c.become(tc)
	return nil
}

// become makes tc what calls are read from and replies written to.
func (c *conn) become(tc *tls.Conn) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.nc, c.secret, c.raw = tc, true, nil
	c.guest = c.s.tls.Mutual() && !rpctls.PeerOf(tc).Service
	c.in.in = bufio.NewReaderSize(tc, inputSize)
}

// forGuests reports whether a client that is no service may call it: what is done with a layout, which has the handle and the owner
// of a data file. Nothing that a guest may call tells either.
func forGuests(call *oncrpc.Call) bool {
	switch call.Prog {
	case oncrpc.ProgNFS:
		switch wire.Proc(call.Proc) {
		case wire.ProcRead, wire.ProcWrite, wire.ProcCommit, wire.ProcFsinfo:
			return true
		}
	case localio.Program, sparse.Program, conns.Program:
		return true
	}
	return false
}

// recheckEvery is how soon a client notices that its certificate is revoked, or has expired.
const recheckEvery = 5 * time.Second

// recheck cuts connections of clients that are not to be served any more, until Shutdown.
func (s *Server) recheck() {
	tick := time.NewTicker(recheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.closed:
			return
		}
		var open []*tls.Conn
		s.mu.Lock()
		for c := range s.conns {
			if tc, ok := c.nc.(*tls.Conn); ok {
				open = append(open, tc)
			}
		}
		s.mu.Unlock()
		for _, tc := range open {
			if err := s.tls.Check(tc); err != nil {
				s.log.Warn("connection cut", "client", tc.RemoteAddr(), "err", err)
				tc.NetConn().Close()
			}
		}
	}
}
