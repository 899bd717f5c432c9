package ca_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/ca"
	"github.com/weftfs/weft/internal/rpctls"
)

// TestJoin: hosts get certificates by tokens, each for one host, and the next ones by those that they have.
func TestJoin(t *testing.T) {
	c, err := ca.Init(t.TempDir(), "ours")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- c.Serve(ctx, l, slog.New(slog.NewTextHandler(t.Output(), nil))) }() // ends with ctx
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	trainer := ca.Subject{Name: "trainer", Life: time.Hour}
	token := func(s ca.Subject, good time.Duration) ca.Token {
		t.Helper()
		made, err := c.NewToken(s, good)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ca.ParseToken(" " + made.String() + "\n")
		if err != nil || again != made {
			t.Fatalf("%v came back as %v, %v", made, again, err)
		}
		return made
	}
	first, dir := token(trainer, time.Minute), t.TempDir()
	cert, err := ca.Join(t.Context(), addr, first, dir)
	if err != nil || cert.Subject.CommonName != "trainer" || len(cert.ExtKeyUsage) != 1 {
		t.Fatalf("%+v, %v", cert, err)
	}
	files := rpctls.Dir(dir)
	if st, err := os.Stat(files.Key); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", st, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || left != nil {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if _, err := rpctls.NewClient(rpctls.Mutual, files); err != nil {
		t.Error(err)
	}
	// The same token on another host, and on this one after all went well.
	for _, where := range []string{t.TempDir(), dir} {
		if _, err := ca.Join(t.Context(), addr, first, where); err == nil || !strings.Contains(err.Error(), "used by somebody else") {
			t.Errorf("a token that was used: %v", err)
		}
	}
	// A host whose answer was lost asks again with the key that it has made.
	lost, before := token(trainer, time.Minute), t.TempDir()
	gone, stop := context.WithCancel(t.Context())
	stop()
	if _, err := ca.Join(gone, addr, lost, before); err == nil {
		t.Error("joined without the network")
	}
	pending := filepath.Join(before, ".key.pending")
	key, err := os.ReadFile(pending)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Join(t.Context(), addr, lost, before); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(pending, key, 0o600); err != nil { // as if the answer had not come
		t.Fatal(err)
	}
	if _, err := ca.Join(t.Context(), addr, lost, before); err != nil {
		t.Errorf("again with the same key: %v", err)
	}

	expired := token(trainer, time.Nanosecond)
	wrongPin := token(trainer, time.Minute)
	wrongPin.Pin[0] ^= 1
	wrongSecret := token(trainer, time.Minute)
	wrongSecret.Secret = first.Secret
	unknown := token(trainer, time.Minute)
	unknown.ID = strings.Repeat("0", 16)
	for want, bad := range map[string]ca.Token{
		"is not there": wrongPin, "not known, has expired": expired, "the token is not known": wrongSecret, "token is not known": unknown,
	} {
		if _, err := ca.Join(t.Context(), addr, bad, t.TempDir()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, bad := range []string{"", "weft1", first.String() + ".", strings.Replace(first.String(), "weft1", "weft2", 1), strings.Replace(first.String(), first.ID, "../../../../x/yz", 1)} {
		if got, err := ca.ParseToken(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}

	service, at := token(ca.Subject{Name: "meta", Service: true, Hosts: []string{"meta1", "10.0.0.1"}, Life: time.Hour}, time.Minute), t.TempDir()
	if cert, err = ca.Join(t.Context(), addr, service, at); err != nil || cert.DNSNames[0] != "meta1" || cert.IPAddresses[0].String() != "10.0.0.1" || cert.Subject.Organization[0] != rpctls.ServiceOrganization {
		t.Fatalf("%+v, %v", cert, err)
	}
	// Renewed it is for the same, of another key, until it is revoked; and the list comes with it.
	old, _ := os.ReadFile(rpctls.Dir(at).Key)
	again, err := ca.Renew(t.Context(), addr, at)
	if err != nil || again.DNSNames[0] != "meta1" || again.SerialNumber.Cmp(cert.SerialNumber) == 0 {
		t.Fatalf("%+v, %v", again, err)
	}
	if now, _ := os.ReadFile(rpctls.Dir(at).Key); bytes.Equal(old, now) {
		t.Error("the key is the same")
	}
	if _, err := c.Revoke("trainer"); err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Renew(t.Context(), addr, dir); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("a certificate that is revoked was renewed: %v", err)
	}
	if _, err := ca.Renew(t.Context(), addr, at); err != nil {
		t.Error(err)
	}
	if list, err := os.ReadFile(rpctls.Dir(at).CRL); err != nil || !bytes.Contains(list, []byte("X509 CRL")) {
		t.Errorf("list of revoked ones: %s, %v", list, err)
	}

	// What is no question of ours.
	root, err := os.ReadFile(files.CA)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(root)
	authority, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(authority)
	plain := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, RootCAs: pool}}}
	defer plain.CloseIdleConnections()
	for _, body := range []string{"", "{}", `{"request":"x"}`, `{"more":1}`, strings.Repeat("x", 1<<20)} {
		for _, path := range []string{"/v1/join", "/v1/renew"} {
			res, err := plain.Post("https://"+addr+path, "application/json", strings.NewReader(body))
			if err != nil {
				continue // hung up on what is too long
			}
			res.Body.Close()
			if res.StatusCode != http.StatusForbidden {
				t.Errorf("%s %.20q: %s", path, body, res.Status)
			}
		}
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add("weft1.0123456789abcdef." + strings.Repeat("A", 43) + "." + strings.Repeat("0f", 32))
	f.Fuzz(func(t *testing.T, s string) {
		token, err := ca.ParseToken(s)
		if err != nil {
			return
		}
		if again, err := ca.ParseToken(token.String()); err != nil || again != token {
			t.Errorf("%q came back as %q, %v", token, again, err)
		}
	})
}
