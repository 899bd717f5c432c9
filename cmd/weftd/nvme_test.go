package main

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// TestNamespaces finds the namespaces of before at the ports of before, unless somebody else has them, and no others.
func TestNamespaces(t *testing.T) {
	dir, log := t.TempDir(), slog.Default()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// start returns the URLs, after a look at what discovery tells at the first port.
	start := func(count int) []string {
		t.Helper()
		var ns namespaces
		urls, err := ns.start(dir, count, minNamespace, "127.0.0.1", log)
		if err != nil {
			t.Fatal(errors.Join(err, ns.stop(ctx)))
		}
		addr, _, _ := strings.Cut(strings.TrimPrefix(urls[0], "nvme://"), "/")
		found, err := nvmetcp.Discover(ctx, nvmetcp.DiscoveryConfig{
			Controller: nvmetcp.Config{HostNQN: "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001", HostID: wire.HostID{1}},
			Addrs:      []string{addr},
		})
		if err := errors.Join(err, ns.stop(ctx)); err != nil {
			t.Fatal(err)
		}
		var told []string
		for _, p := range found.Portals {
			told = append(told, "nvme://"+p.Addr+"/"+p.NQN+"#1")
		}
		if want := slices.Sorted(slices.Values(urls)); !slices.Equal(slices.Sorted(slices.Values(told)), want) {
			t.Errorf("discovery tells of %q, there are %q", told, want)
		}
		return urls
	}
	first := start(2)
	if again := start(2); !slices.Equal(first, again) {
		t.Errorf("first %q, then %q", first, again)
	}
	if st, err := os.Stat(namespaceFile(dir, 1)); err != nil || st.Size() != minNamespace {
		t.Errorf("file of namespace 1: %v, %v", st, err)
	}
	addr, name, _ := strings.Cut(strings.TrimPrefix(first[0], "nvme://"), "/")
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	more := start(3)
	if more[0] == first[0] || !strings.HasSuffix(more[0], name) || more[1] != first[1] {
		t.Errorf("first %q, then with %s taken %q", first, addr, more)
	}
	if third := start(3); !slices.Equal(third, more) {
		t.Errorf("%q, then %q", more, third)
	}

	// Where it was or not at all, for fsck.
	var ns namespaces
	if err := errors.Join(ns.startAgain(dir, log), ns.stop(ctx)); err != nil {
		t.Error(err)
	}
	// A file that is gone is not made anew.
	if err := os.Remove(namespaceFile(dir, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := ns.start(dir, 3, minNamespace, "127.0.0.1", log); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), namespaceFile(dir, 1)) {
		t.Errorf("without a file: %v", err)
	}
	if err := ns.stop(ctx); err != nil {
		t.Error(err)
	}
}

func TestNamespaceID(t *testing.T) {
	n := singleNamespace{UUID: newUUID()}
	if id, err := n.id(); err != nil || id[6]>>4 != 4 || wire.CheckNQN(n.nqn()) != nil {
		t.Errorf("%s: %x, %v", n.UUID, id, err)
	}
	for _, bad := range []string{"", "a", strings.Repeat("g", 36), "00000000-0000-0000-0000-000000000000"} {
		n := singleNamespace{UUID: bad}
		if id, err := n.id(); err == nil {
			t.Errorf("%q: %x", bad, id)
		}
	}
}

func TestNamespaceSize(t *testing.T) {
	for _, c := range []struct {
		blocks uint64
		block  int64
		count  int
		want   int64
	}{
		{0, 4096, 4, 0},
		{1 << 20, 4096, 4, 1 << 30},
		{1<<20 + 1023, 4096, 4, 1 << 30},
		{1 << 26, 4096, 4, 64 << 30},
		{1 << 26, 4096, 1, 64 << 30},
		{math.MaxUint64, 1 << 20, 1, 64 << 30},
	} {
		if got := namespaceSize(c.blocks, c.block, c.count); got != c.want {
			t.Errorf("%d blocks of %d for %d: %d, want %d", c.blocks, c.block, c.count, got, c.want)
		}
	}
}

// TestSecretFlag: a file of secrets that others may read is refused, before anything else is done.
func TestSecretFlag(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "secrets")
	if err := os.WriteFile(file, []byte("* DHHC-1:"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"meta", "single"} {
		err := dispatch(t.Context(), []string{command, "--dir", filepath.Join(dir, "volume"), "--nvme-secretfile", file})
		if err == nil || !strings.Contains(err.Error(), "chmod 600 "+file) {
			t.Errorf("%s: %v", command, err)
		}
	}
}

func TestDiscoveryFlag(t *testing.T) {
	var d discovery
	for _, s := range []string{"a", "10.0.0.1:9", "[fe80::1]", "[fe80::1%eth0]:10"} {
		if err := d.Set(s); err != nil {
			t.Error(err)
		}
	}
	if got, want := d.String(), "a:8009 10.0.0.1:9 [fe80::1]:8009 [fe80::1%eth0]:10"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, bad := range []string{"", ":8009", "a:", "a:0", "a:nvme", "a:65536", "nvme://a", "a/b", "a b"} {
		err := dispatch(t.Context(), []string{"meta", "--dir", t.TempDir(), "--nvme-discovery", bad})
		if err == nil || !strings.Contains(err.Error(), "HOST[:PORT]") || !strings.Contains(err.Error(), strconv.Quote(bad)) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
