package freeze

import (
	"bufio"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// TestProcess stops a process that writes all the time; nothing comes any more once it stands still.
func TestProcess(t *testing.T) {
	cmd := exec.Command("sh", "-c", "while :; do echo x; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	defer cmd.Wait()
	defer cmd.Process.Kill()
	in := bufio.NewReader(out)
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if err := Process(pid); err != nil {
			t.Fatal(err)
		}
		if still, err := standsStill(pid); !still || err != nil {
			t.Fatalf("it goes on: %v", err)
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		for began := time.Now(); ; { // until it runs
			if still, err := standsStill(pid); err == nil && !still {
				break
			}
			if time.Since(began) > 10*time.Second {
				t.Fatal("it does not go on")
			}
			in.Discard(1 << 12)
		}
	}
	cmd.Process.Kill()
	if err := cmd.Wait(); err == nil {
		t.Error("it ended well")
	}
	if err := Process(pid); err == nil {
		t.Error("a process that is gone was stopped")
	}
}
