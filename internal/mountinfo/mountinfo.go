// Package mountinfo reads which file systems are mounted where, as proc(5) shows it. It touches no mount, since one may
// hang.
package mountinfo

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount is one mount of a mount namespace.
type Mount struct {
	ID         string
	Dev        uint64 // st_dev of its files
	Mountpoint string
	Options    string // of the mount
	Type       string
	Source     string
	Super      string // options of the file system
}

// Read lists the mounts that a process sees, in mount order. The process is its number, or self.
func Read(process string) ([]Mount, error) {
	name := "/proc/" + process + "/mountinfo"
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	list, err := parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return list, nil
}

func parse(text string) (list []Mount, err error) {
	for line := range strings.Lines(text) {
		left, right, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		l, r := strings.Split(left, " "), strings.Split(right, " ")
		if len(l) < 6 || len(r) < 3 {
			continue
		}
		var major, minor uint32
		if _, err := fmt.Sscanf(l[2], "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("bad device %q", l[2])
		}
		list = append(list, Mount{
			ID: l[0], Dev: unix.Mkdev(major, minor), Mountpoint: unescape(l[4]), Options: l[5],
			Type: r[0], Source: unescape(r[1]), Super: r[2],
		})
	}
	return list, nil
}

// At is the topmost of some mounts on a directory.
func At(list []Mount, mountpoint string) (top Mount, found bool) {
	for _, m := range list {
		if m.Mountpoint == mountpoint {
			top, found = m, true
		}
	}
	return top, found
}

// unescape undoes octal escapes.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
