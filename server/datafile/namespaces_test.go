package datafile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/dataplane/nvmetcp"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/metarpc"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/datafile/extent"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"
	"github.com/weftfs/weft/server/schema"
)

const (
	mib     = 1 << 20
	testNQN = "nqn.2014-08.org.example:test"
	block   = 4096
)

// disks is a target with one namespace in a file for each size.
type disks struct {
	t      *testing.T
	target *nvmetest.Target
	paths  []string
	files  []*nvme.File
	sick   []*sickness
}

// sickness is what is wrong with a namespace.
type sickness struct {
	mu    sync.RWMutex // held while writes wait
	write error        // what they answer
}

// sickFile is a namespace that may be sick.
type sickFile struct {
	*nvme.File
	*sickness
}

func (f sickFile) WriteAt(p []byte, off int64) (int, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.write != nil {
		return 0, f.write
	}
	return f.File.WriteAt(p, off)
}

// fail has every write answered with err; nil ends that.
func (s *sickness) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write = err
}

func newDisks(t *testing.T, sizes ...int64) *disks {
	t.Helper()
	d := &disks{t: t}
	sub := nvme.Subsystem{NQN: testNQN, Serial: "1", AnyHost: true}
	dir := t.TempDir()
	for i, size := range sizes {
		path := filepath.Join(dir, fmt.Sprint(i))
		f, err := os.Create(path)
		if err == nil {
			err = errors.Join(f.Truncate(size), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		file, err := nvme.OpenFile(path, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		d.paths, d.files, d.sick = append(d.paths, path), append(d.files, file), append(d.sick, &sickness{})
		sub.Namespaces = append(sub.Namespaces, nvme.Namespace{NSID: uint32(i + 1), Backing: sickFile{file, d.sick[i]}, BlockSize: block, NGUID: [16]byte{byte(i + 1)}})
	}
	target, err := nvmetest.New(nvme.Config{
		Subsystems: []nvme.Subsystem{sub},
		Ports:      []nvme.Port{{ID: 1, Listen: "127.0.0.1:0"}, {ID: 2, Listen: "127.0.0.1:0"}},
		Log:        slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	d.target = target
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		target.Shutdown(ctx)
	})
	return d
}

func (d *disks) url(i int) string {
	return fmt.Sprintf("nvme://%s/%s#%d", d.target.Addr(1), testNQN, i+1)
}

// write puts bytes on a namespace behind everybody's back.
func (d *disks) write(i int, off int64, data []byte) {
	d.t.Helper()
	if _, err := d.files[i].WriteAt(data, off); err != nil {
		d.t.Fatal(err)
	}
}

func (d *disks) read(i int, off int64, n int) []byte {
	d.t.Helper()
	b := make([]byte, n)
	if _, err := d.files[i].ReadAt(b, off); err != nil {
		d.t.Fatal(err)
	}
	return b
}

// newBlockWorld starts a Manager whose devices are namespaces of such sizes. Nothing in it is in a synctest bubble.
func newBlockWorld(t *testing.T, sizes ...int64) (*world, *disks) {
	t.Helper()
	name := t.Name()
	hung := time.AfterFunc(2*time.Minute, func() { panic(name + " takes too long") })
	t.Cleanup(func() { hung.Stop() })
	w := &world{t: t, engine: memorytest.New(), net: storetest.New()}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.Format, ID: volume}))
	w.commit(&b)
	w.start(w.engine)
	d := newDisks(t, sizes...)
	for i := range sizes {
		w.add(d.url(i))
	}
	return w, d
}

func (w *world) add(url string) metarpc.DeviceInfo {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	info, err := w.m.AddDevice(ctx, url, false)
	if err != nil || !info.Reachable {
		w.t.Fatalf("%+v, %v", info, err)
	}
	return info
}

// spaces proves that no namespace has lost units, and that so many bytes of all are not free.
func (w *world) spaces(taken int64) {
	w.t.Helper()
	var used int64
	for _, d := range w.m.all() {
		if d.space == nil {
			continue
		}
		stat, err := d.space.Check(w.t.Context(), func(f extent.Finding, _ func(*catalog.Batch) error) error {
			w.t.Errorf("device %v: %+v", d.id, f)
			return nil
		})
		if err != nil {
			w.t.Error(err)
		}
		used += stat.Total - stat.Free
	}
	if used != taken {
		w.t.Errorf("%d bytes are taken, want %d", used, taken)
	}
}

// segment returns the layout that a client gets for the n bytes at off.
func (w *world) segment(row schema.Layout, mode layout.IOMode, off, n int64) metarpc.Segment {
	w.t.Helper()
	list := w.m.Segments(row, mode)
	list[0].Len = min(list[0].Off+list[0].Len, off+n) - off
	list[0].Off = off
	list, err := w.m.Extents(w.t.Context(), row, list)
	if err != nil || len(list) != 1 {
		w.t.Fatalf("%+v, %v", list, err)
	}
	return list[0]
}

// store writes data at off as a client does, which is whole blocks, to all copies, and commits it.
func (w *world) store(d *disks, id layout.FileID, ino schema.Inode, off int64, data []byte) schema.Layout {
	w.t.Helper()
	n := int64(len(data))
	row, err := w.m.Assign(w.t.Context(), id, ino, off, n, session, false, nil, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for at := off; at < off+n; {
		s := w.segment(row, layout.IOModeRW, at, off+n-at)
		var written []metarpc.Written
		for _, files := range s.Mirrors {
			for j := range files {
				if files[j].State == layout.CopyStale {
					continue
				}
				col := layout.Column{}
				if len(files) > 1 {
					col = layout.Column{Unit: s.StripeUnit, Count: len(files), Index: j}
				}
				wr := metarpc.Written{Copy: metarpc.CopyRef{Device: files[j].Device, Handle: files[j].Handle}, Generation: files[j].Generation}
				for from, to := col.Next(s.Off, s.Off+s.Len); from < to; from, to = col.Next(to, s.Off+s.Len) {
					w.write(d, &files[j], from, data[from-off:to-off])
					wr.Ranges = append(wr.Ranges, metarpc.Range{Off: from, Len: to - from})
				}
				written = append(written, wr)
			}
		}
		if err := w.m.Validate(w.t.Context(), id, written); err != nil {
			w.t.Fatal(err)
		}
		if at += s.Len; at < off+n {
			if row, err = w.m.Assign(w.t.Context(), id, ino, at, off+n-at, session, false, nil, nil); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.resize(id, off+n)
	return row
}

// resize sets the size in an inode's row.
func (w *world) resize(id layout.FileID, size int64) {
	w.t.Helper()
	var ino schema.Inode
	raw, err := w.engine.Get(w.t.Context(), schema.InodeKey(id))
	if err == nil {
		err = schema.Decode(raw, &ino)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	ino.Size = size
	var b catalog.Batch
	b.Put(schema.InodeKey(id), schema.Encode(&ino))
	w.commit(&b)
}

// write writes to one copy, wherever it is.
func (w *world) write(d *disks, file *metarpc.DataFile, off int64, data []byte) {
	w.t.Helper()
	dev, err := w.m.device(file.Device)
	if err != nil {
		w.t.Fatal(err)
	}
	if dev.space == nil {
		err := dev.do(w.t.Context(), func(st dataStore) error {
			return st.Write(w.t.Context(), file.Handle, layout.Credential{UID: file.UID, GID: file.GID}, off, data)
		})
		if err != nil {
			w.t.Fatal(err)
		}
		return
	}
	for _, e := range file.Extents {
		from, to := max(off, e.Off), min(off+int64(len(data)), e.Off+e.Len)
		if from < to {
			d.write(int(dev.url().nsid-1), e.Addr+from-e.Off, data[from-off:to-off])
		}
	}
}

// get reads a file by its layout, through the given mirror.
func (w *world) get(d *disks, row schema.Layout, mirror int, n int64) []byte {
	w.t.Helper()
	data := make([]byte, n)
	for at := int64(0); at < n; {
		s := w.segment(row, layout.IOModeRead, at, n-at)
		files := s.Mirrors[mirror]
		for j := range files {
			col := layout.Column{}
			if len(files) > 1 {
				col = layout.Column{Unit: s.StripeUnit, Count: len(files), Index: j}
			}
			dev, err := w.m.device(files[j].Device)
			if err != nil {
				w.t.Fatal(err)
			}
			for from, to := col.Next(s.Off, s.Off+s.Len); from < to; from, to = col.Next(to, s.Off+s.Len) {
				if dev.space == nil {
					err := dev.do(w.t.Context(), func(st dataStore) error {
						_, err := st.Read(w.t.Context(), files[j].Handle, layout.Credential{UID: row.Mirrors[mirror][j].UID, GID: row.Mirrors[mirror][j].GID}, from, data[from:to])
						return err
					})
					if err != nil {
						w.t.Fatal(err)
					}
					continue
				}
				for _, e := range files[j].Extents {
					if a, b := max(from, e.Off), min(to, e.Off+e.Len); a < b && e.State != layout.ExtentInvalid { // what is invalid reads as zeros
						copy(data[a:b], d.read(int(dev.url().nsid-1), e.Addr+a-e.Off, int(b-a)))
					}
				}
			}
		}
		at += s.Len
	}
	return data
}

// pattern is n bytes none of which is zero.
func pattern(seed byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>9)%255 + 1 ^ seed&1
		if b[i] == 0 {
			b[i] = 0xff
		}
	}
	return b
}

// row reads the layout row of a file.
func (w *world) row(id layout.FileID) (row schema.Layout) {
	w.t.Helper()
	raw, err := w.engine.Get(w.t.Context(), schema.LayoutKey(id))
	if err == nil {
		err = schema.Decode(raw, &row)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return row
}

func TestAddNamespace(t *testing.T) {
	w, d := newBlockWorld(t, 16*mib, 16*mib)
	first := w.m.Devices(t.Context())[0]
	if first.Device.Namespace[0].Block != block || first.Total != 14*mib || first.Free != 14*mib || first.Fencing != "reservations" ||
		!first.Device.Namespace[0].Reserved || len(first.Device.Addrs) != 1 {
		t.Errorf("new device: %+v", first)
	}
	if _, err := first.Device.Layout(); err != nil {
		t.Error(err)
	}
	var v schema.Volume
	if raw, err := w.engine.Get(t.Context(), schema.KeyVolume); err != nil || schema.Decode(raw, &v) != nil || v.Format != schema.FormatNamespaces {
		t.Errorf("volume %+v, %v", v, err)
	}

	again := w.add(first.URL)
	if again.Device.ID != first.Device.ID || len(w.m.all()) != 2 {
		t.Errorf("added twice: %+v", again)
	}
	other := w.add(strings.Replace(first.URL, d.target.Addr(1), d.target.Addr(2), 1))
	if other.Device.ID != first.Device.ID || len(other.Device.Addrs) != 2 {
		t.Errorf("by another address: %+v", other)
	}

	// Restarted, with one copy of the label gone.
	nsid := int(first.Device.Namespace[0].NSID - 1)
	if err := w.m.Close(); err != nil {
		t.Fatal(err)
	}
	d.write(nsid, 0, make([]byte, extent.LabelSize))
	w.start(w.engine)
	if back := w.add(first.URL); back.Device.ID != first.Device.ID {
		t.Errorf("after a restart: %+v", back)
	}
	if _, err := extent.ParseLabel(d.read(nsid, 0, extent.LabelSize)); err != nil {
		t.Errorf("the label was not mended: %v", err)
	}

	// Both copies go while it is in use.
	d.write(nsid, 0, make([]byte, extent.LabelSize))
	d.write(nsid, extent.BackupLabel(16*mib), make([]byte, extent.LabelSize))
	dev, err := w.m.device(first.Device.ID)
	if err != nil {
		t.Fatal(err)
	}
	kick(dev.recheck)
	waittest.Until(w.t, "the device is down", func() bool {
		info := w.m.info(t.Context(), []*device{dev})[0]
		return !info.Reachable && strings.Contains(info.Problem, "label")
	})
	if _, err := w.m.AddDevice(t.Context(), first.URL, true); err == nil || !strings.Contains(err.Error(), "label is gone") {
		t.Errorf("a device without its label is taken: %v", err)
	}
}

func TestRefusedNamespaces(t *testing.T) {
	w, d := newBlockWorld(t, 16*mib)
	more := newDisks(t, 16*mib, 16*mib, 16*mib, 2*mib, 16*mib)
	for i := range more.paths { // NGUIDs of their own
		if err := more.target.RemoveNamespace(testNQN, uint32(i+1)); err != nil {
			t.Fatal(err)
		}
		ns := nvme.Namespace{NSID: uint32(i + 1), Backing: more.files[i], BlockSize: block, NGUID: [16]byte{byte(i + 100)}, ReadOnly: i == 4}
		if err := more.target.AddNamespace(testNQN, ns); err != nil {
			t.Fatal(err)
		}
	}
	// They are in a subsystem of the same name, so a Manager of its own adds them.
	w2 := &world{t: t, engine: memorytest.New(), net: storetest.New()}
	var b catalog.Batch
	b.Put(schema.KeyVolume, schema.Encode(&schema.Volume{Format: schema.Format, ID: volume}))
	w2.commit(&b)
	w2.start(w2.engine)

	more.write(0, 1024+56, []byte("\x53\xef")) // ext4
	ns, err := extent.NewNamespace(extent.Identity{NGUID: [16]byte{101}}, block, 16*mib, mib)
	if err != nil {
		t.Fatal(err)
	}
	theirs := extent.LabelOf([16]byte{9}, layout.DeviceID{8}, &ns)
	more.write(1, 0, extent.AppendLabel(nil, &theirs))
	// One that a crash kept from becoming a device: it was given a label, and no rows.
	ns.NGUID = [16]byte{102}
	ours := extent.LabelOf(volume, layout.DeviceID{8}, &ns)
	more.write(2, 0, extent.AppendLabel(nil, &ours))
	for i, want := range []string{"ext4", "volume 09", "", "at least 4", "read-only"} {
		_, err := w2.m.AddDevice(t.Context(), more.url(i), false)
		if want == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), testNQN) {
			t.Errorf("namespace %d: %v, want an error with %q", i+1, err, want)
		}
	}
	if l, err := extent.ParseLabel(more.read(2, 0, extent.LabelSize)); err != nil || l.Device == ours.Device || l.Generation != 2 {
		t.Errorf("its label is %+v, %v", l, err)
	}
	for i := range 2 {
		if info, err := w2.m.AddDevice(t.Context(), more.url(i), true); err != nil || !info.Reachable {
			t.Errorf("forced: %+v, %v", info, err)
		}
	}
	if _, err := w2.m.AddDevice(t.Context(), fmt.Sprintf("nvme://%s/%s#9", more.target.Addr(1), testNQN), false); err == nil {
		t.Error("a namespace that is not there is added")
	}

	// A copy of a device, label and all.
	w2.m.Close()
	id := w.m.all()[0].id
	d.write(0, 0, d.read(0, 0, extent.LabelSize))
	more.write(2, 0, d.read(0, 0, 16*mib))
	w.m.Close()
	w.start(w.engine)
	waittest.Until(w.t, "it is up", func() bool { return w.m.Devices(t.Context())[0].Reachable })
	copied := newDisks(t, 16*mib)
	copied.write(0, 0, d.read(0, 0, 16*mib))
	if err := copied.target.RemoveNamespace(testNQN, 1); err != nil {
		t.Fatal(err)
	}
	const other = "nqn.2014-08.org.example:other"
	target, err := nvmetest.New(nvme.Config{
		Subsystems: []nvme.Subsystem{{NQN: other, Serial: "2", AnyHost: true, Namespaces: []nvme.Namespace{
			{NSID: 1, Backing: copied.files[0], BlockSize: block, NGUID: [16]byte{77}},
			{NSID: 2, Backing: more.files[2], BlockSize: block, NGUID: [16]byte{1}},
		}}},
		Ports: []nvme.Port{{ID: 1, Listen: "127.0.0.1:0"}}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Shutdown(t.Context())
	for nsid, want := range map[int]string{1: "has the label of device " + id.String(), 2: "ident"} {
		if _, err := w.m.AddDevice(t.Context(), fmt.Sprintf("nvme://%s/%s#%d", target.Addr(1), other, nsid), true); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("namespace %d: %v, want an error with %q", nsid, err, want)
		}
	}
}

func TestExtents(t *testing.T) {
	w, d := newBlockWorld(t, 64*mib, 64*mib)
	const id = 5
	ino := w.inode(id, layout.Policy{StripeUnit: 64 << 10, StripeCount: 2})
	data := pattern(0, 5*mib+3*block)
	row := w.store(d, id, ino, 0, data)
	if row.StripeUnit != mib || row.Width != 2 || !w.m.OnNamespaces(row) {
		t.Fatalf("%+v", row)
	}
	if got := w.get(d, row, 0, int64(len(data))+block); !bytes.Equal(got, append(slices.Clone(data), make([]byte, block)...)) {
		t.Error("what was written is not what is read")
	}
	// What was written before nobody made valid reads as zeros.
	row, err := w.m.Assign(t.Context(), id, ino, 20*mib, block, session, false, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := w.segment(row, layout.IOModeRW, 20*mib, block)
	for j := range s.Mirrors[0] {
		w.write(d, &s.Mirrors[0][j], 20*mib, pattern(1, block))
	}
	if got := w.get(d, row, 0, 21*mib)[20*mib:]; !bytes.Equal(got[:block], make([]byte, block)) {
		t.Error("what is not valid is read")
	}
	// It says the data files and how much they have.
	desc := w.m.Describe(row, ino)
	if got := desc.Mirrors[0][0]; !strings.HasPrefix(got.Address, "nvme://127.0.0.1:") || !strings.Contains(got.DataFile, "MiB allocated") {
		t.Errorf("%+v", got)
	}

	// A segment for writing ends where there is no space.
	list := w.m.Segments(row, layout.IOModeRW)
	list, err = w.m.Extents(t.Context(), row, list)
	if err != nil || len(list) != 1 || list[0].Len < int64(len(data)) || list[0].Len > 20*mib {
		t.Errorf("%+v, %v", list, err)
	}
	// Nobody may validate what is not there, or not his.
	ref := row.Mirrors[0][0].Ref()
	for name, c := range map[string]struct {
		w    metarpc.Written
		want error
	}{
		"no space":     {metarpc.Written{Copy: ref, Generation: 1, Ranges: []metarpc.Range{{Off: 40 * mib, Len: block}}}, syscall.ESTALE},
		"no data file": {metarpc.Written{Copy: metarpc.CopyRef{Device: ref.Device, Handle: handleOf(1 << 40)}, Generation: 1, Ranges: []metarpc.Range{{Len: block}}}, nil},
		"no device":    {metarpc.Written{Copy: metarpc.CopyRef{Handle: handleOf(1)}, Ranges: []metarpc.Range{{Len: block}}}, nil},
	} {
		if err := w.m.Validate(t.Context(), id, []metarpc.Written{c.w}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}

	// Cut in the middle of a block.
	if err := w.m.Truncate(t.Context(), row, 3*mib+100); err != nil {
		t.Fatal(err)
	}
	if got := w.get(d, row, 0, 6*mib); !bytes.Equal(got[:3*mib+100], data[:3*mib+100]) || !bytes.Equal(got[3*mib+100:], make([]byte, 3*mib-100)) {
		t.Error("cut, it is not its beginning and zeros")
	}
	w.spaces(4 * mib)
	stale := metarpc.Written{Copy: ref, Generation: 1, Ranges: []metarpc.Range{{Off: 4 * mib, Len: block}}}
	if err := w.m.Validate(t.Context(), id, []metarpc.Written{stale}); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("blocks that were cut off are made valid: %v", err)
	}
	w.remove(id)
	waittest.Until(w.t, "nothing is taken", func() bool { return w.m.GarbageCount(t.Context()) == 0 })
	w.spaces(0)
}

func TestNamespaceFull(t *testing.T) {
	w, d := newBlockWorld(t, 8*mib, 32*mib)
	// One is full: new files go to the other.
	for id := layout.FileID(11); id < 31; id++ {
		w.store(d, id, w.inode(id, layout.Policy{StripeCount: 1}), 0, pattern(byte(id), mib))
	}
	ino := w.inode(9, layout.Policy{StripeCount: 1})
	for off := int64(0); ; off += mib {
		_, err := w.m.Assign(t.Context(), 9, ino, off, mib, session, false, nil, nil)
		if errors.Is(err, ErrNoSpace) && errors.Is(err, syscall.ENOSPC) {
			break
		}
		if err != nil || off > 40*mib {
			t.Fatalf("at %d: %v", off, err)
		}
	}
	for id := layout.FileID(11); id < 31; id++ {
		if got := w.get(d, w.row(id), 0, mib); !bytes.Equal(got, pattern(byte(id), mib)) {
			t.Errorf("file %d is not what was written", id)
		}
		w.remove(id)
	}
	waittest.Until(w.t, "it is removed", func() bool { return w.m.GarbageCount(t.Context()) == 0 })
	if _, err := w.m.Assign(t.Context(), 9, ino, 20*mib, mib, session, false, nil, nil); err != nil {
		t.Error(err)
	}
}

// A data file ends somewhere: what is wanted beyond is refused, for good, and what reaches up to there is given.
func TestNamespaceFar(t *testing.T) {
	w, _ := newBlockWorld(t, 64*mib, 64*mib)
	for i, policy := range []layout.Policy{{StripeCount: 1}, {StripeCount: 2}} {
		id := layout.FileID(9 + i)
		ino := w.inode(id, policy)
		for _, n := range []int64{4096, 2 * mib, layout.ToEOF} {
			row, err := w.m.Assign(t.Context(), id, ino, extent.MaxBytes-4096, n, session, false, nil, nil)
			if err != nil {
				t.Fatalf("%d bytes, the first of which a data file can have: %v", n, err)
			}
			if s := w.segment(row, layout.IOModeRW, extent.MaxBytes-4096, 4096); s.Off > extent.MaxBytes-4096 || s.Off+s.Len < extent.MaxBytes {
				t.Errorf("the segment is %d bytes at %d", s.Len, s.Off)
			}
			for _, off := range []int64{extent.MaxBytes, 1<<63 - 4096} {
				if _, err := w.m.Assign(t.Context(), id, ino, off, n, session, false, nil, nil); !errors.Is(err, syscall.EFBIG) {
					t.Errorf("%d bytes at %d: %v", n, off, err)
				}
				if s := w.segment(row, layout.IOModeRead, off, 2048); len(s.Mirrors[0][0].Extents) > 0 {
					t.Errorf("to be read at %d: %+v", off, s)
				}
			}
			if err := w.m.Truncate(t.Context(), row, 1<<63-4096); err != nil {
				t.Errorf("cut where nothing can be: %v", err)
			}
		}
	}
}

// What is cut off or removed takes no space on a namespace that is thin.
func TestNamespaceThin(t *testing.T) {
	w, d := newBlockWorld(t, 128*mib)
	used := func() int64 {
		var st syscall.Stat_t
		if err := syscall.Stat(d.paths[0], &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	began := used()
	for id := layout.FileID(1); id <= 2; id++ {
		w.store(d, id, w.inode(id, layout.Policy{StripeCount: 1}), 0, pattern(byte(id), 8*mib))
	}
	if n := used() - began; n < 16*mib {
		t.Fatalf("%d bytes are taken, want 16 MiB", n)
	}
	if err := w.m.Truncate(t.Context(), w.row(1), 2*mib); err != nil {
		t.Fatal(err)
	}
	if n := used() - began; n < 10*mib || n > 11*mib {
		t.Errorf("%d bytes are taken after one was cut, want 10 MiB", n)
	}
	w.remove(2)
	waittest.Until(w.t, "what was removed is deallocated", func() bool {
		n := used() - began
		return n >= 2*mib && n <= 3*mib
	})
	if got := w.get(d, w.row(1), 0, 2*mib); !bytes.Equal(got, pattern(1, 8*mib)[:2*mib]) {
		t.Error("what was not cut off is not what was written")
	}
}

// TestNamespaceCrashes ends Managers at any commit, and looks what the next ones make of it: every data file that has units is in a layout or is garbage,
// and no unit is anything else than a data file's, condemned or free.
func TestNamespaceCrashes(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 2))
		w, _ := newBlockWorld(t, 512*mib, 512*mib, 512*mib)
		for life := range 6 {
			if err := w.m.Close(); err != nil {
				t.Fatal(err)
			}
			engine := &crashingEngine{Engine: w.engine, c: &crash{rng: rng, steps: 60 + rng.IntN(400)}, sync: 2 * time.Millisecond}
			w.start(engine)
			var work sync.WaitGroup
			for worker := range 3 {
				random := func(n int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(life*6+2*worker+n))) }
				base := layout.FileID(1000*worker + 10)
				ctx, cancel := context.WithCancel(t.Context())
				work.Go(func() { w.churn(random(0), base); cancel() })
				work.Go(func() { w.cutAll(ctx, random(1), base) })
			}
			work.Wait()
			w.engine = engine.survives(t)
		}
		w.restart()
		waittest.Until(w.t, "nothing is condemned", func() bool {
			return !slices.ContainsFunc(w.m.all(), func(d *device) bool {
				stat, err := d.space.Stat(t.Context())
				return err != nil || stat.Condemned > 0
			})
		})
		if err := w.m.Close(); err != nil { // so that nothing is removed meanwhile
			t.Fatal(err)
		}
		known := map[string]bool{}
		for key := range w.rows(schema.PrefixGarbage) {
			known[key] = true
		}
		for _, value := range w.rows(schema.PrefixLayout) {
			var row schema.Layout
			if err := schema.Decode(value, &row); err != nil {
				t.Fatal(err)
			}
			row.Has(func(file *schema.DataFile) bool {
				known[string(schema.GarbageKey(file.Device, file.Number))] = true
				return false
			})
		}
		var used int64
		for _, d := range w.m.all() {
			err := d.space.List(t.Context(), func(f extent.File) error {
				if used += f.Bytes; !known[string(schema.GarbageKey(d.id, f.Number))] {
					t.Errorf("seed %d: data file %x has units, and nobody has it", seed, f.Number)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
		t.Logf("seed %d: %d MiB", seed, used>>20)
		if w.spaces(used); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// cutAll cuts files until ctx ends.
func (w *world) cutAll(ctx context.Context, rng *rand.Rand, base layout.FileID) {
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		row, _, err := w.m.filling(ctx, base+layout.FileID(rng.IntN(20)))
		if err == nil && columns(&row) > 0 {
			w.m.Truncate(ctx, row, rng.Int64N(4*mib)) // as far as it comes
		}
	}
}

// TestNamespaceRestart has a Manager follow one that was about to free something.
func TestNamespaceRestart(t *testing.T) {
	w, d := newBlockWorld(t, 64*mib)
	ino := w.inode(1, layout.Policy{StripeCount: 1})
	data := pattern(0, 6*mib)
	row := w.store(d, 1, ino, 0, data)
	space := w.m.all()[0].space
	// Cut, and the Manager gone before anything was freed.
	if _, _, err := space.Truncate(t.Context(), row.Mirrors[0][0].Number, 2*mib); err != nil {
		t.Fatal(err)
	}
	w.inode(2, layout.Policy{StripeCount: 1})
	gone := w.store(d, 2, w.inode(2, layout.Policy{StripeCount: 1}), 0, data)
	if err := space.Remove(t.Context(), gone.Mirrors[0][0].Number); err != nil {
		t.Fatal(err)
	}
	w.restart()
	waittest.Until(w.t, "what was condemned is free", func() bool {
		stat, err := w.m.all()[0].space.Stat(t.Context())
		return err == nil && stat.Condemned == 0
	})
	w.spaces(2 * mib)
	// Space for a file that was removed meanwhile.
	var b catalog.Batch
	b.Delete(schema.InodeKey(1))
	w.commit(&b)
	if _, err := w.m.Assign(t.Context(), 1, ino, 0, 30*mib, session, false, nil, nil); !errors.Is(err, ErrNoInode) {
		t.Errorf("a file that is gone gets space: %v", err)
	}
	w.spaces(2 * mib)
}

func TestFenceSession(t *testing.T) {
	w, d := newBlockWorld(t, 16*mib)
	row := w.store(d, 1, w.inode(1, layout.Policy{StripeCount: 1}), 0, pattern(0, mib))
	client, err := nvmetcp.NewInitiator(nvmetcp.InitiatorConfig{
		HostNQN: "nqn.2014-08.org.example:client", HostID: wire.HostID{42}, Key: session.Key, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ns, err := client.Open(t.Context(), []string{d.target.Addr(1)}, testNQN, 1)
	if err != nil {
		t.Fatal(err)
	}
	write := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return ns.Do(ctx, &nvmetcp.Request{Command: nvmetcp.Command{Op: wire.OpWrite, SLBA: mib / block, Blocks: 1, Data: make([]byte, block)}})
	}
	if err := write(); err == nil {
		t.Error("a host that is not registered writes")
	}
	if err := ns.Register(t.Context(), session.Key()); err != nil {
		t.Fatal(err)
	}
	if err := write(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := w.m.FenceSession(t.Context(), row, session); err != nil {
			t.Fatal(err)
		}
	}
	if err := write(); err == nil {
		t.Error("a host that is fenced writes")
	}
	// The service still can.
	if err := w.m.Truncate(t.Context(), row, 100); err != nil {
		t.Error(err)
	}
	// Where there are no reservations a session that was lost is waited for.
	w.m.mu.Lock()
	w.m.devices[0].row.Reserved, w.m.fenceWait = false, 50*time.Millisecond
	w.m.mu.Unlock()
	began := time.Now()
	if err := w.m.FenceSession(t.Context(), row, metarpc.SessionID{8}); err != nil || time.Since(began) < 50*time.Millisecond {
		t.Errorf("fenced after %v, %v", time.Since(began), err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	w.m.mu.Lock()
	w.m.fenceWait = time.Hour
	w.m.mu.Unlock()
	if err := w.m.FenceSession(over, row, metarpc.SessionID{9}); !errors.Is(err, context.Canceled) {
		t.Errorf("not waited for: %v", err)
	}
	// Somebody clears the reservation.
	if err := ns.Register(t.Context(), session.Key()); err != nil {
		t.Fatal(err)
	}
	if err := ns.Clear(t.Context()); err != nil {
		t.Fatal(err)
	}
	dev := w.m.all()[0]
	waittest.Until(w.t, "it is reserved again", func() bool {
		kick(dev.recheck)
		return write() != nil && w.m.Devices(t.Context())[0].Reachable
	})
}

func TestMoves(t *testing.T) {
	w, d := newBlockWorld(t, 64*mib)
	ns := w.m.all()[0]
	e := w.export()
	w.add(e.URL())
	nfs := w.device(0)
	// fill does what the service does with a file that has something to fill.
	fill := func(id layout.FileID) {
		t.Helper()
		row, done, err := w.m.StartFill(t.Context(), id, nil)
		if err != nil {
			t.Fatal(err)
		}
		for end := int64(1); done < end; {
			if done, end, err = w.m.Fill(t.Context(), id, row, done, 2*mib, unpaced, never); err != nil {
				t.Fatal(err)
			}
		}
		if _, err = w.m.EndFill(t.Context(), id, row); err == nil && row.Moving {
			if err = w.m.Exchange(t.Context(), id, nil); err == nil {
				err = w.m.DropMoved(t.Context(), id)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	data := append(pattern(0, 3*mib), make([]byte, mib)...)
	data = append(data, pattern(1, 700)...)
	const id = 3
	ino := w.inode(id, layout.Policy{StripeCount: 2})
	padded := append(slices.Clone(data), make([]byte, block-700)...)
	row := w.store(d, id, ino, 0, padded)
	w.resize(id, int64(len(data)))
	if !w.m.OnNamespaces(row) || row.Width != 2 {
		t.Fatalf("%+v", row)
	}
	for _, to := range []*device{ns, nfs, ns} {
		if _, _, err := w.m.MoveTo(t.Context(), id, to.id); err != nil {
			t.Fatal(err)
		}
		fill(id)
		row = w.row(id)
		if row.Width != 1 || row.Mirrors[0][0].Device != to.id || row.Moving {
			t.Fatalf("%+v", row)
		}
		if got := w.get(d, row, 0, int64(len(padded))); !bytes.Equal(got, padded) {
			t.Errorf("moved to %v, it is something else", to.id)
		}
		if to == nfs {
			if end, err := w.m.Sync(t.Context(), row); err != nil || end != int64(len(data)) {
				t.Errorf("moved to a data server, it is %d bytes long, want %d (%v)", end, len(data), err)
			}
		}
	}
	waittest.Until(w.t, "what was left is removed", func() bool { return w.m.GarbageCount(t.Context()) == 0 })
	w.spaces(4 * mib) // zeros take none

	// A mirrored file on both loses one copy after the other.
	const mirrored = 4
	row = w.store(d, mirrored, w.inode(mirrored, layout.Policy{StripeCount: 1, Mirrors: 2}), 0, padded)
	w.add(w.export().URL())
	w.add(w.export().URL())
	for i := range 2 {
		row = w.row(mirrored)
		if _, err := w.m.MarkStale(t.Context(), mirrored, []metarpc.CopyRef{row.Mirrors[i][0].Ref()}); err != nil {
			t.Fatal(err)
		}
		waittest.Until(w.t, "there is another copy", func() bool {
			fill(mirrored)
			row := w.row(mirrored)
			return !row.Incomplete()
		})
		row = w.row(mirrored)
		for j := range 2 {
			if got := w.get(d, row, j, int64(len(padded))); !bytes.Equal(got, padded) {
				t.Errorf("mirror %d is something else", j)
			}
		}
	}
	w.remove(mirrored)
	w.remove(id)
	waittest.Until(w.t, "all is removed", func() bool { return w.m.GarbageCount(t.Context()) == 0 })
	w.spaces(0)
}

// TestMoveToFull moves a file to a namespace that others fill meanwhile: whoever writes goes on, and the move is given up.
func TestMoveToFull(t *testing.T) {
	w, d := newBlockWorld(t, 8*mib, 64*mib)
	small := w.m.namespaceAt(place{host: "127.0.0.1", port: w.m.all()[0].url().port, nqn: testNQN, nsid: 1})
	if _, err := w.m.DrainDevice(t.Context(), small.id, false); err != nil {
		t.Fatal(err)
	}
	ino := w.inode(1, layout.Policy{StripeCount: 1})
	w.store(d, 1, ino, 0, pattern(0, 2*mib))
	if _, err := w.m.DrainDevice(t.Context(), small.id, true); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.m.MoveTo(t.Context(), 1, small.id); err != nil {
		t.Fatal(err)
	}
	row, _, err := w.m.StartFill(t.Context(), 1, nil)
	if err != nil || !row.Moving {
		t.Fatalf("%+v, %v", row, err)
	}
	for off := int64(0); off < 12*mib; off += mib {
		if row, err = w.m.Assign(t.Context(), 1, ino, off, mib, session, false, nil, nil); err != nil {
			t.Fatalf("at %d: %v", off, err)
		}
	}
	if row.Mirrors[1][0].State != layout.CopyStale {
		t.Errorf("%+v", row)
	}
	if err = w.m.Exchange(t.Context(), 1, nil); err == nil {
		err = w.m.DropMoved(t.Context(), 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	if row := w.row(1); row.Moving || row.Mirrors[0][0].Device == small.id {
		t.Errorf("%+v", row)
	}
	if got := w.get(d, row, 0, 2*mib); !bytes.Equal(got, pattern(0, 2*mib)) {
		t.Error("it is not what was written")
	}
}

// TestNamespaceAway takes the address of a namespace away and gives it back.
func TestNamespaceAway(t *testing.T) {
	w, d := newBlockWorld(t, 16*mib)
	row := w.store(d, 1, w.inode(1, layout.Policy{}), 0, pattern(0, mib))
	addr := d.target.Addr(1)
	if err := d.target.PortDown(1); err != nil {
		t.Fatal(err)
	}
	dev := w.m.all()[0]
	cut := make(chan error)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { cut <- w.m.Truncate(ctx, row, 100) }()
	waittest.Until(w.t, "why it does not answer is known", func() bool {
		err := w.m.why(dev.url(), context.DeadlineExceeded)
		return errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), addr)
	})
	if err := d.target.PortUp(1); err != nil {
		t.Fatal(err)
	}
	if err := <-cut; err != nil {
		t.Error(err)
	}
	if got := w.get(d, row, 0, mib); !bytes.Equal(got[:100], pattern(0, 100)) || !bytes.Equal(got[100:], make([]byte, mib-100)) {
		t.Error("it was not cut")
	}
	waittest.Until(w.t, "it is up", func() bool {
		kick(dev.recheck)
		return w.m.Devices(t.Context())[0].Reachable
	})
}

// TestNamespacePulse: a namespace that does not take a write is down, or not writable, until it does.
func TestNamespacePulse(t *testing.T) {
	for _, c := range []struct {
		name, problem string
		reachable     bool
		begin, end    func(*disks)
	}{
		{"frozen", "does not answer", false, func(d *disks) { d.sick[0].mu.Lock() }, func(d *disks) { d.sick[0].mu.Unlock() }},
		{"failing", "does not take a write", false, func(d *disks) { d.sick[0].fail(syscall.EIO) }, func(d *disks) { d.sick[0].fail(nil) }},
		{"read-only", "not writable", true, func(d *disks) { d.sick[0].fail(syscall.EROFS) }, func(d *disks) { d.sick[0].fail(nil) }},
		{"full", "not writable", true, func(d *disks) { d.sick[0].fail(syscall.ENOSPC) }, func(d *disks) { d.sick[0].fail(nil) }},
		{"gone", "no answer", false, func(d *disks) { d.target.PortDown(1) }, func(d *disks) { d.target.PortUp(1) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, d := newBlockWorld(t, 16*mib)
			row := w.store(d, 1, w.inode(1, layout.Policy{}), 0, pattern(0, mib))
			c.begin(d)
			info := func() metarpc.DeviceInfo { return w.m.Devices(t.Context())[0] }
			waittest.Until(w.t, c.problem, func() bool {
				is := info()
				return is.Reachable == c.reachable && strings.Contains(is.Problem, c.problem)
			})
			if c.reachable {
				if got := w.get(d, row, 0, mib); !bytes.Equal(got, pattern(0, mib)) {
					t.Error("it is not read as before")
				}
			}
			c.end(d)
			waittest.Until(w.t, "it is up", func() bool {
				kick(w.m.all()[0].recheck)
				return info().Reachable && info().Problem == ""
			})
		})
	}
}

// TestNamespaceFewCopies: with one of two namespaces away files get the copies that can be had, and the others when it
// is back.
func TestNamespaceFewCopies(t *testing.T) {
	t.Parallel()
	w, d := newBlockWorld(t, 64*mib, 64*mib)
	policy := layout.Policy{StripeUnit: mib, StripeCount: 2, Mirrors: 2}
	data := pattern(0, 4*mib)
	const older, newer = 1, 2
	row := w.store(d, older, w.inode(older, policy), 0, data[:mib]) // of its two columns it has one
	away := w.m.all()[1]
	at := int(away.url().nsid - 1)
	d.sick[at].fail(syscall.EIO)
	waittest.Until(w.t, "one is down", func() bool { return !w.m.Devices(t.Context())[1].Reachable })
	for i := range row.Mirrors {
		if ref := row.Mirrors[i][0].Ref(); ref.Device == away.id {
			if _, err := w.m.MarkStale(t.Context(), older, []metarpc.CopyRef{ref}); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.store(d, older, w.inode(older, policy), mib, data[mib:])
	w.store(d, newer, w.inode(newer, policy), 0, data)
	for _, id := range []layout.FileID{older, newer} {
		row := w.row(id)
		if !row.FewCopies() || row.GoodCopies(0) != 1 || !w.m.OnNamespaces(row) || !w.hasFill(id) {
			t.Fatalf("%d: %+v, a fill row: %v", id, row, w.hasFill(id))
		}
		good := slices.IndexFunc(row.Mirrors, func(files []schema.DataFile) bool { return files[0].State == layout.CopyGood })
		if row.Mirrors[good][len(row.Mirrors[good])-1].State == layout.CopyGood && !bytes.Equal(w.get(d, row, good, 4*mib), data) {
			t.Errorf("%d is something else", id)
		}
		if err := w.m.Fence(t.Context(), id); err != nil {
			t.Error(err)
		}
		if can, err := w.m.Fillable(t.Context(), id, nil); can || err != nil {
			t.Errorf("%d can be filled: %v, %v", id, can, err)
		}
	}

	d.sick[at].fail(nil)
	for _, id := range []layout.FileID{older, newer} {
		waittest.Until(w.t, "it can be filled", func() bool {
			kick(away.recheck)
			can, err := w.m.Fillable(t.Context(), id, nil)
			return can && err == nil
		})
		waittest.Until(w.t, "it is complete", func() bool {
			if err := w.fill(id, mib, nil); err != nil {
				t.Fatal(err)
			}
			row := w.row(id)
			return !row.Incomplete()
		})
		for i := range 2 {
			if !bytes.Equal(w.get(d, w.row(id), i, 4*mib), data) {
				t.Errorf("mirror %d of %d is something else", i, id)
			}
		}
		if w.hasFill(id) {
			t.Errorf("%d has a fill row", id)
		}
		w.remove(id)
	}
	waittest.Until(w.t, "all is removed", func() bool { return w.m.GarbageCount(t.Context()) == 0 })
	w.spaces(0)
}

func TestRemoveNamespace(t *testing.T) {
	w, d := newBlockWorld(t, 16*mib, 16*mib)
	row := w.store(d, 1, w.inode(1, layout.Policy{StripeCount: 1}), 0, pattern(0, mib))
	dev, err := w.m.device(row.Mirrors[0][0].Device)
	if err != nil {
		t.Fatal(err)
	}
	nsid := int(dev.url().nsid - 1)
	if _, err := w.m.DrainDevice(t.Context(), dev.id, false); err != nil {
		t.Fatal(err)
	}
	if err := w.m.RemoveDevice(t.Context(), dev.id, false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a device with data: %v", err)
	}
	w.remove(1)
	if err := w.m.RemoveDevice(t.Context(), dev.id, false); err != nil {
		t.Fatal(err)
	}
	for _, prefix := range []byte{schema.PrefixExtents, schema.PrefixCondemned, schema.PrefixUnits} {
		if rows := w.rows(prefix); len(rows) > 0 {
			t.Errorf("%d rows %q are left", len(rows), prefix)
		}
	}
	for _, at := range []int64{0, extent.BackupLabel(16 * mib)} {
		if _, err := extent.ParseLabel(d.read(nsid, at, extent.LabelSize)); !errors.Is(err, extent.ErrNoLabel) {
			t.Errorf("its label: %v", err)
		}
	}
	// Anybody may use it.
	other, err := nvmetcp.NewInitiator(nvmetcp.InitiatorConfig{HostNQN: "nqn.2014-08.org.example:other", HostID: wire.HostID{43}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ns, err := other.Open(t.Context(), []string{d.target.Addr(1)}, testNQN, uint32(nsid+1))
	if err == nil {
		err = transfer(t.Context(), ns, wire.OpWrite, mib, make([]byte, block))
	}
	if err != nil {
		t.Errorf("it is reserved still: %v", err)
	}
	// As another volume would.
	if err := ns.Reserve(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	if _, err := w.m.AddDevice(t.Context(), d.url(nsid), true); err == nil || !strings.Contains(err.Error(), "another volume") {
		t.Errorf("one that another host has reserved: %v", err)
	}
	if err := ns.Clear(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info := w.add(d.url(nsid)); info.Device.ID == dev.id {
		t.Error("it has its old id")
	}
	// One that is gone for good.
	w.store(d, 2, w.inode(2, layout.Policy{StripeCount: 2}), 0, pattern(0, 4*mib))
	lost := w.m.all()[0]
	if _, err := w.m.DrainDevice(t.Context(), lost.id, false); err != nil {
		t.Fatal(err)
	}
	w.remove(2)
	if err := w.m.RemoveDevice(t.Context(), lost.id, true); err != nil {
		t.Fatal(err)
	}
	if rows := w.rows(schema.PrefixNamespace); len(rows) != 1 {
		t.Errorf("%d namespaces", len(rows))
	}
}
