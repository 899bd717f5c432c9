// Package rpctls is TLS as weft uses it: with certificates in files, on connections to metadata services and, as RPC-with-TLS (RFC 9289), to
// NFS data servers.
//
// All sides speak TLS 1.3 alone, and the same ALPN protocol: "sunrpc" with data servers (RFC 9289 sections 4.2 and 5), "weft" with metadata
// services. A server is known by the names in its certificate, of which one must be what the client connects to: of data servers that is an
// IP address. A client is known by who has signed its certificate, and by its common name. Who serves a volume has the organization
// [ServiceOrganization] in its certificate: metadata services know each other by it, and data servers know them.
//
// Files are read again when they have changed, by connections that are made a second later; with what cannot be read nothing changes. A
// server asks Check whether a connection that it has may go on.
package rpctls

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// ALPN is the protocol of RPC-with-TLS, Meta that of metadata services.
const (
	ALPN = "sunrpc"
	Meta = "weft"
)

// ServiceOrganization is an organization (O) in the subject of certificates of metadata services and data servers.
const ServiceOrganization = "weft:service"

// Policy is what the option xprtsec of nfs(5) says.
type Policy string

const (
	None   Policy = "none" // clear text
	TLS    Policy = "tls"  // the client checks the server
	Mutual Policy = "mtls" // and the server the client
)

// Files are PEM files.
type Files struct {
	CA   string // certificates of those whose signature counts; empty: those that the system trusts
	Cert string // our own, with what leads from it to the CA
	Key  string // that belongs to Cert
	CRL  string // certificates that are revoked (RFC 5280), by one of CA; may be missing as long as there are none
}

// Names of files in a directory.
const (
	CAFile   = "ca.pem"
	CertFile = "cert.pem"
	KeyFile  = "key.pem"
	CRLFile  = "crl.pem"
)

// Dir are the files in a directory, as weftd ca issue writes it.
func Dir(dir string) Files {
	return Files{
		CA: filepath.Join(dir, CAFile), Cert: filepath.Join(dir, CertFile), Key: filepath.Join(dir, KeyFile), CRL: filepath.Join(dir, CRLFile),
	}
}

// Client makes connections secret.
type Client struct {
	files    *files
	sessions tls.ClientSessionCache
}

// NewClient returns nil for None.
func NewClient(policy Policy, f Files) (*Client, error) {
	switch policy {
	case None:
		if f != (Files{}) {
			return nil, errors.New("TLS certificates are given, and TLS is not asked for: say xprtsec=tls or xprtsec=mtls")
		}
		return nil, nil
	case TLS, Mutual:
	default:
		return nil, fmt.Errorf("xprtsec=%s: want none, tls or mtls", policy)
	}
	if policy == Mutual && f.Cert == "" && f.Key == "" {
		return nil, errors.New("xprtsec=mtls: a certificate and its key are needed")
	}
	if policy == TLS && f.Cert != "" {
		return nil, errors.New("xprtsec=tls sends no certificate of ours: say xprtsec=mtls, or leave it out")
	}
	held, err := open(f, false)
	if err != nil {
		return nil, err
	}
	return &Client{held, tls.NewLRUClientSessionCache(0)}, nil
}

// config is for one connection, to a server of this name or IP address.
func (c *Client) config(name, protocol string) *tls.Config {
	m := c.files.present()
	cfg := m.config(protocol)
	cfg.ServerName, cfg.ClientSessionCache = name, c.sessions
	// The standard verification does not know the CRL, and is left out when a session is resumed; verify is both.
	cfg.InsecureSkipVerify = true
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		if err := m.verify(cs.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		return cs.PeerCertificates[0].VerifyHostname(name)
	}
	return cfg
}

// Server makes connections secret that clients make.
type Server struct {
	files *files
	base  tls.Config // has the keys of session tickets
}

// NewServer returns one. With a CA every client must have a certificate that it signed.
func NewServer(f Files) (*Server, error) {
	if f.Cert == "" && f.Key == "" {
		return nil, errors.New("a server needs a certificate and its key")
	}
	if f.CA == "" && f.CRL != "" {
		return nil, errors.New("revoked certificates are given, and no CA whose certificates clients need")
	}
	held, err := open(f, true)
	if err != nil {
		return nil, err
	}
	return &Server{files: held}, nil
}

// config is for connections that ask for protocol.
func (s *Server) config(protocol string) *tls.Config {
	cfg := s.base.Clone()
	cfg.MinVersion = tls.VersionTLS13
	cfg.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m := s.files.present()
		cfg := m.config(protocol)
		if m.roots != nil {
			cfg.ClientAuth, cfg.ClientCAs = tls.RequireAnyClientCert, m.roots // verified below, as with clients
			cfg.VerifyConnection = func(cs tls.ConnectionState) error {
				return m.verify(cs.PeerCertificates, x509.ExtKeyUsageClientAuth)
			}
		}
		return cfg, nil
	}
	return cfg
}

// Mutual reports whether clients need a certificate.
func (s *Server) Mutual() bool { return s.files.names.CA != "" }

// Check says why the client of a connection is not to be served any more: its certificate was revoked, has expired, or its CA is gone.
func (s *Server) Check(tc *tls.Conn) error {
	if m := s.files.present(); m.roots != nil {
		return m.verify(tc.ConnectionState().PeerCertificates, x509.ExtKeyUsageClientAuth)
	}
	return nil
}

// Peer is who is at the other end of a connection, as far as its certificate says.
type Peer struct {
	Name    string // common name; empty: there was no certificate
	Service bool   // has the organization ServiceOrganization
}

// PeerOf tells who it is.
func PeerOf(tc *tls.Conn) Peer {
	certs := tc.ConnectionState().PeerCertificates
	if len(certs) == 0 {
		return Peer{}
	}
	s := certs[0].Subject
	return Peer{Name: s.CommonName, Service: slices.Contains(s.Organization, ServiceOrganization)}
}

// material is what files had in them.
type material struct {
	own     []tls.Certificate
	roots   *x509.CertPool // nil: the system's
	revoked map[string]bool
	stamp   stamp
}

func (m *material) config(protocol string) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, Certificates: m.own}
}

// verify checks a chain, the leaf first, for a use.
func (m *material) verify(chain []*x509.Certificate, use x509.ExtKeyUsage) error {
	if len(chain) == 0 {
		return errors.New("tls: there is no certificate")
	}
	opts := x509.VerifyOptions{Roots: m.roots, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{use}}
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := chain[0].Verify(opts); err != nil {
		return err
	}
	for _, c := range chain {
		if m.revoked[revocation(c.RawIssuer, c.SerialNumber.Bytes())] {
			return fmt.Errorf("the certificate of %q (serial number %x) is revoked", c.Subject.CommonName, c.SerialNumber)
		}
	}
	return nil
}

func revocation(issuer, serial []byte) string { return string(issuer) + "\x00" + string(serial) }

// stamp tells whether files have changed: size, inode and time of each.
type stamp [4][3]int64

func (f Files) stamp() (s stamp) {
	for i, name := range []string{f.CA, f.Cert, f.Key, f.CRL} {
		var st syscall.Stat_t
		if name != "" && syscall.Stat(name, &st) == nil {
			s[i] = [3]int64{st.Size, int64(st.Ino), st.Mtim.Nano()}
		}
	}
	return s
}

// files are read again when they change.
type files struct {
	names  Files
	server bool // the certificate is to be a server's

	mu     sync.Mutex
	held   *material
	looked time.Time
	failed stamp // of files that could not be read
}

// fresh is how old what is known of files may be.
const fresh = time.Second

func open(names Files, server bool) (*files, error) {
	f := &files{names: names, server: server, looked: time.Now()}
	var err error
	f.held, err = f.read()
	return f, err
}

// read reads the files, and refuses a certificate that does not do.
func (f *files) read() (*material, error) {
	m, err := f.names.read()
	if err == nil && f.server {
		err = serves(f.names.Cert, m.own[0].Leaf)
	}
	return m, err
}

// serves says why clients would not take a certificate for a server's.
func serves(name string, c *x509.Certificate) error {
	if len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 || slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth) ||
		slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
		return nil // RFC 5280 section 4.2.1.12
	}
	return fmt.Errorf("certificate %s, of %q, is a client's, and clients do not take it for a server's: make one with this host's names and addresses (weftd ca issue --host)",
		name, c.Subject.CommonName)
}

// present is what the files have in them, or had before somebody spoilt them.
func (f *files) present() *material {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.looked) < fresh {
		return f.held
	}
	f.looked = time.Now()
	now := f.names.stamp()
	if now == f.held.stamp || now == f.failed {
		return f.held
	}
	m, err := f.read()
	if err != nil {
		f.failed = now
		slog.Error("TLS: the files have changed and are of no use; what was in them before counts", "err", err)
		return f.held
	}
	f.held = m
	slog.Info("TLS: the files were read again", "certificate", f.names.Cert, "ca", f.names.CA, "crl", f.names.CRL)
	return m
}

// read reads the files. One that changes meanwhile is read again later.
func (f Files) read() (*material, error) {
	m := &material{stamp: f.stamp()}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("a certificate and its key go together: one of them is missing")
	}
	if f.Cert != "" {
		if err := private(f.Key); err != nil {
			return nil, err
		}
		own, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
		}
		m.own = []tls.Certificate{own}
	}
	if f.CA == "" {
		return m, nil
	}
	cas, err := certificates(f.CA)
	if err != nil {
		return nil, fmt.Errorf("CA certificates: %w", err)
	}
	m.roots = x509.NewCertPool()
	for _, ca := range cas {
		m.roots.AddCert(ca)
	}
	if m.revoked, err = revoked(f.CRL, cas); err != nil {
		return nil, fmt.Errorf("revoked certificates: %w", err)
	}
	return m, nil
}

// private says what is wrong with the mode of a key's file: it is nobody else's to read, but may be a group's if it is root's.
func private(name string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(name, &st); err != nil {
		return fmt.Errorf("key %s: %w", name, err)
	}
	others := uint32(0o077)
	if st.Uid == 0 {
		others = 0o037
	}
	if st.Mode&others != 0 {
		return fmt.Errorf("key %s has mode %04o: others can get at it: chmod 600 %s", name, st.Mode&0o777, name)
	}
	return nil
}

func certificates(name string) (list []*x509.Certificate, err error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		list = append(list, c)
	}
	if list == nil {
		return nil, fmt.Errorf("there is none in %s (PEM)", name)
	}
	return list, nil
}

// revoked reads a CRL. Without a file there is nothing in it.
func revoked(name string, cas []*x509.Certificate) (map[string]bool, error) {
	if name == "" {
		return nil, nil
	}
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	set := map[string]bool{}
	for found := false; ; found = true {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			if !found {
				return nil, fmt.Errorf("there is no list in %s (PEM)", name)
			}
			return set, nil
		}
		list, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if !slices.ContainsFunc(cas, func(ca *x509.Certificate) bool { return list.CheckSignatureFrom(ca) == nil }) {
			return nil, fmt.Errorf("%s: the list is not signed by the CA", name)
		}
		for _, entry := range list.RevokedCertificateEntries {
			set[revocation(list.RawIssuer, entry.SerialNumber.Bytes())] = true
		}
	}
}
