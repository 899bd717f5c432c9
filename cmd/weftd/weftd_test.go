package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestDeviceURL(t *testing.T) {
	for in, want := range map[string]string{
		"host:2049:/":      "nfs://host:2049/",
		"host:2049:/a/b":   "nfs://host:2049/a/b",
		"[::1]:2049:/data": "nfs://[::1]:2049/data",
	} {
		if got, err := deviceURL(in); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "host", "host:/", "host:2049", "host:2049/", ":2049:/", "host::/", "::1:2049:/", "nfs://host:2049/"} {
		if got, err := deviceURL(in); err == nil || !strings.Contains(err.Error(), "HOST:PORT:/EXPORT") {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

func TestListen(t *testing.T) {
	l, err := listen("127.0.0.1:0", "1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := listen(l.Addr().String(), "1"); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a port in use: %v", err)
	}
	byDefault, err := listen("[::1]", "0")
	if err != nil {
		byDefault, err = listen("127.0.0.1", "0") // a machine without IPv6
	}
	if err != nil {
		t.Errorf("the default port: %v", err)
	} else {
		byDefault.Close()
	}
	for _, bad := range []string{"127.0.0.1:port", "127.0.0.1:70000", "a:b:c"} {
		if l, err := listen(bad, "0"); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v, %v", bad, l, err)
		}
	}
}

func TestSingleState(t *testing.T) {
	dir := t.TempDir()
	if _, found, err := readSingleState(dir); found || err != nil {
		t.Fatalf("of an empty directory: %v, %v", found, err)
	}
	want := singleState{Host: "::1", Ports: []int{1, 2, 3}, Namespaces: []singleNamespace{{newUUID(), 4}, {newUUID(), 5}}}
	if err := want.write(dir); err != nil {
		t.Fatal(err)
	}
	if got, found, err := readSingleState(dir); !found || err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v, %v, %v", got, found, err)
	}
	// Fewer data servers than before are refused before any is started.
	var servers dataServers
	if _, err := servers.startSingle(dir, 2, "127.0.0.1", slog.Default()); err == nil || len(servers.list) != 0 || !strings.Contains(err.Error(), "3 data servers") {
		t.Errorf("fewer: %v", err)
	}
	if _, err := servers.namespaces.start(dir, 1, 0, "127.0.0.1", slog.Default()); err == nil || servers.namespaces.target != nil || !strings.Contains(err.Error(), "2 namespaces") {
		t.Errorf("fewer namespaces: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "single.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := readSingleState(dir); err == nil || !strings.Contains(err.Error(), "single.json") {
		t.Errorf("half a file: %v", err)
	}
}

// TestStartSingle finds the ports of before, unless somebody else has them.
func TestStartSingle(t *testing.T) {
	dir, log := t.TempDir(), slog.Default()
	start := func(count int) []string {
		t.Helper()
		var servers dataServers
		addrs, err := servers.startSingle(dir, count, "127.0.0.1", log)
		if err := errors.Join(err, servers.stop()); err != nil {
			t.Fatal(err)
		}
		return addrs
	}
	first := start(1)
	l, err := net.Listen("tcp", strings.Trim(first[0], "nfs:/"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	second := start(2)
	if second[0] == first[0] || second[0] == second[1] {
		t.Errorf("first %v, then with %s taken %v", first, first[0], second)
	}
	state, found, err := readSingleState(dir)
	if err != nil || !found || len(state.Ports) != 2 {
		t.Errorf("remembered %+v, %v, %v", state, found, err)
	}
}

func TestLockDir(t *testing.T) {
	dir := t.TempDir()
	lock, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := lockDir(dir); err == nil || !strings.Contains(err.Error(), "another weftd") {
		t.Errorf("twice: %v, %v", second, err)
	}
	lock.Close()
	if lock, err = lockDir(dir); err != nil {
		t.Fatal(err)
	}
	lock.Close()
}

func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		want int
	}{
		{"version", 0},
		{"--help", 0},
		{"fsck --help", 0},
		{"", exitUsage},
		{"mount", exitUsage},
		{"version more", exitUsage},
		{"single", exitUsage},
		{"single --dir " + dir + " --data-servers 0", exitUsage},
		{"single --dir " + dir + " --no-such-flag", exitUsage},
		{"single --dir " + dir + " --nvme -1", exitUsage},
		{"single --dir " + dir + " --nvme 257", exitUsage},
		{"single --dir " + dir + " --nvme 1 --data-servers -1", exitUsage},
		{"single --dir " + dir + " --nvme 1 --nvme-size 1MiB", exitUsage},
		{"single --dir " + dir + " --nvme 1 --nvme-size large", exitUsage},
		{"single --dir " + dir + " --nvme-discovery host:0", exitUsage},
		{"data --dir a,b --listen 127.0.0.1:0", exitUsage},
		{"data --dir= --listen=", exitUsage},
		{"data --dir " + dir + " --listen 127.0.0.1:0 --io fast", exitUsage},
		{"meta --dir " + dir + " --data-server host:/", exitUsage},
		{"meta --dir " + dir + " --listen nowhere.invalid:port", exitFailed},
		{"catalog", exitUsage},
		{"catalog export", exitUsage},
		{"catalog export --help", 0},
		{"catalog export --from " + dir + "/none --to " + dir + "/file", exitFailed},
		{"catalog import --from " + dir + "/none --to " + dir + "/new", exitFailed},
		{"catalog backup --from redis://h --to " + dir + "/file", exitUsage},
		{"fsck --dir a --catalog b", exitUsage},
		{"fsck --dir " + dir + " --online --repair", exitUsage},
		{"fsck --dir " + dir + " --rate 5", exitUsage},
		{"fsck --dir " + dir + " --online", fsckCouldNotRun},
		{"fsck", fsckCouldNotRun},
		{"fsck --dir " + dir, fsckCouldNotRun},
	} {
		if got := program.ExitCode(dispatch(context.Background(), strings.Fields(c.args))); got != c.want {
			t.Errorf("weftd %s: %d, want %d", c.args, got, c.want)
		}
	}
}
