package nvmeauth

import (
	"crypto/hmac"
	"math/big"
	"slices"
)

// Controller is the controller's side of one transaction on one queue. It is not safe for concurrent use.
type Controller struct {
	chance
	cfg  Config
	next func(received []byte) (send []byte, done bool, err error) // nil: over

	// From the negotiate message on:
	tid       uint16
	hash      Hash
	group     Group
	seq       uint32
	challenge []byte
	exponent  *big.Int
}

// NewController waits for a host to begin a transaction. The error is that of [Config.Validate].
func NewController(cfg Config) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{chance: newChance(), cfg: cfg.withDefaults()}
	c.next = c.negotiated
	return c, nil
}

// Step takes what Authentication Send brought and gives what the next Authentication Receive shall fetch. It does not keep
// received. Nil stands for an Authentication Receive that came when there was nothing to fetch.
//
// done says that the host has proved itself, and the controller as well if the host asked: the queue may be used as soon as
// send, if there is any, was fetched. An error, a *[Failure] unless the transaction was over before, ends it: send, if there is
// any, tells the host, and the connection is to be closed once it was fetched.
//
// A host without a secret can make Step compute two powers in the largest group: the caller bounds how many transactions run at
// once.
func (c *Controller) Step(received []byte) (send []byte, done bool, err error) {
	if c.next == nil {
		return nil, false, errOver
	}
	return c.next(received)
}

// fail ends the transaction, and tells the host unless it was the one to say so.
func (c *Controller) fail(f *Failure) ([]byte, bool, error) {
	c.next = nil
	f.Host, f.Subsys = c.cfg.HostNQN, c.cfg.SubsysNQN
	if f.ByPeer {
		return nil, false, f
	}
	return appendFailure(nil, kindFailure1, c.tid, f.Reason), false, f
}

// due is what is wrong when b is not the message that is due. The first message names the transaction.
func (c *Controller) due(b []byte, want kind) *Failure {
	if len(b) == 0 {
		return failf(IncorrectMessage, "the host wants to receive, where it should have sent a %s message", want)
	}
	k, tid, f := parseHeader(b)
	if f != nil {
		return f
	}
	if want == kindNegotiate {
		c.tid = tid
	}
	switch {
	case k == kindFailure2 && want != kindNegotiate:
		return peerFailure(b, "the host refuses the controller")
	case k != want:
		return failf(IncorrectMessage, "the host sent a %s message, where a %s message was due", k, want)
	case tid != c.tid:
		return failf(IncorrectPayload, "the host went from transaction %d to %d", c.tid, tid)
	}
	return nil
}

func (c *Controller) negotiated(b []byte) ([]byte, bool, error) {
	if f := c.due(b, kindNegotiate); f != nil {
		return c.fail(f)
	}
	var m negotiate
	if f := m.decode(b); f != nil {
		return c.fail(f)
	}
	if m.secure != 0 {
		return c.fail(failf(ConcatMismatch, "the host asks for a secure channel made of the authentication, which is not offered"))
	}
	i := slices.IndexFunc(c.cfg.Hashes, func(h Hash) bool { return slices.Contains(m.hashes, h) })
	if i < 0 {
		return c.fail(failf(HashUnusable, "the host offers %v, the controller allows %v", m.hashes, c.cfg.Hashes))
	}
	c.hash = c.cfg.Hashes[i]
	i = slices.IndexFunc(c.cfg.Groups, func(g Group) bool { return slices.Contains(m.groups, g) })
	if i < 0 {
		return c.fail(failf(GroupUnusable, "the host offers DH groups %v, the controller allows %v", m.groups, c.cfg.Groups))
	}
	c.group = c.cfg.Groups[i]

	c.seq, c.challenge = c.sequence(), make([]byte, c.hash.size())
	c.random(c.challenge)
	r := challenge{tid: c.tid, hash: c.hash, group: c.group, seq: c.seq, challenge: c.challenge}
	c.exponent, r.public = c.group.exponential(c.random)
	c.next = c.replied
	return r.append(nil), false, nil
}

func (c *Controller) replied(b []byte) ([]byte, bool, error) {
	if f := c.due(b, kindReply); f != nil {
		return c.fail(f)
	}
	var m reply
	if f := m.decode(b); f != nil {
		return c.fail(f)
	}
	if len(m.response) != c.hash.size() {
		return c.fail(failf(IncorrectPayload, "a response of %d bytes for %s", len(m.response), c.hash))
	}
	if f := checkPublic(c.group, m.public); f != nil {
		return c.fail(f)
	}
	ks, f := c.group.session(c.exponent, m.public)
	if f != nil {
		return c.fail(f)
	}
	want := c.cfg.hostResponse(c.hash, c.challenge, ks, c.seq, c.tid)
	if !hmac.Equal(m.response, want) {
		return c.fail(failf(Failed, "the host does not have the secret that the controller has for it: compare them"))
	}
	s := success1{tid: c.tid, hashSize: c.hash.size()}
	if m.challenge == nil {
		c.next = nil
		return s.append(nil), true, nil
	}
	if c.cfg.ControllerSecret.IsZero() {
		return c.fail(failf(Failed, "the host wants a proof from the controller, which has no secret for that: configure one"))
	}
	s.response = c.cfg.controllerResponse(c.hash, m.challenge, ks, m.seq, c.tid)
	c.next = c.confirmed
	return s.append(nil), false, nil
}

func (c *Controller) confirmed(b []byte) ([]byte, bool, error) {
	if f := c.due(b, kindSuccess2); f != nil {
		return c.fail(f)
	}
	if len(b) != fixedSize {
		return c.fail(badSize(kindSuccess2, len(b)))
	}
	c.next = nil
	return nil, true, nil
}
