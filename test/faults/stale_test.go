package faults

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

const (
	staleBlocks = 64
	staleBlock  = 4096
)

// staleFile is a file that mount a has written, and keeps in memory, when mount b changes the same bytes and makes that stable. Afterwards
// all of it must be want.
type staleFile struct {
	name   string
	append bool                                 // a appends, in turn with b, or else it writes at offsets
	lock   bool                                 // each writes under a lock
	change func(t *testing.T, b *os.File) error // nil: it is overwritten
	want   byte
}

var staleFiles = []staleFile{
	{name: "overwrite", want: 'b'},
	{name: "lock", lock: true, want: 'b'},
	{name: "append", append: true, want: 'b'},
	{name: "punch", change: func(_ *testing.T, b *os.File) error {
		return eachStaleBlock(func(off int64) error {
			return unix.Fallocate(int(b.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, staleBlock)
		})
	}},
	{name: "zero", change: func(_ *testing.T, b *os.File) error {
		return unix.Fallocate(int(b.Fd()), unix.FALLOC_FL_ZERO_RANGE, 0, staleBlocks*staleBlock)
	}},
	{name: "truncate", change: func(_ *testing.T, b *os.File) error {
		return errors.Join(b.Truncate(0), b.Truncate(staleBlocks*staleBlock))
	}},
	{name: "move", want: 'b', change: func(t *testing.T, b *os.File) error {
		return errors.Join(moveElsewhere(t, b.Name()), overwriteStale(b))
	}},
}

func eachStaleBlock(do func(off int64) error) error {
	for n := range int64(staleBlocks) {
		if err := do(n * staleBlock); err != nil {
			return err
		}
	}
	return nil
}

func staleContent(with byte) []byte { return bytes.Repeat([]byte{with}, staleBlock) }

func overwriteStale(f *os.File) error {
	return eachStaleBlock(func(off int64) error {
		_, err := f.WriteAt(staleContent('b'), off)
		return err
	})
}

// moveElsewhere moves a file to another device than the one on which it begins.
func moveElsewhere(t *testing.T, path string) error {
	at := harness.LayoutOf(t, path).Mirrors[0].Servers[0].Device
	for _, d := range devices(t, &harness.Mount{Dir: filepath.Dir(path)}) {
		if d.ID != at {
			harness.Weft(t, "layout", "move", path, "--to", d.ID)
			return nil
		}
	}
	return errors.New("there is no other device")
}

// locked calls do with a lock of the file.
func locked(f *os.File, do func() error) error {
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &l); err != nil {
		return err
	}
	err := do()
	l.Type = unix.F_UNLCK
	return errors.Join(err, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &l))
}

// write lets a write the file.
func (s *staleFile) write(a, b string) error {
	f, err := os.OpenFile(a, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if !s.append {
		all := func() error {
			return eachStaleBlock(func(off int64) error {
				_, err := f.WriteAt(staleContent('a'), off)
				return err
			})
		}
		if s.lock {
			return locked(f, all)
		}
		return all()
	}
	var logs []*os.File
	for _, path := range []string{a, b} {
		log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		defer log.Close()
		logs = append(logs, log)
	}
	return eachStaleBlock(func(off int64) error {
		_, err := logs[off/staleBlock%2].Write(staleContent('a'))
		return err
	})
}

// overwrite lets b change it, and makes that stable.
func (s *staleFile) overwrite(t *testing.T, b string) error {
	f, err := os.OpenFile(b, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	change := func() error {
		if s.change != nil {
			return errors.Join(s.change(t, f), f.Sync())
		}
		return errors.Join(overwriteStale(f), f.Sync())
	}
	if s.lock {
		return locked(f, change)
	}
	return change()
}

// check makes stable what a may still keep, and looks in both mounts for what b has written.
func (s *staleFile) check(t *testing.T, a, b string) {
	f, err := os.OpenFile(a, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		t.Error(err)
	}
	for _, path := range []string{a, b} {
		data, err := os.ReadFile(path)
		if err != nil || len(data) != staleBlocks*staleBlock {
			t.Errorf("%d bytes, %v", len(data), err)
			continue
		}
		old := 0
		for n := range staleBlocks {
			if !bytes.Equal(data[n*staleBlock:][:staleBlock], staleContent(s.want)) {
				old++
			}
		}
		if old > 0 {
			t.Errorf("%d of %d blocks are not what was made stable last", old, staleBlocks)
		}
	}
}

// TestStale has one mount overwrite what another one has written and may still send again, and starts the data servers again: nobody may
// ever find the older bytes. It is so by RPC, with descriptors, of mirrored files and on namespaces.
func TestStale(t *testing.T) {
	for _, c := range []struct {
		name   string
		opts   harness.Options
		copies string
	}{
		{name: "rpc", opts: harness.Options{DataServers: 2, Apart: true, Remote: true}, copies: "1"},
		{name: "local", opts: harness.Options{DataServers: 2, Apart: true}, copies: "1"},
		{name: "mirrors", opts: harness.Options{DataServers: 3, Apart: true, Remote: true}, copies: "2"},
		{name: "nvme", opts: harness.Options{NVMe: 2}, copies: "1"},
	} {
		for _, how := range []string{"kill", "stop"} {
			t.Run(c.name+"/"+how, func(t *testing.T) {
				v := harness.NewVolume(t, c.opts)
				a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
				harness.Weft(t, "layout", "set", a.Dir, "--stripe-count", "1", "--mirrors", c.copies)
				for _, s := range staleFiles {
					if err := os.WriteFile(filepath.Join(a.Dir, s.name), nil, 0o644); err != nil {
						t.Fatal(err)
					}
				}
				// All at once, as what is kept is made stable after a second.
				for _, s := range staleFiles {
					if err := s.write(filepath.Join(a.Dir, s.name), filepath.Join(b.Dir, s.name)); err != nil {
						t.Fatalf("%s: %v", s.name, err)
					}
				}
				for _, s := range staleFiles {
					if err := s.overwrite(t, filepath.Join(b.Dir, s.name)); err != nil {
						t.Fatalf("%s: %v", s.name, err)
					}
				}
				restartData(v, how == "kill")
				for _, s := range staleFiles {
					t.Run(s.name, func(t *testing.T) { s.check(t, filepath.Join(a.Dir, s.name), filepath.Join(b.Dir, s.name)) })
				}
			})
		}
	}
}

// restartData ends the data servers of a volume and starts them again, with other verifiers: clients send again what they still keep.
func restartData(v *harness.Volume, kill bool) {
	if len(v.Servers) == 0 {
		if kill {
			v.Kill()
		} else {
			v.Stop()
		}
		v.Start()
	}
	for _, d := range v.Servers {
		if kill {
			d.Kill()
		} else {
			d.Stop()
		}
		d.Forget()
		d.Start()
	}
}
