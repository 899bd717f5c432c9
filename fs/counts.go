package fs

import (
	"sync/atomic"
	"syscall"

	"github.com/weftfs/weft/internal/hist"
)

// Requests of the kernel by their numbers (linux/fuse.h), as they are counted.
const (
	opLookup  = 1
	opSymlink = 6
	opMknod   = 8
	opMkdir   = 9
	opUnlink  = 10
	opRmdir   = 11
	opRename  = 12
	opLink    = 13
	opRead    = 15
	opWrite   = 16
	opSetlkw  = 33
	opCreate  = 35
	opRename2 = 45
)

var opNames = [...]string{
	opLookup: "lookup", 3: "getattr", 4: "setattr", 5: "readlink", opSymlink: "symlink", opMknod: "mknod", opMkdir: "mkdir", opUnlink: "unlink", opRmdir: "rmdir",
	opRename: "rename", opLink: "link", 14: "open",
	opRead: "read", opWrite: "write", 17: "statfs", 18: "release", 20: "fsync", 21: "setxattr", 22: "getxattr", 23: "listxattr", 24: "removexattr", 25: "flush",
	27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 31: "getlk", 32: "setlk", opSetlkw: "setlkw", 34: "access", opCreate: "create", 43: "fallocate", 44: "readdirplus",
	opRename2: "rename", 46: "lseek", 47: "copy_file_range", 51: "tmpfile", 52: "statx",
}

// counts is what requests came to since the mount.
type counts struct {
	ops   [len(opNames)]hist.Hist
	fails [134]atomic.Uint64 // by errno
}

func (c *counts) failed(errno syscall.Errno) {
	if int(errno) < len(c.fails) {
		c.fails[errno].Add(1)
	}
}

// Requests is how many requests of the kernel were answered, and how fast, by name; reads and writes of files that it serves by itself are not among them.
// Errors is how many answers were errors.
func (fs *FS) Requests() (ops map[string]*hist.Counts, errors map[syscall.Errno]uint64) {
	ops, errors = map[string]*hist.Counts{}, map[syscall.Errno]uint64{}
	for op := range fs.counts.ops {
		counts := fs.counts.ops[op].Counts()
		if opNames[op] == "" || counts.Total() == 0 {
			continue
		}
		if have := ops[opNames[op]]; have != nil { // rename has two numbers
			have.Join(&counts)
		} else {
			ops[opNames[op]] = &counts
		}
	}
	for errno := range fs.counts.fails {
		if n := fs.counts.fails[errno].Load(); n > 0 {
			errors[syscall.Errno(errno)] = n
		}
	}
	return ops, errors
}
