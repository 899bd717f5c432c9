package store

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// connections is how many TCP connections are used: calls are small, one that is slow must not hold up the rest.
const connections = 2

// superuser is who the service is to data servers.
var superuser layout.Credential

// DialNFS is the Dialer for real data servers. It is silent: who uses the Server says what is wrong with it.
func DialNFS(name string, addrs []netip.AddrPort) (Server, error) {
	target, err := nfs3.New(nfs3.Config{Name: name, Addrs: addrs, Connections: connections, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	return &nfsServer{target, addrs}, nil
}

// nfsServer is a Server on the network.
type nfsServer struct {
	target *nfs3.Target
	addrs  []netip.AddrPort
}

func (s *nfsServer) Mount(ctx context.Context, export string) ([]byte, error) {
	var errs []error
	for _, addr := range s.addrs {
		root, err := nfs3.Mount(ctx, addr, export)
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
	return s.target.Create(ctx, superuser, dir, name, wire.Guarded, set, wire.CreateVerf{})
}

func (s *nfsServer) Mkdir(ctx context.Context, dir []byte, name string, set wire.Sattr) ([]byte, error) {
	handle, _, err := s.target.Mkdir(ctx, superuser, dir, name, set)
	return handle, err
}

func (s *nfsServer) Remove(ctx context.Context, dir []byte, name string) error {
	return s.target.Remove(ctx, superuser, dir, name)
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
