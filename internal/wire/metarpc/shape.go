package metarpc

import (
	"bytes"
	"fmt"
	"reflect"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// Package msgpack is made for friendly input. It allocates a slice or byte string of whatever length the input claims,
// takes nil, {} and [] for any structure, accepts structures as maps and skips what it finds there by recursion, and
// cuts numbers that are too wide. So a value's bytes are first held against the shape of the Go type they are
// for; what passes is exactly what an encoder of ours can produce (or a wider encoding of the same numbers), and
// each length in it is backed by as many bytes.

// shape is the wire form of a Go type.
type shape struct {
	kind   reflect.Kind // Bool, Int64 (any signed), Uint64 (any unsigned), String, Slice, Array, Struct
	bits   int          // of a number
	length int          // of an array, which is of bytes
	elem   *shape       // of a slice; nil for bytes
	fields []*shape     // of a structure
	least  int          // of them are always there; the rest, tagged metarpc:"optional", are all there or none
}

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
		return &shape{kind: k, elem: shapeOf(t.Elem())}
	case reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return &shape{kind: k, length: t.Len()}
		}
	case reflect.Struct:
		s := &shape{kind: k}
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() {
				s.fields = append(s.fields, shapeOf(f.Type))
				if f.Tag.Get("metarpc") != "optional" {
					s.least = len(s.fields)
				}
			}
		}
		return s
	}
	panic(fmt.Sprintf("metarpc: no wire form for %v", t))
}

// walk passes over one value of this shape.
func (s *shape) walk(c *cursor) {
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
			s.elem.walk(c)
		}
	case reflect.Struct:
		n := c.array()
		if n != s.least && n != len(s.fields) {
			c.fail("array of %d elements, want %d", n, len(s.fields))
			return
		}
		for _, f := range s.fields[:n] {
			if c.err != nil {
				return
			}
			f.walk(c)
		}
	}
}

type decoder struct {
	dec *msgpack.Decoder
	r   bytes.Reader
}

var decoders = sync.Pool{New: func() any { return &decoder{dec: msgpack.NewDecoder(nil)} }}

// decode reads the next value into v, which is a pointer to a zero value. Nothing in v aliases the input.
func (c *cursor) decode(v any) {
	start := c.b
	shapeOf(reflect.TypeOf(v).Elem()).walk(c)
	if c.err != nil {
		return
	}
	d := decoders.Get().(*decoder)
	d.r.Reset(start[:len(start)-len(c.b)])
	d.dec.Reset(&d.r)
	if err := d.dec.Decode(v); err != nil {
		c.fail("%v", err)
	}
	d.r.Reset(nil)
	decoders.Put(d)
}
