package dataplane

import (
	"context"
	"errors"
	"fmt"
	"math"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/rangemap"
	"github.com/weftfs/weft/layout"
)

const (
	// commitRounds bounds how often one settle sends data again because the server has lost it.
	commitRounds = 8
	// syncRounds is the first round in which data is sent again as DATA_SYNC, which needs no verifier to believe.
	syncRounds = 3
	// resendWidth bounds the extents of one data file that are sent again at the same time.
	resendWidth = 16
	// releaseBatch is how many extents are looked at under one hold of dataFile.mu: giving a full pool back takes
	// milliseconds, and completions of other writes wait for the lock.
	releaseBatch = 1024
)

// Commit makes stable, at every mirror, all writes that were acknowledged before it was called. Writes go on meanwhile.
//
// Data that a server has lost is sent again. What fails stays retained, so an error is not the end of the data: the next
// Commit tries again and, until that works or Drop ends it, returns the error again. If ctx ends first, requests already
// sent go on; no memory of the caller is involved. The caller must not hold a LockRange on the file.
func (f *File) Commit(ctx context.Context) error {
	if f.unstable.Load() == 0 {
		return nil
	}
	if err := f.plane.patiently(ctx, f.commit); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

func (f *File) commit(ctx context.Context) error {
	slowest, _ := ctx.Value(SlowestKey{}).(*Slowest)
	return errors.Join(f.together(f.dataFiles(), layout.OpCommit, func(d *dataFile) error {
		began := time.Now()
		err := f.settle(ctx, d)
		if slowest != nil {
			slowest.add(d.use.Load().Device, time.Since(began))
		}
		return err
	})...)
}

// together runs do for each data file at the same time and returns the errors. A copy that was given up does not count.
// kind is what do sends: COMMITs, or what changes the data files.
//
// Once a copy has ended without an error, or with ErrUnsupported, the others of its column are waited for as long as
// device.patience says, not counting the time in which their data servers have announced that they stop; they go on by
// themselves. A copy on a late device is not waited for once a good copy has ended so whose device was not late.
func (f *File) together(files []*dataFile, kind layout.OpKind, do func(*dataFile) error) []error {
	errs := make([]error, len(files))
	if len(files) == 1 {
		errs[0] = copyError(files[0], do(files[0]))
		return errs
	}
	type result struct {
		i   int
		err error
	}
	results := make(chan result, len(files))
	for i, d := range files {
		// This goroutine owns one data file's calls and ends with them.
		go func() { results <- result{i, copyError(d, do(d))} }()
	}
	p := f.plane
	dev := func(d *dataFile) *device { return p.device(d.use.Load().Device) }
	timer := time.NewTicker(time.Duration(p.lookAfter()))
	defer timer.Stop()
	good := map[int32]bool{}   // columns of which a copy has ended well, or cannot do it
	inTime := map[int32]bool{} // those of which that was a good copy whose device was not late
	ended, late := make([]bool, len(files)), make([]bool, len(files))
	// When it was first seen that a file's column is good, or last that its server stops.
	since := make([]int64, len(files))
	for i, d := range files {
		late[i] = dev(d).lateToWrite()
	}
	ticked := false
	for n := 0; n < len(files); {
		select {
		case r := <-results:
			if ended[r.i] {
				continue
			}
			n++
			errs[r.i], ended[r.i] = r.err, true
			if d := files[r.i]; (r.err == nil || isUnsupported(r.err)) && !d.forsaken.Load() {
				column := d.column.Load()
				good[column] = true
				inTime[column] = inTime[column] || !late[r.i] && d.use.Load().State == layout.CopyGood
			}
		case <-timer.C:
			ticked = true
		}
		for i, d := range files {
			column := d.column.Load()
			if ended[i] || !d.mirrored.Load() || !good[column] {
				continue
			}
			use, at := d.use.Load(), p.watch.now()
			c := dev(d).conn.Load()
			stops := c != nil && c.stopping()
			if since[i] == 0 || stops {
				since[i] = at
			}
			if stops {
				continue
			}
			overdue := at-since[i] >= dev(d).patience(at)
			switch {
			case c == nil:
			case overdue:
				c.dev.foundLate(use, 0, since[i])
			case inTime[column] && c.refuses():
				c.dev.foundLate(use, 0, at)
			}
			if overdue || inTime[column] && (dev(d).lateToSync() || ticked && dev(d).lateToWrite()) {
				if c != nil && kind == layout.OpCommit && (overdue || !c.dev.late() && !c.dev.toldOfStuck()) {
					c.dev.foundUnsynced(since[i])
				}
				errs[i] = copyError(d, &Error{Op: layout.OpCommit, Device: use.Device, File: use, Err: ErrStuck})
				ended[i] = true
				n++
			}
		}
		p.Flush() // what late devices were asked
	}
	return errs
}

// copyError is what an error of one data file's calls counts for.
func copyError(d *dataFile, err error) error {
	if d.forsaken.Load() {
		return nil
	}
	var e *Error
	if d.mirrored.Load() && errors.As(err, &e) {
		e.Mirrored = true
	}
	return err
}

// settle commits what is retained of one data file at the time of the call.
func (f *File) settle(ctx context.Context, d *dataFile) error {
	d.mu.Lock()
	goal := d.clock
	d.mu.Unlock()
	if !d.holds(goal) {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	// One at a time. Those who wait mostly find their data committed by the one before them, since its COMMIT is sent
	// after they came: many callers of fsync share few COMMITs.
	select {
	case d.turn <- struct{}{}:
		defer func() { <-d.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for round := 0; d.holds(goal); round++ {
		if round == commitRounds {
			return &Error{Op: layout.OpCommit, Device: d.use.Load().Device, Err: ErrVerifier}
		}
		if err := backOff(ctx, round); err != nil {
			return err
		}
		stable := layout.Unstable
		if round >= syncRounds {
			stable = layout.DataSync
		}
		if err := f.resendLost(ctx, d, stable); err != nil {
			return err
		}
		if err := f.commitOnce(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// backOff waits before a round: not before the first, nor before the one that follows a restart.
func backOff(ctx context.Context, round int) error {
	if round < 2 {
		return ctx.Err()
	}
	timer := time.NewTimer(min(50*time.Millisecond<<round, 2*time.Second))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commitOnce sends one COMMIT and notes what it says about everything acknowledged before.
func (f *File) commitOnce(ctx context.Context, d *dataFile) error {
	op := &layout.Op{Kind: layout.OpCommit, File: d.use.Load()}
	c, err := f.plane.connectWait(ctx, op.File.Device)
	if err != nil {
		return err
	}
	d.mu.Lock()
	upto, count := d.clock, d.retained.Len()
	d.mu.Unlock()
	if count == 0 {
		return nil
	}
	if err := c.do(ctx, op); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if late := (*layout.TimeoutError)(nil); errors.As(err, &late) {
			return opError(op, err) // no answer, so nothing is known to be lost
		}
		// The server may have thrown the data away with the error, and need not say so twice (nfs3: RFC 1813 section
		// 3.3.21): only what is sent again can be believed.
		op.Err = err
		d.committed(upto, op)
		return opError(op, err)
	}
	if d.committed(upto, op) > 0 {
		f.plane.noteLoss(c.dev, op.Verifier)
	}
	return nil
}

// noteLoss logs that unstable data may be lost, once for each restart of a server or loss of a way to a namespace.
func (p *Plane) noteLoss(d *device, verf layout.Verifier) {
	d.mu.Lock()
	known := d.lossNoted == verf
	d.lossNoted = verf
	d.mu.Unlock()
	if !known {
		p.cfg.Log.Warn("data server restarted, or the way to a namespace was lost: data that was not stable is sent again", "device", d.id)
	}
}

// holds reports whether anything is retained that was acknowledged at or before goal.
func (d *dataFile) holds(goal uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	found := false
	d.retained.Overlapping(0, math.MaxInt64, func(e *rangemap.Entry[retained]) bool {
		found = e.Val.acked <= goal
		return !found
	})
	return found
}

// committed goes through what was acknowledged at or before upto, when the COMMIT was sent: data with the verifier of its
// reply is stable and released; other data, all of it if it has failed, is lost. It returns how many extents are lost.
func (d *dataFile) committed(upto uint64, commit *layout.Op) (lost int) {
	for next := int64(0); next < math.MaxInt64; {
		d.mu.Lock()
		if commit.Err == nil {
			d.verifier = commit.Verifier
		}
		end, n := int64(math.MaxInt64), 0
		d.retained.Overlapping(next, math.MaxInt64, func(e *rangemap.Entry[retained]) bool {
			if n++; n > releaseBatch {
				end = e.Off
				return false
			}
			return true
		})
		before := d.retained.Len()
		d.retained.DeleteFunc(next, end, func(e *rangemap.Entry[retained]) bool {
			r := &e.Val
			switch {
			case r.sent > upto:
				return false
			case r.buf == nil && commit.Err != nil && !isWriteBack(commit.Err):
				return false
			case commit.Err != nil || r.lost || !r.coveredBy(commit):
				r.lost = true
				lost++
				return false
			}
			releaseRetained(r)
			return true
		})
		d.file.count(d.retained.Len() - before)
		d.mu.Unlock()
		next = end
	}
	return lost
}

// isWriteBack reports whether the answer to a COMMIT says that something could not be written to the disk. Others refuse the COMMIT.
func isWriteBack(err error) bool {
	var e interface{ Errno() syscall.Errno }
	var no interface{ Refused() bool }
	if errors.As(err, &no) && no.Refused() || !errors.As(err, &e) {
		return errors.Is(err, syscall.EIO)
	}
	switch e.Errno() {
	case syscall.EIO, syscall.ENOSPC, syscall.EDQUOT:
		return true
	}
	return false
}

// resendLost sends again what the data file has lost. It stops at the first failure, when all that was begun has ended.
func (f *File) resendLost(ctx context.Context, d *dataFile, stable layout.Stability) error {
	var spans []span
	d.mu.Lock()
	d.retained.Overlapping(0, math.MaxInt64, func(e *rangemap.Entry[retained]) bool {
		if e.Val.lost {
			spans = append(spans, span{e.Off, e.End})
		}
		return true
	})
	d.mu.Unlock()
	if len(spans) == 0 {
		return nil
	}
	results := make(chan error, len(spans)) // never blocks those who answer after ctx has ended
	running := 0
	wait := func() error {
		select {
		case err := <-results:
			running--
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var errs []error
	for _, s := range spans {
		if len(errs) > 0 || ctx.Err() != nil {
			break
		}
		if running == resendWidth {
			if err := wait(); err != nil {
				errs = append(errs, err)
				break
			}
		}
		node, err := f.lock(ctx, s.off, s.end)
		if err != nil {
			return err
		}
		running++
		f.strays.add(1)
		// This goroutine owns one range of the file until its data was sent again; it ends with the replies.
		go func() {
			err := f.resend(d, s, stable)
			f.locks.release(f.plane, node)
			f.strays.add(-1)
			results <- err
		}()
	}
	for running > 0 {
		if err := wait(); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// resend sends again what is lost in s, whose range is locked: newer writes have either replaced it or wait.
func (f *File) resend(d *dataFile, s span, stable layout.Stability) error {
	var lost []rangemap.Entry[retained]
	d.mu.Lock()
	d.retained.Overlapping(s.off, s.end, func(e *rangemap.Entry[retained]) bool {
		if e.Val.lost {
			refRetained(&e.Val)
			lost = append(lost, *e)
		}
		return true
	})
	d.mu.Unlock()
	var errs []error
	for i := range lost {
		if len(errs) == 0 {
			if err := f.resendExtent(d, &lost[i], stable); err != nil {
				errs = append(errs, err)
			}
		}
		releaseRetained(&lost[i].Val)
	}
	return errors.Join(errs...)
}

func (f *File) resendExtent(d *dataFile, e *rangemap.Entry[retained], stable layout.Stability) error {
	// The range stays locked until the server has answered, or the copy is given up.
	ctx := d.ctx
	use := e.Val.target(d.use.Load())
	if e.Val.buf == nil {
		return opError(&layout.Op{Kind: layout.OpCommit, File: use, Off: e.Off}, ErrNotKept)
	}
	c, err := f.plane.connectWait(ctx, use.Device)
	if err != nil {
		return err
	}
	epoch := c.epoch()
	_, wsize := c.Limits()
	var first *layout.Op
	all := true // so far stable as asked
	for off := e.Off; off < e.End; {
		end := min(e.End, off+int64(max(wsize, 1)))
		pc := piece{op: layout.Op{Kind: layout.OpWrite, File: use, Off: off, Data: e.Val.bytes(off, end), Stable: stable}}
		if err := c.do(ctx, &pc.op); err != nil {
			return opError(&pc.op, err)
		}
		if err := pc.writeResult(); err != nil {
			return opError(&pc.op, err)
		}
		if first == nil {
			first = &pc.op
		} else if pc.op.Verifier != first.Verifier {
			return nil // restarted in between: still lost, the next round sends it again
		}
		all = all && pc.stableAsAsked()
		off = end
	}
	d.resent(e.Off, e.End, first.Verifier, epoch, all)
	return nil
}

// resent notes the new acknowledgement of what was lost in [off, end), whose range is locked.
func (d *dataFile) resent(off, end int64, verf layout.Verifier, epoch uint64, stable bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.verifier = verf
	d.clock++
	before := d.retained.Len()
	d.retained.DeleteFunc(off, end, func(e *rangemap.Entry[retained]) bool {
		r := &e.Val
		if !r.lost {
			return false
		}
		if stable {
			releaseRetained(r)
			return true
		}
		r.verifier, r.epoch, r.sent, r.lost = verf, epoch, d.clock, false
		return false
	})
	d.file.count(d.retained.Len() - before)
}
