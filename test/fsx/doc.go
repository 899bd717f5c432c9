// Package fsx does random reads, writes, truncations, mappings, punches, copies and reopenings of one file and compares it
// with a copy in memory after each of them, as the fsx of Apple and the Linux Test Project do. Run more with
//
//	go test ./test/fsx -args -long
//	go test ./test/fsx -args -ops 100000 -seed 1 -o cache=lease
//
// With -dir DIR the file is there, and nothing is mounted: that tests the test.
package fsx
