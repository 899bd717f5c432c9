package interop

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/test/harness"
)

// TestTLS has all connections to data servers secret, with certificates on both sides, in two programs and a mount.
func TestTLS(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: root, for data servers")
	}
	// The service, the data servers and the mount have certificates as the commands make them.
	authority, service, client := harness.Dir(t), harness.Dir(t), harness.Dir(t)
	weftd := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(harness.Bin(t, "weftd"), args...).CombinedOutput(); err != nil {
			t.Fatalf("weftd %v: %v\n%s", args, err, out)
		}
	}
	weftd("ca", "init", "--dir", authority)
	weftd("ca", "issue", "--dir", authority, "--name", "storage-1", "--host", "127.0.0.1", "--out", service)
	weftd("ca", "issue", "--dir", authority, "--name", "trainer-1", "--out", client)
	weftd("ca", "renew", "--dir", authority, "--out", client)
	weftd("ca", "ls", "--dir", authority)
	files, own := rpctls.Dir(service), rpctls.Dir(client)
	flags := []string{"--tls-ca", files.CA, "--tls-cert", files.Cert, "--tls-key", files.Key}
	ds := []string{harness.FreeAddr(t), harness.FreeAddr(t)}
	dirs := harness.Dir(t) + "/a," + harness.Dir(t) + "/b"
	harness.Spawn(t, "weftd", append([]string{"data", "--dir", dirs, "--listen", strings.Join(ds, ","), "--tls-required", "--tls-crl", filepath.Join(authority, rpctls.CRLFile)}, flags...)...)
	secret, clear := harness.FreeAddr(t), harness.FreeAddr(t)
	harness.Spawn(t, "weftd", append([]string{"meta", "--dir", harness.Dir(t), "--listen", secret, "--xprtsec", "mtls"}, flags...)...)
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", clear)
	for _, addr := range append(ds, secret, clear) {
		harness.AwaitListen(t, addr)
	}
	out, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "add", "--server", clear, "nfs://"+ds[0]+"/").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--xprtsec") {
		t.Errorf("a service without TLS: %v\n%s", err, out)
	}
	for _, addr := range ds {
		harness.Weft(t, "admin", "device", "add", "--server", secret, "nfs://"+addr+"/")
	}
	m := harness.MountAt(t, secret, "xprtsec=mtls", "tls_ca="+own.CA, "tls_cert="+own.Cert, "tls_key="+own.Key)
	data := make([]byte, 10<<20+1)
	rand.NewChaCha8([32]byte{2}).Read(data)
	file := filepath.Join(m.Dir, "file")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	harness.Weft(t, "sync", m.Dir)
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v: contents differ", len(got), err)
	}
	// Revoked, it gets nothing more, on connections that it has neither.
	weftd("ca", "revoke", "--dir", authority, "--name", "trainer-1")
	time.Sleep(8 * time.Second) // connections are looked at every 5 s
	cat := exec.Command("timeout", "2", "cat", file)
	if out, err := cat.Output(); err == nil || len(out) > 0 {
		t.Errorf("%d bytes with a certificate that is revoked, %v", len(out), err)
	}
	m.Unmount()
	// A mount that gives no certificate gets no data, and says why.
	m = harness.MountAt(t, secret, "xprtsec=tls", "tls_ca="+files.CA)
	cat = exec.Command("timeout", "2", "cat", filepath.Join(m.Dir, "file"))
	if out, err := cat.Output(); err == nil || len(out) > 0 {
		t.Errorf("%d bytes without a certificate, %v", len(out), err)
	}
	harness.Await(t, "the reason in the log", func() bool { return strings.Contains(m.Log(), "certificate required") })
	m.Unmount()
}
