package dataplane

import (
	"context"
	"errors"
	"time"

	"github.com/weftfs/weft/layout"
)

// A device becomes late when it leaves a request unanswered for too long that another copy has answered, or when it
// refuses a connection. It stays late until it answers anything. This is one verdict for all requests: writes do not
// wait for a late device, and reads avoid it. A late device always has a question of ours to answer, so the verdict
// ends once the device is back, whatever else it is asked.
//
// A device is stuck when it answers reads, but not WRITEs, as its file system is frozen, for example; or when it
// takes WRITEs, but does not answer COMMITs, as its disk hangs. Writes and COMMITs treat a stuck device as a late
// one, but one WRITE in each Config.MirrorTimeout is sent to it, a stable one. It is stuck until it answers what it
// was found stuck by: a WRITE, or a COMMIT or stable WRITE; in the first case also until all the WRITEs that it has
// left unanswered for too long have ended.
//
// Others may have found out before any request of ours (SetDown). That is a hint: the device's own answer is worth
// more if it is newer. No WRITE is sent to see whether a device is stuck as long as others say so, since they look
// themselves.

// A busy disk answers late as well. A copy is waited for longer than Config.MirrorTimeout if its device has lately
// taken long for changes that it answered. Changes that it had when it was late for a while do not count.

const (
	// slowHalf is the time in which the slowest change of a device counts half.
	slowHalf = int64(10 * time.Second)
	// slowMost is the longest time that counts as slow, in units of Config.MirrorTimeout. More is a failure.
	slowMost = 5
)

// late reports whether the device is late.
func (d *device) late() bool {
	return d.foundSilent() || d.believes(d.toldSilent.Load(), d.heard.Load())
}

// lateToWrite reports whether the device is late or stuck.
func (d *device) lateToWrite() bool { return d.lateToSync() || d.foundStuck() }

// lateToSync reports whether the device is late, or stuck for COMMITs, too.
func (d *device) lateToSync() bool { return d.late() || d.unsynced() || d.toldOfStuck() }

// foundSilent and foundStuck are late and stuck as requests of the plane have found.
func (d *device) foundSilent() bool { return d.lateAt.Load() > d.heard.Load() }
func (d *device) foundStuck() bool {
	return d.unsynced() || d.stuck.Load() > 0 && d.stuckAt.Load() > d.heardWrite.Load()
}

// unsynced reports whether the device was found stuck by a COMMIT.
func (d *device) unsynced() bool { return d.unsyncedAt.Load() > d.heardSync.Load() }

// toldOfStuck reports whether the device is stuck as others have found.
func (d *device) toldOfStuck() bool {
	return d.believes(d.toldStuck.Load(), max(d.heardWrite.Load(), d.heardSync.Load()))
}

// believes reports whether what was told of the device is newer than what it has answered. That it stops, as it has
// announced itself, counts more.
func (d *device) believes(told, heard int64) bool {
	if told == 0 || told <= heard {
		return false
	}
	c := d.conn.Load()
	return c == nil || !c.stopping()
}

// DownDevice is a device that somebody else has found down.
type DownDevice struct {
	Device layout.DeviceID
	Silent bool          // it answers nothing; otherwise it takes no writes
	For    time.Duration // since when that is known
}

// SetDown tells which devices others have found down; all others are not, as far as they know. Such a device is late,
// or stuck, until it is told otherwise, or has answered the plane since it was found down. A late one is asked, so
// that does not take long if it can be reached. Calls come one after the other.
func (p *Plane) SetDown(down []DownDevice) {
	at := p.watch.now()
	told := map[layout.DeviceID]DownDevice{}
	for _, is := range down {
		told[is.Device] = is
		p.device(is.Device)
	}
	hurry := false
	for id, d := range *p.devices.Load() {
		before := d.lateToWrite()
		var silent, stuck int64
		if is, ok := told[id]; ok && is.Silent {
			silent = max(1, at-int64(is.For))
		} else if ok {
			stuck = max(1, at-int64(is.For))
		}
		d.toldSilent.Store(silent)
		d.toldStuck.Store(stuck)
		if d.late() {
			d.askKnown()
		}
		hurry = hurry || !before && d.lateToWrite()
	}
	if hurry {
		p.watch.hurry()
	}
	p.Flush()
}

// FoundDown returns the devices that are late or stuck as requests of the plane have found.
func (p *Plane) FoundDown() (ids []layout.DeviceID) {
	for id, d := range *p.devices.Load() {
		if d.foundSilent() || d.foundStuck() {
			ids = append(ids, id)
		}
	}
	return ids
}

// found calls Config.OnDown for a device that was found late or stuck, and was not before.
func (d *device) found() {
	if f := d.plane.cfg.OnDown; f != nil {
		f()
	}
}

// foundUnsynced makes the device stuck, as it does not answer a COMMIT, unless it has answered one after since, or has
// announced that it stops.
func (d *device) foundUnsynced(since int64) {
	if d.heardSync.Load() > since || d.conn.Load().stopping() {
		return
	}
	known := d.foundStuck()
	d.unsyncedAt.Store(d.plane.watch.now())
	if !known {
		d.found()
	}
}

// tries reports whether a WRITE is to be sent to the device though it is stuck, to see whether it answers.
func (d *device) tries() bool {
	at, last := d.plane.watch.now(), d.triedAt.Load()
	return !d.late() && !d.toldOfStuck() && (last == 0 || at-last >= int64(d.plane.cfg.MirrorTimeout)) && d.triedAt.CompareAndSwap(last, at)
}

// patience is for how long, in nanoseconds, the device may leave a change unanswered that another copy has answered.
func (d *device) patience(at int64) int64 {
	return int64(d.plane.cfg.MirrorTimeout) + 2*d.slowestChange(at)
}

// slowestChange is how long the slowest change took that the device has answered lately.
func (d *device) slowestChange(at int64) int64 {
	return d.slow.Load() >> min((at-d.slowAt.Load())/slowHalf, 62)
}

// hear records that a request has ended, so long after its start.
func (d *device) hear(op *layout.Op, at, took int64) {
	if op.Err != nil {
		var over *layout.TimeoutError
		if errors.Is(op.Err, context.Canceled) || errors.As(op.Err, &over) {
			return // not an answer
		}
	}
	if d.foundSilent() && at-d.lateAt.Load() > d.plane.lookAfter() {
		// Its disk was not slow: the server was away.
		d.backAt.Store(at)
		d.heardSync.Store(at)
	}
	if at > d.heard.Load() {
		d.heard.Store(at)
	}
	if op.Kind == layout.OpRead {
		return
	}
	if op.Kind == layout.OpWrite && at > d.heardWrite.Load() {
		d.heardWrite.Store(at)
	}
	if (op.Kind == layout.OpCommit || op.Stable != layout.Unstable) && at > d.heardSync.Load() {
		d.heardSync.Store(at)
	}
	if at-took < d.backAt.Load() {
		return
	}
	if most := int64(d.plane.cfg.MirrorTimeout); took > most/8 && took <= slowMost*most && took > d.slowestChange(at) {
		d.slow.Store(took)
		d.slowAt.Store(at)
	}
}

// foundLate makes the device late, unless it has answered anything after since, or has announced that it stops. It
// asks the device for a byte of df at off. q.mu may be held. The caller flushes later.
func (d *device) foundLate(df *layout.DataFile, off, since int64) {
	if d.heard.Load() > since || d.conn.Load().stopping() {
		return
	}
	first, known := !d.late(), d.foundSilent()
	if !known {
		d.lateAt.Store(d.plane.watch.now())
	}
	d.ask(df, off)
	if first {
		d.plane.watch.hurry()
	}
	if !known {
		d.found()
	}
}

// askKnown asks for a data file that the device was asked for before, if there is one.
func (d *device) askKnown() {
	if df := d.known.Load(); df != nil {
		d.ask(df, 0)
	}
}

// ask sends the question that a late device has to answer, unless one is under way. It does not count as outstanding,
// since nobody waits for it.
func (d *device) ask(df *layout.DataFile, off int64) {
	if !d.asking.CompareAndSwap(false, true) {
		return
	}
	op := &layout.Op{Kind: layout.OpRead, File: df, Off: off, Data: make([]byte, 1)}
	op.Done = func(op *layout.Op) {
		d.hear(op, d.plane.watch.now(), 0)
		d.asking.Store(false)
		if d.late() { // a soft target has given up, or the device was found late meanwhile
			go func() { // ends at once; not here, with the target's locks
				d.ask(df, off)
				d.plane.Flush()
			}()
		}
	}
	d.conn.Load().start(op)
}

// refuses reports whether the device takes no connections, without having announced that.
func (c *conn) refuses() bool { return c.refused != nil && c.refused() && !c.stopping() }
