package meta

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// greets returns what a client of some versions is answered, on a connection that it then has if it is let in.
func (h *host) greets(speaks metarpc.Versions) (*client, *metarpc.Welcome) {
	h.t.Helper()
	c := h.newClient()
	c.hello.Lowest, c.hello.Highest = speaks.Lowest, speaks.Highest
	conn, w := c.greet()
	conn.Close()
	if w.Status == metarpc.StatusOK {
		c.connect()
	}
	return c, w
}

// Both sides speak the highest version that they have in common; if there is none, both are told which of them is too old.
func TestVersions(t *testing.T) {
	h := startMemory(t)
	h.config = func(cfg *Config) { cfg.Speaks = metarpc.Versions{Lowest: 2, Highest: 4} }
	h.restart()
	for _, row := range []struct {
		client metarpc.Versions
		want   uint32
		text   []string // of a refusal
	}{
		{metarpc.Versions{Lowest: 3, Highest: 5}, 4, nil},
		{metarpc.Versions{Lowest: 4, Highest: 9}, 4, nil},
		{metarpc.Versions{Lowest: 1, Highest: 3}, 3, nil},
		{metarpc.Versions{Lowest: 2, Highest: 2}, 2, nil},
		{metarpc.Versions{Lowest: 5, Highest: 6}, 4, []string{"versions 5 to 6", "versions 2 to 4", "upgrade weftd"}},
		{metarpc.Versions{Lowest: 1, Highest: 1}, 4, []string{"version 1 ", "versions 2 to 4", "upgrade weft on the client"}},
	} {
		c, w := h.greets(row.client)
		if w.Version != row.want || (w.Status == metarpc.StatusVersion) != (row.text != nil) {
			t.Errorf("client of %v: %+v, want version %d", row.client, w, row.want)
			continue
		}
		for _, part := range row.text {
			if !strings.Contains(w.Message, part) {
				t.Errorf("client of %v: %q lacks %q", row.client, w.Message, part)
			}
		}
		if row.text != nil {
			continue
		}
		if w.Volume != h.svc.volume.ID {
			t.Errorf("client of %v: volume %x", row.client, w.Volume)
		}
		must[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: layout.RootID})
		c.drop()
	}
}

// sayers are members that say which versions they speak.
type sayers struct{ members }

func (*sayers) List(context.Context) (*metarpc.MetaListResult, error) {
	return &metarpc.MetaListResult{Shards: 1, Services: []metarpc.MetaService{{Address: "a:1", Lowest: 3, Highest: 9}}}, nil
}

// A client is told what its version has, and nothing else.
func TestNewFields(t *testing.T) {
	h := startMemory(t)
	h.svc.cfg.Members = &sayers{}
	for version := uint32(metarpc.Lowest); version <= metarpc.Version; version++ {
		c, _ := h.greets(metarpc.Versions{Lowest: metarpc.Lowest, Highest: version})
		hdr, ch := c.begin(metarpc.OpMetaList, &metarpc.Empty{})
		frame := <-ch
		c.free <- hdr.Slot
		_, b, err := metarpc.ParseReplyHeader(frame)
		if err != nil {
			t.Fatal(err)
		}
		var r metarpc.MetaListResult
		if err := metarpc.DecodeMessage(b, &r, version); err != nil || len(r.Services) != 1 {
			t.Fatalf("version %d: %+v, %v", version, r, err)
		}
		if got := r.Services[0].Highest == 9; got != (version >= 4) {
			t.Errorf("version %d: %+v", version, r)
		}
	}
}

// A call that one service has answered is answered so by one of another version, too, and has the same effects.
func TestOnceAcrossVersions(t *testing.T) {
	h := startMemory(t)
	old, now := metarpc.Versions{Lowest: metarpc.Lowest, Highest: metarpc.Lowest}, metarpc.Spoken
	next := now
	h.config = func(cfg *Config) { cfg.Speaks = next }
	c := h.client()
	for _, change := range [][2]metarpc.Versions{{now, old}, {old, now}} {
		next = change[0]
		h.restart()
		c.connect()
		must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
		args := &metarpc.TmpFileArgs{Parent: layout.RootID, Mode: 0o600}
		hdr, ch := c.begin(metarpc.OpTmpFile, args)
		first := <-ch
		id, err := metarpc.CreatedID(first)
		if err != nil {
			t.Fatal(err)
		}
		next = change[1]
		h.restart()
		c.connect()
		if c.welcome.Version != change[1].Highest {
			t.Errorf("version %d is spoken, want %d", c.welcome.Version, change[1].Highest)
		}
		again := <-c.send(hdr, args)
		c.free <- hdr.Slot
		if other, err := metarpc.CreatedID(again); err != nil || other != id {
			t.Errorf("from %v to %v: %x, %v, want %x", change[0], change[1], again, err, first)
		}
		must[metarpc.Empty](c, metarpc.OpReclaimComplete, &metarpc.Empty{})
		if _, err := ask[metarpc.AttrResult](c, metarpc.OpGetAttr, &metarpc.IDArgs{ID: id}); err != nil {
			t.Errorf("the file without a name is not open: %v", err)
		}
		if third := <-c.send(hdr, args); !bytes.Equal(third, again) {
			t.Errorf("%x, then %x", again, third)
		}
	}
}
