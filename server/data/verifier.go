package data

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

const (
	// noteSize is the size of a note in bytes: a sector, so that a disk writes it as a whole. A new note takes the
	// place of the old one, which needs no space.
	noteSize = 512
	// lastSyncTime is how long a server that is to end may take to begin syncs of what was written.
	lastSyncTime = 5 * time.Second
	lastSyncs    = 16 // at a time
)

// bootFile holds the kernel's name for the time since it was booted. syncfs is the system call. Tests put others in
// their place.
var (
	bootFile = "/proc/sys/kernel/random/boot_id"
	syncfs   = unix.Syncfs
)

// nothingWritten is what the log says as long as WRITE and COMMIT are refused.
const nothingWritten = "nothing is written to the file system until it is unmounted and mounted again"

// pageCache names the page cache that writes go to. It differs from that of another time if what was not on the disk
// then may be lost.
type pageCache struct {
	Boot  string `json:"boot"`
	Mount string `json:"mount"` // of all mounts since then, this one
}

// vouched is the note in DIR/verifier: a verifier, and what it vouches for as long as that is the same.
type vouched struct {
	Verifier string `json:"verifier"` // in hex
	pageCache
	Failures string `json:"failures"` // failures.Failures when the verifier was drawn
	File     uint64 `json:"file"`     // the note's inode: a copy of the directory holds what was written by then
}

// failures is what the servers of a file system tell one another, in a note that is not on it.
type failures struct {
	pageCache
	Failures string `json:"failures"` // another one when the kernel has said, to one of them, that something could not be written
	Failed   bool   `json:"failed"`   // some page may not have been written, whether or not that was told to a server
	Refused  bool   `json:"refused"`  // one of them could not record it: nothing is written until the file system is mounted anew
}

// verifier is the write verifier of a server: what is in the page cache, and was written with it, will be on the disk,
// or there will be another verifier.
type verifier struct {
	now     atomic.Pointer[wire.WriteVerf]
	refused atomic.Bool // WRITE and COMMIT get NFS3ERR_IO: it cannot be recorded that data was lost

	// What follows is set once, by openVerifier.
	file   *os.File // DIR/verifier; nil: the next server draws a new verifier anyway
	shared string   // path of the failures
	cache  pageCache

	mu     sync.Mutex // held while the verifier changes
	last   vouched
	failed bool // the others know that a page may not have been written
}

// openVerifier finds out whether what was written before this server was started, and is not stable, is still in the
// page cache or on the disk by now, and only then keeps the verifier.
func (s *Server) openVerifier(cfg Config) (err error) {
	v := &s.verifier
	f, err := os.OpenFile(filepath.Join(cfg.Dir, "verifier"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if v.file != f {
			f.Close()
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	v.last.File = st.Ino
	v.draw()
	shared, err := s.openFailures(cfg.LocalDir)
	if err != nil {
		s.log.Warn("the write verifier is a new one at each start: clients send again what was not committed", "dir", cfg.Dir, "because", err)
		return errors.Join(f.Truncate(0), f.Sync())
	}
	defer shared.Close()
	var known failures
	readNote(shared, &known) // one that cannot be read is none
	var was vouched
	readNote(f, &was)
	if known.pageCache != v.cache || known.Failures == "" {
		// If it was there already, nobody knows what it said.
		known = failures{pageCache: v.cache, Failures: rand.Text(), Failed: was.pageCache == v.cache}
		if err := writeNote(shared, &known); err != nil {
			return err
		}
	}
	v.file = f
	why := v.resume(&was, s.root, shared, &known)
	v.failed, s.cache.suspect = known.Failed, known.Failed
	if why == "" {
		return nil
	}
	s.log.Info("a new write verifier: clients send again what was not committed", "dir", cfg.Dir, "because", why)
	if known.Refused {
		v.refused.Store(true)
		s.log.Error(nothingWritten, "dir", cfg.Dir, "because", "a sync has failed before, which could not be recorded")
		return nil
	}
	v.last = vouched{v.last.Verifier, v.cache, known.Failures, v.last.File}
	if err := errors.Join(v.record(), syncDir(cfg.Dir)); err != nil {
		// What is there is another record, or of other failures, so that the next server draws a verifier, too.
		s.log.Warn("the write verifier cannot be recorded", "dir", cfg.Dir, "err", err)
	}
	return nil
}

// resume takes the verifier that was recorded if it vouches for all that was written with it, and tells why not
// otherwise. shared is locked.
func (v *verifier) resume(was *vouched, export int, shared *os.File, known *failures) (why string) {
	verf, err := hex.DecodeString(was.Verifier)
	switch {
	case err != nil || len(verf) != len(wire.WriteVerf{}):
		return "there is none from before"
	case was.File != v.last.File:
		return "the directory is a copy"
	case was.Boot != v.cache.Boot:
		return "the host was booted since"
	case was.Mount != v.cache.Mount:
		return "the file system was mounted since"
	case was.Failures != known.Failures || known.Refused:
		return "something could not be written"
	}
	// The kernel says once that something could not be written. So it counts as said as long as nothing else is known.
	asked := *known
	asked.Failures, asked.Failed = rand.Text(), true
	if err := writeNote(shared, &asked); err != nil {
		return fmt.Sprintf("%s cannot be written: %v", shared.Name(), err)
	}
	if err := syncfs(export); err != nil {
		*known = asked
		return fmt.Sprintf("syncfs: %v", err)
	}
	if err := writeNote(shared, known); err != nil {
		*known = asked
		return fmt.Sprintf("%s cannot be written: %v", shared.Name(), err)
	}
	v.last = *was
	v.now.Store((*wire.WriteVerf)(verf))
	return ""
}

// Ready is an error if WRITE and COMMIT are refused.
func (s *Server) Ready() error {
	if s.verifier.refused.Load() {
		return errors.New(nothingWritten)
	}
	return nil
}

// draw makes a new verifier. Once the server serves, mu is held.
func (v *verifier) draw() {
	var verf wire.WriteVerf
	rand.Read(verf[:])
	v.last.Verifier = hex.EncodeToString(verf[:])
	v.now.Store(&verf)
}

// record makes DIR/verifier hold the verifier.
func (v *verifier) record() error {
	if err := writeNote(v.file, &v.last); err != nil {
		return err
	}
	return v.file.Sync()
}

// newVerifier makes clients send again whatever they have not seen committed, since a sync has failed. When it returns
// no server that is started on the directory will vouch for that again.
func (s *Server) newVerifier() {
	v := &s.verifier
	v.mu.Lock()
	defer v.mu.Unlock()
	v.draw()
	if v.file == nil || v.refused.Load() {
		return
	}
	err := v.record()
	if err == nil && !v.failed {
		err = v.tell(func(known *failures) { known.Failed = true })
		v.failed = err == nil
	}
	if err == nil {
		return
	}
	v.refused.Store(true)
	s.log.Error(nothingWritten, "file", v.file.Name(), "because", fmt.Errorf("a sync has failed, which cannot be recorded: %w", err))
	if err := v.tell(func(known *failures) { known.Failed, known.Refused = true, true }); err != nil {
		s.log.Error("the other data servers of the file system are not told", "err", err)
	}
	if s.broker != nil {
		s.wg.Go(s.broker.revokeWriters) // ends when the clients were asked
	}
}

// tell changes what the servers that will be started on the file system are told.
func (v *verifier) tell(change func(known *failures)) error {
	f, err := lockNote(v.shared)
	if err != nil {
		return err
	}
	defer f.Close()
	var known failures
	if readNote(f, &known) != nil || known.pageCache != v.cache {
		known = failures{pageCache: v.cache, Failures: rand.Text()}
	}
	change(&known)
	return writeNote(f, &known)
}

// openFailures finds out what the page cache of the export is, and opens and locks what its servers tell one another.
func (s *Server) openFailures(dir string) (*os.File, error) {
	v := &s.verifier
	boot, err := os.ReadFile(bootFile)
	if err != nil {
		return nil, err
	}
	dev, mount, err := findMount(s.root, s.handles.mountID)
	if err != nil {
		return nil, err
	}
	if err := privateDir(dir); err != nil {
		return nil, err
	}
	v.cache = pageCache{strings.TrimSpace(string(boot)), mount}
	v.shared = filepath.Join(dir, "failures-"+dev)
	return lockNote(v.shared)
}

// findMount returns the device number of a mounted file system, MAJOR:MINOR, and a name that tells this mount of it
// from earlier ones of the same device. Mounting it a second time, or its directories elsewhere, makes no difference
// where the file system has a directory in /sys/fs, as ext4, XFS and F2FS do: it is made when the file system is
// mounted and removed when the last mount is gone, and the kernel does not use the inode numbers of sysfs again. For
// others it is the number of the mount.
func findMount(fd, id int) (dev, name string, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == fmt.Sprint(id) {
			dev = fields[2]
		}
	}
	if dev == "" {
		return "", "", fmt.Errorf("/proc/self/mountinfo has no mount %d", id)
	}
	if device, err := os.Readlink("/sys/dev/block/" + dev); err == nil {
		var st unix.Stat_t
		for _, dir := range []string{"ext4", "xfs", "f2fs"} {
			dir = filepath.Join("/sys/fs", dir, filepath.Base(device))
			if unix.Stat(dir, &st) == nil {
				return dev, fmt.Sprintf("%s %d", dir, st.Ino), nil
			}
		}
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID_UNIQUE, &st); err != nil {
		return "", "", err
	}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE == 0 {
		return "", "", errors.New("the kernel does not tell mounts of this file system apart (Linux 6.8 does)")
	}
	return dev, fmt.Sprintf("mount %d", st.Mnt_id), nil
}

// lockNote opens the file of a note, made if missing, and locks it until it is closed.
func lockNote(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func readNote(f *os.File, note any) error {
	b := make([]byte, noteSize)
	n, err := f.ReadAt(b, 0)
	if n < noteSize {
		return err
	}
	return json.Unmarshal(b, note)
}

func writeNote(f *os.File, note any) error {
	b, err := json.Marshal(note)
	if err != nil {
		return err
	}
	if len(b) >= noteSize {
		return fmt.Errorf("%s: a note of %d bytes", f.Name(), len(b))
	}
	b = append(b, bytes.Repeat([]byte(" "), noteSize-len(b))...)
	b[noteSize-1] = '\n'
	_, err = f.WriteAt(b, 0)
	return err
}

// lastSync syncs what was written and is not stable, which may be all that there is in the page cache. It waits for
// lastSyncTime at most, and begins no sync after that.
func (s *Server) lastSync(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastSyncTime)
	files := make(chan *file)
	var workers sync.WaitGroup
	for range lastSyncs {
		workers.Go(func() { // ends with files
			for f := range files {
				if ctx.Err() == nil {
					s.sync(f, false) // if it fails there is a new verifier
				}
				s.cache.put(f)
			}
		})
	}
	s.wg.Go(func() { // ends with the syncs
		defer cancel()
		for _, f := range s.cache.written() {
			files <- f
		}
		close(files)
		workers.Wait()
	})
	<-ctx.Done()
}

func (v *verifier) close() {
	if v.file != nil {
		v.file.Close()
	}
}
