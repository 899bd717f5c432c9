// Package linear has several clients work on the same few names at once, writes down who called and got what when, and has the histories
// checked: is there one order of all operations, each at a moment between its call and its return, in which a simple model of a directory
// would have given every answer? What a client answers from what it keeps under a lease counts like what the service answers.
//
//	go test ./test/linear -args -duration 1h
//
// What the kernel does in two steps is two operations here: it looks a path up and then gets the attributes of what it has found, so that no
// link counts are looked at; and link(2) looks up what is to be linked before it locks anything, so a client does that by itself, with O_PATH.
// rename(2) looks the old name up, then the new one, and asks nobody if both are one file, or one is a directory and the other is not. With a
// local file system no name changes in between; with one that others change at the same time, what it compares may never have been
// there at once. So an answer that the kernel can have given by itself is also right if the old name was what it was before.
//
// The checker is github.com/anishathalye/porcupine, after "Faster linearizability checking via P-compositionality" (Horn and Kroening).
package linear
