package fs

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

func withAtime(a Atime) func(*Config) { return func(c *Config) { c.Atime = a } }

// setTimes sets the times that the service knows to some time before now.
func (s *service) setTimes(id layout.FileID, atime, changed time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &s.nodes[id].attr
	a.Atime = time.Now().Add(-atime).UnixNano()
	a.Mtime = time.Now().Add(-changed).UnixNano()
	a.Ctime = a.Mtime
}

func atimeOf(a fuse.Attr) time.Time { return time.Unix(int64(a.Atime), int64(a.Atimensec)) }

// atimeAtService is what the service knows.
func (r *rig) atimeAtService(id layout.FileID) time.Time {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return time.Unix(0, r.s.nodes[id].attr.Atime)
}

func TestAtimeOf(t *testing.T) {
	for flags, want := range map[uintptr]Atime{
		0:                                    {},
		unix.MS_RELATIME | unix.MS_NOSUID:    {},
		unix.MS_NOATIME:                      {Rule: AtimeNever},
		unix.MS_RDONLY:                       {Rule: AtimeNever},
		unix.MS_STRICTATIME:                  {Rule: AtimeStrict},
		unix.MS_NODIRATIME:                   {NoDir: true},
		unix.MS_NODIRATIME | unix.MS_NOATIME: {Rule: AtimeNever, NoDir: true},
	} {
		if got := AtimeOf(flags); got != want {
			t.Errorf("flags %#x: %+v, want %+v", flags, got, want)
		}
	}
}

// The rules of mount(8), for a read of a file, a listing, and a link that is followed.
func TestAtimeRules(t *testing.T) {
	for _, c := range []struct {
		rule         Atime
		atime, mtime time.Duration // before now
		file, dir    bool          // the access counts
	}{
		{Atime{}, 2 * time.Hour, time.Hour, true, true},   // read before the last change
		{Atime{}, time.Hour, 2 * time.Hour, false, false}, // and behind it
		{Atime{}, 25 * time.Hour, 50 * time.Hour, true, true},
		{Atime{Rule: AtimeStrict}, time.Hour, 2 * time.Hour, true, true},
		{Atime{Rule: AtimeNever}, 2 * time.Hour, time.Hour, false, false},
		{Atime{NoDir: true}, 2 * time.Hour, time.Hour, true, false},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			s := newService(1, 1<<20)
			maker := newRig(t, s, withAtime(Atime{Rule: AtimeNever}))
			file, fh := maker.create("f")
			maker.write(file, 0, []byte("data"))
			maker.want(maker.fsync(file, fh), 0, "fsync")
			maker.closeFile(file, fh)
			var made fuse.EntryOut
			in := header(layout.RootID)
			maker.want(maker.raw.Mkdir(nil, &fuse.MkdirIn{InHeader: in, Mode: 0755}, "d", &made), 0, "mkdir")
			dir := layout.FileID(made.NodeId)
			maker.want(maker.raw.Symlink(nil, &in, "target", "l", &made), 0, "symlink")
			link := layout.FileID(made.NodeId)
			for _, id := range []layout.FileID{file, dir, link} {
				s.setTimes(id, c.atime, c.mtime)
			}
			r := newRig(t, s, withAtime(c.rule))
			fh = r.open(file, unix.O_RDONLY)
			for _, n := range []struct {
				id     layout.FileID
				counts bool
				access func()
			}{
				{file, c.file, func() { r.read(file, 0, 4) }},
				{dir, c.dir, func() { r.listDir(dir, 4096, 0, nil) }},
				{link, c.file, func() {
					h := header(link)
					_, status := r.raw.Readlink(nil, &h)
					r.want(status, 0, "readlink")
				}},
			} {
				before := atimeOf(r.stat(n.id))
				start := time.Now()
				n.access()
				after := atimeOf(r.stat(n.id))
				if counted := !after.Before(start); counted != n.counts || !counted && !after.Equal(before) {
					t.Errorf("inode %d: the time of the last access was %v and is %v", n.id, before, after)
				}
			}
			r.closeFile(file, fh)
		})
	}
}

// Reads cause no call; a report of all files follows, and then there is silence.
func TestAtimeReport(t *testing.T) {
	r := newRig(t, newService(1, 1<<20), withAtime(Atime{Rule: AtimeStrict}))
	const files = 5
	var ids []layout.FileID
	for n := range files {
		id, fh := r.create(fmt.Sprint(n))
		defer r.release(fh)
		r.write(id, 0, []byte("data"))
		r.want(r.fsync(id, fh), 0, "fsync")
		r.read(id, 0, 4) // asks for a layout
		ids = append(ids, id)
	}
	waittest.Until(t, "the first report", func() bool { return r.atimeAtService(ids[0]).Equal(atimeOf(r.stat(ids[0]))) })
	var mu sync.Mutex
	calls := map[string]int{}
	r.m.setHook(func(_ context.Context, call string) error {
		mu.Lock()
		defer mu.Unlock()
		calls[call]++
		return nil
	})
	start := time.Now()
	for range 100 {
		for _, id := range ids {
			r.read(id, 0, 4)
		}
	}
	mu.Lock()
	if len(calls) > 0 {
		t.Errorf("reads caused calls: %v", calls)
	}
	mu.Unlock()
	waittest.Until(t, "the report", func() bool {
		for _, id := range ids {
			if r.atimeAtService(id).Before(start) {
				return false
			}
		}
		return true
	})
	mu.Lock()
	defer mu.Unlock()
	if calls["LayoutCommit atimes"] != 1 {
		t.Errorf("%v, want one report", calls)
	}
	r.accesses.mu.Lock()
	defer r.accesses.mu.Unlock()
	if r.accesses.timer != nil || len(r.accesses.parts[0].pending) > 0 {
		t.Error("the timer runs though there is nothing to report")
	}
}

// The end of a mount reports what is left.
func TestAtimeClose(t *testing.T) {
	r := newRig(t, newService(1, 1<<20), withAtime(Atime{Rule: AtimeStrict}))
	id, fh := r.create("f")
	r.write(id, 0, []byte("data"))
	start := time.Now()
	r.read(id, 0, 4)
	r.release(fh)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if r.atimeAtService(id).Before(start) {
		t.Error("the last access was not reported")
	}
}

// A time that is set wins over accesses noted before, also over those that are being reported.
func TestAtimeSet(t *testing.T) {
	r := newRig(t, newService(1, 1<<20), withAtime(Atime{Rule: AtimeStrict}))
	id, fh := r.create("f")
	r.write(id, 0, []byte("data"))
	r.want(r.fsync(id, fh), 0, "fsync")
	reporting, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.m.setHook(func(_ context.Context, call string) error {
		if call == "LayoutCommit atimes" {
			once.Do(func() { close(reporting) })
			<-goOn
		}
		return nil
	})
	r.read(id, 0, 4)
	<-reporting
	r.read(id, 0, 4) // pending, too
	set := make(chan fuse.Attr)
	go func() {
		a, _ := r.setAttr(id, fuse.SetAttrInCommon{Valid: fuse.FATTR_ATIME, Atime: 1000})
		set <- a
	}()
	select {
	case <-set:
		t.Error("the time was set while an older one was on its way")
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	want := time.Unix(1000, 0)
	if got := atimeOf(<-set); !got.Equal(want) {
		t.Errorf("set to %v, shown as %v", want, got)
	}
	if got := atimeOf(r.stat(id)); !got.Equal(want) || !r.atimeAtService(id).Equal(want) {
		t.Errorf("set to %v, is %v, at the service %v", want, got, r.atimeAtService(id))
	}
	r.closeFile(id, fh)
}

// What is remembered and what is to be reported is bounded.
func TestAtimeBounds(t *testing.T) {
	r := newRig(t, newService(1, 1<<20))
	r.m.setHook(func(ctx context.Context, call string) error {
		if call == "LayoutCommit atimes" {
			<-ctx.Done()
		}
		return ctx.Err()
	})
	for id := range layout.FileID(3 * atimeInodes) {
		r.accesses.other(1000+id, true)
		r.accesses.show(&metarpc.Attr{ID: 1<<40 + id, Mode: unix.S_IFDIR, Atime: -1})
	}
	r.accesses.mu.Lock()
	defer r.accesses.mu.Unlock()
	if n, m := len(r.accesses.known), len(r.accesses.parts[0].pending); n > atimeInodes || m > atimeInodes {
		t.Errorf("%d inodes are remembered, %d accesses pending", n, m)
	}
	r.m.setHook(func(context.Context, string) error { return nil })
}
