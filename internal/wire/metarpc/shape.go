package metarpc

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// Package msgpack is made for friendly input. It allocates a slice or byte string of whatever length the input claims,
// takes nil, {} and [] for any structure, accepts structures as maps and skips what it finds there by recursion, and
// cuts numbers that are too wide. So a value's bytes are first held against the shape of the Go type they are
// for; what passes is exactly what an encoder of ours can produce (or a wider encoding of the same numbers), and
// each length in it is backed by as many bytes.
//
// A field that came with a later version than Lowest is tagged since:"VERSION"; those behind it came no earlier. When Lowest reaches that version the tag
// goes. Package msgpack encodes and decodes all fields, so values of other versions are brought into that form and out of it (fit).

// shape is the wire form of a Go type.
type shape struct {
	kind   reflect.Kind // Bool, Int64 (any signed), Uint64 (any unsigned), String, Slice, Array, Struct, Pointer
	bits   int          // of a number
	length int          // of an array, which is of bytes
	elem   *shape       // of a slice, nil for bytes; of a pointer, which may be nil
	fields []*shape     // of a structure
	since  []uint32     // by field: the version that it came with, 0 if all have it
	plain  int          // if there are fields tagged metarpc:"optional", which are all there or none: how many there are without them; else 0
	newest uint32       // the greatest of since, of what is in the value, too
}

// everyVersion is none: all fields that are known.
const everyVersion = math.MaxUint32

// maxElements bounds every list; those of which the protocol says less are checked after decoding.
const maxElements = 1 << 16

var shapes sync.Map // reflect.Type -> *shape

func shapeOf(t reflect.Type) *shape {
	if s, ok := shapes.Load(t); ok {
		return s.(*shape)
	}
	s := makeShape(t)
	shapes.Store(t, s)
	return s
}

func makeShape(t reflect.Type) *shape {
	switch k := t.Kind(); k {
	case reflect.Bool, reflect.String:
		return &shape{kind: k}
	case reflect.Int, reflect.Int64:
		return &shape{kind: reflect.Int64, bits: 64}
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return &shape{kind: reflect.Uint64, bits: t.Bits()}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return &shape{kind: k}
		}
		elem := shapeOf(t.Elem())
		return &shape{kind: k, elem: elem, newest: elem.newest}
	case reflect.Pointer:
		elem := shapeOf(t.Elem())
		return &shape{kind: k, elem: elem, newest: elem.newest}
	case reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return &shape{kind: k, length: t.Len()}
		}
	case reflect.Struct:
		s := &shape{kind: k}
		last := uint32(0)
		for i := range t.NumField() {
			f := t.Field(i)
			if !f.IsExported() {
				continue
			}
			if f.Tag.Get("metarpc") == "optional" && s.plain == 0 {
				s.plain = len(s.fields)
			}
			since, _ := strconv.ParseUint(f.Tag.Get("since"), 10, 32)
			if uint32(since) < last || since > 0 && s.plain > 0 {
				panic(fmt.Sprintf("metarpc: field %s of %v came before the one in front of it, or is behind one that may be left out", f.Name, t))
			}
			last = uint32(since)
			field := shapeOf(f.Type)
			s.fields, s.since, s.newest = append(s.fields, field), append(s.since, last), max(s.newest, field.newest, last)
		}
		return s
	}
	panic(fmt.Sprintf("metarpc: no wire form for %v", t))
}

// count is how many fields a version has.
func (s *shape) count(version uint32) int {
	n := len(s.fields)
	for n > 0 && s.since[n-1] > version {
		n--
	}
	return n
}

// takes reports whether there may be n fields in what somebody has sent who speaks a version, or has sent to others of earlier versions.
func (s *shape) takes(n int, version uint32) bool {
	all := s.count(version)
	return n == all || n > 0 && n == s.plain || 0 < n && n < all && s.since[n] > s.since[n-1]
}

// walk passes over one value of this shape, in the form of a version or an earlier one. Where it is short of fields that are known it sets c.short.
func (s *shape) walk(c *cursor, version uint32) {
	switch s.kind {
	case reflect.Bool:
		c.bool()
	case reflect.Int64:
		c.int(s.bits)
	case reflect.Uint64:
		c.uint(s.bits)
	case reflect.String:
		c.str()
	case reflect.Array:
		if p := c.bin(); c.err == nil && len(p) != s.length {
			c.fail("%d bytes where %d belong", len(p), s.length)
		}
	case reflect.Slice:
		if c.isNil() {
			return
		}
		if s.elem == nil {
			c.bin()
			return
		}
		n := c.array()
		if n > maxElements {
			c.fail("list of %d elements, want at most %d", n, maxElements)
		}
		for i := 0; i < n && c.err == nil; i++ {
			s.elem.walk(c, version)
		}
	case reflect.Pointer:
		if !c.isNil() {
			s.elem.walk(c, version)
		}
	case reflect.Struct:
		n := c.array()
		if !s.takes(n, version) {
			c.fail("array of %d elements, want %d", n, s.count(version))
			return
		}
		c.short = c.short || n < len(s.fields) && n != s.plain
		for _, f := range s.fields[:n] {
			if c.err != nil {
				return
			}
			f.walk(c, version)
		}
	}
}

// fit appends the next value, which walk has passed over, in the form of a version: without the fields that it lacks, and with zero for those that are missing.
func (s *shape) fit(out []byte, c *cursor, version uint32) []byte {
	if s.newest == 0 {
		value := c.b
		s.walk(c, everyVersion)
		return append(out, value[:len(value)-len(c.b)]...)
	}
	if s.kind != reflect.Struct && c.isNil() {
		return append(out, codeNil)
	}
	switch s.kind {
	case reflect.Pointer:
		return s.elem.fit(out, c, version)
	case reflect.Slice:
		n := c.array()
		out = appendArray(out, n)
		for range n {
			out = s.elem.fit(out, c, version)
		}
		return out
	}
	n, all := c.array(), s.count(version)
	if n == s.plain {
		all = n
	}
	out = appendArray(out, all)
	for i, f := range s.fields {
		switch {
		case i < n && i < all:
			out = f.fit(out, c, version)
		case i < n:
			f.walk(c, everyVersion)
		case i < all:
			out = f.zero(out, version)
		}
	}
	return out
}

// zero appends a zero value in the form of a version.
func (s *shape) zero(out []byte, version uint32) []byte {
	switch s.kind {
	case reflect.Bool:
		return append(out, codeFalse)
	case reflect.Int64, reflect.Uint64:
		return append(out, 0)
	case reflect.String:
		return append(out, 0xa0)
	case reflect.Array:
		return append(append(out, codeBin8, byte(s.length)), make([]byte, s.length)...)
	case reflect.Struct:
		all := s.count(version)
		if s.plain > 0 {
			all = s.plain
		}
		out = appendArray(out, all)
		for _, f := range s.fields[:all] {
			out = f.zero(out, version)
		}
		return out
	}
	return append(out, codeNil)
}

// appendArray appends the length of an array.
func appendArray(out []byte, n int) []byte {
	switch {
	case n < 16:
		return append(out, 0x90|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, codeArray16), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(out, codeArray32), uint32(n))
}

type decoder struct {
	dec *msgpack.Decoder
	r   bytes.Reader
}

var decoders = sync.Pool{New: func() any { return &decoder{dec: msgpack.NewDecoder(nil)} }}

// decode reads the next value, in the form of a version or an earlier one, into v, which is a pointer to a zero value. Nothing in v aliases the input.
func (c *cursor) decode(v any, version uint32) {
	s, value := shapeOf(reflect.TypeOf(v).Elem()), c.b
	c.short = false
	s.walk(c, version)
	if c.err != nil {
		return
	}
	value = value[:len(value)-len(c.b)]
	if c.short {
		value = s.fit(nil, &cursor{b: value}, everyVersion)
	}
	d := decoders.Get().(*decoder)
	d.r.Reset(value)
	d.dec.Reset(&d.r)
	if err := d.dec.Decode(v); err != nil {
		c.fail("%v", err)
	}
	d.r.Reset(nil)
	decoders.Put(d)
}

// DecodeMessage reads one value of a protocol like this one, in the form of a version of that or an earlier one, into v, a pointer to a zero value. Nothing in v
// aliases b.
func DecodeMessage(b []byte, v any, version uint32) error {
	c := cursor{b: b}
	c.decode(v, version)
	return c.end()
}

// Fit appends a value that package msgpack has encoded from one of v's type, a pointer, in the form of a version.
func Fit(out, b []byte, v any, version uint32) []byte {
	return shapeOf(reflect.TypeOf(v).Elem()).fit(out, &cursor{b: b}, version)
}
