package pebble

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/weftfs/weft/server/catalog"
)

const (
	manifestPrefix = "MANIFEST-"
	witnessName    = "manifest.synced"
	witnessTitle   = "weft catalog manifests 1\n"
)

// witness is the content of the file manifest.synced: how long the newest MANIFESTs were at their last sync, oldest
// first. See Damage to the files in the package comment.
type witness []witnessEntry

type witnessEntry struct {
	name string
	size int64 // bytes
}

// set returns w after a sync of the MANIFEST called name. It keeps two.
func (w witness) set(name string, size int64) witness {
	if last := len(w) - 1; last >= 0 && w[last].name == name {
		w[last].size = size
		return w
	}
	w = append(w, witnessEntry{name, size})
	return w[max(0, len(w)-2):]
}

// size returns the size known for the MANIFEST called name, or 0.
func (w witness) size(name string) int64 {
	for _, e := range w {
		if e.name == name {
			return e.size
		}
	}
	return 0
}

var crcTable = crc32.MakeTable(crc32.Castagnoli)

func (w witness) encode() []byte {
	b := []byte(witnessTitle)
	for _, e := range w {
		b = fmt.Appendf(b, "%s %d\n", e.name, e.size)
	}
	return fmt.Appendf(b, "crc %08x\n", crc32.Checksum(b, crcTable))
}

// decodeWitness returns nil for anything encode does not write.
func decodeWitness(b []byte) witness {
	body, found := bytes.CutPrefix(b, []byte(witnessTitle))
	if !found || len(b) > maxWitness {
		return nil
	}
	var w witness
	for line := range strings.Lines(string(body)) {
		var e witnessEntry
		if _, err := fmt.Sscanf(line, "%s %d\n", &e.name, &e.size); err != nil || !strings.HasPrefix(e.name, manifestPrefix) {
			break
		}
		w = append(w, e)
	}
	if !bytes.Equal(w.encode(), b) {
		return nil
	}
	return w
}

const maxWitness = 4096 // bytes; it has about a hundred

// manifestFS keeps manifest.synced up to date while Pebble writes its MANIFESTs through it. Logs it makes are logFiles.
type manifestFS struct {
	vfs.FS
	log *slog.Logger

	ahead int   // of logs, see logFile
	room  *room // nil: there is no reserve

	mu      sync.Mutex // held while manifest.synced is written
	witness witness
}

// Create implements [vfs.FS].
func (fs *manifestFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	if err == nil && isLog(name) {
		return &logFile{File: f, ahead: int64(fs.ahead), room: fs.room}, nil
	}
	if err != nil || !strings.HasPrefix(fs.PathBase(name), manifestPrefix) {
		return f, err
	}
	return &manifestFile{File: f, fs: fs, path: name}, nil
}

// Unwrap implements [vfs.FS].
func (fs *manifestFS) Unwrap() vfs.FS { return fs.FS }

// manifestFile is a MANIFEST being written. Pebble appends to it and syncs it under a lock of its own, before it
// deletes anything that only the older state needs.
type manifestFile struct {
	vfs.File
	fs   *manifestFS
	path string
	size int64
}

func (f *manifestFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.size += int64(n)
	return n, err
}

func (f *manifestFile) Sync() error {
	if err := f.File.Sync(); err != nil {
		return err
	}
	f.fs.synced(f.path, f.size)
	return nil
}

// synced records that the MANIFEST at path is durable up to size. Failing to is not an error of the catalog: without a
// record less damage is noticed. The new record need not be durable at once: the old one asks for less, and the switch
// to a new MANIFEST syncs the directory.
func (fs *manifestFS) synced(path string, size int64) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.witness = fs.witness.set(fs.PathBase(path), size)
	name := fs.PathJoin(fs.PathDir(path), witnessName)
	if err := fs.replace(name, fs.witness.encode()); err != nil {
		fs.log.Warn("catalog: cannot record the size of the MANIFEST", "file", name, "err", err)
		_ = fs.Remove(name)
	}
}

// replace gives the file called name new contents, all or none after a crash.
func (fs *manifestFS) replace(name string, contents []byte) error {
	f, err := fs.FS.Create(name+".new", vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(contents)
	err = errors.Join(err, f.SyncData(), f.Close())
	if err != nil {
		return err
	}
	return fs.Rename(name+".new", name)
}

// checkManifest returns ErrCorrupt if the MANIFEST called name in dir is shorter, in sound records, than it was at
// its last sync, or has none. It loads the witness into fs.
func (fs *manifestFS) checkManifest(dir, name string) error {
	if f, err := fs.Open(fs.PathJoin(dir, witnessName)); err == nil {
		b, err := io.ReadAll(io.LimitReader(f, maxWitness+1))
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("read %s: %w", witnessName, err)
		}
		fs.witness = decodeWitness(b)
	}
	f, err := fs.Open(fs.PathJoin(dir, name))
	if err != nil {
		return err
	}
	sound, err := soundBytes(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if want := max(fs.witness.size(name), 1); sound < want {
		return fmt.Errorf("%w: %s has %d sound bytes, at least %d were synced", catalog.ErrCorrupt, name, sound, want)
	}
	return nil
}

// soundBytes returns the length of the longest prefix of a MANIFEST that consists of sound records. An error is one
// of reading, not of what was read.
func soundBytes(r io.Reader) (int64, error) {
	records := record.NewReader(r, 0)
	var sound int64
	for {
		rec, err := records.Next()
		if err == nil {
			_, err = io.Copy(io.Discard, rec)
		}
		switch {
		case err == io.EOF, record.IsInvalidRecord(err):
			return sound, nil
		case err != nil:
			return sound, err
		}
		sound = records.Offset()
	}
}
