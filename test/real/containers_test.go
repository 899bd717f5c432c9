package real

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// beside is for how long a test works while names change around it.
func beside() time.Duration {
	if *long {
		return 10 * time.Minute
	}
	return 3 * time.Second
}

// contents are the regular files below a directory.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		files[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// equal fails the test unless these are the files below a directory.
func equal(t *testing.T, what, dir string, want map[string]string) {
	t.Helper()
	got := contents(t, dir)
	if maps.Equal(got, want) {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if got[name] != want[name] {
			t.Errorf("%s: %s has %q, want %q", what, name, got[name], want[name])
		}
		delete(want, name)
	}
	t.Fatalf("%s: missing are %v", what, slices.Sorted(maps.Keys(want)))
}

// TestOverlay works in an overlay (overlayfs) with three layers, as containers do: two are directories of a mount, with
// what image layers have. Names beside the layers change through two mounts meanwhile.
func TestOverlay(t *testing.T) {
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	on := func(m *harness.Mount, name string) string { return filepath.Join(m.Dir, "image", name) }
	const dirs, names = 6, 10
	name := func(dir, n int) string { return fmt.Sprintf("d%d/f%d", dir, n) }
	layers := map[string]map[string]string{"low": {}, "middle": {}}
	want := map[string]string{} // what the overlay has
	for _, layer := range []string{"low", "middle"} {
		for d := range dirs {
			check(os.MkdirAll(on(a, filepath.Join(layer, fmt.Sprint("d", d))), 0o755))
			for n := range names {
				if layer == "middle" && n%3 > 0 {
					continue
				}
				file := name(d, n)
				text := layer + " " + file
				check(os.WriteFile(on(a, filepath.Join(layer, file)), []byte(text), 0o644))
				layers[layer][file], want[file] = text, text
			}
		}
	}
	// The middle layer removes a file of the lower one, and hides what is in a directory of it.
	check(unix.Mknod(on(a, "middle/"+name(0, 1)), unix.S_IFCHR, 0))
	delete(want, name(0, 1))
	check(unix.Setxattr(on(a, "middle/d1"), "trusted.overlay.opaque", []byte("y"), 0))
	maps.DeleteFunc(want, func(file, text string) bool {
		return strings.HasPrefix(file, "d1/") && strings.HasPrefix(text, "low ")
	})

	lower := "lowerdir=" + on(a, "middle") + ":" + on(a, "low")
	above, merged := harness.Dir(t), harness.Dir(t)
	mount := func(upper string) error {
		check(errors.Join(os.Mkdir(upper+"/upper", 0o755), os.Mkdir(upper+"/work", 0o755)))
		return unix.Mount("overlay", merged, "overlay", 0, lower+",upperdir="+upper+"/upper,workdir="+upper+"/work")
	}
	if err := mount(on(a, "")); err != unix.EINVAL { // docs/posix.md says it
		t.Errorf("a directory of a mount as the upper layer: %v", err)
	}
	check(unix.Mount("none", above, "tmpfs", 0, ""))
	t.Cleanup(func() { unix.Unmount(above, unix.MNT_DETACH) })
	check(mount(above))
	t.Cleanup(func() { unix.Unmount(merged, unix.MNT_DETACH) })
	equal(t, "at once", merged, want)

	for _, dir := range []string{"beside", "beside/more"} {
		check(os.Mkdir(on(a, dir), 0o755))
	}
	stop := harness.ChangeNames(t, *seed, []*harness.Mount{a, b}, "", "image", "image/beside", "image/beside/more")
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	pick := func() string { return name(rng.IntN(dirs), rng.IntN(2*names)) }
	path := func(name string) string { return filepath.Join(merged, name) }
	forget, rounds := time.Now(), 0
	for end := time.Now().Add(beside()); time.Now().Before(end); rounds++ {
		for n := range 20 {
			file, other, text := pick(), pick(), fmt.Sprintf("written in round %d, %d", rounds, n)
			_, there := want[file]
			switch k := rng.IntN(30); {
			case k == 0:
				dir := filepath.Dir(file)
				check(errors.Join(os.RemoveAll(path(dir)), os.Mkdir(path(dir), 0o755)))
				maps.DeleteFunc(want, func(file, _ string) bool { return filepath.Dir(file) == dir })
			case !there:
				check(os.WriteFile(path(file), []byte(text), 0o644))
				want[file] = text
			case k < 10:
				f, err := os.OpenFile(path(file), os.O_WRONLY|os.O_APPEND, 0)
				check(err)
				_, err = f.WriteString(text)
				check(errors.Join(err, f.Close()))
				want[file] += text
			case k < 20 && file != other:
				check(os.Rename(path(file), path(other)))
				want[other] = want[file]
				delete(want, file)
			default:
				check(os.Remove(path(file)))
				delete(want, file)
			}
		}
		if time.Since(forget) > time.Second {
			harness.DropCaches(t)
			forget = time.Now()
		}
		equal(t, fmt.Sprint("round ", rounds), merged, want)
	}
	t.Logf("%d rounds, %d changes", rounds, stop())
	for layer, files := range layers {
		equal(t, layer, on(b, layer), files)
	}
}

// TestChroot unpacks a small system on a mount and builds a program in it by chroot(2), in a mount namespace of its own
// with /proc, /dev, a tmpfs and a directory bound there, as package builders and units with PrivateMounts= do. Names in
// the same directories change through two mounts meanwhile.
func TestChroot(t *testing.T) {
	harness.Need(t, "unshare", "findmnt", "chroot", "bash", "tar", "make", "gcc", "ldd")
	v := harness.NewVolume(t, harness.Options{})
	a, b := v.Mount(), v.Mount()
	root := filepath.Join(a.Dir, "root")
	harness.Run(t, "", "bash", "-c", unpackRoot, "bash", root)
	src := filepath.Join(a.Dir, "src")
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"Makefile": "prog: main.o one.o two.o\n\tgcc -o $@ $^\n%.o: %.c\n\tgcc -c -o $@ $<\n",
		"one.c":    "int one(void) { return 1; }\n",
		"two.c":    "int two(void) { return 2; }\n",
		"main.c": `#include <stdio.h>
#include <unistd.h>
int one(void), two(void);
int main(void)
{
	char path[4096];
	ssize_t n = readlink("/proc/self/exe", path, sizeof path);
	printf("%.*s %d\n", (int)n, path, one() + two());
	return 0;
}
`,
	} {
		if err := os.WriteFile(filepath.Join(src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	stop := harness.ChangeNames(t, *seed, []*harness.Mount{a, b}, "", "src", "root", "root/usr", "root/usr/bin",
		"root/usr/lib", "root/etc", "root/proc", "root/dev", "root/tmp", "root/build", "root/work", "root/work/deep")
	cmd := exec.Command("unshare", "--mount", "--propagation", "slave", "bash", "-c", enterRoot, "bash",
		root, src, useRoot, fmt.Sprint(beside().Seconds()), a.Dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the process
	t.Cleanup(func() { cmd.Process.Kill() })
	link := func(name string) (string, error) {
		return os.Readlink(fmt.Sprintf("/proc/%d/%s", cmd.Process.Pid, name))
	}
	looks := 0
	for running := true; running; {
		select {
		case err := <-ended:
			if running = false; err != nil {
				t.Errorf("in the chroot: %v\n%s", err, out.String())
			}
		case <-time.After(20 * time.Millisecond):
			if _, err := link("fd/7"); err != nil {
				continue // it has not come to that yet, or has ended
			}
			for name, path := range map[string]string{"exe": "usr/bin/sh", "cwd": "work/deep", "fd/7": "work/open", "root": ""} {
				if got, err := link(name); err == nil && got != filepath.Join(root, path) {
					t.Errorf("%s of the shell in the chroot is %s", name, got)
				}
			}
			looks++
		}
	}
	t.Logf("%d looks, %d changes\n%s", looks, stop(), out.String())
	if looks == 0 {
		t.Error("the shell in the chroot was not looked at")
	}
}

// unpackRoot makes the directory $1 a system with a shell, a compiler and what they need, of this machine's files.
const unpackRoot = `
set -eu -o pipefail
shopt -s nullglob
root=$1
mkdir -p "$root"/{usr,etc,proc,dev,src,build,work/deep} "$root/tmp"
for link in /bin /sbin /lib*; do
	[[ ! -L $link ]] || { mkdir -p "$root/$(readlink "$link")" && ln -s "$(readlink "$link")" "$root$link"; }
done
echo root:x:0:0:root:/:/bin/sh >"$root/etc/passwd"
echo contents >"$root/work/open"
programs=()
for name in sh cat cmp cp cut date grep ln ls make mkdir mv pwd readlink rm tar gcc as ld ldconfig; do
	programs+=("$(type -P "$name")")
done
programs+=("$(gcc -print-prog-name=cc1)" "$(gcc -print-prog-name=collect2)")
files() {
	printf '%s\n' "${programs[@]}"
	{ ldd "${programs[@]}" 2>/dev/null || :; } | sed -n 's/^[^/]*\(\/[^ :]*\) (0x.*/\1/p'
	for name in {,S}crt1.o crti.o crtn.o crt{begin,end}{,S}.o libgcc.a libgcc_s.so{,.1} libc.so libc_nonshared.a \
		liblto_plugin.so; do
		file=$(gcc -print-file-name="$name")
		[[ $file != /* ]] || realpath -s "$file"
	done
	gcc -M -xc - <<<$'#include <stdio.h>\n#include <unistd.h>' | grep -o '/[^ ]*' | xargs realpath -s
}
files | sort -u | sed 's,^/,,' | tar -C / -ch -T - | tar -C "$root" -x
`

// enterRoot runs a script in the system at $1, with the sources $2, on the mount $5. Mounts of other tests are not for
// this namespace to hold, above all as nobody would see that: mountinfo of its processes has what is in the chroot.
const enterRoot = `
set -eu
findmnt -n -l -t fuse.weft,overlay -o TARGET | while read -r other; do
	[[ $other == / || $other == "$5" ]] || umount -i -c -l "$other" || : # it went with one that it was in
done
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --bind "$2" "$1/src"
mount -t tmpfs tmpfs "$1/tmp"
exec chroot "$1" /bin/sh -c "$3" sh "$4"
`

// useRoot is that script. It builds a program again and again for $1 seconds.
const useRoot = `
set -eu
PATH=/usr/sbin:/usr/bin
is() { [ "$2" = "$3" ] || { echo "$1: $2, want $3"; exit 1; }; }
ldconfig
echo inside >/tmp/file
cd /work/deep
exec 7</work/open
end=$(($(date +%s) + $1)) rounds=0 now=0
while [ $now -lt $end ]; do
	now=$(date +%s)
	is "program of a program" "$(readlink /proc/self/exe)" /usr/bin/readlink
	is "program of the shell" "$(readlink /proc/$$/exe)" /usr/bin/sh
	is "directory by getcwd" "$(/usr/bin/pwd -P)" /work/deep
	is "directory of the shell" "$(readlink /proc/$$/cwd)" /work/deep
	is "root" "$(readlink /proc/self/root)" /
	is "open file" "$(readlink /proc/$$/fd/7)" /work/open
	is "what is in the open file" "$(cat /proc/$$/fd/7)" contents
	is "file systems mounted there" "$(cut -d ' ' -f 5 /proc/self/mountinfo | grep -cx -e /proc -e /dev -e /src -e /tmp)" 4
	is "file on the tmpfs" "$(cat /tmp/file)" inside
	[ -c /dev/null ]

	rm -rf /build/out /build/copy
	mkdir /build/out /build/copy
	cp -a /src/*.c /src/Makefile /build/out
	make -s -C /build/out -j 2
	is "what was built says" "$(/build/out/prog)" "/build/out/prog 3"
	tar -C /build/out -cf - . | tar -C /build/copy -xf -
	mv /build/copy/prog /work/deep/prog
	cmp /build/out/prog /work/deep/prog
	is "the same, at its new place" "$(./prog)" "/work/deep/prog 3"
	rounds=$((rounds + 1))
done
echo "$rounds rounds"
`
