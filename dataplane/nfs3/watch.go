package nfs3

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxStall bounds how long a connection may be silent before it is asked whether it lives.
	maxStall = 5 * time.Second
	// cutTime is for how long the server's host may acknowledge nothing of what is sent again and again, at most
	// Config.Timeout.
	cutTime = 5 * time.Second
	// cutResends is how often the kernel has sent it again by then, each time after twice the time.
	cutResends = 3
	// maxLook bounds the time between two looks at a connection.
	maxLook = time.Second
)

// watch looks at a connection several times within Config.Timeout. Guarded by Target.mu.
//
// A connection is ended after cutTime if the server's host acknowledges nothing any more, as when a firewall or NAT on
// the way has forgotten the connection: the server itself may well take longer. TCP_USER_TIMEOUT would do that in the
// kernel, but it also ends connections on which the server's host does acknowledge everything, and only has no room for
// more, because the server is stopped or overloaded.
//
// A connection on which nothing was heard for Config.Timeout, while something is outstanding, is ended. One of several
// is ended earlier. After a shorter silence a NULL call is sent on it. If the other connections have no requests, one
// of them gets a NULL call, too. If another connection is then answered and this one is not for as long again, the
// connection stands still, and not the server. A slow request alone, such as a COMMIT, does not end its connection so.
// A server that carries out one call after the other would suffer from it. So each such end makes the next connection
// of the slot more patient.
type watch struct {
	timer  *time.Timer
	used   time.Time // when something was outstanding last
	probed time.Time // when it was asked; zero: not since something was heard
	silent time.Time // since when it was silent when it was asked
	alive  time.Time // when its answer came; what was heard later is a reply to something else
}

// start begins to look at c. What is wrong ends c by [conn.fail], which stops the watch.
func (w *watch) start(c *conn) {
	w.used = time.Now()
	w.timer = time.AfterFunc(c.lookAfter(), c.look)
}

func (w *watch) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
}

// answered notes the answer to the question whether the connection lives, heard at the given time.
func (w *watch) answered(heard time.Time) { w.alive = heard }

// lookAfter is the time between two looks.
func (c *conn) lookAfter() time.Duration { return min(c.t.cfg.Timeout/8, maxLook) }

// patience is how long the connection may be silent before it is asked, and then without an answer.
func (c *conn) patience() time.Duration {
	return min(c.t.cfg.Timeout/8, maxStall) << min(c.slot.stalls, 3)
}

// look runs when the timer goes off.
func (c *conn) look() {
	t := c.t
	t.mu.Lock()
	asked := !c.dead && c.inspect()
	t.mu.Unlock()
	if asked {
		t.Flush()
	}
}

// inspect ends the connection if it stands still or is not used any more, and winds the timer again. It returns true if
// it has queued the question.
func (c *conn) inspect() (asked bool) {
	t := c.t
	now, timeout, w := time.Now(), t.cfg.Timeout, &c.watch
	if c.count == 0 {
		w.probed = time.Time{}
		if now.Sub(w.used) >= t.idleAfter {
			c.fail(errIdle)
			return false
		}
		w.timer.Reset(c.lookAfter())
		return
	}
	w.used = now
	silent := c.since
	if heard := c.in.lastHeard(); heard.After(silent) {
		silent = heard
	}
	switch {
	case w.probed.IsZero():
	case silent.After(w.probed) && !silent.After(w.alive):
		silent = w.silent // nothing but the answer to our question
	case silent.After(w.probed):
		w.probed = time.Time{}
	}
	quiet := now.Sub(silent)
	if begun, ok := c.in.unfinished(); ok && now.Sub(begun) >= 2*timeout {
		c.fail(fmt.Errorf("%w: one began %v ago and does not end", errSilent, now.Sub(begun).Round(time.Millisecond)))
		return false
	}
	switch {
	case quiet >= min(timeout, cutTime) && c.isCut():
		c.fail(fmt.Errorf("%w for %v with %d calls outstanding", errCut, quiet.Round(time.Millisecond), c.count))
		return false
	case quiet >= timeout:
		c.fail(fmt.Errorf("%w for %v with %d calls outstanding", errSilent, timeout, c.count))
		return false
	case w.probed.IsZero():
		if quiet >= c.patience() {
			w.probed, w.silent = now, silent
			c.probe()
			t.probeIdle(c)
			asked = true
		}
	case w.alive.Before(w.probed) && now.Sub(w.probed) >= c.patience() && t.othersAnswer(c, w.probed):
		c.slot.stalls++
		c.fail(fmt.Errorf("%w for %v with %d calls outstanding", errStalled, quiet.Round(time.Millisecond), c.count))
		return false
	}
	w.timer.Reset(min(c.lookAfter(), max(timeout-quiet, time.Millisecond)))
	return asked
}

// isCut reports whether the server's host has acknowledged nothing for cutTime, however often our kernel has sent it
// again.
func (c *conn) isCut() bool {
	var info *unix.TCPInfo
	var err error
	ctlErr := c.in.raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO) })
	if ctlErr != nil || err != nil {
		return false
	}
	unheard := time.Duration(info.Last_ack_recv) * time.Millisecond
	return unheard >= min(c.t.cfg.Timeout, cutTime) && max(info.Retransmits, info.Probes) >= cutResends
}

// probeIdle sends a NULL call on a connection other than c if none of them has requests. Without that
// [Target.othersAnswer] would have no answers to go by.
func (t *Target) probeIdle(c *conn) {
	var idle *conn
	for _, s := range t.slots {
		o := s.conn
		if o == nil || o == c || o.dead {
			continue
		}
		if o.count > 0 {
			return
		}
		idle = o
	}
	if idle != nil {
		idle.probe()
	}
}

// othersAnswer tells whether another connection than c has heard something since then.
func (t *Target) othersAnswer(c *conn, then time.Time) bool {
	for _, s := range t.slots {
		if o := s.conn; o != nil && o != c && !o.dead && o.in.lastHeard().After(then) {
			return true
		}
	}
	return false
}
