package nvmeauth

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"strings"
)

// Hash is a hash function, by its number on the wire.
type Hash uint8

// NoHash is for secrets alone: it says that they are keys as they are. It cannot be negotiated.
const (
	NoHash Hash = iota
	SHA256
	SHA384
	SHA512
)

var hashes = [...]struct {
	name string
	size int // bytes of a digest, of a challenge, and of a secret made for the hash
	new  func() hash.Hash
}{
	NoHash: {name: "none"},
	SHA256: {"SHA-256", sha256.Size, sha256.New},
	SHA384: {"SHA-384", sha512.Size384, sha512.New384},
	SHA512: {"SHA-512", sha512.Size, sha512.New},
}

func (h Hash) String() string {
	if int(h) < len(hashes) {
		return hashes[h].name
	}
	return fmt.Sprintf("hash %#02x", uint8(h))
}

// usable is whether h can be negotiated.
func (h Hash) usable() bool { return h != NoHash && int(h) < len(hashes) }

func (h Hash) size() int { return hashes[h].size }

func (h Hash) hmac(key []byte, parts ...[]byte) []byte {
	m := hmac.New(hashes[h].new, key)
	for _, p := range parts {
		m.Write(p)
	}
	return m.Sum(nil)
}

// Secret is what a host or a controller proves its identity by. The zero Secret is none. Printing one, in whatever way, does
// not show it; only [Secret.Text] does.
type Secret struct {
	// What fmt shows of a Secret in an unexported field, where it calls no methods, is this pointer. It follows a pointer
	// to a struct when the verb does not fit, but none to a pointer.
	s **secret
}

type secret struct {
	hash Hash // of the transformation
	key  []byte
}

func makeSecret(h Hash, key []byte) Secret {
	s := &secret{h, key}
	return Secret{&s}
}

const secretPrefix = "DHHC-1"

// ParseSecret reads the text form. White space around it is cut off, as a secret often comes from a file. Errors say what is
// wrong and never repeat the secret.
func ParseSecret(text string) (Secret, error) {
	fail := func(format string, args ...any) (Secret, error) {
		return Secret{}, fmt.Errorf("NVMe secret: "+format, args...)
	}
	fields := strings.Split(strings.TrimSpace(text), ":")
	if fields[0] != secretPrefix {
		return fail("does not begin with %s: is it one of `nvme gen-dhchap-key`?", secretPrefix)
	}
	if len(fields) != 4 || fields[3] != "" {
		return fail("want the form %s:<hash>:<base64>: with a colon at the end; is it cut off?", secretPrefix)
	}
	var h Hash
	switch fields[1] {
	case "00", "01", "02", "03":
		h = Hash(fields[1][1] - '0')
	default:
		return fail("the hash must be 00 (none), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)")
	}
	// The decoder skips line breaks, which no other reader of secrets does.
	if strings.ContainsAny(fields[2], "\r\n") {
		return fail("a line break in the base64 part")
	}
	b, err := base64.StdEncoding.Strict().DecodeString(fields[2])
	if err != nil {
		return fail("the part after the hash is not base64")
	}
	n := len(b) - crc32.Size
	switch n {
	case 32, 48, 64:
	default:
		return fail("%d bytes; a secret has 32, 48 or 64, and 4 of checksum", len(b))
	}
	if crc32.ChecksumIEEE(b[:n]) != binary.LittleEndian.Uint32(b[n:]) {
		return fail("the checksum does not match: a character was altered or left out")
	}
	return makeSecret(h, b[:n]), nil
}

// Text is the text form, to be stored or handed to an operator: the one way to get a secret out. It is "" for none.
func (s Secret) Text() string {
	if s.IsZero() {
		return ""
	}
	in := *s.s
	b := binary.LittleEndian.AppendUint32(bytes.Clone(in.key), crc32.ChecksumIEEE(in.key))
	return fmt.Sprintf("%s:%02d:%s:", secretPrefix, uint8(in.hash), base64.StdEncoding.EncodeToString(b))
}

// IsZero is whether there is no secret.
func (s Secret) IsZero() bool { return s.s == nil }

// String says whether there is a secret, not which.
func (s Secret) String() string {
	if s.IsZero() {
		return "no secret"
	}
	return secretPrefix + " secret (not shown)"
}

// Format does for every verb what String does for %s.
func (s Secret) Format(f fmt.State, _ rune) { io.WriteString(f, s.String()) }

// key is the key of the responses of the side that has the given NQN.
func (s Secret) key(nqn string) []byte {
	in := *s.s
	if in.hash == NoHash {
		return in.key
	}
	return in.hash.hmac(in.key, []byte(nqn), []byte("NVMe-over-Fabrics"))
}

// response is what proves the knowledge of a secret. key is the secret's, ks the DH session key or nil, and role is "HostHost"
// or "Controller"; prover and verifier are the NQNs of who answers and who asked.
func (h Hash) response(key, challenge, ks []byte, seq uint32, tid uint16, role, prover, verifier string) []byte {
	if ks != nil {
		d := hashes[h].new()
		d.Write(ks)
		challenge = h.hmac(d.Sum(nil), challenge)
	}
	var n [7]byte // the last byte: no secure channel
	binary.LittleEndian.PutUint32(n[:], seq)
	binary.LittleEndian.PutUint16(n[4:], tid)
	return h.hmac(key, challenge, n[:], []byte(role), []byte(prover), []byte{0}, []byte(verifier))
}
