package nvmeauth

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"
	"testing"
)

// TestPrimes computes the primes again as RFC 7919 appendix A defines them,
//
//	p = 2^b - 2^(b-64) + (floor(2^(b-130) * e) + X) * 2^64 - 1
//
// and asks whether they are primes for which (p-1)/2 is one too.
func TestPrimes(t *testing.T) {
	one := big.NewInt(1)
	e := new(big.Int).Lsh(one, 9000) // e * 2^9000, too small by some thousands at most
	for term, k := new(big.Int).Set(e), int64(1); term.Sign() > 0; k++ {
		term.Quo(term, big.NewInt(k))
		e.Add(e, term)
	}
	for _, tt := range []struct {
		group Group
		bits  uint
		x     int64
		end   string // the last bytes but eight, from the RFC's listing
	}{
		{FFDHE2048, 2048, 560316, "886B423861285C97"},
		{FFDHE3072, 3072, 2625351, "25E41D2B66C62E37"},
		{FFDHE4096, 4096, 5736041, "C68A007E5E655F6A"},
		{FFDHE6144, 6144, 15705020, "A40E329CD0E40E65"},
		{FFDHE8192, 8192, 10965728, "D68C8BB7C5C6424C"},
	} {
		p := groups[tt.group].prime
		want := new(big.Int).Rsh(e, 9000-(tt.bits-130))
		want.Add(want, big.NewInt(tt.x)).Lsh(want, 64)
		want.Add(want, new(big.Int).Lsh(one, tt.bits))
		want.Sub(want, new(big.Int).Lsh(one, tt.bits-64)).Sub(want, one)
		if p.Cmp(want) != 0 {
			t.Errorf("%v: the prime is not RFC 7919's", tt.group)
		}
		text := fmt.Sprintf("%X", p)
		if begin, end := "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1", tt.end+"FFFFFFFFFFFFFFFF"; len(text) != int(tt.bits/4) ||
			text[:len(begin)] != begin || text[len(text)-len(end):] != end {
			t.Errorf("%v: %d hex digits from %s to %s", tt.group, len(text), text[:len(begin)], text[len(text)-len(end):])
		}
		if tt.group.size() != int(tt.bits/8) || tt.group.String() != fmt.Sprintf("ffdhe%d", tt.bits) {
			t.Errorf("%v has %d bytes", tt.group, tt.group.size())
		}
		// One round of Miller-Rabin with a random base besides base 2 and Lucas.
		if q := new(big.Int).Rsh(p, 1); !p.ProbablyPrime(1) || !q.ProbablyPrime(1) {
			t.Errorf("%v: not a safe prime", tt.group)
		}
	}
}

func TestSession(t *testing.T) {
	random := newChance().random
	for g := FFDHE2048; g.usable(); g++ {
		x, gx := g.exponential(random)
		y, gy := g.exponential(random)
		if len(gx) != g.size() || bytes.Equal(gx, gy) {
			t.Fatalf("%v: values %x and %x", g, gx, gy)
		}
		a, errA := g.session(x, gy)
		b, errB := g.session(y, gx)
		if errA != nil || errB != nil || !bytes.Equal(a, b) || len(a) != g.size() {
			t.Errorf("%v: keys %x, %x, errors %v, %v", g, a, b, errA, errB)
		}

		one := big.NewInt(1)
		p := groups[g].prime
		for _, bad := range []*big.Int{
			new(big.Int), one, new(big.Int).Sub(p, one), p, new(big.Int).Add(p, one), new(big.Int).Add(p, big.NewInt(2)),
		} {
			var f *Failure
			_, f = g.session(x, bad.FillBytes(make([]byte, g.size())))
			if f == nil || f.Reason != IncorrectPayload {
				t.Errorf("%v: the value %x is taken: %v", g, bad, f)
			}
		}
		// SPDK leaves out leading zeros, and the key has as many bytes as the prime whatever its value.
		if k, f := g.session(big.NewInt(3), []byte{2}); f != nil || len(k) != g.size() || k[len(k)-1] != 8 {
			t.Errorf("%v: 2 to the third is %x, %v", g, k, f)
		}
	}
}

func TestReasons(t *testing.T) {
	for r, want := range map[Reason]string{
		0: "reason 0x00", 1: "authentication failed", 2: "authentication protocol not usable",
		3: "secure channel concatenation mismatch", 4: "hash not usable", 5: "DH group not usable", 6: "incorrect payload",
		7: "incorrect message", 8: "reason 0x08",
	} {
		if got := r.String(); got != want {
			t.Errorf("%d: %q, want %q", r, got, want)
		}
	}
	var err error = failf(HashUnusable, "x")
	if f := (*Failure)(nil); !errors.As(err, &f) || f.Reason != HashUnusable {
		t.Errorf("%v", err)
	}
}

func BenchmarkSession(b *testing.B) {
	for g := FFDHE2048; g.usable(); g++ {
		b.Run(g.String(), func(b *testing.B) {
			for b.Loop() {
				x, public := g.exponential(newChance().random)
				if _, f := g.session(x, public); f != nil {
					b.Fatal(f)
				}
			}
		})
	}
}
