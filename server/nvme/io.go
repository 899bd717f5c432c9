package nvme

import (
	"errors"

	"golang.org/x/sys/unix"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// minPages is from how many bytes on data is sent from the page cache, which saves two copies of it and costs system calls.
	minPages = 32 << 10
	// maxInline is up to how many bytes are written, or read from memory, before the next PDU is read.
	maxInline = 32 << 10
)

// dispatch does a command, or sees to it that it is done. data came in the capsule, and lies in c.in.
func (c *conn) dispatch(r *request, data []byte) {
	if r.cmd.Opcode == wire.OpFabrics {
		c.fabrics(r, data)
		return
	}
	ctrl := c.ctrl.Load()
	if ctrl == nil || !ctrl.ready.Load() {
		r.status = wire.StatusSequence
		c.complete(r)
		return
	}
	if c.mustAuthenticate() {
		r.status = wire.StatusAuthRequired
		c.complete(r)
		return
	}
	ctrl.touch()
	if c.qid == 0 {
		c.admin(ctrl, r, data)
		return
	}
	if c.prepare(ctrl, r); r.status != wire.StatusSuccess {
		c.complete(r)
		return
	}
	switch need := r.cmd.SGL.Length; {
	case r.cmd.Direction() == wire.ToController && len(data) == 0 && need > 0:
		if c.allot(r, int(need)) {
			c.ask(r)
		}
	case r.cmd.Opcode == wire.OpRead:
		c.fetch(r)
	case r.cmd.Direction() == wire.ToHost:
		if c.allot(r, int(need)) {
			c.hand(r)
		}
	case quick(r):
		r.data = data
		c.perform(r)
		c.complete(r)
	case len(data) == 0:
		c.hand(r)
	case c.tryAllot(r, len(data)):
		copy(r.data, data)
		c.hand(r)
	default: // there is no memory to keep the data in
		r.data = data
		c.perform(r)
		c.complete(r)
	}
}

// quick is whether a command that has its data is done without waiting.
func quick(r *request) bool {
	return r.cmd.Opcode == wire.OpWrite && !r.fua && r.cmd.SGL.Length <= maxInline
}

// prepare checks a command of an I/O queue as far as that needs no data, and finds its namespace.
func (c *conn) prepare(ctrl *controller, r *request) {
	cmd := &r.cmd
	need := uint64(0) // bytes of data
	blocks := false
	switch cmd.Opcode {
	case wire.OpRead, wire.OpWrite:
		blocks = true
	case wire.OpWriteZeroes:
		blocks = true
	case wire.OpFlush:
	case wire.OpDatasetManagement:
		ranges, _ := wire.DecodeDSM(cmd)
		need = uint64(ranges) * wire.DSMRangeSize
	case wire.OpReservationRegister, wire.OpReservationAcquire:
		need = wire.RegisterDataSize
	case wire.OpReservationRelease:
		need = wire.ReleaseDataSize
	case wire.OpReservationReport:
		need = (uint64(cmd.CDW10) + 1) * 4
	default:
		r.status = wire.StatusInvalidOpcode
		return
	}
	n := ctrl.sub.table.Load().get(cmd.NSID)
	if n == nil {
		r.status = wire.StatusInvalidNamespace
		return
	}
	r.ns = n
	if r.status = ctrl.port.path(n); r.status != wire.StatusSuccess {
		return
	}
	if blocks {
		var a wire.Range
		a.Decode(cmd)
		if !a.Within(uint64(n.blocks.Load())) {
			r.status = wire.StatusLBARange
			return
		}
		r.off, r.fua = int64(a.SLBA<<n.shift), a.FUA
		if cmd.Opcode != wire.OpWriteZeroes {
			need = uint64(a.Blocks) << n.shift
		}
	}
	have := uint64(cmd.SGL.Length)
	switch {
	case cmd.Fused() != wire.FusedNot, max(need, have) > maxTransfer:
		r.status = wire.StatusInvalidField
	case have < need, have > need && cmd.Opcode != wire.OpDatasetManagement: // Linux always sends 4096 bytes of ranges
		r.status = wire.StatusSGLLength
	}
}

// path is what commands to a namespace get at a port because of the state of its group.
func (p *port) path(n *namespace) wire.Status { return p.ana.Load().states[n.ANAGroup].Status() }

// ask asks for a command's data, all of it at once, into memory that it has.
func (c *conn) ask(r *request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.askLocked(r)
}

func (c *conn) askLocked(r *request) {
	r.want, r.got = len(r.data), 0
	c.expected.Add(1)
	c.asked.Add(1)
	if !c.watched && !c.ended {
		c.watchLocked(c.asked.Load())
	}
	p := wire.R2T{CID: r.cmd.CID, Tag: r.tag, Length: uint32(r.want)}
	c.queueLocked(message{head: p.Append(r.asked[:0], c.framing), r: r})
}

// resume goes on with a request that waited for memory. mu is held.
func (c *conn) resume(r *request) {
	if r.cmd.Direction() == wire.ToController {
		c.askLocked(r)
	} else {
		r.want = 0 // no data comes: none was asked for
		c.handLocked(r)
	}
}

// receive takes a piece of a command's data.
func (c *conn) receive(h wire.Header, b []byte) error {
	var p wire.H2CData
	if err := p.Decode(h, b); err != nil {
		return err
	}
	r, data, err := c.expect(&p)
	if err != nil {
		return err
	}
	c.from += len(b)
	if err := c.readFull(data); err != nil {
		return err
	}
	if h.DataDigest() > 0 {
		d, err := c.need(wire.DigestSize)
		if err != nil {
			return err
		}
		c.from += wire.DigestSize
		if !wire.VerifyDigest(d, data) {
			r.spoilt = true
		}
	}
	c.asked.Add(1)
	if r.got += len(data); r.got < r.want {
		return nil
	}
	c.expected.Add(-1)
	switch {
	case r.spoilt:
		r.status = wire.StatusTransport
		c.complete(r)
	case quick(r):
		c.perform(r)
		c.complete(r)
	default:
		c.hand(r)
	}
	return nil
}

// expect returns the request that a piece of data is for, and where it belongs.
func (c *conn) expect(p *wire.H2CData) (*request, []byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var r *request
	if int(p.Tag) < len(c.requests) {
		r = c.requests[p.Tag]
	}
	if r == nil || r.got >= r.want || r.payload == nil || r.cmd.CID != p.CID {
		return nil, nil, &wire.ProtocolError{Fatal: wire.FatalHeaderField, Info: 10, What: "H2CData that no R2T asked for"}
	}
	end := uint64(p.Offset) + uint64(p.Length)
	if int(p.Offset) != r.got || end > uint64(r.want) || p.Last != (end == uint64(r.want)) {
		return nil, nil, &wire.ProtocolError{Fatal: wire.FatalDataRange, Info: 12, What: "H2CData that is not the next piece of what an R2T asked for"}
	}
	return r, r.data[p.Offset:end], nil
}

// fetch does a Read at once if that does not wait, and leaves it to a worker otherwise.
func (c *conn) fetch(r *request) {
	n := int(r.cmd.SGL.Length)
	f := r.ns.file
	if r.fua {
		f = nil // it has to be made stable, which takes time
	}
	if f != nil && n >= minPages && !c.framing.DataDigest && !f.unsendable.Load() && f.cached(r.first[:1], r.off, n) {
		r.status = c.fromPages(r, n)
		c.complete(r)
		return
	}
	if !c.allot(r, n) {
		return
	}
	if f != nil && n <= maxInline {
		now := false
		if r.status = c.admit(r, false); r.status == wire.StatusSuccess {
			now = f.readNow(r.data, r.off)
			r.ns.mu.RUnlock()
		}
		if now || r.status != wire.StatusSuccess {
			c.complete(r)
			return
		}
	}
	c.hand(r)
}

// fromPages leaves it to whoever sends to take the data from the page cache. What is sent is what the file holds then: a change
// that is made meanwhile may be among it.
func (c *conn) fromPages(r *request, n int) wire.Status {
	status := c.admit(r, false)
	if status == wire.StatusSuccess {
		r.ns.refs.Add(1)
		r.from = extent{r.ns, r.ns.file, r.off, n}
		r.ns.mu.RUnlock()
	}
	return status
}

// admit checks what may change while a command waits. If the status is StatusSuccess the namespace's lock is held shared.
func (c *conn) admit(r *request, write bool) wire.Status {
	n, ctrl := r.ns, c.ctrl.Load()
	n.mu.RLock()
	status := wire.StatusSuccess
	switch {
	case n.gone:
		status = wire.StatusInvalidNamespace
	case c.dead.Load():
		status = wire.StatusAborted
	case !n.reserved.admits(ctrl.hostID, write):
		status = wire.StatusReserved
	case write && n.ReadOnly:
		status = wire.StatusWriteProtected
	default:
		return status
	}
	n.mu.RUnlock()
	return status
}

// perform does a command of an I/O queue, whose data is in r.data or is to be put there.
func (c *conn) perform(r *request) {
	switch r.cmd.Opcode {
	case wire.OpRead:
		r.status = c.transfer(r, false, func(b Backing) error {
			n, err := b.ReadAt(r.data, r.off)
			if n == len(r.data) {
				err = nil
			}
			if err == nil && r.fua { // what is read may not be lost afterwards
				err = b.Sync()
			}
			return err
		})
	case wire.OpWrite:
		r.status = c.transfer(r, true, func(b Backing) error {
			_, err := b.WriteAt(r.data, r.off)
			if err == nil && r.fua {
				err = b.Sync()
			}
			return err
		})
	case wire.OpFlush:
		r.status = c.transfer(r, true, Backing.Sync)
	case wire.OpWriteZeroes:
		var a wire.Range
		a.Decode(&r.cmd)
		r.status = c.transfer(r, true, func(b Backing) error {
			err := b.Zero(r.off, int64(a.Blocks)<<r.ns.shift, a.Deallocate)
			if err == nil && r.fua {
				err = b.Sync()
			}
			return err
		})
	case wire.OpDatasetManagement:
		r.status = c.deallocate(r)
	default:
		r.status = c.reserve(r)
	}
}

// transfer does something to the namespace's backing, if it may be done. A namespace that may not be written can be flushed.
func (c *conn) transfer(r *request, write bool, do func(Backing) error) wire.Status {
	if status := c.admit(r, write && r.cmd.Opcode != wire.OpFlush); status != wire.StatusSuccess {
		return status
	}
	defer r.ns.mu.RUnlock()
	if r.cmd.Opcode == wire.OpFlush && !r.ns.reserved.admits(c.ctrl.Load().hostID, true) {
		return wire.StatusReserved
	}
	err := do(r.ns.Backing)
	if failing := err != nil; r.ns.failing.Load() != failing {
		r.ns.failing.Store(failing)
		if failing {
			c.t.log.Error("the backing of a namespace fails", "subsystem", c.ctrl.Load().sub.NQN, "namespace", r.ns.NSID,
				"command", r.cmd.Name(false), "offset", r.off, "err", err)
		}
	}
	switch {
	case err == nil:
		return wire.StatusSuccess
	case !write:
		return wire.StatusReadError
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return wire.StatusCapacity
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EBADF):
		return wire.StatusWriteProtected
	}
	return wire.StatusWriteFault
}

// deallocate does Dataset Management. What is no more than advice is not taken.
func (c *conn) deallocate(r *request) wire.Status {
	n, deallocate := wire.DecodeDSM(&r.cmd)
	if !deallocate {
		return wire.StatusSuccess
	}
	size := uint64(r.ns.blocks.Load())
	ranges := make([]wire.DSMRange, n)
	for i := range ranges {
		if ranges[i].Decode(r.data[i*wire.DSMRangeSize:]); !ranges[i].Within(size) {
			return wire.StatusLBARange
		}
	}
	return c.transfer(r, true, func(b Backing) error {
		for _, a := range ranges {
			if a.Blocks == 0 {
				continue
			}
			if err := b.Zero(int64(a.SLBA<<r.ns.shift), int64(a.Blocks)<<r.ns.shift, true); err != nil {
				return err
			}
		}
		return nil
	})
}

// cached is whether n bytes at off seem to be in memory, from the looks of their ends, which it reads into b.
func (f *File) cached(b []byte, off int64, n int) bool {
	return f.readNow(b, off) && f.readNow(b, off+int64(n)-1)
}
