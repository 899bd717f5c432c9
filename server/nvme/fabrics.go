package nvme

import (
	"errors"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// fabrics does a Fabrics command, whose data came in the capsule.
func (c *conn) fabrics(r *request, data []byte) {
	r.status, r.result = wire.StatusInvalidOpcode, 0
	ctrl := c.ctrl.Load()
	switch kind := r.cmd.FabricsType(); {
	case kind == wire.FabricsConnect:
		r.status = c.connect(r, data)
	case ctrl == nil:
		r.status = wire.StatusSequence
	case kind == wire.FabricsAuthSend, kind == wire.FabricsAuthReceive:
		ctrl.touch()
		r.status = c.authenticate(r, data)
	case c.mustAuthenticate():
		r.status = wire.StatusAuthRequired
	case c.qid != 0:
		// There are no others on an I/O queue: Disconnect is not offered (OFCS).
	case kind == wire.FabricsPropertyGet:
		ctrl.touch()
		r.status = ctrl.getProperty(r)
	case kind == wire.FabricsPropertySet:
		ctrl.touch()
		r.status = ctrl.setProperty(r)
	}
	c.complete(r)
}

func (ctrl *controller) getProperty(r *request) wire.Status {
	var p wire.PropertyGet
	if status := p.Decode(&r.cmd); status != wire.StatusSuccess || p.Wide != p.Property.Wide() {
		return wire.StatusInvalidField
	}
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	switch p.Property {
	case wire.PropCAP:
		r.result = wire.Capabilities{
			MaxQueueSize: maxQueueSize,
			Contiguous:   true,
			ReadyTimeout: 15 * time.Second,
			NVM:          true,
			CommandSets:  true,
			PageShiftMin: pageShift, PageShiftMax: pageShift,
		}.Property()
	case wire.PropVS:
		r.result = uint64(wire.Version20)
	case wire.PropCC:
		r.result = uint64(ctrl.config.Property())
	case wire.PropCSTS:
		r.result = uint64(ctrl.status.Property())
	default:
		return wire.StatusInvalidField
	}
	return wire.StatusSuccess
}

func (ctrl *controller) setProperty(r *request) wire.Status {
	var p wire.PropertySet
	if status := p.Decode(&r.cmd); status != wire.StatusSuccess || p.Property != wire.PropCC || p.Wide {
		return wire.StatusInvalidField
	}
	return ctrl.configure(uint32(p.Value))
}

// connect does Connect: the connection becomes a queue.
func (c *conn) connect(r *request, data []byte) wire.Status {
	if c.ctrl.Load() != nil {
		return wire.StatusSequence
	}
	var args wire.Connect
	var d wire.ConnectData
	if len(data) != wire.ConnectDataSize {
		return wire.StatusSGLLength
	}
	err := args.Decode(&r.cmd)
	if err == nil {
		err = d.Decode(data)
	}
	status := wire.StatusSuccess
	if err == nil {
		if args.QID == 0 {
			c.t.endLost(&d)
			await(c.t.former(&d))
		}
		status, err = c.join(&args, &d)
	}
	var bad *wire.ParamError
	switch {
	case errors.As(err, &bad) && bad.IsFormat():
		return wire.StatusConnectFormat
	case errors.As(err, &bad):
		r.result = uint64(bad.DW0())
		return wire.StatusConnectParameter
	case err != nil:
		return wire.StatusInternal
	case status != wire.StatusSuccess:
		return status
	}
	ctrl := c.ctrl.Load()
	r.result = uint64(wire.ConnectResult{CntlID: ctrl.id, Authenticate: c.mustAuthenticate()}.DW0())
	return wire.StatusSuccess
}

// former is the connections of a host's associations that have ended, of which a command may run still. It must not write over what the
// host writes when it is connected again.
func (t *Target) former(d *wire.ConnectData) (list []*conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		if ctrl := c.ctrl.Load(); ctrl != nil && c.dead.Load() && ctrl.isOf(d) {
			list = append(list, c)
		}
	}
	return list
}

func badParam(off uint16) error  { return &wire.ParamError{Offset: off} }
func badInData(off uint16) error { return &wire.ParamError{Offset: off, InData: true} }

// join makes the connection a queue of a new controller, or of one that there is.
func (c *conn) join(args *wire.Connect, d *wire.ConnectData) (wire.Status, error) {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	sub := t.subsystems[d.SubsysNQN]
	if sub == nil || !sub.discovery && !c.port.serves(sub) {
		return 0, badInData(wire.ConnectSubsysNQNOffset)
	}
	if !sub.admits(d.HostNQN) {
		t.log.Warn("a host is not allowed to connect", "subsystem", sub.NQN, "host", d.HostNQN, "from", c.nc.RemoteAddr())
		return wire.StatusConnectHost, nil
	}
	if args.QueueSize > maxQueueSize {
		return 0, badParam(wire.ConnectQueueSizeOffset)
	}
	if c.dead.Load() || t.closing {
		return wire.StatusConnectBusy, nil
	}
	if err := c.expectProof(sub, d.HostNQN); err != nil {
		return 0, err
	}
	if args.QID == 0 {
		if d.CntlID != wire.CntlIDAny {
			return 0, badInData(wire.ConnectCntlIDOffset)
		}
		return c.joinNew(sub, args, d), nil
	}
	ctrl := sub.controllers[d.CntlID]
	switch {
	case ctrl == nil || ctrl.port != c.port || ctrl.hostNQN != d.HostNQN:
		return 0, badInData(wire.ConnectCntlIDOffset)
	case ctrl.hostID != d.HostID:
		return 0, badInData(wire.ConnectHostIDOffset)
	}
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	switch {
	case sub.discovery || int(args.QID) > ctrl.granted:
		return 0, badParam(wire.ConnectQIDOffset)
	case ctrl.gone, !ctrl.ready.Load(), ctrl.queues[args.QID] != nil:
		return wire.StatusSequence, nil
	}
	c.become(ctrl, args)
	return wire.StatusSuccess, nil
}

// joinNew makes a controller. Target.mu is held.
func (c *conn) joinNew(sub *subsystem, args *wire.Connect, d *wire.ConnectData) wire.Status {
	if len(sub.controllers) >= maxControllers {
		return wire.StatusConnectBusy
	}
	for _, other := range sub.controllers {
		// Reservations are of the host identifier: the one would be let in, or fenced, with the other.
		if !sub.discovery && other.hostID == d.HostID && other.hostNQN != d.HostNQN {
			c.t.log.Warn("a host has the identifier of another one", "subsystem", sub.NQN, "host", d.HostNQN, "other", other.hostNQN, "from", c.nc.RemoteAddr())
			return wire.StatusConnectHost
		}
	}
	ctrl := &controller{
		t: c.t, sub: sub, port: c.port, hostNQN: d.HostNQN, hostID: d.HostID,
		queues: map[uint16]*conn{}, granted: maxQueues,
	}
	for ctrl.id == 0 || ctrl.id >= 0xFFF0 || sub.controllers[ctrl.id] != nil { // an ID that was not used for long
		sub.lastID++
		ctrl.id = sub.lastID
	}
	sub.controllers[ctrl.id] = ctrl
	ctrl.mu.Lock()
	defer ctrl.mu.Unlock()
	ctrl.setKeepAlive(args.KATO)
	c.become(ctrl, args)
	return wire.StatusSuccess
}

// become makes the connection a queue of a controller, whose mu is held.
func (c *conn) become(ctrl *controller, args *wire.Connect) {
	c.mu.Lock()
	c.qid, c.depth, c.flow = args.QID, args.QueueSize, !args.NoSQFlow
	c.head = 1 // Connect was the first entry
	c.jobs = make(chan *request, 2*c.depth)
	c.mu.Unlock()
	if c.qid != 0 {
		c.rx.MaxCapsule = ioCapsule
		in := make([]byte, inputSize)
		c.from, c.to = 0, copy(in, c.in[c.from:c.to])
		c.in = in
	}
	ctrl.queues[c.qid] = c
	c.ctrl.Store(ctrl)
	if c.mustAuthenticate() {
		c.limitReads(time.Now().Add(beginTime))
	} else {
		c.limitReads(time.Time{})
	}
}

// admits is whether a host may connect. Target.mu is held.
func (s *subsystem) admits(host string) bool {
	_, ok := s.hosts[host]
	return ok || s.AnyHost
}
