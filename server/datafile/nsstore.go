package datafile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/wire/nfs3"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/datafile/extent"
)

// maxExtents is how many extents of a data file are looked up at a time, and told in one segment.
const maxExtents = 4096

// namespaceStore is the dataStore of a device that is an NVMe namespace. A data file's handle is its number. It has no owner, and no end of its
// own: what nobody has written reads as zeros.
//
// What changes a data file goes on when the caller's context ends, since a command that was sent cannot be taken back. device.changing is locked until
// the namespace has answered, so that nothing is freed meanwhile, or written over.
type namespaceStore struct {
	d     *device
	space *extent.Space
	ns    *nvmetcp.Namespace
	met   time.Time
}

// handleOf is the handle of a data file on a namespace.
func handleOf(number uint64) []byte { return binary.BigEndian.AppendUint64(nil, number) }

// numberIn reads a handle.
func numberIn(handle []byte) (uint64, error) {
	if len(handle) != 8 {
		return 0, fmt.Errorf("a handle of %d bytes, want the 8 of a data file on a namespace: %w", len(handle), nfs3.ErrBadHandle)
	}
	return binary.BigEndian.Uint64(handle), nil
}

// answered makes NFSv3 statuses of errors but those that say that there was no answer, which are worth another try once the device was looked at.
func answered(err error) error {
	var (
		noPath *nvmetcp.NoPathError
		path   *nvmetcp.PathError
		gone   *nvmetcp.GoneError
		late   *layout.TimeoutError
		status wire.Status
		known  nfs3.Status
	)
	switch {
	case err == nil, errors.As(err, &known), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &noPath), errors.As(err, &path), errors.As(err, &gone), errors.As(err, &late), errors.Is(err, nvmetcp.ErrClosed),
		errors.As(err, &status) && status.Class() == wire.ClassFenced: // the namespace has forgotten this host's registration
		return err
	case errors.Is(err, extent.ErrNoSpace), errors.As(err, &status) && status.Errno() == syscall.ENOSPC:
		return fmt.Errorf("%w: %w", err, nfs3.ErrNoSpc)
	case errors.As(err, &status) && status.Errno() == syscall.EROFS:
		return fmt.Errorf("%w: %w", err, nfs3.ErrROFS)
	}
	return fmt.Errorf("%w: %w", err, nfs3.ErrIO)
}

// Stopping is never so: namespaces announce nothing.
func (s *namespaceStore) Stopping() bool { return false }

// Null waits for a path.
func (s *namespaceStore) Null(ctx context.Context) error {
	const again = 100 * time.Millisecond
	for !s.ns.Usable() {
		select {
		case <-time.After(again):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Pulse writes zeros to the block behind the label. Data files begin with the second unit, so the block is none of
// theirs. It waits for the namespace whatever becomes of ctx.
func (s *namespaceStore) Pulse(ctx context.Context) error {
	return answered(s.transfer(ctx, wire.OpWrite, extent.LabelSize, make([]byte, s.ns.Format().BlockSize)))
}

// Stat also makes sure that the namespace is still the device, and that the reservation is the service's.
func (s *namespaceStore) Stat(ctx context.Context) (nfs3.FsstatRes, error) {
	if err := s.d.checkNamespace(ctx, s.ns); err != nil {
		return nfs3.FsstatRes{}, err
	}
	stat, err := s.space.Stat(ctx)
	if err != nil {
		return nfs3.FsstatRes{}, err
	}
	return fsstatOf(stat), nil
}

func fsstatOf(stat extent.Stat) nfs3.FsstatRes {
	return nfs3.FsstatRes{TotalBytes: uint64(stat.Total), FreeBytes: uint64(stat.Free), AvailBytes: uint64(stat.Free)}
}

// Info is how much is copied at once.
func (s *namespaceStore) Info(context.Context) (rsize, wsize uint32, err error) {
	return fillBlock, fillBlock, nil
}

// Create does nothing: the number is the device's already.
func (s *namespaceStore) Create(_ context.Context, number uint64, _ layout.Credential) ([]byte, error) {
	return handleOf(number), nil
}

// Remove takes and frees all that a data file has, which nobody can write any more. For a while it leaves those of earlier Managers alone, as
// what these have written last may still be on its way.
func (s *namespaceStore) Remove(ctx context.Context, number uint64) (found bool, err error) {
	if number < s.d.inherited && time.Since(s.met) < settle {
		return false, nil
	}
	err = s.change(ctx, number, func(ctx context.Context) error {
		err := s.space.Remove(ctx, number)
		if err == nil {
			err = s.release(ctx, number, allGenerations)
		}
		return err
	})
	return err == nil, err
}

// release frees what a data file has lost, which the namespace need not keep any more. Whether it says that it can do that makes no difference,
// but that it may still be about to does.
func (s *namespaceStore) release(ctx context.Context, number, generation uint64) error {
	err := s.space.Ranges(ctx, number, generation, func(ranges []layout.Range) error {
		err := s.ns.Deallocate(context.WithoutCancel(ctx), ranges)
		var status wire.Status
		if errors.As(err, &status) {
			s.d.m.log.Debug("what is not needed any more is not deallocated", "device", s.d.id, "error", err)
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	return s.space.Release(ctx, number, generation)
}

// removeExtents takes and frees all that a data file has, of a namespace that is gone.
func removeExtents(ctx context.Context, space *extent.Space, number uint64) error {
	if err := space.Remove(ctx, number); err != nil {
		return err
	}
	return space.Release(ctx, number, allGenerations)
}

// Fence waits for what the service itself does to a data file. Clients are kept out by FenceSession.
func (s *namespaceStore) Fence(ctx context.Context, handle []byte, _ layout.Credential) error {
	number, err := numberIn(handle)
	if err != nil {
		return err
	}
	return s.change(ctx, number, func(context.Context) error { return nil })
}

// Cut takes and frees what is behind size, and makes zeros of the rest of its block.
func (s *namespaceStore) Cut(ctx context.Context, handle []byte, size int64) error {
	number, err := numberIn(handle)
	if err != nil {
		return err
	}
	return s.change(ctx, number, func(ctx context.Context) error {
		parts, generation, err := s.space.Truncate(ctx, number, size)
		if err != nil {
			return err
		}
		for _, part := range parts {
			block := int64(s.ns.Format().BlockSize)
			at := part.Addr - part.Addr%block
			b := make([]byte, block)
			if err := s.transfer(ctx, wire.OpRead, at, b); err != nil {
				return err
			}
			clear(b[part.Addr-at:][:part.Len])
			if err := s.transfer(ctx, wire.OpWrite, at, b); err != nil {
				return err
			}
		}
		return s.release(ctx, number, generation)
	})
}

// Grow does nothing: a data file has no end.
func (s *namespaceStore) Grow(context.Context, []byte, int64) error { return nil }

// Commit does nothing: whoever writes makes it stable before it becomes valid. The file is as long as he has said then.
func (s *namespaceStore) Commit(context.Context, []byte) (int64, error) { return 0, nil }

// Size is the end of the last block that is valid.
func (s *namespaceStore) Size(ctx context.Context, handle []byte) (int64, error) {
	number, err := numberIn(handle)
	if err != nil {
		return 0, err
	}
	size, err := s.space.Size(ctx, number)
	return size, answered(err)
}

func (s *namespaceStore) Read(ctx context.Context, handle []byte, _ layout.Credential, off int64, buf []byte) (int, error) {
	number, err := numberIn(handle)
	if err == nil && len(buf) > 0 {
		err = answered(s.read(ctx, number, off, buf))
	}
	if err != nil {
		return 0, err
	}
	return len(buf), nil
}

// read reads what is valid.
func (s *namespaceStore) read(ctx context.Context, number uint64, off int64, buf []byte) error {
	from, to := s.blocks(off, len(buf))
	b := buf
	if to-from > int64(len(buf)) {
		b = make([]byte, to-from)
	}
	for at := from; at < to; {
		extents, _, err := s.space.Lookup(ctx, number, layout.Range{Off: at, Len: to - at}, layout.IOModeRead, maxExtents)
		if err != nil {
			return err
		}
		for i := range extents {
			e := &extents[i]
			part := b[e.Off-from:][:e.Len]
			if e.State == layout.ExtentNone {
				clear(part)
			} else if err := s.transfer(ctx, wire.OpRead, e.Addr, part); err != nil {
				return err
			}
			at = e.End()
		}
	}
	if len(b) > len(buf) {
		copy(buf, b[off-from:])
	}
	return nil
}

// Write writes where the data file has space, and makes it valid.
func (s *namespaceStore) Write(ctx context.Context, handle []byte, _ layout.Credential, off int64, data []byte) error {
	number, err := numberIn(handle)
	if err != nil || len(data) == 0 {
		return err
	}
	data = bytes.Clone(data) // the caller's may be something else when it goes on without him
	return s.change(ctx, number, func(ctx context.Context) error { return s.write(ctx, number, off, data) })
}

func (s *namespaceStore) write(ctx context.Context, number uint64, off int64, data []byte) error {
	from, to := s.blocks(off, len(data))
	b := data
	if to-from > int64(len(data)) { // the rest of the first and the last block stays as it is
		block := int64(s.ns.Format().BlockSize)
		b = make([]byte, to-from)
		if err := s.read(ctx, number, from, b[:block]); err != nil {
			return err
		}
		if err := s.read(ctx, number, to-block, b[int64(len(b))-block:]); err != nil {
			return err
		}
		copy(b[off-from:], data)
	}
	for at := from; at < to; {
		r := layout.Range{Off: at, Len: to - at}
		extents, generation, err := s.space.Lookup(ctx, number, r, layout.IOModeRW, maxExtents)
		if err != nil {
			return err
		}
		begin := at
		for i := range extents {
			e := &extents[i]
			if e.State == layout.ExtentNone {
				return fmt.Errorf("%d bytes at %d: %w", e.Len, e.Off, extent.ErrNotAllocated)
			}
			if err := s.transfer(ctx, wire.OpWrite, e.Addr, b[e.Off-from:][:e.Len]); err != nil {
				return err
			}
			at = e.End()
		}
		if err := s.space.Validate(ctx, number, generation, layout.Column{}, []layout.Range{{Off: begin, Len: at - begin}}); err != nil {
			return err
		}
	}
	return nil
}

// blocks is the whole blocks in which n bytes at off lie.
func (s *namespaceStore) blocks(off int64, n int) (from, to int64) {
	block := int64(s.ns.Format().BlockSize)
	from, to = off-off%block, off+int64(n)+block-1
	return from, to - to%block
}

// change calls f, with nobody else changing the data file. When ctx ends first it goes on, with a context that ends with the device.
func (s *namespaceStore) change(ctx context.Context, number uint64, f func(context.Context) error) error {
	unlock, err := s.d.changing.lock(ctx, layout.FileID(number))
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	m := s.d.m
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		unlock()
		return ErrClosed
	}
	m.tasks.Go(func() { // ends with f, which waits for the namespace as long as the Manager's Initiator is open
		defer unlock()
		done <- f(s.d.ctx)
	})
	m.mu.Unlock()
	select {
	case err := <-done:
		return answered(err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *namespaceStore) transfer(ctx context.Context, op wire.Opcode, addr int64, data []byte) error {
	return transfer(ctx, s.ns, op, addr, data)
}

// transfer reads or writes whole blocks of a namespace. What is written is stable when it returns. It waits for commands that write whatever
// becomes of ctx.
func transfer(ctx context.Context, ns *nvmetcp.Namespace, op wire.Opcode, addr int64, data []byte) error {
	f := ns.Format()
	block := int64(f.BlockSize)
	most := min(int64(f.MaxTransfer)/block, int64(f.MaxBlocks)) * block
	if op == wire.OpWrite {
		ctx = context.WithoutCancel(ctx)
	}
	for len(data) > 0 {
		n := min(int64(len(data)), most)
		if b := int64(f.Boundary) * block; b > 0 {
			n = min(n, b-addr%b)
		}
		r := nvmetcp.Request{Command: nvmetcp.Command{
			Op: op, SLBA: uint64(addr / block), Blocks: uint32(n / block), Data: data[:n:n], FUA: op == wire.OpWrite && f.Cached,
		}}
		if err := ns.Do(ctx, &r); err != nil {
			return err
		}
		addr, data = addr+n, data[n:]
	}
	return nil
}
