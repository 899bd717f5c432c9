package data

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/wire/localio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// Local tells what clients on the same host get descriptors for.
type Local int

const (
	LocalRW  Local = iota // reading and writing
	LocalRO               // reading
	LocalOff              // nothing: there is no broker
)

var localNames = [...]string{"rw", "ro", "off"}

func (m Local) String() string { return localNames[m] }

// ParseLocal is the inverse of String.
func ParseLocal(name string) (Local, error) {
	for i, n := range localNames {
		if n == name {
			return Local(i), nil
		}
	}
	return 0, fmt.Errorf("%q: want %s", name, strings.Join(localNames[:], ", "))
}

// Bounds of a broker.
const (
	maxSessions = 256
	maxLoans    = 4096 // of a session
	maxProbes   = 64   // that nobody has asked for yet
	probeTime   = 5 * time.Second
	// greetTime is how long a client may take until it has shown its proof.
	greetTime = 5 * time.Second
	// packetTime is how long a client may leave no room for a packet.
	packetTime = time.Second
	// recallTime is how long clients may take to close what is revoked before those who wait are told to come again, a time
	// in which their connections are not taken for dead.
	recallTime = 400 * time.Millisecond
)

// broker lends descriptors of data files to clients on the same host, see package localio.
type broker struct {
	s        *Server
	l        *net.UnixListener
	readOnly string // why no descriptors for writing are lent; empty: they are

	mu       sync.Mutex
	sessions map[*session]bool
	probes   []probe // the oldest first
	lent     map[wire.FileHandle]map[*loan]bool
	returned chan struct{} // closed, and replaced, when something was
}

// probe is a PROBE call.
type probe struct {
	proof localio.Proof
	conn  *conn
	at    time.Time
}

// session is a client's connection.
type session struct {
	b     *broker
	nc    *net.UnixConn
	peer  *unix.Ucred
	opens chan *localio.Open
	out   sync.Mutex // held to send

	// Guarded by broker.mu.
	rpc   *conn // that carried the proof; nil before
	loans map[uint32]*loan
}

// loan is descriptors of a file that a client has.
type loan struct {
	session *session
	id      uint32
	fh      wire.FileHandle
	write   bool
	revoked bool
}

// identity is what a server is known by: nothing that lets anybody guess the key.
func identity(key []byte) (id localio.ID) {
	sum := sha256.Sum256(append([]byte("weft data server identity"), key...))
	copy(id[:], sum[:])
	return id
}

// startBroker makes the broker. Without it the server serves, too, so why there is none is told to those who ask.
func (s *Server) startBroker(cfg Config) {
	rand.Read(s.instance[:])
	if cfg.Local == LocalOff {
		s.remote = "the data server was started with --localio=off"
		return
	}
	l, err := listenLocal(cfg.LocalDir, s.id)
	if err != nil {
		s.remote = fmt.Sprintf("the data server has no socket for clients of its host: %v", err)
		s.log.Warn("clients on this host get no descriptors", "dir", cfg.Dir, "err", err)
		return
	}
	b := &broker{
		s: s, l: l, sessions: map[*session]bool{}, lent: map[wire.FileHandle]map[*loan]bool{}, returned: make(chan struct{}),
	}
	if cfg.Local == LocalRO {
		b.readOnly = "the data server was started with --localio=ro"
	} else if s.leases != nil {
		b.readOnly = fmt.Sprintf("the data server cannot find out who writes a file: %v", s.leases)
	}
	s.broker = b
	s.wg.Add(1)
	go b.accept() // ends when the listener is closed
	s.log.Info("clients on this host get descriptors", "dir", cfg.Dir, "socket", l.Addr(), "localio", cfg.Local, "read_only", b.readOnly)
}

// listenLocal makes the socket. One that a server which was killed has left is removed.
func listenLocal(dir string, id localio.ID) (*net.UnixListener, error) {
	if err := privateDir(dir); err != nil {
		return nil, err
	}
	addr := &net.UnixAddr{Name: localio.Socket(dir, id), Net: "unixpacket"}
	nc, err := net.DialUnix(addr.Net, nil, addr)
	if err == nil {
		nc.Close()
		return nil, fmt.Errorf("%s belongs to another server: is its directory a copy of this one?", addr.Name)
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		if err := os.Remove(addr.Name); err != nil {
			return nil, err
		}
	}
	return net.ListenUnix(addr.Net, addr)
}

// privateDir makes a directory, if it is missing, that root alone may write to.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s is no directory that root alone may write to", dir)
	}
	return nil
}

// probeLeases finds out whether the kernel tells who writes files, see nobodyWrites. The file belongs to somebody else, as data
// files do: that takes CAP_LEASE.
func probeLeases(dir string) error {
	w, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	r, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", w), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(w)
		return err
	}
	defer unix.Close(r)
	err = unix.Fchown(w, 1, 1)
	if err == nil {
		if free, e := noWriter(r); e != nil || free {
			err = fmt.Errorf("a lease on a file that is open for writing gives %v", e)
		}
	}
	unix.Close(w)
	if err != nil {
		return err
	}
	if free, err := noWriter(r); err != nil || !free {
		return fmt.Errorf("leases (fcntl F_SETLEASE, CAP_LEASE): %w", err)
	}
	return nil
}

// noWriter reports whether nobody, in whatever process, has the file open for writing, or mapped so. fd is open for reading.
//
// A read lease is granted only then (fcntl(2), "Leases"; fs/locks.c, check_conflicting_open): the kernel counts all
// descriptions of the inode that are open for writing, also those that are on their way in a socket or behind a FUSE
// file in passthrough.
func noWriter(fd int) (bool, error) { return lease(fd, unix.F_RDLCK) }

// lease reports whether a lease of this kind can be had.
func lease(fd, kind int) (bool, error) {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, kind)
	switch err {
	case nil:
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
		return true, err
	case unix.EAGAIN:
		return false, nil
	}
	return false, err
}

// accept serves clients until the listener is closed.
func (b *broker) accept() {
	defer b.s.wg.Done()
	in := descriptors.Listener(b.l)
	for {
		c, err := in.Accept()
		if err != nil {
			if !b.s.isClosing() {
				b.s.log.Error("clients of this host are not accepted any more", "socket", b.l.Addr(), "err", err)
			}
			return
		}
		nc := c.(*net.UnixConn)
		ses := &session{b: b, nc: nc, opens: make(chan *localio.Open, localio.MaxOpens), loans: map[uint32]*loan{}}
		b.mu.Lock()
		full := len(b.sessions) >= maxSessions || !descriptors.Accepted.Take()
		if !full {
			b.sessions[ses] = true
		}
		b.mu.Unlock()
		if b.s.isClosing() {
			nc.Close() // perhaps shut was there before
		}
		if full {
			ses.refuse("the data server serves too many clients on its host already")
			nc.Close()
			continue
		}
		b.s.wg.Add(1)
		go func() { // owns the session, and ends with its connection
			defer b.s.wg.Done()
			err := ses.serve()
			ses.end()
			descriptors.Accepted.Give()
			if err != nil {
				b.s.log.Warn("client on this host", "pid", ses.pid(), "err", err)
			}
		}()
	}
}

// shut ends all sessions.
func (b *broker) shut() {
	b.l.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	for ses := range b.sessions {
		ses.nc.Close()
	}
}

func (ses *session) pid() int32 {
	if ses.peer == nil {
		return 0
	}
	return ses.peer.Pid
}

// serve answers a client until it closes or breaks the protocol.
func (ses *session) serve() error {
	ses.nc.SetReadDeadline(time.Now().Add(greetTime))
	if ok, err := ses.greet(); !ok || err != nil {
		return err
	}
	ses.nc.SetReadDeadline(time.Time{})
	opened := make(chan struct{})
	go func() { // opens what is asked for; ends with opens
		defer close(opened)
		for o := range ses.opens {
			ses.open(o)
		}
	}()
	defer func() {
		close(ses.opens)
		ses.nc.Close()
		<-opened
	}()
	for {
		m, err := ses.receive()
		if err != nil || m == nil {
			return err
		}
		switch m := m.(type) {
		case *localio.Open:
			select {
			case ses.opens <- m:
			default:
				return fmt.Errorf("more than %d OPENs at a time", localio.MaxOpens)
			}
		case *localio.Closed:
			ses.b.giveBack(ses, m.ID, m.Unstable)
		default:
			return fmt.Errorf("unexpected %T", m)
		}
	}
}

// receive returns the next message, nil at the end.
func (ses *session) receive() (localio.Message, error) {
	var b [localio.MaxMessage]byte
	n, err := ses.nc.Read(b[:])
	if n == 0 || err != nil {
		return nil, nil
	}
	return localio.Decode(b[:n])
}

// send sends a message with descriptors. A client that does not take it is cut off.
func (ses *session) send(m localio.Message, fds ...int) {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	ses.out.Lock()
	defer ses.out.Unlock()
	ses.nc.SetWriteDeadline(time.Now().Add(packetTime))
	if _, _, err := ses.nc.WriteMsgUnix(localio.Append(nil, m), rights, nil); err != nil {
		ses.nc.Close()
	}
}

func (ses *session) refuse(reason string) { ses.send(&localio.Refused{Reason: reason}) }

// greet reports whether the client has proved that it is on this host and reaches this server by RPC.
func (ses *session) greet() (bool, error) {
	s := ses.b.s
	raw, err := ses.nc.SyscallConn()
	if err == nil {
		ctl := raw.Control(func(fd uintptr) { ses.peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		err = errors.Join(err, ctl)
	}
	if err != nil {
		return false, err
	}
	if ses.peer.Uid != uint32(os.Geteuid()) {
		ses.refuse(fmt.Sprintf("the data server serves processes of user %d on its host, not of user %d", os.Geteuid(), ses.peer.Uid))
		return false, nil
	}
	m, err := ses.receive()
	if err != nil || m == nil {
		return false, err
	}
	hello, ok := m.(*localio.Hello)
	switch {
	case !ok:
		return false, fmt.Errorf("%T instead of a HELLO", m)
	case hello.Version != localio.Version:
		ses.refuse(fmt.Sprintf("the data server speaks version %d of localio, not %d", localio.Version, hello.Version))
		return false, nil
	case hello.Server != s.id:
		ses.refuse("another data server is here")
		return false, nil
	}
	challenge := &localio.Challenge{Server: s.id, Instance: s.instance}
	rand.Read(challenge.Nonce[:])
	ses.send(challenge)
	if m, err = ses.receive(); err != nil || m == nil {
		return false, err
	}
	reveal, ok := m.(*localio.Reveal)
	if !ok {
		return false, fmt.Errorf("%T instead of a REVEAL", m)
	}
	if !ses.b.prove(ses, challenge.Nonce, reveal.Nonce) {
		ses.refuse("the data server got no proof by RPC: its address leads to another one")
		return false, nil
	}
	ses.send(&localio.Granted{Align: s.io.Align, Least: max(s.io.Least, s.io.Align), Memory: s.io.Memory, ReadOnly: ses.b.readOnly})
	return true, nil
}

// channel is what a proof has of the RPC connection.
func (c *conn) channel() []byte {
	tc, ok := c.nc.(*tls.Conn)
	if !ok {
		return nil
	}
	state := tc.ConnectionState()
	b, err := state.ExportKeyingMaterial(localio.ExporterLabel, nil, localio.ExporterSize)
	if err != nil {
		return nil
	}
	return b
}

// probed takes in a PROBE call.
func (b *broker) probed(c *conn, a *localio.ProbeArgs) {
	if a.Server != b.s.id || a.Instance != b.s.instance {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget()
	if len(b.probes) == maxProbes {
		b.probes = b.probes[1:]
	}
	b.probes = append(b.probes, probe{a.Proof, c, time.Now()})
}

// forget drops probes that are too old. mu is held.
func (b *broker) forget() {
	for len(b.probes) > 0 && time.Since(b.probes[0].at) > probeTime {
		b.probes = b.probes[1:]
	}
}

// prove looks for the probe that the nonces give, which is used up then.
func (b *broker) prove(ses *session, ours, theirs localio.Nonce) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget()
	for i, p := range b.probes {
		if localio.MakeProof(ours, theirs, b.s.id, b.s.instance, p.conn.channel()) == p.proof {
			b.probes = append(b.probes[:i:i], b.probes[i+1:]...)
			ses.rpc = p.conn
			ses.rpc.sessions.Add(1)
			return true
		}
	}
	return false
}

// ended ends what rests on an RPC connection, which has.
func (b *broker) ended(c *conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := b.probes[:0]
	for _, p := range b.probes {
		if p.conn != c {
			kept = append(kept, p)
		}
	}
	b.probes = kept
	for ses := range b.sessions {
		if ses.rpc == c {
			ses.nc.Close()
		}
	}
}

// end forgets the session and its loans: what its process still has open the kernel knows, and what it has written may be
// unstable.
func (ses *session) end() {
	b := ses.b
	ses.nc.Close()
	var written []wire.FileHandle
	b.mu.Lock()
	delete(b.sessions, ses)
	for _, l := range ses.loans {
		if l.write {
			written = append(written, l.fh)
		}
	}
	b.mu.Unlock()
	for _, fh := range written {
		b.keepOpen(fh)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range ses.loans {
		b.drop(l)
	}
	if ses.rpc != nil {
		ses.rpc.sessions.Add(-1)
	}
}

// keepOpen keeps a file open until it was synced.
func (b *broker) keepOpen(fh wire.FileHandle) {
	if f, err := b.s.get(fh); err == nil {
		f.sync.dirty.Store(true)
		b.s.cache.put(f)
	}
}

// giveBack takes in that a client has closed descriptors. What it leaves unstable keeps the file open.
func (b *broker) giveBack(ses *session, id uint32, unstable bool) {
	b.mu.Lock()
	l := ses.loans[id]
	b.mu.Unlock()
	if l == nil {
		return
	}
	if unstable {
		b.keepOpen(l.fh)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if ses.loans[id] == l {
		b.drop(l)
	}
}

// drop ends a loan. mu is held.
func (b *broker) drop(l *loan) {
	delete(l.session.loans, l.id)
	delete(b.lent[l.fh], l)
	if len(b.lent[l.fh]) == 0 {
		delete(b.lent, l.fh)
	}
	close(b.returned)
	b.returned = make(chan struct{})
}

// open answers an OPEN.
func (ses *session) open(o *localio.Open) {
	fds, verf, status := ses.lend(o)
	ses.send(&localio.Opened{ID: o.ID, Status: status, Verifier: verf}, fds...)
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// lend opens a data file for a client as often as it needs, if it may READ, or also WRITE, it by RPC. The superuser, who may
// do everything, is the metadata service, and gets none.
//
// verf is the verifier of writes by the descriptors. They are opened while no sync of the file runs: one that has failed is
// followed by another verifier, and one that fails later the descriptors hear of, too.
func (ses *session) lend(o *localio.Open) (fds []int, verf wire.WriteVerf, status wire.Status) {
	b, s := ses.b, ses.b.s
	flags, want := unix.O_RDONLY, uint32(mayRead)
	if o.Write {
		flags, want = unix.O_RDWR, mayWrite
	}
	switch {
	case o.Write && b.readOnly != "":
		return nil, verf, wire.ErrNotSupp
	case o.UID == 0:
		return nil, verf, wire.ErrAcces
	case o.Write && s.verifier.refused.Load():
		return nil, verf, wire.ErrIO
	}
	client := ses.nc.RemoteAddr()
	wait, ok := s.refusals.Turn(client)
	if !ok {
		return nil, verf, wire.ErrJukebox
	}
	time.Sleep(wait)
	cred := &oncrpc.AuthSys{UID: o.UID, GID: o.GID}
	var st unix.Stat_t
	f, status := s.openData(&request{cred: cred, client: client}, o.File, want, &st)
	if status != wire.OK {
		return nil, verf, status
	}
	defer s.closeData(f)
	if !authorize(cred, &st, mayRead) {
		return nil, verf, wire.ErrAcces // descriptors for writing can be read, too
	}
	if !b.note(&loan{session: ses, id: o.ID, fh: o.File, write: o.Write}) {
		return nil, verf, wire.ErrJukebox
	}
	f.sync.mu.Lock()
	fd, err := s.handles.openAgain(f, flags)
	verf = *s.verifier.now.Load()
	f.sync.mu.Unlock()
	if err != nil {
		b.giveBack(ses, o.ID, false)
		return nil, verf, statusOf(err)
	}
	fds = append(fds, fd)
	if s.io.Align > 0 {
		if fd, err = s.handles.openAgain(f, flags|unix.O_DIRECT); err == nil {
			fds = append(fds, fd)
		}
	}
	return fds, verf, wire.OK
}

// note records a loan before it is made; the file's lock is held. It reports false if there are too many, or one of that id.
func (b *broker) note(l *loan) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	loans := l.session.loans
	if len(loans) >= maxLoans || loans[l.id] != nil || !b.sessions[l.session] {
		return false
	}
	loans[l.id] = l
	if b.lent[l.fh] == nil {
		b.lent[l.fh] = map[*loan]bool{}
	}
	b.lent[l.fh][l] = true
	return true
}

// revoke asks clients to close a file's descriptors. It does not wait for them.
func (b *broker) revoke(fh wire.FileHandle) {
	b.mu.Lock()
	var asked []*loan
	for l := range b.lent[fh] {
		if !l.revoked {
			l.revoked = true
			asked = append(asked, l)
		}
	}
	b.mu.Unlock()
	for _, l := range asked {
		l.session.send(&localio.Revoke{ID: l.id})
	}
}

// revokeWriters asks clients to close all descriptors for writing.
func (b *broker) revokeWriters() {
	b.mu.Lock()
	var files []wire.FileHandle
	for fh, loans := range b.lent {
		for l := range loans {
			if l.write {
				files = append(files, fh)
				break
			}
		}
	}
	b.mu.Unlock()
	for _, fh := range files {
		b.revoke(fh)
	}
}

// recall asks clients to close a file's descriptors and waits until they have, or the time is over. f.mu is held exclusively,
// so there are no new ones. holders are the processes that still have some.
func (b *broker) recall(f *file) (holders []int32) {
	b.revoke(f.fh)
	late := time.NewTimer(recallTime)
	defer late.Stop()
	for {
		b.mu.Lock()
		returned := b.returned
		holders = holders[:0]
		for l := range b.lent[f.fh] {
			holders = append(holders, l.session.pid())
		}
		b.mu.Unlock()
		if len(holders) == 0 {
			return nil
		}
		select {
		case <-returned:
		case <-late.C:
			return holders
		}
	}
}

// expel sees to it that nobody but us can write f, which others may have open: JUKEBOX if somebody still can. f.mu is held
// exclusively.
//
// What clients say is not enough: one may have lost its session, or have got its descriptors from a server that was here
// before. So it is the kernel that is asked.
func (s *Server) expel(f *file) error {
	alone, holders, err := s.alone(f)
	if alone || err != nil {
		return err
	}
	for wait, began := time.Millisecond, time.Now(); ; wait *= 2 {
		free, err := s.nobodyWrites(f)
		if err != nil {
			return err
		}
		if free {
			f.held.Store(false)
			return nil
		}
		if time.Since(began)+wait > recallTime {
			break
		}
		time.Sleep(wait) // a client that was killed may not be gone yet
	}
	if !f.held.Swap(true) {
		s.log.Warn("a process on this host has a data file open for writing that is to be fenced, which waits for it",
			"handle", f.fh, "holders", holders)
	}
	return wire.ErrJukebox
}

// alone recalls what was lent of f, and reports whether nobody else has it open, for reading or writing. f.mu is held
// exclusively. holders are the processes that have not given back what was lent.
func (s *Server) alone(f *file) (alone bool, holders []int32, err error) {
	if s.broker != nil {
		holders = s.broker.recall(f)
	}
	if s.leases != nil || f.readOnly || f.dir {
		return true, nil, nil // nothing was lent for writing
	}
	if fd := f.direct.Swap(0); fd > 0 {
		unix.Close(int(fd))
	}
	if alone, err = lease(f.fd, unix.F_WRLCK); alone {
		f.held.Store(false)
	}
	return alone, holders, err
}

// nobodyWrites reports whether nobody else has f open for writing, though they may for reading. f.mu is held exclusively, and
// f is not open for direct transfers.
//
// Our own descriptor would count. So a read-only one takes its place meanwhile, once it has no failed write to tell of.
func (s *Server) nobodyWrites(f *file) (bool, error) {
	if f.sync.dirty.Load() {
		s.sync(f, false) // if it fails there is a new verifier
	}
	r, err := s.handles.openAgain(f, unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer unix.Close(r)
	if err := unix.Dup3(r, f.fd, unix.O_CLOEXEC); err != nil {
		return false, err
	}
	free, err := noWriter(r)
	w, reopen := s.handles.openAgain(f, unix.O_RDWR)
	if reopen == nil {
		reopen = unix.Dup3(w, f.fd, unix.O_CLOEXEC)
		unix.Close(w)
	}
	if reopen != nil {
		s.cache.doom(f) // the next request opens it anew
		return false, reopen
	}
	return free, err
}

// local runs a procedure of the program of package localio.
func (c *conn) local(r *request, reply *oncrpc.Reply) {
	s := c.s
	var res results
	switch localio.Proc(r.call.Proc) {
	case localio.ProcIdentity:
		res = &localio.Identity{Server: s.id, Local: s.broker != nil, Reason: s.remote}
	case localio.ProcProbe:
		var a localio.ProbeArgs
		if a.Decode(&r.args) != nil {
			reply.Stat = oncrpc.GarbageArgs
		} else if s.broker != nil {
			s.broker.probed(c, &a)
		}
	default:
		reply.Stat = oncrpc.ProcUnavail
	}
	r.finish(reply, res)
}
