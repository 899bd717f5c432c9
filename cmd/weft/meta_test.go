package main

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/metaclient"
)

func TestShardList(t *testing.T) {
	for want, shards := range map[string][]int{"none": nil, "3": {3}, "0-2": {0, 1, 2}, "0,2-3,5,7-9": {0, 2, 3, 5, 7, 8, 9}} {
		if got := shardList(shards); got != want {
			t.Errorf("%v: %s, want %s", shards, got, want)
		}
	}
}

func TestMetaList(t *testing.T) {
	started := time.Now().Add(-time.Hour).UnixNano()
	st := metaOf(&metarpc.MetaListResult{Shards: 6, Services: []metarpc.MetaService{
		{Address: "b.example:7049", Host: "two", Program: "weftd 1.2", Started: started, State: metarpc.MetaDraining, Lowest: 3, Highest: 4},
		{Address: "c:7049", Host: "three", Program: "weftd 1.1", Started: started, State: metarpc.MetaSilent, Silent: int64(7300 * time.Millisecond), Shards: []int{2}, Sessions: 3},
		{Address: "a:7049", Host: "one", Program: "weftd 1.2", Started: started, Shards: []int{0, 1, 4}, Sessions: 12, Lowest: 4, Highest: 4},
	}})
	var out strings.Builder
	st.print(&out)
	want := `
a:7049          up             shards 0-1,4  12 sessions  weftd 1.2, protocol 4    on one, started 1 hour ago
b.example:7049  draining       shards none   0 sessions   weftd 1.2, protocol 3-4  on two, started 1 hour ago
c:7049          silent for 7s  shards 2      3 sessions   weftd 1.1                on three, started 1 hour ago
nobody has shards 3,5
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`{"shards":6,"unserved":[3,5],"services":[{"address":"a:7049",`, `"version":"weftd 1.2","protocol":"3-4","started"`, `"version":"weftd 1.1","started"`, `"state":"draining","shards":[],`, `"silent":7.3,"shards":[2],"sessions":3}`} {
		if !strings.Contains(string(b), part) {
			t.Errorf("%s lacks %s", b, part)
		}
	}
}

// A mount of a volume of several shards says where they are and which cannot be reached; one shard is not mentioned.
func TestShardStatus(t *testing.T) {
	since := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	var st serviceStatus
	st.addShards(&metaclient.VolumeState{
		Ring: metarpc.Ring{Epoch: 9, Services: []string{"a:7049", "b:7049"}, Owners: []int{0, 0, 1, -1, 0}},
		Sessions: []metaclient.State{
			{Shard: 0, Addr: "a:7049", Connected: true, Since: since, Leases: 5},
			{Shard: 2, Addr: "b:7049", Since: since, Problem: errors.New("refused")},
			{Shard: 3, Problem: errors.New("elsewhere")},
		},
	})
	var out strings.Builder
	st.printShards(&out)
	want := `
  shards      5, sessions for 3; a:7049 has 0-1,4; b:7049 has 2; nobody has 3
  shard 2     not connected since 2024-05-06T07:08:09Z: refused
  shard 3     not connected yet: elsewhere
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`"shards":5,"ring_epoch":9,"services":[{"address":"a:7049","shards":[0,1,4]},`, `"unserved":[3]`, `{"shard":2,"address":"b:7049","connected":false,`} {
		if !strings.Contains(string(b), part) {
			t.Errorf("%s lacks %s", b, part)
		}
	}
	var one serviceStatus
	one.addShards(&metaclient.VolumeState{Ring: metarpc.Ring{Owners: []int{-1}}, Sessions: []metaclient.State{{}}})
	out.Reset()
	one.printShards(&out)
	if b, err := json.Marshal(one); err != nil || out.Len() > 0 || strings.Contains(string(b), "shard") {
		t.Errorf("one shard: %s%s, %v", out.String(), b, err)
	}
}
