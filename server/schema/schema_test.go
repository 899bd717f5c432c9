package schema

import (
	"encoding/hex"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
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

// What raises a format leaves what the catalog has already, with usage and without.
func TestRaised(t *testing.T) {
	for _, c := range []struct{ format, to, want int }{
		{Format, FormatNamespaces, FormatNamespaces}, {FormatNamespaces, FormatNamespaces, FormatNamespaces},
		{Format, FormatShards, FormatShards}, {FormatNamespaces, FormatShards, FormatShards},
		{FormatShards, FormatNamespaces, FormatShards}, {FormatShards, FormatShards, FormatShards},
		{FormatCopies, FormatNamespaces, FormatCopies}, {FormatCopies, FormatShards, FormatCopies},
		{3, FormatNamespaces, 4}, {3, FormatShards, 5}, {4, FormatNamespaces, 4}, {5, FormatNamespaces, 5},
		{Format, FormatCopies, FormatCopies},
	} {
		if got := Raised(c.format, c.to); got != c.want || CheckFormat(got) != nil || CountsUsage(got) != CountsUsage(c.format) {
			t.Errorf("format %d becomes %d for %d, want %d", c.format, got, c.to, c.want)
		}
	}
	for format := formatBefore; format < Format; format++ {
		v := Volume{Format: format}
		v.AddUsage()
		if got := v.Format; !CountsUsage(got) || got > FormatShards {
			t.Errorf("with usage format %d is %d", format, got)
		}
	}
}

// A format is raised once however many want it, and not while there is a service that does not know it.
func TestRaise(t *testing.T) {
	engine, log := memorytest.New(), slog.New(slog.DiscardHandler)
	put := func(key []byte, row any) {
		t.Helper()
		var b catalog.Batch
		b.Put(key, Encode(row))
		if err := engine.Commit(t.Context(), &b); err != nil {
			t.Fatal(err)
		}
	}
	volume := Volume{Format: FormatNamespaces, ID: [16]byte{1}, Policy: Policy{Mirrors: 2}, Shards: 1}
	put(KeyVolume, &volume)
	put(MemberKey([16]byte{1}), &Member{Address: "new:1", Format: FormatCopies})
	put(MemberKey([16]byte{2}), &Member{Address: "old:1", Program: "weftd 1.2", Format: FormatShards})
	if err := Raise(t.Context(), engine, FormatNamespaces, log); err != nil {
		t.Errorf("what it has: %v", err)
	}
	err := Raise(t.Context(), engine, FormatCopies, log)
	old := (*MemberError)(nil)
	if !errors.As(err, &old) || *old != (MemberError{"old:1", "weftd 1.2", FormatCopies}) {
		t.Errorf("with an earlier service: %v", err)
	}
	if err == nil || !strings.Contains(err.Error(), "the metadata service at old:1 (weftd 1.2) does not know format 9 of the catalog") {
		t.Errorf("it says %v", err)
	}
	expect := func(format int) {
		t.Helper()
		var got Volume
		raw, err := engine.Get(t.Context(), KeyVolume)
		if err == nil {
			err = Decode(raw, &got)
		}
		want := volume
		want.Format = format
		if err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	expect(FormatNamespaces)
	put(MemberKey([16]byte{2}), &Member{Address: "old:1", Program: "weftd 1.3", Format: FormatCopies})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { // ends at once
			if err := Raise(t.Context(), engine, FormatCopies, log); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	expect(FormatCopies)
	if err := Raise(t.Context(), engine, FormatNamespaces, log); err != nil {
		t.Errorf("a format of before: %v", err)
	}
	expect(FormatCopies)
}

func TestFewCopies(t *testing.T) {
	file := DataFile{Device: layout.DeviceID{1}}
	stale := file
	stale.State = layout.CopyStale
	for _, c := range []struct {
		row  Layout
		want bool
	}{
		{Layout{}, false},
		{Layout{Mirrors: [][]DataFile{{file}, {stale}}}, false},
		{Layout{Mirrors: [][]DataFile{{file, file}, {file, Absent()}}}, true},
		{Layout{Mirrors: [][]DataFile{{file, file}, {file, Absent()}}, Moving: true}, false},
		{Layout{Mirrors: [][]DataFile{{file}, {Absent()}, {Absent()}}, Moving: true}, true},
		{Layout{Mirrors: [][]DataFile{{file}}, MinCopies: 1}, true},
	} {
		if got := c.row.FewCopies(); got != c.want {
			t.Errorf("%+v: %v", c.row, got)
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
