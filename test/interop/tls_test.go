package interop

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftfs/weft/internal/rpctls/tlstest"
	"github.com/weftfs/weft/test/harness"
)

// TestTLS has all connections to data servers secret, with certificates on both sides, in two programs and a mount.
func TestTLS(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: root, for data servers")
	}
	files := tlstest.New(t).Issue()
	flags := []string{"--tls-ca", files.CA, "--tls-cert", files.Cert, "--tls-key", files.Key}
	ds := []string{harness.FreeAddr(t), harness.FreeAddr(t)}
	dirs := harness.Dir(t) + "/a," + harness.Dir(t) + "/b"
	harness.Spawn(t, "weftd", append([]string{"data", "--dir", dirs, "--listen", strings.Join(ds, ","), "--tls-required"}, flags...)...)
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
	m := harness.MountAt(t, secret, "xprtsec=mtls", "tls_ca="+files.CA, "tls_cert="+files.Cert, "tls_key="+files.Key)
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
	m.Unmount()
	// A mount that gives no certificate gets no data, and says why.
	m = harness.MountAt(t, secret, "xprtsec=tls", "tls_ca="+files.CA)
	cat := exec.Command("timeout", "2", "cat", filepath.Join(m.Dir, "file"))
	if out, err := cat.Output(); err == nil || len(out) > 0 {
		t.Errorf("%d bytes without a certificate, %v", len(out), err)
	}
	harness.Await(t, "the reason in the log", func() bool { return strings.Contains(m.Log(), "certificate required") })
	m.Unmount()
}
