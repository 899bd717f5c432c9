package schema

import (
	"encoding/hex"
	"reflect"
	"testing"

	"github.com/weftfs/weft/layout"
)

// Rows without MinCopies are what earlier versions write and read, and rows with it come back as they were.
func TestMinCopies(t *testing.T) {
	old := Volume{Format: Format, Policy: Policy{StripeUnit: 1 << 20, StripeCount: 4, Mirrors: 2, Placement: layout.PlacementLocal}, Shards: 1}
	const want = "9506c41000000000000000000000000000000000d3000000000000000094d300000000001000000402cc0201"
	if got := hex.EncodeToString(Encode(&old)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	file := DataFile{Device: layout.DeviceID{1}, Number: 2, Handle: []byte{3}, UID: 4, GID: 5}
	cache := Cache{File: file, Bytes: 6, Made: 7}
	for fields, row := range map[byte]Layout{
		4: {StripeUnit: 4096, Width: 1, Mirrors: [][]DataFile{{file}, {Absent()}}},
		5: {StripeUnit: 4096, Width: 1, Mirrors: [][]DataFile{{file}}, Moving: true, Caches: []Cache{cache}},
		6: {StripeUnit: 4096, Width: 1, Mirrors: [][]DataFile{{file}}, Caches: []Cache{cache}, MinCopies: 2},
	} {
		raw := Encode(&row)
		var got Layout
		if err := Decode(raw, &got); err != nil || !reflect.DeepEqual(got, row) || raw[0] != 0x90|fields {
			t.Errorf("%d fields: %+v, %v; want %+v", raw[0]&0xf, got, err, row)
		}
	}
	for _, p := range []Policy{{}, {Mirrors: 2}, {StripeUnit: 1 << 30, StripeCount: 256, Mirrors: 4, Placement: 2, MinCopies: 4}} {
		row := Inode{Policy: p, Linkable: true, Used: 9}
		var got Inode
		if err := Decode(Encode(&row), &got); err != nil || got != row {
			t.Errorf("%+v, %v; want %+v", got, err, row)
		}
	}
}

func TestIncomplete(t *testing.T) {
	file := DataFile{Device: layout.DeviceID{1}}
	stale, filling := file, file
	stale.State, filling.State = layout.CopyStale, layout.CopyFilling
	for _, c := range []struct {
		row  Layout
		want bool
	}{
		{Layout{}, false},
		{Layout{Mirrors: [][]DataFile{{file}, {file}}}, false},
		{Layout{Mirrors: [][]DataFile{{file}, {stale}}}, true},
		{Layout{Mirrors: [][]DataFile{{filling}, {file}}}, true},
		{Layout{Mirrors: [][]DataFile{{file, file}, {file, Absent()}}}, true},
		{Layout{Mirrors: [][]DataFile{{file}}, Moving: true}, true},
	} {
		if got := c.row.Incomplete(); got != c.want {
			t.Errorf("%+v: %v", c.row, got)
		}
	}
}
