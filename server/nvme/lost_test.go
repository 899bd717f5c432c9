package nvme

import (
	"bytes"
	"net"
	"sync"
	"testing"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"

	"github.com/weftfs/weft/internal/waittest"
)

// TestOriginal: a host that has lost an association is connected again when the Writes of the old one were done, or never
// will be: those that had begun, and those that are in the socket. The target has not noticed the loss by itself.
func TestOriginal(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	old := newHost(t, tgt.Addr(1), hostOptions{})
	q := old.queue(1, 64)
	ns := tgt.subsystems[testNQN].table.Load().get(1)
	var lost []*conn
	tgt.mu.Lock()
	for c := range tgt.conns {
		lost = append(lost, c)
	}
	tgt.mu.Unlock()

	ns.mu.Lock() // stands for a disk that does not answer
	answer := sync.OnceFunc(ns.mu.Unlock)
	defer answer()
	const blocks = 32
	for i := range uint64(blocks) {
		q.send(write(1, i, 1, wire.CapsuleSGL(512)), bytes.Repeat([]byte("older..."), 512/8))
	}
	q.nc.(*net.TCPConn).SetLinger(0) // so that what is not sent never is, as hosts do
	q.nc.Close()                     // the host has lost it; its admin queue is still there

	connected := make(chan *testHost, 1)
	go func() { connected <- newHost(t, tgt.Addr(1), hostOptions{}) }()
	waittest.Until(t, "the connections of the lost association are cut", func() bool {
		for _, c := range lost {
			if !c.dead.Load() {
				return false
			}
		}
		return true
	})
	select {
	case <-connected:
		t.Error("the host is connected while Writes of its lost association run")
	default:
	}
	answer()
	again := (<-connected).queue(1, 64)
	newer := bytes.Repeat([]byte("newer..."), 512/8)
	for i := range uint64(blocks) {
		again.ok(write(1, i, 1, wire.CapsuleSGL(512)), newer, nil)
	}
	for _, c := range lost {
		select {
		case <-c.done:
		default:
			t.Error("a connection of the lost association has not ended")
		}
	}
	for i := range uint64(blocks) {
		if _, got := again.ok(read(1, i, 1, 512), nil, nil); !bytes.Equal(got, newer) {
			t.Errorf("block %d: %.8q", i, got)
		}
	}
}

// TestOriginalOthers: what a host has not lost goes on when it makes another association.
func TestOriginalOthers(t *testing.T) {
	tgt := startTarget(t, testConfig(t, t.TempDir()))
	first := newHost(t, tgt.Addr(1), hostOptions{}).queue(1, 64)
	newHost(t, tgt.Addr(2), hostOptions{}).queue(1, 64)
	first.ok(write(1, 0, 1, wire.CapsuleSGL(512)), make([]byte, 512), nil)
}
