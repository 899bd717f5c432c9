package dump

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/server/catalog/etcd"
	"github.com/weftfs/weft/server/catalog/postgres"
)

// engines are the distributed ones, on servers of the test.
func engines(t *testing.T) []place {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	base := pgserver.Start(t, pgserver.Options{}).URL()
	tables := 0
	cluster := etcdserver.Start(t, 3)
	return []place{
		{"postgres", func(t *testing.T) catalog.Engine {
			tables++
			with := "?"
			if strings.Contains(base, "?") {
				with = "&"
			}
			e, err := postgres.Open(t.Context(), postgres.Config{URL: fmt.Sprint(base, with, "weft_table=t", tables), Logger: log})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { e.Close() })
			return e
		}},
		{"etcd", func(t *testing.T) catalog.Engine {
			cfg, err := etcd.ParseURL(cluster.URL("/dump"))
			if err != nil {
				t.Fatal(err)
			}
			cfg.Logger = log
			e, err := etcd.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { e.Close() })
			return e
		}},
	}
}

// TestDistributed takes a volume from the embedded engine to each of the distributed ones, from there to the next, and back.
func TestDistributed(t *testing.T) {
	embedded := places[len(places)-1].make
	first := embedded(t)
	populate(t, first, 11)
	file := export(t, first, KindExport)
	at := first
	for _, to := range append(engines(t), place{"pebble", embedded}) {
		next := to.make(t)
		if _, err := Import(t.Context(), bytes.NewReader(export(t, at, KindExport)), ImportConfig{Engine: next}); err != nil {
			t.Fatalf("to %s: %v", to.name, err)
		}
		if got := export(t, next, KindExport); string(got) != string(file) {
			t.Errorf("%s gives another file", to.name)
		}
		at = next
	}
}
