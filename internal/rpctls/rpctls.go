// Package rpctls makes the TLS configurations of RPC-with-TLS (RFC 9289) from files, and does a client's part of the handshake.
//
// Both sides speak TLS 1.3 and the ALPN protocol "sunrpc" alone (RFC 9289 sections 4.2 and 5). A server is known by
// the names in its certificate, of which one must be what the client connects to: of data servers that is an IP address.
// A client is known by who has signed its certificate.
package rpctls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// ALPN is the protocol that both sides must agree on.
const ALPN = "sunrpc"

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
}

// Client returns the configuration of a client, nil for None. ServerName is left to be set for each connection.
func Client(policy Policy, f Files) (*tls.Config, error) {
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
	cfg, err := f.config()
	if err != nil {
		return nil, err
	}
	if policy == Mutual && cfg.Certificates == nil {
		return nil, errors.New("xprtsec=mtls: a certificate and its key are needed")
	}
	if policy == TLS && cfg.Certificates != nil {
		return nil, errors.New("xprtsec=tls sends no certificate of ours: say xprtsec=mtls, or leave it out")
	}
	if f.CA != "" {
		if cfg.RootCAs, err = pool(f.CA); err != nil {
			return nil, err
		}
	}
	cfg.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	return cfg, nil
}

// Server returns the configuration of a server. With a CA every client must have a certificate that it signed.
func Server(f Files) (*tls.Config, error) {
	cfg, err := f.config()
	if err != nil {
		return nil, err
	}
	if cfg.Certificates == nil {
		return nil, errors.New("a server needs a certificate and its key")
	}
	if f.CA != "" {
		if cfg.ClientCAs, err = pool(f.CA); err != nil {
			return nil, err
		}
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return cfg, nil
}

func (f Files) config() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{ALPN}}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("a certificate and its key go together: one of them is missing")
	}
	if f.Cert != "" {
		own, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
		}
		cfg.Certificates = []tls.Certificate{own}
	}
	return cfg, nil
}

func pool(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("CA certificates: %w", err)
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("CA certificates: there is none in %s (PEM)", file)
	}
	return p, nil
}
