// Command image writes an OCI image with weft's programs, as one tar file that podman, skopeo, crane and others read (oci-archive). The same programs make the same
// bytes. It is a module of its own, so that what it depends on is none of weft's dependencies.
package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: image DIR-OF-PROGRAMS VERSION FILE")
		os.Exit(1)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(2)
	}
}

func write(programs, version, file string) error {
	content, err := layer(programs)
	if err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1), l)
	if err != nil {
		return err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		Env:    []string{"PATH=/usr/sbin:/usr/bin"},
		Cmd:    []string{"weft", "--help"},
		Labels: map[string]string{"org.opencontainers.image.title": "weft", "org.opencontainers.image.version": version},
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "weft-image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	at, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := at.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": version})); err != nil {
		return err
	}
	return archive(dir, file)
}

// layer is a tar of the file system.
func layer(programs string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h tar.Header, content []byte) error {
		h.Format, h.Size = tar.FormatPAX, int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			return err
		}
		_, err := w.Write(content)
		return err
	}
	for _, dir := range []string{"etc", "mnt", "proc", "run", "sys", "tmp", "usr", "usr/bin", "usr/sbin", "var", "var/cache", "var/log"} {
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		if err := add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: mode}, nil); err != nil {
			return nil, err
		}
	}
	if err := add(tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0:root:/:/bin/false\n")); err != nil {
		return nil, err
	}
	for _, name := range []string{"weft", "weftd"} {
		text, err := os.ReadFile(filepath.Join(programs, name))
		if err != nil {
			return nil, err
		}
		if err := add(tar.Header{Typeflag: tar.TypeReg, Name: "usr/bin/" + name, Mode: 0o755}, text); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"mount.weft", "mount.fuse.weft", "umount.weft", "umount.fuse.weft"} {
		if err := add(tar.Header{Typeflag: tar.TypeSymlink, Name: "usr/sbin/" + name, Linkname: "../bin/weft", Mode: 0o777}, nil); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

// archive writes a tar of what is in dir, in the order of names and without times.
func archive(dir, file string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		name, _ := filepath.Rel(dir, path)
		if err != nil || name == "." {
			return err
		}
		if e.IsDir() {
			return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, Format: tar.FormatPAX})
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text)), Format: tar.FormatPAX}); err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return out.Close()
}
