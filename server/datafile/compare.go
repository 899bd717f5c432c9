package datafile

import (
	"bytes"
	"context"
	"fmt"
	"sync"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/schema"
)

// compareBlock is the unit in which copies are compared; what is told of differences are whole ones, but at the end.
const compareBlock = 4096

// Compare compares the good copies of the n bytes at off of a file. Nobody writes there meanwhile. It returns how often each byte was found at most, and
// where the copies differ: for each such place which ones agree with most, or with the first one if there is no majority, and the others.
// An error says that some could not be read.
func (m *Manager) Compare(ctx context.Context, id layout.FileID, off, n int64) (copies int, differ []metarpc.Difference, err error) {
	row, _, err := m.filling(ctx, id)
	if err != nil {
		return 0, nil, fmt.Errorf("compare copies of inode %d: %w", id, err)
	}
	for j := range columns(&row) {
		var good []*schema.DataFile
		for _, files := range row.Mirrors {
			if file := &files[j]; file.State == layout.CopyGood && !file.IsAbsent() {
				good = append(good, file)
			}
		}
		copies = max(copies, len(good))
		if len(good) < 2 {
			continue
		}
		found, err := m.compareColumn(ctx, layout.Column{Unit: row.StripeUnit, Count: row.Width, Index: j}, good, off, off+n)
		if err != nil {
			return 0, nil, fmt.Errorf("compare copies of inode %d: %w", id, err)
		}
		differ = append(differ, found...)
	}
	return copies, differ, nil
}

// compareColumn is Compare for [off, end) of one column.
func (m *Manager) compareColumn(ctx context.Context, col layout.Column, files []*schema.DataFile, off, end int64) (differ []metarpc.Difference, err error) {
	size := m.block(files...)
	bufs, errs := make([][]byte, len(files)), make([]error, len(files))
	for k := range bufs {
		bufs[k] = make([]byte, size)
	}
	for at, stop := col.Next(off, end); at < stop; at, stop = col.Next(at, end) {
		n := min(stop-at, size)
		asking, cancel := context.WithTimeout(ctx, patience)
		var reads sync.WaitGroup
		for k, file := range files {
			reads.Go(func() { bufs[k], errs[k] = bufs[k][:n], m.readAll(asking, file, at, bufs[k][:n]) }) // ends with the answer, or asking
		}
		reads.Wait()
		cancel()
		for k := range errs {
			if errs[k] != nil {
				return nil, errs[k]
			}
		}
		for from := int64(0); from < n; from += compareBlock {
			to := min(from+compareBlock, n)
			best, same := agreed(bufs, from, to)
			if same == len(files) {
				continue
			}
			d := metarpc.Difference{Off: at + from, Len: to - from, Majority: 2*same > len(files)}
			for k, file := range files {
				if bytes.Equal(bufs[k][from:to], bufs[best][from:to]) {
					d.Good = append(d.Good, file.Ref())
				} else {
					d.Bad = append(d.Bad, file.Ref())
				}
			}
			if last := len(differ) - 1; last >= 0 && continues(&differ[last], &d) {
				differ[last].Len += d.Len
			} else {
				differ = append(differ, d)
			}
		}
		at += n
		for k := range bufs {
			bufs[k] = bufs[k][:size]
		}
	}
	return differ, nil
}

// readAll reads zeros where a data file has nothing.
func (m *Manager) readAll(ctx context.Context, file *schema.DataFile, off int64, buf []byte) error {
	return m.at(ctx, file, func(st dataStore) error {
		for done := 0; done < len(buf); {
			n, err := st.Read(ctx, file.Handle, layout.Credential{UID: file.UID, GID: file.GID}, off+int64(done), buf[done:])
			if err != nil {
				return err
			}
			if n == 0 {
				clear(buf[done:])
				return nil
			}
			done += n
		}
		return nil
	})
}

// agreed returns which of the buffers has in [from, to) what most have, the first one of several, and how many that are.
func agreed(bufs [][]byte, from, to int64) (best, same int) {
	for i := range bufs {
		n := 0
		for k := range bufs {
			if bytes.Equal(bufs[k][from:to], bufs[i][from:to]) {
				n++
			}
		}
		if n > same {
			best, same = i, n
		}
	}
	return best, same
}

// continues reports whether b is more of the same as a, and follows it.
func continues(a, b *metarpc.Difference) bool {
	if a.Off+a.Len != b.Off || a.Majority != b.Majority || len(a.Bad) != len(b.Bad) {
		return false
	}
	for k := range a.Bad {
		if a.Bad[k].Device != b.Bad[k].Device || !bytes.Equal(a.Bad[k].Handle, b.Bad[k].Handle) {
			return false
		}
	}
	return true
}
