package faults

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

const (
	// ownBytes is the part of the shared file that one writer has for itself; these parts lie side by side at its start, so that two
	// neighbours have a MiB in common. Behind them is what all write.
	ownBytes    = 200_000
	ownBlock    = 1000
	sharedBytes = 3 << 20
	// recordBytes is a record of the file that all append to.
	recordBytes = 512
)

// scribbleEnv makes this test binary write files that others write as well until standard input ends, and print what it was told: "NUMBER
// OF APART DIR", being number of so many. APART is how far apart their own parts are in bytes, and they write nothing else, or 0.
const scribbleEnv = "WEFT_TEST_SCRIBBLE"

// scribbler writes on one mount to files that others write as well.
type scribbler struct {
	number, of int
	apart      int64
	dir        string
	rng        *rand.Rand
	stop       atomic.Bool
	told
}

// told is what a scribbler was told, and must be so from then on.
type told struct {
	Begun       uint64                      // the last version of a block of its own part that it began
	Blocks      [ownBytes / ownBlock]uint64 // the last one of each block that was acknowledged
	Records     int                         // that were appended
	SyncBlocks  [ownBytes / ownBlock]uint64 // both, at the last fsync
	SyncRecords int
	Ops         int
	Error       string
}

// own is where its own part begins.
func (s *scribbler) own() int64 { return int64(s.number) * max(ownBytes, s.apart) }

// block is a version of a block of a writer's own part.
func (s *scribbler) block(n int, version uint64) []byte {
	b := make([]byte, ownBlock)
	for at := 0; at+24 <= len(b); at += 24 {
		binary.BigEndian.PutUint64(b[at:], uint64(s.number))
		binary.BigEndian.PutUint64(b[at+8:], uint64(n))
		binary.BigEndian.PutUint64(b[at+16:], version)
	}
	return b
}

// record is the n-th record that a writer appends.
func (s *scribbler) record(n int) []byte {
	return bytes.Repeat(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(s.number+1)), uint64(n)), recordBytes/16)
}

// scribbleForever is the process that scribbleEnv says.
func scribbleForever(how string) {
	s := new(scribbler)
	if _, err := fmt.Sscan(how, &s.number, &s.of, &s.apart, &s.dir); err != nil {
		panic(err)
	}
	s.rng = rand.New(rand.NewPCG(*seed, uint64(s.number)))
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		s.stop.Store(true)
	}()
	if err := s.scribble(); err != nil {
		s.Error = err.Error()
	}
	json.NewEncoder(os.Stdout).Encode(s.told)
}

// beginScribble runs a scribbler; stop tells it to end, and end waits for that.
func beginScribble(t *testing.T, number, of int, apart int64, dir string) (stop func(), end func() *scribbler) {
	in, out := startPiped(t, harness.Self(fmt.Sprintf("%s=%d %d %d %s", scribbleEnv, number, of, apart, dir), "-seed", fmt.Sprint(*seed)))
	return func() { in.Close() }, func() *scribbler {
		t.Helper()
		s := &scribbler{number: number, of: of, apart: apart}
		if err := json.NewDecoder(out).Decode(&s.told); err != nil {
			t.Fatalf("writer %d: %v", number, err)
		}
		return s
	}
}

// scribble writes until it is told to stop, or to an error.
func (s *scribbler) scribble() error {
	f, err := os.OpenFile(filepath.Join(s.dir, "shared"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	own, shared := s.own(), int64(s.of)*ownBytes
	buf := make([]byte, 300<<10)
	for ; !s.stop.Load(); s.Ops++ {
		n := s.rng.IntN(100)
		if s.apart > 0 {
			n = 50 + s.rng.IntN(25)
		}
		switch {
		case n < 50: // what others write as well, some of it across a border of 1 MiB
			size := 1 + s.rng.IntN(len(buf)>>s.rng.IntN(12))
			off := shared + s.rng.Int64N(sharedBytes)
			switch s.rng.IntN(4) {
			case 0:
				off = max(shared, off>>20<<20-int64(s.rng.IntN(size+1)))
			case 1, 2: // where the others are at this moment, and shortly nobody
				size = min(size, 32<<10)
				off = shared + time.Now().UnixMilli()/10%(sharedBytes>>15)<<15
			}
			for i := range buf[:size] {
				buf[i] = byte(1 + s.number*50 + s.Ops%50)
			}
			if _, err := f.WriteAt(buf[:size], off); err != nil {
				return fmt.Errorf("write %d: %w", s.Ops, err)
			}
		case n < 75:
			i := s.rng.IntN(len(s.Blocks))
			s.Begun++
			if _, err := f.WriteAt(s.block(i, s.Begun), own+int64(i)*ownBlock); err != nil {
				return fmt.Errorf("write %d: %w", s.Ops, err)
			}
			s.Blocks[i] = s.Begun
		case n < 85:
			if _, err := log.Write(s.record(s.Records)); err != nil {
				return fmt.Errorf("append %d: %w", s.Ops, err)
			}
			s.Records++
		case n < 93:
			i := s.rng.IntN(len(s.Blocks))
			got := make([]byte, ownBlock)
			if _, err := f.ReadAt(got, own+int64(i)*ownBlock); s.Blocks[i] > 0 && (err != nil || !bytes.Equal(got, s.block(i, s.Blocks[i]))) {
				return fmt.Errorf("read %d: %w, block %d has version %d of writer %d, want %d of %d", s.Ops, err, i,
					binary.BigEndian.Uint64(got[16:]), binary.BigEndian.Uint64(got), s.Blocks[i], s.number)
			}
		case n < 97:
			if err := errors.Join(f.Sync(), log.Sync()); err != nil {
				return fmt.Errorf("fsync %d: %w", s.Ops, err)
			}
			s.SyncBlocks, s.SyncRecords = s.Blocks, s.Records
		case n < 98:
			if err := f.Truncate(shared + s.rng.Int64N(sharedBytes)); err != nil {
				return fmt.Errorf("truncate %d: %w", s.Ops, err)
			}
		default:
			if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, shared+s.rng.Int64N(sharedBytes), 70_000); err != nil {
				return fmt.Errorf("punch %d: %w", s.Ops, err)
			}
		}
	}
	if err := errors.Join(f.Sync(), log.Sync()); err != nil {
		return fmt.Errorf("fsync at the end: %w", err)
	}
	s.SyncBlocks, s.SyncRecords = s.Blocks, s.Records
	return nil
}

// check looks in another mount for what the writer was told is safe. A block may have a later version that was begun.
func (s *scribbler) check(t *testing.T, dir string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "shared"))
	if err != nil {
		t.Error(err)
		return
	}
	for i, version := range s.SyncBlocks {
		off := int(s.own()) + i*ownBlock
		if version == 0 {
			continue
		}
		if len(data) < off+ownBlock {
			t.Errorf("writer %d: the file has %d bytes", s.number, len(data))
			return
		}
		got := data[off : off+ownBlock]
		if has := binary.BigEndian.Uint64(got[16:]); has < version || has > s.Begun || !bytes.Equal(got, s.block(i, has)) {
			t.Errorf("writer %d: block %d has version %d of writer %d, want %d or later", s.number, i, has, binary.BigEndian.Uint64(got), version)
			return
		}
	}
	log, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil {
		t.Error(err)
		return
	}
	found := map[int]bool{}
	for at := 0; at+recordBytes <= len(log); at += recordBytes {
		rec := log[at : at+recordBytes]
		if n := int(binary.BigEndian.Uint64(rec[8:])); binary.BigEndian.Uint64(rec) == uint64(s.number+1) {
			if !bytes.Equal(rec, s.record(n)) {
				t.Errorf("writer %d: the record at %d is torn", s.number, at)
			}
			found[n] = true
		}
	}
	for n := range s.SyncRecords {
		if !found[n] {
			t.Errorf("writer %d: record %d of %d is not in the file", s.number, n, s.SyncRecords)
			return
		}
	}
}

// sharedCase is a volume on which several mounts write the same files.
type sharedCase struct {
	name         string
	mounts       int
	copies       int
	apart        int64 // see scribbleEnv
	local        bool
	options      []string
	lease        time.Duration
	disturb      func(t *testing.T, v *harness.Volume, rng *rand.Rand)
	lose         bool          // the last mount is killed half-way
	short, whole time.Duration // how long they write, the latter with -long; 0: not at all
}

// TestSharedMirrors has several mounts write the same bytes, and bytes side by side, of files with several copies, or one: at random places, at
// the end, with truncations, holes and fsync, while servers or a mount are killed. No writer gets an error or loses what was acknowledged, and
// the copies are the same afterwards.
func TestSharedMirrors(t *testing.T) {
	restart := func(t *testing.T, v *harness.Volume, rng *rand.Rand) {
		d := v.Servers[rng.IntN(len(v.Servers))]
		d.Kill()
		time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
		if rng.IntN(2) == 0 {
			d.Forget()
		}
		d.Start()
	}
	service := func(t *testing.T, v *harness.Volume, rng *rand.Rand) {
		v.Kill()
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		v.Start()
	}
	for _, c := range []sharedCase{
		{name: "two", mounts: 2, copies: 2, short: 2 * time.Second, whole: 20 * time.Second, options: []string{"transport=gofuse"}},
		{name: "four", mounts: 4, copies: 3, short: 2 * time.Second, whole: 20 * time.Second, options: []string{"transport=device"}, local: true},
		{name: "single", mounts: 3, copies: 1, disturb: restart, lease: 10 * time.Second, short: 4 * time.Second, whole: 30 * time.Second},
		{name: "lost", mounts: 4, copies: 2, lose: true, lease: 3 * time.Second, whole: 15 * time.Second},
		{name: "apart", mounts: 3, copies: 2, apart: 4 << 20, lose: true, lease: 3 * time.Second, short: 2 * time.Second, whole: 10 * time.Second},
		{name: "server", mounts: 3, copies: 2, disturb: restart, lease: 10 * time.Second, whole: 30 * time.Second},
		{name: "service", mounts: 3, copies: 2, disturb: service, lease: 10 * time.Second, whole: 30 * time.Second},
		{name: "losttwice", mounts: 4, copies: 3, lose: true, disturb: restart, lease: 3 * time.Second, whole: 20 * time.Second, local: true},
	} {
		took := c.short
		if *long {
			took = c.whole
		}
		if took > 0 {
			t.Run(c.name, func(t *testing.T) { sharedMirrors(t, &c, took) })
		}
	}
}

func sharedMirrors(t *testing.T, c *sharedCase, took time.Duration) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 94))
	v := harness.NewVolume(t, harness.Options{Remote: !c.local && !*local, DataServers: 3, Apart: true, Lease: c.lease})
	var mounts []*harness.Mount
	for range c.mounts {
		mounts = append(mounts, v.Mount(append(append(mountOptions(), "mirror-timeout=1s"), c.options...)...))
	}
	harness.Weft(t, "layout", "set", mounts[0].Dir, "--stripe-unit", "64KiB", "--stripe-count", "2", "--mirrors", fmt.Sprint(c.copies))
	for _, name := range []string{"shared", "log"} {
		if err := os.WriteFile(filepath.Join(mounts[0].Dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var stops []func()
	var ends []func() *scribbler
	for i, m := range mounts {
		stop, end := beginScribble(t, i, c.mounts, c.apart, m.Dir)
		stops, ends = append(stops, stop), append(ends, end)
	}
	end := time.Now().Add(took)
	lost := c.lose
	for time.Now().Before(end) {
		time.Sleep(min(time.Until(end), time.Duration(500+rng.IntN(1500))*time.Millisecond))
		if lost && time.Now().After(end.Add(-took/2)) {
			mounts[len(mounts)-1].Signal(syscall.SIGKILL)
			mounts[len(mounts)-1].Abort()
			lost = false
			end = end.Add(2 * c.lease) // until its session is over, for sure, and its files can be written again

		}
		if c.disturb != nil {
			c.disturb(t, v, rng)
		}
	}
	var writers []*scribbler
	stuck := time.AfterFunc(2*time.Minute, func() {
		t.Error("a writer does not end")
		for _, m := range mounts {
			m.Abort()
		}
	})
	for _, stop := range stops { // all at once: one that went on alone would make the copies the same again
		stop()
	}
	for i, end := range ends {
		s := end()
		writers = append(writers, s)
		if s.Error != "" && !(c.lose && i == len(ends)-1) {
			t.Errorf("writer %d: %s", i, s.Error)
		}
		t.Logf("writer %d: %d operations, %d appends", i, s.Ops, s.Records)
		if s.Ops == 0 {
			t.Errorf("writer %d got nowhere", i)
		}
	}
	stuck.Stop()
	for _, s := range writers {
		s.check(t, mounts[0].Dir)
	}
	mounts[0].AwaitCopies()
	harness.Weft(t, "sync", mounts[0].Dir)
	for _, s := range writers {
		s.check(t, mounts[0].Dir)
	}
	if c.copies > 1 {
		allEqual(t, v, mounts[0])
	}
	for _, m := range mounts {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}
