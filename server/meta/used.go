package meta

import (
	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/server/schema"
)

// How much of a file is allocated (metarpc.Used) is in its inode row as its last writer has counted it. Before rows are read it is looked at who may be
// writing, as with reports: what is in the row then is all that was written before, and later writes come later.

// manySessions stands for several that may write a file.
var manySessions = new(session)

// together is who writes a file if a and b do; nil is nobody.
func together(a, b *session) *session {
	switch {
	case a == nil || a == b:
		return b
	case b == nil:
		return a
	}
	return manySessions
}

// to is what a session is told: what it has written itself, and has not reported, it knows.
func (r report) to(sess *session) report {
	if r.writer == sess {
		r.writer = nil
	}
	return r
}

// becomeWriter makes cl a writer's; Service.mu is held.
func (cl *claim) becomeWriter() {
	if cl.writer {
		return
	}
	cl.writer, cl.crowded = true, false
	for _, other := range cl.file.claims {
		if other != cl && other.writer {
			other.crowded, cl.crowded = true, true
		}
	}
}

// crowd is called when a session changes how much is allocated of f: what others have counted does not hold any more. Service.mu is held.
func (f *file) crowd(sess *session) {
	for _, cl := range f.claims {
		if cl.writer && cl.sess != sess {
			cl.crowded = true
		}
	}
}

// counts is what a session's report makes known of the file that cl, which may be nil, is about; Service.mu is held.
func (cl *claim) counts(used metarpc.Used) metarpc.Used {
	if cl == nil || !cl.writer || cl.crowded || cl.file.writtenByOthers(cl.sess) {
		return 0
	}
	return max(used, 0)
}

// writes reports whether r tells of data that was written, or that may have been.
func (r *fileReport) writes() bool { return r.report != report{} || r.used != 0 }

// usedOfCut is what is known of a file that gets another size. emptied says that with size 0 nothing stays allocated.
func usedOfCut(row *schema.Inode, size int64, emptied bool) metarpc.Used {
	switch {
	case size == 0 && emptied:
		return metarpc.UsedOf(0)
	case size >= row.Size:
		return row.Used
	case row.Used == metarpc.UsedOf(row.Size): // no holes
		return metarpc.UsedOf(size)
	}
	return 0
}
