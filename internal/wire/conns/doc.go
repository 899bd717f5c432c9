// Package conns encodes and decodes the arguments and results of weft's private ONC RPC program by which a client names
// its connections, and ends those that it has lost, and a server announces that it stops. The package has no sockets, no goroutines and no clock; what
// surrounds a call is in package oncrpc.
//
// # Why
//
// A client whose connection is lost sends its requests again on another one. The originals may still be in the server:
// in the socket of a process that is stopped, or in a write to a disk that does not answer. If one of them is carried
// out after its repetition was answered, it undoes what the client wrote afterwards. NFSv3 has no words against that.
// Duplicate reply caches, by which servers recognise some repetitions, are bounded, and know an original only once it
// was read.
//
// # The program
//
// Program 0x20776676, of the range that RFC 5531 section 13 leaves to users, version 1, over TCP on the port of the NFS
// service. A server without it answers PROG_UNAVAIL, which is how a client tells. Any credential will do. In XDR (RFC
// 4506):
//
//	program WEFT_CONNS_PROGRAM {
//		version WEFT_CONNS_V1 {
//			void    NULL(void) = 0;
//			void    JOIN(name) = 1;
//			ENDres  END(name)  = 2;
//			void    STOP(void) = 3; // called by the server
//		} = 1;
//	} = 0x20776676;
//
//	struct name {
//		opaque  client[16];     // random, drawn by the client, and known to nobody but it and its servers
//		uint64  number;         // of the connection: 1 or more; for END also 0, all connections of the client
//	};
//
//	struct ENDres {
//		bool    ended;
//	};
//
// JOIN names the connection that it comes by. It is the first call there (after TLS, if there is any), and the client
// sends nothing else before it is answered: so what a server may still have to carry out is on connections whose names
// it knows. No name is used twice. A second JOIN on a connection, or number 0, is GARBAGE_ARGS.
//
// END ends the connections of the name. The server reads no more of them, drops what it has read and not begun, and
// sends no replies there. If ended is true nothing of what was sent there is carried out from then on. If it is false
// something still is (a write waits for a disk), and the client asks again; the server answers so after 0.4 s, so that
// the connection is not taken for dead. A name that the server does not know has ended: the process that knew it is
// gone, and its requests with it.
//
// A client sends no request again that may change something before the END of the connection that had it has been
// answered by true.
//
// STOP is a call that the server makes on a connection that has joined, behind the last reply there, when it stops as
// planned: to be started anew, most often. Its xid is 0, and it has no reply. The server closes the connection then, and
// accepts no more. A client that has copies elsewhere does not write a copy off for 5 s, and then as if there had been
// no STOP. A client that does not know STOP sees a reply to a call that it has not made.
package conns
