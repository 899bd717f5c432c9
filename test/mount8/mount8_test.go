package mount8

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// prelude installs weft in a mount namespace that has /usr, /etc/fstab and mount(8)'s table for itself.
const prelude = `
set -u
failed=0
fail() { echo "FAIL: $*"; failed=1; }
# want CODE CMD... runs a command, keeps what it says, and looks at its exit code.
want() {
	local code=$1 rc=0
	shift
	out=$("$@" 2>&1 </dev/null) || rc=$?
	[[ $rc == "$code" ]] || fail "$*: exit code $rc, want $code: $out"
}
says() { [[ $out == *"$1"* ]] || fail "does not say \"$1\": $out"; }
options() { findmnt -n -o OPTIONS "$1"; }
has() { [[ ,$(options "$1"), == *",$2,"* ]] || fail "$1 is not $2: $(options "$1")"; }
gone() { ! findmnt -n "$1" >/dev/null || fail "$1 is still mounted"; }
ended() { # the serving process, which umount waits for
	[[ ! -e /proc/$1/exe ]] || fail "process $1 still serves"
}
serving() { weft status --json "$1" | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["pid"])'; }

# What other tests have mounted is not this namespace's.
findmnt -n -l -t fuse.weft -o TARGET | while read -r other; do umount -i -l "$other"; done
mount -t tmpfs tmpfs "$BASE/ns"
mkdir "$BASE/ns/upper" "$BASE/ns/work" "$BASE/ns/run" "$BASE/ns/a" "$BASE/ns/b"
chmod 755 "$BASE/ns"
mount -t overlay overlay -o "lowerdir=/usr,upperdir=$BASE/ns/upper,workdir=$BASE/ns/work" /usr
mkdir -p /run/mount
mount --bind "$BASE/ns/run" /run/mount
touch /etc/fstab "$BASE/ns/fstab"
mount --bind "$BASE/ns/fstab" /etc/fstab
want 0 "$WEFT" install --prefix /usr
says "installed"
a=$BASE/ns/a b=$BASE/ns/b
`

// inNamespace runs a script of bash in a mount namespace of its own, after the prelude.
func inNamespace(t *testing.T, v *harness.Volume, script string) {
	t.Helper()
	base := harness.Dir(t)
	if err := os.Mkdir(filepath.Join(base, "ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "bash", "-c", prelude+script+"\nexit $failed\n")
	cmd.Env = append(os.Environ(), "BASE="+base, "WEFT="+harness.Bin(t, "weft"), "ADDR="+v.Addr, "DEAD="+harness.FreeAddr(t), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestMount mounts, remounts and unmounts as administrators do, without fstab.
func TestMount(t *testing.T) {
	harness.Need(t, "findmnt", "unshare", "python3")
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	inNamespace(t, v, `
want 0 mount -t weft "$ADDR:/" "$a"
[[ $(findmnt -n -o SOURCE,FSTYPE "$a") =~ ^"$ADDR:/"\ +fuse.weft$ ]] || fail "findmnt: $(findmnt "$a")"
[[ $(findmnt -n -t fuse.weft -o TARGET) == "$a" ]] || fail "findmnt -t fuse.weft: $(findmnt -t fuse.weft)"
df -h "$a" | grep -q "^$ADDR:/ " || fail "df: $(df -h "$a")"
mkdir "$a/sub" "$a/other"
echo text >"$a/sub/file"
pid=$(serving "$a")

# Remounts, as mount(8) does them for what is in no fstab.
want 0 mount -o remount,ro "$a"
has "$a" ro
! touch "$a/sub/file" 2>/dev/null || fail "a file of a mount that is ro was changed"
want 0 mount -o remount,rw,noexec,noatime "$a"
has "$a" rw; has "$a" noexec; has "$a" noatime
touch "$a/sub/file" || fail "not writable again"
exec 7>>"$a/sub/file"
want 32 mount -o remount,ro "$a"
says busy
has "$a" rw
exec 7>&-
want 0 mount -o remount,relatime,exec "$a"
has "$a" relatime
! [[ $(options "$a") == *noexec* ]] || fail "still noexec"
want 1 mount -o remount,nconnect=9 "$a"
says 'nconnect=9'
[[ $(serving "$a") == "$pid" ]] || fail "another process serves after remounts"

# A directory of the volume, which cannot be left upwards.
want 0 mount -t weft -o ro "$ADDR:/sub" "$b"
has "$b" ro
[[ $(ls "$b") == file && $(ls "$b/..") == $(ls "$BASE/ns") ]] || fail "what is in $b: $(ls "$b"), and above it: $(ls "$b/..")"
want 0 umount "$b"
want 32 mount -t weft "$ADDR:/nothing" "$b"
says "nothing"
want 32 mount -t weft "$ADDR:/sub/file" "$b"
says "not a directory"

# Busy, lazy, and by force.
cd "$a"
want 32 umount "$a"
says busy
cd /
want 0 umount "$a"
gone "$a"
ended "$pid"
want 0 mount -t weft "$ADDR:/" "$a"
pid=$(serving "$a")
exec 7>"$a/open"
want 0 umount -l "$a"
gone "$a"
echo more >&7 || fail "a file that was open is not writable after umount -l"
exec 7>&-
for i in {1..50}; do [[ -e /proc/$pid/exe ]] || break; sleep 0.1; done
ended "$pid"
want 0 mount -t weft "$ADDR:/" "$a"
[[ $(cat "$a/open") == more ]] || fail "what was written after umount -l is lost"
want 0 umount -f "$a"
gone "$a"
want 0 mount -t weft "$ADDR:/" "$a"
exec 7<"$a/open"
want 0 umount -r "$a"
has "$a" ro
exec 7<&-
want 0 umount "$a"
gone "$a"

# What helpers are asked besides.
want 0 mount -v -t weft "$ADDR:/" "$a"
says "served by process"
want 0 umount -v "$a"
says "unmounted"
want 0 mount -f -t weft "$ADDR:/" "$a"
gone "$a"
want 1 mount -f -t weft -o nconect=2 "$ADDR:/" "$a"
says 'did you mean "nconnect"'
want 1 mount -t weft -o no-such-option "$ADDR:/" "$a"
want 0 mount -s -t weft -o no-such-option,noatime "$ADDR:/" "$a"
has "$a" noatime
want 0 umount "$a"
want 1 mount -t weft -o vers=3 "$ADDR:/" "$a"
says "leave it out"
want 1 mount -t weft "no source" "$a"
want 32 mount -t weft "$ADDR:/" "$a/nowhere"
want 32 mount -t weft "$DEAD:/" "$a"
says "$DEAD"
want 0 mount.weft "$ADDR:/" "$a" -o rw
want 0 umount.weft "$a"
want 0 mount -t fuse.weft "$ADDR:/" "$a"
want 0 umount "$a"
gone "$a"
`)
}

// TestFstab has file systems mounted by their lines in fstab(5).
func TestFstab(t *testing.T) {
	harness.Need(t, "findmnt", "unshare", "python3")
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	inNamespace(t, v, `
cat >/etc/fstab <<-END
	$ADDR:/  $a  weft  _netdev,nofail,x-systemd.automount,noatime,nosuid,nodev,noexec,nconnect=2  0  0
	$DEAD:/  $b  weft  _netdev,nofail,user,ro  0  0
END
want 0 findmnt --verify --fstab --tab-file /etc/fstab
mount -a 2>/dev/null && fail "mount -a: no error though a server is dead"
for o in rw nosuid nodev noexec noatime; do has "$a" "$o"; done
gone "$b"
pid=$(serving "$a")
mount -a 2>/dev/null # what is mounted is left alone
[[ $(findmnt -n "$a" | wc -l) == 1 && $(serving "$a") == "$pid" ]] || fail "mounted twice: $(findmnt "$a")"
want 0 mount -o remount,ro "$a"
has "$a" ro; has "$a" noatime; has "$a" nosuid
want 0 mount -o remount "$a" # what fstab says
has "$a" rw
fstab=$(</etc/fstab)
echo "${fstab/nconnect=2/nconnect=3}" >/etc/fstab
want 1 mount -o remount "$a"
says 'nconnect=3'
echo "$fstab" >/etc/fstab
want 0 umount "$a"
gone "$a"
ended "$pid"
want 0 mount "$a"
want 0 umount "$a"
gone "$a"

# Servers that are down when the host starts: mounted when they are up.
PORT=${DEAD##*:}
cat >/etc/fstab <<-END
	$DEAD:/  $b  weft  _netdev,bg,retry=5  0  0
END
want 0 mount -a
says "background"
gone "$b"
python3 -c '
import socket, sys, threading
# Takes connections at the address where nobody was and hands on what comes.
host, port = sys.argv[2].rsplit(":", 1)
def copy(a, b):
    while True:
        data = a.recv(65536)
        if not data:
            break
        b.sendall(data)
    b.close()
l = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    c, _ = l.accept()
    s = socket.create_connection((host, int(port)))
    for x, y in ((c, s), (s, c)):
        threading.Thread(target=copy, args=(x, y), daemon=True).start()
' "$PORT" "$ADDR" & proxy=$!
for i in {1..200}; do findmnt -n "$b" >/dev/null && break; sleep 0.1; done
findmnt -n "$b" >/dev/null || fail "is not mounted when its service is up"
want 0 umount "$b"
kill "$proxy"
`)
}

// TestUser mounts as a user who is not root.
func TestUser(t *testing.T) {
	harness.Need(t, "findmnt", "unshare", "python3", "fusermount3", "setpriv")
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	mine := v.Mount()
	if err := os.Chmod(mine.Dir, 0o777); err != nil {
		t.Fatal(err)
	}
	inNamespace(t, v, fmt.Sprintf(`
mknod -m 666 "$BASE/ns/fuse" c 10 229 # not every machine lets users open it
mount --bind "$BASE/ns/fuse" /dev/fuse
as() { setpriv --reuid %[1]d --regid %[1]d --clear-groups "$@"; }
chown %[1]d "$a"
export XDG_RUNTIME_DIR=$BASE/ns/runtime
mkdir "$XDG_RUNTIME_DIR"
chown %[1]d "$XDG_RUNTIME_DIR"
chmod 700 "$XDG_RUNTIME_DIR"
want 0 as weft mount "$ADDR:/" "$a"
as touch "$a/by-a-user" || fail "cannot write"
[[ $(as stat -c %%u "$a/by-a-user") == %[1]d ]] || fail "owner: $(as stat "$a/by-a-user")"
for o in nosuid nodev; do has "$a" "$o"; done
want 0 as weft status "$a"
want 1 as mount.weft "$ADDR:/" "$a" -o remount,ro
says root
want 0 as weft umount "$a"
gone "$a"
`, 65534)) // fusermount3 wants a user who has a name
}

// TestUserNamespace mounts as a user who is root in a user namespace, with a runtime directory and without.
func TestUserNamespace(t *testing.T) {
	harness.Need(t, "findmnt", "unshare", "python3", "setpriv")
	const user = 65534
	as := []string{"setpriv", "--reuid", fmt.Sprint(user), "--regid", fmt.Sprint(user), "--clear-groups", "unshare", "-Urm"}
	if out, err := exec.Command(as[0], append(as[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("missing: user namespaces for users: %v %s", err, out)
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	inNamespace(t, v, fmt.Sprintf(`
mknod -m 666 "$BASE/ns/fuse" c 10 229 # not every machine lets users open it
mount --bind "$BASE/ns/fuse" /dev/fuse
mount -t tmpfs -o mode=1777 none /tmp # where sockets are without a runtime directory
mkdir /tmp/runtime /tmp/mnt
chown %[1]d /tmp/runtime /tmp/mnt
chmod 700 /tmp/runtime
cat >/tmp/inside <<'END'
fail() { echo "in the user namespace: $*"; exit 1; }
[[ $(id -u) == 0 ]] || fail "user $(id -u)"
weft mount "$ADDR:/" /tmp/mnt || fail "mount"
echo text >/tmp/mnt/file || fail "cannot write"
[[ $(cat /tmp/mnt/file) == text ]] || fail "cannot read"
[[ -S $(echo "$1"/mount-*.sock) && -s $1/log/tmp-mnt.log ]] || fail "no socket and log in $1: $(ls -R "$1")"
weft status /tmp/mnt | grep -q "served by" || fail "status"
weft layout /tmp/mnt/file | grep -q device || fail "layout"
# What rootless containers do with their images.
mkdir /tmp/mnt/image /tmp/mnt/from /tmp/mnt/to /tmp/over
echo image >/tmp/mnt/image/file
mount -t tmpfs none /tmp/over && mkdir /tmp/over/{upper,work,root} || fail "tmpfs"
mount -t overlay -o userxattr,lowerdir=/tmp/mnt/image,upperdir=/tmp/over/upper,workdir=/tmp/over/work none /tmp/over/root || fail "overlay"
mkdir /tmp/over/root/nest && mount --bind /tmp/mnt/image /tmp/over/root/nest || fail "bind"
for round in {1..10}; do
	touch /tmp/mnt/from/new && mv /tmp/mnt/from/new /tmp/mnt/to && rm /tmp/mnt/to/new || fail "changes of names"
	[[ $(cat /tmp/over/root/file /tmp/over/root/nest/file) == image$'\n'image ]] || fail "overlay in round $round"
done
echo more >>/tmp/over/root/file
[[ $(cat /tmp/over/root/file /tmp/mnt/image/file) == image$'\n'more$'\n'image ]] || fail "write to the overlay"
umount /tmp/over/root/nest /tmp/over/root /tmp/over || fail "umount of the overlay"
rm -r /tmp/mnt/*
rmdir /tmp/over
weft umount /tmp/mnt || fail "umount"
END
want 0 env XDG_RUNTIME_DIR=/tmp/runtime %[2]s bash /tmp/inside /tmp/runtime/weft
want 0 env -u XDG_RUNTIME_DIR %[2]s bash /tmp/inside /tmp/weft-%[1]d
`, user, strings.Join(as, " ")))
}

// TestInstalled looks at what weft install makes.
func TestInstalled(t *testing.T) {
	harness.Need(t, "groff", "zsh", "fish", "systemd-analyze", "setpriv")
	root := harness.Dir(t)
	said := harness.Weft(t, "install", "--root", root, "--prefix", "/usr")
	if !strings.HasPrefix(said, "installed ") {
		t.Errorf("install: %s", said)
	}
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, "usr", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	// The page, --help and the parser have the same options.
	help := harness.Weft(t, "mount", "--help")
	plain := strings.NewReplacer(`\-`, "-", `\(aq`, "'", `\(dq`, `"`, `\e`, `\`)
	page := plain.Replace(read("share/man/man8/mount.weft.8"))
	options := 0
	for line := range strings.Lines(help) {
		usage := strings.Fields(line)
		if !strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "   ") || len(usage) == 0 || strings.HasPrefix(usage[0], "-") {
			continue
		}
		options++
		if !strings.Contains(page, fmt.Sprintf(".TP\n.B %q\n", usage[0])) {
			t.Errorf("mount.weft(8) does not have %s", usage[0])
		}
	}
	if n := strings.Count(page[strings.Index(page, `"OPTIONS FOR -o"`):], ".TP\n"); options < 50 || n != options {
		t.Errorf("mount.weft(8) has %d options, --help %d", n, options)
	}
	all := plain.Replace(read("share/man/man8/weft.8"))
	for _, want := range []string{`.SS "weft layout set DIR`, `.B "--stripe-unit string"`, `.SS "weft bench [DIR]`, `.SH "EXIT STATUS"`} {
		if !strings.Contains(all, want) {
			t.Errorf("weft(8) does not have %s", want)
		}
	}
	if all := plain.Replace(read("share/man/man8/weftd.8")); !strings.Contains(all, `.SS "weftd meta --dir DIR`) || !strings.Contains(all, `.B "--listen string"`) {
		t.Error("weftd(8) does not have the options of weftd meta")
	}
	pages, _ := filepath.Glob(filepath.Join(root, "usr/share/man/man8/*.8"))
	if len(pages) != 6 {
		t.Errorf("pages: %v", pages)
	}
	for _, page := range pages {
		if out, err := exec.Command("groff", "-man", "-ww", "-z", "-K", "utf8", "-T", "utf8", page).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v %s", page, err, out)
		}
	}
	// Shells take the completions, and bash completes.
	for shell, name := range map[string]string{"bash": "share/bash-completion/completions/weft", "zsh": "share/zsh/vendor-completions/_weft", "fish": "share/fish/vendor_completions.d/weft.fish"} {
		if out, err := exec.Command(shell, "-n", filepath.Join(root, "usr", name)).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v %s", name, err, out)
		}
	}
	for line, want := range map[string]string{
		"weft lay":               "layout",
		"weft layout m":          "move",
		"weft layout set --stri": "--stripe-unit --stripe-count",
		"weft admin q":           "quota",
		"weft admin quota s":     "set",
		"weft mount -o ro,nosu":  "ro,nosuid",
		"weft umount --fo":       "--force",
	} {
		words := strings.Fields(line)
		script := fmt.Sprintf(`. %s; compopt() { :; }; COMP_WORDS=(%s); COMP_CWORD=%d; _weft; echo "${COMPREPLY[*]}"`, filepath.Join(root, "usr/share/bash-completion/completions/weft"), line, len(words)-1)
		if out, err := exec.Command("bash", "-c", script).CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("%s: %s %v, want %s", line, out, err, want)
		}
	}
	// Units are hardened, and the data server can do with what they leave it.
	for _, unit := range []string{"weftd-meta", "weftd-data"} {
		file := filepath.Join(root, "usr/lib/systemd/system", unit+".service")
		text := strings.ReplaceAll(read("lib/systemd/system/"+unit+".service"), "/usr/bin/", root+"/usr/bin/") // where it is now
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("systemd-analyze", "verify", "--man=no", file).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v %s", unit, err, out)
		}
		if out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=30", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v %s", unit, err, out)
		}
	}
	said = harness.Weft(t, "install", "--root", root, "--prefix", "/usr", "--remove")
	left, _ := filepath.Glob(filepath.Join(root, "usr/*bin/*"))
	if !strings.HasPrefix(said, "removed ") || len(left) > 0 {
		t.Errorf("remove: %s, left %v", said, left)
	}
}

// TestConfined has a data server with the capabilities that its unit leaves it, and a metadata service with those of its own.
func TestConfined(t *testing.T) {
	harness.Need(t, "setpriv")
	base := harness.Dir(t)
	harness.Weft(t, "install", "--root", base, "--prefix", "/usr")
	confined := func(unit string, args ...string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(base, "usr/lib/systemd/system", unit))
		if err != nil {
			t.Fatal(err)
		}
		_, caps, _ := strings.Cut(string(text), "\nCapabilityBoundingSet=")
		caps, _, _ = strings.Cut(caps, "\n")
		set := "-all"
		for _, c := range strings.Fields(caps) {
			set += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
		}
		cmd := exec.Command("setpriv", append([]string{"--no-new-privs", "--bounding-set", set, "--", harness.Bin(t, "weftd")}, args...)...)
		log, err := os.Create(filepath.Join(base, unit+".log"))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Signal(syscall.SIGTERM)
			if err := cmd.Wait(); err != nil {
				t.Errorf("%s: %v", unit, err)
			}
			if t.Failed() {
				said, _ := os.ReadFile(log.Name())
				t.Logf("%s:\n%s", unit, said)
			}
		})
		return args[len(args)-1]
	}
	data := confined("weftd-data.service", "data", "--dir", filepath.Join(base, "data"), "--listen", harness.FreeAddr(t))
	meta := confined("weftd-meta.service", "meta", "--dir", filepath.Join(base, "meta"), "--data-server", data+":/", "--listen", harness.FreeAddr(t))
	mnt := filepath.Join(base, "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "mount", "-o", "retry=1", meta+":/", mnt) // they may still be starting
	defer harness.Weft(t, "umount", mnt)
	want := strings.Repeat("0123456789abcdef", 1<<16)
	for name, uid := range map[string]int{"root's": 0, "another's": 4711} {
		name = filepath.Join(mnt, name)
		if err := os.WriteFile(name, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(name, uid, uid); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if err := os.Truncate(name, 5); err != nil {
			t.Error(err)
		}
	}
	if said := harness.Weft(t, "status", mnt); !strings.Contains(said, "local: yes") {
		t.Errorf("status: %s", said)
	}
	if err := os.Remove(filepath.Join(mnt, "root's")); err != nil {
		t.Error(err)
	}
}
