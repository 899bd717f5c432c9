package nvmetcp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

const (
	testANATT = 10 * time.Second
	fakeBlock = 512
)

// fakeSpace is a namespace of a fakeTarget.
type fakeSpace struct {
	ns   wire.Namespace
	ids  wire.Descriptors
	data []byte
}

func newFakeSpace(id byte, blocks uint64, group uint32) *fakeSpace {
	f := &fakeSpace{data: make([]byte, blocks*fakeBlock)}
	f.ns = wire.Namespace{NSZE: blocks, NCAP: blocks, ANAGRPID: group, BlockShift: 9, NMIC: wire.NMICShared}
	f.ids.UUID[15] = id
	return f
}

// fakeTarget is a subsystem with controllers at some addresses.
type fakeTarget struct {
	t      *testing.T
	mu     sync.Mutex
	spaces map[uint32]*fakeSpace
	ports  map[string]*fakePort
}

// fakePort is an address of a fakeTarget. Its fields are guarded by fakeTarget.mu.
type fakePort struct {
	target *fakeTarget
	addr   string
	refuse error                    // of dial
	ana    map[uint32]wire.ANAState // nil: no ANA
	moves  int                      // so many times the ANA log changes while it is read
	change uint64
	spaces map[uint32]*fakeSpace // instead of the target's, if not nil
	// latency of commands; 0: at Flush, by the goroutine that calls it.
	latency time.Duration
	// answer, if not nil, may end a command otherwise: with an error, or not at all if it returns false.
	answer func(*Command) (error, bool)
	admin  func(what string, nsid uint32) error // may refuse an admin command: active, namespace, descriptors, log
	mdts   int
	vwc    uint8
	kato   time.Duration

	dials, resets, anaReads int
	ops                     map[wire.Opcode]int
	ctl                     *fakeController
}

// fakeController is one connection to a fakePort, with the methods of a Controller.
type fakeController struct {
	port *fakePort
	cfg  Config

	mu      sync.Mutex
	state   State
	queued  []*Command
	flying  map[*Command]*time.Timer
	gone    time.Duration // after which what was sent is not carried out any more, if the connection is lost
	spare   []*Command
	silence bool // no command is answered
	made    uint64
	why     error  // it is not live
	cause   error  // of what cut ends; nil: none in particular
	pause   func() // called once, before the next command is started
}

func newFakeTarget(t *testing.T, addrs ...string) *fakeTarget {
	f := &fakeTarget{t: t, spaces: map[uint32]*fakeSpace{1: newFakeSpace(1, 4096, 1)}, ports: map[string]*fakePort{}}
	for _, addr := range addrs {
		f.ports[addr] = &fakePort{target: f, addr: addr, latency: time.Millisecond, ana: map[uint32]wire.ANAState{1: wire.ANAOptimized, 2: wire.ANAOptimized}, mdts: 1 << 20,
			ops: map[wire.Opcode]int{}}
	}
	return f
}

// resets is how often a controller was reset.
func (f *fakeTarget) resets(addr string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports[addr].resets
}

func (f *fakeTarget) anaReads(addr string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports[addr].anaReads
}

// set changes a port under the lock.
func (f *fakeTarget) set(addr string, change func(p *fakePort)) *fakePort {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.ports[addr]
	change(p)
	return p
}

func (f *fakeTarget) dial(_ context.Context, cfg Config) (controller, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.ports[cfg.Addr]
	p.dials++
	if p.refuse != nil {
		return nil, p.refuse
	}
	p.ctl = &fakeController{port: p, cfg: cfg, flying: map[*Command]*time.Timer{}, gone: 10 * time.Second, made: 1}
	return p.ctl, nil
}

// open makes a Subsystem of all ports.
func (f *fakeTarget) open(change func(*SubsystemConfig)) (*Subsystem, error) {
	cfg := SubsystemConfig{
		Controller: Config{SubsysNQN: testNQN, HostNQN: hostNQN, HostID: [16]byte{1}, Log: slog.New(slog.NewTextHandler(f.t.Output(), nil))},
		Addrs:      slices.Sorted(maps.Keys(f.ports)),
	}
	if change != nil {
		change(&cfg)
	}
	return open(f.t.Context(), cfg, f.dial)
}

// use opens the subsystem and its namespace 1.
func (f *fakeTarget) use(change func(*SubsystemConfig)) (*Subsystem, *Namespace) {
	f.t.Helper()
	s, err := f.open(change)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { s.Close() })
	n, err := s.Namespace(1)
	if err != nil {
		f.t.Fatal(err)
	}
	return s, n
}

func (c *fakeController) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

func (c *fakeController) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

func (c *fakeController) become(s State) {
	c.mu.Lock()
	c.state = s
	c.mu.Unlock()
	c.cfg.OnState(s)
}

func (c *fakeController) Info() *Info {
	c.mu.Lock()
	i := &Info{Association: c.made}
	c.mu.Unlock()
	i.Controller.OAES = wire.EventsNamespaces | wire.EventsANA
	i.Controller.ANATT = testANATT
	i.Controller.ONCS = wire.ONCSReservations
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	i.Controller.VWC, i.KATO = c.port.vwc, c.port.kato
	if c.port.ana != nil {
		i.Controller.CMIC = wire.CMICANA
	}
	return i
}

func (c *fakeController) Limits() Limits {
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	return Limits{MaxTransfer: c.port.mdts, MaxBlocks: 65536}
}

func (c *fakeController) lost(sent bool) error {
	e := &PathError{Addr: c.cfg.Addr, NQN: c.cfg.SubsysNQN, State: c.state, Sent: sent, Err: cmp.Or(c.cause, errors.New("cut"))}
	if sent {
		e.Gone = time.Now().Add(c.gone)
	}
	return e
}

func (c *fakeController) Start(cmd *Command) {
	cmd.Status, cmd.Result, cmd.Err = 0, 0, nil
	if c.pause != nil {
		pause := c.pause
		c.pause = nil
		pause()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != StateLive || cmd.Association != 0 && cmd.Association != c.made {
		cmd.Err = c.lost(false)
		if c.state == StateDead {
			cmd.Err = ErrClosed
		}
		go cmd.Done(cmd)
		return
	}
	c.queued = append(c.queued, cmd)
}

func (c *fakeController) Flush() {
	t := c.port.target
	t.mu.Lock()
	latency := c.port.latency
	t.mu.Unlock()
	c.mu.Lock()
	batch := c.queued
	c.queued, c.spare = c.spare, nil
	if latency > 0 {
		for _, cmd := range batch {
			c.flying[cmd] = time.AfterFunc(latency, func() { c.end(cmd) })
		}
	}
	c.mu.Unlock()
	if latency == 0 {
		for _, cmd := range batch {
			cmd.Err, _ = c.carryOut(cmd, cmd.Data)
			cmd.Done(cmd)
		}
	}
	clear(batch)
	c.mu.Lock()
	c.spare = batch[:0]
	c.mu.Unlock()
}

// end carries a command out and answers it, if it is still there.
func (c *fakeController) end(cmd *Command) {
	c.mu.Lock()
	_, ok := c.flying[cmd]
	if !ok || c.silence {
		c.mu.Unlock()
		return
	}
	err, answered := c.carryOut(cmd, cmd.Data) // with mu held, as Detach waits for that
	if !answered {
		c.flying[cmd] = nil
		c.mu.Unlock()
		return
	}
	delete(c.flying, cmd)
	c.mu.Unlock()
	if cmd.Err = err; err != nil {
		if e, ok := errors.AsType[*StatusError](err); ok {
			cmd.Status = e.Status
		}
	}
	cmd.Done(cmd)
}

func testStatus(s wire.Status, dnr bool) *StatusError {
	return &StatusError{CommandError: &wire.CommandError{Name: "Read", Set: wire.SetIO, Status: s, DNR: dnr}}
}

// carryOut does what cmd says.
func (c *fakeController) carryOut(cmd *Command, data []byte) (error, bool) {
	p := c.port
	t := p.target
	t.mu.Lock()
	defer t.mu.Unlock()
	p.ops[cmd.Op]++
	if p.answer != nil {
		if err, ok := p.answer(cmd); err != nil || !ok {
			return err, ok
		}
	}
	f := p.all()[cmd.NSID]
	if f == nil {
		return testStatus(wire.StatusInvalidNamespace, true), true
	}
	if s := p.ana[f.ns.ANAGRPID].Status(); s != wire.StatusSuccess {
		return testStatus(s, false), true
	}
	from, to := cmd.SLBA*fakeBlock, (cmd.SLBA+uint64(cmd.Blocks))*fakeBlock
	if to > uint64(len(f.data)) {
		return testStatus(wire.StatusLBARange, true), true
	}
	switch cmd.Op {
	case wire.OpRead:
		copy(data, f.data[from:to])
	case wire.OpWrite:
		copy(f.data[from:to], data)
	}
	return nil, true
}

// all is the namespaces that the port has. fakeTarget.mu is held.
func (p *fakePort) all() map[uint32]*fakeSpace {
	if p.spaces != nil {
		return p.spaces
	}
	return p.target.spaces
}

func (c *fakeController) Detach(cmd *Command) {
	c.mu.Lock()
	at := slices.Index(c.queued, cmd)
	_, flying := c.flying[cmd]
	if at < 0 && !flying {
		c.mu.Unlock()
		return
	}
	if cmd.modifies() {
		cmd.Data = bytes.Clone(cmd.Data)
		c.mu.Unlock()
		return
	}
	if at >= 0 {
		c.queued = slices.Delete(c.queued, at, at+1)
	}
	delete(c.flying, cmd)
	c.mu.Unlock()
	cmd.Err = context.Canceled
	cmd.Done(cmd)
}

// cut ends the association. What is flying was sent; whether a write is carried out, now or shortly before it counts as gone, is for late
// to say.
func (c *fakeController) cut(late func(w *Command) (after time.Duration, lands bool)) {
	c.become(StateResetting)
	c.mu.Lock()
	var ended []*Command
	for _, cmd := range c.queued {
		cmd.Err = c.lost(false)
		ended = append(ended, cmd)
	}
	c.queued = nil
	for cmd, timer := range c.flying {
		if timer != nil {
			timer.Stop()
		}
		cmd.Err = c.lost(true)
		ended = append(ended, cmd)
		if late == nil || cmd.Op != wire.OpWrite {
			continue
		}
		if after, lands := late(cmd); lands {
			shadow := &Command{Op: cmd.Op, NSID: cmd.NSID, SLBA: cmd.SLBA, Blocks: cmd.Blocks}
			data := bytes.Clone(cmd.Data)
			time.AfterFunc(min(after, c.gone-time.Nanosecond), func() { c.carryOut(shadow, data) })
		}
	}
	clear(c.flying)
	c.mu.Unlock()
	for _, cmd := range ended {
		cmd.Done(cmd)
	}
	c.become(StateConnecting)
}

// back makes a new association.
func (c *fakeController) back() {
	c.mu.Lock()
	c.silence = false
	c.made++
	c.mu.Unlock()
	c.become(StateLive)
}

// event tells the host of something.
func (p *fakePort) event(e wire.AsyncEvent) {
	p.target.mu.Lock()
	c := p.ctl
	p.target.mu.Unlock()
	if c.State() == StateLive {
		c.cfg.OnEvent(e)
	}
}

// setANA changes a group's state and says so.
func (p *fakePort) setANA(group uint32, s wire.ANAState) {
	p.target.mu.Lock()
	p.ana[group] = s
	p.change++
	p.target.mu.Unlock()
	p.event(wire.EventANAChanged)
}

func (c *fakeController) Reset(string) {
	c.port.target.mu.Lock()
	c.port.resets++
	c.port.target.mu.Unlock()
	c.cut(nil)
	c.back()
}

func (c *fakeController) Close() error {
	if c.State() == StateDead {
		return nil
	}
	c.become(StateDead)
	c.mu.Lock()
	ended := slices.Concat(c.queued, slices.Collect(maps.Keys(c.flying)))
	c.queued = nil
	clear(c.flying)
	c.mu.Unlock()
	for _, cmd := range ended {
		cmd.Err = ErrClosed
		cmd.Done(cmd)
	}
	return nil
}

// ask is what every admin command does at first.
func (c *fakeController) ask(what string, nsid uint32) error {
	if c.State() != StateLive {
		return c.lost(false)
	}
	c.port.target.mu.Lock()
	admin := c.port.admin
	c.port.target.mu.Unlock()
	if admin != nil {
		return admin(what, nsid)
	}
	return nil
}

func (c *fakeController) ActiveNamespaces(context.Context) ([]uint32, error) {
	if err := c.ask("active", 0); err != nil {
		return nil, err
	}
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	return slices.Sorted(maps.Keys(c.port.all())), nil
}

func (c *fakeController) IdentifyNamespace(_ context.Context, nsid uint32) (*wire.Namespace, error) {
	if err := c.ask("namespace", nsid); err != nil {
		return nil, err
	}
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	if f := c.port.all()[nsid]; f != nil {
		ns := f.ns
		return &ns, nil
	}
	return new(wire.Namespace), nil
}

func (c *fakeController) NamespaceDescriptors(_ context.Context, nsid uint32) (*wire.Descriptors, error) {
	if err := c.ask("descriptors", nsid); err != nil {
		return nil, err
	}
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	if f := c.port.all()[nsid]; f != nil {
		ids := f.ids
		return &ids, nil
	}
	return nil, testStatus(wire.StatusInvalidNamespace, true)
}

func (c *fakeController) GetLogPage(_ context.Context, get wire.GetLogPage, b []byte) error {
	if err := c.ask("log", uint32(get.ID)); err != nil {
		return err
	}
	c.port.target.mu.Lock()
	defer c.port.target.mu.Unlock()
	p := c.port
	clear(b)
	if get.ID != wire.LogANA {
		return nil
	}
	p.anaReads++
	log := p.anaLog()
	if get.Offset < uint64(len(log)) {
		copy(b, log[get.Offset:])
	}
	if p.moves > 0 {
		p.moves--
		p.change++
	}
	return nil
}

func (p *fakePort) anaLog() []byte {
	log := wire.ANAHeader{ChangeCount: p.change, Groups: uint16(len(p.ana))}.Append(nil)
	for _, group := range slices.Sorted(maps.Keys(p.ana)) {
		var nsids []uint32
		for _, nsid := range slices.Sorted(maps.Keys(p.all())) {
			if p.all()[nsid].ns.ANAGRPID == group {
				nsids = append(nsids, nsid)
			}
		}
		log = wire.AppendANAGroup(log, wire.ANAGroup{ID: group, ChangeCount: p.change, State: p.ana[group]}, nsids)
	}
	return log
}

// testRequest is a Request that tells when it has ended.
type testRequest struct {
	Request
	ended chan struct{}
}

func newRequest(op wire.Opcode, slba uint64, data []byte) *testRequest {
	r := &testRequest{ended: make(chan struct{})}
	r.Command = Command{Op: op, SLBA: slba, Blocks: uint32(len(data) / fakeBlock), Data: data}
	r.Request.Done = func(*Request) { close(r.ended) }
	return r
}

// start starts it on n and flushes.
func (r *testRequest) start(n *Namespace) *testRequest {
	n.Start(&r.Request)
	n.Flush()
	return r
}

func (r *testRequest) over() bool {
	select {
	case <-r.ended:
		return true
	default:
		return false
	}
}

func (r *testRequest) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-r.ended:
	case <-time.After(24 * time.Hour): // of the bubble's time
		t.Fatal("a request does not end")
	}
	return r.Err
}

// blocksOf is n blocks that tell their number and a generation.
func blocksOf(slba uint64, n int, generation int) []byte {
	b := make([]byte, n*fakeBlock)
	for i := range n {
		s := fmt.Sprintf("block %d generation %d;", slba+uint64(i), generation)
		for at := i * fakeBlock; at < (i+1)*fakeBlock; at += copy(b[at:(i+1)*fakeBlock], s) {
		}
	}
	return b
}
