package perm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// Tag says for whom an entry is.
type Tag uint16

const (
	UserObj  Tag = 0x01 // the owner
	User     Tag = 0x02 // Entry.ID
	GroupObj Tag = 0x04 // the owning group
	Group    Tag = 0x08 // Entry.ID
	Mask     Tag = 0x10 // the most that User, GroupObj and Group entries give
	Other    Tag = 0x20
)

// Entry is one line of a list.
type Entry struct {
	Tag  Tag
	Perm uint16 // the bits of access(2)
	ID   uint32 // of User and Group; NoID in the others
}

// NoID is the ID of entries that have none.
const NoID = math.MaxUint32

// ACL is an access control list. Those that Check approves of are in the order of the tags above.
type ACL []Entry

// The form of struct posix_acl_xattr_header and posix_acl_xattr_entry in linux/posix_acl_xattr.h.
const (
	version    = 2
	headerSize = 4
	entrySize  = 8
)

// MaxEntries is how many entries a list can have. FUSE gives a list one page of memory, so a longer one could be stored
// and not be read.
const MaxEntries = (4096 - headerSize) / entrySize

// What is wrong with a list.
var (
	ErrVersion = errors.New("access control list of another version")
	ErrInvalid = errors.New("not an access control list")
	ErrTooLong = fmt.Errorf("access control list of more than %d entries", MaxEntries)
)

// ParseACL reads the value of an extended attribute. An empty list is nil: there is no list. Check looks at the
// order of the entries.
func ParseACL(value []byte) (ACL, error) {
	if len(value) < headerSize {
		return nil, fmt.Errorf("%w: %d bytes", ErrInvalid, len(value))
	}
	if v := binary.LittleEndian.Uint32(value); v != version {
		return nil, fmt.Errorf("%w: %d, want %d", ErrVersion, v, version)
	}
	value = value[headerSize:]
	switch {
	case len(value)%entrySize != 0:
		return nil, fmt.Errorf("%w: %d bytes after the last entry", ErrInvalid, len(value)%entrySize)
	case len(value) == 0:
		return nil, nil
	case len(value) > MaxEntries*entrySize:
		return nil, ErrTooLong
	}
	l := make(ACL, 0, len(value)/entrySize)
	for ; len(value) > 0; value = value[entrySize:] {
		e := Entry{
			Tag:  Tag(binary.LittleEndian.Uint16(value)),
			Perm: binary.LittleEndian.Uint16(value[2:]),
			ID:   NoID,
		}
		switch e.Tag {
		case UserObj, GroupObj, Mask, Other:
		case User, Group:
			if e.ID = binary.LittleEndian.Uint32(value[4:]); e.ID == NoID {
				return nil, fmt.Errorf("%w: entry %d is nobody's", ErrInvalid, len(l))
			}
		default:
			return nil, fmt.Errorf("%w: entry %d has tag %#x", ErrInvalid, len(l), uint16(e.Tag))
		}
		l = append(l, e)
	}
	return l, nil
}

// Value is the inverse of ParseACL.
func (l ACL) Value() []byte {
	b := make([]byte, 0, headerSize+entrySize*len(l))
	b = binary.LittleEndian.AppendUint32(b, version)
	for _, e := range l {
		b = binary.LittleEndian.AppendUint16(b, uint16(e.Tag))
		b = binary.LittleEndian.AppendUint16(b, e.Perm)
		b = binary.LittleEndian.AppendUint32(b, e.ID)
	}
	return b
}

// Check is ErrInvalid for what is no list: one UserObj, the Users, one GroupObj, the Groups, one Mask, which may be
// missing if there are neither Users nor Groups, and one Other, in this order. As in Linux, two entries may be for the
// same user; the first counts.
func (l ACL) Check() error {
	next := UserObj // what is expected, or later than that and allowed
	named, masked := false, false
	for i, e := range l {
		ok := e.Perm&^7 == 0
		switch e.Tag {
		case UserObj:
			ok = ok && next == UserObj
			next = User
		case User:
			ok = ok && next == User
			named = true
		case GroupObj:
			ok = ok && next == User
			next = Group
		case Group:
			ok = ok && next == Group
			named = true
		case Mask:
			ok = ok && next == Group
			next, masked = Other, true
		case Other:
			ok = ok && (next == Other || next == Group && !named)
			next = 0
		default:
			ok = false
		}
		if !ok {
			return fmt.Errorf("%w: entry %d with tag %#x and permissions %#o", ErrInvalid, i, uint16(e.Tag), e.Perm)
		}
	}
	if next != 0 || named && !masked {
		return fmt.Errorf("%w: incomplete", ErrInvalid)
	}
	return nil
}

// Mode puts what a list says into the permission bits of mode: as the group's bits the mask, if there is one. whole
// reports whether that is all that the list says, so that nobody needs it.
func (l ACL) Mode(mode uint32) (_ uint32, whole bool) {
	mode &^= 0o777
	group := l.group()
	for _, e := range l {
		switch e.Tag {
		case UserObj:
			mode |= uint32(e.Perm&7) << 6
		case Other:
			mode |= uint32(e.Perm & 7)
		}
	}
	if group < 0 {
		return mode, true
	}
	whole = l[group].Tag == GroupObj && !slices.ContainsFunc(l, func(e Entry) bool { return e.Tag == User || e.Tag == Group })
	return mode | uint32(l[group].Perm&7)<<3, whole
}

// group is the entry that the group bits of the mode stand for: Mask, or if there is none GroupObj.
func (l ACL) group() int {
	i := slices.IndexFunc(l, func(e Entry) bool { return e.Tag == Mask })
	if i < 0 {
		i = slices.IndexFunc(l, func(e Entry) bool { return e.Tag == GroupObj })
	}
	return i
}

// Chmod is the list after chmod(2).
func (l ACL) Chmod(mode uint32) ACL {
	l = slices.Clone(l)
	for i := range l {
		switch l[i].Tag {
		case UserObj:
			l[i].Perm = uint16(mode >> 6 & 7)
		case Other:
			l[i].Perm = uint16(mode & 7)
		}
	}
	if i := l.group(); i >= 0 {
		l[i].Perm = uint16(mode >> 3 & 7)
	}
	return l
}

// Inherit returns the mode and the access list of what is made with mode in a directory whose default list is l. The
// list is nil if the mode says it all.
func (l ACL) Inherit(mode uint32) (uint32, ACL) {
	l = slices.Clone(l)
	for i := range l {
		switch l[i].Tag {
		case UserObj:
			l[i].Perm &= uint16(mode >> 6 & 7)
		case Other:
			l[i].Perm &= uint16(mode & 7)
		}
	}
	if i := l.group(); i >= 0 {
		l[i].Perm &= uint16(mode >> 3 & 7)
	}
	mode, whole := l.Mode(mode)
	if whole {
		return mode, nil
	}
	return mode, l
}

// Allows reports whether w may do all that want says, in the bits of access(2). The list l belongs to an inode of that
// owner and group.
func (l ACL) Allows(w *Caller, owner, group uint32, want uint16) bool {
	masked := func(e Entry) bool {
		if i := l.group(); i >= 0 && l[i].Tag == Mask {
			e.Perm &= l[i].Perm
		}
		return want&^e.Perm == 0
	}
	member := false
	for _, e := range l {
		switch e.Tag {
		case UserObj:
			if w.UID == owner {
				return want&^e.Perm == 0
			}
		case User:
			if w.UID == e.ID {
				return masked(e)
			}
		case GroupObj, Group:
			gid := e.ID
			if e.Tag == GroupObj {
				gid = group
			}
			if !w.In(gid) {
				continue
			}
			member = true
			if want&^e.Perm == 0 { // else another of his groups may give it; all of them together never do
				return masked(e)
			}
		case Other:
			return !member && want&^e.Perm == 0
		}
	}
	return false
}
