package dataplane_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/faultytest"
	"github.com/weftfs/weft/layout"
)

// What a plane says of its devices is what was done there.
func TestStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, options{servers: 2, wsize: 4096, rsize: 8192})
		if st := e.plane.Stats(); len(st) != 0 {
			t.Errorf("devices that nobody has asked for: %+v", st)
		}
		f, seg := e.plane.NewFile(), e.segment(16384, 2, 1)
		for i, target := range e.targets {
			target.SetRules(
				faultytest.Rule{Kind: layout.OpWrite, Late: time.Duration(i+1) * time.Second},
				faultytest.Rule{Kind: layout.OpRead, Match: func(op *layout.Op) bool { return op.Off == 4096 }, Err: errFault},
				faultytest.Rule{Kind: layout.OpRead, Late: time.Duration(i+1) * time.Millisecond},
				faultytest.Rule{Kind: layout.OpCommit, Late: time.Minute / 2},
			)
		}
		// of is what is said of server i.
		of := func(i int) dataplane.DeviceStats {
			t.Helper()
			all := e.plane.Stats()
			if len(all) != 2 {
				t.Fatalf("%d devices of 2", len(all))
			}
			for _, st := range all {
				if st.Device == e.servers[i].ID() {
					return st
				}
			}
			t.Fatalf("server %d is not told of", i)
			return dataplane.DeviceStats{}
		}
		check := func(what string, st dataplane.OpStats, ops, bytes uint64, each time.Duration) {
			t.Helper()
			if st.Ops() != ops || st.Bytes != bytes || st.Time != time.Duration(ops)*each {
				t.Errorf("%s: %d requests, %d bytes, %v, want %d, %d, %v each", what, st.Ops(), st.Bytes, st.Time, ops, bytes, each)
			}
			if q := st.Latency.Quantile(0.99); 2*q < each || q > 2*each {
				t.Errorf("%s: 99 %% within %v, want %v", what, q, each)
			}
		}

		w := e.startWrite(f, seg, 0, make([]byte, 16384+100), layout.Unstable)
		synctest.Wait()
		if a, b := of(0), of(1); a.Outstanding != 4 || b.Outstanding != 1 || a.Writes.Ops() != 0 || a.Target != e.targets[0] {
			t.Errorf("while writing: %+v, %+v", a, b)
		}
		if err := w.wait(t); err != nil {
			t.Fatal(err)
		}
		e.check(f, seg, 8192, make([]byte, 8192))
		e.commit(f)
		a, b := of(0), of(1)
		check("writes", a.Writes, 4, 16384, time.Second)
		check("writes of the other", b.Writes, 1, 100, 2*time.Second)
		check("reads", a.Reads, 1, 8192, time.Millisecond)
		check("reads of the other", b.Reads, 0, 0, 0)
		check("commits", b.Commits, 1, 0, time.Minute/2)
		if a.Outstanding != 0 || b.Outstanding != 0 || a.Errors != 0 || a.Err != nil {
			t.Errorf("at rest: %+v, %+v", a, b)
		}

		// A failure counts as such, what its caller takes back does not count at all.
		failed := time.Now()
		if err := e.startRead(f, seg, 4096, make([]byte, 1)).wait(t); !errors.Is(err, errFault) {
			t.Fatalf("read: %v", err)
		}
		e.servers[0].Pause()
		r := e.startRead(f, seg, 0, make([]byte, 1))
		synctest.Wait()
		r.read.Detach()
		r.wait(t)
		time.Sleep(time.Second)
		if a := of(0); a.Errors != 1 || !errors.Is(a.Err, errFault) || !a.ErrTime.Equal(failed) || a.Reads.Ops() != 1 || a.Outstanding != 0 {
			t.Errorf("after a failure: %+v", a)
		}
	})
}

// A device that no target can be made for is told of, too.
func TestStatsNoTarget(t *testing.T) {
	e := &env{t: t}
	e.plane = newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) { return nil, errFault })
	seg := &layout.Segment{
		Range: layout.Range{Len: layout.ToEOF}, IOMode: layout.IOModeRead,
		Mirrors: []layout.Mirror{{Servers: []layout.DataFile{{Device: layout.DeviceID{7}, Handles: [][]byte{{1}}}}}},
	}
	if err := e.startRead(e.plane.NewFile(), seg, 0, make([]byte, 1)).wait(t); !errors.Is(err, errFault) {
		t.Fatal(err)
	}
	st := e.plane.Stats()
	if len(st) != 1 || st[0].Device != (layout.DeviceID{7}) || st[0].Errors != 1 || !errors.Is(st[0].Err, errFault) || st[0].Target != nil {
		t.Errorf("%+v", st)
	}
}
