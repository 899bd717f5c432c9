package ca

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftfs/weft/internal/rpctls"
)

// Defaults of how long certificates are good.
const (
	DefaultLife   = 365 * 24 * time.Hour
	authorityLife = 10 * 365 * 24 * time.Hour
)

// skew is how far the clocks of hosts may be behind the CA's.
const skew = 5 * time.Minute

const (
	keyFile   = "ca.key"
	issuedDir = "issued"
	tokensDir = "tokens"
	lockFile  = "lock"
)

// CA is a certificate authority.
type CA struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Subject is who a certificate is for.
type Subject struct {
	Name    string
	Service bool
	Hosts   []string      // of a service: names and IP addresses by which others reach it
	Life    time.Duration // of the certificate; nanoseconds
}

var goodName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// checkName says what is wrong with the name of a certificate.
func checkName(name string) error {
	if !goodName.MatchString(name) {
		return fmt.Errorf("name %q: want 1 to 64 letters, digits, dots, dashes and underscores, a letter or a digit first", name)
	}
	return nil
}

// Validate checks a subject.
func (s *Subject) Validate() error {
	if err := checkName(s.Name); err != nil {
		return err
	}
	if s.Life <= 0 || s.Life > authorityLife {
		return fmt.Errorf("a certificate that is good for %v: want more than 0, and %v at the most", s.Life, authorityLife)
	}
	if s.Service != (len(s.Hosts) > 0) {
		return errors.New("a service needs the names or addresses by which others reach it, and nobody else has any")
	}
	for _, h := range s.Hosts {
		if net.ParseIP(h) == nil && (h == "" || len(h) > 253 || strings.ContainsAny(h, " /:,")) {
			return fmt.Errorf("%q is neither the name of a host nor an IP address", h)
		}
	}
	return nil
}

// Init makes a CA in a directory, which must not have one.
func Init(dir, name string) (*CA, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	for _, d := range []string{dir, filepath.Join(dir, issuedDir)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	ca := &CA{dir: dir}
	unlock, err := ca.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	for _, file := range []string{rpctls.CAFile, keyFile} {
		if _, err := os.Lstat(filepath.Join(dir, file)); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%s has a CA already, or what is left of one: %s", dir, file)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-skew), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	// The certificate comes last: without it there is no CA.
	if err := Write(filepath.Join(dir, keyFile), keyPEM(key), 0o600); err != nil {
		return nil, err
	}
	if err := Write(filepath.Join(dir, rpctls.CAFile), certPEM(der), 0o644); err != nil {
		return nil, err
	}
	return Open(dir)
}

// Open opens the CA in a directory.
func Open(dir string) (*CA, error) {
	ca := &CA{dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, rpctls.CAFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no CA in %s; make one with: weftd ca init --dir %s", dir, dir)
	}
	if err != nil {
		return nil, err
	}
	if ca.cert, err = parseCert(b); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, rpctls.CAFile), err)
	}
	if b, err = os.ReadFile(filepath.Join(dir, keyFile)); err != nil {
		return nil, err
	}
	if ca.key, err = parseKey(b); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, keyFile), err)
	}
	if !ca.key.PublicKey.Equal(ca.cert.PublicKey) {
		return nil, fmt.Errorf("%s: the key is not that of the certificate", dir)
	}
	return ca, nil
}

// lock keeps other processes from changing the CA.
func (ca *CA) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(ca.dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// Issue makes a key and a certificate for it, both PEM.
func (ca *CA) Issue(s Subject) (cert, key []byte, err error) {
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if cert, err = ca.sign(s, &own.PublicKey); err != nil {
		return nil, nil, err
	}
	return cert, keyPEM(own), nil
}

// sign makes a certificate (PEM) for a key that somebody else has.
func (ca *CA) sign(s Subject, key crypto.PublicKey) ([]byte, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: s.Name}, NotBefore: now.Add(-skew), NotAfter: now.Add(s.Life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	if s.Service {
		cert.Subject.Organization = []string{rpctls.ServiceOrganization}
		cert.ExtKeyUsage = append(cert.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	for _, h := range s.Hosts {
		if ip := net.ParseIP(h); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, h)
		}
	}
	if cert.NotAfter.After(ca.cert.NotAfter) {
		cert.NotAfter = ca.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, ca.cert, key, ca.key)
	if err != nil {
		return nil, err
	}
	b := certPEM(der)
	// It is known here before anybody has it, so that it can be revoked.
	return b, Write(filepath.Join(ca.dir, issuedDir, cert.SerialNumber.Text(16)+".pem"), b, 0o644)
}

// subjectOf is what sign was given for a certificate.
func subjectOf(c *x509.Certificate) Subject {
	s := Subject{Name: c.Subject.CommonName, Service: slices.Contains(c.Subject.Organization, rpctls.ServiceOrganization), Hosts: c.DNSNames}
	for _, ip := range c.IPAddresses {
		s.Hosts = append(s.Hosts, ip.String())
	}
	s.Life = c.NotAfter.Sub(c.NotBefore) - skew
	return s
}

// Renew makes a certificate like the one that it is given (PEM), for the same key. A certificate that is revoked is not renewed; one that has expired is.
func (ca *CA) Renew(old []byte, life time.Duration) ([]byte, error) {
	c, err := parseCert(old)
	if err != nil {
		return nil, err
	}
	if err := ca.own(c); err != nil {
		return nil, err
	}
	s := subjectOf(c)
	s.Life = life
	return ca.sign(s, c.PublicKey)
}

// own says why a certificate does not count: it is not of this CA, or revoked.
func (ca *CA) own(c *x509.Certificate) error {
	if err := c.CheckSignatureFrom(ca.cert); err != nil {
		return fmt.Errorf("the certificate of %q is not of this CA", c.Subject.CommonName)
	}
	revoked, _, err := ca.revoked()
	if err != nil {
		return err
	}
	for _, r := range revoked {
		if r.SerialNumber.Cmp(c.SerialNumber) == 0 {
			return fmt.Errorf("the certificate of %q with the serial number %x is revoked", c.Subject.CommonName, c.SerialNumber)
		}
	}
	return nil
}

// Certificate is one that the CA has signed.
type Certificate struct {
	*x509.Certificate
	Revoked bool
}

// List returns what the CA has signed, sorted by name and then by age.
func (ca *CA) List() ([]Certificate, error) {
	revoked, _, err := ca.revoked()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(ca.dir, issuedDir, "*.pem"))
	if err != nil {
		return nil, err
	}
	var list []Certificate
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		c, err := parseCert(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		list = append(list, Certificate{c, slices.ContainsFunc(revoked, func(r x509.RevocationListEntry) bool {
			return r.SerialNumber.Cmp(c.SerialNumber) == 0
		})})
	}
	slices.SortFunc(list, func(a, b Certificate) int {
		if c := strings.Compare(a.Subject.CommonName, b.Subject.CommonName); c != 0 {
			return c
		}
		return a.NotBefore.Compare(b.NotBefore)
	})
	return list, nil
}

// crl returns the list of revoked certificates (PEM), nothing if there is none.
func (ca *CA) crl() ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(ca.dir, rpctls.CRLFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// revoked returns the entries of the list, and its number, 0 if there is none.
func (ca *CA) revoked() ([]x509.RevocationListEntry, *big.Int, error) {
	b, err := ca.crl()
	if err != nil || b == nil {
		return nil, new(big.Int), err
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, nil, fmt.Errorf("%s: no PEM", rpctls.CRLFile)
	}
	list, err := x509.ParseRevocationList(block.Bytes)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", rpctls.CRLFile, err)
	}
	return list.RevokedCertificateEntries, list.Number, nil
}

// Revoke makes certificates worth nothing, as soon as servers have the list: all of a name, or the one with that serial number (hexadecimal). It
// returns those that were not revoked before.
func (ca *CA) Revoke(nameOrSerial string) ([]*x509.Certificate, error) {
	unlock, err := ca.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	list, err := ca.List()
	if err != nil {
		return nil, err
	}
	entries, number, err := ca.revoked()
	if err != nil {
		return nil, err
	}
	var done []*x509.Certificate
	found := false
	now := time.Now()
	for _, c := range list {
		if c.Subject.CommonName != nameOrSerial && c.SerialNumber.Text(16) != strings.ToLower(nameOrSerial) {
			continue
		}
		found = true
		if !c.Revoked {
			entries = append(entries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: now})
			done = append(done, c.Certificate)
		}
	}
	if !found {
		return nil, fmt.Errorf("no certificate of this CA has the name or the serial number %q; see weftd ca ls", nameOrSerial)
	}
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		RevokedCertificateEntries: entries, Number: new(big.Int).Add(number, big.NewInt(1)), ThisUpdate: now, NextUpdate: ca.cert.NotAfter,
	}, ca.cert, ca.key)
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
	return done, Write(filepath.Join(ca.dir, rpctls.CRLFile), b, 0o644)
}

// Write replaces a file in one step, durably.
func Write(name string, b []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

func serial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b)
	b[0] = b[0]&0x7f | 0x40 // positive, and always as long
	return new(big.Int).SetBytes(b)
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func keyPEM(key *ecdsa.PrivateKey) []byte {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		panic("ca: " + err.Error()) // a key that was just made
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func parseCert(b []byte) (*x509.Certificate, error) {
	block, rest := pem.Decode(b)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("want one certificate (PEM)")
	}
	return x509.ParseCertificate(block.Bytes)
}

func parseKey(b []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("want a key (PEM, PKCS #8)")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	own, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("want an ECDSA key, not a %T", key)
	}
	return own, nil
}
