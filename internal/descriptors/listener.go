package descriptors

import (
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"
)

// acceptPause is how long a Listener waits after a failure.
const acceptPause = 100 * time.Millisecond

// Listener returns l with an Accept that goes on after passing errors. One goroutine may call it at a time.
func Listener(l net.Listener) net.Listener { return &listener{Listener: l} }

type listener struct {
	net.Listener
	since time.Time // when other errors than a shortage began; zero: there is none
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		switch {
		case err == nil:
			if !l.since.IsZero() {
				slog.Info("connections are accepted again", "address", l.Addr().String(), "after", time.Since(l.since).Round(time.Millisecond))
				l.since = time.Time{}
			}
			return nc, nil
		case !passing(err):
			return nil, err
		case errors.Is(err, syscall.ECONNABORTED):
			continue
		case !Short(err) && l.since.IsZero():
			l.since = time.Now()
			slog.Error("connections cannot be accepted; trying again", "address", l.Addr().String(), "err", err)
		}
		time.Sleep(acceptPause)
	}
}

// passing reports whether an error of accept(2) does not concern the listening socket. Errors of the network belong to
// the connection that was to be accepted (accept(2), "Error handling").
func passing(err error) bool {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return false
	}
	switch errno {
	case syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK, syscall.EFAULT:
		return false
	}
	return true
}
