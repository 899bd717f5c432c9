package nfs3

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/wire/xdr"
)

// dir is a directory whose names have all lengths modulo four, and one of which is long.
func dir() []EntryPlus {
	var entries []EntryPlus
	for i := range 12 {
		e := EntryPlus{Entry: Entry{FileID: uint64(100 + i), Name: strings.Repeat("n", i+1), Cookie: uint64(i + 1)}}
		if i == 5 {
			e.Name = strings.Repeat("l", 255)
		}
		if i%3 != 0 {
			e.Attr = post
		}
		if i%2 != 0 {
			e.FH = PostOpFH{true, fh1}
		}
		entries = append(entries, e)
	}
	return entries
}

// TestDirWriter fills replies up to each limit: none is longer than the limit, the next entry would have made it
// longer, and a client sees exactly the entries that were added. What counts are the bytes behind the status.
func TestDirWriter(t *testing.T) {
	const status = 4
	entries := dir()
	for _, dirAttr := range []PostOpAttr{{}, post} {
		all := ReaddirRes{DirAttr: dirAttr}
		empty := len(all.Append(nil)) - status
		for _, e := range entries {
			all.Entries = append(all.Entries, e.Entry)
		}
		for count := range len(all.Append(nil)) + 8 {
			w := NewDirWriter([]byte("head"), dirAttr, CookieVerf{1}, uint32(count))
			n := 0
			for n < len(entries) && w.Add(&entries[n].Entry) {
				n++
			}
			eof := n == len(entries)
			b := w.End(eof)
			size := len(b) - len("head") - status
			if string(b[:4]) != "head" || w.Len() != n {
				t.Fatalf("count %d: %d entries, Len %d, begins with %q", count, n, w.Len(), b[:4])
			}
			if size > count && (n > 0 || count >= empty) {
				t.Errorf("count %d: %d bytes", count, size)
			}
			if !eof && size+entries[n].size() <= count {
				t.Errorf("count %d: entry %d of %d bytes does not go behind %d bytes", count, n, entries[n].size(), size)
			}
			d := xdr.NewDecoder(b[4:])
			var got ReaddirRes
			if err := got.Decode(&d); err != nil || len(d.Rest()) != 0 {
				t.Fatalf("count %d: %v", count, err)
			}
			if got.DirAttr != dirAttr || got.Verf != (CookieVerf{1}) || got.EOF != eof || !slices.Equal(got.Entries, all.Entries[:n]) {
				t.Errorf("count %d: decoded %+v, want %d entries", count, got, n)
			}
		}
	}
}

// TestDirPlusWriter does the same for both limits of READDIRPLUS.
func TestDirPlusWriter(t *testing.T) {
	const status = 4
	entries := dir()
	all := ReaddirPlusRes{DirAttr: post, Entries: entries}
	longest := len(all.Append(nil))
	empty := longest - status
	names := 0
	for _, e := range entries {
		empty -= len(e.append(nil))
		names += len(e.Entry.append(nil))
	}
	for _, dirCount := range []int{0, 1, 27, 28, 100, 300, 350, 400, names - 1, names, longest} {
		for maxCount := range longest + 8 {
			w := NewDirPlusWriter([]byte("head"), post, CookieVerf{1}, uint32(dirCount), uint32(maxCount))
			n, dirSize := 0, 0
			for n < len(entries) && w.Add(&entries[n]) {
				dirSize += len(entries[n].Entry.append(nil))
				n++
			}
			eof := n == len(entries)
			b := w.End(eof)
			size := len(b) - len("head") - status
			limits := fmt.Sprintf("dircount %d, maxcount %d", dirCount, maxCount)
			if string(b[:4]) != "head" || w.Len() != n {
				t.Fatalf("%s: %d entries, Len %d, begins with %q", limits, n, w.Len(), b[:4])
			}
			if size > maxCount && (n > 0 || maxCount >= empty) {
				t.Errorf("%s: %d bytes", limits, size)
			}
			if dirSize > dirCount && n > 1 {
				t.Errorf("%s: %d bytes of names in %d entries", limits, dirSize, n)
			}
			if !eof {
				next := &entries[n]
				if size+len(next.append(nil)) <= maxCount && (n == 0 || dirSize+len(next.Entry.append(nil)) <= dirCount) {
					t.Errorf("%s: entry %d is missing behind %d bytes, %d of names", limits, n, size, dirSize)
				}
			}
			d := xdr.NewDecoder(b[4:])
			var got ReaddirPlusRes
			if err := got.Decode(&d); err != nil || len(d.Rest()) != 0 {
				t.Fatalf("%s: %v", limits, err)
			}
			if got.DirAttr != post || got.Verf != (CookieVerf{1}) || got.EOF != eof || !slices.Equal(got.Entries, entries[:n]) {
				t.Errorf("%s: decoded %+v, want %d entries", limits, got, n)
			}
		}
	}
}
