package datafile

import (
	"context"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
)

// dataStore is where a device has its data files: a directory on an NFSv3 data server ([store.Store]), or an NVMe namespace. Whatever it
// is, it answers with NFSv3 statuses; any other error means that there was no answer. Calls wait while the device cannot be reached, until ctx ends.
type dataStore interface {
	// Null returns when the device has answered anything at all, or when there is a path to a namespace, as keep-alives
	// watch those. It does not wait while connections are refused (ECONNREFUSED).
	Null(ctx context.Context) error
	// Stopping reports whether the data server has announced that it stops, and may be back soon.
	Stopping() bool
	// Pulse returns when the device has taken a write and has made it stable. One call may be under way at a time.
	Pulse(ctx context.Context) error
	// Stat is the space on the device. Info is the largest READ and WRITE.
	Stat(ctx context.Context) (nfs3.FsstatRes, error)
	Info(ctx context.Context) (rsize, wsize uint32, err error)
	// Create makes an empty data file, or finds the one that an earlier call has made. Remove reports whether there was one.
	Create(ctx context.Context, number uint64, owner layout.Credential) (handle []byte, err error)
	Remove(ctx context.Context, number uint64) (found bool, err error)
	// Fence sees to it that nothing that was sent with another owner's layout is carried out any more.
	Fence(ctx context.Context, handle []byte, owner layout.Credential) error
	// Cut makes a data file that is longer than size as long as size, and Grow one that is shorter.
	Cut(ctx context.Context, handle []byte, size int64) error
	Grow(ctx context.Context, handle []byte, size int64) error
	// Commit makes all of a data file stable. It returns how long the file is, as Size does.
	Commit(ctx context.Context, handle []byte) (size int64, err error)
	Size(ctx context.Context, handle []byte) (int64, error)
	// Read counts no bytes behind the end. Write returns when all of data is stable.
	Read(ctx context.Context, handle []byte, owner layout.Credential, off int64, buf []byte) (n int, err error)
	Write(ctx context.Context, handle []byte, owner layout.Credential, off int64, data []byte) error
}
