package fsck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/internal/porttest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/datafile"
	"github.com/weftfs/weft/server/schema"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// dataServer is a data server on a directory.
type dataServer struct {
	t      *testing.T
	dir    string
	addr   string
	server *data.Server
	served chan error
}

func startDataServer(t *testing.T) *dataServer {
	d := &dataServer{t: t, dir: t.TempDir(), addr: porttest.For(t)}
	d.start()
	t.Cleanup(d.stop)
	return d
}

func (d *dataServer) start() {
	d.t.Helper()
	var err error
	if d.server, err = data.Open(data.Config{Dir: d.dir, Log: silent}); err != nil {
		d.t.Fatal(err)
	}
	l, err := net.Listen("tcp", d.addr)
	if err != nil {
		d.t.Fatal(err)
	}
	served := make(chan error, 1)
	d.served = served
	server := d.server
	go func() { served <- server.Serve(l) }() // until stop
}

func (d *dataServer) stop() {
	if d.server == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // connections are cut
	if err := d.server.Shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) {
		d.t.Error(err)
	}
	<-d.served
	d.server = nil
}

func (d *dataServer) url() string { return "nfs://" + d.addr + "/" }

// path is where a data file is on the disk.
func (d *dataServer) path(number uint64) string {
	dir, name := schema.DataFileName(number)
	return filepath.Join(d.dir, "export", schema.VolumeDir(volume), dir, name)
}

// transfer reads or writes a data file as a client does, with what a segment says.
func transfer(t *testing.T, addr string, kind layout.OpKind, handle []byte, cred layout.Credential, off int64, p []byte) error {
	t.Helper()
	target, err := nfs3.New(nfs3.Config{Name: addr, Addrs: []netip.AddrPort{netip.MustParseAddrPort(addr)}, Log: silent})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	done := make(chan struct{})
	op := &layout.Op{
		Kind: kind, File: &layout.DataFile{Handles: [][]byte{handle}, Cred: cred}, Off: off, Data: p,
		Stable: layout.FileSync, Done: func(*layout.Op) { close(done) },
	}
	target.Start(op)
	target.Flush()
	<-done
	return op.Err
}

// The manager of data files and fsck with real data servers and a catalog on disk.
func TestReal(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: root, for a data server, which gives files to their owners")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	engine, err := pebble.Open(pebble.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	commit := func(f func(b *catalog.Batch)) {
		t.Helper()
		var b catalog.Batch
		if f(&b); engine.Commit(ctx, &b) != nil {
			t.Fatal("commit")
		}
	}
	root := schema.Inode{Mode: syscall.S_IFDIR | 0o755, Parent: layout.RootID}
	commit(func(b *catalog.Batch) {
		b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: uncounted, ID: volume}))
		b.Put(schema.KeyNextInode, catalog.EncodeCounters(100))
		b.Put(schema.FilesKey(0), catalog.EncodeCounters(1))
		b.Put(schema.InodeKey(layout.RootID), schema.Encode(&root))
	})
	var m *datafile.Manager
	start := func() {
		t.Helper()
		if m, err = datafile.New(datafile.Config{Engine: engine, Volume: volume, PoolSize: 8, Log: silent}); err != nil {
			t.Fatal(err)
		}
	}
	start()
	t.Cleanup(func() { m.Close() })
	servers := []*dataServer{startDataServer(t), startDataServer(t), startDataServer(t)}
	byID := map[layout.DeviceID]*dataServer{}
	for _, s := range servers {
		info, err := m.AddDevice(ctx, s.url(), false)
		if err != nil || !info.Reachable {
			t.Fatalf("%+v, %v", info, err)
		}
		byID[info.Device.ID] = s
	}

	// Files of all shapes, written with the identity that their segments give.
	fill := func(id layout.FileID) []byte { return bytes.Repeat([]byte{byte(id)}, 1000) }
	rows := map[layout.FileID]schema.Layout{}
	for id := layout.FileID(10); id < 22; id++ {
		ino := schema.Inode{Mode: syscall.S_IFREG | 0o644, Nlink: 1, Policy: schema.Policy{StripeUnit: unit, StripeCount: int(id%3) + 1, Mirrors: int(id%2) + 1}}
		put := func() {
			commit(func(b *catalog.Batch) { b.Put(schema.InodeKey(id), schema.Encode(&ino)) })
		}
		put()
		commit(func(b *catalog.Batch) {
			name := fmt.Sprint("file", id)
			b.Put(schema.EntryKey(layout.RootID, name), schema.Encode(&schema.Entry{ID: id, Type: syscall.S_IFREG}))
			b.Add(schema.CountersKey(layout.RootID), schema.CounterEntries, 1)
			b.Add(schema.FilesKey(0), 0, 1)
		})
		length := int64(id%4) * unit
		row, err := m.Assign(ctx, id, ino, 0, length, session, false, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		rows[id] = row
		rw, read := m.Segments(row, layout.IOModeRW)[0], m.Segments(row, layout.IOModeRead)[0]
		for i := range rw.Mirrors {
			for j, f := range rw.Mirrors[i] {
				addr := byID[f.Device].addr
				off := int64(j) * unit
				if err := transfer(t, addr, layout.OpWrite, f.Handle, layout.Credential{UID: f.UID, GID: f.GID}, off, fill(id)); err != nil {
					t.Fatal(err)
				}
				reader := layout.Credential{UID: read.Mirrors[i][j].UID, GID: read.Mirrors[i][j].GID}
				got := make([]byte, 1000)
				if err := transfer(t, addr, layout.OpRead, f.Handle, reader, off, got); err != nil || !bytes.Equal(got, fill(id)) {
					t.Errorf("inode %d, read: %v", id, err)
				}
				if err := transfer(t, addr, layout.OpWrite, f.Handle, reader, off, got); !errors.Is(err, wire.ErrAcces) {
					t.Errorf("inode %d, write with a READ layout: %v", id, err)
				}
			}
		}
		end, err := m.Sync(ctx, row)
		if want := int64(len(row.Mirrors[0])-1)*unit + 1000; err != nil || end != want {
			t.Errorf("inode %d: end %d, want %d, %v", id, end, want, err)
		}
		ino.Size = end
		put()
		commit(func(b *catalog.Batch) { b.Delete(schema.WriterKey(id, session)) })
	}

	check := func(repair bool, want map[Kind]int64) {
		t.Helper()
		report, err := Check(ctx, Config{Engine: engine, Repair: repair, Log: silent, Timeout: 3 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(report.Counts, want) {
			t.Errorf("found %v, want %v: %v", report.Counts, want, report.Problems)
		}
	}
	drain := func() {
		t.Helper()
		for m.GarbageCount(ctx) > 0 {
			if ctx.Err() != nil {
				t.Fatal("garbage is not collected")
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	check(false, map[Kind]int64{})

	// One that goes, and what it had.
	gone := rows[11]
	commit(func(b *catalog.Batch) {
		b.Delete(schema.LayoutKey(11))
		b.Delete(schema.InodeKey(11))
		b.Delete(schema.EntryKey(layout.RootID, "file11"))
		b.Add(schema.CountersKey(layout.RootID), schema.CounterEntries, -1)
		b.Add(schema.FilesKey(0), 0, -1)
		m.Discard(b, 11, gone)
	})
	m.Kick()
	drain()
	for _, files := range gone.Mirrors {
		for _, f := range files {
			if _, err := os.Stat(byID[f.Device].path(f.Number)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("removed data file: %v", err)
			}
		}
	}
	check(false, map[Kind]int64{})

	// A data server goes away in the middle of a truncation and comes back, where it was.
	wide := rows[20]
	file := wide.Mirrors[0][0]
	moving := byID[file.Device]
	moving.stop()
	cut := make(chan error, 1)
	go func() { cut <- m.Truncate(ctx, wide, 10) }()
	select {
	case err := <-cut:
		t.Errorf("truncation without a data server: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if _, err := Check(ctx, Config{Engine: engine, Log: silent, Timeout: time.Second}); !errors.Is(err, ErrCouldNotRun) || !strings.Contains(err.Error(), moving.addr) {
		t.Errorf("fsck without a data server: %v", err)
	}
	moving.start()
	if err := <-cut; err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(moving.path(file.Number)); err != nil || info.Size() != 10 {
		t.Errorf("after the truncation: %v, %v", info.Size(), err)
	}

	// It comes back at another address.
	moving.stop()
	moving.addr = porttest.For(t)
	moving.start()
	info, err := m.AddDevice(ctx, moving.url(), false)
	if err != nil || info.Device.ID != file.Device || !info.Reachable || info.Device.Addrs[0] != moving.addr {
		t.Fatalf("%+v, %v", info, err)
	}
	if _, err := m.Sync(ctx, wide); err != nil {
		t.Error(err)
	}
	for range 20 { // more than the pools have
		ino := schema.Inode{Mode: syscall.S_IFREG}
		commit(func(b *catalog.Batch) { b.Put(schema.InodeKey(50), schema.Encode(&ino)) })
		row, err := m.Assign(ctx, 50, ino, 0, 10*unit, session, false, nil, nil)
		if err != nil || row.Width != 3 {
			t.Fatalf("%+v, %v", row, err)
		}
		commit(func(b *catalog.Batch) {
			b.Delete(schema.LayoutKey(50))
			b.Delete(schema.InodeKey(50))
			b.Delete(schema.WriterKey(50, session))
			m.Discard(b, 50, row)
		})
		m.Kick()
	}
	drain()

	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	check(false, map[Kind]int64{})

	// Damage done on the data servers' disks.
	f := rows[12].Mirrors[0][0]
	if err := os.Remove(byID[f.Device].path(f.Number)); err != nil {
		t.Fatal(err)
	}
	f = rows[13].Mirrors[1][0]
	if err := os.Truncate(byID[f.Device].path(f.Number), 50*unit); err != nil {
		t.Fatal(err)
	}
	f = rows[14].Mirrors[0][0]
	if err := os.Chown(byID[f.Device].path(f.Number), 0, 0); err != nil {
		t.Fatal(err)
	}
	f = rows[15].Mirrors[0][0] // as after copying a disk: the same file, but other inode and handle
	path := byID[f.Device].path(f.Number)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, content, 0o640), os.Chmod(path, 0o640), os.Chown(path, int(f.UID), int(f.GID))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(servers[0].path(1<<20), []byte("lost"), 0o640); err != nil {
		t.Fatal(err)
	}
	want := map[Kind]int64{Missing: 1, BeyondSize: 1, Owner: 1, StaleHandle: 1, OrphanDataFile: 1, NextNumber: 1}
	check(false, want)
	check(true, want)
	check(false, map[Kind]int64{})
	start()
	for _, d := range servers {
		if info, err := m.AddDevice(ctx, d.url(), false); err != nil || !info.Reachable { // waits until it is met
			t.Errorf("%+v, %v", info, err)
		}
	}
	drain()
	if _, err := os.Stat(servers[0].path(1 << 20)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("orphan data file: %v", err)
	}
	f = rows[15].Mirrors[0][0]
	raw, err := engine.Get(ctx, schema.LayoutKey(15))
	if err != nil {
		t.Fatal(err)
	}
	var row schema.Layout
	if err := schema.Decode(raw, &row); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1000)
	cred := layout.Credential{UID: f.UID, GID: f.GID}
	if err := transfer(t, byID[f.Device].addr, layout.OpRead, row.Mirrors[0][0].Handle, cred, 0, got); err != nil || !bytes.Equal(got, fill(15)) {
		t.Errorf("through the new handle: %v", err)
	}
}
