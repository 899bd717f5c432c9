package interop

import (
	"net"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestKernelClient has the kernel's NFSv3 client use our data server like any file system of regular files.
func TestKernelClient(t *testing.T) {
	harness.StartVM(t)
	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "data", "--dir", harness.Dir(t), "--listen", addr)
	harness.AwaitListen(t, addr)
	_, port, _ := net.SplitHostPort(addr)
	out := harness.Guest(t, strings.ReplaceAll(`
		mkdir -p /mnt/w
		mount -t nfs -o vers=3,proto=tcp,mountproto=tcp,port=PORT,mountport=PORT,nolock,hard 10.0.2.2:/ /mnt/w
		cd /mnt/w
		mkdir -p tree/sub
		# Regular files only: an export has no links and devices.
		(cd /etc && find . -type f | tar -cf - --no-recursion -T -) | tar -C tree -xf -
		(cd tree && find . -type f | while read f; do cmp "$f" "/etc/$f"; done)
		fio --name=v --rw=randrw --bsrange=4k-64k --size=8m --numjobs=2 --verify=crc32c --verify_fatal=1 --do_verify=1 --end_fsync=1 >/dev/null
		mv tree/sub tree/moved
		rmdir tree/moved
		i=0; while [ $i -lt 500 ]; do : >tree/n$i; i=$((i+1)); done
		ls tree | grep -c '^n[0-9]'
		truncate -s 5 v.0.0
		stat -c %s v.0.0
		ln -s x link 2>/dev/null || echo no links
		rm -rf tree v.* local-*
		ls -A | wc -l
		cd /
		umount /mnt/w`, "PORT", port))
	if want := "500\n5\nno links\n0\n"; out != want {
		t.Fatalf("the guest says %q, want %q", out, want)
	}
}
