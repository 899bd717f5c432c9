package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/weftfs/weft/internal/manual"
)

//go:embed systemd/*.service
var systemdUnits embed.FS

// installed is a file that weft install makes.
type installed struct {
	name string // below the prefix
	mode os.FileMode
	text []byte
	link string // what it is a symbolic link to, if it is one
}

func runInstall(_ context.Context, c *command, args []string) error {
	fl := c.Flags("\nmount(8) looks for mount.weft in /sbin, which is /usr/sbin: so mount -t weft works with the prefix /usr. With another one it is said what to link.\n" +
		"weftd is installed if it lies beside weft.\n")
	prefix := fl.String("prefix", "/usr", "`directory` below which all goes: bin, sbin, share and lib")
	root := fl.String("root", "", "`directory` that will be the root of the file system, for packages and images; names in what is installed do not have it")
	remove := fl.Bool("remove", false, "remove what was installed instead")
	if err := parse(c, fl, args, 0, 0); err != nil {
		return err
	}
	if !filepath.IsAbs(*prefix) {
		return usagef("install: --prefix %q: want a path from / on", *prefix)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	files, err := toInstall(self, *prefix)
	if err != nil {
		return err
	}
	at := filepath.Join(*root, *prefix)
	if *remove {
		for _, f := range files {
			if err := os.Remove(filepath.Join(at, f.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		fmt.Printf("removed %d files below %s\n", len(files), at)
		return nil
	}
	for _, f := range files {
		if err := f.write(filepath.Join(at, f.name)); err != nil {
			return err
		}
	}
	fmt.Printf("installed %d files below %s\n", len(files), at)
	if *root == "" && !slices.Contains([]string{"/", "/usr"}, filepath.Clean(*prefix)) {
		fmt.Printf("mount(8) does not look in %s: for mount -t weft link mount.weft, mount.fuse.weft, umount.weft and umount.fuse.weft into /usr/sbin\n", filepath.Join(*prefix, "sbin"))
	}
	return nil
}

// toInstall is all there is to install.
func toInstall(self, prefix string) ([]installed, error) {
	weft, err := os.ReadFile(self)
	if err != nil {
		return nil, err
	}
	files := []installed{{name: "bin/weft", mode: 0o755, text: weft}}
	for _, h := range []string{"mount", "umount"} {
		for _, kind := range []string{".weft", ".fuse.weft"} {
			files = append(files, installed{name: "sbin/" + h + kind, link: "../bin/weft"})
		}
	}
	p := describeProgram()
	page := func(name string, write func(io.Writer) error) {
		var b bytes.Buffer
		err = errors.Join(err, write(&b))
		files = append(files, installed{name: "share/man/man8/" + name + ".8", mode: 0o644, text: b.Bytes()})
	}
	page("weft", func(w io.Writer) error { return p.Page(w, sectionSources, sectionFiles, sectionExit, sectionSee) })
	page("mount.weft", func(w io.Writer) error {
		return helpers[0].Manual().Page(w, p.Options, sectionSources, sectionFstab, sectionMountExit, sectionSee)
	})
	page("umount.weft", func(w io.Writer) error {
		return helpers[1].Manual().Page(w, nil, sectionMountExit, sectionSee)
	})
	for _, h := range []string{"mount", "umount"} {
		files = append(files, installed{name: "share/man/man8/" + h + ".fuse.weft.8", link: h + ".weft.8"})
	}
	places := map[string]string{
		"bash": "share/bash-completion/completions/%s", "zsh": "share/zsh/vendor-completions/_%s", "fish": "share/fish/vendor_completions.d/%s.fish",
	}
	for _, shell := range manual.Shells {
		var b bytes.Buffer
		err = errors.Join(err, p.Completion(&b, shell))
		files = append(files, installed{name: fmt.Sprintf(places[shell], "weft"), mode: 0o644, text: b.Bytes()})
	}
	daemon := filepath.Join(filepath.Dir(self), "weftd")
	text, missing := os.ReadFile(daemon)
	if err != nil || missing != nil {
		return files, err
	}
	files = append(files, installed{name: "bin/weftd", mode: 0o755, text: text})
	say := func(name, what string) {
		out, e := exec.Command(daemon, "manual", what).Output()
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s manual %s: %w", daemon, what, e))
		}
		files = append(files, installed{name: name, mode: 0o644, text: out})
	}
	say("share/man/man8/weftd.8", "man")
	for _, shell := range manual.Shells {
		say(fmt.Sprintf(places[shell], "weftd"), shell)
	}
	units, _ := systemdUnits.ReadDir("systemd")
	for _, u := range units {
		text, _ := systemdUnits.ReadFile("systemd/" + u.Name())
		files = append(files, installed{name: "lib/systemd/system/" + u.Name(), mode: 0o644, text: bytes.ReplaceAll(text, []byte("@bin@"), []byte(filepath.Join(prefix, "bin")))})
	}
	return files, err
}

// write makes the file, in place of what is there. A program that is running goes on with the old one.
func (f *installed) write(name string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	made := name + ".new"
	os.Remove(made)
	var err error
	if f.link != "" {
		err = os.Symlink(f.link, made)
	} else {
		err = errors.Join(os.WriteFile(made, f.text, f.mode), os.Chmod(made, f.mode))
	}
	if err == nil {
		err = os.Rename(made, name)
	}
	if err != nil {
		os.Remove(made)
	}
	return err
}
