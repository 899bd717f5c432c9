// Package iobuf is a pool of page-aligned buffers with a hard bound: what the data plane keeps of unstable writes until
// they are committed. The alignment lets a buffer go to a file opened with O_DIRECT as it is.
//
// # Where the memory comes from
//
// A [Pool] reserves its whole limit as one anonymous mapping when it is made. That costs addresses only: a page becomes
// memory when it is first written. So the bound includes every kind of waste, and the garbage collector, which would
// let a heap of the same size grow to twice as much, knows nothing of it.
//
// Buffers are runs of pages, cut from blocks of up to [MaxSize] by a buddy scheme that gives back the tail of a block
// which the buffer does not need; the waste of one buffer is less than a page. Blocks freed last are used first, and a
// block that nobody used for some seconds is returned to the operating system with madvise(2).
//
// The mapping goes when the Pool and all its buffers are unreachable. Until then a stale slice reads zeros or somebody
// else's bytes, it never faults. Under the race detector the memory comes from the heap instead, where the detector
// can watch it, and freed buffers are overwritten.
//
// # Locking
//
// Pool.mu is a leaf: nothing else is locked and no callback is made while it is held.
package iobuf
