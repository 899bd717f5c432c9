package layout

import "fmt"

// OpKind is what an Op asks of a data server.
type OpKind uint8

const (
	OpRead OpKind = iota + 1
	OpWrite
	OpCommit
)

func (k OpKind) String() string {
	switch k {
	case OpRead:
		return "READ"
	case OpWrite:
		return "WRITE"
	case OpCommit:
		return "COMMIT"
	}
	return fmt.Sprintf("op(%d)", uint8(k))
}

// Stability is how durable a written byte is, as NFSv3's stable_how (RFC 1813 section 3.3.7). Greater is safer.
type Stability uint32

const (
	Unstable Stability = 0 // may be lost if the server restarts before a COMMIT
	DataSync Stability = 1 // data, and what is needed to find it, is on stable storage
	FileSync Stability = 2 // data and all attributes are
)

func (s Stability) String() string {
	switch s {
	case Unstable:
		return "UNSTABLE"
	case DataSync:
		return "DATA_SYNC"
	case FileSync:
		return "FILE_SYNC"
	}
	return fmt.Sprintf("stable_how(%d)", uint32(s))
}

// Verifier identifies an instance of a server that has lost no unstable data. Compare for equality only.
type Verifier [8]byte

// Op is one request to one data file.
//
// Whoever starts it fills the first group. From Start until Done the Op and Data belong to the target: READ fills Data
// from its beginning, WRITE only reads it. Done is called exactly once, from any goroutine, with the second group set;
// it must be short and must not block. Afterwards the target no longer knows the Op and it may be started again.
type Op struct {
	Kind   OpKind
	File   *DataFile
	Off    int64
	Data   []byte    // READ: destination, WRITE: source
	Count  int64     // COMMIT: bytes from Off, 0 = to the end
	Stable Stability // WRITE: asked for
	Done   func(*Op)
	// Overdue, if set, may be called once before Done, for a WRITE whose time is over while nobody knows whether the
	// server will still carry it out: the request goes on until there is an answer. The target calls it with its locks
	// held, so it must not call the target.
	Overdue func(op *Op, err error)
	// Leave says that Data is memory that the caller may want back before a disk has answered (Detach). A target that
	// cannot take it back, since the kernel has it, transfers by memory of its own.
	Leave bool

	N         int       // bytes read or written; less than len(Data) only at EOF of the data file (READ) or with Err
	EOF       bool      // READ: the data file ends at Off+N; not always told if N is len(Data)
	Committed Stability // WRITE: given
	Verifier  Verifier  // WRITE, COMMIT
	// Kept, if not 0, says of an UNSTABLE WRITE that the kernel of this host has the data now, whatever becomes of the server, and of a COMMIT
	// that everything with the same number is stable: what has another one may have been lost when it was written back. 0 in a COMMIT
	// says nothing.
	Kept uint64
	Err  error

	// Target is scratch space of the target that has the Op (a queue link, a deadline); zero it before reuse.
	Target any
}
