// Package oncrpc encodes and decodes what surrounds a remote procedure call of ONC RPC version 2 (RFC 5531): the record
// mark on a byte stream, the headers of calls and replies, and the credentials AUTH_NONE and AUTH_SYS.
//
// It has no sockets, no goroutines and no table of outstanding calls: the client's connection and the server's
// connection keep those. A message on a stream is
//
//	record mark (4 bytes) | call or reply header | arguments or results
//
// where the arguments and results belong to the program, for instance to package nfs3. A header's Append and Decode
// touch the header alone and leave the rest to the caller, so that the payload of a READ or WRITE can go straight
// between the socket and its buffer. Neither allocates when the message is sound.
package oncrpc
