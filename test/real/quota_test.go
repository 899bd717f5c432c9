package real

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// du is what weft du says of a directory.
func du(t *testing.T, dir string) (bytes, files, dirs int64) {
	t.Helper()
	var list []struct{ Bytes, Files, Dirs int64 }
	if err := json.Unmarshal([]byte(harness.Weft(t, "du", "--json", dir)), &list); err != nil || len(list) != 1 {
		t.Fatalf("%v, %+v", err, list)
	}
	return list[0].Bytes, list[0].Files, list[0].Dirs
}

// usedOf is what weft admin quota get says that a quota's directory, user or group uses.
func usedOf(t *testing.T, args ...string) (bytes, files int64) {
	t.Helper()
	var list []struct {
		Bytes int64 `json:"used_bytes"`
		Files int64 `json:"used_files"`
	}
	out := harness.Weft(t, append([]string{"admin", "quota", "get", "--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 {
		t.Fatalf("%v, %q", err, out)
	}
	return list[0].Bytes, list[0].Files
}

// TestUsage copies a tree, kills the service meanwhile, and compares weft du with du, which looks at everything.
func TestUsage(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	m := v.Mount()
	copied := make(chan struct{})
	go func() { // ends with cp
		defer close(copied)
		harness.Run(t, "", "cp", "-a", source(t), m.Dir+"/tree")
	}()
	harness.Await(t, "half of the tree is there", func() bool {
		n, err := os.ReadDir(m.Dir + "/tree")
		return err == nil && len(n) > 5
	})
	v.Kill()
	v.Start()
	<-copied
	harness.Run(t, m.Dir, "sh", "-c", "mkdir -p a/b/c && mv tree/http a/b/c/ && rm -r tree/mail && ln tree/dial.go a/link && cp -r a/b z && mv a/b/c/http tree/moved")
	harness.Weft(t, "sync", m.Dir)
	check := func(dir string) {
		t.Helper()
		// du(1) counts the sizes of directories as well.
		out := harness.Run(t, "", "du", "-s", "--apparent-size", "--block-size=1", dir)
		want, err := strconv.ParseInt(strings.Fields(out)[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		files, dirs, names := int64(0), int64(0), map[uint64]bool{}
		err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			if ino := info.Sys().(*syscall.Stat_t).Ino; e.IsDir() {
				want -= info.Size()
				dirs++
			} else if !names[ino] {
				names[ino] = true
				files++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if gotBytes, gotFiles, gotDirs := du(t, dir); gotBytes != want || gotFiles != files || gotDirs != dirs-1 {
			t.Errorf("%s: weft du says %d bytes, %d files, %d directories; there are %d, %d, %d", dir, gotBytes, gotFiles, gotDirs, want, files, dirs-1)
		}
	}
	for _, dir := range []string{"", "tree", "tree/moved", "z", "z/c/http"} {
		check(filepath.Join(m.Dir, dir))
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// TestQuota fills a directory with a quota through two mounts.
func TestQuota(t *testing.T) {
	harness.Need(t, "fio")
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	dir := "/proj/team"
	if err := os.MkdirAll(a.Dir+dir+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	const limit = 24 << 20
	harness.Weft(t, "admin", "quota", "set", a.Dir+"/proj", "--bytes", strconv.Itoa(limit), "--files", "60")

	// One writer has exactly what there is.
	write := func(path string, n int) error {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		block := make([]byte, 1<<20)
		for ; n > 0 && err == nil; n-- {
			_, err = f.Write(block)
		}
		err = errors.Join(err, f.Sync())
		return errors.Join(err, f.Close())
	}
	if err := write(a.Dir+dir+"/one", 30); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("30 MiB of 24: %v", err)
	}
	harness.Weft(t, "sync", a.Dir)
	if used, _ := usedOf(t, a.Dir+"/proj"); used != limit {
		t.Errorf("%d bytes are used of %d", used, limit)
	}
	for what, err := range map[string]error{
		"write at another mount": write(b.Dir+dir+"/sub/two", 1),
		"longer":                 os.Truncate(b.Dir+dir+"/one", limit+1),
		"into it":                func() error { return errors.Join(write(b.Dir+"/big", 1), os.Rename(b.Dir+"/big", b.Dir+dir+"/big")) }(),
	} {
		if !errors.Is(err, syscall.EDQUOT) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// df shows the quota, below it as well, and not beside it.
	space := func(path string) (size, used uint64) {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * uint64(st.Bsize), (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	for _, path := range []string{a.Dir + "/proj", b.Dir + dir + "/sub", b.Dir + dir + "/one"} {
		if size, used := space(path); size != limit || used != limit {
			t.Errorf("%s: %d bytes used of %d", path, used, size)
		}
	}
	if size, _ := space(a.Dir); size <= limit {
		t.Errorf("the volume has %d bytes", size)
	}
	if out := strings.Fields(strings.Split(harness.Run(t, "", "df", "--block-size=1M", a.Dir+dir), "\n")[1]); out[1] != "24" || out[2] != "24" || out[3] != "0" {
		t.Errorf("df says %q", out)
	}
	// What is cut, or removed, is there for others at once.
	if err := os.Truncate(a.Dir+dir+"/one", limit/2); err != nil {
		t.Error(err)
	}
	if err := write(b.Dir+dir+"/sub/two", 12); err != nil {
		t.Error(err)
	}
	harness.Run(t, "", "rm", a.Dir+dir+"/one", a.Dir+dir+"/sub/two")

	// Several writers at a time go over by no more than what each of them was granted.
	const writers = 4
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			if err := write(fmt.Sprintf("%s%s/w%d", []string{a.Dir, b.Dir}[i%2], dir, i), 24); !errors.Is(err, syscall.EDQUOT) {
				t.Logf("writer %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	harness.Weft(t, "sync", a.Dir)
	harness.Weft(t, "sync", b.Dir)
	if used, _ := usedOf(t, a.Dir+"/proj"); used < limit || used > writers*limit {
		t.Errorf("%d writers have written %d bytes of %d", writers, used, limit)
	} else {
		t.Logf("%d writers have written %d bytes of %d", writers, used, limit)
	}
	if err := write(a.Dir+dir+"/more", 1); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("after that: %v", err)
	}
	harness.Run(t, "", "sh", "-c", "rm "+a.Dir+dir+"/w* "+a.Dir+dir+"/more")

	// fio meets it in the middle of its file.
	cmd := exec.Command("fio", "--name=q", "--rw=write", "--bs=256k", "--size=40m", "--end_fsync=1", "--fallocate=none")
	cmd.Dir = b.Dir + dir
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "Disk quota exceeded") {
		t.Errorf("fio: %v\n%.1000s", err, out)
	}
	harness.Run(t, "", "sh", "-c", "rm -f "+b.Dir+dir+"/q*")

	// Files: two directories are there. Also while the service is killed.
	made := 0
	for i := range 100 {
		err := os.WriteFile(fmt.Sprintf("%s%s/sub/f%d", []string{a.Dir, b.Dir}[i%2], dir, i), nil, 0o644)
		if errors.Is(err, syscall.EDQUOT) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if made++; made == 30 {
			v.Kill()
			v.Start()
		}
	}
	if made != 58 {
		t.Errorf("%d files and 2 directories where there may be 60", made)
	}
	if err := os.Mkdir(b.Dir+dir+"/d", 0o755); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("a directory more: %v", err)
	}
	if _, files := usedOf(t, a.Dir+"/proj"); files != 60 {
		t.Errorf("%d files", files)
	}
	if _, files, dirs := du(t, b.Dir+"/proj"); files != 58 || dirs != 2 {
		t.Errorf("%d files, %d directories", files, dirs)
	}

	// Owners.
	harness.Weft(t, "admin", "quota", "set", "--server", v.Addr, "--user", "1234", "--files", "1")
	for i, want := range []error{nil, syscall.EDQUOT} {
		name := fmt.Sprintf("%s/owned%d", a.Dir, i)
		if err := errors.Join(os.WriteFile(name, nil, 0o644), os.Chown(name, 1234, -1)); !errors.Is(err, want) {
			t.Errorf("file %d: %v, want %v", i, err, want)
		}
	}
	if out := harness.Weft(t, "admin", "quota", "ls", "--server", v.Addr); strings.Count(out, "\n") != 3 || !strings.Contains(out, "tree /proj ") || !strings.Contains(out, "user 1234 ") {
		t.Errorf("ls says\n%s", out)
	}
	harness.Weft(t, "admin", "quota", "set", a.Dir+"/proj", "--bytes", "0", "--files", "0")
	if err := write(a.Dir+dir+"/free", 30); err != nil {
		t.Error(err)
	}
	a.Unmount()
	b.Unmount()
	v.Stop()
	v.Fsck()
}
