package meta

import (
	"context"
	"slices"
	"sync"
	"syscall"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

var errTextBusy = refusef(metarpc.Status(syscall.ETXTBSY), "the program is being executed, or its privileges are being taken away")

// privilegesOf are the set-ID bits with which a program is executed, and whether there are file capabilities.
func privilegesOf(mode uint32, flags metarpc.AttrFlags) (bits uint32, capable bool) {
	if !isRegular(mode) {
		return 0, false
	}
	bits = mode & syscall.S_ISUID
	if mode&syscall.S_IXGRP != 0 {
		bits |= mode & syscall.S_ISGID
	}
	return bits, flags&metarpc.AttrCapability != 0
}

func isPrivileged(mode uint32, flags metarpc.AttrFlags) bool {
	bits, capable := privilegesOf(mode, flags)
	return bits != 0 || capable
}

// executed reports whether a session other than by executes f, or may be about to, with privileges that it had when it
// was opened; s.mu is held.
func (f *file) executed(by *session) bool {
	return f != nil && slices.ContainsFunc(f.claims, func(cl *claim) bool { return cl.sess != by && (cl.executing > 0 || cl.open && cl.exec) })
}

// beginExecution has nobody else take f's privileges away until end is called. end reports whether the session may
// execute f, which had those privileges after that: not if they were being taken away already. s.mu is held for both.
func (s *Service) beginExecution(cl *claim) (end func(privileged bool) error) {
	disarming := cl.file.disarms > 0
	cl.executing++
	return func(privileged bool) error {
		cl.executing--
		cl.exec = cl.open && (cl.exec || privileged && !disarming)
		s.changedFile(cl.file)
		if privileged && disarming {
			return errTextBusy
		}
		return nil
	}
}

// disarm is called before t takes privileges from a file because its contents change. While others execute it, it is
// refused; nobody begins to until the outcome is known.
func (s *Service) disarm(t *tx, sess *session, id layout.FileID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files[id].executed(sess) {
		return errTextBusy
	}
	f := s.file(id)
	f.disarms++
	t.onOutcome(func(bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.disarms--
		s.changedFile(f)
	})
	return nil
}

// lost reports whether a program has fewer privileges than before, gained whether it has others.
func lost(before, after *schema.Inode) bool { return gained(after, before) }

func gained(before, after *schema.Inode) bool {
	was, wasCapable := privilegesOf(before.Mode, before.Flags)
	is, capable := privilegesOf(after.Mode, after.Flags)
	return is&^was != 0 || capable && !wasCapable
}

// armed is called after a file was given privileges, and before that is answered: sessions that have it open for
// writing hear of it, so that they take the privileges away before they write next. Before the change they would find
// that there are none.
func (s *Service) armed(ctx context.Context, by *session, id layout.FileID) error {
	var writers []*session
	s.mu.Lock()
	if f := s.files[id]; f != nil {
		for _, cl := range f.claims {
			if cl.sess != by && cl.open && cl.write {
				writers = append(writers, cl.sess)
			}
		}
	}
	s.mu.Unlock()
	var calls sync.WaitGroup
	for _, sess := range writers {
		calls.Go(func() { // ends like a recall
			s.recallFrom(ctx, sess, []metarpc.LeaseItem{{ID: id, Lease: metarpc.LeaseAttrs}}, nil)
		})
	}
	calls.Wait()
	return ctx.Err()
}
