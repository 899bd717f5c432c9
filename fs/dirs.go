package fs

import (
	"context"
	"math"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// Entries are found by their offsets, so of an open directory hardly anything is kept (openDir), and no entries between
// two requests: the kernel holds the directory's lock for each of them, so what one returns is true as far as this
// mount goes.
//
// An offset has 31 bits, since programs of 32 bits cannot take more, and means the same in every open, mount and
// restart: which entries are still to come. Cookies have 63 bits, of which the upper 31 are the entry's hash. Entries
// of one hash are a group; nearly all are alone in theirs. The last one of a group has its hash for an offset. Those
// before it have the numbers below, as many as are free. So what was told may be removed: those that follow keep their
// offsets.
//
// The kernel may take a part of a page only, as much as the program's buffer holds, and goes on with the offset of the
// last entry that it took. So the offsets in a page grow. An entry that has no offset of its own, since the numbers
// below its group's hash are taken, has that of the entry in front of it and a page to itself. openDir tells where the
// next page of the same open begins then. Any other open begins such a group again.

func (r *raw) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	// ENOSYS would save this request, and make the kernel cache directories for good.
	out.Fh = r.dirs.add(cred(&in.InHeader))
	return fuse.OK
}

func (r *raw) ReleaseDir(in *fuse.ReleaseIn) { r.dirs.remove(in.Fh) }

// FsyncDir waits until all names that the service has shown are durable. Changes that this mount made are durable when
// they are answered, but a lookup can show a name that another mount is still making.
func (r *raw) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	_, err := r.fs.meta.LayoutCommit(ctx, []metarpc.SizeReport{{ID: r.fs.id(in.NodeId)}}, false)
	return r.status(err)
}

func (r *raw) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	ctx := r.begin(cancel, &in.InHeader)
	defer ctx.end()
	return r.status(r.readDir(ctx, in, &dirPage{list: out, left: int(in.Size)}))
}

// Offsets of entries, as the kernel gives them back to say where to go on. Those of names are greater.
const (
	afterDot    = 1
	afterDotDot = 2
)

// restBits are those of a cookie that its hash lacks.
const restBits = 32

// dirHash is the offset of an entry that is alone with it.
func dirHash(cookie uint64) uint64 { return max(cookie>>restBits, afterDotDot+1) }

func (r *raw) readDir(ctx context.Context, in *fuse.ReadIn, page *dirPage) error {
	id := r.fs.id(in.NodeId)
	off := in.Offset
	if off < afterDot {
		page.add(fuse.DirEntry{Name: ".", Ino: uint64(id), Mode: unix.S_IFDIR, Off: afterDot})
	}
	if off < afterDotDot {
		page.add(fuse.DirEntry{Name: "..", Ino: fuse.FUSE_UNKNOWN_INO, Mode: unix.S_IFDIR, Off: afterDotDot})
		off = afterDotDot
	}
	dir, ok := r.dirs.of(in.Fh)
	if !ok {
		dir.who = cred(&in.InHeader)
	}
	var told *dirEnd
	if dir.last.name != "" && dir.last.off == in.Offset {
		told = &dir.last
	}
	entries, err := r.fs.groupsAfter(ctx, dir.who, id, off, told, page.room())
	if err != nil {
		return err
	}
	if in.Flags&unix.O_NOATIME == 0 {
		r.fs.accesses.other(id, true)
	}
	if last := page.fill(entries, off); last.name != "" {
		r.dirs.told(in.Fh, last)
	}
	return nil
}

// groupsAfter reads about limit of the entries that come after an offset: whole groups, but for what was told of the
// first one before. There is at least one unless none are left. told is the last entry that was told, nil if only the
// offset is known.
func (fs *FS) groupsAfter(
	ctx context.Context, who metarpc.Cred, dir layout.FileID, off uint64, told *dirEnd, limit int,
) (list []metaclient.DirEntry, err error) {
	guess := false // off has to tell what was told before
	owned := false // an entry has off for its hash
	passed := func(*metaclient.DirEntry) bool { return false }
	after := uint64(0)
	switch {
	case off > math.MaxInt32:
		return nil, nil // no offset of ours
	case told != nil:
		after = told.cookie - 1
		passed = func(e *metaclient.DirEntry) bool {
			return e.Cookie < told.cookie || e.Cookie == told.cookie && e.Name <= told.name
		}
	case off > afterDotDot:
		guess = true
		passed = func(e *metaclient.DirEntry) bool {
			owned = owned || dirHash(e.Cookie) == off
			return dirHash(e.Cookie) <= off
		}
		if off > afterDotDot+1 {
			after = off<<restBits - 1
		}
	}
	for {
		// One more than wanted for what has passed, and one as a group is known to be whole when another one begins.
		got, err := fs.meta.ReadDir(ctx, who, dir, after, min(limit+2, metarpc.MaxPage))
		if err != nil {
			return nil, err
		}
		list = append(list, got.Entries...)
		for len(list) > 0 && passed(&list[0]) {
			list = list[1:]
		}
		if got.EOF {
			break
		}
		after = got.Entries[len(got.Entries)-1].Cookie
		if n := withoutLastGroup(list); n > 0 {
			list = list[:n]
			break
		}
	}
	if guess && !owned && len(list) > 0 {
		// The offset may be one of those that the first group has below its hash.
		n, left := firstGroup(list), dirHash(list[0].Cookie)-off
		if left < uint64(n) {
			list = list[uint64(n)-left:]
		}
	}
	return list, nil
}

// firstGroup is how many entries the first group of a list has, which is not empty.
func firstGroup(list []metaclient.DirEntry) int {
	n := 1
	for n < len(list) && dirHash(list[n].Cookie) == dirHash(list[0].Cookie) {
		n++
	}
	return n
}

// withoutLastGroup is how many entries a list has in front of its last group.
func withoutLastGroup(list []metaclient.DirEntry) int {
	n := len(list)
	for n > 0 && dirHash(list[n-1].Cookie) == dirHash(list[len(list)-1].Cookie) {
		n--
	}
	return n
}

// dirPage is the answer to one READDIR. READDIRPLUS is not used: what it says of attributes and names the kernel may not
// keep, see the package comment, and could as well have not asked for. It will ask for each name it wants; the answers
// are here already.
type dirPage struct {
	list *fuse.DirEntryList
	left int // bytes
	some bool
}

// direntSize is the size of struct fuse_dirent without its name.
const direntSize = 24

func (p *dirPage) size(name string) int { return direntSize + (len(name)+7)&^7 }

// room is how many entries with names of ordinary length fit.
func (p *dirPage) room() int {
	return min(max(p.left/p.size("ordinary-name.ext"), 1), metarpc.MaxPage)
}

// add adds an entry if there is room.
func (p *dirPage) add(e fuse.DirEntry) bool {
	if !p.list.AddDirEntry(e) {
		return false
	}
	p.left -= p.size(e.Name)
	p.some = true
	return true
}

// fill adds the entries for which there is room, of groups that come after an offset, and returns the last one of them.
func (p *dirPage) fill(entries []metaclient.DirEntry, off uint64) (last dirEnd) {
	for len(entries) > 0 {
		n, hash := firstGroup(entries), dirHash(entries[0].Cookie)
		for i, e := range entries[:n] {
			at, behind := off, uint64(n-1-i)
			if off+behind < hash {
				at = hash - behind
			}
			alone := at == off // it has no offset of its own
			if alone && p.some || !p.add(fuse.DirEntry{Name: e.Name, Ino: uint64(e.Attr.ID), Mode: e.Attr.Mode, Off: at}) {
				return last
			}
			if last = (dirEnd{at, e.Cookie, e.Name}); alone {
				return last
			}
			off = at
		}
		entries = entries[n:]
	}
	return last
}

// openDirs are the directories that are open.
type openDirs struct {
	mu   sync.Mutex
	last uint64
	open map[uint64]openDir
}

// openDir remembers who opened a directory: what open(2) allowed, readdir(3) may do, whoever does it. And it remembers
// where the last page ended, which is where the kernel goes on if it has taken all of that.
type openDir struct {
	who  metarpc.Cred
	last dirEnd
}

// dirEnd is an entry that was told, and its offset. The zero dirEnd is none.
type dirEnd struct {
	off, cookie uint64
	name        string
}

func (d *openDirs) add(who metarpc.Cred) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last++
	d.open[d.last] = openDir{who: who}
	return d.last
}

func (d *openDirs) of(fh uint64) (openDir, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, ok := d.open[fh]
	return dir, ok
}

func (d *openDirs) told(fh uint64, last dirEnd) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if dir, ok := d.open[fh]; ok {
		dir.last = last
		d.open[fh] = dir
	}
}

func (d *openDirs) remove(fh uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, fh)
}
