// Package tlstest makes certificates for tests.
package tlstest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weftfs/weft/internal/ca"
	"github.com/weftfs/weft/internal/rpctls"
)

// CA signs certificates.
type CA struct {
	*ca.CA
	t   testing.TB
	Dir string
}

// New makes a CA whose files are removed with the test.
func New(t testing.TB) *CA {
	t.Helper()
	dir := t.TempDir()
	c, err := ca.Init(dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	return &CA{c, t, dir}
}

// Issue makes a certificate of a service at 127.0.0.1 and ::1, or the given names and addresses.
func (c *CA) Issue(hosts ...string) rpctls.Files {
	c.t.Helper()
	if hosts == nil {
		hosts = []string{"127.0.0.1", "::1"}
	}
	return c.IssueTo(ca.Subject{Name: "service", Service: true, Hosts: hosts, Life: time.Hour})
}

// IssueClient makes a client's certificate.
func (c *CA) IssueClient(name string) rpctls.Files {
	c.t.Helper()
	return c.IssueTo(ca.Subject{Name: name, Life: time.Hour})
}

// IssueTo makes a certificate, in a directory as [rpctls.Dir] has it; the CRL is the CA's own.
func (c *CA) IssueTo(s ca.Subject) rpctls.Files {
	c.t.Helper()
	cert, key, err := c.CA.Issue(s)
	if err != nil {
		c.t.Fatal(err)
	}
	f := rpctls.Dir(c.t.TempDir())
	c.write(f.Cert, cert)
	c.write(f.Key, key)
	if err := os.Symlink(filepath.Join(c.Dir, rpctls.CAFile), f.CA); err != nil {
		c.t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(c.Dir, rpctls.CRLFile), f.CRL); err != nil {
		c.t.Fatal(err)
	}
	return f
}

func (c *CA) write(name string, b []byte) {
	if err := os.WriteFile(name, b, 0o600); err != nil {
		c.t.Fatal(err)
	}
}
