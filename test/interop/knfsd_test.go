package interop

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestKernelServer has the kernel's NFSv3 server as a data server: exports that are good, and what is said of others.
func TestKernelServer(t *testing.T) {
	ports := harness.StartVM(t)
	harness.Guest(t, `
		mkdir -p /export/ds1/squashed /export/ds1/readonly /export/ds1/secure
		cat >>/etc/exports <<-END
			/export/ds1/squashed *(rw,insecure,root_squash,no_subtree_check,fsid=101)
			/export/ds1/readonly *(ro,insecure,no_root_squash,no_subtree_check,fsid=102)
			/export/ds1/secure *(rw,secure,no_root_squash,no_subtree_check,fsid=103)
		END
		exportfs -ra`)
	addr := harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", addr)
	harness.AwaitListen(t, addr)
	add := func(export string) (string, error) {
		url := "nfs://" + ports["LAB_HOST"] + ":" + ports["LAB_NFS_PORT"] + export + "?mountport=" + ports["LAB_MOUNTD_PORT"]
		out, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "add", "--server", addr, url).CombinedOutput()
		return string(out), err
	}
	for export, want := range map[string]string{
		"/export/ds1/squashed": "no_root_squash", "/export/ds1/readonly": "read-only", "/export/none": "does not export",
	} {
		if out, err := add(export); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, %q; want %q", export, err, out, want)
		}
	}
	// The port that a connection comes from is kept by the virtual machine, if it is reserved.
	for _, export := range []string{"/export/ds0", "/export/ds2", "/export/ds1/secure"} {
		if out, err := add(export); err != nil {
			t.Fatalf("%s: %v\n%s", export, err, out)
		}
	}
	m := harness.MountAt(t, addr)
	harness.Run(t, m.Dir, "cp", "-a", filepath.Join(harness.Root, "layout"), "tree")
	harness.Run(t, m.Dir, "diff", "-r", filepath.Join(harness.Root, "layout"), "tree")
	harness.Need(t, "fio")
	harness.Run(t, m.Dir, "fio", "--name=v", "--rw=randwrite", "--bsrange=4k-256k", "--size=16m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--end_fsync=1")
	m.Unmount()
}
