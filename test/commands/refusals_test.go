package commands

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/rpctls/tlstest"
	"github.com/weftfs/weft/test/harness"
)

// TestRefusals has what cannot be mounted, or started, say what is wrong and what to do.
func TestRefusals(t *testing.T) {
	harness.NeedMount(t)
	dir, at, addr := harness.Dir(t), harness.Dir(t), harness.FreeAddr(t)
	var service *harness.Proc
	serve := func(args ...string) {
		t.Helper()
		if service != nil {
			service.End(syscall.SIGTERM)
		}
		service = harness.Spawn(t, "weftd", append([]string{"meta", "--dir", dir, "--listen", addr}, args...)...)
		harness.AwaitListen(t, addr)
	}
	refused := func(want string, program string, args ...string) {
		t.Helper()
		cmd := exec.Command(harness.Bin(t, program), args...)
		out, err := cmd.CombinedOutput()
		if err == nil || strings.Count(string(out), "\n") != 1 || !strings.Contains(string(out), want) {
			t.Errorf("%v: %v, want a line with %q\n%s", cmd.Args, err, want, out)
		}
		if harness.Mounted(at) {
			t.Errorf("%v: mounted", cmd.Args)
			exec.Command("umount", "-l", at).Run()
		}
	}

	serve()
	m := harness.MountAt(t, addr)
	for _, name := range []string{"a", "a/b", "c"} {
		if err := os.Mkdir(filepath.Join(m.Dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("b", filepath.Join(m.Dir, "a/link")); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	refused("the volume has no directory /none: mount "+addr+":/ and make it there", "weft", "mount", addr+":/none/below", at)
	refused("the volume has no directory /a/none: mount "+addr+":/a and make it there", "weft", "mount", addr+":/a/none", at)
	refused("/a/link of the volume is not a directory: mount the one that it is in, "+addr+":/a", "weft", "mount", addr+":/a/link", at)
	refused("the volume has no directory /none: make that directory", "weft", "admin", "client", "set", "192.0.2.1(rw,path=/none)", "--server", addr)
	refused(`option "mirror-timeout=1": a time has a unit: 1s`, "weft", "mount", "-o", "mirror-timeout=1", addr+":/", at)

	serve("--export", "*(rw,no_root_squash,path=/a)")
	for _, top := range []string{"/", "/c", "/ab"} {
		refused("use /a of the volume alone (path=), and not "+top+": mount "+addr+":/a", "weft", "mount", addr+":"+top, at)
	}
	for _, top := range []string{"/a", "/a/b"} {
		harness.Weft(t, "mount", addr+":"+top, at)
		harness.Weft(t, "umount", at)
	}
	serve("--export", "*(rw,no_root_squash,path=/none)")
	refused("the rule for * says path=/none, and the volume has no directory /none: make that directory, or name another one", "weft", "mount", addr+":/", at)

	authority := tlstest.New(t)
	files := authority.IssueClient("trainer-1")
	for _, args := range [][]string{{"meta", "--dir", harness.Dir(t)}, {"single", "--dir", harness.Dir(t)}, {"data", "--dir", harness.Dir(t)}} {
		args = append(args, "--listen", harness.FreeAddr(t), "--tls-dir", filepath.Dir(files.Cert))
		refused(`of "trainer-1", is a client's`, "weftd", args...)
	}
}
