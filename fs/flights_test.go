package fs

import (
	"testing"
	"time"

	"github.com/weftfs/weft/layout"
)

func TestFlights(t *testing.T) {
	fs := &FS{}
	fs.flights.init()
	now := time.Now()
	var all []*flight
	for i := range 100 {
		f := &flight{op: opRead, pid: uint32(i), id: layout.FileID(i % 7), began: now.Add(-time.Duration(100-i) * time.Second)}
		all = append(all, f)
		fs.flights.start(f)
	}
	lock := &flight{op: opSetlkw, began: now.Add(-time.Hour)}
	fs.flights.start(lock)
	list := fs.Flights(50*time.Second + time.Second/2)
	if len(list) != 50 {
		t.Fatalf("%d of 50 requests", len(list))
	}
	for i, f := range list {
		if f.Op != "read" || f.PID != uint32(i) || f.ID != layout.FileID(i%7) || !f.Began.Equal(all[i].began) {
			t.Errorf("request %d: %+v", i, f)
		}
	}
	for _, f := range append(all, lock) {
		fs.flights.end(f)
		fs.flights.end(f)
	}
	if list := fs.Flights(0); len(list) != 0 {
		t.Errorf("all have ended: %+v", list)
	}
}

func TestWatchedFiles(t *testing.T) {
	fs := &FS{}
	f := &flight{id: 5, pid: 9}
	fs.watched.add(f, false, 100) // nobody asks
	if list := fs.Files(); list != nil {
		t.Errorf("%+v", list)
	}
	fs.watched.add(f, false, 100)
	fs.watched.add(f, true, 10)
	fs.watched.add(&flight{id: 6}, true, 1000)
	list := fs.Files()
	if len(list) != 2 || list[0].ID != 6 || list[1] != (FileUse{ID: 5, PID: 9, Reads: 1, Writes: 1, Read: 100, Written: 10}) {
		t.Errorf("%+v", list)
	}
	for id := range layout.FileID(2 * filesWatched) {
		fs.watched.add(&flight{id: id}, true, 1)
	}
	if n := len(fs.Files()); n > filesWatched {
		t.Errorf("%d files are watched", n)
	}
	fs.watched.asked = time.Now().Add(-watchTime - time.Second)
	fs.watched.add(f, true, 1)
	if fs.watched.on.Load() || fs.watched.files != nil {
		t.Error("nobody has asked for long, and it goes on")
	}
}
