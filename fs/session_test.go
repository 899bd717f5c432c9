package fs

import (
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
)

// What a session had written is not reported in the next one, whatever state the report is in.
func TestSessionReport(t *testing.T) {
	for _, when := range []string{"provisional", "durable"} {
		t.Run(when, func(t *testing.T) {
			r := newRig(t, newService(1, 1<<20))
			id, fh := r.create("f")
			r.write(id, 0, pattern(1, 1000))
			r.OnSizeQuery(t.Context(), []layout.FileID{id}) // or close would not tell anything of a new file
			r.write(id, 1000, pattern(1, 1000))
			begun, over := make(chan struct{}), make(chan error, 1)
			call, report := "LayoutCommit provisional", func() fuse.Status { return r.flush(id, fh) }
			if when == "durable" {
				call, report = "LayoutCommit", func() fuse.Status { return r.fsync(id, fh) }
			}
			var first atomic.Bool
			r.m.setHook(func(ctx context.Context, c string) error {
				if c == call && first.CompareAndSwap(false, true) {
					close(begun)
					<-ctx.Done() // it is on its way, and would be sent again in the next session
					over <- ctx.Err()
				}
				return nil
			})
			status := make(chan fuse.Status, 1)
			go func() { status <- report() }() // ends with the report
			<-begun
			r.OnLost(0)
			select {
			case err := <-over:
				if err == nil {
					t.Error("the report was made")
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the report is still on its way after the end of the session")
			}
			r.want(<-status, syscall.EIO, "close or fsync")
			r.OnReset(t.Context(), 0, true)
			waittest.Until(t, "unstable data is dropped", func() bool { return r.plane.Retained() == 0 })
			r.want(r.fsync(id, fh), 0, "fsync")
			if n := r.durable(id); n != 0 {
				t.Errorf("a size of %d was reported", n)
			}
			r.closeFile(id, fh)
		})
	}
}

// A write whose acknowledgement comes after the end of the session starts again, unless it was made under a lock.
func TestSessionWrite(t *testing.T) {
	for _, locked := range []bool{false, true} {
		t.Run(map[bool]string{false: "plain", true: "locked"}[locked], func(t *testing.T) {
			r := newRig(t, newService(1, 1<<20))
			id, fh := r.create("f")
			r.write(id, 0, []byte("first")) // so that there is a layout
			r.want(r.fsync(id, fh), 0, "fsync")
			if locked {
				lock := &fuse.LkIn{InHeader: header(id), Fh: fh, Owner: 7, Lk: fuse.FileLock{End: 1 << 62, Typ: unix.F_WRLCK}}
				r.want(r.raw.SetLk(nil, lock), 0, "lock")
			}
			var writes atomic.Int32
			sent := make(chan struct{}, 2)
			r.faults[0].SetRules(faultytest.Rule{Kind: layout.OpWrite, Match: func(*layout.Op) bool {
				writes.Add(1)
				sent <- struct{}{}
				return true
			}, Late: 200 * time.Millisecond, Times: 1})
			status := make(chan fuse.Status, 1)
			go func() { // ends with the write
				_, s := r.raw.Write(nil, &fuse.WriteIn{InHeader: header(id), Fh: fh, Offset: 1000, Flags: unix.O_RDWR}, []byte("late"))
				status <- s
			}()
			<-sent
			r.OnLost(0)
			if locked {
				r.OnLockLost(id, false, 7)
				r.want(<-status, syscall.EIO, "write under a lock that was lost")
				r.want(r.fsync(id, fh), syscall.EIO, "fsync")
				if n := r.durable(id); n != 5 {
					t.Errorf("the size became %d", n)
				}
				r.flush(id, fh)
				r.release(fh)
				return
			}
			r.want(<-status, 0, "write")
			if n := writes.Load(); n != 2 {
				t.Errorf("%d WRITEs to the data server, want the second one in the new session", n)
			}
			r.flush(id, fh) // tells of the loss
			r.want(r.fsync(id, fh), 0, "fsync")
			if n := r.durable(id); n != 1004 {
				t.Errorf("the size is %d, want 1004", n)
			}
			r.closeFile(id, fh)
		})
	}
}
