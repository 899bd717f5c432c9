package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/schema"
)

const (
	fewFiles  = 10_000
	manyFiles = 10_000_000
	perDir    = 1000 // files in a directory of a volume of either size
	depthDirs = 10   // of which so many are looked at
	depthOps  = 1000
)

// depth measures how long an operation on names takes, of each three a create, a stat of a file that was not seen before, and an
// unlink, in a volume of ten million files against one of ten thousand.
func depth(l *lab) (f figures, err error) {
	one := func(files int) (took float64, err error) {
		dir, err := l.deepVolume(files)
		if err != nil {
			return 0, err
		}
		v, err := l.weftd(nil, "single", "--dir", dir)
		if err != nil {
			return 0, err
		}
		mnt, end, err := v.mount()
		if err != nil {
			return 0, errors.Join(err, v.srv.stop())
		}
		took, err = deepOps(mnt, files)
		return took, errors.Join(err, end(), v.srv.stop())
	}
	if f.weft, err = one(manyFiles); err == nil {
		f.baseline, err = one(fewFiles)
	}
	return f, err
}

// deepOps returns how long one operation takes, in microseconds.
func deepOps(mnt string, files int) (float64, error) {
	seen := make([]string, depthDirs)
	for i, d := range rand.Perm(files / perDir)[:depthDirs] {
		seen[i] = filepath.Join(mnt, fmt.Sprint("d", d))
		if _, err := os.Stat(seen[i]); err != nil {
			return 0, err
		}
	}
	n := depthOps
	if turns != nil {
		n /= turns.n
	}
	return inTurns(func(t *turn) (figure, ops float64, took time.Duration, err error) {
		start := time.Now()
		for i := t.index * n; i < (t.index+1)*n; i++ {
			dir := seen[i%depthDirs]
			name := filepath.Join(dir, fmt.Sprint("new", i))
			if err := touch(name); err != nil {
				return 0, 0, 0, err
			}
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(dir, fmt.Sprint("f", i/depthDirs)), &st); err != nil {
				return 0, 0, 0, err
			}
			if err := unix.Unlink(name); err != nil {
				return 0, 0, 0, err
			}
		}
		took, ops = time.Since(start), float64(3*n)
		return float64(took.Microseconds()) / ops, ops, took, nil
	})
}

// deepVolume makes a volume of so many empty files, once in a run: their rows are written into the catalog.
func (l *lab) deepVolume(files int) (dir string, err error) {
	if dir, ok := l.deep[files]; ok {
		return dir, nil
	}
	dir = filepath.Join(l.disk, fmt.Sprint("deep", files))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	engine, err := pebble.Open(pebble.Config{Dir: filepath.Join(dir, "catalog")})
	if err != nil {
		return "", err
	}
	if err := errors.Join(writeFiles(context.Background(), engine, files), engine.Close()); err != nil {
		return "", err
	}
	l.deep[files] = dir
	return dir, nil
}

// writeFiles makes a volume of directories d0, d1 and so on in the root, with the files f0, f1 and so on in each.
func writeFiles(ctx context.Context, engine catalog.Engine, files int) error {
	vol, err := meta.OpenVolume(ctx, engine, layout.Policy{}, 1)
	if err != nil {
		return err
	}
	raw, err := engine.Get(ctx, schema.KeyNextInode)
	if err != nil {
		return err
	}
	counters, err := catalog.DecodeCounters(raw)
	if err != nil {
		return err
	}
	next := layout.FileID(counters.Field(0))
	now := time.Now().UnixNano()
	b := new(catalog.Batch)
	add := func(parent layout.FileID, name string, row schema.Inode) layout.FileID {
		id := next
		next++
		row.Atime, row.Mtime, row.Ctime, row.Btime = now, now, now, now
		b.Put(schema.InodeKey(id), schema.Encode(&row))
		b.Put(schema.EntryKey(parent, name), schema.Encode(&schema.Entry{ID: id, Type: row.Mode & syscall.S_IFMT}))
		return id
	}
	dirs := files / perDir
	for d := range dirs {
		dir := add(layout.RootID, fmt.Sprint("d", d), schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID})
		for i := range perDir {
			add(dir, fmt.Sprint("f", i), schema.Inode{Mode: syscall.S_IFREG | 0o644, Nlink: 1, Policy: vol.Policy})
		}
		b.Put(schema.CountersKey(dir), catalog.EncodeCounters(perDir, 0, now, now))
		b.Durability = catalog.NoSync
		if err := engine.Commit(ctx, b); err != nil {
			return err
		}
		b.Reset()
	}
	b.Put(schema.CountersKey(layout.RootID), catalog.EncodeCounters(int64(dirs), int64(dirs), now, now))
	b.Put(schema.KeyNextInode, catalog.EncodeCounters(int64(next)))
	b.Put(schema.FilesKey(0), catalog.EncodeCounters(int64(1+dirs+dirs*perDir)))
	return engine.Commit(ctx, b)
}
