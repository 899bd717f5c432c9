package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// build runs scripts/image.
func build(t *testing.T) []byte {
	t.Helper()
	file := filepath.Join(t.TempDir(), "weft.tar")
	if out, err := exec.Command("../../scripts/image", file).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// unpack unpacks a tar file.
func unpack(t *testing.T, r io.Reader, dir string) {
	t.Helper()
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.IsZero() && h.ModTime.Unix() != 0 || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s has a time or an owner: %v, %d, %d", h.Name, h.ModTime, h.Uid, h.Gid)
		}
		name := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(name, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, name)
		default:
			var text []byte
			if text, err = io.ReadAll(in); err == nil {
				err = os.WriteFile(name, text, os.FileMode(h.Mode))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestImage builds the image twice, looks whether it is one, and runs what is in it with nothing but /dev/fuse and /proc.
func TestImage(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: root, to mount")
	}
	first := build(t)
	if !bytes.Equal(first, build(t)) {
		t.Error("two builds differ")
	}
	dir := t.TempDir()
	unpack(t, bytes.NewReader(first), dir)
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatal(manifest, err)
	}
	img, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatal(layers, err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	unpack(t, content, root)

	// A volume, served by the image's weftd, and a mount, both in the image's root.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	var log bytes.Buffer
	inside := func(command string) *exec.Cmd {
		script := fmt.Sprintf(`mkdir -p %[1]s/dev %[1]s/mnt/weft && touch %[1]s/dev/fuse && mount --bind /dev/fuse %[1]s/dev/fuse && mount -t proc proc %[1]s/proc && exec chroot %[1]s %[2]s`, root, command)
		cmd := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script)
		cmd.Env, cmd.Stdout, cmd.Stderr = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, &log, &log
		return cmd
	}
	service := inside("weftd single --dir /var/volume --data-servers 1 --listen " + addr)
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		service.Process.Kill()
		service.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	}()
	ready := filepath.Join(root, "run/ready")
	mount := inside("weft mount -f -o retry=1 --ready-file /run/ready " + addr + ":/ /mnt/weft")
	if err := mount.Start(); err != nil {
		t.Fatal(err)
	}
	defer mount.Process.Kill()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the mount is not ready")
		}
	}
	// Its mount namespace is the mount's own.
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", mount.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	pid := strings.TrimSpace(string(children))
	file := "/proc/" + pid + "/root/mnt/weft/file"
	if err := os.WriteFile(file, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "text" {
		t.Errorf("%q, %v", got, err)
	}
	var n int
	if _, err := fmt.Sscan(pid, &n); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(n, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := mount.Wait(); err != nil {
		t.Errorf("the mount ended with %v", err)
	}
	if _, err := os.Stat(ready); err == nil {
		t.Error("the readiness file is left")
	}
}
