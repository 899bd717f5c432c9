package fs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// privileges are what execve(2) takes from the attributes of a program. The zero value is none.
type privileges struct{ bits, uid, gid uint32 }

func privilegesOf(a *metarpc.Attr) privileges {
	p := privileges{bits: setIDBits(a.Mode)}
	if a.Mode&unix.S_IFMT != unix.S_IFREG || p.bits == 0 {
		return privileges{}
	}
	if p.bits&unix.S_ISUID != 0 {
		p.uid = a.UID
	}
	if p.bits&unix.S_ISGID != 0 {
		p.gid = a.GID
	}
	return p
}

const (
	maxPrograms = 1 << 16 // that are remembered
	maxAsked    = 256     // threads that are remembered for one of them
)

// given knows which privileges of programs the kernel may have. execve(2) takes them from what the kernel was told
// last, be that outdated or not. So before a program is opened for execution it must be certain that the kernel has
// been told of what is so now.
type given struct {
	some  atomic.Bool // there are programs
	mu    sync.Mutex
	clock uint64 // counts what matters to the order of events
	of    map[layout.FileID]*program
	full  bool // there are others, of which nothing is known
}

// program is a file of which the kernel was told privileges, and may not have been told yet that there are none.
type program struct {
	given privileges
	mixed bool   // others were given as well
	at    uint64 // when some were given last
	// Of an answer to a question that was asked before upset the kernel may have made nothing, nor of any while
	// upsetting.
	upset     uint64
	upsetting int
	asked     map[uint32]question // by thread
}

// question is the last one that a thread has asked.
type question struct {
	answered uint64
	told     privileges
	// certain says that it was asked after what upset the program: the thread had got an answer since then.
	certain bool
	refused bool // it had been refused the program before
}

func (g *given) tick() uint64 {
	g.clock++
	return g.clock
}

// tell is called before the kernel is answered with attributes, which a thread asked for; 0 stands for those that
// cannot be told apart.
func (g *given) tell(thread uint32, a *metarpc.Attr) {
	told := privilegesOf(a)
	if told == (privileges{}) && !g.some.Load() {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.of[a.ID]
	switch {
	case p == nil && told == privileges{}:
		return
	case p == nil && len(g.of) == maxPrograms:
		g.full = true
		return
	case p == nil:
		p = g.add(a.ID, &program{given: told})
	}
	now := g.tick()
	if told != (privileges{}) {
		p.mixed = p.mixed || p.given != told
		p.at = now
	}
	if p.asked == nil {
		return // nobody was refused
	}
	before, ok := p.asked[thread]
	if ok || len(p.asked) < maxAsked {
		p.asked[thread] = question{now, told, ok && p.steady(before.answered), before.refused}
	}
}

// add remembers a program; mu is held.
func (g *given) add(id layout.FileID, p *program) *program {
	if g.of == nil {
		g.of = map[layout.FileID]*program{}
	}
	g.of[id] = p
	g.some.Store(true)
	return p
}

// steady reports whether nothing has upset the program since a time.
func (p *program) steady(since uint64) bool { return p.upsetting == 0 && p.upset <= since }

// during runs what may keep the kernel from making use of answers that are on their way to it.
func (g *given) during(id layout.FileID, f func()) {
	if !g.some.Load() {
		f()
		return
	}
	g.mu.Lock()
	p := g.of[id]
	if p != nil {
		p.upsetting++
	}
	g.mu.Unlock()
	f()
	if p != nil {
		g.mu.Lock()
		p.upsetting--
		p.upset = g.tick()
		g.mu.Unlock()
	}
}

// errOldPrivileges makes execve(2) look the program up once more (ESTALE), for which the kernel asks for its
// attributes.
var errOldPrivileges = &execError{"the kernel has the privileges of before a change", syscall.ESTALE}

// errTextBusy ends execve(2).
var errTextBusy = &execError{"its privileges are being changed, or it is written", syscall.ETXTBSY}

type execError struct {
	reason string
	errno  syscall.Errno
}

func (e *execError) Error() string        { return e.reason }
func (e *execError) Errno() syscall.Errno { return e.errno }

// mayExecute decides whether a thread may have a program opened for execution whose attributes are a now. written says
// that it is open for writing here.
//
// The kernel has the privileges of now if it was never given others. Else the thread itself must have been answered
// with those of now, by an answer that nothing can have upset; then the kernel has made use of it, since it is the
// thread that does so. A thread that has not asked is refused once with ESTALE, and does; after that with ETXTBSY.
func (g *given) mayExecute(thread uint32, a *metarpc.Attr, written bool) error {
	if !g.some.Load() {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p, now := g.of[a.ID], privilegesOf(a)
	if p == nil && g.full {
		for id := range g.of { // so that there is room
			delete(g.of, id)
			break
		}
		p = g.add(a.ID, &program{mixed: true, at: g.tick()})
	}
	if p == nil || !p.mixed && p.given == now {
		return nil
	}
	q, ok := p.asked[thread]
	switch {
	case written: // writes upset it unseen
		return errTextBusy
	case ok && q.certain && q.told == now && p.steady(q.answered) && p.at <= q.answered:
		if now == (privileges{}) {
			delete(g.of, a.ID)
			g.some.Store(len(g.of) > 0 || g.full)
		} else {
			p.given, p.mixed, p.asked = now, false, nil
		}
		return nil
	case ok && q.refused:
		delete(p.asked, thread)
		return errTextBusy
	}
	return errOldPrivileges
}

// refused is called after a thread was refused a program and the kernel was made to ask again, and before it hears of
// that.
func (g *given) refused(thread uint32, id layout.FileID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.of[id]
	if p == nil {
		return
	}
	if len(p.asked) >= maxAsked {
		p.asked = nil
	}
	if p.asked == nil {
		p.asked = map[uint32]question{}
	}
	p.asked[thread] = question{answered: g.tick(), refused: true}
}

// releasePatience is how long execve(2) waits for the last writer to go: the kernel does not wait for RELEASE.
const releasePatience = 100 * time.Millisecond

// execute finds out whether a thread may execute a file whose attributes are a now.
func (i *inode) execute(ctx context.Context, thread uint32, a *metarpc.Attr) error {
	i.mu.Lock()
	written := i.writers > 0
	i.mu.Unlock()
	err := i.fs.given.mayExecute(thread, a, written)
	if err != nil && written {
		waiting, cancel := context.WithTimeout(ctx, releasePatience)
		defer cancel()
		if i.await(waiting, func() bool { return i.writers == 0 }) == nil {
			i.mu.Unlock()
			err = i.fs.given.mayExecute(thread, a, false)
		}
	}
	if errors.Is(err, errOldPrivileges) {
		i.fs.forgetAttrs(i.id)
		i.fs.given.refused(thread, i.id)
	}
	if err != nil {
		return fmt.Errorf("execution of inode %d: %w", i.id, err)
	}
	return nil
}
