package nfs3

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"strconv"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/xdr"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// readDirBytes is how much of a directory one READDIRPLUS asks for; the reply must fit the receive buffer.
const readDirBytes = 32 << 10

type message interface{ Append(b []byte) []byte }

// result decodes into a struct that the caller owns again when call returns, also after an error.
type result interface{ Decode(d *xdr.Decoder) error }

// call runs one procedure and waits for its reply or the end of ctx.
func (t *Target) call(ctx context.Context, ctl *control, detail string) error {
	done := make(chan error, 1)
	ctl.end = func(err error) { done <- err }
	failed := func(err error) error {
		if e := (*ReplyError)(nil); errors.As(err, &e) {
			return err
		}
		return fmt.Errorf("nfs3: %s%s on %s: %w", ctl.name, detail, t.cfg.Name, err)
	}
	if err := ctx.Err(); err != nil {
		return failed(err)
	}
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return failed(ErrClosed)
	}
	r := t.enqueueControl(ctl)
	t.dispatch()
	t.mu.Unlock()
	t.Flush()

	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		t.mu.Lock()
		if r.ctl != ctl { // ended this very moment, and r is perhaps somebody else's
			t.mu.Unlock()
			err = <-done
			break
		}
		r.ctl = nil
		delayed := r.delay > 0
		if r.state != stateSent && r.state != stateReceiving {
			t.drop(r)
			t.dispatch()
		}
		err = ctx.Err()
		switch {
		case t.trouble.slots > 0:
			err = fmt.Errorf("%w (%w)", err, t.trouble.err)
		case delayed:
			err = fmt.Errorf("%w (%w)", err, ErrDelayed)
		}
		t.mu.Unlock()
		t.Flush()
	}
	if err != nil {
		return failed(err)
	}
	return nil
}

// nfs runs a procedure of the NFS program. status is that in res; one other than OK becomes an *Error.
func (t *Target) nfs(ctx context.Context, cred layout.Credential, proc wire.Proc, detail string, args message, res result, status *wire.Status) (resent bool, err error) {
	ctl := &control{prog: oncrpc.ProgNFS, proc: uint32(proc), name: proc.String(), cred: cred, args: args.Append(nil), res: res}
	if err := t.call(ctx, ctl, detail); err != nil {
		return ctl.resent, err
	}
	if *status != wire.OK {
		return ctl.resent, &Error{Op: ctl.name, Detail: detail, Status: *status, Addr: ctl.addr}
	}
	return ctl.resent, nil
}

func quoted(name string) string { return " " + strconv.Quote(name) }

func dirOp(dir []byte, name string) (wire.DirOpArgs, error) {
	fh, err := wire.NewFileHandle(dir)
	return wire.DirOpArgs{Dir: fh, Name: name}, err
}

// isStatus tells whether err is the server's answer s.
func isStatus(err error, s wire.Status) bool {
	var e *Error
	return errors.As(err, &e) && e.Status == s
}

// Null asks the server for nothing but an answer.
func (t *Target) Null(ctx context.Context) error {
	return t.call(ctx, &control{prog: oncrpc.ProgNFS, proc: uint32(wire.ProcNull), name: wire.ProcNull.String()}, "")
}

// GetAttr returns the attributes of a file.
func (t *Target) GetAttr(ctx context.Context, cred layout.Credential, file []byte) (wire.Fattr, error) {
	fh, err := wire.NewFileHandle(file)
	if err != nil {
		return wire.Fattr{}, err
	}
	var res wire.GetattrRes
	_, err = t.nfs(ctx, cred, wire.ProcGetattr, "", &fh, &res, &res.Status)
	return res.Attr, err
}

// SetAttr changes attributes and returns the new ones if the server says them. With a guard the server refuses with
// ErrNotSync unless that is the file's ctime, so a call that was sent twice does nothing the second time; the error may then
// be about the change that the first one made.
func (t *Target) SetAttr(ctx context.Context, cred layout.Credential, file []byte, attr wire.Sattr, guard *wire.Time) (wire.PostOpAttr, error) {
	fh, err := wire.NewFileHandle(file)
	if err != nil {
		return wire.PostOpAttr{}, err
	}
	args := wire.SetattrArgs{FH: fh, Attr: attr}
	if guard != nil {
		args.Guard, args.GuardCtime = true, *guard
	}
	var res wire.WccRes
	_, err = t.nfs(ctx, cred, wire.ProcSetattr, "", &args, &res, &res.Status)
	return res.Wcc.After, err
}

// Lookup finds a name in a directory.
func (t *Target) Lookup(ctx context.Context, cred layout.Credential, dir []byte, name string) (file []byte, attr wire.PostOpAttr, err error) {
	args, err := dirOp(dir, name)
	if err != nil {
		return nil, attr, err
	}
	var res wire.LookupRes
	if _, err := t.nfs(ctx, cred, wire.ProcLookup, quoted(name), &args, &res, &res.Status); err != nil {
		return nil, attr, err
	}
	return res.FH.Bytes(), res.Attr, nil
}

// Access asks which of the bits in mask (wire.AccessRead and so on) the user is granted.
func (t *Target) Access(ctx context.Context, cred layout.Credential, file []byte, mask uint32) (uint32, error) {
	fh, err := wire.NewFileHandle(file)
	if err != nil {
		return 0, err
	}
	var res wire.AccessRes
	_, err = t.nfs(ctx, cred, wire.ProcAccess, "", &wire.AccessArgs{FH: fh, Access: mask}, &res, &res.Status)
	return res.Access, err
}

// Create makes a regular file and returns its handle. attr counts in the modes Unchecked and Guarded, verf in
// Exclusive, after which SetAttr sets the attributes.
//
// A call that lost its connection is sent again. That is harmless in the modes Unchecked and Exclusive; in Guarded
// ErrExist may then be about the file that this call has made.
func (t *Target) Create(ctx context.Context, cred layout.Credential, dir []byte, name string, mode wire.CreateMode, attr wire.Sattr, verf wire.CreateVerf) (file []byte, after wire.PostOpAttr, err error) {
	where, err := dirOp(dir, name)
	if err != nil {
		return nil, after, err
	}
	args := wire.CreateArgs{Where: where, Mode: mode, Attr: attr, Verf: verf}
	var res wire.CreateRes
	if _, err := t.nfs(ctx, cred, wire.ProcCreate, quoted(name), &args, &res, &res.Status); err != nil {
		return nil, after, err
	}
	if !res.FH.Present { // servers may leave it out
		return t.Lookup(ctx, cred, dir, name)
	}
	return res.FH.FH.Bytes(), res.Attr, nil
}

// Mkdir makes a directory and returns its handle. After a lost connection, ErrExist to the repeated call is taken for the
// success of the first: the directory that is there is returned.
func (t *Target) Mkdir(ctx context.Context, cred layout.Credential, dir []byte, name string, attr wire.Sattr) (made []byte, after wire.PostOpAttr, err error) {
	where, err := dirOp(dir, name)
	if err != nil {
		return nil, after, err
	}
	var res wire.CreateRes
	resent, err := t.nfs(ctx, cred, wire.ProcMkdir, quoted(name), &wire.MkdirArgs{Where: where, Attr: attr}, &res, &res.Status)
	switch {
	case resent && isStatus(err, wire.ErrExist), err == nil && !res.FH.Present:
		made, after, lookupErr := t.Lookup(ctx, cred, dir, name)
		if lookupErr == nil && after.Present && after.Attr.Type != wire.TypeDir {
			return nil, after, err
		}
		return made, after, lookupErr
	case err != nil:
		return nil, after, err
	}
	return res.FH.FH.Bytes(), res.Attr, nil
}

// Remove removes a name that is no directory. After a lost connection, ErrNoEnt to the repeated call is success.
func (t *Target) Remove(ctx context.Context, cred layout.Credential, dir []byte, name string) error {
	return t.remove(ctx, cred, wire.ProcRemove, dir, name)
}

// Rmdir removes an empty directory. After a lost connection, ErrNoEnt to the repeated call is success.
func (t *Target) Rmdir(ctx context.Context, cred layout.Credential, dir []byte, name string) error {
	return t.remove(ctx, cred, wire.ProcRmdir, dir, name)
}

func (t *Target) remove(ctx context.Context, cred layout.Credential, proc wire.Proc, dir []byte, name string) error {
	args, err := dirOp(dir, name)
	if err != nil {
		return err
	}
	var res wire.WccRes
	resent, err := t.nfs(ctx, cred, proc, quoted(name), &args, &res, &res.Status)
	if resent && isStatus(err, wire.ErrNoEnt) {
		return nil
	}
	return err
}

// ReadDirPlus returns the entries behind cookie, as many as fit one reply. The first call has cookie and verifier 0, the
// next ones the cookie of the last entry and the verifier of the latest reply, until EOF. ErrBadCookie asks to begin
// anew.
func (t *Target) ReadDirPlus(ctx context.Context, cred layout.Credential, dir []byte, cookie uint64, verf wire.CookieVerf) (*wire.ReaddirPlusRes, error) {
	fh, err := wire.NewFileHandle(dir)
	if err != nil {
		return nil, err
	}
	args := wire.ReaddirPlusArgs{Dir: fh, Cookie: cookie, Verf: verf, DirCount: readDirBytes, MaxCount: readDirBytes}
	res := new(wire.ReaddirPlusRes)
	if _, err := t.nfs(ctx, cred, wire.ProcReaddirPlus, "", &args, res, &res.Status); err != nil {
		return nil, err
	}
	return res, nil
}

// FSInfo returns the limits and properties of the file system that file is in.
func (t *Target) FSInfo(ctx context.Context, cred layout.Credential, file []byte) (wire.FsinfoRes, error) {
	var res wire.FsinfoRes
	fh, err := wire.NewFileHandle(file)
	if err == nil {
		_, err = t.nfs(ctx, cred, wire.ProcFsinfo, "", &fh, &res, &res.Status)
	}
	return res, err
}

// FSStat returns how full the file system is that file is in.
func (t *Target) FSStat(ctx context.Context, cred layout.Credential, file []byte) (wire.FsstatRes, error) {
	var res wire.FsstatRes
	fh, err := wire.NewFileHandle(file)
	if err == nil {
		_, err = t.nfs(ctx, cred, wire.ProcFsstat, "", &fh, &res, &res.Status)
	}
	return res, err
}

// Commit makes unstable writes to count bytes at off durable, count 0 meaning up to the end, if the verifier is that of
// the writes.
func (t *Target) Commit(ctx context.Context, cred layout.Credential, file []byte, off, count int64) (layout.Verifier, error) {
	fh, err := wire.NewFileHandle(file)
	if err != nil {
		return layout.Verifier{}, err
	}
	if off < 0 || count < 0 {
		return layout.Verifier{}, fmt.Errorf("nfs3: COMMIT of %d bytes at %d: bad range", count, off)
	}
	if count > math.MaxUint32 {
		count = 0
	}
	var res wire.CommitRes
	_, err = t.nfs(ctx, cred, wire.ProcCommit, "", &wire.CommitArgs{FH: fh, Offset: uint64(off), Count: uint32(count)}, &res, &res.Status)
	return layout.Verifier(res.Verf), err
}

// Mount asks the MOUNT service at addr for the handle of an exported directory, with TLS unless that is nil (see Config).
// Unlike the methods of a Target it does not try again when the server cannot be reached.
func Mount(ctx context.Context, addr netip.AddrPort, export string, secret *rpctls.Client) (root []byte, err error) {
	if len(export) > wire.MaxMountPath {
		return nil, fmt.Errorf("nfs3: export path of %d bytes, the longest is %d", len(export), wire.MaxMountPath)
	}
	var res wire.MountRes
	ctl := &control{
		prog: oncrpc.ProgMount, proc: uint32(wire.MountProcMnt), name: wire.MountProcMnt.String(),
		args: (&wire.MountPath{Path: export}).Append(nil), res: &res, bare: true,
	}
	if err := callOnce(ctx, addr, secret, ctl, quoted(export)); err != nil {
		return nil, err
	}
	if res.Status != wire.OK {
		return nil, &Error{Op: ctl.name, Detail: quoted(export), Status: res.Status, Addr: addr}
	}
	return res.FH.Bytes(), nil
}

// MountAt is Mount at the server whose NFS service is at addr. It asks the MOUNT service at the port it is said to have, and if that
// is 0 on the NFS port, where weftd data has it, or where the port mapper says.
func MountAt(ctx context.Context, addr netip.AddrPort, mountPort uint16, export string, secret *rpctls.Client) (root []byte, err error) {
	if mountPort != 0 {
		return Mount(ctx, netip.AddrPortFrom(addr.Addr(), mountPort), export, secret)
	}
	root, err = Mount(ctx, addr, export, secret)
	var refused *oncrpc.Error
	if err == nil || !errors.As(err, &refused) || refused.Stat != oncrpc.ProgUnavail {
		return root, err
	}
	port, err := Port(ctx, addr.Addr(), oncrpc.ProgMount, wire.Version)
	if err != nil {
		return nil, fmt.Errorf("the server has no MOUNT service on its NFS port %d, and where it is cannot be found out (say it with ?mountport=PORT): %w", addr.Port(), err)
	}
	return Mount(ctx, netip.AddrPortFrom(addr.Addr(), port), export, secret)
}

// Port asks the port mapper of a host (RFC 1833 section 3, version 2) for the TCP port of a program. A program that is not
// registered is an error that tells so. There is no TLS there.
func Port(ctx context.Context, host netip.Addr, prog, vers uint32) (uint16, error) {
	var res portmapRes
	args := portmapArgs{prog: prog, vers: vers}
	ctl := &control{prog: oncrpc.ProgPortmap, vers: 2, proc: 3, name: "GETPORT", args: args.append(nil), res: &res, bare: true}
	addr := netip.AddrPortFrom(host, PortmapPort)
	if err := callOnce(ctx, addr, nil, ctl, ""); err != nil {
		return 0, err
	}
	if res.port == 0 || res.port > math.MaxUint16 {
		return 0, &NotRegisteredError{Addr: addr, Prog: prog, Vers: vers}
	}
	return uint16(res.port), nil
}

// PortmapPort is where port mappers listen.
const PortmapPort = 111

// NotRegisteredError says that a port mapper does not know a program.
type NotRegisteredError struct {
	Addr       netip.AddrPort // of the port mapper
	Prog, Vers uint32
}

func (e *NotRegisteredError) Error() string {
	return fmt.Sprintf("the port mapper at %v knows no program %d version %d on TCP: is the NFS server running, with NFSv3?", e.Addr, e.Prog, e.Vers)
}

type portmapArgs struct{ prog, vers uint32 }

func (a *portmapArgs) append(b []byte) []byte {
	const tcp = 6
	for _, v := range []uint32{a.prog, a.vers, tcp, 0} {
		b = xdr.AppendUint32(b, v)
	}
	return b
}

type portmapRes struct{ port uint32 }

func (r *portmapRes) Decode(d *xdr.Decoder) error {
	r.port = d.Uint32()
	return d.Err()
}

// callOnce makes one call on a connection of its own.
func callOnce(ctx context.Context, addr netip.AddrPort, secret *rpctls.Client, ctl *control, detail string) error {
	t, err := New(Config{Name: addr.String(), Addrs: []netip.AddrPort{addr}, Connections: 1, TLS: secret, ReservedPort: true, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer t.Close()
	t.failFast, t.prog = true, ctl.prog
	return t.call(ctx, ctl, detail)
}
