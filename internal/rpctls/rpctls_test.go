package rpctls_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/ca"
	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/internal/rpctls/tlstest"
)

// TestFiles: what does not go together is refused, and the message says why.
func TestFiles(t *testing.T) {
	ca := tlstest.New(t)
	own, other := ca.Issue(), ca.Issue()
	client := ca.IssueClient("trainer")
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(t.TempDir(), "open")
	key, err := os.ReadFile(own.Key)
	if err == nil {
		err = os.WriteFile(open, key, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := tlstest.New(t)
	foreign := elsewhere.IssueClient("revoked")
	if _, err := elsewhere.Revoke("revoked"); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		policy rpctls.Policy // empty: of a server
		files  rpctls.Files
		want   string
	}{
		{rpctls.None, rpctls.Files{}, ""},
		{rpctls.None, rpctls.Files{CA: own.CA}, "xprtsec=tls"},
		{"ssl", rpctls.Files{}, "none, tls or mtls"},
		{rpctls.TLS, rpctls.Files{}, ""},
		{rpctls.TLS, rpctls.Files{CA: own.CA}, ""},
		{rpctls.TLS, own, "xprtsec=mtls"},
		{rpctls.TLS, rpctls.Files{CA: junk}, "there is none in " + junk},
		{rpctls.TLS, rpctls.Files{CA: junk + "2"}, "no such file"},
		{rpctls.Mutual, own, ""},
		{rpctls.Mutual, rpctls.Files{CA: own.CA}, "are needed"},
		{rpctls.Mutual, rpctls.Files{Cert: own.Cert}, "go together"},
		{rpctls.Mutual, rpctls.Files{Cert: own.Cert, Key: other.Key}, "private key does not match"},
		{rpctls.Mutual, rpctls.Files{Cert: own.Cert, Key: open}, "chmod 600"},
		{rpctls.Mutual, rpctls.Files{CA: own.CA, Cert: own.Cert, Key: own.Key, CRL: junk}, "there is no list in " + junk},
		{rpctls.Mutual, rpctls.Files{CA: own.CA, Cert: own.Cert, Key: own.Key, CRL: foreign.CRL}, "not signed by the CA"},
		{"", own, ""},
		{"", rpctls.Files{Cert: own.Cert, Key: own.Key, CRL: junk}, "no CA"},
		{"", rpctls.Files{CA: own.CA}, "needs a certificate"},
		{"", client, `of "trainer", is a client's`},
		{rpctls.Mutual, client, ""},
	} {
		var err error
		if tc.policy == "" {
			_, err = rpctls.NewServer(tc.files)
		} else {
			_, err = rpctls.NewClient(tc.policy, tc.files)
		}
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q, %+v: error %v, want %q", tc.policy, tc.files, err, tc.want)
		}
	}
}

// pair makes a connection, and what a server answers on it.
func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	for _, nc := range []net.Conn{client, server} {
		nc.SetDeadline(time.Now().Add(10 * time.Second))
		t.Cleanup(func() { nc.Close() })
	}
	return client, server
}

// meet has a client and a server shake hands and exchange a byte, and returns what each of them says of it.
func meet(t *testing.T, c *rpctls.Client, s *rpctls.Server) (peer rpctls.Peer, tc *tls.Conn, client, server error) {
	t.Helper()
	cn, sn := pair(t)
	done := make(chan error, 1)
	go func() { // ends with the handshake
		var err error
		if tc, err = s.Accept(context.Background(), sn, "weft"); err == nil {
			peer = rpctls.PeerOf(tc)
			_, err = tc.Write([]byte{1})
		} else {
			sn.Close()
		}
		done <- err
	}()
	secret, err := c.Connect(t.Context(), cn, "127.0.0.1", "weft")
	if err == nil {
		_, err = io.ReadFull(secret, make([]byte, 1))
	} else {
		cn.Close()
	}
	server = <-done
	return peer, tc, err, server
}

func newClient(t *testing.T, policy rpctls.Policy, f rpctls.Files) *rpctls.Client {
	t.Helper()
	c, err := rpctls.NewClient(policy, f)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newServer(t *testing.T, f rpctls.Files) *rpctls.Server {
	t.Helper()
	s, err := rpctls.NewServer(f)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wants(err error, want string) bool {
	return (err == nil) == (want == "") && (err == nil || strings.Contains(err.Error(), want))
}

// TestHandshake: who is let in, and what is said to the others.
func TestHandshake(t *testing.T) {
	authority := tlstest.New(t)
	own, client := authority.Issue(), authority.IssueClient("trainer-1")
	expired := authority.IssueTo(ca.Subject{Name: "old", Service: true, Hosts: []string{"127.0.0.1"}, Life: 1})
	revoked := authority.IssueTo(ca.Subject{Name: "stolen", Service: true, Hosts: []string{"127.0.0.1"}, Life: time.Hour})
	if _, err := authority.Revoke("stolen"); err != nil {
		t.Fatal(err)
	}
	foreign := tlstest.New(t).Issue()
	trust := func(f rpctls.Files) rpctls.Files { f.CA, f.CRL = own.CA, own.CRL; return f }
	onlyCA := trust(rpctls.Files{})
	for _, tc := range []struct {
		name           string
		policy         rpctls.Policy
		client, server rpctls.Files
		wantC, wantS   string
		peer           rpctls.Peer
	}{
		{"both certified", rpctls.Mutual, client, own, "", "", rpctls.Peer{Name: "trainer-1"}},
		{"two services", rpctls.Mutual, own, own, "", "", rpctls.Peer{Name: "service", Service: true}},
		{"server alone", rpctls.TLS, onlyCA, rpctls.Files{Cert: own.Cert, Key: own.Key}, "", "", rpctls.Peer{}},
		{"server expired", rpctls.TLS, onlyCA, expired, "expired", "bad certificate", rpctls.Peer{}},
		{"server revoked", rpctls.TLS, onlyCA, revoked, "revoked", "bad certificate", rpctls.Peer{}},
		{"server elsewhere", rpctls.TLS, onlyCA, authority.Issue("192.0.2.1"), "not 127.0.0.1", "bad certificate", rpctls.Peer{}},
		{"server of another CA", rpctls.TLS, onlyCA, foreign, "unknown authority", "bad certificate", rpctls.Peer{}},
		{"no client certificate", rpctls.TLS, onlyCA, own, "certificate required", "didn't provide a certificate", rpctls.Peer{}},
		{"client expired", rpctls.Mutual, trust(expired), own, "bad certificate", "expired", rpctls.Peer{}},
		{"client revoked", rpctls.Mutual, trust(revoked), own, "bad certificate", "revoked", rpctls.Peer{}},
		{"client of another CA", rpctls.Mutual, trust(foreign), own, "bad certificate", "unknown authority", rpctls.Peer{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			peer, _, c, s := meet(t, newClient(t, tc.policy, tc.client), newServer(t, tc.server))
			if !wants(c, tc.wantC) || !wants(s, tc.wantS) || peer != tc.peer {
				t.Errorf("client: %v, want %q; server: %v, want %q; peer %+v, want %+v", c, tc.wantC, s, tc.wantS, peer, tc.peer)
			}
		})
	}
	t.Run("clear text server", func(t *testing.T) {
		cn, sn := pair(t)
		sn.Write([]byte("\x00\x00\x00\x04what"))
		if _, err := newClient(t, rpctls.TLS, onlyCA).Connect(t.Context(), cn, "127.0.0.1", "weft"); !wants(err, "does not speak TLS") {
			t.Error(err)
		}
	})
	t.Run("client as server", func(t *testing.T) {
		cn, sn := pair(t)
		cert, err := tls.LoadX509KeyPair(client.Cert, client.Key)
		if err != nil {
			t.Fatal(err)
		}
		go tls.Server(sn, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"weft"}}).Handshake() // ends with the connection
		if _, err := newClient(t, rpctls.TLS, onlyCA).Connect(t.Context(), cn, "127.0.0.1", "weft"); !wants(err, "incompatible key usage") {
			t.Error(err)
		}
	})
	t.Run("downgrade", func(t *testing.T) {
		cn, sn := pair(t)
		cert, err := tls.LoadX509KeyPair(own.Cert, own.Key)
		if err != nil {
			t.Fatal(err)
		}
		old := tls.Server(sn, &tls.Config{MaxVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}})
		go old.Handshake() // ends with the connection
		if _, err := newClient(t, rpctls.TLS, onlyCA).Connect(t.Context(), cn, "127.0.0.1", "weft"); !wants(err, "protocol version") {
			t.Error(err)
		}
		cn, sn = pair(t)
		old = tls.Client(cn, &tls.Config{MaxVersion: tls.VersionTLS12, InsecureSkipVerify: true})
		go old.Handshake() // ends with the connection
		if _, err := newServer(t, own).Accept(t.Context(), sn, "weft"); !wants(err, "unsupported versions") {
			t.Error(err)
		}
	})
	t.Run("another protocol", func(t *testing.T) {
		cn, sn := pair(t)
		go newServer(t, own).Accept(context.Background(), sn, rpctls.ALPN) // ends with the connection
		if _, err := newClient(t, rpctls.TLS, onlyCA).Connect(t.Context(), cn, "127.0.0.1", "weft"); !wants(err, "no application protocol") {
			t.Error(err)
		}
		cert, err := tls.LoadX509KeyPair(own.Cert, own.Key)
		if err != nil {
			t.Fatal(err)
		}
		cn, sn = pair(t)
		go tls.Server(sn, &tls.Config{Certificates: []tls.Certificate{cert}}).Handshake() // ends with the connection
		if _, err := newClient(t, rpctls.TLS, onlyCA).Connect(t.Context(), cn, "127.0.0.1", "weft"); !wants(err, "does not agree on the protocol") {
			t.Error(err)
		}
	})
}

// TestReload: files count that were changed while they are in use, and those that somebody has spoilt do not.
func TestReload(t *testing.T) {
	authority := tlstest.New(t)
	client := newClient(t, rpctls.Mutual, authority.IssueClient("trainer-1"))
	files := authority.Issue("192.0.2.1")
	server := newServer(t, files)
	if _, _, err, _ := meet(t, client, server); !wants(err, "not 127.0.0.1") {
		t.Fatal(err)
	}
	right := authority.Issue()
	put := func(name string, b []byte) {
		t.Helper()
		if err := ca.Write(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	copyOf := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const again = 1100 * time.Millisecond // files are looked at each second
	put(files.Key, copyOf(right.Key))
	time.Sleep(again)
	if _, _, err, _ := meet(t, client, server); !wants(err, "not 127.0.0.1") {
		t.Error("a key without its certificate:", err)
	}
	put(files.Cert, copyOf(right.Cert))
	time.Sleep(again)
	_, tc, err, _ := meet(t, client, server)
	if err != nil {
		t.Fatal("the new certificate: ", err)
	}
	if err := server.Check(tc); err != nil {
		t.Error(err)
	}
	if _, err := authority.Revoke("trainer-1"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(again)
	if err := server.Check(tc); !wants(err, "revoked") {
		t.Error("a connection whose certificate is revoked:", err)
	}
	if _, _, _, err := meet(t, client, server); !wants(err, "revoked") {
		t.Error("a session that is resumed with such a certificate:", err)
	}
	put(files.Cert, []byte("junk"))
	time.Sleep(again)
	if _, _, _, err := meet(t, client, server); !wants(err, "revoked") {
		t.Error("spoilt files:", err)
	}
}
