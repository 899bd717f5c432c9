package answers

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

var (
	testName = regexp.MustCompile("^`([a-z0-9/]+) (Test[A-Za-z0-9]+)`$")
	chapter  = regexp.MustCompile(`^([A-Za-z0-9/]+\.md): (.+)$`)
)

func TestAnswers(t *testing.T) {
	for doc, least := range map[string][2]int{"docs/answers.md": {36, 50}, "docs/security.md": {11, 16}} {
		rows, named := names(t, doc)
		if rows < least[0] || named < least[1] {
			t.Errorf("%s: %d answers, %d names", doc, rows, named)
		}
	}
}

// names checks that what the tables of a page name as evidence is there.
func names(t *testing.T, page string) (rows, named int) {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join(harness.Root, page))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(doc)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if !strings.HasPrefix(line, "| ") || len(cells) != 3 || strings.HasPrefix(line, "| ---") || strings.HasSuffix(line, " by |\n") {
			continue
		}
		rows++
		for by := range strings.SplitSeq(strings.TrimSpace(cells[2]), ", ") {
			named++
			if m := testName.FindStringSubmatch(by); m != nil {
				files, _ := filepath.Glob(filepath.Join(harness.Root, m[1], "*_test.go"))
				if !anyHas(t, files, "func "+m[2]+"(t *testing.T)") {
					t.Errorf("there is no %s in %s", m[2], m[1])
				}
			} else if m := chapter.FindStringSubmatch(by); m != nil {
				file := filepath.Join(harness.Root, m[1])
				if !anyHas(t, []string{file}, "# "+m[2]+"\n") && !anyHas(t, []string{file}, "\n"+m[2]+" ") {
					t.Errorf("there is no chapter %q in %s", m[2], m[1])
				}
			} else {
				t.Errorf("%q names neither a test nor a chapter", by)
			}
		}
	}
	return rows, named
}

func anyHas(t *testing.T, files []string, text string) bool {
	t.Helper()
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), text) {
			return true
		}
	}
	return false
}
