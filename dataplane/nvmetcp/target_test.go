package nvmetcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/nvmeauth"
	"github.com/weftfs/weft/internal/nvmeauth/nvmeauthtest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/server/nvme"
	"github.com/weftfs/weft/server/nvme/nvmetest"

	wire "github.com/weftfs/weft/internal/wire/nvmetcp"
)

// startTarget starts a target of ours with one port, and a namespace of peerSize bytes in blocks of 512.
func startTarget(t testing.TB, hosts ...nvme.Host) (*nvmetest.Target, Config) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "namespace")
	if err := os.WriteFile(path, make([]byte, peerSize), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := nvme.OpenFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	tgt, err := nvmetest.New(nvme.Config{
		Subsystems: []nvme.Subsystem{{
			NQN: testNQN, Serial: "1", AnyHost: len(hosts) == 0, Hosts: hosts,
			Namespaces: []nvme.Namespace{{NSID: 1, Backing: f, BlockSize: 512, NGUID: [16]byte{1}}},
		}},
		Ports: []nvme.Port{{ID: 1, Listen: "127.0.0.1:0", HeaderDigest: true, DataDigest: true}},
		Log:   slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := tgt.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		f.Close()
	})
	return tgt, Config{
		Addr: tgt.Addr(1), SubsysNQN: testNQN, HostNQN: hostNQN, HostID: wire.HostID{1}, Queues: 2, ReconnectDelay: 10 * time.Millisecond,
		Log: slog.New(slog.DiscardHandler),
	}
}

func connect(t testing.TB, cfg Config) *Controller {
	t.Helper()
	c, err := Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestTarget writes and reads what our own target serves.
func TestTarget(t *testing.T) {
	for _, digests := range []bool{false, true} {
		t.Run(fmt.Sprintf("digests %v", digests), func(t *testing.T) {
			_, cfg := startTarget(t)
			cfg.HeaderDigest, cfg.DataDigest = digests, digests
			c := connect(t, cfg)
			seed := rand.Uint64()
			t.Logf("seed %#x", seed)
			rnd := rand.New(rand.NewPCG(seed, 0))
			model := make([]byte, peerSize)
			for range 4 {
				batch(t, c, rnd, wire.OpWrite, func(off int, b []byte) {
					copy(b, pattern(rnd.Uint64(), len(b)))
					copy(model[off:], b)
				}, nil)
				batch(t, c, rnd, wire.OpRead, nil, func(off int, b []byte) {
					if !bytes.Equal(b, model[off:][:len(b)]) {
						t.Errorf("%d bytes at %d are wrong", len(b), off)
					}
				})
			}
			for _, cmd := range []*Command{
				{Op: wire.OpFlush, NSID: 1},
				{Op: wire.OpWriteZeroes, NSID: 1, SLBA: 16, Blocks: 1024},
				{Raw: func() *wire.Command { c := wire.Deallocate(1, 1, true); return &c }(), Data: wire.DSMRange{SLBA: 2048, Blocks: 8}.Append(nil)},
			} {
				if err := do(t, c, cmd); err != nil {
					t.Error(err)
				}
			}
			zeros := readCommand(16, 512<<10)
			if err := do(t, c, zeros); err != nil || !bytes.Equal(zeros.Data, make([]byte, 512<<10)) {
				t.Errorf("not zeros, %v", err)
			}
		})
	}
}

// TestTargetLost takes the target away again and again under load. Whatever a write has ended with, what is read later is what
// one of the writes that may have been carried out has written: the last that succeeded or one after it.
func TestTargetLost(t *testing.T) {
	tgt, cfg := startTarget(t)
	states := make(chan State, 1000)
	cfg.OnState = func(s State) { states <- s }
	c := connect(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	const block = 32 << 10
	for i := range 8 {
		wg.Go(func() {
			slba := uint64(i) * block / 512
			possible := map[byte]bool{0: true}
			for n := byte(1); ctx.Err() == nil; n++ {
				err := do(t, c, writeCommand(slba, bytes.Repeat([]byte{n}, block)))
				var path *PathError
				switch {
				case err == nil:
					clear(possible)
					possible[n] = true
				case refused(err): // while its controller was going
				case !errors.As(err, &path):
					t.Error(err)
					return
				case path.Sent:
					// Another one may be sent only when this one cannot be carried out any more; DropControllers and
					// PortDown see to that here.
					possible[n] = true
				}
				r := readCommand(slba, block)
				switch err := do(t, c, r); {
				case errors.As(err, &path), refused(err):
					time.Sleep(time.Millisecond)
				case err != nil:
					t.Error(err)
					return
				case !possible[r.Data[0]] || !possible[r.Data[block-1]]:
					t.Errorf("read %d, which was not written", r.Data[0])
					return
				}
			}
		})
	}
	for i := range 20 {
		time.Sleep(10 * time.Millisecond)
		if i%2 == 0 {
			if err := tgt.DropControllers(testNQN, ""); err != nil {
				t.Fatal(err)
			}
		} else {
			if err := tgt.PortDown(1); err != nil {
				t.Fatal(err)
			}
			awaitState(t, states, StateConnecting)
			if err := tgt.PortUp(1); err != nil {
				t.Fatal(err)
			}
		}
		awaitState(t, states, StateLive)
	}
	cancel()
	wait(t, &wg)
	if s := c.Stats(); s.Losses < 20 {
		t.Errorf("%d losses", s.Losses)
	}
	// A host that is not allowed any more gives up.
	if err := tgt.DisallowHost(testNQN, hostNQN); err != nil {
		t.Fatal(err)
	}
	awaitState(t, states, StateDead)
	var path *PathError
	if err := do(t, c, readCommand(0, 512)); !errors.As(err, &path) || path.State != StateDead || !strings.Contains(err.Error(), "allow host") {
		t.Error(err)
	}
}

// refused tells whether a controller has refused a command because it is no longer in use.
func refused(err error) bool {
	var status *StatusError
	return errors.As(err, &status) && status.Class() == wire.ClassReset
}

// TestTargetEvents is told of what changes.
func TestTargetEvents(t *testing.T) {
	tgt, cfg := startTarget(t)
	events := make(chan wire.AsyncEvent, 100)
	cfg.OnEvent = func(e wire.AsyncEvent) { events <- e }
	c := connect(t, cfg)
	for range 5 {
		for _, state := range []wire.ANAState{wire.ANAInaccessible, wire.ANAOptimized} {
			if err := tgt.SetANA(1, 1, state); err != nil {
				t.Fatal(err)
			}
			select {
			case e := <-events:
				if !e.Is(wire.EventANAChanged) {
					t.Fatal(e)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("no event")
			}
			err := do(t, c, readCommand(0, 512))
			var status *StatusError
			if want := state.Status(); want == 0 && err != nil || want != 0 && (!errors.As(err, &status) || status.Status != want) {
				t.Errorf("in state %v: %v", state, err)
			}
			id := c.Info().Controller
			b := make([]byte, wire.ANAHeaderSize+wire.ANAGroupSize*id.NANAGRPID+4*id.MNAN)
			if err := c.GetLogPage(t.Context(), wire.GetLogPage{ID: wire.LogANA, NSID: wire.AllNamespaces}, b); err != nil {
				t.Fatal(err)
			}
			for g, err := range wire.ANAGroups(b) {
				if err != nil || g.State != state {
					t.Errorf("group %d is %v, %v; want %v", g.ID, g.State, err, state)
				}
			}
		}
	}
}

// TestAuthentication has secrets that are right, wrong and missing, on one side and on both.
func TestAuthentication(t *testing.T) {
	mine, theirs, other := nvmeauthtest.NewSecret(nvmeauth.SHA256), nvmeauthtest.NewSecret(nvmeauth.SHA512), nvmeauthtest.NewSecret(nvmeauth.SHA256)
	var none nvmeauth.Secret
	both := nvme.Host{NQN: hostNQN, Secret: mine, ControllerSecret: theirs}
	for _, test := range []struct {
		name         string
		host         nvme.Host
		secret, ctrl nvmeauth.Secret
		want         string // "" if it works
	}{
		{"host", nvme.Host{NQN: hostNQN, Secret: mine}, mine, none, ""},
		{"host alone of both", both, mine, none, ""},
		{"both", both, mine, theirs, ""},
		{"needless", nvme.Host{NQN: hostNQN}, mine, none, ""},
		{"none", both, none, none, "give this host's secret"},
		{"wrong", both, other, none, "authenticat"},
		{"wrong controller", both, mine, other, "authenticat"},
		{"controller without", nvme.Host{NQN: hostNQN}, mine, theirs, "does not prove itself"},
	} {
		t.Run(test.name, func(t *testing.T) {
			tgt, cfg := startTarget(t, test.host)
			cfg.Secret, cfg.CtrlSecret = test.secret, test.ctrl
			c, err := Connect(t.Context(), cfg)
			if test.want != "" {
				var ce *ConnectError
				if err == nil {
					c.Close()
					t.Fatal("connected")
				}
				if !errors.As(err, &ce) || !ce.Final || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), cfg.Addr) {
					t.Errorf("%v; want %q", err, test.want)
				}
				t.Log(err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			if got := c.Info().Authenticated; got == test.host.Secret.IsZero() {
				t.Errorf("authenticated: %v", got)
			}
			if err := do(t, c, readCommand(0, 512)); err != nil {
				t.Error(err)
			}
			if err := tgt.DropControllers(testNQN, hostNQN); err != nil {
				t.Fatal(err)
			}
			waittest.Until(t, "connected again", func() bool { return c.Stats().Losses == 1 && c.State() == StateLive })
			if err := do(t, c, readCommand(0, 512)); err != nil {
				t.Error(err)
			}
		})
	}
}
