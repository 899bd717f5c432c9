package data

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// pattern fills b with bytes that tell file, offset and round.
func pattern(b []byte, file, off, round uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], (off+uint64(i))*0x9e3779b97f4a7c15+file<<32+round)
	}
}

// Many connections write, read and remove at once, each region being one writer's, with payloads of the usual and of the
// largest size, and find what they wrote. Files outnumber the descriptors that are kept.
func TestConcurrency(t *testing.T) {
	ts := start(t, ramDir(t), limitFiles(3))
	const workers = 4
	rounds := uint64(5)
	if testing.Short() {
		rounds = 3
	}
	setup := ts.dial()
	shared := setup.create(ts.root, "shared", 1000, 1001)
	var wg sync.WaitGroup
	for w := range uint64(workers) {
		c := ts.dial()
		wg.Go(func() {
			size := 1 << 20
			if w%2 == 0 {
				size = maxIO
			}
			cred := as(1000, 1001)
			buf := make([]byte, size)
			for round := range rounds {
				name := fmt.Sprintf("own-%d-%d", w, round)
				own := c.createAs(super, ts.root, name, wire.Exclusive, wire.Sattr{}, wire.CreateVerf{byte(w), byte(round)})
				if own.Status != wire.OK || c.setattr(super, own.FH.FH, owned(1000, 1001)).Status != wire.OK {
					t.Errorf("CREATE: %v", own.Status)
					return
				}
				for _, fh := range []wire.FileHandle{shared, own.FH.FH} {
					off := w * maxIO
					pattern(buf, w, off, round)
					res := c.write(cred, fh, off, buf, wire.Stable(round%3))
					if res.Status != wire.OK || int(res.Count) != size {
						t.Errorf("WRITE: %v, %d bytes", res.Status, res.Count)
					}
					if commit := c.commit(cred, fh); commit.Status != wire.OK || commit.Verf != res.Verf {
						t.Errorf("COMMIT: %v", commit.Status)
					}
					c.check(fh, off, buf)
				}
				if st := c.remove(super, ts.root, name); st != wire.OK {
					t.Errorf("REMOVE: %v", st)
				}
				if st := c.read(cred, own.FH.FH, 0, 10).Status; st != wire.ErrStale {
					t.Errorf("READ of what was removed: %v", st)
				}
			}
		})
	}
	wg.Wait()
	if n := ts.openFiles(); n > workers+3 {
		t.Errorf("%d files open", n)
	}
	ts.stop()
	ts.wantNoPayloads()
}

// When SETATTR has answered, no WRITE that the old ids allowed changes the file any more. Writers with the old ids go on
// all the while.
func TestFence(t *testing.T) {
	ts := start(t, ramDir(t))
	const (
		writers = 4
		size    = 256 << 10
		rounds  = 8
	)
	c := ts.dial()
	var uid atomic.Uint32
	uid.Store(1000)
	fh := c.create(ts.root, "f", 1000, 1001)
	c.put(fh, 0, make([]byte, writers*size))
	var done atomic.Bool
	var accepted, refused [writers]atomic.Int64
	var wg sync.WaitGroup
	for w := range writers {
		c := ts.dial()
		wg.Go(func() {
			var mine sync.WaitGroup
			for i := range 3 { // calls at once
				mine.Go(func() {
					buf := make([]byte, size)
					for n := uint64(i); !done.Load(); n += 3 {
						pattern(buf, uint64(w), n, n)
						switch st := c.write(as(uid.Load(), 1001), fh, uint64(w*size), buf, wire.Unstable).Status; st {
						case wire.OK:
							accepted[w].Add(1)
						case wire.ErrAcces:
							refused[w].Add(1)
						default:
							t.Errorf("WRITE: %v", st)
							return
						}
					}
				})
			}
			mine.Wait()
		})
	}
	// progress waits until each writer has counted something more.
	progress := func(counts *[writers]atomic.Int64) {
		for w := range counts {
			for before := counts[w].Load(); counts[w].Load() == before && !t.Failed(); {
				time.Sleep(20 * time.Microsecond)
			}
		}
	}
	var a, b []byte
	for round := range uint32(rounds) {
		next := 1001 + round
		if res := c.setattr(super, fh, wire.Sattr{SetUID: true, UID: next}); res.Status != wire.OK || res.Wcc.After.Attr.UID != next {
			t.Errorf("SETATTR: %v", res.Status)
			break
		}
		var err1, err2 error
		a, err1 = os.ReadFile(ts.export("f"))
		progress(&refused)
		b, err2 = os.ReadFile(ts.export("f"))
		if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
			t.Errorf("round %d: the file changed after the fence", round)
			break
		}
		uid.Store(next)
		progress(&accepted)
	}
	done.Store(true)
	wg.Wait()
}

// SETATTR waits for I/O that runs, and I/O for it.
func TestFenceWaits(t *testing.T) {
	ts := start(t, "")
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	defer ts.cache.put(f)
	setattr := (&wire.SetattrArgs{FH: fh, Attr: wire.Sattr{SetMode: true, Mode: 0o640}}).Append(nil)
	read := (&wire.ReadArgs{FH: fh}).Append(nil)
	write := (&writeCall{wire.WriteArgs{FH: fh}, nil}).Append(nil)
	commit := (&wire.CommitArgs{FH: fh}).Append(nil)
	waits := func(proc wire.Proc, args []byte, unlock func()) {
		t.Helper()
		w := c.send(nfsCall(proc, super), args)
		select {
		case <-w:
			t.Errorf("%v did not wait", proc)
			unlock()
		case <-time.After(20 * time.Millisecond):
			unlock()
			<-w
		}
	}
	f.mu.RLock()
	waits(wire.ProcSetattr, setattr, f.mu.RUnlock)
	for proc, args := range map[wire.Proc][]byte{wire.ProcRead: read, wire.ProcWrite: write, wire.ProcCommit: commit} {
		f.mu.Lock()
		waits(proc, args, f.mu.Unlock)
	}
}

// Memory for payloads is scarce while all of READ, WRITE and SETATTR want the same file: a WRITE that has memory waits for
// the SETATTR, which waits for the READ, which must not wait for memory then.
func TestScarcePayloadMemory(t *testing.T) {
	ts := start(t, ramDir(t), func(s *Server) { s.payloads = semaphore.NewWeighted(2 << 20) })
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	c.put(fh, 0, make([]byte, 1<<20))
	var wg sync.WaitGroup
	for range 4 {
		for _, do := range []func(c *client){
			func(c *client) { c.put(fh, 0, make([]byte, 1<<20)) },
			func(c *client) { c.read(super, fh, 0, 1<<20) },
			func(c *client) { c.setattr(super, fh, wire.Sattr{SetMode: true, Mode: 0o640}) },
		} {
			c := ts.dial()
			wg.Go(func() {
				for range 20 {
					do(c)
				}
			})
		}
	}
	wg.Wait()
	ts.stop()
	if !ts.payloads.TryAcquire(2 << 20) {
		t.Error("memory for payloads was not given back")
	}
}

// READ and WRITE do not allocate, whoever's they are.
func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector sync.Pool drops what it is given")
	}
	ts := start(t, ramDir(t))
	c := ts.dial()
	fh := c.create(ts.root, "f", 1000, 1001)
	const size = 64 << 10
	c.put(fh, 0, make([]byte, size))
	for proc, args := range map[wire.Proc]appender{
		wire.ProcRead:  &wire.ReadArgs{FH: fh, Count: size},
		wire.ProcWrite: &writeCall{wire.WriteArgs{FH: fh}, make([]byte, size)},
	} {
		nc := ts.dialRaw()
		// Two users take turns.
		calls := [][]byte{
			marked(nfsCall(proc, as(1000, 1001)), args.Append(nil)),
			marked(nfsCall(proc, as(0, 0, 1, 2, 3)), args.Append(nil)),
		}
		reply := make([]byte, size+1000)
		n := testing.AllocsPerRun(300, func() {
			for _, call := range calls {
				if _, err := nc.Write(call); err != nil {
					t.Fatal(err)
				}
				io.ReadFull(nc, reply[:4])
				n, _ := oncrpc.ParseRecordMark(reply)
				if _, err := io.ReadFull(nc, reply[:n]); err != nil {
					t.Fatal(err)
				}
			}
		})
		if n != 0 {
			t.Errorf("%v: %v allocations", proc, n)
		}
	}
}
