package postgres_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/catalog/postgres"
)

// quiet drops what engines log.
var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// database returns the URL of a database: WEFT_TEST_POSTGRES, or that of a server which is started for the test.
func database(t testing.TB) string {
	if own := os.Getenv("WEFT_TEST_POSTGRES"); own != "" {
		return own
	}
	return pgserver.Start(t, pgserver.Options{}).URL()
}

var tables atomic.Int64

// newTable returns base with the name of a table that is not there yet.
func newTable(t testing.TB, base string) string {
	t.Helper()
	between := "?"
	if strings.Contains(base, "?") {
		between = "&"
	}
	table := fmt.Sprintf("weft_test_%d_%d", os.Getpid(), tables.Add(1))
	if os.Getenv("WEFT_TEST_POSTGRES") != "" {
		t.Cleanup(func() { drop(t, base, table) })
	}
	return base + between + "weft_table=" + table
}

// drop removes a catalog from a database that is not the test's own.
func drop(t testing.TB, base, table string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, base)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, fmt.Sprintf(`DROP TABLE IF EXISTS %[1]s, %[1]s_changes; DROP SEQUENCE IF EXISTS %[1]s_ids;
		DO $$ DECLARE f text; BEGIN
			FOR f IN SELECT oid::regprocedure FROM pg_proc WHERE proname ~ '^%[1]s_commit_' LOOP EXECUTE 'DROP FUNCTION ' || f; END LOOP;
		END $$`, table))
	if err != nil {
		t.Error(err)
	}
}

func mustOpen(t testing.TB, cfg postgres.Config) *postgres.Engine {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	e, err := postgres.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestContract(t *testing.T) {
	t.Parallel()
	base := database(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		return mustOpen(t, postgres.Config{URL: newTable(t, base)})
	})
}

// TestContractOfHandles has three engines open on one catalog, as three services have. Each call goes to another one.
func TestContractOfHandles(t *testing.T) {
	t.Parallel()
	base := database(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		url := newTable(t, base)
		var all []catalog.Engine
		for range 3 {
			all = append(all, mustOpen(t, postgres.Config{URL: url}))
		}
		return catalogtest.Spread(all...)
	})
}

func TestContractWithFaults(t *testing.T) {
	t.Parallel()
	base := database(t)
	catalogtest.Run(t, func(t *testing.T) catalog.Engine {
		return catalogtest.Resolve(faultytest.New(mustOpen(t, postgres.Config{URL: newTable(t, base)}), faultytest.Config{
			Seed: 1, Conflict: 0.02, Lost: 0.02, Applied: 0.02, Late: 0.02,
		}))
	})
}

func TestReopen(t *testing.T) {
	t.Parallel()
	base := database(t)
	catalogtest.RunReopen(t, func(t *testing.T) func() catalog.Engine {
		url := newTable(t, base)
		return func() catalog.Engine { return mustOpen(t, postgres.Config{URL: url}) }
	})
}
