package commands

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/filename"
	"github.com/weftfs/weft/test/harness"
)

// TestNames has commands show names that are not UTF-8, and that hold what a terminal obeys.
func TestNames(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	m := v.Mount()
	const odd = "a b\n\x1b[31m\xff"
	dir := filepath.Join(m.Dir, odd)
	file := filepath.Join(dir, odd)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, make([]byte, 1_000_000), 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "admin", "quota", "set", dir, "--files", "9", "--server", v.Addr)
	for _, rule := range []string{"*(rw,no_root_squash)", "192.0.2.1(path=/" + odd + ")"} {
		harness.Weft(t, "admin", "client", "set", rule, "--server", v.Addr)
	}
	quoted := func(name string) string { return filename.Quote(name) }
	// In the text there is the name as a shell reads it, and nothing else that a terminal would obey.
	for _, c := range []struct {
		want  string
		fails bool
		args  []string
	}{
		{quoted(file) + ": ", false, []string{"layout", file}},
		{quoted(dir) + ": ", false, []string{"layout", dir}},
		{quoted(dir), false, []string{"du", dir}},
		{quoted("/" + odd), false, []string{"admin", "quota", "ls", "--server", v.Addr}},
		{",path=/" + filename.Escape(odd), false, []string{"admin", "client", "ls", "--server", v.Addr}},
		{quoted(file+"-") + ": no such", true, []string{"layout", file + "-"}},
		{quoted(file) + ": not a directory", true, []string{"du", file}},
		{quoted(dir) + " is not a weft mount", true, []string{"umount", dir}},
		{quoted(file) + " is not a directory", true, []string{"mount", v.Addr + ":/", file}},
		{quoted(v.Addr + ":/" + odd), true, []string{"mount", v.Addr + ":/" + odd + "/none", harness.Dir(t)}},
		{`bench \x1b`, true, []string{"bench \x1b"}},
	} {
		out, err := exec.Command(harness.Bin(t, "weft"), c.args...).CombinedOutput()
		if (err != nil) != c.fails || !strings.Contains(string(out), c.want) || bytes.ContainsAny(out, "\x1b\xff") {
			t.Errorf("weft %q: %v, want %s\n%q", c.args, err, c.want, out)
		}
	}
	// A program gets every byte.
	var layout struct{ File filename.JSON }
	var du, quotas []struct{ Path, Name filename.JSON }
	for _, c := range []struct {
		into any
		got  func() filename.JSON
		want string
		args []string
	}{
		{&layout, func() filename.JSON { return layout.File }, file, []string{"layout", "--json", file}},
		{&du, func() filename.JSON { return du[0].Path }, dir, []string{"du", "--json", dir}},
		{&quotas, func() filename.JSON { return quotas[0].Name }, "/" + odd, []string{"admin", "quota", "ls", "--json", "--server", v.Addr}},
	} {
		if out := harness.Weft(t, c.args...); json.Unmarshal([]byte(out), c.into) != nil || string(c.got()) != c.want {
			t.Errorf("weft %q: %s, want %q", c.args, out, c.want)
		}
	}
	// So it does of what serving processes tell.
	trace := exec.Command(harness.Bin(t, "weft"), "trace", "--json", "--op", "mkdir", m.Dir)
	lines, err := trace.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	got := make(chan filename.JSON, 1)
	go func() { // ends with the command
		var line struct{ Path filename.JSON }
		json.NewDecoder(lines).Decode(&line)
		got <- line.Path
		io.Copy(io.Discard, lines) // or the command would wait for a reader
	}()
	for n := 0; ; n++ { // until the trace, which begins some time, has shown one
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprint("\xfe", n)), 0o755); err != nil && !errors.Is(err, syscall.EDQUOT) {
			t.Fatal(err)
		}
		select {
		case path := <-got:
			if !strings.HasPrefix(string(path), odd+"/\xfe") {
				t.Errorf("traced: %q", path)
			}
			trace.Process.Signal(syscall.SIGINT)
			trace.Wait()
			return
		default:
		}
	}
}

// TestDu asks for what is below a directory right after it was written and closed: stat(2) says the same.
func TestDu(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2})
	m := v.Mount()
	dir := filepath.Join(m.Dir, "d")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for n := range 5 {
		want := int64(0)
		for _, name := range []string{"a", "b"} {
			name = filepath.Join(dir, name)
			f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write(make([]byte, 100_000+n)); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			st, err := os.Stat(name)
			if err != nil {
				t.Fatal(err)
			}
			want += st.Size()
		}
		if out := harness.Weft(t, "du", "--bytes", dir); !strings.HasPrefix(out, fmt.Sprintf("%d  2 files", want)) {
			t.Fatalf("want %d bytes: %s", want, out)
		}
	}
}
