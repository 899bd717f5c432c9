package commands

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/test/harness"
)

// TestBench measures a volume of which one data server is drained, and leaves nothing there.
func TestBench(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 3})
	m := v.Mount()
	var devices []struct{ ID string }
	if err := json.Unmarshal([]byte(harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr)), &devices); err != nil || len(devices) != 3 {
		t.Fatalf("%v, %v", devices, err)
	}
	drained := devices[1].ID
	harness.Weft(t, "admin", "device", "drain", drained, "--server", v.Addr)
	var r struct {
		Devices []struct {
			ID, By, Problem string
			Write, Read     float64
			Half            int64 `json:"read_4k_p50"`
		}
		Striped  struct{ Write, Read float64 }
		Metadata []struct {
			Call      string
			One, Many float64
		}
		Hints []string
	}
	out := harness.Weft(t, "bench", m.Dir, "--time", "10s", "--json")
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(r.Devices) != 3 {
		t.Errorf("%d devices", len(r.Devices))
	}
	for _, d := range r.Devices {
		if d.ID == drained {
			if !strings.Contains(d.Problem, "drained") || d.Read != 0 {
				t.Errorf("the one that is drained: %+v", d)
			}
			continue
		}
		if d.Write <= 0 || d.Read <= 0 || d.Half <= 0 || d.By != "local" || d.Problem != "" {
			t.Errorf("%+v", d)
		}
	}
	if r.Striped.Write <= 0 || r.Striped.Read <= 0 {
		t.Errorf("striped: %+v", r.Striped)
	}
	if len(r.Metadata) != 2 || r.Metadata[0].One <= 0 || r.Metadata[1].Many <= 0 {
		t.Errorf("metadata: %+v", r.Metadata)
	}
	if !strings.Contains(strings.Join(r.Hints, "\n"), "drained") {
		t.Errorf("hints: %q", r.Hints)
	}
	if left, err := os.ReadDir(m.Dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	// Interrupted, it leaves nothing either.
	cmd := exec.Command(harness.Bin(t, "weft"), "bench", m.Dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for names := []string(nil); len(names) == 0 && cmd.ProcessState == nil; {
		names, _ = filepath.Glob(m.Dir + "/.weft-bench-*/each/*")
	}
	cmd.Process.Signal(syscall.SIGINT)
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 2 {
		t.Errorf("interrupted: %v", err)
	}
	if left, err := os.ReadDir(m.Dir); err != nil || len(left) > 0 {
		t.Errorf("left behind when interrupted: %v, %v", left, err)
	}
}

// doctor runs weft doctor and returns what it prints, its exit code, and the report.
func doctor(t *testing.T, args ...string) (said string, code int, report string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "report")
	cmd := exec.Command(harness.Bin(t, "weft"), append([]string{"doctor", "--report", name}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState.ExitCode() < 0 {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(name) // there is none if the arguments are wrong
	return string(out), cmd.ProcessState.ExitCode(), string(text)
}

// TestDoctor looks at a mount that is well, at one without its service, at one that is stopped, and at one whose process has died.
func TestDoctor(t *testing.T) {
	key := make([]byte, 32, 36)
	secret := "DHHC-1:00:" + base64.StdEncoding.EncodeToString(binary.LittleEndian.AppendUint32(key, crc32.ChecksumIEEE(key))) + ":"
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true})
	secrets := filepath.Join(t.TempDir(), "secrets")
	if err := os.WriteFile(secrets, []byte("* "+secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := v.Mount("nvme-secretfile=" + secrets)
	said, code, report := doctor(t, m.Dir)
	if code != 0 || strings.Contains(said, "!!") {
		t.Errorf("exit code %d: %s", code, said)
	}
	for _, want := range []string{"/dev/fuse can be opened", v.Addr + " takes a connection", "goroutine", "status of " + m.Dir, "MemAvailable", `msg=mounted`} {
		if !strings.Contains(report, want) {
			t.Errorf("no %q in the report", want)
		}
	}
	if strings.Contains(report, "DHHC-1") {
		t.Error("there is a secret in the report")
	}

	v.Servers[1].Stop()
	said, code, _ = doctor(t, m.Dir)
	if code != 2 || !strings.Contains(said, "!! dev ") || !strings.Contains(said, "connection refused") {
		t.Errorf("without a data server: exit code %d: %s", code, said)
	}
	v.Servers[1].Start()

	v.Kill()
	said, code, _ = doctor(t, m.Dir)
	if code != 2 || !strings.Contains(said, "!! metadata") || !strings.Contains(said, "Is the service running there") {
		t.Errorf("without its service: exit code %d: %s", code, said)
	}
	waits := exec.Command("mkdir", m.Dir+"/d")
	if err := waits.Start(); err != nil {
		t.Fatal(err)
	}
	if said, _, _ = doctor(t, m.Dir); !strings.Contains(said, "!! requests") || !strings.Contains(said, "weft umount --force "+m.Dir) {
		t.Errorf("while somebody waits: %s", said)
	}
	v.Start()
	if err := waits.Wait(); err != nil {
		t.Error(err)
	}

	m.Signal(syscall.SIGKILL)
	for m.Serving() {
	}
	said, code, _ = doctor(t, m.Dir)
	if code != 2 || !strings.Contains(said, "umount -l "+m.Dir) {
		t.Errorf("without its process: exit code %d: %s", code, said)
	}
	m.Abort()
	if said, code, _ = doctor(t, m.Dir); code != 2 || !strings.Contains(said, "is not a weft mount") {
		t.Errorf("without a mount: exit code %d: %s", code, said)
	}
}

// TestProgress runs what may take long and reads how far it is, as programs do.
func TestProgress(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	m := v.Mount()
	var devices []struct {
		ID    string
		Files int64 `json:"data_files"`
	}
	list := func() {
		t.Helper()
		if err := json.Unmarshal([]byte(harness.Weft(t, "admin", "device", "ls", "--json", "--server", v.Addr)), &devices); err != nil || len(devices) != 2 {
			t.Fatalf("%v, %v", devices, err)
		}
	}
	list()
	const size = 10_000_000
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(m.Dir, name), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	harness.Weft(t, "sync", m.Dir)
	type state struct {
		Seconds   float64
		Share     float64
		PerSecond float64 `json:"per_second"`
		Counts    []struct {
			Unit        string
			Done, Total int64
		}
		Doing string
	}
	// last runs a command and returns the last object that it wrote to standard error, and what it wrote to standard output.
	last := func(program string, args ...string) (st state, out string) {
		t.Helper()
		cmd := exec.Command(harness.Bin(t, program), append(args, "--progress", "json")...)
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v: %v: %s", cmd.Args, err, &stderr)
		}
		for line := range strings.Lines(stderr.String()) {
			if !strings.HasPrefix(line, "{") {
				continue
			}
			st = state{}
			if err := json.Unmarshal([]byte(line), &st); err != nil {
				t.Fatalf("%v: %v: %s", cmd.Args, err, line)
			}
		}
		return st, stdout.String()
	}
	st, out := last("weft", "layout", "move", m.Dir, "--to", devices[0].ID)
	if st.Share != 1 || len(st.Counts) != 2 || st.Counts[0].Unit != "bytes" || st.Counts[0].Done != 2*size || st.Counts[0].Total != 2*size ||
		st.Counts[1].Unit != "files" || st.Counts[1].Done != 2 || !strings.HasPrefix(out, "2 files moved") {
		t.Errorf("layout move: %+v, %s", st, out)
	}
	st, out = last("weft", "admin", "device", "drain", devices[0].ID, "--wait", "--server", v.Addr)
	if list(); devices[0].Files != 0 || devices[1].Files == 0 || !strings.Contains(out, "is drained") {
		t.Errorf("drained: %+v, %s", devices, out)
	}
	if st.Seconds > 0 && (st.Share != 1 || len(st.Counts) != 1 || st.Counts[0].Unit != "data files" || st.Counts[0].Done != st.Counts[0].Total) {
		t.Errorf("drain: %+v", st)
	}
	if st, _ := last("weft", "admin", "resilver", "--server", v.Addr); st.Seconds != 0 {
		t.Errorf("there is nothing to be made anew: %+v", st)
	}
	m.Unmount()
	v.Stop()
	dump := filepath.Join(t.TempDir(), "dump")
	if st, _ := last("weftd", "catalog", "export", "--from", v.Dir, "--to", dump); st.Share == 0 || len(st.Counts) != 2 || st.Counts[0].Unit != "rows" || st.Counts[0].Done == 0 {
		t.Errorf("catalog export: %+v", st)
	}
	if st, out := last("weftd", "fsck", "--dir", v.Dir); st.Share == 0 || len(st.Counts) != 1 || st.Counts[0].Done == 0 || st.Doing != "paths" || !strings.Contains(out, "clean") {
		t.Errorf("fsck: %+v, %s", st, out)
	}
}
