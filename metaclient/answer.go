package metaclient

import (
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// Answer is what the service says of an inode, or the cache under a lease.
type Answer struct {
	Attr     metarpc.Attr
	Keep     time.Duration // how long Attr may be kept unless it is recalled; 0 = not at all
	KeepName time.Duration // the same for the name that was asked for or made
}

// DirPage is a part of a directory.
type DirPage struct {
	Entries []DirEntry
	EOF     bool
}

// DirEntry is one name of a DirPage.
type DirEntry struct {
	Name   string
	Cookie uint64
	Answer
}
