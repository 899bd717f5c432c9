package pebble

import (
	"math"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// zeroAhead is how far a log is filled with zeros ahead of what is written to it, in bytes. On a small disk it is less.
const zeroAhead = 1 << 20

var zeros [zeroAhead]byte

// isLog reports whether a file is a log of Pebble's.
func isLog(name string) bool { return filepath.Ext(name) == ".log" }

// logFile is a new log, which Pebble appends to and syncs for each commit. If the file grew with each record, or blocks that were only reserved
// got their first content, the file system would have to commit its journal for each sync, too. So the file is written
// twice: first with zeros, far ahead, and a sync of what replaces them is one of data alone. Pebble takes zeros for the end of a log (record.ErrZeroedChunk),
// as it does what an older log has left in one that it uses again.
type logFile struct {
	vfs.File
	ahead  int64 // how far it is filled
	room   *room // nil: there is no reserve. Nothing is filled while the disk is full
	end    int64 // of what was written
	zeroed int64 // up to where there are zeros
}

// Write implements [vfs.File]. It is called by one goroutine at a time.
func (f *logFile) Write(p []byte) (int, error) {
	if end := f.end + int64(len(p)); end > f.zeroed && !f.room.isShort() {
		if _, err := f.WriteAt(zeros[:f.ahead], end); err != nil {
			f.zeroed = math.MaxInt64 // a disk that is full may still have room for p
		} else {
			f.zeroed = end + f.ahead
		}
	}
	n, err := f.File.Write(p)
	f.end += int64(n)
	return n, err
}
