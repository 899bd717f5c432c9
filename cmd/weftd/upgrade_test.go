package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/internal/wire/peerrpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
)

// The versions that programs speak in TestUpgrade: one that is older than this one, and the next one.
var (
	oldVersions  = metarpc.Versions{Lowest: metarpc.Lowest, Highest: metarpc.Lowest}
	nextVersions = metarpc.Versions{Lowest: metarpc.Lowest, Highest: metarpc.Version + 1}
	nextPeers    = metarpc.Versions{Lowest: peerrpc.Lowest, Highest: peerrpc.Version + 1}
)

// dial begins a client that speaks some versions and knows all services that there are.
func (w *clusterWorld) dial(id byte, speaks metarpc.Versions) (*metaclient.Volume, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	return metaclient.Dial(ctx, metaclient.Config{Addrs: slices.Clone(w.addrs), Client: metarpc.ClientInfo{ID: [16]byte{id}, Host: "test"}, Log: w.log, Speaks: speaks})
}

// work makes, moves and removes names below a directory of its own, also from one shard to another, until stop is closed. Whatever fails is an error.
func work(ctx context.Context, v *metaclient.Volume, name string, seed uint64, stop chan struct{}) (rounds int, err error) {
	r := rand.New(rand.NewPCG(seed, 0))
	mkdir := func(parent layout.FileID, name string) (layout.FileID, error) {
		a, err := v.MakeNode(ctx, metarpc.Cred{}, &metarpc.MakeNodeArgs{Parent: parent, Name: name, Mode: 0o40755})
		return a.Attr.ID, err
	}
	top, err := mkdir(layout.RootID, name)
	if err != nil {
		return 0, err
	}
	var dirs []layout.FileID // in several shards, as directories are
	for i := range 8 {
		dir, err := mkdir(top, fmt.Sprint("d", i))
		if err != nil {
			return 0, err
		}
		dirs = append(dirs, dir)
	}
	for ; ; rounds++ {
		select {
		case <-stop:
			return rounds, nil
		default:
		}
		from, to := dirs[r.IntN(len(dirs))], dirs[r.IntN(len(dirs))]
		a, created, err := v.Create(ctx, metarpc.Cred{}, &metarpc.CreateArgs{Parent: from, Name: "f", Mode: 0o644, Access: metarpc.AccessWrite})
		if err != nil || !created {
			return rounds, fmt.Errorf("create: %v, %w", created, err)
		}
		v.Release(a.Attr.ID)
		if err := v.Rename(ctx, metarpc.Cred{}, &metarpc.RenameArgs{OldParent: from, OldName: "f", NewParent: to, NewName: "g"}); err != nil {
			return rounds, err
		}
		found, err := v.Lookup(ctx, metarpc.Cred{}, to, "g")
		if err != nil || found.Attr.ID != a.Attr.ID {
			return rounds, fmt.Errorf("%v was found, not %v: %w", found.Attr.ID, a.Attr.ID, err)
		}
		if err := v.Remove(ctx, metarpc.Cred{}, to, "g", false); err != nil {
			return rounds, err
		}
	}
}

// Services of three versions serve a volume with each other, to clients of several versions. One service after the other is replaced by one of another version, and
// back, while clients are at work: nothing fails.
func TestUpgrade(t *testing.T) {
	w := newClusterWorld(t, 6)
	w.urls = nil // data servers take no part
	type kind struct {
		name           string
		clients, peers metarpc.Versions
	}
	old, now, next := kind{name: "old", clients: oldVersions}, kind{name: "now"}, kind{"next", nextVersions, nextPeers}
	type service struct {
		addr string
		stop func()
	}
	var services []service
	start := func(k kind) {
		addr, stop := w.startAs(k.clients, k.peers)
		services = append(services, service{addr, stop})
	}
	start(old)
	start(now)
	start(next)
	w.even(3)

	seed := rand.Uint64()
	t.Log("seed", seed)
	stop := make(chan struct{})
	var working sync.WaitGroup
	volumes := map[string]*metaclient.Volume{}
	for i, client := range []struct {
		name   string
		speaks metarpc.Versions
	}{{"old", oldVersions}, {"now", metarpc.Spoken}, {"next", nextVersions}} {
		v, err := w.dial(byte(i+1), client.speaks)
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close(context.WithoutCancel(t.Context())) // while there are services
		volumes[client.name] = v
		working.Go(func() { // ends with stop
			rounds, err := work(context.WithoutCancel(t.Context()), v, client.name, seed+uint64(i), stop)
			if err != nil {
				t.Errorf("%s client: after %d rounds: %v", client.name, rounds, err)
			}
			t.Logf("%s client: %d rounds", client.name, rounds)
		})
	}
	// What is there makes room in turn, at last the one that is old again.
	for _, k := range []kind{now, old, now, now, now} {
		gone := services[0]
		services = services[1:]
		gone.stop()
		w.addrs = slices.DeleteFunc(w.addrs, func(addr string) bool { return addr == gone.addr })
		start(k)
		w.even(3)
		t.Logf("%s is replaced by a service of version %q", gone.addr, k.name)
	}
	close(stop)
	working.Wait()

	for name, v := range volumes {
		list, err := v.MetaList(t.Context())
		if err != nil || len(list.Services) != 3 {
			t.Fatalf("%s client: %+v, %v", name, list, err)
		}
		for _, s := range list.Services { // which old ones cannot be told
			if told := (metarpc.Versions{Lowest: s.Lowest, Highest: s.Highest}); (told == metarpc.Spoken) != (name != "old") || name == "old" && s.Highest != 0 {
				t.Errorf("%s client: %+v", name, s)
			}
		}
	}
	// Whoever has no version in common with the services is told what to do about it.
	for want, speaks := range map[string]metarpc.Versions{
		"upgrade weft on the client":          {Lowest: 1, Highest: 1},
		"upgrade weftd on the service's host": {Lowest: metarpc.Version + 1, Highest: metarpc.Version + 1},
	} {
		if _, err := w.dial(99, speaks); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), metarpc.Spoken.String()) || !strings.Contains(err.Error(), speaks.String()) {
			t.Errorf("client of %v: %v", speaks, err)
		}
	}
}
