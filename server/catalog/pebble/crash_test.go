package pebble

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/weftfs/weft/server/catalog"
)

// crashBatch is a commit that can be checked afterwards: two rows that name its id, and a count of all commits.
func crashBatch(id uint64) *catalog.Batch {
	b := new(catalog.Batch)
	b.GuardAbsent(number('a', id))
	b.Put(number('a', id), bytes.Repeat(number('v', id), 8))
	b.Put(number('b', id), number('v', id))
	b.Add([]byte("count"), 0, 1)
	b.Max([]byte("count"), 1, int64(id))
	return b
}

// checkCrash reopens a catalog that crashBatch commits went to and checks that each is there wholly or not at all, that
// the count agrees, and that none of acknowledged is missing. It returns how many there are and the highest id.
func checkCrash(t *testing.T, cfg Config, acknowledged []uint64) (total int, highest uint64) {
	t.Helper()
	ctx := context.Background()
	e := mustOpen(t, cfg)
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	there := [2]map[uint64]bool{{}, {}}
	for i, prefix := range []byte{'a', 'b'} {
		for row, err := range e.Scan(ctx, []byte{prefix}, []byte{prefix + 1}, catalog.ScanOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			id := binary.BigEndian.Uint64(row.Key[1:])
			if !bytes.HasPrefix(row.Value, number('v', id)) {
				t.Fatalf("row %c of commit %d has %x", prefix, id, row.Value)
			}
			there[i][id] = true
		}
	}
	for id := range there[0] {
		highest = max(highest, id)
		if !there[1][id] {
			t.Errorf("commit %d has row a only", id)
		}
	}
	value, err := e.Get(ctx, []byte("count"))
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		t.Fatal(err)
	}
	counters, err := catalog.DecodeCounters(value)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(there[0]); len(there[1]) != n || counters.Field(0) != int64(n) || counters.Field(1) != int64(highest) {
		t.Errorf("%d rows a, %d rows b, counters %d; highest id %d", n, len(there[1]), counters, highest)
	}
	for _, id := range acknowledged {
		if !there[0][id] {
			t.Errorf("commit %d was acknowledged and is gone", id)
		}
	}
	return len(there[0]), highest
}

// crashChild commits from several goroutines until it is killed, and prints the id of each commit that returned.
func crashChild() {
	e, err := Open(Config{Dir: os.Args[1], MemTableBytes: minMemTableBytes, CacheBytes: 1 << 20})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	first, err := strconv.ParseUint(os.Args[2], 10, 64)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var next atomic.Uint64
	next.Store(first)
	for range 8 {
		go func() { // ends with the process
			for {
				id := next.Add(1)
				if err := e.Commit(context.Background(), crashBatch(id)); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				fmt.Fprintf(os.Stdout, "%d\n", id) // one write each
			}
		}()
	}
	select {}
}

// TestKill kills a process that commits, some times over one catalog, and looks for every commit it reported.
func TestKill(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "catalog")
	var acknowledged []uint64
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	for round := range rounds {
		first := uint64(round) * 1e9
		cmd := child(t, "crash", dir, fmt.Sprint(first))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wanted := 1 + rng.IntN(1500)
		n := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var id uint64
			if _, err := fmt.Sscan(lines.Text(), &id); err != nil || id <= first {
				t.Fatalf("the child printed %q", lines.Text())
			}
			acknowledged = append(acknowledged, id)
			if n++; n == wanted {
				if err := cmd.Process.Kill(); err != nil { // SIGKILL; go on reading what was printed before it
					t.Fatal(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil || n < wanted {
			t.Fatalf("round %d: the child ended by itself after %d commits: %v, %s", round, n, err, &stderr)
		}
		total, _ := checkCrash(t, testConfig(t, dir), acknowledged)
		t.Logf("round %d: %d acknowledged, %d there", round, len(acknowledged), total)
	}
}

// TestPowerLoss takes copies of a file system as power cuts would leave it, with none or some of what was not synced, while
// commits, flushes and compactions go on, and opens each.
func TestPowerLoss(t *testing.T) {
	t.Parallel()
	for _, unsynced := range []int{0, 50, 100} {
		t.Run(fmt.Sprintf("unsynced=%d%%", unsynced), func(t *testing.T) {
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			mem := vfs.NewCrashableMem()
			cfg := testConfig(t, "catalog")
			cfg.fs = mem
			e := mustOpen(t, cfg)
			var mu sync.Mutex // of acknowledged
			var acknowledged []uint64
			ids := make(chan uint64)
			var group sync.WaitGroup
			for range 8 {
				group.Go(func() { // ends when ids is closed
					for id := range ids {
						if err := e.Commit(context.Background(), crashBatch(id)); err != nil {
							t.Errorf("commit: %v", err)
						}
						mu.Lock()
						acknowledged = append(acknowledged, id)
						mu.Unlock()
					}
				})
			}
			rng := rand.New(rand.NewPCG(seed, 0))
			id := uint64(0)
			cuts, most := 8, 700
			if testing.Short() {
				cuts, most = 4, 300
			}
			for range cuts {
				for range 1 + rng.IntN(most) {
					id++
					ids <- id
				}
				// The last few are still on their way.
				mu.Lock()
				before := acknowledged[:len(acknowledged):len(acknowledged)]
				mu.Unlock()
				crashed := cfg
				crashed.fs = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsynced, RNG: rng})
				total, _ := checkCrash(t, crashed, before)
				t.Logf("%d acknowledged of %d, %d there", len(before), id, total)
			}
			close(ids)
			group.Wait()
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestNoSyncOrder commits in a row, now and then with Sync. What a power cut leaves must be a beginning of that row, at
// least as far as the last Sync, and a barrier counts as one.
func TestNoSyncOrder(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	mem := vfs.NewCrashableMem()
	cfg := testConfig(t, "catalog")
	cfg.fs = mem
	e := mustOpen(t, cfg)
	ctx := context.Background()
	var durable uint64
	lost, last := 0, uint64(3000)
	if testing.Short() {
		last = 800
	}
	for id := uint64(1); id <= last; id++ {
		b := crashBatch(id)
		switch rng.IntN(20) {
		case 0:
			durable = id
		case 1:
			if err := e.Commit(ctx, new(catalog.Batch)); err != nil {
				t.Fatal(err)
			}
			durable = id - 1
			b.Durability = catalog.NoSync
		case 2:
			failed := new(catalog.Batch)
			failed.GuardPresent([]byte("nobody puts this"))
			var guard *catalog.GuardError
			if err := e.Commit(ctx, failed); !errors.As(err, &guard) {
				t.Fatal(err)
			}
			durable = id - 1
			b.Durability = catalog.NoSync
		default:
			b.Durability = catalog.NoSync
		}
		if err := e.Commit(ctx, b); err != nil {
			t.Fatal(err)
		}
		if rng.IntN(60) != 0 {
			continue
		}
		crashed := cfg
		crashed.fs = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(3) * 50, RNG: rng})
		total, highest := checkCrash(t, crashed, nil)
		if uint64(total) != highest || highest < durable {
			t.Fatalf("of %d commits, %d of them durable, there are %d up to number %d", id, durable, total, highest)
		}
		if highest < id {
			lost++
		}
	}
	if lost == 0 {
		t.Error("no power cut lost anything: the test tests nothing")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}
