package faults

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// admVerify runs weft admin verify, and returns what it says and its exit code.
func admVerify(t *testing.T, args ...string) (said string, code int) {
	t.Helper()
	cmd := exec.Command(harness.Bin(t, "weft"), append([]string{"admin", "verify", "--progress", "off"}, args...)...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// TestVerify damages copies behind weft's back. It is found which those are, and they are made anew.
func TestVerify(t *testing.T) {
	harness.NeedMount(t)
	v := harness.NewVolume(t, harness.Options{Remote: !*local, DataServers: 3, Apart: true})
	m := v.Mount(mountOptions()...)
	const size = 10<<20 + 77
	want := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(want)
	for _, mirrors := range []int{1, 2, 3} {
		dir := fmt.Sprint(m.Dir, "/", mirrors)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		harness.Weft(t, "layout", "set", dir, "--stripe-unit", "64KiB", "--stripe-count", "3", "--mirrors", fmt.Sprint(mirrors))
		for _, name := range []string{"f", "other"} {
			if err := os.WriteFile(filepath.Join(dir, name), want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if said, code := admVerify(t, m.Dir); code != 0 || !strings.Contains(said, "4 files compared") || !strings.Contains(said, "5 have one copy, or no data") {
		t.Fatalf("nothing is damaged: exit code %d\n%s", code, said)
	}

	for _, mirrors := range []int{2, 3} {
		f := fmt.Sprintf("%s/%d/f", m.Dir, mirrors)
		l := harness.LayoutOf(t, f)
		// Not the first copy, which counts if there are two.
		bad := l.Mirrors[mirrors-1].Servers[0]
		const at = 6*64<<10 + 4096 // a stripe unit of the first column
		data, err := os.OpenFile(v.ServerAt(bad.Address).Path(bad.DataFile), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := data.WriteAt(make([]byte, 5000), at); err != nil {
			t.Fatal(err)
		}
		data.Close()
		says := "nobody knows which is right"
		if mirrors == 3 {
			says = " agree, and not "
		}
		for _, args := range [][]string{{f}, {m.Dir, "--rate", "1GiB"}, {f, "--repair"}} {
			said, code := admVerify(t, args...)
			place := fmt.Sprintf("%s: 8192 bytes at %d differ: ", f, at)
			if code != 3 || strings.Count(said, " differ: ") != 1 || !strings.Contains(said, place) || !strings.Contains(said, says) ||
				!strings.Contains(said, "1 have copies that differ") || !strings.Contains(said, strings.TrimSuffix(bad.Address, ":/")) ||
				(len(args) > 1 && args[1] == "--repair") != strings.Contains(said, "1 of these are repaired") {
				t.Errorf("%d copies, %v: exit code %d, want %s %s, on %s:\n%s", mirrors, args, code, place, says, bad.Address, said)
			}
		}
		m.AwaitCopies()
		if said, code := admVerify(t, m.Dir); code != 0 {
			t.Errorf("%d copies, after the repair: exit code %d\n%s", mirrors, code, said)
		}
		if got, err := os.ReadFile(f); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d copies, after the repair: %d bytes, equal %t, %v", mirrors, len(got), bytes.Equal(got, want), err)
		}
		allEqual(t, v, m)
	}

	// What cannot be read is not taken for equal.
	v.Servers[0].Kill()
	if said, code := admVerify(t, m.Dir+"/3/f"); code != 2 {
		t.Errorf("a data server is away: exit code %d\n%s", code, said)
	}
	v.Servers[0].Start()
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// TestVerifyWhileWritten compares the copies of files that two mounts write meanwhile.
func TestVerifyWhileWritten(t *testing.T) {
	harness.NeedMount(t)
	v := harness.NewVolume(t, harness.Options{Remote: !*local, DataServers: 3, Apart: true})
	mounts := []*harness.Mount{v.Mount(mountOptions()...), v.Mount(mountOptions()...)}
	m := mounts[0]
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-unit", "64KiB", "--stripe-count", "2", "--mirrors", "2")
	for _, name := range []string{"shared", "log"} { // which the writers of one file need
		if err := os.WriteFile(filepath.Join(m.Dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var stops []func()
	var ends []func() *scribbler
	for n, m := range mounts {
		stop, end := beginScribble(t, n, len(mounts), 0, m.Dir)
		stops, ends = append(stops, stop), append(ends, end)
	}
	for range 10 {
		m.Verify()
	}
	for _, stop := range stops {
		stop()
	}
	for n, end := range ends {
		if s := end(); s.Error != "" || s.Ops == 0 {
			t.Errorf("writer %d: %d operations, %s", n, s.Ops, s.Error)
		} else {
			s.check(t, m.Dir)
		}
	}
	m.Verify()
	for _, m := range mounts {
		m.Unmount()
	}
	v.Stop()
	v.Fsck()
}
