package sessions

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/metaclient"
	"github.com/weftfs/weft/test/harness"
)

// All come from one address, which has room for 256 connections at least.
var count = flag.Int("sessions", 250, "how many")

const (
	files  = 200 // on which each session has leases
	opened = 50  // of them that it has open

	settle = time.Minute // after a restart; on two cores that do nothing else it is 5 s

	// Bytes of the service's memory that one of each may cost.
	sessionBound = 512 << 10
	leaseBound   = 4 << 10
	openBound    = 8 << 10
)

// everybody has all clients do something at the same time.
func everybody(t *testing.T, clients []*metaclient.Volume, f func(context.Context, int, *metaclient.Volume) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var all sync.WaitGroup
	errs := make(chan error, len(clients))
	for i, c := range clients {
		all.Go(func() { errs <- f(ctx, i, c) }) // ends with f
	}
	all.Wait()
	for range clients {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

// TestSessions measures what sessions, leases and open files cost, kills the service and waits until all clients have back what they had.
func TestSessions(t *testing.T) {
	v := harness.NewVolume(t, harness.Options{DataServers: 1})
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	root := metarpc.Cred{}
	empty := resident(t, v.Pid())

	clients := make([]*metaclient.Volume, *count)
	var dialing sync.WaitGroup
	for i := range clients {
		dialing.Go(func() { // ends with the answer
			info := metarpc.ClientInfo{Host: fmt.Sprintf("host%d", i), PID: i, Program: "test", Mount: "/mnt/weft"}
			rand.Read(info.ID[:])
			var err error
			if clients[i], err = metaclient.Dial(t.Context(), metaclient.Config{Addrs: []string{v.Addr}, Client: info, Log: quiet}); err != nil {
				t.Error(err)
			}
		})
	}
	dialing.Wait()
	if t.Failed() {
		t.FailNow()
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		var closing sync.WaitGroup
		for _, c := range clients {
			closing.Go(func() { c.Close(ctx) }) // bounded by ctx
		}
		closing.Wait()
	}()
	connected := resident(t, v.Pid())

	var ids []layout.FileID
	for i := range files {
		a, _, err := clients[0].Create(t.Context(), root, &metarpc.CreateArgs{Parent: layout.RootID, Name: fmt.Sprintf("f%d", i), Mode: 0o644})
		if err != nil {
			t.Fatal(err)
		}
		clients[0].Release(a.Attr.ID)
		ids = append(ids, a.Attr.ID)
	}
	everybody(t, clients, func(ctx context.Context, i int, c *metaclient.Volume) error {
		for cookie := uint64(0); ; {
			page, err := c.ReadDir(ctx, root, layout.RootID, cookie, files)
			if err != nil || page.EOF {
				return err
			}
			cookie = page.Entries[len(page.Entries)-1].Cookie
		}
	})
	leased := resident(t, v.Pid())
	for _, id := range ids {
		if _, ok := clients[len(clients)/2].CachedAttr(id); !ok {
			t.Fatalf("there is no lease on inode %d", id)
		}
	}
	everybody(t, clients, func(ctx context.Context, i int, c *metaclient.Volume) error {
		for _, id := range ids[:opened] {
			if _, err := c.Open(ctx, root, &metarpc.OpenArgs{ID: id, Access: metarpc.AccessRead}); err != nil {
				return err
			}
		}
		return nil
	})
	open := resident(t, v.Pid())

	for _, m := range []struct {
		what          string
		before, after int64
		each          int
		bound         int64
	}{
		{"session", empty, connected, *count, sessionBound},
		{"lease", connected, leased, *count * files, leaseBound},
		{"open file", leased, open, *count * opened, openBound},
	} {
		cost := (m.after - m.before) / int64(m.each)
		t.Logf("%d of the service's memory: %d bytes for each %s (%d of them)", m.after, cost, m.what, m.each)
		if cost > m.bound {
			t.Errorf("a %s costs %d bytes, want at most %d", m.what, cost, m.bound)
		}
	}

	v.Kill()
	v.Start()
	up := time.Now()
	var mu sync.Mutex
	var took []time.Duration
	everybody(t, clients, func(ctx context.Context, i int, c *metaclient.Volume) error {
		// It changes something, and so is done when nobody's leases may still be unknown, as all have reclaimed what they had.
		args := &metarpc.SetAttrArgs{ID: ids[i%files], Mask: metarpc.SetMode, Mode: 0o600}
		_, err := c.SetAttr(ctx, root, args)
		mu.Lock()
		took = append(took, time.Since(up))
		mu.Unlock()
		return err
	})
	slices.Sort(took)
	t.Logf("a change of each of %d clients was answered %v to %v after the service was up again, the middle one %v", len(took), took[0], took[len(took)-1], took[len(took)/2])
	if last := took[len(took)-1]; last > settle {
		t.Errorf("the last client waited %v, want at most %v", last, settle)
	}
	v.Kill() // the sessions end with the test
	v.Start()
}

// resident is a process's memory, after what it does not need was given back.
func resident(t *testing.T, pid int) int64 {
	t.Helper()
	least := int64(1) << 62
	for range 10 { // collections come when they come
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			t.Fatal(err)
		}
		var size, pages int64
		if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
			t.Fatal(err)
		}
		least = min(least, pages*int64(syscall.Getpagesize()))
		time.Sleep(100 * time.Millisecond)
	}
	return least
}
