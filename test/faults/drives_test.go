package faults

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// cellBytes is what is written at once of a file, or some of these. It is no multiple of a drive's blocks.
const (
	cellBytes = 4000
	cellWords = cellBytes / 8
	maxCells  = 700
)

// stampEnv makes this test binary write files until standard input ends, and print what it was told: "NUMBER DIR". watchEnv makes it read
// those of others until then, and print what was wrong: "DIR".
const (
	stampEnv = "WEFT_TEST_STAMP"
	watchEnv = "WEFT_TEST_WATCH"
)

// word is 8 bytes of a file: all of it is stamped with whose and which bytes these are.
func word(id, version uint32, at int64) uint64 {
	return uint64(id)<<40 | uint64(version)<<24 | uint64(at)
}

// cell is what is known of some bytes of a file.
type cell struct {
	Floor   uint32 `json:",omitempty"` // versions up to this one were cut off
	Synced  uint32 `json:",omitempty"` // the last one that is safe; 0: none
	Written uint32 `json:",omitempty"` // the last one that was acknowledged; 0: zeros
	Begun   uint32 `json:",omitempty"`
	Zero    bool   `json:",omitempty"` // it may be zeros after a crash
}

// stamped is a file, whose name is its ID: no two files ever have the same.
type stamped struct {
	ID      uint32
	Version uint32
	Cells   []cell
	Size    int64 // acknowledged
	Low     int64 // what it is at least after a crash, and at most
	High    int64
	Created bool // acknowledged
	Gone    bool
	Doubt   bool // its removal was not acknowledged
	f       *os.File
}

func (s *stamped) name() string { return fmt.Sprint("f", s.ID) }

// stamper writes files on one mount.
type stamper struct {
	dir  string
	stop atomic.Bool
	mu   sync.Mutex
	Ops  int
	stampedFiles
}

// stampedFiles is what is left of a stamper when it has ended.
type stampedFiles struct {
	Files []*stamped
	Error string
}

// stampForever is the process that stampEnv says.
func stampForever(how string) {
	s := new(stamper)
	var number uint32
	if _, err := fmt.Sscan(how, &number, &s.dir); err != nil {
		panic(err)
	}
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		s.stop.Store(true)
	}()
	var workers sync.WaitGroup
	for w := range uint32(3) {
		workers.Go(func() {
			if err := s.work(number*4+w, rand.New(rand.NewPCG(*seed, uint64(number)<<8|uint64(w)))); err != nil {
				s.mu.Lock()
				s.Error = errors.Join(errors.New(s.Error), err).Error()
				s.mu.Unlock()
				s.stop.Store(true)
			}
		})
	}
	workers.Wait()
	json.NewEncoder(os.Stdout).Encode(s.stampedFiles)
}

// work writes some files until it is told to stop, or to an error.
func (s *stamper) work(number uint32, rng *rand.Rand) error {
	var files [2]*stamped
	for next := number << 10; !s.stop.Load(); {
		i := rng.IntN(len(files))
		if files[i] == nil {
			next++
			files[i] = &stamped{ID: next, Cells: make([]cell, maxCells)}
			for c := range files[i].Cells {
				files[i].Cells[c].Zero = true
			}
			s.mu.Lock()
			s.Files = append(s.Files, files[i])
			s.mu.Unlock()
		}
		if err := files[i].step(s.dir, rng); err != nil {
			return fmt.Errorf("%s: %w", files[i].name(), err)
		}
		if files[i].Gone {
			files[i] = nil
		}
	}
	return nil
}

// step does something with the file.
func (s *stamped) step(dir string, rng *rand.Rand) (err error) {
	if s.f == nil {
		if s.f, err = os.OpenFile(filepath.Join(dir, s.name()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644); err == nil {
			s.Created = true
		}
		return err
	}
	switch n := rng.IntN(100); {
	case n < 45:
		return s.write(rng.IntN(maxCells-30), 1+rng.IntN(30))
	case n < 55:
		return s.write(rng.IntN(maxCells/2), 100+rng.IntN(200))
	case n < 72:
		if err := s.f.Sync(); err != nil {
			return fmt.Errorf("fsync: %w", err)
		}
		for i := range s.Cells {
			if c := &s.Cells[i]; c.Written > 0 {
				c.Synced, c.Zero = c.Written, false
			}
		}
		s.Low = s.Size
	case n < 80:
		return s.truncate(rng.IntN(maxCells) * rng.IntN(2))
	case n < 84:
		s.Doubt = true
		if err := errors.Join(s.f.Close(), os.Remove(filepath.Join(dir, s.name()))); err != nil {
			return err
		}
		s.Gone = true
	default:
		from := rng.IntN(maxCells - 30)
		return s.look(s.f, from, from+1+rng.IntN(29), false)
	}
	return nil
}

// write writes the next version of cells.
func (s *stamped) write(from, n int) error {
	s.Version++
	buf := make([]byte, n*cellBytes)
	for at := 0; at < len(buf); at += 8 {
		binary.BigEndian.PutUint64(buf[at:], word(s.ID, s.Version, int64(from*cellWords+at/8)))
	}
	for i := from; i < from+n; i++ {
		s.Cells[i].Begun = s.Version
	}
	end := int64(from+n) * cellBytes
	s.High = max(s.High, end)
	if _, err := s.f.WriteAt(buf, int64(from)*cellBytes); err != nil {
		return fmt.Errorf("write of %d bytes at %d: %w", len(buf), from*cellBytes, err)
	}
	for i := from; i < from+n; i++ {
		s.Cells[i].Written = s.Version
	}
	s.Size = max(s.Size, end)
	return nil
}

// truncate makes the file n cells long.
func (s *stamped) truncate(n int) error {
	size := int64(n) * cellBytes
	s.Low, s.High = min(s.Low, size), max(s.High, size)
	for i := n; i < maxCells; i++ {
		s.Cells[i].Zero = true
	}
	if err := s.f.Truncate(size); err != nil {
		return fmt.Errorf("truncate to %d: %w", size, err)
	}
	for i := n; i < maxCells; i++ {
		c := &s.Cells[i]
		c.Floor, c.Synced, c.Written = c.Begun, 0, 0
	}
	s.Size, s.Low, s.High = size, size, size
	return nil
}

// look reads cells and holds them against what is known. crashed says that what was not synced may be lost.
func (s *stamped) look(f *os.File, from, to int, crashed bool) error {
	buf := make([]byte, (to-from)*cellBytes)
	n, err := f.ReadAt(buf, int64(from)*cellBytes)
	if err != nil && err != io.EOF {
		return fmt.Errorf("read of %d bytes at %d: %w", len(buf), from*cellBytes, err)
	}
	if want := min(max(s.Size-int64(from)*cellBytes, 0), int64(len(buf))); !crashed && int64(n) != want {
		return fmt.Errorf("read of %d bytes at %d: %d bytes, want %d", len(buf), from*cellBytes, n, want)
	}
	for at := 0; at+8 <= n; at += 8 {
		i := from + at/cellBytes
		c, w := &s.Cells[i], binary.BigEndian.Uint64(buf[at:])
		version := uint32(w>>24) & 0xffff
		ok := w == 0
		if ok && crashed {
			ok = c.Zero || c.Synced == 0
		} else if ok {
			ok = c.Written == 0
		} else if ok = w == word(s.ID, version, int64(from*cellWords+at/8)); ok && crashed {
			ok = version >= c.Synced && version > c.Floor && version <= c.Begun
		} else if ok {
			ok = version == c.Written
		}
		if !ok {
			return fmt.Errorf("at %d (cell %d): file %d, version %d, word %d (%#x); of file %d %+v is known", from*cellBytes+at, i, w>>40, version, w&(1<<24-1), w, s.ID, *c)
		}
	}
	return nil
}

// check looks at all files.
func (s *stampedFiles) check(t *testing.T, dir string, crashed bool) {
	t.Helper()
	bad := 0
	for _, file := range s.Files {
		err := file.check(dir, crashed)
		if err == nil {
			continue
		}
		t.Errorf("%s/%s: %v", dir, file.name(), err)
		if bad++; bad == 5 {
			t.Fatal("and more")
		}
	}
}

func (s *stamped) check(dir string, crashed bool) error {
	f, err := os.Open(filepath.Join(dir, s.name()))
	if errors.Is(err, fs.ErrNotExist) {
		if s.Gone || s.Doubt || !s.Created {
			return nil
		}
	} else if err == nil && s.Gone {
		err = errors.New("it is there again")
	}
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !crashed && st.Size() != s.Size:
		return fmt.Errorf("%d bytes, want %d", st.Size(), s.Size)
	case crashed && (st.Size() < s.Low || st.Size() > s.High):
		return fmt.Errorf("%d bytes, want %d to %d", st.Size(), s.Low, s.High)
	}
	return s.look(f, 0, maxCells, crashed)
}

// watchForever is the process that watchEnv says: whatever the files are like at the moment, there is nothing of others in them.
func watchForever(dir string) error {
	var stop atomic.Bool
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	buf := make([]byte, maxCells*cellBytes)
	for !stop.Load() {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			var id uint32
			fmt.Sscanf(e.Name(), "f%d", &id)
			f, err := os.Open(filepath.Join(dir, e.Name()))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			n, err := f.ReadAt(buf, 0)
			f.Close()
			if err != nil && err != io.EOF {
				return err
			}
			for at := 0; at+8 <= n; at += 8 {
				w := binary.BigEndian.Uint64(buf[at:])
				if w != 0 && w != word(id, uint32(w>>24)&0xffff, int64(at/8)) {
					return fmt.Errorf("%s at %d: word %d of file %d (%#x)", e.Name(), at, w&(1<<24-1), w>>40, w)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}

// beginStamps runs a stamper, and beginWatch a watcher; the functions that they return end them.
func beginStamps(t *testing.T, number int, dir string) (end func() *stampedFiles) {
	cmd := harness.Self(fmt.Sprintf("%s=%d %s", stampEnv, number, dir), "-seed", fmt.Sprint(*seed+uint64(number)))
	in, out := startPiped(t, cmd)
	return func() *stampedFiles {
		t.Helper()
		in.Close()
		s := new(stampedFiles)
		if err := errors.Join(json.NewDecoder(out).Decode(s), cmd.Wait()); err != nil {
			t.Fatalf("writer: %v", err)
		}
		if len(s.Files) == 0 {
			t.Error("a writer got nowhere")
		}
		return s
	}
}

func beginWatch(t *testing.T, dir string) (end func() string) {
	cmd := harness.Self(fmt.Sprintf("%s=%s", watchEnv, dir))
	in, out := startPiped(t, cmd)
	return func() string {
		t.Helper()
		in.Close()
		said, err := io.ReadAll(out)
		if err := errors.Join(err, cmd.Wait()); err != nil {
			t.Fatalf("watcher: %v", err)
		}
		return strings.TrimSpace(string(said))
	}
}

// Who is killed, in bits.
const (
	killClient = 1 << iota
	killService
	killDrives
	killAll = killClient | killService | killDrives
)

// TestKillOnDrives kills a client, the metadata service and the namespaces in all combinations, while two clients write files and each
// reads those of the other. What was synced is there, what was not written is zeros, nobody ever sees bytes of another file or what was on the
// namespaces before, those who were not killed notice nothing, and each time the volume is consistent.
func TestKillOnDrives(t *testing.T) {
	harness.NeedMount(t)
	disks := newDrives(t, 2)
	v := harness.NewVolume(t, harness.Options{Lease: 4 * time.Second, Devices: disks.urls()})
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 97))
	order := rng.Perm(killAll)
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	for i := range max(2, *kills/2) {
		who := order[i%killAll] + 1
		at := fmt.Sprintf("round %d (client %v, service %v, drives %v)", i, who&killClient != 0, who&killService != 0, who&killDrives != 0)
		t.Log(at)
		name := fmt.Sprint("round", i)
		dirs := [2]string{name + "/a", name + "/b"}
		for j, dir := range dirs {
			if err := os.MkdirAll(filepath.Join(a.Dir, dir), 0o755); err != nil {
				t.Fatal(err)
			}
			if j == i%2 {
				harness.Weft(t, "layout", "set", filepath.Join(a.Dir, dir), "--mirrors", "2")
			}
		}
		endA, endB := beginStamps(t, 2*i, filepath.Join(a.Dir, dirs[0])), beginStamps(t, 2*i+1, filepath.Join(b.Dir, dirs[1]))
		watchA, watchB := beginWatch(t, filepath.Join(a.Dir, dirs[1])), beginWatch(t, filepath.Join(b.Dir, dirs[0]))
		pause := func(most int) { time.Sleep(time.Duration(rng.IntN(most)) * time.Millisecond) }
		time.Sleep(400 * time.Millisecond)
		pause(500)
		for _, j := range rng.Perm(3) {
			switch who & (1 << j) {
			case killClient:
				a.Signal(syscall.SIGKILL)
			case killService:
				v.Kill()
			case killDrives:
				disks.end()
			}
			pause(100)
		}
		var stampsA, stampsB *stampedFiles
		if who&killClient != 0 {
			a.Abort()
			stampsA = endA() // its errors are our doing
			watchA()
		}
		pause(300)
		if who&killDrives != 0 {
			disks.start()
		}
		if who&killService != 0 {
			v.Fsck()
			v.Start()
		}
		pause(500)
		stuck := time.AfterFunc(time.Minute, func() {
			t.Errorf("%s: a writer does not end", at)
			a.Abort()
			b.Abort()
		})
		stampsB = endB()
		for end, dir := range map[*func() string]string{&watchB: dirs[0], &watchA: dirs[1]} {
			if end == &watchA && stampsA != nil {
				continue
			}
			if said := (*end)(); said != "" {
				t.Errorf("%s: who reads %s: %s", at, dir, said)
			}
		}
		if stampsA == nil {
			if stampsA = endA(); stampsA.Error != "" {
				t.Errorf("%s: the first writer: %s", at, stampsA.Error)
			}
		} else {
			a = v.Mount(mountOptions()...)
		}
		if stampsB.Error != "" {
			t.Errorf("%s: the second writer: %s", at, stampsB.Error)
		}
		stuck.Stop()
		for _, dir := range []string{b.Dir, a.Dir} {
			stampsA.check(t, filepath.Join(dir, dirs[0]), who&killClient != 0)
			stampsB.check(t, filepath.Join(dir, dirs[1]), false)
		}
		if t.Failed() {
			t.Fatal(at)
		}
		if who&killService == 0 {
			v.Stop()
			v.Fsck()
			v.Start()
		}
		if err := os.RemoveAll(filepath.Join(b.Dir, name)); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	}
	a.Unmount()
	b.Unmount()
	harness.Await(t, "all of the namespaces is free again", func() bool {
		var devices []struct {
			Total int64 `json:"total_bytes"`
			Free  int64 `json:"free_bytes"`
		}
		unmarshal(t, harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr), &devices)
		return len(devices) == 2 && devices[0].Free == devices[0].Total && devices[1].Free == devices[1].Total
	})
	v.Stop()
	var report struct {
		Namespaces []struct{ Total, Free int64 }
	}
	unmarshal(t, harness.Run(t, "", harness.Bin(t, "weftd"), "fsck", "--dir", v.Dir, "--json"), &report)
	if n := report.Namespaces; len(n) != 2 || n[0].Free != n[0].Total || n[1].Free != n[1].Total {
		t.Errorf("fsck: %+v", n)
	}
}
