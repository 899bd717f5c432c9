// Package schema says what the metadata service keeps in its catalog: the keys, and the rows behind them. It is shared
// by the service, by the manager of data files, and by fsck.
//
//	key                                row        what
//	"a" device[16]                     Namespace  the NVMe namespace that the device is
//	"b" device[16] group[8]            raw        a bit for each unit of a group, set if it is not free; absent: all are free
//	"c" device[16]                     counters   field 0: data files of the device that are in layouts, caches too
//	"d" device[16]                     Device     a data server
//	"e" dir[8] cookie[8] name          Entry      a directory entry; cookie is Cookie(name)
//	"f" id[8]                          Fill       the file's layout has copies that are not good
//	"g" device[16] number[8]           empty      a data file that is garbage unless a layout has claimed it
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
//	"r" session[16] slot[2]            Reply      the last answer of a slot that changed the catalog
//	"s" session[16]                    Session    a client's session
//	"t" id[8]                          Truncate   data files are to be cut to this size
//	"u"                                counters   field 0: inodes in use
//	"v"                                Volume     the volume itself
//	"w" id[8] session[16]              empty      the session may have written data past the durable size
//	"x" id[8] name                     raw        an extended attribute
//	"y" device[16]                     counters   field 0: units that data files on the namespace have, field 1: units that are condemned
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
// # Namespaces
//
// A data file on an NVMe namespace is no file but a number, and what it has is in rows (package datafile/extent): each unit of the
// namespace is free, or one data file has it, or it is condemned, and a batch that takes it from one to the other changes all rows that
// say so. The batch that adds the first such device raises the catalog's format to [FormatNamespaces], since earlier versions would not
// know whose bytes those are. A catalog without one stays as it is.
package schema
