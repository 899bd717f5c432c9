package nfs3

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The source ports of the Linux client; below them are those of well-known services.
const (
	minReserved = 665
	maxReserved = 1023
)

// reservedTries is how many reserved ports are tried that turn out to be in use for the same server.
const reservedTries = 8

// keepAlive finds connections dead that have nothing outstanding, before there is something; the others see watch.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: time.Second, Count: 5}

// connect makes a TCP connection, from a certain port if from is valid and that can be had. Go sets TCP_NODELAY.
func (t *Target) connect(p *path, from netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: min(t.cfg.Timeout, maxDial), KeepAliveConfig: keepAlive}
	if from.IsValid() {
		var bound error
		d.Control = func(_, _ string, raw syscall.RawConn) error {
			bound = bindTo(from, raw)
			return bound
		}
		nc, err := dialTCP(p.ctx, &d, p.addr)
		if bound == nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.EADDRINUSE) {
			return nc, err
		}
	}
	for try := 0; t.cfg.ReservedPort && try < reservedTries; try++ {
		d.Control = func(network, _ string, raw syscall.RawConn) error { return bindReserved(network, raw) }
		nc, err := dialTCP(p.ctx, &d, p.addr)
		switch {
		case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EADDRINUSE):
			continue
		case errors.Is(err, errNoReserved):
			t.noteExposed(err)
			try = reservedTries
			continue
		}
		return nc, err
	}
	d.Control = nil
	return dialTCP(p.ctx, &d, p.addr)
}

// dialTCP is [net.Dialer.DialTCP] without its own bind, which an earlier one does not allow.
func dialTCP(ctx context.Context, d *net.Dialer, addr netip.AddrPort) (*net.TCPConn, error) {
	nc, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return nc.(*net.TCPConn), nil
}

// noteExposed logs once why other ports are used.
func (t *Target) noteExposed(err error) {
	t.mu.Lock()
	noted := t.exposed
	t.exposed = true
	t.mu.Unlock()
	if !noted {
		t.cfg.Log.Info("connections come from ports above 1023: exports must allow that (insecure)", "server", t.cfg.Name, "reason", err)
	}
}

var errNoReserved = errors.New("no source port below 1024 can be used")

// bindReserved binds a socket to a free reserved port.
func bindReserved(network string, raw syscall.RawConn) error {
	err := errNoReserved
	ctlErr := raw.Control(func(fd uintptr) {
		// One port may serve connections to several servers.
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) != nil {
			return
		}
		const ports = maxReserved - minReserved + 1
		first := rand.N(ports)
		for i := range ports {
			port := minReserved + (first+i)%ports
			var sa unix.Sockaddr = &unix.SockaddrInet4{Port: port}
			if strings.HasSuffix(network, "6") {
				sa = &unix.SockaddrInet6{Port: port}
			}
			switch bindErr := unix.Bind(int(fd), sa); {
			case bindErr == nil:
				err = nil
				return
			case !errors.Is(bindErr, unix.EADDRINUSE):
				return // EACCES: not root
			}
		}
	})
	if ctlErr != nil {
		return ctlErr
	}
	return err
}
