package localio

import (
	"container/list"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/localio"
)

// proveTime bounds an attempt to get a session, and packetTime a send to a broker that does not read.
const (
	proveTime  = 5 * time.Second
	packetTime = time.Second
)

// errNoBroker says that there is nothing at this address, nor will be soon.
type errNoBroker struct{ reason string }

func (e *errNoBroker) Error() string { return e.reason }

// errForeign says that the server has no broker, as it is none of weft's.
var errForeign = &errNoBroker{"it is none of weft's data servers"}

// session is a proved connection to a broker, or a directory that was found to be what the server exports. Guarded by Target.mu:
// files and what follows it.
type session struct {
	t        *Target
	nc       *net.UnixConn
	rpc      *rpcConn
	export   *export // instead of both; nil: there is a broker
	kind     fileio.Kind
	readOnly string // why nothing is lent for writing

	files   map[key]*file
	named   map[uint32]*file
	recent  list.List // of *file: those that are open, the one used last first
	lastID  uint32
	waiting int  // files that are opening
	held    int  // files that are opening, or whose descriptors are not closed
	easing  bool // a goroutine calls giveBack
	syncing int  // files that giveBack has retired and that are not closed, since they are synced first

	// known are open files, or such as were, for reading and for writing, by the data file of the layout that was used. It takes
	// no lock, and is emptied when it gets large.
	known [2]sync.Map // from *layout.DataFile to *file
	count atomic.Int64
}

// key is what descriptors are lent for.
type key struct {
	fh    nfs3.FileHandle
	cred  layout.Credential
	write bool
}

// file is descriptors of a data file, or the wait for them. Guarded by Target.mu, but for what does not change while it is open.
type file struct {
	session    *session
	key        key
	id         uint32
	state      state
	known      chan struct{} // closed when the state is no longer opening
	refusedAt  time.Time
	fd, direct int
	streams    fileio.Streams
	verifier   layout.Verifier
	kept       uint64 // see Target.token
	early      bool   // revoked before it was lent
	place      *list.Element
	eased      bool // it is one of session.syncing

	use    atomic.Int64 // requests that use it, and retired
	recent atomic.Bool  // it was used since it was last looked at
	dirty  atomic.Bool  // written and not synced
	once   sync.Once    // of close

	syncing sync.Mutex // held during a sync: the kernel tells a descriptor of a failure once
	broken  error      // of a sync; guarded by syncing
}

// retired in file.use says that nobody may begin to use it. Who finds nothing else there closes it.
const retired = 1 << 62

// acquire begins a use, if the file is open.
func (f *file) acquire() bool {
	if f.use.Add(1)&retired != 0 {
		f.release()
		return false
	}
	if !f.recent.Load() {
		f.recent.Store(true)
	}
	return true
}

// release ends a use. Target.mu is not held.
func (f *file) release() {
	if f.use.Add(-1) == retired {
		f.close()
	}
}

// state is how far it is with a file.
type state uint8

const (
	opening state = iota
	open
	refused
	closing // revoked, or of no more use: closed when nobody uses it
)

func (f *file) Buffered() int            { return f.fd }
func (f *file) Direct() int              { return f.direct }
func (f *file) Streams() *fileio.Streams { return &f.streams }

// prove gets a session with the broker of the data server.
func (t *Target) prove(ctx context.Context) (s *session, err error) {
	ctx, cancel := context.WithTimeout(ctx, proveTime)
	defer cancel()
	t.mu.Lock()
	addrs := t.addrs
	t.mu.Unlock()
	rpc, err := dialRPC(ctx, addrs, t.cfg.TLS)
	if err != nil {
		return nil, fmt.Errorf("the data server cannot be asked: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { rpc.nc.Close() })
	defer stop()
	defer func() {
		if err != nil {
			rpc.nc.Close()
		}
	}()
	var who wire.Identity
	err = rpc.call(wire.ProcIdentity, nil, &who)
	var unknown *oncrpc.Error
	switch {
	case errors.As(err, &unknown) && unknown.Stat == oncrpc.ProgUnavail:
		return nil, errForeign
	case err != nil:
		return nil, fmt.Errorf("the data server cannot be asked: %w", err)
	case !who.Local:
		return nil, &errNoBroker{who.Reason}
	}
	nc, err := t.dialBroker(who.Server)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			nc.Close()
		}
	}()
	limit(ctx, nc)
	granted, err := t.shake(nc, rpc, who.Server)
	if err != nil {
		return nil, err
	}
	nc.SetDeadline(time.Time{})
	return &session{
		t: t, nc: nc, rpc: rpc, readOnly: granted.ReadOnly,
		kind:  fileio.Kind{Align: granted.Align, Least: granted.Least, Memory: granted.Memory},
		files: map[key]*file{}, named: map[uint32]*file{},
	}, nil
}

// dialBroker connects to the socket of a server's broker, if that is root's, or ours.
func (t *Target) dialBroker(server wire.ID) (*net.UnixConn, error) {
	path := wire.Socket(t.cfg.Dir, server)
	var st unix.Stat_t
	switch err := unix.Lstat(t.cfg.Dir, &st); {
	case err == unix.ENOENT:
		return nil, &errNoBroker{fmt.Sprintf("it runs on another host, or in a container that does not share %s", t.cfg.Dir)}
	case err == unix.EACCES:
		return nil, &errNoBroker{fmt.Sprintf("user %d may not enter %s", os.Geteuid(), t.cfg.Dir)}
	case err != nil:
		return nil, fmt.Errorf("%s: %w", t.cfg.Dir, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR || !trusted(st.Uid) || st.Mode&0o022 != 0:
		return nil, fmt.Errorf("%s is no directory that root alone may write to", t.cfg.Dir)
	}
	nc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, &errNoBroker{fmt.Sprintf("it runs on another host, or in a container that does not share %s", t.cfg.Dir)}
	case errors.Is(err, unix.EACCES):
		return nil, &errNoBroker{fmt.Sprintf("user %d may not connect to %s", os.Geteuid(), path)}
	case errors.Is(err, unix.ECONNREFUSED):
		return nil, fmt.Errorf("the data server that made %s is gone", path)
	case err != nil:
		return nil, err
	}
	raw, err := nc.SyscallConn()
	var peer *unix.Ucred
	if err == nil {
		ctl := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		err = errors.Join(err, ctl)
	}
	if err == nil && !trusted(peer.Uid) {
		err = fmt.Errorf("%s is served by user %d, not by root", path, peer.Uid)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return nc, nil
}

func trusted(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

// shake shows the broker that we reach its server by RPC.
func (t *Target) shake(nc *net.UnixConn, rpc *rpcConn, server wire.ID) (*wire.Granted, error) {
	say := func(m wire.Message) error {
		_, err := nc.Write(wire.Append(nil, m))
		return err
	}
	hear := func() (wire.Message, error) {
		var b [wire.MaxMessage]byte
		n, err := nc.Read(b[:])
		if err != nil {
			return nil, fmt.Errorf("the broker of the data server does not answer: %w", err)
		}
		m, err := wire.Decode(b[:n])
		if no, ok := m.(*wire.Refused); ok {
			return nil, errors.New(no.Reason)
		}
		return m, err
	}
	if err := say(&wire.Hello{Version: wire.Version, Server: server}); err != nil {
		return nil, err
	}
	m, err := hear()
	if err != nil {
		return nil, err
	}
	challenge, ok := m.(*wire.Challenge)
	if !ok || challenge.Server != server {
		return nil, fmt.Errorf("the broker of the data server answers %T of another one", m)
	}
	channel, err := rpc.channel()
	if err != nil {
		return nil, err
	}
	var ours wire.Nonce
	rand.Read(ours[:])
	args := wire.ProbeArgs{
		Server: server, Instance: challenge.Instance,
		Proof: wire.MakeProof(challenge.Nonce, ours, server, challenge.Instance, channel),
	}
	if err := rpc.call(wire.ProcProbe, args.Append(nil), nil); err != nil {
		return nil, fmt.Errorf("PROBE: %w", err)
	}
	if err := say(&wire.Reveal{Nonce: ours}); err != nil {
		return nil, err
	}
	if m, err = hear(); err != nil {
		return nil, err
	}
	granted, ok := m.(*wire.Granted)
	if !ok {
		return nil, fmt.Errorf("the broker of the data server answers %T to the proof", m)
	}
	return granted, nil
}

// serve takes what the broker sends until one of the connections ends, and tells why. Without one see watch.
func (s *session) serve(ctx context.Context) error {
	over := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { s.closeIdle(over) }) // ends below
	if s.export != nil {
		err := s.watch(ctx)
		close(over)
		watching.Wait()
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.nc.Close() })
	defer stop()
	watching.Go(func() { // ends with the RPC connection, which ends below
		s.rpc.wait()
		s.nc.Close()
	})
	err := s.read()
	s.nc.Close()
	s.rpc.nc.Close()
	close(over)
	watching.Wait()
	return err
}

func (s *session) read() error {
	var b [wire.MaxMessage]byte
	rights := make([]byte, unix.CmsgSpace(2*4))
	for {
		n, oobn, flags, _, err := s.nc.ReadMsgUnix(b[:], rights)
		if err != nil || n == 0 {
			return errors.New("the data server has ended the session")
		}
		fds := lentBy(rights[:oobn])
		short := flags&unix.MSG_CTRUNC != 0 // the kernel had no numbers for all of them
		if short {
			closeAll(fds)
			fds = nil
			descriptors.Short(unix.EMFILE)
		}
		m, err := wire.Decode(b[:n])
		switch m := m.(type) {
		case *wire.Opened:
			s.opened(m, fds, short)
			continue
		case *wire.Revoke:
			s.revoked(m.ID)
		case nil:
		default:
			err = fmt.Errorf("the broker sends %T", m)
		}
		closeAll(fds) // there should be none
		if err != nil {
			return err
		}
	}
}

// lentBy returns the descriptors that came with a packet.
func lentBy(rights []byte) (fds []int) {
	all, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for i := range all {
		if got, err := unix.ParseUnixRights(&all[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

// send sends a message to the broker. If that does not take it the session ends. Without one an OPEN is answered here. Target.mu is
// not held.
func (s *session) send(m wire.Message) {
	if s.export != nil {
		if o, ok := m.(*wire.Open); ok {
			s.lend(o)
		}
		return
	}
	s.nc.SetWriteDeadline(time.Now().Add(packetTime))
	if _, err := s.nc.Write(wire.Append(nil, m)); err != nil {
		s.nc.Close()
	}
}

// lookup returns the file of k, if there is one, open or not. Target.mu is held.
func (s *session) lookup(k key) *file {
	f := s.files[k]
	if f != nil && f.state == refused && time.Since(f.refusedAt) > refuseTime {
		delete(s.files, k)
		return nil
	}
	return f
}

// ask makes a file and has its descriptors lent. Target.mu is held; the caller sends the message.
func (s *session) ask(k key) (*file, *wire.Open) {
	s.lastID++
	f := &file{session: s, key: k, id: s.lastID, known: make(chan struct{})}
	s.files[k], s.named[f.id] = f, f
	s.waiting++
	s.held++
	return f, &wire.Open{ID: f.id, File: k.fh, UID: k.cred.UID, GID: k.cred.GID, Write: k.write}
}

// full reports whether no more files may be lent now. Then it has room made for later ones. Target.mu is held.
func (s *session) full() bool {
	if s.waiting == wire.MaxOpens || descriptors.Scarce() {
		return true
	}
	if s.held < s.t.bound() {
		return false
	}
	if !s.easing {
		s.easing = true
		go func() { // ends soon: it does not wait for the syncs
			s.giveBack(easeFiles)
			s.t.mu.Lock()
			s.easing = false
			s.t.mu.Unlock()
		}()
	}
	return true
}

// giveBack closes up to most files that nobody uses, beginning with those that were unused for longest. It returns how
// many are closed now. Others are closed once they have been synced, easeFiles of them at a time.
func (s *session) giveBack(most int) (closed int) {
	var unused []*file
	s.t.mu.Lock()
	for e := s.recent.Back(); e != nil && len(unused) < most; {
		f := e.Value.(*file)
		e = e.Prev()
		dirty := f.dirty.Load()
		if f.use.Load() > 0 || dirty && s.syncing == easeFiles {
			continue
		}
		if dirty {
			f.eased = true
			s.syncing++
		}
		if !f.retire() { // a request has begun to use it, and closes it
			continue
		}
		unused = append(unused, f)
		if !dirty {
			closed++
		}
	}
	s.t.mu.Unlock()
	for _, f := range unused {
		f.close()
	}
	return closed
}

// opened takes in the answer to an OPEN, and the descriptors that came with it. short says that the process had too few
// numbers for all of them, which is not a refusal.
func (s *session) opened(m *wire.Opened, fds []int, short bool) {
	t := s.t
	var st unix.Stat_t
	good := m.Status == nfs3.OK && len(fds) > 0 && len(fds) <= 2 && unix.Fstat(fds[0], &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
	t.mu.Lock()
	f := s.named[m.ID]
	waited, taken := f != nil && f.state == opening, false
	switch {
	case waited && good && !f.early:
		f.state, f.fd, f.direct = open, fds[0], fileio.NoDirect
		if len(fds) == 2 {
			f.direct = fds[1]
		}
		f.verifier = layout.Verifier(m.Verifier)
		t.salt(f.key.fh, &f.verifier)
		f.kept = t.token(f.key.fh)
		f.place = s.recent.PushFront(f)
		taken = true
	case waited:
		f.state, f.refusedAt = refused, time.Now()
		delete(s.named, f.id)
		s.held--
		if f.early || short || len(s.files) > 4*t.cfg.Files {
			delete(s.files, f.key)
		}
	}
	if waited {
		s.waiting--
		close(f.known)
	}
	var spare []*file // more than one, if there was none to spare before
	for n := s.spare(f); n != nil; n = s.spare(f) {
		spare = append(spare, n)
	}
	t.mu.Unlock()
	if !taken {
		closeAll(fds)
		if m.Status == nfs3.OK { // they could not be taken: too many are open, perhaps
			s.send(&wire.Closed{ID: m.ID})
		}
	}
	for _, f := range spare {
		f.close()
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// spare returns an open file to be closed, if there are too many: one that was not used for long, of those that nobody uses and
// that have nothing to be synced. It is not keep. Target.mu is held.
func (s *session) spare(keep *file) *file {
	if s.recent.Len() <= s.t.most() {
		return nil
	}
	for n := 2 * s.recent.Len(); n > 0; n-- { // each gets a second chance
		e := s.recent.Back()
		f := e.Value.(*file)
		switch {
		case f == keep || f.use.Load() > 0 || f.dirty.Load() || f.recent.Swap(false):
			s.recent.MoveToFront(e)
		case f.retire():
			return f
		default:
			return nil // somebody has begun to use it, and closes it
		}
	}
	return nil
}

// closeIdle closes, from time to time, what was not used since the last time, until stop is closed.
func (s *session) closeIdle(stop <-chan struct{}) {
	tick := time.NewTicker(s.t.cfg.Idle)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		}
		var unused []*file
		s.t.mu.Lock()
		for e := s.recent.Front(); e != nil; {
			f := e.Value.(*file)
			e = e.Next()
			if !f.recent.Swap(false) && f.use.Load() == 0 && !f.dirty.Load() && f.retire() {
				unused = append(unused, f)
			}
		}
		s.t.mu.Unlock()
		for _, f := range unused {
			f.close()
		}
	}
}

// retire makes nobody use f any more, and reports whether nobody does: then the caller closes it. Target.mu is held.
func (f *file) retire() bool {
	s := f.session
	f.state = closing
	s.recent.Remove(f.place)
	if s.files[f.key] == f {
		delete(s.files, f.key)
	}
	return f.use.Add(retired) == retired
}

// close closes the descriptors of a retired file and tells the broker, or has that done if something is to be synced before: nobody may
// be told of a failure afterwards. Target.mu is not held.
func (f *file) close() {
	f.once.Do(func() { // who finds that it is retired may call it, too
		var st unix.Stat_t
		if !f.dirty.Load() || unix.Fstat(f.fd, &st) == nil && st.Nlink == 0 { // nobody will want it any more
			f.closeNow()
			return
		}
		f.session.t.tasks.Go(func() { // ends with the sync
			f.sync(false)
			f.closeNow()
		})
	})
}

// closeNow is close without a sync.
func (f *file) closeNow() {
	s, t := f.session, f.session.t
	unix.Close(f.fd)
	if f.direct != fileio.NoDirect {
		unix.Close(f.direct)
	}
	t.mu.Lock()
	delete(s.named, f.id)
	s.held--
	if f.eased {
		s.syncing--
	}
	t.mu.Unlock()
	s.send(&wire.Closed{ID: f.id, Unstable: f.dirty.Load()})
}

// revoked ends the use of what the broker wants back.
func (s *session) revoked(id uint32) {
	t := s.t
	t.mu.Lock()
	f := s.named[id]
	if f == nil || f.state != open { // it is on its way, or being closed already
		if f != nil {
			f.early = true
		}
		t.mu.Unlock()
		return
	}
	unused := f.retire()
	t.mu.Unlock()
	if unused {
		f.close()
	}
}

// end closes everything, once what has begun is over, after the connections have ended.
func (s *session) end() {
	t := s.t
	var unused []*file
	t.mu.Lock()
	for _, f := range s.named {
		switch f.state {
		case opening:
			f.state, f.refusedAt = refused, time.Now()
			close(f.known)
		case open:
			if f.retire() {
				unused = append(unused, f)
			}
		}
	}
	t.mu.Unlock()
	for _, f := range unused {
		f.close()
	}
	if s.export != nil {
		s.export.dir.Close()
	}
}
