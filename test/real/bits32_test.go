package real

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/schema"
	"github.com/weftfs/weft/test/harness"
)

// compile32 makes a program of 32 bits from a source in C, and skips the test if that cannot be.
func compile32(t *testing.T, source string, flags ...string) (program string) {
	t.Helper()
	program = filepath.Join(harness.Dir(t), "program")
	if err := os.WriteFile(program+".c", []byte(source), 0o644); err != nil {
		t.Fatal(err)
	}
	flags = append(flags, "-m32", "-o", program, program+".c")
	if out, err := exec.Command("gcc", flags...).CombinedOutput(); err != nil {
		t.Skipf("missing: a C library for 32 bits (libc6-dev-i386 and gcc-multilib): %s", out)
	}
	if err := exec.Command(program).Run(); errors.Is(err, syscall.ENOEXEC) { // any other end will do
		t.Skip("missing: a kernel that runs programs of 32 bits (IA32 emulation is not there, or off)")
	}
	return program
}

// Test32Bits has programs of 32 bits list, stat, read and write, without large files (_FILE_OFFSET_BITS=64) and with
// them.
func Test32Bits(t *testing.T) {
	narrow, wide := compile32(t, program32), compile32(t, program32, "-D_FILE_OFFSET_BITS=64")
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// run runs a program, whose exit code is an errno.
	run := func(program string, args ...string) (said string, errno syscall.Errno) {
		t.Helper()
		cmd := exec.Command(program, args...)
		var out bytes.Buffer
		cmd.Stdout = &out
		err := cmd.Run()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() > 0 {
			return out.String(), syscall.Errno(exit.ExitCode())
		}
		check(err)
		return out.String(), 0
	}
	says := func(what, want string, errno syscall.Errno, program string, args ...string) {
		t.Helper()
		if got, e := run(program, args...); got != want || e != errno {
			t.Errorf("%s: %q, %v; want %q, %v", what, got, e, want, errno)
		}
	}
	// lines are what a program should say of the files of a directory.
	lines := func(dir string) (list []string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		check(err)
		for _, e := range entries {
			var st unix.Stat_t
			check(unix.Lstat(filepath.Join(dir, e.Name()), &st))
			list = append(list, fmt.Sprintf("%s %d %d %d\n", e.Name(), st.Ino, st.Ino, st.Size))
		}
		return list
	}
	lists := func(what, program, dir string, want []string) {
		t.Helper()
		said, errno := run(program, "list", dir)
		got := slices.Sorted(strings.Lines(said))
		if slices.Sort(want); !slices.Equal(got, want) || errno != 0 {
			t.Errorf("%s: %q, %v; want %q", what, got, errno, want)
		}
	}
	programs := map[string]string{"without large files": narrow, "with large files": wide}
	dir := filepath.Join(a.Dir, "dir")
	check(os.Mkdir(dir, 0o755))
	for i := range 50 {
		check(os.WriteFile(filepath.Join(dir, fmt.Sprint("file", i)), make([]byte, 1000*i), 0o644))
	}
	for _, what := range slices.Sorted(maps.Keys(programs)) {
		says(what, "", 0, programs[what], "work", dir)
		var want []byte
		for i := range 200_000 {
			want = append(want, byte(i*7%251))
		}
		copy(want[100:], "mapped")
		want = append(want[:150_000], "appended"...)
		got, err := os.ReadFile(filepath.Join(b.Dir, "dir", "made"))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: wrote %d bytes, %v; or other bytes", what, len(got), err)
		}
		says(what, "d\n", 0, programs[what], "last", filepath.Join(dir, "made"))
		lists(what, programs[what], dir, lines(dir))
		check(os.Remove(filepath.Join(dir, "made")))
	}

	// What 32 bits do not hold is EOVERFLOW to one and nothing special to the other: sizes,
	large := filepath.Join(dir, "large")
	f, err := os.Create(large)
	check(err)
	_, err = f.WriteAt([]byte("z"), 5<<30)
	check(errors.Join(err, f.Close()))
	says("large file, without large files", "", unix.EOVERFLOW, narrow, "last", large)
	says("large file, with large files", "z\n", 0, wide, "last", large)
	all := lines(dir)
	lists("beside a large file, with large files", wide, dir, all)
	for i, line := range all {
		if strings.HasPrefix(line, "large ") {
			all[i] = fmt.Sprintf("large error %d\n", unix.EOVERFLOW)
		}
	}
	lists("beside a large file, without large files", narrow, dir, all)

	// and inode numbers, of a volume in which billions of files have been made.
	if v.Cluster != nil {
		return // its catalog is not so easily changed
	}
	a.Unmount()
	b.Unmount()
	v.Stop()
	engine, err := pebble.Open(pebble.Config{Dir: filepath.Join(v.Dir, "catalog"), MustExist: true})
	check(err)
	var batch catalog.Batch
	batch.Put(schema.KeyNextInode, catalog.EncodeCounters(1<<33))
	check(errors.Join(engine.Commit(t.Context(), &batch), engine.Close()))
	v.Start()
	a = v.Mount()
	far := filepath.Join(a.Dir, "far")
	check(os.Mkdir(far, 0o755))
	check(os.WriteFile(filepath.Join(far, "file"), []byte("far"), 0o644))
	lists("large inode numbers, with large files", wide, far, lines(far))
	says("large inode numbers, with large files", "", 0, wide, "work", far)
	says("large inode numbers, with large files", "d\n", 0, wide, "last", filepath.Join(far, "made"))
	says("large inode numbers, without large files", "", unix.EOVERFLOW, narrow, "list", far)
	says("large inode numbers, without large files", "r\n", 0, narrow, "last", filepath.Join(far, "file"))
	check(os.Rename(filepath.Join(far, "file"), filepath.Join(a.Dir, "dir", "far")))
	if said, errno := run(narrow, "list", filepath.Join(a.Dir, "dir")); errno != unix.EOVERFLOW {
		t.Errorf("one large inode number, without large files: %q, %v", said, errno)
	}
	a.Unmount()
	v.Stop()
	v.Fsck()
}

// program32 is a program whose exit code is an errno. "list" prints a directory's names, with the inode numbers of
// readdir(3) and stat(2) and the size, or the error of stat(2); "work" makes a file in a directory in many ways; "last"
// prints the last byte of a file.
const program32 = `
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int list(void)
{
	DIR *d = opendir(".");
	struct dirent *e;
	struct stat st;
	if (!d)
		return errno;
	while (errno = 0, e = readdir(d)) {
		if (e->d_name[0] == '.')
			continue;
		if (lstat(e->d_name, &st))
			printf("%s error %d\n", e->d_name, errno);
		else
			printf("%s %llu %llu %lld\n", e->d_name, (unsigned long long)e->d_ino,
				(unsigned long long)st.st_ino, (long long)st.st_size);
	}
	return errno;
}

#define DO(x) do { if ((x) < 0) return errno; } while (0)

static int work(void)
{
	static char buf[200000], back[200000];
	struct flock lock = {.l_type = F_WRLCK, .l_start = 1000, .l_len = 1000};
	struct stat st;
	struct statvfs fs;
	char *map;
	int fd, i;
	for (i = 0; i < sizeof buf; i++)
		buf[i] = i * 7 % 251;
	DO(mkdir("sub", 0755));
	DO(fd = open("sub/new", O_RDWR | O_CREAT | O_EXCL, 0644));
	DO(fcntl(fd, F_SETLKW, &lock));
	DO(write(fd, buf, 100000));
	DO(pwrite(fd, buf + 100000, 100000, 100000));
	if (pread(fd, back, sizeof back, 0) != sizeof back || memcmp(buf, back, sizeof back))
		return EIO;
	if ((map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
		return errno;
	memcpy(map + 100, "mapped", 6);
	DO(munmap(map, 4096));
	DO(fsync(fd));
	DO(ftruncate(fd, 150000));
	if (lseek(fd, 0, SEEK_END) != 150000)
		return EIO;
	DO(close(fd));
	DO(fd = open("sub/new", O_WRONLY | O_APPEND));
	DO(write(fd, "appended", 8));
	DO(close(fd));
	DO(link("sub/new", "linked"));
	DO(rename("sub/new", "made"));
	DO(unlink("linked"));
	DO(rmdir("sub"));
	DO(stat("made", &st) && errno != EOVERFLOW ? -1 : 0);
	DO(statvfs(".", &fs));
	return 0;
}

static int last(const char *file)
{
	char c;
	int fd;
	DO(fd = open(file, O_RDONLY));
	DO(lseek(fd, -1, SEEK_END));
	DO(read(fd, &c, 1));
	printf("%c\n", c);
	return 0;
}

int main(int argc, char **argv)
{
	if (argv[1][0] == 'l' && argv[1][1] == 'a')
		return last(argv[2]);
	if (chdir(argv[2]))
		return errno;
	return argv[1][0] == 'w' ? work() : list();
}
`
