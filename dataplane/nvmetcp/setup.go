package nvmetcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/weftfs/weft/internal/descriptors"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	// maxTransfer bounds the data of one command, whatever the controller says it takes.
	maxTransfer = 1 << 20
	// maxDial bounds an attempt to connect a socket, and the exchange of ICReq and ICResp.
	maxDial = 10 * time.Second
	// fabricsInline is how much data always fits the capsule on the admin queue and of Fabrics commands.
	fabricsInline = 8192
	// maxShutdown bounds the polite end of a controller that is closed.
	maxShutdown = 2 * time.Second
	// minReady is how long a controller may take to be enabled at least, whatever it says.
	minReady = time.Second
)

// Info is what is known of a controller.
type Info struct {
	Association   uint64 // counts those of the Controller, from 1 on
	Remote        netip.AddrPort
	Version       wire.Version
	Capabilities  wire.Capabilities
	Controller    wire.ControllerData
	Limits        Limits
	KATO          time.Duration // 0: there is no keep alive
	Authenticated bool
}

// lingers is how long the controller may keep an association that it hears nothing of any more.
func (i *Info) lingers() time.Duration {
	kato := i.KATO
	if kas := i.Controller.KAS; kas > 0 {
		kato = (kato + kas - 1) / kas * kas // which it rounds up
	}
	if i.traffic() {
		kato *= 2 // it may look only once in that time
	}
	return kato + i.Controller.CQT
}

// traffic tells whether any command counts as Keep Alive.
func (i *Info) traffic() bool { return i.Controller.CTRATT&wire.CTRATTTBKAS != 0 }

// retryDelay is what a completion's CRD means.
func (i *Info) retryDelay(crd uint8) time.Duration { return i.Controller.CRDT[crd-1] }

// stepError is what failed while an association was set up.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

func step(name string, err error) error {
	if err == nil {
		return nil
	}
	return &stepError{name, err}
}

// unusable is a controller that answers, but not as one that we can use.
type unusable struct{ err error }

func (e *unusable) Error() string { return e.err.Error() }
func (e *unusable) Unwrap() error { return e.err }

func unusablef(format string, args ...any) error { return &unusable{fmt.Errorf(format, args...)} }

// connect makes an association. Its errors are *ConnectError.
func (c *Controller) connect(ctx context.Context) (*association, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(c.ctx, func() { cancel(ErrClosed) })()
	a := newAssociation(c)
	err := a.setUp(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = step("gave up", context.Cause(ctx))
		}
		a.fail(err)
		a.stop()
		return nil, c.connectError(err)
	}
	c.info.Store(a.info)
	c.live.Store(a)
	return a, nil
}

func (c *Controller) connectError(err error) error {
	e := &ConnectError{Addr: c.cfg.Addr, NQN: c.cfg.SubsysNQN, Step: "connect", Err: err}
	if s := (*stepError)(nil); errors.As(err, &s) {
		e.Step, e.Err = s.step, s.err
	}
	var (
		status *wire.CommandError
		wrong  *wire.ProtocolError
		cannot *unusable
		op     *net.OpError
	)
	switch {
	case errors.As(err, &status):
		e.Final = status.DNR
		e.Err = status // the rest is said
		e.Advice = c.advice(status)
	case errors.As(err, &cannot):
		e.Final = true
	case errors.As(err, &wrong):
		e.Advice = "is this an NVMe/TCP port? They are 4420 by convention, 8009 for discovery"
	case errors.Is(err, syscall.ECONNREFUSED):
		e.Err = syscall.ECONNREFUSED
		e.Advice = "nothing listens there: check the address, and that the target is running"
	case errors.As(err, &op):
		e.Err = op.Err // the rest says again what and where
	}
	return e
}

// advice is what to do about a status that a controller was not set up for.
func (c *Controller) advice(e *wire.CommandError) string {
	if e.Set != wire.SetFabrics {
		return ""
	}
	switch e.Status {
	case wire.StatusConnectHost:
		return fmt.Sprintf("allow host %s to use the subsystem, and see that no other host has its HOSTID, %x", c.cfg.HostNQN, c.cfg.HostID)
	case wire.StatusConnectParameter:
		switch p := wire.ConnectParam(uint32(e.Result)); {
		case p.InData && p.Offset == wire.ConnectSubsysNQNOffset:
			return "there is no such subsystem at this port: check its NQN, discovery lists them"
		case p.InData && p.Offset == wire.ConnectHostNQNOffset:
			return fmt.Sprintf("host NQN %s is not accepted", c.cfg.HostNQN)
		}
	case wire.StatusAuthRequired:
		return "the subsystem wants authentication: give this host's secret"
	case wire.StatusConnectBusy:
		return "the subsystem has no controller free"
	}
	return ""
}

// setUp brings the controller up.
func (a *association) setUp(ctx context.Context) error {
	cfg := &a.c.cfg
	a.info = &Info{Association: a.c.made.Add(1), KATO: cfg.KATO}
	cntlID, err := a.setUpAdmin(ctx)
	if err != nil {
		return err
	}
	if err := a.enable(ctx); err != nil {
		return step("enable", err)
	}
	if err := a.identify(ctx, cntlID); err != nil {
		return step("identify", err)
	}
	a.keep()
	a.tended.Store(true)
	a.wg.Add(1)
	go a.tend()
	if err := a.configure(ctx); err != nil {
		return err
	}
	if err := a.setUpIO(ctx, cntlID); err != nil {
		return err
	}
	return a.cause()
}

// setUpAdmin makes the admin queue.
func (a *association) setUpAdmin(ctx context.Context) (cntlID uint16, err error) {
	cfg := &a.c.cfg
	q, err := a.dial(ctx, 0, wire.AdminQueueSize)
	if err != nil {
		return 0, err
	}
	a.admin = q
	q.inl = fabricsInline
	a.info.Remote = q.nc.RemoteAddr().(*net.TCPAddr).AddrPort()
	res, err := a.connectQueue(ctx, q, wire.Connect{QueueSize: wire.AdminQueueSize, KATO: cfg.KATO}, wire.CntlIDAny)
	if err == nil && res.CntlID >= wire.CntlIDStatic {
		err = unusablef("controller ID %#x", res.CntlID)
	}
	a.info.Authenticated = res.Authenticate
	return res.CntlID, step("connect admin queue", err)
}

// connectQueue runs Connect on q, and authenticates if that is wanted.
func (a *association) connectQueue(ctx context.Context, q *queue, args wire.Connect, cntlID uint16) (wire.ConnectResult, error) {
	cfg := &a.c.cfg
	args.QID, args.NoSQFlow = q.id, true
	sqe := args.Command()
	data := wire.ConnectData{HostID: cfg.HostID, CntlID: cntlID, SubsysNQN: cfg.SubsysNQN, HostNQN: cfg.HostNQN}
	answer, err := a.call(ctx, q, &sqe, data.Append(nil), cfg.AdminTimeout)
	if err != nil {
		return wire.ConnectResult{}, err
	}
	res := wire.DecodeConnectResult(answer.DW0())
	switch {
	case res.Secure:
		err = unusablef("the subsystem wants a secure channel (TLS), which weft does not have")
	case res.Authenticate:
		err = step("authenticate", a.authenticate(ctx, q))
	case !cfg.CtrlSecret.IsZero():
		err = unusablef("the controller does not want to authenticate, and so does not prove itself: set the secrets there, too")
	}
	return res, err
}

// dial connects the queue's socket and agrees with the controller on the form of PDUs. size is the queue's, in entries.
func (a *association) dial(ctx context.Context, id uint16, size int) (*queue, error) {
	cfg := &a.c.cfg
	d := net.Dialer{Timeout: maxDial, Control: func(_, _ string, raw syscall.RawConn) error {
		return setUserTimeout(raw, cfg.IOTimeout)
	}}
	nc, err := descriptors.Retry(func() (net.Conn, error) { return d.DialContext(ctx, "tcp", cfg.Addr) })
	if err != nil {
		return nil, step("connect", err)
	}
	q := newQueue(a, id, nc, size-1)
	if err := q.agree(ctx, nc); err != nil {
		abort(nc)
		return nil, step("set up connection", err)
	}
	raw, err := nc.(*net.TCPConn).SyscallConn()
	if err != nil {
		abort(nc)
		return nil, err
	}
	q.in.init(raw)
	q.out.init(raw)
	return q, a.add(q)
}

// agree exchanges ICReq and ICResp.
func (q *queue) agree(ctx context.Context, nc net.Conn) error {
	nc.SetDeadline(time.Now().Add(maxDial))
	defer nc.SetDeadline(time.Time{})
	defer context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })()
	cfg := &q.a.c.cfg
	req := wire.ICReq{HeaderDigest: cfg.HeaderDigest, DataDigest: cfg.DataDigest, MaxR2T: maxR2T}
	if _, err := nc.Write(req.Append(nil)); err != nil {
		return err
	}
	var b [wire.ICSize]byte
	if _, err := io.ReadFull(nc, b[:wire.HeaderSize]); err != nil {
		if errors.Is(err, io.EOF) {
			err = errHungUp
		}
		return err
	}
	start := wire.Receiver{Role: wire.Host}
	h, err := start.Decode(b[:])
	if err != nil {
		return err
	}
	if h.Type != wire.PDUICResp {
		return sequenceError("%v instead of ICResp", h.Type)
	}
	if _, err := io.ReadFull(nc, b[wire.HeaderSize:]); err != nil {
		return err
	}
	var resp wire.ICResp
	if err := resp.Decode(h, b[:], &req); err != nil {
		return err
	}
	if resp.HeaderDigest != req.HeaderDigest || resp.DataDigest != req.DataDigest {
		return unusablef("the controller does not agree to digests (header %v, data %v): turn them off here, or on there", resp.HeaderDigest, resp.DataDigest)
	}
	q.send = wire.Framing{HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest, Align: resp.Align}
	q.recv = wire.Receiver{Framing: wire.Framing{HeaderDigest: resp.HeaderDigest, DataDigest: resp.DataDigest}, Role: wire.Host, MaxData: maxTransfer}
	q.chunk = int(min(resp.MaxH2CData, maxTransfer))
	return nil
}

func (a *association) property(ctx context.Context, p wire.Property) (uint64, error) {
	sqe := wire.PropertyGet{Property: p, Wide: p.Wide()}.Command()
	answer, err := a.call(ctx, a.admin, &sqe, nil, a.c.cfg.AdminTimeout)
	return answer.Result, err
}

func (a *association) configuration(ctx context.Context, cc wire.Configuration) error {
	sqe := wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command()
	_, err := a.call(ctx, a.admin, &sqe, nil, a.c.cfg.AdminTimeout)
	return err
}

// enable enables the controller.
func (a *association) enable(ctx context.Context) error {
	v, err := a.property(ctx, wire.PropCAP)
	if err != nil {
		return err
	}
	caps := &a.info.Capabilities
	if err := caps.Decode(v); err != nil {
		return &unusable{err}
	}
	if v, err = a.property(ctx, wire.PropVS); err != nil {
		return err
	}
	a.info.Version = wire.Version(v)
	cc := a.defaultConfiguration()
	if err := a.configuration(ctx, cc); err != nil {
		return err
	}
	cc.Enable = true
	if err := a.configuration(ctx, cc); err != nil {
		return err
	}
	return a.await(ctx, max(caps.ReadyTimeout, minReady), func(s wire.ControllerStatus) bool { return s.Ready })
}

func (a *association) defaultConfiguration() wire.Configuration {
	cc := wire.DefaultConfiguration()
	cc.PageShift = a.info.Capabilities.PageShiftMin
	if a.info.Capabilities.CommandSets {
		cc.CommandSet = wire.AllCommandSets
	}
	return cc
}

// await asks for the controller's status until it is as wanted, for limit at most.
func (a *association) await(ctx context.Context, limit time.Duration, wanted func(wire.ControllerStatus) bool) error {
	deadline := time.Now().Add(limit)
	for delay := time.Millisecond; ; delay = min(2*delay, 100*time.Millisecond) {
		v, err := a.property(ctx, wire.PropCSTS)
		if err != nil {
			return err
		}
		var s wire.ControllerStatus
		s.Decode(uint32(v))
		switch {
		case wanted(s):
			return nil
		case s.Fatal:
			return errors.New("the controller reports a fatal error (CSTS.CFS): see its log")
		case time.Now().After(deadline):
			return fmt.Errorf("the controller is not ready after %v (status %#x)", limit, v)
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-a.down:
			return a.cause()
		}
	}
}

// identify learns what the controller is and can, and checks that it can be used.
func (a *association) identify(ctx context.Context, cntlID uint16) error {
	cfg, info := &a.c.cfg, a.info
	b := make([]byte, wire.IdentifySize)
	id := &info.Controller
	sqe := wire.Identify{CNS: wire.CNSController}.Command()
	if _, err := a.call(ctx, a.admin, &sqe, b, cfg.AdminTimeout); err != nil {
		return err
	}
	err := id.Decode(b)
	if err == nil && !cfg.Discovery {
		err = id.CheckIO()
	}
	switch {
	case err != nil:
		return &unusable{err}
	case cfg.Discovery && id.Type != wire.ControllerDiscovery && id.Type != 0:
		return unusablef("this is not a discovery controller (type %d)", id.Type)
	case id.CntlID != cntlID:
		return unusablef("it says that it is controller %#x, and Connect said %#x", id.CntlID, cntlID)
	case !cfg.Discovery && id.SubsysNQN != "" && id.SubsysNQN != cfg.SubsysNQN:
		return unusablef("it says that it is of subsystem %s", id.SubsysNQN)
	}
	page := info.Capabilities.PageShiftMin
	info.Limits = Limits{MaxTransfer: int(id.MaxTransfer(page, maxTransfer)), MaxBlocks: wire.MaxBlocks, MaxZeroes: 1 << 40}
	if cfg.Discovery {
		return nil
	}
	info.Limits.Inline = int(min(id.CapsuleData(), maxTransfer))
	if id.ONCS&wire.ONCSWriteZeroes != 0 {
		var nvm wire.NVMController
		sqe := wire.Identify{CNS: wire.CNSSetController, CSI: wire.CSINVM}.Command()
		_, err := a.call(ctx, a.admin, &sqe, b, cfg.AdminTimeout)
		if err == nil {
			err = nvm.Decode(b)
		}
		if err != nil && !isStatus(err) {
			return err
		} // those who do not know the structure have MDTS alone
		info.Limits.MaxZeroes = int64(nvm.MaxWriteZeroes(id.MDTS, page, uint64(info.Limits.MaxZeroes)))
	}
	return nil
}

// isStatus tells whether err is a controller's answer.
func isStatus(err error) bool {
	var status *wire.CommandError
	return errors.As(err, &status)
}

// configure tells the controller what this host wants of it.
func (a *association) configure(ctx context.Context) error {
	cfg, id := &a.c.cfg, &a.info.Controller
	set := func(f wire.Feature, data []byte) (uint32, error) {
		sqe := f.Set(wire.NoSGL())
		answer, err := a.call(ctx, a.admin, &sqe, data, cfg.AdminTimeout)
		return answer.DW0(), err
	}
	if id.CRDT[0] != 0 {
		// Without it the controller names no delays, which is all that is lost.
		if _, err := set(wire.Feature{ID: wire.FeatureHostBehavior}, wire.AppendHostBehavior(nil, true)); err != nil && !isStatus(err) {
			return step("set host behaviour", err)
		}
	}
	if cfg.Discovery && cfg.KATO == 0 {
		return nil
	}
	if events := id.OAES & (wire.EventsNamespaces | wire.EventsANA | wire.EventsDiscovery); events != 0 {
		if _, err := set(wire.Feature{ID: wire.FeatureEvents, Value: uint32(events)}, nil); err != nil {
			return step("ask for events", err)
		}
	}
	for range min(id.AERs, maxEvents) {
		a.arm(a.newEventRequest())
	}
	return nil
}

// setUpIO makes the I/O queues.
func (a *association) setUpIO(ctx context.Context, cntlID uint16) error {
	cfg, info := &a.c.cfg, a.info
	if cfg.Discovery {
		return nil
	}
	sqe := wire.Feature{ID: wire.FeatureQueues, Value: wire.QueueCount(cfg.Queues)}.Set(wire.NoSGL())
	answer, err := a.call(ctx, a.admin, &sqe, nil, cfg.AdminTimeout)
	if err != nil {
		return step("ask for I/O queues", err)
	}
	n := a.countQueues(min(cfg.Queues, wire.DecodeQueueCount(answer.DW0())))
	size := min(cfg.QueueSize, info.Capabilities.MaxQueueSize)
	if most := int(info.Controller.MAXCMD); most > 0 {
		size = max(min(size, most+1), wire.MinQueueSize)
	}
	info.Limits.Queues, info.Limits.Depth = n, size-1
	a.io = make([]*queue, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { a.io[i], errs[i] = a.setUpQueue(ctx, uint16(i+1), size, cntlID) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return step(fmt.Sprintf("connect I/O queue %d", i+1), err)
		}
	}
	return nil
}

// countQueues returns how many of n queues the process has descriptors for, which is one at least.
func (a *association) countQueues(n int) int {
	most := 1
	for most < n && descriptors.Dialed.Take() {
		a.counted.Add(1)
		most++
	}
	return most
}

// uncount gives back what countQueues has taken.
func (a *association) uncount() {
	for range a.counted.Swap(0) {
		descriptors.Dialed.Give()
	}
}

func (a *association) setUpQueue(ctx context.Context, id uint16, size int, cntlID uint16) (*queue, error) {
	q, err := a.dial(ctx, id, size)
	if err != nil {
		return nil, err
	}
	q.inl = a.info.Limits.Inline
	res, err := a.connectQueue(ctx, q, wire.Connect{QueueSize: size}, cntlID)
	if err == nil && res.CntlID != cntlID {
		err = unusablef("it belongs to controller %#x instead of %#x", res.CntlID, cntlID)
	}
	return q, err
}

// close ends an association: it shuts the controller down, if that does not take long, and then fails.
func (a *association) close() {
	ctx, cancel := context.WithTimeout(context.Background(), min(maxShutdown, a.c.cfg.AdminTimeout))
	defer cancel()
	cc := a.defaultConfiguration()
	cc.Enable, cc.Shutdown = true, wire.ShutdownNormal
	if a.configuration(ctx, cc) == nil {
		// An error here means that the controller gets to know by the connections' end.
		_ = a.await(ctx, maxShutdown, func(s wire.ControllerStatus) bool { return s.Shutdown == wire.ShutdownComplete })
	}
	a.fail(ErrClosed)
}
