package store

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// Subdirs is how many directories data files are spread over.
const Subdirs = 256

const (
	dirMode  = 0o700
	fileMode = 0o640 // the owner may write, the group may read (RFC 8435 section 2.2)

	labelPrefix = "device-"
	pulseName   = "pulse"

	// A pulse adds a block to the pulse file, which has so many at most: a disk without room behind its file system
	// takes only what overwrites.
	pulseBlock  = 4096
	pulseBlocks = 16
)

var (
	// ErrNoLabel: the export holds no labelled directory of the volume.
	ErrNoLabel = errors.New("no data of this volume there")
	// ErrSquashed: the server takes the superuser for somebody else.
	ErrSquashed = errors.New("the server does not take root for root")
	// ErrTaken: a file of that name exists and cannot be ours.
	ErrTaken = errors.New("the name is taken by another file")
)

// Store is a volume's directory on one data server.
type Store struct {
	ID   layout.DeviceID // what the label says; zero if there is none
	Root []byte          // handle of the export's root

	server Server
	volume string // name of the volume's directory
	dir    []byte // its handle; nil if there is none

	// Of the one call of Pulse that may be under way.
	pulse  []byte // the handle of the pulse file; nil = not known
	pulses int    // how many blocks it has

	mu      sync.Mutex
	subdirs [Subdirs][]byte // handles, nil = not known
}

// Open mounts export and reads the label. If the export has no labelled directory of the volume it returns, together
// with ErrNoLabel, a Store that is good for Format alone.
func Open(ctx context.Context, server Server, export string, volume [16]byte) (*Store, error) {
	root, err := server.Mount(ctx, export)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", export, err)
	}
	s := &Store{Root: root, server: server, volume: schema.VolumeDir(volume)}
	s.dir, _, err = server.Lookup(ctx, root, s.volume)
	if is(err, nfs3.ErrNoEnt) {
		return s, fmt.Errorf("%s: %w", export, ErrNoLabel)
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s in %s: %w", s.volume, export, err)
	}
	err = s.entries(ctx, s.dir, func(e *nfs3.EntryPlus) error {
		id, ok := parseLabel(e.Name)
		if !ok {
			return nil
		}
		if s.ID != (layout.DeviceID{}) {
			return fmt.Errorf("two labels, devices %v and %v", s.ID, id)
		}
		s.ID = id
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read %s in %s: %w", s.volume, export, err)
	}
	if s.ID == (layout.DeviceID{}) {
		return s, fmt.Errorf("%s: %w", export, ErrNoLabel)
	}
	return s, nil
}

func parseLabel(name string) (id layout.DeviceID, ok bool) {
	digits, found := strings.CutPrefix(name, labelPrefix)
	if !found || len(digits) != hex.EncodedLen(len(id)) {
		return id, false
	}
	_, err := hex.Decode(id[:], []byte(digits))
	return id, err == nil
}

// Format makes the volume's directory, if it is missing, and labels it as device id.
func (s *Store) Format(ctx context.Context, id layout.DeviceID) error {
	var err error
	if s.dir == nil {
		if s.dir, err = s.mkdir(ctx, s.Root, s.volume); err != nil {
			return err
		}
	}
	_, _, err = s.server.Create(ctx, s.dir, labelPrefix+id.String(), nfs3.Sattr{SetMode: true, Mode: 0o400})
	if err != nil && !is(err, nfs3.ErrExist) {
		return fmt.Errorf("create label in %s: %w", s.volume, err)
	}
	s.ID = id
	return nil
}

// CheckOwner checks that what the service has made belongs to the superuser, and gives it back what was made while it
// did not; if that cannot be the error is ErrSquashed.
func (s *Store) CheckOwner(ctx context.Context) error {
	attr, err := s.server.GetAttr(ctx, s.dir)
	if err != nil {
		return fmt.Errorf("attributes of %s: %w", s.volume, err)
	}
	if attr.UID == superuser.UID {
		return nil
	}
	set := nfs3.Sattr{SetUID: true, UID: superuser.UID, SetGID: true, GID: superuser.GID}
	if err := s.server.SetAttr(ctx, s.dir, set, nil); err != nil {
		return fmt.Errorf("%s belongs to user %d: %w (%w)", s.volume, attr.UID, ErrSquashed, err)
	}
	// A server may have made another user of the owner, too, and say nothing.
	if attr, err = s.server.GetAttr(ctx, s.dir); err != nil {
		return fmt.Errorf("attributes of %s: %w", s.volume, err)
	}
	if attr.UID != superuser.UID {
		return fmt.Errorf("%s belongs to user %d: %w", s.volume, attr.UID, ErrSquashed)
	}
	return nil
}

// Unformat removes what Format has made, as long as nothing else was made.
func (s *Store) Unformat(ctx context.Context) error {
	err := s.server.Remove(ctx, s.dir, labelPrefix+s.ID.String())
	if err != nil {
		return fmt.Errorf("remove the label from %s: %w", s.volume, err)
	}
	return nil
}

// mkdir makes a directory, or finds the one there is, and returns its handle.
func (s *Store) mkdir(ctx context.Context, parent []byte, name string) ([]byte, error) {
	handle, err := s.server.Mkdir(ctx, parent, name, nfs3.Sattr{SetMode: true, Mode: dirMode})
	if err != nil && !is(err, nfs3.ErrExist) {
		return nil, fmt.Errorf("mkdir %s: %w", name, err)
	}
	if err == nil && handle != nil {
		return handle, nil
	}
	if handle, _, err = s.server.Lookup(ctx, parent, name); err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return handle, nil
}

// inSubdir calls f with the handle of a subdirectory, and once more if the cached handle turns out to be stale. If there
// is no such subdirectory it is made if create is set; otherwise the error is ErrNoEnt.
func (s *Store) inSubdir(ctx context.Context, name string, create bool, f func(dir []byte) error) error {
	i, err := strconv.ParseUint(name, 16, 8)
	if err != nil {
		return err
	}
	s.mu.Lock()
	handle := s.subdirs[i]
	s.mu.Unlock()
	if handle != nil {
		if err := f(handle); !is(err, nfs3.ErrStale) {
			return err
		}
	}
	if handle, _, err = s.server.Lookup(ctx, s.dir, name); is(err, nfs3.ErrNoEnt) && create {
		handle, err = s.mkdir(ctx, s.dir, name)
	}
	if err != nil {
		return fmt.Errorf("directory %s: %w", name, err)
	}
	s.mu.Lock()
	s.subdirs[i] = handle
	s.mu.Unlock()
	return f(handle)
}

// Create makes an empty data file and returns its handle. One of that number that is there and empty, whoever owns it, is taken to
// be the result of an earlier attempt: a data server may have been killed before it had given the file its owner. If it has data,
// or is no regular file, the error is ErrTaken.
func (s *Store) Create(ctx context.Context, number uint64, owner layout.Credential) (handle []byte, err error) {
	dir, name := schema.DataFileName(number)
	err = s.inSubdir(ctx, dir, true, func(dir []byte) error {
		handle, err = s.create(ctx, dir, name, owner)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create data file %s: %w", name, err)
	}
	return handle, nil
}

func (s *Store) create(ctx context.Context, dir []byte, name string, owner layout.Credential) ([]byte, error) {
	want := nfs3.Sattr{
		SetMode: true, Mode: fileMode,
		SetUID: true, UID: owner.UID,
		SetGID: true, GID: owner.GID,
	}
	handle, attr, err := s.server.Create(ctx, dir, name, want)
	if is(err, nfs3.ErrExist) {
		return nil, ErrTaken
	}
	if err == nil && handle == nil {
		handle, attr, err = s.server.Lookup(ctx, dir, name)
	}
	if err == nil && !attr.Present {
		attr.Attr, err = s.server.GetAttr(ctx, handle)
	}
	if err == nil && attr.Attr.Size == 0 && !Owned(&attr.Attr, owner) {
		// RFC 1813 lets a server ignore attributes of a CREATE, too.
		if err := s.SetOwner(ctx, handle, owner); err != nil {
			return nil, fmt.Errorf("give it to uid %d (the export must not squash root): %w", owner.UID, err)
		}
		// Whoever owned it may have written until then.
		attr.Attr, err = s.server.GetAttr(ctx, handle)
	}
	switch {
	case err != nil:
		return nil, err
	case attr.Attr.Size > 0:
		return nil, ErrTaken
	}
	return handle, nil
}

// Owned reports whether a data file has the owner and mode it should have.
func Owned(a *nfs3.Fattr, owner layout.Credential) bool {
	return a.Type == nfs3.TypeReg && a.UID == owner.UID && a.GID == owner.GID && a.Mode&0o7777 == fileMode
}

// SetOwner sets a data file's owner and mode, and checks that the server did it.
func (s *Store) SetOwner(ctx context.Context, file []byte, owner layout.Credential) error {
	err := s.server.SetAttr(ctx, file, nfs3.Sattr{
		SetMode: true, Mode: fileMode,
		SetUID: true, UID: owner.UID,
		SetGID: true, GID: owner.GID,
	}, nil)
	if err != nil {
		return err
	}
	attr, err := s.server.GetAttr(ctx, file)
	if err != nil {
		return err
	}
	if !Owned(&attr, owner) {
		return fmt.Errorf("the server left it to uid %d, gid %d, mode %o: %w", attr.UID, attr.GID, attr.Mode, nfs3.ErrPerm)
	}
	return nil
}

// Fence gives a data file a new owner, and returns when the server has shown that it has it.
func (s *Store) Fence(ctx context.Context, file []byte, owner layout.Credential) error {
	const guarded = 3 // tries that are guarded by the ctime; somebody who writes all the time would defeat them
	for try := 0; ; try++ {
		attr, err := s.server.GetAttr(ctx, file)
		if err != nil {
			return err
		}
		if Owned(&attr, owner) {
			return nil
		}
		if try >= guarded {
			return s.SetOwner(ctx, file, owner)
		}
		err = s.server.SetAttr(ctx, file, nfs3.Sattr{
			SetMode: true, Mode: fileMode,
			SetUID: true, UID: owner.UID,
			SetGID: true, GID: owner.GID,
		}, &attr.Ctime)
		if err != nil && !is(err, nfs3.ErrNotSync) {
			return err
		}
	}
}

// Remove removes a data file and reports whether there was one.
func (s *Store) Remove(ctx context.Context, number uint64) (bool, error) {
	dir, name := schema.DataFileName(number)
	err := s.inSubdir(ctx, dir, false, func(dir []byte) error { return s.server.Remove(ctx, dir, name) })
	if is(err, nfs3.ErrNoEnt) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove data file %s: %w", name, err)
	}
	return true, nil
}

// Cut makes a data file that is longer than size as long as size.
func (s *Store) Cut(ctx context.Context, file []byte, size int64) error {
	return s.resize(ctx, file, size, func(is uint64) bool { return is <= uint64(size) })
}

// Grow makes a data file that is shorter than size as long as size.
func (s *Store) Grow(ctx context.Context, file []byte, size int64) error {
	return s.resize(ctx, file, size, func(is uint64) bool { return is >= uint64(size) })
}

// resize gives a data file a size unless it has a good one.
func (s *Store) resize(ctx context.Context, file []byte, size int64, good func(is uint64) bool) error {
	for {
		attr, err := s.server.GetAttr(ctx, file)
		if err != nil {
			return err
		}
		if good(attr.Size) {
			return nil
		}
		err = s.server.SetAttr(ctx, file, nfs3.Sattr{SetSize: true, Size: uint64(size)}, &attr.Ctime)
		if err != nil && !is(err, nfs3.ErrNotSync) {
			return err
		}
		// Look again in either case: a call that was sent twice may be refused although it worked, and somebody
		// else's change of the file may have got in between.
	}
}

// Commit makes a data file's data stable and returns its size then.
func (s *Store) Commit(ctx context.Context, file []byte) (int64, error) {
	if err := s.server.Commit(ctx, file); err != nil {
		return 0, err
	}
	return s.Size(ctx, file)
}

// Size returns a data file's size.
func (s *Store) Size(ctx context.Context, file []byte) (int64, error) {
	attr, err := s.server.GetAttr(ctx, file)
	if err != nil {
		return 0, err
	}
	return Size(&attr), nil
}

// Size is a data file's size; one beyond the range of an offset is the largest offset.
func Size(a *nfs3.Fattr) int64 { return int64(min(a.Size, uint64(layout.ToEOF))) }

// Stat returns the space of the file system that the store is on. The answer ErrStale means that the volume's directory
// is gone.
func (s *Store) Stat(ctx context.Context) (nfs3.FsstatRes, error) { return s.server.FSStat(ctx, s.dir) }

// Null asks the server for nothing but an answer; see [Server].
func (s *Store) Null(ctx context.Context) error { return s.server.Null(ctx) }

// Stopping reports whether the server has announced that it stops, and may be back soon.
func (s *Store) Stopping() bool { return s.server.Stopping() }

// Pulse writes to the pulse file, stably, which shows that the file system takes writes. It makes the file if there is
// none. One call may be under way at a time; other processes may write to the same file.
func (s *Store) Pulse(ctx context.Context) error {
	made := s.pulse == nil
	if made {
		handle, _, err := s.server.Create(ctx, s.dir, pulseName, nfs3.Sattr{SetMode: true, Mode: 0o600, SetSize: true})
		if err == nil && handle == nil {
			handle, _, err = s.server.Lookup(ctx, s.dir, pulseName)
		}
		if err != nil {
			return fmt.Errorf("create %s: %w", pulseName, err)
		}
		s.pulse, s.pulses = handle, 0
	}
	err := s.writePulse(ctx)
	if is(err, nfs3.ErrStale) {
		s.pulse = nil
		if !made {
			return s.Pulse(ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("write to %s: %w", pulseName, err)
	}
	return nil
}

// writePulse appends a block to the pulse file, and empties the file once it is large. It does that after the write,
// which would otherwise get the space of before.
func (s *Store) writePulse(ctx context.Context) error {
	block := make([]byte, pulseBlock)
	copy(block, "a metadata service of weft writes here to see whether the file system takes writes\n")
	if err := s.server.Write(ctx, s.pulse, superuser, int64(s.pulses)*pulseBlock, block); err != nil {
		return err
	}
	if s.pulses++; s.pulses < pulseBlocks {
		return nil
	}
	s.pulses = 0
	return s.Cut(ctx, s.pulse, 0)
}

// Info returns the largest READ and WRITE that the server takes.
func (s *Store) Info(ctx context.Context) (rsize, wsize uint32, err error) {
	info, err := s.server.FSInfo(ctx, s.Root)
	return info.Rtmax, info.Wtmax, err
}

// File is a file found in a store.
type File struct {
	Name   string // path below the volume's directory
	Number uint64
	Known  bool // it is a regular file with the name of a data file in its place; otherwise Number means nothing
	Handle []byte
	Attr   nfs3.Fattr
}

// List calls f with everything in one subdirectory, 0 to Subdirs-1. A subdirectory that does not exist is empty. What is removed meanwhile
// may be left out.
func (s *Store) List(ctx context.Context, subdir int, f func(*File) error) error {
	dir := fmt.Sprintf("%02x", subdir)
	handle, _, err := s.server.Lookup(ctx, s.dir, dir)
	if is(err, nfs3.ErrNoEnt) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("directory %s: %w", dir, err)
	}
	return s.entries(ctx, handle, func(e *nfs3.EntryPlus) error {
		file := File{Name: dir + "/" + e.Name}
		var err error
		if e.FH.Present {
			file.Handle = append(file.Handle, e.FH.FH.Bytes()...)
		} else if file.Handle, e.Attr, err = s.server.Lookup(ctx, handle, e.Name); is(err, nfs3.ErrNoEnt) {
			return nil
		} else if err != nil {
			return fmt.Errorf("look up %s: %w", file.Name, err)
		}
		if file.Attr = e.Attr.Attr; !e.Attr.Present {
			if file.Attr, err = s.server.GetAttr(ctx, file.Handle); is(err, nfs3.ErrStale) {
				return nil
			} else if err != nil {
				return fmt.Errorf("attributes of %s: %w", file.Name, err)
			}
		}
		if number, err := strconv.ParseUint(e.Name, 16, 64); err == nil {
			inDir, name := schema.DataFileName(number)
			file.Number, file.Known = number, inDir == dir && name == e.Name && file.Attr.Type == nfs3.TypeReg
		}
		return f(&file)
	})
}

// Find returns a data file's handle and attributes; the answer ErrNoEnt means that there is none.
func (s *Store) Find(ctx context.Context, number uint64) (handle []byte, attr nfs3.Fattr, err error) {
	dir, name := schema.DataFileName(number)
	err = s.inSubdir(ctx, dir, false, func(dir []byte) error {
		var post nfs3.PostOpAttr
		if handle, post, err = s.server.Lookup(ctx, dir, name); err != nil {
			return err
		}
		if attr = post.Attr; !post.Present {
			attr, err = s.server.GetAttr(ctx, handle)
		}
		return err
	})
	return handle, attr, err
}

// Read reads from a data file with its owner's credential; bytes behind its end are not counted.
func (s *Store) Read(ctx context.Context, file []byte, owner layout.Credential, off int64, buf []byte) (int, error) {
	return s.server.Read(ctx, file, owner, off, buf)
}

// Write writes to a data file with its owner's credential, and returns when that is stable.
func (s *Store) Write(ctx context.Context, file []byte, owner layout.Credential, off int64, data []byte) error {
	return s.server.Write(ctx, file, owner, off, data)
}

// GetAttr returns a data file's attributes.
func (s *Store) GetAttr(ctx context.Context, file []byte) (nfs3.Fattr, error) {
	return s.server.GetAttr(ctx, file)
}

// entries calls f with each entry of a directory but "." and "..".
func (s *Store) entries(ctx context.Context, dir []byte, f func(*nfs3.EntryPlus) error) error {
	var cookie uint64
	var verf nfs3.CookieVerf
	for {
		page, err := s.server.ReadDir(ctx, dir, cookie, verf)
		if err != nil {
			return err
		}
		for i := range page.Entries {
			e := &page.Entries[i]
			cookie = e.Cookie
			if e.Name == "." || e.Name == ".." {
				continue
			}
			if err := f(e); err != nil {
				return err
			}
		}
		if page.EOF {
			return nil
		}
		if len(page.Entries) == 0 {
			return fmt.Errorf("directory listing does not go on at cookie %d: %w", cookie, nfs3.ErrServerFault)
		}
		verf = page.Verf
	}
}
