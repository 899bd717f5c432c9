package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const localName = "the local disk"

// A treeJob is what people do to whole trees: commands of which the last is measured. They run in the directory that has
// the tree, or is to have it, as "tree".
type treeJob [][]string

var (
	untar     = treeJob{{"tar"}} // -xf of the archive
	lsLR      = untar.and([]string{"ls", "-lR", "tree"})
	findSize  = untar.and([]string{"find", "tree", "-type", "f", "-size", "+0"})
	rmRF      = untar.and([]string{"rm", "-rf", "tree"})
	gitStatus = untar.and(slices.Concat(commitTree, treeJob{git("status", "--porcelain")})...)
	gitClone  = treeJob{{"clone"}} // of a repository with the tree

	commitTree = treeJob{git("init", "-q"), git("add", "."), git("commit", "-q", "-m", "tree")}
)

func (job treeJob) and(more ...[]string) treeJob { return append(slices.Clone(job), more...) }

func git(args ...string) []string {
	return append([]string{"git", "-C", "tree", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "safe.directory=*"}, args...)
}

// A tree is what an archive is made of. Its write is given the archive, in which all is below "tree/", and returns how many files that has.
type tree struct {
	name  string
	write func(*tar.Writer) (files int, err error)
}

var (
	smallFiles = tree{"small", writeSmallFiles}
	goTree     = tree{"go", writeGoTree}
)

// source is where a tree comes from, on the disk.
type source struct {
	archive    string
	files      int
	repository string // with the tree as its one commit; "" until a job wants it
}

// source makes the archive of a tree, for all the rows of a run.
func (l *lab) source(t tree) (*source, error) {
	if s := l.sources[t.name]; s != nil {
		return s, nil
	}
	s := &source{archive: filepath.Join(l.disk, t.name+".tar")}
	f, err := os.Create(s.archive)
	if err != nil {
		return nil, err
	}
	defer f.Close() // a second time, if all goes well
	w := tar.NewWriter(f)
	if s.files, err = t.write(w); err != nil {
		return nil, err
	}
	if err := errors.Join(w.Close(), f.Close()); err != nil {
		return nil, err
	}
	l.sources[t.name] = s
	return s, nil
}

// commit makes the repository.
func (s *source) commit(l *lab) error {
	if s.repository != "" {
		return nil
	}
	dir, err := os.MkdirTemp(l.disk, "repository")
	if err != nil {
		return err
	}
	if _, err := untar.and(commitTree...).run(dir, s); err != nil {
		return err
	}
	s.repository = filepath.Join(dir, "tree")
	return nil
}

// trees measures a job in files per second on weft, with everything on the disk, and on the disk itself. On weft the last
// command finds a new mount, which knows nothing of the tree.
func trees(t tree, job treeJob) func(*lab) (figures, error) {
	return func(l *lab) (f figures, err error) {
		from, err := l.source(t)
		if err != nil {
			return f, err
		}
		if job[0][0] == "clone" {
			if err := from.commit(l); err != nil {
				return f, err
			}
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
			f.weft, err = commands.run(dir, from)
			if err := errors.Join(err, end()); err != nil {
				return f, err
			}
		}
		local, err := os.MkdirTemp(l.disk, "local")
		if err != nil {
			return f, err
		}
		f.baseline, err = job.run(local, from)
		return f, errors.Join(err, os.RemoveAll(local))
	}
}

// run runs the commands and returns how many files a second the last one has got through.
func (job treeJob) run(dir string, from *source) (rate float64, err error) {
	for _, args := range job {
		switch args[0] {
		case "tar":
			args = []string{"tar", "-xf", from.archive}
		case "clone": // through a pack, as from another host
			args = []string{"git", "-c", "safe.directory=*", "clone", "-q", "--no-local", from.repository, "tree"}
		}
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Stderr = os.Stderr
		start := time.Now()
		if err := cmd.Run(); err != nil {
			return 0, fmt.Errorf("%v: %w", args, err)
		}
		rate = float64(from.files) / time.Since(start).Seconds()
	}
	return rate, nil
}

// writeSmallFiles writes 10,000 files of 2 KiB each, in 100 directories.
func writeSmallFiles(w *tar.Writer) (int, error) {
	const files = 10_000
	content := make([]byte, 2048)
	for i := range files {
		dir := fmt.Sprintf("tree/d%02d/", i%100)
		if i < 100 {
			if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
				return 0, err
			}
		}
		copy(content, fmt.Sprintf("%08d", i))
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%sf%04d", dir, i), Size: int64(len(content)), Mode: 0o644}); err != nil {
			return 0, err
		}
		if _, err := w.Write(content); err != nil {
			return 0, err
		}
	}
	return files, nil
}

// writeGoTree writes the sources of the Go distribution that is installed.
func writeGoTree(w *tar.Writer) (files int, err error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return 0, fmt.Errorf("go env GOROOT: %w", err)
	}
	root := filepath.Join(strings.TrimSpace(string(out)), "src")
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: filepath.Join("tree", name), Mode: int64(info.Mode().Perm()), ModTime: info.ModTime()}
		switch {
		case d.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
			return w.WriteHeader(h)
		case !info.Mode().IsRegular():
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		h.Size = int64(len(content))
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err == nil && files == 0 {
		err = fmt.Errorf("no files in %s", root)
	}
	return files, err
}
