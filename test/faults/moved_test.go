package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// moves is run by bash in a network and a mount namespace of its own. Data servers and services come back under their
// names at other addresses, while a write waits for them.
const moves = `
set -eu
ip link set lo up
for i in 1 2 3 4; do ip addr add 10.9.0.$i/32 dev lo; done
cd "$BASE"
mkdir mnt
touch hosts
mount --bind hosts /etc/hosts
hosts() { # META DATA...: where metahost and datahost are
	{
		echo 127.0.0.1 localhost
		echo 10.9.0.$1 metahost
		for i in "${@:2}"; do echo 10.9.0.$i datahost; done
	} >/etc/hosts
}
listens() { until (: </dev/tcp/$1/$2) 2>/dev/null; do sleep 0.1; done; }
data() { # ADDRESS
	"$BIN/weftd" data --dir d --listen $1:2049 --localio=off 2>>data.log & dp=$!
	listens ${1:-10.9.0.3} 2049
}
meta() { # ADDRESS
	"$BIN/weftd" meta --dir m --listen $1:7049 --data-server datahost:2049:/ 2>>meta.log & mp=$!
	listens $1 7049
}
end() { kill "$@" || true; wait "$@" || true; }
finish() {
	local rc=$?
	[[ $rc == 0 ]] || tail -n 20 *.log
	timeout 60 "$BIN/weft" umount --force mnt || umount -l mnt || true
	end $dp $mp
	exit $rc
}
write() { # NAME: begins a write that waits
	timeout 120 sh -c "echo $1 >mnt/$1 && sync mnt/$1" & wp=$!
}
want() { [[ $(timeout 60 cat mnt/$1) == $1 ]] || { echo "FAIL: $1 is not what was written"; exit 1; }; }

dp= mp=
trap finish EXIT
hosts 1 1
data 10.9.0.1
meta 10.9.0.1
"$BIN/weft" mount -o log="$BASE/mount.log" metahost:/ mnt
write before; wait $wp

# The data server alone.
end $dp
write alone
hosts 1 2
data 10.9.0.2
wait $wp
want before; want alone

# Both at once.
end $dp $mp
write both
hosts 3 3
data 10.9.0.3
meta 10.9.0.3
wait $wp
want before; want both

# An address more, and then only that one.
if [[ $LONG ]]; then
	end $dp
	data ''
	write more; wait $wp
	hosts 3 3 4
	until grep -qF '10.9.0.4:2049' mount.log; do sleep 1; done
	hosts 3 4
	until grep -qF 'addresses=[10.9.0.4:2049]' mount.log; do sleep 1; done
	write last; wait $wp
	want more; want last
fi
`

// TestMoved: a mount finds a data server again that is at another address, also when the service has moved with it.
func TestMoved(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "unshare", "ip", "bash", "timeout")
	cmd := exec.Command("unshare", "--net", "--mount", "--propagation", "private", "bash", "-c", moves)
	cmd.Env = append(os.Environ(), "BASE="+harness.Dir(t), "BIN="+filepath.Dir(harness.Bin(t, "weft")), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin", "LONG=")
	if *long {
		cmd.Env = append(cmd.Env, "LONG=1")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
