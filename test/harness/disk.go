package harness

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Disk is an ext4 file system of a test on a loop device, whose power can be cut and whose writes can be made to fail.
// Its image is in memory, sparse, and takes only what is written.
type Disk struct {
	Dir    string // where it is mounted; every user may enter it
	t      testing.TB
	host   string // the tmpfs that holds the image
	size   int64
	device string
	cut    bool
	frozen bool
}

// NewDisk makes one of so many bytes, 16 MiB at least. It skips the test where that cannot be done. The disk goes with
// the test, but what runs on it has to end first: a server that is started after NewDisk does.
func NewDisk(t testing.TB, size int64) *Disk {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	Need(t, "losetup", "mkfs.ext4")
	base := Dir(t)
	d := &Disk{Dir: filepath.Join(base, "disk"), t: t, host: filepath.Join(base, "host"), size: size}
	for _, dir := range []string{d.Dir, d.host} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("weft-test", d.host, "tmpfs", 0, d.room(2*size)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(d.host, unix.MNT_DETACH) })
	image := filepath.Join(d.host, "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, size)); err != nil {
		t.Fatal(err)
	}
	// Blocks are pages of the image: to a loop device a write that found room for a part of a page is one that was done.
	Run(t, "", "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-J", "size=4", "-E", "packed_meta_blocks=1", image)
	d.attach()
	d.mount()
	t.Cleanup(func() { unix.Unmount(d.Dir, unix.MNT_DETACH) })
	d.allocateMetadata(image)
	return d
}

// attach makes a loop device of the image.
func (d *Disk) attach() {
	d.t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", filepath.Join(d.host, "image")).CombinedOutput()
	if err != nil {
		d.t.Skipf("missing: a loop device (losetup: %v: %s)", err, out)
	}
	device := strings.TrimSpace(string(out))
	d.device = device
	d.t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
}

// allocateMetadata allocates in the image what a new file system uses, which lies at its beginning, so that FailWrites
// does not hit it.
func (d *Disk) allocateMetadata(image string) {
	d.t.Helper()
	var st unix.Statfs_t
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err == nil {
		defer f.Close()
		err = errors.Join(unix.Statfs(d.Dir, &st), unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, d.size-int64(st.Bfree)*st.Bsize))
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *Disk) room(bytes int64) string { return fmt.Sprintf("size=%d,mode=755", bytes) }

func (d *Disk) mount() {
	d.t.Helper()
	// A device tells whoever syncs it next that something could not be written, also after it was mounted anew. One
	// that was without power does not.
	if f, err := os.Open(d.device); err == nil {
		unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0)
		f.Close()
	}
	if err := unix.Mount(d.device, d.Dir, "ext4", 0, "errors=remount-ro"); err != nil {
		d.t.Fatalf("mounting %s: %v", d.device, err)
	}
}

// Cut is a power cut: from now on all requests of the file system fail, and what is not on the disk, nor in its
// journal, is lost. Programs that have it in use have to end before Remount.
func (d *Disk) Cut() {
	d.t.Helper()
	noLogFlush := uint32(2) // FSOP_GOING_FLAGS_NOLOGFLUSH
	d.ioctl("shutdown", 0x8004587d, uintptr(unsafe.Pointer(&noLogFlush)))
	d.cut = true
}

// Remount unmounts the file system and mounts it again. It waits until no process has it in use any more, which
// includes mounts that have descriptors of its files (LOCALIO).
func (d *Disk) Remount() {
	d.t.Helper()
	Await(d.t, "unmounting "+d.Dir, func() bool {
		err := unix.Unmount(d.Dir, 0)
		if err != nil && err != unix.EBUSY {
			d.t.Fatalf("unmounting %s: %v", d.Dir, err)
		}
		return err == nil
	})
	if d.cut && d.mountedElsewhere() {
		// The kernel would mount the dead file system once more. What its journal has committed is written now, and not
		// over what another device writes.
		if f, err := os.Open(d.device); err == nil {
			f.Sync()
			f.Close()
		}
		d.attach()
	}
	Await(d.t, "the last mount of "+d.device, func() bool { return !d.mountedElsewhere() })
	d.cut = false
	d.mount()
}

// mountedElsewhere reports whether the unmounted disk is still mounted in mount namespaces that others have made meanwhile.
func (d *Disk) mountedElsewhere() bool {
	_, err := os.Stat(filepath.Join("/sys/fs/ext4", filepath.Base(d.device)))
	return err == nil
}

// ReadOnly makes it read-only, as ext4 does by itself after an error: all writes fail, and so do syncs where something
// is not written. It is writable again after Remount.
func (d *Disk) ReadOnly() {
	d.t.Helper()
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(d.device), "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("test"), 0); err != nil {
		d.t.Fatal(err)
	}
}

// FailWrites makes the disk fail: no block can be written but those that files have now, so that bytes that are new get
// into the page cache but not onto the disk, and a sync fails. Reads and what overwrites succeed, and so does the
// journal. The function that it returns ends it.
func (d *Disk) FailWrites() (undo func()) {
	d.t.Helper()
	d.Freeze() // which writes everything, and leaves it to others to be told of what could not be written
	d.Thaw()
	trim := struct{ start, length, min uint64 }{length: math.MaxUint64}
	d.ioctl("trimming", 0xc0185879, uintptr(unsafe.Pointer(&trim))) // FITRIM: what no file has is no longer in the image
	var st unix.Statfs_t
	if err := unix.Statfs(d.host, &st); err != nil {
		d.t.Fatal(err)
	}
	resize := func(bytes int64) {
		d.t.Helper()
		if err := unix.Mount("", d.host, "", unix.MS_REMOUNT, d.room(bytes)); err != nil {
			d.t.Fatal(err)
		}
	}
	resize(int64(st.Blocks-st.Bfree) * st.Bsize)
	return func() { resize(2 * d.size) }
}

// Freeze makes what writes to the file system wait, Thaw go on. Cleanup functions that the test has registered before
// may rely on a disk that is not frozen.
func (d *Disk) Freeze() {
	d.t.Helper()
	d.ioctl("freeze", 0xc0045877, 0)
	d.frozen = true
	d.t.Cleanup(func() {
		if d.frozen {
			d.Thaw()
		}
	})
}

func (d *Disk) Thaw() {
	d.t.Helper()
	d.ioctl("thaw", 0xc0045878, 0)
	d.frozen = false
}

func (d *Disk) ioctl(what string, request, arg uintptr) {
	d.t.Helper()
	f, err := os.Open(d.Dir)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, arg); errno != 0 {
		d.t.Fatalf("%s of %s: %v", what, d.Dir, errno)
	}
}
