package crash

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
)

// nameCount is how many names a writer of names changes.
const nameCount = 6

// change is what a writer of names does to one of them: version N of a file takes the place of the one before, or
// nothing does. The log has it when it begins and when it has been promised.
type change struct {
	Name     string
	N        int
	Gone     bool
	Promised bool // fsync of the directory has returned since
}

// contentOf is what a version of a file has.
func contentOf(name string, n int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprintf("%s-%d", name, n))
	src := rand.NewChaCha8(key)
	b := make([]byte, 1+src.Uint64()%20000)
	src.Read(b)
	return b
}

// runNames replaces files by new versions, each of which is stable before it gets its name, removes them, and has the
// directory made stable now and then.
func runNames(w work, stop *atomic.Bool) error {
	log, err := os.OpenFile(w.Log+".names", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	out := json.NewEncoder(log)
	rng := rand.New(rand.NewPCG(w.Seed, 1<<32))
	open := map[string]change{} // not promised yet
	for n := 1; !stop.Load(); n++ {
		c := change{Name: fmt.Sprintf("n%d", rng.IntN(nameCount)), N: n, Gone: rng.IntN(5) == 0}
		if err := out.Encode(c); err != nil {
			return err
		}
		path := filepath.Join(w.Mount, w.Names, c.Name)
		if c.Gone {
			err = os.Remove(path)
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		} else if err = writeStable(path+".new", contentOf(c.Name, n)); err == nil {
			err = os.Rename(path+".new", path)
		}
		if err == nil {
			open[c.Name] = c
			if rng.IntN(3) == 0 {
				if err = syncDir(filepath.Dir(path)); err == nil {
					for name, c := range open {
						c.Promised = true
						if err := out.Encode(c); err != nil {
							return err
						}
						delete(open, name)
					}
				}
			}
		}
		if err != nil {
			return fmt.Errorf("names: %w", err)
		}
	}
	return nil
}

// writeStable writes a file, and fsync is what it does before the end.
func writeStable(path string, data []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// checkNames tells what a directory has that a writer of names has not been promised, or lacks.
func checkNames(dir string, changes []change) (found []string) {
	history := map[string][]change{}
	for _, c := range changes {
		all := history[c.Name]
		if c.Promised { // what was before is of no use any more
			all = nil
			for _, o := range history[c.Name] {
				if o.N > c.N {
					all = append(all, o)
				}
			}
			all = append([]change{c}, all...)
		} else if len(all) == 0 {
			all = []change{{Name: c.Name, Gone: true}, c}
		} else {
			all = append(all, c)
		}
		history[c.Name] = all
	}
	for name, may := range history {
		got, err := os.ReadFile(filepath.Join(dir, name))
		right := false
		for _, c := range may {
			if c.Gone {
				right = right || errors.Is(err, fs.ErrNotExist)
			} else {
				right = right || err == nil && bytes.Equal(got, contentOf(name, c.N))
			}
		}
		if !right {
			found = append(found, fmt.Sprintf("%s: %d bytes, %v; it may be one of %+v", filepath.Join(dir, name), len(got), err, may))
		}
	}
	return found
}

// readNames reads the log of a writer of names. It may have been killed in the middle of a line.
func readNames(path string) (all []change, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		if !strings.HasSuffix(line, "\n") {
			break
		}
		var c change
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", path, line, err)
		}
		all = append(all, c)
	}
	return all, nil
}
