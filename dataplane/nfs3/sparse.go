package nfs3

import (
	"context"
	"errors"
	"fmt"
	"math"
	"syscall"

	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/sparse"
	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// ErrNoSparse tells that a server does not have the program of package sparse: it is no data server of weft's. Its errno is
// EOPNOTSUPP, which a server that has it answers where its file system cannot do what is asked.
var ErrNoSparse error = noSparse{}

type noSparse struct{}

func (noSparse) Error() string {
	return "nfs3: the server cannot reserve space or tell holes from data"
}
func (noSparse) Errno() syscall.Errno { return syscall.EOPNOTSUPP }

// Allocate reserves space for the bytes of col in the n bytes at off of a data file, which become its size at least unless
// keepSize is set. What it has reserved is on stable storage when it returns without an error.
//
// Like Start it is hard. If ctx ends first the server may still carry it out, at any later time.
func (t *Target) Allocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, keepSize bool) error {
	return t.eachPart(ctx, df, sparse.ProcAllocate, col, off, n, func(r sparse.RangeArgs) (message, result, func() (wire.Status, uint64)) {
		res := new(sparse.RangeRes)
		return &sparse.AllocateArgs{RangeArgs: r, KeepSize: keepSize}, res, func() (wire.Status, uint64) { return res.Status, res.Off }
	})
}

// Deallocate makes the bytes of col in the n bytes at off of a data file read as zeros and frees their space. That is on
// stable storage when it returns without an error; otherwise as Allocate.
func (t *Target) Deallocate(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64) error {
	return t.eachPart(ctx, df, sparse.ProcDeallocate, col, off, n, func(r sparse.RangeArgs) (message, result, func() (wire.Status, uint64)) {
		res := new(sparse.RangeRes)
		return &r, res, func() (wire.Status, uint64) { return res.Status, res.Off }
	})
}

// Seek finds the first byte of col in the n bytes at off of a data file that is a hole or else data. What lies behind the
// end of the data file is a hole.
func (t *Target) Seek(ctx context.Context, df *layout.DataFile, col layout.Column, off, n int64, hole bool) (at int64, found bool, err error) {
	what := sparse.Data
	if hole {
		what = sparse.Hole
	}
	var res *sparse.SeekRes
	err = t.eachPart(ctx, df, sparse.ProcSeek, col, off, n, func(r sparse.RangeArgs) (message, result, func() (wire.Status, uint64)) {
		res = new(sparse.SeekRes)
		return &sparse.SeekArgs{RangeArgs: r, What: what}, res, func() (wire.Status, uint64) {
			if res.Found && res.Status == wire.OK && res.Off >= r.Off && res.Off-r.Off < r.Length {
				at, found = int64(res.Off), true
				return wire.OK, r.Off + r.Length
			}
			return res.Status, res.Off
		}
	})
	return at, found, err
}

// eachPart makes the call again and again until the range is done. build returns its arguments, where its results go, and
// what tells from them how far it came.
func (t *Target) eachPart(ctx context.Context, df *layout.DataFile, proc sparse.Proc, col layout.Column, off, n int64,
	build func(sparse.RangeArgs) (message, result, func() (wire.Status, uint64))) error {
	detail := fmt.Sprintf(" of %d bytes at %d", n, off)
	if off < 0 || n < 0 || n > math.MaxInt64-off {
		return fmt.Errorf("nfs3: %v%s: bad range", proc, detail)
	}
	fh, err := wire.NewFileHandle(df.Handles[0])
	if err != nil {
		return err
	}
	args := sparse.RangeArgs{FH: fh, Off: uint64(off), Length: uint64(n)}
	if col.Count > 1 {
		args.Column = sparse.Column{Unit: uint64(col.Unit), Count: uint32(col.Count), Index: uint32(col.Index)}
	}
	for args.Length > 0 {
		epoch := t.epoch.Load()
		if t.foreign.Load() == epoch+1 {
			return ErrNoSparse
		}
		msg, res, progress := build(args)
		ctl := &control{
			prog: sparse.Program, vers: sparse.Version, proc: uint32(proc), name: proc.String(),
			cred: df.Cred, args: msg.Append(nil), res: res,
		}
		if err := t.call(ctx, ctl, detail); err != nil {
			var refused *oncrpc.Error
			if errors.As(err, &refused) && (refused.Stat == oncrpc.ProgUnavail || refused.Stat == oncrpc.ProgMismatch) {
				// Connections made later may lead to a server that was replaced: then it is asked again.
				t.foreign.Store(t.epoch.Load() + 1)
				return ErrNoSparse
			}
			return err
		}
		status, at := progress()
		if status != wire.OK {
			return &Error{Op: ctl.name, Detail: detail, Status: status, Addr: ctl.addr}
		}
		if at <= args.Off || at-args.Off > args.Length {
			return &ReplyError{Op: ctl.name, Detail: detail, Addr: ctl.addr, Err: fmt.Errorf("done up to %d of %d bytes at %d", at, args.Length, args.Off)}
		}
		args.Length -= at - args.Off
		args.Off = at
	}
	return nil
}
