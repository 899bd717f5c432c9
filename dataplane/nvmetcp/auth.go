package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/weftfs/weft/internal/nvmeauth"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// authenticate proves to the controller, on a queue that is connected, that this host is who it says, and has the controller do the
// same if it has a secret for that.
func (a *association) authenticate(ctx context.Context, q *queue) error {
	cfg := &a.c.cfg
	if cfg.Secret.IsZero() {
		return unusablef("the subsystem wants authentication: give this host's secret for it")
	}
	host, err := nvmeauth.NewHost(nvmeauth.Config{
		HostNQN: cfg.HostNQN, SubsysNQN: cfg.SubsysNQN, HostSecret: cfg.Secret, ControllerSecret: cfg.CtrlSecret,
	}, uint16(a.transactions.Add(1)))
	if err != nil {
		return &unusable{err}
	}
	var received []byte
	for {
		send, done, failed := host.Step(received)
		if len(send) > 0 {
			sqe := wire.Auth{Length: uint32(len(send))}.Command(true)
			if _, err := a.call(ctx, q, &sqe, send, cfg.AdminTimeout); err != nil && failed == nil {
				return hungUp(err)
			}
		}
		switch {
		case failed != nil:
			return &unusable{failed}
		case done:
			return nil
		}
		received = make([]byte, nvmeauth.MaxMessage)
		sqe := wire.Auth{Receive: true, Length: nvmeauth.MaxMessage}.Command(false)
		if _, err := a.call(ctx, q, &sqe, received, cfg.AdminTimeout); err != nil {
			return hungUp(err)
		}
	}
}

// hungUp adds to the error of a connection that was closed what it may mean: the Linux target closes it when a response is wrong,
// sometimes before it has told the host.
func hungUp(err error) error {
	if errors.Is(err, errHungUp) || errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("%w (if that happens again the controller refuses the host: compare the secrets on both sides)", err)
	}
	return err
}
