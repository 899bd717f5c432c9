package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

const (
	localName = "the local disk"
	treeFiles = 10_000 // of some 2 KiB each, in 100 directories
)

// A treeJob is what people do to whole trees: commands of which the last is measured. They run in the directory that has
// the tree, or is to have it, as "tree".
type treeJob [][]string

var (
	untar     = treeJob{{"tar"}} // -xf of the archive
	lsLR      = untar.and([]string{"ls", "-lR", "tree"})
	findSize  = untar.and([]string{"find", "tree", "-type", "f", "-size", "+0"})
	rmRF      = untar.and([]string{"rm", "-rf", "tree"})
	gitStatus = untar.and(git("init", "-q"), git("add", "."), git("commit", "-q", "-m", "tree"), git("status", "--porcelain"))
)

func (job treeJob) and(more ...[]string) treeJob { return append(slices.Clone(job), more...) }

func git(args ...string) []string {
	return append([]string{"git", "-C", "tree", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "safe.directory=*"}, args...)
}

// trees measures a job in files per second on weft, with everything on the disk, and on the disk itself. On weft the last
// command finds a new mount, which knows nothing of the tree.
func trees(job treeJob) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		archive := filepath.Join(l.disk, "tree.tar")
		if err := writeTree(archive); err != nil {
			return f, err
		}
		v, err := l.volume(l.disk)
		if err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, v.close()) }()
		last := len(job) - 1
		for _, commands := range []treeJob{job[:last], job[last:]} {
			dir, end, err := v.mount()
			if err != nil {
				return f, err
			}
			f.weft, err = commands.run(dir, archive)
			if err := errors.Join(err, end()); err != nil {
				return f, err
			}
		}
		local, err := os.MkdirTemp(l.disk, "local")
		if err != nil {
			return f, err
		}
		f.baseline, err = job.run(local, archive)
		return f, errors.Join(err, os.RemoveAll(local))
	}
}

// run runs the commands and returns how many files a second the last one has got through.
func (job treeJob) run(dir, archive string) (rate float64, err error) {
	for _, args := range job {
		if args[0] == "tar" {
			args = []string{"tar", "-xf", archive}
		}
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Stderr = os.Stderr
		start := time.Now()
		if err := cmd.Run(); err != nil {
			return 0, fmt.Errorf("%v: %w", args, err)
		}
		rate = treeFiles / time.Since(start).Seconds()
	}
	return rate, nil
}

// writeTree makes the archive that the trees come from.
func writeTree(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close() // a second time, if all goes well
	w := tar.NewWriter(f)
	content := make([]byte, 2048)
	for i := range treeFiles {
		dir := fmt.Sprintf("tree/d%02d/", i%100)
		if i < 100 {
			if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
				return err
			}
		}
		copy(content, fmt.Sprintf("%08d", i))
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%sf%04d", dir, i), Size: int64(len(content)), Mode: 0o644}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), f.Close())
}
