// Package nfs3 encodes and decodes the arguments and results of NFS version 3 and of MOUNT version 3 (RFC 1813), for
// both sides of the wire. It has no sockets, no goroutines and no clock; what surrounds a call is in package oncrpc.
//
// # Messages
//
// Each message has the two methods
//
//	Append(b []byte) []byte          // encode at the end of b; cannot fail
//	Decode(d *xdr.Decoder) error     // take the message from d, replacing everything in the receiver
//
// A decoded message is valid: enums have a defined value, lengths are within the limits of the protocol, and nothing
// in it aliases the input. A status is the exception, since servers do invent some: it is kept, and its errno is EIO.
// Input behind the message is left in the decoder and is no error, as in every implementation we know of.
//
// Results begin with a Status. When it is not OK the fields that the failure arm of RFC 1813 does not have are neither
// encoded nor decoded.
//
//	 #  procedure    arguments         results            #  procedure    arguments        results
//	 0  NULL         -                 -                 11  MKNOD        MknodArgs        CreateRes
//	 1  GETATTR      FileHandle        GetattrRes        12  REMOVE       DirOpArgs        WccRes
//	 2  SETATTR      SetattrArgs       WccRes            13  RMDIR        DirOpArgs        WccRes
//	 3  LOOKUP       DirOpArgs         LookupRes         14  RENAME       RenameArgs       RenameRes
//	 4  ACCESS       AccessArgs        AccessRes         15  LINK         LinkArgs         LinkRes
//	 5  READLINK     FileHandle        ReadlinkRes       16  READDIR      ReaddirArgs      ReaddirRes
//	 6  READ         ReadArgs          ReadRes           17  READDIRPLUS  ReaddirPlusArgs  ReaddirPlusRes
//	 7  WRITE        WriteArgs         WriteRes          18  FSSTAT       FileHandle       FsstatRes
//	 8  CREATE       CreateArgs        CreateRes         19  FSINFO       FileHandle       FsinfoRes
//	 9  MKDIR        MkdirArgs         CreateRes         20  PATHCONF     FileHandle       PathconfRes
//	10  SYMLINK      SymlinkArgs       CreateRes         21  COMMIT       CommitArgs       CommitRes
//
//	MOUNT: 0 NULL, 1 MNT MountPath MountRes, 2 DUMP - DumpRes, 3 UMNT MountPath -, 4 UMNTALL - -, 5 EXPORT - ExportRes
//
// # READ and WRITE
//
// A payload never passes through this package. WriteArgs and ReadRes have AppendHead and DecodeHead instead of Append
// and Decode: the head is everything before the first payload byte, and behind the payload come xdr.Pad(count) zero
// bytes. DecodeHead works on the beginning of a record while the rest is still in the socket. A READ reply whose RPC
// verifier is empty, as it is with AUTH_SYS:
//
//	byte  0  xid | 1 | 0 | verifier flavor, length 0 | accept_stat 0            24 bytes, oncrpc.AcceptedSize
//	     24  status 0 | attributes follow: 0                                     8
//	     32  count | eof | length                                               12: the payload begins at 44
//
//	     24  status 0 | attributes follow: 1 | fattr3                           92
//	    116  count | eof | length                                               12: the payload begins at 128
//
// Nothing in READ, WRITE and COMMIT allocates.
package nfs3
