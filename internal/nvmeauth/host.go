package nvmeauth

import (
	"crypto/hmac"
	"slices"
)

// Host is the host's side of one transaction on one queue. It is not safe for concurrent use.
type Host struct {
	chance
	cfg  Config
	tid  uint16
	next func(received []byte) (send []byte, done bool, err error) // nil: over

	// From the challenge on:
	hash     Hash
	expected []byte // the controller's response, nil if none is wanted
}

// NewHost begins a transaction. transaction is T_ID: the caller counts it up, so that transactions of one association differ.
// The error is that of [Config.Validate].
func NewHost(cfg Config, transaction uint16) (*Host, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	h := &Host{chance: newChance(), cfg: cfg.withDefaults(), tid: transaction}
	h.next = h.start
	return h, nil
}

// Step takes what Authentication Receive brought, nothing (nil) the first time, and gives what Authentication Send shall carry.
// It does not keep received.
//
// After each send that is not the last one the caller fetches the controller's message, into a buffer of [MaxMessage] bytes,
// and calls Step again. done says that both sides are satisfied: the queue may be used once send, if there is any, is at the
// controller. An error, a *[Failure] unless the transaction was over before, ends it: send, if there is any, tells the
// controller, and the connection is to be closed.
func (h *Host) Step(received []byte) (send []byte, done bool, err error) {
	if h.next == nil {
		return nil, false, errOver
	}
	return h.next(received)
}

// fail ends the transaction, and tells the controller unless it was the one to say so.
func (h *Host) fail(f *Failure) ([]byte, bool, error) {
	h.next = nil
	f.Host, f.Subsys = h.cfg.HostNQN, h.cfg.SubsysNQN
	if f.ByPeer {
		return nil, false, f
	}
	return appendFailure(nil, kindFailure2, h.tid, f.Reason), false, f
}

func (h *Host) start([]byte) ([]byte, bool, error) {
	h.next = h.challenged
	return (&negotiate{tid: h.tid, hashes: h.cfg.Hashes, groups: h.cfg.Groups}).append(nil), false, nil
}

// due is what is wrong when b is not the message that is due.
func (h *Host) due(b []byte, want kind) *Failure {
	k, tid, f := parseHeader(b)
	switch {
	case f != nil:
		return f
	case k == kindFailure1:
		return peerFailure(b, "the controller refuses the host")
	case k != want:
		return failf(IncorrectMessage, "the controller sent a %s message, where a %s message was due", k, want)
	case tid != h.tid:
		return failf(IncorrectPayload, "the controller answers transaction %d, ours is %d", tid, h.tid)
	}
	return nil
}

func (h *Host) challenged(b []byte) ([]byte, bool, error) {
	if f := h.due(b, kindChallenge); f != nil {
		return h.fail(f)
	}
	var m challenge
	if f := m.decode(b); f != nil {
		return h.fail(f)
	}
	// Linux takes the group it is configured for, whether offered or not.
	if !slices.Contains(h.cfg.Hashes, m.hash) {
		return h.fail(failf(HashUnusable, "the controller chose %s, the host allows %v", m.hash, h.cfg.Hashes))
	}
	if !slices.Contains(h.cfg.Groups, m.group) {
		return h.fail(failf(GroupUnusable, "the controller chose DH group %s, the host allows %v", m.group, h.cfg.Groups))
	}
	x, public := m.group.exponential(h.random)
	ks, f := m.group.session(x, m.public)
	if f != nil {
		return h.fail(f)
	}
	h.hash = m.hash
	// The sequence number is there also without a challenge: 0 is reserved for secure channels (Linux commit 6f66d046eade).
	r := reply{tid: h.tid, seq: h.sequence(), public: public}
	r.response = h.cfg.hostResponse(m.hash, m.challenge, ks, m.seq, h.tid)
	if !h.cfg.ControllerSecret.IsZero() {
		r.challenge = make([]byte, m.hash.size())
		h.random(r.challenge)
		h.expected = h.cfg.controllerResponse(m.hash, r.challenge, ks, r.seq, h.tid)
	}
	h.next = h.succeeded
	return r.append(nil), false, nil
}

func (h *Host) succeeded(b []byte) ([]byte, bool, error) {
	if f := h.due(b, kindSuccess1); f != nil {
		return h.fail(f)
	}
	var m success1
	if f := m.decode(b); f != nil {
		return h.fail(f)
	}
	switch {
	case m.hashSize != h.hash.size():
		return h.fail(failf(IncorrectPayload, "a success1 message for a hash of %d bytes, after one of %d", m.hashSize, h.hash.size()))
	case (m.response == nil) != (h.expected == nil):
		// Linux lets a controller pass that leaves the response out. A host that was told the controller's secret wants it
		// proved.
		return h.fail(failf(IncorrectPayload, "proof of the controller: sent %t, asked for %t", m.response != nil, h.expected != nil))
	case h.expected == nil:
		h.next = nil
		return nil, true, nil
	case !hmac.Equal(m.response, h.expected):
		return h.fail(failf(Failed, "the controller does not have the controller's secret that the host has: compare them"))
	}
	h.next = nil
	return appendSuccess2(nil, h.tid), true, nil
}
