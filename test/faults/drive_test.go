package faults

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/test/harness"
)

// drivesEnv makes this test binary serve the files of a directory as namespaces until it is killed: "DIR HOST:PORT...", file N at the
// N-th address.
const drivesEnv = "WEFT_TEST_DRIVES"

const (
	driveBytes = 256 << 20
	driveBlock = 4096
	// blankBytes at either end of a drive are zeros before it is added to a volume; all else is poison, which no file has ever had.
	blankBytes = 1 << 20
	poison     = 0xEE
)

// drives are namespaces, each alone in a subsystem that has a port of its own. They are served by one process.
type drives struct {
	t     *testing.T
	dir   string
	addrs []string
	end   func() // of the process
}

func newDrives(t *testing.T, count int) *drives {
	t.Helper()
	d := &drives{t: t, dir: harness.Dir(t)}
	fill := bytes.Repeat([]byte{poison}, 4<<20)
	for i := range count {
		f, err := os.Create(filepath.Join(d.dir, fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		for off := int64(blankBytes); off < driveBytes-blankBytes && err == nil; off += int64(len(fill)) {
			_, err = f.WriteAt(fill[:min(int64(len(fill)), driveBytes-blankBytes-off)], off)
		}
		if err == nil {
			err = f.Truncate(driveBytes)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		d.addrs = append(d.addrs, harness.FreeAddr(t))
	}
	d.start()
	t.Cleanup(func() { d.end() })
	return d
}

func (d *drives) start() {
	d.t.Helper()
	cmd := harness.Self(fmt.Sprintf("%s=%s %s", drivesEnv, d.dir, strings.Join(d.addrs, " ")), "-seed", fmt.Sprint(*seed))
	cmd.Stdin = nil
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.end = sync.OnceFunc(func() {
		cmd.Process.Signal(syscall.SIGKILL)
		cmd.Wait()
	})
	for _, addr := range d.addrs {
		harness.AwaitListen(d.t, addr)
	}
}

// urls are those of the namespaces.
func (d *drives) urls() (urls []string) {
	for i, addr := range d.addrs {
		urls = append(urls, "nvme://"+addr+"/"+driveNQN(i)+"#1")
	}
	return urls
}

func driveNQN(i int) string { return fmt.Sprint("nqn.2024-01.test.weft:drive", i) }

// serveDrives is the process that drivesEnv says.
func serveDrives(how string) {
	words := strings.Fields(how)
	cfg := nvme.Config{Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	for i, addr := range words[1:] {
		f, err := os.OpenFile(filepath.Join(words[0], fmt.Sprint(i)), os.O_RDWR, 0)
		if err != nil {
			panic(err)
		}
		cfg.Subsystems = append(cfg.Subsystems, nvme.Subsystem{
			NQN: driveNQN(i), Serial: fmt.Sprint(i), AnyHost: true,
			Namespaces: []nvme.Namespace{{NSID: 1, Backing: newDrive(f), BlockSize: driveBlock, NGUID: [16]byte{0xd0, byte(i)}}},
		})
		cfg.Ports = append(cfg.Ports, nvme.Port{ID: uint16(i + 1), Listen: addr, Subsystems: []string{driveNQN(i)}})
	}
	if _, err := nvme.New(cfg); err != nil {
		panic(err)
	}
	select {}
}

// drive is a namespace with a volatile write cache, as it is at a power failure: of what was written since the last Sync some blocks
// are in the file, and when the process is killed the others are gone.
type drive struct {
	f     *os.File
	sync  sync.Mutex // held over a Sync, taken before mu
	mu    sync.RWMutex
	cache map[int64][]byte // blocks that are not in the file, by number
	rng   *rand.Rand
}

func newDrive(f *os.File) *drive {
	return &drive{f: f, cache: map[int64][]byte{}, rng: rand.New(rand.NewPCG(*seed, uint64(os.Getpid())))}
}

func (d *drive) Size() (int64, error) { return driveBytes, nil }

func (d *drive) ReadAt(p []byte, off int64) (int, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	n, err := d.f.ReadAt(p, off)
	if err != nil && err != io.EOF {
		return n, err
	}
	first := off / driveBlock
	for b := first; b*driveBlock < off+int64(len(p)); b++ {
		if data := d.cache[b]; data != nil {
			if at := b*driveBlock - off; at >= 0 {
				copy(p[at:], data)
			} else {
				copy(p, data[-at:])
			}
		}
	}
	return n, err
}

// WriteAt is given whole blocks.
func (d *drive) WriteAt(p []byte, off int64) (int, error) {
	if off%driveBlock != 0 || len(p)%driveBlock != 0 {
		return 0, fmt.Errorf("write of %d bytes at %d", len(p), off)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for at := 0; at < len(p); at += driveBlock {
		d.cache[(off+int64(at))/driveBlock] = slices.Clone(p[at : at+driveBlock])
	}
	for d.rng.IntN(4) == 0 && len(d.cache) > 0 { // caches write back what they like
		for b, data := range d.cache {
			if _, err := d.f.WriteAt(data, b*driveBlock); err != nil {
				return 0, err
			}
			delete(d.cache, b)
			break
		}
	}
	return len(p), nil
}

func (d *drive) Sync() error {
	d.sync.Lock()
	defer d.sync.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for b, data := range d.cache {
		if _, err := d.f.WriteAt(data, b*driveBlock); err != nil {
			return err
		}
	}
	clear(d.cache)
	return nil
}

func (d *drive) Zero(off, n int64, release bool) error {
	_, err := d.WriteAt(make([]byte, n), off)
	return err
}
