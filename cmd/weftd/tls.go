package main

import (
	"log/slog"

	"github.com/spf13/pflag"

	"github.com/weftfs/weft/internal/rpctls"
	"github.com/weftfs/weft/server/datafile/store"
	"github.com/weftfs/weft/server/meta/admit"
)

// tlsFlags say what this program proves itself with, and what others have to.
type tlsFlags struct {
	fl       *pflag.FlagSet
	dir      string
	given    rpctls.Files
	policy   string // of connections that this program makes
	required bool   // of those that it accepts
}

func newTLSFlags(fl *pflag.FlagSet) *tlsFlags {
	f := &tlsFlags{fl: fl, policy: string(rpctls.None)}
	fl.StringVar(&f.dir, "tls-dir", "", "directory with ca.pem, cert.pem, key.pem and maybe crl.pem, as weftd ca issue makes it; in place of the four flags below")
	fl.StringVar(&f.given.Cert, "tls-cert", "", "PEM file of this server's certificate, with what leads from it to the CA")
	fl.StringVar(&f.given.Key, "tls-key", "", "PEM file of the key that belongs to it")
	fl.StringVar(&f.given.CA, "tls-ca", "", "PEM file of the certificates that sign those of others: every client that comes with TLS needs one then, and so does\nevery server that is connected to (default: that of clients does not matter, those of servers are checked by the system's)")
	fl.StringVar(&f.given.CRL, "tls-crl", "", "PEM file of certificates that are revoked, which need not exist yet")
	return f
}

// accepting adds what is for connections that are accepted.
func (f *tlsFlags) accepting() *tlsFlags {
	f.fl.BoolVar(&f.required, "tls-required", false, "refuse clients that come without TLS")
	return f
}

// dialing adds what is for connections that are made.
func (f *tlsFlags) dialing(to string) *tlsFlags {
	f.fl.StringVar(&f.policy, "xprtsec", f.policy, "connections to "+to+": none, tls or mtls (with our own certificate)")
	return f
}

func (f *tlsFlags) files() (rpctls.Files, error) {
	if f.dir == "" {
		return f.given, nil
	}
	if f.given != (rpctls.Files{}) {
		return f.given, usagef("--tls-dir names all files; it does not go with --tls-cert, --tls-key, --tls-ca and --tls-crl")
	}
	return rpctls.Dir(f.dir), nil
}

// server is for connections that are accepted. nil: there is no TLS.
func (f *tlsFlags) server() (*rpctls.Server, error) {
	files, err := f.files()
	if err != nil {
		return nil, err
	}
	if files.Cert == "" && files.Key == "" {
		if f.required {
			return nil, usagef("--tls-required needs --tls-dir, or --tls-cert and --tls-key")
		}
		if files != (rpctls.Files{}) && f.policy == string(rpctls.None) {
			return nil, usagef("--tls-ca and --tls-crl are given, and neither a certificate of this server nor --xprtsec, which needs them")
		}
		return nil, nil
	}
	s, err := rpctls.NewServer(files)
	if err != nil {
		return nil, usagef("%v", err)
	}
	return s, nil
}

// door is where clients of a metadata service come in.
func (f *tlsFlags) door(log *slog.Logger) (*admit.Door, error) {
	s, err := f.server()
	return &admit.Door{Log: log, TLS: s, Require: f.required}, err
}

// client is for connections that are made. nil: they are in clear text.
func (f *tlsFlags) client() (*rpctls.Client, error) {
	files, err := f.files()
	if err != nil {
		return nil, err
	}
	switch rpctls.Policy(f.policy) {
	case rpctls.None:
		files = rpctls.Files{} // which are for those that are accepted
	case rpctls.TLS:
		files.Cert, files.Key = "", ""
	}
	c, err := rpctls.NewClient(rpctls.Policy(f.policy), files)
	if err != nil {
		return nil, usagef("--xprtsec: %v", err)
	}
	return c, nil
}

// dialer is client for data servers.
func (f *tlsFlags) dialer() (store.Dialer, error) {
	c, err := f.client()
	return store.DialTLS(c), err
}
