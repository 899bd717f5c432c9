package local

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// dataFilesAt is how many data files of layouts each data server has, by its id.
func dataFilesAt(t *testing.T, v *harness.Volume) map[string]int64 {
	t.Helper()
	var list []struct {
		ID        string
		DataFiles int64 `json:"data_files"`
	}
	out := harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr)
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n := map[string]int64{}
	for _, d := range list {
		n[d.ID] = d.DataFiles
	}
	return n
}

// checkDataFiles compares that with the layouts of files.
func checkDataFiles(t *testing.T, v *harness.Volume, paths ...string) {
	t.Helper()
	want := map[string]int64{}
	for _, path := range paths {
		for _, m := range harness.LayoutOf(t, path).Mirrors {
			for _, s := range m.Servers {
				if s.DataFile != "" {
					want[s.Device]++
				}
			}
		}
	}
	for id, n := range dataFilesAt(t, v) {
		if n != want[id] {
			t.Errorf("device %s counts %d data files, the layouts have %d there", id, n, want[id])
		}
	}
}

// wholeOn checks that a file is one data file on a device.
func wholeOn(t *testing.T, path, id string) {
	t.Helper()
	l := harness.LayoutOf(t, path)
	if len(l.Mirrors) != 1 || len(l.Mirrors[0].Servers) != 1 || l.Mirrors[0].Servers[0].Device != id {
		t.Errorf("%s lies on %+v, want %s", path, l.Mirrors, id)
	}
}

// A file that lies on data servers elsewhere is moved to this host, and read locally from then on.
func TestMoveToLocal(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Apart: true, Remote: true})
	far := v.Mount(mountOptions()...)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<19)
	if err := os.WriteFile(far.Dir+"/f", want, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(harness.Bin(t, "weft"), "layout", "move", far.Dir+"/f", "--to", "local").CombinedOutput(); err == nil || !strings.Contains(string(out), "none of the volume's data servers is on this host") {
		t.Errorf("without a data server here: %v: %s", err, out)
	}
	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "data", "--dir", filepath.Join(harness.Dir(t), "near"), "--listen", addr)
	harness.AwaitListen(t, addr)
	harness.Weft(t, "admin", "device", "add", "nfs://"+addr+"/", "--server", v.Addr)
	m := v.Mount(append(mountOptions(), "passthrough=off")...) // so that reads are counted
	near := func() (local device, rpc uint64) {
		for _, d := range devices(t, m) {
			if d.Local {
				local = d
			}
			rpc += d.OpsRPC
		}
		return local, rpc
	}
	id, _ := near()
	if id.ID == "" {
		t.Fatalf("none of %+v is local", devices(t, m))
	}
	if out := harness.Weft(t, "layout", "move", m.Dir+"/f", "--to", "local"); !strings.HasPrefix(out, "1 files moved, 8.0 MiB") {
		t.Errorf("moved: %s", out)
	}
	if out := harness.Weft(t, "layout", "move", m.Dir+"/f", "--to", "local"); !strings.Contains(out, "1 were there already") {
		t.Errorf("moved again: %s", out)
	}
	wholeOn(t, m.Dir+"/f", id.ID)
	before, rpc := near()
	same(t, m.Dir+"/f", want)
	after, rpcAfter := near()
	if after.OpsLocal == before.OpsLocal || rpcAfter != rpc {
		t.Errorf("%d requests without RPC and %d with it to read the file", after.OpsLocal-before.OpsLocal, rpcAfter-rpc)
	}
	same(t, far.Dir+"/f", want)
	checkDataFiles(t, v, m.Dir+"/f")
	m.Unmount()
	far.Unmount()
	v.Stop()
	v.Fsck()
}

// What a kernel reads by itself stays where it is until it is closed.
func TestMovePinned(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Apart: true})
	m := v.Mount(append(mountOptions(), "passthrough=ro")...)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	if err := os.WriteFile(m.Dir+"/f", want, 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "layout", "move", m.Dir+"/f", "--to", "local")
	from := harness.LayoutOf(t, m.Dir+"/f").Mirrors[0].Servers[0].Device
	var to string
	for id := range dataFilesAt(t, v) {
		if id != from {
			to = id
		}
	}
	f, err := os.Open(m.Dir + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(harness.Bin(t, "weft"), "layout", "move", m.Dir+"/f", "--to", to)
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(said)
	for lines.Scan() && !strings.Contains(lines.Text(), "where it is open in passthrough") {
	}
	if lines.Err() != nil || lines.Text() == "" {
		t.Fatal("it does not wait for a file that is open in passthrough")
	}
	wholeOn(t, m.Dir+"/f", from)
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("other bytes are read: %v", err)
	}
	f.Close()
	for lines.Scan() {
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	wholeOn(t, m.Dir+"/f", to)
	same(t, m.Dir+"/f", want)
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// A directory: files of any size, with links, without data, mirrored ones.
func TestMoveDirectory(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Apart: true})
	m, other := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	var dev string
	for id := range dataFilesAt(t, v) {
		dev = id
	}
	dir := m.Dir + "/dir"
	if err := os.MkdirAll(dir+"/sub/mirrored", 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "layout", "set", dir+"/sub/mirrored", "--mirrors", "2", "--stripe-count", "2")
	want := map[string][]byte{}
	write := func(name string, n int) {
		want[name] = bytes.Repeat([]byte(fmt.Sprintf("%-16s", filepath.Base(name))), n/16)
		if err := os.WriteFile(dir+"/"+name, want[name], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 12 {
		write(fmt.Sprintf("small%d", i), 16<<i)
		write(fmt.Sprintf("sub/large%d", i), 3<<20+i<<16)
	}
	for i := range 4 {
		write(fmt.Sprintf("sub/mirrored/m%d", i), 3<<20)
	}
	for _, err := range []error{
		os.WriteFile(dir+"/empty", nil, 0o644), // opened for writing, so it has a data file
		unix.Mknod(dir+"/nothing", unix.S_IFREG|0o644, 0),
		os.Link(dir+"/small1", dir+"/sub/link"),
		os.Symlink("small1", dir+"/symlink"),
		os.WriteFile(m.Dir+"/beside", []byte("beside"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	beside := harness.LayoutOf(t, m.Dir+"/beside").Mirrors[0].Servers[0].DataFile
	cmd := exec.Command(harness.Bin(t, "weft"), "layout", "move", dir, "--to", dev[:10])
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "1 have no data yet") || strings.Contains(string(out), "could not") {
		t.Errorf("%v: %s", err, out)
	}
	paths := []string{m.Dir + "/beside", dir + "/empty"}
	for name, data := range want {
		same(t, dir+"/"+name, data)
		same(t, other.Dir+"/dir/"+name, data)
		paths = append(paths, dir+"/"+name)
		if !strings.Contains(name, "mirrored") {
			wholeOn(t, dir+"/"+name, dev)
			continue
		}
		l := harness.LayoutOf(t, dir+"/"+name)
		for j := range l.Mirrors[0].Servers {
			a, b := l.Mirrors[0].Servers[j].Device, l.Mirrors[1].Servers[j].Device
			if a == b || a != dev && b != dev {
				t.Errorf("%s: column %d has copies on %s and %s, want one on %s", name, j, a, b, dev)
			}
		}
	}
	if now := harness.LayoutOf(t, m.Dir+"/beside").Mirrors[0].Servers[0].DataFile; now != beside {
		t.Error("a file beside the directory was moved")
	}
	for name, data := range want { // they can still be written and grow
		if err := os.WriteFile(other.Dir+"/dir/"+name, append(data, data...), 0o644); err != nil {
			t.Fatal(err)
		}
		same(t, dir+"/"+name, append(data, data...))
	}
	checkDataFiles(t, v, paths...)
	out, err = exec.Command(harness.Bin(t, "weft"), "layout", "move", dir, "--to", "nowhere").CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); err == nil || code != 0 || !strings.Contains(string(out), "could not be moved") {
		t.Errorf("to nowhere: %v: %s", err, out)
	}
	m.Unmount()
	other.Unmount()
	v.Stop()
	v.Fsck()
}

// blocks is a file of numbered blocks that a writer and a reader use at the same time: each block holds its number and a count, which
// only grows.
type blocks struct {
	acked []atomic.Uint64 // the count of each block that was last written
	begun []atomic.Uint64 // and that is being written
}

const blockBytes = 16 << 10

func (b *blocks) fill(buf []byte, i int, count uint64) {
	for at := 0; at < len(buf); at += 16 {
		binary.BigEndian.PutUint64(buf[at:], uint64(i))
		binary.BigEndian.PutUint64(buf[at+8:], count)
	}
}

// write writes a block once more.
func (b *blocks) write(f *os.File, i int) error {
	count := b.begun[i].Add(1)
	buf := make([]byte, blockBytes)
	b.fill(buf, i, count)
	_, err := f.WriteAt(buf, int64(i)*blockBytes)
	if err == nil {
		b.acked[i].Store(count)
	}
	return err
}

// check reads a block.
func (b *blocks) check(f *os.File, i int) error {
	least := b.acked[i].Load()
	buf := make([]byte, blockBytes)
	if _, err := f.ReadAt(buf, int64(i)*blockBytes); err != nil {
		return err
	}
	most := b.begun[i].Load()
	for at := 0; at < len(buf); at += 16 {
		number, count := binary.BigEndian.Uint64(buf[at:]), binary.BigEndian.Uint64(buf[at+8:])
		if number != uint64(i) || count < least || count > most {
			return fmt.Errorf("block %d at byte %d: number %d, count %d, want %d to %d", i, at, number, count, least, most)
		}
	}
	return nil
}

// usersEnv names the directories of two mounts to a process of this test that uses a file there until its standard input ends. It is
// not the process that starts servers: to start a program closes its copies of open files, which waits for them.
const usersEnv = "WEFT_TEST_USERS"

// use writes a file on one mount and reads it on another, until stop is closed.
func use(t *testing.T, writer, reader string, ready func(), stop chan struct{}) {
	const n = 128 << 20 / blockBytes
	bl := &blocks{acked: make([]atomic.Uint64, n), begun: make([]atomic.Uint64, n)}
	w, err := os.Create(writer)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for i := range n {
		if err := bl.write(w, i); err != nil {
			t.Fatal(err)
		}
	}
	r, err := os.Open(reader)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ready()
	var users sync.WaitGroup
	for i := range 4 {
		users.Go(func() { // until stop is closed
			rnd := rand.New(rand.NewPCG(uint64(i), 5))
			for {
				select {
				case <-stop:
					return
				default:
				}
				var err error
				if at := rnd.IntN(n); i%2 == 0 {
					err = bl.write(w, at/2*2+i/2) // a block has one writer
				} else {
					err = bl.check(r, at)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	users.Wait()
	again, err := os.Open(writer)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for i := range n {
		if err := errors.Join(bl.check(r, i), bl.check(again, i)); err != nil {
			t.Fatal(err)
		}
	}
}

// A file is moved to and fro while it is written on one mount and read on another, and the metadata service is killed in the midst of it.
func TestMoveInUse(t *testing.T) {
	if dirs := strings.Split(os.Getenv(usersEnv), ":"); len(dirs) == 2 {
		stop := make(chan struct{})
		go func() { // ends with standard input
			io.Copy(io.Discard, os.Stdin)
			close(stop)
		}()
		use(t, dirs[0]+"/f", dirs[1]+"/f", func() { fmt.Println("ready") }, stop)
		return
	}
	v := harness.NewVolume(t, harness.Options{Apart: true, Lease: 5 * time.Second})
	a, b := v.Mount(mountOptions()...), v.Mount(mountOptions()...)
	users := harness.Self(usersEnv+"="+a.Dir+":"+b.Dir, "-test.run=^TestMoveInUse$", "-test.timeout=5m")
	input, err := users.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := users.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := users.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewScanner(output)
	for said.Scan() && said.Text() != "ready" {
		t.Log(said.Text())
	}
	var ids []string
	for id := range dataFilesAt(t, v) {
		ids = append(ids, id)
	}
	for _, id := range ids[:2] {
		harness.Weft(t, "layout", "move", a.Dir+"/f", "--to", id)
		wholeOn(t, b.Dir+"/f", id)
	}
	// Whoever asked for it is gone, and so is the service; what was begun is ended all the same.
	for i, id := range ids[2:] {
		cmd := exec.Command(harness.Bin(t, "weft"), "layout", "move", b.Dir+"/f", "--to", id)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		harness.Await(t, "the beginning of a move", func() bool { return len(harness.LayoutOf(t, b.Dir+"/f").Mirrors) == 2 })
		time.Sleep(time.Duration(i+1) * 30 * time.Millisecond)
		v.Kill()
		cmd.Process.Kill()
		cmd.Wait()
		v.Fsck() // in the middle of it
		v.Start()
		harness.Await(t, "the end of the move", func() bool {
			l := harness.LayoutOf(t, a.Dir+"/f")
			return len(l.Mirrors) == 1 && len(l.Mirrors[0].Servers) == 1 && l.Mirrors[0].Servers[0].Device == id
		})
	}
	t.Logf("moves that went on: %d", strings.Count(v.Log(), "moves=1"))
	input.Close()
	for said.Scan() {
		t.Log(said.Text())
	}
	if err := users.Wait(); err != nil {
		t.Fatalf("who used the file: %v", err)
	}
	checkDataFiles(t, v, a.Dir+"/f")
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}
