package fs

import (
	"os"
	"reflect"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseGroups(t *testing.T) {
	for _, c := range []struct {
		name, status string
		groups       []uint32
		ok           bool
	}{
		{"some", "Name:\tsh\nUid:\t5\t5\t5\t7\nGid:\t1\t1\t1\t1\nFDSize:\t64\nGroups:\t4 24 4294967294 \nNStgid:\t1\n", []uint32{4, 24, 4294967294}, true},
		{"none", "Uid:\t7\t7\t7\t7\nGroups:\t \n", nil, true},
		{"somebody else", "Uid:\t7\t7\t7\t8\nGroups:\t1\n", []uint32{1}, false},
		{"no user", "Groups:\t1\n", []uint32{1}, false},
		{"cut", "Uid:\t7\t7\t7\t7\n", nil, false},
		{"no number", "Uid:\t7\t7\t7\t7\nGroups:\t1 x\n", nil, false},
		{"nothing", "", nil, false},
	} {
		if groups, ok := parseGroups([]byte(c.status), 7); ok != c.ok || !reflect.DeepEqual(groups, c.groups) {
			t.Errorf("%s: %v %t", c.name, groups, ok)
		}
	}
}

func TestGroupsOf(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own, err := unix.Getgroups()
	ok(t, err)
	groups, visible := groupsOf(uint32(unix.Gettid()), uint32(os.Geteuid()))
	if !visible || len(groups) != len(own) {
		t.Errorf("%v %t, want %v", groups, visible, own)
	}
	if _, visible := groupsOf(0, 0); visible {
		t.Error("nobody is visible")
	}
	if _, visible := groupsOf(1<<30, 0); visible {
		t.Error("a process that cannot be is visible")
	}
}

func BenchmarkGroupsOf(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ReportAllocs()
	for b.Loop() {
		groupsOf(uint32(unix.Gettid()), uint32(os.Geteuid()))
	}
}
