// Command bench measures weft against baselines that run in the same minutes, in turn with it: absolute figures of a
// shared machine mean nothing, ratios do. scripts/bench installs and builds what it needs.
//
// A row has a fixed name. Each repeat measures weft and the baseline one after the other; the figures shown are medians,
// the ratio is the median of the repeats' ratios, and the spread is that of the ratios. Rows whose operations are
// durable before they are answered also show the disk's own floor, an fdatasync of 512 bytes, from the same repeats.
//
// Baselines are the simplest correct programs there are: a file system in memory over go-fuse, a loop over TCP whose other
// end reads and writes the same files, a loop that speaks NFS version 3. Where a loop's number of connections and depth
// matter, short trials choose them each time. Slow networks and devices are data servers of this program that delay
// their replies or pass a bounded number of bytes a second, for a server or for each connection; one that is to take
// requests and answer none is stopped. NVMe/TCP targets are of this program, too. NFS-Ganesha, rpcbind if none runs, and
// all else is started for a row, on free
// ports, and ended after it.
//
// The lab-kernel rows run in the virtual machine of test/lab, which is started for the first of them and ended with the
// program: the kernel's NFSv3 client and weft, on files of the machine's own NFS server. They are left out unless named.
//
// The loop rows measure weft against itself: the transport device, our own, against gofuse.
//
// With --against a row compares this build of weft with others (turns.go).
package main
