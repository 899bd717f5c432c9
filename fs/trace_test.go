package fs

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/targettest"
)

func TestTracer(t *testing.T) {
	fs := &FS{}
	fs.flights.init()
	if _, err := fs.Trace([]string{"read", "reed"}, 0); err == nil || !strings.Contains(err.Error(), `"reed"`) || fs.tracing() {
		t.Errorf("an unknown kind: %v", err)
	}
	slow, err := fs.Trace([]string{"read"}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	all, err := fs.Trace(nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	var j journey
	j.metadata.Store(1)
	j.data.Store(2)
	for _, f := range []*flight{{op: opRead, began: now}, {op: opWrite, began: now.Add(-time.Hour)}, {op: opRead, pid: 7, id: 9, began: now.Add(-time.Hour)}, {op: 1000, began: now}} {
		fs.flights.start(f)
		fs.answered(f, &j, "name", 3, 4)
	}
	if len(slow.C) != 1 || len(all.C) != 3 {
		t.Fatalf("%d slow reads and %d requests, want 1 and 3", len(slow.C), len(all.C))
	}
	if got := <-slow.C; got.Flight != (Flight{"read", 7, 9, now.Add(-time.Hour)}) || got.Name != "name" || got.Off != 3 || got.Bytes != 4 || got.Took < time.Hour || got.Metadata != 1 || got.Data != 2 {
		t.Errorf("%+v", got)
	}
	fs.EndTrace(slow)
	for range tracerRoom + 5 { // nobody reads
		fs.answered(&flight{op: opRead, began: now}, &j, "", 0, 0)
	}
	if all.Lost() != 8 || slow.Lost() != 0 || len(slow.C) != 0 {
		t.Errorf("%d and %d are lost, %d were told of after the end", all.Lost(), slow.Lost(), len(slow.C))
	}
	fs.EndTrace(all)
	if fs.tracing() {
		t.Error("it goes on")
	}
}

// TestTracedTransfers has files be read and written while tracers come and go: what is traced adds up, and names a device of the file.
func TestTracedTransfers(t *testing.T) {
	s := newService(2, 4<<10)
	r := newRig(t, s)
	id, fh := r.create("f")
	defer r.closeFile(id, fh)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for n := range int64(4) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				r.write(id, n*16<<10, pattern(uint64(n), 16<<10))
				r.wantRead(id, n*16<<10, 16<<10, pattern(uint64(n), 16<<10))
				r.want(r.fsync(id, fh), 0, "fsync")
			}
		})
	}
	for range 20 {
		tr, err := r.Trace([]string{"read", "write"}, 0)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		for range 300 {
			got := <-tr.C
			seen[got.Op]++
			device := slices.ContainsFunc(s.servers, func(server *targettest.Server) bool { return server.ID() == got.Device })
			if got.Bytes != 16<<10 || got.Off%(16<<10) != 0 || got.ID != id || got.Data > got.Took+time.Millisecond || got.Slowest > got.Took+time.Millisecond || device != (got.Slowest > 0) {
				t.Errorf("%+v", got)
			}
			if got.Slowest > 0 {
				seen["device"]++
			}
			if got.Data > 0 {
				seen["data"]++
			}
		}
		if seen["read"] == 0 || seen["write"] == 0 || seen["device"] < 100 || seen["data"] < 100 {
			t.Errorf("of 300: %v", seen)
		}
		r.EndTrace(tr)
	}
	close(stop)
	wg.Wait()
	if p := r.Names().Path(id); p != "f" {
		t.Errorf("its path is %q", p)
	}
}
