package faults

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/test/harness"
)

// verifyEnv makes this test binary write and check the file it names until standard input ends, and print what it has seen.
const verifyEnv = "WEFT_TEST_VERIFY"

// verifyForever writes blocks in random order, each with its number and version all over, and checks them as often.
func verifyForever(path string) (result string) {
	const block, blocks = 32 << 10, 256
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err.Error()
	}
	defer func() {
		if err := f.Close(); err != nil && result == "" {
			result = err.Error()
		}
	}()
	var stop atomic.Bool
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	rng := rand.New(rand.NewPCG(*seed, 97))
	versions := make([]uint64, blocks)
	fill := func(buf []byte, n int) {
		for at := 0; at < len(buf); at += 16 {
			binary.BigEndian.PutUint64(buf[at:], uint64(n))
			binary.BigEndian.PutUint64(buf[at+8:], versions[n])
		}
	}
	buf, want := make([]byte, block), make([]byte, block)
	for i := 0; !stop.Load(); i++ {
		n := rng.IntN(blocks)
		if rng.IntN(2) == 0 {
			versions[n]++
			fill(buf, n)
			if _, err := f.WriteAt(buf, int64(n)*block); err != nil {
				return fmt.Sprintf("request %d: %v", i, err)
			}
		} else if versions[n] > 0 {
			if _, err := f.ReadAt(buf, int64(n)*block); err != nil {
				return fmt.Sprintf("request %d: %v", i, err)
			}
			if fill(want, n); !bytes.Equal(buf, want) {
				return fmt.Sprintf("request %d: block %d has version %d of block %d, want version %d", i, n,
					binary.BigEndian.Uint64(buf[8:]), binary.BigEndian.Uint64(buf), versions[n])
			}
		}
		if i%200 == 0 {
			if err := f.Sync(); err != nil {
				return fmt.Sprintf("request %d: fsync: %v", i, err)
			}
		}
	}
	for n, version := range versions {
		if version == 0 {
			continue
		}
		if _, err := f.ReadAt(buf, int64(n)*block); err != nil {
			return fmt.Sprintf("at the end: %v", err)
		}
		if fill(want, n); !bytes.Equal(buf, want) {
			return fmt.Sprintf("at the end block %d is wrong", n)
		}
	}
	return ""
}

// verify runs verifyForever; the function it returns ends it.
func verify(t *testing.T, path string) (end func()) {
	cmd := harness.Self(verifyEnv+"="+path, "-seed", fmt.Sprint(*seed))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	return func() {
		t.Helper()
		in.Close()
		if err := cmd.Wait(); err != nil || strings.TrimSpace(out.String()) != "" {
			t.Errorf("verify: %v %s", err, out.String())
		}
	}
}

// TestMirrors kills, restarts and stops one data server after the other under load on files with two copies, and some
// forget what was not stable. No application gets an error or a wrong byte, and when all is over the copies are made
// anew and equal.
func TestMirrors(t *testing.T) {
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 96))
	v := harness.NewVolume(t, harness.Options{Remote: !*local, DataServers: 3, Apart: true, Lease: 30 * time.Second})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "3", "--mirrors", "2")
	endLoad := begin(t, "close", "a", m.Dir)
	endVerify := verify(t, filepath.Join(m.Dir, "verified"))
	for i := range *kills {
		time.Sleep(time.Duration(500+rng.IntN(1500)) * time.Millisecond)
		d := v.Servers[rng.IntN(len(v.Servers))]
		away := time.Duration(rng.IntN(4000)) * time.Millisecond
		switch i % 3 {
		case 0:
			d.Kill()
			time.Sleep(away)
			d.Start()
		case 1:
			d.Pause()
			time.Sleep(away)
			d.Continue()
		case 2: // the metadata service as well, perhaps while it makes copies anew
			d.Kill()
			time.Sleep(away / 2)
			v.Kill()
			time.Sleep(away / 2)
			d.Forget()
			d.Start()
			v.Start()
		}
		// The next one is not taken away before there is another copy of what this one had.
		m.AwaitCopies()
	}
	l := endLoad()
	endVerify()
	if l.Error != "" {
		t.Errorf("an application got an error: %s", l.Error)
	}
	t.Logf("%d files written", len(l.Files))
	l.check(t)
	harness.Weft(t, "admin", "resilver", "--server", v.Addr)
	harness.Weft(t, "sync", m.Dir)
	allEqual(t, v, m)
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// TestMirrorsLostClient loses a client that writes files with two copies, while a data server is away as well. What it had
// synced is there, on both copies, and what it was writing is the same on both.
func TestMirrorsLostClient(t *testing.T) {
	const lease = 3 * time.Second
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 95))
	v := harness.NewVolume(t, harness.Options{Remote: !*local, DataServers: 3, Apart: true, Lease: lease})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "2", "--mirrors", "2")
	for i := range max(2, *kills/4) {
		lost := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
		name := fmt.Sprint("round", i)
		if err := os.Mkdir(filepath.Join(m.Dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		end := begin(t, "fsync", "w", filepath.Join(lost.Dir, name))
		time.Sleep(time.Duration(500+rng.IntN(1500)) * time.Millisecond)
		d := v.Servers[rng.IntN(len(v.Servers))]
		d.Kill()
		time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
		lost.Abort()
		l := end() // its errors are our doing
		l.dir = filepath.Join(m.Dir, name)
		l.check(t)
		d.Start()
		time.Sleep(2 * lease) // until its session is over, for sure
		m.AwaitCopies()
		l.check(t)
		allEqual(t, v, m)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// TestDrain moves everything off a data server under load, and takes it out of the volume. Then nobody misses it. Later it is added again.
func TestDrain(t *testing.T) {
	t.Logf("-seed %d", *seed)
	v := harness.NewVolume(t, harness.Options{Remote: !*local, DataServers: 3, Apart: true})
	m := v.Mount(mountOptions()...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "3", "--mirrors", "1")
	endLoad := begin(t, "close", "a", m.Dir)
	endVerify := verify(t, filepath.Join(m.Dir, "verified"))
	time.Sleep(2 * time.Second)
	d := v.Servers[1]
	type device struct {
		Address   string
		Draining  bool
		DataFiles int64 `json:"data_files"`
	}
	list := func() map[string]device {
		var devices []device
		if err := json.Unmarshal([]byte(harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr)), &devices); err != nil {
			t.Fatal(err)
		}
		byAddress := map[string]device{}
		for _, dev := range devices {
			byAddress[dev.Address] = dev
		}
		return byAddress
	}
	harness.Weft(t, "admin", "device", "drain", d.URL(), "--wait", "--server", v.Addr)
	if left := list()[d.URL()].DataFiles; left > 0 {
		t.Errorf("it still has %d data files", left)
	}
	harness.Weft(t, "admin", "device", "remove", d.URL(), "--server", v.Addr)
	if devices := list(); len(devices) != 2 || devices[d.URL()].Address != "" {
		t.Errorf("after it was removed: %+v", devices)
	}
	d.Kill()
	time.Sleep(2 * time.Second)
	l := endLoad()
	endVerify()
	if l.Error != "" {
		t.Errorf("an application got an error: %s", l.Error)
	}
	t.Logf("%d files written", len(l.Files))
	l.check(t)
	d.Start()
	harness.Weft(t, "admin", "device", "add", d.URL(), "--server", v.Addr)
	endLoad = begin(t, "close", "b", m.Dir)
	used := func() bool { return list()[d.URL()].DataFiles > 0 }
	if !waittest.Poll(5*time.Minute, 200*time.Millisecond, used) {
		t.Fatalf("added again it gets no data files: %+v", list())
	}
	l = endLoad()
	if l.Error != "" {
		t.Errorf("an application got an error: %s", l.Error)
	}
	l.check(t)
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// allEqual compares the copies of all files.
func allEqual(t *testing.T, v *harness.Volume, m *harness.Mount) {
	t.Helper()
	var paths []string
	if err := filepath.WalkDir(m.Dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			paths = append(paths, path)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, path := range paths {
		compared += equalCopies(t, v, path)
	}
	if compared == 0 {
		t.Error("no copies were compared")
	}
	m.Verify()
}

// differ is the first byte at which a and b differ, in whole groups of 16, -1 if they are equal.
func differ(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	at := 0
	for at < min(len(a), len(b)) && a[at] == b[at] {
		at++
	}
	return at &^ 15
}

// equalCopies compares the copies of a file, and returns how many it has compared with another.
func equalCopies(t *testing.T, v *harness.Volume, path string) (compared int) {
	t.Helper()
	l := harness.LayoutOf(t, path)
	if len(l.Mirrors) == 0 {
		return 0
	}
	for j := range l.Mirrors[0].Servers {
		var first []byte
		for i := range l.Mirrors {
			s := l.Mirrors[i].Servers[j]
			if s.DataFile == "" {
				continue
			}
			data, err := os.ReadFile(v.ServerAt(s.Address).Path(s.DataFile))
			if err != nil {
				t.Error(err)
				continue
			}
			data = bytes.TrimRight(data, "\x00") // one may have a hole there
			if i == 0 {
				first = data
				continue
			}
			compared++
			if at := differ(first, data); at >= 0 {
				t.Errorf("%s: the copies of column %d differ from byte %d on, %x and %x (%d and %d bytes) in\n%+v", path, j, at,
					first[at:min(at+32, len(first))], data[at:min(at+32, len(data))], len(first), len(data), l)
			}
		}
	}
	return compared
}
