package real

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var (
	long = flag.Bool("long", false, "full sizes")
	seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of random data and choices")
)

// source is a real tree to copy: all of Go's sources, or the part that holds a compiler's worth of small files.
func source(t testing.TB) string {
	root := strings.TrimSpace(harness.Run(t, "", "go", "env", "GOROOT"))
	if *long {
		return filepath.Join(root, "src")
	}
	return filepath.Join(root, "src", "net")
}

// same fails the test unless two trees are equal.
func same(t *testing.T, a, b string) {
	t.Helper()
	if out := harness.Run(t, "", "diff", "-r", "--no-dereference", a, b); out != "" {
		t.Fatalf("%s and %s differ:\n%.2000s", a, b, out)
	}
}

func TestCopyTree(t *testing.T) {
	copyTree(t, harness.NewVolume(t, harness.Options{}).Mount(), source(t))
}

// TestNVMe copies a tree to NVMe namespaces, which is there as well after a restart, and has fio verify what it writes.
func TestNVMe(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{NVMe: 4})
	m := v.Mount()
	src := source(t)
	if !*long {
		src = filepath.Join(src, "http")
	}
	copyTree(t, m, src)
	big := filepath.Join(m.Dir, "big")
	if err := os.WriteFile(big, make([]byte, 8<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	devices := map[string]bool{}
	for _, s := range harness.LayoutOf(t, big).Mirrors[0].Servers {
		if devices[s.Device] = true; !strings.HasPrefix(s.Address, "nvme://") {
			t.Errorf("data file at %q", s.Address)
		}
	}
	if len(devices) != 4 {
		t.Errorf("a file of 4 stripes lies on %d namespaces", len(devices))
	}
	if out := harness.Weft(t, "status", m.Dir); strings.Count(out, "local: no, because it is an NVMe namespace") != 4 {
		t.Errorf("weft status says:\n%s", out)
	}
	t.Run("fio", func(t *testing.T) {
		harness.Need(t, "fio")
		verify(t, m, map[bool]string{false: "8m", true: "512m"}[*long])
	})
	for _, policy := range []string{"numa", "round-robin", "queue-depth", "adaptive"} {
		harness.Weft(t, "nvme-policy", m.Dir, policy)
		if out := harness.Weft(t, "status", m.Dir); !strings.Contains(out, "nvme-policy="+policy) {
			t.Errorf("weft nvme-policy %s; weft status says:\n%s", policy, out)
		}
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
	v.Start()
	m = v.Mount()
	same(t, src, m.Dir+"/cp")
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// copyTree copies a tree in several ways.
func copyTree(t *testing.T, m *harness.Mount, src string) {
	t.Helper()
	harness.Run(t, "", "cp", "-a", src, m.Dir+"/cp")
	same(t, src, m.Dir+"/cp")
	harness.Run(t, "", "sh", "-c", fmt.Sprintf("mkdir %s/tar && tar -C %s -cf - . | tar -C %s/tar -xf -", m.Dir, src, m.Dir))
	same(t, src, m.Dir+"/tar")
	harness.Run(t, "", "rm", "-rf", m.Dir+"/tar")
	if entries, err := os.ReadDir(m.Dir); err != nil || len(entries) != 1 {
		t.Fatalf("after rm -rf: %v, %v", entries, err)
	}
}

// TestBuild compiles a program with the Go distribution on the mount.
func TestBuild(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount()
	root := strings.TrimSpace(harness.Run(t, "", "go", "env", "GOROOT"))
	goroot := m.Dir + "/go"
	harness.Run(t, "", "mkdir", goroot)
	// The compiler itself runs from the mount too.
	for _, part := range []string{"bin", "pkg/tool", "pkg/include", "VERSION", "go.env"} {
		harness.Run(t, root, "cp", "-a", "--parents", part, goroot)
	}
	if *long {
		harness.Run(t, root, "cp", "-a", "src", goroot)
	} else {
		// What a small program is made of.
		deps := harness.Run(t, "", "go", "list", "-deps", "-f", "{{.Dir}}", "fmt", "strings")
		for _, dir := range strings.Fields(deps) {
			rel, err := filepath.Rel(root, dir)
			if err != nil {
				t.Fatal(err)
			}
			harness.Run(t, root, "cp", "-a", "--parents", rel, goroot)
		}
		harness.Run(t, root, "sh", "-c", fmt.Sprintf("cp -a --parents src/go.mod src/go.sum src/internal src/vendor src/cmd/go.mod src/cmd/vendor %s 2>/dev/null; cp -a --parents src/runtime %s", goroot, goroot))
	}
	prog := m.Dir + "/prog"
	harness.Run(t, "", "mkdir", prog)
	for name, text := range map[string]string{
		"go.mod":  "module prog\n\ngo 1.26\n",
		"main.go": "package main\n\nimport (\n\t\"fmt\"\n\t\"strings\"\n)\n\nfunc main() { fmt.Println(strings.ToUpper(\"built on weft\")) }\n",
	} {
		if err := os.WriteFile(filepath.Join(prog, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(goroot+"/bin/go", "build", "-o", "prog", ".")
	cmd.Dir = prog
	cmd.Env = append(os.Environ(), "GOROOT="+goroot, "GOCACHE="+m.Dir+"/cache", "CGO_ENABLED=0", "GOFLAGS=", "GOTOOLCHAIN=local")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	if out := harness.Run(t, "", prog+"/prog"); out != "BUILT ON WEFT\n" {
		t.Fatalf("the program says %q", out)
	}
}

func TestGit(t *testing.T) {
	harness.Need(t, "git")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	src := source(t)
	repo := m.Dir + "/repo"
	git := func(dir string, args ...string) {
		t.Helper()
		harness.Run(t, dir, "git", append([]string{"-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*", "-c", "init.defaultBranch=main", "-c", "gc.autoDetach=false"}, args...)...)
	}
	git(m.Dir, "init", "-q", repo)
	harness.Run(t, "", "cp", "-a", src, repo+"/tree")
	git(repo, "add", ".")
	git(repo, "commit", "-qm", "all")
	git(repo, "fsck", "--strict")
	git(m.Dir, "clone", "-q", repo, "clone")
	same(t, repo+"/tree", m.Dir+"/clone/tree")
	git(m.Dir+"/clone", "gc", "-q")
	git(m.Dir+"/clone", "fsck", "--strict")
}

func TestRsync(t *testing.T) {
	harness.Need(t, "rsync")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	for _, src := range []string{filepath.Join(source(t), "."), filepath.Join(harness.Root, "internal")} {
		there, back := filepath.Join(m.Dir, filepath.Base(src)), filepath.Join(t.TempDir(), "back")
		harness.Run(t, "", "rsync", "-a", "--checksum", src+"/", there)
		harness.Run(t, "", "rsync", "-a", "--checksum", there+"/", back)
		same(t, src, back)
		if out := harness.Run(t, "", "rsync", "-a", "--checksum", "--itemize-changes", "--dry-run", src+"/", back); out != "" {
			t.Fatalf("rsync still sees differences:\n%.2000s", out)
		}
	}
}

func TestFio(t *testing.T) {
	harness.Need(t, "fio")
	m := harness.NewVolume(t, harness.Options{}).Mount()
	verify(t, m, map[bool]string{false: "24m", true: "512m"}[*long])
}

// verify has fio check what it wrote, in several ways.
func verify(t *testing.T, m *harness.Mount, size string) {
	for _, job := range []struct{ name, rw, bs, engine string }{
		{"random", "randrw", "4k-64k", "psync"},
		{"sequential", "rw", "1m", "psync"},
		{"async", "randwrite", "16k", "libaio"},
	} {
		t.Run(job.name, func(t *testing.T) {
			harness.Run(t, m.Dir, "fio", "--name="+job.name, "--rw="+job.rw, "--bsrange="+rangeOf(job.bs), "--size="+size, "--numjobs=4", "--direct=1",
				"--ioengine="+job.engine, "--iodepth=8", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--group_reporting", "--randseed="+fmt.Sprint(*seed), "--fsync_on_close=1")
		})
	}
}

func rangeOf(bs string) string {
	if strings.Contains(bs, "-") {
		return bs
	}
	return bs + "-" + bs
}

// TestSparse has a file with a hole across 4 GiB.
func TestSparse(t *testing.T) {
	m := harness.NewVolume(t, harness.Options{}).Mount()
	const gib = 1 << 30
	size, data, chunk := int64(6*gib), int64(96<<20), 8<<20
	if *long {
		data = 3 * gib
	}
	f, err := os.Create(m.Dir + "/sparse")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	// Half of the data ends 100 MiB below 4 GiB, half begins 100 MiB above it.
	low, high := 4*int64(gib)-100<<20-data/2, 4*int64(gib)+100<<20
	fill := func(off int64) []byte {
		b := make([]byte, chunk)
		var key [32]byte
		copy(key[:], fmt.Sprint(*seed, off))
		rand.NewChaCha8(key).Read(b)
		return b
	}
	each := func(do func(off int64)) {
		for _, start := range []int64{low, high} {
			for off := start; off < start+data/2; off += int64(chunk) {
				do(off)
			}
		}
	}
	each(func(off int64) {
		if _, err := f.WriteAt(fill(off), off); err != nil {
			t.Fatal(err)
		}
	})
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, chunk)
	each(func(off int64) {
		if _, err := f.ReadAt(buf, off); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(buf, fill(off)) {
			t.Fatalf("wrong bytes at %d", off)
		}
	})
	for _, off := range []int64{0, low - int64(chunk), 4*gib - 4<<20, high - int64(chunk), size - int64(chunk)} {
		if _, err := f.ReadAt(buf, off); err != nil {
			t.Fatal(err)
		}
		if i := bytes.IndexFunc(buf, func(r rune) bool { return r != 0 }); i >= 0 {
			t.Fatalf("the hole at %d has a byte at %d", off, off+int64(i))
		}
	}
	if st, err := f.Stat(); err != nil || st.Size() != size {
		t.Fatalf("size %d, want %d (%v)", st.Size(), size, err)
	}
}

// TestTraining reads random samples in 4 processes while a checkpoint is written and renamed.
func TestTraining(t *testing.T) {
	m := harness.NewVolume(t, harness.Options{}).Mount()
	files, sampleSize, checkpoint, rounds := 200, 40<<10, 32<<20, 2
	if *long {
		files, sampleSize, checkpoint, rounds = 2000, 100<<10, 512<<20, 10
	}
	data := m.Dir + "/samples"
	if err := os.Mkdir(data, 0o755); err != nil {
		t.Fatal(err)
	}
	var sums strings.Builder
	rng := rand.New(rand.NewPCG(*seed, 1))
	for i := range files {
		b := make([]byte, sampleSize/2+rng.IntN(sampleSize))
		var key [32]byte
		copy(key[:], fmt.Sprint(*seed, i))
		rand.NewChaCha8(key).Read(b)
		name := fmt.Sprintf("%06d", i)
		if err := os.WriteFile(filepath.Join(data, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(b), name)
	}
	if err := os.WriteFile(m.Dir+"/SUMS", []byte(sums.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait() // also when the writer fails
	for range 4 {
		wg.Add(1)
		go func() { // a reader
			defer wg.Done()
			cmd := exec.Command("sh", "-c", fmt.Sprintf("for i in $(seq %d); do sort -R ../SUMS | sha256sum -c --quiet - || exit 1; done", rounds))
			cmd.Dir = data
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("reader: %v\n%.1000s", err, out)
			}
		}()
	}
	for round := range rounds {
		sum := sha256.New()
		tmp, final := m.Dir+"/ckpt.tmp", m.Dir+"/ckpt"
		f, err := os.Create(tmp)
		if err != nil {
			t.Fatal(err)
		}
		var key [32]byte
		key[0] = byte(round)
		if _, err := io.CopyN(io.MultiWriter(f, sum), rand.NewChaCha8(key), int64(checkpoint)); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, final); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%x  %s\n", sum.Sum(nil), final)
		if got := harness.Run(t, "", "sha256sum", final); got != want {
			t.Fatalf("checkpoint %d: %q, want %q", round, got, want)
		}
	}
}

// TestStop shows that what was written is there after everything was stopped and started again, and striped.
func TestStop(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount()
	big := make([]byte, 16<<20)
	rand.NewChaCha8([32]byte{7}).Read(big)
	if err := os.WriteFile(m.Dir+"/big", big, 0o644); err != nil {
		t.Fatal(err)
	}
	l := harness.LayoutOf(t, m.Dir+"/big")
	seen := map[string]bool{}
	for _, s := range l.Mirrors[0].Servers {
		seen[s.Device] = s.DataFile != ""
	}
	if len(seen) != 4 || l.Size != int64(len(big)) {
		t.Fatalf("layout %+v", l)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
	// Each data server's directory has its share.
	for i := range 4 {
		var blocks int64
		filepath.Walk(filepath.Join(v.Dir, "data", fmt.Sprint(i)), func(path string, info os.FileInfo, err error) error {
			var st unix.Stat_t
			if err == nil && info.Mode().IsRegular() && unix.Stat(path, &st) == nil {
				blocks += st.Blocks
			}
			return nil
		})
		if blocks*512 < int64(len(big))/4 {
			t.Errorf("data server %d has %d bytes", i, blocks*512)
		}
	}
	v.Start()
	m = v.Mount()
	got, err := os.ReadFile(m.Dir + "/big")
	if err != nil || !bytes.Equal(got, big) {
		t.Fatalf("after a restart: %d bytes, %v", len(got), err)
	}
}
