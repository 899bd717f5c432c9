// Package posix checks single system calls: each case runs in a directory of a weft mount and in one of the local disk's
// file system, and both must give the answer the table says.
package posix
