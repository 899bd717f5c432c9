package fs

import (
	"context"
	"errors"
	"log/slog"
	"slices"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// reservation is a place that the service keeps for an append. inode.mu guards what changes of it.
type reservation struct {
	session  *sessionLife
	number   uint64 // 0: of a service that has shown the place to others already
	off, end int64
	at       int64 // when the append was made, by the clock of the service

	done     int64 // acknowledged bytes
	writing  int   // parts at the data plane
	tried    bool  // a part failed, of which data servers may have some all the same
	recalled bool  // nothing is written there: another place is asked for
	over     bool  // nobody goes on writing
}

// begun reports whether some of the append may be at its place already. At another place it would be there twice. inode.mu is held.
func (p *reservation) begun() bool { return p.writing > 0 || p.tried || p.done > 0 }

// kept reports whether a restarted service has to be told of the place. It must not hear of a recalled place: nothing
// is written there, and the file may have been truncated since the recall. inode.mu is held.
func (p *reservation) kept() bool { return p.number != 0 && !p.recalled }

// errUncertain is what becomes of an append that was begun in a session that has ended.
var errUncertain = errors.New("the session ended during an append, which may be in the file: it was not tried again")

// uncertain reports whether what is at a place that was left may count.
func (i *inode) uncertain(p *reservation) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return p.session != i.session() && p.begun()
}

// reservations are the appends to a file for which the service finds the places. inode.mu guards them.
type reservations struct {
	count int // appends whose place is reserved or about to be
	// reservedEnd is the end of the last place that was reserved; the service knows of so many bytes.
	reservedEnd int64
	list        []*reservation // that are not written
	// What the service has to be told: the numbers of places that are written, and of those that nobody will write.
	ended, givenUp []uint64
	upto           uint64 // the greatest number that was recalled; the answer with the place may come later
	// end is where those end that are written and not durable. Unlike inode.end it says nothing of the size, as others
	// may be about to write in front of it.
	end     int64
	asked   bool // somebody waits for those in list
	reclaim bool // a restarted service has to be told of those in list
}

// toTell reports whether the service has to be told of places.
func (r *reservations) toTell() bool {
	return len(r.ended)+len(r.givenUp) > 0 || r.reclaim && slices.ContainsFunc(r.list, (*reservation).kept)
}

// lose forgets places that were lost with the session.
func (r *reservations) lose() {
	*r = reservations{count: r.count, end: r.end}
}

// tellMost is how many places one report, or one Reserve, has of a kind.
const tellMost = metarpc.MaxBatch

// tell adds to a report what the service has to be told.
func (r *reservations) tell(to *metarpc.SizeReport) {
	to.Ended = slices.Clone(r.ended[:min(len(r.ended), tellMost)])
	to.GivenUp = slices.Clone(r.givenUp[:min(len(r.givenUp), tellMost)])
	if !r.reclaim {
		return
	}
	for _, p := range r.list {
		if p.kept() {
			to.Reserved = append(to.Reserved, metarpc.Place{Number: p.number, Off: p.off, Len: p.end - p.off, Mtime: p.at})
		}
	}
}

// told takes back what tell, or a Reserve, has told.
func (r *reservations) told(ended, givenUp []uint64, reclaimed bool) {
	r.ended = slices.DeleteFunc(r.ended, func(n uint64) bool { return slices.Contains(ended, n) })
	r.givenUp = slices.DeleteFunc(r.givenUp, func(n uint64) bool { return slices.Contains(givenUp, n) })
	if reclaimed {
		r.reclaim = false
	}
}

// reserve asks for a place of n bytes at the end of the file.
func (i *inode) reserve(ctx context.Context, n int64, s *sessionLife) (*reservation, error) {
	i.mu.Lock()
	known := i.end <= i.reserved.reservedEnd
	i.mu.Unlock()
	if !known {
		if err := i.fs.publish(ctx, []*inode{i}); err != nil {
			return nil, err
		}
	}
	i.mu.Lock()
	var told metarpc.SizeReport
	i.reserved.tell(&told)
	i.mu.Unlock()
	var p *reservation // i.mu guards it and left
	left := false
	err := i.fs.meta.Reserve(ctx, &metarpc.ReserveArgs{ID: i.id, Len: n, Ended: told.Ended, GivenUp: told.GivenUp}, func(r metarpc.ReserveResult) {
		i.mu.Lock()
		defer i.mu.Unlock()
		if !left && s == i.session() {
			i.reserved.told(told.Ended, told.GivenUp, false)
			p = i.keepPlace(s, &r, n)
		}
	})
	i.mu.Lock()
	left = true
	i.mu.Unlock()
	switch {
	case err != nil:
		i.fs.unsure(err, i.id)
		return nil, err
	case p == nil:
		return nil, errOtherSession
	}
	return p, nil
}

// keepPlace puts a place of n bytes on the list; mu is held. A restarted service is told the list later than that. It
// would give a place away again that is not on the list.
func (i *inode) keepPlace(s *sessionLife, r *metarpc.ReserveResult, n int64) *reservation {
	p := &reservation{session: s, number: r.Number, off: r.Off, end: r.Off + n, at: r.Mtime}
	if p.number == 0 {
		i.wrote(p.end, p.at) // such a service, when it is restarted, has to be told of the place as well
	}
	p.recalled = p.number != 0 && p.number <= i.reserved.upto
	i.reserved.reservedEnd = max(i.reserved.reservedEnd, p.end)
	i.reserved.list = append(i.reserved.list, p)
	return p
}

// wroteAt counts out a part of n bytes of a place that the data plane had; acknowledged says how that ended. The place
// is written when all its parts are. mu is held.
func (i *inode) wroteAt(p *reservation, n int64, acknowledged bool) {
	p.writing--
	if acknowledged {
		p.done += n
		i.wroteSome(p.at)
	} else {
		p.tried = true
	}
	switch {
	case p.done == p.end-p.off:
		i.reserved.end = max(i.reserved.end, p.end)
		i.endPlace(p, &i.reserved.ended)
	case p.over && p.writing == 0:
		i.endPlace(p, &i.reserved.givenUp)
	}
	i.notify()
}

// leavePlace says that nobody goes on writing at a place.
func (i *inode) leavePlace(p *reservation) {
	i.mu.Lock()
	defer i.mu.Unlock()
	p.over = true
	if p.writing == 0 {
		i.endPlace(p, &i.reserved.givenUp)
	}
	i.notify()
}

// endPlace takes a place off the list, if it is there, and puts its number where it is told from: with the next report
// or Reserve, or at once if somebody waits for it or it is given up. mu is held.
func (i *inode) endPlace(p *reservation, numbers *[]uint64) {
	r := &i.reserved
	at := slices.Index(r.list, p)
	if at < 0 {
		return
	}
	r.list = slices.Delete(r.list, at, at+1)
	if p.number == 0 || p.session != i.session() {
		return
	}
	*numbers = append(*numbers, p.number)
	if r.asked || numbers == &r.givenUp {
		i.again()
		// The goroutine owns a hold of the inode; it ends with the report.
		i.fs.spawn(func() {
			defer i.drop()
			i.publishPlaces(i.fs.ctx)
		})
	}
	r.asked = r.asked && len(r.list) > 0
}

// publishPlaces tells the service which places are written, and what else it does not know of the file.
func (i *inode) publishPlaces(ctx context.Context) {
	if err := i.fs.publish(ctx, []*inode{i}); err != nil && ctx.Err() == nil {
		i.fs.waiting.log(i.fs.log, slog.LevelWarn, "appends could not be reported for others to see", "file", i.id, "err", err)
	}
}

// OnReserveRecall recalls the places of appends to a file, up to one that has a number. Appends of which nothing is
// written take new places. It waits for the others, so that they are in the file once, and tells the service which places
// are written. It is for metaclient.Config.
//
// An append that has failed at a data server may need a layout. The service grants it during the recall.
func (fs *FS) OnReserveRecall(ctx context.Context, id layout.FileID, upto uint64) {
	i := fs.holdKnown(id)
	if i == nil {
		return
	}
	defer i.drop()
	i.mu.Lock()
	i.reserved.upto = max(i.reserved.upto, upto)
	i.mu.Unlock()
	if err := i.await(ctx, func() bool { return !i.recallPlaces(upto) }); err != nil {
		return // nobody waits for us any more
	}
	i.mu.Unlock()
	i.publishPlaces(ctx)
}

// recallPlaces recalls the places up to one that has a number where nothing is begun, and reports whether there are
// others. mu is held.
func (i *inode) recallPlaces(upto uint64) (begun bool) {
	for _, p := range i.reserved.list {
		switch {
		case p.number == 0 || p.number > upto || p.recalled:
		case p.begun():
			begun = true
		default:
			p.recalled = true
			i.notify()
		}
	}
	return begun
}

// tellPlaces tells the service of places that are written, before it is asked for the size: otherwise it would ask for
// them.
func (i *inode) tellPlaces(ctx context.Context) {
	i.mu.Lock()
	told := !i.reserved.toTell()
	i.mu.Unlock()
	if !told {
		i.publishPlaces(ctx)
	}
}
