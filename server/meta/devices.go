package meta

import (
	"context"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
)

// tellPause is the shortest time between two rounds in which all clients are told which devices are down.
const tellPause = 500 * time.Millisecond

// watchDevices tells all clients when devices go down, or are no longer down, or have other addresses. It ends with
// s.ctx.
func (s *Service) watchDevices() {
	for epoch := uint64(0); ; {
		states, err := s.cfg.Files.DeviceStates(s.ctx, epoch)
		if err != nil {
			return
		}
		epoch = states.Epoch
		s.mu.Lock()
		s.devicesEpoch = epoch
		for _, sess := range s.sessions {
			s.tellDevices(sess)
		}
		s.mu.Unlock()
		if retry.Pause(s.ctx, tellPause) != nil {
			return
		}
	}
}

// tellDevices tells a session which devices are down, if there is news for it. It does not wait for the answer; s.mu is
// held. What there is to tell until the session has answered, it is told after that, at once.
func (s *Service) tellDevices(sess *session) {
	if sess.telling || sess.told >= s.devicesEpoch || !metarpc.BackDeviceStates.In(sess.version.Load()) {
		return
	}
	sess.telling = true
	s.tasks.Go(func() { // ends when the session knows all, or with the session
		for {
			s.mu.Lock()
			told, attached := sess.told, sess.attached
			sess.telling = told < s.devicesEpoch
			more := sess.telling
			s.mu.Unlock()
			if !more {
				return
			}
			states, err := s.cfg.Files.DeviceStates(sess.ctx, told) // there is something newer
			if err == nil {
				err = s.callBack(s.ctx, sess, metarpc.BackDeviceStates, states)
			}
			if err != nil {
				return
			}
			s.mu.Lock()
			if sess.attached == attached { // otherwise it may have forgotten them with the connection before
				sess.told = states.Epoch
			}
			s.mu.Unlock()
		}
	})
}

func (s *Service) reportDevices(_ context.Context, c *call, a *metarpc.ReportDevicesArgs) (*metarpc.Empty, error) {
	s.cfg.Files.Complain(c.sess.id, a.Devices)
	return &metarpc.Empty{}, nil
}
