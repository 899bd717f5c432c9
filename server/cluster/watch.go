package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

// watch tells the processes that live from those that are dead, by their beats.
type watch struct {
	lease time.Duration // of rows that do not say how long they can be silent
	last  time.Duration // when the last look was over
	seen  map[memberID]sighting
}

// sighting is when a beat was first seen: when the read that showed it was over.
type sighting struct {
	beat []byte
	at   time.Duration
}

func newWatch(lease time.Duration) watch { return watch{lease: lease, seen: map[memberID]sighting{}} }

// look remembers which beats rows show, whose reading began and was over then. It returns those that have beaten since the look before, and those that are dead; the
// others, and self, are neither.
func (w *watch) look(rows []memberRow, self memberID, began, over time.Duration) (living, dead []*memberRow) {
	if began-w.last > w.lease/2 {
		// The catalog was away, perhaps for others, too, whose beats come now. Or this process was stopped.
		clear(w.seen)
	}
	w.last = over
	there := map[memberID]bool{}
	for i := range rows {
		other := &rows[i]
		there[other.id] = true
		s, ok := w.seen[other.id]
		changed := !slices.Equal(s.beat, other.beat)
		switch {
		case other.id == self:
		case !ok || changed:
			w.seen[other.id] = sighting{other.beat, over}
			if ok {
				living = append(living, other)
			}
		case began-s.at >= other.lease(w.lease):
			dead = append(dead, other)
		}
	}
	maps.DeleteFunc(w.seen, func(id memberID, _ sighting) bool { return !there[id] })
	return living, dead
}

// alone waits until it is known whether anybody uses the volume: members, or who maintains it. It returns the rows that dead ones have left, or an error that names
// one who lives.
func alone(ctx context.Context, engine catalog.Engine, clock func() time.Duration) (members []memberRow, maintainer *memberRow, err error) {
	for w := newWatch(DefaultLease); ; {
		began := clock()
		members, maintainer, err = users(ctx, engine)
		if err != nil {
			return nil, nil, err
		}
		rows := members
		if maintainer != nil {
			rows = append(slices.Clip(rows), *maintainer)
		}
		living, dead := w.look(rows, memberID{}, began, clock())
		switch {
		case len(living) > 0 && maintainer != nil && living[0].id == maintainer.id:
			return nil, nil, maintained(maintainer)
		case len(living) > 0:
			return nil, nil, fmt.Errorf("a metadata service uses the catalog: %s on %s: stop it", living[0].Address, living[0].Host)
		case len(dead) == len(rows):
			return members, maintainer, nil
		}
		if err := retry.Pause(ctx, DefaultLease/20); err != nil {
			return nil, nil, err
		}
	}
}

// Unused makes sure that nobody uses the volume in a catalog: no process, or none that gives a sign of life.
func Unused(ctx context.Context, engine catalog.Engine) error {
	_, _, err := alone(ctx, engine, bootTime)
	return err
}

// users reads the rows of all who may use the volume. maintainer is nil if nobody maintains it.
func users(ctx context.Context, engine catalog.Engine) (members []memberRow, maintainer *memberRow, err error) {
	snap, err := engine.Snapshot(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer snap.Close()
	if members, err = readMembers(ctx, snap); err == nil {
		maintainer, err = readMaintainer(ctx, snap)
	}
	return members, maintainer, err
}

// readMembers reads the rows of members, in the order of ids.
func readMembers(ctx context.Context, r catalog.Reader) (members []memberRow, err error) {
	from, to := schema.Of(schema.PrefixMember)
	for kv, err := range r.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		m := memberRow{raw: slices.Clone(kv.Value)}
		if err := schema.Decode(m.raw, &m.Member); err != nil || len(kv.Key) != 1+len(m.id) {
			return nil, fmt.Errorf("member row %q: %w", kv.Key, errors.Join(err, catalog.ErrCorrupt))
		}
		m.id = memberID(kv.Key[1:])
		members = append(members, m)
	}
	from, to = schema.Of(schema.PrefixBeat)
	for kv, err := range r.Scan(ctx, from, to, catalog.ScanOptions{}) {
		if err != nil {
			return nil, err
		}
		if m := find(members, memberID(kv.Key[1:])); m != nil {
			m.beat = slices.Clone(kv.Value)
		}
	}
	return members, nil
}

// find returns the row of a member, or nil.
func find(members []memberRow, id memberID) *memberRow {
	i, ok := slices.BinarySearchFunc(members, id, func(m memberRow, id memberID) int { return slices.Compare(m.id[:], id[:]) })
	if !ok {
		return nil
	}
	return &members[i]
}
