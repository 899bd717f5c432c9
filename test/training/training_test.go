package training

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/weftfs/weft/test/harness"
)

var torch = flag.Bool("torch", false, "run the examples for PyTorch, too (Debian: python3-torch)")

var block = regexp.MustCompile("(?ms)^```python run=([a-z]+)\n(.*?)^```$")

// TestExamples runs them one after the other in one directory, in the order of the document, while a data server is killed and started again.
func TestExamples(t *testing.T) {
	harness.Need(t, "/usr/bin/python3")
	doc, err := os.ReadFile(filepath.Join(harness.Root, "docs/training.md"))
	if err != nil {
		t.Fatal(err)
	}
	v := harness.NewVolume(t, harness.Options{DataServers: 3, Apart: true})
	m := v.Mount()
	ran := map[string]int{}
	for _, example := range block.FindAllSubmatch(doc, -1) {
		kind, script := string(example[1]), string(example[2])
		if kind == "torch" && !*torch {
			continue
		}
		ran[kind]++
		cmd := exec.Command("/usr/bin/python3", "-c", script)
		cmd.Dir = m.Dir
		killed := make(chan struct{})
		go func() { // ends with the restart
			defer close(killed)
			time.Sleep(200 * time.Millisecond)
			v.Servers[ran[kind]%3].Kill()
			time.Sleep(time.Second)
			v.Servers[ran[kind]%3].Start()
		}()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s\n%s", err, out, script)
		}
		<-killed
	}
	if ran["numpy"] != 3 || *torch && ran["torch"] != 1 {
		t.Errorf("examples: %v", ran)
	}
}
