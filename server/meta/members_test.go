package meta

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/wire/metarpc"
)

// members are processes of which one drains.
type members struct{ drained map[string]bool }

func (m *members) List(context.Context) (*metarpc.MetaListResult, error) {
	r := &metarpc.MetaListResult{Shards: 2}
	for _, addr := range []string{"a:1", "b:1"} {
		s := metarpc.MetaService{Address: addr}
		if m.drained[addr] {
			s.State = metarpc.MetaDraining
		}
		r.Services = append(r.Services, s)
	}
	return r, nil
}

func (m *members) Drain(_ context.Context, address string, cancel bool) error {
	if address != "a:1" && address != "b:1" {
		return fmt.Errorf("no service at %s: %w", address, syscall.ENOENT)
	}
	m.drained[address] = !cancel
	return nil
}

// Who asks for the other services is told of them, and only root may have one drained.
func TestMembers(t *testing.T) {
	h := startMemory(t)
	c := h.client()
	check := func(what string, op metarpc.Op, args any, want syscall.Errno, state ...metarpc.MetaState) {
		t.Helper()
		var r metarpc.MetaListResult
		hdr, ch := c.begin(op, args)
		err := c.finish(hdr, ch, &r)
		if statusOf(err) != metarpc.Status(want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
		for i, st := range state {
			if len(r.Services) != len(state) || r.Services[i].State != st {
				t.Errorf("%s: %+v, want states %v", what, r.Services, state)
			}
		}
	}
	root := metarpc.Cred{}
	c.cred = root
	check("list of one", metarpc.OpMetaList, &metarpc.Empty{}, syscall.EOPNOTSUPP)
	check("drain the only one", metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "a:1"}, syscall.EOPNOTSUPP)

	h.svc.cfg.Members = &members{drained: map[string]bool{}}
	check("drain an unknown one", metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "c:1"}, syscall.ENOENT)
	c.cred = testCred
	check("drain by a user", metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "b:1"}, syscall.EPERM)
	check("list", metarpc.OpMetaList, &metarpc.Empty{}, 0, metarpc.MetaUp, metarpc.MetaUp)
	c.cred = root
	check("drain", metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "b:1"}, 0, metarpc.MetaUp, metarpc.MetaDraining)
	check("cancel", metarpc.OpMetaDrain, &metarpc.MetaDrainArgs{Address: "b:1", Cancel: true}, 0, metarpc.MetaUp, metarpc.MetaUp)
}
