package memorytest

import (
	"bytes"
	"hash/maphash"
)

// node is a node of a treap: ordered by key, and a heap by prio. Nodes are never changed once published. The
// priority is a hash of the key, so that equal contents give an equal shape.
type node struct {
	key, value  []byte
	prio        uint64
	left, right *node
}

// seed is shared by all trees of the process.
var seed = maphash.MakeSeed()

// get returns the node of key, or nil.
func (n *node) get(key []byte) *node {
	for n != nil {
		switch c := bytes.Compare(key, n.key); {
		case c < 0:
			n = n.left
		case c > 0:
			n = n.right
		default:
			return n
		}
	}
	return nil
}

// split returns the nodes below key and those at or above it.
func (n *node) split(key []byte) (below, rest *node) {
	if n == nil {
		return nil, nil
	}
	m := *n
	if bytes.Compare(n.key, key) < 0 {
		m.right, rest = n.right.split(key)
		return &m, rest
	}
	below, m.left = n.left.split(key)
	return below, &m
}

// join returns the union of two trees, all keys of a below all keys of b.
func join(a, b *node) *node {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.prio >= b.prio:
		m := *a
		m.right = join(a.right, b)
		return &m
	}
	m := *b
	m.left = join(a, b.left)
	return &m
}

// without returns the tree without key.
func (n *node) without(key []byte) *node {
	if n.get(key) == nil {
		return n
	}
	below, rest := n.split(key)
	_, above := rest.split(append(bytes.Clone(key), 0)) // the smallest key behind key
	return join(below, above)
}

// with returns the tree with a row set. It keeps both slices.
func (n *node) with(key, value []byte) *node {
	below, rest := n.without(key).split(key)
	row := &node{key: key, value: value, prio: maphash.Bytes(seed, key)}
	return join(join(below, row), rest)
}

// walk calls visit on the nodes with from <= key < to in order until it returns false; an empty to is behind the last
// key. It reports whether it went through all of them.
func (n *node) walk(from, to []byte, visit func(*node) bool) bool {
	if n == nil {
		return true
	}
	above := bytes.Compare(n.key, from) >= 0
	below := len(to) == 0 || bytes.Compare(n.key, to) < 0
	return (!above || n.left.walk(from, to, visit)) &&
		(!above || !below || visit(n)) &&
		(!below || n.right.walk(from, to, visit))
}

// walkBack is walk from the last key to the first.
func (n *node) walkBack(from, to []byte, visit func(*node) bool) bool {
	if n == nil {
		return true
	}
	above := bytes.Compare(n.key, from) >= 0
	below := len(to) == 0 || bytes.Compare(n.key, to) < 0
	return (!below || n.right.walkBack(from, to, visit)) &&
		(!above || !below || visit(n)) &&
		(!above || n.left.walkBack(from, to, visit))
}
