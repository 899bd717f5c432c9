package cluster

import (
	"reflect"
	"testing"

	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/server/meta"
)

// whole fails the test if v, a pointer to a structure, or a structure in one of its lists, has a field that is zero.
func whole(t *testing.T, v reflect.Value) {
	t.Helper()
	for i := range v.NumField() {
		f := v.Field(i)
		if v.Type().Field(i).Name == "_msgpack" {
			continue
		}
		if f.IsZero() {
			t.Errorf("%s.%s is not sent", v.Type(), v.Type().Field(i).Name)
		}
		if f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct {
			for j := range f.Len() {
				whole(t, f.Index(j))
			}
		}
	}
}

// TestWire has every field of what services say to each other sent.
func TestWire(t *testing.T) {
	h := &meta.Hold{Shard: 1, Row: []byte{2}, To: 3, Change: 4, Oldest: 5, Items: []meta.HoldItem{{ID: 6, Lease: 1, Last: true}}}
	s := &meta.Settle{Shard: 1, Row: []byte{2}, Oldest: 3, Changes: []meta.Settled{{Change: 4, To: 5, Committed: true}}}
	for _, v := range []any{h, s, wireHold(h), wireSettle(s)} {
		whole(t, reflect.ValueOf(v).Elem())
	}
	for _, c := range []*peerrpc.Call{{Op: peerrpc.OpHold, Hold: wireHold(h)}, {Op: peerrpc.OpSettle, Settle: wireSettle(s)}} {
		frame, err := peerrpc.Append(nil, peerrpc.Version, c)
		if err != nil {
			t.Fatal(err)
		}
		got, err := peerrpc.ParseCall(frame[4:], peerrpc.Version)
		if err != nil {
			t.Fatal(err)
		}
		if got.Hold != nil && !reflect.DeepEqual(holdOf(got.Hold), h) || got.Settle != nil && !reflect.DeepEqual(settleOf(got.Settle), s) {
			t.Errorf("%+v", got)
		}
	}
}
