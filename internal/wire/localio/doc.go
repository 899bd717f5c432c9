// Package localio encodes and decodes what a client and a data server on the same host say to one another so that the client
// may read and write data files by descriptors of its own. It has no sockets, no goroutines and no clock.
//
// # Parts
//
// A data server of weft's has a broker, which listens on a UNIX socket of the type SOCK_SEQPACKET in [Dir], named by the
// server's identity in hex: 16 bytes that the server drew when its directory was made, and keeps there. The directory belongs
// to root, and nobody else may enter it. Each start of the server draws an instance, 16 bytes too.
//
// Beside the socket there is an ONC RPC program, on the port of the NFS service: 0x20776675, of the range that RFC 5531
// section 13 leaves to users, version 1. In XDR (RFC 4506):
//
//	program WEFT_LOCALIO_PROGRAM {
//		version WEFT_LOCALIO_V1 {
//			void     NULL(void)           = 0;
//			IDENTITY GET_IDENTITY(void)   = 1;
//			void     PROBE(PROBEargs)     = 2;
//		} = 1;
//	} = 0x20776675;
//
//	struct IDENTITY {
//		opaque   server[16];
//		bool     local;              // there is a broker
//		string   reason<256>;        // why not, if there is none
//	};
//
//	struct PROBEargs {
//		opaque   server[16];
//		opaque   instance[16];
//		opaque   proof[32];
//	};
//
// # Proof
//
// Addresses, host names and numbers of boots prove nothing: there are network namespaces, containers and copied images. What
// proves that both ends are on one host is that they meet at a socket in the file system; what proves that the broker belongs
// to the server which the client's calls reach is a secret that makes the whole round:
//
//	client                          server, at the end of the RPC connection
//	       GET_IDENTITY  ---------->
//	       <---------- server
//	client                          broker, at the socket named by server
//	       HELLO  ----------------->
//	       <---------- CHALLENGE    instance, nonce Ns
//	       PROBE  ----------> (RPC) proof = SHA-256("weft-local-1" | Ns | Nc | server | instance | channel)
//	       REVEAL ----------------->  Nc
//	       <---------- GRANTED
//
// channel is the 32 bytes that the TLS exporter of the RPC connection gives for the label "EXPORTER-weft-local-1" without a
// context, and nothing without TLS. Both nonces are 32 random bytes, used once. The broker grants if a proof of the last 5 seconds that was not used
// yet, of its own server's RPC connections, is the one that Ns and Nc give. Both ends of the socket look at the other's
// SO_PEERCRED: the client must be root, and the broker too.
//
// A refusal is REFUSED with the reason, and the end of the connection. What was granted lasts until the UNIX connection, or the
// RPC connection that carried the proof, ends.
//
// # Descriptors
//
// OPEN asks for descriptors of a data file. The broker judges as for READ (read-only descriptors) or WRITE (for both), by the
// function that also does so for RPC, and answers OPENED with the NFSv3 status. With NFS3_OK there come one or two descriptors
// (SCM_RIGHTS): the first for the page cache, the second, if any, open with O_DIRECT. The client says CLOSED once it has closed
// them and does nothing by them any more.
//
// REVOKE asks the client for that. It is said when what was granted has changed (a SETATTR of owner, group or mode: a
// fence), or the file has lost its name. A client answers as soon as what it has begun is over, and begins nothing more.
// The server does not rely on its word: whether somebody can still write a file it asks the kernel, see package server/data. As long as
// that is so it answers JUKEBOX to the SETATTR; a metadata service that does not want to wait replaces the file and removes it.
//
// # Stability
//
// What is written by a descriptor is in the server's page cache, as after an UNSTABLE WRITE, and has the verifier that came
// with OPENED: that of a WRITE by RPC at the time. A COMMIT by RPC covers it, and fdatasync(2) by the descriptor is a COMMIT of what
// was written by it. A client whose fdatasync fails has to treat all that it wrote to the file, by whatever way, and was not stable
// as if the verifier had changed: the kernel tells each descriptor of a failure only once. unstable says that
// something was written by the descriptors that was not synced: the server keeps the file open until that is done, so as to
// learn of a failure.
//
// # Messages
//
// Each packet is one message, in XDR: a number for its type, and
//
//	HELLO      1  unsigned version (1); opaque server[16];
//	CHALLENGE  2  opaque server[16]; opaque instance[16]; opaque nonce[32];
//	REVEAL     3  opaque nonce[32];
//	GRANTED    4  hyper align; hyper least; bool memory; string readonly<256>;
//	REFUSED    5  string reason<256>;
//	OPEN       6  unsigned id; nfs_fh3 file; unsigned uid; unsigned gid; bool write;
//	OPENED     7  unsigned id; nfsstat3 status; writeverf3 verifier;
//	REVOKE     8  unsigned id;
//	CLOSED     9  unsigned id; bool unstable;
//
// align is what offsets and lengths of direct transfers are multiples of, 0 if there are none, and least the shortest of them;
// memory says that the file system is in memory; readonly, unless it is empty, why no OPEN for writing is granted. id is the client's, a new one for each OPEN. At most
// [MaxOpens] OPENs may be without an answer.
package localio
