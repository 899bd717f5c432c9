package interop

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/test/harness"
)

// TestTLS has all connections secret, to metadata services and to data servers, with certificates on both sides, in two programs and a mount.
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
	crl := filepath.Join(authority, rpctls.CRLFile)
	if err := os.Symlink(crl, filepath.Join(service, rpctls.CRLFile)); err != nil {
		t.Fatal(err)
	}
	files := rpctls.Dir(service)
	flags := []string{"--tls-ca", files.CA, "--tls-cert", files.Cert, "--tls-key", files.Key, "--tls-crl", crl}
	ds := []string{harness.FreeAddr(t), harness.FreeAddr(t)}
	dirs := harness.Dir(t) + "/a," + harness.Dir(t) + "/b"
	harness.Spawn(t, "weftd", append([]string{"data", "--dir", dirs, "--listen", strings.Join(ds, ","), "--tls-required"}, flags...)...)
	secret, clear, open := harness.FreeAddr(t), harness.FreeAddr(t), harness.FreeAddr(t)
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", secret, "--xprtsec", "mtls", "--tls-dir", service, "--tls-required")
	harness.Spawn(t, "weftd", "meta", "--dir", harness.Dir(t), "--listen", clear)
	for _, addr := range append(ds, secret, clear) {
		harness.AwaitListen(t, addr)
	}
	out, err := exec.Command(harness.Bin(t, "weft"), "admin", "device", "add", "--server", clear, "nfs://"+ds[0]+"/").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--xprtsec") {
		t.Errorf("a service without TLS: %v\n%s", err, out)
	}
	for _, addr := range ds {
		harness.Weft(t, "admin", "device", "add", "--server", secret, "--tls-dir", client, "nfs://"+addr+"/")
	}
	for names, args := range map[string][]string{
		"xprtsec=":           {"--xprtsec", "none", "--server", secret},
		"wants one":          {"--xprtsec", "tls", "--tls-dir", client, "--server", secret},
		"does not speak TLS": {"--tls-dir", client, "--server", clear},
		"unknown authority":  {"--xprtsec", "tls", "--server", secret},
		"no such file":       {"--xprtsec", "mtls", "--tls-dir", "/nowhere", "--server", secret},
		"match localhost":    {"--tls-dir", client, "--server", strings.Replace(secret, "127.0.0.1", "localhost", 1)},
		"none, tls or mtls":  {"--xprtsec", "ssl", "--server", secret},
	} {
		out, err := exec.Command(harness.Bin(t, "weft"), append([]string{"admin", "device", "ls"}, args...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), names) {
			t.Errorf("weft admin device ls %v: %v, want it to say %q\n%s", args, err, names, out)
		}
	}
	m := harness.MountAt(t, secret, "tls_dir="+client)
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
	// Rules go by the names in certificates.
	admin := func(args ...string) (string, error) {
		out, err := exec.Command(harness.Bin(t, "weft"), append([]string{"admin", "client"}, append(args, "--server", secret, "--tls-dir", service)...)...).CombinedOutput()
		return string(out), err
	}
	if out, err := admin("set", "cert:storage-1(rw,no_root_squash)"); err == nil || !strings.Contains(out, "cert:trainer-1") {
		t.Errorf("a rule that cuts the mount off: %v\n%s", err, out)
	}
	sub := filepath.Join(m.Dir, "sub")
	if err := errors.Join(os.Mkdir(sub, 0o777), os.Chmod(sub, 0o777)); err != nil {
		t.Fatal(err)
	}
	for _, rule := range []string{"cert:*(rw,no_root_squash)", "cert:trainer-*(rw,path=/sub)"} {
		if out, err := admin("set", rule); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if out, err := admin("ls"); err != nil || !strings.HasPrefix(out, "cert:trainer-*(rw,root_squash,") || !strings.Contains(out, "path=/sub)\ncert:*(") {
		t.Errorf("weft admin client ls: %v\n%s", err, out)
	}
	if _, err := os.ReadDir(m.Dir); !errors.Is(err, os.ErrPermission) {
		t.Errorf("readdir of what is above the directory of the rule: %v", err)
	}
	if _, err := os.Stat(filepath.Join(m.Dir, "other")); !errors.Is(err, os.ErrPermission) {
		t.Errorf("lookup of something else there: %v", err)
	}
	inside := filepath.Join(sub, "file")
	if err := os.WriteFile(inside, []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(inside, &st); err != nil || st.Uid != 65534 {
		t.Errorf("root's file is of user %d, %v", st.Uid, err)
	}
	below := harness.Dir(t)
	harness.Weft(t, "mount", "-o", "tls_dir="+client, secret+":/sub", below)
	if _, err := os.ReadFile(filepath.Join(below, "file")); err != nil {
		t.Error(err)
	}
	harness.Weft(t, "umount", below)
	for _, who := range []string{"cert:trainer-*", "cert:*"} {
		if out, err := admin("rm", who); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if _, err := os.ReadDir(m.Dir); err != nil {
		t.Error(err)
	}

	// Revoked, it gets nothing more, on connections that it has neither.
	weftd("ca", "revoke", "--dir", authority, "--name", "trainer-1")
	time.Sleep(8 * time.Second) // connections are looked at every 5 s
	cat := exec.Command("timeout", "2", "cat", file)
	if out, err := cat.Output(); err == nil || len(out) > 0 {
		t.Errorf("%d bytes with a certificate that is revoked, %v", len(out), err)
	}
	harness.Await(t, "the reason in the log", func() bool { return strings.Contains(m.Log(), "does not take our certificate") })
	harness.Weft(t, "umount", "--force", m.Dir)
	m.Abort()

	// A metadata service that lets everybody in, and data servers that do not: who gives them no certificate gets no data, and is told why.
	harness.Spawn(t, "weftd", append([]string{"meta", "--dir", harness.Dir(t), "--listen", open, "--xprtsec", "mtls"}, flags...)...)
	harness.AwaitListen(t, open)
	for _, addr := range ds {
		harness.Weft(t, "admin", "device", "add", "--server", open, "nfs://"+addr+"/")
	}
	m = harness.MountAt(t, open, "data_xprtsec=mtls", "tls_dir="+service)
	if err := os.WriteFile(filepath.Join(m.Dir, "file"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	m.Unmount()
	m = harness.MountAt(t, open, "xprtsec=none", "data_xprtsec=tls", "tls_ca="+files.CA)
	cat = exec.Command("timeout", "2", "cat", filepath.Join(m.Dir, "file"))
	if out, err := cat.Output(); err == nil || len(out) > 0 {
		t.Errorf("%d bytes without a certificate, %v", len(out), err)
	}
	harness.Await(t, "the reason in the log", func() bool { return strings.Contains(m.Log(), "certificate required") })
	m.Unmount()
}
