package pebble

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cpebble "github.com/cockroachdb/pebble/v2"

	"github.com/weftfs/weft/server/catalog"
)

// childEnv makes this test binary run one of the children below instead of the tests.
const childEnv = "WEFT_CATALOG_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "open":
		openChild()
	case "crash":
		crashChild()
	case "fatal":
		fatalChild()
	}
	fmt.Fprintln(os.Stderr, "unknown child", os.Getenv(childEnv))
	os.Exit(2)
}

// child returns a command that runs the child called name.
func child(t *testing.T, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	return cmd
}

// openChild opens a catalog and prints the error.
func openChild() {
	e, err := Open(Config{Dir: os.Args[1]})
	fmt.Println(errors.Is(err, catalog.ErrLocked), err)
	if err == nil {
		err = e.Close()
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// wantOneLine fails unless err is of the kind wanted, names dir and fits a line.
func wantOneLine(t *testing.T, err, want error, dir string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
	if text := err.Error(); strings.Contains(text, "\n") || !strings.Contains(text, dir) {
		t.Errorf("%q is not one line with %s in it", text, dir)
	}
	t.Log(err)
}

func TestOpenLocked(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "catalog")
	e := mustOpen(t, testConfig(t, dir))
	if err := os.Symlink(dir, filepath.Join(parent, "link")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(parent)
	for _, name := range []string{dir, "catalog", dir + "/", "./link", filepath.Join(parent, "link")} {
		_, err := Open(testConfig(t, name))
		wantOneLine(t, err, catalog.ErrLocked, name)
	}
	out, err := child(t, "open", dir).CombinedOutput()
	if err == nil || !bytes.HasPrefix(out, []byte("true ")) {
		t.Errorf("another process: %s, %v; want ErrLocked", out, err)
	}
	if err := e.Commit(context.Background(), new(catalog.Batch)); err != nil {
		t.Errorf("the first one was harmed: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if out, err := child(t, "open", dir).CombinedOutput(); err != nil {
		t.Errorf("after close, another process: %s, %v", out, err)
	}
}

func TestOpenNothingThere(t *testing.T) {
	parent := t.TempDir()
	cfg := testConfig(t, filepath.Join(parent, "catalog"))
	cfg.MustExist = true
	_, err := Open(cfg)
	wantOneLine(t, err, catalog.ErrNoCatalog, cfg.Dir)
	if _, err := os.Stat(cfg.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory was made: %v", err)
	}
	if err := os.Mkdir(cfg.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err = Open(cfg)
	wantOneLine(t, err, catalog.ErrNoCatalog, cfg.Dir)
	if names := list(t, cfg.Dir); len(names) > 0 {
		t.Errorf("there are now %v", names)
	}

	_, err = Open(testConfig(t, filepath.Join(parent, "no", "such", "parent")))
	wantOneLine(t, err, os.ErrNotExist, "no/such/parent")

	cfg.MustExist = false
	if err := os.Mkdir(filepath.Join(cfg.Dir, "lost+found"), 0o700); err != nil { // a file system of its own
		t.Fatal(err)
	}
	for range 2 {
		e := mustOpen(t, cfg)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		cfg.MustExist = true
	}
}

func TestOpenSomethingElse(t *testing.T) {
	for _, name := range []string{"thesis.tex", "mail.log", ".log"} {
		dir := t.TempDir()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(testConfig(t, dir))
		wantOneLine(t, err, catalog.ErrNotCatalog, dir)
		if names := list(t, dir); len(names) != 1 {
			t.Errorf("there are now %v", names)
		}
		if _, err := Open(testConfig(t, file)); err == nil {
			t.Error("opened a file")
		}
	}

	foreign := t.TempDir()
	db, err := cpebble.Open(foreign, &cpebble.Options{Logger: &libraryLogger{testConfig(t, "").Logger, nil}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Set([]byte("a"), []byte("1"), cpebble.Sync), db.Close()); err != nil {
		t.Fatal(err)
	}
	before := list(t, foreign)
	_, err = Open(testConfig(t, foreign))
	wantOneLine(t, err, catalog.ErrNotCatalog, foreign)
	if after := list(t, foreign); !slices.Equal(before, after) {
		t.Errorf("files were %v, are %v", before, after)
	}
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// makeFull makes a catalog with several tables, more than one MANIFEST's worth of history and rows in the log, which spans
// several of its 32 KiB blocks. It returns the key of a row in a table and of one in the log.
func makeFull(t *testing.T, dir string) (flushed, logged []byte) {
	t.Helper()
	ctx := context.Background()
	cfg := testConfig(t, dir)
	cfg.MemTableBytes = 1 << 20
	for round := range uint64(2) {
		e := mustOpen(t, cfg)
		rng := rand.New(rand.NewPCG(1, round))
		put := func(prefix byte, id uint64, d catalog.Durability) {
			b := &catalog.Batch{Durability: d}
			value := make([]byte, 100)
			for i := range value {
				value[i] = byte(rng.Uint32()) // does not compress
			}
			b.Put(number(prefix, id), value)
			if err := e.Commit(ctx, b); err != nil {
				t.Fatal(err)
			}
		}
		for i := range uint64(2000) {
			put('t', 2000*round+i, catalog.NoSync)
			if i%1000 == 999 {
				if err := e.db.Flush(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for i := range uint64(1000) {
			d := catalog.NoSync
			if i%20 == 0 {
				d = catalog.Sync
			}
			put('z', 1000*round+i, d)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return number('t', 1000), number('z', 1999)
}

// file returns the only or, of several, the last file of dir whose name matches.
func file(t *testing.T, dir, pattern string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("no %s in %s (%v)", pattern, list(t, dir), err)
	}
	return names[len(names)-1]
}

// change rewrites a file.
func rewrite(t *testing.T, name string, with func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, with(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, name string) {
	t.Helper()
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
}

func nothing([]byte) []byte { return nil }

func half(b []byte) []byte { return b[:len(b)/2] }

func flipMiddle(b []byte) []byte {
	b[len(b)/2] ^= 0x10
	return b
}

func garbage(b []byte) []byte {
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// TestOpenDamaged damages a catalog in every way that can be seen at once. Open must say so and remove nothing: with the
// files put back, everything is there.
func TestOpenDamaged(t *testing.T) {
	t.Parallel()
	sound := filepath.Join(t.TempDir(), "sound")
	flushed, logged := makeFull(t, sound)
	for name, damage := range map[string]func(t *testing.T, dir string){
		"MANIFEST empty":   func(t *testing.T, dir string) { rewrite(t, file(t, dir, "MANIFEST-*"), nothing) },
		"MANIFEST half":    func(t *testing.T, dir string) { rewrite(t, file(t, dir, "MANIFEST-*"), half) },
		"MANIFEST bit":     func(t *testing.T, dir string) { rewrite(t, file(t, dir, "MANIFEST-*"), flipMiddle) },
		"MANIFEST garbage": func(t *testing.T, dir string) { rewrite(t, file(t, dir, "MANIFEST-*"), garbage) },
		"MANIFEST last byte": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "MANIFEST-*"), func(b []byte) []byte { return b[:len(b)-1] })
		},
		"MANIFEST removed": func(t *testing.T, dir string) { remove(t, file(t, dir, "MANIFEST-*")) },
		"marker removed":   func(t *testing.T, dir string) { remove(t, file(t, dir, "marker.manifest.*")) },
		"both without a size": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "MANIFEST-*"), nothing)
			remove(t, file(t, dir, witnessName))
		},
		"marker of no file": func(t *testing.T, dir string) {
			if err := os.Rename(file(t, dir, "marker.manifest.*"), filepath.Join(dir, "marker.manifest.000009.MANIFEST-999999")); err != nil {
				t.Fatal(err)
			}
		},
		"marker of no name": func(t *testing.T, dir string) {
			if err := os.Rename(file(t, dir, "marker.manifest.*"), filepath.Join(dir, "marker.manifest.000009.what")); err != nil {
				t.Fatal(err)
			}
		},
		"marker malformed": func(t *testing.T, dir string) {
			if err := os.Rename(file(t, dir, "marker.manifest.*"), filepath.Join(dir, "marker.manifest.")); err != nil {
				t.Fatal(err)
			}
		},
		"OPTIONS empty":   func(t *testing.T, dir string) { rewrite(t, file(t, dir, "OPTIONS-*"), nothing) },
		"OPTIONS garbage": func(t *testing.T, dir string) { rewrite(t, file(t, dir, "OPTIONS-*"), garbage) },
		"format removed":  func(t *testing.T, dir string) { remove(t, file(t, dir, "marker.format-version.*")) },
		"table removed":   func(t *testing.T, dir string) { remove(t, file(t, dir, "*.sst")) },
		"table half":      func(t *testing.T, dir string) { rewrite(t, file(t, dir, "*.sst"), half) },
		"table empty":     func(t *testing.T, dir string) { rewrite(t, file(t, dir, "*.sst"), nothing) },
		"log bit": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "*.log"), func(b []byte) []byte { b[200] ^= 1; return b })
		},
		"older data only": func(t *testing.T, dir string) {
			remove(t, file(t, dir, "marker.manifest.*"))
			remove(t, file(t, dir, "*.log"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "catalog")
			if err := os.CopyFS(dir, os.DirFS(sound)); err != nil {
				t.Fatal(err)
			}
			damage(t, dir)
			before := list(t, dir)
			for range 2 {
				_, err := Open(testConfig(t, dir))
				wantOneLine(t, err, catalog.ErrCorrupt, dir)
			}
			after := list(t, dir)
			for _, name := range before {
				if !slices.Contains(after, name) {
					t.Errorf("Open removed %s", name)
				}
			}
			for _, name := range after { // the damaged marker would be the newer one
				if !slices.Contains(list(t, sound), name) {
					remove(t, filepath.Join(dir, name))
				}
			}
			for _, name := range list(t, sound) {
				b, err := os.ReadFile(filepath.Join(sound, name))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			e := mustOpen(t, testConfig(t, dir))
			for _, key := range [][]byte{flushed, logged} {
				if _, err := e.Get(t.Context(), key); err != nil {
					t.Errorf("with the files put back, %q: %v", key, err)
				}
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestOpenAfterCrash leaves what crashes leave. All of it must open, with everything there.
func TestOpenAfterCrash(t *testing.T) {
	sound := filepath.Join(t.TempDir(), "sound")
	flushed, logged := makeFull(t, sound)
	for name, leave := range map[string]func(t *testing.T, dir string){
		"half a record in the MANIFEST": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "MANIFEST-*"), func(b []byte) []byte { return append(b, 1, 2, 3, 4, 200, 0, 1, 'x', 'y') })
		},
		"zeros behind the MANIFEST": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "MANIFEST-*"), func(b []byte) []byte { return append(b, make([]byte, 5000)...) })
		},
		"half a record in the log": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, "*.log"), func(b []byte) []byte { return append(b, 9, 9, 9) })
		},
		"no witness":     func(t *testing.T, dir string) { remove(t, file(t, dir, witnessName)) },
		"empty witness":  func(t *testing.T, dir string) { rewrite(t, file(t, dir, witnessName), nothing) },
		"half a witness": func(t *testing.T, dir string) { rewrite(t, file(t, dir, witnessName), half) },
		"a MANIFEST synced, not yet switched to": func(t *testing.T, dir string) {
			rewrite(t, file(t, dir, witnessName), func(b []byte) []byte { return decodeWitness(b).set("MANIFEST-999999", 1<<40).encode() })
		},
		"an unfinished witness": func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, witnessName+".new"), []byte("weft"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a table nobody knows": func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, "999998.sst"), []byte("half"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "catalog")
			if err := os.CopyFS(dir, os.DirFS(sound)); err != nil {
				t.Fatal(err)
			}
			leave(t, dir)
			for range 2 {
				e := mustOpen(t, testConfig(t, dir))
				for _, key := range [][]byte{flushed, logged} {
					if _, err := e.Get(t.Context(), key); err != nil {
						t.Errorf("%q: %v", key, err)
					}
				}
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestOpenInterruptedCreation opens what is left when the process is killed while it makes a catalog.
func TestOpenInterruptedCreation(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"LOCK", "MANIFEST-000001", "temporary.000003.dbtmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e := mustOpen(t, testConfig(t, dir))
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenNewerFormat(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "catalog")
	if err := mustOpen(t, testConfig(t, dir)).Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file(t, dir, "marker.format-version.*"), filepath.Join(dir, "marker.format-version.000099.999")); err != nil {
		t.Fatal(err)
	}
	_, err := Open(testConfig(t, dir))
	if err == nil || errors.Is(err, catalog.ErrCorrupt) || !strings.Contains(err.Error(), "newer") {
		t.Errorf("got %v", err)
	}
}

// TestGarbageInTables keeps the size of the tables, so that only reading can notice. Every answer must be an error or
// right, and the rest of the catalog must go on.
func TestGarbageInTables(t *testing.T) {
	t.Parallel()
	sound := filepath.Join(t.TempDir(), "sound")
	flushed, logged := makeFull(t, sound)
	for name, with := range map[string]func([]byte) []byte{"all": garbage, "a bit": flipMiddle} {
		t.Run(name, func(t *testing.T) {
			ctx, dir := t.Context(), filepath.Join(t.TempDir(), "catalog")
			if err := os.CopyFS(dir, os.DirFS(sound)); err != nil {
				t.Fatal(err)
			}
			tables, err := filepath.Glob(filepath.Join(dir, "*.sst"))
			if err != nil || len(tables) == 0 {
				t.Fatalf("no tables, %v", err)
			}
			for _, table := range tables {
				rewrite(t, table, with)
			}
			e := mustOpen(t, testConfig(t, dir))
			defer func() {
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			}()
			corrupt := 0
			every := uint64(10) // each error comes with a stack trace, which takes its time
			if testing.Short() {
				every = 100
			}
			for i := uint64(0); i < 4000; i += every {
				value, err := e.Get(ctx, number('t', i))
				switch {
				case err == nil && len(value) == 100:
				case errors.Is(err, catalog.ErrCorrupt):
					corrupt++
				default:
					t.Fatalf("get %d: %d bytes, %v", i, len(value), err)
				}
			}
			if corrupt == 0 || name == "all" && corrupt < int(4000/every) {
				t.Errorf("%d of %d rows cannot be read", corrupt, 4000/every)
			}
			var last error
			for _, last = range e.Scan(ctx, nil, nil, catalog.ScanOptions{}) {
			}
			if !errors.Is(last, catalog.ErrCorrupt) {
				t.Errorf("scan ended with %v", last)
			}
			if name == "all" {
				b := new(catalog.Batch)
				b.GuardPresent(flushed)
				if err := e.Commit(ctx, b); !errors.Is(err, catalog.ErrCorrupt) {
					t.Errorf("guard on a row that cannot be read: %v", err)
				}
			}
			if _, err := e.Get(ctx, logged); err != nil {
				t.Errorf("a row of the log: %v", err)
			}
			b := new(catalog.Batch)
			b.Put(flushed, []byte("written again"))
			if err := e.Commit(ctx, b); err != nil {
				t.Error(err)
			}
			if got, err := e.Get(ctx, flushed); err != nil || string(got) != "written again" {
				t.Errorf("get: %q, %v", got, err)
			}
		})
	}
}

// TestSpoiledCountersDoNotStopFlushes puts operands that make no sense under the merge operator, and lets flushes and
// compactions meet them. Only those rows may suffer.
func TestSpoiledCountersDoNotStopFlushes(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	e := mustOpen(t, testConfig(t, dir))
	misuse := new(catalog.Batch)
	misuse.Put([]byte("misused"), []byte("seven b"))
	misuse.Put([]byte("sound"), []byte("1"))
	if err := e.Commit(ctx, misuse); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		if got, err := e.Get(ctx, []byte("damaged")); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("damaged: %q, %v", got, err)
		}
		if got, err := e.Get(ctx, []byte("misused")); !errors.Is(err, catalog.ErrNotCounters) {
			t.Errorf("misused: %q, %v", got, err)
		}
		if got, err := e.Get(ctx, []byte("sound")); err != nil || string(got) != "1" {
			t.Errorf("sound: %q, %v", got, err)
		}
	}
	for range 3 {
		if err := e.db.Merge([]byte("damaged"), []byte("garbage"), cpebble.NoSync); err != nil {
			t.Fatal(err)
		}
		b := new(catalog.Batch)
		b.Add([]byte("misused"), 0, 1)
		b.Add([]byte("damaged"), 0, 1)
		if err := e.Commit(ctx, b); err != nil && !errors.Is(err, catalog.ErrCorrupt) {
			t.Fatal(err)
		}
		check()
		if err := e.db.Flush(); err != nil {
			t.Fatal(err)
		}
		check()
	}
	if err := e.db.Compact(ctx, []byte("a"), []byte("z"), false); err != nil {
		t.Fatal(err)
	}
	check()
	repair := new(catalog.Batch)
	repair.Delete([]byte("damaged"))
	repair.Put([]byte("misused"), catalog.EncodeCounters(1))
	repair.Add([]byte("misused"), 0, 1)
	repair.Add([]byte("damaged"), 0, 2)
	if err := e.Commit(ctx, repair); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"damaged", "misused"} {
		if got, err := e.Get(ctx, []byte(key)); err != nil || !bytes.Equal(got, catalog.EncodeCounters(2)) {
			t.Errorf("%s after repair: %x, %v", key, got, err)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestConfigValidate(t *testing.T) {
	for name, cfg := range map[string]Config{
		"Dir":           {},
		"MemTableBytes": {Dir: "x", MemTableBytes: 1},
		"MemTables":     {Dir: "x", MemTables: 1},
		"CacheBytes":    {Dir: "x", CacheBytes: -1},
	} {
		if _, err := Open(cfg); err == nil || !strings.Contains(err.Error(), "Config."+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
