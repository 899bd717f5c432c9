package data

import (
	"container/list"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/fileio"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// file is an open file or directory of the export. There is at most one of each, unless it has no name any more.
type file struct {
	handles  *handles
	fh       wire.FileHandle
	fd       int
	dir      bool
	readOnly bool // the file system was when it was opened

	// mu fences data files: it is held shared from the check of a caller's rights to the end of the READ, WRITE or
	// COMMIT, and exclusively to change the ids and modes that the check reads, and to punch holes. Directories need none.
	mu sync.RWMutex

	sync syncState

	direct     atomic.Int32 // descriptor for direct transfers; 0: not opened yet, or fileio.NoDirect
	streams    fileio.Streams
	unsendable atomic.Bool // pages of it could not be sent
	held       atomic.Bool // it was logged that others have it open

	// Guarded by cache.mu.
	refs   int           // of requests
	place  *list.Element // in cache.recent
	doomed bool          // out of the cache; closed when refs is 0
}

// cache keeps files open between requests.
type cache struct {
	handles *handles
	max     int // files, beyond those that requests use; the share of descriptors may allow fewer
	// suspect says that files may have pages of before, which were not written, see fileio.DropPages.
	suspect bool

	mu     sync.Mutex
	files  map[wire.FileHandle]*file
	recent list.List // of *file, the one used last first
}

func (c *cache) init(h *handles, max int) {
	c.handles, c.max = h, max
	c.files = map[wire.FileHandle]*file{}
	c.recent.Init()
}

// most is how many files it may keep now, beyond those that requests use. A file may need two descriptors.
func (c *cache) most() int { return min(descriptors.Files.Part()/2, c.max) }

// get returns the file of a handle; the caller puts it back. spare, if not nil, is a file that the cache has too many:
// the caller retires it.
func (c *cache) get(fh wire.FileHandle) (f, spare *file, err error) {
	if f := c.hit(fh); f != nil {
		return f, nil, nil
	}
	if f, err = descriptors.Retry(func() (*file, error) { return c.handles.open(fh) }); err != nil {
		return nil, nil, err
	}
	if c.suspect && !f.dir {
		fileio.DropPages(f.fd)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if other := c.take(fh); other != nil {
		f.close()
		return other, nil, nil
	}
	f.refs = 1
	f.place = c.recent.PushFront(f)
	c.files[fh] = f
	if len(c.files) > c.most() {
		spare = c.oldest()
	}
	return f, spare, nil
}

func (c *cache) hit(fh wire.FileHandle) *file {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.take(fh)
}

// take returns a cached file with a reference. mu is held.
func (c *cache) take(fh wire.FileHandle) *file {
	f := c.files[fh]
	if f != nil {
		f.refs++
		c.recent.MoveToFront(f.place)
	}
	return f
}

// oldest returns the file that nobody has used for longest, with a reference; nil if all are in use. mu is held.
func (c *cache) oldest() *file {
	for e := c.recent.Back(); e != nil; e = e.Prev() {
		if f := e.Value.(*file); f.refs == 0 {
			f.refs = 1
			return f
		}
	}
	return nil
}

// put ends a request's use of f.
func (c *cache) put(f *file) {
	c.mu.Lock()
	f.refs--
	last := f.doomed && f.refs == 0
	c.mu.Unlock()
	if last {
		f.close()
	}
}

// retire is put for a spare file, which leaves the cache if nobody else has taken or written it meanwhile.
func (c *cache) retire(f *file) {
	c.mu.Lock()
	if f.refs == 1 && !f.doomed && !f.sync.dirty.Load() {
		c.remove(f)
	}
	c.mu.Unlock()
	c.put(f)
}

// doom takes f, which the caller holds, out of the cache since it has no name any more: its space is freed when the last
// request puts it.
func (c *cache) doom(f *file) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !f.doomed {
		c.remove(f)
	}
}

// remove takes f out. mu is held.
func (c *cache) remove(f *file) {
	delete(c.files, f.fh)
	c.recent.Remove(f.place)
	f.doomed = true
}

// giveBack closes the files that no request uses, except those with something to be synced. It returns how many
// descriptors they had at least.
func (c *cache) giveBack() (n int) {
	var idle []*file
	c.mu.Lock()
	for _, f := range c.files {
		if f.refs == 0 && !f.sync.dirty.Load() {
			c.remove(f)
			idle = append(idle, f)
		}
	}
	c.mu.Unlock()
	for _, f := range idle {
		f.close()
	}
	return len(idle)
}

// written returns the files that no sync has covered, each with a reference.
func (c *cache) written() (files []*file) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.files {
		if f.sync.dirty.Load() {
			f.refs++
			files = append(files, f)
		}
	}
	return files
}

// close closes everything; no request runs any more.
func (c *cache) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.files {
		f.close()
	}
	clear(c.files)
	c.recent.Init()
}

// get returns the file of a handle; the caller puts it back into the cache, and has no file's lock.
func (s *Server) get(fh wire.FileHandle) (*file, error) {
	f, spare, err := s.cache.get(fh)
	if spare != nil {
		if spare.sync.dirty.Load() {
			s.sync(spare, false) // once it is closed the kernel may forget that it could not write it
		}
		if spare.sync.failed.Load() {
			spare.recover()
		}
		s.cache.retire(spare)
	}
	if err == nil && f.sync.failed.Load() {
		f.recover()
	}
	return f, err
}

// open is get together with stat.
func (s *Server) open(fh wire.FileHandle, st *unix.Stat_t) (*file, error) {
	f, err := s.get(fh)
	if err != nil {
		return nil, err
	}
	if err := s.stat(f, st); err != nil {
		s.cache.put(f)
		return nil, err
	}
	return f, nil
}

// stat describes a file that the caller holds: ESTALE if it has no name any more.
//
// A request may find a file, open it and enter it in the cache while another removes it, so that the remover finds
// nothing to forget. Hence every request looks for itself.
func (s *Server) stat(f *file, st *unix.Stat_t) error {
	if err := unix.Fstat(f.fd, st); err != nil {
		return err
	}
	if st.Nlink == 0 {
		s.cache.doom(f)
		if s.broker != nil {
			s.broker.revoke(f.fh) // its space is freed when nobody has it open
		}
		return unix.ESTALE
	}
	return nil
}

// forget closes a file if its last name was removed.
func (s *Server) forget(fh wire.FileHandle) {
	if f := s.cache.hit(fh); f != nil {
		var st unix.Stat_t
		s.stat(f, &st)
		s.cache.put(f)
	} else if s.broker != nil {
		s.broker.revoke(fh)
	}
}
