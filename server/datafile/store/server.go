package store

import (
	"context"
	"errors"
	"net"
	"net/netip"

	nfs "github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
)

// Server is what is asked of an NFSv3 data server. Every call is made as the superuser (uid 0, gid 0) and waits while
// the server cannot be reached, until ctx ends. What the server answers is an error that [Status] knows; any other
// error means that there was no answer; if it is ErrDelayed, ctx ended while the server said JUKEBOX. Handles are file handles
// as the server gave them.
type Server interface {
	// Null asks for nothing but an answer. It does not wait while connections are refused: the error is ECONNREFUSED
	// then (errors.Is). A server that has announced that it stops is waited for, for a few seconds.
	Null(ctx context.Context) error
	// Stopping reports whether the server has announced that it stops, and these few seconds are not over.
	Stopping() bool
	// Mount returns the handle of an export's root (MOUNT version 3). It alone does not wait: it
	// tries each address once.
	Mount(ctx context.Context, export string) (root []byte, err error)
	FSInfo(ctx context.Context, file []byte) (nfs3.FsinfoRes, error)
	FSStat(ctx context.Context, file []byte) (nfs3.FsstatRes, error)
	Lookup(ctx context.Context, dir []byte, name string) ([]byte, nfs3.PostOpAttr, error)
	GetAttr(ctx context.Context, file []byte) (nfs3.Fattr, error)
	// SetAttr with a guard is refused with ErrNotSync unless it is the file's ctime.
	SetAttr(ctx context.Context, file []byte, set nfs3.Sattr, guard *nfs3.Time) error
	// Create makes a file, or finds the regular one of that name (UNCHECKED). The handle may be nil if the server did not give it.
	Create(ctx context.Context, dir []byte, name string, set nfs3.Sattr) ([]byte, nfs3.PostOpAttr, error)
	// Mkdir makes a directory; the handle may be nil.
	Mkdir(ctx context.Context, dir []byte, name string, set nfs3.Sattr) ([]byte, error)
	Remove(ctx context.Context, dir []byte, name string) error
	// Read reads from a data file as its owner; what lies behind its end is not counted in n. Write writes all of data as the
	// owner cred, and returns when that is stable. Both wait for one answer, so data may be as long as FSInfo allows.
	Read(ctx context.Context, file []byte, cred layout.Credential, off int64, buf []byte) (n int, err error)
	Write(ctx context.Context, file []byte, cred layout.Credential, off int64, data []byte) error
	// Commit makes all of the file's data stable (COMMIT of everything).
	Commit(ctx context.Context, file []byte) error
	// ReadDir returns a page of READDIRPLUS, from the beginning with cookie and verifier zero.
	ReadDir(ctx context.Context, dir []byte, cookie uint64, verf nfs3.CookieVerf) (nfs3.ReaddirPlusRes, error)
	// Close ends all calls and connections.
	Close() error
}

// Dialer makes the Server that listens at any of addrs; name is for logs. mountPort is where its MOUNT service listens, 0
// if that is to be found out. It does not wait for a connection.
type Dialer func(name string, addrs []netip.AddrPort, mountPort uint16) (Server, error)

// Resolver returns the addresses of a host, which may be one itself.
type Resolver func(ctx context.Context, host string, port uint16) ([]netip.AddrPort, error)

// Resolve is the system's Resolver.
func Resolve(ctx context.Context, host string, port uint16) ([]netip.AddrPort, error) {
	ip, err := netip.ParseAddr(host)
	ips := []netip.Addr{ip}
	if err != nil {
		if ips, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err != nil {
			return nil, err
		}
	}
	addrs := make([]netip.AddrPort, len(ips))
	for i, ip := range ips {
		addrs[i] = netip.AddrPortFrom(ip.Unmap(), port)
	}
	return addrs, nil
}

// ErrDelayed is part of the error of a call whose ctx ended while the server said JUKEBOX to it.
var ErrDelayed = nfs.ErrDelayed

// Status returns what the server answered, if err is a server's answer.
func Status(err error) (nfs3.Status, bool) {
	var status nfs3.Status
	ok := errors.As(err, &status)
	return status, ok
}

// is reports whether err is this answer.
func is(err error, status nfs3.Status) bool {
	got, ok := Status(err)
	return ok && got == status
}
