package nfs3

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/internal/wire/xdr"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// joinTime bounds JOIN, and one END; Config.Timeout does too.
const joinTime = 10 * time.Second

// lastNumber is the number of the latest connection of this process.
var lastNumber atomic.Uint64

// predecessor is the connection that a slot has lost while it carried requests that may change something. They stay in
// slot.held until the server carries out none of them any more, or, where the server cannot tell, until there is a
// connection from the same port, by which its reply cache knows them.
type predecessor struct {
	name        conns.Name // zero: the server does not have the program of package conns
	local, addr netip.AddrPort
}

// changes tells whether the call, carried out late, could undo something that was done after its repetition.
func (ctl *control) changes() bool {
	switch ctl.prog {
	case oncrpc.ProgNFS:
		switch wire.Proc(ctl.proc) {
		case wire.ProcSetattr, wire.ProcCreate, wire.ProcMkdir, wire.ProcRemove, wire.ProcRmdir, wire.ProcRename:
			return true
		}
	case sparse.Program:
		return sparse.Proc(ctl.proc) != sparse.ProcSeek
	}
	return false
}

// hold keeps r, which the predecessor had, until it may be sent again.
func (s *slot) hold(r *rpc) {
	r.state = stateLost
	s.held.pushBack(r)
}

// bequeath makes c, which is dead, what the slot's next connection has to end before it is used.
func (s *slot) bequeath(c *conn) {
	local, _ := c.nc.LocalAddr().(*net.TCPAddr)
	s.prior = &predecessor{name: c.name, addr: c.addr, local: local.AddrPort()}
}

// samePort returns the port from which the slot's next connection to addr should come: that of the lost one, if the
// server knows repetitions by it. It is zero if any will do.
func (s *slot) samePort(addr netip.AddrPort) netip.AddrPort {
	if p := s.prior; p != nil && p.name.Number == 0 && p.addr == addr {
		return p.local
	}
	return netip.AddrPort{}
}

// bindTo binds a socket to an address that another one may have had just now.
func bindTo(from netip.AddrPort, raw syscall.RawConn) error {
	var err error
	ctlErr := raw.Control(func(fd uintptr) {
		if err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return
		}
		if ip := from.Addr(); ip.Is4() || ip.Is4In6() {
			err = unix.Bind(int(fd), &unix.SockaddrInet4{Addr: ip.Unmap().As4(), Port: int(from.Port())})
		} else {
			err = unix.Bind(int(fd), &unix.SockaddrInet6{Addr: ip.As16(), Port: int(from.Port())})
		}
	})
	return errors.Join(ctlErr, err)
}

// join names a new connection and ends the one that the slot has lost. It returns the zero Name if the server does not
// have the program for that. Nothing else was sent by nc.
func (s *slot) join(ctx context.Context, nc net.Conn, addr netip.AddrPort) (conns.Name, error) {
	name := conns.Name{Client: s.t.client, Number: lastNumber.Add(1)}
	err := s.t.connCall(ctx, nc, conns.ProcJoin, &name, nil)
	var refused *oncrpc.Error
	switch {
	case errors.As(err, &refused):
		return conns.Name{}, nil
	case err == nil:
		err = s.endPrior(ctx, nc, addr)
	}
	return name, err
}

// endPrior waits until the server carries out nothing any more that the lost connection had.
func (s *slot) endPrior(ctx context.Context, nc net.Conn, addr netip.AddrPort) error {
	t := s.t
	t.mu.Lock()
	prior := s.prior
	t.mu.Unlock()
	if prior == nil || prior.name.Number == 0 { // the server that was there is another one, whose requests are none of this one's
		return nil
	}
	for told := false; ; told = true {
		var res conns.EndRes
		err := t.connCall(ctx, nc, conns.ProcEnd, &prior.name, &res)
		if err != nil || res.Ended {
			return err
		}
		if !told {
			t.mu.Lock()
			s.mourn(time.Now(), addr, errUnended)
			t.mu.Unlock()
		}
	}
}

// connCall makes one call of the program of package conns on a connection that nothing else uses yet.
func (t *Target) connCall(ctx context.Context, nc net.Conn, proc conns.Proc, args *conns.Name, res *conns.EndRes) error {
	ctx, cancel := context.WithTimeout(ctx, min(t.cfg.Timeout, joinTime))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	t.mu.Lock()
	call := oncrpc.Call{XID: t.nextXID(), Prog: conns.Program, Vers: conns.Version, Proc: uint32(proc)}
	t.mu.Unlock()
	err := exchange(nc, call, args, res)
	if !stop() {
		err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		if t.ctx.Err() != nil {
			err = ErrClosed
		}
	}
	if refused := (*oncrpc.Error)(nil); err != nil && !errors.As(err, &refused) {
		err = fmt.Errorf("%v: %w", proc, err)
	}
	return err
}

// exchange sends a call and receives its reply, and not a byte more.
func exchange(nc net.Conn, call oncrpc.Call, args *conns.Name, res *conns.EndRes) error {
	b := args.Append(call.Append(make([]byte, oncrpc.RecordMarkSize)))
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	if _, err := nc.Write(b); err != nil {
		return err
	}
	b = b[:oncrpc.RecordMarkSize]
	if _, err := io.ReadFull(nc, b); err != nil {
		return err
	}
	n, last := oncrpc.ParseRecordMark(b)
	if most := oncrpc.ReplyMax + 4; !last || n > most {
		return malformedf("record of %d bytes in reply to %v", n, conns.Proc(call.Proc))
	}
	b = make([]byte, n)
	if _, err := io.ReadFull(nc, b); err != nil {
		return err
	}
	d := xdr.NewDecoder(b)
	var rep oncrpc.Reply
	if err := rep.Decode(&d); err != nil {
		return &malformed{err}
	}
	if rep.XID != call.XID {
		return malformedf("reply to another call than %v", conns.Proc(call.Proc))
	}
	if err := rep.Err(); err != nil || res == nil {
		return err
	}
	if err := res.Decode(&d); err != nil {
		return &malformed{err}
	}
	return nil
}

// resume gives c, which is new, what its predecessor has lost.
func (s *slot) resume(c *conn) {
	s.prior = nil
	for r := s.held.head; r != nil; r = s.held.head {
		r.unlink()
		c.assign(r)
	}
}

// stopTime is for how long a server that has said that it stops may take to be back.
const stopTime = 5 * time.Second

// called receives a call that the server makes, of which there is one.
func (c *conn) called() error {
	b, err := c.in.whole()
	if err != nil {
		return err
	}
	d := xdr.NewDecoder(b)
	var call oncrpc.Call
	if err := call.Decode(&d); err != nil {
		return &malformed{err}
	}
	if call.Prog != conns.Program || call.Vers != conns.Version || conns.Proc(call.Proc) != conns.ProcStop {
		return malformedf("a call of procedure %d of program %#x", call.Proc, call.Prog)
	}
	c.in.consume(len(b))
	c.t.mu.Lock()
	c.t.stopUntil = time.Now().Add(stopTime)
	c.t.mu.Unlock()
	return nil
}

// Stopping reports whether the server has said a short time ago that it stops, and is not back. Until then, or until
// that time is over, its copies should not be written off.
func (t *Target) Stopping() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Now().Before(t.stopUntil)
}

// newClient draws the identity of a client of data servers.
func newClient() (c conns.Client) {
	rand.Read(c[:])
	return c
}
