// Package faultytest wraps a catalog.Engine so that it behaves as badly as the interface allows: calls that take long, commits
// that lost a race, commits whose outcome is unknown because they were never applied, were applied, or are applied a while
// after the answer, and snapshots that expire.
//
// It is for tests. The choices depend on the seed and on the order in which calls arrive, so a failing test with one
// caller can be run again.
//
// Engine.mu guards the random numbers and is a leaf.
package faultytest
