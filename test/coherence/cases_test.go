package coherence

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// TestCases has single sequences of what two mounts do with a file. a and b are its path through each of them, f and g are
// open there, and the file has the ten bytes 0123456789.
func TestCases(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	ma, mb := twoMounts(v)
	long := func(path string) string {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err.Error()
		}
		return fmt.Sprintf("size %d mtime %d.%09d", st.Size, st.Mtim.Sec, st.Mtim.Nsec)
	}
	old := []unix.Timespec{{Sec: 1e9}, {Sec: 1e9}}
	setOld := func(path string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, path, old, 0) }
	const oldLine = "size 10 mtime 1000000000.000000000"
	read := func(f *os.File) string {
		b := make([]byte, 100)
		n, _ := f.ReadAt(b, 0)
		return string(b[:n])
	}
	must := func(t *testing.T, errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	want := func(t *testing.T, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	write := func(f *os.File, s string, off int64) error {
		_, err := f.WriteAt([]byte(s), off)
		return err
	}
	appendTimes := func(t *testing.T, a, b string) {
		end, err := os.OpenFile(a, os.O_WRONLY|os.O_APPEND, 0)
		must(t, err)
		defer end.Close()
		_, err = end.WriteString("end")
		must(t, err)
		seen := long(b)
		want(t, long(a), seen)
		must(t, end.Sync())
		want(t, long(b), seen)
		want(t, long(a), seen)
	}
	cases := []struct {
		name string
		do   func(t *testing.T, a, b string, f, g *os.File)
	}{
		{"a time set while another one's write is not reported", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, write(f, "x", 0), setOld(b))
			want(t, long(a), oldLine)
			want(t, long(b), oldLine)
			must(t, f.Sync()) // and a late report does not undo it
			want(t, long(b), oldLine)
			want(t, long(a), oldLine)
		}},
		{"times of a write, before and after it is synced", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, setOld(a), write(f, "x", 3))
			seen := long(b)
			if seen == oldLine {
				t.Error("the other mount does not see the new time")
			}
			want(t, long(a), seen)
			must(t, f.Sync())
			want(t, long(a), seen)
			want(t, long(b), seen)
		}},
		{"times of an append with another writer", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, write(g, "x", 0))
			appendTimes(t, a, b)
		}},
		{"times of an append", func(t *testing.T, a, b string, f, g *os.File) { appendTimes(t, a, b) }},
		{"writers in turn", func(t *testing.T, a, b string, f, g *os.File) {
			for i := range 10 {
				must(t, write(f, "a", int64(i)), write(g, "b", int64(i+1)))
			}
			want(t, read(f), "aaaaaaaaaab")
			want(t, read(g), "aaaaaaaaaab")
			want(t, long(a), long(b))
		}},
		{"cut while another one writes", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, write(f, "more than there was", 5), unix.Truncate(b, 3))
			want(t, read(f), "012")
			must(t, write(f, "x", 6))
			want(t, read(g), "012\x00\x00\x00x")
			must(t, f.Sync())
			want(t, read(g), "012\x00\x00\x00x")
		}},
		{"extended attributes", func(t *testing.T, a, b string, f, g *os.File) {
			list := func(path string) string {
				names := make([]byte, 1000)
				n, err := unix.Listxattr(path, names)
				return fmt.Sprintf("%q %v", names[:max(n, 0)], err)
			}
			want(t, list(b), `"" <nil>`)
			must(t, unix.Setxattr(a, "user.x", []byte("1"), 0))
			want(t, list(b), `"user.x\x00" <nil>`)
			must(t, unix.Removexattr(b, "user.x"))
			want(t, list(a), `"" <nil>`)
		}},
		{"unlinked here, open there", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, os.Remove(a), write(g, "x", 0))
			want(t, read(f), "x123456789")
			want(t, long(b), unix.ENOENT.Error())
			must(t, os.WriteFile(b, []byte("new"), 0o644))
			want(t, read(f), "x123456789")
			got, err := os.ReadFile(a)
			must(t, err)
			want(t, string(got), "new")
		}},
		{"replaced by a rename", func(t *testing.T, a, b string, f, g *os.File) {
			must(t, os.WriteFile(a+".new", []byte("new"), 0o644), os.Rename(a+".new", a))
			got, err := os.ReadFile(b)
			must(t, err)
			want(t, string(got), "new")
			want(t, read(g), "0123456789")
		}},
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a, b := fmt.Sprint(ma.Dir, "/", i), fmt.Sprint(mb.Dir, "/", i)
			must(t, os.WriteFile(a, []byte("0123456789"), 0o644))
			f, g := open(t, a, os.O_RDWR), open(t, b, os.O_RDWR)
			want(t, read(f), read(g))
			c.do(t, a, b, f, g)
		})
	}
}
