package faults

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// retainEnv makes this test binary open the file it names, and do to it what standard input says, line by line: "write
// C" fills it with the letter C, without a sync, and "fsync". After each it prints ok or the error.
const retainEnv = "WEFT_TEST_RETAIN"

// A retained file is retainBlocks writes of retainBlock bytes, which data servers do through the page cache.
const (
	retainBlocks = 64
	retainBlock  = 4096
)

func retainForever(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		do, letter, _ := strings.Cut(lines.Text(), " ")
		if do == "fsync" {
			err = f.Sync()
		}
		for i := 0; do == "write" && i < retainBlocks && err == nil; i++ {
			_, err = f.WriteAt(bytes.Repeat([]byte(letter), retainBlock), int64(i*retainBlock))
		}
		if err == nil {
			fmt.Println("ok")
		} else {
			fmt.Println(err)
		}
		err = nil
	}
	return nil
}

// retainer is a process that has a file of a mount open, which that retains what is not stable.
type retainer struct {
	t     *testing.T
	path  string
	in    io.Writer
	lines *bufio.Scanner
}

func retain(t *testing.T, path string) *retainer {
	cmd := harness.Self(retainEnv + "=" + path)
	in, out := startPiped(t, cmd)
	t.Cleanup(func() { // before the mount is unmounted
		cmd.Process.Kill()
		cmd.Wait()
	})
	return &retainer{t, path, in, bufio.NewScanner(out)}
}

// do returns what came of a line.
func (r *retainer) do(line string) string {
	r.t.Helper()
	fmt.Fprintln(r.in, line)
	if !r.lines.Scan() {
		r.t.Fatalf("the process that has %s open has ended", r.path)
	}
	return r.lines.Text()
}

func (r *retainer) must(line string) {
	r.t.Helper()
	if got := r.do(line); got != "ok" {
		r.t.Errorf("%s: %s: %s", r.path, line, got)
	}
}

// wantLetter checks that a file was filled with it.
func wantLetter(t *testing.T, path, letter string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if want := bytes.Repeat([]byte(letter), retainBlocks*retainBlock); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes, %d of them %s, %v", path, len(got), bytes.Count(got, []byte(letter)), letter, err)
	}
}

// verifierOf is the write verifier that a data server has recorded.
func verifierOf(t *testing.T, d *harness.DataServer) string {
	t.Helper()
	var note struct{ Verifier string }
	b, err := os.ReadFile(filepath.Join(d.Dir, "verifier"))
	if err == nil {
		err = json.Unmarshal(b, &note)
	}
	if err != nil || note.Verifier == "" {
		t.Fatalf("%s: %s, %v", d.Dir, b, err)
	}
	return note.Verifier
}

// sentAgain reports whether a mount has found that a server lost something.
func sentAgain(m *harness.Mount) bool {
	return strings.Contains(m.Log(), "data that was not stable is sent again")
}

// TestKillKeepsVerifier ends a data server by kill -9 and by SIGTERM: it comes back with the verifier that it had, so
// that a client that has written and not synced sends nothing again. It does when the verifier has changed.
func TestKillKeepsVerifier(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true})
	m := v.Mount(mountOptions()...)
	d := v.Servers[0]
	r := retain(t, filepath.Join(m.Dir, "f"))
	before := verifierOf(t, d)
	for i, end := range []func(){d.Kill, d.Stop, d.Kill} {
		letter := string(rune('a' + i))
		r.must("write " + letter)
		end()
		d.Start()
		r.must("fsync")
		wantLetter(t, r.path, letter)
	}
	if sentAgain(m) {
		t.Error("data was sent again")
	}
	if after := verifierOf(t, d); after != before {
		t.Errorf("verifier %s, before %s", after, before)
	}
	r.must("write z")
	d.Kill()
	d.Forget()
	d.Start()
	r.must("fsync")
	wantLetter(t, r.path, "z")
	if !sentAgain(m) {
		t.Error("the verifier has changed, and nothing was sent again")
	}
}

// TestPowerCut cuts a data server's power. What was fsynced is on the disk, and what was only written the client sends
// again.
func TestPowerCut(t *testing.T) {
	disk := harness.NewDisk(t, 64<<20)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true, Disks: []*harness.Disk{disk}})
	m := v.Mount(mountOptions()...)
	d := v.Servers[0]
	synced, written := retain(t, filepath.Join(m.Dir, "synced")), retain(t, filepath.Join(m.Dir, "written"))
	for i := range 3 {
		letter := string(rune('a' + i))
		synced.must("write " + letter)
		synced.must("fsync")
		written.must("write " + letter)
		before := verifierOf(t, d)
		d.PowerCut()
		wantLetter(t, d.Path(dataFileOf(t, synced.path)), letter)
		if b, _ := os.ReadFile(d.Path(dataFileOf(t, written.path))); bytes.Contains(b, []byte(letter)) {
			t.Fatal("what was not synced is on the disk, so that this shows nothing")
		}
		d.Start()
		written.must("fsync") // by then it serves
		if verifierOf(t, d) == before {
			t.Error("the verifier is the same after a power cut")
		}
		wantLetter(t, d.Path(dataFileOf(t, written.path)), letter)
	}
	d.PowerCut()
	d.Start()
	other := v.Mount(mountOptions()...)
	wantLetter(t, filepath.Join(other.Dir, "synced"), "c")
	wantLetter(t, filepath.Join(other.Dir, "written"), "c")
}

// dataFileOf is the name of a file's only data file.
func dataFileOf(t *testing.T, path string) string {
	t.Helper()
	return harness.LayoutOf(t, path).Mirrors[0].Servers[0].DataFile
}

// TestPowerCutUnderLoad cuts it again and again in the midst of many writes. No application gets an error, and all is
// there that was closed, or fsynced.
func TestPowerCutUnderLoad(t *testing.T) {
	t.Logf("-seed %d -kills %d", *seed, *kills)
	rng := rand.New(rand.NewPCG(*seed, 90))
	disk := harness.NewDisk(t, 512<<20)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true, Disks: []*harness.Disk{disk}})
	m := v.Mount(mountOptions()...)
	d := v.Servers[0]
	endA, endB := begin(t, "close", "a", m.Dir), begin(t, "fsync", "b", m.Dir)
	for range *kills {
		time.Sleep(time.Duration(rng.IntN(1500)) * time.Millisecond)
		d.PowerCut()
		d.Start()
	}
	for _, l := range []*load{endA(), endB()} {
		if l.Error != "" {
			t.Errorf("an application got an error: %s", l.Error)
		}
		t.Logf("%d files written", len(l.Files))
		l.check(t)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// TestFailedWriteBack has a disk not take what is in the page cache, while the data server runs and while it does not.
// Whoever syncs meanwhile is told; what is synced when the disk works again is on the disk.
func TestFailedWriteBack(t *testing.T) {
	disk := harness.NewDisk(t, 64<<20)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Remote: true, Disks: []*harness.Disk{disk}})
	m := v.Mount(mountOptions()...)
	d := v.Servers[0]
	told, untold := retain(t, filepath.Join(m.Dir, "told")), retain(t, filepath.Join(m.Dir, "untold"))
	before := verifierOf(t, d)
	undo := disk.FailWrites()
	told.must("write a")
	if got := told.do("fsync"); got == "ok" {
		t.Error("fsync to a disk that fails")
	}
	after := verifierOf(t, d)
	if after == before {
		t.Error("a sync has failed, and the verifier is the same")
	}
	undo()
	told.must("fsync")

	undo = disk.FailWrites()
	untold.must("write a")
	before = verifierOf(t, d)
	d.Kill()
	// The kernel writes back by and by; here at once, and whoever is told of the failure is no data server.
	f, err := os.OpenFile(d.Path(dataFileOf(t, untold.path)), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if f.Sync() == nil {
		t.Error("the disk does not fail")
	}
	f.Close()
	undo()
	d.Start()
	untold.must("fsync") // by then it serves
	if verifierOf(t, d) == before {
		t.Error("a write-back has failed while there was no server, and the verifier is the same")
	}
	d.PowerCut()
	d.Start()
	other := v.Mount(mountOptions()...)
	wantLetter(t, filepath.Join(other.Dir, "told"), "a")
	wantLetter(t, filepath.Join(other.Dir, "untold"), "a")
}

// TestPowerCutLocal has a client on the same host outlive a disk that goes off. What it has written by descriptors was
// only in the page cache of that: fsync says so, and does not take the server's word that all is well.
func TestPowerCutLocal(t *testing.T) {
	disk := harness.NewDisk(t, 64<<20)
	v := harness.NewVolume(t, harness.Options{DataServers: 1, Apart: true, Disks: []*harness.Disk{disk}})
	m := v.Mount(mountOptions()...)
	d := v.Servers[0]
	r := retain(t, filepath.Join(m.Dir, "f"))
	r.must("write a")
	d.PowerCut()
	d.Start()
	if r.do("fsync") == "ok" {
		t.Error("fsync of what is lost")
	}
	r.must("write b")
	r.must("fsync")
	wantLetter(t, d.Path(dataFileOf(t, r.path)), "b")
}
