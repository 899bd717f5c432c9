// Package fsck proves that a catalog and the data servers agree with each other and with the rules of package schema, and
// repairs what does not. It looks at names, links and counters, at every row that belongs to an inode, and at every data
// file on every data server. It does not look at file contents, which no checksum covers.
//
// What data files have on NVMe namespaces is in the catalog alone, so of a namespace only the label is read. It is proved
// that each unit of it is free, condemned or one data file's, and is counted as that ([extent.Space.Check]); that each data file
// with units is in a layout or garbage; and that no file has valid blocks behind the one in which it ends. What is condemned the service
// frees.
//
// No metadata service may run on the catalog meanwhile, which is for the caller to see to (cluster.Maintain); but see below. What a crash leaves for the next service to finish is no
// problem and is only counted: garbage, inodes without names that were open, truncations under way, and files whose
// writers had not reported their last size. Nor is it one that a file was being moved: what was to be moved where is not looked at.
//
// # Usage
//
// What directories and owners are charged with follows from the rest, so it is counted last. If there are other problems by which it is
// wrong it is counted anew without being told as well. What a directory is still to tell its parent is no problem.
//
// # Memory
//
// The catalog is read in streams. Held in memory are about 50 bytes for each inode, some 200 and the name for each
// directory, about 50 for each owner, about 50 for each data file, 150 for each cache, and 2 bits for each unit of one namespace at a time.
//
// # While services run
//
// With [Config.Snapshot] the catalog is read in snapshots, and nothing is repaired. What a service may leave at a crash it may show at any moment, and
// the other way round, so in one snapshot the catalog has to be as after a crash, and what is about it alone is judged there. What data servers
// have is looked at later, when files have come, grown and gone:
//
//	new numbers   a data file of a number that was not yet taken in the first snapshot, and is in a later one, is not looked at
//	the rest      is only suspected. It is looked at again, with fresh rows, until the same is found twice by the same rows (confirm): they were so
//	              before the data server was asked and after it, so it is not on its way. What is not found again was
//
// Numbers of data files are never used twice, so a data file that neither a layout nor the garbage had in the first snapshot, though its number was
// taken, is nobody's.
//
// # Repairs
//
// A repair never drops bytes that a file may own: a size that is too small is raised to the data, a garbage row of a
// data file that a layout has is deleted, an inode that lost its name is linked as lost+found/inode-NUMBER. Where bytes
// are gone the problem says so (Lost). Data files that no layout has become garbage, which the service removes. A namespace without
// a label of the volume is not written to, and ends the run like a data server that cannot be reached.
// Repairs are guarded batches: one that finds the catalog changed by somebody else ends the run.
//
// # Locks
//
// checker.mu guards everything while the data servers are listed side by side; it is held over catalog calls and the
// calls of a repair.
package fsck
