// Package crash has several mounts change the same few blocks while processes are killed, told to end and stopped and
// disks lose power, and checks each block, in each read and at the end, against all that was done to it.
//
//	go test ./test/crash -args -duration 30m -cuts 200
//	go test ./test/crash -run TestOrder/files -args -seed 17 -mounts 4
//	go test ./test/crash -run TestOrder -args -without append,'service cut'
//
// A seed gives the same plan of harm and the same operations for each writer, but how they meet differs from run to
// run. A finding prints the seed of its round and the history of the block.
//
// # Who does what
//
// Each mount has a worker, a process with two writers. A writer has files open three times (plain, O_DSYNC, O_APPEND)
// and does one operation after the other. It logs each when it begins and again when it has returned, with the
// monotonic clock. Every 64 bytes of a block tell which operation wrote them. An operation that returns an error is
// no failure: the writer opens the file anew, which begins an epoch. A worker whose mount was killed ends, and a new
// mount gets another one.
//
// A file of blocks is written in place, appended to, truncated, punched and locked. A log is only appended to and
// truncated to nothing. There are both with one copy and with two.
//
// # What a block may be
//
// A change is promised if it returned without an error and one of these did later, in the same epoch:
//
//   - fsync of all three descriptors; the write itself with O_DSYNC;
//   - unlock of a lock under which it was made, if another mount had the file open all the time and neither of them
//     had stood still;
//   - weft sync of the mount.
//
// An error since the last fsync takes back what unlock and weft sync have promised: the session may have been lost
// before.
//
// A look at a block, which is a read or what is there at the end, must see a promised change that ended before the
// look began. There is one exception: if the power of a data server was cut in between, only what was stable before
// the look began must be seen. Others may look before the writer has sent again what it has in memory.
//
// A value that is seen is right if its operation began before the look ended, and no change that must be seen both
// ended before the look began and began after that operation ended. An operation that has not returned, or with an
// error, may be carried out at any later time. So zeros are right only where a truncation or a punch explains them,
// or nothing was written that must be seen. At the end, a block that is a mixture of several values is wrong, unless
// one of them is of an operation without an answer, and all mounts and all copies have to agree.
//
// Nobody knows where an append ends up before it is seen. Where it is seen it counts as a write, and the file must
// not have been longer when it began. A log must have every promised record since the last truncation, once, and
// records in the order in which they were appended. It must have no hole, unless an append need not be seen, or took
// so long that its place may have been recalled.
//
// The rule is weaker than a search for one order of all operations, but it needs no search: it compares two at a
// time. It reports nothing that an order explains.
package crash
