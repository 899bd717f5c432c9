// Package datafile is the metadata service's side of the data servers: which devices there are and how they are, which
// data files a regular file has, and how data files come and go. It keeps all that in the catalog (package schema). It
// knows nothing of sessions, names and sizes, and moves no data.
//
// There is one [Manager] per catalog: it takes every garbage row that is not in its own pool for garbage.
//
// # The life of a data file
//
//	number taken    one batch raises Device.Next and writes garbage rows for several numbers; durable
//	made            CREATE on the data server; the file now waits in the Manager's memory, in the device's pool
//	assigned        one batch deletes the garbage row and puts the file into a layout row
//	discarded       one batch deletes the layout row and writes the garbage row again
//	removed         REMOVE on the data server, then the garbage row is deleted
//
// A crash at any point leaves a garbage row for every data file that no layout has; the next Manager removes it. A number
// is never used twice, so a REMOVE that is executed late does no harm. A CREATE of the previous Manager that is executed
// late would leave a file without a row; so the garbage row of a file that was not found is kept for some seconds more
// if an earlier Manager wrote it.
//
// # Which data files a file gets
//
// None until it is written to. For a range within the first stripe unit, one in each mirror; for a range that goes
// further, one for each of the W servers of each mirror. What a file has is never exchanged, only added to, and W is
// settled when the second one is added. New data files go to data servers that are reachable and have room; files begin
// at a device that depends on a hash of their number, so that small ones spread.
//
// # Fences
//
// A layout is worth as much as the synthetic owners in it. Fence gives all data files of a file new ones, waits until each
// data server shows that it knows them, and puts them into the layout row. Whoever has an older layout is refused from
// then on, also those who may go on writing: they ask for the layout again. A fence that was cut short leaves a layout row
// with owners that are out of date; who asked for the fence has to ask again, and records that it must.
//
// # Locks
//
// In the order in which they may be taken, each before those after it:
//
//	Manager.adding   held over calls to a data server
//	Manager.files    one lock for each file, held over Assign and Fence
//	device.rowMu     held over commits that change the Device row
//	Manager.mu       guards the state of all devices, held over no call
package datafile
