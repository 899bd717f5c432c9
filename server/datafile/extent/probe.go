package extent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Content is what a namespace has on it.
type Content uint8

const (
	Blank   Content = iota // zeros, as far as was looked
	Ours                   // the volume's own label
	Another                // the label of another volume
	Foreign                // somebody's data
)

func (c Content) String() string {
	switch c {
	case Blank:
		return "blank"
	case Ours:
		return "ours"
	case Another:
		return "another volume's"
	case Foreign:
		return "foreign"
	}
	return fmt.Sprintf("content(%d)", uint8(c))
}

// How much of a namespace has to be read for Probe, from its beginning and from its end: as much as the signatures that it knows need.
const (
	ProbeHead = 256 << 10
	ProbeTail = 256 << 10
)

// Found is what Probe finds.
type Found struct {
	Content Content
	Label   *Label // if it is Ours or Another
	// What says what it looks like, for people.
	What string
	// Damaged says that the two copies of the label differ, or one cannot be read: both are to be written anew.
	Damaged bool
}

// Probe says what a namespace of size bytes has on it, whose first ProbeHead and last ProbeTail bytes these are, or all of it if it is
// smaller. Only one that is Blank, or Ours, may be written to without somebody insisting. What carries a label of the volume but
// has another identity is a copy: the caller compares.
func Probe(head, tail []byte, size int64, volume [16]byte) Found {
	front, frontErr := ParseLabel(head)
	back, backErr := (*Label)(nil), ErrNoLabel
	if at := BackupLabel(size) - (size - int64(len(tail))); at >= 0 && at < int64(len(tail)) {
		back, backErr = ParseLabel(tail[at:])
	}
	what := ""
	if frontErr != nil {
		what = signature(head, tail, size)
	}
	switch {
	case frontErr == nil:
		f := found(front, volume)
		if backErr == nil && back.Volume == front.Volume && back.Generation > front.Generation {
			f = found(back, volume)
		}
		f.Damaged = backErr != nil || *front != *back
		return f
	case what != "":
	case backErr == nil && (errors.Is(frontErr, ErrBadLabel) || zero(head[:min(len(head), LabelSize)])):
		f := found(back, volume)
		f.Damaged = true
		return f
	case errors.Is(frontErr, ErrBadLabel):
		what = fmt.Sprintf("a label of weft that cannot be read (%v)", frontErr)
	case zero(head) && zero(tail):
		return Found{Content: Blank, What: "nothing"}
	default:
		what = "data of an unknown kind"
	}
	if backErr == nil {
		what += fmt.Sprintf(", over what was device %v of the weft volume %x", back.Device, back.Volume)
	}
	return Found{Content: Foreign, What: what}
}

func found(l *Label, volume [16]byte) Found {
	if l.Volume != volume {
		return Found{Content: Another, Label: l, What: fmt.Sprintf("device %v of the weft volume %x", l.Device, l.Volume)}
	}
	return Found{Content: Ours, Label: l, What: fmt.Sprintf("device %v of this volume", l.Device)}
}

func zero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

var zeros [4096]byte

// signatures are what is at fixed places of others' data, the most telling first.
var signatures = []struct {
	what  string
	at    int // from the end, if negative
	magic string
}{
	{"a GPT partition table", 512, "EFI PART"},
	{"a GPT partition table", 4096, "EFI PART"},
	{"a GPT partition table", -512, "EFI PART"},
	{"a GPT partition table", -4096, "EFI PART"},
	{"an LVM physical volume", 0, "LABELONE"},
	{"an LVM physical volume", 512, "LABELONE"},
	{"an LVM physical volume", 1024, "LABELONE"},
	{"an LVM physical volume", 1536, "LABELONE"},
	{"a LUKS container", 0, "LUKS\xba\xbe"},
	{"an xfs file system", 0, "XFSB"},
	{"an ext2, ext3 or ext4 file system", 1024 + 56, "\x53\xef"},
	{"a btrfs file system", 64<<10 + 64, "_BHRfS_M"},
	{"an mdraid member", 0, "\xfc\x4e\x2b\xa9"},     // version 1.1
	{"an mdraid member", 4096, "\xfc\x4e\x2b\xa9"},  // version 1.2
	{"an mdraid member", -8192, "\xfc\x4e\x2b\xa9"}, // version 1.0
	{"Linux swap space", 4096 - 10, "SWAPSPACE2"},
	{"an NTFS file system", 3, "NTFS    "},
	{"an exFAT file system", 3, "EXFAT   "},
	{"a FAT file system", 82, "FAT32   "},
	{"a FAT file system", 54, "FAT1"},
	{"a bcache device", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{"a Ceph OSD", 0, "bluestore block device"},
}

const mdAlign = 64 << 10

// signature says whose data that looks like; "" if it looks like nobody's.
func signature(head, tail []byte, size int64) string {
	for _, s := range signatures {
		b, at := head, s.at
		if at < 0 {
			b, at = tail, len(tail)+at
		}
		if at >= 0 && len(b) >= at+len(s.magic) && string(b[at:at+len(s.magic)]) == s.magic {
			return s.what
		}
	}
	// mdraid before version 1 counts from the beginning.
	if at := size/mdAlign*mdAlign - mdAlign - (size - int64(len(tail))); at >= 0 && at+4 <= int64(len(tail)) && string(tail[at:at+4]) == "\xfc\x4e\x2b\xa9" {
		return "an mdraid member"
	}
	// ZFS has a ring of uberblocks, any of which may be the first.
	for at := 128 << 10; at+8 <= len(head); at += 1 << 10 {
		if n := head[at : at+8]; binary.LittleEndian.Uint64(n) == 0xbab10c || binary.BigEndian.Uint64(n) == 0xbab10c {
			return "a ZFS pool"
		}
	}
	if len(head) >= 512 && head[510] == 0x55 && head[511] == 0xaa {
		return "an MBR partition table, or a boot sector"
	}
	return ""
}
