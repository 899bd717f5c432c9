package localio

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/test/harness"
)

// A disk without room: who writes is told what the server tells, which costs neither what was written before nor the descriptor.
func TestFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("weft-test", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("missing: a tmpfs of its own (%v)", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	e := newEnv(t, dir, nil)
	l := e.local()
	df := e.newFile(0o640)
	block := bytes.Repeat([]byte("weft"), 64<<10/4)
	write := func(off int64) *layout.Op {
		return do(l, layout.Op{Kind: layout.OpWrite, File: df, Off: off, Data: block})
	}
	first := write(0)
	if first.Err != nil {
		t.Fatal(first.Err)
	}
	descriptor := func() (f *file) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, f = range l.session.files {
		}
		return f
	}
	opened := descriptor()
	filler := filepath.Join(dir, "filler")
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	room := len(block)/2 + os.Getpagesize() // for some of a block
	if err := os.WriteFile(filler, make([]byte, int(st.Bfree)*int(st.Bsize)-room), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if op := write(int64(len(block))); errnoOf(op.Err) != unix.ENOSPC {
			t.Fatalf("no room: %v, %d bytes", op.Err, op.N)
		}
	}
	if descriptor() != opened {
		t.Error("no room: the file was opened again")
	}
	before := l.Status(context.Background())
	again := write(0)
	commit := do(l, layout.Op{Kind: layout.OpCommit, File: df})
	if again.Err != nil || commit.Err != nil || again.Verifier != first.Verifier || commit.Verifier != first.Verifier {
		t.Errorf("where there is room: %v, %v, verifiers %x, %x, %x", again.Err, commit.Err, first.Verifier, again.Verifier, commit.Verifier)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if op := write(int64(len(block))); op.Err != nil || op.N != len(block) {
		t.Errorf("with room again: %d bytes, %v", op.N, op.Err)
	}
	if after := l.Status(context.Background()); after.OpsRPC != before.OpsRPC || after.OpsLocal != before.OpsLocal+3 {
		t.Errorf("afterwards %d by descriptors and %d by RPC, want 3 and 0", after.OpsLocal-before.OpsLocal, after.OpsRPC-before.OpsRPC)
	}
	if got, err := os.ReadFile(e.path()); err != nil || !bytes.Equal(got, append(block, block...)) {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
}

// A disk that fails: reads get what the server says of it, and go by descriptors again when it is well.
func TestDiskFails(t *testing.T) {
	for _, program := range []string{"losetup", "mkfs.ext4"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("missing: ", program)
		}
	}
	dir := t.TempDir()
	image, there := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Skipf("missing: a loop device (%s: %v: %s)", name, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	const size, block = 32 << 20, 512 << 10
	if err := os.Mkdir(there, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, size); err != nil {
		t.Fatal(err)
	}
	run("mkfs.ext4", "-q", "-O", "^has_journal", image)
	device := run("losetup", "--find", "--show", "--direct-io=on", image)
	t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
	run("mount", device, there)
	t.Cleanup(func() { unix.Unmount(there, unix.MNT_DETACH) })
	e := newEnv(t, there, func(c *data.Config) { c.IO = data.IODirect })
	l := e.local()
	df := e.newFile(0o640)
	want := bytes.Repeat([]byte("weft"), block/4)
	if op := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: want, Stable: layout.FileSync}); op.Err != nil {
		t.Fatal(op.Err)
	}
	read := func() (*layout.Op, uint64) {
		before := l.Status(context.Background()).OpsLocal
		op := do(l, layout.Op{Kind: layout.OpRead, File: df, Data: make([]byte, block)})
		return op, l.Status(context.Background()).OpsLocal - before
	}
	if op, local := read(); op.Err != nil || local != 1 || !bytes.Equal(op.Data, want) {
		t.Fatalf("a good disk: %v, %d by descriptors", op.Err, local)
	}
	good, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if op, _ := read(); errnoOf(op.Err) != unix.EIO {
			t.Errorf("a disk that fails: %d bytes, %v", op.N, op.Err)
		}
	}
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.Write(good)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if op, local := read(); op.Err != nil || local != 1 || !bytes.Equal(op.Data, want) {
		t.Errorf("a good disk again: %v, %d by descriptors, status %+v", op.Err, local, l.Status(context.Background()))
	}
}

// What a disk did not take is not taken for stable, also by who asks by RPC. What is written again when it works is on
// the disk.
func TestFailedDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	disk := harness.NewDisk(t, 32<<20)
	e := newEnv(t, disk.Dir, func(c *data.Config) { c.IO = data.IOBuffered })
	l := e.local()
	df := e.newFile(0o640)
	want := bytes.Repeat([]byte("weft"), 1<<16)
	write := func() (*layout.Op, *layout.Op) {
		t.Helper()
		before := l.Status(context.Background()).OpsLocal
		w := do(l, layout.Op{Kind: layout.OpWrite, File: df, Data: want})
		if w.Err != nil || l.Status(context.Background()).OpsLocal == before {
			t.Fatalf("WRITE %v, or not by a descriptor", w.Err)
		}
		return w, do(l, layout.Op{Kind: layout.OpCommit, File: df})
	}
	undo := disk.FailWrites()
	if w, c := write(); c.Err == nil && c.Kept == w.Kept {
		t.Error("stable on a disk that fails")
	}
	undo()
	if w, c := write(); c.Err != nil || c.Kept != w.Kept {
		t.Errorf("COMMIT %v, covers %x, written %x", c.Err, c.Kept, w.Kept)
	}
	path := e.path()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	e.stop()
	disk.Remount()
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("other contents: %d bytes, %v", len(got), err)
	}
}
