package posix

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// A difference is a check that a file system answers otherwise than the table or the local disk's file system, and why
// that is right.
type difference struct {
	where  string // weft, ext4, tmpfs, or namespaces: weft with its data there
	check  string // its name, where * stands for anything
	reason string
}

// differences are all that are known and justified; docs/posix.md lists the same.
var differences = []difference{
	{"weft", "pwritev2 RWF_NOAPPEND", "FUSE does not tell a write through an O_APPEND descriptor that was not to append from one that was"},
	{"weft", "rename WHITEOUT", "whiteouts mean something to overlayfs alone, and weft is not meant to be its upper layer"},
	{"weft", "fallocate COLLAPSE_RANGE*", "striped data cannot be moved by less than copying it; the answer is EOPNOTSUPP wherever the range lies"},
	{"weft", "fallocate INSERT_RANGE*", "striped data cannot be moved by less than copying it; the answer is EOPNOTSUPP wherever the range lies"},
	{"weft", "lseek SEEK_SET 9223372036854775807", "weft's largest file is the kernel's largest, ext4's is 16 TiB"},
	{"weft", "truncate to the largest size", "weft's largest file is the kernel's largest, ext4's is 16 TiB"},
	{"weft", "mode * after chown -1 -1 by *", "FUSE does not tell of a chown(2) that changes neither owner nor group, so set-user-ID and set-group-ID stay"},
	{"weft", "blocks of a punched file", "only the data servers know what is left of such a file, and asking them all at each stat(2) would cost too much: st_blocks is a block less than the size"},
	{"weft", "d_ino of ..", "the entry `..` has the number FUSE keeps for unknown ones, since an open directory may have another parent by now; stat(2) of it is right"},
	{"weft", "times after mmap and read (file), file", "FUSE is not told of mmap(2); the time of access changes when a page is read"},
	{"weft", "epoll of a file", "the kernel lets every FUSE file be waited for; it is always ready"},
	{"namespaces", "lseek SEEK_HOLE finds what was punched", "blocks of a namespace that were written stay data when they are made zeros; a file's space is given back when it is cut or removed"},
	{"ext4", "times after setxattr to the same (file), file", "ext4 sees that the value is the same and changes nothing"},
	{"tmpfs", "fallocate ZERO_RANGE*", "tmpfs does not have it"},
	{"tmpfs", "fallocate COLLAPSE_RANGE*", "tmpfs does not have it and says so wherever the range lies"},
	{"tmpfs", "fallocate INSERT_RANGE*", "tmpfs does not have it and says so wherever the range lies"},
	{"tmpfs", "lseek SEEK_SET 9223372036854775807", "the largest file of tmpfs is the kernel's largest, ext4's is 16 TiB"},
	{"tmpfs", "truncate to the largest size", "the largest file of tmpfs is the kernel's largest, ext4's is 16 TiB"},
	{"tmpfs", "pwrite just below the largest offset", "the largest file of tmpfs is the kernel's largest, which that byte is still in"},
	{"tmpfs", "times after read of nothing (file), file", "tmpfs goes by the call, not by the bytes read"},
	{"tmpfs", "65000 links and no more", "tmpfs does not limit links"},
	{"tmpfs", "xattrs until there is no room", "tmpfs has room for more of them"},
	{"tmpfs", "memory sealing is not for files", "files of tmpfs are what memfd_create(2) makes, which can be sealed"},
}

func (d difference) matches(where, name string) bool {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(d.check), `\*`, ".*")
	return d.concerns(where) && regexp.MustCompile("^"+pattern+"$").MatchString(name)
}

// concerns reports whether it is one of what is tested at where.
func (d difference) concerns(where string) bool {
	return d.where == where || d.where == "namespaces" && where == "weft" && onNamespaces
}

// TestDifferencesDocumented holds docs/posix.md to the list.
func TestDifferencesDocumented(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(harness.Root, "docs", "posix.md"))
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for line := range strings.Lines(string(b)) {
		if regexp.MustCompile(`^\| (weft|namespaces|ext4|tmpfs) `).MatchString(line) {
			documented = append(documented, strings.TrimSpace(line))
		}
	}
	var listed []string
	for _, d := range differences {
		listed = append(listed, fmt.Sprintf("| %s | `%s` | %s |", d.where, d.check, d.reason))
	}
	for _, line := range documented {
		if !slices.Contains(listed, line) {
			t.Errorf("docs/posix.md has, and the list has not:\n%s", line)
		}
	}
	for _, line := range listed {
		if !slices.Contains(documented, line) {
			t.Errorf("docs/posix.md lacks:\n%s", line)
		}
	}
}
