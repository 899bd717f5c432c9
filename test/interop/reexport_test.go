package interop

import (
	"bytes"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/dataplane/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/test/harness"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

var long = flag.Bool("long", false, "TestGaneshaReexport goes on for 10 minutes")

// reexported is a directory that was made through NFS-Ganesha, with its files.
type reexported struct {
	dir   []byte
	names []string
	files [][]byte
}

// TestGaneshaReexport has an NFS-Ganesha export a mount. Its clients go on with the handles that they have when the
// kernel has forgotten the inodes, when another mount has renamed the directories, and after a restart of the mount and
// of Ganesha.
func TestGaneshaReexport(t *testing.T) {
	harness.NeedMount(t)
	aloneWithGanesha(t)
	v := harness.NewVolume(t, harness.Options{})
	other, m := v.Mount(), v.Mount()
	// By default handles contain the number of the device, which is another one after each restart. Of that Major64 takes
	// the part that is 0 for all FUSE file systems.
	g := newGanesha(t, export{m.Dir, access + "Filesystem_Id = 1.1; FSAL { Name = VFS; fsid_type = Major64; }"})
	tg, err := nfs3.New(nfs3.Config{
		Name: "ganesha", Addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:" + g.nfs)}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tg.Close() })
	root, err := nfs3.Mount(t.Context(), netip.MustParseAddrPort("127.0.0.1:"+g.mount), m.Dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	var cred layout.Credential
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	do := func(op layout.Op, file []byte) *layout.Op {
		t.Helper()
		done := make(chan struct{})
		op.File, op.Done = &layout.DataFile{Handles: [][]byte{file}}, func(*layout.Op) { close(done) }
		tg.Start(&op)
		tg.Flush()
		<-done
		check(op.Err)
		return &op
	}
	// The names differ in length, so that a listing ends its pages anywhere.
	const files = 100
	create := func(name string) (made reexported) {
		t.Helper()
		made.dir, _, err = tg.Mkdir(t.Context(), cred, root, name, wire.Sattr{SetMode: true, Mode: 0o755})
		check(err)
		for i := range files {
			name := fmt.Sprintf("%0*d", 3+i, i)
			file, _, err := tg.Create(t.Context(), cred, made.dir, name, wire.Guarded, wire.Sattr{SetMode: true, Mode: 0o644}, wire.CreateVerf{})
			check(err)
			do(layout.Op{Kind: layout.OpWrite, Data: []byte(name), Stable: layout.FileSync}, file)
			made.names, made.files = append(made.names, name), append(made.files, file)
		}
		slices.Sort(made.names)
		return made
	}
	verify := func(what string, made *reexported) {
		t.Helper()
		var names []string
		var verf wire.CookieVerf
		for cookie := uint64(0); ; {
			page, err := tg.ReadDirPlus(t.Context(), cred, made.dir, cookie, verf)
			if err != nil {
				t.Fatalf("%s: listing: %v", what, err)
			}
			for _, e := range page.Entries {
				if cookie = e.Cookie; e.Name[0] != '.' {
					names = append(names, e.Name)
				}
			}
			if verf = page.Verf; page.EOF {
				break
			}
		}
		if slices.Sort(names); !slices.Equal(names, made.names) {
			t.Fatalf("%s: %d names, want %d: %q", what, len(names), len(made.names), names)
		}
		for i, file := range made.files {
			want := fmt.Sprintf("%0*d", 3+i, i)
			got := do(layout.Op{Kind: layout.OpRead, Data: make([]byte, 2*files)}, file)
			if !bytes.Equal(got.Data[:got.N], []byte(want)) {
				t.Fatalf("%s: file %d has %q", what, i, got.Data[:got.N])
			}
		}
	}
	fsid := func() uint64 {
		t.Helper()
		attr, err := tg.GetAttr(t.Context(), cred, root)
		check(err)
		return attr.FSID
	}
	before := fsid()
	restart := func() {
		t.Helper()
		g.kill()
		for old := deviceOf(t, m.Dir); deviceOf(t, m.Dir) == old; {
			m.Unmount()
			occupyDevices(t, old)
			m = v.MountAgain(m)
		}
		g.start()
		if after := fsid(); after != before {
			t.Fatalf("the file system has number %d, had %d", after, before)
		}
	}
	end := time.Now().Add(10 * time.Minute)
	var all []reexported
	for round := 0; *long && time.Now().Before(end) || !*long && round < 3; round++ {
		name := fmt.Sprint("dir", round)
		all = append(all, create(name))
		check(os.Rename(filepath.Join(other.Dir, name), filepath.Join(other.Dir, "moved"+name)))
		if round%2 == 1 {
			restart()
		}
		harness.DropCaches(t)
		for n := range all[max(0, len(all)-10):] {
			verify(fmt.Sprintf("round %d, directory %d", round, n), &all[max(0, len(all)-10)+n])
		}
	}
	// What was made through it others have.
	for n := range all {
		list, err := os.ReadDir(filepath.Join(other.Dir, fmt.Sprint("moveddir", n)))
		if err != nil || len(list) != files {
			t.Errorf("directory %d: %d entries, %v", n, len(list), err)
		}
	}
	g.kill()
}

// deviceOf is the number of the device that a file system has for stat(2).
func deviceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Dev
}

// occupyDevices keeps file systems from getting the number of a device, or a lower one, until the end of the test. A
// mount gets the lowest that is free.
func occupyDevices(t *testing.T, highest uint64) {
	t.Helper()
	for {
		dir := harness.Dir(t)
		if err := unix.Mount("none", dir, "tmpfs", 0, "size=4k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, 0) })
		if deviceOf(t, dir) >= highest {
			return
		}
	}
}
