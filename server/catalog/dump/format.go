package dump

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"iter"

	"github.com/weftfs/weft/server/catalog"
	"github.com/weftfs/weft/server/schema"
)

const (
	magic   = "weftcat\n"
	version = 1

	// BlockBytes is how long the rows of a block are before it ends, MaxValue the longest value, and MaxHeader the longest volume row.
	BlockBytes = 64 << 10
	MaxValue   = 16 << 20
	MaxHeader  = 4 << 10

	rowHead   = 2 + 4
	endBytes  = 4 + 8 + 4
	maxBlock  = BlockBytes - 1 + rowHead + catalog.MaxKey + MaxValue
	fixedHead = len(magic) + 4 + 1 + 4
)

// Kind says how a file was made, see the package comment.
type Kind uint8

const (
	KindExport Kind = iota
	KindBackup
)

func (k Kind) String() string {
	switch k {
	case KindExport:
		return "export"
	case KindBackup:
		return "backup"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

var (
	// ErrNotDump: the file is none of weft's catalogs.
	ErrNotDump = errors.New("not a file of weftd catalog export or backup")
	// ErrVersion: the file is of a newer version.
	ErrVersion = errors.New("written by a newer weftd")
	// ErrDamaged: the file is not what was written.
	ErrDamaged = errors.New("the file is damaged")
)

// Header is how a file begins.
type Header struct {
	Kind   Kind
	Volume []byte // value of the volume row
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Writer writes a file.
type Writer struct {
	w    io.Writer // buffers nothing: each block is one Write
	sum  hash.Hash
	buf  []byte // block under way, with room for its length
	last []byte // key
	rows uint64
}

// NewWriter begins a file.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	if len(h.Volume) == 0 || len(h.Volume) > MaxHeader || h.Kind > KindBackup {
		return nil, fmt.Errorf("a volume row of %d bytes, %v", len(h.Volume), h.Kind)
	}
	d := &Writer{w: w, sum: sha256.New()}
	b := append(make([]byte, 0, BlockBytes+1<<10), magic...)
	b = binary.BigEndian.AppendUint32(b, version)
	b = append(b, byte(h.Kind))
	b = binary.BigEndian.AppendUint32(b, uint32(len(h.Volume)))
	b = append(b, h.Volume...)
	d.buf = binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return d, d.flush()
}

// flush writes buf and begins a block.
func (d *Writer) flush() error {
	d.sum.Write(d.buf)
	_, err := d.w.Write(d.buf)
	d.buf = append(d.buf[:0], 0, 0, 0, 0)
	return err
}

// endBlock writes the block under way.
func (d *Writer) endBlock() error {
	binary.BigEndian.PutUint32(d.buf, uint32(len(d.buf)-4))
	d.buf = binary.BigEndian.AppendUint32(d.buf, crc32.Checksum(d.buf, castagnoli))
	return d.flush()
}

// Add adds a row, whose key is behind all before. It keeps neither slice.
func (d *Writer) Add(key, value []byte) error {
	if len(key) == 0 || len(key) > catalog.MaxKey || len(value) > MaxValue || bytes.Compare(key, d.last) <= 0 {
		return fmt.Errorf("%w: row %.40q with %d bytes, behind %.40q", catalog.ErrCorrupt, key, len(value), d.last)
	}
	d.last = append(d.last[:0], key...)
	d.rows++
	if d.buf = appendRow(d.buf, key, value); len(d.buf)-4 >= BlockBytes {
		return d.endBlock()
	}
	return nil
}

// Close writes the end. It closes nothing.
func (d *Writer) Close() error {
	if len(d.buf) > 4 {
		if err := d.endBlock(); err != nil {
			return err
		}
	}
	d.buf = binary.BigEndian.AppendUint64(d.buf, d.rows)
	d.buf = binary.BigEndian.AppendUint32(d.buf, crc32.Checksum(d.buf, castagnoli))
	if err := d.flush(); err != nil {
		return err
	}
	_, err := d.w.Write(d.sum.Sum(nil))
	return err
}

func appendRow(b, key, value []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(append(b, key...), value...)
}

// Reader reads a file.
type Reader struct {
	Header Header

	r    io.Reader
	sum  hash.Hash
	buf  []byte
	last []byte
	rows uint64
}

// NewReader reads the header of a file. Errors are ErrNotDump, ErrVersion, ErrDamaged, and those of r.
func NewReader(r io.Reader) (*Reader, error) {
	d := &Reader{r: r, sum: sha256.New()}
	head, err := d.read(fixedHead)
	if errors.Is(err, ErrDamaged) {
		return nil, fmt.Errorf("%w: it is shorter than a header", ErrNotDump)
	}
	if err != nil {
		return nil, err
	}
	if string(head[:len(magic)]) != magic {
		return nil, ErrNotDump
	}
	if v := binary.BigEndian.Uint32(head[len(magic):]); v != version {
		return nil, fmt.Errorf("%w: version %d, this one knows version %d", ErrVersion, v, version)
	}
	d.Header.Kind = Kind(head[len(magic)+4])
	n := binary.BigEndian.Uint32(head[fixedHead-4:])
	if n == 0 || n > MaxHeader || d.Header.Kind > KindBackup {
		return nil, fmt.Errorf("%w: in its header", ErrDamaged)
	}
	crc := crc32.Checksum(head, castagnoli)
	rest, err := d.read(int(n) + 4)
	if err != nil {
		return nil, err
	}
	if d.Header.Volume = bytes.Clone(rest[:n]); crc32.Update(crc, castagnoli, d.Header.Volume) != binary.BigEndian.Uint32(rest[n:]) {
		return nil, fmt.Errorf("%w: the checksum of its header is wrong", ErrDamaged)
	}
	return d, nil
}

// read returns the next n bytes, good until it is called again. It takes no more memory than twice what is there.
func (d *Reader) read(n int) ([]byte, error) {
	d.buf = d.buf[:0]
	for len(d.buf) < n {
		from := len(d.buf)
		step := min(n-from, max(from, BlockBytes+1<<12))
		if cap(d.buf) < from+step {
			d.buf = append(make([]byte, 0, from+step), d.buf...)
		}
		d.buf = d.buf[:from+step]
		if _, err := io.ReadFull(d.r, d.buf[from:]); err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil, fmt.Errorf("%w: it ends too early, after %d rows", ErrDamaged, d.rows)
		} else if err != nil {
			return nil, err
		}
	}
	d.sum.Write(d.buf)
	return d.buf, nil
}

// Rows yields the rows, each good until the next one is asked for. The file is what was written if the last one came without an error.
func (d *Reader) Rows() iter.Seq2[catalog.Row, error] {
	return func(yield func(catalog.Row, error) bool) {
		for short := false; ; {
			rows, err := d.block()
			if err == nil && len(rows) > 0 && short {
				err = d.damaged("a block is too short")
			}
			if err == nil && len(rows) == 0 {
				err = d.end()
				if err == nil {
					return
				}
			}
			total := len(rows)
			short = total < BlockBytes
			for err == nil && len(rows) > 0 {
				if total-len(rows) >= BlockBytes {
					err = d.damaged("a block is too long")
					break
				}
				var row catalog.Row
				if row, rows, err = d.row(rows); err == nil && !yield(row, nil) {
					return
				}
			}
			if err != nil {
				yield(catalog.Row{}, err)
				return
			}
		}
	}
}

func (d *Reader) damaged(why string) error {
	return fmt.Errorf("%w: %s, after %d rows", ErrDamaged, why, d.rows)
}

// block returns the rows of the next block, none at the end.
func (d *Reader) block() ([]byte, error) {
	head, err := d.read(4)
	if err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head)
	if n == 0 {
		return nil, nil
	}
	if n > maxBlock {
		return nil, d.damaged("a block is too long")
	}
	crc := crc32.Checksum(head, castagnoli)
	body, err := d.read(int(n) + 4)
	if err != nil {
		return nil, err
	}
	rows := body[:n]
	if crc32.Update(crc, castagnoli, rows) != binary.BigEndian.Uint32(body[n:]) {
		return nil, d.damaged("the checksum of a block is wrong")
	}
	return rows, nil
}

// row takes a row off a block.
func (d *Reader) row(block []byte) (row catalog.Row, rest []byte, err error) {
	if len(block) < rowHead {
		return row, nil, d.damaged("a row is cut off")
	}
	key, value := int(binary.BigEndian.Uint16(block)), int(binary.BigEndian.Uint32(block[2:]))
	if key == 0 || key > catalog.MaxKey || value > MaxValue || key+value > len(block)-rowHead {
		return row, nil, d.damaged("a row has no such length")
	}
	row.Key, block = block[rowHead:rowHead+key:rowHead+key], block[rowHead+key:]
	row.Value, rest = block[:value:value], block[value:]
	if bytes.Compare(row.Key, d.last) <= 0 || !kept(row.Key) {
		return row, nil, d.damaged(fmt.Sprintf("row %.40q has no place there", row.Key))
	}
	d.last = append(d.last[:0], row.Key...)
	d.rows++
	return row, rest, nil
}

// end reads what comes behind the last block's rows, and nothing else.
func (d *Reader) end() error {
	crc := crc32.Checksum(make([]byte, 4), castagnoli)
	b, err := d.read(endBytes - 4)
	if err != nil {
		return err
	}
	if rows := binary.BigEndian.Uint64(b); rows != d.rows || crc32.Update(crc, castagnoli, b[:8]) != binary.BigEndian.Uint32(b[8:]) {
		return d.damaged(fmt.Sprintf("it should have %d", rows))
	}
	want := d.sum.Sum(nil)
	if b, err = d.read(sha256.Size); err != nil {
		return err
	}
	if !bytes.Equal(b, want) {
		return d.damaged("the checksum of the whole is wrong")
	}
	switch n, err := io.ReadFull(d.r, make([]byte, 1)); {
	case n > 0:
		return d.damaged("there is something behind its end")
	case err != io.EOF:
		return err
	}
	return nil
}

// kept reports whether the row of a key is in files.
func kept(key []byte) bool {
	return !bytes.Equal(key, schema.KeyVolume) && !bytes.Equal(key, schema.KeyImport) && !bytes.Equal(key, schema.KeyMaintenance) &&
		key[0] != schema.PrefixMember && key[0] != schema.PrefixBeat
}
