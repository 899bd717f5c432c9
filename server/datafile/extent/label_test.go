package extent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/weftfs/weft/layout"
)

var labelled = Label{
	Generation: 3, Volume: volume, Device: dev,
	Identity: Identity{NGUID: ident.NGUID, EUI64: [8]byte{0xe0, 1}, UUID: [16]byte{0xf0, 2}},
	Block:    4096, Size: 1 << 40, Unit: 1 << 21, Group: 8192,
}

func TestLabelGolden(t *testing.T) {
	want := "776566746e766d65" + "0100000000000000" + "0300000000000000" + // magic, version, generation
		"ab010000000000000000000000000000" + "07080000000000000000000000000000" + // volume, device
		"0102030405060708090a0b0c0d0e0f10" + "e001000000000000" + "f0020000000000000000000000000000" + // NGUID, EUI64, UUID
		"0010000000000000" + "0000000000010000" + "0000200000000000" + "0020000000000000" + // block, size, unit, group
		strings.Repeat("00", 20) +
		"926c8838dd175f5787e349967684ec0cc87acb89b9a7773815d2a63627abece1" // SHA-256 of all that
	b := AppendLabel([]byte{0xaa}, &labelled)
	if b[0] != 0xaa || len(b) != 1+LabelSize || !zero(b[1+labelEnd:]) {
		t.Fatalf("%d bytes", len(b))
	}
	b = b[1:]
	if got := hex.EncodeToString(b[:labelEnd]); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	l, err := ParseLabel(b)
	if err != nil || *l != labelled {
		t.Errorf("%+v, %v", l, err)
	}
	ns := l.Namespace()
	if LabelOf(volume, dev, &ns) != labelled {
		t.Errorf("%+v", ns)
	}
	for i := range LabelSize { // each byte counts
		if i > labelEnd+100 && i < LabelSize-100 {
			continue
		}
		b[i] ^= 1
		l, err := ParseLabel(b)
		if want := map[bool]error{true: ErrNoLabel, false: ErrBadLabel}[i < 8]; !errors.Is(err, want) || l != nil {
			t.Errorf("byte %d: %v", i, err)
		}
		b[i] ^= 1
	}
	if _, err := ParseLabel(b[:LabelSize-1]); !errors.Is(err, ErrNoLabel) {
		t.Errorf("too short: %v", err)
	}
	bad := labelled
	bad.Unit = 5
	if _, err := ParseLabel(AppendLabel(nil, &bad)); !errors.Is(err, ErrBadLabel) {
		t.Errorf("a unit of 5 bytes: %v", err)
	}
	for size, want := range map[int64]int64{1 << 30: 1<<30 - 65536, 1<<30 + 512: 1<<30 - 65536, 1<<30 + 65535: 1<<30 - 65536, 1<<30 + 65536: 1 << 30} {
		if got := BackupLabel(size); got != want {
			t.Errorf("backup of %d at %d", size, got)
		}
	}
	for id, want := range map[Identity]string{
		labelled.Identity: "nguid.0102030405060708090a0b0c0d0e0f10", {EUI64: [8]byte{1}, UUID: [16]byte{2}}: "eui.0100000000000000",
		{UUID: [16]byte{2}}: "uuid.02000000000000000000000000000000",
	} {
		if id.String() != want {
			t.Errorf("%v", id)
		}
	}
}

func FuzzParseLabel(f *testing.F) {
	b := AppendLabel(nil, &labelled)
	f.Add(b[:labelEnd], true)
	f.Add(b[:labelEnd], false)
	f.Fuzz(func(t *testing.T, b []byte, sum bool) {
		b = append(bytes.Clone(b), make([]byte, LabelSize)...)[:max(LabelSize, len(b))]
		if sum { // so that it gets past the checksum
			var l Label
			if p, err := ParseLabel(b); err == nil {
				l = *p
			}
			l.Generation++
			b = AppendLabel(nil, &l)
		}
		l, err := ParseLabel(b)
		if err != nil {
			if !errors.Is(err, ErrNoLabel) && !errors.Is(err, ErrBadLabel) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(AppendLabel(nil, l)[:LabelSize], b[:LabelSize]) {
			t.Fatalf("%+v is another label", l)
		}
		ns := l.Namespace()
		g := geometryOf(&ns)
		if g.limit <= first || g.perRow < 1 {
			t.Fatalf("%+v", g)
		}
	})
}

func TestProbe(t *testing.T) {
	const size = 16<<20 + 4096
	write := func(b []byte, at int64, what string) []byte {
		if at < 0 {
			at += size
		}
		copy(b[at:], what)
		return b
	}
	label := func(change func(*Label)) string {
		l := labelled
		if change != nil {
			change(&l)
		}
		return string(AppendLabel(nil, &l))
	}
	blank := func() []byte { return make([]byte, size) }
	ours := func() []byte { return write(write(blank(), 0, label(nil)), BackupLabel(size), label(nil)) }
	another := label(func(l *Label) { l.Volume[5]++ })
	for name, c := range map[string]struct {
		disk    []byte
		content Content
		what    string // part
		damaged bool
	}{
		"blank":                 {blank(), Blank, "nothing", false},
		"ours":                  {ours(), Ours, "device 0708", false},
		"ours, no backup":       {write(blank(), 0, label(nil)), Ours, "device 0708", true},
		"ours, backup only":     {write(blank(), BackupLabel(size), label(nil)), Ours, "device 0708", true},
		"ours, front torn":      {write(ours(), 20, "x"), Ours, "device 0708", true},
		"ours, back torn":       {write(ours(), BackupLabel(size)+20, "x"), Ours, "device 0708", true},
		"ours, back newer":      {write(ours(), BackupLabel(size), label(func(l *Label) { l.Generation = 9 })), Ours, "device 0708", true},
		"ours, with data":       {write(write(ours(), 1<<20, "data"), 200<<10, "\x0c\xb1\xba"), Ours, "device 0708", false},
		"ours, over old GPT":    {write(write(blank(), -512, "EFI PART"), 0, label(nil)), Ours, "", true},
		"another's":             {write(write(blank(), 0, another), BackupLabel(size), another), Another, "volume ab0100000001", false},
		"another's, backup":     {write(blank(), BackupLabel(size), another), Another, "volume ab0100000001", true},
		"a later version":       {write(blank(), 0, "weftnvme\x02"), Foreign, "version 2", false},
		"GPT":                   {write(write(blank(), 510, "\x55\xaa"), 512, "EFI PART"), Foreign, "GPT", false},
		"GPT, blocks of 4096":   {write(write(blank(), 510, "\x55\xaa"), 4096, "EFI PART"), Foreign, "GPT", false},
		"GPT, backup only":      {write(blank(), -512, "EFI PART"), Foreign, "GPT", false},
		"GPT over ours":         {write(write(ours(), 510, "\x55\xaa"), 512, "EFI PART"), Foreign, "GPT partition table, over what was device 0708", false},
		"MBR":                   {write(blank(), 510, "\x55\xaa"), Foreign, "MBR", false},
		"ext4":                  {write(blank(), 1080, "\x53\xef"), Foreign, "ext4", false},
		"ext4 over ours":        {write(ours(), 1080, "\x53\xef"), Foreign, "ext4", false},
		"xfs":                   {write(blank(), 0, "XFSB\x00\x00\x10\x00"), Foreign, "xfs", false},
		"btrfs":                 {write(blank(), 65600, "_BHRfS_M"), Foreign, "btrfs", false},
		"LVM":                   {write(blank(), 512, "LABELONE"), Foreign, "LVM", false},
		"LVM over ours":         {write(ours(), 512, "LABELONE"), Foreign, "LVM", false},
		"ZFS":                   {write(blank(), 133<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), Foreign, "ZFS", false},
		"ZFS, big-endian":       {write(blank(), 129<<10, "\x00\x00\x00\x00\x00\xba\xb1\x0c"), Foreign, "ZFS", false},
		"mdraid 0.90":           {write(blank(), size/65536*65536-65536, "\xfc\x4e\x2b\xa9"), Foreign, "mdraid", false},
		"mdraid 1.0":            {write(blank(), -8192, "\xfc\x4e\x2b\xa9"), Foreign, "mdraid", false},
		"mdraid 1.1":            {write(blank(), 0, "\xfc\x4e\x2b\xa9"), Foreign, "mdraid", false},
		"mdraid 1.2":            {write(blank(), 4096, "\xfc\x4e\x2b\xa9"), Foreign, "mdraid", false},
		"LUKS":                  {write(blank(), 0, "LUKS\xba\xbe"), Foreign, "LUKS", false},
		"swap":                  {write(blank(), 4086, "SWAPSPACE2"), Foreign, "swap", false},
		"a file system on ours": {write(write(ours(), 0, strings.Repeat("\x00", 65536)), 0, "XFSB"), Foreign, "xfs file system, over what was", false},
		"something":             {write(blank(), 100<<10, "hello"), Foreign, "unknown", false},
		"something at the end":  {write(blank(), -5, "hello"), Foreign, "unknown", false},
		"something on ours":     {write(write(blank(), 100, "hello"), BackupLabel(size), label(nil)), Foreign, "unknown kind, over what was", false},
	} {
		for _, n := range []int{ProbeHead, size} {
			f := Probe(c.disk[:n], c.disk[size-n:], size, volume)
			if f.Content != c.content || !strings.Contains(f.What, c.what) || f.Damaged != c.damaged || (f.Label != nil) != (f.Content == Ours || f.Content == Another) {
				t.Errorf("%s: %v, %q, damaged %t, label %v", name, f.Content, f.What, f.Damaged, f.Label != nil)
			}
			if name == "ours, back newer" && f.Label.Generation != 9 {
				t.Errorf("%s: %+v", name, f.Label)
			}
		}
	}
	for c, want := range map[Content]string{Blank: "blank", Ours: "ours", Another: "another volume's", Foreign: "foreign", 9: "content(9)"} {
		if c.String() != want {
			t.Errorf("%v", c)
		}
	}
	for n := range 5000 { // whatever is missing
		Probe(make([]byte, n), make([]byte, n), int64(n)*layout.MinBlock, volume)
	}
}
