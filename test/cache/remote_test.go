package cache

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// networkEnv tells the test binary that it is in a network namespace of its own.
const networkEnv = "WEFT_TEST_NETWORK"

// TestRemote prefetches a directory (2 GiB of it with -long) from data servers behind a network link, on a terminal, and reads it twice:
// the second time by no request to them.
func TestRemote(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "unshare", "ip", "script")
	if os.Getenv(networkEnv) == "" {
		cmd := exec.Command("unshare", "-n", "sh", "-c", `ip link set lo up && exec "$@"`, "sh", os.Args[0], "-test.run=^TestRemote$", "-test.v",
			"-o="+*options, fmt.Sprintf("-long=%t", *long))
		cmd.Env = append(os.Environ(), networkEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Error(err)
		}
		return
	}
	count, size := 8, 4<<20
	if *long {
		count, size = 32, 64<<20
	}
	harness.Run(t, "", "sh", "-c", "ip link add weft0 type veth peer name weft1 && ip addr add 198.18.79.1/24 dev weft0 && ip link set weft0 up")
	const here, there, port = "198.18.79.1", "198.18.79.2", "7049"
	base := harness.Dir(t)
	far := exec.Command("unshare", "-n", "--kill-child", "sh", "-c", `ip link set lo up
until ip link show weft1 >/dev/null 2>&1; do sleep 0.05; done
ip addr add `+there+`/24 dev weft1 && ip link set weft1 up && exec "$@"`, "sh",
		harness.Bin(t, "weftd"), "single", "--dir", filepath.Join(base, "far"), "--listen", there+":"+port, "--localio=off")
	far.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := far.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		far.Process.Kill()
		far.Wait()
	})
	harness.Await(t, "a network namespace", func() bool {
		ours, err := os.Readlink("/proc/self/ns/net")
		theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", far.Process.Pid))
		return err == nil && err2 == nil && ours != theirs
	})
	harness.Run(t, "", "ip", "link", "set", "weft1", "netns", fmt.Sprint(far.Process.Pid))
	harness.AwaitListen(t, there+":"+port)
	m := harness.MountAt(t, there+":"+port, mountOptions()...)
	for i := range count {
		write(t, fmt.Sprintf("%s/%d", m.Dir, i), content(uint64(i), size))
	}
	harness.Weft(t, "sync", m.Dir)
	local := here + ":7050"
	harness.Spawn(t, "weftd", "data", "--dir", filepath.Join(base, "near"), "--listen", local)
	harness.AwaitListen(t, local)
	harness.Weft(t, "admin", "device", "add", "nfs://"+local+"/", "--server", there+":"+port)

	out := harness.Run(t, base, "script", "-qec", harness.Bin(t, "weft")+" prefetch "+m.Dir, "/dev/null")
	if !regexp.MustCompile(`\r\x1b\[K\[[#-]{20}\] .*\r\x1b\[Kcached `).MatchString(out) ||
		!regexp.MustCompile(fmt.Sprintf(`cached %d files with .* in .* \(.*/s\)`, count)).MatchString(out) {
		t.Errorf("on a terminal: %q", out)
	}
	t.Logf("%s", out)
	before, far0 := reads(t, m)
	for i := range count {
		check(t, fmt.Sprintf("%s/%d", m.Dir, i), content(uint64(i), size))
	}
	after, far1 := reads(t, m)
	// What is late is asked from another data server as well, which is bounded to a twentieth.
	if total := uint64(count * size); after == before || far1-far0 > total/10 {
		t.Errorf("%d requests were local, and %d bytes of %d came from elsewhere", after-before, far1-far0, total)
	}
	t.Logf("%d requests were local, and %d bytes of %d came from elsewhere", after-before, far1-far0, count*size)
	m.Unmount()
}
