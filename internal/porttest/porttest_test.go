package porttest

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestAddr has processes side by side take more addresses than a block has: they differ, are below the range of outgoing connections, and
// somebody can listen there.
func TestAddr(t *testing.T) {
	const each = 2 * blockSize
	if os.Getenv("FREEPORT_TEST_CHILD") != "" {
		for range each {
			os.Stdout.WriteString("addr " + For(t) + "\n")
		}
		var wait [1]byte
		os.Stdin.Read(wait[:]) // it keeps its blocks until the others have theirs
		return
	}
	var ended []func() error
	var taken []string
	for range 4 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestAddr$")
		cmd.Env = append(os.Environ(), "FREEPORT_TEST_CHILD=1")
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 64<<10)
		var text string
		for strings.Count(text, "addr ") < each || !strings.HasSuffix(text, "\n") {
			n, err := out.Read(buf)
			if err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			text += string(buf[:n])
		}
		taken = append(taken, strings.Fields(strings.ReplaceAll(text, "addr ", ""))...)
		ended = append(ended, func() error { in.Close(); return cmd.Wait() })
	}
	seen := map[string]bool{}
	for _, addr := range taken {
		if at, err := netip.ParseAddrPort(addr); err != nil || at.Port() <= first || at.Port() >= 32768 || seen[addr] {
			t.Errorf("%s: %v, seen before: %v", addr, err, seen[addr])
		}
		seen[addr] = true
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Error(err)
			continue
		}
		l.Close()
	}
	if len(seen) != 4*each {
		t.Errorf("%d addresses of %d", len(seen), 4*each)
	}
	for _, end := range ended {
		if err := end(); err != nil {
			t.Error(err)
		}
	}
}
