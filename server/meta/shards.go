package meta

import (
	"math/rand/v2"
	"time"

	"github.com/weftfs/weft/internal/retry"
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// mine reports whether an inode is of the shard that is served. What is known in memory is of such alone.
func (s *Service) mine(id layout.FileID) bool {
	return s.shards == 1 || layout.ShardOf(id, s.shards) == s.cfg.Shard
}

// birthShard is the shard of an inode that is made now with this mode: that of its directory, or of a directory any.
func (s *Service) birthShard(mode uint32) int {
	if s.shards > 1 && isDir(mode) {
		return rand.IntN(s.shards)
	}
	return s.cfg.Shard
}

// aliveLook is how often it is looked whether answers may be sent again.
const aliveLook = 10 * time.Millisecond

// alive reports whether no other process can be serving the shard.
func (s *Service) alive() bool { return s.cfg.Alive == nil || s.cfg.Alive() }

// awaitAlive waits until no other process can be serving the shard, and is false if the service stops before. Nothing that a client could
// take for an answer is sent before.
func (s *Service) awaitAlive() bool {
	for !s.alive() {
		if retry.Pause(s.ctx, aliveLook) != nil {
			return false
		}
	}
	return true
}

// refuseForeign refuses a call about an inode of another shard.
func (s *Service) refuseForeign(op metarpc.Op, args any) error {
	if s.shards == 1 {
		return nil
	}
	one, several := subjects(args)
	for i := range 1 + len(several) {
		id := one
		if i > 0 {
			id = several[i-1]
		}
		if id != 0 && !s.mine(id) {
			return refusef(metarpc.StatusBadArgs, "%v of inode %d, which is of shard %d of %d: this session is for shard %d", op, id,
				layout.ShardOf(id, s.shards), s.shards, s.cfg.Shard)
		}
	}
	return nil
}

// subjects are the inodes that say to which shard a call goes, one or several: those whose state the service needs in memory.
func subjects(args any) (one layout.FileID, several []layout.FileID) {
	switch a := args.(type) {
	case *metarpc.IDArgs:
		return a.ID, nil
	case *metarpc.SetAttrArgs:
		return a.ID, nil
	case *metarpc.NameArgs:
		return a.Parent, nil
	case *metarpc.ParentArgs:
		return a.ID, nil
	case *metarpc.CreateArgs:
		return a.Parent, nil
	case *metarpc.MakeNodeArgs:
		return a.Parent, nil
	case *metarpc.TmpFileArgs:
		return a.Parent, nil
	case *metarpc.LinkArgs:
		return a.ID, nil
	case *metarpc.RemoveArgs:
		return a.Parent, nil
	case *metarpc.RenameArgs:
		return a.OldParent, nil
	case *metarpc.ReadDirArgs:
		return a.ID, nil
	case *metarpc.XattrArgs:
		return a.ID, nil
	case *metarpc.OpenArgs:
		return a.ID, nil
	case *metarpc.CloseArgs:
		return 0, a.IDs
	case *metarpc.LayoutGetArgs:
		return a.ID, nil
	case *metarpc.LayoutReturnArgs:
		return 0, a.IDs
	case *metarpc.LayoutCommitArgs:
		for i := range a.Reports {
			several = append(several, a.Reports[i].ID)
		}
		return 0, several
	case *metarpc.ReserveArgs:
		return a.ID, nil
	case *metarpc.LockArgs:
		return a.ID, nil
	case *metarpc.LeaseReturnArgs:
		return 0, a.IDs
	case *metarpc.LayoutErrorArgs:
		return a.ID, nil
	case *metarpc.VerifyArgs:
		return a.ID, nil
	case *metarpc.LayoutMoveArgs:
		return a.ID, nil
	case *metarpc.CacheStartArgs:
		return a.ID, nil
	case *metarpc.CacheDoneArgs:
		return a.ID, nil
	case *metarpc.CacheDropArgs:
		return a.ID, nil
	}
	return 0, nil // Renew, Devices and the like
}
