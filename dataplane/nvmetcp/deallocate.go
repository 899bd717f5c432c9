package nvmetcp

import (
	"context"
	"math"
	"slices"

	"github.com/weftfs/weft/layout"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// Deallocate tells the controller that nobody needs what these bytes of the namespace hold, which are whole blocks, so that a device that is
// thin has space for others. What is there afterwards nobody knows. It does nothing if the controller has no such command.
func (n *Namespace) Deallocate(ctx context.Context, ranges []layout.Range) error {
	if !n.format.Deallocates {
		return nil
	}
	block := int64(n.format.BlockSize)
	const most = math.MaxUint32 // blocks of one
	var list []wire.DSMRange
	for _, r := range ranges {
		for at, end := r.Off/block, r.End()/block; at < end; at += most {
			list = append(list, wire.DSMRange{SLBA: uint64(at), Blocks: uint32(min(end-at, most))})
		}
	}
	for part := range slices.Chunk(list, wire.MaxDSMRanges) {
		sqe := wire.Deallocate(n.nsid, len(part), true)
		var data []byte
		for _, r := range part {
			data = r.Append(data)
		}
		if err := n.Do(ctx, &Request{Command: Command{Raw: &sqe, Data: data}}); err != nil {
			return err
		}
	}
	return nil
}
