package metaclient

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// service is a metadata service that follows the protocol's rules for sessions and slots, executes calls by a script,
// and can be made to hang up at any point.
type service struct {
	t      *testing.T
	ctx    context.Context // ends with the test; handlers that block watch it
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	lease  time.Duration
	slots  int

	// handle executes a call. nil answers everything with a zero result.
	handle func(op metarpc.Op, args any) (metarpc.Status, any)
	// cut says whether to hang up at a point: "received" (before execution), "executed" (before the reply), "replied".
	cut func(point string, op metarpc.Op) bool
	// welcome may change the answer to a hello, or with false hang up instead.
	welcome func(nc net.Conn, w *metarpc.Welcome) bool
	// early runs before a call is executed or recorded; a status other than StatusOK is the reply.
	early func(op metarpc.Op) metarpc.Status

	mu       sync.Mutex
	speaks   metarpc.Versions
	volume   [16]byte
	instance [16]byte
	sessions map[metarpc.SessionID]*serviceSession
	conns    map[net.Conn]bool
	calls    []metarpc.Op  // executed, in order
	frames   []time.Time   // when calls and answers came
	backs    chan backSeen // answers to callbacks
	hellos   int
}

type backSeen struct {
	metarpc.BackReply
	nc net.Conn
}

type serviceSession struct {
	slots map[int]*serviceSlot
}

type serviceSlot struct {
	idle     chan struct{} // has a token unless a call executes; testing/synctest does not see through a mutex
	sequence uint64
	frame    []byte
}

func newService(t *testing.T) *service {
	s := &service{
		t: t, lease: 30 * time.Second, slots: 16, speaks: metarpc.Spoken, volume: [16]byte{0xf5}, instance: [16]byte{1},
		sessions: map[metarpc.SessionID]*serviceSession{}, conns: map[net.Conn]bool{}, backs: make(chan backSeen, 100),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	t.Cleanup(s.stop)
	return s
}

// stop ends everything the service does.
func (s *service) stop() {
	s.cancel()
	s.hangUp()
	s.tasks.Wait()
}

// hangUp closes all connections.
func (s *service) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for nc := range s.conns {
		nc.Close()
	}
}

// forget ends all sessions, as when their leases have run out.
func (s *service) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.sessions)
}

func (s *service) executed(op metarpc.Op) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, o := range s.calls {
		if o == op {
			n++
		}
	}
	return n
}

// listen serves a real socket and returns its address.
func (s *service) listen() string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			s.accept(nc)
		}
	}()
	return ln.Addr().String()
}

// dial connects to the service through a pipe, which testing/synctest can follow.
func (s *service) dial(ctx context.Context, addr string) (net.Conn, error) {
	client, server := net.Pipe()
	s.accept(&manyWriters{server, make(chan struct{}, 1)})
	return client, nil
}

// manyWriters is an end of a pipe that several goroutines may write to: they wait for each other where
// testing/synctest can follow, which is not so of the mutex of the pipe.
type manyWriters struct {
	net.Conn
	turn chan struct{}
}

func (c *manyWriters) Write(b []byte) (int, error) {
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	return c.Conn.Write(b)
}

func (s *service) accept(nc net.Conn) {
	s.run(nc, func() error {
		r := bufio.NewReader(nc)
		frame, err := metarpc.ReadFrame(r, nil, metarpc.MaxHello)
		if err != nil {
			return err
		}
		s.mu.Lock()
		speaks := s.speaks
		s.mu.Unlock()
		hello, err := metarpc.ParseHello(frame, speaks)
		if err != nil {
			return err
		}
		return s.serve(nc, r, hello)
	})
}

// run runs what serves a connection, until the service ends.
func (s *service) run(nc net.Conn, serve func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		nc.Close()
		return
	}
	s.conns[nc] = true
	s.tasks.Go(func() {
		err := serve()
		nc.Close()
		s.mu.Lock()
		delete(s.conns, nc)
		s.mu.Unlock()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe) &&
			!errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.ErrUnexpectedEOF) {
			s.t.Errorf("service: %v", err)
		}
	})
}

func (s *service) serve(nc net.Conn, r *bufio.Reader, hello *metarpc.Hello) error {
	s.mu.Lock()
	s.hellos++
	version, ok := s.speaks.Choose(hello.Versions())
	if !ok {
		s.t.Errorf("a client of %v comes to a service of %v", hello.Versions(), s.speaks)
	}
	w := &metarpc.Welcome{
		Magic: metarpc.Magic, Version: version, Session: hello.Session, Volume: s.volume, Instance: s.instance,
		Slots: s.slots, Lease: int64(s.lease),
	}
	if w.Session == (metarpc.SessionID{}) {
		rand.Read(w.Session[:])
		s.sessions[w.Session] = &serviceSession{slots: map[int]*serviceSlot{}}
	}
	sess := s.sessions[w.Session]
	if sess == nil {
		w.Status, w.Message = metarpc.StatusBadSession, "there is no such session"
	}
	s.mu.Unlock()
	if s.welcome != nil && !s.welcome(nc, w) {
		return nil
	}
	b, err := metarpc.AppendWelcome(nil, w)
	if err != nil {
		return err
	}
	if _, err := nc.Write(b); err != nil || w.Status != metarpc.StatusOK {
		return err
	}
	for {
		frame, err := metarpc.ReadFrame(r, nil, metarpc.MaxFrame)
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.frames = append(s.frames, time.Now())
		s.mu.Unlock()
		switch kind, _ := metarpc.FrameKind(frame); kind {
		case metarpc.KindCall:
			h, args, err := metarpc.ParseCall(frame, version)
			if err != nil {
				return err
			}
			s.tasks.Go(func() { s.call(nc, version, sess, h, args) })
		case metarpc.KindBackReply:
			back, err := metarpc.ParseBackReply(frame)
			if err != nil {
				return err
			}
			s.backs <- backSeen{back, nc}
		default:
			return fmt.Errorf("frame of kind %d", kind)
		}
	}
}

// call applies the slot rule to a call and replies.
func (s *service) call(nc net.Conn, version uint32, sess *serviceSession, h metarpc.CallHeader, args any) {
	hangUp := func(point string) bool {
		if s.cut != nil && s.cut(point, h.Op) {
			nc.Close()
			return true
		}
		return false
	}
	if hangUp("received") {
		return
	}
	if s.early != nil {
		if status := s.early(h.Op); status != metarpc.StatusOK {
			s.reply(nc, h, status, nil)
			return
		}
	}
	s.mu.Lock()
	sl := sess.slots[h.Slot]
	if sl == nil {
		sl = &serviceSlot{idle: make(chan struct{}, 1)}
		sl.idle <- struct{}{}
		sess.slots[h.Slot] = sl
	}
	s.mu.Unlock()
	<-sl.idle
	defer func() { sl.idle <- struct{}{} }()
	switch {
	case h.Sequence == sl.sequence:
		nc.Write(sl.frame)
		return
	case h.Sequence != sl.sequence+1:
		s.t.Errorf("slot %d: sequence %d after %d", h.Slot, h.Sequence, sl.sequence)
		s.reply(nc, h, metarpc.StatusBadSequence, nil)
		return
	}
	s.mu.Lock()
	s.calls = append(s.calls, h.Op)
	s.mu.Unlock()
	status, result := metarpc.StatusOK, h.Op.NewResult()
	if s.handle != nil {
		status, result = s.handle(h.Op, args)
	}
	if result == nil && status == metarpc.StatusOK {
		result = h.Op.NewResult()
	}
	sl.sequence = h.Sequence
	b, err := metarpc.AppendReply(nil, version, metarpc.ReplyHeader{Slot: h.Slot, Sequence: h.Sequence, Status: status}, result)
	if err != nil {
		s.t.Error(err)
	}
	sl.frame = b
	if hangUp("executed") {
		return
	}
	nc.Write(b)
	hangUp("replied")
}

func (s *service) reply(nc net.Conn, h metarpc.CallHeader, status metarpc.Status, result any) {
	b, err := metarpc.AppendReply(nil, metarpc.Version, metarpc.ReplyHeader{Slot: h.Slot, Sequence: h.Sequence, Status: status}, result)
	if err != nil {
		s.t.Error(err)
	}
	nc.Write(b)
}

// recall calls every client back.
func (s *service) recall(number uint64, id layout.FileID, off, n int64) {
	b, err := metarpc.AppendCallBack(nil, metarpc.Version, metarpc.BackHeader{Number: number, Op: metarpc.BackLayoutRecall},
		&metarpc.LayoutRecallArgs{ID: id, Off: off, Len: n})
	if err != nil {
		s.t.Fatal(err)
	}
	s.send(b)
}

// send writes bytes to every client.
func (s *service) send(b []byte) {
	s.mu.Lock()
	var conns []net.Conn
	for nc := range s.conns {
		conns = append(conns, nc)
	}
	s.mu.Unlock()
	for _, nc := range conns {
		nc.Write(b)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// connected starts a client of s over pipes and closes it, and what serves it, at the end of the test.
func connected(t *testing.T, s *service, cfg Config) *Client {
	t.Helper()
	cfg.Addrs, cfg.Log = []string{"service:7049"}, quiet()
	v, err := start(context.Background(), cfg, s.dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		v.Close(ctx)
		s.stop()
	})
	return only(v)
}

// only is the one session of a volume with one shard.
func only(v *Volume) *Client { return v.clients[0].Load() }
