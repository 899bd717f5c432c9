// Package schema says what the metadata service keeps in its catalog: the keys, and the rows behind them. It is shared
// by the service, by the manager of data files, and by fsck.
//
//	key                                row        what
//	"a" device[16]                     Namespace  the NVMe namespace that the device is
//	"b" device[16] group[8]            raw        a bit for each unit of a group, set if it is not free; absent: all are free
//	"c" device[16]                     counters   field 0: data files of the device that are in layouts, caches too
//	"d" device[16]                     Device     a data server
//	"e" dir[8] cookie[8] name          Entry      a directory entry; cookie is Cookie(name)
//	"f" id[8]                          Fill       the file's layout has copies that are not good, or absent
//	"g" device[16] number[8]           raw        a data file that is garbage unless a layout has claimed it; empty, or the member that has
//	                                              it in its pool, or is to remove it
//	"h" device[16] id[8]               CacheUse   the file has a cache on the device
//	"i" id[8]                          Inode      an inode
//	"j" device[16] number[8]           ExtentFile a data file on a namespace that has extents, or has had some
//	"j" device[16] number[8] unit[8]   Extents    its extents from this unit of the data file on to the next row
//	"k" dir[8]                         counters   a directory's blind counters, fields Counter...
//	"l" id[8]                          Layout     where a regular file's data files are
//	"m"                                counters   field 0: how often a directory changed its parent; always guarded,
//	                                              which puts such moves into one order
//	"n"                                counters   field 0: the next free inode number
//	"o" id[8]                          empty      an inode without names, any more or yet, that some session may have open
//	"p" id[8]                          Move       the file's data is to lie on a device that somebody has named
//	"q" device[16] number[8]           Condemned  units that a data file has lost, which somebody may still write; the key goes on with
//	    generation[8] unit[8]                     the data file's generation and the first unit on the namespace
//	"r" session[16] slot[2]            Reply      the last answer of a slot that changed the catalog; or that there will be none of what was tried
//	"s" session[16]                    Session    a client's session
//	"t" id[8]                          Truncate   data files are to be cut to this size
//	"u" shard[2]                       counters   field 0: inodes in use, by what the shard's service has added and removed. One for each shard, so that
//	                                              services do not collide; all of them together count. The first shard's has no shard in its key
//	"v"                                Volume     the volume itself
//	"w" id[8] session[16]              Writer     the session may have written data past the durable size; empty if nothing more is said
//	"x" id[8] name                     raw        an extended attribute
//	"y" device[16]                     counters   field 0: units that data files on the namespace have, field 1: units that are condemned
//	"I"                                raw        an import into the catalog has not ended, so that there is no volume yet
//	"B" member[16]                     counters   field 0: raised by the member, or who maintains the volume, as long as it lives
//	"D" dir[8]                         counters   field 0: changes of the directory's usage that its parent may not have been told of
//	"F"                                Maintenance a process that has the volume to itself, while nobody serves it
//	"M" member[16]                     Member     a process that serves shards
//	"Q" kind[1] id[8]                  Quota      what a directory tree, a user or a group may use; kind is a metarpc.QuotaKind
//	"R"                                counters   field 0: raised with every change of the rows of members and shards
//	"S" shard[2]                       Shard      who serves the shard
//	"T" dir[8]                         counters   the usage that the directory has told its parent, fields Told...; absent: nothing
//	"U" uid[4] gid[4] shard[2]         counters   the usage of an owner, fields Owner..., one for each shard as with "u"
//
// Number c*layout.ShardChunk and those behind it are of shard c mod n of a volume with n shards. The next free number is one that was never handed out or kept
// for later, of any shard: who needs numbers of a shard takes the next chunk of it, and leaves out those in between. The rows of sessions, and what belongs to them,
// are changed only by the service of their shard, and so are, of an inode's rows, "f", "h", "l", "o", "p", "t" and "w"; but a batch of any service may add the row "o",
// by which it leaves a regular file of another shard without names (link count 0): the shard's service removes it. The row of a shard is guarded by batches that
// rely on what its service holds in memory for them; it is written anew, with a greater epoch, for each service that takes the shard over.
//
// Numbers are big-endian, so that keys sort as numbers do. Rows are msgpack arrays, counters are catalog counter rows.
//
// # What belongs together in one batch
//
// A directory entry, the link count or existence of its inode, and the parent's counters change together. The parent's
// inode row is only guarded to be present, never rewritten, by what happens in the directory. An inode row goes
// together with its layout and xattr rows; the layout's data files become garbage rows in that same batch. A data file is
// born as garbage: the row is written before the file is created on the data server, and the batch that gives the file to a
// layout deletes it. The rows of caches by device change together with the layouts that have them. So a crash at any point leaves a garbage row for every data file that no layout has.
//
// # Usage
//
// An inode that is no directory is charged to one directory, its home (Inode.Parent): its size, which is what the row says, and itself. It
// is born there, and moves its home along with its name. Further names change nothing. If the name in its home goes while others remain,
// or all go while somebody has it open, it has no home (0) until one of its names is moved or made. So whatever has a home has a name there, and a
// directory that can be removed is nobody's home. Everything is charged to its owner as well, directories with no bytes.
//
//	direct(D)  CounterBytes and CounterFiles, and CounterSubdirs for the directories
//	sub(D)     CounterSub...: always the sum of told(C) over all directories C that are in D
//	total(D)   direct(D) + sub(D): all that is below D, without D itself
//	told(D)    what D has told its parent: total(D) as it was some time; if it is not what it is there is a "D" row of D
//
// Whoever changes direct(D) or sub(D) adds 1 to D's "D" row in the same batch, but for the root, which has nobody to tell. A directory that
// changes its parent, or goes, takes told(D) out of sub of its parent in that batch. So no change of a file touches more than the counters of its own
// directory and owner, and a crash at any point loses nothing: whoever finds a "D" row tells the parent the difference.
//
// Formats 3 to 5 had none of this, and no homes.
//
// # Formats
//
// The volume row says of which format all the rest is. A process that does not know it leaves the catalog alone. Who knows later ones as well keeps to the one that
// there is, until something needs a later one. The batch that raises the format is guarded so that all members know it by then (RaiseFormat): their rows say what they know, every
// batch that adds a member raises the ring counter, and it is guarded by the volume row, so that nobody joins who does not know the format. Two rows are the same in all formats:
// Member, whose fields only get more, and the first field of Volume.
//
// # Namespaces
//
// A data file on an NVMe namespace is no file but a number, and what it has is in rows (package datafile/extent): each unit of the
// namespace is free, or one data file has it, or it is condemned, and a batch that takes it from one to the other changes all rows that
// say so. The batch that adds the first such device raises the catalog's format to [FormatNamespaces], since earlier versions would not
// know whose bytes those are. A catalog without one stays as it is.
//
// # Copies
//
// A layout may have absent copies that are to be made, and policies and layouts may have MinCopies. Earlier versions forget
// to make these copies, and cannot read these rows. So the catalog has [FormatCopies] before the first such row is
// committed (Raise).
package schema
