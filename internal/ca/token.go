package ca

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Token lets its bearer get one certificate.
type Token struct {
	ID     string
	Secret string
	Pin    [sha256.Size]byte // of the CA's certificate
}

const tokenWord = "weft1"

var (
	goodID     = regexp.MustCompile(`^[0-9a-f]{16}$`)
	goodSecret = regexp.MustCompile(`^[A-Za-z0-9_-]{43}$`)
)

func (t Token) String() string {
	return strings.Join([]string{tokenWord, t.ID, t.Secret, hex.EncodeToString(t.Pin[:])}, ".")
}

// ParseToken reads a token; white space around it does not matter.
func ParseToken(s string) (t Token, err error) {
	parts := strings.Split(strings.TrimSpace(s), ".")
	if len(parts) != 4 || parts[0] != tokenWord || !goodID.MatchString(parts[1]) || !goodSecret.MatchString(parts[2]) || len(parts[3]) != 2*sha256.Size {
		return t, errors.New("that is no join token; weftd ca token makes one")
	}
	t.ID, t.Secret = parts[1], parts[2]
	_, err = hex.Decode(t.Pin[:], []byte(parts[3]))
	return t, err
}

// tokenRow is what the CA has of a token.
type tokenRow struct {
	Secret  []byte    `json:"secret"` // SHA-256
	Subject Subject   `json:"subject"`
	Expires time.Time `json:"expires"`
	Key     []byte    `json:"key,omitempty"` // SHA-256 of the key (SubjectPublicKeyInfo) that a certificate was signed for
}

// NewToken makes a token that is good for one certificate, for some time.
func (ca *CA) NewToken(s Subject, life time.Duration) (Token, error) {
	if err := s.Validate(); err != nil {
		return Token{}, err
	}
	if life <= 0 {
		return Token{}, fmt.Errorf("a token that is good for %v", life)
	}
	unlock, err := ca.lock()
	if err != nil {
		return Token{}, err
	}
	defer unlock()
	if err := os.MkdirAll(filepath.Join(ca.dir, tokensDir), 0o700); err != nil {
		return Token{}, err
	}
	ca.forgetTokens()
	id, secret := make([]byte, 8), make([]byte, 32)
	rand.Read(id)
	rand.Read(secret)
	t := Token{ID: hex.EncodeToString(id), Secret: base64.RawURLEncoding.EncodeToString(secret), Pin: sha256.Sum256(ca.cert.Raw)}
	hash := sha256.Sum256([]byte(t.Secret))
	return t, ca.writeToken(t.ID, &tokenRow{Secret: hash[:], Subject: s, Expires: time.Now().Add(life)})
}

func (ca *CA) tokenFile(id string) string { return filepath.Join(ca.dir, tokensDir, id+".json") }

func (ca *CA) writeToken(id string, row *tokenRow) error {
	b, err := json.Marshal(row)
	if err != nil {
		return err
	}
	return Write(ca.tokenFile(id), b, 0o600)
}

func (ca *CA) readToken(id string) (row tokenRow, err error) {
	b, err := os.ReadFile(ca.tokenFile(id))
	if err != nil {
		return row, err
	}
	return row, json.Unmarshal(b, &row)
}

// forgetTokens removes those that have expired.
func (ca *CA) forgetTokens() {
	files, _ := filepath.Glob(ca.tokenFile("*"))
	for _, file := range files {
		row, err := ca.readToken(strings.TrimSuffix(filepath.Base(file), ".json"))
		if err == nil && time.Now().After(row.Expires) {
			os.Remove(file)
		}
	}
}

// errToken is all that is said of a token that is not good, whatever the reason.
var errToken = errors.New("the token is not known, has expired, or was used by somebody else")

// redeem signs a certificate for a key (SubjectPublicKeyInfo) that is shown with a token, and says for whom.
func (ca *CA) redeem(id, secret string, public []byte) (Subject, error) {
	if !goodID.MatchString(id) {
		return Subject{}, errToken
	}
	unlock, err := ca.lock()
	if err != nil {
		return Subject{}, err
	}
	defer unlock()
	row, err := ca.readToken(id)
	if errors.Is(err, fs.ErrNotExist) {
		return Subject{}, errToken
	}
	if err != nil {
		return Subject{}, err
	}
	hash, key := sha256.Sum256([]byte(secret)), sha256.Sum256(public)
	if subtle.ConstantTimeCompare(hash[:], row.Secret) != 1 || time.Now().After(row.Expires) {
		return Subject{}, errToken
	}
	if row.Key == nil {
		row.Key = key[:]
		return row.Subject, ca.writeToken(id, &row)
	}
	if subtle.ConstantTimeCompare(key[:], row.Key) != 1 {
		return Subject{}, fmt.Errorf("%w; if it was not you, revoke what it got: weftd ca revoke %s", errToken, row.Subject.Name)
	}
	return row.Subject, nil
}
