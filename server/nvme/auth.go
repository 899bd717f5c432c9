package nvme

import (
	"errors"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// authentication is that of a host on one queue.
type authentication struct {
	cfg    nvmeauth.Config
	peer   *nvmeauth.Controller
	next   []byte // what the host has to fetch
	proved bool   // at least once: it may do so again
	err    error  // it failed
}

// mustAuthenticate is whether the host has to prove itself before anything else.
func (c *conn) mustAuthenticate() bool { return c.auth != nil && !c.auth.proved }

// expectProof makes a host that has a secret prove that it knows it. Target.mu is held.
func (c *conn) expectProof(sub *subsystem, host string) error {
	c.auth = nil
	h := sub.hosts[host]
	if h.Secret.IsZero() {
		return nil
	}
	a := &authentication{cfg: h.config(sub.NQN)}
	var err error
	if a.peer, err = nvmeauth.NewController(a.cfg); err == nil {
		c.auth = a
	}
	return err
}

func (h *Host) config(nqn string) nvmeauth.Config {
	return nvmeauth.Config{HostNQN: h.NQN, SubsysNQN: nqn, HostSecret: h.Secret, ControllerSecret: h.ControllerSecret}
}

// authenticate does Authentication Send and Receive. When it has failed and the host has been told the connection ends.
func (c *conn) authenticate(r *request, data []byte) wire.Status {
	a := c.auth
	var args wire.Auth
	if a == nil {
		return wire.StatusInvalidOpcode
	}
	if status := args.Decode(&r.cmd); status != wire.StatusSuccess {
		return status
	}
	if !args.Receive {
		if len(data) != int(args.Length) || a.err != nil || a.next != nil {
			return wire.StatusInvalidField
		}
		if a.peer == nil { // proves itself again
			var err error
			if a.peer, err = nvmeauth.NewController(a.cfg); err != nil {
				return wire.StatusInternal
			}
		}
		c.step(data)
		return wire.StatusSuccess
	}
	if a.next == nil && a.peer != nil {
		c.step(nil)
	}
	if int(args.Length) < len(a.next) || args.Length > adminCapsule || len(a.next) == 0 {
		return wire.StatusInvalidField
	}
	r.data = make([]byte, args.Length)
	copy(r.data, a.next)
	a.next = nil
	if a.err != nil {
		c.ending = a.err
	} else if a.peer == nil {
		c.authenticated()
	}
	return wire.StatusSuccess
}

// step gives the host's message to the transaction. As a step may take long, there are not many at once.
func (c *conn) step(received []byte) {
	a := c.auth
	c.t.proofs <- struct{}{}
	send, done, err := a.peer.Step(received)
	<-c.t.proofs
	a.next = send
	switch {
	case err != nil:
		a.peer, a.err = nil, err
		if len(send) == 0 {
			c.ending = err
		}
	case done:
		a.peer = nil
		if len(send) == 0 {
			c.authenticated()
		}
	}
}

func (c *conn) authenticated() {
	c.auth.proved = true
	c.limitReads(time.Time{})
}

// refused is whether a connection ends because its host has not proved itself.
func refused(err error) bool { return errors.As(err, new(*nvmeauth.Failure)) }
