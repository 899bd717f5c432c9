package fs

import (
	"path"

	"github.com/weftfs/weft/layout"
)

// Names is where inodes were when it was made, as far as it is known here.
type Names struct {
	root layout.FileID
	of   map[layout.FileID]place // parent is an inode number here
}

// Names asks nobody.
func (fs *FS) Names() *Names {
	n := &Names{fs.root, map[layout.FileID]place{}}
	fs.meta.KnownNames(func(dir layout.FileID, name string, child layout.FileID) { n.of[child] = place{uint64(dir), name} })
	return n
}

// maxDepth is how deep directories may be to be believed: names that were learned at different times may lead in a circle.
const maxDepth = 1000

// Path is where an inode is below the root of the mount, or of its subdirectory that is mounted, which itself is "."; empty if it is not known.
func (n *Names) Path(id layout.FileID) string {
	if id == n.root {
		return "."
	}
	below := ""
	for range maxDepth {
		at, ok := n.of[id]
		if !ok {
			return ""
		}
		below = path.Join(at.name, below)
		if id = layout.FileID(at.parent); id == n.root {
			return below
		}
	}
	return ""
}
