// Command weft mounts a weft file system and looks after its mounts.
//
// It parses flags and wires the parts together; everything else is in the packages it imports. `weft mount` starts
// itself again as the serving process, which reports through a pipe when the mount is usable, so the caller's exit
// status tells and its terminal and pipes are freed. A serving process listens on a control socket (control.go), which
// is how the other commands reach it also when the mount itself hangs.
package main
