package cluster

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/meta/locktable"
)

// maxHolds is how many calls of one connection that may have to wait for clients are carried out at a time; others fail. The rest of the calls
// are not counted: what a Hold waits for may be the Settle of another one.
const maxHolds = 1024

var errClosed = errors.New("the connection is no longer needed")

// peer is the connection to another member, by which it is called.
type peer struct {
	ready chan struct{} // closed when net and version are set, or err

	writing sync.Mutex // held while a frame is written

	mu      sync.Mutex
	net     net.Conn
	version uint32 // of the protocol
	err     error  // why it cannot be used
	last    uint64
	calls   map[uint64]chan *peerrpc.Reply // by number; each has room for the one answer
}

// peer returns the connection to a member, which it makes if there is none.
func (m *member) peer(ctx context.Context, to *memberRow) (*peer, error) {
	m.mu.Lock()
	p := m.peers[to.id]
	if p == nil || p.broken() != nil {
		if m.ctx.Err() != nil {
			m.mu.Unlock()
			return nil, ErrFenced
		}
		p = &peer{ready: make(chan struct{}), calls: map[uint64]chan *peerrpc.Reply{}}
		m.peers[to.id] = p
		m.n.tasks.Go(func() { m.call(p, to) }) // owns the connection; ends with it
	}
	m.mu.Unlock()
	select {
	case <-p.ready:
		return p, p.broken()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *peer) broken() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// close ends the connection, and with it the calls that have no answer.
func (p *peer) close(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return
	}
	p.err = err
	if p.net != nil {
		p.net.Close()
	}
	for _, answer := range p.calls {
		close(answer)
	}
	p.calls = nil
}

// call makes a connection and reads the answers that come on it.
func (m *member) call(p *peer, to *memberRow) {
	ctx, cancel := context.WithTimeout(m.ctx, helloTimeout)
	nc, r, version, err := m.connect(ctx, to)
	cancel()
	if err == nil {
		p.mu.Lock()
		p.version = version
		if p.net = nc; p.err != nil {
			nc.Close()
		}
		p.mu.Unlock()
		defer context.AfterFunc(m.ctx, func() { p.close(errClosed) })()
	} else {
		p.close(fmt.Errorf("connect to the metadata service at %s: %w", to.Address, err))
	}
	close(p.ready)
	var buf []byte
	for err == nil {
		if buf, err = metarpc.ReadFrame(r, buf, peerrpc.MaxFrame); err != nil {
			break
		}
		var reply *peerrpc.Reply
		if reply, err = peerrpc.ParseReply(buf, version); err != nil {
			break
		}
		p.mu.Lock()
		if answer := p.calls[reply.Number]; answer != nil {
			delete(p.calls, reply.Number)
			answer <- reply
		}
		p.mu.Unlock()
	}
	p.close(fmt.Errorf("connection to the metadata service at %s lost: %w", to.Address, err))
}

// connect makes a connection on which both sides have shown who they are, and agreed on a version.
func (m *member) connect(ctx context.Context, to *memberRow) (_ net.Conn, r *bufio.Reader, version uint32, err error) {
	nc, err := m.n.cfg.Dial(ctx, to.Address)
	if err != nil {
		return nil, nil, 0, err
	}
	defer func() {
		if err != nil {
			nc.Close()
		}
	}()
	defer context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })()
	speaks := m.n.cfg.SpeaksToPeers
	hello := &peerrpc.Hello{Magic: peerrpc.Magic, Lowest: speaks.Lowest, Highest: speaks.Highest, From: m.id, To: to.id}
	rand.Read(hello.Nonce[:])
	if err := write(nc, hello); err != nil {
		return nil, nil, 0, err
	}
	r = bufio.NewReader(nc)
	frame, err := metarpc.ReadFrame(r, nil, peerrpc.MaxHello)
	if err != nil {
		return nil, nil, 0, err
	}
	challenge, err := peerrpc.ParseChallenge(frame)
	if err != nil {
		return nil, nil, 0, err
	}
	want := peerrpc.ProofOf(to.Token, peerrpc.CalleeSide, hello, challenge.Nonce)
	switch {
	case challenge.Status != peerrpc.StatusOK:
		return nil, nil, 0, fmt.Errorf("refused: %s", challenge.Message)
	case !hmac.Equal(challenge.Proof[:], want[:]):
		return nil, nil, 0, errors.New("what answers there is not this volume's service")
	case !speaks.Has(challenge.Version):
		return nil, nil, 0, fmt.Errorf("it answers in version %d of the protocol between services, %v are spoken here", challenge.Version, speaks)
	}
	return nc, r, challenge.Version, write(nc, &peerrpc.Proof{Proof: peerrpc.ProofOf(to.Token, peerrpc.CallerSide, hello, challenge.Nonce)})
}

// write writes one of the first frames, which are the same in all versions.
func write(nc net.Conn, frame any) error {
	b, err := peerrpc.Append(nil, peerrpc.Version, frame)
	if err == nil {
		_, err = nc.Write(b)
	}
	return err
}

// do makes a call and waits for its answer. The error of one that was answered is errNotHere or says what the callee has said.
func (m *member) do(ctx context.Context, to *memberRow, c *peerrpc.Call) (*peerrpc.Reply, error) {
	p, err := m.peer(ctx, to)
	if err != nil {
		return nil, err
	}
	wait := peerrpc.MaxWait
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline))
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	c.Wait = int64(max(wait, 0))
	answer := make(chan *peerrpc.Reply, 1)
	p.mu.Lock()
	if p.err != nil {
		defer p.mu.Unlock()
		return nil, p.err
	}
	p.last++
	c.Number = p.last
	p.calls[c.Number] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.calls, c.Number)
		p.mu.Unlock()
	}()
	frame, err := peerrpc.Append(nil, p.version, c)
	if err != nil {
		return nil, err
	}
	p.writing.Lock()
	p.net.SetWriteDeadline(time.Now().Add(m.n.cfg.Lease))
	_, err = p.net.Write(frame)
	p.writing.Unlock()
	if err != nil {
		p.close(fmt.Errorf("connection to the metadata service at %s lost: %w", to.Address, err))
		return nil, err
	}
	select {
	case reply, ok := <-answer:
		switch {
		case !ok:
			return nil, p.broken()
		case reply.Status == peerrpc.StatusNotHere:
			return nil, errNotHere
		case reply.Status != peerrpc.StatusOK:
			return nil, fmt.Errorf("the metadata service at %s: %s", to.Address, reply.Message)
		}
		return reply, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// tell has another member look at the rows.
func (m *member) tell(ctx context.Context, to *memberRow) error {
	_, err := m.do(ctx, to, &peerrpc.Call{Op: peerrpc.OpLook})
	return err
}

// errNotHere: the shard is served by nobody now, or by another one than was asked.
var errNotHere = errors.New("the shard is moving to another metadata service")

// peers is a member as its services see it.
type peers struct{ m *member }

var _ meta.Peers = peers{}

// at finds who has a shard: another member, or a service here.
func (p peers) at(shard int) (*memberRow, Service, error) {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if shard < 0 || shard >= len(m.view.shards) {
		return nil, nil, fmt.Errorf("shard %d of %d", shard, len(m.view.shards))
	}
	owner := m.view.shards[shard].owner
	to := m.view.member(owner)
	switch s := m.served[shard]; {
	case to == nil:
		return nil, nil, errNotHere
	case owner != m.id:
		return to, nil, nil
	case s == nil || s.gone || s.svc == nil:
		return nil, nil, errNotHere
	default:
		return nil, s.svc, nil
	}
}

// ask makes a call to the service of a shard, by here if that is in this process.
func (p peers) ask(ctx context.Context, shard int, c *peerrpc.Call, here func(Service) error) (*peerrpc.Reply, error) {
	to, svc, err := p.at(shard)
	var reply *peerrpc.Reply
	switch {
	case err == nil && svc != nil:
		err = here(svc)
	case err == nil:
		c.Shard = shard
		reply, err = p.m.do(ctx, to, c)
	}
	if errors.Is(err, errNotHere) {
		p.m.doubt()
	}
	if err != nil {
		return nil, fmt.Errorf("service of shard %d: %w", shard, err)
	}
	return reply, nil
}

// wireHold is a Hold as it is sent, holdOf the inverse; wireSettle and settleOf are the same for Settle.
func wireHold(h *meta.Hold) *peerrpc.Hold {
	w := &peerrpc.Hold{Shard: h.Shard, Row: h.Row, To: h.To, Change: h.Change, Oldest: h.Oldest}
	for _, item := range h.Items {
		w.Items = append(w.Items, peerrpc.HoldItem{ID: item.ID, Lease: item.Lease, Last: item.Last})
	}
	return w
}

func holdOf(w *peerrpc.Hold) *meta.Hold {
	h := &meta.Hold{Shard: w.Shard, Row: w.Row, To: w.To, Change: w.Change, Oldest: w.Oldest}
	for _, item := range w.Items {
		h.Items = append(h.Items, meta.HoldItem{ID: item.ID, Lease: item.Lease, Last: item.Last})
	}
	return h
}

func wireSettle(s *meta.Settle) *peerrpc.Settle {
	w := &peerrpc.Settle{Shard: s.Shard, Row: s.Row, Oldest: s.Oldest}
	for _, c := range s.Changes {
		w.Changes = append(w.Changes, peerrpc.Settled{Change: c.Change, To: c.To, Committed: c.Committed})
	}
	return w
}

func settleOf(w *peerrpc.Settle) *meta.Settle {
	s := &meta.Settle{Shard: w.Shard, Row: w.Row, Oldest: w.Oldest}
	for _, c := range w.Changes {
		s.Changes = append(s.Changes, meta.Settled{Change: c.Change, To: c.To, Committed: c.Committed})
	}
	return s
}

// wireWait and waitOf are the same for a LockWait.
func wireWait(w locktable.Wait) peerrpc.LockWait {
	return peerrpc.LockWait{Number: w.Number, Waiter: peerrpc.LockOwner{Client: w.Waiter.Client, Number: w.Waiter.Number},
		Holder: peerrpc.LockOwner{Client: w.Holder.Client, Number: w.Holder.Number}}
}

func waitOf(w peerrpc.LockWait) locktable.Wait {
	return locktable.Wait{Number: w.Number, Waiter: locktable.Owner{Client: w.Waiter.Client, Number: w.Waiter.Number},
		Holder: locktable.Owner{Client: w.Holder.Client, Number: w.Holder.Number}}
}

// Hold implements [meta.Peers].
func (p peers) Hold(ctx context.Context, shard int, h *meta.Hold) (held *meta.Held, err error) {
	reply, err := p.ask(ctx, shard, &peerrpc.Call{Op: peerrpc.OpHold, Hold: wireHold(h)}, func(svc Service) (err error) {
		held, err = svc.Hold(ctx, h)
		return err
	})
	if reply != nil {
		held = &meta.Held{State: meta.HoldState(reply.State), Row: reply.Row}
	}
	return held, err
}

// Settle implements [meta.Peers].
func (p peers) Settle(ctx context.Context, shard int, s *meta.Settle) error {
	_, err := p.ask(ctx, shard, &peerrpc.Call{Op: peerrpc.OpSettle, Settle: wireSettle(s)}, func(svc Service) error { return svc.Settle(ctx, s) })
	return err
}

// LockWaits implements [meta.Peers].
func (p peers) LockWaits(ctx context.Context, shard int, after locktable.Wait) (waits []locktable.Wait, err error) {
	wire := wireWait(after)
	reply, err := p.ask(ctx, shard, &peerrpc.Call{Op: peerrpc.OpLockWaits, After: &wire}, func(svc Service) error {
		waits = svc.LockWaits(after)
		return nil
	})
	if reply != nil {
		for _, w := range reply.Waits {
			waits = append(waits, waitOf(w))
		}
	}
	return waits, err
}

// servePeer answers another member's calls until the connection ends. The caller closes it.
func (n *Node) servePeer(nc net.Conn, r *bufio.Reader, frame []byte) error {
	hello, err := peerrpc.ParseHello(frame)
	if err != nil {
		return err
	}
	nc.SetDeadline(time.Now().Add(helloTimeout))
	speaks := n.cfg.SpeaksToPeers
	version, ok := speaks.Choose(hello.Versions())
	challenge := &peerrpc.Challenge{Version: version}
	n.mu.Lock()
	m := n.present
	n.mu.Unlock()
	var token [16]byte
	switch {
	case !ok:
		challenge.Version, challenge.Status = speaks.Highest, peerrpc.StatusVersion
		challenge.Message = peerrpc.Mismatch(hello.Versions(), speaks)
	case m == nil || m.id != hello.To:
		challenge.Status, challenge.Message = peerrpc.StatusWrongPeer, "the member that is called is another one, or no more"
	default:
		m.mu.Lock()
		if self := m.view.member(m.id); self != nil {
			token = self.Token
		}
		m.mu.Unlock()
		rand.Read(challenge.Nonce[:])
		challenge.Proof = peerrpc.ProofOf(token, peerrpc.CalleeSide, hello, challenge.Nonce)
	}
	if err := write(nc, challenge); err != nil {
		return err
	}
	if challenge.Status != peerrpc.StatusOK {
		return errors.New(challenge.Message)
	}
	buf, err := metarpc.ReadFrame(r, nil, peerrpc.MaxHello)
	if err != nil {
		return err
	}
	proof, err := peerrpc.ParseProof(buf)
	if err != nil {
		return err
	}
	if want := peerrpc.ProofOf(token, peerrpc.CallerSide, hello, challenge.Nonce); token == [16]byte{} || !hmac.Equal(proof.Proof[:], want[:]) {
		return errors.New("the caller does not know this member's token")
	}
	nc.SetDeadline(time.Time{})

	ctx, cancel := context.WithCancel(m.ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { nc.Close() })()
	var writing sync.Mutex
	var calls sync.WaitGroup
	defer calls.Wait()
	defer cancel() // before that
	holds := make(chan struct{}, maxHolds)
	for {
		if buf, err = metarpc.ReadFrame(r, buf, peerrpc.MaxFrame); err != nil {
			if m.ctx.Err() != nil || m.n.peerGone(hello.From) {
				return nil
			}
			return err
		}
		c, err := peerrpc.ParseCall(buf, version)
		if err != nil {
			return err
		}
		full := false
		if c.Op == peerrpc.OpHold {
			select {
			case holds <- struct{}{}:
			default:
				full = true
			}
		}
		calls.Go(func() { // ends with the call, at the latest with the connection
			reply := &peerrpc.Reply{Status: peerrpc.StatusFailed, Message: "too many calls at a time"}
			if !full {
				reply = m.carryOut(ctx, c)
				if c.Op == peerrpc.OpHold {
					<-holds
				}
			}
			if !m.alive() { // what was found may no longer be so
				cancel()
				return
			}
			reply.Number = c.Number
			b, err := peerrpc.Append(nil, version, reply)
			if err != nil { // it is too large
				m.log.Error("answer to another metadata service", "error", err)
				b, _ = peerrpc.Append(nil, version, &peerrpc.Reply{Number: c.Number, Status: peerrpc.StatusFailed, Message: err.Error()})
			}
			writing.Lock()
			defer writing.Unlock()
			nc.SetWriteDeadline(time.Now().Add(m.n.cfg.Lease))
			if _, err := nc.Write(b); err != nil {
				cancel()
			}
		})
	}
}

// peerGone reports whether a member has left, or is about to.
func (n *Node) peerGone(id memberID) bool {
	m := n.member()
	if m == nil {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	other := m.view.member(id)
	return other == nil || other.Draining
}

// carryOut does what another member has asked for.
func (m *member) carryOut(ctx context.Context, c *peerrpc.Call) *peerrpc.Reply {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.Wait))
	defer cancel()
	reply := new(peerrpc.Reply)
	var err error
	svc := m.service(c.Shard)
	if c.Op != peerrpc.OpLook && svc == nil {
		m.doubt()
		return &peerrpc.Reply{Status: peerrpc.StatusNotHere, Message: "the shard is not served here"}
	}
	switch c.Op {
	case peerrpc.OpLook:
		err = m.awaitLook(ctx)
	case peerrpc.OpHold:
		var held *meta.Held
		if held, err = svc.Hold(ctx, holdOf(c.Hold)); err == nil {
			reply.State, reply.Row = uint8(held.State), held.Row
		}
	case peerrpc.OpSettle:
		err = svc.Settle(ctx, settleOf(c.Settle))
	case peerrpc.OpLockWaits:
		for _, w := range svc.LockWaits(waitOf(*c.After)) {
			reply.Waits = append(reply.Waits, wireWait(w))
		}
	}
	if err != nil {
		reply.Status, reply.Message = peerrpc.StatusFailed, err.Error()
	}
	return reply
}
