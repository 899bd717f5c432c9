package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// connections is how many TCP connections are used: calls are small, one that is slow must not hold up the rest.
const connections = 2

// superuser is who the service is to data servers.
var superuser layout.Credential

// DialNFS is the Dialer for real data servers, in clear text. It is silent: who uses the Server says what is wrong with it.
func DialNFS(name string, addrs []netip.AddrPort, mountPort uint16) (Server, error) {
	return DialTLS(nil)(name, addrs, mountPort)
}

// DialTLS returns the Dialer for data servers that are spoken to with TLS, as package rpctls configures it, or in clear
// text if that is nil.
func DialTLS(secret *rpctls.Client) Dialer {
	return func(name string, addrs []netip.AddrPort, mountPort uint16) (Server, error) {
		target, err := nfs3.New(nfs3.Config{
			Name: name, Addrs: addrs, Connections: connections, TLS: secret, ReservedPort: true, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return nil, err
		}
		return &nfsServer{target, addrs, mountPort, secret}, nil
	}
}

// nfsServer is a Server on the network.
type nfsServer struct {
	target    *nfs3.Target
	addrs     []netip.AddrPort
	mountPort uint16
	secret    *rpctls.Client
}

func (s *nfsServer) Mount(ctx context.Context, export string) ([]byte, error) {
	var errs []error
	for _, addr := range s.addrs {
		root, err := nfs3.MountAt(ctx, addr, s.mountPort, export, s.secret)
		if err == nil {
			return root, nil
		}
		errs = append(errs, err)
		if _, answered := Status(err); answered {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// refusedAfter is how long a NULL may have no answer before it is looked whether connections are refused.
const refusedAfter = 100 * time.Millisecond

func (s *nfsServer) Null(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.target.Null(ctx) }() // ends with the answer or ctx
	ticks := time.NewTicker(refusedAfter)
	defer ticks.Stop()
	for {
		select {
		case err := <-done:
			if err != nil && ctx.Err() != nil && s.target.Stopping() {
				err = fmt.Errorf("it has announced that it stops: %w", ctx.Err()) // not that it refuses connections
			}
			return err
		case <-ticks.C:
		}
		if st := s.target.Stats(); !slices.ContainsFunc(st.Connections, func(c nfs3.ConnStats) bool { return c.Up }) &&
			!st.Trouble.IsZero() && errors.Is(st.Err, syscall.ECONNREFUSED) && !s.target.Stopping() {
			return st.Err
		}
	}
}

func (s *nfsServer) Stopping() bool { return s.target.Stopping() }

func (s *nfsServer) FSInfo(ctx context.Context, file []byte) (wire.FsinfoRes, error) {
	return s.target.FSInfo(ctx, superuser, file)
}

func (s *nfsServer) FSStat(ctx context.Context, file []byte) (wire.FsstatRes, error) {
	return s.target.FSStat(ctx, superuser, file)
}

func (s *nfsServer) Lookup(ctx context.Context, dir []byte, name string) ([]byte, wire.PostOpAttr, error) {
	return s.target.Lookup(ctx, superuser, dir, name)
}

func (s *nfsServer) GetAttr(ctx context.Context, file []byte) (wire.Fattr, error) {
	return s.target.GetAttr(ctx, superuser, file)
}

func (s *nfsServer) SetAttr(ctx context.Context, file []byte, set wire.Sattr, guard *wire.Time) error {
	_, err := s.target.SetAttr(ctx, superuser, file, set, guard)
	return err
}

func (s *nfsServer) Create(ctx context.Context, dir []byte, name string, set wire.Sattr) ([]byte, wire.PostOpAttr, error) {
	return s.target.Create(ctx, superuser, dir, name, wire.Unchecked, set, wire.CreateVerf{})
}

func (s *nfsServer) Mkdir(ctx context.Context, dir []byte, name string, set wire.Sattr) ([]byte, error) {
	handle, _, err := s.target.Mkdir(ctx, superuser, dir, name, set)
	return handle, err
}

func (s *nfsServer) Remove(ctx context.Context, dir []byte, name string) error {
	return s.target.Remove(ctx, superuser, dir, name)
}

func (s *nfsServer) Read(ctx context.Context, file []byte, cred layout.Credential, off int64, buf []byte) (int, error) {
	op := &layout.Op{Kind: layout.OpRead, Off: off, Data: buf}
	err := s.do(ctx, op, file, cred)
	return op.N, err
}

func (s *nfsServer) Write(ctx context.Context, file []byte, cred layout.Credential, off int64, data []byte) error {
	op := &layout.Op{Kind: layout.OpWrite, Off: off, Data: data, Stable: layout.DataSync}
	err := s.do(ctx, op, file, cred)
	switch {
	case err != nil:
		return err
	case op.N != len(data) || op.Committed < layout.DataSync:
		return fmt.Errorf("WRITE of %d bytes: %d written, %v: %w", len(data), op.N, op.Committed, wire.ErrServerFault)
	}
	return nil
}

// do starts a READ or WRITE and waits for its end. If ctx ends first nobody touches op.Data any more when it returns.
func (s *nfsServer) do(ctx context.Context, op *layout.Op, file []byte, cred layout.Credential) error {
	op.File = &layout.DataFile{Handles: [][]byte{file}, Cred: cred}
	done := make(chan struct{})
	op.Done = func(*layout.Op) { close(done) }
	s.target.Start(op)
	s.target.Flush()
	select {
	case <-done:
		return op.Err
	case <-ctx.Done():
		s.target.Detach(op)
		return ctx.Err()
	}
}

func (s *nfsServer) Commit(ctx context.Context, file []byte) error {
	_, err := s.target.Commit(ctx, superuser, file, 0, 0)
	return err
}

func (s *nfsServer) ReadDir(ctx context.Context, dir []byte, cookie uint64, verf wire.CookieVerf) (wire.ReaddirPlusRes, error) {
	res, err := s.target.ReadDirPlus(ctx, superuser, dir, cookie, verf)
	if err != nil {
		return wire.ReaddirPlusRes{}, err
	}
	return *res, nil
}

func (s *nfsServer) Close() error { return s.target.Close() }
