package data

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/descriptors"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// A file handle on the wire: version 1 | kernel handle type, big-endian int32 | kernel handle | MAC[macSize].
const (
	handleVersion = 1
	handleHead    = 5
	macSize       = 16
)

// The key's file: key[keySize] | the first bytes of its SHA-256.
const (
	keySize    = 32
	keySumSize = 8
)

// handles makes file handles and opens them. Files of other file systems mounted in the export have none.
type handles struct {
	key     []byte
	mount   int // descriptor of the export, which names the file system
	mountID int
}

func newHandles(key []byte, export int) (handles, error) {
	_, id, err := unix.NameToHandleAt(export, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return handles{}, fmt.Errorf("its file system gives no file handles (name_to_handle_at): %w", err)
	}
	return handles{key: key, mount: export, mountID: id}, nil
}

// of makes the handle of name in the directory dirfd, or of dirfd itself if name is empty, and describes the file.
func (h *handles) of(dirfd int, name string) (fh wire.FileHandle, st unix.Stat_t, err error) {
	flags := 0
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	kh, mount, err := unix.NameToHandleAt(dirfd, name, flags)
	if err != nil {
		return fh, st, err
	}
	if mount != h.mountID {
		return fh, st, unix.EXDEV
	}
	if err := unix.Fstatat(dirfd, name, &st, flags|unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fh, st, err
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFDIR {
		return fh, st, unix.EINVAL // somebody put something there that we never make
	}
	b := append(make([]byte, 0, wire.MaxHandle), handleVersion)
	b = binary.BigEndian.AppendUint32(b, uint32(kh.Type()))
	b = append(b, kh.Bytes()...)
	if len(b)+macSize > wire.MaxHandle {
		return fh, st, fmt.Errorf("kernel file handle of %d bytes: %w", kh.Size(), unix.EOVERFLOW)
	}
	fh, err = wire.NewFileHandle(append(b, h.mac(b)...))
	return fh, st, err
}

func (h *handles) mac(b []byte) []byte {
	m := hmac.New(sha256.New, h.key)
	m.Write(b)
	return m.Sum(nil)[:macSize]
}

// open opens what fh stands for: ESTALE if it is gone, wire.ErrBadHandle if fh is not one of ours.
func (h *handles) open(fh wire.FileHandle) (*file, error) {
	b := fh.Bytes()
	if len(b) < handleHead+macSize || b[0] != handleVersion {
		return nil, wire.ErrBadHandle
	}
	body := b[:len(b)-macSize]
	if !hmac.Equal(h.mac(body), b[len(b)-macSize:]) {
		return nil, wire.ErrBadHandle
	}
	kh := kernelHandle(body)
	f := &file{handles: h, fh: fh}
	var err error
	f.fd, err = unix.OpenByHandleAt(h.mount, kh, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	switch err {
	case unix.EISDIR:
		f.dir = true
		f.fd, err = unix.OpenByHandleAt(h.mount, kh, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	case unix.EROFS: // as after an error of the disk: what is there can still be read
		f.readOnly = true
		f.fd, err = unix.OpenByHandleAt(h.mount, kh, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// kernelHandle takes it out of a handle without the MAC.
func kernelHandle(body []byte) unix.FileHandle {
	return unix.NewFileHandle(int32(binary.BigEndian.Uint32(body[1:])), body[handleHead:])
}

// openAgain opens a data file once more.
func (h *handles) openAgain(f *file, flags int) (fd int, err error) {
	b := f.fh.Bytes()
	return descriptors.Retry(func() (int, error) {
		return unix.OpenByHandleAt(h.mount, kernelHandle(b[:len(b)-macSize]), flags|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	})
}

// loadKey reads the key of file handles, or makes one for an export that is empty.
func loadKey(path, export string) ([]byte, error) {
	b, err := os.ReadFile(path)
	switch {
	case err == nil && (len(b) != keySize+keySumSize || !bytes.Equal(b[keySize:], keySum(b[:keySize]))):
		return nil, fmt.Errorf("%s is damaged, and without it no handle that was given out is valid: restore it", path)
	case err == nil:
		return b[:keySize], nil
	case !errors.Is(err, os.ErrNotExist):
		return nil, err
	}
	empty, err := isEmpty(export)
	if err != nil {
		return nil, err
	}
	if !empty {
		return nil, fmt.Errorf("%s is missing though there are files, and without it no handle that was given out is valid: restore it", path)
	}
	key := make([]byte, keySize)
	rand.Read(key)
	return key, writeKey(path, append(key[:keySize:keySize], keySum(key)...))
}

func keySum(key []byte) []byte {
	sum := sha256.Sum256(key)
	return sum[:keySumSize]
}

// writeKey writes a file that is there either wholly or not at all, whatever happens.
func writeKey(path string, b []byte) error {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func isEmpty(dir string) (bool, error) {
	d, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer d.Close()
	_, err = d.Readdirnames(1)
	if err == io.EOF {
		return true, nil
	}
	return false, err
}
