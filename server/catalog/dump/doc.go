// Package dump turns catalogs into files and files into catalogs: it is how a volume goes from one engine to another, and how it is backed
// up. It knows little of what the rows mean (package schema), and nothing of where files and catalogs are.
//
// # The file
//
// All numbers are big-endian. A file is a header, blocks of rows, and an end:
//
//	header  magic[8]   "weftcat\n"
//	        version[4] 1
//	        kind[1]    0 export, 1 backup
//	        length[4]  of the volume row, at most MaxHeader
//	        volume     the value of the volume row (schema.KeyVolume)
//	        crc[4]     CRC-32C of all before
//	block   length[4]  bytes of its rows, more than 0
//	        rows       key length[2], value length[4], key, value
//	        crc[4]     CRC-32C of the length and the rows
//	end     length[4]  0
//	        rows[8]    how many there are, without the volume row
//	        crc[4]     CRC-32C of the two
//	        sum[32]    SHA-256 of all before
//
// The rows are in the order of their keys. The volume row is none of them, nor are those of processes (schema.PrefixMember,
// PrefixBeat and KeyMaintenance), which are about who uses the catalog. A block ends with the row with which it has BlockBytes or more, and no earlier unless it
// is the last. So what is in a catalog determines the file, whatever the engine: two files of the same kind are alike if and only if the
// catalogs are. A reader refuses any other file, so that whatever it accepts is what Writer would have written.
//
// # Exports and backups
//
// An export is made of a catalog that nobody uses, and the volume goes on where it is imported: sessions can be taken up there by their
// clients, who have waited. A backup is made while services run, so whoever imports it goes back in time. What is made after that must not be
// taken for what was made since the backup and is lost: Import ends the sessions and leaps over inode numbers and numbers of data files.
//
// # Snapshots
//
// A file is of one revision of the catalog. If the engine does not keep the snapshot for as long as it takes, a backup fails; an export goes
// on in a newer one. It needs no snapshot, strictly speaking: it looks at the rows of processes and shards before and after instead. Whoever has
// changed the catalog meanwhile is, or was, a member, and a member that does anything takes shards, which raises their epochs.
//
// # An interrupted import
//
// Import puts the volume row last, in the batch that deletes the row schema.KeyImport, which is there from the first batch on. A catalog with the
// latter is not used by anybody (meta.OpenVolume); Import of the same file may begin anew there. Each batch guards that it
// has not done so elsewhere meanwhile.
package dump
