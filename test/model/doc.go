// Package model compares a weft mount with a plain directory: the same random operations are done in both, and every
// answer, byte and attribute must agree; on one mount, and on several in turn. Run more with
//
//	go test ./test/model -ops 200000 -seed 1
package model
