package data

import (
	"bytes"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/internal/wire/conns"
	wire "github.com/weftfs/weft/internal/wire/nfs3"
	"github.com/weftfs/weft/internal/wire/oncrpc"
	"github.com/weftfs/weft/internal/wire/oncrpc/oncrpctest"
)

var someClient = conns.Client{1, 2, 3}

func (c *client) connections(proc conns.Proc, name conns.Name, res *conns.EndRes) error {
	call := oncrpc.Call{Prog: conns.Program, Vers: conns.Version, Proc: uint32(proc)}
	w := c.send(call, name.Append(nil))
	if res == nil {
		_, err := finish(w, nil)
		return err
	}
	_, err := finish(w, res)
	return err
}

func (c *client) join(number uint64) {
	c.t.Helper()
	if err := c.connections(conns.ProcJoin, conns.Name{Client: someClient, Number: number}, nil); err != nil {
		c.t.Fatalf("JOIN: %v", err)
	}
}

func (c *client) endLost(number uint64) bool {
	c.t.Helper()
	var res conns.EndRes
	if err := c.connections(conns.ProcEnd, conns.Name{Client: someClient, Number: number}, &res); err != nil {
		c.t.Fatalf("END: %v", err)
	}
	return res.Ended
}

// TestOriginal: when a client has ended a connection that it has lost, the WRITEs that this one carried have been
// carried out, or never are: those that had begun, those that had been read, and those in the socket.
func TestOriginal(t *testing.T) {
	ts := start(t, "")
	a, b, other := ts.dial(), ts.dial(), ts.dial()
	a.join(1)
	b.join(2)
	other.join(3)
	fh := a.create(ts.root, "f", 1, 1)

	f, err := ts.get(fh)
	if err != nil {
		t.Fatal(err)
	}
	defer ts.cache.put(f)
	f.mu.Lock() // stands for a disk that does not answer
	const sent = maxRequests + 100
	for i := range sent {
		w := writeCall{wire.WriteArgs{FH: fh, Offset: uint64(i)}, []byte{'o'}}
		a.send(nfsCall(wire.ProcWrite, super), w.Append(nil))
	}
	waittest.Until(t, "as many WRITEs have begun as may", func() bool { return ts.refs(f) == 1+maxRequests })
	a.nc.Close()

	if b.endLost(1) {
		t.Fatal("END says that nothing is carried out any more, while WRITEs are")
	}
	if ts.refs(f) != 1+maxRequests {
		t.Error("a WRITE has ended")
	}
	f.mu.Unlock()
	for !b.endLost(1) {
	}
	if n := ts.refs(f); n != 1 {
		t.Errorf("%d WRITEs are carried out after END", n-1)
	}
	if size := b.getattr(fh).Attr.Size; size > maxRequests {
		t.Errorf("the file has %d bytes: WRITEs that had not begun were carried out after the client asked for their end", size)
	}
	new := []byte("new")
	b.put(fh, 0, new)
	other.check(fh, 0, new) // it is still there
}

// TestOriginalNames: what has no name, or another one, is not ended.
func TestOriginalNames(t *testing.T) {
	ts := start(t, "")
	a, b, c, d := ts.dial(), ts.dial(), ts.dial(), ts.dial()
	a.join(1)
	b.join(2)
	for _, name := range []conns.Name{{Client: someClient, Number: 4}, {Client: conns.Client{4}, Number: 1}, {Client: conns.Client{4}}} {
		var res conns.EndRes
		if err := c.connections(conns.ProcEnd, name, &res); err != nil || !res.Ended {
			t.Errorf("END of %v, which nobody has: %v, %v", name, res.Ended, err)
		}
	}
	for _, name := range []conns.Name{{Client: someClient, Number: 9}, {Client: someClient}} {
		var refused *oncrpc.Error
		if err := a.connections(conns.ProcJoin, name, nil); !errors.As(err, &refused) || refused.Stat != oncrpc.GarbageArgs {
			t.Errorf("second JOIN, of %v: %v", name, err)
		}
	}
	if err := d.connections(conns.ProcJoin, conns.Name{Client: someClient}, nil); err == nil {
		t.Error("JOIN with number 0 is taken")
	}
	a.getattr(ts.root)
	if !c.endLost(1) {
		t.Error("a connection with nothing to do does not end")
	}
	if _, err := finish(a.send(nfsCall(wire.ProcGetattr, super), ts.root.Append(nil)), nil); !errors.Is(err, errLost) {
		t.Errorf("call on a connection that was ended: %v", err)
	}
	b.getattr(ts.root)
	if !c.endLost(0) {
		t.Error("the connections of a client do not end")
	}
	if _, err := finish(b.send(nfsCall(wire.ProcGetattr, super), ts.root.Append(nil)), nil); !errors.Is(err, errLost) {
		t.Errorf("call on a connection of a client all of whose connections were ended: %v", err)
	}
	d.getattr(ts.root) // it has no name
}

// TestAnnouncedStop: Shutdown tells the clients that have joined, and no others, behind what it has answered.
func TestAnnouncedStop(t *testing.T) {
	ts := start(t, "")
	call := func(proc conns.Proc) oncrpc.Call {
		return oncrpc.Call{Prog: conns.Program, Vers: conns.Version, Proc: uint32(proc)}
	}
	dial := func(first []byte) net.Conn {
		nc := ts.dialRaw()
		nc.Write(first)
		if _, err := readRecord(nc); err != nil {
			t.Fatal(err)
		}
		return nc
	}
	name := conns.Name{Client: someClient, Number: 1}
	joined, other := dial(marked(call(conns.ProcJoin), name.Append(nil))), dial(marked(nfsCall(wire.ProcNull, super), nil))
	stop := rawCall(0, call(conns.ProcStop), nil)
	stopped := make(chan struct{})
	go func() { // ends when the clients have seen the end
		defer close(stopped)
		ts.stop()
	}()
	for _, tt := range []struct {
		nc   net.Conn
		want []byte
	}{
		{joined, append(oncrpctest.AppendRecordMark(nil, len(stop), true), stop...)},
		{other, nil},
	} {
		got, err := io.ReadAll(tt.nc)
		if err != nil || !bytes.Equal(got, tt.want) {
			t.Errorf("the last word is %x, %v; want %x", got, err, tt.want)
		}
		tt.nc.Close()
	}
	<-stopped
	// A server that is there no more refuses connections.
	if nc, err := net.Dial("tcp", ts.addr); !errors.Is(err, syscall.ECONNREFUSED) {
		if nc != nil {
			nc.Close()
		}
		t.Errorf("afterwards: %v", err)
	}
}
