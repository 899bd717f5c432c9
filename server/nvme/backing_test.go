package nvme

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// What a host writes again after a Flush that failed, to a target that was started again, is on the disk.
func TestFailedDisk(t *testing.T) {
	disk := harness.NewDisk(t, 32<<20)
	path, data := filepath.Join(disk.Dir, "ns"), bytes.Repeat([]byte("weft"), 1<<18)
	write := func(f *File) error {
		t.Helper()
		if n, err := f.WriteAt(data, 0); n < len(data) {
			t.Fatal(err)
		}
		return f.Sync()
	}
	f := backingFile(t, disk.Dir, testSize)
	undo := disk.FailWrites()
	if write(f) == nil {
		t.Fatal("a sync to a disk that fails")
	}
	undo()
	if write(f) == nil {
		t.Error("it is as if nothing had failed")
	}
	f.Close()
	f, err := OpenFile(path, false)
	if err == nil {
		err = write(f)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	disk.Remount()
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got[:len(data)], data) {
		t.Errorf("other contents, %v", err)
	}
}
