package pebble

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/weftfs/weft/server/catalog"
)

var errDisk = errors.New("the disk gave up")

// failing returns a file system whose operations of the kinds given fail, once armed, on files whose name contains part.
func failing(fs vfs.FS, part string, kinds ...errorfs.OpKind) (vfs.FS, *atomic.Bool) {
	armed := new(atomic.Bool)
	return errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if !armed.Load() || !strings.Contains(op.Path, part) {
			return nil
		}
		for _, kind := range kinds {
			if op.Kind == kind {
				return errDisk
			}
		}
		return nil
	})), armed
}

// TestLogSyncFails lets the sync of the log fail once. No commit from then on may be acknowledged, even though the disk
// works again, and Fatal is called once.
func TestLogSyncFails(t *testing.T) {
	fs, armed := failing(vfs.NewMem(), ".log", errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo)
	var fatal atomic.Int32
	cfg := testConfig(t, "catalog")
	cfg.fs = fs
	cfg.Fatal = func(err error) {
		fatal.Add(1)
		armed.Store(false)
		if !errors.Is(err, errDisk) {
			t.Errorf("Fatal(%v)", err)
		}
	}
	e := mustOpen(t, cfg)
	commit := func(key string, d catalog.Durability) error {
		b := &catalog.Batch{Durability: d}
		b.Put([]byte(key), nil)
		return e.Commit(context.Background(), b)
	}
	if err := commit("before", catalog.Sync); err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			err := commit(fmt.Sprint(i), catalog.Sync)
			if !errors.Is(err, catalog.ErrUnknown) && !errors.Is(err, catalog.ErrClosed) {
				t.Errorf("commit %d: %v", i, err)
			}
		})
	}
	group.Wait()
	if n := fatal.Load(); n != 1 {
		t.Errorf("Fatal was called %d times", n)
	}
	for _, d := range []catalog.Durability{catalog.Sync, catalog.NoSync} {
		if err := commit("after", d); !errors.Is(err, catalog.ErrClosed) {
			t.Errorf("a later commit: %v", err)
		}
	}
	if _, err := e.Get(context.Background(), []byte("before")); !errors.Is(err, catalog.ErrClosed) {
		t.Errorf("a later read: %v", err)
	}
}

// TestDiskFull has the log find no room: what was committed then is not known, and it is told why the engine has stopped.
func TestDiskFull(t *testing.T) {
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		armed := new(atomic.Bool)
		cfg := testConfig(t, "catalog")
		cfg.fs = errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
			if armed.Load() && strings.Contains(op.Path, ".log") && op.Kind == errorfs.OpFileWrite {
				return &os.PathError{Op: "write", Path: op.Path, Err: cause}
			}
			return nil
		}))
		fatal := make(chan error, 10)
		cfg.Fatal = func(err error) { fatal <- err }
		e := mustOpen(t, cfg)
		armed.Store(true)
		b := new(catalog.Batch)
		b.Put([]byte("a"), nil)
		if err := e.Commit(t.Context(), b); !errors.Is(err, catalog.ErrFull) || !errors.Is(err, catalog.ErrUnknown) {
			t.Errorf("%v: %v", cause, err)
		}
		if err := <-fatal; !errors.Is(err, catalog.ErrFull) {
			t.Errorf("%v: Fatal(%v)", cause, err)
		}
		if err := e.Commit(t.Context(), b); !errors.Is(err, catalog.ErrClosed) {
			t.Errorf("%v: a later commit: %v", cause, err)
		}
	}
}

// TestBarrierFails is the same for the sync behind an answer that wrote nothing.
func TestBarrierFails(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		fs, armed := failing(vfs.NewMem(), ".log", errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo)
		fatal := make(chan error, 10)
		cfg := testConfig(t, "catalog")
		cfg.fs = fs
		cfg.Fatal = func(err error) { fatal <- err }
		e := mustOpen(t, cfg)
		lazy := &catalog.Batch{Durability: catalog.NoSync}
		lazy.Put([]byte("a"), nil)
		if err := e.Commit(t.Context(), lazy); err != nil {
			t.Fatal(err)
		}
		armed.Store(true)
		b := new(catalog.Batch)
		if guarded {
			b.GuardAbsent([]byte("a"))
		}
		if err := e.Commit(t.Context(), b); !errors.Is(err, catalog.ErrUnknown) {
			t.Errorf("guarded %v: %v", guarded, err)
		}
		if len(fatal) != 1 {
			t.Errorf("guarded %v: Fatal was called %d times", guarded, len(fatal))
		}
	}
}

// TestManifestFails lets a flush fail to record its table, which Pebble cannot go on after.
func TestManifestFails(t *testing.T) {
	fs, armed := failing(vfs.NewMem(), "MANIFEST", errorfs.OpFileWrite, errorfs.OpFileSync)
	fatal := make(chan error, 10)
	cfg := testConfig(t, "catalog")
	cfg.fs = fs
	cfg.Fatal = func(err error) { fatal <- err }
	e := mustOpen(t, cfg)
	b := new(catalog.Batch)
	b.Put([]byte("a"), nil)
	if err := e.Commit(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	if _, err := e.db.AsyncFlush(); err != nil {
		t.Fatal(err)
	}
	if err := <-fatal; !strings.Contains(err.Error(), errDisk.Error()) {
		t.Errorf("Fatal(%v)", err)
	}
	if err := e.Commit(t.Context(), b); !errors.Is(err, catalog.ErrClosed) {
		t.Errorf("a later commit: %v", err)
	}
}

// TestWitnessFails: not being able to note the size of the MANIFEST is no reason to stop, and leaves no stale note.
func TestWitnessFails(t *testing.T) {
	mem := vfs.NewMem()
	fs, armed := failing(mem, witnessName, errorfs.OpCreate, errorfs.OpFileWrite)
	cfg := testConfig(t, "catalog")
	cfg.fs = fs
	e := mustOpen(t, cfg)
	armed.Store(true)
	b := new(catalog.Batch)
	b.Put([]byte("a"), []byte("1"))
	if err := e.Commit(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if err := e.db.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := mem.Stat(mem.PathJoin(cfg.Dir, witnessName)); err == nil {
		t.Error("the old witness is still there")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = mustOpen(t, cfg)
	if got, err := e.Get(t.Context(), []byte("a")); err != nil || string(got) != "1" {
		t.Errorf("get: %q, %v", got, err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// fatalChild has the default Fatal and a log that fails.
func fatalChild() {
	fs, armed := failing(vfs.NewMem(), ".log", errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo)
	e, err := Open(Config{Dir: "catalog", fs: fs})
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	armed.Store(true)
	b := new(catalog.Batch)
	b.Put([]byte("a"), nil)
	fmt.Println("acknowledged:", e.Commit(context.Background(), b))
	os.Exit(4)
}

func TestFatalExits(t *testing.T) {
	out, err := child(t, "fatal").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), errDisk.Error()) {
		t.Errorf("%v: %s", err, out)
	}
	if strings.Contains(string(out), "acknowledged") {
		t.Errorf("the commit returned: %s", out)
	}
}
