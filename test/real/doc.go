// Package real does with a weft mount what people do: copy and build source trees, keep git repositories, run fio with
// verification, train. The sizes are small by default; -long takes the full ones.
package real
