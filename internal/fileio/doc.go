// Package fileio reads and writes data files through the page cache and, where that is of use, past it (O_DIRECT). Data
// servers use it, and clients on the same host.
//
// A transfer is cut in up to three parts: the whole blocks go past the page cache, by a second descriptor of the file that is
// open with O_DIRECT, the ends before and behind them through it. Both ways see one file, as the kernel orders them; package
// server/data tells why. Where whole blocks are aligned in the file they have to be aligned in memory as well (Kind.Shift);
// what is not goes through the page cache.
//
// What goes through the page cache in sequence is dropped from it behind that, at some distance: a file that is shorter stays.
//
// The package decides nothing about rights and stability, has no goroutines and takes no locks.
package fileio
