package dataplane

import (
	"context"

	"github.com/weftfs/weft/layout"
)

// Validator is what a Target also offers if its data files have extents (see layout.Extent), of which the service has to be
// told what was written to those that are INVALID.
//
// The target remembers which of their blocks were written, for the reads of all who have a segment that calls them INVALID. A data
// file of a newer generation ends what it knows of older ones: what is to be told must have been told before.
type Validator interface {
	// Written is what was written to INVALID extents and is on stable storage, of which the service has not been told: whole
	// blocks, in their order. What df itself calls valid is not among it.
	Written(df *layout.DataFile) []layout.Range
	// Validated notes that the service has made ranges valid that Written has returned for df.
	Validated(df *layout.DataFile, ranges []layout.Range)
	// Cut forgets what was written to whole blocks at and past from, which the file has no longer.
	Cut(df *layout.DataFile, from int64)
	// Forget forgets what was validated: no segment is used any more, by a request that has begun or will begin, that
	// calls it INVALID.
	Forget(df *layout.DataFile)
	// Quiesce returns when nothing that was started for df is carried out any more, or with an error when ctx ends. What was not sent is not
	// sent, and ends with an error. Nothing may be started for df meanwhile.
	Quiesce(ctx context.Context, df *layout.DataFile) error
}

// Written is what was written to INVALID extents of a data file.
type Written struct {
	File   *layout.DataFile // Generation is that of what was written
	Ranges []layout.Range   // whole blocks, in their order
}

// Written is what the service has to be told, with the layoutcommit, of what was written to INVALID extents: until it has made
// them valid they are zeros to all others, and for good if this host is lost. Call it after Commit: what that has made stable is
// in it.
func (f *File) Written() (all []Written) {
	f.eachValidator(func(v Validator, df *layout.DataFile) {
		if f.Forsaken(df) {
			return
		}
		if ranges := v.Written(df); len(ranges) > 0 {
			all = append(all, Written{df, ranges})
		}
	})
	return all
}

// Validated notes that the service has made valid what Written has returned. The segments that the caller has kept must say so by
// now, or must not be kept for longer than to the next Forget.
func (f *File) Validated(all []Written) {
	for _, w := range all {
		if v := f.validator(w.File); v != nil {
			v.Validated(w.File, w.Ranges)
		}
	}
}

// Forget lets go of the memory that it takes to know what was validated. No segment may be in use, nor be used later, that is
// older than that. It is to be called when the file is not used any more, and may be called before. Of data files that have unstable data
// it forgets nothing: that may be sent again by the segment that it was written by.
func (f *File) Forget() {
	f.eachValidator(func(v Validator, df *layout.DataFile) {
		d := f.lookup(df)
		d.mu.Lock()
		idle := d.retained.Len() == 0
		d.mu.Unlock()
		if idle {
			v.Forget(df)
		}
	})
}

// Quiesce waits until nothing is carried out any more that was started for copies that were forsaken, as far as they have extents: space that
// another file may get. What was not sent yet is not sent. Reads and writes that have begun must have ended for their callers before.
func (f *File) Quiesce(ctx context.Context) error {
	for _, d := range f.dataFiles() {
		df := d.use.Load()
		if !d.forsaken.Load() {
			continue
		}
		if v := f.validator(df); v != nil {
			if err := v.Quiesce(ctx, df); err != nil {
				return err
			}
		}
	}
	return nil
}

// eachValidator runs do for the data files that were written to.
func (f *File) eachValidator(do func(Validator, *layout.DataFile)) {
	for _, d := range f.dataFiles() {
		df := d.use.Load()
		if v := f.validator(df); v != nil {
			do(v, df)
		}
	}
}

// validator returns the data file's target if it is a Validator.
func (f *File) validator(df *layout.DataFile) Validator {
	c := f.plane.device(df.Device).conn.Load()
	if c == nil {
		return nil
	}
	v, _ := c.Target.(Validator)
	return v
}
