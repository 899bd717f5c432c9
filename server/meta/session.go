package meta

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/perm"
	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/meta/admit"
	"github.com/weftfs/weft/server/meta/locktable"
	"github.com/weftfs/weft/server/schema"
)

// session is a client's session. Its claims are guarded by Service.mu.
type session struct {
	id      metarpc.SessionID
	client  metarpc.ClientInfo
	created int64     // nanoseconds since 1970
	known   bool      // from the catalog: made by an earlier instance
	unsure  bool      // its row may be put once more, by a commit that is still on its way
	epoch   time.Time // what renewed counts from; its monotonic clock does not jump
	ctx     context.Context
	cancel  context.CancelFunc // at the end of the session
	running sync.WaitGroup     // calls being executed; none is added once ended is set
	calls   atomic.Uint64
	version atomic.Uint32 // of the protocol on its last connection to this instance; 0 = there was none
	renewed atomic.Int64  // nanoseconds since epoch, when the last frame came
	claims  map[layout.FileID]*claim
	locks   locktable.Session
	ready   readyQueue

	// Guarded by Service.mu.
	leases    map[layout.FileID]metarpc.Lease // nil once the session has ended and its client relies on none
	shrinking bool                            // it is being asked to give leases back
	query     *sizeQuery                      // what it is to be asked next; nil = nothing
	querying  bool                            // somebody sends it questions
	reclaimed bool                            // has what it had at an earlier instance, or never had anything there
	expired   chan struct{}                   // closed when leases is nil
	told      uint64                          // epoch of the device states that it has on its connection; see tellDevices
	attached  uint64                          // connections so far
	telling   bool                            // somebody tells it

	mu       sync.Mutex
	ended    bool
	left     bool // ended by its client
	returned bool // has been on a connection of this instance
	conn     *conn
	address  string
	peer     rpctls.Peer // whose certificate it had on the first connection to this instance
	grant    grant       // what the rules gave it
	slots    []slot
	backs    map[uint64]*callback // by number, unanswered
	lastBack uint64
}

// slot is where one call at a time is executed.
type slot struct {
	sequence uint64
	busy     bool
	conn     *conn  // where the answer of the call being executed goes: it came from there last
	frame    []byte // the answer of sequence; nil if executing that call again is as good
	restored bool   // frame is from the catalog, written by an earlier instance
	row      []byte // the slot's row in the catalog (schema.Reply), which may be of an earlier call; nil if there is none
}

// callback is a call to the client.
type callback struct {
	op      metarpc.BackOp
	args    any
	done    chan metarpc.Status // has room for the one answer
	working chan struct{}       // gets an element when the client says that it is at it
	stuck   func()              // called when the client says that its own changes stand in the way; may be nil
}

func newCallback(op metarpc.BackOp, args any) *callback {
	return &callback{op: op, args: args, done: make(chan metarpc.Status, 1), working: make(chan struct{}, 1)}
}

// String is enough of the id to tell sessions apart in a log.
func (sess *session) String() string { return hex.EncodeToString(sess.id[:4]) }

func (s *Service) newSession(id metarpc.SessionID, row schema.Session) *session {
	sess := &session{
		id:      id,
		client:  row.Client,
		created: row.Created,
		epoch:   s.started,
		claims:  map[layout.FileID]*claim{},
		leases:  map[layout.FileID]metarpc.Lease{},
		expired: make(chan struct{}),
		slots:   make([]slot, s.cfg.Slots),
		backs:   map[uint64]*callback{},
	}
	sess.ctx, sess.cancel = context.WithCancel(s.ctx)
	sess.locks = locktable.Session{Client: row.Client.ID, Host: row.Client.Host, Life: sess.ctx,
		Tell: func(a metarpc.LockReadyArgs) { s.lockReady(sess, a) }}
	sess.renew()
	return sess
}

func (sess *session) renew() { sess.renewed.Store(int64(time.Since(sess.epoch))) }

// idle is how long ago the last frame came.
func (sess *session) idle() time.Duration {
	return time.Since(sess.epoch) - time.Duration(sess.renewed.Load())
}

// welcome answers a hello and binds the session to the connection. An error tells why the client was refused.
func (s *Service) welcome(c *conn, in *admit.Incoming, hello *metarpc.Hello) (*session, error) {
	var sess *session
	var refusal *metarpc.Error
	s.mu.Lock()
	draining := s.draining.Load()
	if !draining {
		s.hellos.Add(1)
		defer s.hellos.Done()
	}
	s.mu.Unlock()
	given, err := s.admitted(s.ctx, in)
	switch {
	case draining:
		refusal = &metarpc.Error{Status: metarpc.StatusShutdown, Message: "the service is going down"}
	case err != nil:
		refusal = &metarpc.Error{Status: errAccess.Status, Message: err.Error()}
	default:
		sess, refusal = s.session(in, hello)
	}
	if refusal == nil && s.attach(sess, c, in, given) {
		return sess, nil
	}
	if refusal == nil {
		refusal = &metarpc.Error{Status: metarpc.StatusBadSession, Message: "the session has just ended, or is another client's"}
	}
	c.send(s.welcomeFrame(&metarpc.Welcome{Version: c.version, Status: refusal.Status, Message: refusal.Message}))
	return nil, refusal
}

func (s *Service) welcomeFrame(w *metarpc.Welcome) []byte {
	w.Magic, w.Volume = metarpc.Magic, s.volume.ID
	if s.cfg.Ring != nil {
		w.Ring = s.cfg.Ring()
	}
	frame, err := metarpc.AppendWelcome(nil, w)
	if err != nil {
		panic("meta: " + err.Error()) // its message is cut to what fits
	}
	return frame
}

// session returns the session a hello asks for, or makes one.
func (s *Service) session(in *admit.Incoming, hello *metarpc.Hello) (*session, *metarpc.Error) {
	refuse := func(status metarpc.Status, format string, args ...any) (*session, *metarpc.Error) {
		return nil, &metarpc.Error{Status: status, Message: fmt.Sprintf(format, args...)}
	}
	if _, ok := s.cfg.Speaks.Choose(hello.Versions()); !ok {
		return refuse(metarpc.StatusVersion, "%s", metarpc.Mismatch(hello.Versions(), s.cfg.Speaks))
	}
	if hello.Shard != s.cfg.Shard {
		return refuse(metarpc.StatusMoved, "this service has shard %d of %d, not %d", s.cfg.Shard, s.shards, hello.Shard)
	}
	if hello.Session != (metarpc.SessionID{}) {
		s.mu.Lock()
		sess := s.sessions[hello.Session]
		s.mu.Unlock()
		if sess == nil || sess.client.ID != hello.Client.ID {
			return refuse(metarpc.StatusBadSession, "there is no such session of this client")
		}
		return sess, nil
	}
	if n := s.sessionsOf(in); n >= maxSessions {
		return refuse(metarpc.Status(syscall.EUSERS), "this client has %d sessions already", n)
	}
	var id metarpc.SessionID
	rand.Read(id[:])
	row := schema.Session{Client: hello.Client, Created: time.Now().UnixNano(), Shard: s.cfg.Shard}
	var b catalog.Batch
	b.GuardAbsent(schema.SessionKey(id))
	b.Put(schema.SessionKey(id), schema.Encode(&row))
	var err error
	for try := range retry.Tries {
		if err = retry.BackOff(s.ctx, try); err != nil {
			break
		}
		if err = s.engine.Commit(s.ctx, &b); !errors.Is(err, catalog.ErrConflict) {
			break
		}
	}
	unsure := errors.Is(err, catalog.ErrUnknown)
	if unsure {
		err = catalog.FindOut(s.ctx, s.engine, &b)
	}
	if err != nil {
		s.log.Error("session not made", "error", err)
		return refuse(metarpc.StatusInternal, "make a session: %v", err)
	}
	sess := s.newSession(id, row)
	sess.reclaimed, sess.unsure = true, unsure
	s.mu.Lock()
	s.sessions[id] = sess
	s.mu.Unlock()
	return sess, nil
}

// attach makes c the session's connection and sends the welcome, unless the session has ended or another client began it. The welcome is queued
// together with the change: a client that has seen it may make another connection at once, which then is the newest.
func (s *Service) attach(sess *session, c *conn, in *admit.Incoming, given grant) bool {
	address := in.Conn.RemoteAddr().String()
	sess.mu.Lock()
	if sess.ended || sess.returned && sess.peer != in.Peer {
		sess.mu.Unlock()
		return false
	}
	sess.renew()
	sess.peer = in.Peer
	old, first := sess.conn, !sess.returned
	sess.conn, sess.address, sess.grant, sess.returned = c, address, given, true
	sess.version.Store(c.version)
	flush := c.enqueue(s.welcomeFrame(&metarpc.Welcome{
		Version: c.version, Session: sess.id, Instance: s.instance, Slots: s.cfg.Slots, Lease: int64(s.cfg.Lease), Top: given.Path,
	}))
	again := make(map[uint64]*callback, len(sess.backs))
	for _, cb := range sess.backs {
		if !cb.op.In(c.version) {
			cb.done <- metarpc.Status(syscall.EOPNOTSUPP)
			continue
		}
		sess.lastBack++
		again[sess.lastBack] = cb
		c.enqueue(s.backFrame(c.version, sess.lastBack, cb))
	}
	sess.backs = again
	sess.mu.Unlock()
	if flush {
		c.flush()
	}
	if old != nil {
		old.close()
	}
	s.mu.Lock()
	sess.told, sess.attached = 0, sess.attached+1
	s.tellDevices(sess)
	s.mu.Unlock()
	log := s.log.With("session", sess, "address", address)
	switch {
	case !first:
		log.Info("client connected again")
	case sess.known:
		log.Info("client of an earlier instance came back", "host", sess.client.Host, "mount", sess.client.Mount)
		s.mu.Lock()
		s.graceEnd = time.Now().Add(s.cfg.Lease) // no earlier than it was; this happens once for each session
		s.mu.Unlock()
	default:
		log.Info("client connected", "host", sess.client.Host, "pid", sess.client.PID, "program", sess.client.Program,
			"mount", sess.client.Mount)
	}
	return true
}

// detach tells the session that c is lost. It reports whether c was the session's connection.
func (sess *session) detach(c *conn) bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if sess.conn != c {
		return false
	}
	sess.conn = nil
	return true
}

// call is a call being executed.
type call struct {
	sess  *session
	from  *conn           // on which it came; its answer may go to a later one, of the same version
	ctx   context.Context // ends with the session
	h     metarpc.CallHeader
	who   *perm.Caller // see Service.caller
	frame []byte       // the answer, once it is settled by a batch that holds it
	row   []byte       // the slot's, see there
	after func()       // called when the answer is in the connection's queue, behind which a callback's frame would come
	sent  func()       // called when the answer is sent, unless somebody is sending who sends that, too; or cannot be
}

// accept finds out what to do with a call that came in, and executes it. refusal is what was wrong with its arguments. It reports whether the caller
// still has the reader.
func (s *Service) accept(rd *reader, h metarpc.CallHeader, args any, refusal *metarpc.Error) (kept bool, err error) {
	sess, from := rd.sess, rd.conn
	sess.calls.Add(1)
	sess.mu.Lock()
	if sess.conn != from {
		sess.mu.Unlock()
		return true, errReplaced
	}
	if h.Slot >= len(sess.slots) {
		sess.mu.Unlock()
		from.send(s.refusal(h, metarpc.StatusBadSlot, fmt.Sprintf("slot %d of %d", h.Slot, len(sess.slots))))
		return true, nil
	}
	sl := &sess.slots[h.Slot]
	again := h.Sequence == sl.sequence
	switch {
	case again && sl.busy:
		sl.conn = from
		sess.mu.Unlock()
		return true, nil
	case again && sl.frame != nil && !sl.restored:
		frame := sl.frame
		sess.mu.Unlock()
		from.send(frame)
		return true, nil
	case h.Sequence < sl.sequence:
		last := sl.sequence
		sess.mu.Unlock()
		from.send(s.refusal(h, metarpc.StatusBadSequence, fmt.Sprintf("sequence %d after %d", h.Sequence, last)))
		return true, nil
	case sl.busy:
		sess.mu.Unlock()
		from.send(s.refusal(h, metarpc.StatusBadSlot, fmt.Sprintf("slot %d is busy", h.Slot)))
		return true, nil
	case s.draining.Load():
		sess.mu.Unlock()
		from.send(s.refusal(h, metarpc.StatusShutdown, "the service is going down"))
		return true, nil
	}
	var first []byte // the answer given before the restart
	if again {
		first = sl.frame
	}
	row := sl.row
	*sl = slot{sequence: h.Sequence, busy: true, conn: from}
	sess.running.Add(1)
	sess.mu.Unlock()
	s.tasks.Add(1)
	defer s.tasks.Done()
	defer sess.running.Done()
	t := &turn{Context: sess.ctx, rd: rd}
	// This goroutine owns the slot until it has put the answer into a queue. There are no more of them than slots.
	c := &call{sess: sess, from: from, ctx: t, h: h, frame: first, row: row}
	s.answer(c, args, refusal)
	alive := s.awaitAlive()
	sess.mu.Lock()
	sl = &sess.slots[h.Slot]
	to := sl.conn
	sl.busy, sl.conn, sl.row = false, nil, c.row
	if h.Op.Once() {
		sl.frame = c.frame
	}
	sess.mu.Unlock()
	flush := alive && to.enqueue(c.frame)
	if c.after != nil {
		c.after()
	}
	if flush {
		to.flush()
	}
	if c.sent != nil {
		c.sent()
	}
	return t.keep(), nil
}

// answer executes a call and leaves its answer in c.frame. If that is set already, an earlier instance executed it.
func (s *Service) answer(c *call, args any, refusal *metarpc.Error) {
	began := time.Now()
	defer func() { s.counts.took(c.h.Op, began) }()
	var result any
	var err error
	switch {
	case refusal != nil:
		err = refusal
	case c.frame != nil:
		if err = s.replay(c.ctx, c, args); err == nil {
			return
		}
		c.frame = nil
	default:
		if c.h.Op.Once() {
			err = s.awaitGrace(c.ctx)
		}
		if err == nil {
			if err = s.throttle(c.ctx, c); err == nil {
				result, err = s.execute(c, args)
			}
		}
		if err == nil && c.frame != nil {
			return
		}
	}
	if err == nil {
		c.frame, err = c.reply(result)
	}
	if err != nil {
		status, message := s.status(c, err)
		s.counts.refused(status)
		c.frame = s.refusal(c.h, status, message)
	}
}

func (c *call) reply(result any) ([]byte, error) {
	return metarpc.AppendReply(nil, c.from.version, metarpc.ReplyHeader{Slot: c.h.Slot, Sequence: c.h.Sequence}, result)
}

func (s *Service) refusal(h metarpc.CallHeader, status metarpc.Status, message string) []byte {
	frame, err := metarpc.AppendReply(nil, metarpc.Version, metarpc.ReplyHeader{ // in all versions the same
		Slot: h.Slot, Sequence: h.Sequence, Status: status, Message: message,
	}, nil)
	if err != nil {
		panic("meta: " + err.Error()) // a reply without a result always fits a frame
	}
	return frame
}

// replay makes this instance know what executing the call made the earlier one know, or wait for.
func (s *Service) replay(ctx context.Context, c *call, args any) error {
	switch a := args.(type) {
	case *metarpc.CreateArgs, *metarpc.TmpFileArgs:
		id, err := metarpc.CreatedID(c.frame[4:])
		if err != nil {
			return fmt.Errorf("stored reply: %w", err)
		}
		again := &metarpc.OpenArgs{ID: id, Reclaim: true}
		if _, _, err := s.openFile(ctx, c, again); err != nil && !errors.Is(err, errStale) {
			return err
		}
	case *metarpc.SetAttrArgs:
		return s.awaitCut(ctx, a.ID)
	}
	return nil
}

// errEnded tells that a session is over.
var errEnded = errors.New("the session has ended")

// callBack calls the client and waits for its answer, across connections, until ctx or the session ends. Whoever neither
// answers nor says that data servers keep it waiting for a lease loses the session.
func (s *Service) callBack(ctx context.Context, sess *session, op metarpc.BackOp, args any) error {
	return s.await(ctx, sess, newCallback(op, args), s.cfg.Lease)
}

// await is callBack with the record of the call, and another time than a lease.
func (s *Service) await(ctx context.Context, sess *session, cb *callback, patience time.Duration) error {
	op := cb.op
	sess.mu.Lock()
	if sess.ended {
		sess.mu.Unlock()
		return errEnded
	}
	sess.lastBack++
	number := sess.lastBack
	sess.backs[number] = cb
	c := sess.conn
	sess.mu.Unlock()
	defer sess.forget(cb)
	if c != nil && !op.In(c.version) {
		s.end(sess, fmt.Sprintf("it does not know %v any more", op))
		return errEnded
	}
	if c != nil {
		c.send(s.backFrame(c.version, number, cb))
	}
	began := time.Now()
	late := false
	lease := time.NewTimer(patience)
	defer lease.Stop()
	for {
		select {
		case status := <-cb.done:
			if status != metarpc.StatusOK {
				s.end(sess, fmt.Sprintf("it refused %v: %v", op, status))
				return errEnded
			}
			if late {
				s.log.Info("a client that data servers kept waiting has answered", "session", sess, "host", sess.client.Host, "callback", op, "after", time.Since(began).Round(time.Millisecond))
			}
			return nil
		case <-cb.working:
			lease.Reset(patience)
			if !late && time.Since(began) > patience/2 {
				late = true
				s.log.Warn("data servers keep a client waiting; until it answers others wait for what it holds", "session", sess, "host", sess.client.Host, "callback", op)
			}
		case <-lease.C:
			if rest := patience - s.sinceUnheard(); rest > 0 {
				lease.Reset(rest)
				continue
			}
			s.end(sess, fmt.Sprintf("it did not answer %v for %v", op, patience))
			return errEnded
		case <-sess.ctx.Done():
			return errEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Service) backFrame(version uint32, number uint64, cb *callback) []byte {
	frame, err := metarpc.AppendCallBack(nil, version, metarpc.BackHeader{Number: number, Op: cb.op}, cb.args)
	if err != nil {
		panic("meta: " + err.Error()) // whoever calls back keeps within the bounds
	}
	return frame
}

// answered hands a callback's answer to whoever waits for it.
func (sess *session) answered(from *conn, r metarpc.BackReply) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	cb := sess.backs[r.Number]
	switch {
	case cb == nil || sess.conn != from:
	case r.Status == metarpc.StatusStuck && cb.stuck != nil:
		cb.stuck()
		fallthrough
	case r.Status == metarpc.StatusWorking:
		select {
		case cb.working <- struct{}{}:
		default:
		}
	default:
		delete(sess.backs, r.Number)
		cb.done <- r.Status
	}
}

func (sess *session) forget(cb *callback) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	for number, other := range sess.backs {
		if other == cb {
			delete(sess.backs, number)
		}
	}
}

func (s *Service) endSession(_ context.Context, c *call, _ *metarpc.Empty) (*metarpc.Empty, error) {
	c.after = func() {
		c.sess.mu.Lock()
		c.sess.left = true
		c.sess.mu.Unlock()
		s.end(c.sess, "the client ended it")
	}
	return &metarpc.Empty{}, nil
}

func (s *Service) renewSession(context.Context, *call, *metarpc.Empty) (*metarpc.Empty, error) {
	return &metarpc.Empty{}, nil // receive has done it
}

// end ends a session: at once for the client, in the background for what it leaves behind.
func (s *Service) end(sess *session, reason string) {
	s.mu.Lock()
	sess.mu.Lock()
	if sess.ended {
		sess.mu.Unlock()
		s.mu.Unlock()
		return
	}
	sess.ended = true
	left := sess.left
	c := sess.conn
	sess.conn = nil
	sess.mu.Unlock()
	delete(s.sessions, sess.id)
	s.fading[sess] = struct{}{}
	if !left {
		sess.doubt()
	}
	for _, cl := range sess.claims {
		if !cl.unfenced { // nothing is written there any more
			cl.places = nil
		}
		s.changedFile(cl.file)
	}
	s.mu.Unlock()
	s.log.Info("session ends", "session", sess, "host", sess.client.Host, "mount", sess.client.Mount, "reason", reason)
	s.cfg.Files.Forget(sess.id)
	sess.cancel()
	if c != nil {
		c.close()
	}
	s.tasks.Go(func() { s.endLeases(sess, left) }) // ends when the client relies on no lease, or with s.ctx
	s.tasks.Go(func() { s.cleanUp(sess) })         // ends when nothing of the session is left, or with s.ctx
	s.checkGrace()
}

// doubt notes that nobody knows what the client of an ended session has written, and may still read or write; Service.mu is held.
func (sess *session) doubt() {
	for _, cl := range sess.claims {
		if cl.writer {
			cl.unsure, cl.unfenced = true, true
		}
		cl.unbarred = cl.writer || len(cl.reads) > 0
	}
}

// sinceUnheard is how long ago it was last found that clients could not be heard, or the service was started.
func (s *Service) sinceUnheard() time.Duration {
	if !s.alive() {
		return 0
	}
	return time.Since(s.started) - time.Duration(s.unheard.Load())
}

// watchLeases ends sessions whose lease is over, and then the grace period. It ends with s.ctx.
func (s *Service) watchLeases() {
	interval := s.cfg.Lease / 4
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last, wasAlive := time.Now(), true
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		now := time.Now()
		// Either this process stood still, and frames may be waiting to be read; or it answered nobody, and clients connect in vain. Nobody is blamed
		// for having been silent then.
		alive := s.alive()
		late := now.Sub(last) > 2*interval || !alive || !wasAlive
		last, wasAlive = now, alive
		s.mu.Lock()
		if late {
			s.unheard.Store(int64(now.Sub(s.started)))
			s.graceEnd = now.Add(s.cfg.Lease)
		}
		sessions := make([]*session, 0, len(s.sessions))
		for _, sess := range s.sessions {
			sessions = append(sessions, sess)
		}
		s.mu.Unlock()
		for _, sess := range sessions {
			switch {
			case late:
				sess.renew()
			case sess.idle() > s.cfg.Lease:
				s.end(sess, fmt.Sprintf("no word from it for %v", sess.idle().Round(time.Millisecond)))
			}
		}
		s.forgetRecalls()
		s.mu.Lock()
		over := s.grace && !late && now.After(s.graceEnd)
		s.mu.Unlock()
		if over {
			s.endGrace()
		}
	}
}
