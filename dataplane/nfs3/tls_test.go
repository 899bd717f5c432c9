package nfs3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/weftfs/weft/dataplane/targettest"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/rpctls/tlstest"
	"github.com/weftfs/weft/internal/waittest"
	"github.com/weftfs/weft/layout"
	"github.com/weftfs/weft/server/data"

	wire "github.com/weftfs/weft/internal/wire/nfs3"
)

// dataServer starts a data server of weft's own.
func dataServer(t *testing.T, cfg data.Config) netip.AddrPort {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("missing: root, for a data server, which gives files to their owners")
	}
	cfg.Dir, cfg.Log = t.TempDir(), slog.New(slog.DiscardHandler)
	s, err := data.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends at Shutdown
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // cut whoever is there
		s.Shutdown(ctx)
		<-served
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func clientTLS(t *testing.T, policy rpctls.Policy, f rpctls.Files) *rpctls.Client {
	t.Helper()
	cfg, err := rpctls.NewClient(policy, f)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func serverTLS(t *testing.T, f rpctls.Files) *rpctls.Server {
	t.Helper()
	cfg, err := rpctls.NewServer(f)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestTLSContract runs the suite of all targets through TLS, with certificates on both sides.
func TestTLSContract(t *testing.T) {
	files := tlstest.New(t).Issue()
	targettest.Run(t, func(t *testing.T) targettest.Fixture {
		addr := dataServer(t, data.Config{TLS: serverTLS(t, files), RequireTLS: true})
		secret := clientTLS(t, rpctls.Mutual, files)
		tg := newTarget(t, Config{RSize: 128 << 10, WSize: 64 << 10, TLS: secret}, addr)
		root, err := Mount(t.Context(), addr, "/", secret)
		if err != nil {
			t.Fatal(err)
		}
		var files atomic.Int32
		return targettest.Fixture{
			Target: tg,
			NewFile: func() *layout.DataFile {
				attr := wire.Sattr{SetMode: true, Mode: 0o600}
				fh, _, err := tg.Create(t.Context(), layout.Credential{}, root, fmt.Sprint("f", files.Add(1)), wire.Guarded, attr, wire.CreateVerf{})
				if err != nil {
					t.Fatal(err)
				}
				return &layout.DataFile{Handles: [][]byte{fh}}
			},
		}
	})
}

// TestTLSLarge sends more than fits any buffer, over connections that are cut in between.
func TestTLSLarge(t *testing.T) {
	files := tlstest.New(t).Issue()
	addr := dataServer(t, data.Config{TLS: serverTLS(t, rpctls.Files{Cert: files.Cert, Key: files.Key})})
	r := newRelay(t, addr)
	tg := newTarget(t, Config{TLS: clientTLS(t, rpctls.TLS, rpctls.Files{CA: files.CA}), RSize: 4 << 20, WSize: 4 << 20}, r.addr)
	root, err := Mount(t.Context(), addr, "/", tg.cfg.TLS)
	if err != nil {
		t.Fatal(err)
	}
	fh, _, err := tg.Create(t.Context(), layout.Credential{}, root, "f", wire.Guarded, wire.Sattr{}, wire.CreateVerf{})
	if err != nil {
		t.Fatal(err)
	}
	df := &layout.DataFile{Handles: [][]byte{fh}}
	want := pattern(4<<20, 5)
	for i := range 5 {
		w := writeOp("", int64(i)*(4<<20), want)
		w.File = df
		start(tg, w)
		if i%2 == 1 {
			r.mu.Lock()
			for c := range r.pairs {
				c.Close()
			}
			r.mu.Unlock()
		}
		wait(t, w.done, "WRITE")
		if w.Err != nil {
			t.Fatal(w.Err)
		}
	}
	for i := range 5 {
		rd := readOp("", int64(i)*(4<<20), 4<<20)
		rd.File = df
		ok(t, tg, rd)
		if !bytes.Equal(rd.Data, want) {
			t.Errorf("part %d differs", i)
		}
	}
	if st := tg.Stats(); !st.TLS {
		t.Error("the statistics say nothing of TLS")
	}
}

// TestTLSRefused: without TLS as asked for, not a call is made, and the error says what is wrong.
func TestTLSRefused(t *testing.T) {
	ca := tlstest.New(t)
	own, elsewhere, foreign := ca.Issue(), ca.Issue("192.0.2.1"), tlstest.New(t).Issue()
	noCA := func(f rpctls.Files) rpctls.Files { f.CA, f.CRL = "", ""; return f }
	onlyCA := func(f rpctls.Files) rpctls.Files { return rpctls.Files{CA: f.CA} }
	for _, tc := range []struct {
		name   string
		server data.Config
		client *rpctls.Client
		want   string
	}{
		{"server without TLS", data.Config{}, clientTLS(t, rpctls.TLS, onlyCA(own)), "offers no TLS"},
		{"server of another CA", data.Config{TLS: serverTLS(t, noCA(foreign))}, clientTLS(t, rpctls.TLS, onlyCA(own)), "unknown authority"},
		{"certificate for another address", data.Config{TLS: serverTLS(t, noCA(elsewhere))}, clientTLS(t, rpctls.TLS, onlyCA(own)), "valid for 192.0.2.1, not 127.0.0.1"},
		{"client without certificate", data.Config{TLS: serverTLS(t, own)}, clientTLS(t, rpctls.TLS, onlyCA(own)), "certificate required"},
		{"client of another CA", data.Config{TLS: serverTLS(t, own)}, clientTLS(t, rpctls.Mutual, rpctls.Files{CA: own.CA, Cert: foreign.Cert, Key: foreign.Key}), "certificate"},
		{"clear text where TLS is required", data.Config{TLS: serverTLS(t, noCA(own)), RequireTLS: true}, nil, "AUTH_TOOWEAK"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			addr := dataServer(t, tc.server)
			_, err := Mount(t.Context(), addr, "/", tc.client)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("MNT: error %v, want %q", err, tc.want)
			}
			var refused *rpctls.HandshakeError
			if tc.client == nil != !errors.As(err, &refused) && !strings.Contains(tc.want, "certificate") {
				t.Errorf("MNT: error of type %T", err)
			}
			tg := newTarget(t, Config{TLS: tc.client}, addr)
			r := readOp("x", 0, 10)
			start(tg, r)
			if tc.client == nil {
				wait(t, r.done, "READ")
				err = r.Err
			} else {
				waittest.Until(t, "the error", func() bool { return tg.Stats().Err != nil })
				err = tg.Stats().Err
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("READ: error %v, want %q", err, tc.want)
			}
			if st := tg.Stats(); st.Calls+st.Reads > 0 && tc.client != nil {
				t.Errorf("calls were answered: %+v", st)
			}
		})
	}
	t.Run("server that knows nothing of it", func(t *testing.T) {
		srv := newServer(t) // which hangs up
		tg := newTarget(t, Config{TLS: clientTLS(t, rpctls.TLS, onlyCA(own))}, srv.addr)
		start(tg, readOp("x", 0, 10))
		waittest.Until(t, "the error", func() bool { return tg.Stats().Err != nil })
		if err := tg.Stats().Err; !strings.Contains(err.Error(), "no answer to the question") {
			t.Errorf("error %v", err)
		}
		if n := srv.calls(wire.ProcRead) + srv.calls(wire.ProcFsinfo); n > 0 {
			t.Errorf("%d calls in clear text", n)
		}
	})
}

// TestTLSGuest: a certificate that is not a service's gets nothing by which one could look around.
func TestTLSGuest(t *testing.T) {
	ca := tlstest.New(t)
	own := ca.Issue()
	addr := dataServer(t, data.Config{TLS: serverTLS(t, own), RequireTLS: true})
	if _, err := Mount(t.Context(), addr, "/", clientTLS(t, rpctls.Mutual, own)); err != nil {
		t.Errorf("MNT of a service: %v", err)
	}
	if _, err := Mount(t.Context(), addr, "/", clientTLS(t, rpctls.Mutual, ca.IssueClient("trainer"))); err == nil || !strings.Contains(err.Error(), "AUTH_TOOWEAK") {
		t.Errorf("MNT of a guest: %v", err)
	}
}
