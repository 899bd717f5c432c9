package etcd

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/server/catalog"
)

func TestParseURL(t *testing.T) {
	for url, want := range map[string]Config{
		"etcd://a:1":             {Endpoints: []string{"a:1"}},
		"etcd://a:1,b:2,[::1]:3": {Endpoints: []string{"a:1", "b:2", "[::1]:3"}},
		"etcd://a:1/weft":        {Endpoints: []string{"a:1"}, Prefix: "/weft"},
		"etcd://a:1/two/parts/":  {Endpoints: []string{"a:1"}, Prefix: "/two/parts"},
		"etcd://me:pass%40word@a:1,b:2/x": {
			Endpoints: []string{"a:1", "b:2"}, Prefix: "/x", Username: "me", Password: "pass@word",
		},
		"etcd://a:1?max-txn-ops=1000&max-request-bytes=4194304": {
			Endpoints: []string{"a:1"}, MaxTxnOps: 1000, MaxRequestBytes: 4 << 20,
		},
		"etcd://a:1/x?retention=30s": {Endpoints: []string{"a:1"}, Prefix: "/x", Retention: 30 * time.Second},
		"etcd://a:1/x?retention=0":   {Endpoints: []string{"a:1"}, Prefix: "/x", NoCompaction: true},
	} {
		got, err := ParseURL(url)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", url, got, err, want)
		}
	}
	if got, err := ParseURL("etcd://a:1?tls=1"); err != nil || got.TLS == nil {
		t.Errorf("tls: %+v, %v", got, err)
	}
	for url, want := range map[string]string{
		"postgres://a:1":                         "etcd://",
		"etcd://":                                "host:port",
		"etcd://a":                               "host:port",
		"etcd://a:1,":                            "host:port",
		"etcd://a:1/" + strings.Repeat("x", 300): "Prefix",
		"etcd://a:1?nothing=1":                   "nothing=1",
		"etcd://a:1?max-txn-ops=many":            "max-txn-ops=many",
		"etcd://a:1?max-txn-ops=1":               "--max-txn-ops",
		"etcd://a:1?max-request-bytes=1":         "--max-request-bytes",
		"etcd://a:1?retention=-1s":               "Retention",
		"etcd://a:1?tls=perhaps":                 "tls=perhaps",
	} {
		if got, err := ParseURL(url); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want an error with %q", url, got, err, want)
		}
	}
}

func TestHistory(t *testing.T) {
	for _, revisions := range [][]int64{nil, {1}, {1, 2, 1 << 62}} {
		got, err := decodeHistory(encodeHistory(revisions))
		if err != nil || !slices.Equal(got, revisions) {
			t.Errorf("%v came back as %v, %v", revisions, got, err)
		}
	}
	for _, bad := range []string{"0", "-1", "x", "2 1", "1 1", "99999999999999999999"} {
		if got, err := decodeHistory([]byte(bad)); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("%q: %v, %v", bad, got, err)
		}
	}
}

func FuzzHistory(f *testing.F) {
	f.Add([]byte("1 22 333 "))
	f.Fuzz(func(t *testing.T, b []byte) {
		revisions, err := decodeHistory(b)
		if err != nil {
			return
		}
		again, err := decodeHistory(encodeHistory(revisions))
		if err != nil || !slices.Equal(again, revisions) {
			t.Fatalf("%q: %v, then %v, %v", b, revisions, again, err)
		}
	})
}
