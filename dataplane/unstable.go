package dataplane

import "math"

// Unstable is how many bytes of the file are kept until they are stable, on each mirror.
func (f *File) Unstable() (n int64) {
	for _, d := range f.dataFiles() {
		d.mu.Lock()
		d.retained.overlapping(0, math.MaxInt64, func(e *extent[retained]) bool {
			n += e.end - e.off
			return true
		})
		d.mu.Unlock()
	}
	return n
}
