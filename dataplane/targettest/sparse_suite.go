package targettest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane"
	"github.com/weftfs/weft/layout"
)

// RunSparse holds targets that are dataplane.Sparsers to what that says, on servers that can do it all and whose holes come
// in blocks of at most 64 KiB.
func RunSparse(t *testing.T, open func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, fx Fixture, s dataplane.Sparser)
	}{
		{"Punch", testPunch},
		{"Allocate", testAllocate},
		{"Seek", testSeek},
		{"SparseErrors", testSparseErrors},
	} {
		t.Run(c.name, func(t *testing.T) {
			fx := open(t)
			c.run(t, fx, fx.Target.(dataplane.Sparser))
		})
	}
}

// sparseBlock is a multiple of the blocks of every server.
const sparseBlock = 64 << 10

func sparseContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func testPunch(t *testing.T, fx Fixture, s dataplane.Sparser) {
	ctx, df := sparseContext(t), fx.NewFile()
	want := bytes.Repeat([]byte{0xaa}, 4*sparseBlock)
	for off := 0; off < len(want); off += sparseBlock {
		write(t, fx, df, int64(off), want[off:][:sparseBlock], layout.Unstable)
	}
	check := func(what string) {
		t.Helper()
		for off := 0; off < len(want); off += sparseBlock {
			if got, _ := read(t, fx, df, int64(off), sparseBlock); !bytes.Equal(got, want[off:][:sparseBlock]) {
				t.Errorf("%s: what is at %d is not what should be", what, off)
			}
		}
	}
	if err := s.Deallocate(ctx, df, layout.Column{}, 100, sparseBlock); err != nil {
		t.Fatal(err)
	}
	clear(want[100:][:sparseBlock])
	check("a range")
	if err := s.Deallocate(ctx, df, layout.Column{Unit: sparseBlock, Count: 2, Index: 1}, sparseBlock/2, 4*sparseBlock); err != nil {
		t.Fatal(err)
	}
	clear(want[sparseBlock:][:sparseBlock])
	clear(want[3*sparseBlock:])
	check("a column")
	if _, eof := read(t, fx, df, 4*sparseBlock-1, 1); !eof {
		t.Error("the size changed")
	}
	if err := s.Deallocate(ctx, df, layout.Column{}, 5, 0); err != nil {
		t.Errorf("nothing: %v", err)
	}
}

func testAllocate(t *testing.T, fx Fixture, s dataplane.Sparser) {
	ctx, df := sparseContext(t), fx.NewFile()
	write(t, fx, df, 0, []byte("data"), layout.Unstable)
	if err := s.Allocate(ctx, df, layout.Column{}, 0, 4*sparseBlock, true); err != nil {
		t.Fatal(err)
	}
	if got, _ := read(t, fx, df, 0, 10); string(got) != "data" {
		t.Errorf("with keepSize the file is %q", got)
	}
	if err := s.Allocate(ctx, df, layout.Column{Unit: sparseBlock, Count: 3, Index: 1}, 0, 6*sparseBlock, false); err != nil {
		t.Fatal(err)
	}
	if got, eof := read(t, fx, df, 5*sparseBlock-4, 10); !bytes.Equal(got, make([]byte, 4)) || !eof {
		t.Errorf("the end of the column is %q, end of file %v", got, eof)
	}
	if got, _ := read(t, fx, df, 0, 6); string(got) != "data\x00\x00" {
		t.Errorf("the file begins with %q", got)
	}
}

func testSeek(t *testing.T, fx Fixture, s dataplane.Sparser) {
	ctx, df := sparseContext(t), fx.NewFile()
	odd := layout.Column{Unit: sparseBlock, Count: 2, Index: 1}
	for _, unit := range []int64{1, 3, 7} {
		write(t, fx, df, unit*sparseBlock, bytes.Repeat([]byte{0xaa}, sparseBlock), layout.Unstable)
	}
	for _, c := range []struct {
		hole   bool
		off, n int64
		col    layout.Column
		found  bool
		want   int64
	}{
		{false, 0, 100 * sparseBlock, layout.Column{}, true, sparseBlock},
		{false, 0, sparseBlock, layout.Column{}, false, 0},
		{true, 0, 1, layout.Column{}, true, 0},
		{true, sparseBlock + 1, 100 * sparseBlock, layout.Column{}, true, 2 * sparseBlock},
		{true, 0, 100 * sparseBlock, odd, true, 5 * sparseBlock},
		{false, 4 * sparseBlock, 100 * sparseBlock, odd, true, 7 * sparseBlock},
		{true, 7 * sparseBlock, sparseBlock, odd, false, 0},
		{true, 7 * sparseBlock, 100 * sparseBlock, odd, true, 9 * sparseBlock},
		{false, 8 * sparseBlock, 100 * sparseBlock, layout.Column{}, false, 0},
	} {
		at, found, err := s.Seek(ctx, df, c.col, c.off, c.n, c.hole)
		if err != nil || found != c.found || found && at != c.want {
			t.Errorf("seek in %d bytes at %d of %+v, hole %v: %d, %v, %v; want %d, %v", c.n, c.off, c.col, c.hole, at, found, err, c.want, c.found)
		}
	}
}

func testSparseErrors(t *testing.T, fx Fixture, s dataplane.Sparser) {
	ctx := sparseContext(t)
	calls := func(df *layout.DataFile, off, n int64) []error {
		_, _, err := s.Seek(ctx, df, layout.Column{}, off, n, false)
		return []error{
			s.Allocate(ctx, df, layout.Column{}, off, n, true), s.Deallocate(ctx, df, layout.Column{}, off, n), err,
		}
	}
	if fx.BadFile != nil {
		for i, err := range calls(fx.BadFile, 0, 10) {
			var e interface{ Errno() syscall.Errno }
			if !errors.As(err, &e) || e.Errno() == 0 || e.Errno() == syscall.EOPNOTSUPP {
				t.Errorf("call %d of an unknown data file: %v, want an error with an errno", i, err)
			}
		}
	}
	df := fx.NewFile()
	for i, err := range calls(df, math.MaxInt64-5, 10) {
		if err == nil {
			t.Errorf("call %d beyond what a file can have: no error", i)
		}
	}
	expired, cancel := context.WithDeadline(context.Background(), time.Unix(1, 0))
	defer cancel()
	if err := s.Deallocate(expired, df, layout.Column{}, 0, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without time: %v", err)
	}
	fx.Target.Close()
	for i, err := range calls(df, 0, 1) {
		if err == nil {
			t.Errorf("call %d after Close: no error", i)
		}
	}
}
