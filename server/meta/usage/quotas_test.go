package usage

import (
	"errors"
	"maps"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

func treeQuota(dir layout.FileID) metarpc.QuotaName {
	return metarpc.QuotaName{Kind: metarpc.QuotaTree, ID: uint64(dir)}
}

// limit sets a quota.
func (v *volume) limit(qs *Quotas, name metarpc.QuotaName, bytes, files int64) {
	v.t.Helper()
	var b catalog.Batch
	b.Put(schema.QuotaKey(name), schema.Encode(&schema.Quota{Bytes: bytes, Files: files}))
	if err := v.engine.Commit(v.t.Context(), &b); err != nil {
		v.t.Fatal(err)
	}
	if err := qs.Settle(v.t.Context()); err != nil {
		v.t.Fatal(err)
	}
}

func wantOver(t *testing.T, err error) {
	t.Helper()
	if e := (*metarpc.Error)(nil); !errors.As(err, &e) || e.Status != metarpc.Status(syscall.EDQUOT) {
		t.Errorf("%v, want EDQUOT", err)
	}
}

// quotaVolume is a volume with quotas. What others write is in writing, and narrowed counts.
func quotaVolume(t *testing.T) (v *volume, qs *Quotas, writing map[layout.FileID]int64, narrowed *int) {
	v, writing, narrowed = newVolume(t, 1), map[layout.FileID]int64{}, new(int)
	qs = v.trees[0].Quotas(func() map[layout.FileID]int64 { return maps.Clone(writing) }, func() { *narrowed++ })
	return v, qs, writing, narrowed
}

// TestAdmitInodes refuses as soon as a limit is reached, and nothing that fits.
func TestAdmitInodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, qs, _, _ := quotaVolume(t)
		top, other := v.dir(layout.RootID), v.dir(layout.RootID)
		deep := v.dir(v.dir(top))
		row := schema.Inode{Mode: syscall.S_IFREG, Parent: deep, UID: 7}
		v.limit(qs, treeQuota(top), 0, 10) // with two directories
		for i := range 8 {
			if err := qs.AdmitNew(t.Context(), deep, &row); err != nil {
				t.Fatalf("file %d: %v", i, err)
			}
			v.add(row)
		}
		wantOver(t, qs.AdmitNew(t.Context(), deep, &row))
		if err := qs.AdmitNew(t.Context(), other, &row); err != nil {
			t.Error(err)
		}
		full := v.file(other, 1)
		fullRow := v.rows[full]
		_, err := qs.AdmitMoved(t.Context(), full, &fullRow, other, top)
		wantOver(t, err)
		// What goes makes room at once.
		for id, row := range v.rows {
			if row.UID == 7 {
				v.move(id, other)
				break
			}
		}
		if _, err := qs.AdmitMoved(t.Context(), full, &fullRow, other, top); err != nil {
			t.Error(err)
		}
		// Another owner is charged with what is given to him.
		user := metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: 9}
		v.limit(qs, user, 0, 1)
		given := fullRow
		given.UID = 9
		if err := qs.AdmitChange(t.Context(), &fullRow, &given); err != nil {
			t.Error(err)
		}
		v.change(full, func(c *Change, row *schema.Inode) { c.Recharge(row, &given); *row = given })
		wantOver(t, qs.AdmitChange(t.Context(), &row, &schema.Inode{Mode: row.Mode, Parent: row.Parent, UID: 9}))
	})
}

// TestAdmitBytes is about how long files may become.
func TestAdmitBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, qs, writing, narrowed := quotaVolume(t)
		top := v.dir(layout.RootID)
		file, other := v.file(top, 0), v.file(v.dir(top), 0)
		row := v.rows[file]
		if end, err := qs.Allowance(t.Context(), file, &row, 0); err != nil || end != layout.ToEOF {
			t.Errorf("without a quota up to %d (%v)", end, err)
		}
		const size = 2 * quotaMost
		v.limit(qs, treeQuota(top), size, 0)
		if *narrowed != 1 {
			t.Errorf("narrowed %d times by the first quota", *narrowed)
		}
		allowance := func(off, want int64) {
			t.Helper()
			if end, err := qs.Allowance(t.Context(), file, &row, off); err != nil || end != want {
				t.Errorf("from %d on up to %d (%v), want %d", off, end, err, want)
			}
		}
		allowance(0, size/quotaShare)
		allowance(quotaMost, quotaMost+(size-quotaMost)/quotaShare)
		allowance(size-100, size)
		_, err := qs.Allowance(t.Context(), file, &row, size)
		wantOver(t, err)
		for _, limits := range []func() (bool, error){
			func() (bool, error) { return qs.Limited(t.Context(), file, &row) },
			func() (bool, error) { return qs.LimitsBytes(t.Context(), &row) },
			func() (bool, error) { return qs.OfTrees(t.Context()) },
		} {
			if yes, err := limits(); err != nil || !yes {
				t.Errorf("%v (%v)", yes, err)
			}
		}
		// What another file is being written counts, and its own does not count twice.
		writing[other] = quotaMost
		writing[file] = 1000
		time.Sleep(quotaAge)
		allowance(0, (size-quotaMost)/quotaShare)
		wantOver(t, qs.AdmitLonger(t.Context(), file, &row, quotaMost+1))
		if err := qs.AdmitLonger(t.Context(), file, &row, quotaMost); err != nil {
			t.Error(err)
		}
		longer := row
		longer.Size = quotaMost
		wantOver(t, qs.AdmitChange(t.Context(), &row, &longer)) // which does not tell one's own apart
		st := &metarpc.StatFSResult{Total: 10 * size, Free: 9 * size, Avail: 9 * size}
		if err := qs.LimitSpace(t.Context(), top, st); err != nil || st.Total != size || st.Avail != quotaMost-1000 {
			t.Errorf("%+v (%v)", st, err)
		}
		v.limit(qs, treeQuota(top), 2*size, 0)
		v.limit(qs, treeQuota(top), size, 0)
		if *narrowed != 2 {
			t.Errorf("narrowed %d times, want 2", *narrowed)
		}
	})
}

// TestList lists quotas page by page.
func TestList(t *testing.T) {
	v, qs, _, _ := quotaVolume(t)
	top := v.dir(layout.RootID)
	v.file(top, 10)
	var b catalog.Batch
	const users = pageOfQuotas + 10
	for i := range users {
		name := metarpc.QuotaName{Kind: metarpc.QuotaUser, ID: uint64(i)}
		b.Put(schema.QuotaKey(name), schema.Encode(&schema.Quota{Files: 100}))
	}
	b.Put(schema.QuotaKey(treeQuota(layout.RootID)), schema.Encode(&schema.Quota{Bytes: 100}))
	if err := v.engine.Commit(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	var all []metarpc.QuotaInfo
	for a := (metarpc.QuotasArgs{After: true}); ; a.Name = all[len(all)-1].Name {
		r, err := qs.List(t.Context(), &a)
		if err != nil || len(r.Quotas) == 0 {
			t.Fatalf("after %v: %+v (%v)", a.Name, r, err)
		}
		if all = append(all, r.Quotas...); r.EOF {
			break
		}
	}
	root := metarpc.QuotaInfo{Name: treeQuota(layout.RootID), Path: "/", Bytes: 100, UsedBytes: 10, UsedFiles: 2}
	if len(all) != users+1 || all[0] != root && all[users] != root {
		t.Errorf("%d quotas: %+v to %+v", len(all), all[0], all[len(all)-1])
	}
	if r, err := qs.List(t.Context(), &metarpc.QuotasArgs{Name: treeQuota(top)}); err != nil || len(r.Quotas) > 0 {
		t.Errorf("%+v (%v)", r, err)
	}
	// No names are in this catalog, so there is no path either.
	info, err := qs.Unlimited(t.Context(), treeQuota(top))
	if want := (metarpc.QuotaInfo{Name: treeQuota(top), UsedBytes: 10, UsedFiles: 1}); err != nil || info != want {
		t.Errorf("%+v (%v), want %+v", info, err, want)
	}
}
