package datafile

import (
	"context"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// complaint is a client's report that a device does not answer it.
type complaint struct {
	began time.Time // when it was made first
	at    time.Time // when it was made last
}

// DeviceStates returns which devices are down, as soon as that is news for somebody who was told up to an epoch, or any
// has other addresses since. As long as none was down since the start, or has changed its addresses, there is no news.
func (m *Manager) DeviceStates(ctx context.Context, epoch uint64) (*metarpc.DeviceStatesArgs, error) {
	for {
		m.mu.Lock()
		states, news := m.states(), m.news
		m.mu.Unlock()
		if states.Epoch > epoch {
			return states, nil
		}
		if err := m.wait(ctx, news); err != nil {
			return nil, err
		}
	}
}

// states is what clients are told; m.mu is held.
func (m *Manager) states() *metarpc.DeviceStatesArgs {
	states := &metarpc.DeviceStatesArgs{Prober: m.prober, Epoch: m.epoch}
	for _, d := range m.devices {
		if d.condition == down && len(states.Down) < metarpc.MaxBatch {
			states.Down = append(states.Down, metarpc.DownDevice{Device: d.id, Silent: d.mute, For: int64(time.Since(d.fell))})
		}
	}
	return states
}

// changeStates makes news of what clients are told; m.mu is held.
func (m *Manager) changeStates() {
	m.epoch++
	close(m.news)
	m.news = make(chan struct{})
}

// Complain takes in which devices do not answer a client, all of them. A device of which that is new is looked at at
// once; nothing else is believed.
func (m *Manager) Complain(session metarpc.SessionID, devices []layout.DeviceID) {
	silent := make(map[layout.DeviceID]bool, len(devices))
	for _, id := range devices {
		silent[id] = true
	}
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		if !silent[d.id] {
			delete(d.complaints, session)
			continue
		}
		c, ok := d.complaints[session]
		if !ok || c.over(now) {
			c.began = now
			d.suspect(now)
		}
		c.at = now
		d.complaints[session] = c
	}
}

func (c complaint) over(now time.Time) bool { return now.Sub(c.at) >= metarpc.ReportLifetime }

// suspect has the device probed, and a pulse sent, but not more often than devices are probed anyway; m.mu is held.
func (d *device) suspect(now time.Time) {
	if now.Sub(d.suspected) < probePeriod {
		return
	}
	d.suspected = now
	if d.pulse.failed == 0 { // those that fail are to be few
		d.pulse.next = time.Time{}
	}
	kick(d.recheck)
}

// countComplaints is how many clients the device does not answer though it has answered a pulse that was sent after
// they first said so, and is up; m.mu is held.
func (d *device) countComplaints(now time.Time) (n int) {
	for session, c := range d.complaints {
		switch {
		case c.over(now):
			delete(d.complaints, session)
		case d.condition == up && d.pulse.worked.After(c.began):
			n++
		}
	}
	return n
}

// noteComplaints logs when there begin to be complaints that the service cannot confirm, and when they end; m.mu is
// held.
func (d *device) noteComplaints(now time.Time) {
	n := d.countComplaints(now)
	if (n > 0) == d.partial {
		return
	}
	d.partial = n > 0
	log := d.m.log.With("device", d.id, "url", placeOf(&d.row).String())
	if d.partial {
		log.Warn("data server does not answer all clients, though it can be reached from here", "clients", n)
	} else {
		log.Info("no client complains any more of a data server that can be reached from here")
	}
}
