package harness

import (
	"flag"
	"path/filepath"
	"strings"
	"testing"
)

// Lab is whether StartVM can be used.
var Lab = flag.Bool("lab", false, "use the virtual machine of test/lab, which fetches its parts from the system's package source")

// StartVM starts the virtual machine of test/lab with these options. It ends with the test. It returns what `vm ports` says.
func StartVM(t *testing.T, options ...string) map[string]string {
	t.Helper()
	if !*Lab {
		t.Skip("missing: the virtual machine (scripts/test --lab starts it)")
	}
	vm := filepath.Join(Root, "test/lab/vm")
	Run(t, "", vm, append([]string{"up"}, options...)...)
	t.Cleanup(func() { Run(t, "", vm, "down") })
	ports := map[string]string{}
	for line := range strings.Lines(Run(t, "", vm, "ports")) {
		if name, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "="); ok {
			ports[name] = strings.Trim(value, `'"`)
		}
	}
	return ports
}

// Guest runs a script of sh in that machine and returns what it prints.
func Guest(t *testing.T, script string) string {
	t.Helper()
	return Run(t, "", filepath.Join(Root, "test/lab/vm"), "sh", "set -e\n"+script)
}
