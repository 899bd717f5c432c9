package house

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

const module = "github.com/weftfs/weft/"

// rules: packages whose path begins with the key may import, of this module, what begins with one of the values, or what is
// one of those with a final "$". The longest key counts. Tests may import more.
var rules = map[string][]string{
	"layout":                  {},
	"internal":                {"internal"},
	"internal/wire/metarpc":   {"internal", "layout"},
	"internal/wire/flexfiles": {"internal", "layout"},
	"internal/wire/peerrpc":   {"internal", "layout"},
	"dataplane":               {"layout", "internal"},
	"dataplane/faultytest":    {"layout", "internal", "dataplane"},
	"dataplane/targettest":    {"layout", "internal", "dataplane"},
	"metaclient":              {"layout", "internal"},
	"localio":                 {"layout", "internal"},
	"fs":                      {"layout", "internal", "metaclient", "dataplane", "fs/device"},
	"fs/device":               {"internal"},
	"server/catalog":          {"internal", "server/catalog"},
	"server/catalog/dump":     {"layout", "server/catalog$", "server/schema"},
	"server/cluster":          {"internal", "server/meta$", "server/meta/admit", "server/meta/locktable", "server/catalog$", "server/schema"},
	"server/data":             {"layout", "internal"},
	"server/datafile":         {"layout", "internal", "dataplane", "server/catalog$", "server/datafile", "server/schema"},
	"server/fsck":             {"layout", "internal", "server/catalog$", "server/datafile", "server/schema"},
	"server/meta":             {"layout", "internal", "server/catalog$", "server/meta/admit", "server/meta/locktable", "server/meta/turnback", "server/meta/usage", "server/schema"},
	"server/meta/admit":       {"internal"},
	"server/meta/locktable":   {"layout", "internal"},
	"server/meta/turnback":    {"layout", "internal"},
	"server/meta/usage":       {"layout", "internal/retry", "internal/wire/metarpc", "server/catalog$", "server/schema"},
	"server/nvme":             {"internal"},
	"server/nvme/nvmetest":    {"server/nvme$"},
	"server/schema":           {"layout", "internal", "server/catalog$"},
	"cmd/weft":                {"layout", "internal", "metaclient", "dataplane", "localio", "fs"},
	"cmd/weftd":               {"layout", "internal", "server", "dataplane"},
	"test":                    {""},
}

// outside: what packages may import from outside the standard library, where that is restricted.
var outside = map[string][]string{
	"layout":                {},
	"internal":              {},
	"internal/wire/metarpc": {"github.com/vmihailenco/msgpack/v5"},
	"internal/wire/peerrpc": {"github.com/vmihailenco/msgpack/v5"},
	"internal/cli":          {"github.com/spf13/pflag"},
	"internal/iobuf":        {"golang.org/x/sys/unix"},
	"internal/ca":           {"golang.org/x/sys/unix"},
	"internal/mountinfo":    {"golang.org/x/sys/unix"},
	"internal/fileio":       {"golang.org/x/sys/unix"},
	"internal/manual":       {"github.com/spf13/pflag"},
	"internal/progress":     {"github.com/spf13/pflag", "github.com/dustin/go-humanize", "golang.org/x/sys/unix"},
	"internal/metrics": {"github.com/prometheus/client_golang/prometheus", "github.com/prometheus/client_golang/prometheus/collectors",
		"github.com/prometheus/client_golang/prometheus/promhttp"},
}

type pkg struct {
	ImportPath string
	Imports    []string
}

func TestArrows(t *testing.T) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = harness.Root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; seen++ {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		path := strings.TrimPrefix(p.ImportPath, module)
		allowed, ok := longest(rules, path)
		if !ok {
			t.Errorf("%s: no rule for this package", path)
			continue
		}
		foreign, restricted := longest(outside, path)
		for _, imp := range p.Imports {
			if own, ok := strings.CutPrefix(imp, module); ok {
				if !slices.ContainsFunc(allowed, func(a string) bool { return below(own, a) }) {
					t.Errorf("%s imports %s", path, own)
				}
			} else if first, _, _ := strings.Cut(imp, "/"); restricted && strings.Contains(first, ".") && !slices.Contains(foreign, imp) {
				t.Errorf("%s imports %s", path, imp)
			}
		}
	}
	if seen < 10 {
		t.Fatalf("go list shows %d packages", seen)
	}
}

func below(path, top string) bool {
	if alone, ok := strings.CutSuffix(top, "$"); ok {
		return path == alone
	}
	return top == "" || path == top || strings.HasPrefix(path, top+"/")
}

func longest(m map[string][]string, path string) (v []string, ok bool) {
	best := -1
	for key, value := range m {
		if below(path, key) && len(key) > best {
			best, v, ok = len(key), value, true
		}
	}
	return v, ok
}
