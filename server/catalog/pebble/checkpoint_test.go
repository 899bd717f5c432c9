package pebble

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/weftfs/weft/server/catalog"
)

// TestCheckpoint copies a catalog while it is written: the copy has all that was committed before, and each commit as a whole.
func TestCheckpoint(t *testing.T) {
	top := t.TempDir()
	e := mustOpen(t, testConfig(t, filepath.Join(top, "catalog")))
	defer e.Close()
	const before = 2000
	put := func(from, to int, durability catalog.Durability) error {
		for i := from; i < to; i++ {
			b := catalog.Batch{Durability: durability}
			b.Put(fmt.Appendf(nil, "a%08d", i), make([]byte, 100))
			b.Put(fmt.Appendf(nil, "b%08d", i), nil)
			b.Add([]byte("count"), 0, 1)
			if err := e.Commit(t.Context(), &b); err != nil {
				return err
			}
		}
		return nil
	}
	if err := put(0, before, catalog.NoSync); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() { // until stop is closed
		for i := before; ; i += 100 {
			select {
			case <-stop:
				return
			default:
			}
			if err := put(i, i+100, catalog.Sync); err != nil {
				t.Error(err)
				return
			}
		}
	})
	dir := filepath.Join(top, "copy")
	err := e.Checkpoint(t.Context(), dir)
	close(stop)
	writer.Wait()
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(t, dir)
	cfg.MustExist = true
	c := mustOpen(t, cfg)
	defer c.Close()
	rows := map[byte]int{}
	for row, err := range c.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		rows[row.Key[0]]++
	}
	value, err := c.Get(t.Context(), []byte("count"))
	if err != nil {
		t.Fatal(err)
	}
	counters, err := catalog.DecodeCounters(value)
	if err != nil || rows['a'] < before || rows['a'] != rows['b'] || counters.Field(0) != int64(rows['a']) {
		t.Errorf("the copy has %d and %d rows, counted %d; %d were committed before (%v)", rows['a'], rows['b'], counters, before, err)
	}
	if err := e.Checkpoint(t.Context(), dir); err == nil {
		t.Error("a second copy in the same directory is made")
	}
	// Both are catalogs of their own.
	var b catalog.Batch
	b.Put([]byte("copy"), nil)
	if err := c.Commit(t.Context(), &b); err != nil {
		t.Error(err)
	}
	if _, err := e.Get(t.Context(), []byte("copy")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("a row of the copy in the catalog: %v", err)
	}
}
