package nvme

import (
	"context"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// tryHost is a host that does not mind losing its controller. It returns how many commands were answered.
func tryHost(addr string, id byte, rnd *rand.Rand) (done int) {
	var conns []net.Conn
	defer func() {
		for _, nc := range conns {
			nc.Close()
		}
	}()
	queue := func(c wire.Connect, cntl uint16) (*hostQueue, uint16) {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			return nil, 0
		}
		conns = append(conns, nc)
		nc.SetDeadline(time.Now().Add(30 * time.Second))
		q := &hostQueue{nc: nc, rx: wire.Receiver{Role: wire.Host, MaxData: 1 << 24}}
		nc.Write((&wire.ICReq{MaxR2T: 1}).Append(nil))
		if _, err := q.tryRecv(); err != nil {
			return nil, 0
		}
		d := wire.ConnectData{HostID: wire.HostID{id}, CntlID: cntl, SubsysNQN: testNQN, HostNQN: hostNQN}
		comp, ok := q.try(c.Command(), d.Append(nil))
		if !ok || comp.Status != wire.StatusSuccess {
			return nil, 0
		}
		return q, wire.DecodeConnectResult(comp.DW0()).CntlID
	}
	admin, cntl := queue(wire.Connect{QueueSize: 32, KATO: 5 * time.Second}, wire.CntlIDAny)
	if admin == nil {
		return 0
	}
	cc := wire.DefaultConfiguration()
	cc.Enable = true
	admin.try(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil)
	admin.try(wire.Feature{ID: wire.FeatureEvents, Value: uint32(wire.EventsANA | wire.EventsNamespaces)}.Set(wire.NoSGL()), nil)
	q, _ := queue(wire.Connect{QID: 1, QueueSize: 32, NoSQFlow: true}, cntl)
	if q == nil {
		return 0
	}
	cmd := wire.CapsuleCmd{Command: wire.AsyncEventRequest()}
	cmd.Command.CID = 0xFFFF
	admin.nc.Write(cmd.Append(nil, admin.framing))
	for range 50 + rnd.IntN(200) {
		nsid, slba := 1+rnd.Uint32N(3), rnd.Uint64N(1000)
		ok := true
		switch rnd.IntN(6) {
		case 0:
			_, ok = q.try(write(nsid, slba, 8, wire.CapsuleSGL(4096)), make([]byte, 4096))
		case 1:
			_, ok = q.try(flushCommand(nsid), nil)
		case 2:
			a := wire.ReservationRegister{NSID: nsid, New: 1}
			_, ok = q.try(a.Command(true), a.AppendData(nil))
		case 3:
			a := wire.ReservationRelease{NSID: nsid, Action: wire.Clear, Current: 1}
			_, ok = q.try(a.Command(true), a.AppendData(nil))
		default:
			_, ok = q.try(read(nsid, slba, 1+rnd.Uint32N(256), 512), nil)
		}
		if !ok {
			return done
		}
		done++
	}
	return done
}

// try does a command and reports whether it was answered.
func (q *hostQueue) try(cmd wire.Command, in []byte) (wire.Completion, bool) {
	q.cid++
	cmd.CID = q.cid
	c := wire.CapsuleCmd{Command: cmd, Length: uint32(len(in))}
	if _, err := q.nc.Write(append(c.Append(nil, q.framing), in...)); err != nil {
		return wire.Completion{}, false
	}
	for {
		p, err := q.tryRecv()
		if err != nil {
			return wire.Completion{}, false
		}
		if p.Type == wire.PDUC2HData && p.Flags&wire.FlagSuccess != 0 {
			return wire.Completion{}, true
		}
		if p.Type == wire.PDUCapsuleResp {
			var r wire.CapsuleResp
			r.Decode(p.Header, p.head)
			if r.Completion.CID == q.cid {
				return r.Completion, true
			}
		}
	}
}

// TestChurn has hosts come, work and go while everything that can change does, and looks whether anything is left in the end.
func TestChurn(t *testing.T) {
	before := runtime.NumGoroutine()
	dir := ramDir(t)
	tgt, err := New(testConfig(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	extra := backingFile(t, dir, 1<<20)
	defer extra.Close()
	var wg sync.WaitGroup
	var stop atomic.Bool
	var done atomic.Int64
	for id := range byte(6) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(id), 1))
			for !stop.Load() {
				done.Add(int64(tryHost(tgt.Addr(1+uint16(id%2)), id, rnd)))
			}
		})
	}
	rnd := rand.New(rand.NewPCG(7, 7))
	states := []wire.ANAState{wire.ANAOptimized, wire.ANANonOptimized, wire.ANAInaccessible, wire.ANAChange}
	for i := 0; i < 300 || done.Load() < 2000; i++ {
		var err error
		switch rnd.IntN(8) {
		case 0:
			if err = tgt.control().AddNamespace(testNQN, Namespace{NSID: 3, Backing: extra, BlockSize: 512, UUID: [16]byte{3}}); err == nil {
				time.Sleep(time.Millisecond)
				err = tgt.control().RemoveNamespace(testNQN, 3)
			}
		case 1:
			err = tgt.control().DropControllers(testNQN, hostNQN)
		case 2:
			if err = tgt.control().PortDown(2); err == nil {
				err = tgt.control().PortUp(2)
			}
		case 3:
			if err = tgt.control().DisallowHost(testNQN, hostNQN); err == nil {
				err = tgt.control().AllowHost(testNQN, Host{NQN: hostNQN})
			}
		default:
			err = tgt.control().SetANA(1+uint16(rnd.IntN(2)), 1+rnd.Uint32N(2), states[rnd.IntN(len(states))])
		}
		if err != nil {
			t.Error(err)
		}
		time.Sleep(3 * time.Millisecond)
	}
	stop.Store(true)
	wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := tgt.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if n := tgt.payloads.Load(); n != 0 {
		t.Errorf("%d bytes of payload are left", n)
	}
	waittest.Until(t, "all goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}
