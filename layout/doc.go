// Package layout is the vocabulary that every part of weft shares: files, devices, mirrors, stripes, segments, and
// the requests made to data servers. It models Flex Files layouts (RFC 8435) as pure arithmetic: no I/O, no clock, no
// wire form. The wire forms live in internal/wire/metarpc (msgpack) and internal/wire/flexfiles (RFC 8435 XDR).
//
// # The model
//
// A file's bytes lie in data files, one per data server and mirror. A [Segment] says where a range of the file lies: one
// or more mirrors, each with the same number W of data servers and the same stripe unit U. Mapping is sparse (RFC 8435
// section 6): byte L of the file is byte L of the data file on server (L / U) mod W. So a data file has holes where
// other servers own the unit, and with W == 1 it is byte-identical to the file.
//
// A file starts with a narrow segment [0, U) on one server; when it grows past U the metadata service adds the wide
// segment. Sparse mapping makes the narrow one a part of the wide one: server 0 and its data file stay the same, so
// nothing moves and nobody who holds the narrow segment has to give it up.
//
// On a device that is an NVMe namespace a data file is no file but a number, and its segment lists the [Extent]s that its bytes have
// there, with offsets as in any other data file. What was written to an extent that is invalid counts when it was committed to the
// metadata service, and reads as zeros until then.
//
// # Requests
//
// An [Op] is one request to one data file. It has the start/complete form: a target's Start queues it and returns, and
// Done ends it from any goroutine, exactly once.
package layout
