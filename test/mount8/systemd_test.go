package mount8

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// hostPrelude makes a host of its own: the files of this one below what is written, namespaces of every kind, and systemd as process 1, which boots as
// often as it is told.
const hostPrelude = `
set -u
failed=0
fail() { echo "FAIL: $*"; failed=1; }
die() { fail "$@"; cat "$BASE/ns/console"; exit 1; }
# within waits for a command to succeed, up to so many seconds, and on slow machines as many times as long.
within() {
	local until=$((SECONDS + $1 * ${SLOW:-1})) what=$*
	shift
	until "$@" >/dev/null 2>&1; do
		((SECONDS <= until)) || { fail "not within time: $what"; return 1; }
		sleep 0.1
	done
}
not() { ! "$@"; }

mount -t tmpfs tmpfs "$BASE/ns"
host=$BASE/ns/host
mkdir "$BASE/ns/upper" "$BASE/ns/work" "$BASE/ns/srv" "$BASE/ns/cgroup" "$host"
mount -t overlay overlay -o "lowerdir=/,upperdir=$BASE/ns/upper,workdir=$BASE/ns/work" "$host"
# There is nothing of this host's own services, nor of what is done to a kernel at boot.
rm -rf "$host"/lib/systemd/system/*.wants "$host/etc/systemd/system" "$host/run" "$host/tmp" "$host/srv" "$host/mnt"
find "$host"/lib/systemd/system-generators ! -type d ! -name systemd-fstab-generator -delete
mkdir -p "$host"/{etc/systemd/system,etc/weft,run,tmp,srv,mnt,old}
printf '[Manager]\nDefaultTimeoutStopSec=5s\n' >"$host/etc/systemd/system.conf"
printf '[Unit]\nRequires=basic.target\nWants=local-fs.target remote-fs.target multi-user.target\nAfter=local-fs.target remote-fs.target\n' >"$host/etc/systemd/system/boot.target"
cat >"$BASE/ns/setup" <<'END'
set -eu
cd "$1"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs sys sys
mount -t cgroup2 cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --bind ../srv srv # an overlay gives no file handles
ip link set lo up
# At port 7 there is no answer at all.
nft 'add table ip silent; add chain ip silent in { type filter hook input priority 0; }; add rule ip silent in tcp dport 7 drop'
pivot_root . old
umount -l /old
export container=weft
exec /lib/systemd/systemd --unit=boot.target
END
mount -t cgroup2 cgroup "$BASE/ns/cgroup"
cgroup=$BASE/ns/cgroup/weft-test-$$
mkdir "$cgroup"
boot() {
	(echo $BASHPID >"$cgroup/cgroup.procs" && exec unshare --fork --pid --mount --cgroup --uts --ipc --net bash "$BASE/ns/setup" "$host") </dev/null >"$BASE/ns/console" 2>&1 &
	outer=$!
	within 10 pgrep -P $outer || die "there is no process 1"
	init=$(pgrep -P $outer)
	within 20 on systemctl is-active boot.target || { on systemctl list-jobs; die "it does not boot"; }
}
on() { nsenter -t "$init" -m -p -n -i -u -C "$@"; } # runs a command there
poweroff() {
	local began=$SECONDS
	on systemctl --no-block poweroff 2>/dev/null
	while [[ -e /proc/$init ]]; do
		((SECONDS - began < 60 * ${SLOW:-1})) || { on systemctl list-jobs; die "it does not go off"; }
		sleep 0.1
	done
	wait $outer
}
finish() {
	kill -KILL "$init" 2>/dev/null
	wait
	find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null
}
trap finish EXIT
"$WEFT" install --prefix /usr --root "$host" >/dev/null || die "weft install"
`

// bootScript comes after that prelude. In it the host is $host while it is off, and on COMMAND runs something there. The host's fstab has weft
// mounts: it boots while no service runs, then beside services, which are units themselves, has a unit with PrivateMounts=, and goes off with a data
// server that is gone.
const bootScript = `
echo 'OPTIONS=--dir /srv/weft --listen 127.0.0.1:2049' >"$host/etc/weft/data.conf"
echo 'OPTIONS=--dir /var/lib/weft --listen 127.0.0.1:7049 --data-server 127.0.0.1:2049:/' >"$host/etc/weft/meta.conf"
local=x-systemd.after=weftd-meta.service,x-systemd.after=weftd-data.service
cat >"$host/etc/fstab" <<END
127.0.0.1:7049:/  /mnt/plain   weft  _netdev,nofail,noatime,nosuid,retry=1,$local  0  0
127.0.0.1:7049:/  /mnt/auto    weft  _netdev,nofail,noatime,x-systemd.automount,x-systemd.idle-timeout=2s,$local  0  0
127.0.0.1:7049:/  /mnt/retry   weft  _netdev,nofail,retry=10000,x-systemd.mount-timeout=infinity,$local  0  0
127.0.0.1:7049:/  /mnt/bg      weft  _netdev,nofail,bg,$local  0  0
127.0.0.1:9:/     /mnt/refused weft  _netdev,nofail  0  0
127.0.0.1:7:/     /mnt/silent  weft  _netdev,nofail,x-systemd.mount-timeout=8s  0  0
END
mkdir "$host"/mnt/{plain,auto,retry,bg,refused,silent}
state() { [[ $(on systemctl show -P ActiveState "mnt-$1.$2") == "$3" ]]; }
mounted() { on grep -q " /mnt/$1 .* - fuse.weft " /proc/self/mountinfo; } # without touching it

# Services that are down, refuse, or do not answer keep no host from starting.
boot
! mounted '[a-z]*' || fail "mounted without a service: $(on findmnt)"
within 10 state refused mount failed
state auto automount active || fail "no automount"
state silent mount activating || state silent mount failed || fail "the mount of a silent service: $(on systemctl show -P ActiveState mnt-silent.mount)"
within 20 state silent mount failed

# They come: what waits is mounted, and what is used.
on systemctl start weftd-data weftd-meta || fail "the services do not start: $(on systemctl status weftd-data weftd-meta)"
for name in plain retry bg; do
	within 20 mounted $name
	within 5 state $name mount active
done
[[ ,$(on findmnt -n -o OPTIONS /mnt/plain), == *,nosuid,noatime,* ]] || fail "options: $(on findmnt -n -o OPTIONS /mnt/plain)"
mounted auto && fail "mounted before it is used"
for round in 1 2; do
	on timeout 40 touch /mnt/auto/used-$round || fail "the automount does not mount"
	mounted auto || fail "used, and not mounted"
	within 15 not mounted auto
	within 20 state auto mount inactive
	[[ -z $(on pgrep -f ' /mnt/auto$') ]] || fail "a process serves what is unmounted for lack of use"
done
[[ $(on ls /mnt/plain) == $'used-1\nused-2' ]] || fail "what there is: $(on ls /mnt/plain)"

# fstab is changed.
sed -i '/plain/s/noatime/ro/' "$host/etc/fstab"
on systemctl daemon-reload
on systemctl reload mnt-plain.mount || fail "remount"
[[ ,$(on findmnt -n -o OPTIONS /mnt/plain), == *,ro,* ]] || fail "not remounted ro: $(on findmnt -n -o OPTIONS /mnt/plain)"
sed -i '/plain/s/ro,/noatime,/' "$host/etc/fstab"
on systemctl daemon-reload
on systemctl reload mnt-plain.mount || fail "remount"

# A unit with mounts of its own inside of weft keeps them, and its paths, while names change there through two mounts.
cat >"$host/etc/systemd/system/private.service" <<'END'
[Unit]
RequiresMountsFor=/mnt/plain
[Service]
PrivateMounts=yes
BindPaths=/mnt/plain/unit/data:/mnt/plain/unit/bound
WorkingDirectory=/mnt/plain/unit/work
ExecStart=/bin/sh -c 'mount -t tmpfs tmpfs ../nest && echo inside >../nest/file && exec /mnt/plain/unit/sleep inf'
END
on mkdir -p /mnt/plain/unit/{data,bound,work,nest}
on sh -c 'cp /bin/sleep /mnt/plain/unit && echo bound >/mnt/plain/unit/data/file' || fail "write"
on systemctl daemon-reload
on systemctl start private || fail "the unit does not start: $(on systemctl status private)"
pid=$(on systemctl show -P MainPID private)
inside() { on nsenter -t "$pid" -m "$@"; }
within 10 inside test -e /mnt/plain/unit/nest/file
on test -e /mnt/plain/unit/nest/file && fail "what the unit has mounted is seen outside"
for round in {1..10}; do
	for mount in plain retry; do
		on sh -ec 'cd /mnt/$0/unit; echo >new; mv new nest/new; mv nest/new bound/new; rm bound/new; mkdir new; mv new work/new; mv work/new data/new; rmdir data/new' $mount ||
			fail "changes of names through $mount"
	done
	inside sh -ec 'cd /mnt/plain/unit; [ "$(cat nest/file bound/file)" = "inside
bound" ]; [ "$(readlink /proc/$0/exe) $(readlink /proc/$0/cwd)" = "$PWD/sleep $PWD/work" ]; [ "$(ls /proc/$0/cwd/..)" = "$(ls)" ]' "$pid" ||
		{ fail "round $round: in the unit: $(inside grep /mnt/plain /proc/self/mountinfo; inside ls -l /proc/$pid)"; break; }
	sleep 0.1
done
[[ $(on systemctl is-active private) == active ]] || fail "the unit has ended: $(on systemctl status private)"

# Nothing that was written is lost when the host goes off, though nobody has called sync(2).
head -c 30000000 /dev/urandom >"$BASE/ns/srv/source"
on cp /srv/source /mnt/plain/copy || fail "write"
on cp /srv/source /mnt/auto/copy2 || fail "write"
poweroff

# Beside services that start at the same time.
systemctl --root="$host" enable weftd-meta weftd-data 2>/dev/null || fail "enable"
boot
within 20 mounted plain
for name in copy copy2; do
	on cmp /srv/source /mnt/plain/$name || fail "/mnt/plain/$name is not what was written"
done

# A data server that is gone does not keep it from going off.
on systemctl stop weftd-data
on dd if=/srv/source of=/mnt/plain/lost bs=1M status=none 2>/dev/null &
writer=$!
within 10 on test -e /mnt/plain/lost
poweroff
wait $writer
exit $failed
`

func TestSystemd(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "systemctl", "unshare", "nsenter", "pgrep", "ip", "nft")
	base := harness.Dir(t)
	if err := os.Mkdir(filepath.Join(base, "ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "private", "bash", "-c", hostPrelude+bootScript)
	cmd.Env = append(os.Environ(), "BASE="+base, "WEFT="+harness.Bin(t, "weft"), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its host
	cmd.WaitDelay = 20 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestSystemdGuest is TestSystemd in the virtual machine, with its kernel and this machine's systemd.
func TestSystemdGuest(t *testing.T) {
	share := harness.Dir(t)
	harness.StartVM(t, "--share", share)
	harness.Need(t, "systemctl", "dpkg", "ldd")
	if err := os.WriteFile(filepath.Join(share, "script"), []byte(hostPrelude+bootScript), 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Run(t, "", "cp", harness.Bin(t, "weft"), harness.Bin(t, "weftd"), share)
	harness.Run(t, "", "bash", "-c", `
set -eu -o pipefail
mapfile -t files < <(dpkg -L systemd | while read -r f; do [[ -d $f ]] || echo "$f"; done)
mapfile -t libs < <(ldd /lib/systemd/systemd /bin/systemctl /lib/systemd/systemd-* 2>/dev/null | sed -n 's/.* => \(\/.*\) (.*/\1/p' | sort -u)
tar -C / -cf "$0" "${files[@]#/}"
tar -C / -rhf "$0" "${libs[@]#/}"`, filepath.Join(share, "systemd.tar"))
	t.Log(harness.Guest(t, `
modprobe overlay
tar -C / --skip-old-files -xf /share/systemd.tar
ldconfig
mkdir -p /tmp/base/ns
BASE=/tmp/base WEFT=/share/weft SLOW=5 timeout 900 unshare --mount --propagation private bash /share/script 2>&1
echo "Linux $(uname -r), $(systemctl --version | head -n 1)"`))
}
