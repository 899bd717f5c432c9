package ca

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/weftfs/weft/internal/descriptors"
	"github.com/weftfs/weft/internal/rpctls"
)

// DefaultPort is where a CA answers hosts that join.
const DefaultPort = 6061

const (
	maxBody     = 16 << 10 // bytes of a question or an answer; a CRL in an answer comes on top
	maxAnswer   = 16 << 20
	requestTime = 20 * time.Second
)

type question struct {
	ID      string `json:"id,omitempty"`
	Secret  string `json:"secret,omitempty"`
	Request string `json:"request"`
}

type answer struct {
	Certificate string `json:"certificate,omitempty"`
	CA          string `json:"ca,omitempty"`
	CRL         string `json:"crl,omitempty"`
	Error       string `json:"error,omitempty"`
}

// Serve answers hosts that join, or renew their certificates, until ctx ends. It closes l.
func (ca *CA) Serve(ctx context.Context, l net.Listener, log *slog.Logger) error {
	own, err := ca.ownCertificate()
	if err != nil {
		l.Close()
		return err
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/join", func(w http.ResponseWriter, r *http.Request) { ca.serve(w, r, log, ca.join) })
	mux.HandleFunc("POST /v1/renew", func(w http.ResponseWriter, r *http.Request) { ca.serve(w, r, log, ca.renew) })
	mux.HandleFunc("GET /v1/crl", func(w http.ResponseWriter, r *http.Request) {
		crl, err := ca.crl()
		if err != nil {
			log.Error("the list of revoked certificates cannot be read", "err", err)
			http.Error(w, "the list cannot be read", http.StatusInternalServerError)
			return
		}
		w.Write(crl)
	})
	server := &http.Server{
		Handler: mux, ReadTimeout: requestTime, WriteTimeout: requestTime, MaxHeaderBytes: maxBody,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), // handshakes of whoever comes by
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, ClientCAs: pool, ClientAuth: tls.VerifyClientCertIfGiven,
		},
	}
	stop := context.AfterFunc(ctx, func() {
		ending, cancel := context.WithTimeout(context.Background(), requestTime)
		defer cancel()
		server.Shutdown(ending)
	})
	defer stop()
	if err := server.ServeTLS(descriptors.Listener(l), "", ""); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// ownCertificate is that of the service, which lives as long as its process. Hosts that join know it by the CA alone, so it has no names.
func (ca *CA) ownCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "join", Organization: []string{rpctls.ServiceOrganization}},
		NotBefore: time.Now().Add(-skew), NotAfter: ca.cert.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: key}, nil
}

// refused is an error that the host is told.
type refused struct{ error }

// serve answers one question with a certificate for whom grant says.
func (ca *CA) serve(w http.ResponseWriter, r *http.Request, log *slog.Logger, grant func(*http.Request, *question, []byte) (Subject, error)) {
	log = log.With("client", r.RemoteAddr)
	reply := func(status int, a *answer) {
		b, err := json.Marshal(a)
		if err != nil {
			panic("ca: " + err.Error()) // strings
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		w.Write(b)
	}
	var q question
	csr, err := parseQuestion(http.MaxBytesReader(w, r.Body, maxBody), &q)
	var s Subject
	if err == nil {
		s, err = grant(r, &q, csr.RawSubjectPublicKeyInfo)
	}
	var cert, crl []byte
	if err == nil {
		if cert, err = ca.sign(s, csr.PublicKey); err == nil {
			crl, err = ca.crl()
		}
	}
	if told := (refused{}); errors.As(err, &told) {
		log.Warn("no certificate for a host", "path", r.URL.Path, "err", err)
		reply(http.StatusForbidden, &answer{Error: err.Error()})
		return
	}
	if err != nil {
		log.Error("no certificate for a host", "path", r.URL.Path, "err", err)
		reply(http.StatusInternalServerError, &answer{Error: "the CA cannot sign it; its log says why"})
		return
	}
	log.Info("certificate signed", "name", s.Name, "service", s.Service, "hosts", s.Hosts, "path", r.URL.Path)
	reply(http.StatusOK, &answer{Certificate: string(cert), CA: string(certPEM(ca.cert.Raw)), CRL: string(crl)})
}

// parseQuestion reads a question, whose request must be signed by the key in it.
func parseQuestion(r io.Reader, q *question) (*x509.CertificateRequest, error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(q); err != nil {
		return nil, refused{fmt.Errorf("malformed question: %w", err)}
	}
	block, _ := pem.Decode([]byte(q.Request))
	if block == nil {
		return nil, refused{errors.New("no certificate request in PEM")}
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, refused{fmt.Errorf("certificate request: %w", err)}
	}
	if key, ok := csr.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
		return nil, refused{errors.New("certificate request: want an ECDSA key on P-256")}
	}
	return csr, nil
}

func (ca *CA) join(_ *http.Request, q *question, public []byte) (Subject, error) {
	s, err := ca.redeem(q.ID, q.Secret, public)
	if errors.Is(err, errToken) {
		err = refused{err}
	}
	return s, err
}

func (ca *CA) renew(r *http.Request, _ *question, _ []byte) (Subject, error) {
	if len(r.TLS.PeerCertificates) == 0 {
		return Subject{}, refused{errors.New("to renew a certificate it takes one")}
	}
	c := r.TLS.PeerCertificates[0]
	if err := ca.own(c); err != nil {
		return Subject{}, refused{err}
	}
	return subjectOf(c), nil
}

// Join gets a certificate with a token from the CA at addr (HOST:PORT), and writes it, its key, the CA's certificate and the CRL to dir, for
// [rpctls.Dir]. The key never leaves this host.
func Join(ctx context.Context, addr string, t Token, dir string) (*x509.Certificate, error) {
	return get(ctx, addr, dir, "/v1/join", question{ID: t.ID, Secret: t.Secret}, &tls.Config{}, func(chain []*x509.Certificate) (*x509.CertPool, error) {
		for _, c := range chain {
			if c.IsCA && sha256.Sum256(c.Raw) == t.Pin {
				pool := x509.NewCertPool()
				pool.AddCert(c)
				return pool, nil
			}
		}
		return nil, errors.New("the CA that the token is of is not there")
	})
}

// Renew gets a new key and certificate in place of those in dir.
func Renew(ctx context.Context, addr, dir string) (*x509.Certificate, error) {
	f := rpctls.Dir(dir)
	own, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("there is no certificate in %s", f.CA)
	}
	return get(ctx, addr, dir, "/v1/renew", question{}, &tls.Config{Certificates: []tls.Certificate{own}}, func([]*x509.Certificate) (*x509.CertPool, error) {
		return pool, nil
	})
}

// get asks the CA, which must be one that trusted says, given what it shows.
func get(ctx context.Context, addr, dir, path string, q question, cfg *tls.Config, trusted func([]*x509.Certificate) (*x509.CertPool, error)) (*x509.Certificate, error) {
	key, err := joinKey(dir, path == "/v1/renew")
	if err != nil {
		return nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, err
	}
	q.Request = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr}))
	b, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	var pool *x509.CertPool
	cfg.MinVersion = tls.VersionTLS13
	cfg.InsecureSkipVerify = true // the CA has no name that we would know; the following is stricter
	cfg.VerifyConnection = func(cs tls.ConnectionState) (err error) {
		if pool, err = trusted(cs.PeerCertificates); err != nil {
			return err
		}
		leaf := cs.PeerCertificates[0]
		if !slices.Contains(leaf.Subject.Organization, rpctls.ServiceOrganization) {
			return errors.New("who answers there is not the CA")
		}
		_, err = leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+addr+path, bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}
	res, err := transport.RoundTrip(r)
	if err != nil {
		return nil, fmt.Errorf("CA at %s: %w", addr, err)
	}
	defer res.Body.Close()
	var a answer
	if err := json.NewDecoder(io.LimitReader(res.Body, maxAnswer)).Decode(&a); err != nil {
		return nil, fmt.Errorf("CA at %s: %s: %w", addr, res.Status, err)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("CA at %s: %s", addr, a.Error)
	}
	cert, err := parseCert([]byte(a.Certificate))
	if err != nil {
		return nil, fmt.Errorf("CA at %s: %w", addr, err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("CA at %s: its answer is not a certificate of ours: %w", addr, err)
	}
	return cert, install(dir, key, &a)
}

// pendingFile has the key of a certificate that was asked for, so that asking again is with the same one, which a token allows.
const pendingFile = ".key.pending"

func joinKey(dir string, fresh bool) (*ecdsa.PrivateKey, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	pending := filepath.Join(dir, pendingFile)
	if b, err := os.ReadFile(pending); err == nil && !fresh {
		return parseKey(b)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return key, Write(pending, keyPEM(key), 0o600)
}

// install writes what was answered. Whoever reads the certificate between the two last steps finds that the key is another's, and goes on with what
// it had.
func install(dir string, key *ecdsa.PrivateKey, a *answer) error {
	f := rpctls.Dir(dir)
	if a.CRL != "" {
		if err := Write(f.CRL, []byte(a.CRL), 0o644); err != nil {
			return err
		}
	}
	if err := Write(f.CA, []byte(a.CA), 0o644); err != nil {
		return err
	}
	if err := Write(f.Key, keyPEM(key), 0o600); err != nil {
		return err
	}
	if err := Write(f.Cert, []byte(a.Certificate), 0o644); err != nil {
		return err
	}
	return os.Remove(filepath.Join(dir, pendingFile))
}
