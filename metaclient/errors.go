package metaclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

var (
	// ErrClosed ends calls of a client that was closed.
	ErrClosed = errors.New("metadata client is closed")

	// errSessionGone tells that the service does not know the session any more.
	errSessionGone = errors.New("the metadata service has ended this client's session")
	errMoved       = errors.New("does not serve this part of the volume")
	errTooOld      = errors.New("the metadata service is of an older version, which does not have this call")
	errShutdown    = errors.New("the metadata service is shutting down")
)

// OutcomeError is the end of a call that was sent and must not be executed twice, when the session ended before an
// answer came. It may have been executed or not.
type OutcomeError struct {
	Op    metarpc.Op
	Cause error
}

func (e *OutcomeError) Error() string {
	return fmt.Sprintf("metadata service: %v: outcome unknown, no answer came: %v", e.Op, e.Cause)
}

func (e *OutcomeError) Unwrap() error { return e.Cause }

// Errno is EIO: nothing better describes a change that may have happened.
func (e *OutcomeError) Errno() syscall.Errno { return syscall.EIO }

// UnavailableError says that a metadata service has answered and cannot serve now. It may later.
type UnavailableError struct {
	Addr string
	Why  string
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("the metadata service at %s cannot serve now: %s", e.Addr, e.Why)
}

// connectError tells why the service at addr cannot be used, in words for who typed the address.
func connectError(addr string, err error) error {
	host, _, splitErr := net.SplitHostPort(addr)
	if splitErr != nil {
		return fmt.Errorf("metadata service address %q: want HOST:PORT: %w", addr, splitErr)
	}
	var dns *net.DNSError
	var secret *rpctls.HandshakeError
	switch {
	case errors.As(err, &secret) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled):
		return fmt.Errorf("metadata service: %w", err)
	case errors.As(err, &dns) && dns.IsNotFound:
		return fmt.Errorf("no such host: %s (%w)", host, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("connection refused at %s: is weftd meta running there? (%w)", addr, err)
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("connecting to %s: %w", addr, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no answer from %s: is it reachable? (%w)", addr, err)
	}
	return fmt.Errorf("cannot connect to %s: %w", addr, err)
}

// tlsAlert is what package tls calls an alert of the other side, which looks at our certificate last.
const tlsAlert = "remote error"

// helloError tells why what listens at addr cannot be spoken to.
func helloError(addr string, err error) error {
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == tlsAlert:
		return fmt.Errorf("the metadata service at %s does not take our certificate, or wants one (xprtsec=mtls); its log says why (%w)", addr, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s accepts connections but does not answer: is it a weft metadata service? One that starts without its catalog (etcd without a quorum) "+
			"does not answer either, and its log says so (%w)", addr, err)
	case errors.Is(err, metarpc.ErrMalformed):
		return fmt.Errorf("%s is not a weft metadata service (%w)", addr, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%s has closed the connection without an answer: is it a weft metadata service? One that stops does so, too, and its log says why (%w)", addr, err)
	}
	return fmt.Errorf("hello with %s: %w", addr, err)
}
