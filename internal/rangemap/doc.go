// Package rangemap maps ranges of bytes that do not overlap to values.
//
// A [Map] has no lock: whoever has it sees to it that one goroutine uses it at a time.
package rangemap
