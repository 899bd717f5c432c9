package real

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// dirent is an entry as getdents64(2) tells it.
type dirent struct {
	name string
	off  int64
}

// openDir opens a directory until the test ends, or close is called.
func openDir(t *testing.T, path string) (fd int, close func()) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd, func() { unix.Close(fd) }
}

// getdents reads entries of an open directory into a buffer of so many bytes.
func getdents(t *testing.T, fd, size int) (list []dirent) {
	t.Helper()
	buf := make([]byte, size)
	n, err := unix.Getdents(fd, buf)
	if err != nil {
		t.Fatal(err)
	}
	for buf = buf[:n]; len(buf) > 0; {
		length := binary.NativeEndian.Uint16(buf[16:])
		name, _, _ := strings.Cut(string(buf[19:length]), "\x00")
		list = append(list, dirent{name, int64(binary.NativeEndian.Uint64(buf[8:]))})
		buf = buf[length:]
	}
	return list
}

// listing reads a directory through buffers of so many bytes.
func listing(t *testing.T, path string, size int) (list []dirent) {
	t.Helper()
	fd, close := openDir(t, path)
	defer close()
	for {
		part := getdents(t, fd, size)
		if len(part) == 0 {
			return list
		}
		list = append(list, part...)
	}
}

// TestDirectoryOffsets uses the offsets of a directory's entries as programs of 32 bits, telldir(3) and NFS servers do.
func TestDirectoryOffsets(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	n := 1000
	if *long {
		n = 20_000
	}
	dir := filepath.Join(a.Dir, "dir")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%0*d", 6+i%100, i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	offsets := map[string]int64{}
	same := func(what string, list []dirent) {
		t.Helper()
		got := map[string]int64{}
		for _, e := range list {
			got[e.name] = e.off
			if e.off > math.MaxInt32 {
				t.Fatalf("%s: %s has offset %d", what, e.name, e.off)
			}
		}
		if len(got) != n+2 || len(list) != n+2 || len(offsets) > 0 && !maps.Equal(got, offsets) {
			t.Fatalf("%s: %d entries, %d names, want %d; or other offsets", what, len(list), len(got), n+2)
		}
		offsets = got
	}
	list := listing(t, dir, 32768)
	same("first listing", list)
	for _, size := range []int{512, 1024, 2048, 5000, 1 << 20} {
		same(fmt.Sprintf("buffer of %d bytes", size), listing(t, dir, size))
	}
	b.Unmount()
	b = v.Mount()
	other := filepath.Join(b.Dir, "dir")
	same("later mount", listing(t, other, 32768))

	// What comes behind an offset, in another open, on another mount.
	r := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d", *seed)
	for range 200 {
		i := r.IntN(len(list) - 1)
		fd, close := openDir(t, other)
		if _, err := unix.Seek(fd, list[i].off, unix.SEEK_SET); err != nil {
			t.Fatal(err)
		}
		if next := getdents(t, fd, 512); len(next) == 0 || next[0] != list[i+1] {
			t.Fatalf("behind entry %d comes %v, want %v", i, next, list[i+1])
		}
		close()
	}

	t.Run("32 bits", func(t *testing.T) {
		program := compile32(t, readdir32)
		if out := harness.Run(t, "", program, dir); out != fmt.Sprintf("%d entries\n", n+2) {
			t.Errorf("a program of 32 bits sees %s", out)
		}
	})

	// What comes and goes meanwhile keeps nothing from being told, and once: first others are added, then what was told
	// is removed.
	for _, size := range []int{1024, 32768} {
		fd, close := openDir(t, dir)
		seen := map[string]int{}
		for k := 0; ; k++ {
			part := getdents(t, fd, size)
			if len(part) == 0 {
				break
			}
			for _, e := range part {
				seen[e.name]++
			}
			if k < 20 {
				if err := os.WriteFile(filepath.Join(other, fmt.Sprintf("new-%d-%d", size, k)), nil, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		close()
		for name := range offsets {
			if seen[name] != 1 {
				t.Errorf("%s was told %d times while others were added", name, seen[name])
			}
		}
	}
	fd, close := openDir(t, dir)
	defer close()
	for {
		part := getdents(t, fd, 2048)
		if len(part) == 0 {
			break
		}
		for k, e := range part {
			if e.name[0] == '.' {
				continue
			}
			from := dir
			if k%10 == 0 {
				from = other
			}
			if err := os.Remove(filepath.Join(from, e.name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Remove(dir); err != nil {
		t.Errorf("what is left: %v, %v", listing(t, dir, 4096), err)
	}
}

// readdir32 lists a directory without large files (_FILE_OFFSET_BITS).
const readdir32 = `
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
int main(int argc, char **argv)
{
	DIR *d = opendir(argv[1]);
	int n = 0;
	for (errno = 0; readdir(d); n++)
		if (n % 100 == 0)
			seekdir(d, telldir(d));
	printf("%d entries\n", n);
	return errno != 0;
}
`
