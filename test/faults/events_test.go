package faults

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var events = flag.Int("events", 6, "how many events one data server after the other has in TestEvents")

// networkEnv tells the test binary that it is in a network namespace of its own.
const networkEnv = "WEFT_TEST_NETWORK"

// TestEvents takes one of four data servers away at a time, by chance: killed, restarted, stopped, silent, full. Meanwhile fio
// writes and verifies, and a tree is copied and compared. With one copy of everything callers wait for the server; with two they
// do not notice. Nobody gets an error or a wrong byte.
func TestEvents(t *testing.T) {
	harness.NeedMount(t)
	harness.Need(t, "fio", "diff")
	if !ownNetwork(t, "TestEvents") {
		return
	}
	t.Run("hard", func(t *testing.T) { takeAway(t, 1, kill, restart, pause, silence) })
	t.Run("mirrors", func(t *testing.T) { takeAway(t, 2, kill, restart, pause, silence, fill) })
}

// ownNetwork runs a test again in a network namespace of its own, where nft can drop packets. It returns false in the process that did so.
func ownNetwork(t *testing.T, name string) bool {
	t.Helper()
	harness.Need(t, "unshare", "ip", "nft")
	if os.Getenv(networkEnv) != "" {
		harness.Run(t, "", "nft", "add table inet weft; add chain inet weft in { type filter hook input priority 0; }")
		return true
	}
	args := append([]string{"-n", "sh", "-c", `ip link set lo up && exec "$@"`, "sh", os.Args[0]}, os.Args[1:]...)
	cmd := exec.Command("unshare", append(args, "-test.run=^"+name+"$", "-test.v", fmt.Sprint("-seed=", *seed))...)
	cmd.Env = append(os.Environ(), networkEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}

// An event takes a data server away for some time.
type event func(t *testing.T, d *harness.DataServer, away time.Duration)

func kill(_ *testing.T, d *harness.DataServer, away time.Duration) {
	d.Kill()
	time.Sleep(away)
	d.Forget()
	d.Start()
}

func restart(_ *testing.T, d *harness.DataServer, _ time.Duration) {
	d.Stop()
	d.Start()
}

func pause(_ *testing.T, d *harness.DataServer, away time.Duration) {
	d.Pause()
	time.Sleep(away)
	d.Continue()
}

// silence drops every packet from and to it.
func silence(t *testing.T, d *harness.DataServer, away time.Duration) {
	harness.Run(t, "", "nft", fmt.Sprintf("add rule inet weft in tcp dport %s drop; add rule inet weft in tcp sport %[1]s drop", d.Port()))
	time.Sleep(away)
	harness.Run(t, "", "nft", "flush chain inet weft in")
}

func fill(_ *testing.T, d *harness.DataServer, away time.Duration) {
	undo := d.Fill()
	time.Sleep(away)
	undo()
}

func takeAway(t *testing.T, copies int, kinds ...event) {
	t.Logf("-seed %d -events %d", *seed, *events)
	rng := rand.New(rand.NewPCG(*seed, uint64(copies)))
	v := harness.NewVolume(t, harness.Options{Remote: !*local, Apart: true, Room: 512 << 20})
	m := v.Mount(append(mountOptions(), "mirror-timeout=1s")...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "4", "--mirrors", fmt.Sprint(copies))
	source := filepath.Join(strings.TrimSpace(harness.Run(t, "", "go", "env", "GOROOT")), "src", "crypto")

	var loads sync.WaitGroup
	var stop, failed atomic.Bool
	rounds := func(name string, round func(dir string) error) {
		dir := filepath.Join(m.Dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		loads.Go(func() { // a load; ends when it is told to, or with an error
			n := 0
			for ; !stop.Load(); n++ {
				if err := round(dir); err != nil {
					failed.Store(true)
					t.Errorf("%s, round %d: %v", name, n, err)
					return
				}
			}
			t.Logf("%s: %d rounds", name, n)
		})
	}
	rounds("fio", func(dir string) error {
		return quiet(dir, "fio", "--name=v", "--rw=randrw", "--bsrange=4k-256k", "--size=24m", "--numjobs=2", "--verify=crc32c",
			"--verify_fatal=1", "--do_verify=1", "--end_fsync=1", fmt.Sprint("--randseed=", *seed))
	})
	rounds("tree", func(dir string) error {
		for _, command := range [][]string{{"cp", "-a", source, "copy"}, {"diff", "-r", source, "copy"}, {"rm", "-r", "copy"}} {
			if err := quiet(dir, command[0], command[1:]...); err != nil {
				return err
			}
		}
		return nil
	})

	for i := 0; i < *events && !failed.Load(); i++ {
		time.Sleep(time.Duration(300+rng.IntN(1000)) * time.Millisecond)
		d := v.Servers[rng.IntN(len(v.Servers))]
		kinds[rng.IntN(len(kinds))](t, d, time.Duration(rng.IntN(3000))*time.Millisecond)
		if copies > 1 {
			// The next one is not taken away before there is another copy of what this one had.
			m.AwaitCopies()
		}
	}
	stop.Store(true)
	loads.Wait()
	if copies > 1 {
		m.AwaitCopies()
		harness.Weft(t, "sync", m.Dir)
		allEqual(t, v, m)
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// quiet runs a program, and returns what it has printed if it fails.
func quiet(dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%.4000s", name, err, out)
	}
	return nil
}
