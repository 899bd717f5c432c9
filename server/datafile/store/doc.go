// Package store knows how a volume lies on one data server: which directory of the export it uses, how that directory
// says which device it is, and how data files are named, made, listed and removed there. The manager of data files and
// fsck share it. It knows nothing of the catalog's contents and keeps no state but file handles.
//
// # In the export
//
//	EXPORT/weft-VOLUME/                    schema.VolumeDir; mode 0700
//	EXPORT/weft-VOLUME/device-DEVICE       the label: an empty file whose name holds the device's id in hex
//	EXPORT/weft-VOLUME/pulse               written to by metadata services, 64 KiB at most; mode 0600
//	EXPORT/weft-VOLUME/5e/                 one of 256 directories, made when first needed; mode 0700
//	EXPORT/weft-VOLUME/5e/000000000000015e a data file, schema.DataFileName; mode 0640, owned by its synthetic ids
//
// The label tells a device from others whatever address it has, so that a server that moved is found again and one that
// took over another's address is not mistaken for it. Clients use file handles and never look anything up, so the
// directories admit the superuser alone.
//
// The pulse file is no data file: fsck and the collection of garbage look into the 256 directories only. If it is
// removed it is made again.
//
// # Calls that may be executed late
//
// A call whose connection broke may be sent again by the [Server] and executed twice, the second time late. Therefore
// CREATE is GUARDED: it never changes a file that exists. A cut is a SETATTR guarded by the file's ctime: once
// the first has changed the file, the second is refused. A fence is guarded in the same way, for some tries. A late REMOVE finds nothing, as no number is used twice.
//
// A Store has one lock, around its cache of handles, held over no call.
package store
