package coherence

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

// TestNamespace unmounts while another mount namespace has a copy of the mount: nobody waits for that, and it works on.
func TestNamespace(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Lease: lease})
	m := v.Mount(mountOptions()...)
	if err := os.WriteFile(m.Dir+"/f", []byte("contents"), 0o644); err != nil {
		t.Fatal(err)
	}
	other := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", `echo ready; read line; cat "$0/f"`, m.Dir)
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	ready := make(chan struct{}, 1)
	other.Stdout, other.Stderr = &signalling{&out, ready}, os.Stderr
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Process.Kill() })
	<-ready
	begun := time.Now()
	said, err := exec.Command(harness.Bin(t, "weft"), "umount", m.Dir).CombinedOutput()
	if err != nil || !strings.Contains(string(said), "pid") || time.Since(begun) > 20*time.Second {
		t.Errorf("weft umount after %v: %v, %q; want it to name who has a copy", time.Since(begun), err, said)
	}
	if harness.Mounted(m.Dir) {
		t.Error("it is still mounted here")
	}
	in.Close()
	if err := other.Wait(); err != nil || out.String() != "ready\ncontents" {
		t.Errorf("the copy: %v, %q", err, out.String())
	}
	// With the copy the mount has ended, and the serving process with it.
	harness.Await(t, "the end of the serving process", func() bool { return !m.Serving() })
	m.Abort() // there is nothing left to unmount
}

// signalling tells of the first write.
type signalling struct {
	*strings.Builder
	first chan<- struct{}
}

func (s *signalling) Write(b []byte) (int, error) {
	select {
	case s.first <- struct{}{}:
	default:
	}
	return s.Builder.Write(b)
}
