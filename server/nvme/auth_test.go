package nvme

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// prove authenticates a queue, from the host's side.
func (q *hostQueue) prove(cfg nvmeauth.Config) error {
	q.t.Helper()
	peer, err := nvmeauth.NewHost(cfg, 1)
	if err != nil {
		q.t.Fatal(err)
	}
	var received []byte
	for {
		send, done, err := peer.Step(received)
		if len(send) > 0 {
			q.ok(wire.Auth{Length: uint32(len(send))}.Command(true), send, nil)
		}
		if err != nil || done {
			return err
		}
		_, received = q.ok(wire.Auth{Receive: true, Length: nvmeauth.MaxMessage}.Command(false), nil, nil)
	}
}

func TestAuthentication(t *testing.T) {
	host := Host{NQN: hostNQN, Secret: nvmeauthtest.NewSecret(nvmeauth.SHA256), ControllerSecret: nvmeauthtest.NewSecret(nvmeauth.SHA384)}
	cfg := testConfig(t, t.TempDir())
	cfg.Subsystems[0].Hosts = []Host{host}
	tgt := startTarget(t, cfg)
	good := nvmeauth.Config{HostNQN: hostNQN, SubsysNQN: testNQN, HostSecret: host.Secret, Groups: []nvmeauth.Group{nvmeauth.FFDHE2048}}
	both := good
	both.ControllerSecret = host.ControllerSecret
	bad := good
	bad.HostSecret = nvmeauthtest.NewSecret(nvmeauth.SHA256)

	begin := func(c wire.Connect, cntl uint16) (*hostQueue, uint16) {
		t.Helper()
		q := dial(t, tgt.Addr(1), wire.ICReq{})
		comp := (&hostOptions{}).connect(q, c, cntl)
		res := wire.DecodeConnectResult(comp.DW0())
		if comp.Status != wire.StatusSuccess || !res.Authenticate || res.Secure {
			t.Fatalf("connect: %v %+v", comp.Status, res)
		}
		return q, res.CntlID
	}
	admin, id := begin(wire.Connect{QueueSize: 32}, wire.CntlIDAny)
	for _, cmd := range []wire.Command{wire.PropertyGet{Property: wire.PropVS}.Command(), wire.KeepAlive()} {
		if st := admin.status(cmd, nil, nil); st != wire.StatusAuthRequired && st != wire.StatusSequence {
			t.Errorf("before authentication: %v", st)
		}
	}
	if err := admin.prove(both); err != nil {
		t.Fatal(err)
	}
	cc := wire.DefaultConfiguration()
	cc.Enable = true
	admin.ok(wire.PropertySet{Property: wire.PropCC, Value: uint64(cc.Property())}.Command(), nil, nil)
	if err := admin.prove(good); err != nil { // again, while the queue is used
		t.Error(err)
	}
	admin.ok(wire.KeepAlive(), nil, nil)
	q, _ := begin(wire.Connect{QID: 1, QueueSize: 8}, id)
	if st := q.status(read(1, 0, 1, 512), nil, nil); st != wire.StatusAuthRequired {
		t.Errorf("read before authentication: %v", st)
	}
	if err := q.prove(good); err != nil {
		t.Fatal(err)
	}
	q.ok(read(1, 0, 1, 512), nil, nil)

	// A wrong secret: the host is told, and the connection ends.
	q, _ = begin(wire.Connect{QueueSize: 32}, wire.CntlIDAny)
	var f *nvmeauth.Failure
	if err := q.prove(bad); !errors.As(err, &f) || !f.ByPeer {
		t.Errorf("with a wrong secret: %v", err)
	}
	if _, err := q.tryRecv(); !errors.Is(err, io.EOF) {
		t.Errorf("then: %v", err)
	}
	// Out of turn: nothing to fetch, and rubbish.
	q, _ = begin(wire.Connect{QueueSize: 32}, wire.CntlIDAny)
	q.do(wire.Auth{Receive: true, Length: nvmeauth.MaxMessage}.Command(false), nil, nil)
	if _, err := q.tryRecv(); !errors.Is(err, io.EOF) {
		t.Errorf("after a message was fetched that there was not: %v", err)
	}
	q, _ = begin(wire.Connect{QueueSize: 32}, wire.CntlIDAny)
	q.ok(wire.Auth{Length: 64}.Command(true), make([]byte, 64), nil)
	if st := q.status(wire.PropertyGet{Property: wire.PropVS}.Command(), nil, nil); st != wire.StatusAuthRequired {
		t.Errorf("after rubbish: %v", st)
	}
	q.do(wire.Auth{Receive: true, Length: nvmeauth.MaxMessage}.Command(false), nil, nil)
	if _, err := q.tryRecv(); !errors.Is(err, io.EOF) {
		t.Errorf("after rubbish: %v", err)
	}

	// A Connect that failed leaves nothing behind.
	q = dial(t, tgt.Addr(1), wire.ICReq{})
	(&hostOptions{}).connect(q, wire.Connect{QueueSize: 32}, 77)
	if comp := (&hostOptions{subsys: wire.DiscoveryNQN}).connect(q, wire.Connect{QueueSize: 32}, wire.CntlIDAny); comp.Status != wire.StatusSuccess || wire.DecodeConnectResult(comp.DW0()).Authenticate {
		t.Errorf("discovery after a Connect that failed: %+v", comp)
	}

	// Secrets change for connections that come later.
	if err := tgt.control().AllowHost(testNQN, Host{NQN: hostNQN}); err != nil {
		t.Fatal(err)
	}
	newHost(t, tgt.Addr(1), hostOptions{})
	admin.ok(wire.KeepAlive(), nil, nil)
	if err := tgt.control().AllowHost(testNQN, Host{NQN: hostNQN, ControllerSecret: host.Secret}); err == nil || !strings.Contains(err.Error(), "secret") {
		t.Errorf("a secret of the target alone: %v", err)
	}
}
