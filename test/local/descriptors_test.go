package local

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

// fewFiles is how many files a mount with few descriptors reads: more than it may have descriptors.
const fewFiles = 150

// soon runs a command that hangs where descriptors are leaked, or an accept loop has ended.
func soon(t *testing.T, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v (%v)\n%s", name, strings.Join(args, " "), err, context.Cause(ctx), out)
	}
}

// A mount with fewer descriptors than files reads and writes them all without a shortage: what exceeds the share of
// lent ones goes by RPC. When there are none at all, as another limit sees to, it serves on, also commands, with one
// line in the log.
func TestFewDescriptors(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	a := v.Mount(mountOptions()...)
	contents := func(i int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%03d ", i), 750) }
	name := func(m *harness.Mount, i int) string { return fmt.Sprintf("%s/%d", m.Dir, i) }
	for i := range fewFiles {
		if err := os.WriteFile(name(a, i), contents(i), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m := v.MountUnder([]string{"sh", "-c", `ulimit -n 256; exec "$@"`, "sh"}, mountOptions()...)
	soon(t, "sh", "-c", `cat "$1"/* | cmp - "$2"`, "sh", m.Dir, func() string {
		all := t.TempDir() + "/all"
		soon(t, "sh", "-c", `cat "$1"/* >"$2"`, "sh", a.Dir, all)
		return all
	}())
	for i := fewFiles; i < 2*fewFiles; i++ { // which nothing syncs
		if err := os.WriteFile(name(m, i), contents(i), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	soon(t, harness.Bin(t, "weft"), "status", m.Dir)
	if strings.Contains(m.Log(), "no descriptors are left") {
		t.Errorf("the shares are too large:\n%s", m.Log())
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.Pid()))
	if err != nil || len(fds) > 192 {
		t.Errorf("%d of 256 descriptors are in use, %v", len(fds), err)
	}

	var old unix.Rlimit
	if err := unix.Prlimit(m.Pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 8, Max: 256}, &old); err != nil {
		t.Fatal(err)
	}
	for i := range 2 * fewFiles {
		same(t, name(m, i), contents(i))
	}
	for i := range 20 {
		if err := os.WriteFile(name(m, i), contents(i+1), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(m.Log(), "no descriptors are left"); n != 1 {
		t.Errorf("the log says %d times that there are none:\n%s", n, m.Log())
	}
	if err := unix.Prlimit(m.Pid(), unix.RLIMIT_NOFILE, &old, nil); err != nil {
		t.Fatal(err)
	}
	soon(t, harness.Bin(t, "weft"), "status", m.Dir)
	for i := range 20 {
		same(t, name(a, i), contents(i+1))
	}
	m.Unmount()
	if strings.Contains(m.Log(), "lost") || strings.Contains(m.Log(), "level=ERROR") && strings.Count(m.Log(), "level=ERROR") != 1 {
		t.Errorf("other trouble:\n%s", m.Log())
	}
}
