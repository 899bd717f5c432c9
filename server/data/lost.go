package data

import (
	"crypto/tls"
	"time"

	"github.com/weftfs/weft/internal/wire/conns"
	"github.com/weftfs/weft/internal/wire/oncrpc"
)

// endTime is for how long an END waits for what lost connections still carry before the client is told to ask again, a
// time in which its connections are not taken for dead.
const endTime = 400 * time.Millisecond

// join names c. It reports false if c has a name already, or the name belongs to no connection.
func (s *Server) join(c *conn, name conns.Name) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.name.Number != 0 || name.Number == 0 {
		return false
	}
	c.name = name
	return true
}

// cut closes c's socket; unlike the Close of a TLS connection it does not wait until the client has been told. s.mu is
// held.
func (c *conn) cut() {
	nc := c.nc
	if tc, ok := nc.(*tls.Conn); ok {
		nc = tc.NetConn()
	}
	nc.Close()
}

// endLost ends the connections of a name and reports whether nothing that came by them is carried out any more. What a
// connection has read and not begun is dropped, since c.lost is looked at before anything begins; what has begun is
// waited for, as it is part of the connection's end.
func (s *Server) endLost(name *conns.Name) bool {
	var lost []*conn
	s.mu.Lock()
	for c := range s.conns {
		if name.Covers(c.name) {
			c.lost.Store(true)
			c.cut()
			lost = append(lost, c)
		}
	}
	s.mu.Unlock()
	late := time.NewTimer(endTime)
	defer late.Stop()
	for _, c := range lost {
		select {
		case <-c.gone:
		case <-late.C:
			return false
		}
	}
	return true
}

// announceStop tells a client of weft's own, behind the last reply, that the server stops as planned. serve calls it when
// nothing else is sent any more.
func (c *conn) announceStop() {
	c.s.mu.Lock()
	joined := c.name.Number != 0
	c.s.mu.Unlock()
	if !joined {
		return
	}
	call := oncrpc.Call{Prog: conns.Program, Vers: conns.Version, Proc: uint32(conns.ProcStop)}
	b := call.Append(make([]byte, oncrpc.RecordMarkSize))
	oncrpc.PutRecordMark(b, len(b)-oncrpc.RecordMarkSize, true)
	c.nc.SetWriteDeadline(time.Now().Add(lingerTime))
	c.nc.Write(b) // to a client that does not take it the server has died
}

// connections runs a procedure of the program of package conns.
func (c *conn) connections(r *request, reply *oncrpc.Reply) {
	var res results
	var name conns.Name
	proc := conns.Proc(r.call.Proc)
	switch err := name.Decode(&r.args); {
	case proc > conns.ProcEnd:
		reply.Stat = oncrpc.ProcUnavail
	case err != nil:
		reply.Stat = oncrpc.GarbageArgs
	case proc == conns.ProcEnd:
		res = &conns.EndRes{Ended: c.s.endLost(&name)}
	case !c.s.join(c, name):
		reply.Stat = oncrpc.GarbageArgs
	}
	r.finish(reply, res)
}
