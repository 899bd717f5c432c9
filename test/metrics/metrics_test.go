package metrics

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/test/harness"
)

// get asks over HTTP.
func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text)
}

// work does what makes numbers.
func work(t *testing.T, dir string, n int) {
	t.Helper()
	full := filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Rmdir(full); err != syscall.ENOTEMPTY {
		t.Fatalf("rmdir of a directory that is not empty: %v", err)
	}
	for i := range n {
		name := filepath.Join(dir, fmt.Sprint("f", i))
		if err := os.WriteFile(name, make([]byte, 100_000), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(filepath.Join(dir, "f0"), 0o755); err == nil {
			t.Fatal("made twice")
		}
		if err := os.Remove(name); err != nil && i > 0 {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "f0"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var series = regexp.MustCompile(`(?m)^(weft_[a-z0-9_]+?)(?:_bucket|_sum|_count)?(?:\{| )`)

// TestMetrics holds what is told to the documentation, to Prometheus' rules for names, and to the dashboard and the alerts.
func TestMetrics(t *testing.T) {
	harness.Need(t, "prometheus", "promtool")
	serviceAt, mountAt, promAt := harness.FreeAddr(t), harness.FreeAddr(t), harness.FreeAddr(t)
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Args: []string{"--metrics", serviceAt, "--pprof"}})
	m := v.Mount("metrics="+mountAt, "log-format=json")
	harness.Await(t, "the mount is ready", func() bool {
		code, _ := get(t, "http://"+mountAt+"/readyz")
		return code == 200
	})
	work(t, m.Dir, 20)

	// Names, and their documentation.
	doc, err := os.ReadFile(filepath.Join(harness.Root, "docs/monitoring.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "\n## Metrics\n")
	table, _, _ = strings.Cut(table, "\n## ")
	documented := map[string]bool{}
	for _, name := range regexp.MustCompile("`(weft_[a-z0-9_]+)`").FindAllStringSubmatch(table, -1) {
		documented[name[1]] = true
	}
	told := map[string]bool{}
	for _, addr := range []string{serviceAt, mountAt} {
		code, text := get(t, "http://"+addr+"/metrics")
		if code != 200 {
			t.Fatalf("%s: %d %s", addr, code, text)
		}
		problems, err := promlint.New(strings.NewReader(text)).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			if strings.HasPrefix(p.Metric, "weft_") {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
		for _, match := range series.FindAllStringSubmatch(text, -1) {
			told[match[1]] = true
		}
		if n := strings.Count(text, "\n"); n > 3000 {
			t.Errorf("%s: %d lines", addr, n)
		}
	}
	for name := range told {
		if !documented[name] {
			t.Errorf("docs/monitoring.md does not have %s", name)
		}
	}
	// Two that there are only after an error.
	for name := range documented {
		if !told[name] && name != "weft_device_last_error_timestamp_seconds" && name != "weft_data_call_errors_total" {
			t.Errorf("%s is documented, and not told", name)
		}
	}
	if code, _ := get(t, "http://"+serviceAt+"/debug/pprof/"); code != 200 {
		t.Errorf("profiles of the service: %d", code)
	}
	if code, _ := get(t, "http://"+mountAt+"/debug/pprof/"); code != 404 {
		t.Errorf("profiles of the mount, which was not to have them: %d", code)
	}
	for _, line := range strings.Split(strings.TrimSpace(m.Log()), "\n") {
		if !json.Valid([]byte(line)) {
			t.Errorf("log: %s", line)
		}
	}

	// The alerts as such.
	deploy := filepath.Join(harness.Root, "scripts/deploy")
	harness.Run(t, deploy, "promtool", "check", "rules", "alerts.yml")
	harness.Run(t, deploy, "promtool", "test", "rules", "alerts_test.yml")

	// A Prometheus that scrapes a run.
	base := harness.Dir(t)
	config := filepath.Join(base, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 1s}\nrule_files: [%s/alerts.yml]\nscrape_configs:\n", deploy)
	for job, addr := range map[string]string{"weft-meta": serviceAt, "weft-mount": mountAt} {
		text += fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: [%q]}]}\n", job, addr)
	}
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	prom := exec.Command("prometheus", "--config.file", config, "--storage.tsdb.path", filepath.Join(base, "data"), "--web.listen-address", promAt, "--log.level", "warn")
	if err := prom.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		prom.Process.Signal(syscall.SIGTERM)
		prom.Wait()
	})
	query := func(expr string) (n int, problem string) {
		code, body := get(t, "http://"+promAt+"/api/v1/query?query="+url.QueryEscape(expr))
		var r struct {
			Status, Error string
			Data          struct{ Result []any }
		}
		if err := json.Unmarshal([]byte(body), &r); err != nil || r.Status != "success" {
			return 0, fmt.Sprint(code, " ", body)
		}
		return len(r.Data.Result), ""
	}
	ok := waittest.Poll(time.Minute, 100*time.Millisecond, func() bool {
		work(t, m.Dir, 5)
		n, _ := query(`count_over_time(up[1m]) >= 5`)
		return n == 2
	})
	if !ok {
		t.Fatal("not after a minute: Prometheus has scraped some times")
	}
	board, err := os.ReadFile(filepath.Join(deploy, "grafana-dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(board, &dashboard); err != nil {
		t.Fatal(err)
	}
	queries := 0
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			queries++
			n, problem := query(strings.ReplaceAll(target.Expr, "$__rate_interval", "30s"))
			if n == 0 {
				t.Errorf("panel %q: %s gives nothing %s", p.Title, target.Expr, problem)
			}
		}
	}
	if queries < 16 {
		t.Errorf("%d queries in the dashboard", queries)
	}
	// Each metric that an alert is about is there, and none of them is a false alarm.
	rules, err := os.ReadFile(filepath.Join(deploy, "alerts.yml"))
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, name := range regexp.MustCompile(`weft_[a-z0-9_]+`).FindAllString(string(rules), -1) {
		used[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if n, problem := query(name); n == 0 {
			t.Errorf("an alert is about %s, of which there is nothing %s", name, problem)
		}
	}
	if n, problem := query(`ALERTS`); n > 0 || problem != "" {
		t.Errorf("%d alerts %s", n, problem)
	}

	// A service that dies.
	v.Kill()
	harness.Await(t, "the mount says that it is not ready, and why", func() bool {
		code, body := get(t, "http://"+mountAt+"/readyz")
		return code == 503 && (strings.Contains(body, v.Addr) || strings.Contains(body, "device"))
	})
	if code, _ := get(t, "http://"+mountAt+"/healthz"); code != 200 {
		t.Errorf("healthz of the mount: %d", code)
	}
	harness.Await(t, "Prometheus has seen it", func() bool { n, _ := query(`up{job="weft-meta"} == 0`); return n == 1 })
	v.Start()
	for _, addr := range []string{mountAt, serviceAt} {
		harness.Await(t, "ready again: "+addr, func() bool {
			code, _ := get(t, "http://"+addr+"/readyz")
			return code == 200
		})
	}
	work(t, m.Dir, 5)
}
