package fs

import (
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/fs/device"
	"github.com/weftfs/weft/internal/iobuf"
	"github.com/weftfs/weft/layout"
)

// transfers serves the READs and WRITEs of the device loop.
type transfers struct{ fs *FS }

func (t transfers) NewTransfer(r *device.Request) device.Transfer {
	c := &transferCall{fs: t.fs, r: r}
	c.read.Done, c.write.Done = c.done, c.done
	return c
}

func (t transfers) Flush() { t.fs.Flush() }

func (t transfers) WriteBuffer(n int) *iobuf.Buf { return t.fs.data.Buffer(n) }

func (t transfers) Abandoned(finished <-chan struct{}, pid uint32, interrupted bool) bool {
	return t.fs.abandoned(finished, pid, interrupted)
}

// transferCall is one READ or WRITE on its way.
type transferCall struct {
	fs    *FS
	r     *device.Request
	read  Read
	write Write
	flight
}

func (c *transferCall) done(n int, errno syscall.Errno) {
	j := &c.read.journey
	if c.r.Write {
		j = &c.write.journey
	}
	c.fs.answered(&c.flight, j, "", c.r.Off, n)
	c.fs.watched.add(&c.flight, c.r.Write, n)
	c.r.Done(n, errno)
}

func (c *transferCall) Start() {
	fs, r := c.fs, c.r
	if fs.unprotected(r.Fh) {
		r.Done(0, syscall.EIO)
		return
	}
	c.flight = flight{op: opRead, pid: r.Pid, id: fs.id(r.Node), began: time.Now()}
	if r.Write {
		c.op = opWrite
	}
	fs.flights.start(&c.flight)
	if !r.Write {
		c.read.fill(fs.id(r.Node), r.Fh, r.Off, r.Data, r.Flags)
		fs.StartRead(&c.read)
		return
	}
	c.write.fill(fs.id(r.Node), r.Fh, r.Off, r.Data, r.Flags, r.WriteFlags)
	c.write.Buf = r.Buf
	fs.StartWrite(&c.write)
}

func (c *transferCall) Detach() {
	c.fs.flights.end(&c.flight)
	if c.r.Write {
		c.write.Detach()
	} else {
		c.read.Detach()
	}
}

// fill sets what the kernel asks for. Who opens a file with O_DIRECT wants to have the say in what is read.
func (r *Read) fill(id layout.FileID, fh uint64, off int64, buf []byte, flags uint32) {
	r.ID, r.Off, r.Buf, r.NoAtime = id, off, buf, flags&unix.O_NOATIME != 0
	if r.Fh = fh; flags&unix.O_DIRECT != 0 {
		r.Fh = 0
	}
}

// fill sets what the kernel asks for.
func (w *Write) fill(id layout.FileID, fh uint64, off int64, data []byte, flags, writeFlags uint32) {
	w.ID, w.Off, w.Data = id, off, data
	w.Fh, w.Flags, w.ClearSetID = fh, flags, writeFlags&fuse.WRITE_KILL_SUIDGID != 0
	if writeFlags&fuse.WRITE_CACHE != 0 {
		// Pages of a mapping: they belong where they are, and fsync(2) will come if it is wanted. The kernel does not
		// say who has written them.
		w.Flags, w.ClearSetID = 0, true
	}
}
