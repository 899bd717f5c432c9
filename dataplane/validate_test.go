package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/layout"
)

// noting is a target whose data files have extents, in name. It notes what it is told.
type noting struct {
	dataplane.Target
	ranges []layout.Range
	told   []string
	err    error // of Quiesce
	punch  func(df *layout.DataFile)
}

func (n *noting) Deallocate(_ context.Context, df *layout.DataFile, _ layout.Column, _, _ int64) error {
	n.punch(df)
	return nil
}

func (n *noting) Allocate(context.Context, *layout.DataFile, layout.Column, int64, int64, bool) error {
	return nil
}

func (n *noting) Seek(_ context.Context, _ *layout.DataFile, _ layout.Column, off, _ int64, _ bool) (int64, bool, error) {
	return off, false, nil
}

func (n *noting) Written(*layout.DataFile) []layout.Range { return n.ranges }

func (n *noting) Validated(df *layout.DataFile, ranges []layout.Range) {
	n.told = append(n.told, fmt.Sprint("validated ", df.Generation, ranges))
}

func (n *noting) Cut(df *layout.DataFile, from int64) {
	n.told = append(n.told, fmt.Sprint("cut ", df.Generation, " ", from))
}

func (n *noting) Forget(df *layout.DataFile) {
	n.told = append(n.told, fmt.Sprint("forget ", df.Generation))
}

func (n *noting) Quiesce(_ context.Context, df *layout.DataFile) error {
	n.told = append(n.told, fmt.Sprintf("quiesce %x", df.Handles[0]))
	return n.err
}

// What was written is asked of the targets that know it, for the data files that were written to.
func TestWritten(t *testing.T) {
	e := newEnv(t, options{servers: 3})
	targets := map[layout.DeviceID]*noting{}
	plane := newPlane(t, 0, func(id layout.DeviceID) (dataplane.Target, error) {
		i := slices.IndexFunc(e.servers, func(s *targettest.Server) bool { return s.ID() == id })
		if i == 2 {
			return e.targets[i], nil // has none
		}
		targets[id] = &noting{Target: e.targets[i], ranges: []layout.Range{{Off: int64(i) * 4096, Len: 512}}}
		return targets[id], nil
	})
	seg := e.segment(4096, 3, 1)
	f := plane.NewFile()
	if all := f.Written(); len(all) > 0 {
		t.Errorf("%v was written to a new file", all)
	}
	write := func(seg *layout.Segment, n int) {
		t.Helper()
		done := make(chan error, 1)
		f.StartWrite(&dataplane.Write{Segment: seg, Data: make([]byte, n), Done: func(err error) { done <- err }})
		plane.Flush()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	write(seg, 4096)
	first, second := &seg.Mirrors[0].Servers[0], &seg.Mirrors[0].Servers[1]
	want := []dataplane.Written{{File: first, Ranges: []layout.Range{{Off: 0, Len: 512}}}}
	if all := f.Written(); !reflect.DeepEqual(all, want) {
		t.Errorf("written is %v, want %v", all, want)
	}
	newer := e.segment(4096, 3, 1)
	for i := range newer.Mirrors[0].Servers {
		df := &newer.Mirrors[0].Servers[i]
		df.Handles, df.Generation = seg.Mirrors[0].Servers[i].Handles, 7
	}
	write(newer, 3*4096)
	all := f.Written()
	if len(all) != 2 || all[0].File.Generation != 7 || all[1].File.Generation != 7 {
		t.Errorf("written is %v", all)
	}
	f.Validated(all)
	if err := f.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
	f.Drop(100)
	f.Forget()
	for i, df := range []*layout.DataFile{first, second} {
		want := []string{fmt.Sprintf("validated 7 [[%d, %d)]", i*4096, i*4096+512), "cut 7 100", "forget 7"}
		if got := targets[df.Device].told; !slices.Equal(got, want) {
			t.Errorf("target %d was told %q, want %q", i, got, want)
		}
	}
	if err := f.Quiesce(t.Context()); err != nil {
		t.Error(err)
	}
	f.Forsake([]*layout.DataFile{second})
	targets[second.Device].told = nil
	targets[second.Device].err = errors.New("test")
	if err := f.Quiesce(t.Context()); err != targets[second.Device].err {
		t.Error(err)
	}
	if got := targets[second.Device].told; !slices.Equal(got, []string{fmt.Sprintf("quiesce %x", second.Handles[0])}) || len(targets[first.Device].told) != 3 {
		t.Errorf("the target of the copy that was given up was told %q, the other one %q", got, targets[first.Device].told)
	}
	if all := f.Written(); len(all) != 1 || all[0].File.Device != first.Device {
		t.Errorf("written is %v, with one copy given up", all)
	}
}

// A hole is punched by the extents of the segment that it was asked for with, whatever segment another request has meanwhile.
func TestPunchByItsOwnExtents(t *testing.T) {
	e := newEnv(t, options{servers: 1})
	var target *noting
	plane := newPlane(t, 0, func(layout.DeviceID) (dataplane.Target, error) { return target, nil })
	segment := func(off int64) *layout.Segment {
		seg := e.segment(4096, 1, 1)
		files := seg.Mirrors[0].Servers
		files = append(files, files[0]) // a data file that has two columns
		for i := range files {
			files[i].Handles, files[i].Generation = [][]byte{{1}}, 1
			files[i].Extents = []layout.Extent{{Off: off, Len: 16384}}
		}
		seg.Off, seg.Len, seg.OnNamespaces, seg.Mirrors[0].Servers = off, 16384, true, files
		return seg
	}
	here, there := segment(0), segment(1<<20)
	f := plane.NewFile()
	punch := func(seg *layout.Segment) {
		if err := f.Punch(t.Context(), seg, seg.Off, seg.Len, func(error) {}); err != nil {
			t.Error(err)
		}
	}
	var used []int64
	target = &noting{Target: e.targets[0], punch: func(df *layout.DataFile) {
		used = append(used, df.Extents[0].Off)
		if len(used) == 1 {
			punch(there)
		}
	}}
	punch(here)
	if want := []int64{0, 1 << 20, 1 << 20, 0}; !slices.Equal(used, want) {
		t.Errorf("holes are punched by the extents at %d, want %d", used, want)
	}
}
