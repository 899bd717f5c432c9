package linear

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"
)

const (
	names      = 5  // in two directories; few, so that clients meet
	each       = 40 // operations of a client in one round
	checkBound = 30 * time.Second
)

// kind is what an operation does.
type kind uint8

const (
	opCreate kind = iota // open(O_CREAT|O_EXCL)
	opMkdir
	opUnlink
	opRmdir
	opRename
	opLink // of what a stat has found, by descriptor
	opStat
	opLock   // flock(LOCK_EX|LOCK_NB)
	opUnlock // of what it has locked
	kinds
)

func (k kind) String() string {
	return [...]string{"create", "mkdir", "unlink", "rmdir", "rename", "link", "stat", "lock", "unlock"}[k]
}

// input is an operation: a and b are names by number. A link is of ino to b.
type input struct {
	kind   kind
	client int
	a, b   int
	ino    uint64
}

// output is what it returned. ino is that of a create, a mkdir or a stat.
type output struct {
	errno unix.Errno
	ino   uint64
}

// entry is what a name stands for in the model; ino 0 is nothing.
type entry struct {
	ino  uint64
	dir  bool
	lost bool // a name of the inode was taken away and this one has stayed
}

// state is the model: the names, what each last stood for before, and who has the lock.
type state struct {
	entries [names]entry
	before  [names]entry
	holder  int // a client + 1; 0: nobody
}

// set gives a name another meaning.
func (s *state) set(name int, e entry) {
	if s.entries[name].ino != 0 {
		s.before[name] = s.entries[name]
	}
	s.entries[name] = e
}

// remove takes away a name, or what it stands for.
func (s *state) remove(name int) {
	ino := s.entries[name].ino
	s.set(name, entry{})
	for i := range s.entries {
		if ino != 0 && s.entries[i].ino == ino {
			s.entries[i].lost = true
		}
	}
}

// find returns an entry of an inode; the zero entry if there is none.
func (s *state) find(ino uint64) entry {
	for _, e := range s.entries {
		if e.ino == ino {
			return e
		}
	}
	return entry{}
}

// steps is what can be after in, given that it was out that was answered, from which it takes the numbers of new inodes; nothing if out is wrong.
func (s state) steps(in input, out output) []any {
	var all []any
	if next, ok := s.step(in, out); ok {
		all = append(all, next)
	}
	if s.kernelSays(in, out.errno) {
		all = append(all, s)
	}
	return all
}

// kernelSays reports whether the kernel may have answered by itself: a rename with what the old name was before, a link with a number of names of its own
// (vfs_link). That one may be 0 while there is a name: fuse_entry_unlinked counts down when UNLINK is answered, also if attributes that do not have the
// name any more were faster.
func (s *state) kernelSays(in input, errno unix.Errno) bool {
	switch in.kind {
	case opLink:
		return errno == unix.ENOENT && s.find(in.ino).lost
	case opRename:
	default:
		return false
	}
	a, b := s.before[in.a], s.entries[in.b]
	if a.ino == 0 || b.ino == 0 {
		return false
	}
	switch errno {
	case 0:
		return a.ino == b.ino
	case unix.ENOTDIR:
		return a.dir && !b.dir
	case unix.EISDIR:
		return !a.dir && b.dir
	}
	return false
}

// step is what is after in if it was done at one moment. It reports false if out is wrong then.
func (s state) step(in input, out output) (state, bool) {
	a, b := s.entries[in.a], s.entries[in.b]
	want := unix.Errno(0)
	next := s
	switch in.kind {
	case opCreate, opMkdir:
		if a.ino != 0 {
			want = unix.EEXIST
		} else {
			next.set(in.a, entry{ino: out.ino, dir: in.kind == opMkdir})
		}
	case opUnlink, opRmdir:
		switch {
		case a.ino == 0:
			want = unix.ENOENT
		case in.kind == opUnlink && a.dir:
			want = unix.EISDIR
		case in.kind == opRmdir && !a.dir:
			want = unix.ENOTDIR
		default:
			next.remove(in.a)
		}
	case opRename:
		switch {
		case a.ino == 0:
			want = unix.ENOENT
		case a.ino == b.ino: // two names of one file stay
		case b.ino != 0 && a.dir && !b.dir:
			want = unix.ENOTDIR
		case b.ino != 0 && !a.dir && b.dir:
			want = unix.EISDIR
		default:
			next.remove(in.b)
			next.set(in.a, entry{})
			next.entries[in.b] = a
		}
	case opLink:
		e := s.find(in.ino)
		switch {
		case b.ino != 0:
			want = unix.EEXIST
		case e.ino == 0:
			want = unix.ENOENT
		default:
			next.set(in.b, e)
		}
	case opStat:
		if a.ino == 0 {
			want = unix.ENOENT
		} else if out.errno == 0 && out.ino != a.ino {
			return s, false
		}
	case opLock:
		if s.holder != 0 {
			want = unix.EWOULDBLOCK
		} else {
			next.holder = in.client + 1
		}
	case opUnlock:
		next.holder = 0
	}
	if out.errno != want {
		return s, false
	}
	if want != 0 {
		return s, true
	}
	return next, true
}

var model = (&porcupine.NondeterministicModel{
	Init:  func() []any { return []any{state{}} },
	Step:  func(s, in, out any) []any { return s.(state).steps(in.(input), out.(output)) },
	Equal: func(a, b any) bool { return a.(state) == b.(state) },
	DescribeOperation: func(in, out any) string {
		i, o := in.(input), out.(output)
		return fmt.Sprintf("%v(%d, %d, %d): %v ino %d", i.kind, i.a, i.b, i.ino, o.errno, o.ino)
	},
}).ToModel()

// client does operations through one mount.
type client struct {
	number int
	dirs   [2]string // where the names are: even ones in the first, odd ones in the second
	lock   int       // descriptor of the file that is locked
	holds  bool
	found  int    // descriptor of a regular file that a stat has found; -1: none
	ino    uint64 // its
}

func (c *client) path(name int) string {
	return filepath.Join(c.dirs[name%2], fmt.Sprintf("n%d", name))
}

// do does one operation. An errno that the model does not know is no answer but a failure.
func (c *client) do(in input) (output, error) {
	var st unix.Stat_t
	var err error
	switch a, b := c.path(in.a), c.path(in.b); in.kind {
	case opCreate:
		var fd int
		if fd, err = unix.Open(a, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o644); err == nil {
			err = errors.Join(unix.Fstat(fd, &st), unix.Close(fd))
		}
	case opMkdir:
		// No call makes a directory and tells which: so it gets its name when it is known, which is a rename that must not replace anything.
		made := c.path(in.a) + fmt.Sprintf("-made-by-%d", c.number)
		err = errors.Join(unix.Mkdir(made, 0o755), unix.Stat(made, &st))
		if err != nil {
			return output{}, fmt.Errorf("mkdir %s: %w", made, err)
		}
		if err = unix.Renameat2(unix.AT_FDCWD, made, unix.AT_FDCWD, a, unix.RENAME_NOREPLACE); err != nil {
			if gone := unix.Rmdir(made); gone != nil {
				return output{}, fmt.Errorf("rmdir %s: %w", made, gone)
			}
		}
	case opUnlink:
		err = unix.Unlink(a)
	case opRmdir:
		err = unix.Rmdir(a)
	case opRename:
		err = unix.Rename(a, b)
	case opLink:
		err = unix.Linkat(c.found, "", unix.AT_FDCWD, b, unix.AT_EMPTY_PATH)
		if err == unix.ESTALE { // it has no name any more, and nobody has it open: a descriptor of O_PATH is none
			err = unix.ENOENT
		}
		unix.Close(c.found)
		c.found = -1
	case opStat:
		var fd int
		if fd, err = unix.Open(a, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
			break
		}
		if err = unix.Fstat(fd, &st); err == unix.ESTALE { // gone since
			err = unix.ENOENT
		}
		if c.found < 0 && err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			c.found, c.ino = fd, st.Ino
		} else {
			unix.Close(fd)
		}
	case opLock:
		if err = unix.Flock(c.lock, unix.LOCK_EX|unix.LOCK_NB); err == nil {
			c.holds = true
		}
	case opUnlock:
		err = unix.Flock(c.lock, unix.LOCK_UN)
		c.holds = false
	}
	out := output{ino: st.Ino}
	if err != nil {
		var errno unix.Errno
		if !errors.As(err, &errno) {
			return out, err
		}
		switch errno {
		case unix.ENOENT, unix.EEXIST, unix.EISDIR, unix.ENOTDIR, unix.EWOULDBLOCK:
			out = output{errno: errno}
		default:
			return out, fmt.Errorf("%v(%d, %d): %w", in.kind, in.a, in.b, err)
		}
	}
	return out, nil
}

// next chooses an operation.
func (c *client) next(r *rand.Rand) input {
	in := input{kind: kind(r.IntN(int(kinds))), client: c.number, a: r.IntN(names), b: r.IntN(names)}
	if c.holds && (in.kind == opLock || r.IntN(4) == 0) {
		in.kind = opUnlock
	} else if !c.holds && in.kind == opUnlock {
		in.kind = opLock
	}
	switch {
	case in.kind == opLink && c.found < 0:
		in.kind = opStat
	case in.kind == opLink:
		in.a, in.ino = 0, c.ino
	}
	return in
}

// Round has each mount's client do operations in two new directories and checks their history. The error has the history.
func Round(seed uint64, mounts []string) (err error) {
	base := fmt.Sprintf("linear-%x", seed)
	made := []string{base, base + "/even", base + "/odd"}
	for _, dir := range made {
		if err := os.Mkdir(filepath.Join(mounts[0], dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(mounts[0], base, "lock"), nil, 0o644); err != nil {
		return err
	}
	began := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	var failed []error
	var clients sync.WaitGroup
	for i, mount := range mounts {
		c := &client{number: i, found: -1, dirs: [2]string{filepath.Join(mount, made[1]), filepath.Join(mount, made[2])}}
		if c.lock, err = unix.Open(filepath.Join(mount, base, "lock"), unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		defer func() {
			unix.Close(c.lock)
			if c.found >= 0 {
				unix.Close(c.found)
			}
		}()
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		clients.Go(func() { // ends after its operations
			for range each {
				in := c.next(r)
				called := time.Since(began)
				out, err := c.do(in)
				op := porcupine.Operation{ClientId: i, Input: in, Output: out, Call: int64(called), Return: int64(time.Since(began))}
				mu.Lock()
				history = append(history, op)
				if err != nil {
					failed = append(failed, fmt.Errorf("client %d: %w", i, err))
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	clients.Wait()
	if len(failed) > 0 {
		return errors.Join(failed...)
	}
	switch result, info := porcupine.CheckOperationsVerbose(model, history, checkBound); result {
	case porcupine.Illegal:
		var longest []porcupine.Operation
		for _, order := range slices.Concat(info.PartialLinearizationsOperations()...) {
			if len(order) > len(longest) {
				longest = order
			}
		}
		var b strings.Builder
		for _, op := range history {
			mark := ' '
			if !slices.Contains(longest, op) {
				mark = '?'
			}
			fmt.Fprintf(&b, "\n%c%12d %12d client %d: %s", mark, op.Call, op.Return, op.ClientId, model.DescribeOperation(op.Input, op.Output))
		}
		return fmt.Errorf("no order of these operations explains what they returned; the longest that does is without those with a ?:%s", b.String())
	case porcupine.Unknown:
		return fmt.Errorf("the history of %d operations was not checked within %v", len(history), checkBound)
	}
	return os.RemoveAll(filepath.Join(mounts[0], base))
}

// Run does rounds until the duration is over, and fails the test with the seed of a round whose history is wrong. It returns how many there were.
func Run(t testing.TB, seed uint64, d time.Duration, mounts []string) (rounds int) {
	t.Helper()
	t.Logf("linear: -seed %d", seed)
	for end := time.Now().Add(d); time.Now().Before(end); rounds++ {
		if err := Round(seed+uint64(rounds), mounts); err != nil {
			t.Fatalf("-seed %d: %v", seed+uint64(rounds), err)
		}
	}
	return rounds
}
