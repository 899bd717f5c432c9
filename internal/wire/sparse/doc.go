// Package sparse encodes and decodes the arguments and results of weft's private ONC RPC program, with which a client
// reserves space in data files, gives it back, and finds data and holes. NFS version 3 has no words for that. The names
// are those of NFSv4.2 (RFC 7862), which has. The package has no sockets, no goroutines and no clock; what surrounds a
// call is in package oncrpc.
//
// # The program
//
// Program 0x20776674, of the range that RFC 5531 section 13 leaves to users, version 1, over TCP on the port of the NFS
// service. A server without it answers PROG_UNAVAIL, which is how a client tells. Credentials are AUTH_SYS and count as
// they do for NFS: who may WRITE a file may ALLOCATE and DEALLOCATE in it, who may READ it may SEEK. In XDR (RFC 4506),
// with nfs_fh3 and nfsstat3 of RFC 1813:
//
//	program WEFT_SPARSE_PROGRAM {
//		version WEFT_SPARSE_V1 {
//			void       NULL(void)             = 0;
//			RANGEres   ALLOCATE(ALLOCATEargs) = 1;
//			RANGEres   DEALLOCATE(RANGEargs)  = 2;
//			SEEKres    SEEK(SEEKargs)         = 3;
//		} = 1;
//	} = 0x20776674;
//
//	struct column {             // which bytes of a range are meant: those of the units u with u % count == index
//		uint64  unit;           // bytes; 1 to 2^63-1 if count > 1
//		uint32  count;          // 0 or 1: all bytes
//		uint32  index;          // < count if count > 1
//	};
//
//	struct RANGEargs {
//		nfs_fh3 file;
//		uint64  offset;         // offset + length <= 2^63-1
//		uint64  length;
//		column  bytes;
//	};
//
//	struct ALLOCATEargs {
//		RANGEargs range;
//		bool      keep_size;    // leave the file's size; else it becomes at least the end of the last byte meant
//	};
//
//	union RANGEres switch (nfsstat3 status) {
//	case NFS3_OK:
//		uint64  offset;         // all before it is done
//	default:
//		void;
//	};
//
//	enum what { DATA = 0, HOLE = 1 };
//
//	struct SEEKargs {
//		RANGEargs range;
//		what      what;
//	};
//
//	union SEEKres switch (nfsstat3 status) {
//	case NFS3_OK:
//		bool    found;
//		uint64  offset;         // where, or before which nothing was found
//	default:
//		void;
//	};
//
// Stripe columns are mapped sparsely (RFC 8435 section 6): a data file has holes where the other columns of the file are.
// Hence the column: with it one call serves a whole range, and SEEK passes over what is none of the data file's business.
//
// # What is promised
//
// ALLOCATE makes sure that later writes to the bytes do not fail for lack of space. What was a hole reads as zeros, and
// SEEK may call it either. DEALLOCATE makes the bytes read as zeros, and frees the whole blocks among them; the last
// block counts as whole if the range has all that the file has of it. Neither leaves anything for COMMIT to do: what has
// been answered is on stable storage, as after a FILE_SYNC write.
//
// SEEK finds the first byte meant, at or after offset, that is data (or a hole); everything behind the end of the file is
// a hole, though the last block of data may count as data to its end. Data and holes come in blocks of the server's file
// system, and a server may call a hole data.
//
// A server need not do all of a long range in one call. The offset in the results then is less than offset + length, but
// more than offset, and the client calls again with what is left. With length 0 nothing is done.
//
// Statuses are those of WRITE and READ. In particular: NFS3ERR_NOTSUPP, the server's file system cannot do this to this
// file; NFS3ERR_NOSPC and NFS3ERR_DQUOT, there is no space to reserve, and part of the range may have been; NFS3ERR_FBIG,
// the file cannot become so long, or the range ends beyond 2^63-1.
package sparse
