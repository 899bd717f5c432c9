package dataplane

import (
	"math"

	"github.com/weftfs/weft/internal/rangemap"
)

// Unstable is how many bytes of the file are kept until they are stable, on each mirror.
func (f *File) Unstable() (n int64) {
	for _, d := range f.dataFiles() {
		d.mu.Lock()
		d.retained.Overlapping(0, math.MaxInt64, func(e *rangemap.Entry[retained]) bool {
			n += e.End - e.Off
			return true
		})
		d.mu.Unlock()
	}
	return n
}
