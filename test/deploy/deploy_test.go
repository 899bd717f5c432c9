// Package deploy holds the files in scripts/deploy/kubernetes to the types of Kubernetes, and what they start to the programs. It is a module of its own, so that
// these types are none of weft's dependencies.
package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

const root = "../.."

// decode is strict: a field that there is none of is an error, as is one that stands twice.
func decode[T any](t *testing.T, doc []byte) *T {
	t.Helper()
	var v T
	if err := yaml.UnmarshalStrict(doc, &v); err != nil {
		t.Error(err)
	}
	return &v
}

func TestKubernetes(t *testing.T) {
	files, err := filepath.Glob(root + "/scripts/deploy/kubernetes/*.yaml")
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	kinds := map[string]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range bytes.Split(text, []byte("\n---\n")) {
			var what struct{ APIVersion, Kind string }
			if err := yaml.Unmarshal(doc, &what); err != nil {
				t.Fatal(file, err)
			}
			kinds[what.Kind]++
			switch what.APIVersion + " " + what.Kind {
			case "v1 Pod":
				check(t, &decode[core.Pod](t, doc).Spec)
			case "apps/v1 DaemonSet":
				set := decode[apps.DaemonSet](t, doc)
				selects(t, set.Spec.Selector.MatchLabels, set.Spec.Template.Labels)
				check(t, &set.Spec.Template.Spec)
			case "apps/v1 StatefulSet":
				set := decode[apps.StatefulSet](t, doc)
				selects(t, set.Spec.Selector.MatchLabels, set.Spec.Template.Labels)
				check(t, &set.Spec.Template.Spec)
			case "v1 Service":
				decode[core.Service](t, doc)
			case "policy/v1 PodDisruptionBudget":
				decode[policy.PodDisruptionBudget](t, doc)
			default:
				t.Errorf("%s: %s %s is not checked", file, what.APIVersion, what.Kind)
			}
		}
	}
	for _, kind := range []string{"Pod", "DaemonSet", "StatefulSet", "Service"} {
		if kinds[kind] == 0 {
			t.Errorf("there is no %s", kind)
		}
	}
}

func selects(t *testing.T, selector, labels map[string]string) {
	t.Helper()
	if len(selector) == 0 {
		t.Error("no selector")
	}
	for name, value := range selector {
		if labels[name] != value {
			t.Errorf("the selector %s=%s does not select the template's labels %v", name, value, labels)
		}
	}
}

// check holds a pod together: volumes, ports of probes, and commands.
func check(t *testing.T, spec *core.PodSpec) {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range spec.Volumes {
		volumes[v.Name] = true
	}
	ours := 0
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("container %s mounts %s, which is no volume", c.Name, m.Name)
			}
		}
		for _, probe := range []*core.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			if probe != nil && !slices.ContainsFunc(c.Ports, func(p core.ContainerPort) bool { return p.Name == probe.HTTPGet.Port.StrVal }) {
				t.Errorf("container %s is probed at the port %v, which it does not have", c.Name, probe.HTTPGet.Port)
			}
		}
		if c.Image == "weft" {
			ours++
			command(t, c.Command)
		}
	}
	if ours == 0 {
		t.Error("no container is weft's")
	}
}

// command has the programs themselves parse what a container starts.
func command(t *testing.T, args []string) {
	t.Helper()
	program, rest := filepath.Join(root, "bin", args[0]), args[1:]
	switch {
	case args[0] == "weft" && args[1] == "mount":
		// mount.weft -f looks at everything and does not mount.
		dir := t.TempDir()
		link := filepath.Join(t.TempDir(), "mount.weft")
		self, err := filepath.Abs(program)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(self, link); err != nil {
			t.Fatal(err)
		}
		i := slices.Index(rest, "-o")
		program, rest = link, []string{rest[len(rest)-2], dir, "-f", "-o", rest[i+1]}
	default:
		rest = append(slices.Clone(rest), "--help")
	}
	out, err := exec.Command(program, rest...).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	for _, arg := range args[2:] {
		if name, ok := strings.CutPrefix(arg, "--"); ok && !strings.Contains(string(out), "--"+name) {
			t.Errorf("%s: no flag --%s", args[0], name)
		}
	}
}
