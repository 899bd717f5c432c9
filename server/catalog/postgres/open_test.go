package postgres_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest"
	"github.com/weftfs/weft/server/catalog/catalogtest/pgserver"
	"github.com/weftfs/weft/server/catalog/postgres"
)

// TestOpenRefuses names what is wrong, and what to do about it.
func TestOpenRefuses(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	for _, sql := range []string{
		"CREATE TABLE foreign_table (k bytea PRIMARY KEY)",
		"CREATE TABLE newer (k bytea)", "COMMENT ON TABLE newer IS 'weft catalog 2'",
		"CREATE ROLE reader LOGIN", "CREATE ROLE guest LOGIN", "GRANT ALL ON SCHEMA public TO guest",
	} {
		server.Exec(sql)
	}
	first := mustOpen(t, postgres.Config{URL: server.URL()})
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	as := func(user string) string { return strings.Replace(server.URL(), "weft@", user+":secret@", 1) }
	for name, c := range map[string]struct {
		cfg   postgres.Config
		is    error
		wants string
	}{
		"no URL":            {postgres.Config{URL: "/var/lib/weft"}, nil, "postgres://"},
		"a bad table":       {postgres.Config{URL: server.URL() + "&weft_table=a.b"}, nil, "weft_table"},
		"a bad parameter":   {postgres.Config{URL: server.URL() + "&connect_timeout=soon"}, nil, "connect_timeout"},
		"no catalog":        {postgres.Config{URL: server.URL() + "&weft_table=other", MustExist: true}, catalog.ErrNoCatalog, "other"},
		"somebody's table":  {postgres.Config{URL: server.URL() + "&weft_table=foreign_table"}, catalog.ErrNotCatalog, "?weft_table="},
		"a newer catalog":   {postgres.Config{URL: server.URL() + "&weft_table=newer"}, nil, "newer one"},
		"no such schema":    {postgres.Config{URL: server.URL() + "&search_path=nowhere"}, nil, "CREATE SCHEMA"},
		"no such database":  {postgres.Config{URL: strings.Replace(server.URL(), "/postgres?", "/nowhere?", 1)}, nil, "nowhere"},
		"no such user":      {postgres.Config{URL: as("nobody")}, nil, "nobody"},
		"no right to make":  {postgres.Config{URL: as("reader") + "&weft_table=readers"}, nil, "permission denied"},
		"no right to use":   {postgres.Config{URL: as("guest")}, nil, "GRANT SELECT"},
		"an unknown option": {postgres.Config{URL: server.URL() + "&weft_tabel=x"}, nil, "weft_tabel"},
	} {
		c.cfg.Logger = quiet
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		e, err := postgres.Open(ctx, c.cfg)
		cancel()
		if err == nil {
			t.Errorf("%s: opened", name)
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		if !strings.Contains(err.Error(), c.wants) || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: %v; want %q", name, err, c.wants)
		}
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the password is in the error: %v", name, err)
		}
	}
}

// TestOpenWaits opens a catalog whose server is not there yet.
func TestOpenWaits(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	url := newTable(t, server.URL())
	server.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := postgres.Open(ctx, postgres.Config{URL: url, Logger: quiet}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no server: %v", err)
	}
	opened := make(chan error)
	go func() { // ends when Open does
		e, err := postgres.Open(t.Context(), postgres.Config{URL: url, Logger: quiet})
		if err == nil {
			err = e.Close()
		}
		opened <- err
	}()
	server.Start()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// TestSchemas has two catalogs of one name in two schemas, and one of another name.
func TestSchemas(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	server.Exec(`CREATE SCHEMA "second One"`)
	var all []*postgres.Engine
	for _, more := range []string{"", "&search_path=%22second%20One%22", "&weft_table=third"} {
		e := mustOpen(t, postgres.Config{URL: server.URL() + more})
		b := new(catalog.Batch)
		b.GuardRangeEmpty(nil, nil)
		b.Put([]byte("k"), []byte(more))
		b.Add([]byte("n"), 0, 1)
		if err := e.Commit(t.Context(), b); err != nil {
			t.Errorf("%q: %v", more, err)
		}
		all = append(all, e)
	}
	for _, e := range all {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestSnapshotsExpire(t *testing.T) {
	server := pgserver.Start(t, pgserver.Options{})
	catalogtest.RunExpiry(t, func(t *testing.T) catalog.Engine {
		return mustOpen(t, postgres.Config{URL: newTable(t, server.URL()), SnapshotAge: 300 * time.Millisecond})
	})
	e := mustOpen(t, postgres.Config{URL: newTable(t, server.URL()), SnapshotAge: time.Millisecond})
	snap, err := e.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for err == nil || errors.Is(err, catalog.ErrNotFound) {
		_, err = snap.Get(t.Context(), []byte("k"))
	}
	if !errors.Is(err, catalog.ErrSnapshotExpired) {
		t.Errorf("an old snapshot: %v", err)
	}
	if err := snap.Close(); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
