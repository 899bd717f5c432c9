// Package memorytest is a catalog engine that keeps everything in memory, for tests.
//
// The rows form a persistent treap: a commit builds a new version that shares all untouched nodes with the old one and
// publishes its root. Readers take the root and need no lock, a snapshot is a root, and a scan sees one revision.
// Nothing is durable, so both durability classes mean the same.
//
// There is one lock, Engine.mu, which orders commits.
package memorytest
