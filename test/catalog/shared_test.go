package catalog

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/test/harness"
)

// TestShared moves a volume from the embedded engine to one that services can share, checks and backs it up there while it is used, and
// moves it back.
func TestShared(t *testing.T) {
	for _, engine := range []struct {
		name string
		url  func() string
	}{
		{"etcd", func() string { return etcdserver.Start(t, 1).URL("/shared") }},
		{"postgres", func() string { return pgserver.Start(t, pgserver.Options{}).URL() }},
	} {
		t.Run(engine.name, func(t *testing.T) { shared(t, engine.url()) })
	}
}

func shared(t *testing.T, url string) {
	v := harness.NewVolume(t, harness.Options{DataServers: 2, Apart: true})
	m := v.Mount()
	stop := load(t, m.Dir)
	stop()
	victim := filepath.Join(m.Dir, "victim")
	if err := os.WriteFile(victim, make([]byte, 100<<10), 0o644); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	v.Stop()
	top := t.TempDir()
	file := func(name string) string { return filepath.Join(top, name) }
	weftd(t, "catalog", "export", "--from", v.Dir, "--to", file("first"))
	weftd(t, "catalog", "import", "--from", file("first"), "--to", url)
	weftd(t, "catalog", "export", "--from", url, "--to", file("second"))
	same(t, file("first"), file("second"))

	meta := harness.Spawn(t, "weftd", "meta", "--catalog", url, "--listen", v.Addr)
	harness.Await(t, "the service", func() bool {
		return exec.Command(harness.Bin(t, "weft"), "admin", "device", "ls", "--server", v.Addr).Run() == nil
	})
	m = v.Mount()
	victim = filepath.Join(m.Dir, "victim")
	stop = load(t, m.Dir)
	for range *runs {
		if found := fsck(t, "--catalog", url, "--online"); len(found) > 0 {
			t.Errorf("under load: %+v", found)
		}
	}
	at := harness.LayoutOf(t, victim).Mirrors[0].Servers[0]
	if err := os.Remove(v.ServerAt(at.Address).Path(at.DataFile)); err != nil {
		t.Fatal(err)
	}
	found := fsck(t, "--catalog", url, "--online")
	if len(found) != 1 || found[0].Kind != "missing-data-file" || found[0].Path != "/victim" {
		t.Errorf("with a data file less, under load: %+v", found)
	}
	weftd(t, "catalog", "backup", "--from", url, "--to", file("backup"))
	for _, args := range [][]string{
		{"catalog", "export", "--from", url, "--to", file("no")}, {"fsck", "--catalog", url, "--repair"},
	} {
		out, err := exec.Command(harness.Bin(t, "weftd"), args...).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte(v.Addr)) {
			t.Errorf("weftd %v while it is used: %v, %s", args, err, out)
		}
	}
	stop()
	if err := os.Remove(victim); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	meta.End(syscall.SIGTERM)

	weftd(t, "catalog", "export", "--from", url, "--to", file("third"))
	v.Dir = filepath.Join(top, "back")
	weftd(t, "catalog", "import", "--from", file("third"), "--to", v.Dir)
	weftd(t, "catalog", "export", "--from", v.Dir, "--to", file("fourth"))
	same(t, file("third"), file("fourth"))
	v.Fsck()
	weftd(t, "catalog", "import", "--from", file("backup"), "--to", file("restored"))
}

// same compares two files.
func same(t *testing.T, a, b string) {
	t.Helper()
	x, errX := os.ReadFile(a)
	y, errY := os.ReadFile(b)
	if errX != nil || errY != nil || !bytes.Equal(x, y) {
		t.Errorf("%s and %s differ (%v, %v)", a, b, errX, errY)
	}
}
