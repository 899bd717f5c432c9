package store_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/datafile/storetest"
	"github.com/weftfs/weft/server/schema"
)

var (
	volume = [16]byte{1, 2, 3}
	device = layout.DeviceID{4, 5, 6}
	owner  = layout.Credential{UID: 1 << 20, GID: 1<<20 + 1}
)

// terse is a data server that leaves out everything RFC 1813 allows it to, and ignores attributes of a CREATE.
type terse struct{ store.Server }

func (s terse) Create(ctx context.Context, dir []byte, name string, _ nfs3.Sattr) ([]byte, nfs3.PostOpAttr, error) {
	_, _, err := s.Server.Create(ctx, dir, name, nfs3.Sattr{})
	return nil, nfs3.PostOpAttr{}, err
}

func (s terse) Mkdir(ctx context.Context, dir []byte, name string, set nfs3.Sattr) ([]byte, error) {
	_, err := s.Server.Mkdir(ctx, dir, name, set)
	return nil, err
}

func (s terse) Lookup(ctx context.Context, dir []byte, name string) ([]byte, nfs3.PostOpAttr, error) {
	handle, _, err := s.Server.Lookup(ctx, dir, name)
	return handle, nfs3.PostOpAttr{}, err
}

func (s terse) ReadDir(ctx context.Context, dir []byte, cookie uint64, verf nfs3.CookieVerf) (nfs3.ReaddirPlusRes, error) {
	res, err := s.Server.ReadDir(ctx, dir, cookie, verf)
	for i := range res.Entries {
		res.Entries[i].FH, res.Entries[i].Attr = nfs3.PostOpFH{}, nfs3.PostOpAttr{}
	}
	return res, err
}

// servers runs a test on each kind of data server, with an empty export.
func servers(t *testing.T, test func(t *testing.T, server store.Server, export string)) {
	t.Run("memory", func(t *testing.T) { test(t, fake(t), "/e") })
	t.Run("terse", func(t *testing.T) { test(t, terse{fake(t)}, "/e") })
	t.Run("data", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("missing: root, for a data server, which gives files to their owners")
		}
		test(t, real(t), "/")
	})
}

func fake(t *testing.T) store.Server {
	net := storetest.New()
	net.Export("10.0.0.1:2049", "/e")
	server, err := net.Dial("test", []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:2049")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return server
}

func real(t *testing.T) store.Server {
	ds, err := data.Open(data.Config{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- ds.Serve(l) }() // until the Shutdown below
	t.Cleanup(func() {
		if err := ds.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		<-served
	})
	server, err := store.DialNFS("test", []netip.AddrPort{netip.MustParseAddrPort(l.Addr().String())}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server
}

func format(t *testing.T, server store.Server, export string) *store.Store {
	t.Helper()
	st, err := store.Open(t.Context(), server, export, volume)
	if !errors.Is(err, store.ErrNoLabel) {
		t.Fatalf("empty export: %v", err)
	}
	if err := st.Format(t.Context(), device); err != nil {
		t.Fatal(err)
	}
	return st
}

func TestOpen(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		if _, err := store.Open(t.Context(), server, "/none", volume); err == nil {
			t.Error("export that does not exist")
		}
		st := format(t, server, export)
		again, err := store.Open(t.Context(), server, export, volume)
		if err != nil || again.ID != device {
			t.Fatalf("device %v, %v", again.ID, err)
		}
		if _, err := store.Open(t.Context(), server, export, [16]byte{9}); !errors.Is(err, store.ErrNoLabel) {
			t.Errorf("another volume: %v", err)
		}
		// Labelling is repeated after a crash.
		if err := st.Format(t.Context(), device); err != nil {
			t.Error(err)
		}
		if rsize, wsize, err := st.Info(t.Context()); err != nil || rsize < 1<<20 || wsize < 1<<20 {
			t.Errorf("%d, %d, %v", rsize, wsize, err)
		}
		if stat, err := st.Stat(t.Context()); err != nil || stat.TotalBytes == 0 {
			t.Errorf("%+v, %v", stat, err)
		}
		if err := st.Format(t.Context(), layout.DeviceID{7}); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Open(t.Context(), server, export, volume); err == nil || errors.Is(err, store.ErrNoLabel) {
			t.Errorf("two labels: %v", err)
		}
	})
}

func TestDataFiles(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		ctx := t.Context()
		st := format(t, server, export)
		if found, err := st.Remove(ctx, 5); found || err != nil {
			t.Errorf("removed what is not there: %v, %v", found, err)
		}
		handles := map[uint64][]byte{}
		for _, number := range []uint64{0, 5, 0x105, 0x205, 0x305, 0x405, 1<<64 - 1} {
			handle, err := st.Create(ctx, number, owner)
			if err != nil {
				t.Fatal(err)
			}
			handles[number] = handle
			attr, err := st.GetAttr(ctx, handle)
			if err != nil || !store.Owned(&attr, owner) || attr.Size != 0 {
				t.Errorf("%x: %+v, %v", number, attr, err)
			}
			again, err := st.Create(ctx, number, owner)
			if err != nil || !slices.Equal(again, handle) {
				t.Errorf("%x made again: %v, %v", number, again, err)
			}
			found, attr, err := st.Find(ctx, number)
			if err != nil || !slices.Equal(found, handle) || !store.Owned(&attr, owner) {
				t.Errorf("%x: found %v, %+v, %v", number, found, attr, err)
			}
		}
		// As a data server leaves it that is killed before the file has its owner.
		if err := st.SetOwner(ctx, handles[5], layout.Credential{}); err != nil {
			t.Fatal(err)
		}
		again, err := st.Create(ctx, 5, owner)
		if err != nil || !slices.Equal(again, handles[5]) {
			t.Errorf("empty file of another owner: %v, %v", again, err)
		}
		if attr, err := st.GetAttr(ctx, handles[5]); err != nil || !store.Owned(&attr, owner) {
			t.Errorf("empty file of another owner was left so: %+v, %v", attr, err)
		}
		if err := server.SetAttr(ctx, handles[5], nfs3.Sattr{SetSize: true, Size: 100}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := st.Create(ctx, 5, owner); !errors.Is(err, store.ErrTaken) {
			t.Errorf("file with contents: %v", err)
		}
		if size, err := st.Commit(ctx, handles[5]); err != nil || size != 100 {
			t.Errorf("size %d, %v", size, err)
		}
		for _, c := range []struct{ to, want int64 }{{200, 100}, {100, 100}, {30, 30}, {0, 0}} {
			if err := st.Cut(ctx, handles[5], c.to); err != nil {
				t.Fatal(err)
			}
			if size, err := st.Commit(ctx, handles[5]); err != nil || size != c.want {
				t.Errorf("cut to %d: size %d, want %d, %v", c.to, size, c.want, err)
			}
		}
		for _, c := range []struct{ to, want int64 }{{0, 0}, {200, 200}, {100, 200}} {
			if err := st.Grow(ctx, handles[5], c.to); err != nil {
				t.Fatal(err)
			}
			if size, err := st.Commit(ctx, handles[5]); err != nil || size != c.want {
				t.Errorf("grown to %d: size %d, want %d, %v", c.to, size, c.want, err)
			}
		}

		list := func(subdir int) (numbers []uint64) {
			t.Helper()
			err := st.List(ctx, subdir, func(f *store.File) error {
				if !f.Known || !slices.Equal(f.Handle, handles[f.Number]) || !store.Owned(&f.Attr, owner) {
					t.Errorf("listed %+v", f)
				}
				if dir, name := schema.DataFileName(f.Number); f.Name != dir+"/"+name {
					t.Errorf("listed %+v", f)
				}
				numbers = append(numbers, f.Number)
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			slices.Sort(numbers)
			return numbers
		}
		if l := fmt.Sprint(list(0), list(5), list(6), list(0xff)); l != "[0] [5 261 517 773 1029] [] [18446744073709551615]" {
			t.Errorf("lists %s", l)
		}
		if found, err := st.Remove(ctx, 0x105); !found || err != nil {
			t.Errorf("%v, %v", found, err)
		}
		if found, err := st.Remove(ctx, 0x105); found || err != nil {
			t.Errorf("%v, %v", found, err)
		}
		if l := fmt.Sprint(list(5)); l != "[5 517 773 1029]" {
			t.Errorf("list %s", l)
		}
		if _, _, err := st.Find(ctx, 0x105); !errors.Is(err, nfs3.ErrNoEnt) {
			t.Errorf("%v", err)
		}
	})
}

// forgetful is a data server that lost a directory's handle once.
type forgetful struct {
	store.Server
	stale bool
}

func (s *forgetful) Create(ctx context.Context, dir []byte, name string, set nfs3.Sattr) ([]byte, nfs3.PostOpAttr, error) {
	if s.stale {
		s.stale = false
		return nil, nfs3.PostOpAttr{}, nfs3.ErrStale
	}
	return s.Server.Create(ctx, dir, name, set)
}

func TestStaleDirectory(t *testing.T) {
	server := &forgetful{Server: fake(t)}
	st := format(t, server, "/e")
	if _, err := st.Create(t.Context(), 5, owner); err != nil {
		t.Fatal(err)
	}
	server.stale = true
	if _, err := st.Create(t.Context(), 0x105, owner); err != nil || server.stale {
		t.Errorf("%v", err)
	}
}

// A data server on which the superuser is nobody is no use.
func TestRootSquash(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		st := format(t, squashing{server}, export)
		if _, err := st.Create(t.Context(), 5, owner); !errors.Is(err, nfs3.ErrPerm) {
			t.Errorf("%v", err)
		}
	})
}

// A directory that was made while the superuser was nobody is taken back once it is not.
func TestCheckOwner(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		ctx := t.Context()
		st := format(t, server, export)
		if err := st.CheckOwner(ctx); err != nil {
			t.Fatal(err)
		}
		dir, _, err := server.Lookup(ctx, st.Root, schema.VolumeDir(volume))
		if err != nil {
			t.Fatal(err)
		}
		if err := server.SetAttr(ctx, dir, nfs3.Sattr{SetUID: true, UID: 65534}, nil); err != nil {
			t.Fatal(err)
		}
		squashed, err := store.Open(ctx, squashing{server}, export, volume)
		if err != nil {
			t.Fatal(err)
		}
		if err := squashed.CheckOwner(ctx); !errors.Is(err, store.ErrSquashed) {
			t.Errorf("squashed: %v", err)
		}
		if err := st.CheckOwner(ctx); err != nil {
			t.Error(err)
		}
		if attr, err := server.GetAttr(ctx, dir); err != nil || attr.UID != 0 {
			t.Errorf("owner %d, %v", attr.UID, err)
		}
		if err := st.Unformat(ctx); err != nil {
			t.Error(err)
		}
		if _, err := store.Open(ctx, server, export, volume); !errors.Is(err, store.ErrNoLabel) {
			t.Errorf("after Unformat: %v", err)
		}
	})
}

type squashing struct{ store.Server }

func (s squashing) Create(ctx context.Context, dir []byte, name string, set nfs3.Sattr) ([]byte, nfs3.PostOpAttr, error) {
	set.UID, set.GID = 65534, 65534
	return s.Server.Create(ctx, dir, name, set)
}

func (s squashing) SetAttr(context.Context, []byte, nfs3.Sattr, *nfs3.Time) error {
	return nfs3.ErrPerm
}

// Something else among the data files.
func TestForeign(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		ctx := t.Context()
		st := format(t, server, export)
		if _, err := st.Create(ctx, 5, owner); err != nil {
			t.Fatal(err)
		}
		volumeDir, _, err := server.Lookup(ctx, st.Root, schema.VolumeDir(volume))
		if err != nil {
			t.Fatal(err)
		}
		dir, _, err := server.Lookup(ctx, volumeDir, "05")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"5", "0000000000000006", "000000000000000A", "000000000000ff05x"} {
			if _, _, err := server.Create(ctx, dir, name, nfs3.Sattr{}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := server.Mkdir(ctx, dir, "0000000000000105", nfs3.Sattr{}); err != nil {
			t.Fatal(err)
		}
		known, foreign := 0, 0
		err = st.List(ctx, 5, func(f *store.File) error {
			if f.Known {
				known++
			} else {
				foreign++
			}
			return nil
		})
		if err != nil || known != 1 || foreign != 5 {
			t.Errorf("%d known, %d foreign, %v", known, foreign, err)
		}
	})
}

// TestPulse has two services write to the pulse file, which stays small, and is made again when it is gone.
func TestPulse(t *testing.T) {
	servers(t, func(t *testing.T, server store.Server, export string) {
		ctx := t.Context()
		first, err := store.Open(ctx, server, export, volume)
		if !errors.Is(err, store.ErrNoLabel) {
			t.Fatal(err)
		}
		if err := first.Format(ctx, device); err != nil {
			t.Fatal(err)
		}
		second, err := store.Open(ctx, server, export, volume)
		if err != nil {
			t.Fatal(err)
		}
		dir, _, err := server.Lookup(ctx, first.Root, schema.VolumeDir(volume))
		if err != nil {
			t.Fatal(err)
		}
		size := func() int64 {
			t.Helper()
			handle, _, err := server.Lookup(ctx, dir, "pulse")
			if err != nil {
				t.Fatal(err)
			}
			attr, err := server.GetAttr(ctx, handle)
			if err != nil {
				t.Fatal(err)
			}
			return store.Size(&attr)
		}
		most := int64(0)
		for i := range 100 {
			if err := first.Pulse(ctx); err != nil {
				t.Fatal(err)
			}
			most = max(most, size())
			if i%3 == 0 {
				if err := second.Pulse(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if i == 50 {
				if err := server.Remove(ctx, dir, "pulse"); err != nil {
					t.Fatal(err)
				}
			}
		}
		if most < 32<<10 || most > 64<<10 {
			t.Errorf("it had %d bytes at most", most)
		}
		third, err := store.Open(ctx, server, export, volume)
		if err == nil {
			err = third.Pulse(ctx)
		}
		if err != nil || third.ID != device {
			t.Errorf("device %v, %v", third.ID, err)
		}
	})
}
