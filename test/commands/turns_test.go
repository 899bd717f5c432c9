package commands

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestBenchAgainst compares this build with itself.
func TestBenchAgainst(t *testing.T) {
	harness.NeedMount(t)
	dir := harness.Dir(t)
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Run(t, "", "go", "build", "-o", bin, "github.com/weftfs/weft/test/bench")
	for _, name := range []string{"weft", "weftd"} {
		if err := os.Symlink(harness.Bin(t, name), filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	out := harness.Run(t, "", filepath.Join(bin, "bench"), "md-create-1", "--turns", "3", "--against", dir, "--against", dir)
	line := regexp.MustCompile(`^(\S+) +[0-9]+/s  against \S+ +median ([0-9.]+)  mean [0-9.]+ \+- [0-9.]+  processor time ([0-9.]+)$`)
	var rows []string
	for l := range strings.Lines(out) {
		m := line.FindStringSubmatch(strings.TrimSpace(l))
		if m == nil {
			t.Fatalf("line %q of\n%s", l, out)
		}
		rows = append(rows, m[1])
		for _, s := range m[2:] {
			if v, err := strconv.ParseFloat(s, 64); err != nil || v < 0.1 || v > 10 {
				t.Errorf("%q: a build does %s of its own work", l, s)
			}
		}
	}
	if got, want := strings.Join(rows, " "), "md-create-1 md-create-1"; got != want {
		t.Errorf("rows %q, want %q", got, want)
	}

	for _, bad := range [][2]string{
		{"--against /no/such", "/no/such/bin/bench: no such file or directory: run scripts/bench --list"},
		{"--turns 5", "only with --against"},
		{"--turns 2 --against /no/such", "at least 3"},
		{"--runs 5 --against /no/such", "--runs: not with --against"},
	} {
		b, err := exec.Command(filepath.Join(bin, "bench"), append([]string{"md-create-1"}, strings.Fields(bad[0])...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(b), bad[1]) {
			t.Errorf("%s: %v, want %q in\n%s", bad[0], err, bad[1], b)
		}
	}
}
