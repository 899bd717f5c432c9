package datafile

import (
	"context"
	"log/slog"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/nvmeauth"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/schema"
)

// Namespace is a device that is a namespace, as somebody reaches it who takes the place of the volume's Manager, such as fsck.
type Namespace struct {
	nvme *nvmetcp.Initiator
	ns   *nvmetcp.Namespace
}

// DialNamespace reaches the namespace of a device of a volume. No Manager of the volume runs meanwhile.
func DialNamespace(ctx context.Context, volume [16]byte, row *schema.Device, secrets *nvmeauth.Secrets, log *slog.Logger) (*Namespace, error) {
	nvme, err := newInitiator(volume, secrets, log)
	if err != nil {
		return nil, err
	}
	ns, err := nvme.Open(ctx, portals(row), row.NQN, row.NSID)
	if err == nil && ns.Format().Reservable { // for who is not registered may not even read
		err = ns.Register(ctx, hostKey(volume))
	}
	if err != nil {
		nvme.Close()
		return nil, err
	}
	return &Namespace{nvme, ns}, nil
}

func (n *Namespace) Identity() extent.Identity { return identityOf(n.ns.ID()) }

// Block and Size are in bytes.
func (n *Namespace) Block() int64 { return int64(n.ns.Format().BlockSize) }
func (n *Namespace) Size() int64  { return sizeOf(n.ns) }

// ReadAt reads whole blocks.
func (n *Namespace) ReadAt(ctx context.Context, p []byte, off int64) error {
	return transfer(ctx, n.ns, wire.OpRead, off, p)
}

// WriteAt writes whole blocks, which are stable when it returns.
func (n *Namespace) WriteAt(ctx context.Context, p []byte, off int64) error {
	return transfer(ctx, n.ns, wire.OpWrite, off, p)
}

func (n *Namespace) Close() error { return n.nvme.Close() }
