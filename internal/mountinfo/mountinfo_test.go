package mountinfo

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "/mnt": "/mnt", `/a\040b\011c\012d\134e`: "/a b\tc\nd\\e", `/a\`: `/a\`, `/a\04`: `/a\04`, `/a\999`: `/a\999`, `\0401`: " 1",
	} {
		if got := unescape(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestParse(t *testing.T) {
	got, err := parse(`22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw
90 22 0:44 / /mnt/a\040b rw,nosuid shared:5 - fuse.weft host:7049:/dir\134x rw,user_id=0
91 90 0:300 / /mnt/a\040b rw - tmpfs  rw
a line of another kind
`)
	want := []Mount{
		{"22", unix.Mkdev(8, 1), "/", "rw,relatime", "ext4", "/dev/sda1", "rw"},
		{"90", unix.Mkdev(0, 44), "/mnt/a b", "rw,nosuid", "fuse.weft", `host:7049:/dir\x`, "rw,user_id=0"},
		{"91", unix.Mkdev(0, 300), "/mnt/a b", "rw", "tmpfs", "", "rw"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("%+v, %v; want %+v", got, err, want)
	}
	if top, ok := At(got, "/mnt/a b"); !ok || top != want[2] {
		t.Errorf("topmost: %+v, %v", top, ok)
	}
	if top, ok := At(got, "/mnt"); ok {
		t.Errorf("where nothing is mounted: %+v", top)
	}
	for _, bad := range []string{"1 2 0-52 / /m rw - t s rw\n", "1 2 x:y / /m rw - t s rw\n", "1 2 0:x / /m rw - t s rw"} {
		if got, err := parse(bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

func TestRead(t *testing.T) {
	list, err := Read("self")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := At(list, "/proc"); !ok {
		t.Errorf("/proc is not among %d mounts", len(list))
	}
	if list, err := Read("0"); err == nil {
		t.Errorf("of no process: %+v", list)
	}
}
