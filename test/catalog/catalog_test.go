package catalog

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
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

	"github.com/weftfs/weft/test/harness"
)

var runs = flag.Int("runs", 3, "checks under load")

// load creates, writes, appends to, truncates, renames and removes files below dir until stop is called, which returns how much was done.
func load(t *testing.T, dir string) (stop func() int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var done atomic.Int64
	var workers sync.WaitGroup
	for i := range 4 {
		own := filepath.Join(dir, fmt.Sprint("worker", i))
		if err := os.MkdirAll(own, 0o755); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			harness.Weft(t, "layout", "set", own, "--mirrors", "2")
		}
		workers.Go(func() { // until cancel
			r := rand.New(rand.NewPCG(uint64(i), 0))
			for ctx.Err() == nil {
				if err := step(r, own); err != nil {
					t.Errorf("load: %v", err)
					return
				}
				done.Add(1)
			}
		})
	}
	var once sync.Once
	stop = func() int64 {
		once.Do(cancel)
		workers.Wait()
		return done.Load()
	}
	t.Cleanup(func() { stop() })
	return stop
}

// step does one of these.
func step(r *rand.Rand, dir string) error {
	name := func() string { return filepath.Join(dir, fmt.Sprint("f", r.IntN(30))) }
	data := func() []byte { return bytes.Repeat([]byte{byte(r.Uint32())}, r.IntN(300<<10)) }
	var err error
	switch path := name(); r.IntN(8) {
	case 0, 1, 2:
		err = os.WriteFile(path, data(), 0o644)
	case 3:
		var f *os.File
		if f, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err == nil {
			_, err = f.Write(data())
			err = errors.Join(err, f.Sync(), f.Close())
		}
	case 4:
		err = os.Truncate(path, int64(r.IntN(200<<10)))
	case 5:
		err = os.Rename(path, name())
	case 6:
		err = os.Remove(path)
	case 7:
		sub := filepath.Join(dir, fmt.Sprint("d", r.IntN(3)))
		if err = os.MkdirAll(sub, 0o755); err == nil {
			if err = os.WriteFile(filepath.Join(sub, "x"), data(), 0o644); err == nil && r.IntN(2) == 0 {
				err = os.RemoveAll(sub)
			}
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// problem is what fsck finds.
type problem struct {
	Kind, Path string
	DataFile   string `json:"data_file"`
}

// fsck checks a volume and returns what it finds; it must be able to run.
func fsck(t *testing.T, args ...string) (found []problem) {
	t.Helper()
	cmd := exec.Command(harness.Bin(t, "weftd"), append([]string{"fsck", "--json"}, args...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 0 && code != 1 {
		t.Fatalf("weftd fsck %s: %v\n%s", strings.Join(args, " "), err, errs.Bytes())
	}
	var report struct {
		Problems []problem
		Busy     int64
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if report.Busy > 0 {
		t.Logf("%d data files were busy", report.Busy)
	}
	return report.Problems
}

// TestOnlineFsck checks a volume under load, and finds the damage that was done to it and nothing else.
func TestOnlineFsck(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true})
	m := v.Mount()
	victim := filepath.Join(m.Dir, "victim")
	if err := os.WriteFile(victim, make([]byte, 100<<10), 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", m.Dir)
	stop := load(t, m.Dir)
	for range *runs {
		if found := fsck(t, "--dir", v.Dir, "--online"); len(found) > 0 {
			t.Errorf("under load: %+v", found)
		}
	}
	if found := fsck(t, "--catalog", "pebble:"+v.Dir, "--online", "--rate", "2000"); len(found) > 0 {
		t.Errorf("slowly, under load: %+v", found)
	}
	at := harness.LayoutOf(t, victim).Mirrors[0].Servers[0]
	if err := os.Remove(v.ServerAt(at.Address).Path(at.DataFile)); err != nil {
		t.Fatal(err)
	}
	found := fsck(t, "--dir", v.Dir, "--online")
	if len(found) != 1 || found[0].Kind != "missing-data-file" || found[0].Path != "/victim" {
		t.Errorf("with a data file less, under load: %+v", found)
	}
	out, err := exec.Command(harness.Bin(t, "weftd"), "fsck", "--dir", v.Dir).CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("--online")) {
		t.Errorf("as if it were stopped: %v, %s", err, out)
	}
	if n := stop(); n < 100 {
		t.Errorf("%d steps of load", n)
	}
	if err := os.Remove(victim); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
	if list, err := os.ReadDir(filepath.Join(v.Dir, "checkpoints")); len(list) > 0 {
		t.Errorf("copies are left: %v, %v", list, err)
	}
}

// TestOnlineNamespaces checks a volume on NVMe namespaces under load; fsck reaches them beside the service, as the same host.
func TestOnlineNamespaces(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{NVMe: 2})
	m := v.Mount()
	stop := load(t, m.Dir)
	for range *runs {
		if found := fsck(t, "--dir", v.Dir, "--online"); len(found) > 0 {
			t.Errorf("under load: %+v", found)
		}
	}
	stop()
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// weftd runs a command of weftd's.
func weftd(t *testing.T, args ...string) {
	t.Helper()
	harness.Run(t, "", harness.Bin(t, "weftd"), args...)
}

// TestRestore goes back to a backup that was made under load. What was there then is there again, and new files get the places of none that
// came later.
func TestRestore(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true})
	m := v.Mount()
	keep := map[string][]byte{}
	for i := range 20 {
		path := filepath.Join("keep", fmt.Sprint(i))
		keep[path] = bytes.Repeat([]byte{byte(i + 1)}, 1000*i)
		if err := errors.Join(os.MkdirAll(filepath.Join(m.Dir, "keep"), 0o755), os.WriteFile(filepath.Join(m.Dir, path), keep[path], 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	harness.Weft(t, "sync", m.Dir)
	stop := load(t, filepath.Join(m.Dir))
	time.Sleep(time.Second)
	file := filepath.Join(t.TempDir(), "backup")
	weftd(t, "catalog", "backup", "--from", v.Dir, "--to", file)
	time.Sleep(time.Second)
	stop()
	for i := range 200 { // which take numbers that the backup does not know of
		if err := os.WriteFile(filepath.Join(m.Dir, fmt.Sprint("later", i)), []byte("later"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m.Unmount()
	v.Stop()

	v.Dir = filepath.Join(t.TempDir(), "restored")
	weftd(t, "catalog", "import", "--from", file, "--to", v.Dir)
	for _, p := range fsck(t, "--dir", v.Dir, "--repair") {
		if strings.HasPrefix(p.Path, "/keep") {
			t.Errorf("of what was there when the backup was made: %+v", p)
		}
	}
	v.Start()
	m = v.Mount()
	if _, err := os.Stat(filepath.Join(m.Dir, "later7")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file of later: %v", err)
	}
	for i := range 200 {
		path := fmt.Sprint("new", i)
		keep[path] = []byte(path)
		if err := os.WriteFile(filepath.Join(m.Dir, path), keep[path], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range keep {
		if got, err := os.ReadFile(filepath.Join(m.Dir, path)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, want %d: %v", path, len(got), len(want), err)
		}
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// holder is a shell script that has files open while nobody serves the volume: a test that had them would wait for itself, since what
// it starts closes them first.
const holder = `
exec 3>open 4>gone 5<gone
printf 'before ' >&3
printf 'still there' >&4
rm gone
echo ready
read line
mkdir 'made meanwhile'
printf after >&3
sync open
cat open
echo
cat <&5
`

// TestMove takes a volume to another catalog while it is mounted: the mount waits, and goes on with the files that it had open.
func TestMove(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true})
	m := v.Mount()
	cmd := exec.Command("sh", "-e", "-c", holder)
	cmd.Dir, cmd.Stderr = m.Dir, os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); line != "ready\n" {
		t.Fatal(line, err)
	}
	v.Stop()
	fmt.Fprintln(in)

	top := t.TempDir()
	first, second := filepath.Join(top, "first"), filepath.Join(top, "second")
	weftd(t, "catalog", "export", "--from", v.Dir, "--to", first)
	v.Dir = filepath.Join(top, "moved")
	weftd(t, "catalog", "import", "--from", first, "--to", v.Dir)
	weftd(t, "catalog", "export", "--from", v.Dir, "--to", second)
	a, errA := os.ReadFile(first)
	b, errB := os.ReadFile(second)
	if err := errors.Join(errA, errB); err != nil || !bytes.Equal(a, b) {
		t.Errorf("the files differ: %v", err)
	}
	v.Start()

	got, err := io.ReadAll(lines)
	if err := errors.Join(err, cmd.Wait()); err != nil || string(got) != "before after\nstill there" {
		t.Errorf("the files that were open: %q, %v", got, err)
	}
	if _, err := os.Stat(filepath.Join(m.Dir, "made meanwhile")); err != nil {
		t.Error(err)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}
