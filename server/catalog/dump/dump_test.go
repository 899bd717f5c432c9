package dump

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/catalog/faultytest"
	"github.com/weftfs/weft/server/catalog/memorytest"
	"github.com/weftfs/weft/server/catalog/pebble"
	"github.com/weftfs/weft/server/schema"
)

var volume = schema.Volume{Format: schema.Format, ID: [16]byte{0xab, 1}, Created: 5}

// place makes empty catalogs of a kind of engine. Their limits are those of the engine, or narrower ones.
type place struct {
	name string
	make func(t *testing.T) catalog.Engine
}

var places = []place{
	{"memory", func(t *testing.T) catalog.Engine { return memorytest.New() }},
	{"narrow and faulty", func(t *testing.T) catalog.Engine {
		e := faultytest.New(memorytest.New(), faultytest.Config{Conflict: 0.1, Lost: 0.1, Applied: 0.1, Late: 0.1, LateBy: 10 * time.Millisecond})
		t.Cleanup(func() { e.Close() })
		return &narrow{Engine: e, caps: catalog.Caps{MaxBatchBytes: 4096, MaxKeys: 16, MaxValue: 3000}}
	}},
	{"pebble", func(t *testing.T) catalog.Engine {
		e, err := pebble.Open(pebble.Config{Dir: t.TempDir(), Fatal: func(err error) { t.Error(err) }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		return e
	}},
}

// narrow is an engine with limits of its own.
type narrow struct {
	catalog.Engine
	caps catalog.Caps
}

func (n *narrow) Caps() catalog.Caps { return n.caps }

func (n *narrow) Commit(ctx context.Context, b *catalog.Batch) error {
	if err := b.Check(n.caps); err != nil {
		return err
	}
	return n.Engine.Commit(ctx, b)
}

func commit(t *testing.T, e catalog.Engine, fill func(b *catalog.Batch)) {
	t.Helper()
	b := catalog.Batch{Durability: catalog.NoSync}
	fill(&b)
	for {
		err := e.Commit(t.Context(), &b)
		if err == nil {
			return
		}
		if !errors.Is(err, catalog.ErrConflict) && !errors.Is(err, catalog.ErrUnknown) {
			t.Fatal(err)
		}
	}
}

// populate puts a volume with some thousand rows into a catalog.
func populate(t *testing.T, e catalog.Engine, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	commit(t, e, func(b *catalog.Batch) {
		b.Put(schema.KeyVolume, schema.Encode(&volume))
		b.Put(schema.FilesKey(0), catalog.EncodeCounters(3000))
		b.Put(schema.KeyNextInode, catalog.EncodeCounters(8000))
		b.Put(schema.DeviceKey(layout.DeviceID{1}), schema.Encode(&schema.Device{Next: 77}))
		b.Put(schema.SessionKey([16]byte{1}), schema.Encode(&schema.Session{Created: 4}))
		b.Put(schema.SessionKey([16]byte{2}), schema.Encode(&schema.Session{Ended: true}))
	})
	commit(t, e, func(b *catalog.Batch) {
		b.Put(schema.MemberKey([16]byte{1}), schema.Encode(&schema.Member{}))
		b.Put(schema.KeyMaintenance, schema.Encode(&schema.Maintenance{}))
		b.Add(schema.BeatKey([16]byte{1}), 0, 17)
		b.Put(schema.ShardKey(0), schema.Encode(&schema.Shard{Epoch: 3}))
	})
	for id := layout.FileID(10); id < 2200; id++ {
		commit(t, e, func(b *catalog.Batch) {
			b.Put(schema.InodeKey(id), bytes.Repeat([]byte{byte(id)}, r.IntN(2*int(id)%2000+1)))
			b.Put(schema.EntryKey(1, fmt.Sprint(id)), nil)
			b.Add(schema.CountersKey(layout.FileID(id%7)), 0, r.Int64N(100))
		})
	}
}

func export(t *testing.T, e catalog.Engine, kind Kind) []byte {
	t.Helper()
	var out bytes.Buffer
	var told Progress
	p, err := Export(t.Context(), &out, ExportConfig{Kind: kind, Snapshot: e.Snapshot, Progress: func(p Progress) { told = p }})
	if err != nil {
		t.Fatal(err)
	}
	if p.Bytes != int64(out.Len()) || told.Rows == 0 || told.Rows > p.Rows || p.Share() > 1 {
		t.Errorf("told %+v, then %+v; the file has %d bytes", told, p, out.Len())
	}
	return out.Bytes()
}

func dumpRows(t *testing.T, e catalog.Engine) map[string]string {
	t.Helper()
	rows := map[string]string{}
	for row, err := range e.Scan(t.Context(), nil, nil, catalog.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		rows[string(row.Key)] = string(row.Value)
	}
	return rows
}

// TestAcrossEngines takes a volume from each engine to each: the files are alike, byte by byte.
func TestAcrossEngines(t *testing.T) {
	for _, from := range places {
		for _, to := range places {
			t.Run(from.name+"-"+to.name, func(t *testing.T) {
				a, b := from.make(t), to.make(t)
				populate(t, a, 1)
				file := export(t, a, KindExport)
				got, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: b})
				if err != nil {
					t.Fatal(err)
				}
				if got.Volume.ID != volume.ID || got.Kind != KindExport || got.Sessions != 0 || got.Bytes != int64(len(file)) {
					t.Errorf("imported %+v", got)
				}
				if again := export(t, b, KindExport); !bytes.Equal(file, again) {
					t.Errorf("files of %d and %d bytes", len(file), len(again))
				}
				rows := dumpRows(t, b)
				for _, key := range [][]byte{schema.MemberKey([16]byte{1}), schema.KeyMaintenance} {
					if _, ok := rows[string(key)]; ok || int64(len(rows)) != got.Rows+1 {
						t.Errorf("%d rows, %d were imported; that of a process, %q, among them: %v", len(rows), got.Rows, key, ok)
					}
				}
			})
		}
	}
}

// TestBackupGoesBack imports a backup: nothing that was given out since is given out again.
func TestBackupGoesBack(t *testing.T) {
	a, b := memorytest.New(), memorytest.New()
	populate(t, a, 2)
	got, err := Import(t.Context(), bytes.NewReader(export(t, a, KindBackup)), ImportConfig{Engine: b})
	if err != nil {
		t.Fatal(err)
	}
	if got.Sessions != 1 || got.Kind != KindBackup {
		t.Errorf("%+v", got)
	}
	rows := dumpRows(t, b)
	var dev schema.Device
	var sess schema.Session
	if err := errors.Join(schema.Decode([]byte(rows[string(schema.DeviceKey(layout.DeviceID{1}))]), &dev),
		schema.Decode([]byte(rows[string(schema.SessionKey([16]byte{1}))]), &sess)); err != nil {
		t.Fatal(err)
	}
	next, _ := catalog.DecodeCounters([]byte(rows[string(schema.KeyNextInode)]))
	if dev.Next != 77+leap || next.Field(0) != 8000+leap || !sess.Ended || sess.Created != 4 {
		t.Errorf("next data file %d, next inode %d, session %+v", dev.Next, next, sess)
	}
	if rows[string(schema.KeyVolume)] != string(schema.Encode(&volume)) {
		t.Error("another volume row")
	}
}

// TestShards gives a volume another number of shards.
func TestShards(t *testing.T) {
	a, b := memorytest.New(), memorytest.New()
	populate(t, a, 3)
	file := export(t, a, KindExport)
	got, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: b, Shards: 16})
	if err != nil {
		t.Fatal(err)
	}
	rows := dumpRows(t, b)
	if got.Volume.Shards != 16 || got.Volume.Format != schema.FormatShards || got.Sessions != 1 {
		t.Errorf("%+v", got)
	}
	if _, ok := rows[string(schema.ShardKey(0))]; ok {
		t.Error("a shard has its owner still")
	}
	// And back to one, which takes as little.
	d := memorytest.New()
	one, err := Import(t.Context(), bytes.NewReader(export(t, b, KindExport)), ImportConfig{Engine: d, Shards: 1})
	if err != nil || one.Volume.ShardCount() != 1 || one.Volume.Format != schema.FormatShards || one.Sessions != 0 {
		t.Errorf("%+v, %v", one, err)
	}
	again, err := Import(t.Context(), bytes.NewReader(export(t, d, KindExport)), ImportConfig{Engine: memorytest.New(), Shards: 4})
	if err != nil || again.Volume.Shards != 4 || again.Volume.Format != schema.FormatShards {
		t.Errorf("%+v, %v", again, err)
	}
	// The same number as before leaves everything as it is.
	c := memorytest.New()
	if _, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: c, Shards: 1}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(file, export(t, c, KindExport)) {
		t.Error("an import with as many shards as before has changed something")
	}
	for _, shards := range []int{-1, layout.MaxShards + 1} {
		if _, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: memorytest.New(), Shards: shards}); err == nil {
			t.Errorf("%d shards", shards)
		}
	}
	// Namespaces belong to volumes with one.
	commit(t, a, func(b *catalog.Batch) { b.Put(schema.NamespaceKey(layout.DeviceID{1}), nil) })
	if _, err := Import(t.Context(), bytes.NewReader(export(t, a, KindExport)), ImportConfig{Engine: memorytest.New(), Shards: 2}); err == nil || !strings.Contains(err.Error(), "namespaces") {
		t.Errorf("a volume with namespaces: %v", err)
	}
}

// TestNotEmpty leaves alone what is there, and says what it is.
func TestNotEmpty(t *testing.T) {
	a := memorytest.New()
	populate(t, a, 4)
	file := export(t, a, KindExport)
	for _, c := range []struct {
		name, want string
		fill       func(b *catalog.Batch)
	}{
		{"volume", fmt.Sprintf("volume %x", volume.ID), func(b *catalog.Batch) { b.Put(schema.KeyVolume, schema.Encode(&volume)) }},
		{"rows", `"zzz"`, func(b *catalog.Batch) { b.Put([]byte("zzz"), nil) }},
	} {
		b := memorytest.New()
		commit(t, b, c.fill)
		before := dumpRows(t, b)
		_, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: b})
		if !errors.Is(err, ErrNotEmpty) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if after := dumpRows(t, b); fmt.Sprint(before) != fmt.Sprint(after) {
			t.Errorf("%s: rows were changed", c.name)
		}
	}
	if _, err := Export(t.Context(), new(bytes.Buffer), ExportConfig{Snapshot: memorytest.New().Snapshot}); err == nil || !strings.Contains(err.Error(), "no volume") {
		t.Errorf("export of nothing: %v", err)
	}
}

// TestInterrupted interrupts an import anywhere: there is no volume, and the import can be run again.
func TestInterrupted(t *testing.T) {
	a := memorytest.New()
	populate(t, a, 5)
	file := export(t, a, KindExport)
	for _, place := range places {
		t.Run(place.name, func(t *testing.T) {
			b := place.make(t)
			for _, part := range []int{100, 5000, len(file) / 2, len(file) - 10} {
				if _, err := Import(t.Context(), bytes.NewReader(file[:part]), ImportConfig{Engine: b}); !errors.Is(err, ErrDamaged) {
					t.Fatalf("the first %d bytes: %v", part, err)
				}
				if _, err := b.Get(t.Context(), schema.KeyVolume); !errors.Is(err, catalog.ErrNotFound) {
					t.Fatalf("after %d bytes there is a volume: %v", part, err)
				}
				if _, err := Export(t.Context(), new(bytes.Buffer), ExportConfig{Snapshot: b.Snapshot}); err == nil || !strings.Contains(err.Error(), "import") {
					t.Errorf("export of it: %v", err)
				}
			}
			if _, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: b}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(file, export(t, b, KindExport)) {
				t.Error("it is not the same")
			}
		})
	}
}

// TestOverAnother lets the import of another file begin anew over one that was interrupted: what is left of the first is found.
func TestOverAnother(t *testing.T) {
	a, c := memorytest.New(), memorytest.New()
	populate(t, a, 6)
	commit(t, a, func(b *catalog.Batch) { b.Put([]byte("cc"), []byte("more")) })
	populate(t, c, 6)
	first, second := export(t, a, KindExport), export(t, c, KindExport)
	b := memorytest.New()
	if _, err := Import(t.Context(), bytes.NewReader(first[:len(first)-1]), ImportConfig{Engine: b}); !errors.Is(err, ErrDamaged) {
		t.Fatal(err)
	}
	if _, err := Import(t.Context(), bytes.NewReader(second), ImportConfig{Engine: b}); !errors.Is(err, catalog.ErrCorrupt) {
		t.Errorf("over rows of another file: %v", err)
	}
	if _, err := b.Get(t.Context(), schema.KeyVolume); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("there is a volume: %v", err)
	}
}

// TestTwoImports runs two at a time: the one that began first ends with an error, or both do.
func TestTwoImports(t *testing.T) {
	a, b := memorytest.New(), memorytest.New()
	populate(t, a, 7)
	file := export(t, a, KindExport)
	slow := &pausing{Reader: bytes.NewReader(file), at: len(file) / 2, reached: make(chan struct{}), resume: make(chan struct{})}
	first := make(chan error)
	go func() {
		_, err := Import(t.Context(), slow, ImportConfig{Engine: b})
		first <- err
	}()
	<-slow.reached
	if _, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: b}); err != nil {
		t.Error(err)
	}
	close(slow.resume)
	if guard := (*catalog.GuardError)(nil); !errors.As(<-first, &guard) {
		t.Error("the first import has gone on")
	}
	if !bytes.Equal(file, export(t, b, KindExport)) {
		t.Error("it is not what was imported")
	}
}

// pausing stops once.
type pausing struct {
	*bytes.Reader
	at              int
	reached, resume chan struct{}
}

func (p *pausing) Read(b []byte) (int, error) {
	if p.at > 0 && p.Len() < p.at {
		p.at = 0
		close(p.reached)
		<-p.resume
	}
	return p.Reader.Read(b)
}

// expiring gives snapshots that can be read for some rows only; between two of them something may happen.
type expiring struct {
	catalog.Engine
	rows    int
	between func()
	given   int
}

func (e *expiring) Snapshot(ctx context.Context) (catalog.Snapshot, error) {
	if e.given++; e.given == 2 && e.between != nil {
		e.between()
	}
	s, err := e.Engine.Snapshot(ctx)
	return &expiringSnapshot{Snapshot: s, rows: e.rows}, err
}

type expiringSnapshot struct {
	catalog.Snapshot
	rows int
}

func (s *expiringSnapshot) Scan(ctx context.Context, from, to []byte, opts catalog.ScanOptions) iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		for row, err := range s.Snapshot.Scan(ctx, from, to, opts) {
			if s.rows--; s.rows < 0 {
				yield(catalog.Row{}, catalog.ErrSnapshotExpired)
				return
			}
			if !yield(row, err) {
				return
			}
		}
	}
}

func TestSnapshotExpires(t *testing.T) {
	a := memorytest.New()
	populate(t, a, 8)
	want := export(t, a, KindExport)
	e := &expiring{Engine: a, rows: 500}
	if got := export(t, e, KindExport); !bytes.Equal(got, want) || e.given < 5 {
		t.Errorf("%d bytes in %d snapshots, want %d bytes", len(got), e.given, len(want))
	}
	_, err := Export(t.Context(), new(bytes.Buffer), ExportConfig{Kind: KindBackup, Snapshot: e.Snapshot})
	if !errors.Is(err, catalog.ErrSnapshotExpired) {
		t.Errorf("backup: %v", err)
	}
	// Somebody serves the volume meanwhile, for a moment.
	for _, rows := range []int{500, 1 << 30} { // also if the first snapshot lasts
		e = &expiring{Engine: a, rows: rows, between: func() {
			commit(t, a, func(b *catalog.Batch) { b.Put(schema.ShardKey(0), schema.Encode(&schema.Shard{Epoch: 99})) })
		}}
		_, err = Export(t.Context(), new(bytes.Buffer), ExportConfig{Kind: KindExport, Snapshot: e.Snapshot})
		if !errors.Is(err, ErrChanged) {
			t.Errorf("used meanwhile, snapshots of %d rows: %v", rows, err)
		}
		commit(t, a, func(b *catalog.Batch) { b.Put(schema.ShardKey(0), schema.Encode(&schema.Shard{Epoch: 3})) })
	}
	// An import reads again what it put, in as many snapshots as it takes.
	e = &expiring{Engine: memorytest.New(), rows: 500}
	if _, err := Import(t.Context(), bytes.NewReader(want), ImportConfig{Engine: e}); err != nil || e.given < 5 {
		t.Errorf("import: %v, %d snapshots", err, e.given)
	}
}

// TestVerify finds what is not as it was put.
func TestVerify(t *testing.T) {
	a := memorytest.New()
	populate(t, a, 9)
	file := export(t, a, KindExport)
	b := memorytest.New()
	e := &expiring{Engine: b, rows: 500, between: func() {
		commit(t, b, func(b *catalog.Batch) { b.Put(schema.InodeKey(2199), []byte("rotten")) })
	}}
	if _, err := Import(t.Context(), bytes.NewReader(file), ImportConfig{Engine: e}); !errors.Is(err, catalog.ErrCorrupt) {
		t.Errorf("import: %v", err)
	}
	if _, err := b.Get(t.Context(), schema.KeyVolume); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("there is a volume: %v", err)
	}
}

// small is a file of two rows.
func small(t testing.TB) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := NewWriter(&out, Header{Kind: KindBackup, Volume: []byte("VVV")})
	if err == nil {
		err = errors.Join(w.Add([]byte("a"), []byte("one")), w.Add([]byte("b"), nil), w.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestGolden(t *testing.T) {
	const want = "776566746361740a" + "00000001" + "01" + "00000003" + "565656" + "72329dc2" +
		"00000011" + "0001" + "00000003" + "61" + "6f6e65" + "0001" + "00000000" + "62" + "77fe19b5" +
		"00000000" + "0000000000000002" + "ca5bc5aa"
	got := hex.EncodeToString(small(t))
	if !strings.HasPrefix(got, want) || len(got) != len(want)+64 {
		t.Errorf("%s\nwant %s and a SHA-256", got, want)
	}
}

func readAll(file []byte) (h Header, rows []catalog.Row, err error) {
	r, err := NewReader(bytes.NewReader(file))
	if err != nil {
		return h, nil, err
	}
	for row, err := range r.Rows() {
		if err != nil {
			return r.Header, rows, err
		}
		rows = append(rows, catalog.Row{Key: bytes.Clone(row.Key), Value: bytes.Clone(row.Value)})
	}
	return r.Header, rows, nil
}

// TestDamage cuts a file off everywhere, changes each bit of it, and adds a byte.
func TestDamage(t *testing.T) {
	file := small(t)
	if h, rows, err := readAll(file); err != nil || len(rows) != 2 || string(rows[0].Value) != "one" || h.Kind != KindBackup {
		t.Fatalf("%+v %v %v", h, rows, err)
	}
	known := func(err error) bool {
		return errors.Is(err, ErrDamaged) || errors.Is(err, ErrNotDump) || errors.Is(err, ErrVersion)
	}
	for n := range file {
		if _, _, err := readAll(file[:n]); !known(err) {
			t.Errorf("the first %d bytes: %v", n, err)
		}
	}
	for i := range 8 * len(file) {
		bad := bytes.Clone(file)
		bad[i/8] ^= 1 << (i % 8)
		if _, _, err := readAll(bad); !known(err) {
			t.Errorf("bit %d: %v", i, err)
		}
	}
	if _, _, err := readAll(append(bytes.Clone(file), 0)); !errors.Is(err, ErrDamaged) {
		t.Errorf("a byte more: %v", err)
	}
	newer := bytes.Clone(file)
	binary.BigEndian.PutUint32(newer[8:], 2)
	if _, _, err := readAll(newer); !errors.Is(err, ErrVersion) {
		t.Errorf("version 2: %v", err)
	}
	for _, foreign := range []string{"", "PK\x03\x04", strings.Repeat("SQLite format 3\x00", 100)} {
		if _, _, err := readAll([]byte(foreign)); !errors.Is(err, ErrNotDump) {
			t.Errorf("%.10q: %v", foreign, err)
		}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "closed"))
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := NewReader(f); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a file that cannot be read: %v", err)
	}
}

func TestWriterRefuses(t *testing.T) {
	w, err := NewWriter(new(bytes.Buffer), Header{Volume: []byte("V")})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Add([]byte("m"), nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ key, value []byte }{
		{nil, nil}, {[]byte("m"), nil}, {[]byte("a"), nil}, {make([]byte, catalog.MaxKey+1), nil}, {[]byte("n"), make([]byte, MaxValue+1)},
	} {
		if err := w.Add(c.key, c.value); !errors.Is(err, catalog.ErrCorrupt) {
			t.Errorf("row %.10q of %d bytes: %v", c.key, len(c.value), err)
		}
	}
	if _, err := NewWriter(new(bytes.Buffer), Header{Volume: make([]byte, MaxHeader+1)}); err == nil {
		t.Error("too long a volume row")
	}
}

// FuzzReader: whatever is read without an error is what the writer would write, and no more memory is taken than there is input.
func FuzzReader(f *testing.F) {
	f.Add(small(f))
	var large bytes.Buffer
	w, _ := NewWriter(&large, Header{Volume: []byte("V")})
	for i := range 5 {
		w.Add([]byte{byte(i + 'a')}, make([]byte, 30000))
	}
	w.Close()
	f.Add(large.Bytes())
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, file []byte) {
		h, rows, err := readAll(file)
		if err != nil {
			return
		}
		var out bytes.Buffer
		w, err := NewWriter(&out, h)
		if err != nil {
			t.Fatal(err)
		}
		for row := range slices.Values(rows) {
			if err := w.Add(row.Key, row.Value); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil || !bytes.Equal(out.Bytes(), file) {
			t.Fatalf("written again it is another file (%v)", err)
		}
	})
}
