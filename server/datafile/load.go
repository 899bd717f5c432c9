package datafile

import (
	"math"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

const (
	// clearly is by what factor devices must differ for it to count. What clients did in the last minute is only a hint, and if any
	// difference in space counted, all new files would go to the emptiest device.
	clearly = 2
	// busy is the load up to which a device counts as idle: one request under way at all times.
	busy = 1
	// forgetLoad is how many reports have to be missing for a client's load to be forgotten.
	forgetLoad = 8
	// maxSpan bounds the time that a report stands for. Clients report every minute, unless they could not.
	maxSpan = 5 * time.Minute
)

// clientLoad is how busy a client keeps a device.
type clientLoad struct {
	mean float64       // requests under way, smoothed over its reports
	span time.Duration // that the last report speaks of
	at   time.Time     // when that came
}

// missing is how many reports are overdue.
func (l clientLoad) missing(now time.Time) float64 {
	return max(0, float64(now.Sub(l.at))/float64(l.span)-1)
}

func (l clientLoad) faded(now time.Time) float64 { return l.mean * math.Exp2(-l.missing(now)) }

// Report takes in what a client has done at devices in a time of this length, up to now.
func (m *Manager) Report(session metarpc.SessionID, span time.Duration, devices []metarpc.DeviceStats) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range devices {
		st := &devices[i]
		d := m.find(st.Device)
		if d == nil {
			continue // removed meanwhile
		}
		// The time that all requests took, divided by the time that has passed, is how many there were at a time (Little's law).
		mean := (float64(st.Reads.Time) + float64(st.Writes.Time)) / float64(span)
		if st.Reads.Ops == 0 && st.Writes.Ops == 0 {
			mean = float64(st.Outstanding) // it does not answer
		}
		if old, ok := d.loads[session]; ok {
			mean = (mean + old.faded(now)) / 2
		}
		d.loads[session] = clientLoad{mean, min(span, maxSpan), now}
	}
}

// Forget forgets what a client has reported, whose session has ended.
func (m *Manager) Forget(session metarpc.SessionID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		delete(d.loads, session)
		delete(d.complaints, session)
	}
}

// addLoads adds the loads of all clients up; m.mu is held. It is done now and then, since there may be many clients.
func (d *device) addLoads(now time.Time) {
	d.load = 0
	for session, l := range d.loads {
		if l.missing(now) > forgetLoad {
			delete(d.loads, session)
			continue
		}
		d.load += l.faded(now)
	}
}

// byDrawbacks divides devices by how much speaks against new data files there, compared with the others: nothing, one thing, or
// both; m.mu is held.
func byDrawbacks(devices []*device) (alike [3][]*device) {
	least, most := math.Inf(1), 0.0
	for _, d := range devices {
		least = min(least, d.load)
		most = max(most, d.freeShare())
	}
	for _, d := range devices {
		against := 0
		if d.load > max(busy, clearly*least) {
			against++
		}
		if d.stat.TotalBytes > 0 && clearly*d.freeShare() < most {
			against++
		}
		alike[against] = append(alike[against], d)
	}
	return alike
}

// freeShare is which part of the device's space is free, 0 if it does not tell; m.mu is held.
func (d *device) freeShare() float64 {
	return float64(d.stat.AvailBytes) / max(1, float64(d.stat.TotalBytes))
}
