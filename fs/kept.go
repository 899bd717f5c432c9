package fs

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

const (
	// The kernel may keep a name for mostKept, or on a soft mount for softKept. A recall may take as long
	// if a change of this mount stands in its way and cannot start over.
	mostKept, softKept = 5 * time.Second, time.Second
	// After a recall the names of the directory are kept for an eighth of the time since then, or for leastKept.
	leastKept = 250 * time.Millisecond
	// keptSlack is by how much the kernel keeps a name longer, since it counts in jiffies of up to 10 ms.
	keptSlack = 25 * time.Millisecond
	// After a recall the kernel keeps no names of the directory for recallPause, or for slowRecallPause if the recall
	// had to wait for time to pass. No answer to a question that is older than recallPause is kept.
	recallPause     = time.Second
	slowRecallPause = 30 * time.Second
	// A thread that sleeps sleepPatience after its answer, or is not seen to sleep for threadPatience, has
	// made use of it.
	sleepPatience  = 300 * time.Millisecond
	threadPatience = time.Second
	threadPoll     = time.Millisecond
	threadLook     = 20 * time.Millisecond // how often the state of a thread is looked at
	// stuckNames is after how long without progress in expiring names the changes that stand in the way
	// start over, and after how long again those that have begun since.
	stuckNames = 20 * time.Millisecond
	// A directory is remembered for dirMemory after its last use, and for recallMemory after a recall.
	dirMemory, recallMemory = 10 * time.Second, 8 * mostKept
	// maxKept bounds the names that the kernel may keep, and maxAskers the threads that may be about to make use of
	// answers.
	maxKept, maxAskers = 1 << 16, 1 << 12
)

// keptNames knows which names the kernel may keep, and which threads may be about to make use of answers that let it.
// See the package comment. With most set the zero value is ready.
type keptNames struct {
	most   time.Duration // for which a name may be kept
	asking atomic.Int32  // the length of askers
	mu     sync.Mutex
	dirs   map[layout.FileID]*keptDir
	count  int // of names
	askers map[uint32]asker
	swept  int64 // when dirs was looked through last, as all times by now()
}

// keptDir is a directory of which the kernel may keep names, or may not for a while.
type keptDir struct {
	names    map[place]*keptName
	used     int64 // when something was given or renamed last
	renames  int   // of this mount that are under way
	renamed  int64 // when the last one ended
	recalls  int   // that are under way
	recalled int64 // when the last one ended
	pause    int64 // until when the kernel gets no names to keep
}

// keptName is a name that the kernel may keep. After a rename it is at the old place, too, where the kernel may still
// have it.
type keptName struct {
	dirs   []*keptDir
	askers int   // threads that may be about to make use of an answer
	until  int64 // how long it is kept, but for these
}

// asker is a thread that was answered with a name to keep, and has asked for nothing since.
type asker struct {
	name     *keptName
	keep     time.Duration
	answered int64
	locked   bool // it holds the lock of the directory until it has made use of the answer
}

// give returns for how long the kernel may keep the answer to a thread's question about a name, which was asked at a
// time and is known for keep. locked says that the thread holds the lock of the directory.
func (k *keptNames) give(
	dir layout.FileID, at place, thread uint32, locked bool, asked int64, keep time.Duration,
) time.Duration {
	if keep <= 0 || thread == 0 {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	t := now()
	d := k.dir(dir, t)
	if t-asked > int64(recallPause) || k.count >= maxKept || len(k.askers) >= maxAskers {
		return 0
	}
	if d.recalls+d.renames > 0 || t < d.pause || asked <= d.recalled || asked <= d.renamed {
		return 0
	}
	d.used = t
	if keep = min(keep, k.most); d.recalled != 0 {
		keep = min(keep, max(leastKept, time.Duration(t-d.recalled)/8))
	}
	k.pass(thread, t)
	n := d.names[at]
	if n == nil {
		n = &keptName{}
		k.put(d, at, n)
	}
	n.askers++
	if k.askers == nil {
		k.askers = map[uint32]asker{}
	}
	k.askers[thread] = asker{name: n, keep: keep, answered: t, locked: locked}
	k.asking.Store(int32(len(k.askers)))
	return keep
}

// dir finds a directory or adds it; k.mu is held.
func (k *keptNames) dir(id layout.FileID, t int64) *keptDir {
	if t-k.swept > int64(mostKept) {
		k.sweep(t)
	}
	d := k.dirs[id]
	if d == nil {
		d = &keptDir{used: t}
		if k.dirs == nil {
			k.dirs = map[layout.FileID]*keptDir{}
		}
		k.dirs[id] = d
	}
	return d
}

// put has a name at a place in a directory; k.mu is held.
func (k *keptNames) put(d *keptDir, at place, n *keptName) {
	if d.names == nil {
		d.names = map[place]*keptName{}
	}
	if d.names[at] == nil {
		k.count++
	}
	if d.names[at] = n; !slices.Contains(n.dirs, d) {
		n.dirs = append(n.dirs, d)
	}
}

// asked is called when a thread makes a request, and so has made use of the answer to its last one.
func (k *keptNames) asked(thread uint32) {
	if k.asking.Load() == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pass(thread, now())
}

// pass says that a thread has made use of its answer by t; k.mu is held.
func (k *keptNames) pass(thread uint32, t int64) {
	a, ok := k.askers[thread]
	if !ok {
		return
	}
	delete(k.askers, thread)
	k.asking.Store(int32(len(k.askers)))
	a.name.askers--
	a.name.until = max(a.name.until, t+int64(a.keep+keptSlack))
}

// sweep forgets what does not matter any more; k.mu is held.
func (k *keptNames) sweep(t int64) {
	k.swept = t
	for thread, a := range k.askers {
		if t-a.answered > int64(threadPatience) {
			k.pass(thread, t)
		}
	}
	for id, d := range k.dirs {
		for at, n := range d.names {
			if n.askers == 0 && n.until < t {
				delete(d.names, at)
				k.count--
			}
		}
		remember := max(d.used+int64(dirMemory), d.pause)
		if d.recalled != 0 {
			remember = max(remember, d.recalled+int64(recallMemory))
		}
		if len(d.names)+d.recalls+d.renames == 0 && t > remember {
			delete(k.dirs, id)
		}
	}
}

// ends are the directories of a rename, and the old and the new name as the kernel has them.
type ends struct {
	dirs     [2]layout.FileID
	at       [2]place
	exchange bool
}

// beginRename lets the kernel keep no more names of the directories of a rename until endRename.
func (k *keptNames) beginRename(e *ends) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := now()
	for _, id := range e.dirs {
		k.dir(id, t).renames++
	}
}

// endRename is called before the kernel hears of a rename. After a slow one it gets no names of the old
// directories to keep for a while.
func (k *keptNames) endRename(e *ends, slow bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := now()
	for i, id := range e.dirs {
		d := k.dirs[id]
		d.renames--
		d.used, d.renamed = t, t
		if slow && (i == 0 || e.exchange) {
			d.pause = max(d.pause, t+int64(slowRecallPause))
		}
	}
}

// moving returns the names that the kernel may keep and will take along.
func (k *keptNames) moving(e *ends) (list []*keptName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, id := range e.dirs {
		if n := k.dirs[id].names[e.at[i]]; n != nil && (i == 0 || e.exchange) {
			list = append(list, n)
		}
	}
	return list
}

// move notes that the kernel may take names along, with the time for which it may keep them: from now on they are at
// both places. It reports false if it must not, because a lease on the new directories may have been recalled since a
// time.
func (k *keptNames) move(e *ends, since int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	from, to := k.dirs[e.dirs[0]], k.dirs[e.dirs[1]]
	recalled := func(d *keptDir) bool { return d.recalls > 0 || since <= d.recalled }
	if recalled(to) || e.exchange && recalled(from) || now()-since > int64(recallPause) {
		return false
	}
	// Until the kernel has heard of the rename each is where it was.
	both := &keptName{}
	for _, n := range []*keptName{from.names[e.at[0]], to.names[e.at[1]]} {
		if n == nil {
			continue
		}
		both.until = max(both.until, n.until)
		for thread, a := range k.askers {
			if a.name == n {
				a.name = both
				k.askers[thread] = a
				both.askers++
				n.askers--
			}
		}
	}
	k.put(from, e.at[0], both)
	k.put(to, e.at[1], both)
	return true
}

// beginRecall lets the kernel keep no names of some directories until endRecall.
func (k *keptNames) beginRecall(ids []layout.FileID) (dirs []*keptDir) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := now()
	for _, id := range ids {
		d := k.dir(id, t)
		d.recalls++
		dirs = append(dirs, d)
	}
	return dirs
}

// endRecall says that the kernel keeps none of the names of the directories any more.
func (k *keptNames) endRecall(dirs []*keptDir, slow bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t, pause := now(), recallPause
	if slow {
		pause = slowRecallPause
	}
	for _, d := range dirs {
		k.count -= len(d.names)
		d.names = nil
		d.recalls--
		d.recalled, d.pause = t, max(d.pause, t+int64(pause))
	}
}

// inDirs is of the names of some directories.
func inDirs(dirs []*keptDir) func(*keptName) bool {
	set := map[*keptDir]bool{}
	for _, d := range dirs {
		set[d] = true
	}
	return func(n *keptName) bool { return slices.ContainsFunc(n.dirs, func(d *keptDir) bool { return set[d] }) }
}

// list returns the names of some directories that the kernel may keep.
func (k *keptNames) list(dirs []*keptDir) (list []place) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range dirs {
		for at := range d.names {
			list = append(list, at)
		}
	}
	return list
}

// until returns how long the kernel keeps one of the names of some directories; no thread is about to make use of an
// answer.
func (k *keptNames) until(dirs []*keptDir) (last int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range dirs {
		for _, n := range d.names {
			last = max(last, n.until)
		}
	}
	return last
}

// answered returns the threads that may be about to make use of answers about some names, those with the lock of the
// directory only if locked is set, and when they were answered.
func (k *keptNames) answered(of func(*keptName) bool, locked bool) map[uint32]int64 {
	threads := map[uint32]int64{}
	if k.asking.Load() == 0 {
		return threads
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for thread, a := range k.askers {
		if of(a.name) && (locked || !a.locked) {
			threads[thread] = a.answered
		}
	}
	return threads
}

// threadState is what a thread does.
type threadState int

const (
	threadRuns threadState = iota // or waits for a processor, or is not known
	threadSleeps
	threadGone
)

func stateOf(thread uint32) threadState {
	if errors.Is(unix.Kill(int(thread), 0), unix.ESRCH) {
		return threadGone
	}
	fields, err := procStat(thread)
	if err != nil || fields[statState] == "R" {
		return threadRuns
	}
	return threadSleeps
}

// awaitAskers waits until all threads have made use of answers about some names, but for those that hold
// the lock of the directory unless locked is set. It ends with done, which may be nil, and with ctx. It
// reports whether time had to pass.
func (fs *FS) awaitAskers(
	ctx context.Context, of func(*keptName) bool, locked bool, done <-chan struct{},
) (slow bool) {
	tick := time.NewTicker(threadPoll)
	defer tick.Stop()
	for looked := int64(0); ; {
		threads := fs.kept.answered(of, locked)
		if len(threads) == 0 {
			return slow
		}
		if t := now(); looked == 0 || t-looked > int64(threadLook) {
			looked = t
			for thread, answered := range threads {
				state, since := fs.thread(thread), time.Duration(t-answered)
				late := since > threadPatience || state == threadSleeps && since > sleepPatience
				if state == threadGone || late {
					slow = slow || late
					fs.kept.asked(thread)
				}
			}
		}
		select {
		case <-tick.C:
		case <-done:
			return slow
		case <-ctx.Done():
			return slow
		}
	}
}

// expireNames makes the kernel ask for all names of some directories again, and waits until it keeps none of them.
//
// Notifications wait for the locks of the directories. A request of ours that holds one may be waiting for what the
// service gives only when a recall has been answered. Such requests start over, as far as they can. The names last no
// longer than they may be kept in any case.
func (fs *FS) expireNames(ctx context.Context, ids ...layout.FileID) {
	if len(ids) == 0 {
		return
	}
	dirs := fs.kept.beginRecall(slices.Compact(ids))
	slow, of := false, inDirs(dirs)
	defer func() { fs.kept.endRecall(dirs, slow) }()
	slow = fs.awaitAskers(ctx, of, false, nil)
	names := fs.kept.list(dirs)
	if len(names) == 0 {
		return
	}
	done, over := make(chan struct{}), make(chan struct{})
	defer close(over)
	var told atomic.Int64
	// The goroutine is in the kernel until the locks of the directories are free, or until the mount ends.
	fs.spawn(func() {
		fs.forgetting <- struct{}{}
		defer func() { <-fs.forgetting }()
		defer close(done)
		fs.notify(func(k kernel) {
			for _, at := range names {
				select {
				case <-over:
					return
				default:
				}
				k.expireName(at)
				told.Add(1)
			}
		})
	})
	fs.spawn(func() { fs.freeLocks(ctx, ids, &told, done, over) }) // ends with done or over
	fs.awaitAskers(ctx, of, true, done)
	timer := time.NewTimer(time.Duration(fs.kept.until(dirs) - now()))
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		slow = true
	case <-ctx.Done():
	}
}

// freeLocks has the requests start over that hold the locks of directories whenever no name was expired for
// stuckNames. It ends when one of two channels is closed.
func (fs *FS) freeLocks(ctx context.Context, ids []layout.FileID, told *atomic.Int64, done, over <-chan struct{}) {
	stuck, _ := ctx.Value(metaclient.StuckKey{}).(func())
	tick := time.NewTicker(stuckNames)
	defer tick.Stop()
	for before := int64(0); ; {
		select {
		case <-done:
			return
		case <-over:
			return
		case <-tick.C:
		}
		if n := told.Load(); n != before {
			before = n
			continue
		}
		if fs.flights.overtake(ids) && stuck != nil {
			stuck()
		}
	}
}

// beforeRename is called before a rename that began at a time. The kernel will move the entries and go on
// keeping them, so from now on the names count at both places. It reports false if there may be no lease on
// the new directories; names are what the kernel keeps then. An error is the rename's, too.
func (fs *FS) beforeRename(
	ctx context.Context, who metarpc.Cred, e *ends, began int64,
) (names []*keptName, leased bool, err error) {
	names = fs.kept.moving(e)
	if len(names) == 0 {
		return nil, true, nil
	}
	leased = true
	if e.dirs[0] != e.dirs[1] {
		began = now()
		for i := range e.dirs {
			if i == 1 || e.exchange {
				a, err := fs.meta.Lookup(ctx, who, e.dirs[i], e.at[i].name)
				if none, _ := errnoOf(err); err != nil && none != unix.ENOENT {
					return nil, false, err
				}
				leased = leased && a.KeepName+keptSlack >= fs.kept.rest(names)
			}
		}
	}
	return names, leased && fs.kept.move(e, began), nil
}

// rest is for how long the kernel may keep one of some names at most.
func (k *keptNames) rest(names []*keptName) (rest time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := now()
	for _, n := range names {
		if n.askers > 0 {
			return threadPatience + k.most + keptSlack
		}
		rest = max(rest, time.Duration(n.until-t))
	}
	return rest
}

// awaitNames waits until the kernel keeps none of some names.
func (fs *FS) awaitNames(ctx context.Context, names []*keptName) {
	fs.awaitAskers(ctx, func(n *keptName) bool { return slices.Contains(names, n) }, true, nil)
	timer := time.NewTimer(fs.kept.rest(names))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
