package nvmetcp

import (
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// inner is what the Controller keeps in a Command. Guarded by the mu of the queue that has it.
type inner struct {
	slot       *slot // nil while it waits for one
	data       []byte
	limit      time.Duration // how long an answer may take; 0: for ever
	own        bool          // one of ours, not for the I/O queues to check
	token      bool          // it has one of association.room until its slot is free
	prev, next *Command
}

func (cmd *Command) cost() int64 { return int64(len(cmd.Data)) + overhead }

// ranged tells whether the command is about SLBA and Blocks.
func (cmd *Command) ranged() bool {
	if cmd.Raw != nil {
		return false
	}
	switch cmd.Op {
	case wire.OpRead, wire.OpWrite, wire.OpCompare, wire.OpWriteZeroes:
		return true
	}
	return false
}

// modifies tells whether the command changes something in the namespace.
func (cmd *Command) modifies() bool {
	op := cmd.Op
	if cmd.Raw != nil {
		op = cmd.Raw.Opcode
	}
	switch op {
	case wire.OpFlush, wire.OpRead, wire.OpCompare, wire.OpReservationReport:
		return false
	}
	return !cmd.own
}

// encode makes the submission queue entry, but for CID and SGL.
func (cmd *Command) encode() wire.Command {
	switch {
	case cmd.Raw != nil:
		return *cmd.Raw
	case cmd.ranged():
		r := wire.Range{NSID: cmd.NSID, SLBA: cmd.SLBA, Blocks: cmd.Blocks, FUA: cmd.FUA}
		return r.Command(cmd.Op, wire.NoSGL())
	}
	return wire.Command{Opcode: cmd.Op, NSID: cmd.NSID}
}

// name is what the specification calls the I/O command.
func (cmd *Command) name() string {
	sqe := cmd.encode()
	return sqe.Name(false)
}
