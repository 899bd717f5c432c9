// Package filelock keeps the byte-range locks of one file, with the meaning that POSIX gives them (fcntl(2)): an owner's
// new lock replaces what it had in that range, which may shorten, split or merge its locks, and locks conflict if they
// belong to different owners, overlap, and one of them is for writing.
//
// It is a data structure and no more: who waits for a lock, and who may ask, is up to its users. A Table is not safe for
// concurrent use.
package filelock
