package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/dump"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/meta"
	"github.com/weftfs/weft/server/schema"
)

func TestParseCatalog(t *testing.T) {
	for in, want := range map[string]catalogName{
		"/var/lib/weft":        {dir: "/var/lib/weft"},
		"pebble:/var/lib/weft": {dir: "/var/lib/weft"},
		"pebble:rel":           {dir: "rel"},
		"a:b":                  {dir: "a:b"},
	} {
		if got, err := parseCatalog(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for in, want := range map[string]string{"": "name", "redis://h/1": "redis"} {
		if got, err := parseCatalog(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
}

// serving is a volume in a directory whose catalog is in use, as by a service.
func serving(t *testing.T, dir string) (*pebble.Engine, *checkpoints) {
	t.Helper()
	log := quiet()
	engine, err := openEngine(dir, false, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	if _, err := meta.OpenVolume(t.Context(), engine, layout.Policy{}, 1); err != nil {
		t.Fatal(err)
	}
	copies, err := serveCheckpoints(dir, engine, log)
	if err != nil {
		t.Fatal(err)
	}
	return engine, copies
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// TestCatalogCommands backs up a catalog that is in use, and takes it from one directory to another and back when it is not.
func TestCatalogCommands(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, strings.Repeat("long", 40)) // more than a socket's name may have
	engine, copies := serving(t, dir)
	var b catalog.Batch
	b.Put(schema.SessionKey([16]byte{1}), schema.Encode(&schema.Session{Created: 1}))
	if err := engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	file := func(name string) string { return filepath.Join(top, name) }
	run := func(want string, args ...string) {
		t.Helper()
		err := dispatch(t.Context(), append([]string{"catalog"}, args...))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("catalog %s: %v, want %q", strings.Join(args, " "), err, want)
		}
	}
	read := func(name string) []byte {
		t.Helper()
		raw, err := os.ReadFile(file(name))
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	run("catalog backup", "export", "--from", dir, "--to", file("no"))
	run("", "backup", "--from", dir, "--to", file("backup"))
	run("exists", "backup", "--from", dir, "--to", file("backup"))
	run("no such file", "backup", "--from", dir, "--to", file("no/dir"))
	// A service needs a moment to see that a connection was closed.
	waittest.Until(t, "no copy is left", func() bool { return len(entries(t, copies.dir)) == 0 })
	if err := errors.Join(copies.close(), engine.Close()); err != nil {
		t.Fatal(err)
	}

	run("", "backup", "--from", dir, "--to", file("stopped")) // also if nobody runs
	if !bytes.Equal(read("backup"), read("stopped")) {
		t.Error("a backup of the stopped catalog is another one")
	}
	run("", "export", "--from", "pebble:"+dir, "--to", file("export"))
	run("", "import", "--from", file("export"), "--to", file("second"))
	run("", "export", "--from", file("second"), "--to", file("again"))
	if !bytes.Equal(read("export"), read("again")) {
		t.Error("there and back it is another file")
	}
	run("has volume", "import", "--from", file("export"), "--to", file("second"))
	run("has all shards", "import", "--from", file("export"), "--to", file("third"), "--shards", "2")
	run("at least 1", "import", "--from", file("export"), "--to", file("third"), "--shards", "0")
	run("no such file", "import", "--from", file("nothing"), "--to", file("third"))
	run("not a directory of weftd", "export", "--from", top, "--to", file("no"))
	run("not a directory of weftd", "backup", "--from", top, "--to", file("no"))

	// What was cut off is no catalog, until all of it was imported.
	if err := os.WriteFile(file("half"), read("export")[:100], 0o600); err != nil {
		t.Fatal(err)
	}
	run(dump.ErrDamaged.Error(), "import", "--from", file("half"), "--to", file("third"))
	run("has not ended", "export", "--from", file("third"), "--to", file("no"))
	run("", "import", "--from", file("backup"), "--to", file("third"))
	run("not a file of weftd", "import", "--from", filepath.Join(dir, "weftd.lock"), "--to", file("fourth"))

	third, err := openEngine(file("third"), true, quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	raw, err := third.Get(t.Context(), schema.SessionKey([16]byte{1}))
	var s schema.Session
	if err := errors.Join(err, schema.Decode(raw, &s)); err != nil || !s.Ended {
		t.Errorf("the session of a backup: %+v, %v", s, err)
	}
	for _, name := range entries(t, top) {
		if strings.Contains(name, ".part") || name == "no" {
			t.Errorf("%s is left", name)
		}
	}
}

// TestCheckpoints removes copies when those who use them go, when the service ends, and after one that was killed.
func TestCheckpoints(t *testing.T) {
	dir := t.TempDir()
	if _, err := takeCheckpoint(t.Context(), dir); !errors.Is(err, errNoService) {
		t.Errorf("nobody there: %v", err)
	}
	engine, copies := serving(t, dir)
	first, err := takeCheckpoint(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	second, err := takeCheckpoint(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := entries(t, copies.dir); len(got) != 2 || first.dir == second.dir {
		t.Errorf("%v", got)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	waittest.Until(t, "a copy that nobody uses is removed", func() bool { return len(entries(t, copies.dir)) == 1 })
	c, err := pebble.Open(pebble.Config{Dir: second.dir, MustExist: true, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(t.Context(), schema.KeyVolume); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := copies.close(); err != nil {
		t.Error(err)
	}
	if got := entries(t, copies.dir); len(got) != 0 {
		t.Errorf("after the service: %v", got)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if _, err := takeCheckpoint(t.Context(), dir); !errors.Is(err, errNoService) {
		t.Errorf("nobody there any more: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(copies.dir, "old"), 0o700); err != nil {
		t.Fatal(err)
	}
	again, err := serveCheckpoints(dir, engine, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if got := entries(t, copies.dir); len(got) != 0 {
		t.Errorf("after one that was killed: %v", got)
	}
	if err := errors.Join(again.close(), engine.Close()); err != nil {
		t.Error(err)
	}
}
