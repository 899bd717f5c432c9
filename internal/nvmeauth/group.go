package nvmeauth

import (
	"fmt"
	"math/big"
)

// Group is a Diffie-Hellman group, by its number on the wire.
type Group uint8

// NoGroup is challenge and response alone. With it, whoever records an exchange can try secrets on the record; secrets that
// were drawn by a machine, as nvme-cli does, are too long for that.
const (
	NoGroup Group = iota
	FFDHE2048
	FFDHE3072
	FFDHE4096
	FFDHE6144
	FFDHE8192
)

// groups has the primes, and how many random bytes make an exponent: RFC 7919 section 5.2 asks for 225 to 400 bits, rounded up
// here.
var groups = [...]struct {
	name     string
	prime    *big.Int
	size     int // bytes of the prime
	exponent int
}{
	NoGroup:   {name: "none"},
	FFDHE2048: {"ffdhe2048", mustHex(prime2048), 256, 29},
	FFDHE3072: {"ffdhe3072", mustHex(prime3072), 384, 35},
	FFDHE4096: {"ffdhe4096", mustHex(prime4096), 512, 41},
	FFDHE6144: {"ffdhe6144", mustHex(prime6144), 768, 47},
	FFDHE8192: {"ffdhe8192", mustHex(prime8192), 1024, 50},
}

func mustHex(s string) *big.Int {
	n, ok := new(big.Int).SetString(s, 16)
	if !ok {
		panic("nvmeauth: a prime that is no number")
	}
	return n
}

func (g Group) String() string {
	if int(g) < len(groups) {
		return groups[g].name
	}
	return fmt.Sprintf("group %#02x", uint8(g))
}

// usable is whether g can be negotiated.
func (g Group) usable() bool { return int(g) < len(groups) }

func (g Group) size() int { return groups[g].size }

// power is base^exponent mod p, big-endian and as long as p. It is not constant time: see the package's comment.
func (g Group) power(base, exponent *big.Int) []byte {
	return new(big.Int).Exp(base, exponent, groups[g].prime).FillBytes(make([]byte, g.size()))
}

// exponential draws an exponent and gives it with the value to send. Both are nil for NoGroup.
func (g Group) exponential(random func([]byte)) (x *big.Int, public []byte) {
	if g == NoGroup {
		return nil, nil
	}
	b := make([]byte, groups[g].exponent)
	random(b)
	x = new(big.Int).SetBytes(b)
	return x, g.power(big.NewInt(2), x)
}

// session is the session key from our exponent and the peer's value, nil for NoGroup. It fails for the values whose result
// would not depend on the exponent, or only on its lowest bit: 0, 1, p-1, and p and above, which are those of others again.
func (g Group) session(x *big.Int, peer []byte) ([]byte, *Failure) {
	if g == NoGroup {
		return nil, nil
	}
	y := new(big.Int).SetBytes(peer)
	last := new(big.Int).Sub(groups[g].prime, big.NewInt(1))
	if y.Cmp(big.NewInt(1)) <= 0 || y.Cmp(last) >= 0 {
		return nil, failf(IncorrectPayload, "a DH value that %s does not allow", g)
	}
	return g.power(y, x), nil
}
