package meta

import (
	"bytes"
	"context"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// heldUp is something that is not done to a file because of what sessions have pinned.
type heldUp struct {
	what  string
	since time.Time
}

// sameCopy reports whether two references name one data file.
func sameCopy(a, b metarpc.CopyRef) bool {
	return a.Device == b.Device && bytes.Equal(a.Handle, b.Handle)
}

// pin pins a copy of a file that is on one of a.Near, if the session has the file open and the copy is all there is of the file, or all
// copies are the same and stay so: then nobody may write the file before the copy is pinned. l is the layout as it was read.
func (s *Service) pin(ctx context.Context, sess *session, a *metarpc.LayoutGetArgs, l schema.Layout) (metarpc.CopyRef, error) {
	var none metarpc.CopyRef
	id, near := a.ID, a.Near
	ref, several := s.cfg.Files.Whole(l, near, a.Pin == metarpc.PinAny)
	if len(ref.Handle) == 0 || several && a.IOMode == layout.IOModeRW || !s.setPin(sess, id, ref, several) {
		return none, nil
	}
	// Who relies on that nothing is pinned has done what it was for, or has seen the pin.
	var now schema.Layout
	_, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &now)
	again, still := s.cfg.Files.Whole(now, near, a.Pin == metarpc.PinAny)
	if err == nil && sameCopy(again, ref) && still == several {
		return ref, nil
	}
	s.setPin(sess, id, none, false)
	return none, err
}

// repin pins again what a session had pinned, in the grace period as it says, and afterwards if the copy is good and nothing is being
// done to the file: it was not known of the session that it relied on it.
func (s *Service) repin(ctx context.Context, sess *session, id layout.FileID, ref metarpc.CopyRef) error {
	s.mu.Lock()
	cl := sess.claims[id]
	done := cl == nil || !cl.open || sameCopy(cl.pin, ref)
	s.mu.Unlock()
	if done || !s.setPin(sess, id, ref, false) {
		return nil
	}
	var l schema.Layout
	_, err := schema.ReadRow(ctx, s.engine, schema.LayoutKey(id), &l)
	good := func(file *schema.DataFile) bool { return file.Is(ref) && file.State == layout.CopyGood }
	if err == nil && (l.Has(good) || slices.ContainsFunc(l.Caches, func(c schema.Cache) bool { return good(&c.File) })) {
		return nil
	}
	s.setPin(sess, id, metarpc.CopyRef{}, false)
	return err
}

// setPin notes what a session has pinned of a file that it has open, if nothing speaks against it.
func (s *Service) setPin(sess *session, id layout.FileID, ref metarpc.CopyRef, several bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	cl := sess.claims[id]
	if cl == nil || !cl.open {
		return false
	}
	f := cl.file
	if len(ref.Handle) > 0 {
		writing := func(cl *claim) bool { return cl.writer || cl.assigning > 0 || cl.returning || cl.unfenced || cl.unsure }
		if f.freezing > 0 || f.sizing || s.grace || several && slices.ContainsFunc(f.claims, writing) {
			return false
		}
	}
	cl.pin = ref
	s.changedFile(f)
	return true
}

// pinned lists what is pinned of f; Service.mu is held.
func (f *file) pinned() (refs []metarpc.CopyRef) {
	for _, cl := range f.claims {
		if cl.open && len(cl.pin.Handle) > 0 {
			refs = append(refs, cl.pin)
		}
	}
	return refs
}

// maybePinned lists what may be pinned of f, which has this layout: before all clients have come back after a restart, everything that can be.
func (s *Service) maybePinned(f *file, l *schema.Layout) []metarpc.CopyRef {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.grace {
		return f.pinned()
	}
	refs := refsOf(l.Caches, func(c *schema.Cache) bool { return c.File.State == layout.CopyGood })
	if l.Width == 1 {
		refs = append(refs, l.Copies(layout.CopyGood)...)
	}
	return refs
}

// freezePins returns what is pinned of a file. Nothing more is until thaw is called.
func (s *Service) freezePins(id layout.FileID) (refs []metarpc.CopyRef, thaw func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.file(id)
	f.freezing++
	return f.pinned(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.freezing--
		s.changedFile(f)
	}
}

// awaitUnpinned waits until nothing of a file is pinned, and keeps it so until thaw is called. what is what waits, for people.
func (s *Service) awaitUnpinned(ctx context.Context, id layout.FileID, what string) (thaw func(), err error) {
	refs, thaw := s.freezePins(id)
	if len(refs) == 0 {
		return thaw, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[id]
	s.holdUp(f, what)
	for len(f.pinned()) > 0 {
		if err := s.wait(ctx, f); err != nil {
			f.freezing--
			s.changedFile(f)
			return nil, err
		}
	}
	return thaw, nil
}

// holdUp notes, and says, what waits because of what is pinned of f; Service.mu is held.
func (s *Service) holdUp(f *file, what string) {
	if f.heldUp == nil || f.heldUp.what != what {
		f.heldUp = &heldUp{what, time.Now()}
		s.log.Warn("a file is open in passthrough: what is to be done to it waits until it is closed", "inode", f.id, "what", what,
			"hosts", f.pinners())
	}
}

// pinners are the hosts that have pinned copies of f; Service.mu is held.
func (f *file) pinners() (hosts []string) {
	for _, cl := range f.claims {
		if cl.open && len(cl.pin.Handle) > 0 && !slices.Contains(hosts, cl.sess.client.Host) {
			hosts = append(hosts, cl.sess.client.Host)
		}
	}
	return hosts
}

// maxHeldUp is how many files are told of.
const maxHeldUp = 64

// allHeldUp lists what is held up; Service.mu is held.
func (s *Service) allHeldUp() (list []metarpc.HeldUp) {
	for id, f := range s.files {
		if f.heldUp != nil && len(list) < maxHeldUp {
			list = append(list, metarpc.HeldUp{ID: id, What: f.heldUp.what, Since: f.heldUp.since.UnixNano(), Hosts: f.pinners()})
		}
	}
	slices.SortFunc(list, func(a, b metarpc.HeldUp) int { return int(a.Since - b.Since) })
	return list
}
