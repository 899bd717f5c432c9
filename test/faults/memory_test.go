package faults

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/test/harness"
)

var long = flag.Bool("long", false, "full sizes")

const (
	writers     = 64
	writerRange = 16 << 20 // of its file, which a writer writes again and again
	writerBlock = 1 << 20
	memoryLimit = 256 << 20 // of the serving process
)

// rounds is how often a writer writes its range: 256 MiB, or 32 MiB.
func rounds() int {
	if *long {
		return 16
	}
	return 2
}

// fillBlock makes what a writer writes at off in a round.
func fillBlock(b []byte, name string, off int64, round int) {
	var number uint64
	fmt.Sscanf(name, "w%d", &number)
	for at := 0; at < len(b); at += 16 {
		binary.BigEndian.PutUint64(b[at:], number<<32|uint64(round))
		binary.BigEndian.PutUint64(b[at+8:], uint64(off)+uint64(at))
	}
}

// rewriteEnv makes this test binary rewrite each file that a line of standard input names, all at the same time, and print the
// name of each that is done, or the error.
const rewriteEnv = "WEFT_TEST_REWRITE"

func rewriteAll() {
	var wg sync.WaitGroup
	var mu sync.Mutex // held to print
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		path := in.Text()
		wg.Go(func() { // a writer
			said := filepath.Base(path)
			if err := rewrite(path); err != nil {
				said = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			fmt.Println(said)
		})
	}
	wg.Wait()
}

func rewrite(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close() // a second time, if all goes well
	b := make([]byte, writerBlock)
	for round := range rounds() {
		for off := int64(0); off < writerRange; off += writerBlock {
			fillBlock(b, filepath.Base(path), off, round)
			if _, err := f.WriteAt(b, off); err != nil {
				return err
			}
		}
	}
	return f.Close()
}

// TestMemory has 64 writers rewrite their files, each on one data server, while one of the four is dead. The mount stays within
// its memory. Writers to the others go on, although what those to the dead one have under way takes up all the memory for
// unstable data, and these go on when it is back.
func TestMemory(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{Remote: true, DataServers: 4, Apart: true})
	// Each request under way takes max_write in the process, and until the garbage collector has run so do as many that are over.
	m := v.MountUnder(inMemoryGroup(t, memoryLimit), append(mountOptions(), "retain=16MiB", "max_write=1MiB")...)
	harness.Weft(t, "layout", "set", m.Dir, "--stripe-count", "1")
	dead := v.Servers[0]
	var hit, others []string
	for i := range writers {
		path := filepath.Join(m.Dir, fmt.Sprint("w", i))
		if err := os.WriteFile(path, []byte{0}, 0o644); err != nil {
			t.Fatal(err)
		}
		if v.ServerAt(harness.LayoutOf(t, path).Mirrors[0].Servers[0].Address) == dead {
			hit = append(hit, path)
		} else {
			others = append(others, path)
		}
	}
	if len(hit) == 0 || len(others) == 0 {
		t.Fatalf("%d of %d files are on one of four data servers", len(hit), writers)
	}
	// The writers are a process of their own, see loadEnv.
	cmd := harness.Self(rewriteEnv+"=1", fmt.Sprint("-long=", *long))
	in, out := startPiped(t, cmd)
	said := make(chan string, writers)
	go func() { // ends with the writers
		defer close(said)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			said <- lines.Text()
		}
	}()
	left := map[string]bool{}
	for _, path := range slices.Concat(hit, others) {
		left[filepath.Base(path)] = true
	}
	running := func(path string) bool { return left[filepath.Base(path)] }
	await := func(paths []string) {
		t.Helper()
		deadline := time.After(map[bool]time.Duration{false: 5 * time.Minute, true: time.Hour}[*long])
		for slices.ContainsFunc(paths, running) {
			select {
			case line := <-said:
				if !left[line] {
					t.Fatalf("a writer says %q", line)
				}
				delete(left, line)
			case <-deadline:
				t.Fatalf("these writers have not ended: %v", left)
			}
		}
	}
	// So that what is retained is the dead server's when the others begin.
	fmt.Fprintln(in, strings.Join(hit, "\n"))
	harness.Await(t, "the first round of a writer", func() bool {
		st, err := os.Stat(hit[0])
		if err != nil {
			t.Fatal(err)
		}
		return st.Size() == writerRange
	})
	dead.Kill()
	t.Logf("%d writers of %d have lost their server, with %s not stable", len(hit), writers, retained(t, m))
	fmt.Fprintln(in, strings.Join(others, "\n"))
	in.Close()
	await(others)
	t.Logf("the others have ended, with %s not stable", retained(t, m))
	if !slices.ContainsFunc(hit, running) {
		t.Error("no writer had to wait for the dead server")
	}
	dead.Start()
	await(hit)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the writers: %v", err)
	}
	harness.Weft(t, "sync", m.Dir)
	most := peakMemory(t, m.Pid())
	t.Logf("the mount had %d bytes of memory at most", most)
	if most > memoryLimit {
		t.Errorf("the limit is %d", memoryLimit)
	}
	m.Unmount()
	m = v.Mount(mountOptions()...)
	for i := range writers {
		checkRewritten(t, filepath.Join(m.Dir, fmt.Sprint("w", i)))
	}
	m.Unmount()
	v.Stop()
	v.Fsck()
}

// inMemoryGroup is what starts a program in a memory cgroup of its own, of either version; nothing if there can be none.
func inMemoryGroup(t *testing.T, limit int64) (starter []string) {
	root, limitFile := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(b), "memory") {
		root, limitFile = "/sys/fs/cgroup", "memory.max"
	}
	dir, err := os.MkdirTemp(root, "weft-test-")
	if err != nil {
		t.Logf("no memory cgroup: %v", err)
		return nil
	}
	t.Cleanup(func() {
		harness.Await(t, "the end of the memory cgroup", func() bool { return unix.Rmdir(dir) == nil })
	})
	if err := os.WriteFile(filepath.Join(dir, limitFile), []byte(strconv.FormatInt(limit, 10)), 0o644); err != nil {
		t.Logf("no memory cgroup: %v", err)
		return nil
	}
	return []string{"sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, dir}
}

// retained is how much data a mount keeps because it is not stable.
func retained(t *testing.T, m *harness.Mount) string {
	t.Helper()
	var st []struct {
		Retained int64 `json:"retained_bytes"`
	}
	unmarshal(t, harness.Weft(t, "status", "--json", m.Dir), &st)
	return fmt.Sprint(st[0].Retained, " bytes")
}

// peakMemory is the most memory that a process has had so far, in bytes.
func peakMemory(t *testing.T, pid int) (n int64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	if _, err := fmt.Sscan(after, &n); err != nil {
		t.Fatal(err)
	}
	return n << 10
}

// checkRewritten holds a file against what its writer wrote last.
func checkRewritten(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, want := make([]byte, writerBlock), make([]byte, writerBlock)
	for off := int64(0); off < writerRange; off += writerBlock {
		if _, err := io.ReadFull(f, got); err != nil {
			t.Fatalf("%s at %d: %v", path, off, err)
		}
		if fillBlock(want, filepath.Base(path), off, rounds()-1); !bytes.Equal(got, want) {
			t.Errorf("%s is wrong at %d: it begins with %x, want %x", path, off, got[:16], want[:16])
		}
	}
	if st, err := f.Stat(); err != nil || st.Size() != writerRange {
		t.Errorf("%s: want %d bytes: %v, %v", path, writerRange, st, err)
	}
}
