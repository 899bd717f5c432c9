package etcd

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/catalogtest/etcdserver"
)

// TestQuotaReserve fills a cluster up with what grows: that is refused before etcd refuses everything.
func TestQuotaReserve(t *testing.T) {
	t.Parallel()
	const quota = 16 << 20
	cluster := etcdserver.Start(t, 1, "--quota-backend-bytes", fmt.Sprint(quota))
	cfg := configOf(t, cluster.URL("/test"))
	cfg.Retention = 5 * time.Second
	e := mustOpen(t, cfg)
	defer mustClose(t, e)
	for begin := time.Now(); e.Room().Size != quota; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("after a minute: %+v", e.Room())
		}
	}
	// Sizes are those of a tenth of a second ago, in which less than the reserve is written. Larger rows are written anew with
	// what comes after them.
	const row = 16 << 10
	key := func(n int) []byte { return fmt.Append(nil, "row", n) }
	grow := func(n int) error {
		b := catalog.Batch{Grows: true}
		b.GuardAbsent(key(n))
		b.Put(key(n), make([]byte, row))
		if err := e.readQuota(http.DefaultClient); err != nil { // the machine may not let the engine do so in time
			t.Fatal(err)
		}
		return e.Commit(t.Context(), &b)
	}
	made := 0
	var err error
	for ; err == nil && made < quota/row; made++ {
		err = grow(made)
	}
	r := e.Room()
	if !errors.Is(err, catalog.ErrFull) || strings.Contains(err.Error(), "alarm") || !r.Full || !r.Low || r.Size != quota || made < quota/2/row {
		t.Fatalf("after %d rows: %v; %+v", made, err, r)
	}
	if guard := (*catalog.GuardError)(nil); !errors.As(grow(0), &guard) {
		t.Error("a row that is there is not told of")
	}
	for n := range made {
		mustCommit(t, e, func(b *catalog.Batch) { b.Delete(key(n)) })
	}
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if err := grow(made); err == nil {
			break
		} else if !errors.Is(err, catalog.ErrFull) || time.Since(begin) > 2*time.Minute {
			t.Fatalf("all is deleted: %v; %+v", err, e.Room())
		}
	}
}

// TestRoomOf looks at sizes of a cluster with a quota of 1 GiB, so with a reserve of 2 % of it.
func TestRoomOf(t *testing.T) {
	const quota = 1000 << 20
	for _, row := range []struct {
		total, used int64 // MiB
		before      catalog.Room
		low, full   bool
	}{
		{total: 100, used: 50},
		{total: 939, used: 930},
		{total: 945, used: 930, low: true},
		{total: 945, used: 910},
		{total: 935, used: 920, before: catalog.Room{Low: true}, low: true},
		{total: 981, used: 965, low: true, full: true},
		{total: 981, used: 950, low: true},
		{total: 999, used: 500},
		{total: 999, used: 999, low: true, full: true},
		{total: 981, used: 950, before: catalog.Room{Low: true, Full: true}, low: true, full: true},
		{total: 981, used: 930, before: catalog.Room{Low: true, Full: true}, low: true},
	} {
		r := roomOf(sizes{quota, row.total << 20, row.used << 20}, row.before)
		if r.Low != row.low || r.Full != row.full || r.Size != quota {
			t.Errorf("%+v: %+v", row, r)
		}
	}
}

func TestParseSizes(t *testing.T) {
	const text = "# HELP etcd_server_quota_backend_bytes Current backend storage quota size in bytes.\n" +
		"# TYPE etcd_server_quota_backend_bytes gauge\netcd_server_quota_backend_bytes 2.147483648e+09\n" +
		"etcd_mvcc_db_total_size_in_bytes 20480\netcd_mvcc_db_total_size_in_use_in_bytes 16384\nprocess_open_fds 12\n"
	if s, err := parseSizes(strings.NewReader(text)); err != nil || s != (sizes{2 << 30, 20480, 16384}) {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"", "<html>", strings.Replace(text, "20480", "x", 1), strings.Replace(text, "_in_use", "", 1)} {
		if s, err := parseSizes(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}
