// Package flexfiles encodes and decodes what Flex Files layouts (RFC 8435, layout type 4) carry inside NFSv4 messages:
// layouts, device addresses, and the errors and statistics that a client reports. It has no sockets and no NFSv4
// compounds around them.
//
//	ff_layout4            AppendLayout   DecodeLayout     layout.Segment without its range and iomode
//	layout4               AppendSegment  DecodeSegment    layout.Segment (RFC 8881 section 3.3.13)
//	ff_device_addr4       AppendDevice   DecodeDevice     layout.Device without its id
//	ff_ioerr4             IOError, which is also all the arguments of LAYOUTERROR (RFC 7862 section 15.6)
//	ff_iostats4           IOStats
//	LAYOUTSTATS arguments IOStats, by AppendArgs and DecodeArgs (RFC 7862 section 15.7)
//	ff_layoutreturn4      Return, the body of a LAYOUTRETURN
//
// What Append writes for valid values Decode reads back the same. Decoding allocates no more than a small multiple of
// its input, and nothing that was decoded aliases it. Input behind a message is left in the decoder and is no error.
//
// # What is on the wire and not in package layout
//
// Ranges to the end of the file have all bits of their length set there and layout.ToEOF here. The user and group of a
// data server are strings there; for an NFSv3 server they are decimal numbers, and only such are taken: weft speaks
// nothing else to data servers. Addresses are universal addresses (RFC 5665 section 5.2.3), see ParseUaddr; those of
// transports other than tcp, tcp6, rdma and rdma6 are left out.
//
// A mirror with one data server should come with a stripe unit of 0 and in practice comes with any: it is kept, and means
// nothing. Some servers leave out flags and statistics hint at the end of a layout, which then are 0.
//
// The length that knfsd of Linux 6.12 declares for a layout is up to 2 bytes too short or 4 too long, depending on how
// many digits user and group have. DecodeLayout takes both.
package flexfiles
