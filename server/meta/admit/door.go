package admit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftfs/weft/internal/callers"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Door is where connections come in, which are in clear text or TLS.
type Door struct {
	Log     *slog.Logger
	TLS     *rpctls.Server // nil: none is offered
	Require bool           // clear text is refused
	Callers callers.Table  // its connections

	complaints callers.Complaints // about them

	mu      sync.Mutex
	secrets map[*watched]struct{} // TLS connections of clients with certificates
	looking bool                  // somebody checks them
}

// Incoming is a connection that has come in.
type Incoming struct {
	Conn   net.Conn
	Frame  []byte        // the first one
	R      *bufio.Reader // what follows is read through it
	Secret bool          // it is TLS
	Peer   rpctls.Peer   // who is at the other end
	guest  *guest
	door   *Door
}

// guest is a connection as package callers knows it.
type guest struct {
	socket net.Conn // as it was accepted
	frames atomic.Uint64
	inUse  atomic.Pointer[func() bool] // nil: no
}

// State implements callers.Conn.
func (g *guest) State() (frames uint64, used bool) {
	inUse := g.inUse.Load()
	return g.frames.Load(), inUse != nil && (*inUse)()
}

// End implements callers.Conn.
func (g *guest) End() { g.socket.Close() }

// Use has the connection count as used as long as inUse says so. That does not wait.
func (in *Incoming) Use(inUse func() bool) { in.guest.inUse.Store(&inUse) }

// Frames counts the frames that have come, for whoever reads them.
func (in *Incoming) Frames() *atomic.Uint64 { return &in.guest.frames }

// Leave must follow when the connection has ended.
func (in *Incoming) Leave() { in.door.Callers.Leave(in.guest) }

// Complain logs what is wrong with a connection, unless there was a line about its address a short time ago.
func (d *Door) Complain(log *slog.Logger, from net.Addr, what string, args ...any) {
	if dropped, ok := d.complaints.Pass(from); ok {
		log.Warn(what, append([]any{"address", from.String(), "not_logged", dropped}, args...)...)
	}
}

// watched is a connection whose client's certificate is looked at again while it is open.
type watched struct {
	rpctls.Conn
	door *Door
}

func (c *watched) Close() error {
	c.door.mu.Lock()
	delete(c.door.secrets, c)
	c.door.mu.Unlock()
	return c.Conn.Close()
}

// peeked is a connection of which some bytes have been read.
type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (c *peeked) Read(p []byte) (int, error) { return c.r.Read(p) }

const (
	helloTimeout = 10 * time.Second // for the first frame
	readBuffer   = 16 << 10         // bytes; many calls fit, and a service has many clients
	tlsHandshake = 22               // the type of the first record (RFC 8446 section 5.1); a frame that long is none
	// recheckEvery is how soon a client notices that its certificate is revoked, or has expired.
	recheckEvery = 5 * time.Second
)

var errWantsTLS = errors.New("the client wants TLS, and this service has no certificate (--tls-dir)")

// Admit reads the first frame from a connection that was just made, after the handshake if it is TLS; the peer has some
// seconds for each. An error that is io.EOF says that there was nothing. A peer that Require does not let in is not
// told so here (see Refuses). After an error the connection is closed; otherwise Leave must follow.
func (d *Door) Admit(nc net.Conn) (*Incoming, error) {
	in := &Incoming{Conn: nc, R: bufio.NewReaderSize(nc, readBuffer), guest: &guest{socket: nc}, door: d}
	if !d.Callers.Enter(in.guest, nc.RemoteAddr()) {
		nc.Close()
		return nil, errFull
	}
	if err := d.admit(in); err != nil {
		nc.Close()
		in.Leave()
		return nil, err
	}
	in.guest.frames.Add(1)
	return in, nil
}

// errFull says that a connection has no room.
var errFull = errors.New("too many connections are in use")

func (d *Door) admit(in *Incoming) error {
	nc := in.Conn
	nc.SetReadDeadline(time.Now().Add(helloTimeout))
	first, err := in.R.Peek(1)
	if err == io.EOF {
		return err
	}
	if err == nil && first[0] == tlsHandshake {
		if d.TLS == nil {
			nc.SetWriteDeadline(time.Now().Add(helloTimeout))
			io.WriteString(nc, "weft: no TLS\n") // which a client of TLS takes for what it is
			return errWantsTLS
		}
		if err := d.shake(in); err != nil {
			return err
		}
	}
	if in.Frame, err = metarpc.ReadFrame(in.R, nil, metarpc.MaxHello); err != nil {
		if err != io.EOF || in.Secret {
			err = fmt.Errorf("connection without a hello: %w", err)
		}
		in.Conn.Close()
		return err
	}
	in.Conn.SetReadDeadline(time.Time{})
	return nil
}

func (d *Door) shake(in *Incoming) error {
	ctx, cancel := context.WithTimeout(context.Background(), helloTimeout)
	defer cancel()
	tc, err := d.TLS.Accept(ctx, &peeked{in.Conn, in.R}, rpctls.Meta)
	if err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	in.Conn, in.R, in.Secret, in.Peer = rpctls.Conn{Conn: tc}, bufio.NewReaderSize(tc, readBuffer), true, rpctls.PeerOf(tc)
	if !d.TLS.Mutual() {
		return nil
	}
	c := &watched{rpctls.Conn{Conn: tc}, d}
	in.Conn = c
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.secrets == nil {
		d.secrets = map[*watched]struct{}{}
	}
	d.secrets[c] = struct{}{}
	if !d.looking {
		d.looking = true
		go d.recheck() // ends when there are no connections
	}
	return nil
}

// recheck cuts connections whose peers are not to be served any more.
func (d *Door) recheck() {
	tick := time.NewTicker(recheckEvery)
	defer tick.Stop()
	for {
		<-tick.C
		d.mu.Lock()
		if len(d.secrets) == 0 {
			d.looking = false
			d.mu.Unlock()
			return
		}
		open := slices.Collect(maps.Keys(d.secrets))
		d.mu.Unlock()
		for _, c := range open {
			if err := d.TLS.Check(c.Conn.Conn); err != nil {
				d.Log.Warn("connection cut", "address", c.RemoteAddr().String(), "error", err)
				c.Conn.Close() // its reader ends, and closes c
			}
		}
	}
}

// Refuses says why a client cannot be let in.
func (d *Door) Refuses(in *Incoming) error {
	if d.Require && !in.Secret {
		return errors.New("this service wants TLS: mount with xprtsec=tls, or xprtsec=mtls and a certificate (weft join)")
	}
	return nil
}

// RefusesPeer says why somebody is not another metadata service.
func (d *Door) RefusesPeer(in *Incoming) error {
	switch {
	case d.Require && !in.Secret:
		return errors.New("another metadata service without TLS: start it with --tls-dir and --xprtsec")
	case in.Secret && d.TLS.Mutual() && !in.Peer.Service:
		return fmt.Errorf("%q says that it is a metadata service, and its certificate does not (weftd ca issue --host)", in.Peer.Name)
	}
	return nil
}
